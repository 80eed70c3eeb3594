"""Lanes: at most one record of a key between `produce()` and the commit of its purge.

A lane belongs to one key, that is one (topic, key). Its first record is *under way*: ready to be sent, sent, or
acknowledged and waiting for its purge. The others wait behind it, by ascending id. Only when the purge of the first
one has been committed does the next one become ready.

Why until the commit of the purge, and not just until the acknowledgement? Suppose R0 is acknowledged, R1 is sent, and
the process dies before either is purged. The successor sends R0 R1 again: the topic has R0 R1 R0 R1, an order
reversal. With lanes the worst case is R0 R0 R1, a plain repeat.

Records without a key have no order to keep: they are ready at once.

Invariants, for any sequence of calls (proven by tests/unit/test_lanes.py):

- of each key at most one record is under way;
- records of a key become ready in the order in which they were admitted;
- `held` counts what was admitted and neither purged nor abandoned, `held_bytes` its bytes.

The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from itertools import repeat
from operator import itemgetter
from typing import Final

from outbox_core.ports import LaneKey, StoredRecord, size_of

_TOPIC: Final = 1
_KEY: Final = 2
_id_of = itemgetter(0)


def lane_of(record: StoredRecord) -> LaneKey | None:
    """The lane of a record, or None if it has no key."""
    key = record[_KEY]
    return None if key is None else (record[_TOPIC], key)


def without(records: Iterable[StoredRecord], refused: Iterable[StoredRecord]) -> list[StoredRecord]:
    """The records but for those that are refused, and what follows them in their keys."""
    gone = set(map(_id_of, refused))
    stopped: set[LaneKey] = set()
    kept = []
    for record in records:
        lane = lane_of(record)
        if record[0] in gone:
            if lane is not None:
                stopped.add(lane)
        elif lane not in stopped:
            kept.append(record)
    return kept


class Lanes:
    """The records that a harvester holds, by key.

    Args:
        capacity: how many records may wait in a lane before it counts as full. A soft limit: records that have been
            marked are admitted whatever the number.
    """

    def __init__(self, capacity: int) -> None:
        self._capacity = capacity
        self._followers: dict[LaneKey, deque[StoredRecord] | None] = {}  # a key is here while its lane is in use
        self._ready: deque[StoredRecord] = deque()
        self._full: set[LaneKey] = set()
        self._held: dict[int, int] = {}  # id -> size
        self._held_bytes = 0

    @property
    def held(self) -> int:
        """How many records were admitted and neither purged nor abandoned."""
        return len(self._held)

    @property
    def held_bytes(self) -> int:
        """What the values of those records take."""
        return self._held_bytes

    @property
    def full(self) -> frozenset[LaneKey]:
        """Lanes that have reached their capacity; leave their keys out of the next mark."""
        return frozenset(self._full)

    @property
    def has_ready(self) -> bool:
        """Whether `take` would return anything."""
        return bool(self._ready)

    def holds_any(self, records: Sequence[StoredRecord]) -> bool:
        """Whether any of these records is held already."""
        return not self._held.keys().isdisjoint(map(_id_of, records))

    def admit(self, records: Sequence[StoredRecord]) -> None:
        """Take in marked records, by ascending id."""
        sizes = {record[0]: size_of(record) for record in records}
        self._held.update(sizes)
        self._held_bytes += sum(sizes.values())
        lanes = self._followers
        ready = self._ready.append
        for record in records:
            key = record[_KEY]
            if key is None:
                ready(record)
                continue
            lane = (record[_TOPIC], key)
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
        """Up to `limit` records that may be sent now, in order."""
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
        """The purge of these records is committed: the next record of each key becomes ready."""
        lanes = self._followers
        self._let_go(records)
        for record in records:
            key = record[_KEY]
            if key is None:
                continue
            lane = (record[_TOPIC], key)
            followers = lanes[lane]
            if not followers:
                del lanes[lane]
                continue
            self._ready.append(followers.popleft())
            if self._full and len(followers) <= self._capacity // 2:
                self._full.discard(lane)

    def withdraw(self, record: StoredRecord) -> list[StoredRecord]:
        """Drop a record that is under way and not in flight any more, with its followers; return them all."""
        lane = lane_of(record)
        dropped = [record, *((self._followers.pop(lane, None) or ()) if lane is not None else ())]
        if lane is not None:
            self._full.discard(lane)
        self._let_go(dropped)
        return dropped

    def withdraw_followers(self, record: StoredRecord) -> list[StoredRecord]:
        """Drop and return what waits behind a record that is under way, and stays so."""
        lane = lane_of(record)
        followers = self._followers.get(lane) if lane is not None else None
        if lane is None or not followers:
            return []
        self._followers[lane] = None
        self._full.discard(lane)
        self._let_go(followers)
        return list(followers)

    def withdraw_unsent(self, covers: Callable[[StoredRecord], bool]) -> list[StoredRecord]:
        """Drop what is covered and not taken; return it. What is under way keeps its lane, without followers."""
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
        self._let_go(dropped)
        return dropped

    def abandon(self) -> list[StoredRecord]:
        """Drop every record that has not been taken, and return them. What is under way keeps its lane."""
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
        self._let_go(dropped)
        return dropped

    def _let_go(self, records: Iterable[StoredRecord]) -> None:
        self._held_bytes -= sum(map(self._held.pop, map(_id_of, records), repeat(0)))
