"""Writing the markers that follow a start marker: ends and keep-alives.

One idempotent producer writes a message's markers in order, to the partition chosen at its start, even if the topic
gets more. It never waits for Kafka: an undelivered marker is produced again while the consumer is open. Trackers ignore
an end marker that comes late or twice; a late keep-alive could undo the marker after it, so an unwanted one is dropped,
as is a marker that Kafka takes for too large.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple
from zlib import crc32

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.clients import KafkaError, KafkaException, Producer, make_producer
from outbox_core.outage import Outage
from outbox_queue.config import QueueConfig
from outbox_queue.errors import QueueClosed
from outbox_queue.protocol.clients import PARTITIONER, producer_settings

_ANY_PARTITION = -1
_PURGE_SECONDS = 1.0
_RETRY_SECONDS = 0.05
_LOG_AGAIN_SECONDS = 60.0

IsWanted = Callable[[], bool]  # asked before an undelivered marker is sent again

_log = logging.getLogger(__name__)


class MarkerRecord(NamedTuple):
    """A marker on its way to the marker topic."""

    partition: int
    key: bytes
    value: bytes


class MarkerKeys:
    """Key and partition of a message's markers, by the setting `marker_key`."""

    def __init__(self, config: QueueConfig, queue: bytes, partitions: int) -> None:
        self._by_queue = config.marker_key == "queue"
        self._queue = queue
        self._partitions = partitions

    def key(self, place: tuple[int, int]) -> bytes:
        """Return the key of a message's markers."""
        return self._queue if self._by_queue else b"%d-%d" % place

    def partition(self, key: bytes) -> int:
        """Return the partition for a key; -1 leaves it to Go's partitioner, when markers are keyed by queue."""
        return _ANY_PARTITION if self._by_queue else crc32(key) % self._partitions


class MarkerWriter:
    """The writer of markers, for any thread; `retry_failed`, `flush` and `close` are for one thread at a time."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._topic = config.marker_topic
        self._failed: deque[tuple[MarkerRecord, IsWanted | None]] = deque()
        self._is_broken = False
        self._outage = Outage("delivering markers", _log, _LOG_AGAIN_SECONDS)
        self._producer: Producer | None = self._make()

    def _make(self) -> Producer:
        return make_producer({**producer_settings(self._config, linger_ms=2), **PARTITIONER})

    def write(self, record: MarkerRecord, is_wanted: IsWanted | None = None) -> None:
        """Hand a marker to the client. Raises `QueueClosed` after `close`."""
        producer = self._open()
        report = self._report if is_wanted is None else partial(self._report, is_wanted=is_wanted)
        partition, key, value = record
        try:
            producer.produce(self._topic, value, key, partition, report)
        except BufferError:
            self._failed.append((record, is_wanted))
            producer.poll(0)  # served reports make room
        except KafkaException as error:
            self._note(error.args[0], record, is_wanted)

    def retry_failed(self) -> None:
        """Serve delivery reports, and produce failed markers again."""
        self._open().poll(0)
        if self._is_broken:
            self._replace_producer()
        for _ in range(len(self._failed)):
            record, is_wanted = self._failed.popleft()
            if is_wanted is None or is_wanted():
                self.write(record, is_wanted)
        # Successes are not reported, and a failure takes so long at most.
        self._outage.expire_after(2 * self._config.delivery_timeout.total_seconds())

    def flush(self, timeout_seconds: float) -> int:
        """Wait until all markers are delivered; return the number of those that are not in time."""
        end = time.monotonic() + timeout_seconds
        while True:
            left = self._open().flush(max(0.0, min(0.2, end - time.monotonic())))
            if not left and not self._failed:
                return 0
            if time.monotonic() >= end:
                return left + len(self._failed)
            if self._failed:
                time.sleep(_RETRY_SECONDS)  # it may fail at once, again and again
            self.retry_failed()

    def close(self, timeout_seconds: float) -> int:
        """Flush, and let go of the client: its threads and connections end, even if the writer is referred to."""
        end = time.monotonic() + timeout_seconds
        self.flush(timeout_seconds)
        producer, self._producer = self._open(), None
        if producer.flush(max(0.0, end - time.monotonic())):  # markers that other threads wrote meanwhile count as well
            _take_back(producer)
        return len(self._failed)

    def _open(self) -> Producer:
        producer = self._producer
        if producer is None:
            raise QueueClosed("the consumer has been closed: the marker is not written, and its message is redelivered")
        return producer

    def _report(self, error: KafkaError | None, message: Any, is_wanted: IsWanted | None = None) -> None:
        if error is not None:  # only failures are reported (`delivery.report.only.error`)
            by_queue = self._config.marker_key == "queue"
            partition = _ANY_PARTITION if by_queue else message.partition()
            self._note(error, MarkerRecord(partition, message.key(), message.value()), is_wanted)

    def _note(self, error: KafkaError, record: MarkerRecord, is_wanted: IsWanted | None) -> None:
        self._is_broken |= error.fatal()
        if error.code() == KafkaError.MSG_SIZE_TOO_LARGE:
            size = len(record.value)
            _log.error("a marker of %d bytes is given up: %s; its message is redelivered", size, error.str())
            return
        if self._producer is not None:
            self._outage.failed(error.str())
        self._failed.append((record, is_wanted))

    def _replace_producer(self) -> None:
        """Go on with another client after a fatal error: the old one reports its undelivered records as failed."""
        try:
            made = self._make()
        except KafkaUnavailable as error:  # the next retry tries again
            self._outage.failed(error)
            return
        broken, self._producer = self._open(), made
        self._is_broken = False
        _log.warning("the producer of markers is broken, and is replaced")
        _take_back(broken)


def _take_back(producer: Producer) -> None:
    """Have undelivered records reported as failed: their reports would be kept for ever otherwise."""
    producer.purge()
    producer.flush(_PURGE_SECONDS)
