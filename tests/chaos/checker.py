"""The checker: it compares the messages of a `read_committed` reader with the records that the database committed.

The load numbers the records of a key 1 2 3 ... in the order in which they were committed. So of each key the reader
must see 1 2 3 ... to the last one committed, each once. Records without a key have no order, and each arrives once.

It judges each message as it arrives, so that the time of a fault is known:

    repeated    adjacent: the message of its key just before once more; distant: with others of its key in between
    reordered   a record that arrives after a later one of its key
    lost        committed, and not there at the end
    stranger    never committed
    mislabelled a repeat whose id header differs, or a new record whose id is not above the one before it
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

Lane = tuple[str, str | None]
"""(topic, key), the key None for all records without one."""

STRANGER = 10**15
"""Numbers from here on are on records of rivals, which are never committed."""


class Arrival(NamedTuple):
    """A message as the reader received it.

    Attributes:
        topic: its topic.
        key: its key, or None.
        n: its number.
        row: id of its row, from the id header; None without one.
        partition: its partition.
        offset: its offset.
        sent_at: time of its production, in seconds since the epoch.
    """

    topic: str
    key: str | None
    n: int
    row: int | None
    partition: int
    offset: int
    sent_at: float


class Violation(NamedTuple):
    """A message, or the lack of one, that breaks a promise."""

    kind: str
    topic: str
    key: str | None
    n: int
    detail: str
    sent_at: float

    def __str__(self) -> str:
        return f"{self.kind}: {self.topic}/{self.key} #{self.n} {self.detail}"


@dataclass
class _LaneState:
    """The messages of one key so far."""

    highest: int = 0
    previous: int = 0
    row: int = 0  # of the highest
    partition: int = -1
    missing: set[int] = field(default_factory=set)  # below the highest
    rows: dict[int, int] = field(default_factory=dict)  # of recent records


class Checker:
    """A judge of arrivals. Used by one thread.

    Attributes:
        received: messages received, repeats included.
        violations: those found so far; `finish` adds the losses.
    """

    def __init__(self) -> None:
        self.received = 0
        self.violations: list[Violation] = []
        self._lanes: dict[Lane, _LaneState] = defaultdict(_LaneState)
        self._keyless: dict[str, dict[int, int | None]] = defaultdict(dict)

    def see(self, arrival: Arrival) -> None:
        """Judge the next message; those of a partition come in their order."""
        self.received += 1
        if arrival.key is None:
            self._see_keyless(arrival)
        else:
            self._see_in_lane(self._lanes[arrival.topic, arrival.key], arrival)

    def finish(self, committed: Mapping[Lane, Iterable[int]]) -> None:
        """Compare with all committed records.

        Args:
            committed: numbers by lane.
        """
        for lane, numbers in committed.items():
            wanted = set(numbers)
            seen = self._seen(lane)
            for n in sorted(wanted - seen):
                self._complain("lost", lane, n, "")
            for n in sorted(seen - wanted):
                self._complain("stranger", lane, n, "was never committed")
        for lane in {*self._lanes, *((topic, None) for topic in self._keyless)} - committed.keys():
            for n in sorted(self._seen(lane)):
                self._complain("stranger", lane, n, "was never committed")

    def count(self, *kinds: str) -> int:
        """Count the violations of these kinds."""
        return sum(violation.kind in kinds for violation in self.violations)

    def _seen(self, lane: Lane) -> set[int]:
        topic, key = lane
        if key is None:
            return set(self._keyless[topic])
        state = self._lanes[lane]
        return set(range(1, state.highest + 1)) - state.missing

    def _see_keyless(self, arrival: Arrival) -> None:
        seen = self._keyless[arrival.topic]
        if arrival.n in seen:
            self._repeat("repeated (adjacent)", arrival, seen[arrival.n])
        seen[arrival.n] = arrival.row

    def _see_in_lane(self, state: _LaneState, arrival: Arrival) -> None:
        n = arrival.n
        if n >= STRANGER:
            self._blame("stranger", arrival, "was never committed")
            return
        if state.partition not in {-1, arrival.partition}:
            self._blame("reordered", arrival, f"moved from partition {state.partition} to {arrival.partition}")
        state.partition = arrival.partition
        if n > state.highest:
            state.missing.update(range(state.highest + 1, n))
            if arrival.row is None or arrival.row <= state.row:
                self._blame("mislabelled", arrival, f"row {arrival.row} after row {state.row}")
            state.highest, state.row = n, arrival.row or 0
            state.rows[n] = state.row
            state.rows.pop(n - 200, None)
        elif n in state.missing:
            state.missing.discard(n)
            self._blame("reordered", arrival, f"after #{state.highest}")
        elif n == state.previous:
            self._repeat("repeated (adjacent)", arrival, state.rows.get(n))
        else:
            self._repeat("repeated (distant)", arrival, state.rows.get(n), f"after #{state.previous}")
        state.previous = n

    def _repeat(self, kind: str, arrival: Arrival, row: int | None, detail: str = "") -> None:
        self._blame(kind, arrival, detail)
        if row is not None and row != arrival.row:
            self._blame("mislabelled", arrival, f"row {row} the first time")

    def _blame(self, kind: str, arrival: Arrival, detail: str) -> None:
        where = f"{detail} (row {arrival.row}, partition {arrival.partition}, offset {arrival.offset})"
        self.violations.append(Violation(kind, arrival.topic, arrival.key, arrival.n, where, arrival.sent_at))

    def _complain(self, kind: str, lane: Lane, n: int, detail: str) -> None:
        self.violations.append(Violation(kind, *lane, n, detail, 0.0))
