"""One transactional producer, from `init_transactions()` to the moment when it must be thrown away.

librdkafka reports three kinds of trouble inside a transaction, and each means something else for the harvester:

- the transaction must be aborted (`Aborted`): nothing of it will ever be seen, and the producer can go on;
- the producer is fenced or otherwise broken (`Ended`): somebody else has taken the transactional.id, or the
  coordinator gave the transaction up because it was open too long;
- a call timed out (`Ended` too): the commit may have happened or not. Only a new producer's `init_transactions()`
  settles it, so this one is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from outbox_core.harvest.publisher import Failure, message_headers
from outbox_core.kafka import KafkaError, KafkaException, make_producer
from outbox_core.ports import StoredRecord

_INIT_ATTEMPT_SECONDS = 2.0
_QUEUE_FULL_POLL_SECONDS = 0.01
_DISCARD_POLLS = 200


@dataclass(frozen=True, slots=True)
class Committed:
    """The transaction is in Kafka, whole."""


@dataclass(frozen=True, slots=True)
class Aborted:
    """The transaction is not in Kafka, and the producer can begin another.

    Attributes:
        error: what its first failed record, or else the transaction itself, failed of; None if it was our choice.
        record_at_fault: whether it is the kind of error that a record of the transaction may be to blame for.
    """

    error: KafkaError | None
    record_at_fault: bool


@dataclass(frozen=True, slots=True)
class Ended:
    """The producer is of no more use; what became of its transaction is settled by the next one.

    Attributes:
        reason: what happened, in words.
    """

    reason: str


Outcome = Committed | Aborted | Ended


# The broker judged what was in the message, or where it was to go. Anything else (time-outs, lost connections,
# missing replicas) says nothing about a record.
_RECORD_AT_FAULT = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.INVALID_RECORD,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_TIMESTAMP,
        KafkaError.POLICY_VIOLATION,
        KafkaError.TOPIC_EXCEPTION,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
    }
)


class TransactionalProducer:
    """A Kafka producer with a fixed transactional.id. Used by one thread.

    Args:
        settings: librdkafka settings, `transactional.id` and `transaction.timeout.ms` among them.
        id_header: name of the header with the record's identity, '' for none.
        outbox_name: identity of the outbox, written before the record's id.
        timeout_seconds: how long a commit or an abort may take.
    """

    def __init__(
        self, settings: Mapping[str, Any], *, id_header: str, outbox_name: str, timeout_seconds: float
    ) -> None:
        # Without delivery reports: they would cost more than all the rest, and the commit vouches for every record.
        self._producer = make_producer(settings)
        self._transactional_id = str(settings["transactional.id"])
        self._id_header = id_header
        self._id_prefix = outbox_name.encode() + b":"
        self._timeout = timeout_seconds

    def init(self, give_up: Callable[[], bool]) -> Ended | None:
        """Fence the last owner of the transactional.id and wait until its transaction is settled.

        Returns:
            None when that is done; `Ended` if it failed or was given up.
        """
        while not give_up():
            try:
                self._producer.init_transactions(_INIT_ATTEMPT_SECONDS)
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if not cause.retriable():
                    return Ended(cause.str())
            else:
                return None
        return Ended("init_transactions was given up")

    def discard(self) -> None:
        """Take back whatever is still queued, before the producer is thrown away.

        librdkafka 2.16 corrupts its memory when a fenced producer is destroyed with messages in it.
        """
        with suppress(KafkaException):
            self._producer.purge(in_queue=True, in_flight=True)
        for _ in range(_DISCARD_POLLS):
            if not len(self._producer):
                return
            with suppress(KafkaException):  # a broken producer says so once more
                self._producer.poll(_QUEUE_FULL_POLL_SECONDS)

    def begin(self) -> Ended | None:
        """Open a transaction."""
        try:
            self._producer.begin_transaction()
        except KafkaException as error:
            return Ended(error.args[0].str())
        return None

    def send(self, records: Iterable[StoredRecord], give_up: Callable[[], bool]) -> list[Failure] | Ended | None:
        """Produce records in their order.

        Returns:
            The records that the client itself refused (they are not in the transaction), None if `give_up` said so
            while the queue was full, or `Ended` if the producer is broken.
        """
        refused: list[Failure] = []
        produce, prefix, id_header = self._producer.produce, self._id_prefix, self._id_header
        for record in records:
            try:
                headers = message_headers(record, id_header, prefix)
                while True:
                    try:
                        produce(record[1], record[3], record[2], record[6], headers=headers)
                        break
                    except BufferError:
                        if give_up():
                            return None
                        self._producer.poll(_QUEUE_FULL_POLL_SECONDS)  # raises if the producer has broken
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if cause.fatal() or cause.code() in _BROKEN:
                    return Ended(cause.str())
                if cause.code() == KafkaError._STATE:  # noqa: SLF001  the transaction has failed already
                    return refused
                refused.append(Failure(record, cause))
            except (TypeError, ValueError, OverflowError) as error:  # a row that is no message, written by hand
                refused.append(Failure(record, KafkaError(KafkaError._INVALID_ARG, str(error))))  # noqa: SLF001
        return refused

    def send_manifest(self, topic: str, value: bytes, partition: int = 0) -> Ended | None:
        """Produce the manifest into the open transaction, on the partition that belongs to this transactional.id."""
        try:
            while True:
                try:
                    self._producer.produce(topic, value, self._transactional_id, partition)
                except BufferError:
                    self._producer.poll(_QUEUE_FULL_POLL_SECONDS)
                else:
                    return None
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            return None if cause.code() == KafkaError._STATE else Ended(cause.str())  # noqa: SLF001  the commit will tell

    def commit(self) -> Outcome:
        """Commit the transaction, and abort it if it must be."""
        try:
            self._producer.commit_transaction(self._timeout)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if not cause.fatal() and cause.txn_requires_abort():
                return self.abort(cause)
            return Ended(f"the commit's outcome is unknown: {cause.str()}")
        return Committed()

    def abort(self, cause: KafkaError | None = None) -> Aborted | Ended:
        """Abort the open transaction."""
        try:
            self._producer.abort_transaction(self._timeout)
        except KafkaException as error:
            return Ended(error.args[0].str())
        return Aborted(cause, record_at_fault=cause is not None and cause.code() in _RECORD_AT_FAULT)


_BROKEN = frozenset(
    {KafkaError._FATAL, KafkaError._FENCED, KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED}  # noqa: SLF001
)
