"""Backoff by destination: a small map `destination -> not before`, handed to scans exactly as holds are.

A **destination** is a partition of a topic, a topic as a whole (one that does not exist), or a single key. When a
record fails for a reason that may pass, its destination is backed off, and its row stays in the table like any other.
No record is kept in memory, only

- the time before which the destination is not tried again, which grows with each failure;
- the keys that are known to go there, which scans leave out;
- the row by which it is tried (`due`). It is read from the table again then: it may be corrected, held or gone.

The arrival of that row ends the backoff, and all keys flow again. A record that may be to blame for the failure of its
batch is backed off with its key, too, for no time at all: it is tried at once, alone.

Each key fails once, before its destination is known. If a destination collects `_MOST_KEYS` of them and no record has
arrived in its topic for a while, or it or its topic `_FAR_TOO_MANY_KEYS` in any case, the whole topic is backed off
instead: the list of keys does not grow with the table. After a minute its other partitions are tried again, too.

A topic whose records end the producer, without a reason from Kafka, is a **suspect**: it is tried alone, as soon as
others were committed. `suspect` counts how often that ended the producer: after an outage, which ends producers too,
no count grows, since no others are committed meanwhile. The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from itertools import islice, takewhile
from operator import attrgetter

from outbox_core.stores.interface import LaneOrRow, RowId, StoredRecord, lane_or_row, row_id

Destination = tuple[str, int | LaneOrRow | None]
"""(topic, partition); (topic, None) for all of a topic; (topic, lane or row) for a key, or a record without one."""

_MOST_KEYS, _FAR_TOO_MANY_KEYS = 1_000, 50_000
_QUIET_SECONDS = 5.0
_WIDE_SECONDS = 60.0
_NEVER = float("inf")
LONGEST_BACKOFF_SECONDS = 10.0
"""A destination is tried again so soon after it is back, however long it was away."""


@dataclass(slots=True, eq=False)
class BackoffInfo:
    """A destination that is backed off, the time of its first failure, and the error of the last one."""

    destination: Destination
    row: RowId  # by which it is tried again
    since: float
    seconds: float
    until: float
    why: str
    widened_at: float = float("-inf")
    ends: int = 0  # of a suspect
    others_committed: bool = False  # since the last of them
    keys: list[LaneOrRow] = field(default_factory=list)


_until = attrgetter("until")

MOST_ENDS = 3
"""So many times a topic may end the producer, with commits of others between, before it is held."""


class Backoffs:
    """Destinations that are backed off, with the keys that wait for them; durations in seconds."""

    def __init__(self, first: float, longest: float, clock: Callable[[], float]) -> None:
        self._first = first
        self.longest = longest
        self._clock = clock
        self._active: dict[Destination, BackoffInfo] = {}
        self._rows: dict[RowId, BackoffInfo] = {}  # by the rows that they are tried by
        self.waiting: set[LaneOrRow] = set()  # keys, and records without one, that scans leave out
        self._topics: defaultdict[str, set[RowId]] = defaultdict(set)  # rows of each topic with a backoff
        self._arrived: dict[str, float] = {}  # time of the last arrival in each of them
        self._order: list[BackoffInfo] = []  # by `until`: of 100,000 only the first are looked at
        self._unreachable: set[RowId] = set()  # not those for which Kafka answered: a topic does not exist, for example

    def __len__(self) -> int:
        return len(self._active)

    def covers(self, record: StoredRecord) -> bool:
        """Return True if scans that start now leave a record out."""
        return (record.topic, None) in self._active or lane_or_row(record) in self.waiting

    @property
    def infos(self) -> list[BackoffInfo]:
        """The destinations that are backed off, by their first failure."""
        return sorted(self._active.values(), key=attrgetter("since"))

    @property
    def is_unreachable(self) -> bool:
        """True if Kafka could not be reached for any destination, when it was tried last."""
        return bool(self._unreachable)

    @property
    def unreachable(self) -> dict[tuple[str, int | None], float]:
        """Partitions, and topics of which it is not known which, that Kafka could not be reached for; since when."""
        found: dict[tuple[str, int | None], float] = {}
        for row in self._unreachable:
            (topic, part), since = self._rows[row].destination, self._rows[row].since
            place = topic, part if isinstance(part, int) else None
            found[place] = min(since, found.get(place, since))
        return found

    @property
    def topics(self) -> frozenset[str]:
        """Topics that scans leave out."""
        return frozenset(topic for topic in self._topics if (topic, None) in self._active)

    def next_due(self, is_busy: Callable[[RowId], bool] = lambda _: False) -> float:
        """Return the time at which the next destination is to be tried, but for those whose rows are busy."""
        return next((each.until for each in self._order if not is_busy(each.row)), _NEVER)

    def due(self, most: int, is_busy: Callable[[RowId], bool]) -> list[RowId]:
        """Return rows to try now that are not busy."""
        time = self._clock()
        due = takewhile(lambda each: each.until <= time, self._order)
        return list(islice((each.row for each in due if not is_busy(each.row)), most))

    def due_together(self, most: int) -> list[RowId]:
        """Return rows to try now in one transaction, each of another topic; a suspect's row alone."""
        time, rows = self._clock(), dict[str, RowId]()
        for each in self._order:
            topic = each.destination[0]
            if each.until > time or len(rows) >= most:
                break
            if topic not in rows and self.is_suspect(topic):
                return [*rows.values()] or [each.row]
            rows.setdefault(topic, each.row)
        return [*rows.values()]

    def failed(
        self, record: StoredRecord, destination: Destination, *, unreachable: bool = True, why: str = ""
    ) -> bool:
        """Back off a destination after a failed delivery; return True if it did not wait before."""
        row, item, whole = row_id(record), lane_or_row(record), (destination[0], None)
        is_new = destination not in self._active or not self._active[destination].seconds
        mine = self._rows.get(row)
        if mine is not None and mine.destination != destination and self._concerns_others(mine, record, destination):
            self.end(row)
            mine = None
        if mine is not None:  # tried again, in vain
            mine.why = why
            (self._unreachable.add if unreachable else self._unreachable.discard)(row)
            mine.seconds = min(self.longest, max(self._first, mine.seconds * 2))
            self._postpone(mine, self._clock() + mine.seconds)
            return is_new
        if whole in self._active:
            destination = whole
        known = self._active.get(destination)
        if known is None:
            known = self._start(row, destination, unreachable=unreachable, why=why)
        if (known.row == row or destination[1] is not None) and item not in self.waiting:
            self.waiting.add(item)
            known.keys.append(item)
        quiet_since = max(known.since, self._arrived.get(destination[0], 0.0))
        is_quiet = len(known.keys) > _MOST_KEYS and self._clock() - quiet_since > _QUIET_SECONDS
        if is_quiet or max(len(known.keys), len(self._topics[destination[0]])) > _FAR_TOO_MANY_KEYS:
            self._widen(destination)
        return is_new

    def _concerns_others(self, mine: BackoffInfo, record: StoredRecord, destination: Destination) -> bool:
        """Return True if not that which was tried is away: the record's key alone is, or not the whole topic."""
        if destination_of_its_own(record) in (mine.destination, destination):
            return True
        is_wide = mine.destination[1] is None and isinstance(destination[1], int) and not mine.ends
        return is_wide and self._clock() - mine.widened_at > _WIDE_SECONDS

    def _start(self, row: RowId, destination: Destination, *, unreachable: bool, why: str) -> BackoffInfo:
        time = self._clock()
        backoff = self._active[destination] = BackoffInfo(destination, row, time, self._first, time + self._first, why)
        self._rows[row] = backoff
        self._topics[destination[0]].add(row)
        insort(self._order, backoff, key=_until)
        if unreachable:
            self._unreachable.add(row)
        return backoff

    def _postpone(self, backoff: BackoffInfo, until: float) -> None:
        self._leave_order(backoff)
        backoff.until = until
        insort(self._order, backoff, key=_until)

    def _leave_order(self, backoff: BackoffInfo) -> None:
        del self._order[self._order.index(backoff, bisect_left(self._order, backoff.until, key=_until))]

    def try_alone(self, record: StoredRecord, why: str = "") -> None:
        """Have a record tried at once, and by itself, as it may be to blame for the failure of its batch."""
        own = destination_of_its_own(record)
        self.failed(record, own, unreachable=False, why=why)
        if own in self._active:
            self._active[own].seconds = 0.0
            self._postpone(self._active[own], self._clock())

    def suspect(self, record: StoredRecord, why: str) -> int:
        """Back off a topic that alone ended the producer; return how often it did, with commits of others between."""
        mine, whole = self._rows.get(row_id(record)), (record.topic, None)
        if mine is not None and mine.destination != whole:
            self.end(mine.row)
        self.failed(record, whole, why=why)
        backoff = self._active[whole]
        if not backoff.ends or backoff.others_committed:
            backoff.ends += 1
        backoff.others_committed = False
        return backoff.ends

    def is_suspect(self, topic: str) -> bool:
        """Return True if a topic has ended the producer."""
        backoff = self._active.get((topic, None))
        return backoff is not None and backoff.ends > 0

    def succeeded(self, records: Iterable[StoredRecord]) -> list[Destination]:
        """Note the arrival of records; return the destinations that were tried by them, and had to wait."""
        ended: list[Destination] = []
        time = self._clock()
        for record in records:
            if record.topic in self._topics:
                self._arrived[record.topic] = time
                whole = self._active.get((record.topic, None))
                if whole is not None and whole.until > time:
                    self._postpone(whole, time)
            mine = self._rows.get(row_id(record))
            if mine is not None and mine.seconds:
                ended.append(mine.destination)
            self.end(row_id(record))
        return ended

    def committed(self) -> None:
        """Note a commit: suspects of other topics are tried again, unless they are proven and cannot be held."""
        for topic in self._topics:
            backoff = self._active.get((topic, None))
            if backoff is not None and 0 < backoff.ends < MOST_ENDS and not backoff.others_committed:
                backoff.others_committed = True
                self._postpone(backoff, min(backoff.until, self._clock()))

    def end(self, row: RowId) -> None:
        """End the backoff that is tried by a row, if there is one."""
        backoff = self._rows.pop(row, None)
        if backoff is not None:
            topic, _ = backoff.destination
            del self._active[backoff.destination]
            self._free_keys(backoff)
            self._leave_order(backoff)
            self._unreachable.discard(row)
            self._topics[topic].remove(row)
            if not self._topics[topic]:
                del self._topics[topic]
                self._arrived.pop(topic, None)

    def _free_keys(self, backoff: BackoffInfo) -> None:
        self.waiting.difference_update(backoff.keys)
        backoff.keys.clear()

    def _widen(self, destination: Destination) -> None:
        """Back off the whole topic in the stead of the destination, and of all others of it."""
        backoff, whole = self._active.pop(destination), (destination[0], None)
        self._free_keys(backoff)
        for row in self._topics[destination[0]] - {backoff.row}:
            self.end(row)
        backoff.destination, backoff.widened_at = whole, self._clock()
        self._active[whole] = backoff


def destination_of_its_own(record: StoredRecord) -> Destination:
    """Return the destination that only the record and its key have."""
    return record.topic, lane_or_row(record)
