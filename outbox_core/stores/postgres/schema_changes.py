"""The state of an outbox's tables in a database, and the changes that bring it up to date (`outbox schema --apply`).

The parts are those of the Alembic chain and of Django's migrations, with the same numbers. Applying is idempotent: what
is there stays as it is, and rows are never touched.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any, Literal, NamedTuple

from outbox_core.errors import OutboxTableError
from outbox_core.schema import (
    HOLD_COLUMNS,
    REQUIRED_COLUMNS,
    TableName,
    add_checks_sql,
    checks_of,
    create_history_sql,
    create_hold_sql,
    create_table_sql,
    events_beside,
    hold_beside,
    notify_statements,
    statistics_beside,
)
from outbox_core.stores.postgres.connection import Connection

Layout = Literal["binary", "text"]
Part = Literal["outbox", "hold", "checks", "history", "notify"]
_ORDER: tuple[Part, ...] = ("outbox", "hold", "checks", "history", "notify")

COLUMN_TYPES = """
SELECT attname, format_type(atttypid, NULL) FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""

CHECK_CONSTRAINTS = "SELECT conname, convalidated FROM pg_constraint WHERE conrelid = to_regclass(%s) AND contype = 'c'"

_TRIGGER = """
SELECT count(*) FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid
WHERE t.tgrelid = to_regclass(%s) AND t.tgenabled IN ('O', 'A') AND p.prosrc LIKE %s
"""

_ALONE = "SELECT pg_advisory_xact_lock(hashtext('kafka_outbox.schema'))"
_PATIENCE = "SELECT set_config('lock_timeout', '5s', true)"


class PartState(NamedTuple):
    """A part of the schema: its revision in the Alembic chain, and its state in words."""

    part: Part
    revision: str  # empty for one that no chain makes
    is_there: bool
    detail: str


def inspect_schema(connection: Connection, name: TableName) -> list[PartState]:
    """Return the parts of an outbox's schema. `name` has its schema.

    Raises:
        OutboxTableError: if a table of that name is no outbox, or the one beside it no table of holds.
    """
    columns = _columns(connection, name, REQUIRED_COLUMNS, "no outbox")
    holds = hold_beside(name)
    has_holds = bool(_columns(connection, holds, HOLD_COLUMNS, "no table of holds"))
    layout = _layout(columns)
    there = dict(_fetch(connection, CHECK_CONSTRAINTS, [name.quoted]))
    missing = sorted(set(checks_of(layout)) - set(there)) if columns else []
    unvalidated = sorted(check for check in checks_of(layout) if there.get(check) is False)
    ((triggers,),) = _fetch(connection, _TRIGGER, [name.quoted, "%kafka_outbox_%"])
    checks = "CHECK constraints, not validated" if unvalidated else "CHECK constraints, validated"
    checks = f"lacks {', '.join(missing)}" if missing else checks
    return [
        PartState("outbox", "0001", bool(columns), f"table {name}, {layout} layout" if columns else f"no table {name}"),
        PartState("hold", "0003", has_holds, f"table {holds}" if has_holds else f"no table {holds}"),
        PartState("checks", "0004", bool(columns) and not missing, checks if columns else "no table"),
        _history_state(connection, name),
        PartState("notify", "", bool(triggers), "trigger for notify" if triggers else "no trigger for notify"),
    ]


def _history_state(connection: Connection, name: TableName) -> PartState:
    tables = statistics_beside(name), events_beside(name)
    missing = [table for table in tables if not _columns(connection, table, (), "")]
    if missing:
        return PartState("history", "0005", False, f"no table {' and '.join(map(str, missing))}")
    return PartState("history", "0005", True, f"tables {' and '.join(map(str, tables))}")


def apply_schema(connection: Connection, name: TableName, layout: Layout, parts: Collection[Part]) -> list[str]:
    """Make the parts that are missing, and return one line for each about what was done.

    Call it in a transaction, which the caller commits: all is made, or nothing. It waits for a lock on an existing
    table for at most five seconds, since inserts queue behind it.

    Args:
        connection: of a role that may create tables in the schema, or owns those that are there.
        name: of the outbox table, with its schema.
        layout: of an outbox that is made; one that is there keeps its own.
        parts: what is wanted.

    Raises:
        OutboxTableError: as `inspect_schema`, or if a part needs an outbox that is neither there nor wanted.
    """
    _fetch(connection, _ALONE)
    _fetch(connection, _PATIENCE)
    done: list[str] = []
    is_new = False
    for part in (part for part in _ORDER if part in parts):
        state = next(state for state in inspect_schema(connection, name) if state.part == part)
        if part == "checks" and is_new:
            continue  # made with the table
        if state.is_there:
            done.append(f"is there  {state.detail}")
            continue
        columns = _columns(connection, name, REQUIRED_COLUMNS, "no outbox")
        if part in ("checks", "notify") and not columns:
            raise OutboxTableError(f"there is no table {name} to change; leave out --only, and it is made")
        kept: Layout = _layout(columns) if columns else layout
        for statement in _statements(part, name, kept):
            connection.execute(statement.encode())
        is_new = is_new or part == "outbox"
        done.append(f"made      {_made(part, name, kept)}")
    return done


def _statements(part: Part, name: TableName, layout: Layout) -> list[str]:
    match part:
        case "outbox":
            return [create_table_sql(name, layout)]
        case "hold":
            return [create_hold_sql(name)]
        case "history":
            return [create_history_sql(name)]
        case "checks":
            return [add_checks_sql(name, checks_of(layout))]
        case "notify":
            return notify_statements(name)


def _made(part: Part, name: TableName, layout: Layout) -> str:
    match part:
        case "outbox":
            return f"table {name}, {layout} layout"
        case "hold":
            return f"table {hold_beside(name)}"
        case "history":
            return f"tables {statistics_beside(name)} and {events_beside(name)}"
        case "checks":
            return f"CHECK constraints of {name}; validate them where there are rows (`outbox doctor` says how)"
        case "notify":
            return f"trigger for notify on {name}"


def _layout(columns: dict[str, str]) -> Layout:
    return "text" if columns and columns["kafka_value"] != "bytea" else "binary"


def _columns(connection: Connection, name: TableName, needed: tuple[str, ...], what: str) -> dict[str, str]:
    columns = dict(_fetch(connection, COLUMN_TYPES, [name.quoted]))
    missing = [column for column in needed if column not in columns]
    if columns and missing:
        raise OutboxTableError(f"table {name} is {what}: it lacks the column(s) {', '.join(missing)}")
    return columns


def _fetch(connection: Connection, sql: str, parameters: list[Any] | None = None) -> list[tuple[Any, ...]]:
    return connection.execute(sql, parameters).fetchall()
