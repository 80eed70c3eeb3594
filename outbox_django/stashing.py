"""Stashing records in a Django transaction.

The database is, in this order: the `using` of the call, the `using` of the `OutboxTable`, `OUTBOX["DATABASE"]`, or the
routers' `db_for_write(Outbox)`. Django's own connection writes the record, so it shares the fate of the surrounding
`atomic` block or savepoint.

Stash last, after the statements that lock rows: ids are drawn in the order of stashing, and only a lock that is already
held makes that the order in which transactions on the same data commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Unpack

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox_core import commit_signal, stasher
from outbox_core.formats.preparation import FormatOptions
from outbox_core.record import OutboxRecord
from outbox_core.schema import BINARY_LAYOUT, TableLayout
from outbox_core.stasher import Stasher
from outbox_django.databases import connection_in_transaction, write_alias
from outbox_django.settings import outbox_settings


class OutboxTable:
    """One of several outbox tables of a project: `OutboxTable("billing_outbox", using="billing").stash(record)`.

    Immutable, and may be made at module level. `using` is the alias of its database, unless a call names another;
    `layout` is `outbox_core.schema.TEXT_LAYOUT` for a table as goharvest makes it; `formats` say how values become
    bytes, see `outbox_core.formats.preparation.Preparation`.
    """

    __slots__ = ("_stasher", "_using")

    def __init__(
        self,
        name: str,
        *,
        using: str | None = None,
        layout: TableLayout = BINARY_LAYOUT,
        **formats: Unpack[FormatOptions],
    ) -> None:
        self._stasher = Stasher(name, layout, **formats)
        self._using = using

    def __repr__(self) -> str:
        return f"OutboxTable({self._stasher!r}, using={self._using!r})"

    def stash(self, record: OutboxRecord, *, using: str | None = None) -> None:
        """Write one record in the current transaction, as `outbox_django.stash` does."""
        connection = _connection_in_transaction(using or self._using)
        self._stasher.stash(connection, record)
        _notify_after_commit(connection)

    def stash_many(self, records: Iterable[OutboxRecord], *, using: str | None = None) -> None:
        """Write records in their order, in one batch, as `outbox_django.stash_many` does."""
        connection = _connection_in_transaction(using or self._using)
        self._stasher.stash_many(connection, records)
        _notify_after_commit(connection)


def stash(record: OutboxRecord, *, using: str | None = None) -> None:
    """Write a record to the outbox in the current transaction; it is published if and only if that commits.

    Args:
        record: the record.
        using: alias of the database whose transaction it belongs to; without it see the module's docstring.

    Raises:
        TransactionRequired: if that database is in autocommit mode and outside an `atomic` block; nothing was written.
        InvalidRecord: if the record does not fit the table; nothing was sent to the database.
        InvalidConfig: if the alias does not exist or is no PostgreSQL database, or the OUTBOX setting is wrong.
        django.db.Error: of a failed statement, for example if the table is missing.
    """
    _configured_table().stash(record, using=using)


def stash_many(records: Iterable[OutboxRecord], *, using: str | None = None) -> None:
    """Write records in their order, in one batch, as `stash` does: all of them, or none if one does not fit."""
    _configured_table().stash_many(records, using=using)


def stash_on(connection: BaseDatabaseWrapper, record: OutboxRecord) -> None:
    """Stash a queue's message in the transaction of one of Django's connections.

    Its partition was drawn to spread messages; a table without a column for it does without.
    """
    if not outbox_settings().table_layout.has_partition:
        record = replace(record, partition=None)
    stash(record, using=connection.alias)


def stash_alias() -> str:
    """Return the alias of the database that `stash` writes to by default."""
    return write_alias("Outbox")


def _configured_table() -> OutboxTable:
    current = outbox_settings()
    return _table(current.table.quoted, current.table_layout)


@lru_cache(maxsize=16)
def _table(name: str, layout: TableLayout) -> OutboxTable:
    return OutboxTable(name, layout=layout)


def _connection_in_transaction(using: str | None) -> BaseDatabaseWrapper:
    alias = using or stash_alias()
    if stasher.interceptor is not None:
        from outbox_django.testing import intercepted_connection

        return intercepted_connection(alias, stasher.interceptor)
    return connection_in_transaction(alias, "stash", "record")


def _notify_after_commit(connection: BaseDatabaseWrapper) -> None:
    """Notify the harvesters of this process, if there are any, once the transaction is committed."""
    if not commit_signal.has_subscribers() or not connection.in_atomic_block:
        return
    if not any(entry[1] is commit_signal.notify for entry in connection.run_on_commit):
        transaction.on_commit(commit_signal.notify, using=connection.alias, robust=True)
