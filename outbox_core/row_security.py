"""Row level security: policies that hide rows of an outbox's tables from a role.

**To see nothing is not to know that there is nothing.** A DELETE that deletes nothing, a scan that finds no row, a
table of holds that looks empty: each lets something go on, and each may be the work of a policy that hides rows. So

- sessions of our own set `row_security` to `off`. PostgreSQL then refuses each statement that a policy would filter,
  when it plans it, with the lock of the table;
- a role that policies hide nothing from would be refused, too. These are deliberate policies: for each command that the
  role may use, a permissive one for this role or PUBLIC is `true`, and no restrictive one is anything else. For such
  a role the setting stays `on`, and each transaction of ours is watched (`seeing_all`): before it ends, the policies
  of the tables that it has locked are looked at again. Whoever changes a policy needs ACCESS EXCLUSIVE on its table,
  which the lock keeps from him until then: so what is found are the policies that its statements ran with. Whoever
  exempts a role (BYPASSRLS, membership in the owner) needs no lock: a table that was not exempt before, and is now, is
  no evidence, and as a plan made before may live on, the connection is closed;
- on a connection of the caller's, whose settings are not ours, the question comes before the statement, or is part of
  one that would do harm. In a transaction that has one snapshot (REPEATABLE READ, SERIALIZABLE) it would find old
  policies, while statements run with those of now: there no policy passes for deliberate.

Policies for roles that this one is a member of do not count, as memberships are granted and revoked without a lock.
Those of a partition do not count either: PostgreSQL applies those of the table that a statement names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from typing import Any, NamedTuple, Protocol

from outbox_core.drivers import plain_cursor
from outbox_core.errors import RowsHidden
from outbox_core.schema import TableName
from outbox_core.watched_calls import SHORT_SECONDS, watched

Fetch = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
"""A function that runs a statement with parameters and returns its rows."""

ONE_SNAPSHOT = ("repeatable read", "serializable")
"""The isolation levels of transactions that do not see what others commit meanwhile."""

# INSERT does not count: what it may not insert is an error.
_HIDES = """
row_security_active({oid}) AND (
    current_setting('transaction_isolation') IN ('repeatable read', 'serializable') OR EXISTS (
        SELECT FROM pg_policy WHERE polrelid = {oid} AND NOT polpermissive AND polcmd <> 'a'
        AND (pg_get_expr(polqual, polrelid) <> 'true' OR pg_get_expr(polwithcheck, polrelid) <> 'true')
    ) OR EXISTS (
        SELECT FROM (VALUES ('r', has_any_column_privilege({oid}, 'SELECT')),
                            ('w', has_any_column_privilege({oid}, 'UPDATE')),
                            ('d', has_table_privilege({oid}, 'DELETE'))) AS command (code, is_granted)
        WHERE is_granted AND NOT EXISTS (
            SELECT FROM pg_policy WHERE polrelid = {oid} AND polpermissive AND polcmd::text IN (code, '*')
            AND polroles && ARRAY[0, (SELECT oid FROM pg_roles WHERE rolname = current_user)]::oid[]
            AND pg_get_expr(polqual, polrelid) = 'true'
            AND (code <> 'w' OR coalesce(pg_get_expr(polwithcheck, polrelid), 'true') = 'true')
        )
    )
)
"""

_FIND = f"""
SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname), {_HIDES.format(oid="c.oid").strip()},
       (SELECT string_agg(quote_ident(polname), ', ' ORDER BY polname) FROM pg_policy WHERE polrelid = c.oid),
       quote_ident(current_user), NOT row_security_active(c.oid), current_setting('transaction_isolation')
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = ANY (ARRAY[{{tables}}]::oid[]) AND c.relrowsecurity {{condition}}
ORDER BY 1
"""

_IS_LOCKED = """
AND c.oid = ANY (ARRAY(SELECT relation FROM pg_locks
                       WHERE pid = pg_backend_pid() AND locktype = 'relation' AND granted))
"""

_SET = "SELECT set_config('row_security', %s, false)"
_REFUSES = "check_enable_rls"  # the function of PostgreSQL whose error it is: its words are translated


class Secured(NamedTuple):
    """A table with row level security.

    `table` and `role` are as statements name them; `policies` are names, None if it has none. It does not count for a
    role that is exempt, as the table's owner is. `isolation` is the level of the transaction that looked.
    """

    table: str
    hides: bool
    policies: str | None
    role: str
    is_exempt: bool
    isolation: str

    @property
    def description(self) -> str:
        """The table and its policies, for people."""
        having = f"policies: {self.policies}" if self.policies else "it has no policy"
        return f"table {self.table} has row level security ({having})"

    @property
    def shortest_remedy(self) -> str:
        """One statement that mends it: without a policy nobody meant to show some rows and hide others."""
        if self.policies is None:
            return f"ALTER TABLE {self.table} DISABLE ROW LEVEL SECURITY"
        return f"ALTER ROLE {self.role} BYPASSRLS"

    @property
    def remedy(self) -> str:
        """The statements that mend it, any of them."""
        return (
            f"ALTER TABLE {self.table} DISABLE ROW LEVEL SECURITY, or ALTER ROLE {self.role} BYPASSRLS, or "
            f"CREATE POLICY outbox_all ON {self.table} TO {self.role} USING (true) WITH CHECK (true), without a "
            "restrictive policy beside it"
        )


def hides_sql(table: TableName) -> str:
    """Return a condition for statements with parameters: policies of a table hide rows from the session's role."""
    name = table.quoted.replace("'", "''").replace("%", "%%")
    oid = f"to_regclass('{name}')::oid"
    return f"({_HIDES.format(oid=oid).strip()})"


def secured_tables(fetch: Fetch, tables: Sequence[TableName]) -> list[Secured]:
    """Return those of these tables whose row level security counts for the session's role; others may be missing."""
    return [table for table in _find(fetch, tables) if not table.is_exempt]


def _find(fetch: Fetch, tables: Sequence[TableName], condition: str = "") -> list[Secured]:
    """Return those of these tables that have row level security."""
    statement = _FIND.format(tables=", ".join(["to_regclass(%s)"] * len(tables)), condition=condition)
    return [Secured(*row) for row in fetch(statement, [table.quoted for table in tables])]


def refuse_hidden(fetch: Fetch, tables: Sequence[TableName]) -> None:
    """Raise RowsHidden if policies of these tables hide rows from the session's role."""
    hiding = [table for table in secured_tables(fetch, tables) if table.hides]
    if hiding:
        raise hidden(hiding)


class PolicyWatch(NamedTuple):
    """The watch over a session of ours whose tables have deliberate policies.

    `exempt` are those of its tables whose row level security did not count for the role when the session began.
    """

    tables: Sequence[TableName]
    exempt: frozenset[str]

    def look(self, fetch: Fetch) -> None:
        """Raise RowsHidden if policies may have hidden rows from the statements of the transaction under way."""
        found = _find(fetch, self.tables, _IS_LOCKED)
        hiding = [table for table in found if table.hides]
        if hiding:
            raise hidden(hiding)
        for table in found:
            if table.is_exempt and table.table not in self.exempt:
                raise RowsHidden(
                    f"{table.description}, which stopped counting for role {table.role} at this moment: the statement "
                    "may have been planned before, and is repeated over a new connection"
                )


class WatchedConnection(Protocol):
    """A connection of psycopg 3 whose session is ours."""

    policies: PolicyWatch | None

    def transaction(self) -> Any:
        """Return the context of a transaction."""

    def close(self) -> None:
        """Close it."""


def set_row_security(fetch: Fetch, tables: Sequence[TableName]) -> PolicyWatch | None:
    """Have PostgreSQL refuse, for the rest of a session of ours, to hide rows.

    Return the watch over its transactions if it is not to refuse, as these tables have deliberate policies, which hide
    nothing; else None.
    """
    found = _find(fetch, tables)
    counting = [table for table in found if not table.is_exempt]
    is_deliberate = bool(counting) and not any(table.hides for table in counting)
    fetch(_SET, ["on" if is_deliberate else "off"])
    return PolicyWatch(tables, frozenset({t.table for t in found if t.is_exempt})) if is_deliberate else None


@contextmanager
def seeing_all(connection: WatchedConnection) -> Iterator[None]:
    """Run statements of ours as a transaction that ends well only if no policy may have hidden rows from them.

    Raises RowsHidden, and closes the connection: its plans may be those of policies that do not count any more.
    """
    try:
        with connection.transaction():
            yield
            if connection.policies is not None:
                connection.policies.look(fetch_on(connection))
    except RowsHidden as error:
        connection.close()
        error.in_doubt = True  # whatever was concluded over this connection: the next one may lead to another server
        raise


def fetch_on(connection: Any, seconds: float | None = None, purpose: str = "row level security") -> Fetch:
    """Return the function that runs statements on a DB-API connection of paramstyle `format`.

    Each has so many seconds, by default those of a short one; `purpose` is for the log line of one that has not.
    """

    def fetch(statement: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        patience = SHORT_SECONDS if seconds is None else seconds
        with watched(connection, patience, purpose), closing(plain_cursor(connection)) as cursor:
            cursor.execute(statement, parameters)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows

    return fetch


def is_refusal(error: Any) -> bool:
    """Return True for the error of a statement that PostgreSQL refused, as a policy would filter it. Of psycopg 3."""
    return bool(error.diag.source_function == _REFUSES)


def hidden(hiding: Iterable[Secured]) -> RowsHidden:
    """Return the error for tables whose policies hide rows."""
    described = "; ".join(_hiding(table) for table in hiding)
    return RowsHidden(f"{described}. Until then nothing is concluded from rows that are not seen")


def _hiding(table: Secured) -> str:
    what = f"which hides rows from role {table.role}, or keeps it from changing them"
    remedy = table.remedy
    if table.isolation in ONE_SNAPSHOT:
        what = f"and a transaction of isolation level {table.isolation} cannot see what that hides now"
        remedy = f"use read committed; or {remedy}"
    return f"{table.description}, {what}: {remedy}"
