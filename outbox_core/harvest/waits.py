"""Says what waits by itself: destinations that could not be reached, and records that await a trial.

They are in memory only, so neither the table nor its holds show them: rows stay, and nothing is wrong with any of them.
So the log says it when one has waited for a while, again every minute, and when the last one is over; gauges tell how
many there are at any time.

Belongs to the harvest thread.
"""

from __future__ import annotations

import logging

from outbox_core.election.leadership import now
from outbox_core.harvest.parking import LONGEST_REST_SECONDS, Parking, Place, Wait
from outbox_core.metrics import HarvestMetrics

_log = logging.getLogger(__name__)

_TELL_AFTER_SECONDS = 10.0
_TELL_AGAIN_SECONDS = 60.0
_LOOK_EVERY_SECONDS = 1.0
_NAMED = 3


class Waits:
    """What waits in one leadership or term.

    Args:
        metrics: where to count.
        parking: the closed destinations.
        longest_rest: after how many seconds each is tried again, at most.
    """

    def __init__(self, metrics: HarvestMetrics, parking: Parking, longest_rest: float = LONGEST_REST_SECONDS) -> None:
        self._metrics = metrics
        self._parking = parking
        self._longest_rest = longest_rest
        self._look_at = 0.0
        self._told_at: float | None = None
        self._set_aside_since: float | None = None

    def look(self, set_aside: int = 0) -> None:
        """See what waits now; cheap while nothing does.

        Args:
            set_aside: records of failed transactions that await a trial.
        """
        if not self._parking and not set_aside:
            if self._look_at:
                self.over()
            return
        time = now()
        if time < self._look_at:
            return
        self._look_at = time + _LOOK_EVERY_SECONDS
        self._metrics.waiting(len(self._parking), self._parking.parked + set_aside)
        self._set_aside_since = (self._set_aside_since or time) if set_aside else None
        old = [wait for wait in self._parking.waits if time - wait.since >= _TELL_AFTER_SECONDS]
        is_long = bool(old) or (set_aside and time - (self._set_aside_since or time) >= _TELL_AFTER_SECONDS)
        if is_long and (self._told_at is None or time - self._told_at >= _TELL_AGAIN_SECONDS):
            self._told_at = time
            self._tell(old, set_aside, time)

    def _tell(self, old: list[Wait], set_aside: int, time: float) -> None:
        parts = [f"{name(wait.place)} for {time - wait.since:.0f} s ({wait.why})" for wait in old[:_NAMED]]
        if len(old) > _NAMED:
            parts.append(f"{len(old) - _NAMED} more destinations")
        if set_aside:
            parts.append(f"{set_aside} records of failed transactions, to be tried in smaller ones")
        _log.warning(
            "waiting, with all records of %d keys: %s; each destination is tried again within %.0f s",
            self._parking.parked,
            "; ".join(parts),
            self._longest_rest,
        )

    def over(self) -> None:
        """Nothing waits, or nothing is known of it any more."""
        self._look_at = 0.0
        self._set_aside_since = None
        self._metrics.waiting(0, 0)
        if self._told_at is not None:
            self._told_at = None
            _log.warning("no destination is waited for any more")


def name(place: Place) -> str:
    """A destination, as logs name it."""
    topic, part = place
    if part is None:
        return f"topic {topic}"
    return f"{topic}, partition {part}" if isinstance(part, int) else f"one key of {topic}"
