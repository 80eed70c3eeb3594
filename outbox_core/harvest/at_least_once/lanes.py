"""Lanes: at most one record of a key between `produce()` and the commit of its purge.

A lane belongs to one (topic, key). Its first record is *under way*: ready to be sent, sent, or acknowledged and waiting
for its purge. The others wait behind it, by ascending id. Records without a key are ready at once.

The acknowledgement is too early to move on. Suppose R0 is acknowledged, R1 is sent, and the process dies before either
is purged. The successor sends R0 R1 again: the topic has R0 R1 R0 R1, an order reversal. With lanes the worst case is
R0 R0 R1, a plain repeat.

A record that failed, or is held, is **released** to the table together with those behind it: their marks are cleared.
Until that is committed, and for as long as a mark that began earlier may still return rows of the key, none of them may
be sent: a later record would overtake a released one. So such a key, or a record without one,

- is left out of every mark that starts before the marks of its rows are cleared (`returning`);
- is filtered from the result of a mark that was under way at the release (`admit`). Those rows are released, too: where
  that mark came after their marks had been cleared, they have one again, and are on their way for a second time.

           .--------------------- the purge of its last record ---------------------.
           v                                                                        |
    in the table --mark--> ready --take--> sent --acknowledgement--> waits for its purge
           ^                 |              |
           '-- marks cleared -- returning <-'  hold, failure

Invariants, for any sequence of calls (proven by tests/unit/harvest/test_lanes.py):

- of each key at most one record is under way;
- records of a key become ready in the order of their ids;
- `held` counts the records that were admitted and neither purged nor released, `held_bytes` their bytes.

The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter

from outbox_core.errors import must
from outbox_core.stores.interface import LaneKey, LaneOrRow, RowId, StoredRecord, lane_of, lane_or_row, row_id, sizes_of

_id_of = attrgetter("id")


class Lanes:
    """The records that a harvester has in memory, by key, and the keys whose rows are on the way back to the table."""

    def __init__(self, capacity: int) -> None:
        # a soft limit: marked records are admitted however many wait in a lane
        self._capacity = capacity
        self._followers: dict[LaneKey, deque[StoredRecord] | None] = {}  # a key is here while its lane is in use
        self._ready: deque[StoredRecord] = deque()
        self._full: set[LaneKey] = set()
        self._held: dict[int, int] = {}  # id -> size
        self.held_bytes = 0
        # Rows whose marks are being cleared, with what they belong to for each time that is still to come.
        self._returning: dict[RowId, list[LaneOrRow]] = {}
        self._released: set[LaneOrRow] = set()  # since the last mark started
        self._purged: set[int] = set()  # the same

    @property
    def held(self) -> int:
        """Number of records in the lanes."""
        return len(self._held)

    @property
    def mean_bytes(self) -> int:
        """Bytes of one of them on average."""
        return self.held_bytes // len(self._held) if self._held else 0

    @property
    def full(self) -> frozenset[LaneKey]:
        """Lanes that have reached their capacity; leave their keys out of the next mark."""
        return frozenset(self._full)

    @property
    def returning(self) -> set[LaneOrRow]:
        """Keys, and rows without one, whose marks are being cleared; leave them out of the next mark, too."""
        return {item for items in self._returning.values() for item in items}

    @property
    def marked_ids(self) -> set[int]:
        """The ids of all rows that may carry our mark: those in lanes, and those whose marks are being cleared."""
        return {*self._held, *(row.id for row in self._returning)}

    @property
    def has_ready(self) -> bool:
        """True if `take` would return a record."""
        return bool(self._ready)

    def holds_id(self, identity: int) -> bool:
        """Return True if a record with this id is in a lane."""
        return identity in self._held

    def is_busy(self, row: RowId) -> bool:
        """Return True if this row is in a lane, or its mark is being cleared."""
        return row in self._returning or row.id in self._held

    def knows_any(self, records: Sequence[StoredRecord]) -> bool:
        """Return True if any of these records is in a lane already, or has been purged since the last mark started."""
        ids = list(map(_id_of, records))
        return not (self._held.keys().isdisjoint(ids) and self._purged.isdisjoint(ids))

    # -- from the table into Kafka

    def mark_starts(self) -> None:
        """Note that a mark starts, which leaves out `full` and `returning`.

        What is purged from now on it may return, if another leader's mark came before it.
        """
        self._released.clear()
        self._purged.clear()

    def admit(
        self, records: Sequence[StoredRecord], is_held: Callable[[StoredRecord], bool] | None = None
    ) -> list[StoredRecord]:
        """Take in the records of the last mark, by ascending id; return those that are released again."""
        back: list[StoredRecord] = []
        if self._released or is_held is not None:
            released = self._released
            back = [
                record
                for record in records
                if (released and lane_or_row(record) in released) or (is_held is not None and is_held(record))
            ]
        if back:
            self._return(back)
            rows = set(map(row_id, back))
            records = [record for record in records if row_id(record) not in rows]
        self._admit(records)
        return back

    def _admit(self, records: Sequence[StoredRecord]) -> None:
        sizes = sizes_of(records)
        expected = len(self._held) + len(records)
        self._held.update(zip(map(_id_of, records), sizes, strict=True))
        self.held_bytes += sum(sizes)
        must(len(self._held) == expected, "a record must be in one lane once; %d are twice", expected - len(self._held))
        lanes = self._followers
        ready = self._ready.append
        for record in records:
            key = record.key
            if key is None:
                ready(record)
                continue
            lane = (record.topic, key)
            if lane not in lanes:
                lanes[lane] = None
                ready(record)
                continue
            followers = lanes[lane]
            if followers is None:
                followers = lanes[lane] = deque()
            followers.append(record)
            if len(followers) >= self._capacity:
                self._full.add(lane)

    def take(self, limit: int) -> list[StoredRecord]:
        """Remove and return records that may be sent now, in order, up to a limit."""
        ready = self._ready
        if len(ready) <= limit:
            taken = list(ready)
            ready.clear()
            return taken
        return [ready.popleft() for _ in range(limit)]

    def put_back(self, records: Sequence[StoredRecord]) -> None:
        """Return records that were taken and not sent, in the order in which they were taken."""
        self._ready.extendleft(reversed(records))

    def purged(self, records: Sequence[StoredRecord]) -> None:
        """Make the next record of each key ready, as the purge of these is committed."""
        lanes = self._followers
        expected = len(self._held) - len(records)
        self._forget(records)
        self._purged.update(map(_id_of, records))
        strange = len(self._held) - expected
        must(not strange, "a purge must move only lanes of records under way; %d of %d are not", strange, len(records))
        for record in records:
            key = record.key
            if key is None:
                continue
            lane = (record.topic, key)
            followers = lanes[lane]
            if not followers:
                del lanes[lane]
                continue
            self._ready.append(followers.popleft())
            if self._full and len(followers) <= self._capacity // 2:
                self._full.discard(lane)

    # -- back to the table

    def turn_away(self, records: Sequence[StoredRecord]) -> Sequence[StoredRecord]:
        """Release records of the last mark that are not taken in; return them."""
        self._return(records)
        return records

    def release(self, record: StoredRecord) -> list[StoredRecord]:
        """Drop a record that is under way and not in flight any more, with its followers; return them all."""
        return self._release([record], [])

    def release_unsent(self, covers: Callable[[StoredRecord], bool]) -> list[StoredRecord]:
        """Drop and return covered records that are not taken. A record under way keeps its lane, without followers."""
        first = [record for record in self._ready if covers(record)]
        if first:
            self._ready = deque(record for record in self._ready if not covers(record))
        return self._release(first, [lane for lane, rest in self._followers.items() if rest and covers(rest[0])])

    def release_all(self) -> list[StoredRecord]:
        """Drop and return every record that has not been taken. A record under way keeps its lane."""
        first = list(self._ready)
        self._ready.clear()
        return self._release(first, [lane for lane, followers in self._followers.items() if followers])

    def reset_done(self, rows: Iterable[RowId]) -> None:
        """Note rows whose marks were cleared, once for each release."""
        for row in rows:
            items = self._returning.get(row)
            if items is not None:
                items.pop(0)
                if not items:
                    del self._returning[row]

    def _release(self, first: Iterable[StoredRecord], lanes: Iterable[LaneKey]) -> list[StoredRecord]:
        """Drop the first records of lanes with their followers, and the followers alone of other lanes."""
        dropped: list[StoredRecord] = []
        for record in first:
            dropped.append(record)
            lane = lane_of(record)
            if lane is not None:
                dropped.extend(self._followers.pop(lane, None) or ())
                self._full.discard(lane)
        for lane in lanes:
            dropped.extend(self._followers.get(lane) or ())
            if lane in self._followers:
                self._followers[lane] = None
            self._full.discard(lane)
        self._forget(dropped)
        self._return(dropped)
        return dropped

    def _return(self, records: Iterable[StoredRecord]) -> None:
        for record in records:
            item = lane_or_row(record)
            self._returning.setdefault(row_id(record), []).append(item)
            self._released.add(item)

    def _forget(self, records: Iterable[StoredRecord]) -> None:
        self.held_bytes -= sum(map(self._held.pop, map(_id_of, records), repeat(0)))
        must(self.held_bytes >= 0, "the bytes in lanes must not fall below 0; they are %d", self.held_bytes)
