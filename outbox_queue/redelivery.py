"""Redelivering what expired: the next copy, or a dead letter, and the end marker of the old copy, in one transaction.

Each marker partition has a transactional.id of its own. A tracker that makes the producer (`prepare`) fences the one
that had the partition before and settles what that had begun; what the other had committed is in the partition before
the tick that is sent next. So of two trackers that both believe to own a partition, one redelivers, and each message
once.

A batch that fails because Kafka refuses one of its records is taken apart, until that message is alone. Such a
message becomes a dead letter without headers; it cannot be sent again as it is.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outbox_queue import dead_letters, wire
from outbox_queue import headers as message_headers
from outbox_queue.clients import TRACKER_GROUP, transactional_settings
from outbox_queue.config import QueueConfig
from outbox_queue.headers import Header
from outbox_queue.in_progress import MessageId, Unfinished
from outbox_queue.transaction import Failure, Transaction

_PREPARE_SECONDS = 4.0
_FIRST_ATTEMPT = 1
_MOST_AT_ONCE = 500
REDELIVERED = "redelivered"
"""The reason in a tracker's end marker."""

_log = logging.getLogger(__name__)


class Expired(NamedTuple):
    """A message to redeliver, read from its start marker.

    Attributes:
        queue: id of its queue.
        payload: of the message.
        headers: the user's.
        attempt: the number of the attempt that ended.
        max_attempts: how many there may be, 0 for no limit.
        enqueued_at_ms: when the first copy was sent, if that is known.
        origin: place of the first copy.
        reason: what the consumer said when it gave the message back.
    """

    queue: bytes
    payload: bytes
    headers: list[Header]
    attempt: int
    max_attempts: int
    enqueued_at_ms: int | None
    origin: tuple[int, int]
    reason: str

    @property
    def is_used_up(self) -> bool:
        """Whether no attempt is left."""
        return 0 < self.max_attempts <= self.attempt


@dataclass
class Redelivered:
    """What became of a batch.

    Attributes:
        done: copies and dead letters that are committed.
        left: what is still in progress, and has to be judged again.
        refused: what Kafka takes in no form.
        copies: how many messages were sent again, by queue.
        dead: how many were set aside, by queue.
        failure: why the rest is left; None if only another producer is needed.
    """

    done: list[Unfinished] = field(default_factory=list)
    left: list[Unfinished] = field(default_factory=list)
    refused: list[Unfinished] = field(default_factory=list)
    copies: Counter[bytes] = field(default_factory=Counter)
    dead: Counter[bytes] = field(default_factory=Counter)
    failure: Failure | None = None


class Redeliverer:
    """Redelivers the messages of one marker partition. Used by one thread.

    A producer whose next transaction could meet a late end of its last one is given up, and what is left is judged
    anew, after `prepare`.

    Args:
        config: of the queues.
        partition: number of the marker partition.
    """

    def __init__(self, config: QueueConfig, partition: int) -> None:
        self._config = config
        self._partition = partition
        self._transaction: Transaction | None = None
        self._limit = _MOST_AT_ONCE
        self._refused: set[MessageId] = set()

    @property
    def is_prepared(self) -> bool:
        """Whether nobody else can redeliver this partition's messages without our being told."""
        return self._transaction is not None and not self._transaction.must_replace

    def prepare(self, give_up: Callable[[], bool]) -> Failure | None:
        """Fence whoever had the partition before; None if that is done.

        Args:
            give_up: whether to leave it at that.
        """
        self.close()
        transactional_id = f"{TRACKER_GROUP}-{self._config.marker_topic}-{self._partition}"
        transaction = Transaction(transactional_settings(self._config, transactional_id))
        failure = transaction.start(_PREPARE_SECONDS, give_up)
        if failure is None:
            self._transaction = transaction
        else:
            transaction.discard()
        return failure

    def redeliver(self, entries: list[Unfinished]) -> Redelivered:
        """Redeliver a batch; afterwards, `is_prepared` tells whether another may follow."""
        result = Redelivered()
        while entries:
            if self._transaction is None or not self.is_prepared:
                # A new producer would fence a tracker that has fenced ours: what that one did has to be read first.
                result.left += entries
                break
            batch = self._batch(entries)
            failure = self._run(self._transaction, batch, result)
            if failure is None:
                entries = entries[len(batch) :]
            elif not failure.is_refused or failure.is_over:
                result.left += entries
                result.failure = failure
                if failure.is_over:
                    self.close()
                break
            elif self._is_hopeless(batch, failure):
                result.refused += batch
                entries = entries[len(batch) :]
        return result

    def _batch(self, entries: list[Unfinished]) -> list[Unfinished]:
        """The first of these, up to the limit; one that Kafka refused comes alone, and is set aside."""
        if entries[0].message_id in self._refused:
            return entries[:1]
        few = entries[: self._limit]
        return list(itertools.takewhile(lambda entry: entry.message_id not in self._refused, few))

    def _is_hopeless(self, batch: list[Unfinished], failure: Failure) -> bool:
        """Kafka refuses a record of the batch: note what to try next, and return whether there is nothing.

        It is noted here, since a slow abort ends the producer: the search goes on after the next tick.
        """
        if len(batch) > 1:
            self._limit = len(batch) // 2
            return False
        (entry,) = batch
        named = _named(entry, self._read(entry))
        if entry.message_id not in self._refused:
            _log.error("message %s of queue %r cannot be sent again: %s", *named, failure.reason)
            self._refused.add(entry.message_id)
            return False
        _log.error("message %s of queue %r cannot be set aside: %s", *named, failure.reason)
        self._refused.discard(entry.message_id)
        return True

    def close(self) -> None:
        """Throw the producer away."""
        if self._transaction is not None:
            self._transaction.discard()
            self._transaction = None

    def _run(self, transaction: Transaction, entries: list[Unfinished], result: Redelivered) -> Failure | None:
        """Redeliver a batch in one transaction; None if that is done."""
        batch = [(entry, self._read(entry)) for entry in entries]
        stripped = entries[0].message_id in self._refused
        failure = transaction.run(lambda: self._fill(transaction, batch, stripped=stripped))
        if failure is None:
            self._count(batch, result, stripped=stripped)
            self._refused.difference_update(entry.message_id for entry in entries)
            self._limit = min(2 * self._limit, _MOST_AT_ONCE)
        return failure

    def _count(self, batch: list[tuple[Unfinished, Expired]], result: Redelivered, *, stripped: bool) -> None:
        for entry, expired in batch:
            result.done.append(entry)
            counter = result.dead if stripped or expired.is_used_up else result.copies
            counter[expired.queue] += 1

    def _fill(self, transaction: Transaction, batch: list[tuple[Unfinished, Expired]], *, stripped: bool) -> None:
        now_ms = time.time_ns() // 1_000_000  # for people who read dead letters; no decision goes by it
        for entry, expired in batch:
            if stripped or expired.is_used_up:
                reason = "is too large to be sent again; its headers are lost" if stripped else _why(expired)
                key, value, headers = dead_letters.record(
                    expired.queue,
                    expired.payload,
                    headers=() if stripped else expired.headers,
                    attempts=expired.attempt,
                    enqueued_at_ms=expired.enqueued_at_ms,
                    origin=expired.origin,
                    reason=reason,
                    dead_at_ms=now_ms,
                )
                transaction.produce(self._config.dead_letters, value, key, headers=headers)
            else:
                headers = message_headers.of_copy(
                    expired.headers,
                    attempt=expired.attempt + 1,
                    enqueued_at_ms=expired.enqueued_at_ms,
                    origin=expired.origin,
                )
                transaction.produce(self._config.message_topic, expired.payload, expired.queue, headers=headers)
            # To the start marker's partition, whatever key its writer chose.
            end = wire.end_marker(*entry.message_id, reason=REDELIVERED)
            transaction.produce(self._config.marker_topic, end, entry.start[0], partition=self._partition)

    def _read(self, entry: Unfinished) -> Expired:
        marker = wire.Marker.FromString(entry.start[1])
        attempt = entry.attempt
        if attempt is None:
            attempt = marker.attempt if marker.HasField("attempt") else _FIRST_ATTEMPT
        limit = marker.max_attempts if marker.HasField("max_attempts") else self._config.max_attempts
        return Expired(
            queue=marker.key,
            payload=marker.value,
            headers=[(header.name, _value(header)) for header in marker.headers],
            attempt=attempt,
            max_attempts=limit or 0,
            enqueued_at_ms=marker.enqueued_at_ms or None,
            origin=(marker.origin.partition, marker.origin.offset) if marker.HasField("origin") else entry.message_id,
            reason=entry.reason,
        )


def _value(header: Any) -> bytes | None:
    return header.value if header.HasField("value") else None


def _why(expired: Expired) -> str:
    return expired.reason or f"was not finished in {expired.attempt} attempts"


def _named(entry: Unfinished, expired: Expired) -> tuple[str, str]:
    return message_headers.place_text(entry.message_id), expired.queue.decode(errors="replace")
