"""A report of waiting records: destinations that are backed off.

These are in memory only, so neither the table nor its holds show them. The log names them once one has waited for a
while, again every minute, and says when the last wait is over; gauges count them. Belongs to the harvest thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

from outbox_core.election.lease import now
from outbox_core.harvest.failures.backoffs import BackoffInfo, Backoffs, Destination
from outbox_core.metrics import HarvestMetrics
from outbox_core.printable import plural

_log = logging.getLogger(__name__)

_LOG_AFTER_SECONDS = 10.0
_LOG_AGAIN_SECONDS = 60.0
_INTERVAL_SECONDS = 1.0
_NAMED = 3

T = TypeVar("T")


class BackoffReport:
    """The report of one leadership."""

    def __init__(self, metrics: HarvestMetrics, backoffs: Backoffs) -> None:
        self._metrics = metrics
        self._backoffs = backoffs
        self._next_at = 0.0
        self._logged_at: float | None = None

    def update(self) -> None:
        """Set the gauges, and log if records wait for long."""
        if not self._backoffs:
            if self._next_at:
                self.end()
            return
        time = now()
        if time < self._next_at:
            return
        self._next_at = time + _INTERVAL_SECONDS
        self._metrics.waiting(len(self._backoffs), len(self._backoffs.waiting))
        seconds = {place: time - since for place, since in self._backoffs.unreachable.items()}
        self._metrics.activity.cannot_reach(seconds)
        if self._logged_at is not None and time - self._logged_at < _LOG_AGAIN_SECONDS:
            return
        old = [info for info in self._backoffs.infos if time - info.since >= _LOG_AFTER_SECONDS]
        if old:
            self._logged_at = time
            self._log(old, time)

    def _log(self, old: list[BackoffInfo], time: float) -> None:
        def wait(info: BackoffInfo) -> str:
            return f"{name(info.destination)} for {time - info.since:.0f} s ({info.why})"

        _log.warning(
            "waiting, with all records of %s: %s; each destination is tried again within %.0f s",
            plural(len(self._backoffs.waiting), "key"),
            the_first(old, wait),
            self._backoffs.longest,
        )

    def end(self) -> None:
        """Reset the gauges, as no record waits any more, or none that is known."""
        self._next_at = 0.0
        self._metrics.waiting(0, 0)
        self._metrics.activity.cannot_reach({})
        if self._logged_at is not None:
            self._logged_at = None
            _log.warning("no destination is waited for any more")


def name(destination: Destination) -> str:
    """Return a destination's name in logs."""
    topic, part = destination
    if part is None:
        return f"topic {topic}"
    return f"{topic}, partition {part}" if isinstance(part, int) else f"one key of {topic}"


def the_first(destinations: Sequence[T], text: Callable[[T], str]) -> str:
    """Join the texts of the first destinations, and count the others."""
    more = [plural(len(destinations) - _NAMED, "more destination")] if len(destinations) > _NAMED else []
    return "; ".join([*map(text, destinations[:_NAMED]), *more])
