"""Keys that failed and rest before they are tried again, so that they do not hold up the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from outbox_core.harvest.lanes import lane_of
from outbox_core.ports import LaneKey, StoredRecord


class Cooling:
    """Rests that double with every failure of the same lane, and end with its first success.

    Args:
        first: length of the first rest, in seconds.
        longest: length that rests do not exceed, in seconds.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, first: float, longest: float, clock: Callable[[], float]) -> None:
        self._first = first
        self._longest = longest
        self._clock = clock
        self._rests: dict[LaneKey, tuple[float, float]] = {}  # lane -> (length of its rest, end of its rest)

    def __bool__(self) -> bool:
        """Whether any lane's last attempt failed."""
        return bool(self._rests)

    def failed(self, lane: LaneKey) -> None:
        """Begin a rest, twice as long as the lane's last one."""
        length, _ = self._rests.get(lane, (self._first / 2, 0.0))
        length = min(self._longest, length * 2)
        self._rests[lane] = (length, self._clock() + length)

    def succeeded(self, records: Iterable[StoredRecord]) -> None:
        """The lanes of these records work again."""
        for record in records:
            lane = lane_of(record)
            if lane is not None:
                self._rests.pop(lane, None)

    def lanes(self) -> frozenset[LaneKey]:
        """The lanes that rest now."""
        if not self._rests:
            return frozenset()
        time = self._clock()
        return frozenset(lane for lane, (_, end) in self._rests.items() if time < end)
