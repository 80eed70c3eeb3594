"""Stashing on a bare DB-API connection: one INSERT in the caller's transaction.

    connection.execute("UPDATE orders SET state = 'paid' WHERE id = %s", [order_id])
    Stasher().stash(connection, OutboxRecord(topic="orders", key=order_id, value={"state": "paid"}))
    connection.commit()

Works with psycopg 3, psycopg2 and every other PostgreSQL driver of paramstyle `format`. A `Stasher` never begins,
commits or rolls back. Before it sends any SQL, it refuses a connection that is not in a transaction and will not begin
one (`TransactionRequired`), and a record that does not fit the table (`InvalidRecord`).

Stash last, after the statements that lock rows: ids are drawn in the order of stashing, and only a lock that is already
held makes that the order in which transactions on the same data commit.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from contextlib import closing
from types import TracebackType
from typing import Any, Protocol, Self, Unpack

from outbox_core.drivers import IN_TRANSACTION, plain_cursor, transaction_status
from outbox_core.errors import OutboxError, TransactionRequired
from outbox_core.formats.preparation import FormatOptions, Preparation
from outbox_core.record import OutboxRecord
from outbox_core.schema import BINARY_LAYOUT, TableLayout, TableName

__all__ = [
    "Connection",
    "PreparedStasher",
    "Stasher",
]

_PIPELINE_BUSY = 1
_IN_EXPLICIT_TRANSACTION = IN_TRANSACTION - {_PIPELINE_BUSY}
"""libpq's PQTRANS_INTRANS and PQTRANS_INERROR; PQTRANS_ACTIVE says nothing before the pipeline is drained."""


class Connection(Protocol):
    """The part of a DB-API connection that stashing uses."""

    def cursor(self) -> Any:
        """Make a cursor."""


class Interceptor(Protocol):
    """A test's place between stashes and the database, for all adapters; `outbox_core.testing` takes it.

    Rows are those of `TableLayout.row`, without the partition where the table has no column for it.

    Attributes:
        writes: False if rows are kept in memory: then no SQL is sent, and `keep` is called instead of `stashed`.
    """

    @property
    def writes(self) -> bool:
        """True if stashes go on to the database."""

    def keep(self, connection: object, rows: Sequence[Sequence[Any]]) -> None:
        """Keep rows in memory, after the checks that a stash makes before it sends SQL."""

    def stashed(self, connection: object, rows: Sequence[Sequence[Any]]) -> None:
        """Note rows that have been written in the transaction of a connection."""


interceptor: Interceptor | None = None
"""None outside tests. One for the process, as the code under test may stash in any thread."""


class Stasher:
    """A writer of records into one outbox table. Immutable; may be shared between threads with a connection each.

    Args:
        table: name of the outbox table, `outbox` or `billing.outbox`.
        layout: types and limits of its columns; `TEXT_LAYOUT` for a table as goharvest makes it.
        formats: how values become bytes, see `outbox_core.formats.preparation.Preparation`.

    Attributes:
        insert_sql: the statement that is sent, with a `%s` for every element of `row(record)`.

    Raises:
        InvalidConfig: if `table` is not a table name, or a serializer cannot be called.
    """

    __slots__ = ("_preparation", "insert_sql", "layout", "table")

    def __init__(
        self,
        table: str | TableName = "outbox",
        layout: TableLayout = BINARY_LAYOUT,
        **formats: Unpack[FormatOptions],
    ) -> None:
        self.table = TableName.parse(table) if isinstance(table, str) else table
        self.layout = layout
        self.insert_sql = insert_sql(self.table, layout)
        self._preparation = Preparation(insert_claim=_insert_claim, **formats)

    def __repr__(self) -> str:
        return f"Stasher({str(self.table)!r})"

    def stash(self, connection: Connection, record: OutboxRecord) -> None:
        """Write one record in the connection's transaction.

        Raises:
            InvalidRecord: if the record does not fit the table; nothing was sent.
            TransactionRequired: if the connection is in autocommit mode and outside a transaction; nothing was sent.
        """
        row = self.row(record, _ready(connection))
        if interceptor is not None and not interceptor.writes:
            interceptor.keep(connection, [row])
            return
        with closing(plain_cursor(connection)) as cursor:
            cursor.execute(self.insert_sql, row)
        if interceptor is not None:
            interceptor.stashed(connection, [row])

    def stash_many(self, connection: Connection, records: Iterable[OutboxRecord]) -> None:
        """Write records in their order, in one batch; raises as `stash` does, before any record is sent.

        psycopg 3 sends them without waiting for each answer.
        """
        ready = _ready(connection)
        rows = [self.row(record, ready) for record in records]
        if interceptor is not None and not interceptor.writes:
            interceptor.keep(connection, rows)
            return
        if rows:
            with closing(plain_cursor(connection)) as cursor:
                cursor.executemany(self.insert_sql, rows)
        if interceptor is not None:
            interceptor.stashed(connection, rows)

    def prepare(self, connection: Connection) -> PreparedStasher:
        """Return a stasher of single records, bound to this connection.

        Raises:
            TransactionRequired: if the connection is in autocommit mode and outside a transaction.
        """
        return PreparedStasher(self, connection)

    def row(self, record: OutboxRecord, connection: Connection | None = None) -> tuple[object, ...]:
        """Return the parameters of `insert_sql` for one record; raise InvalidRecord if it does not fit the table.

        A large payload goes to a claim store in the database on this connection, if there is one.
        """
        return self.layout.row(self._preparation.prepare(record, connection))[: len(self.layout.columns)]


class PreparedStasher:
    """A stasher of single records over one cursor; made by `Stasher.prepare`, closed at the end of its `with` block.

    On psycopg 3 the server parses the INSERT once. Used by one thread, like the connection.
    """

    __slots__ = ("_connection", "_cursor", "_options", "_stasher")

    def __init__(self, stasher: Stasher, connection: Connection) -> None:
        require_transaction(connection)
        self._stasher = stasher
        self._connection = connection
        self._cursor = plain_cursor(connection)
        # Only psycopg 3 has this attribute, and the argument to prepare on first use instead of the fifth.
        self._options = {"prepare": True} if hasattr(connection, "prepare_threshold") else {}

    def stash(self, record: OutboxRecord) -> None:
        """Write one record in the connection's transaction; raises as `Stasher.stash` does."""
        row = self._stasher.row(record, _ready(self._connection))
        if interceptor is not None and not interceptor.writes:
            interceptor.keep(self._connection, [row])
            return
        self._cursor.execute(self._stasher.insert_sql, row, **self._options)
        if interceptor is not None:
            interceptor.stashed(self._connection, [row])

    def close(self) -> None:
        """Close the cursor; the transaction stays as it is."""
        self._cursor.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _ready(connection: Connection) -> Connection | None:
    """Refuse a connection before a large payload is in its claim store; None for an outbox in memory."""
    if interceptor is not None and not interceptor.writes:
        return None
    require_transaction(connection)
    return connection


def _insert_claim(connection: Connection, table: TableName, name: str, payload: bytes) -> None:
    escaped_name = table.quoted.replace("%", "%%")
    with closing(plain_cursor(connection)) as cursor:
        cursor.execute(f"INSERT INTO {escaped_name} (name, payload) VALUES (%s, %s)", [name, payload])


def insert_sql(table: TableName, layout: TableLayout) -> str:
    """Return the INSERT of a stash with `%s` placeholders, for the columns of `layout` in the order of its rows.

    The database's clock writes create_time: by the column's default, or named here where there is none. Arrays are
    cast, because an empty array or one of only NULLs has no type of its own.
    """
    array = "bytea[]" if layout.values == "binary" else "text[]"
    casts = {"kafka_header_keys": "::text[]", "kafka_header_values": f"::{array}"}
    columns = layout.columns
    placeholders = ", ".join(f"%s{casts.get(column, '')}" for column in columns)
    escaped_name = table.quoted.replace("%", "%%")
    if layout.has_time_default:
        return f"INSERT INTO {escaped_name} ({', '.join(columns)}) VALUES ({placeholders})"
    return f"INSERT INTO {escaped_name} (create_time, {', '.join(columns)}) VALUES (now(), {placeholders})"


def require_transaction(connection: object, subject: str = "record") -> None:
    """Refuse a connection on which a statement would commit by itself; `subject` names the written thing in the error.

    Raises:
        TransactionRequired: if the connection is in autocommit mode and not inside an explicit transaction.
        OutboxError: if the connection is asynchronous.
    """
    driver_connection = getattr(connection, "driver_connection", None) or connection  # of an SQLAlchemy pool
    if inspect.iscoroutinefunction(getattr(driver_connection, "commit", None)):
        raise OutboxError(
            f"{type(driver_connection).__module__}.{type(driver_connection).__name__} is asynchronous; "
            "outbox_sqlalchemy has `astash` and `aaccept` for asynchronous sessions and connections"
        )
    if getattr(driver_connection, "autocommit", False) is True and not _in_explicit_transaction(driver_connection):
        raise TransactionRequired(
            f"the connection is in autocommit mode and outside a transaction, so the {subject} would not be atomic "
            "with your data; begin a transaction first, or turn autocommit off"
        )


def _in_explicit_transaction(connection: Any) -> bool:
    """Return True if an autocommit connection is in a BEGIN block, as far as the driver knows (psycopg does)."""
    if transaction_status(connection) == _PIPELINE_BUSY and hasattr(connection, "pipeline"):
        with connection.pipeline():  # entering a nested pipeline waits for what was sent so far
            pass
    return transaction_status(connection) in _IN_EXPLICIT_TRANSACTION
