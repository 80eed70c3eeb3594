"""Stashing through SQLAlchemy: the logic once for connections, with thin shells for sessions and for asyncio.

Pending changes of a session are flushed first (unless its autoflush is off), as before a query: the transaction's row
locks are then taken before the record's id is drawn, which keeps messages in the order of their changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Unpack

from sqlalchemy import Connection, LargeBinary, MetaData, Table, Text, column, func, insert, table
from sqlalchemy.orm import Session

from outbox_core import stasher
from outbox_core.formats.preparation import FormatOptions, Preparation
from outbox_core.record import OutboxRecord
from outbox_core.schema import BINARY_LAYOUT, TableLayout, TableName
from outbox_sqlalchemy.commit_events import notify_after_commit
from outbox_sqlalchemy.sessions import (
    STASHING,
    AnyAsyncSession,
    SyncSession,
    Target,
    WrongSession,
    asynchronous,
    connection_for,
    mapped,
    synchronous,
)
from outbox_sqlalchemy.table import layout_of, make_outbox_table


class Outbox:
    """One outbox table of an application. Immutable: shared freely between threads, tasks and sessions.

    Args:
        table: a name (`outbox`, `billing.outbox`), a `Table` (made by `make_outbox_table`, or reflected), or a mapped
            class. With a `Table` or class, a session with several binds finds the database as it does for any other.
        layout: types of the columns; only for a table given by name, whose default is the binary layout.
        formats: how values become bytes, see `outbox_core.formats.preparation.Preparation`.

    Attributes:
        table: its `Table`.
        layout: types of its columns.

    Raises:
        InvalidConfig: if a name is not a table name, or a serializer cannot be called.
        OutboxTableError: if a `Table` or class is no outbox.
    """

    __slots__ = ("_insert", "_keys", "_preparation", "_target", "layout", "table")

    def __init__(
        self,
        table: str | Table | type[Any] = "outbox",
        *,
        layout: TableLayout | None = None,
        **formats: Unpack[FormatOptions],
    ) -> None:
        mapper = None
        if isinstance(table, str):
            table = make_outbox_table(MetaData(), table, layout=layout or BINARY_LAYOUT)
        elif layout is not None:
            raise WrongSession("layout: belongs to a table given by name; a Table or mapped class says it itself")
        elif not isinstance(table, Table):
            table, mapper = mapped(table)
        self.table: Table = table
        self.layout = layout_of(table)
        self._preparation = Preparation(insert_claim=_insert_claim, **formats)
        keys = {column.name: column.key for column in table.columns}
        self._keys = [keys[name] for name in self.layout.columns]
        # The database's clock, also where the column has no default; `inline`, since the id is not needed.
        now = {} if self.layout.has_time_default else {keys["create_time"]: func.now()}
        self._insert = insert(table).values(now).inline()
        self._target = Target(STASHING, self._insert, table, mapper)

    def __repr__(self) -> str:
        return f"Outbox({self.table.fullname!r})"

    def stash(self, session: SyncSession, record: OutboxRecord) -> None:
        """Write one record in the transaction of a session or connection.

        Raises:
            InvalidRecord: if the record does not fit the table; no SQL was sent.
            TransactionRequired: if the connection commits by itself (AUTOCOMMIT); no SQL was sent.
            WrongSession: if `session` is neither a synchronous session nor a connection.
        """
        if stasher.interceptor is not None and not stasher.interceptor.writes:
            self._keep(session, [self._parameters(record)])
            return
        connection = self._connection(session)  # it is refused before a large payload goes to its claim store
        parameters = self._parameters(record, connection)
        _get_ready(session)
        connection.execute(self._insert, parameters)
        if stasher.interceptor is not None:
            _captured(connection, [parameters])

    def stash_many(self, session: SyncSession, records: Iterable[OutboxRecord]) -> None:
        """Write records in their order, in one `executemany`; all are checked first. Errors are those of `stash`."""
        if stasher.interceptor is not None and not stasher.interceptor.writes:
            self._keep(session, [self._parameters(record) for record in records])
            return
        connection = self._connection(session)
        parameters = [self._parameters(record, connection) for record in records]
        _get_ready(session)
        if parameters:
            connection.execute(self._insert, parameters)
        if stasher.interceptor is not None:
            _captured(connection, parameters)

    async def astash(self, session: AnyAsyncSession, record: OutboxRecord) -> None:
        """Stash on an asynchronous session or connection, as `stash` does."""
        if _is_stand_in(session):
            self.stash(session, record)  # type: ignore[arg-type]
            return
        await asynchronous(session, STASHING).run_sync(self.stash, record)

    async def astash_many(self, session: AnyAsyncSession, records: Iterable[OutboxRecord]) -> None:
        """Stash on an asynchronous session or connection, as `stash_many` does."""
        if _is_stand_in(session):
            self.stash_many(session, records)  # type: ignore[arg-type]
            return
        await asynchronous(session, STASHING).run_sync(self.stash_many, records)

    def _keep(self, session: SyncSession, parameters: list[dict[str, Any]]) -> None:
        """Leave checked rows to a test's outbox in memory."""
        from outbox_sqlalchemy.testing import keep

        def find(real: SyncSession) -> Connection:
            connection = self._connection(real)
            _get_ready(real)
            return connection

        keep(session, _rows(parameters), find)

    def _parameters(self, record: OutboxRecord, connection: Connection | None = None) -> dict[str, Any]:
        return dict(zip(self._keys, self.layout.row(self._preparation.prepare(record, connection)), strict=False))

    def _connection(self, session: SyncSession) -> Connection:
        return connection_for(synchronous(session, STASHING), self._target)


def _insert_claim(connection: Connection, name: TableName, claim: str, payload: bytes) -> None:
    target = table(name.table, column("name", Text), column("payload", LargeBinary), schema=name.schema)
    connection.execute(insert(target).values(name=claim, payload=payload))


def _get_ready(session: SyncSession) -> None:
    """Flush as a query would; not while a flush is under way, whose event handlers may stash."""
    found = synchronous(session, STASHING)
    if not isinstance(found, Session):
        return
    if found.autoflush and not found._flushing:  # noqa: SLF001  SQLAlchemy's autoflush asks the same
        found.flush()
    notify_after_commit(found)


def _captured(connection: Connection, parameters: list[dict[str, Any]]) -> None:
    """Tell a test of written rows."""
    from outbox_sqlalchemy.testing import note

    note(connection, _rows(parameters))


def _rows(parameters: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return [tuple(row.values()) for row in parameters]  # in the order of the layout's columns


def _is_stand_in(session: object) -> bool:
    """Return True for a test's stand-in for an asynchronous session, which an outbox in memory accepts."""
    if stasher.interceptor is None or stasher.interceptor.writes:
        return False
    from outbox_sqlalchemy.testing import is_stand_in

    return is_stand_in(session)
