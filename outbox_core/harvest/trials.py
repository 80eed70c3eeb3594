"""Which record made a transaction fail?

A transaction fails as a whole, and a delivery report names a batch; so a record is bad only if it fails alone. The
records of a failed transaction are set aside as a group: they stay in memory, scans leave them and their keys out, and
the harvester goes on with everything else. Between its ordinary transactions, for a bounded share of its time, it tries
groups, each in a transaction of its own:

- a group that is committed is published;
- a group that fails is split, and its parts take its place: those that delivery reports named from those that they
  did not; the large from the small, where a record was too large; else the first half from the second;
- a group of one that fails with a code that a record may be to blame for is bad.

Order is kept: the parts of a group are tried one after the other, the records of a key in their order, and a record
moves to a later part together with all that follow it in its key. What goes back to the table takes along whatever is
set aside of its keys (`drop`): else it would be overtaken.

The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterable, Sequence

from outbox_core.harvest.lanes import lane_of
from outbox_core.kafka import KafkaError
from outbox_core.ports import LaneKey, StoredRecord, bytes_of

Group = Sequence[StoredRecord]

_SHARE = 0.25
_MOST_DEBT_SECONDS = 2.0
_HUGE = 2**62
TOO_LARGE = (KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.RECORD_LIST_TOO_LARGE, KafkaError.INVALID_MSG_SIZE)


class Trials:
    """Groups of records that wait for their trial.

    Args:
        most: with more records than this, they go before any other work: they are in memory.
        most_bytes: the same for their values and headers.

    Attributes:
        let_go: whether the group that was taken last is without records that meanwhile are held or parked.
    """

    def __init__(self, most: int, most_bytes: int) -> None:
        self._most = most
        self._most_bytes = most_bytes
        self.let_go = False
        self._groups: deque[Group] = deque()
        self._records = self._bytes = 0  # in the groups
        self._credit = 0.0
        self._smallest_refused: dict[str, int] = {}  # topic -> size of the smallest record that was too large alone

    def __bool__(self) -> bool:
        return bool(self._groups)

    @property
    def records(self) -> int:
        """How many records are set aside."""
        return self._records

    @property
    def lanes(self) -> set[LaneKey]:
        """Keys that no scan may bring."""
        lanes = (lane_of(record) for group in self._groups for record in group)
        return {lane for lane in lanes if lane is not None}

    @property
    def ids(self) -> set[int]:
        """Records that are set aside."""
        return {record[0] for group in self._groups for record in group}

    @property
    def are_too_many(self) -> bool:
        """Whether so much waits in memory that nothing else may be read before a trial."""
        return self._records > self._most or self._bytes > self._most_bytes

    @property
    def have_time(self) -> bool:
        """Whether the ordinary work of the last time leaves time for a trial."""
        return self._credit >= 0

    def published(self, seconds: float) -> None:
        """So much time went into ordinary work."""
        self._credit = min(self._credit + _SHARE * seconds, 1.0)

    def tried(self, seconds: float) -> None:
        """So much time went into a trial.

        While nothing can be delivered, trials are all that is done, and may take minutes. The work of the time after
        that does not have to earn all of them.
        """
        self._credit = max(self._credit - seconds, -_MOST_DEBT_SECONDS)

    def set_aside(self, group: Group) -> None:
        """A transaction of these records failed."""
        if group:
            self._groups.append(group)
            self._count(group, 1)

    def _count(self, group: Group, sign: int) -> None:
        self._records += sign * len(group)
        self._bytes += sign * bytes_of(group)

    def next(self, is_kept_back: Callable[[StoredRecord], bool]) -> Group:
        """The next group to try, without those that meanwhile are held or parked."""
        group = self._groups.popleft()
        self._count(group, -1)
        gone = {record[0]: record for record in group if is_kept_back(record)}
        self.let_go = bool(gone)
        lanes = self.drop(gone.values())
        return [record for record in group if record[0] not in gone and lane_of(record) not in lanes]

    def drop(self, records: Iterable[StoredRecord]) -> set[LaneKey]:
        """These go back to the table: forget all others of their keys, which would overtake them. Returns the keys."""
        lanes = {lane for lane in map(lane_of, records) if lane is not None}
        if lanes and not lanes.isdisjoint(self.lanes):
            groups, self._groups = self._groups, deque()
            self._records = self._bytes = 0
            for group in groups:
                self.set_aside([record for record in group if lane_of(record) not in lanes])
        return lanes

    def put_back(self, group: Group) -> None:
        """A group that is to be tried next: it was not after all, or is a part of one that was."""
        if group:
            self._groups.appendleft(group)
            self._count(group, 1)

    def refused(self, record: StoredRecord, code: int) -> None:
        """This record is bad."""
        if code in TOO_LARGE:
            size, topic = _size(record), record[1]
            self._smallest_refused[topic] = min(size, self._smallest_refused.get(topic, size))

    def failed(self, group: Group, named: Collection[int], code: int | None) -> None:
        """A group of several failed; its parts take its place.

        Args:
            group: the records, by ascending id.
            named: ids of those of which a delivery report said that they failed.
            code: the error.
        """
        for part in reversed(self._parts(group, named, code)):
            self.put_back(part)

    def _parts(self, group: Group, named: Collection[int], code: int | None) -> list[Group]:
        chosen: Collection[int] = named
        if code in TOO_LARGE:
            sure = {record[0] for record in group if _size(record) >= self._smallest_refused.get(record[1], _HUGE)}
            if sure:
                others, suspects = _apart(group, sure)
                return [part for part in (others, *([record] for record in suspects)) if part]
            largest = max(map(_size, group))
            chosen = {record[0] for record in group if _size(record) > largest // 2}
        others, later = _apart(group, chosen)
        if others and later:
            return [others, later]
        middle = len(group) // 2
        return [group[:middle], group[middle:]]


def _apart(group: Group, chosen: Collection[int]) -> tuple[Group, Group]:
    """The others, and then the chosen with whatever follows them in their keys."""
    others: list[StoredRecord] = []
    later: list[StoredRecord] = []
    moved: set[LaneKey] = set()
    for record in group:
        lane = lane_of(record)
        if record[0] in chosen or lane in moved:
            later.append(record)
            if lane is not None:
                moved.add(lane)
        else:
            others.append(record)
    return others, later


def sizes_of(record: StoredRecord) -> dict[str, int]:
    """About as many bytes as its columns have in Kafka."""
    return {
        "kafka_key": _bytes_of(record[2]),
        "kafka_value": _bytes_of(record[3]),
        "kafka_header_keys": sum(map(_bytes_of, record[4] or ())),
        "kafka_header_values": sum(map(_bytes_of, record[5] or ())),
    }


def _bytes_of(part: bytes | str | None) -> int:
    if not isinstance(part, str):
        return len(part or b"")
    return len(part) if part.isascii() else len(part.encode())


def _size(record: StoredRecord) -> int:
    return sum(sizes_of(record).values())
