"""The library's errors: every error that it raises on purpose derives from OutboxError.

They say what was wrong and where, and what to do about it. They never contain passwords: `outbox_core.config.redact`
shows data sources.
"""

from __future__ import annotations

import inspect
import logging
import traceback

__all__ = [
    "ClientExhausted",
    "ClientRefused",
    "DeadLetterTopicError",
    "GroupRefused",
    "InvalidConfig",
    "InvalidMessageId",
    "InvalidRecord",
    "InvariantBroken",
    "KafkaUnavailable",
    "LeaderTopicError",
    "MarkedRowsFound",
    "MissingExtra",
    "OutboxError",
    "OutboxTableError",
    "ProcessExhausted",
    "RightsMissing",
    "RowsHeld",
    "RowsHidden",
    "RowsRemain",
    "StatementCancelled",
    "StoreSilent",
    "StoreUnavailable",
    "TableUnusable",
    "TrackingTopicError",
    "TransactionRequired",
    "UnsafeConsumer",
]


_log = logging.getLogger(__name__)


class OutboxError(Exception):
    """The root of all errors of this library."""


class InvariantBroken(OutboxError, AssertionError):
    """The library found itself in a state that its protocol excludes, and stopped before it published or deleted more.

    A defect of the library or of one of its premises, so please report it. What the process knew is not to be trusted;
    another one begins with what the table and Kafka say, and loses nothing.
    """


def must(condition: object, message: str, *values: object) -> None:
    """Raise InvariantBroken unless a condition holds, and log it: in production, too, and with `python -O`.

    `message` is formatted with `values` (as by `%`) only if the condition does not hold.
    """
    if condition:
        return
    text = message % values if values else message
    _log.critical("an invariant is broken, and this stops: %s", text)  # here, as some threads have nobody to tell
    raise InvariantBroken(text)


class InvalidRecord(OutboxError, ValueError):
    """A record cannot be a Kafka message, or does not fit the outbox table's columns."""


class SerializationFailed(InvalidRecord):
    """A serializer refused a record's value, or could not reach its schema registry; its error is the cause."""


class InvalidMessageId(OutboxError, ValueError):
    """A source or message id cannot be kept in an inbox."""


class TransactionRequired(OutboxError):
    """A record was stashed or a message accepted outside a transaction, so it would not be atomic with the data."""


class AcceptanceLost(OutboxError):
    """A transaction that accepted a message cannot commit it any more, though no error has left the handler.

    The handler has caught an error of the database outside a savepoint, after which PostgreSQL makes of the COMMIT
    a ROLLBACK without an error; or it has ended the transaction itself.
    """


class InvalidConfig(OutboxError, ValueError):
    """A setting is unknown, missing or out of range.

    Attributes:
        mistakes: a sentence for each mistake, beginning with the setting's name as its author wrote it.
        shows_no_values: True if no sentence has a value, which may be a secret.
    """

    shows_no_values = False

    def __init__(self, *mistakes: str) -> None:
        super().__init__("; ".join(mistakes))
        self.mistakes = mistakes


class OutboxTableError(OutboxError):
    """The outbox table is missing, or a table of that name is not an outbox."""


class StoreUnavailable(OutboxError):
    """The database cannot be reached, or went away.

    Attributes:
        in_doubt: True if a statement was under way, which may or may not have taken effect.
    """

    def __init__(self, message: str, *, in_doubt: bool = False) -> None:
        super().__init__(message)
        self.in_doubt = in_doubt


class StoreSilent(StoreUnavailable):
    """The database did not answer within the time that the caller has; its connection was given up."""


class StatementCancelled(StoreUnavailable):
    """The database cancelled a statement: it ran, or waited for a lock, for longer than `statementTimeout`."""


class TableUnusable(StoreUnavailable):
    """The outbox table, or what belongs to it, cannot be used now: it is away, was changed, or our role lacks a right.

    A harvester that started on a table in order goes on when it is in order again.
    """


class RowsRemain(StoreUnavailable):
    """Published rows are still there after a DELETE, failed or not; publishing must wait, as they would be repeated."""


class RightsMissing(TableUnusable):
    """The role lacks a right on a table, which may have been revoked for a moment; the message has the GRANT."""


class RowsHidden(TableUnusable):
    """Row level security hides rows from the role, so that what is not seen may be there all the same."""


class RowsHeld(StoreUnavailable):
    """Rows that could not be marked are held now; the holds must be read before the next mark."""


class KafkaUnavailable(OutboxError):
    """The Kafka cluster cannot be reached with the given settings."""


class ClientRefused(InvalidConfig, KafkaUnavailable):
    """A Kafka client could not be made from its settings.

    Where a process starts they are wrong, and it ends. Later they have made a client before, and a file that they name
    may be away for a moment, such as `ssl.ca.location` while secrets rotate: whoever retries KafkaUnavailable retries
    this, too.
    """


class ProcessExhausted(OutboxError):
    """The process can open no more files or start no more threads."""


class ClientExhausted(ProcessExhausted, KafkaUnavailable):
    """A Kafka client could not be made, as the process can open no more files or start no more threads."""


class LeaderTopicError(OutboxError):
    """The leader topic is missing and cannot be made, or cannot be used."""


class TrackingTopicError(OutboxError):
    """The tracking topic of exactly-once delivery has wrong settings or foreign content, or cannot be used."""


class DeadLetterTopicError(OutboxError):
    """The dead-letter topic is missing and cannot be made, or cannot be used."""


class MarkedRowsFound(OutboxError):
    """Exactly-once delivery found rows marked by an at-least-once leader, which may have been published already."""


class GroupRefused(OutboxError):
    """The leader group does not let us in, has members of another kind, or is led for another outbox than ours."""


class UnsafeConsumer(OutboxError):
    """A Kafka consumer commits offsets by itself, also of records that were not handled."""


class MissingExtra(OutboxError):
    """An optional part of the package is needed and not installed."""


def traceback_of(error: BaseException) -> str:
    """Format an error with its traceback; without that if Python cannot, as for a SyntaxError whose line is bytes."""
    try:
        return "".join(traceback.format_exception(error))
    except Exception:
        frames = "".join(traceback.format_tb(error.__traceback__))
        return f"Traceback (most recent call last):\n{frames}{type(error).__name__}: its text cannot be formatted\n"


def is_unfinished(result: object) -> bool:
    """Return True for the result of a handler that has only begun its work, which nobody goes on with; close it."""
    if result is None:
        return False
    if inspect.iscoroutine(result):
        result.close()  # it is not warned of as never awaited
    return inspect.isawaitable(result) or inspect.isgenerator(result) or inspect.isasyncgen(result)


def refuse_unfinished(result: object, topic: str | None) -> None:
    """Refuse the result of a handler that has only begun its work (`OutboxError`)."""
    if is_unfinished(result):
        raise OutboxError(
            f"the handler of topic {topic!r} returned {type(result).__name__}, which is not awaited: the work is not "
            "done; hand over a function that runs it, such as one that calls asyncio.run(handle(message))"
        )
