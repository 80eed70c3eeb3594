"""Writing the markers that follow a start marker: ends and keep-alives.

They are written by one idempotent producer, so those of one message arrive in their order. A message's markers all go
to the partition that is chosen when it is started, even if the topic gets more partitions meanwhile. Nothing here waits
for Kafka: what could not be delivered within the client's own delivery timeout is handed to the client again, for as
long as the consumer is open. An end marker that comes late or twice does no harm: the tracker ignores it. A keep-alive
that comes late could undo what was said after it, so it is given up once it is not wanted any more; and a marker that
Kafka takes for too large is given up at once.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

from outbox_core.kafka import KafkaError, KafkaException, Producer, make_producer
from outbox_queue.clients import producer_settings
from outbox_queue.config import QueueConfig
from outbox_queue.errors import QueueClosed

PARTITIONER = {"partitioner": "murmur2_random"}
"""Go's: a marker that is keyed by its queue lands where the Go processes' markers of that queue do."""

_ANY_PARTITION = -1
_FULL_QUEUE_WAIT_SECONDS = 0.05
_PURGE_SECONDS = 1.0

Wanted = Callable[[], bool]
"""Whether a marker still is to be delivered, though it could not be before."""

_log = logging.getLogger(__name__)


class MarkerRecord(NamedTuple):
    """A marker on its way to the marker topic."""

    partition: int
    key: bytes
    value: bytes


class MarkerKeys:
    """Which key and partition the markers of a message have.

    Args:
        config: of the queue; `marker_key` decides.
        queue: the queue's id.
        partitions: how many the marker topic has.
    """

    def __init__(self, config: QueueConfig, queue: bytes, partitions: int) -> None:
        self._by_queue = config.marker_key == "queue"
        self._queue = queue
        self._partitions = partitions

    def key(self, place: tuple[int, int]) -> bytes:
        """The record key."""
        return self._queue if self._by_queue else b"%d-%d" % place

    def partition(self, key: bytes) -> int:
        """The partition for a key; -1 leaves it to Go's partitioner, when markers are keyed by queue."""
        return _ANY_PARTITION if self._by_queue else crc32(key) % self._partitions


class MarkerWriter:
    """Writes markers, from any thread; `tend`, `flush` and `close` are for one thread at a time.

    Args:
        config: of the queue.
    """

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._topic = config.marker_topic
        self._failed: deque[tuple[MarkerRecord, Wanted | None]] = deque()
        self._is_broken = False
        self._producer: Producer | None = self._make()

    def _make(self) -> Producer:
        return make_producer({**producer_settings(self._config, linger_ms=2), **PARTITIONER})

    def write(self, record: MarkerRecord, wanted: Wanted | None = None) -> None:
        """Hand a marker to the client; waits only while its queue is full.

        Args:
            record: the marker.
            wanted: asked before it is handed to the client once more; by default, it is always wanted.

        Raises:
            QueueClosed: after `close`.
        """
        producer = self._open()
        report = self._report if wanted is None else partial(self._report, wanted=wanted)
        try:
            producer.produce(self._topic, record.value, record.key, record.partition, on_delivery=report)
        except BufferError:
            producer.poll(_FULL_QUEUE_WAIT_SECONDS)
            self._failed.append((record, wanted))
        except KafkaException as error:
            self._note(error.args[0], record, wanted)

    def tend(self) -> None:
        """Hear of failures, and hand the client again what failed."""
        self._open().poll(0)
        if self._is_broken:
            self._replace_producer()
        for _ in range(len(self._failed)):
            record, wanted = self._failed.popleft()
            if wanted is None or wanted():
                self.write(record, wanted)

    def flush(self, seconds: float) -> int:
        """Wait until everything is delivered; return how many markers are not when the time is over."""
        end = time.monotonic() + seconds
        while True:
            left = self._open().flush(max(0.0, min(0.2, end - time.monotonic())))
            if not left and not self._failed:
                return 0
            if time.monotonic() >= end:
                return left + len(self._failed)
            self.tend()

    def close(self, seconds: float) -> int:
        """`flush`, and let go of the client, whoever still refers to the writer: its threads and connections end."""
        end = time.monotonic() + seconds
        self.flush(seconds)
        producer, self._producer = self._open(), None
        if producer.flush(max(0.0, end - time.monotonic())):  # what other threads have written meanwhile counts as well
            _take_back(producer)
        return len(self._failed)

    def _open(self) -> Producer:
        producer = self._producer
        if producer is None:
            raise QueueClosed("the consumer has been closed: the marker is not written, and its message is redelivered")
        return producer

    def _report(self, error: KafkaError | None, message: Any, wanted: Wanted | None = None) -> None:
        """Only failures are reported (`delivery.report.only.error`)."""
        if error is not None:
            record = MarkerRecord(self._partition_of(message), message.key(), message.value())
            self._note(error, record, wanted)

    def _note(self, error: KafkaError, record: MarkerRecord, wanted: Wanted | None) -> None:
        self._is_broken |= error.fatal()
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            _log.error(
                "a marker of %d bytes is given up: %s; its message is redelivered", len(record.value), error.str()
            )
            return
        if not self._failed and self._producer is not None:
            _log.warning("markers could not be delivered, and are tried again: %s", error.str())
        self._failed.append((record, wanted))

    def _partition_of(self, message: Any) -> int:
        if self._config.marker_key == "queue":
            return _ANY_PARTITION
        partition: int = message.partition()
        return partition

    def _replace_producer(self) -> None:
        """After a fatal error it delivers nothing any more. What it still has comes back as failed."""
        broken, self._producer = self._open(), self._make()
        self._is_broken = False
        _log.warning("the producer of markers cannot go on, and is replaced")
        _take_back(broken)


def _take_back(producer: Producer) -> None:
    """Have what is not delivered reported as failed: its reports would be kept for ever otherwise."""
    producer.purge()
    producer.flush(_PURGE_SECONDS)
