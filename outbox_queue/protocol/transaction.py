"""Transactions that run as a whole: either everything that a function produces is in Kafka, or nothing.

Of the defences of `outbox_core.kafka.transactions`, one needs its callers: `begin` may replace the producer, and the
new one fences the process that has fenced the old one. So a caller that decides by its reading, and relies on being
fenced when that is out of date, checks `must_replace` first, discards the producer, and reads again.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

from outbox_core.kafka.clients import KafkaConfig, KafkaError, KafkaException
from outbox_core.kafka.errors import NEVER_ACCEPTED
from outbox_core.kafka.transactions import Aborted, Committed, Ended, GiveUp, TransactionalProducer, never

_LARGEST_RECORD = 1_000_000_000


class Failure(NamedTuple):
    """The reason of a transaction that did not happen.

    If `is_over`, the producer is of no more use, and only the next one of its transactional.id finds out whether the
    transaction is committed. If `is_refused`, Kafka refuses one of its records.
    """

    reason: str
    is_over: bool
    is_refused: bool
    error: KafkaError | None = None


def transactional_producer(settings: KafkaConfig) -> TransactionalProducer:
    """Make a producer from librdkafka settings, `transactional.id` and `transaction.timeout.ms` among them."""
    timeout = int(settings["transaction.timeout.ms"]) / 1000
    # The client refuses no record that a broker has taken once.
    return TransactionalProducer({**settings, "message.max.bytes": _LARGEST_RECORD}, timeout_seconds=timeout)


def start(producer: TransactionalProducer, timeout_seconds: float, give_up: GiveUp = never) -> Failure | None:
    """Fence the last owner of the transactional.id and finish its transaction; return None if that is done."""
    end = time.monotonic() + timeout_seconds
    ended = producer.init(lambda: give_up() or time.monotonic() >= end)
    return _failure(ended) if ended is not None else None


def run(producer: TransactionalProducer, fill: Callable[[], None], give_up: GiveUp = never) -> Failure | None:
    """Commit everything that `fill` produces; return None if that is done.

    A KafkaException that leaves `fill` aborts the transaction; `give_up` leaves the outcome to the next producer.
    """
    ended = producer.begin()
    if ended is not None:
        return _failure(ended)
    try:
        fill()
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        if give_up():
            return Failure(cause.str(), is_over=True, is_refused=False, error=cause)
        if cause.code() != KafkaError._STATE:  # noqa: SLF001  else it has failed before: the commit says why
            aborted = producer.abort(cause)
            return _failure(aborted) if isinstance(aborted, Ended) else _failure(Aborted(cause, record_at_fault=False))
    outcome = producer.commit(give_up)
    return None if isinstance(outcome, Committed) else _failure(outcome)


def _failure(outcome: Aborted | Ended) -> Failure:
    if isinstance(outcome, Ended):
        return Failure(outcome.reason, is_over=True, is_refused=False, error=outcome.cause or outcome.error)
    error = outcome.error
    reason = error.str() if error is not None else "the transaction was aborted"
    is_refused = error is not None and error.code() in NEVER_ACCEPTED
    return Failure(reason, is_over=False, is_refused=is_refused, error=error)
