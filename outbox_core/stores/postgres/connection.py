"""Connections to PostgreSQL for harvesting, safe from roles that may create objects in a schema.

**The search path is pinned.** PostgreSQL takes a function or operator that fits its arguments better than its own from
any schema on the path (CVE-2018-1058): a role that may create one in `public` could have the harvester's role run it.
So a session's own path is used once, to find tables that were named without a schema, by statements without operators
and with qualified functions. From then on it is `pg_catalog, pg_temp`, and statements name tables with their schemas.

Before that, a pooler is refused that lends its connections for one transaction at a time: a pinned path, which the next
client of the pool would get, ends all that an application sends.

Triggers on those tables run under this path, too. They must qualify their names, as for `pg_restore`.
"""

from __future__ import annotations

import re
from contextlib import closing
from typing import Any
from uuid import uuid4

import psycopg

from outbox_core.errors import InvalidConfig, OutboxTableError, StoreSilent, StoreUnavailable
from outbox_core.schema import TableName
from outbox_core.stores.postgres.deadlines import BoundedConnection, ConnectionGivenUp

_WHO = "SELECT pg_catalog.pg_backend_pid(), current_user"

_FIND = "SELECT pg_catalog.to_regclass(%s)::pg_catalog.oid"

_PIN = """SELECT pg_catalog.set_config('search_path', 'pg_catalog, pg_temp', false),
    pg_catalog.set_config('quote_all_identifiers', 'off', false)"""  # names of types are compared

_NAME = """
SELECT n.nspname, c.relname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = %s
"""

_SESSION = """
SELECT set_config('synchronous_commit', 'on', false),
       -- Statements that are serializable by default would fail for what others read, and make others' fail.
       set_config('default_transaction_isolation', 'read committed', false),
       set_config('statement_timeout', %(statement_timeout)s, false),
       -- Whatever role or database set: a session that is ended in between is an outage of our own making. The last
       -- one is known from PostgreSQL 17 on.
       set_config('lock_timeout', '0', false),
       set_config('idle_session_timeout', '0', false),
       CASE WHEN current_setting('transaction_timeout', true) IS NOT NULL
            THEN set_config('transaction_timeout', '0', false) END,
       -- A client that was frozen or cut off while rows were sent to it, or between a statement and its COMMIT, keeps
       -- them locked: the server waits for it with the transaction open, for which no statement_timeout counts. So the
       -- server's side of a connection gives up as soon as ours does. (Over a Unix socket those of TCP have no effect.)
       set_config('idle_in_transaction_session_timeout', %(unread)s, false),
       set_config('tcp_user_timeout', %(unread)s, false),
       set_config('tcp_keepalives_idle', '5', false),
       set_config('tcp_keepalives_interval', '2', false),
       set_config('tcp_keepalives_count', '3', false),
       -- The head of the table is found through its primary key, always. Statistics of a table that is empty one
       -- minute and holds a million rows the next would have the planner sort the whole table instead.
       set_config('enable_seqscan', 'off', false),
       set_config('enable_bitmapscan', 'off', false),
       set_config('enable_sort', 'off', false),
       set_config('enable_hashjoin', 'off', false),
       set_config('enable_mergejoin', 'off', false),
       set_config('jit', 'off', false),
       -- With these settings all parameters have the same plan. Planning anew for those at hand would take longer than
       -- a small mark or scan itself.
       set_config('plan_cache_mode', 'force_generic_plan', false),
       pg_is_in_recovery()
"""

CONNECTION_DEFAULTS = {
    # Whatever role or database set: there are texts that no other encoding has.
    "client_encoding": "utf8",
    # Without these a database that vanishes behind a firewall is noticed after two hours.
    "connect_timeout": "10",
    "keepalives_idle": "5",
    "keepalives_interval": "2",
    "keepalives_count": "3",
    "tcp_user_timeout": "10000",
}

LENT_BY_TRANSACTION = (
    "the database's address is that of a pooler that lends its connections for one transaction at a time (PgBouncer's "
    "pool_mode=transaction): settings of this session would come to other applications, and be lost to it. Name the "
    "database itself, or a pool of sessions"
)

_UNREAD_SECONDS = 10.0  # as the client's tcp_user_timeout
_PROBE_SETTING = "kafka_outbox.session"
_TRIES = 3
_CONSTRAINT_VIOLATIONS = "23"  # class of SQLSTATE

Connection = BoundedConnection[tuple[Any, ...]]


def pin_search_path(connection: psycopg.Connection[Any], *names: TableName) -> list[TableName]:
    """Find tables by the session's search path, and from then on use no schema but `pg_catalog`.

    Call it before any other statement of the session. Outside autocommit it begins a transaction. Rows must be readable
    by position. A table that is not found is returned without a schema. Behind a pooler of transactions it closes the
    connection and raises OutboxTableError.
    """
    # A pooler gives its clients process ids of its own. To tell more takes a second connection.
    pid, role = connection.execute(_WHO).fetchone() or (None, "")
    if isinstance(connection, BoundedConnection):
        connection.role = role
    if pid != connection.info.backend_pid:
        given: dict[str, Any] = {"password": connection.info.password, "connect_timeout": 10}
        with BoundedConnection.connect(connection.info.dsn, **given, autocommit=True) as second:
            is_lent = is_lent_by_transaction(connection, second)
        if is_lent:
            connection.close()
            raise OutboxTableError(LENT_BY_TRANSACTION)
    oids = [None if name.schema else connection.execute(_FIND, (name.quoted,)).fetchone() for name in names]
    connection.execute(_PIN)
    found = []
    for name, row in zip(names, oids, strict=True):
        place = connection.execute(_NAME, (row[0],)).fetchone() if row is not None and row[0] is not None else None
        found.append(name if place is None else TableName(place[1], place[0]))
    return found


def connect_to_primary(
    data_source: str, application_name: str, *names: TableName, statement_timeout: float = 0.0
) -> tuple[Connection, list[TableName]]:
    """Open an autocommit connection for harvesting; return it and these tables as it finds them.

    `statement_timeout` is in seconds, 0.0 for none. A statement that is not answered for longer gives the connection up
    (see `deadlines`). Raises StoreUnavailable if the server refuses us, does not answer or is a standby.
    """
    given = parameters_of(data_source)
    settings: dict[str, Any] = {"application_name": application_name, **CONNECTION_DEFAULTS, **given}
    try:
        connection: Connection = BoundedConnection.connect(**settings, autocommit=True)
    except psycopg.Error as error:
        raise StoreUnavailable(f"cannot connect to {location(data_source)}: {one_line(error)}") from None
    try:
        tables = pin_search_path(connection, *names)
        timeouts = {"statement_timeout": milliseconds(statement_timeout), "unread": milliseconds(_UNREAD_SECONDS)}
        row = connection.execute(_SESSION, timeouts).fetchone()
    except ConnectionGivenUp as error:
        raise StoreSilent(str(error)) from None
    except psycopg.Error as error:
        connection.close()
        raise StoreUnavailable(f"the database refused the session's settings: {one_line(error)}") from None
    if row is None or row[-1]:
        # A standby lags behind: what has been purged would be found there again.
        connection.close()
        raise StoreUnavailable("the database server is a standby; name the primary")
    connection.set_patience(statement_timeout, purpose=application_name)
    return connection, tables


def parameters_of(data_source: str) -> dict[str, Any]:
    """Return libpq's parameters in a data source. Raises InvalidConfig, without the driver's words: they quote it."""
    try:
        return psycopg.conninfo.conninfo_to_dict(data_source)
    except psycopg.ProgrammingError:
        if re.search("[?&]ssl=", data_source):  # no other name: it may be a part of a password
            text = "data_source: `ssl` is a parameter of asyncpg's, and libpq has `sslmode`: write sslmode=require, say"
            raise InvalidConfig(text) from None
        raise InvalidConfig("data_source: is neither a libpq connection string nor a postgresql:// URL") from None


def location(data_source: str) -> str:
    """Return where a data source leads, without secrets: `database shop at db.example:5432 as role app`."""
    try:
        given = psycopg.conninfo.conninfo_to_dict(data_source)
    except psycopg.ProgrammingError:
        return "the database"
    if _is_default(data_source):
        return "the default database, postgres at localhost (set --dsn, OUTBOX_POSTGRES_DSN or dataSource for another)"
    host = given.get("host") or given.get("hostaddr") or "the local socket"
    port = f":{given['port']}" if given.get("port") and not str(host).startswith("/") else ""
    role = f" as role {given['user']}" if given.get("user") else ""
    return f"database {given.get('dbname') or given.get('user') or '(the default)'} at {host}{port}{role}"


def _is_default(data_source: str) -> bool:
    try:
        from outbox_core.config import DEFAULT_DATA_SOURCE, normalise_data_source
    except ImportError:  # the base install, which has no default
        return False
    return data_source == normalise_data_source(DEFAULT_DATA_SOURCE)


def is_lent_by_transaction(first: Any, second: Any) -> bool:
    """Detect a pooler that lends sessions for one transaction: connections share settings, or change processes.

    Both are connections of any driver, in autocommit mode.
    """
    token = str(uuid4())
    for _ in range(_TRIES):
        (pid, _) = _one(first, "SELECT pg_catalog.pg_backend_pid(), pg_catalog.set_config(%s, %s, false)", token)
        with closing(second.cursor()) as cursor:
            cursor.execute("BEGIN")
            (_, seen) = _one(second, "SELECT 0, pg_catalog.current_setting(%s, true)")
            (pid_now, _) = _one(first, "SELECT pg_catalog.pg_backend_pid(), %s")
            cursor.execute("COMMIT")
        if seen == token or pid_now != pid:
            return True
    return False


def _one(connection: Any, statement: str, *values: str) -> tuple[Any, ...]:
    with closing(connection.cursor()) as cursor:
        cursor.execute(statement, (_PROBE_SETTING, *values))
        return cursor.fetchone() or (None, None)


def milliseconds(seconds: float) -> str:
    """Return a duration as a setting of PostgreSQL."""
    return str(round(seconds * 1000))


def one_line(error: psycopg.Error) -> str:
    """Return a driver's message without line breaks, and without the values of a row that violates a constraint."""
    is_of_row = (error.sqlstate or "").startswith(_CONSTRAINT_VIOLATIONS)
    text = (is_of_row and error.diag.message_primary) or str(error).removeprefix("connection failed: ")
    return "; ".join(line.strip() for line in text.splitlines() if line.strip())
