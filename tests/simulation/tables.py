"""A PostgreSQL that takes SQL, as far as inbox, stashes, tasks and handlers write it, and a driver's connection to it.

Transactions are those of READ COMMITTED: rows that a transaction has written are locked until its end, and others wait
for it. An error aborts the transaction; what follows is refused, and its COMMIT rolls back, without an error. A session
goes on for a while when its connection has broken: until the server finds out, its locks are held, and a COMMIT that is
still on its way may be carried out.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import lru_cache
from types import SimpleNamespace
from typing import Any, Self

import psycopg
from psycopg.pq import TransactionStatus

from outbox_core.inbox import IS_MARKED, IS_OURS
from tests.simulation.network import LOST, Connection, Network, Respond, Server
from tests.simulation.scheduling import Process, ProcessDied, Scheduler, current
from tests.simulation.threads import Event

Place = tuple[str, Any]
"""A table and a key in it."""

Row = dict[str, Any]

KEYS: dict[str, tuple[str, ...]] = {"inbox": ("source", "message_id"), "outbox_task_result": ("id",)}
"""The primary keys of tables; the others have a sequence."""

FAILS = "SELECT 1/0"
"""A statement that fails, and aborts its transaction."""

CONNECT = "connect"
_LOOK_SECONDS = 0.2  # at sessions whose connection has broken
_SILENT_SECONDS = 20.0  # until the client's system gives a silent connection up
_SLOW_SHARE, _SLOWEST_SECONDS, _FAST_SECONDS = 0.05, 0.05, 0.0005
_REFUSED = (psycopg.errors.DeadlockDetected, psycopg.errors.SerializationFailure, psycopg.errors.QueryCanceled)
_MARK = ("", "kafka_outbox.accepted")  # the place of a setting, which ends with its transaction or savepoint


# -- SQL


@dataclass(frozen=True)
class _Statement:
    verb: str
    table: str = ""
    columns: tuple[str, ...] = ()
    name: str = ""  # of a savepoint
    conditions: tuple[tuple[str, bool], ...] = ()  # columns, and whether they are to be equal to their parameters
    is_ours: bool = False  # rows of the own transaction alone
    locks: bool = False
    skips_conflicts: bool = False
    marks: bool = False  # its last parameter becomes a setting of the transaction
    nulls: tuple[str, ...] = ()  # columns that an UPDATE makes NULL


_INSERT = re.compile(r"INSERT INTO (\S+) \((.*?)\) VALUES \((.*?)\)(?P<rest>.*)", re.DOTALL)
_SELECT = re.compile(r"SELECT (.*?) FROM (\S+) WHERE (.*)", re.DOTALL)
_UPDATE = re.compile(r"UPDATE (\S+) SET (.*?) WHERE (.*)", re.DOTALL)
_CONDITION = re.compile(r'(NOT \()?(?:"\w+"\.)?"?(\w+)"? = %s')
_CONTROL = re.compile(
    r"(BEGIN|COMMIT|RELEASE SAVEPOINT|ROLLBACK TO SAVEPOINT|ROLLBACK|SAVEPOINT)(?: \"?(\w+)\"?)?", re.IGNORECASE
)


def _plain(name: str) -> str:
    return name.rpartition(".")[2].strip('" ')


@lru_cache(maxsize=200)
def parse(sql: str) -> _Statement:
    """Return what a statement does; those that this PostgreSQL does not know are refused at once."""
    sql = sql.strip()
    if sql in (CONNECT, FAILS, IS_MARKED, "SELECT 1"):
        return _Statement(sql)
    if found := _CONTROL.fullmatch(sql):
        return _Statement(found[1].upper(), name=found[2] or "")
    if found := _INSERT.fullmatch(sql):
        values = [value.strip() for value in found[3].split(",")]
        columns = [_plain(name) for name, value in zip(found[2].split(","), values, strict=True) if "%s" in value]
        return _Statement(
            "INSERT",
            _plain(found[1]),
            tuple(columns),
            skips_conflicts="ON CONFLICT" in found["rest"],
            marks="RETURNING set_config(" in found["rest"],
        )  # fmt: skip
    if found := _SELECT.fullmatch(sql):
        where, is_ours = found[3].replace(IS_OURS, ""), IS_OURS in found[3]
        columns = [_plain(name) for name in found[1].split(",")]
        return _Statement(
            "SELECT", _plain(found[2]), tuple(columns), "", _conditions(where), is_ours, "FOR UPDATE" in where
        )  # fmt: skip
    if found := _UPDATE.fullmatch(sql):
        changes = [each.partition(" = ") for each in found[2].split(", ")]
        columns = [_plain(name) for name, _, value in changes if "%s" in value]
        nulls = [_plain(name) for name, _, value in changes if value == "NULL"]
        return _Statement(
            "UPDATE", _plain(found[1]), tuple(columns), "", _conditions(found[3]), locks=True, nulls=tuple(nulls)
        )  # fmt: skip
    raise NotImplementedError(f"the simulated PostgreSQL does not know: {sql}")


def _conditions(where: str) -> tuple[tuple[str, bool], ...]:
    return tuple((column, not negated) for negated, column in _CONDITION.findall(where))


def _stored(value: Any) -> Any:
    """Return a parameter as the table keeps it: JSON as text, which is what Django reads."""
    return value.dumps(value.obj) if hasattr(value, "dumps") else value


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, str) and isinstance(other, str) and one[:1] in "[{" and other[:1] in "[{":
        return bool(json.loads(one or "0") == json.loads(other or "0"))
    return bool(one == other)


# -- the server


class _Waits(Exception):
    """A statement has to wait for the end of another transaction."""

    def __init__(self, holder: _Transaction) -> None:
        self.holder = holder


@dataclass(eq=False)
class _Transaction:
    """An open transaction: what it has written, in layers of savepoints."""

    layers: list[tuple[str, dict[Place, Row]]] = field(default_factory=lambda: [("", {})])
    is_aborted: bool = False
    locks: set[Place] = field(default_factory=set)
    waiters: list[Callable[[], None]] = field(default_factory=list)

    def written(self, place: Place) -> Row | None:
        return next((rows[place] for _, rows in reversed(self.layers) if place in rows), None)

    @property
    def changes(self) -> dict[Place, Row]:
        return {place: row for _, rows in self.layers for place, row in rows.items() if place != _MARK}


@dataclass(eq=False)
class _Session:
    """A session of the server."""

    connection: Connection
    transaction: _Transaction | None = None
    is_over: bool = False
    ends: bool = False  # as the server is about to find out that its connection has broken
    commits: int = 0

    @property
    def status(self) -> TransactionStatus:
        if self.transaction is None:
            return TransactionStatus.IDLE
        return TransactionStatus.INERROR if self.transaction.is_aborted else TransactionStatus.INTRANS


@dataclass(frozen=True)
class _Answer:
    status: TransactionStatus
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    count: int = 0
    error: psycopg.Error | None = None
    changes: dict[Place, Row] = field(default_factory=dict)  # that a COMMIT has committed


class Tables:
    """The tables, and the sessions that work on them."""

    def __init__(self, scheduler: Scheduler, server: Server) -> None:
        self.scheduler = scheduler
        self.server = server
        self.rows: dict[str, dict[Any, Row]] = {}
        self.on_commit: Callable[[dict[Place, Row], dict[Place, Row | None]], None] = lambda _, __: None
        self.reached: Callable[[str], None] = lambda _: None
        self._sessions: list[_Session] = []
        self._locks: dict[Place, _Transaction] = {}
        self._number = 0
        self._look()

    def open(self, connection: Connection) -> _Session:
        """Begin a session."""
        session = _Session(connection)
        self._sessions.append(session)
        return session

    def end_all(self) -> None:
        """End all sessions, as the server ends."""
        for session in list(self._sessions):
            self._end(session)

    def terminate(self, share: float, network: Network) -> None:
        """End some sessions that are idle, as `idle_session_timeout` does, and others, as an administrator does."""
        for session in list(self._sessions):
            if self.scheduler.random.random() < share:
                self._end(session)
                network.break_connection(session.connection)

    def _look(self) -> None:
        random = self.scheduler.random
        for session in self._sessions:
            if session.connection.is_broken and not session.ends:
                session.ends = True
                seconds = random.choice((0.0, 0.1, 3.0)) * random.random()
                self.scheduler.after(seconds, lambda session=session: self._end(session))
        self.scheduler.after(_LOOK_SECONDS, self._look)

    def _end(self, session: _Session) -> None:
        if not session.is_over:
            session.is_over = True
            self._sessions.remove(session)
            self._finish(session)

    def take(self, session: _Session, sql: str, parameters: Sequence[Any], *, begins: bool, fails: bool) -> Any:
        """Return the server's handler of a statement."""

        def handle(respond: Respond) -> None:
            random = self.scheduler.random
            slowest = _SLOWEST_SECONDS if random.random() < _SLOW_SHARE else _FAST_SECONDS
            self.scheduler.after(slowest * random.random(), lambda: run(respond))

        def run(respond: Respond) -> None:
            if session.is_over:
                return
            if begins and session.transaction is None:
                session.transaction = _Transaction()
            try:
                answer = self._execute(session, parse(sql), parameters, fails=fails)
            except _Waits as waits:
                self.reached("waits for another transaction")
                waits.holder.waiters.append(lambda: run(respond))
                return
            respond(answer)

        return handle

    def _execute(
        self, session: _Session, statement: _Statement, parameters: Sequence[Any], *, fails: bool
    ) -> _Answer:  # fmt: skip
        transaction, verb = session.transaction, statement.verb
        if verb in ("COMMIT", "ROLLBACK"):
            if fails and transaction is not None and verb == "COMMIT":
                self._finish(session)
                return _Answer(session.status, error=psycopg.errors.SerializationFailure("could not serialize"))
            is_committed = verb == "COMMIT" and transaction is not None and not transaction.is_aborted
            if verb == "COMMIT" and not is_committed:
                self.reached("COMMIT that rolls back")
            changes = transaction.changes if transaction is not None and is_committed else {}
            session.commits += is_committed
            self._finish(session, changes)
            return _Answer(session.status, changes=changes)
        if verb == "BEGIN":
            session.transaction = transaction or _Transaction()
            return _Answer(session.status)
        if transaction is not None and transaction.is_aborted and verb != "ROLLBACK TO SAVEPOINT":
            text = "current transaction is aborted, commands ignored until end of transaction block"
            return _Answer(session.status, error=psycopg.errors.InFailedSqlTransaction(text))
        try:
            if fails:
                self.reached("statement refused")
                raise self.scheduler.random.choice(_REFUSED)("the statement was cancelled")
            return self._carry_out(session, statement, parameters)
        except psycopg.Error as error:
            if session.transaction is not None:
                session.transaction.is_aborted = True
            return _Answer(session.status, error=error)

    def _carry_out(self, session: _Session, statement: _Statement, parameters: Sequence[Any]) -> _Answer:
        verb, transaction = statement.verb, session.transaction
        if verb == FAILS:
            raise psycopg.errors.DivisionByZero("division by zero")
        if verb in (CONNECT, "SELECT 1"):
            return _Answer(session.status, [(1,)], 1)
        if verb.endswith("SAVEPOINT"):
            self._save(transaction, verb, statement.name)
            return _Answer(session.status)
        is_implicit = transaction is None
        if transaction is None:
            session.transaction = transaction = _Transaction()
        try:
            rows, count = self._work(transaction, statement, [_stored(value) for value in parameters])
            changes = transaction.changes if is_implicit else {}
        except _Waits:
            if is_implicit:
                self._finish(session)  # it begins anew
            raise
        if is_implicit:
            self._finish(session, changes)
        return _Answer(session.status, rows, count, changes=changes)

    @staticmethod
    def _save(transaction: _Transaction | None, verb: str, name: str) -> None:
        if transaction is None:
            raise psycopg.errors.NoActiveSqlTransaction(f"{verb} can only be used in transaction blocks")
        if verb == "SAVEPOINT":
            transaction.layers.append((name, {}))
            return
        places = [number for number, (known, _) in enumerate(transaction.layers) if known == name]
        if not places:
            raise psycopg.errors.InvalidSavepointSpecification(f'savepoint "{name}" does not exist')
        above = transaction.layers[places[-1] :]
        del transaction.layers[places[-1] :]
        if verb == "RELEASE SAVEPOINT":
            for _, rows in above:
                transaction.layers[-1][1].update(rows)
        else:
            transaction.is_aborted = False
            transaction.layers.append((name, {}))

    def _work(
        self, transaction: _Transaction, statement: _Statement, parameters: list[Any]
    ) -> tuple[list[tuple[Any, ...]], int]:  # fmt: skip
        table, columns = statement.table, statement.columns
        if statement.verb == IS_MARKED:
            is_marked = transaction.written(_MARK) == {"mark": parameters[0]}
            return [(1,)] * is_marked, int(is_marked)
        if statement.verb == "INSERT":
            marked = {_MARK: {"mark": parameters.pop()}} if statement.marks else {}
            row = dict(zip(columns, parameters, strict=True))
            place = table, self._key(table, row)
            self._lock(transaction, place)
            if self._read(transaction, place) is not None:
                if statement.skips_conflicts:
                    return [], 0
                raise psycopg.errors.UniqueViolation(f"duplicate key value of {table}")
            transaction.layers[-1][1].update({place: row, **marked})
            return [(1,)], 1
        values, rest = (parameters[: len(columns)], parameters[len(columns) :])
        conditions = rest if statement.verb == "UPDATE" else parameters
        found = []
        for place in self._candidates(transaction, statement, conditions):
            if statement.locks:
                self._lock(transaction, place)
            row_now = self._read(transaction, place)
            is_wanted = row_now is not None and all(
                _same(row_now.get(column), value) == is_equal
                for (column, is_equal), value in zip(statement.conditions, conditions, strict=True)
            )
            if is_wanted and not (statement.is_ours and transaction.written(place) is None):
                found.append((place, row_now or {}))
        if statement.verb == "UPDATE":
            for place, row in found:
                changed = dict(zip(columns, values, strict=True)) | dict.fromkeys(statement.nulls)
                transaction.layers[-1][1][place] = row | changed
            return [], len(found)
        return [tuple(1 if name == "1" else row.get(name) for name in columns) for _, row in found], len(found)

    def _candidates(
        self, transaction: _Transaction, statement: _Statement, parameters: Sequence[Any]
    ) -> Iterable[Place]:  # fmt: skip
        table, given = statement.table, dict(zip(statement.conditions, parameters, strict=True))
        key = KEYS.get(table, ("",))
        if all((column, True) in given for column in key):
            return [(table, self._key(table, {column: given[column, True] for column in key}))]
        names = dict.fromkeys([*self.rows.get(table, ()), *(at for name, at in transaction.changes if name == table)])
        return [(table, name) for name in names]

    def _key(self, table: str, row: Row) -> Any:
        if table in KEYS:
            return tuple(row[column] for column in KEYS[table])
        self._number += 1
        return self._number

    def _read(self, transaction: _Transaction, place: Place) -> Row | None:
        written = transaction.written(place)
        return self.rows.get(place[0], {}).get(place[1]) if written is None else written

    def _lock(self, transaction: _Transaction, place: Place) -> None:
        holder = self._locks.setdefault(place, transaction)
        if holder is not transaction:
            raise _Waits(holder)
        transaction.locks.add(place)

    def _finish(self, session: _Session, changes: dict[Place, Row] | None = None) -> None:
        """End a session's transaction: committed with these changes, or rolled back."""
        transaction, session.transaction = session.transaction, None
        if transaction is None:
            return
        for place in transaction.locks:
            del self._locks[place]
        if changes:
            before = {(table, key): self.rows.get(table, {}).get(key) for table, key in changes}
            for (table, key), row in changes.items():
                self.rows.setdefault(table, {})[key] = row
            self.on_commit(changes, before)
        for waiter in transaction.waiters:
            self.scheduler.after(0.0, waiter)


# -- the driver


class DriverConnection:
    """A connection as psycopg makes it: a transaction begins with its first statement, unless in autocommit mode."""

    def __init__(self, world: Any, *, autocommit: bool = False) -> None:
        self._world = world
        self._process: Process = current().process
        self._autocommit = autocommit
        self._status = TransactionStatus.IDLE
        self.closed = False
        self.broken = False
        self.wire: Connection = world.network.connect(self._process, world.tables.server)
        self._session = world.tables.open(self.wire)
        self._request(CONNECT, ())

    # -- as psycopg has it

    @property
    def info(self) -> Any:
        """The session as its client knows it."""
        status = TransactionStatus.UNKNOWN if self.closed else self._status
        return SimpleNamespace(transaction_status=status, server_version=170_000, backend_pid=1)

    @property
    def autocommit(self) -> bool:
        """True if each statement is a transaction of its own."""
        return self._autocommit

    @autocommit.setter
    def autocommit(self, is_on: bool) -> None:
        self._check_open()
        if self._status != TransactionStatus.IDLE:
            raise psycopg.ProgrammingError(f"can't change 'autocommit' now: connection in {self._status.name}")
        self._autocommit = is_on

    def cursor(self) -> Cursor:
        """Make a cursor."""
        self._check_open()
        return Cursor(self)

    def execute(self, sql: str, parameters: Sequence[Any] = ()) -> Cursor:
        """Execute a statement."""
        return self.cursor().execute(sql, parameters)

    def commit(self) -> None:
        """Commit the transaction, if there is one; one that was aborted is rolled back, without an error."""
        self._check_open()
        if self._status != TransactionStatus.IDLE:
            self._request("COMMIT", ())

    def rollback(self) -> None:
        """Roll the transaction back, if there is one."""
        self._check_open()
        if self._status != TransactionStatus.IDLE:
            self._request("ROLLBACK", ())

    def close(self) -> None:
        """Close it: the server ends the session."""
        if not self.closed:
            self.closed = True
            self._world.network.break_connection(self.wire)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Commit, or roll back; a connection is closed then, as psycopg's context manager does."""
        try:
            if kind is None:
                self.commit()
            elif not self.closed and not self._process.is_dead:
                with suppress(psycopg.Error):
                    self.rollback()
        finally:
            self.close()

    # -- the wire

    def _check_open(self) -> None:
        if self._process.is_dead:
            raise ProcessDied
        if self.closed:
            raise psycopg.OperationalError("the connection is lost" if self.broken else "the connection is closed")

    def run(self, sql: str, parameters: Sequence[Any]) -> _Answer:
        """Send a statement, behind a BEGIN where one is due."""
        self._check_open()
        begins = not self._autocommit and self._status == TransactionStatus.IDLE
        return self._request(sql, parameters, begins=begins and parse(sql).verb not in ("COMMIT", "ROLLBACK"))

    def _request(self, sql: str, parameters: Sequence[Any], *, begins: bool = False) -> _Answer:
        world, event, found, commits = self._world, Event(), list[Any](), self._session.commits
        fault = world.at_statement(self, sql)
        handler = world.tables.take(self._session, sql, parameters, begins=begins, fails=fault == "refuse")
        request = world.network.send(self.wire, handler, lambda answer: (found.append(answer), event.set()))

        def give_up() -> None:
            if not request.is_over:
                world.network.break_connection(self.wire)

        self._process.after(_SILENT_SECONDS, give_up)
        if fault == "break":
            delay = world.scheduler.random.random() * 4 * world.network.latency
            world.scheduler.after(delay, lambda: world.network.break_connection(self.wire))
        event.wait()
        if found[0] is LOST:
            world.failed()
            if sql == "COMMIT":
                world.in_doubt(has_committed=self._session.commits > commits)
            self.closed = self.broken = True
            self._status = TransactionStatus.UNKNOWN
            raise psycopg.OperationalError("server closed the connection unexpectedly")
        answer: _Answer = found[0]
        self._status = answer.status
        if answer.changes:
            world.acknowledged(self._process, answer.changes)
        if answer.error is not None:
            world.failed()
            raise answer.error
        return answer


class Cursor:
    """A cursor over rows as tuples."""

    def __init__(self, connection: DriverConnection) -> None:
        self.connection = connection
        self._rows: Iterator[tuple[Any, ...]] = iter(())
        self.rowcount = -1

    def execute(self, sql: Any, parameters: Sequence[Any] | None = None) -> Cursor:
        """Execute a statement."""
        answer = self.connection.run(str(sql), parameters or ())
        self._rows, self.rowcount = iter(answer.rows), answer.count
        return self

    def fetchone(self) -> tuple[Any, ...] | None:
        """Return the next row, or None."""
        return next(self._rows, None)

    def fetchmany(self, size: int = 1) -> list[tuple[Any, ...]]:
        """Return the next rows."""
        return [row for _, row in zip(range(size), self._rows, strict=False)]

    def fetchall(self) -> list[tuple[Any, ...]]:
        """Return the other rows."""
        return list(self._rows)

    def close(self) -> None:
        """Close it."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
