"""The seam between harvesters and the database: `OutboxStore`, cut by need, and the values that cross it.

Every implementation must pass tests/contract/test_store_contract.py.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from operator import attrgetter
from types import MappingProxyType
from typing import NamedTuple, Protocol
from uuid import UUID

from outbox_core.schema import EventKind

LaneKey = tuple[str, str]
"""(topic, key): the unit of order. A record without a key belongs to none."""

_id_of, _create_time_of = attrgetter("id"), attrgetter("create_time")

NO_LIMIT = 2**62
"""More bytes than there are."""

LONGEST_KEY_OF_HOLD = 256
"""Holds know longer keys by a digest: thousands of holds must fit into memory, however long their keys are."""

KEY_DIGEST_PREFIX = "sha256:"


class HeldKey(str):
    """A key in the form of `held_key`, where the key itself was not read."""

    __slots__ = ()


def held_key(key: str) -> str:
    """Return the key as holds and exclusions know it: itself, or its digest if it is long or looks like a digest."""
    if (len(key) <= LONGEST_KEY_OF_HOLD and not key.startswith(KEY_DIGEST_PREFIX)) or isinstance(key, HeldKey):
        return key
    return KEY_DIGEST_PREFIX + sha256(key.encode()).hexdigest()


class RowId(NamedTuple):
    """The identity of a row: an id alone comes back after TRUNCATE ... RESTART IDENTITY, with another create time."""

    id: int
    create_time: int


class StoredRecord(NamedTuple):
    """A row of the outbox.

    Attributes:
        id: the row's id.
        topic: Kafka topic.
        key: Kafka key, or None.
        value: Kafka value; None is a tombstone. Text is sent as UTF-8. `OversizedValue` if the message would be too
            large: then it has no headers either, and its key is a `HeldKey`.
        header_keys: names of the headers, or None.
        header_values: their values, parallel to `header_keys`.
        partition: explicit partition; -1 lets the partitioner decide.
        create_time: microseconds since the Unix epoch; 0 for a time that no clock shows.
    """

    id: int
    topic: str
    key: str | None
    value: bytes | str | None
    header_keys: list[str] | None
    header_values: list[bytes | str | None] | None
    partition: int
    create_time: int


def lane_of(record: StoredRecord) -> LaneKey | None:
    """Return the lane of a record, None if it has no key."""
    return None if record.key is None else (record.topic, record.key)


def row_id(record: StoredRecord) -> RowId:
    """Return the identity of a record's row."""
    return RowId(record.id, record.create_time)


def ids_and_times(rows: Collection[RowId | StoredRecord]) -> tuple[list[int], list[int]]:
    """Return the ids and the create times of rows, as deletions take them."""
    return list(map(_id_of, rows)), list(map(_create_time_of, rows))


LaneOrRow = LaneKey | RowId
"""A key with its topic, or the row of a record without a key: the unit that fails and waits."""


def lane_or_row(record: StoredRecord) -> LaneOrRow:
    """Return the record's lane, or its row if it has no key."""
    return lane_of(record) or row_id(record)


class OversizedValue:
    """A stand-in for a value that was not read, as no producer takes its record.

    Attributes:
        size: the bytes of key, value and headers together.
        limit: the largest size of a message.
    """

    __slots__ = ("limit", "size")

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit

    def __len__(self) -> int:
        return 1024

    def __repr__(self) -> str:
        return f"OversizedValue({self.size}, {self.limit})"


HEADER_BYTES = 64
"""The memory that a header's name or value takes beside its bytes, near enough."""

_ARRAY_BYTES = 32
_ROUNDING_BYTES = 8


def sizes_of(records: Iterable[StoredRecord]) -> list[int]:
    """Return roughly the bytes that each record takes in memory: topic, key, value and headers."""
    return [
        len(topic) + len(key or "") + len(value or "") + (_size_of_headers(names, values) if names or values else 0)
        for _, topic, key, value, names, values, _, _ in records
    ]


def _size_of_headers(*columns: Sequence[bytes | str | None] | None) -> int:
    size = 0
    for texts in columns:
        size += _ARRAY_BYTES + (HEADER_BYTES + _ROUNDING_BYTES) * len(texts or ())
        size += sum([len(text) for text in texts or () if text])
    return size


def bytes_of(records: Iterable[StoredRecord]) -> int:
    """Return the bytes that records take together; see `sizes_of`."""
    return sum(sizes_of(records))


class MarkedRows(NamedTuple):
    """Rows that carry some at-least-once leader's mark."""

    number: int
    first: int
    last: int


class MarkedBatch(NamedTuple):
    """The result of a mark.

    Attributes:
        selected: the number of rows it chose.
        records: the rows it marked, by ascending id. Fewer than `selected`, perhaps none, means that another leader
            is at work on the same rows: none of this batch may be published, and the table is not known to be empty.
    """

    selected: int
    records: Sequence[StoredRecord]


@dataclass(frozen=True)
class HoldSet:
    """All holds of an outbox at a moment: read by one statement, and handed to later ones as a parameter.

    Attributes:
        topics: topics that are held as a whole.
        lanes: keys that are held, in the form of `held_key`.
        ids: records without a key, or with a long one, that are held.
        requests: ids of the held records that go to the dead-letter topic, with their errors.
        refused: those of the topics that were held for an error, with the error.
        may_change: True if the harvester can add and delete holds; if not, there are no requests.
    """

    topics: frozenset[str] = frozenset()
    lanes: frozenset[LaneKey] = frozenset()
    ids: frozenset[int] = frozenset()
    requests: Mapping[int, str] = field(default_factory=lambda: MappingProxyType({}))
    refused: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    may_change: bool = True

    def __bool__(self) -> bool:
        return bool(self.topics or self.lanes or self.ids)

    def __len__(self) -> int:
        return len(self.topics) + len(self.lanes) + len(self.ids)

    @cached_property
    def items(self) -> frozenset[Hashable]:
        """All topics, lanes and ids."""
        return frozenset().union(self.topics, self.lanes, self.ids)

    def covers(self, record: StoredRecord) -> bool:
        """Return True if a record is held."""
        topic, key = record.topic, record.key
        return topic in self.topics or (record.id in self.ids if key is None else (topic, held_key(key)) in self.lanes)


NO_HOLDS = HoldSet()

MARKED = "marked"
"""The reason of the holds of records that an at-least-once leader may have sent."""


class NewHold(NamedTuple):
    """A hold that the harvester sets: of a topic (no `record_id`), or of a record, with its key if it has one.

    `reason` is a few words, `error` Kafka's answer; with `dead_letter` the record goes to the dead-letter topic. With
    a `create_time` it is of the row that has both: none is set if that is gone, and its id another row's.
    """

    topic: str
    key: str | None
    record_id: int | None
    reason: str
    error: str
    dead_letter: bool = False
    create_time: int | None = None


class WaitingRows(NamedTuple):
    """Rows that wait in the outbox.

    Attributes:
        number: exact up to a bound, estimated beyond it.
        oldest_age_seconds: age of the one with the lowest id, 0.0 if there is none.
        topics: the number of rows of the most frequent topics, among those that were counted.
    """

    number: int = 0
    oldest_age_seconds: float = 0.0
    topics: Mapping[str, int] = MappingProxyType({})


class Backlog(NamedTuple):
    """The waiting rows: those that may be published, and those that a hold keeps back."""

    deliverable: WaitingRows = WaitingRows()
    held: WaitingRows = WaitingRows()

    @property
    def pending(self) -> int:
        """Number of all rows."""
        return self.deliverable.number + self.held.number

    @property
    def oldest_age_seconds(self) -> float:
        """Age of the older of the first deliverable and the first held row."""
        return max(self.deliverable.oldest_age_seconds, self.held.oldest_age_seconds)


class NewEvent(NamedTuple):
    """An event of a leadership for the history: of a kind, by an instance, so many seconds ago."""

    kind: EventKind
    actor: str
    age_seconds: float
    reason: str
    leader_id: UUID
    term: int | None


class NewStatistics(NamedTuple):
    """A row of statistics: an interval of an instance, and the backlog then; see `outbox_core.retention.history`."""

    instance: str
    interval_seconds: float
    published: int
    failed: int
    published_bytes: int
    backlog: Backlog | None
    latency_p50: float | None
    latency_p99: float | None


class Floor(NamedTuple):
    """An id up to which a mark or scan need not look (`outbox_core.harvest.watermark` proves it).

    Attributes:
        id: no new row appears up to this id.
        place: the `SequenceSnapshot.place` it was proven for. In any other a store looks from the head of the table.
    """

    id: int
    place: Hashable


NO_FLOOR = Floor(-(2**63) - 1, None)
"""The head of the table: below every id."""


class SequenceSnapshot(NamedTuple):
    """The ids that were drawn, and the transactions that may still write a row with one of them.

    Attributes:
        last_id: no id drawn before the snapshot is higher.
        place: one connection, and one incarnation of table and sequence; equal to no other, ever.
        writers: names of the transactions that were writing to the table *after* `last_id` was read. A transaction
            has one name from its first write until its rows are visible or gone, also while it is prepared.
        unusable: the reason for which ids of this table prove nothing; '' if they do.
    """

    last_id: int
    place: Hashable
    writers: frozenset[str]
    unusable: str = ""


class OpenWriter(NamedTuple):
    """A transaction that has written to the outbox and is still open; `name` is as in `SequenceSnapshot.writers`.

    `pid` (of its server process) is None once it is prepared, `gid` before. `age_seconds` counts from its begin or
    preparation. Age, application and session state ("idle in transaction") are 0.0 and '' if hidden from us.
    """

    name: str
    pid: int | None
    gid: str | None
    age_seconds: float
    application: str
    state: str


class RowQuery(NamedTuple):
    """A selection of the earliest rows of the table, for a mark or a scan; `without_*` and `holds` leave rows out.

    It is made before the statement runs: a hold that is released meanwhile takes effect in the next one.

    Attributes:
        limit: the largest number of rows.
        max_bytes: no row is added once those before it take that much (`sizes_of`); one large row always fits.
        after: the floor above which rows are selected.
        without_rows: rows by id and create time; a record stands for its row.
        only_rows: the rows among which it selects, None for all.
    """

    limit: int
    max_bytes: int = NO_LIMIT
    after: Floor = NO_FLOOR
    without_keys: Collection[LaneKey] = ()
    without_rows: Collection[RowId | StoredRecord] = ()
    without_topics: Collection[str] = ()
    holds: HoldSet = NO_HOLDS
    only_rows: Collection[RowId] | None = None


class HoldStore(Protocol):
    """The table of holds of an outbox. An outbox may have none."""

    def read(self) -> HoldSet | None:
        """Return the holds, None if there is no table of them; the same object as long as they do not change.

        Raises:
            StoreUnavailable: also if the role may not read the table: a record might be held all the same.
        """

    def add(self, holds: Sequence[NewHold]) -> None:
        """Add holds, but for those that are there already, and those of rows that are gone."""

    def fetch(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        """Return the held rows of these ids, by ascending id, marked or not."""

    def refuse_dead_letters(self, ids: Sequence[int], error: str) -> int:
        """Keep records held that the dead-letter topic refused, with its error; return how many."""

    def delete_dead_lettered(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete held rows of which both id and create time match, and their holds; return how many rows.

        Raises:
            RowsRemain: as `OutboxStore.delete_published` does.
        """

    def release_gone(self) -> int:
        """Delete the holds of records that are no longer in the table; return how many.

        It is worth no wait: raise StoreUnavailable if a lock of somebody else's keeps it waiting.
        """


def may_hold(holds: HoldStore) -> bool:
    """Return True if there is a table of holds, and it may be changed."""
    found = holds.read()
    return found is not None and found.may_change


class SequenceStore(Protocol):
    """The sequence that the table's ids are drawn from, and the transactions that draw."""

    def snapshot(self) -> SequenceSnapshot:
        """Read the last id drawn; then, by a second statement (alone among all methods), the open writers."""

    def describe(self, writers: Collection[str]) -> Sequence[OpenWriter]:
        """Describe those of these writers that are still open."""


class MarkStore(Protocol):
    """The marks that at-least-once leaders left; not those of relays (`outbox_core.stores.relay_marks`)."""

    def count(self) -> MarkedRows:
        """Count the rows that carry a harvester's mark."""

    def hold(self, limit: int) -> int:
        """Hold some of the rows that carry a harvester's mark, and clear their marks; return how many.

        A mark that a constraint keeps stays; its row is counted until it is held.
        """

    def release_held(self) -> int:
        """Release the rows that `hold` held; return how many."""

    def clear(self) -> int:
        """Clear all marks, relays' too, but for those that a constraint keeps; return how many."""


class HistoryStore(Protocol):
    """The history of an outbox. An outbox may have none: then nothing is written, and no error says so."""

    def add_events(self, events: Sequence[NewEvent]) -> None:
        """Write events, but for those that are there already."""

    def add_statistics(self, statistics: NewStatistics) -> None:
        """Write a row of statistics."""

    def prune(self) -> int:
        """Delete statistics and events that are too old; return how many."""


class OutboxStore(Protocol):
    """One connection to the database that holds an outbox table, and its stores of holds, sequence, marks and history.

    Used by one thread at a time. Every method is one short transaction of its own, raises `StoreUnavailable` when the
    database is away (and reconnects on the next call), and `OutboxTableError` when the table is not as it should be.
    """

    @property
    def holds(self) -> HoldStore:
        """The table of holds."""

    @property
    def sequence(self) -> SequenceStore:
        """The sequence of ids."""

    @property
    def marks(self) -> MarkStore:
        """The marks of other leaders."""

    @property
    def history(self) -> HistoryStore:
        """The history."""

    def check(self) -> str:
        """Check the table; return the outbox's identity, `<database>.<schema>.<table>`."""

    def server_id(self) -> str:
        """Return an ID of the database server, the same on its physical standbys; '' where it may not be read."""

    def mark(self, leader_id: UUID, query: RowQuery) -> MarkedBatch:
        """Mark the rows of a query that `leader_id` has not marked yet, and return them.

        Raises:
            RowsHeld: if a constraint keeps some rows from being marked: they are held now, and none is marked.
        """

    def purge(self, leader_id: UUID, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete the rows of which both id and create time match and that `leader_id` still marks; return how many.

        Raises:
            RowsRemain: if such rows are still there afterwards.
        """

    def reset(self, leader_id: UUID, ids: Sequence[int]) -> int:
        """Clear the mark of the rows of these ids that `leader_id` still marks; return how many.

        A row that a constraint keeps from being changed is held, and keeps its mark.
        """

    def find_lost(self, leader_id: UUID, known: Collection[int], query: RowQuery) -> MarkedRows:
        """Count the rows that `leader_id` marks, with other ids than known, among the first of a query, marked or not.

        `mark` never returns them: somebody has put them back into the table, or has written the mark.
        """

    def scan(self, query: RowQuery) -> Sequence[StoredRecord]:
        """Return the rows of a query, by ascending id, unchanged."""

    def delete_published(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete the rows of which both id and create time match, marked or not; return how many.

        Raises:
            RowsRemain: if such rows are still there afterwards.
        """

    def rotate_archive(self) -> int:
        """Make room in the archive for the days to come, drop days that are too old; return how many.

        0 without an archive: then published rows are gone. With one they go there by the statement that deletes them.
        """

    def find(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        """Return the rows of these ids that are in the table, by ascending id."""

    def is_empty(self) -> bool:
        """Return True if no row is visible."""

    def at_work(self, seconds: float) -> str:
        """Return what the database does for a statement of this role and program on another connection.

        `is at work on it` or `has it wait for a lock`, if that is one for `seconds` at least; '' if there is none: what
        such a statement waits for is then not the database, but the connection.
        """

    def backlog(self) -> Backlog:
        """Count the waiting rows, for metrics: by statements of their own, which see what is committed meanwhile."""

    def close(self) -> None:
        """Close the connection. The store can be used again: it reconnects."""


StoreFactory = Callable[[], OutboxStore]
