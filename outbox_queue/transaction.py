"""A transaction that is run as a whole: what a function produces is in Kafka, or none of it is."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from outbox_core.harvest.transaction import Aborted, Committed, Ended, TransactionalProducer
from outbox_core.kafka import KafkaError, KafkaException

_LARGEST_RECORD = 1_000_000_000
TOO_LARGE = frozenset(
    {
        KafkaError.MSG_SIZE_TOO_LARGE,
        KafkaError.INVALID_MSG_SIZE,
        KafkaError.RECORD_LIST_TOO_LARGE,
        KafkaError.INVALID_RECORD,
    }
)
"""What Kafka says of records that it will never take."""


class Failure(NamedTuple):
    """Why a transaction did not happen.

    Attributes:
        reason: in words.
        is_over: whether the producer is of no more use; then the transaction may even have been committed, which only
            the next producer of the same transactional.id settles.
        is_refused: whether Kafka refuses what is in one of its records.
    """

    reason: str
    is_over: bool
    is_refused: bool


class Transaction(TransactionalProducer):
    """A producer of one transactional.id. Used by one thread.

    Args:
        settings: librdkafka settings, `transactional.id` and `transaction.timeout.ms` among them.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        timeout = int(settings["transaction.timeout.ms"]) / 1000
        # What a broker has taken once is not refused by the client.
        unlimited = {**settings, "message.max.bytes": _LARGEST_RECORD}
        super().__init__(unlimited, timeout_seconds=timeout)

    def start(self, seconds: float, give_up: Callable[[], bool] = lambda: False) -> Failure | None:
        """Fence the last owner of the transactional.id and settle its transaction; None if that is done.

        Args:
            seconds: about how long to try.
            give_up: whether to leave it at that.
        """
        end = time.monotonic() + seconds
        ended = self.init(lambda: give_up() or time.monotonic() >= end)
        return _failure(ended) if ended is not None else None

    def run(self, fill: Callable[[], None]) -> Failure | None:
        """Commit whatever `fill` produces; None if that is done."""
        ended = self.begin()
        if ended is not None:
            return _failure(ended)
        try:
            fill()
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            aborted = self.abort(cause)
            return _failure(aborted) if isinstance(aborted, Ended) else Failure(cause.str(), False, _is_refused(cause))
        outcome = self.commit()
        return None if isinstance(outcome, Committed) else _failure(outcome)


def _failure(outcome: Aborted | Ended) -> Failure:
    if isinstance(outcome, Ended):
        return Failure(outcome.reason, is_over=True, is_refused=False)
    error = outcome.error
    reason = error.str() if error is not None else "the transaction was aborted"
    return Failure(reason, is_over=False, is_refused=error is not None and _is_refused(error))


def _is_refused(error: KafkaError) -> bool:
    return error.code() in TOO_LARGE
