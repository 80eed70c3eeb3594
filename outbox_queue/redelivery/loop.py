"""One tracker at work: it reads the markers of its partitions, redelivers expired messages, and commits its offsets.

- It commits the offset of the first unfinished message's start marker: on time, on revoke and at the end.
- At a rebalance it reads every partition again from the committed offset: the group's assignors, those of kafka-mq-go,
  revoke everything first. It throws away a batch during which partitions were assigned, which may hold records from
  before; it has none of the new assignment, which begins paused.

Everything here, callbacks included, runs on the thread that calls `turn`.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Any

from outbox_core.errors import must
from outbox_core.kafka.clients import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
    discard,
    make_consumer,
    make_producer,
)
from outbox_core.kafka.errors import MEMBER_HOPELESS, why_unreadable
from outbox_core.outage import Outage
from outbox_core.printable import plural
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.duty import READ, GroupDuty
from outbox_queue.errors import QueueError
from outbox_queue.metrics import QueueMetrics
from outbox_queue.protocol.clients import TRACKER_GROUP, consumer_settings, producer_settings
from outbox_queue.protocol.headers import queue_name
from outbox_queue.redelivery.in_progress import QueueLoad
from outbox_queue.redelivery.partition import MarkerPartition
from outbox_queue.redelivery.tracked_partition import TrackedPartition, TrackerContext, now_ms

_BATCH = 5000
_BUSY_SECONDS = 0.02
_IDLE_SECONDS = 0.2
_REFUSED_SECONDS = 60.0  # longer than between two complaints of the client
_REPORT_MS = 1000.0
_REPORT_SHARE = 20  # reporting takes no more than a twentieth of the time

_CONSUMER_SETTINGS = {
    "session.timeout.ms": 6000,  # a dead tracker's partitions are taken over after so long
    "heartbeat.interval.ms": 1500,
    "fetch.wait.max.ms": 20,
    "fetch.min.bytes": 1,
    "queued.max.messages.kbytes": 32_768,
}

_log = logging.getLogger(__name__)


class TrackerLoop:
    """A member of the trackers' group. Used by one thread, but for `in_progress` and `is_caught_up`."""

    def __init__(self, config: QueueConfig, metrics: QueueMetrics, give_up: Callable[[], bool]) -> None:
        self.in_progress = 0
        self.is_caught_up = False
        duty = GroupDuty("the tracker", TRACKER_GROUP, config.marker_topic, config, metrics.tracker_left)
        ticks = make_producer(producer_settings(config, linger_ms=0))
        self._ctx = TrackerContext(config, metrics, lambda: give_up() or duty.is_unable, ticks, duty)
        self._partitions: dict[int, TrackedPartition] = {}
        self._unreadable_before = 0  # in partitions that were ours
        self._was_assigned = False
        self._read_since_commit = 0
        self._commit_at = self._report_at = 0.0
        self._outside_since: float | None = now_ms()
        extra = {**_CONSUMER_SETTINGS, **config.kafka, "on_commit": self._note_commit}
        self._consumer: Consumer = make_consumer(consumer_settings(config, TRACKER_GROUP, extra))

    @property
    def partitions(self) -> int:
        """Number of partitions assigned to this tracker."""
        return len(self._partitions)

    @property
    def outage(self) -> Outage:
        """The longest outage."""
        return max(self._ctx.redelivery, self._ctx.clock, self._ctx.reading, key=lambda outage: outage.lasted_seconds)

    @property
    def trouble(self) -> str | None:
        """The reason why it has left the trackers' group, None if it has not."""
        return self._ctx.duty.trouble

    @property
    def outside_seconds(self) -> float:
        """Seconds for which it has not been a member of the trackers' group."""
        since = self._outside_since  # the other thread may join meanwhile
        return 0.0 if since is None else (now_ms() - since) / 1000

    def begin(self) -> None:
        """Join the trackers' group."""
        self._ctx.duty.start()
        self._join()

    def _join(self) -> None:
        topics = [self._ctx.config.marker_topic]
        self._consumer.subscribe(topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._dropped)

    def turn(self) -> None:
        """Read a batch of markers and attend to each partition; raise QueueError if this cannot go on."""
        self._ctx.duty.act(self._consumer.unsubscribe, self._join)
        records = self._consume()
        if self._was_assigned:
            self._was_assigned = False
            topic = self._ctx.config.marker_topic
            self._consumer.resume([TopicPartition(topic, number) for number in self._partitions])
        else:
            self._read(records)
        self._ctx.ticks.poll(0)
        now = now_ms()
        for tracked in self._partitions.values():
            if not tracked.attend(now):
                break  # the failure may have taken long: poll the group before the others' turn
        self._commit_if_due(now)
        self._report_if_due(now)

    def forget(self) -> None:
        """Let go of all partitions without a commit: what is known of them is not to be trusted."""
        self._forget(self._partitions.copy())

    def end(self) -> None:
        """Leave the group; partitions are committed as they are revoked. It is of no use afterwards."""
        self._ctx.duty.close()
        try:
            self._consumer.close()
        finally:
            self._forget(self._partitions.copy())
            discard(self._ctx.ticks)  # else undelivered ticks' reports would be kept for ever, and all of us with them
            self._ctx.metrics.tracking({}, partitions=0, catching_up=0, unreadable=self._unreadable_before)
            # The consumer and we refer to each other, and a client's threads end with its last reference.
            del self._ctx.ticks, self._consumer

    def _consume(self) -> list[Any]:
        busy = self.in_progress > 0 or not self.is_caught_up
        try:
            found: list[Any] = self._consumer.consume(_BATCH, _BUSY_SECONDS if busy else _IDLE_SECONDS)
        except KafkaException as error:
            self._check(error.args[0])
            time.sleep(_BUSY_SECONDS)  # it may fail at once, again and again
            return []
        return found

    def _read(self, records: Iterable[Any]) -> None:
        now, partitions = now_ms(), self._partitions
        count, is_refused = 0, False
        for record in records:
            error = record.error()
            if error is not None:
                is_refused = self._check(error) or is_refused
                continue
            tracked = partitions.get(record.partition())
            if tracked is not None:
                count += 1
                tracked.markers.read(record.offset(), record.timestamp(), record.key(), record.value(), now)
        self._read_since_commit += count
        if count and not is_refused:
            self._ctx.reading.recovered()
        for tracked in partitions.values():
            if tracked.markers.read_at == now:
                tracked.note_read()

    def _check(self, error: KafkaError) -> bool:
        """Note an error, and tell whether it is a refusal. Raises QueueError if fatal, or before it has read."""
        is_refused = error.code() in MEMBER_HOPELESS
        if error.fatal() or is_refused:
            config = self._ctx.config
            why = why_unreadable(error, config.kafka, config.marker_topic, TRACKER_GROUP)
            if error.fatal() or not self._ctx.duty.has_done(READ):
                raise QueueError(f"markers of {config.marker_topic!r} cannot be read: {why}")
            self._ctx.reading.failed(why)
        elif error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001
            _log.debug("marker consumer: %s", error.str())
        return is_refused

    # -- offsets ---------------------------------------------------------------------------------------------------

    def _commit_if_due(self, now: float) -> None:
        settings = self._ctx.config.redelivery_tracker
        if self._read_since_commit >= settings.num_offsets_per_commit or now >= self._commit_at:
            self._commit(self._partitions, wait=False)
            self._commit_at = now + milliseconds(settings.commit_interval)
            self._read_since_commit = 0

    def _commit(self, partitions: dict[int, TrackedPartition], *, wait: bool) -> None:
        offsets = []
        for number, tracked in partitions.items():
            offset = tracked.markers.offset_to_commit()
            if offset is not None and offset != tracked.committed:
                last = tracked.committed
                must(last is None or offset > last, "the committed offset must rise; %d follows %s", offset, last)
                offsets.append(TopicPartition(self._ctx.config.marker_topic, number, offset))
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
        """Have failed offsets committed the next time, even if no marker is read until then."""
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
        for number in (partition.partition for partition in partitions):
            self._partitions[number] = TrackedPartition(number, self._ctx)
        self._ctx.duty.assigned(self._partitions, consumer.memberid())
        self._was_assigned, self._outside_since = True, None
        self.is_caught_up = False
        _log.info("tracking marker partitions %s", sorted(self._partitions))

    def _revoked(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._commit(self._ours(partitions), wait=True)
        self._lost(consumer, partitions)

    def _dropped(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._ctx.duty.assigned(())
        self._lost(consumer, partitions)

    def _lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._forget(self._ours(partitions))
        self._outside_since = self._outside_since or now_ms()
        self.is_caught_up = False

    def _ours(self, partitions: list[TopicPartition]) -> dict[int, TrackedPartition]:
        named = (partition.partition for partition in partitions)
        return {number: self._partitions[number] for number in named if number in self._partitions}

    def _forget(self, partitions: dict[int, TrackedPartition]) -> None:
        for number, tracked in partitions.items():
            tracked.close()
            if self._partitions.pop(number, None) is not None:
                self._unreadable_before += tracked.markers.unreadable

    # -- metrics ---------------------------------------------------------------------------------------------------

    def _report_if_due(self, now: float) -> None:
        markers = [tracked.markers for tracked in self._partitions.values()]
        self.in_progress = sum(map(len, markers))
        catching_up = sum(not one.is_caught_up for one in markers)
        if self._partitions and not catching_up and not self.is_caught_up:
            _log.info("caught up: %s in progress", plural(self.in_progress, "message"))
        self.is_caught_up = self._outside_since is None and catching_up == 0
        if now < self._report_at:
            return
        began = now_ms()  # what the turn did before may have taken seconds
        busy = [tracked for tracked in self._partitions.values() if not tracked.note_nothing_left(now)]
        if not self._partitions:
            self._ctx.redelivery.forget()
            self._ctx.reading.expire_after(_REFUSED_SECONDS)  # the group may refuse us: then there is no partition, too
        elif not busy:
            self._ctx.redelivery.recovered()
        unreadable = self._unreadable_before + sum(one.unreadable for one in markers)
        loads = _sum(markers, now)
        self._ctx.metrics.tracking(loads, partitions=len(markers), catching_up=catching_up, unreadable=unreadable)
        reported_at = now_ms()
        self._report_at = reported_at + max(_REPORT_MS, (reported_at - began) * _REPORT_SHARE)


def _sum(partitions: list[MarkerPartition], now: float) -> dict[str, QueueLoad]:
    counts: Counter[str] = Counter()
    ages: dict[str, float] = {}
    for partition in partitions:
        for queue, (count, age) in partition.load(now).items():
            name = queue_name(queue)
            counts[name] += count
            ages[name] = max(age, ages.get(name, 0.0))
    return {name: QueueLoad(count, ages[name]) for name, count in counts.items()}
