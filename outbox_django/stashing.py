"""Stashing records in a Django transaction.

    with transaction.atomic():
        order.save()
        stash(OutboxRecord(topic="orders", key=order.pk, value={"total": 42}))

The database is, in this order: the `using` of the call, the `using` of the `OutboxTable`, `OUTBOX["DATABASE"]`, or what
the routers answer to `db_for_write(Outbox)`. There the record is written over Django's own connection, so it shares the
fate of everything else in the surrounding `atomic` block or savepoint, and shows in query logs and `assertNumQueries`.

Stash last, after the statements that lock rows: ids are drawn in the order of stashing, and only a lock that is already
held makes that the order in which transactions on the same data commit.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache

from django.db import transaction
from django.db.backends.base.base import BaseDatabaseWrapper

from outbox_core import doorbell
from outbox_core.record import OutboxRecord
from outbox_core.schema import BINARY_LAYOUT, TableLayout
from outbox_core.stasher import Stasher
from outbox_django.databases import connection_in_transaction, write_alias
from outbox_django.settings import outbox_settings


class OutboxTable:
    """One of several outbox tables of a project: `OutboxTable("billing_outbox", using="billing").stash(record)`.

    Immutable, and may be made at module level: nothing is looked up before a record is stashed.

    Args:
        name: name of the table, `table` or `schema.table`.
        using: alias of the database that has it, unless a call names another.
        layout: what its columns hold; `outbox_core.schema.TEXT_LAYOUT` for a table as goharvest makes it.

    Raises:
        InvalidConfig: if `name` is not a table name.
    """

    __slots__ = ("_stasher", "_using")

    def __init__(self, name: str, *, using: str | None = None, layout: TableLayout = BINARY_LAYOUT) -> None:
        self._stasher = Stasher(name, layout)
        self._using = using

    def __repr__(self) -> str:
        return f"OutboxTable({self._stasher!r}, using={self._using!r})"

    def stash(self, record: OutboxRecord, *, using: str | None = None) -> None:
        """Write one record in the current transaction; arguments and errors as of `outbox_django.stash`."""
        connection = _connection_in_transaction(using or self._using)
        self._stasher.stash(connection, record)
        _ring_after_commit(connection)

    def stash_many(self, records: Iterable[OutboxRecord], *, using: str | None = None) -> None:
        """Write records in their order, in one batch; arguments and errors as of `outbox_django.stash_many`."""
        connection = _connection_in_transaction(using or self._using)
        self._stasher.stash_many(connection, records)
        _ring_after_commit(connection)


def stash(record: OutboxRecord, *, using: str | None = None) -> None:
    """Write a record to the outbox in the current transaction; it is published if and only if that commits.

    Args:
        record: what to publish.
        using: alias of the database whose transaction it belongs to; without it see the module's docstring.

    Raises:
        TransactionRequired: if that database is in autocommit mode and outside an `atomic` block; nothing was written.
        InvalidRecord: if the record does not fit the table; nothing was sent to the database.
        InvalidConfig: if the alias does not exist or is no PostgreSQL database, or the OUTBOX setting is wrong.
        django.db.Error: what Django raises for a failed statement, for example if the table is missing.
    """
    _configured_table().stash(record, using=using)


def stash_many(records: Iterable[OutboxRecord], *, using: str | None = None) -> None:
    """Write records in their order, in one batch: all of them, or none when any of them does not fit.

    Arguments and errors as of `stash`.
    """
    _configured_table().stash_many(records, using=using)


def stash_on(connection: BaseDatabaseWrapper, record: OutboxRecord) -> None:
    """`stash` in the transaction of one of Django's connections, for callers that know no aliases.

    Raises:
        TransactionRequired: if it is in autocommit mode and outside an `atomic` block; nothing was written.
        InvalidRecord: if the record does not fit the table; nothing was sent to the database.
    """
    stash(record, using=connection.alias)


def stash_alias() -> str:
    """Alias of the database that `stash` writes to unless told otherwise."""
    return write_alias("Outbox")


def _configured_table() -> OutboxTable:
    current = outbox_settings()
    return _table(current.table.quoted, current.table_layout)


@lru_cache(maxsize=16)
def _table(name: str, layout: TableLayout) -> OutboxTable:
    return OutboxTable(name, layout=layout)


def _connection_in_transaction(using: str | None) -> BaseDatabaseWrapper:
    return connection_in_transaction(using or stash_alias(), "stash", "record")


def _ring_after_commit(connection: BaseDatabaseWrapper) -> None:
    """Have a harvester in this process, if there is one, look at the outbox once the transaction is committed."""
    if not doorbell.is_heard() or not connection.in_atomic_block:
        return
    if not any(entry[1] is doorbell.ring for entry in connection.run_on_commit):
        transaction.on_commit(doorbell.ring, using=connection.alias, robust=True)
