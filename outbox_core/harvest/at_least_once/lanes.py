"""Lanes: at most one record of a key between `produce()` and the commit of its purge.

A lane belongs to one (topic, key). Its first record is *under way*: ready to be sent, sent, or acknowledged and waiting
for its purge. The others wait behind it, by ascending id. Records without a key are ready at once.

The acknowledgement is too early to move on. Suppose R0 is acknowledged, R1 is sent, and the process dies before either
is purged. The successor sends R0 R1 again: the topic has R0 R1 R0 R1, an order reversal. With lanes the worst case is
R0 R0 R1, a plain repeat.

Invariants, for any sequence of calls (proven by tests/unit/harvest/test_lanes.py):

- of each key at most one record is under way;
- records of a key become ready in the order in which they were admitted;
- `held` counts the records that were admitted and neither purged nor released, `held_bytes` their bytes.

The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import attrgetter

from outbox_core.errors import must
from outbox_core.stores.interface import LaneKey, StoredRecord, lane_of, size_of

_id_of = attrgetter("id")


def without(records: Iterable[StoredRecord], refused: Iterable[StoredRecord]) -> list[StoredRecord]:
    """Return the records without the refused ones and their followers."""
    gone = set(map(_id_of, refused))
    stopped: set[LaneKey] = set()
    kept = []
    for record in records:
        lane = lane_of(record)
        if record.id in gone:
            if lane is not None:
                stopped.add(lane)
        elif lane not in stopped:
            kept.append(record)
    return kept


class Lanes:
    """The records that a harvester has in memory, by key."""

    def __init__(self, capacity: int) -> None:
        # a soft limit: marked records are admitted however many wait in a lane
        self._capacity = capacity
        self._followers: dict[LaneKey, deque[StoredRecord] | None] = {}  # a key is here while its lane is in use
        self._ready: deque[StoredRecord] = deque()
        self._full: set[LaneKey] = set()
        self._held: dict[int, int] = {}  # id -> size
        self._held_bytes = 0

    @property
    def held(self) -> int:
        """Number of records in the lanes."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """Bytes of those records."""
        return self._held_bytes

    @property
    def full(self) -> frozenset[LaneKey]:
        """Lanes that have reached their capacity; leave their keys out of the next mark."""
        return frozenset(self._full)

    @property
    def has_ready(self) -> bool:
        """True if `take` would return a record."""
        return bool(self._ready)

    def holds_any(self, records: Sequence[StoredRecord]) -> bool:
        """Return True if any of these records is in a lane already."""
        return not self._held.keys().isdisjoint(map(_id_of, records))

    def admit(self, records: Sequence[StoredRecord]) -> None:
        """Take in marked records, by ascending id."""
        sizes = {record.id: size_of(record) for record in records}
        expected = len(self._held) + len(records)
        self._held.update(sizes)
        self._held_bytes += sum(sizes.values())
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

    def release(self, record: StoredRecord) -> list[StoredRecord]:
        """Drop a record that is under way and not in flight any more, with its followers; return them all."""
        lane = lane_of(record)
        dropped = [record, *((self._followers.pop(lane, None) or ()) if lane is not None else ())]
        if lane is not None:
            self._full.discard(lane)
        self._forget(dropped)
        return dropped

    def release_followers(self, record: StoredRecord) -> list[StoredRecord]:
        """Drop and return the records behind one that stays under way."""
        lane = lane_of(record)
        followers = self._followers.get(lane) if lane is not None else None
        if lane is None or not followers:
            return []
        self._followers[lane] = None
        self._full.discard(lane)
        self._forget(followers)
        return list(followers)

    def release_unsent(self, covers: Callable[[StoredRecord], bool]) -> list[StoredRecord]:
        """Drop and return covered records that are not taken. A record under way keeps its lane, without followers."""
        dropped = [record for record in self._ready if covers(record)]
        if dropped:
            self._ready = deque(record for record in self._ready if not covers(record))
        for record in list(dropped):
            lane = lane_of(record)
            if lane is not None:
                dropped.extend(self._followers.pop(lane, None) or ())
                self._full.discard(lane)
        for lane, followers in self._followers.items():
            if followers and covers(followers[0]):
                dropped.extend(followers)
                self._followers[lane] = None
                self._full.discard(lane)
        self._forget(dropped)
        return dropped

    def release_all(self) -> list[StoredRecord]:
        """Drop and return every record that has not been taken. A record under way keeps its lane."""
        ready = list(self._ready)
        dropped = list(ready)
        self._ready.clear()
        for record in ready:
            lane = lane_of(record)
            if lane is not None:
                dropped.extend(self._followers.pop(lane) or ())
        for lane, followers in self._followers.items():
            if followers:
                dropped.extend(followers)
                self._followers[lane] = None
        self._full.clear()
        self._forget(dropped)
        return dropped

    def _forget(self, records: Iterable[StoredRecord]) -> None:
        self._held_bytes -= sum(map(self._held.pop, map(_id_of, records), repeat(0)))
        must(self._held_bytes >= 0, "the bytes in lanes must not fall below 0; they are %d", self._held_bytes)
