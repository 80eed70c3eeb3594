"""The harvester's part of the history: leadership events and a row of statistics each ten seconds.

Events are noted on any thread, at once, and written by the thread that counts the backlog, on its connection. They
wait in memory while the database is away, so that the history tells of an outage, too.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from outbox_core.errors import OutboxTableError, RightsMissing, StoreSilent, StoreUnavailable
from outbox_core.events import Event, LeaderAcquired, LeaderFenced, LeaderRevoked
from outbox_core.metrics import HarvestMetrics, Totals
from outbox_core.monitoring.histogram import DELIVERY_BUCKETS, quantile
from outbox_core.outage import Outage
from outbox_core.printable import printable
from outbox_core.schema import EventKind
from outbox_core.stores.interface import Backlog, HistoryStore, NewEvent, NewStatistics

_log = logging.getLogger(__name__)

STATISTICS_EVERY_SECONDS = 10.0
_PRUNE_EVERY_SECONDS = 600.0
_MOST_EVENTS = 1_000
_SILENT_PAUSE_SECONDS = 60.0  # what was not answered may be under way, and occupies a process of the server
_KINDS = {
    LeaderAcquired: EventKind.LEADER_ACQUIRED,
    LeaderRevoked: EventKind.LEADER_HANDED_OVER,
    LeaderFenced: EventKind.LEADER_FENCED,
}


class _Interval(NamedTuple):
    """The beginning of an interval of statistics."""

    at: float
    totals: Totals


class HistoryWriter:
    """The events that are not written yet, and the interval of statistics. `note` is for any thread."""

    def __init__(self, instance: str, metrics: HarvestMetrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._instance = instance
        self._metrics = metrics
        self._clock = clock
        self._events: deque[tuple[float, NewEvent]] = deque(maxlen=_MOST_EVENTS)
        self._interval: _Interval | None = None
        self._pruned_at = float("-inf")
        self._outage = Outage("writing the history", _log)
        self._write_at = float("-inf")  # not before

    def note(self, event: Event) -> None:
        """Keep a leadership event until it is written."""
        if isinstance(event, LeaderAcquired | LeaderRevoked | LeaderFenced):
            reason, term = getattr(event, "reason", ""), event.term if event.term >= 0 else None
            # It may cite another process by a name that PostgreSQL refuses, and all later events would wait behind it.
            noted = NewEvent(_KINDS[type(event)], self._instance, 0.0, printable(reason), event.leader_id, term)
            self._events.append((self._clock(), noted))

    def write(self, history: HistoryStore, backlog: Backlog | None, *, leads: bool) -> None:
        """Write what there is to write; what the database does not take now is kept for later."""
        if self._clock() < self._write_at:
            return
        try:
            self._write_events(history)
            if leads:
                self._write_statistics(history, backlog)
            else:
                self._interval = None
        except (StoreSilent, OutboxTableError, RightsMissing) as error:  # other connections may be well
            self._outage.failed(error)
            if isinstance(error, StoreSilent):
                self._write_at = self._clock() + _SILENT_PAUSE_SECONDS
            return
        except StoreUnavailable:
            return  # the harvest thread says so
        self._outage.recovered()

    def _write_events(self, history: HistoryStore) -> None:
        while self._events:
            noted_at, event = self._events[0]
            history.add_events([event._replace(age_seconds=max(0.0, self._clock() - noted_at))])
            self._events.popleft()

    def _write_statistics(self, history: HistoryStore, backlog: Backlog | None) -> None:
        at = self._clock()
        interval = self._interval
        if interval is not None and at - interval.at < STATISTICS_EVERY_SECONDS:
            return
        totals = self._metrics.totals()
        # Whatever becomes of the row: the next interval begins here.
        self._interval = _Interval(at, totals)
        if interval is None:
            return
        counts = [
            after - before
            for after, before in zip(totals.delivery_latency, interval.totals.delivery_latency, strict=True)
        ]
        history.add_statistics(
            NewStatistics(
                self._instance,
                at - interval.at,
                totals.published - interval.totals.published,
                totals.failed - interval.totals.failed,
                totals.bytes - interval.totals.bytes,
                backlog,
                quantile(0.5, DELIVERY_BUCKETS, counts),
                quantile(0.99, DELIVERY_BUCKETS, counts),
            )
        )
        if at - self._pruned_at >= _PRUNE_EVERY_SECONDS:
            self._pruned_at = at
            history.prune()
