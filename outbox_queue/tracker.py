"""The redelivery tracker: a process's part in seeing to it that no message is forgotten.

Trackers share the partitions of the marker topic as a consumer group, so any number may run; one that dies is
replaced by the others after six seconds, one that is stopped at once. What each does is told in
`outbox_queue.tracker_loop`.
"""

from __future__ import annotations

import logging
import threading
from typing import Self

from outbox_core.metrics import Health
from outbox_queue.clients import TRACKER_GROUP, transactional_settings
from outbox_queue.config import QueueConfig
from outbox_queue.metrics import QueueMetrics
from outbox_queue.topics import ensure_topics
from outbox_queue.tracker_loop import TrackerLoop
from outbox_queue.transaction import Transaction

_AWAY_SECONDS = 30.0

_log = logging.getLogger(__name__)


class RedeliveryTracker:
    """A tracker on a thread of its own. As a context manager, started and stopped.

    Args:
        config: of the queues; the same as the consumers have.
        metrics: where to count; by default metrics of its own.
    """

    def __init__(self, config: QueueConfig, *, metrics: QueueMetrics | None = None) -> None:
        self._config = config
        self.metrics = metrics if metrics is not None else QueueMetrics()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None
        self._loop: TrackerLoop | None = None
        self._error: BaseException | None = None

    def start(self) -> None:
        """Make the topics that are missing and begin to track.

        Raises:
            InvalidConfig: if Kafka's client refuses a setting.
            QueueTopicError: if a topic is missing and cannot be made, or messages would be lost by its settings.
            KafkaUnavailable: if the cluster does not answer.
            RuntimeError: if it was started before.
        """
        if self._thread is not None:
            raise RuntimeError("a tracker is started once; make another")
        # What the client does not take is told now, not by the first redelivery.
        Transaction(transactional_settings(self._config, TRACKER_GROUP)).discard()
        ensure_topics(self._config)
        self._loop = TrackerLoop(self._config, self.metrics, self._stopping.is_set)
        self._thread = threading.Thread(target=self._run, name="outbox-queue-tracker", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask it to end: to commit how far it is, and to hand its partitions to other trackers. Returns at once."""
        self._stopping.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait until it has ended, for at most so many seconds; return whether it has.

        Raises:
            QueueError: what ended it, if that was not `stop`.
        """
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
        """Whether it was asked to end."""
        return self._stopping.is_set()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
        if not self.join(self._config.close_timeout.total_seconds()):
            _log.warning("the tracker does not end: Kafka does not answer; left to itself")

    @property
    def is_caught_up(self) -> bool:
        """Whether it has its partitions, if any, and has read them to the end."""
        return self._loop is not None and self._loop.is_caught_up

    @property
    def in_progress(self) -> int:
        """How many messages are unfinished in its partitions, as far as it has read."""
        return self._loop.in_progress if self._loop is not None else 0

    def health(self) -> Health:
        """Whether it is well, for a probe; `leader` tells whether it has partitions."""
        loop, thread = self._loop, self._thread
        if loop is None or thread is None:
            return Health(ok=False, leader=False, detail="not started")
        if not thread.is_alive():
            return Health(ok=False, leader=False, detail=f"ended: {self._error}" if self._error else "stopped")
        has_any = loop.partitions > 0
        if loop.outage.lasted_seconds > _AWAY_SECONDS:
            return Health(ok=False, leader=has_any, detail=loop.outage.describe())
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
        finally:
            loop.end()
