"""Bisection of failed transactions, which finds the record that made one fail.

A transaction fails as a whole, and a delivery report names a batch; so a record is bad only if it fails alone. The
records of a failed transaction stay in memory as a group; scans leave them and their keys out. Between its ordinary
transactions, for a bounded share of its time, the harvester tries groups, each in a transaction of its own:

- a group that is committed is published;
- a group that fails is split, and its parts take its place: those that delivery reports named from the others; the
  large from the small, where a record was too large; else the first half from the second;
- a group of one that fails with a code that a record may be to blame for is bad.

Parts are tried one after the other, and a record moves to a later part together with its followers. A record that is
released to the table takes along all others of its key (`release`): they would overtake it. The structure is pure and
belongs to one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from outbox_core.kafka.errors import TOO_LARGE
from outbox_core.stores.interface import LaneKey, RowId, StoredRecord, bytes_of, lane_of, row_id

Group = Sequence[StoredRecord]

_SHARE = 0.25
_MOST_DEBT_SECONDS = 2.0
_HUGE = 2**62


class Bisection:
    """Groups of records that are tried again. Beyond `most` records or `most_bytes` they precede all other work."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.is_idle = False
        self.left_some_out = False
        self._groups: deque[Group] = deque()
        self._records = self._bytes = 0  # in the groups
        self._credit = 0.0
        self._smallest_refused: dict[str, int] = {}  # topic -> size of the smallest record that was too large alone

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def records(self) -> int:
        """Number of records in memory."""
        return self._records

    @property
    def lanes(self) -> set[LaneKey]:
        """Keys that scans leave out."""
        lanes = (lane_of(record) for group in self._groups for record in group)
        return {lane for lane in lanes if lane is not None}

    @property
    def rows(self) -> set[RowId]:
        """Records that scans leave out."""
        return {row_id(record) for group in self._groups for record in group}

    @property
    def is_over_limit(self) -> bool:
        """True if a group must be tried before more is read."""
        return self._records > self._most or self._bytes > self._most_bytes

    @property
    def has_time(self) -> bool:
        """True if ordinary work leaves time for a group."""
        return self.is_idle or self._credit >= 0

    def spent_publishing(self, seconds: float) -> None:
        """Credit time spent on ordinary work."""
        self._credit = min(self._credit + _SHARE * seconds, 1.0)

    def spent_retrying(self, seconds: float) -> None:
        """Debit time spent on a group, up to a limit: while no delivery succeeds, groups may take minutes."""
        self._credit = max(self._credit - seconds, -_MOST_DEBT_SECONDS)

    def add(self, group: Group) -> None:
        """Add the records of a failed transaction."""
        if group:
            self._groups.append(group)
            self._count(group, 1)

    def put_first(self, group: Group) -> None:
        """Add a group that is tried next."""
        if group:
            self._groups.appendleft(group)
            self._count(group, 1)

    def _count(self, group: Group, sign: int) -> None:
        self._records += sign * len(group)
        self._bytes += sign * bytes_of(group)

    def next(self, is_kept_back: Callable[[StoredRecord], bool]) -> Group:
        """Remove and return the next group, without records that are held or backed off meanwhile."""
        group = self._groups.popleft()
        self._count(group, -1)
        gone = {record.id: record for record in group if is_kept_back(record)}
        self.left_some_out = bool(gone)
        lanes = self.release(gone.values())
        return [record for record in group if record.id not in gone and lane_of(record) not in lanes]

    def release(self, records: Iterable[StoredRecord]) -> set[LaneKey]:
        """Forget all records of the keys of these, which are released to the table; return the keys."""
        lanes = {lane for lane in map(lane_of, records) if lane is not None}
        if lanes and not lanes.isdisjoint(self.lanes):
            groups, self._groups = self._groups, deque()
            self._records = self._bytes = 0
            for group in groups:
                self.add([record for record in group if lane_of(record) not in lanes])
        return lanes

    def note_too_large(self, record: StoredRecord, code: int) -> None:
        """Note a record that failed alone; the size counts if it was too large."""
        if code in TOO_LARGE:
            size, topic = _size(record), record.topic
            self._smallest_refused[topic] = min(size, self._smallest_refused.get(topic, size))

    def split(self, group: Group, named: Collection[int], code: int | None) -> None:
        """Put the parts of a failed group of several in its place; delivery reports named the ids `named`."""
        for part in reversed(self._parts(group, named, code)):
            self.put_first(part)

    def _parts(self, group: Group, named: Collection[int], code: int | None) -> list[Group]:
        chosen: Collection[int] = named
        if code in TOO_LARGE:
            sure = {record.id for record in group if _size(record) >= self._smallest_refused.get(record.topic, _HUGE)}
            if sure:
                others, suspects = _apart(group, sure)
                return [part for part in (others, *([record] for record in suspects)) if part]
            largest = max(map(_size, group))
            chosen = {record.id for record in group if _size(record) > largest // 2}
        others, later = _apart(group, chosen)
        if others and later:
            return [others, later]
        middle = len(group) // 2
        return [group[:middle], group[middle:]]


def _apart(group: Group, chosen: Collection[int]) -> tuple[Group, Group]:
    others: list[StoredRecord] = []
    later: list[StoredRecord] = []
    moved: set[LaneKey] = set()
    for record in group:
        lane = lane_of(record)
        if record.id in chosen or lane in moved:
            later.append(record)
            if lane is not None:
                moved.add(lane)
        else:
            others.append(record)
    return others, later


def sizes_of(record: StoredRecord) -> dict[str, int]:
    """Return the approximate bytes of its columns in Kafka."""
    return {
        "kafka_key": _bytes_of(record.key),
        "kafka_value": _bytes_of(record.value),
        "kafka_header_keys": sum(map(_bytes_of, record.header_keys or ())),
        "kafka_header_values": sum(map(_bytes_of, record.header_values or ())),
    }


def _bytes_of(part: bytes | str | None) -> int:
    if not isinstance(part, str):
        return len(part or b"")
    return len(part) if part.isascii() else len(part.encode())


def _size(record: StoredRecord) -> int:
    return sum(sizes_of(record).values())
