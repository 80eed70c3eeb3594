"""A harvester beside an application's own work, for web servers above all.

    embedded = EmbeddedHarvester(config)

    @asynccontextmanager
    async def lifespan(app):
        async with embedded:
            yield

A web server should come up while Kafka is down, and live on when a harvester cannot. So a thread of its own starts the
harvester, tries again when that fails, and makes another when an error has ended it; `health` tells about it.

Threads do not survive a fork. In a process that was forked afterwards this object does nothing, and says so in its
health: make one in each worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import threading
from datetime import timedelta
from typing import Self

from outbox_core.config import HarvestConfig, redact
from outbox_core.events import EventHandler
from outbox_core.harvest.harvester import Harvester
from outbox_core.metrics import HarvestMetrics, Health
from outbox_core.outage import Outage

_LEAVE_SECONDS = 5.0

_log = logging.getLogger(__name__)


class EmbeddedHarvester:
    """A harvester that is replaced when it fails. A context manager, also for `async with`; started once.

    Args:
        config: of its harvesters.
        on_event: their event handler.
        metrics: their metrics.
        retry_after: time before the next attempt, after one that could not start or was ended by an error.
    """

    def __init__(
        self,
        config: HarvestConfig,
        on_event: EventHandler | None = None,
        *,
        metrics: HarvestMetrics | None = None,
        retry_after: timedelta = timedelta(seconds=5),
    ) -> None:
        self._config = config
        self._on_event = on_event
        self._metrics = metrics
        self._retry_seconds = retry_after.total_seconds()
        self._stopping = threading.Event()
        self._harvester: Harvester | None = None
        self._thread: threading.Thread | None = None
        self._outage = Outage("the embedded harvester", _log)
        self._pid = os.getpid()

    def start(self) -> None:
        """Begin to start the harvester, on another thread; return at once."""
        if self._thread is not None or self._stopping.is_set():
            raise RuntimeError("an embedded harvester is started once; make another, in each worker after its fork")
        self._pid = os.getpid()
        self._thread = threading.Thread(target=self._run, name="outbox-embedded", daemon=True)
        self._thread.start()

    def stop(self) -> bool:
        """Finish the records in flight, and hand leadership over; return whether it has ended in time.

        It has `drain_timeout`, `heartbeat_timeout` and five seconds.
        """
        if self._thread is None or self._is_forked:
            return True
        self._stopping.set()
        harvester = self._harvester
        if harvester is not None:
            harvester.stop()
        limits = self._config.limits
        self._thread.join((limits.drain_timeout + limits.heartbeat_timeout).total_seconds() + _LEAVE_SECONDS)
        if self._thread.is_alive():
            _log.warning("the harvester does not end, and is left behind: the next leader finds its marks")
        return not self._thread.is_alive()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    async def __aenter__(self) -> Self:
        self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.to_thread(self.stop)

    @property
    def is_leader(self) -> bool:
        """True if it leads, and may publish."""
        harvester = self._harvester
        return harvester is not None and not self._is_forked and harvester.is_leader

    def health(self) -> Health:
        """Report its health, for a probe of the application or one of its own."""
        if self._is_forked:
            detail = f"it was started in process {self._pid} before this one was forked; start one in each worker"
            return Health(ok=False, leader=False, detail=detail)
        if self._stopping.is_set():
            return Health(ok=False, leader=self.is_leader, detail="stopped")
        harvester = self._harvester
        if harvester is not None:
            return harvester.health()
        failed = self._outage.is_ongoing
        return Health(ok=not failed, leader=False, detail=self._outage.describe() if failed else "starting")

    @property
    def _is_forked(self) -> bool:
        return os.getpid() != self._pid

    def _run(self) -> None:
        while not self._stopping.is_set():
            harvester = Harvester(self._config, self._on_event, metrics=self._metrics)
            try:
                harvester.start()
                self._harvester = harvester
                self._outage.recovered()
                if self._stopping.is_set():  # `stop` may have come before it could be seen
                    harvester.stop()
                harvester.join()
            except BaseException as error:  # of an event handler that calls `sys.exit`, too, which ends only a thread
                self._harvester = None
                self._outage.failed(redact(str(error)) or type(error).__name__)
                self._stopping.wait(self._retry_seconds)
            else:
                return  # it was stopped, by `stop` or at the end of the process
