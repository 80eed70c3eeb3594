"""What consumers and trackers keep in memory: within what their settings promise, and nothing once all is finished."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from math import ceil
from typing import Any
from unittest.mock import patch

from outbox_queue import QueueConfig
from outbox_queue.consuming import reader
from outbox_queue.consuming.consumer import Consumer
from outbox_queue.protocol import markers as wire
from outbox_queue.redelivery import in_progress
from outbox_queue.redelivery.in_progress import InProgress, Unfinished
from outbox_queue.redelivery.partition import MarkerPartition
from outbox_queue.redelivery.tracker import RedeliveryTracker
from tests.simulation.queue_oracle import Oracle
from tests.simulation.scheduling import Process, current

CONCURRENCY = 2  # of the workers of one queue
_TASKS_OF_QUEUE = CONCURRENCY + 4  # its workers, the thread that waits for them, reader, keep-alives, and its duty
_TASKS_OF_TRACKER = 3
_OLD_MS = 2000.0  # after which an entry of a heap that is not due any more must have been dropped


class Books:
    """The consumers and trackers of a run, with what they keep."""

    def __init__(self, config: QueueConfig, oracle: Oracle, queues: int) -> None:
        self._config = config
        self._oracle = oracle
        self._queues = queues
        self._consumers: list[tuple[Process, Consumer]] = []

    def opened(self, consumer: Consumer) -> None:
        """Note a consumer."""
        self._consumers = [(process, other) for process, other in self._consumers if not process.is_dead]
        self._consumers.append((current().process, consumer))

    def excess(self, trackers: Iterable[tuple[Process, RedeliveryTracker]]) -> Iterator[str]:
        """Return what exceeds its bound; the oracle must have read on."""
        for process, consumer in self._consumers:
            if not process.is_dead:
                for what, number, most in self._kept_by(consumer):
                    if number > most:
                        yield f"{process.name} keeps {number} {what}, and {most} are allowed"
        for process, tracker in trackers:
            for markers in partitions_of(tracker):
                for what in self._unjustified(markers):
                    yield f"{process.name}, marker partition {markers.number}: {what}"

    def _kept_by(self, consumer: Consumer) -> Iterator[tuple[str, int, int]]:
        """Return what a consumer keeps: what it is, the number, and the largest one that is allowed."""
        config, buffer, kept = self._config, consumer._buffer, consumer._reader._member
        yield "messages in progress", buffer.in_progress, config.max_in_progress
        yield "received messages", buffer.received, CONCURRENCY
        yield "waiting messages", len(buffer._waiting), config.receive_buffer_capacity
        yield "fetched records", len(kept._fetched), max(reader._READ_AT_ONCE, config.max_in_progress) + 1
        yield "markers on their way", _markers_of(consumer), self._most_markers

    @property
    def _most_markers(self) -> int:
        """For each message an end, and a keep-alive for each half of its timeout until the client gives one up."""
        keep_alives = self._config.delivery_timeout / (self._config.redelivery_timeout / 2)
        return (self._config.max_in_progress + CONCURRENCY) * (2 + ceil(keep_alives))

    def _unjustified(self, markers: MarkerPartition) -> Iterator[str]:
        """Return what a tracker keeps without need."""
        read_to, kept = markers.position or 0, markers._in_progress
        for entry in kept:
            marks = self._oracle.marks.get(entry.message_id, ())
            read = [
                mark.kind
                for mark in marks
                if mark.partition == markers.number and mark.offset < read_to and mark.kind != wire.KEEPALIVE
            ]
            if read[-1:] != [wire.START]:
                yield f"the message at {entry.message_id} has ended, and is kept"

    def left_by_consumers(self) -> Iterator[str]:
        """Return what consumers keep although everything is finished."""
        for process, consumer in self._consumers:
            if process.is_dead:
                continue
            for what, number in _unsettled(consumer):
                if number:
                    yield f"{process.name} keeps {number} {what}, and everything is finished"
            yield from self._tasks(process, 1 + _TASKS_OF_QUEUE * self._queues)

    def left_by_tracker(self, process: Process, tracker: RedeliveryTracker, now: float) -> Iterator[str]:
        """Return what a tracker keeps although everything is finished."""
        yield from self._tasks(process, _TASKS_OF_TRACKER)
        for markers in partitions_of(tracker):
            time = markers.time(now)
            over = [deadline for deadline, _ in markers._in_progress._by_deadline if time and deadline < time - _OLD_MS]
            if over:
                yield f"{process.name} keeps {len(over)} deadlines that are over"

    @staticmethod
    def _tasks(process: Process, most: int) -> Iterator[str]:
        if len(process._tasks) > most:
            names = sorted(task.name for task in process._tasks)
            yield f"{process.name} has {len(names)} threads, and needs {most}: {names}"


@contextmanager
def bounded(books: Books, broken: Callable[[str], None]) -> Iterator[None]:
    """Note the consumers that are made, and look at each heap of deadlines when it has grown."""
    make_consumer, put_into_heap = Consumer.__init__, InProgress._queue

    def making(self: Consumer, *arguments: Any, **options: Any) -> None:
        make_consumer(self, *arguments, **options)
        books.opened(self)

    def putting(self: InProgress, entry: Unfinished) -> None:
        before = self.heap_size
        put_into_heap(self, entry)
        most = 2 * len(self) + in_progress._SLACK + 1
        if self.heap_size > max(before, most):
            broken(f"{self.heap_size} deadlines are kept, and {most} are allowed")

    with patch.object(Consumer, "__init__", making), patch.object(InProgress, "_queue", putting):
        yield


def partitions_of(tracker: RedeliveryTracker) -> list[MarkerPartition]:
    """Return the partitions that a tracker has."""
    return [] if tracker._loop is None else [each.markers for each in tracker._loop._partitions.values()]


def _markers_of(consumer: Consumer) -> int:
    """Return the number of markers that are not known to be in Kafka."""
    writer: Any = consumer._acks._markers
    return len(writer._failed) + (0 if writer._producer is None else len(writer._producer))


def _unsettled(consumer: Consumer) -> Iterator[tuple[str, int]]:
    buffer, kept = consumer._buffer, consumer._reader._member
    yield "messages in progress", 0 if consumer._acks.is_closed else buffer.in_progress
    yield "fetched records", len(kept._fetched)
    yield "markers on their way", 0 if consumer._acks.is_closed else _markers_of(consumer)
    yield "messages in its metrics", consumer._counters._processing
