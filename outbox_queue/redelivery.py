"""Redelivering what expired: the next copy, or a dead letter, and the end marker of the old copy, in one transaction.

Each marker partition has a transactional.id of its own. A tracker that makes the producer (`prepare`) fences the one
that had the partition before and settles what that had begun; what the other had committed is in the partition before
the tick that is sent next. So of two trackers that both believe to own a partition, one redelivers, and each message
once.

A batch that fails because Kafka refuses one of its records is taken apart, until that message is alone. Such a
message becomes a dead letter without headers; it cannot be sent again as it is.
"""

from __future__ import annotations

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
from outbox_queue.in_progress import Unfinished
from outbox_queue.transaction import Failure, Transaction

_PREPARE_SECONDS = 4.0
_FIRST_ATTEMPT = 1
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
        left: what is still in progress.
        copies: how many messages were sent again, by queue.
        dead: how many were set aside, by queue.
        failure: why the rest is left.
    """

    done: list[Unfinished] = field(default_factory=list)
    left: list[Unfinished] = field(default_factory=list)
    copies: Counter[bytes] = field(default_factory=Counter)
    dead: Counter[bytes] = field(default_factory=Counter)
    failure: Failure | None = None


class Redeliverer:
    """Redelivers the messages of one marker partition. Used by one thread.

    Args:
        config: of the queues.
        partition: number of the marker partition.
    """

    def __init__(self, config: QueueConfig, partition: int) -> None:
        self._config = config
        self._partition = partition
        self._transaction: Transaction | None = None

    @property
    def is_prepared(self) -> bool:
        """Whether nobody else can redeliver this partition's messages without our being told."""
        return self._transaction is not None

    def prepare(self, give_up: Callable[[], bool]) -> Failure | None:
        """Fence whoever had the partition before; None if that is done.

        Args:
            give_up: whether to leave it at that.
        """
        transactional_id = f"{TRACKER_GROUP}-{self._config.marker_topic}-{self._partition}"
        transaction = Transaction(transactional_settings(self._config, transactional_id))
        failure = transaction.start(_PREPARE_SECONDS, give_up)
        if failure is None:
            self._transaction = transaction
        return failure

    def redeliver(self, entries: list[Unfinished]) -> Redelivered:
        """Redeliver a batch; afterwards, `is_prepared` tells whether another may follow."""
        result = Redelivered()
        self._redeliver(entries, result)
        return result

    def close(self) -> None:
        """Throw the producer away."""
        if self._transaction is not None:
            self._transaction.discard()
            self._transaction = None

    def _redeliver(self, entries: list[Unfinished], result: Redelivered, *, stripped: bool = False) -> None:
        if self._transaction is None:
            result.left += entries
            return
        batch = [(entry, self._read(entry)) for entry in entries]
        failure = self._transaction.run(lambda: self._fill(batch, stripped=stripped))
        if failure is None:
            self._count(batch, result, stripped=stripped)
        elif failure.is_over or not failure.is_refused:
            result.left += entries
            result.failure = failure
            if failure.is_over:
                self.close()
        elif len(entries) > 1:
            half = len(entries) // 2
            self._redeliver(entries[:half], result)
            self._redeliver(entries[half:], result)
        elif not stripped:
            _log.error("message %s of queue %r cannot be sent again: %s", *_named(batch[0]), failure.reason)
            self._redeliver(entries, result, stripped=True)
        else:
            _log.error("message %s of queue %r cannot be set aside: %s", *_named(batch[0]), failure.reason)
            result.left += entries
            result.failure = failure

    def _count(self, batch: list[tuple[Unfinished, Expired]], result: Redelivered, *, stripped: bool) -> None:
        for entry, expired in batch:
            result.done.append(entry)
            counter = result.dead if stripped or expired.is_used_up else result.copies
            counter[expired.queue] += 1

    def _fill(self, batch: list[tuple[Unfinished, Expired]], *, stripped: bool) -> None:
        transaction = self._transaction
        assert transaction is not None  # noqa: S101  `_redeliver` has looked
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


def _named(message: tuple[Unfinished, Expired]) -> tuple[str, str]:
    entry, expired = message
    return message_headers.place_text(entry.message_id), expired.queue.decode(errors="replace")
