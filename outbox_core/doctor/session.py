"""A database session that waits neither for locks nor for slow answers; for commands that look, it reads only.

SELECT on the outbox and its holds suffices. Statements that read the catalogs alone are answered even while the table
is locked, so they come first; the first statement that meets the lock names who has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, Self

import psycopg

from outbox_core.errors import OutboxTableError, RowsHidden, StoreSilent, StoreUnavailable
from outbox_core.row_security import fetch_on, is_refusal, refuse_hidden, set_row_security
from outbox_core.schema import TableName, hold_beside, quote
from outbox_core.stores.postgres.connection import (
    CONNECTION_DEFAULTS,
    Connection,
    location,
    milliseconds,
    one_line,
    parameters_of,
    pin_search_path,
)
from outbox_core.stores.postgres.deadlines import BoundedConnection, ConnectionGivenUp

CONNECT_SECONDS = 2.0
LOCK_SECONDS = 1.5
_STATEMENT_SECONDS = 5.0

_SETTINGS = """
SELECT set_config('lock_timeout', %s, false), set_config('statement_timeout', %s, false),
       set_config('default_transaction_read_only', %s, false), set_config('idle_session_timeout', '0', false),
       set_config('default_transaction_isolation', 'read committed', false)
"""

_IDENTITY = """
SELECT current_database(), n.nspname, c.relname
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""

_SERVER_ID = "SELECT system_identifier::text FROM pg_control_system()"

# Every statement here waits for this mode alone; one that waits for it keeps later statements out, too.
_BLOCKERS = """
SELECT l.pid, l.relation::regclass::text, l.granted, nullif(a.application_name, ''), a.usename, a.state,
       extract(epoch FROM clock_timestamp() - a.xact_start)::float8, pg_blocking_pids(l.pid)
FROM pg_locks AS l LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
WHERE l.locktype = 'relation' AND l.mode = 'AccessExclusiveLock' AND l.pid IS DISTINCT FROM pg_backend_pid()
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.relation = ANY (ARRAY[to_regclass(%(table)s), to_regclass(%(holds)s)]::oid[])
ORDER BY l.granted DESC, 7 DESC NULLS LAST LIMIT 3
"""


class TableLocked(StoreUnavailable):
    """The outbox table or that of its holds is locked; `remedy` ends the session that has the lock."""

    def __init__(self, message: str, remedy: str) -> None:
        super().__init__(message)
        self.remedy = remedy


class DatabaseSession:
    """A session on the outbox's database. Use it as a context manager, from one thread.

    Args:
        data_source: as libpq reads it.
        table: the outbox table, `table` or `schema.table`.
        application_name: the session's name in `pg_stat_activity`.
        connect_seconds: for how long to try to connect, to each address.
        writes: let statements write, too.

    Raises:
        InvalidConfig: for an unreadable data source.
        StoreUnavailable: if the database cannot be reached, or does not let us in.
        OutboxTableError: behind a pooler that lends its connections for one transaction at a time.
    """

    def __init__(
        self,
        data_source: str,
        table: str,
        *,
        application_name: str,
        connect_seconds: float = CONNECT_SECONDS,
        writes: bool = False,
    ) -> None:
        name = TableName.parse(table)
        place = location(data_source)
        try:
            given = parameters_of(data_source)
            given["connect_timeout"] = max(2, round(connect_seconds))  # libpq takes less for two
            given["application_name"] = application_name
            self.connection: Connection = BoundedConnection.connect(**{**CONNECTION_DEFAULTS, **given}, autocommit=True)
        except psycopg.Error as error:
            raise StoreUnavailable(f"cannot connect to {place}: {one_line(error)}") from None
        self.place = place
        try:
            (self.table,) = pin_search_path(self.connection, name)
            self.holds = hold_beside(self.table)
            with self.translated():  # the role may lack the right to a schema
                set_row_security(fetch_on(self.connection), (self.table, self.holds))
            limits = milliseconds(LOCK_SECONDS), milliseconds(_STATEMENT_SECONDS)
            self.connection.execute(_SETTINGS, (*limits, "off" if writes else "on"))
            self.connection.set_patience(_STATEMENT_SECONDS, purpose=application_name)
        except ConnectionGivenUp as error:
            raise StoreSilent(str(error)) from None
        except psycopg.Error as error:
            self.connection.close()
            raise StoreUnavailable(f"{place} does not answer: {one_line(error)}") from None
        except OutboxTableError:
            self.connection.close()
            raise

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def role(self) -> str:
        """The role, as statements name it."""
        return quote(self.connection.role)

    def identity(self) -> str | None:
        """Return `<database>.<schema>.<table>`, None if there is no such table."""
        rows = self.ask(_IDENTITY, (self.table.quoted,))
        return ".".join(rows[0]) if rows else None

    def server_id(self) -> str:
        """Return the server's system identifier, '' where it may not be read (some hosted databases)."""
        try:
            return str(self.ask(_SERVER_ID)[0][0])
        except OutboxTableError:
            return ""

    def ask(self, statement: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        """Run a statement and return its rows; the errors are those of `translated`."""
        with self.translated():
            return self.connection.execute(statement, parameters).fetchall()

    @contextmanager
    def translated(self) -> Iterator[None]:
        """Translate the errors of statements on the connection.

        Raises:
            TableLocked: if one waited for a lock.
            RowsHidden: if row level security would hide rows from one.
            OutboxTableError: if the role lacks a right, or the table a column.
            StoreUnavailable: if the database failed, took longer than 5 s, or said nothing for 15 s.
        """
        try:
            yield
        except psycopg.errors.LockNotAvailable:
            raise self._locked() from None
        except psycopg.errors.QueryCanceled:
            raise StoreUnavailable(
                f"{self.place} gave no answer within {_STATEMENT_SECONDS:g} s; dead rows at the table's head that "
                "vacuum cannot remove are the usual cause"
            ) from None
        except ConnectionGivenUp as error:
            raise StoreSilent(str(error), in_doubt=True) from None
        except psycopg.OperationalError as error:
            raise StoreUnavailable(f"{self.place} failed: {one_line(error)}") from None
        except psycopg.Error as error:
            if is_refusal(error):
                refuse_hidden(fetch_on(self.connection), (self.table, self.holds))
                raise RowsHidden(f"{one_line(error)}, for role {self.role}") from None
            role = "" if " as role " in self.place else f" as role {self.role}"
            raise OutboxTableError(f"{one_line(error)} (in {self.place}{role})") from None

    def _locked(self) -> TableLocked:
        names = {"table": self.table.quoted, "holds": self.holds.quoted}
        rows = [_Blocker(*row) for row in self.ask(_BLOCKERS, names)]
        if not rows:
            return TableLocked(
                f"{self.table} was locked for more than {LOCK_SECONDS:g} s, and is free again", "run the command again"
            )
        described = "; ".join(row.describe() for row in rows)
        pid = next((row.pid for row in rows if row.pid is not None), None)
        remedy = "SELECT gid, owner, prepared FROM pg_prepared_xacts"
        if pid is not None:
            remedy = f"SELECT pg_terminate_backend({pid})"
        return TableLocked(described, remedy)


class _Blocker(NamedTuple):
    """A row of `_BLOCKERS`."""

    pid: int | None  # None for a prepared transaction
    relation: str
    granted: bool
    application: str | None
    role: str | None
    state: str | None
    seconds: float | None
    blocked_by: list[int]

    def describe(self) -> str:
        who = f"pid {self.pid}" if self.pid is not None else "a prepared transaction"
        about = ", ".join(word for word in (self.application, self.role and f"role {self.role}", self.state) if word)
        does = "holds" if self.granted else "waits for"
        since = "" if self.seconds is None else f", in a transaction of {self.seconds:,.0f} s"
        behind = "" if self.granted or not self.blocked_by else f", behind pid {', '.join(map(str, self.blocked_by))}"
        return f"{who}{f' ({about})' if about else ''} {does} ACCESS EXCLUSIVE on {self.relation}{since}{behind}"


def assumed_identity(data_source: str, table: str) -> str:
    """Return the probable `<database>.<schema>.<table>` of an outbox whose database does not answer."""
    name = TableName.parse(table)
    try:
        given = psycopg.conninfo.conninfo_to_dict(data_source)
    except psycopg.ProgrammingError:
        given = {}
    database = given.get("dbname") or given.get("user") or "postgres"
    return f"{database}.{name.schema or 'public'}.{name.table}"
