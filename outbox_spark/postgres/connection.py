"""Connections of pipelines to PostgreSQL: with a pinned search path, and errors without passwords."""

from __future__ import annotations

import psycopg

from outbox_core.config import redact
from outbox_core.errors import InvalidConfig, StoreUnavailable
from outbox_core.row_security import fetch_on, set_row_security
from outbox_core.schema import TableName
from outbox_core.stores.postgres.connection import Connection, pin_search_path
from outbox_core.stores.postgres.deadlines import BoundedConnection
from outbox_spark.runtime.secrets import filled

_CONNECT_SECONDS = 10

_SESSION = """
SELECT pg_catalog.current_schema(), pg_catalog.set_config('synchronous_commit', 'on', false)
"""


def connect(
    dsn: str, *names: TableName, what: str, application_name: str = "outbox-spark", autocommit: bool = False
) -> tuple[Connection, list[TableName]]:
    """Connect with a pinned search path; return also the tables' full names, found or to be created.

    A table without a schema is looked up by the session's own search path; a missing one belongs to the path's first
    schema. `what` names the connection's purpose in errors. Raises InvalidConfig and StoreUnavailable.
    """
    try:
        given = psycopg.conninfo.conninfo_to_dict(dsn)
    except psycopg.ProgrammingError:
        # Without the driver's words: they quote the DSN, perhaps its password.
        raise InvalidConfig(f"dsn of {what}: libpq cannot read it") from None
    defaults = {"connect_timeout": _CONNECT_SECONDS, "application_name": application_name}
    connection: Connection | None = None
    try:
        connection = BoundedConnection.connect(**{**defaults, **filled(given)}, autocommit=True)
        (first, _) = connection.execute(_SESSION).fetchone() or (None, None)
        found = pin_search_path(connection, *names)
        tables = [name if name.schema else TableName(name.table, first) for name in found]
        if tables:  # nothing is concluded from rows that a policy hides: PostgreSQL refuses such a statement
            connection.policies = set_row_security(fetch_on(connection), tables)
        connection.autocommit = autocommit
        connection.set_patience(0.0, purpose=what)
    except psycopg.Error as error:
        if connection is not None:
            connection.close()
        raise StoreUnavailable(f"cannot reach the database of {what}: {one_line(error)}") from None
    return connection, tables


def one_line(error: Exception) -> str:
    """Return the server's or the driver's message without the statement, line breaks and passwords."""
    text = (isinstance(error, psycopg.Error) and error.diag.message_primary) or str(error)
    return redact("; ".join(line.strip() for line in text.splitlines() if line.strip()) or type(error).__name__)


def with_parameters(name: TableName) -> str:
    """Quote the table's name for a statement that has parameters, where a % begins one."""
    return name.quoted.replace("%", "%%")
