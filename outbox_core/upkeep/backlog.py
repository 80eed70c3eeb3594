"""The count of waiting records for the metrics, and the writing of the history, on a connection of its own."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import Protocol

from outbox_core.config import HarvestConfig
from outbox_core.errors import OutboxTableError, RightsMissing, StoreSilent, StoreUnavailable
from outbox_core.events import Event
from outbox_core.metrics import HarvestMetrics
from outbox_core.outage import Outage
from outbox_core.printable import plural
from outbox_core.stores.interface import Backlog, OutboxStore
from outbox_core.upkeep.history import HistoryWriter

_log = logging.getLogger(__name__)

# A count goes through up to 100,000 rows, and through dead ones at the head of the table: at most 2% of the time. But
# one that had to wait for a lock or for the database must not leave alerts blind for longer than a minute.
_PAUSE_FACTOR = 49
_LONGEST_PAUSE_SECONDS = 60.0
_TREND_SECONDS = 60.0
_LAST_WRITE_SECONDS = 2.0
_SERVER_EVERY_SECONDS = 60.0
_ROTATE_EVERY_SECONDS = 3600.0
_ROTATE_AGAIN_SECONDS = 60.0
_HAS_MOVED = (
    "the database was upgraded (pg_upgrade) or moved under this harvester: the server's system identifier was %s and "
    "is %s. It goes on publishing; new members refuse to join it. Restart all harvesters, with exactly-once delivery "
    "the first one with --accept-moved"
)


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


class ObservedHarvester(Protocol):
    """A harvester as its observer sees it."""

    config: HarvestConfig
    metrics: HarvestMetrics

    @property
    def is_leader(self) -> bool:
        """True if it leads."""

    @property
    def kafka_answers(self) -> bool | None:
        """True if Kafka has answered lately; None if that is not known yet."""

    @property
    def counts_backlog(self) -> bool:
        """True if it is for this harvester to count."""


class BacklogObserver:
    """A thread that counts at intervals while its harvester leads, or while there is no leader, and writes the history.

    It outlives the elector by a moment, to write the last event.
    """

    def __init__(
        self,
        store: OutboxStore,
        harvester: ObservedHarvester,
        interval_seconds: float,
        server_id: str,
        *,
        counts: bool = True,
    ) -> None:
        self._counts = counts
        self._look_at_server_at = float("-inf")
        self._server_id = server_id  # when the harvester started, '' if unknown
        self._store = store
        self._harvester = harvester
        self._interval = interval_seconds
        self._stopping = threading.Event()
        self._wake = threading.Event()
        self._outage = Outage("counting the backlog", _log)
        self._rotation = Outage("making partitions of the archive", _log)
        self._rotate_at = 0.0
        self._trend = Trend()
        self._history = HistoryWriter(harvester.config.name, harvester.metrics)
        self._thread = threading.Thread(target=self._run, name="outbox-backlog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def note(self, event: Event) -> None:
        """Have a leadership event written into the history, soon. From any thread."""
        self._history.note(event)
        self._wake.set()

    def stop(self) -> None:
        """End the thread, and wait a moment for that: the last event should be written."""
        self._stopping.set()
        self._wake.set()
        if self._thread.is_alive():
            self._thread.join(_LAST_WRITE_SECONDS)
        self._harvester.metrics.backlog(None)  # from now on it is not known here

    def _run(self) -> None:
        count_at = time.monotonic()
        backlog: Backlog | None = None
        try:
            while True:
                self._wake.clear()
                stops, began = self._stopping.is_set(), time.monotonic()
                if not stops:
                    self._harvester.metrics.kafka_up(self._harvester.kafka_answers)
                if not stops and began >= count_at:
                    backlog = self._observe()
                    ended = time.monotonic()
                    pause = min(_PAUSE_FACTOR * (ended - began), _LONGEST_PAUSE_SECONDS)
                    count_at = ended + max(self._interval, pause)
                leads = self._harvester.is_leader
                self._history.write(self._store.history, backlog, leads=leads)
                if leads and not stops:
                    self._rotate()
                if stops:
                    return
                self._wake.wait(max(0.0, min(self._interval, count_at - time.monotonic())))
        finally:
            self._store.close()

    def _observe(self) -> Backlog | None:
        """Count, and tell the metrics."""
        harvester = self._harvester
        backlog = self._ask() if self._counts and harvester.counts_backlog else None
        if backlog is None:
            self._trend.forget()
            harvester.metrics.backlog(None)
            return None
        self._look_at_server()
        left = self._trend.time_to_empty(time.monotonic(), backlog.deliverable.number)
        harvester.metrics.backlog(backlog, left)
        return backlog

    def _look_at_server(self) -> None:
        """Log that the database has moved under the harvester: nothing fails before another one starts or leads."""
        if not self._server_id or time.monotonic() < self._look_at_server_at:
            return
        self._look_at_server_at = time.monotonic() + _SERVER_EVERY_SECONDS
        try:
            server_id = self._store.server_id()
        except (StoreUnavailable, OutboxTableError):
            return
        if server_id not in ("", self._server_id):
            _log.warning(_HAS_MOVED, self._server_id, server_id)
            self._server_id = server_id

    def _rotate(self) -> None:
        """Have the archive's partitions made and dropped, once an hour."""
        if time.monotonic() < self._rotate_at:
            return
        try:
            dropped = self._store.rotate_archive()
        except (StoreSilent, OutboxTableError, RightsMissing) as error:
            self._rotation.failed(error)
            self._rotate_at = time.monotonic() + _ROTATE_AGAIN_SECONDS
            return
        except StoreUnavailable:
            return  # the harvest thread says so
        self._rotation.recovered()
        self._rotate_at = time.monotonic() + _ROTATE_EVERY_SECONDS
        if dropped:
            _log.info("dropped %s of the archive", plural(dropped, "day"))

    def _ask(self) -> Backlog | None:
        """Return the backlog; None if it is not known, as 0 would be good news."""
        try:
            backlog = self._store.backlog()
        except (StoreSilent, OutboxTableError) as error:  # other connections may be well
            self._outage.failed(error)
            return None
        except StoreUnavailable:
            return None  # the harvest thread says so
        self._outage.recovered()
        return backlog
