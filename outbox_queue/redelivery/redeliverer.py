"""Redelivering expired messages: in one transaction a copy, or a dead letter, and the end marker of the old copy.

Each marker partition has a transactional.id of its own. A tracker that makes its producer (`prepare`) fences the last
owner of the partition and finishes its transaction; its commits are in the partition before the next tick. So of two
trackers that both believe to own a partition only one redelivers, and each message once.

If Kafka refuses a record, its batch is halved until the message is alone; it becomes a dead letter without headers.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.transactions import GiveUp, TransactionalProducer, never
from outbox_queue.config import QueueConfig
from outbox_queue.protocol import headers as message_headers
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol import transaction
from outbox_queue.protocol.clients import TRACKER_GROUP, transactional_settings
from outbox_queue.protocol.headers import Header
from outbox_queue.protocol.transaction import Failure
from outbox_queue.redelivery.in_progress import MessageId, Unfinished

_PREPARE_SECONDS = 4.0
_MOST_AT_ONCE = 500
REDELIVERED = "redelivered"  # reason in a tracker's end marker

_log = logging.getLogger(__name__)


class Expired(NamedTuple):
    """A message to redeliver, read from its start marker."""

    entry: Unfinished
    queue: bytes  # id of its queue
    payload: bytes
    headers: list[Header]  # the user's
    attempt: int  # the number of the attempt that ended
    max_attempts: int  # 0 for no limit
    enqueued_at_ms: int | None  # when the first copy was sent, if that is known
    origin: tuple[int, int]  # place of the first copy

    @property
    def is_used_up(self) -> bool:
        """True if no attempt is left."""
        return 0 < self.max_attempts <= self.attempt


@dataclass
class Redelivered:
    """Outcome of a batch; without a failure, the messages that are left need only another producer."""

    done: list[Unfinished] = field(default_factory=list)  # copies and dead letters that are committed
    left: list[Unfinished] = field(default_factory=list)  # still in progress, and to be judged again
    refused: list[Unfinished] = field(default_factory=list)  # accepted by Kafka in no form
    copies: Counter[bytes] = field(default_factory=Counter)  # by queue
    dead: Counter[bytes] = field(default_factory=Counter)  # by queue
    failure: Failure | None = None


class Redeliverer:
    """The redelivery of one marker partition's messages, for one thread.

    It discards a producer whose next transaction a late end of the last one could meet; the rest of the batch is judged
    again after `prepare`.
    """

    def __init__(self, config: QueueConfig, partition: int) -> None:
        self._config = config
        self._partition = partition
        self._producer: TransactionalProducer | None = None
        self._limit = _MOST_AT_ONCE
        self._refused: set[MessageId] = set()

    @property
    def is_prepared(self) -> bool:
        """True if another tracker can redeliver this partition's messages only by fencing us."""
        return self._producer is not None and not self._producer.must_replace

    def prepare(self, give_up: Callable[[], bool]) -> Failure | None:
        """Fence the last owner of the partition; return None if that is done."""
        self.close()
        transactional_id = f"{TRACKER_GROUP}-{self._config.marker_topic}-{self._partition}"
        try:
            producer = transaction.transactional_producer(transactional_settings(self._config, transactional_id))
        except KafkaUnavailable as error:
            return Failure(str(error), is_over=True, is_refused=False)
        failure = transaction.start(producer, _PREPARE_SECONDS, give_up)
        if failure is None:
            self._producer = producer
        else:
            producer.discard()
        return failure

    def close(self) -> None:
        """Discard the producer."""
        if self._producer is not None:
            self._producer.discard()
            self._producer = None

    def redeliver(self, entries: list[Unfinished], give_up: GiveUp = never) -> Redelivered:
        """Redeliver a batch; afterwards, `is_prepared` tells whether another may follow.

        Once `give_up` says so, the outcome of a transaction is left to the next tracker.
        """
        result = Redelivered()
        while entries:
            if self._producer is None or not self.is_prepared:
                # A new producer would fence a tracker that has fenced ours: its commits have to be read first.
                result.left += entries
                break
            batch = self._batch(entries)
            failure = self._run(self._producer, batch, result, give_up)
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
        """Return the first entries, up to the limit; a message that Kafka refused comes alone."""
        if entries[0].message_id in self._refused:
            return entries[:1]
        few = entries[: self._limit]
        return list(itertools.takewhile(lambda entry: entry.message_id not in self._refused, few))

    def _is_hopeless(self, batch: list[Unfinished], failure: Failure) -> bool:
        """Choose the next try after Kafka refused a record; return whether none is left."""
        if len(batch) > 1:
            self._limit = len(batch) // 2
            return False
        (entry,) = batch
        place, queue = message_headers.place_text(entry.message_id), entry.queue.decode(errors="replace")
        if entry.message_id not in self._refused:
            _log.error("message %s of queue %r cannot be sent again: %s", place, queue, failure.reason)
            self._refused.add(entry.message_id)
            return False
        _log.error("message %s of queue %r cannot become a dead letter: %s", place, queue, failure.reason)
        self._refused.discard(entry.message_id)
        return True

    def _run(
        self, producer: TransactionalProducer, entries: list[Unfinished], result: Redelivered, give_up: GiveUp
    ) -> Failure | None:
        batch = [self._read(entry) for entry in entries]
        stripped = entries[0].message_id in self._refused
        failure = transaction.run(producer, lambda: self._fill(producer, batch, stripped=stripped), give_up)
        if failure is None:
            result.done += entries
            for expired in batch:
                (result.dead if stripped or expired.is_used_up else result.copies)[expired.queue] += 1
            self._refused.difference_update(entry.message_id for entry in entries)
            self._limit = min(2 * self._limit, _MOST_AT_ONCE)
        return failure

    def _fill(self, producer: TransactionalProducer, batch: list[Expired], *, stripped: bool) -> None:
        now_ms = time.time_ns() // 1_000_000  # for people who read dead letters; no decision goes by it
        for expired in batch:
            entry = expired.entry
            if stripped:
                self._produce_dead_letter(
                    producer,
                    expired._replace(headers=[]),
                    "is too large to be sent again; its headers are lost",
                    now_ms,
                )
            elif expired.is_used_up:
                reason = entry.reason or f"was not finished in {expired.attempt} attempts"
                self._produce_dead_letter(producer, expired, reason, now_ms)
            else:
                headers = message_headers.of_copy(
                    expired.headers,
                    attempt=expired.attempt + 1,
                    enqueued_at_ms=expired.enqueued_at_ms,
                    origin=expired.origin,
                )
                producer.produce(self._config.message_topic, expired.payload, expired.queue, headers=headers)
            # To the start marker's partition, whatever key its writer chose.
            end = wire.end_marker(*entry.message_id, reason=REDELIVERED)
            producer.produce(self._config.marker_topic, end, entry.start[0], partition=self._partition)

    def _produce_dead_letter(self, producer: TransactionalProducer, expired: Expired, reason: str, now_ms: int) -> None:
        key, value, headers = message_headers.dead_letter_record(
            expired.queue,
            expired.payload,
            headers=expired.headers,
            attempts=expired.attempt,
            enqueued_at_ms=expired.enqueued_at_ms,
            origin=expired.origin,
            reason=reason,
            dead_at_ms=now_ms,
        )
        producer.produce(self._config.dead_letters, value, key, headers=headers)

    def _read(self, entry: Unfinished) -> Expired:
        marker = wire.Marker.FromString(entry.start[1])
        limit = marker.max_attempts if marker.HasField("max_attempts") else self._config.max_attempts
        return Expired(
            entry=entry,
            queue=marker.key,
            payload=marker.value,
            headers=wire.headers_of(marker),
            attempt=wire.attempt_of(marker) if entry.attempt is None else entry.attempt,
            max_attempts=limit or 0,
            enqueued_at_ms=marker.enqueued_at_ms or None,
            origin=wire.origin_of(marker) or entry.message_id,
        )
