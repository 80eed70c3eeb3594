"""Row level security: policies that hide rows of an outbox's tables from a role.

**To see nothing is not to know that there is nothing.** A DELETE that deletes nothing, a scan that finds no row, a
table of holds that looks empty: each lets something go on, and each may be the work of a policy that hides rows. So

- sessions of our own set `row_security` to `off`. PostgreSQL then refuses each statement that a policy would filter,
  when it plans it, with the lock of the table;
- a role that policies hide nothing from would be refused, too. These are deliberate policies: for each command that the
  role may use, a permissive one for this role or PUBLIC is `true`, and no restrictive one is anything else. For such
  a role the setting stays `on`, and each statement of the harvester is watched: after it, and before its transaction
  ends, the policies are looked at again. Whoever changes a policy needs ACCESS EXCLUSIVE on its table, which
  the statement keeps from him until then: so what is found are the policies that it ran with;
- on a connection of the caller's, whose settings are not ours, the question comes before the statement, or is part of
  one that would do harm.

Policies for roles that this one is a member of do not count, as memberships are granted and revoked without a lock.
Those of a partition do not count either: PostgreSQL applies those of the table that a statement names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from typing import Any, NamedTuple

from outbox_core.errors import RowsHidden
from outbox_core.schema import TableName
from outbox_core.watched_calls import SHORT_SECONDS, watched

Fetch = Callable[[str, Sequence[Any]], list[tuple[Any, ...]]]
"""A function that runs a statement with parameters and returns its rows."""

# INSERT does not count: what it may not insert is an error.
_HIDES = """
row_security_active({oid}) AND (
    EXISTS (
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

_SECURED = f"""
SELECT quote_ident(n.nspname) || '.' || quote_ident(c.relname), {_HIDES.format(oid="c.oid").strip()},
       (SELECT string_agg(quote_ident(polname), ', ' ORDER BY polname) FROM pg_policy WHERE polrelid = c.oid),
       quote_ident(current_user)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = ANY (ARRAY[{{tables}}]::oid[]) AND row_security_active(c.oid)
ORDER BY 1
"""

_SET = "SELECT set_config('row_security', %s, false)"
_REFUSES = "check_enable_rls"  # the function of PostgreSQL whose error it is: its words are translated


class Secured(NamedTuple):
    """A table with row level security that counts for the role: not for its owner, say.

    `table` and `role` are as statements name them; `policies` are names, None if it has none.
    """

    table: str
    hides: bool
    policies: str | None
    role: str

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
    statement = _SECURED.format(tables=", ".join(["to_regclass(%s)"] * len(tables)))
    return [Secured(*row) for row in fetch(statement, [table.quoted for table in tables])]


def refuse_hidden(fetch: Fetch, tables: Sequence[TableName]) -> None:
    """Raise RowsHidden if policies of these tables hide rows from the session's role."""
    hiding = [table for table in secured_tables(fetch, tables) if table.hides]
    if hiding:
        raise hidden(hiding)


def set_row_security(fetch: Fetch, tables: Sequence[TableName]) -> bool:
    """Have PostgreSQL refuse, for the rest of a session of ours, to hide rows.

    Return True if it is not to refuse, as these tables have deliberate policies, which hide nothing.
    """
    secured = secured_tables(fetch, tables)
    is_deliberate = bool(secured) and not any(table.hides for table in secured)
    fetch(_SET, ["on" if is_deliberate else "off"])
    return is_deliberate


def fetch_on(connection: Any, seconds: float | None = None, purpose: str = "row level security") -> Fetch:
    """Return the function that runs statements on a DB-API connection of paramstyle `format`.

    Each has so many seconds, by default those of a short one; `purpose` is for the log line of one that has not.
    """

    def fetch(statement: str, parameters: Sequence[Any]) -> list[tuple[Any, ...]]:
        patience = SHORT_SECONDS if seconds is None else seconds
        with watched(connection, patience, purpose), closing(connection.cursor()) as cursor:
            cursor.execute(statement, parameters)
            return [tuple(row) for row in cursor.fetchall()]

    return fetch


def is_refusal(error: Any) -> bool:
    """Return True for the error of a statement that PostgreSQL refused, as a policy would filter it. Of psycopg 3."""
    return bool(error.diag.source_function == _REFUSES)


def hidden(hiding: Iterable[Secured]) -> RowsHidden:
    """Return the error for tables whose policies hide rows."""
    described = "; ".join(
        f"{table.description}, which hides rows from role {table.role}, or keeps it from changing them: {table.remedy}"
        for table in hiding
    )
    return RowsHidden(f"{described}. Until then nothing is concluded from rows that are not seen")
