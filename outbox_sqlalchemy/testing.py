"""Help for tests on SQLAlchemy: rollbacks as `outbox_core.testing` sees them, and schemas for SQLite.

The captures of `outbox_core.testing` work on sessions and connections of any kind, asynchronous ones included. This
module follows the connections that were stashed on, by SQLAlchemy's own events: a record that was rolled back with its
session, or with a savepoint, counts no more. SQLAlchemy tells of a commit before it is done: the records of one that
fails, on a deferred constraint, count all the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sqlalchemy import Connection, MetaData, Table, event
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Session, scoped_session
from sqlalchemy.sql.elements import SavepointClause

from outbox_core.schema import HOLD_COLUMNS, INBOX_COLUMNS, REQUIRED_COLUMNS
from outbox_core.testing.interception import interception
from outbox_sqlalchemy.sessions import SyncSession, WrongSession
from outbox_sqlalchemy.table import make_history_tables

__all__ = ["application_tables"]

_REAL = (Session, scoped_session, Connection, AsyncSession, async_scoped_session, AsyncConnection)


def application_tables(metadata: MetaData) -> list[Table]:
    """Return the tables of an application without those of the outbox, which only PostgreSQL can have.

    For the schema of tests on SQLite: `Base.metadata.create_all(engine, tables=application_tables(Base.metadata))`.
    """
    history = (set(table.columns.keys()) for table in make_history_tables(MetaData()))
    ours = [set(REQUIRED_COLUMNS), set(INBOX_COLUMNS), set(HOLD_COLUMNS), *history]
    return [table for table in metadata.sorted_tables if not any(names <= set(table.columns.keys()) for names in ours)]


def note(connection: Connection, rows: Sequence[Sequence[Any]]) -> None:
    """Tell open captures of rows that were written, and from now on how the connection's transactions end."""
    interception.stashed(_follow(connection), rows)


def keep(session: SyncSession, rows: Sequence[Sequence[Any]], find: Callable[[SyncSession], Connection]) -> None:
    """Keep rows in memory; `find` returns the connection of a session.

    A stand-in for a session has none, nor has a session without a database: there is nothing to roll back.
    """
    if is_stand_in(session):
        interception.keep(session, rows)
        return
    try:
        connection = find(session)
    except WrongSession as error:
        if not isinstance(error.__cause__, UnboundExecutionError):
            raise
        interception.stashed(session, rows)
    else:
        if not connection.in_transaction():
            connection.begin()  # as the INSERT would
        note(connection, rows)


def is_stand_in(session: object) -> bool:
    """Return True for an object of a test's own in the place of a session."""
    return not any(kind in type(session).__mro__ for kind in _REAL)  # a mock with a spec would pass isinstance


def _follow(connection: Connection) -> Connection:
    interception.follow(connection, lambda: _Following(connection).end)
    return connection


class _Following:
    """The listeners on one connection."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._savepoints: dict[str, int] = {}
        self._listeners: list[tuple[str, Callable[..., Any]]] = [
            ("before_execute", self._before_execute),
            ("rollback_savepoint", self._undone),
            ("rollback", interception.rolled_back),
            ("commit", interception.committed),
            ("rollback_twophase", lambda found, *_: interception.rolled_back(found)),
            ("commit_twophase", lambda found, *_: interception.committed(found)),
        ]
        for name, listener in self._listeners:
            event.listen(connection, name, listener)

    def end(self) -> None:
        for name, listener in self._listeners:
            event.remove(self._connection, name, listener)

    def _before_execute(self, connection: Connection, statement: object, *_: Any) -> None:
        # Not the event "savepoint", which comes before SQLAlchemy has made the savepoint's name.
        del connection
        if isinstance(statement, SavepointClause):
            self._savepoints[statement.ident] = interception.moment()

    def _undone(self, connection: Connection, name: str, context: None) -> None:
        del context
        # One that was begun before the first stash is unknown, and takes all records of this connection along.
        interception.rolled_back(connection, after=self._savepoints.get(name, 0))
