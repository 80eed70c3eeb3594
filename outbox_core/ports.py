"""The seam between the harvester and the world, on one screen.

A harvester needs a place that holds records (`OutboxStore`) and somebody who says whether it may publish them
(`LeaderElector`). Both can be replaced; every implementation must pass its suite in tests/contract/.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from hashlib import sha256
from types import MappingProxyType
from typing import NamedTuple, Protocol
from uuid import UUID

from outbox_core.events import EventHandler

LaneKey = tuple[str, str]
"""(topic, key): the unit of order. A record without a key belongs to none."""

NO_LIMIT = 2**62
"""More bytes than there are."""

LONGEST_KEY_OF_HOLD = 256
"""Longer keys are known to holds by a digest: what is held must not take more memory the longer its keys are."""

KEY_DIGEST_PREFIX = "sha256:"


class HeldKey(str):
    """A key as `held_key` has it, where the key itself was not read."""

    __slots__ = ()


def held_key(key: str) -> str:
    """The key as holds and exclusions know it: itself, or a digest of it.

    A key that looks like a digest is one of those that are known by theirs, so no two keys are known by the same text.
    """
    if (len(key) <= LONGEST_KEY_OF_HOLD and not key.startswith(KEY_DIGEST_PREFIX)) or isinstance(key, HeldKey):
        return key
    return KEY_DIGEST_PREFIX + sha256(key.encode()).hexdigest()


class StoredRecord(NamedTuple):
    """A row of the outbox as the harvester sees it.

    Stores may return plain tuples that begin like this: it is a hot path, and the harvester reads them by position.

    Attributes:
        id: the row's id.
        topic: Kafka topic.
        key: Kafka key, or None.
        value: Kafka value; None is a tombstone. Text is sent as UTF-8. `Withheld` if the message would be too large:
            then its headers are not there either, and its key is a `HeldKey`.
        header_keys: names of the headers, or None for none.
        header_values: their values, parallel to `header_keys`.
        partition: explicit partition; -1 lets the partitioner decide.
        create_time: microseconds since the Unix epoch, from a scan; 0 from a mark, which has no use for it.
    """

    id: int
    topic: str
    key: str | None
    value: bytes | str | None
    header_keys: list[str] | None
    header_values: list[bytes | str | None] | None
    partition: int
    create_time: int


class Withheld:
    """Stands for the value of a record that no client would take, so that it was not read. No producer takes it either.

    Attributes:
        size: how many bytes key, value and headers have together.
        limit: how many a message may have.
    """

    __slots__ = ("limit", "size")

    def __init__(self, size: int, limit: int) -> None:
        self.size = size
        self.limit = limit

    def __len__(self) -> int:
        """What a record without its value takes in memory, near enough."""
        return WITHHELD_BYTES

    def __repr__(self) -> str:
        return f"Withheld({self.size}, {self.limit})"


WITHHELD_BYTES = 1024
HEADER_BYTES = 64
"""What a header's name or value takes in memory beside its bytes, near enough."""

_ARRAY_BYTES = 32
_ROUNDING_BYTES = 8


def size_of(record: StoredRecord) -> int:
    """What a record takes in memory, in bytes, near enough: topic, key, value and headers."""
    size = len(record[1]) + len(record[2] or "") + len(record[3] or "")
    names, values = record[4], record[5]
    if names or values:
        for texts in (names or (), values or ()):
            size += _ARRAY_BYTES + (HEADER_BYTES + _ROUNDING_BYTES) * len(texts)
            size += sum([len(text) for text in texts if text])
    return size


def bytes_of(records: Iterable[StoredRecord]) -> int:
    """What records take together; see `size_of`."""
    return sum(map(size_of, records))


class MarkedRows(NamedTuple):
    """Rows that carry some at-least-once leader's mark."""

    number: int
    first: int
    last: int


class MarkedBatch(NamedTuple):
    """What a mark did.

    Attributes:
        selected: how many rows it chose.
        records: the rows it marked, by ascending id. Fewer than `selected` means that another leader is at work on
            the same rows: nothing of this batch may be published.
    """

    selected: int
    records: Sequence[StoredRecord]


@dataclass(frozen=True)
class HoldSet:
    """What is held at a moment: read by one statement, and handed to later ones as their parameter.

    Attributes:
        topics: topics of which nothing is published.
        lanes: keys of which nothing is published, as `held_key` has them.
        ids: records without a key, or with a long one, that are not published.
        requests: of the held records those that are to go to the dead-letter topic, with what is known of their error.
        refused: of the topics those that were held for an error, with the error.
        may_change: whether the harvester can hold more, and let go of what it holds; if not, there are no requests.
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
        """Everything that is held: topics, lanes and ids."""
        return frozenset().union(self.topics, self.lanes, self.ids)

    def with_topics(self, topics: frozenset[str]) -> HoldSet:
        """The same, and some topics more."""
        return HoldSet(self.topics | topics, self.lanes, self.ids) if topics else self

    def covers(self, record: StoredRecord) -> bool:
        """Whether a record is not to be published."""
        identity, topic, key = record[:3]
        return topic in self.topics or (identity in self.ids if key is None else (topic, held_key(key)) in self.lanes)


NO_HOLDS = HoldSet()


class NewHold(NamedTuple):
    """A hold that the harvester sets.

    Attributes:
        topic: Kafka topic.
        key: key of the record, None if it has none or the topic is held.
        record_id: the record, None if the topic is held.
        reason: why, in few words.
        error: what Kafka said.
        dead_letter: whether the record is to go to the dead-letter topic.
    """

    topic: str
    key: str | None
    record_id: int | None
    reason: str
    error: str
    dead_letter: bool = False


class Backlog(NamedTuple):
    """How much waits in the outbox.

    Attributes:
        pending: number of rows; exact up to a bound, estimated from statistics beyond it.
        oldest_age_seconds: age of the row with the lowest id, 0.0 if there is none.
    """

    pending: int
    oldest_age_seconds: float


class Floor(NamedTuple):
    """An id up to which a mark or scan need not look (`outbox_core.harvest.floor` proves it).

    Attributes:
        id: nothing new will be found up to this id.
        place: where that was proven, see `Sight`. Anywhere else a store looks from the head of the table.
    """

    id: int
    place: Hashable


NO_FLOOR = Floor(-(2**63) - 1, None)
"""Look from the head of the table: below every id."""


class Sight(NamedTuple):
    """How far ids have been drawn, and who may still write a row with one of them.

    Attributes:
        last_id: no id drawn before this look is higher.
        place: one connection, and one incarnation of table and sequence; equal to nothing else, ever.
        writers: names of the transactions that were writing to the table *after* `last_id` was read. A transaction
            has one name from its first write until its rows are visible or gone, also while it is prepared.
        unusable: why ids of this table prove nothing; '' if they do.
    """

    last_id: int
    place: Hashable
    writers: frozenset[str]
    unusable: str = ""


class OpenWriter(NamedTuple):
    """A transaction that has written to the outbox and is still open.

    Attributes:
        name: as in `Sight.writers`.
        pid: of its server process; None once it is prepared.
        gid: of a prepared transaction, else None.
        age_seconds: how long ago it began, or was prepared; 0.0 if we may not know.
        application: application_name of its session.
        state: of its session, such as "idle in transaction"; '' if we may not know.
    """

    name: str
    pid: int | None
    gid: str | None
    age_seconds: float
    application: str
    state: str


class OutboxStore(Protocol):
    """One connection to the database that holds an outbox table. Used by one thread at a time.

    Every method is one short transaction of its own, raises `StoreUnavailable` when the database is away (and
    reconnects on the next call), and `OutboxTableError` when the table is not as it should be.
    """

    def check(self) -> str:
        """Look at the table; return the outbox's identity, `<database>.<schema>.<table>`."""

    def server_id(self) -> str:
        """Return an ID of the database server, the same on its physical standbys; '' where it may not be read."""

    def mark(
        self,
        leader_id: UUID,
        limit: int,
        excluding: Collection[LaneKey] = (),
        resting: Collection[int] = (),
        floor: Floor = NO_FLOOR,
        *,
        max_bytes: int = NO_LIMIT,
        holds: HoldSet = NO_HOLDS,
    ) -> MarkedBatch:
        """Mark the earliest rows above the floor not marked by `leader_id`; not what is held, nor these lanes and ids.

        At most `limit` rows, and no row once those before it take `max_bytes` (`size_of`). Returns them.

        Raises:
            RowsHeld: if a constraint keeps some rows from being marked: they are held now, and none is marked.
        """

    def purge(self, leader_id: UUID, ids: Sequence[int]) -> int:
        """Delete the rows of these ids that are still marked by `leader_id`; return how many.

        Raises:
            RowsRemain: if such rows are there all the same afterwards, as they are of `settle` and `bury`.
        """

    def reset(self, leader_id: UUID, ids: Sequence[int]) -> int:
        """Clear the mark on the rows of these ids that are still marked by `leader_id`; return how many.

        A row that a constraint keeps from being changed is held, and keeps its mark.
        """

    def scan(
        self,
        limit: int,
        in_flight: Collection[int],
        excluding: Collection[LaneKey] = (),
        floor: Floor = NO_FLOOR,
        *,
        max_bytes: int = NO_LIMIT,
        holds: HoldSet = NO_HOLDS,
    ) -> Sequence[StoredRecord]:
        """The earliest rows above the floor, by id; not what is held, nor the given ids and lanes. Changes nothing.

        Limited as `mark` is.
        """

    def sight(self) -> Sight:
        """How far ids have been drawn; then, by a second statement (alone among these methods), who is writing."""

    def describe(self, writers: Collection[str]) -> Sequence[OpenWriter]:
        """Those of these writers that are still open."""

    def settle(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete the rows of which both id and create time match, whoever marked them; return how many."""

    def holds(self) -> HoldSet | None:
        """What is held now, None if this outbox has no table of holds; `StoreUnavailable` if that may not be read."""

    def hold(self, holds: Sequence[NewHold]) -> None:
        """Hold what is not held yet."""

    def find(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        """Return the rows of these ids that are in the table, by ascending id."""

    def fetch(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        """The held rows of these ids, by ascending id, whoever marked them."""

    def bury(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete held rows of which both id and create time match, and with them their holds; return how many rows."""

    def keep(self, ids: Sequence[int], error: str) -> int:
        """Let records be held as before, as the dead-letter topic refused them; return how many."""

    def release_gone(self) -> int:
        """Delete the holds of records that are no longer there; return how many."""

    def marked(self) -> MarkedRows:
        """The rows that carry any harvester's mark; a relay's (`outbox_core.relay_marks`) do not count."""

    def hold_marked(self, limit: int) -> int:
        """Hold some of the rows that carry a harvester's mark, and clear their marks; return how many they were.

        A mark that a constraint keeps stays; its row is counted until it is held.
        """

    def release_marked(self) -> int:
        """Let go of what `hold_marked` held; return how many records."""

    def clear_marks(self) -> int:
        """Clear all marks, whosever they are, but for those that a constraint keeps; return how many."""

    def is_empty(self) -> bool:
        """Whether no row is visible."""

    def backlog(self) -> Backlog:
        """Count what waits, for metrics."""

    def close(self) -> None:
        """Close the connection. The store can be used again: it reconnects."""


class Leadership(Protocol):
    """A lease on leadership; see `outbox_core.election.leadership`."""

    @property
    def leader_id(self) -> UUID:
        """ID of this leadership, fresh at every `LeaderAcquired`."""

    @property
    def term(self) -> int:
        """Number of the claim it rests on."""

    @property
    def deadline(self) -> float:
        """When it ends unless renewed, on the clock `outbox_core.election.leadership.now`."""


class LeaderElector(Protocol):
    """Says who may publish. Runs on a thread of its own."""

    @property
    def leadership(self) -> Leadership | None:
        """The current lease, or None. May already have expired: compare its deadline with now."""

    def start(self) -> None:
        """Begin to contend. Raises if that can never work (topic, rights, settings)."""

    def stop(self) -> None:
        """Hand leadership back (`LeaderRevoked`, if held) and leave the group. Idempotent."""

    @property
    def failure(self) -> BaseException | None:
        """What ended the elector against its will, or None."""

    @property
    def trouble(self) -> str | None:
        """What keeps it from electing anybody, for people; None while it works."""


StoreFactory = Callable[[], OutboxStore]
ElectorFactory = Callable[[EventHandler], LeaderElector]
