"""The thread that reads the message topic for a consumer: read, start, commit, hand over.

For each batch, in this order:

1. read records; those of other queues are skipped;
2. write a start marker for each of ours, and commit the offsets (`outbox_queue.starts`);
3. only then hand them over.

If 2 fails, nothing is handed over, and the Kafka consumer is set back (`seek`) to where it was, so that the batch comes
again; or, if its partitions have been taken away, comes to whoever has them now. If the process dies after 2, the
trackers know of every message that it had.

A delayed message that is not due yet is started with the time that is left for its redelivery timeout, and not handed
over: the tracker sends it again when it is due.

Records are read only while there is room for them. The group is polled even so, with the partitions paused: a consumer
whose handlers are slow keeps its partitions. What is read beyond the room is held here, neither started nor committed.

Offsets of skipped records are committed with the next batch, after so many of them, on time, when partitions are taken
away, and at the end. At the end of a partition the offset goes past the marks of transactions too (trackers write their
copies in transactions), which are no records: otherwise an empty queue would seem to lag for ever.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from outbox_core.kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
    make_consumer,
    principal_of,
    why_unreadable,
)
from outbox_queue.clients import consumer_settings, group_of
from outbox_queue.config import QueueConfig
from outbox_queue.errors import QueueError
from outbox_queue.metrics import QueueCounters
from outbox_queue.starts import NotStarted, PlainStarts, SecondsLeft, Starts, TransactionalStarts, commit, deadline

_READ_AT_ONCE = 500
_LONGEST_WITHOUT_POLL_SECONDS = 1.0
_WAIT_SECONDS = 0.1
_LONGEST_POLL_SECONDS = 0.2  # then the thread looks whether it is to stop, and what is to be committed
_PAUSE_AFTER_FAILURE_SECONDS = 0.5
_LAG_INTERVAL_SECONDS = 2.0
_LAG_PATIENCE_SECONDS = 0.2

# What does not pass by waiting: whoever receives is told.
_HOPELESS = frozenset(
    {
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
        KafkaError.GROUP_AUTHORIZATION_FAILED,
        KafkaError.CLUSTER_AUTHORIZATION_FAILED,
        KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED,
        KafkaError.INCONSISTENT_GROUP_PROTOCOL,
        KafkaError.INVALID_TRANSACTION_TIMEOUT,
        KafkaError._AUTHENTICATION,  # noqa: SLF001  confluent's public constants begin like this
    }
)

_log = logging.getLogger(__name__)


class Fetcher:
    """Reads one queue's messages out of the message topic, on a thread of its own.

    Args:
        config: of the queue.
        queue: the queue's id.
        room: waits so many seconds for room, and says for how many messages there is.
        start: makes messages out of records: calls `write` with start markers, then hands them over.
        counters: of the queue; told its lag.
        fail: told of an error that does not pass.
    """

    def __init__(
        self,
        config: QueueConfig,
        queue: str,
        *,
        room: Callable[[float], int],
        start: Callable[[Sequence[Any], Callable[[Sequence[Any]], None], bool], None],
        counters: QueueCounters,
        fail: Callable[[BaseException], None],
    ) -> None:
        self._config = config
        self._queue = queue
        self._key = queue.encode()
        self._room = room
        self._start = start
        self._counters = counters
        self._fail = fail
        self._held: deque[Any] = deque()
        self._done: dict[int, int] = {}  # by partition: the next offset, after what is started or skipped
        self._ends: dict[int, int] = {}  # by partition: where its end was when it was reached last
        self._skipped: dict[int, int] = {}
        self._number_skipped = 0
        self._committed_at = time.monotonic()
        self._is_paused = False
        self._polled_at = 0.0
        self._measured_at = 0.0
        self._complaint = ""
        self._stopping = threading.Event()
        self._seconds_left_to_stop: SecondsLeft | None = None
        self._consumer: Consumer = make_consumer(
            consumer_settings(config, group_of(queue), {"enable.partition.eof": True})
        )
        self._starts: Starts = (
            TransactionalStarts(config, queue, self._consumer)
            if config.transactional
            else PlainStarts(config, self._consumer)
        )
        self._thread = threading.Thread(target=self._run, name=f"outbox-queue-{queue}", daemon=True)

    def start(self) -> None:
        """Subscribe, and begin to read."""
        self._consumer.subscribe([self._config.message_topic], on_revoke=self._revoked, on_lost=self._lost)
        self._thread.start()

    def ask_to_stop(self, seconds: float) -> None:
        """Begin to stop; what is under way is given up after so many seconds."""
        if self._seconds_left_to_stop is None:
            self._seconds_left_to_stop = deadline(seconds)
        self._stopping.set()

    def join(self, seconds: float) -> bool:
        """Whether the thread has ended, at the latest after so many seconds."""
        if self._thread.ident is not None:
            self._thread.join(max(0.0, seconds))
        return not self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                self._step()
            self._commit_skipped()
        except Exception as error:
            _log.exception("queue %r: reading has ended", self._queue)
            self._fail(error)
        finally:
            self._counters.lag(None)
            self._starts.close()
            self._consumer.close()
            # They and we refer to each other, and a client's threads end with its last reference.
            del self._starts, self._consumer

    def _step(self) -> None:
        room = self._room(_WAIT_SECONDS)
        if room:
            if not self._held:
                self._read(max(room, _READ_AT_ONCE))
            self._begin(room)
        self._stay_in_group()
        now = time.monotonic()
        is_time = now - self._committed_at >= self._config.commit_interval.total_seconds()
        if self._skipped and (is_time or self._number_skipped >= self._config.max_messages_per_commit):
            self._commit_skipped()
        if now - self._measured_at >= _LAG_INTERVAL_SECONDS:
            self._measured_at = now
            self._counters.lag(self._lag())

    def _lag(self) -> int | None:
        """How many records are left to read, of all queues; as far as the last answers from Kafka tell.

        While partitions are paused there are no such answers, and Kafka is asked.
        """
        lag: int | None = None
        for partition in self._consumer.assignment():
            done = self._done.get(partition.partition, self._ends.get(partition.partition))
            end = self._end_of(partition)
            if end < 0 and self._is_paused:
                return None  # to ask for the others would take as long
            if done is not None and end >= 0:
                lag = (lag or 0) + max(0, end - done)
        return lag

    def _end_of(self, partition: TopicPartition) -> int:
        """-1 if it is not known."""
        ask = self._is_paused
        try:
            _, end = self._consumer.get_watermark_offsets(partition, timeout=_LAG_PATIENCE_SECONDS, cached=not ask)
        except KafkaException:
            return -1
        return int(end)

    def _read(self, most: int) -> None:
        self._resume()
        first = self._consumer.poll(min(_LONGEST_POLL_SECONDS, self._config.next_message_timeout.total_seconds()))
        self._polled_at = time.monotonic()
        if first is None:
            return
        self._hold([first])
        if most > 1:
            self._hold(self._consumer.consume(most - 1, 0))

    def _hold(self, records: Iterable[Any]) -> None:
        for record in records:
            error = record.error()
            if error is None:
                self._held.append(record)
            elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001
                self._ends[record.partition()] = record.offset()
            else:
                self._heed(error)
        self._skip_to_ends()

    def _skip_to_ends(self) -> None:
        """Between the last record of a partition and its end there are only marks of transactions."""
        for partition, end in self._ends.items():
            if end > self._done.get(partition, end) and not self._holds(partition):
                self._skipped[partition] = self._done[partition] = end

    def _holds(self, partition: int) -> bool:
        return any(record.partition() == partition for record in self._held)

    def _heed(self, error: KafkaError) -> None:
        """Errors pass, but for those that an operator has to see to."""
        if error.fatal() or error.code() in _HOPELESS:
            config = self._config
            why = why_unreadable(error, config.kafka, config.message_topic, group_of(self._queue))
            raise QueueError(f"queue {self._queue!r} cannot be read: {why}")
        self._complain(f"reading: {error.str()}")

    def _begin(self, room: int) -> None:
        """Start as many of the records that are held as there is room for."""
        key, held = self._key, self._held
        chosen: list[Any] = []
        offsets: dict[int, int] = {}
        while held and len(chosen) < room:
            record = held.popleft()
            if record.key() == key:
                chosen.append(record)
            else:
                self._number_skipped += 1
            offsets[record.partition()] = record.offset() + 1
        if not chosen:
            self._skipped.update(offsets)
            self._done.update(offsets)
            self._skip_to_ends()
            return
        try:
            self._start(
                chosen,
                lambda markers: self._starts.write(markers, self._skipped | offsets, self._patience()),
                bool(held) or len(chosen) == room,
            )
        except NotStarted as error:
            if error.cause is not None and error.cause.code() in _HOPELESS:
                principal = principal_of(self._config.kafka)
                raise QueueError(
                    f"messages of queue {self._queue!r} cannot be started: {error} (as {principal})"
                ) from None
            self._complain(f"messages are not started yet: {error}")
            self._set_back(chosen)
            self._stopping.wait(_PAUSE_AFTER_FAILURE_SECONDS)
        else:
            self._forget_skipped()
            self._done.update(offsets)
            self._skip_to_ends()
            self._complaint = ""

    def _patience(self) -> SecondsLeft:
        """How long a batch may take: as long as its delivery may, and less once the consumer is being closed."""
        whole = deadline(self._config.delivery_timeout.total_seconds() + 1)

        def seconds_left() -> float:
            stop = self._seconds_left_to_stop
            return whole() if stop is None else min(whole(), stop())

        return seconds_left

    def _set_back(self, chosen: Sequence[Any]) -> None:
        """Have the chosen records, and those that are held, come again."""
        first: dict[int, int] = {}
        for record in (*chosen, *self._held):
            partition, offset = record.partition(), record.offset()
            first[partition] = min(offset, first.get(partition, offset))
        self._held.clear()
        for partition, offset in first.items():
            # It comes up again when it is reached again. Until then there is more before it than marks of transactions.
            self._ends.pop(partition, None)
            try:
                self._consumer.seek(TopicPartition(self._config.message_topic, partition, offset))
            except KafkaException as error:  # it has been taken away
                _log.info("partition %d is not set back: %s", partition, error.args[0].str())

    def _stay_in_group(self) -> None:
        """Poll also while nothing can be started, or the group takes this consumer for dead."""
        now = time.monotonic()
        if now - self._polled_at < _LONGEST_WITHOUT_POLL_SECONDS or self._stopping.is_set():
            return
        if not self._is_paused:
            self._consumer.pause(self._consumer.assignment())
            self._is_paused = True
        record = self._consumer.poll(0)
        self._polled_at = now
        if record is not None:
            self._hold([record])

    def _resume(self) -> None:
        if self._is_paused:
            self._consumer.resume(self._consumer.assignment())
            self._is_paused = False

    def _commit_skipped(self) -> None:
        if not self._skipped:
            return
        try:
            commit(self._config, self._consumer, self._skipped)
        except KafkaException as error:
            self._complain(f"offsets of other queues' messages are not committed: {error.args[0].str()}")
            self._committed_at = time.monotonic()
        else:
            self._forget_skipped()

    def _forget_skipped(self) -> None:
        self._skipped.clear()
        self._number_skipped = 0
        self._committed_at = time.monotonic()

    def _revoked(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        self._commit_skipped()
        self._lost(_, partitions)

    def _lost(self, _: Consumer, partitions: list[TopicPartition]) -> None:
        gone = {partition.partition for partition in partitions}
        self._held = deque(record for record in self._held if record.partition() not in gone)
        for partition in gone:
            for offsets in (self._skipped, self._done, self._ends):
                offsets.pop(partition, None)
        self._is_paused = False  # whatever is assigned next is not paused

    def _complain(self, what: str) -> None:
        """Once for each thing in a row: what fails is tried again and again."""
        if what != self._complaint:
            self._complaint = what
            _log.warning("queue %r: %s", self._queue, what)
