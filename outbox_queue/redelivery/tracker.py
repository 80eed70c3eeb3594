"""The redelivery tracker, on a thread of its own.

Trackers share the marker partitions as a consumer group. Others replace one that dies after six seconds.
"""

from __future__ import annotations

import logging
import threading
from typing import Self

from outbox_core.errors import InvariantBroken
from outbox_core.metrics import Health
from outbox_queue.config import QueueConfig
from outbox_queue.metrics import QueueMetrics
from outbox_queue.protocol.clients import TRACKER_GROUP, transactional_settings
from outbox_queue.protocol.topics import ensure_topics
from outbox_queue.protocol.transaction import transactional_producer
from outbox_queue.redelivery.loop import TrackerLoop

_AWAY_SECONDS = 30.0

_log = logging.getLogger(__name__)


class RedeliveryTracker:
    """A tracker on a thread of its own, with the consumers' settings. As a context manager, started and stopped."""

    def __init__(self, config: QueueConfig, *, metrics: QueueMetrics | None = None) -> None:
        self._config = config
        self.metrics = metrics if metrics is not None else QueueMetrics()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: TrackerLoop | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Make missing topics and begin to track. Errors are those of `Queue.consumer`, and InvalidConfig."""
        if self._thread is not None:
            raise RuntimeError("a tracker is started once; make another")
        # Settings that the client refuses raise now, not at the first redelivery.
        transactional_producer(transactional_settings(self._config, TRACKER_GROUP)).discard()
        ensure_topics(self._config)
        self._loop = TrackerLoop(self._config, self.metrics, self._stopping.is_set)
        self._thread = threading.Thread(target=self._run, name="outbox-queue-tracker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Begin to end: commit the offsets, and hand the partitions to other trackers. Returns at once."""
        self._stopping.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait at most so many seconds (None: no limit); return whether it has ended, or raise its error."""
        if self._thread is None:
            return True
        self._thread.join(timeout)
        if self._thread.is_alive():
            return False
        if self._error is not None:
            raise self._error
        return True

    @property
    def is_stopping(self) -> bool:
        """True if `stop` was called."""
        return self._stopping.is_set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if not self.join(self._config.close_timeout.total_seconds()):
            _log.warning("the tracker does not end, as Kafka does not answer, and is left behind")

    @property
    def is_caught_up(self) -> bool:
        """True if it has joined the group, and has read its partitions to their ends."""
        return self._loop is not None and self._loop.is_caught_up

    @property
    def in_progress(self) -> int:
        """Number of unfinished messages in its partitions, as far as it has read."""
        return self._loop.in_progress if self._loop is not None else 0

    def health(self) -> Health:
        """Report its health, for a probe; `leader` tells whether it has partitions."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return Health(ok=False, leader=False, detail="not started")
        if not thread.is_alive():
            return Health(
                ok=False, leader=False, detail=f"ended: {self._error}" if self._error else "stopped", alive=False
            )
        if (trouble := loop.trouble) is not None:
            return Health(ok=False, leader=False, detail=f"the tracker {trouble}")
        has_any = loop.partitions > 0
        if loop.outage.lasted_seconds > _AWAY_SECONDS:
            return Health(ok=False, leader=has_any, detail=loop.outage.describe())
        outside = loop.outside_seconds
        if outside > _AWAY_SECONDS:
            why = f"Kafka has not let it into group {TRACKER_GROUP} for {outside:.0f} s"
            return Health(ok=False, leader=False, detail=why)
        state = "caught up" if loop.is_caught_up else "catching up"
        return Health(
            ok=True, leader=has_any, detail=f"{loop.partitions} partitions, {state}, {loop.in_progress} in progress"
        )

    def _run(self) -> None:
        loop = self._loop
        assert loop is not None  # noqa: S101  `start` has made it
        try:
            loop.begin()
            while not self._stopping.is_set():
                loop.turn()
        except BaseException as error:
            self._error = error
            _log.exception("the tracker was ended by an error")
            if isinstance(error, InvariantBroken):
                loop.forget()
        finally:
            loop.end()
