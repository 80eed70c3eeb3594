"""The count of waiting records for the metrics, on a connection of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING

from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.outage import Outage
from outbox_core.stores.interface import Backlog, OutboxStore

if TYPE_CHECKING:
    from outbox_core.harvest.harvester import Harvester

_log = logging.getLogger(__name__)

# Where the head of the table is full of dead rows a count goes through them: at most a tenth of the time.
_PAUSE_FACTOR = 9
_TREND_SECONDS = 60.0


class Trend:
    """The deliverable records of the last minute, from which follows when there will be none."""

    def __init__(self) -> None:
        self._counts: deque[tuple[float, int]] = deque()

    def time_to_empty(self, at: float, records: int) -> float | None:
        """Note a count at a time in seconds; return the seconds until it is 0, None while it does not fall."""
        counts = self._counts
        while counts and at - counts[0][0] > _TREND_SECONDS:
            counts.popleft()
        counts.append((at, records))
        since, before = counts[0]
        if not records:
            return 0.0
        return records * (at - since) / (before - records) if before > records else None

    def forget(self) -> None:
        """Begin anew, after a time without counts."""
        self._counts.clear()


class BacklogObserver:
    """A thread that counts at intervals while its harvester leads, or while there is no leader."""

    def __init__(self, store: OutboxStore, harvester: Harvester, interval_seconds: float) -> None:
        self._store = store
        self._harvester = harvester
        self._interval = interval_seconds
        self._stopping = threading.Event()
        self._outage = Outage("counting the backlog", _log)
        self._trend = Trend()
        self._thread = threading.Thread(target=self._run, name="outbox-backlog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._observe()
            self._stopping.wait(max(self._interval, _PAUSE_FACTOR * (time.monotonic() - began)))
        self._store.close()

    def _observe(self) -> None:
        harvester = self._harvester
        harvester.metrics.kafka_up(harvester.kafka_answers)
        backlog = self._ask() if harvester.counts_backlog else None
        if backlog is None:
            self._trend.forget()
            harvester.metrics.backlog(None)
            return
        left = self._trend.time_to_empty(time.monotonic(), backlog.deliverable.number)
        harvester.metrics.backlog(backlog, left)

    def _ask(self) -> Backlog | None:
        """Return the backlog; None if it is not known, as 0 would be good news."""
        try:
            backlog = self._store.backlog()
        except StoreUnavailable:
            return None  # the harvest thread says so
        except OutboxTableError as error:
            self._outage.failed(error)
            return None
        self._outage.recovered()
        return backlog
