"""One tracker at work: it reads the markers of its partitions, redelivers what expired, and commits how far it is.

A turn of the loop reads a batch of markers, then looks at each partition (`outbox_queue.marker_partition`): a tick is
sent, or a batch of expired messages is redelivered (`outbox_queue.redelivery`).

- A partition whose messages are to be redelivered for the first time is prepared *before* the tick that judges them:
  what another tracker had committed there is thus read before anything is decided. The same holds when a producer is
  replaced because the end of its last transaction may have been sent twice (`outbox_core.harvest.transaction`).
- A tick that does not come back within two seconds may wait behind the unfinished transaction of a tracker that died:
  preparing the partition ends it.
- The offset that is committed is that of the first unfinished message's start marker, on time, on revoke and at the
  end.
- At a rebalance every partition is read again from what was committed: the group's assignors are those of kafka-mq-
  go's trackers, which take everything away first. A batch during which partitions were assigned is thrown away, since
  it may hold records from before; nothing of the new assignment is in it, for it begins paused.

Everything here, callbacks included, runs on the thread that calls `turn`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from outbox_core import election
from outbox_core.harvest.outage import Outage
from outbox_core.kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
    discard,
    make_consumer,
    make_producer,
    why_unreadable,
)
from outbox_queue.clients import TRACKER_GROUP, consumer_settings, producer_settings
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.errors import QueueError
from outbox_queue.in_progress import QueueLoad
from outbox_queue.marker_partition import MarkerPartition, Tick
from outbox_queue.metrics import QueueMetrics
from outbox_queue.redelivery import Redelivered, Redeliverer

_BATCH = 5000
_BUSY_SECONDS = 0.02
_IDLE_SECONDS = 0.2
_REDELIVERED_AT_ONCE = 500
_REDELIVERED_BYTES = 4_000_000
_TICK_PATIENCE_MS = 2000.0
_TICK_LOST_MS = 10_000.0
_RETRY_MS = 1000.0
_REFUSED_MS = 60_000.0
_REPORT_MS = 1000.0
_REPORT_SHARE = 20  # reporting takes no more than a twentieth of the time

_CONSUMER_SETTINGS = {
    "session.timeout.ms": 6000,  # a dead tracker's partitions are taken over after so long
    "heartbeat.interval.ms": 1500,
    "fetch.wait.max.ms": 20,
    "fetch.min.bytes": 1,
    "queued.max.messages.kbytes": 32_768,
}

_HOPELESS = frozenset(
    {
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.UNSUPPORTED_SASL_MECHANISM,
        KafkaError._AUTHENTICATION,  # noqa: SLF001  confluent's public constants
    }
)

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Tracked:
    """A partition that is assigned to us.

    Attributes:
        markers: what is known of it.
        redeliverer: for its messages.
        committed: the offset that was last committed, or is being committed; None for none.
        retry_at: nothing is tried before, on the monotonic clock.
    """

    markers: MarkerPartition
    redeliverer: Redeliverer
    committed: int | None = None
    retry_at: float = 0.0


class TrackerLoop:
    """Used by one thread, but for `in_progress` and `is_caught_up`, which anyone may read.

    Args:
        config: of the queues.
        metrics: where to count.
        give_up: whether to end; asked before whatever may take long.
    """

    def __init__(self, config: QueueConfig, metrics: QueueMetrics, give_up: Callable[[], bool]) -> None:
        self._redelivery = Outage("redelivery", _log)
        self._time = Outage("asking for the time", _log)
        self.in_progress = 0
        self.is_caught_up = False
        self._config = config
        self._metrics = metrics
        self._give_up = give_up
        self._tick_interval = float(milliseconds(config.redelivery_tracker.use_now_if_no_marker_seen))
        self._longest_ms = milliseconds(config.marker_retention / 2)
        self._commit_interval = float(milliseconds(config.redelivery_tracker.commit_interval))
        self._commit_count = config.redelivery_tracker.num_offsets_per_commit
        self._partitions: dict[int, _Tracked] = {}
        self._unreadable_before = 0  # in partitions that were ours
        self._was_assigned = self._is_member = False
        self._read_since_commit = 0
        self._committed_at = self._reported_at = 0.0
        self._report_interval = _REPORT_MS
        self._ticks = make_producer(producer_settings(config, linger_ms=0))
        extra = {**_CONSUMER_SETTINGS, **config.kafka, "on_commit": self._note_commit}
        self._consumer: Consumer = make_consumer(consumer_settings(config, TRACKER_GROUP, extra))

    @property
    def partitions(self) -> int:
        """How many are assigned to us."""
        return len(self._partitions)

    @property
    def outage(self) -> Outage:
        """What has been failing for the longest time."""
        return max(self._redelivery, self._time, key=lambda outage: outage.lasted_seconds)

    def begin(self) -> None:
        """Join the trackers' group."""
        self._consumer.subscribe(
            [self._config.marker_topic], on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._lost
        )

    def turn(self) -> None:
        """Read a batch of markers and do what it asks for.

        Raises:
            QueueError: if this cannot go on.
        """
        records = self._consume()
        if self._was_assigned:
            self._was_assigned = False
            self._consumer.resume([TopicPartition(self._config.marker_topic, number) for number in self._partitions])
        else:
            self._read(records)
        self._ticks.poll(0)
        now = _now()
        for tracked in self._partitions.values():
            if not self._attend(tracked, now):
                break  # it took its time to fail: the others' turn is after the next look at the group
        self._commit_if_due(now)
        self._report_if_due(now)

    def end(self) -> None:
        """Leave the group; partitions are committed as they are revoked. It is of no use afterwards."""
        try:
            self._consumer.close()
        finally:
            self._forget(self._partitions.copy())
            discard(self._ticks)  # the reports of what it still has would be kept for ever, and all of us with them
            self._metrics.tracking({}, partitions=0, catching_up=0, unreadable=self._unreadable_before)
            # The consumer and we refer to each other, and a client's threads end with its last reference.
            del self._ticks, self._consumer

    def _consume(self) -> list[Any]:
        busy = self.in_progress > 0 or not self.is_caught_up
        try:
            found: list[Any] = self._consumer.consume(_BATCH, _BUSY_SECONDS if busy else _IDLE_SECONDS)
        except KafkaException as error:
            self._note(error.args[0])
            time.sleep(_BUSY_SECONDS)  # it may fail at once, again and again
            return []
        return found

    def _read(self, records: Iterable[Any]) -> None:
        now, partitions = _now(), self._partitions
        count = 0
        for record in records:
            error = record.error()
            if error is not None:
                self._note(error)
                continue
            tracked = partitions.get(record.partition())
            if tracked is not None:
                count += 1
                tracked.markers.read(record.offset(), record.timestamp(), record.key(), record.value(), now)
        self._read_since_commit += count
        if count:
            self._time.ended()

    def _note(self, error: KafkaError) -> None:
        """What the consumer cannot recover from ends the tracker; all else it retries by itself."""
        if error.fatal() or error.code() in _HOPELESS:
            topic = self._config.marker_topic
            why = why_unreadable(error, self._config.kafka, topic, TRACKER_GROUP)
            raise QueueError(f"markers of {topic!r} cannot be read: {why}")
        if error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
            _log.debug("marker consumer: %s", error.str())

    def _attend(self, tracked: _Tracked, now: float) -> bool:
        """Do what is to be done for a partition; return whether Kafka let us."""
        markers = tracked.markers
        if now < tracked.retry_at:
            return True
        if markers.tick is not None:
            return self._wait_for_tick(tracked, markers.tick, now)
        if markers.has_expired:
            return self._redeliver(tracked)
        return not markers.wants_tick(now) or self._send_tick(tracked, now)

    def _wait_for_tick(self, tracked: _Tracked, tick: Tick, now: float) -> bool:
        quiet = now - max(tick.sent_at, tracked.markers.read_at)
        if quiet > _TICK_PATIENCE_MS and not tracked.redeliverer.is_prepared:
            return self._prepare(tracked)
        if quiet > _TICK_LOST_MS:
            tracked.markers.tick_failed(tick.token)
        return True

    def _send_tick(self, tracked: _Tracked, now: float) -> bool:
        markers = tracked.markers
        if markers.looks_expired(now) and not tracked.redeliverer.is_prepared and not self._prepare(tracked):
            return False
        value, token = markers.send_tick(now, may_judge=tracked.redeliverer.is_prepared)

        def failed(error: KafkaError | None, _: object) -> None:
            if error is not None and self._partitions.get(markers.number) is tracked:  # else it is not ours any more
                markers.tick_failed(token)
                tracked.retry_at = _now() + _RETRY_MS
                self._time.began(f"partition {markers.number} of the marker topic: {error.str()}")

        try:
            self._ticks.produce(self._config.marker_topic, value, None, markers.number, on_delivery=failed)
        except (BufferError, KafkaException) as error:
            markers.tick_failed(token)
            tracked.retry_at = now + _RETRY_MS
            self._time.began(f"partition {markers.number} of the marker topic: {error}")
        return True

    def _prepare(self, tracked: _Tracked) -> bool:
        failure = tracked.redeliverer.prepare(self._give_up)
        if failure is not None:
            self._redelivery.began(f"partition {tracked.markers.number} of the marker topic: {failure.reason}")
            tracked.retry_at = _now() + _RETRY_MS
        return failure is None

    def _redeliver(self, tracked: _Tracked) -> bool:
        markers = tracked.markers
        batch = markers.take_expired(_REDELIVERED_AT_ONCE, _REDELIVERED_BYTES)
        if not batch:
            return True
        result = tracked.redeliverer.redeliver(batch)
        markers.settle(result.done, redelivered=True)
        markers.postpone(result.refused, _REFUSED_MS)
        markers.settle(result.left, redelivered=False)
        self._count(result)
        if result.failure is None:
            if result.done:
                self._redelivery.ended()
            if not tracked.redeliverer.is_prepared:
                markers.judge_again()
            return True
        markers.judge_again()
        self._redelivery.began(f"partition {markers.number} of the marker topic: {result.failure.reason}")
        tracked.retry_at = _now() + _RETRY_MS
        return False

    def _count(self, result: Redelivered) -> None:
        for queue, count in result.copies.items():
            self._metrics.of(_text(queue)).redelivered(count)
        for queue, count in result.dead.items():
            self._metrics.of(_text(queue)).dead_lettered(count)
            _log.warning("queue %r: %d messages set aside in %s", _text(queue), count, self._config.dead_letters)

    # -- offsets ---------------------------------------------------------------------------------------------------

    def _commit_if_due(self, now: float) -> None:
        if self._read_since_commit >= self._commit_count or now - self._committed_at >= self._commit_interval:
            self._commit(self._partitions, wait=False)
            self._committed_at = now
            self._read_since_commit = 0

    def _commit(self, partitions: dict[int, _Tracked], *, wait: bool) -> None:
        offsets = []
        for number, tracked in partitions.items():
            offset = tracked.markers.offset_to_commit()
            if offset is not None and offset != tracked.committed:
                offsets.append(TopicPartition(self._config.marker_topic, number, offset))
                tracked.committed = offset
        if not offsets:
            return
        try:
            if wait:
                self._consumer.commit(offsets=offsets, asynchronous=False)
            else:
                self._consumer.commit(offsets=offsets, asynchronous=True)
        except KafkaException as error:
            self._note_commit(error.args[0], offsets)

    def _note_commit(self, error: KafkaError | None, offsets: list[TopicPartition]) -> None:
        """What was not committed is committed at the next time, even if nothing has moved until then.

        Until then, whoever reads next begins a little earlier, and comes to the same knowledge.
        """
        for one in offsets:
            tracked = self._partitions.get(one.partition)
            failure = one.error or error
            if failure is None or tracked is None or tracked.committed != one.offset:
                continue
            tracked.committed = None
            _log.info("partition %d of the marker topic was not committed: %s", one.partition, failure.str())

    # -- assignment ------------------------------------------------------------------------------------------------

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.assign(partitions)
        if partitions:
            consumer.pause(partitions)
        self._forget(self._partitions.copy())
        for partition in partitions:
            markers = MarkerPartition(
                partition.partition, tick_interval=self._tick_interval, longest_ms=self._longest_ms
            )
            self._partitions[partition.partition] = _Tracked(markers, Redeliverer(self._config, partition.partition))
        self._was_assigned = self._is_member = True
        self.is_caught_up = False
        _log.info("tracking marker partitions %s", sorted(self._partitions))

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        revoked = self._among_ours(partitions)
        self._commit(revoked, wait=True)
        self._leave(revoked)

    def _lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._leave(self._among_ours(partitions))

    def _leave(self, partitions: dict[int, _Tracked]) -> None:
        self._forget(partitions)
        self._is_member = self.is_caught_up = False

    def _among_ours(self, partitions: list[TopicPartition]) -> dict[int, _Tracked]:
        named = (partition.partition for partition in partitions)
        return {number: self._partitions[number] for number in named if number in self._partitions}

    def _forget(self, partitions: dict[int, _Tracked]) -> None:
        for number, tracked in partitions.items():
            tracked.redeliverer.close()
            if self._partitions.pop(number, None) is not None:
                self._unreadable_before += tracked.markers.unreadable

    # -- what others see -------------------------------------------------------------------------------------------

    def _report_if_due(self, now: float) -> None:
        markers = [tracked.markers for tracked in self._partitions.values()]
        self.in_progress = sum(map(len, markers))
        catching_up = sum(not one.is_caught_up for one in markers)
        if self._partitions and not catching_up and not self.is_caught_up:
            _log.info("caught up: %d messages are in progress", self.in_progress)
        self.is_caught_up = self._is_member and catching_up == 0
        if now - self._reported_at < self._report_interval:
            return
        # What could not be redelivered may have been finished meanwhile by its consumer: then nothing is amiss.
        if not any(one.has_expired or one.looks_expired(now) for one in markers):
            self._redelivery.ended()
        unreadable = self._unreadable_before + sum(one.unreadable for one in markers)
        self._metrics.tracking(
            _sum(markers, now), partitions=len(markers), catching_up=catching_up, unreadable=unreadable
        )
        self._reported_at = _now()
        self._report_interval = max(_REPORT_MS, (self._reported_at - now) * _REPORT_SHARE)


def _sum(partitions: list[MarkerPartition], now: float) -> dict[str, QueueLoad]:
    counts: Counter[str] = Counter()
    ages: dict[str, float] = {}
    for partition in partitions:
        for queue, (count, age) in partition.load(now).items():
            name = _text(queue)
            counts[name] += count
            ages[name] = max(age, ages.get(name, 0.0))
    return {name: QueueLoad(count, ages[name]) for name, count in counts.items()}


def _text(queue: Any) -> str:
    return bytes(queue).decode(errors="replace")


def _now() -> float:
    return election.now() * 1000
