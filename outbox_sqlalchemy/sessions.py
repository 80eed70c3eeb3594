"""From a session or connection of any kind to the connection of the caller's transaction."""

from __future__ import annotations

from typing import Any, NamedTuple

from sqlalchemy import Connection, Executable, Table, inspect
from sqlalchemy.exc import UnboundExecutionError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncSession, async_scoped_session
from sqlalchemy.orm import Mapper, Session, scoped_session

from outbox_core.errors import OutboxError, TransactionRequired

SyncSession = Session | scoped_session[Any] | Connection
AnyAsyncSession = AsyncSession | async_scoped_session[Any] | AsyncConnection


class WrongSession(OutboxError, TypeError):
    """An argument that is no session or connection, or one of the other kind (asynchronous or not)."""


class Purpose(NamedTuple):
    """The purpose of a session, in the words of errors: the function, its object, the class of the table."""

    verb: str
    subject: str
    handle: str


STASHING = Purpose("stash", "record", "Outbox")
ACCEPTING = Purpose("accept", "acceptance", "Inbox")


class Target(NamedTuple):
    """A statement and its table, for sessions that choose a database by the table or the kind of statement."""

    purpose: Purpose
    statement: Executable
    table: Table
    mapper: Mapper[Any] | None


def synchronous(session: SyncSession, purpose: Purpose) -> Session | Connection:
    """Return the session or connection itself; raise WrongSession if it is neither, or asynchronous."""
    if isinstance(session, scoped_session):
        session = session()
    if isinstance(session, Session | Connection):
        return session
    if isinstance(session, AsyncSession | async_scoped_session | AsyncConnection):
        raise WrongSession(f"{type(session).__name__} is asynchronous: use `await a{purpose.verb}(...)`")
    raise WrongSession(f"expected a Session, scoped_session or Connection, got {type(session).__name__}")


def asynchronous(session: object, purpose: Purpose) -> AsyncSession | AsyncConnection:
    """Return the asynchronous session or connection itself; raise WrongSession if it is neither, or synchronous."""
    if isinstance(session, async_scoped_session):
        session = session()
    if isinstance(session, AsyncSession | AsyncConnection):
        return session
    if isinstance(session, Session | scoped_session | Connection):
        raise WrongSession(f"{type(session).__name__} is synchronous: use `{purpose.verb}(...)`")
    raise WrongSession(
        f"expected an AsyncSession, async_scoped_session or AsyncConnection, got {type(session).__name__}"
    )


def connection_for(session: Session | Connection, target: Target) -> Connection:
    """Return the connection of the caller's transaction for this statement.

    Raises:
        TransactionRequired: if the connection commits by itself (AUTOCOMMIT).
        WrongSession: if the session has no database for the table.
    """
    connection = _bound(session, target) if isinstance(session, Session) else session
    # The driver's own setting, whatever set it: the engine, an execution option, or an argument to connect().
    if getattr(connection.connection.dbapi_connection, "autocommit", False) is True:
        raise TransactionRequired(
            f"the connection is in AUTOCOMMIT, so the {target.purpose.subject} would not be atomic with your data; "
            f"{target.purpose.verb} on a connection or session with another isolation level"
        )
    return connection


def mapped(model: object) -> tuple[Table, Mapper[Any]]:
    """Return the table and mapper of a mapped class; raise WrongSession if it is none."""
    mapper = inspect(model, raiseerr=False)
    if not isinstance(mapper, Mapper) or not isinstance(mapper.local_table, Table):
        raise WrongSession(f"expected a table's name, a Table or a mapped class, got {model!r}")
    return mapper.local_table, mapper


def _bound(session: Session, target: Target) -> Connection:
    arguments: dict[str, Any] = {"clause": target.statement}
    if target.mapper is not None:
        arguments["mapper"] = target.mapper
    try:
        return session.connection(bind_arguments=arguments)
    except UnboundExecutionError as error:
        raise WrongSession(
            f"the session has no database for the table {target.table.fullname!r}; give it a `bind`, or name the "
            f"very Table or mapped class of the session's `binds`: {target.purpose.handle}(table)"
        ) from error
