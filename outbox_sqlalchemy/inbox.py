"""Accepting through SQLAlchemy: `outbox_core.inbox` in the transaction of a session or connection of any kind."""

from __future__ import annotations

from typing import Any
from uuid import UUID

from sqlalchemy import Executable, MetaData, Table, Text, bindparam, func, literal_column, select, text, true
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import InvalidRequestError

from outbox_core.errors import OutboxTableError
from outbox_core.inbox import BEGIN, GOES_ON, IS_MARKED, IS_OURS, MARK_SETTING, confirming, inbox_key, mark, refuse_lost
from outbox_core.schema import INBOX_COLUMNS
from outbox_sqlalchemy.sessions import (
    ACCEPTING,
    AnyAsyncSession,
    SyncSession,
    Target,
    asynchronous,
    connection_for,
    mapped,
    synchronous,
)
from outbox_sqlalchemy.table import make_inbox_table

_IS_MARKED = text(IS_MARKED.replace("%s", ":mark")).bindparams(bindparam("mark", type_=Text))


class Inbox:
    """One inbox table of an application. Immutable: shared freely between threads, tasks and sessions.

    Args:
        table: a name (`inbox`, `billing.inbox`), a `Table` (made by `make_inbox_table`, or reflected), or a mapped
            class. With a `Table` or class, a session with several binds finds the database as it does for any other.

    Attributes:
        table: its `Table`.

    Raises:
        InvalidConfig: if a name is not a table name.
        OutboxTableError: if a `Table` or class is no inbox.
    """

    __slots__ = ("_confirm", "_insert", "_target", "table")

    def __init__(self, table: str | Table | type[Any] = "inbox") -> None:
        mapper = None
        if isinstance(table, str):
            table = make_inbox_table(MetaData(), table)
        elif not isinstance(table, Table):
            table, mapper = mapped(table)
        self.table: Table = table
        columns = {column.name: column for column in table.columns}
        missing = [name for name in INBOX_COLUMNS if name not in columns]
        if missing:
            raise OutboxTableError(f"table {table.fullname!r} is no inbox: it has no column {', '.join(missing)}")
        source, message_id, accept_time = (columns[name] for name in INBOX_COLUMNS)
        self._insert: Executable = (
            insert(table)
            .values(
                {
                    source.key: bindparam("accepted_source"),
                    message_id.key: bindparam("accepted_id"),
                    accept_time.key: func.now(),
                }
            )
            .on_conflict_do_nothing(index_elements=[source, message_id])
            .returning(func.set_config(MARK_SETTING, bindparam("accepted_mark", type_=Text), true()))
        )
        self._confirm: Executable = select(literal_column("1")).where(
            source == bindparam("accepted_source"), message_id == bindparam("accepted_id"), text(IS_OURS)
        )
        self._target = Target(ACCEPTING, self._insert, table, mapper)

    def __repr__(self) -> str:
        return f"Inbox({self.table.fullname!r})"

    def accept(self, session: SyncSession, source: str | int | UUID, message_id: str | bytes | int | UUID) -> bool:
        """Accept a message in the transaction of a session or connection. Call it first: nothing is flushed.

        Args:
            session: a Session, scoped_session or Connection.
            source: an API and its client, or a consumer group, whose ids are different from each other.
            message_id: the message, among those of its source. Compared exactly, upper and lower case included.

        Returns:
            True the first time; False for a repeat: the transaction of the first is committed.

        Raises:
            InvalidMessageId: if one of them is empty, too long or no text; no SQL was sent.
            TransactionRequired: if the connection commits by itself (AUTOCOMMIT); no SQL was sent.
            WrongSession: if `session` is neither a synchronous session nor a connection.
        """
        accepted_source, accepted_id = inbox_key(source, message_id)
        connection = connection_for(synchronous(session, ACCEPTING), self._target)
        parameters = {
            "accepted_source": accepted_source,
            "accepted_id": accepted_id,
            "accepted_mark": mark(self.table.fullname, accepted_source, accepted_id),
        }
        return connection.execute(self._insert, parameters).first() is not None

    def confirm(self, session: SyncSession, source: str | int | UUID, message_id: str | bytes | int | UUID) -> None:
        """Make sure that this transaction can commit what it has accepted. Call it last, before the commit.

        `consume` and `idempotent` do. It takes one round trip, two if the transaction has accepted another message
        since, and flushes nothing.

        Raises:
            AcceptanceLost: if an error has aborted the transaction, or if it was ended since `accept` returned True.
        """
        accepted_source, accepted_id = inbox_key(source, message_id)
        parameters = {"accepted_source": accepted_source, "accepted_id": accepted_id}
        with confirming(InvalidRequestError):
            connection = connection_for(synchronous(session, ACCEPTING), self._target)
            marked = {"mark": mark(self.table.fullname, accepted_source, accepted_id)}
            if connection.execute(_IS_MARKED, marked).first() is None:
                refuse_lost(goes_on=connection.execute(self._confirm, parameters).first() is not None)

    def begin(self, session: SyncSession) -> None:
        """Mark the transaction of work that accepts no message, for `confirm_begun`; no other database needs that."""
        connection = connection_for(synchronous(session, ACCEPTING), self._target)
        if connection.dialect.name == "postgresql":
            connection.execute(text(BEGIN))

    def confirm_begun(self, session: SyncSession) -> None:
        """Make sure that a transaction can commit since it was marked, or raise AcceptanceLost, as `confirm` does."""
        with confirming(InvalidRequestError):
            connection = connection_for(synchronous(session, ACCEPTING), self._target)
            if connection.dialect.name == "postgresql":
                refuse_lost(goes_on=connection.execute(text(GOES_ON)).first() is not None)

    async def aconfirm(
        self, session: AnyAsyncSession, source: str | int | UUID, message_id: str | bytes | int | UUID
    ) -> None:
        """Confirm on an asynchronous session or connection, as `confirm` does."""
        await asynchronous(session, ACCEPTING).run_sync(self.confirm, source, message_id)

    async def aaccept(
        self, session: AnyAsyncSession, source: str | int | UUID, message_id: str | bytes | int | UUID
    ) -> bool:
        """Accept on an asynchronous session or connection, as `accept` does."""
        return await asynchronous(session, ACCEPTING).run_sync(self.accept, source, message_id)
