"""Records that failed and rest before they are tried again, so that they do not hold up the others.

A record with a key rests together with its key, since its followers must not overtake it. A record without one rests
alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from outbox_core.harvest.lanes import lane_of
from outbox_core.ports import LaneKey, StoredRecord

_FORGET_AFTER = 10


class Resting(NamedTuple):
    """What rests now: lanes, and ids of records without a key."""

    lanes: frozenset[LaneKey]
    identities: frozenset[int]


class Cooling:
    """Rests that double with every failure in a row, and end with the first success.

    Args:
        first: length of the first rest, in seconds.
        longest: length that rests do not exceed, in seconds.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, first: float, longest: float, clock: Callable[[], float]) -> None:
        self._first = first
        self._longest = longest
        self._clock = clock
        self._rests: dict[LaneKey | int, tuple[float, float]] = {}  # who -> (length of the rest, its end)

    def __bool__(self) -> bool:
        """Whether anybody's last attempt failed."""
        return bool(self._rests)

    def failed(self, record: StoredRecord) -> None:
        """Begin a rest, twice as long as the last one."""
        who = _who(record)
        length, _ = self._rests.get(who, (self._first / 2, 0.0))
        length = min(self._longest, length * 2)
        self._rests[who] = (length, self._clock() + length)

    def succeeded(self, records: Iterable[StoredRecord]) -> None:
        """What these records stand for works again."""
        if self._rests:
            for record in records:
                self._rests.pop(_who(record), None)

    def resting(self) -> Resting:
        """Who rests now."""
        if not self._rests:
            return Resting(frozenset(), frozenset())
        time = self._clock()
        forgotten = time - _FORGET_AFTER * self._longest  # its row may have been deleted by hand
        for who in [who for who, (_, end) in self._rests.items() if end < forgotten]:
            del self._rests[who]
        resting = [who for who, (_, end) in self._rests.items() if time < end]
        return Resting(
            frozenset(who for who in resting if not isinstance(who, int)),
            frozenset(who for who in resting if isinstance(who, int)),
        )


def _who(record: StoredRecord) -> LaneKey | int:
    return lane_of(record) or record[0]
