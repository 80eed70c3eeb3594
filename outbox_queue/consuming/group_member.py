"""The message topic as one member of the queue's consumer group reads it: records, positions, commits and lag.

Records are fetched only while there is capacity for them. The group is polled even so, with the partitions paused: a
consumer whose handlers are slow keeps its partitions. Fetched records beyond the capacity stay here, uncommitted.

Offsets of skipped records (of other queues) are committed with the next batch, after so many of them, on time, on
revoke, and at the end. At a partition's end they move past the marks of the trackers' transactions: else an empty queue
would seem to lag for ever.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from outbox_core.kafka.clients import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
    make_consumer,
)
from outbox_core.kafka.errors import MEMBER_HOPELESS, why_unreadable
from outbox_queue.config import QueueConfig
from outbox_queue.consuming.start_writers import NotStarted
from outbox_queue.duty import READ, GroupDuty
from outbox_queue.errors import QueueError
from outbox_queue.metrics import QueueCounters
from outbox_queue.protocol.clients import consumer_settings, group_of

_LONGEST_WITHOUT_POLL_SECONDS = 1.0
_LONGEST_POLL_SECONDS = 0.2  # then the thread checks whether it is to stop, and commits
_LAG_INTERVAL_SECONDS = 2.0
_LAG_TIMEOUT_SECONDS = 0.2
_COMMIT = "commit offsets"

_log = logging.getLogger(__name__)


class Offsets:
    """One member's position: its offsets (next, last ends reached, to commit), and how many records are taken."""

    def __init__(self) -> None:
        self.done: dict[int, int] = {}
        self.ends: dict[int, int] = {}
        self.skipped: dict[int, int] = {}
        self.skipped_records = 0
        self.taken_records = 0  # of the fetched ones, from the first on
        self.committed_at = time.monotonic()

    def committed(self) -> None:
        """Forget skipped offsets: they are committed."""
        self.committed_at = time.monotonic()
        self.skipped.clear()
        self.skipped_records = 0

    def forget(self, partition: int) -> None:
        """Forget a partition."""
        for offsets in (self.done, self.ends, self.skipped):
            offsets.pop(partition, None)


class GroupMember:
    """A Kafka consumer in the group of one queue, for one thread."""

    def __init__(
        self,
        config: QueueConfig,
        queue: str,
        counters: QueueCounters,
        warn: Callable[[str], None],
        commit: Callable[[Mapping[int, int]], None],
        *,
        duty: GroupDuty,
    ) -> None:
        self.offsets = Offsets()
        self._commit = commit  # may raise NotStarted
        self._duty = duty
        self._config = config
        self._queue = queue
        self._counters = counters
        self._warn = warn
        self._fetched: deque[Any] = deque()
        self._is_paused = False
        self._polled_at = self._lag_reported_at = 0.0
        self.consumer: Consumer = make_consumer(
            consumer_settings(config, group_of(queue), {"enable.partition.eof": True})
        )

    @property
    def has_fetched(self) -> bool:
        """True if there are fetched records that it has not moved past."""
        return bool(self._fetched)

    def subscribe(self) -> None:
        """Join the group."""
        topics = [self._config.message_topic]
        self.consumer.subscribe(topics, on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._dropped)

    def unsubscribe(self) -> None:
        """Leave the group, for a while: the next poll hears of the partitions that are revoked."""
        self.consumer.unsubscribe()

    def close(self) -> None:
        """Leave the group, and let go of the client."""
        self._counters.lag(self, None)
        self.consumer.close()
        del self.consumer  # it refers to us, too, and its threads end with the last reference

    def fetch(self, most: int) -> None:
        """Wait for records, and fetch up to so many."""
        if self._is_paused:
            self.consumer.resume(self.consumer.assignment())
            self._is_paused = False
        first = self.consumer.poll(min(_LONGEST_POLL_SECONDS, self._config.next_message_timeout.total_seconds()))
        self._polled_at = time.monotonic()
        if first is None:
            return
        self._keep([first])
        if most > 1:
            self._keep(self.consumer.consume(most - 1, 0))

    def poll_while_full(self) -> None:
        """Poll without fetching, if the last poll was long ago: the group takes this member for dead otherwise."""
        if time.monotonic() - self._polled_at >= _LONGEST_WITHOUT_POLL_SECONDS:
            self.poll_paused()

    def poll_paused(self) -> None:
        """Poll without fetching, and hear of partitions that are revoked."""
        if not self._is_paused:
            self.consumer.pause(self.consumer.assignment())
            self._is_paused = True
        self._polled_at = time.monotonic()
        record = self.consumer.poll(0)
        if record is not None:
            self._keep([record])

    def take(self, most: int) -> tuple[list[Any], dict[int, int]]:
        """Return fetched records of this queue, and the offsets after them and after those of others between them.

        The same are taken again until `skip` or `committed` has moved past them, or the group has revoked them.
        """
        key = self._queue.encode()
        records: list[Any] = []
        offsets: dict[int, int] = {}
        self.offsets.taken_records = 0
        for record in self._fetched:
            if len(records) == most:
                break
            self.offsets.taken_records += 1
            if record.key() == key:
                records.append(record)
            else:
                self.offsets.skipped_records += 1
            offsets[record.partition()] = record.offset() + 1
        return records, offsets

    def skip(self, offsets: Mapping[int, int]) -> None:
        """Move past records without committing."""
        self.offsets.skipped.update(offsets)
        self._move_past_taken(offsets)

    def committed(self, offsets: Mapping[int, int]) -> None:
        """Move past records whose offsets are committed, with those of all skipped records."""
        self.offsets.committed()
        self._move_past_taken(offsets)

    def drop_committed(self) -> None:
        """Forget fetched records whose offsets are committed; raise NotStarted if Kafka does not tell."""
        numbers = {record.partition() for record in self._fetched}
        asked = [TopicPartition(self._config.message_topic, number) for number in numbers]
        try:
            answer = self.consumer.committed(asked, self._config.delivery_timeout.total_seconds())
        except KafkaException as error:
            raise NotStarted(error.args[0].str(), error.args[0]) from None
        for one in answer:
            if one.error is not None:
                raise NotStarted(one.error.str(), one.error)
        ends = {one.partition: one.offset for one in answer}
        self._fetched = deque(one for one in self._fetched if one.offset() >= ends[one.partition()])

    def commit_if_due(self) -> None:
        """Commit skipped offsets, after the configured time or number of records."""
        waited = time.monotonic() - self.offsets.committed_at
        is_time = waited >= self._config.commit_interval.total_seconds()
        if is_time or self.offsets.skipped_records >= self._config.max_messages_per_commit:
            self.commit_skipped()

    def commit_skipped(self) -> None:
        """Commit skipped offsets."""
        if not self.offsets.skipped:
            return
        self._duty.tried(_COMMIT)
        try:
            self._commit(self.offsets.skipped)
        except NotStarted as error:
            self._warn(f"offsets of other queues' messages are not committed: {error}")
            self.offsets.committed_at = time.monotonic()  # the next try comes as late
        else:
            self._duty.succeeded(_COMMIT)
            self.offsets.committed()

    def report_lag_if_due(self) -> None:
        """Count the lag, now and then."""
        now = time.monotonic()
        if now - self._lag_reported_at >= _LAG_INTERVAL_SECONDS:
            self._lag_reported_at = now
            self._counters.lag(self, self.lag())

    def lag(self) -> int | None:
        """Return the number of records left to read, of all queues; None if that is unknown."""
        lag: int | None = None
        for partition in self.consumer.assignment():
            done = self.offsets.done.get(partition.partition, self.offsets.ends.get(partition.partition))
            try:
                is_cached = not self._is_paused
                _, end = self.consumer.get_watermark_offsets(partition, timeout=_LAG_TIMEOUT_SECONDS, cached=is_cached)
            except KafkaException:
                end = -1
            if end < 0 and self._is_paused:
                return None  # the other partitions would take as long
            if done is not None and end >= 0:
                lag = (lag or 0) + max(0, end - done)
        return lag

    def _keep(self, records: Iterable[Any]) -> None:
        read: set[int] = set()
        for record in records:
            error = record.error()
            if error is None:
                read.add(record.partition())
                self._fetched.append(record)
                if record.offset() < self.offsets.ends.get(record.partition(), 0):
                    del self.offsets.ends[record.partition()]  # the topic was made anew
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                read.add(record.partition())
                self.offsets.ends[record.partition()] = record.offset()
            else:
                config = self._config
                why = why_unreadable(error, config.kafka, config.message_topic, group_of(self._queue))
                if error.fatal() or (error.code() in MEMBER_HOPELESS and not self._duty.has_done(READ)):
                    raise QueueError(f"queue {self._queue!r} cannot be read: {why}")
                self._warn(f"reading: {why}")
        for partition in read:
            self._duty.has_read(partition)
        self._move_past_ends()

    def _move_past_taken(self, offsets: Mapping[int, int]) -> None:
        # Not by their offsets, which begin again in a topic that is made anew.
        for _ in range(self.offsets.taken_records):
            self._fetched.popleft()
        self.offsets.taken_records = 0
        self.offsets.done.update(offsets)
        self._move_past_ends()

    def _move_past_ends(self) -> None:
        done, fetched = self.offsets.done, self._fetched
        for partition, end in self.offsets.ends.items():
            # Only marks of transactions are between the last record of a partition and its end.
            if end > done.get(partition, end) and all(one.partition() != partition for one in fetched):
                self.offsets.skipped[partition] = done[partition] = end

    def _assigned(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        consumer.assign(partitions)
        self._duty.assigned((partition.partition for partition in partitions), consumer.memberid())
        # The client keeps paused what was paused in an earlier assignment, even if another member had it meanwhile.
        consumer.resume(partitions)
        self._is_paused = False

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self.commit_skipped()
        self._lost(_, partitions)

    def _dropped(self, consumer: Consumer, partitions: list[TopicPartition]) -> None:
        self._duty.assigned(())
        self._lost(consumer, partitions)

    def _lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        gone = {partition.partition for partition in partitions}
        self._fetched = deque(record for record in self._fetched if record.partition() not in gone)
        self.offsets.taken_records = 0
        for partition in gone:
            self.offsets.forget(partition)
