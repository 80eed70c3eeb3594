"""The database: an outbox table with snapshots, open writers and a sequence, and the store that the product asks.

A statement takes its snapshot when it begins and changes rows when it ends; a row that changed in between is skipped,
as UPDATE and DELETE skip it. A connection that breaks leaves the outcome of its statement unknown: it may have taken
effect, have none, or take effect later, after its client has crashed.

A session of others may lock the table against changes, as CREATE INDEX does: statements wait, up to their time-out.

Row level security may hide all rows of a table from the harvesters' role for a while. PostgreSQL then refuses the
statements of the product's sessions, which ask for that instead of seeing nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple
from uuid import UUID

from outbox_core.errors import RowsHidden, StatementCancelled, StoreSilent, StoreUnavailable
from outbox_core.stores.interface import (
    NO_FLOOR,
    Backlog,
    HoldSet,
    MarkedBatch,
    MarkedRows,
    NewHold,
    OpenWriter,
    RowQuery,
    SequenceSnapshot,
    StoredRecord,
    bytes_of,
    held_key,
    lane_of,
    row_id,
)
from outbox_core.stores.postgres.deadlines import GRACE_SECONDS, SETUP_SECONDS
from tests.simulation.network import LOST, Connection, Network, Request, Server
from tests.simulation.scheduling import Process, Scheduler, current
from tests.simulation.threads import Event

OUTBOX = "shop.public.outbox"
CANCELLED = object()
"""In the place of a statement's answer: it waited for a lock for longer than the statement timeout."""
REFUSED = object()
"""In the place of a statement's answer: a policy would hide rows, and the session wants to see all or nothing."""
_SEQUENCE_AHEAD = 32  # numbers that PostgreSQL notes as drawn before they are
_SILENT_SECONDS = 11.0  # after which keepalives and `tcp_user_timeout` give up a connection
_STATEMENT_SECONDS = 30.0  # the statement timeout
_FIND_LOST_SECONDS = 150.0  # until rows that came back with their mark are seen: two looks, a minute apart


@dataclass(slots=True, eq=False)
class Row:
    """A committed row."""

    record: StoredRecord
    leader: UUID | None = None
    version: int = 0
    freed_at: float = -1.0
    waits_since: float = 0.0  # when it was committed, or a hold of it released
    was_taken: bool = False  # from one leader by another, who may have marked it late, and cleared that


@dataclass(slots=True, eq=False)
class HoldTime:
    """The time of a hold."""

    hold: NewHold
    since: float
    until: float = float("inf")


class Standby(NamedTuple):
    """The data of a standby."""

    rows: dict[int, Row]
    last_id: int


def _has(rows: dict[int, Row], row: Row) -> bool:
    other = rows.get(row.record.id)
    return other is not None and other.record is row.record


@dataclass(eq=False)
class Database:
    """The table, its holds, and who writes to it."""

    scheduler: Scheduler
    server: Server = field(default_factory=lambda: Server("database"))
    rows: dict[int, Row] = field(default_factory=dict)
    slow_statements: float = 0.1  # the share of statements that take up to `slowest_statement`
    slowest_statement: float = 0.02  # seconds
    slow_answers: float = 0.0  # the share of statements that take effect up to `slowest_statement` before their answer
    late_changes: float = 0.0  # the share of statements that change rows whose connection breaks before they arrive
    reading: set[Process] = field(default_factory=set)  # that have a mark or scan under way
    locked_until: float = 0.0  # by a session of others, against changes
    running: dict[object, tuple[Process, float]] = field(default_factory=dict)  # statements, since when
    last_id: int = 0
    incarnation: int = 0
    writers: set[str] = field(default_factory=set)
    holds: list[NewHold] = field(default_factory=list)
    hold_version: int = 0
    hold_times: list[HoldTime] = field(default_factory=list)
    read_at: dict[str, list[tuple[float, str]]] = field(default_factory=dict)  # value -> times and processes
    deleted: deque[Row] = field(default_factory=lambda: deque(maxlen=3))  # the last ones, with their marks
    hidden: set[str] = field(default_factory=set)  # tables whose rows a policy hides, "rows" or "holds"
    on_hidden: Callable[[StoredRecord], None] = lambda _: None  # gets a row that a floor hides from its harvester
    _times: int = 0

    @property
    def visible(self) -> dict[int, Row]:
        """The rows that a policy lets the harvesters' role see."""
        return {} if "rows" in self.hidden else self.rows

    def draw(self) -> int:
        """Draw an id from the sequence."""
        self.last_id += 1
        return self.last_id

    def create_time(self) -> int:
        """Return the begin of a transaction in microseconds, like no other."""
        self._times += 1
        return int(self.scheduler.wall_clock() * 1_000_000) + self._times

    def commit(self, records: Sequence[StoredRecord]) -> None:
        """Make rows visible."""
        for record in records:
            self.rows[record.id] = Row(record, waits_since=self.scheduler.now)

    def truncate(self) -> bool:
        """Empty the table and restart its ids; False while a writer is open, whose lock is in the way."""
        if self.writers:
            return False
        self.rows.clear()
        self.deleted.clear()
        self.last_id = 0
        self.incarnation += 1
        return True

    def standby(self) -> Standby:
        """Return what a standby has that stands still from now on."""
        rows = {identity: replace(row) for identity, row in self.rows.items()}
        return Standby(rows, self.last_id + self.scheduler.random.randrange(_SEQUENCE_AHEAD + 1))

    def promote(self, standby: Standby) -> tuple[list[StoredRecord], list[StoredRecord]]:
        """Go on with a standby, on the same timeline; return the records that are lost, and those that come back."""
        lost = [row.record for row in self.rows.values() if not _has(standby.rows, row)]
        revived = [row.record for row in standby.rows.values() if not _has(self.rows, row)]
        for identity, row in standby.rows.items():
            is_same = _has(self.rows, row) and self.rows[identity].leader == row.leader
            if row.leader is not None and not is_same:
                row.waits_since = self.scheduler.now + _FIND_LOST_SECONDS  # the mark may be that of who leads now
        self.rows, self.last_id = standby.rows, standby.last_id
        self.deleted.clear()
        self.writers.clear()
        self.server.began_at = self.scheduler.now
        return lost, revived

    def put_back(self) -> list[StoredRecord]:
        """Put the rows that were deleted last into the table again, with their marks; return their records."""
        rows = [row for row in self.deleted if row.record.id not in self.rows]
        self.deleted.clear()
        for row in rows:
            row.was_taken, row.waits_since = True, self.scheduler.now + _FIND_LOST_SECONDS
            self.rows[row.record.id] = row
        return [row.record for row in rows]

    def set_holds(self, holds: list[NewHold]) -> None:
        """Replace the holds."""
        now = self.scheduler.now
        for time in self.hold_times:
            if time.hold not in holds:
                time.until = min(time.until, now)
        for hold in self.holds:
            for row in self.rows.values() if hold not in holds else ():
                row.waits_since = max(now, row.waits_since) if covers(hold, row.record) else row.waits_since
        self.hold_times += [HoldTime(hold, now) for hold in holds if hold not in self.holds]
        self.holds = holds
        self.hold_version += 1


def covers(hold: NewHold, record: StoredRecord) -> bool:
    """Tell whether a hold keeps a record back. One without a key is of an id whose record has none, either."""
    is_whole_topic = hold.key is None and hold.record_id is None
    is_same = hold.key == record.key and (hold.key is not None or hold.record_id == record.id)
    return hold.topic == record.topic and (is_whole_topic or is_same)


def holds_of(holds: Sequence[NewHold]) -> HoldSet:
    """Return the holds as a harvester knows them."""
    return HoldSet(
        topics=frozenset(hold.topic for hold in holds if hold.key is None and hold.record_id is None),
        lanes=frozenset((hold.topic, held_key(hold.key)) for hold in holds if hold.key is not None),
        ids=frozenset(hold.record_id for hold in holds if hold.key is None and hold.record_id is not None),
    )


def _exclusion(query: RowQuery) -> Callable[[StoredRecord], bool]:
    """Return the function that tells which records a query leaves out, wherever its floor is."""
    rows, keys, topics = set(map(row_id, query.without_rows)), set(query.without_keys), set(query.without_topics)
    only = None if query.only_rows is None else set(query.only_rows)

    def is_left_out(record: StoredRecord) -> bool:
        if record.topic in topics or query.holds.covers(record) or lane_of(record) in keys:
            return True
        return row_id(record) in rows or (only is not None and row_id(record) not in only)

    return is_left_out


@dataclass(frozen=True)
class _Place:
    connection: Connection | None
    incarnation: int


class Store:
    """An `OutboxStore` on the simulated database; also its `HoldStore`, `SequenceStore` and `MarkStore`."""

    def __init__(self, database: Database, network: Network) -> None:
        self._database = database
        self._network = network
        self._scheduler = database.scheduler
        self._process: Process = current().process
        self._connection: Connection | None = None
        self._is_set_up = False  # the connection
        self._known: tuple[object, HoldSet] | None = None
        self._planned_at = 0.0
        self.holds = self.sequence = self.marks = self

    # -- statements

    def _statement(self, *steps: Callable[[], Any], changes: bool = False, table: str = "rows") -> Any:
        """Run the steps of one statement on the server, with some time between them; return the last one's result."""
        if self._connection is None or self._connection.is_broken:
            self._connection, self._is_set_up = self._network.connect(self._process, self._database.server), False
        event, found, statement = Event(), [], object()

        def handle(respond: Callable[[object], None]) -> None:
            self._database.running[statement] = self._process, self._scheduler.now
            waits = self._database.locked_until - self._scheduler.now if changes else 0.0
            if waits > _STATEMENT_SECONDS:
                self._scheduler.after(_STATEMENT_SECONDS, lambda: self._end(statement, lambda: respond(CANCELLED)))
            elif waits > 0:
                self._scheduler.after(waits, lambda: self._run(statement, steps, table, respond))
            else:
                self._run(statement, steps, table, respond)

        connection = self._connection
        request = self._network.send(connection, handle, lambda answer: (found.append(answer), event.set()))
        self._process.after(_SILENT_SECONDS, lambda: self._give_up(connection, request, statement))
        patience = _STATEMENT_SECONDS + GRACE_SECONDS if self._is_set_up else SETUP_SECONDS
        if changes and self._database.late_changes and self._scheduler.random.random() < self._database.late_changes:
            self._network.break_connection(connection)
        if not event.wait(self.bounded(patience)):
            self._network.break_connection(connection)
            self._connection = None
            raise StoreSilent(f"the database has not answered for {patience:.0f} s", in_doubt=True)
        self._is_set_up = True
        self._raise_for(found[0], table)
        return found[0][0]

    def _run(
        self, statement: object, steps: Sequence[Callable[[], Any]], table: str, respond: Callable[[object], None]
    ) -> None:
        """Carry out the first step of a statement, and the others later."""
        if self.refuses(table):
            self._end(statement, lambda: respond(REFUSED))
            return
        first, *others = steps
        result = first()
        if not others:
            self._end(statement, lambda: self._answer(lambda: respond((result,))))
            return
        is_slow = self._scheduler.random.random() < self._database.slow_statements
        pause = self._database.slowest_statement if is_slow else 0.0003
        self._scheduler.after(
            pause * self._scheduler.random.random(), lambda: self._run(statement, others, table, respond)
        )

    def _end(self, statement: object, answer: Callable[[], None]) -> None:
        del self._database.running[statement]
        answer()

    def _raise_for(self, answer: object, table: str) -> None:
        """Raise the error that an answer stands for, if it does, and give up the connection."""
        if answer is LOST:
            self._connection = None
            raise StoreUnavailable("the connection is lost", in_doubt=True)
        if answer is CANCELLED:
            self.close()
            raise StatementCancelled("canceling statement due to statement timeout", in_doubt=True)
        if answer is REFUSED:
            self.close()
            raise RowsHidden(f"query would be affected by row-level security policy for table {table!r}")

    def refuses(self, table: str) -> bool:
        """Return True if PostgreSQL refuses a statement on a table: its rows are hidden, and the session wants all."""
        return table in self._database.hidden

    @staticmethod
    def bounded(seconds: float) -> float | None:
        """Return how long a statement may take: the deadline that the product's connections have of their own."""
        return seconds

    def _give_up(self, connection: Connection, request: Request, statement: object) -> None:
        """Break a connection that passes nothing; one whose server stands still, or is at work, is alive."""
        cut = self._network.cut.get((self._process, self._database.server))
        is_alive = statement in self._database.running if cut is None else cut.is_hung
        if not request.is_over and not is_alive:
            self._network.break_connection(connection)

    def _answer(self, respond: Callable[[], None]) -> None:
        """Send an answer, at once or late."""
        random, share = self._scheduler.random, self._database.slow_answers
        if share and random.random() < share:
            self._scheduler.after(self._database.slowest_statement * random.random(), respond)
        else:
            respond()

    def close(self) -> None:
        connection, self._connection = self._connection, None
        if connection is not None:
            self._network.break_connection(connection)

    # -- the table

    def check(self) -> str:
        return str(self._statement(lambda: OUTBOX))

    def server_id(self) -> str:
        return str(self._statement(lambda: "4711"))

    def _select(self, query: RowQuery, is_wanted: Callable[[Row], bool]) -> list[Row]:
        database, floor = self._database, query.after
        lowest = NO_FLOOR.id
        here = _Place(self._connection, database.incarnation)
        if floor.place == here and database.last_id >= floor.id:
            lowest = floor.id
        is_left_out = _exclusion(query)
        found: list[Row] = []
        taken = 0
        # Hidden from nobody: a row that another leader has taken from our hands, and one that has left them after this
        # statement was planned. The floor falls for it, and the next statement finds it.
        for identity in sorted(database.visible):
            row = database.rows[identity]
            record = row.record
            if not is_wanted(row) or is_left_out(record):
                continue
            if identity <= lowest:
                was_freed = not row.was_taken and row.freed_at < self._planned_at
                if row.version == 0 or (row.leader is None and was_freed and not self._process.has_slept):
                    database.on_hidden(record)
                continue
            if found and taken >= query.max_bytes:
                break
            found.append(row)
            self._note_reading(record)
            taken += bytes_of([record])
            if len(found) == query.limit:
                break
        return found

    def _note_reading(self, record: StoredRecord) -> None:
        # Nobody hears of what a late statement reads.
        if isinstance(record.value, bytes) and not self._network.is_late:
            times = self._database.read_at.setdefault(record.value.decode(), [])
            times.append((self._scheduler.now, self._process.name))

    @contextmanager
    def _reading(self) -> Iterator[None]:
        self._planned_at = current().works_since
        self._database.reading.add(self._process)
        try:
            yield
        finally:
            self._database.reading.discard(self._process)

    def mark(self, leader_id: UUID, query: RowQuery) -> MarkedBatch:
        seen: list[tuple[Row, int]] = []

        def select() -> None:
            seen.extend((row, row.version) for row in self._select(query, lambda row: row.leader != leader_id))

        def update() -> MarkedBatch:
            records = []
            for row, version in seen:
                if row.version == version and self._database.rows.get(row.record.id) is row:
                    row.was_taken = row.was_taken or row.leader is not None
                    row.leader = leader_id
                    row.version += 1
                    records.append(row.record)
            return MarkedBatch(len(seen), records)

        with self._reading():
            batch: MarkedBatch = self._statement(select, update, changes=True)
        return batch

    def find_lost(self, leader_id: UUID, known: Collection[int], query: RowQuery) -> MarkedRows:
        is_left_out = _exclusion(query)

        def look() -> MarkedRows:
            marked = [row.record for row in self._database.visible.values() if row.leader == leader_id]
            lost = [record.id for record in marked if record.id not in known and not is_left_out(record)]
            return MarkedRows(len(lost), min(lost, default=0), max(lost, default=0))

        found: MarkedRows = self._statement(look)
        return found

    def scan(self, query: RowQuery) -> Sequence[StoredRecord]:
        found: list[StoredRecord] = []

        def select() -> None:
            found.extend(row.record for row in self._select(query, lambda _: True))

        with self._reading():
            self._statement(select, lambda: None)
        return found

    def _delete(self, ids: Sequence[int], times: Sequence[int], is_wanted: Callable[[Row], bool]) -> int:
        rows = self._database.visible
        count = 0
        for identity, time in zip(ids, times, strict=True):
            row = rows.get(identity)
            if row is not None and row.record.create_time == time and is_wanted(row):
                del rows[identity]
                row.version += 1
                self._database.deleted.append(row)
                count += 1
        return count

    def purge(self, leader_id: UUID, ids: Sequence[int], create_times: Sequence[int]) -> int:
        def delete() -> int:
            return self._delete(ids, create_times, lambda row: row.leader == leader_id)

        return int(self._statement(delete, changes=True))

    def delete_published(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        return int(self._statement(lambda: self._delete(ids, create_times, lambda _: True), changes=True))

    def reset(self, leader_id: UUID, ids: Sequence[int]) -> int:
        def clear() -> int:
            rows = [self._database.visible.get(identity) for identity in ids]
            mine = [row for row in rows if row is not None and row.leader == leader_id]
            for row in mine:
                row.leader = None
                row.freed_at = self._scheduler.now
                row.version += 1
            return len(mine)

        return int(self._statement(clear, changes=True))

    def find(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        def look() -> list[StoredRecord]:
            rows = self._database.visible
            return [rows[identity].record for identity in sorted(ids) if identity in rows]

        records: list[StoredRecord] = self._statement(look)
        return records

    def is_empty(self) -> bool:
        return bool(self._statement(lambda: not self._database.visible))

    def at_work(self, seconds: float) -> str:
        def look() -> str:
            running = self._database.running.values()
            before = self._scheduler.now - seconds
            mine = any(process is self._process and since <= before for process, since in running)
            return "is at work on it" if mine else ""

        return str(self._statement(look))

    def backlog(self) -> Backlog:
        return Backlog(int(self._statement(lambda: len(self._database.visible))), 0.0)

    # -- holds

    def read(self) -> HoldSet:
        def look() -> tuple[object, list[NewHold]]:
            is_hidden = "holds" in self._database.hidden
            return (self._database.hold_version, is_hidden), [] if is_hidden else list(self._database.holds)

        version, holds = self._statement(look, table="holds")
        if self._known is None or self._known[0] != version:
            self._known = version, holds_of(holds)
        return self._known[1]

    def add(self, holds: Sequence[NewHold]) -> None:
        def insert() -> None:
            self._database.set_holds([*self._database.holds, *filter(self._is_there, holds)])

        self._statement(insert)

    def _is_there(self, hold: NewHold) -> bool:
        row = None if hold.record_id is None else self._database.visible.get(hold.record_id)
        return hold.create_time is None or (row is not None and row.record.create_time == hold.create_time)

    def fetch(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        return self.find(ids)

    def refuse_dead_letters(self, ids: Sequence[int], error: str) -> int:
        del ids, error
        return 0

    def delete_dead_lettered(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        return self.delete_published(ids, create_times)

    def release_gone(self) -> int:
        return 0

    # -- the sequence

    def snapshot(self) -> SequenceSnapshot:
        database, drawn = self._database, []
        self._statement(lambda: drawn.append((database.last_id, database.incarnation)))
        connection = self._connection
        writers = self._statement(lambda: frozenset(database.writers))
        if connection is not self._connection:
            raise StoreUnavailable("the connection is lost")
        (last_id, incarnation) = drawn[0]
        return SequenceSnapshot(last_id, _Place(connection, incarnation), writers)

    def describe(self, writers: Collection[str]) -> Sequence[OpenWriter]:
        return [OpenWriter(name, 1, None, 0.0, "", "") for name in writers]

    # -- marks

    def count(self) -> MarkedRows:
        def look() -> MarkedRows:
            marked = sorted(identity for identity, row in self._database.visible.items() if row.leader is not None)
            return MarkedRows(len(marked), marked[0] if marked else 0, marked[-1] if marked else 0)

        marked: MarkedRows = self._statement(look)
        return marked

    def hold(self, limit: int) -> int:
        del limit
        return 0

    def release_held(self) -> int:
        return 0

    def clear(self) -> int:
        def wipe() -> int:
            marked = [row for row in self._database.visible.values() if row.leader is not None]
            for row in marked:
                row.leader = None
                row.freed_at = self._scheduler.now
                row.version += 1
            return len(marked)

        return int(self._statement(wipe))
