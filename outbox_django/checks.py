"""System checks: mistakes in the OUTBOX setting, its database and its table, before they matter.

`docs/how-to-django.md` lists them. A missing table is a warning: `migrate`, which makes it, runs the same check first.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import Any, NamedTuple

from django.apps import apps
from django.apps.config import AppConfig
from django.conf import settings
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as CheckWarning
from django.db import DEFAULT_DB_ALIAS, connections, router
from django.db.migrations.recorder import MigrationRecorder

from outbox_core.errors import InvalidConfig, OutboxError
from outbox_core.schema import INBOX_COLUMNS, REQUIRED_COLUMNS, hold_beside
from outbox_django.databases import write_alias
from outbox_django.settings import OutboxSettings, Problem, find_problems, outbox_settings, readable_settings
from outbox_django.stashing import stash_alias

_Apps = Sequence[AppConfig] | None

_COLUMNS = """
SELECT attname, format_type(atttypid, NULL) FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""

_HAS_TIME_DEFAULT = """
SELECT atthasdef FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = 'create_time'
"""

_INBOX_KEY = """
SELECT EXISTS (
    SELECT FROM pg_index WHERE indrelid = to_regclass(%s) AND indisunique AND indimmediate AND indpred IS NULL
    AND ARRAY(SELECT attname::text FROM pg_attribute WHERE attrelid = indrelid AND attnum = ANY (indkey)
              ORDER BY attname) = ARRAY['message_id', 'source']
)
"""

_SEQUENCE = """
SELECT seqrelid::regclass::text, seqcache FROM pg_sequence
WHERE seqrelid = pg_get_serial_sequence(%s, 'id')::regclass
"""


def check_settings(app_configs: _Apps = None, **_: Any) -> list[CheckMessage]:
    """Check the OUTBOX dict by itself: E001 to E003."""
    del app_configs
    return [_settings_error(problem) for problem in find_problems(getattr(settings, "OUTBOX", {}))]


def _settings_error(problem: Problem) -> Error:
    if problem.key is None:
        number = "E001"
    elif problem.hint:
        number = "E002"
    else:
        number = "E003"
    return Error(problem.message, hint=problem.hint, id=f"outbox_django.{number}")


def check_databases(app_configs: _Apps = None, **_: Any) -> list[CheckMessage]:
    """Check the database that `stash` writes to, without connecting: E004 and E005."""
    del app_configs
    current = _readable_settings()
    if current is None:
        return []
    direct = current.direct_database
    named = {"DATABASE": stash_alias()} | ({} if direct is None else {"DIRECT_DATABASE": direct})
    wrong: list[CheckMessage] = [
        Error(
            f"OUTBOX[{key!r}] is {alias!r}, which is no alias of DATABASES.",
            hint=f"The aliases are {', '.join(map(repr, connections))}.",
            id="outbox_django.E004",
        )
        for key, alias in named.items()
        if alias not in connections
    ]
    if wrong:
        return wrong
    alias = named["DATABASE"]
    vendor = connections[alias].vendor
    if vendor == "postgresql":
        return []
    return [
        Error(
            f"The outbox is in database {alias!r}, which is {vendor}; it needs PostgreSQL.",
            hint="Name a PostgreSQL database's alias in OUTBOX['DATABASE'], or route the app `outbox_django`.",
            id="outbox_django.E005",
        )
    ]


def check_harvester(app_configs: _Apps = None, **_: Any) -> list[CheckMessage]:
    """Check the harvester's settings, where it is installed and OUTBOX says something about Kafka: E006.

    What `check_settings` reports is left out, so that all mistakes are told at once.
    """
    del app_configs
    current = readable_settings()
    if not current.kafka or not _harvester_is_installed() or check_databases():
        return []
    from outbox_django.harvesting import harvest_config

    alias = current.database or router.db_for_write(apps.get_model("outbox_django", "Outbox"))
    try:
        harvest_config(current, alias)
    except InvalidConfig as error:
        return [Error(f"The harvester refuses {mistake}", id="outbox_django.E006") for mistake in error.mistakes]
    return []


def _harvester_is_installed() -> bool:
    return all(find_spec(name) is not None for name in ("pydantic", "psycopg"))


def check_tables(app_configs: _Apps = None, databases: Sequence[str] | None = None, **_: Any) -> list[CheckMessage]:
    """Check the tables on each of `databases` where they belong: E007, E008, W001 to W006."""
    del app_configs
    current = _readable_settings()
    if current is None:
        return []
    found: list[CheckMessage] = []
    for model, check in (("Outbox", _check_table), ("Inbox", _check_inbox), ("Outbox", _check_holds)):
        for alias in databases or ():
            if _belongs(model, alias) and not _is_being_made(alias):
                found += check(current, alias)
    return found


def _is_being_made(alias: str) -> bool:
    """Tell whether this is the `manage.py migrate` that makes the tables: what it makes is not missing."""
    if sys.argv[1:2] != ["migrate"]:
        return False
    applied = MigrationRecorder(connections[alias]).applied_migrations()
    return not any(app == "outbox_django" for app, _ in applied)


def _belongs(model: str, alias: str) -> bool:
    is_postgres = connections[alias].vendor == "postgresql"
    return is_postgres and router.allow_migrate_model(alias, apps.get_model("outbox_django", model))


def _check_table(current: OutboxSettings, alias: str) -> list[CheckMessage]:
    table = _look_at(alias, current.table.quoted)
    where = f"{current.table} in database {alias!r}"
    if not table.columns:
        if alias != stash_alias():
            return []
        return [CheckWarning(f"There is no table {where}.", hint=_hint_to_migrate(alias), id="outbox_django.W001")]
    needed = dict.fromkeys((*REQUIRED_COLUMNS, *current.table_layout.columns))
    missing = [column for column in needed if column not in table.columns]
    if missing:
        return [Error(f"{where} is no outbox: it lacks {', '.join(missing)}.", id="outbox_django.E007")]
    return [
        *_check_layout(current, table, where),
        *_check_time(current, table, where),
        *_check_sequence(table, where),
    ]


def _check_inbox(current: OutboxSettings, alias: str) -> list[CheckMessage]:
    name = current.inbox_table
    where = f"{name} in database {alias!r}"
    with connections[alias].cursor() as cursor:
        cursor.execute(_COLUMNS, [name.quoted])
        columns = dict(cursor.fetchall())
        cursor.execute(_INBOX_KEY, [name.quoted])
        (has_key,) = cursor.fetchone()
    if not columns:
        if alias != write_alias("Inbox"):
            return []
        return [CheckWarning(f"There is no table {where}.", hint=_hint_to_migrate(alias), id="outbox_django.W004")]
    missing = [column for column in INBOX_COLUMNS if column not in columns]
    if missing:
        return [Error(f"{where} is no inbox: it lacks {', '.join(missing)}.", id="outbox_django.E008")]
    if not has_key:
        hint = f"ALTER TABLE {name.quoted} ADD PRIMARY KEY (source, message_id);"
        return [Error(f"{where} has no primary key of source and message_id.", hint=hint, id="outbox_django.E008")]
    return []


def _check_holds(current: OutboxSettings, alias: str) -> list[CheckMessage]:
    name = hold_beside(current.table)
    with connections[alias].cursor() as cursor:
        names = [current.table.quoted, name.quoted]
        cursor.execute("SELECT to_regclass(%s) IS NULL OR to_regclass(%s) IS NOT NULL", names)
        (is_well,) = cursor.fetchone()
    if is_well or alias != stash_alias():
        return []
    return [
        CheckWarning(
            f"There is no table {name} in database {alias!r}: nothing can be paused, and a bad record is tried "
            "for ever.",
            hint=f"{_hint_to_migrate(alias)} Routers have to let the app `outbox_django` into it.",
            id="outbox_django.W005",
        )
    ]


def _hint_to_migrate(alias: str) -> str:
    return f"Run `manage.py migrate{'' if alias == DEFAULT_DB_ALIAS else f' --database {alias}'}`."


def _check_layout(current: OutboxSettings, table: _Table, where: str) -> Iterator[CheckMessage]:
    layout = "binary" if table.columns["kafka_value"] == "bytea" else "text"
    if layout != current.layout:
        yield Error(
            f"{where} has the {layout} layout, and OUTBOX['LAYOUT'] is {current.layout!r}.",
            hint=f"Set OUTBOX['LAYOUT'] to {layout!r}.",
            id="outbox_django.E007",
        )
    if "kafka_partition" not in table.columns:
        yield CheckWarning(
            f"{where} has no column kafka_partition: stash works without it, the model and its admin do not.",
            hint=f"ALTER TABLE {current.table.quoted} ADD COLUMN kafka_partition integer; writers that name their "
            "columns, goharvest's included, are not affected.",
            id="outbox_django.W003",
        )


def _check_time(current: OutboxSettings, table: _Table, where: str) -> Iterator[CheckMessage]:
    if current.table_layout.has_time_default and not table.has_time_default:
        yield CheckWarning(
            f"create_time of {where} has no default, and stash leaves it to that: each INSERT fails.",
            hint=f"ALTER TABLE {current.table.quoted} ALTER COLUMN create_time SET DEFAULT now();",
            id="outbox_django.W006",
        )


def _check_sequence(table: _Table, where: str) -> Iterator[CheckMessage]:
    if table.sequence_cache > 1:
        yield CheckWarning(
            f"The sequence of {where} has CACHE {table.sequence_cache}: ids are not drawn in order, so records of "
            "different sessions can be published in the wrong order.",
            hint=f"ALTER SEQUENCE {table.sequence} CACHE 1;",
            id="outbox_django.W002",
        )


class _Table(NamedTuple):
    """The outbox table as the database's catalog describes it; without columns if there is no such table."""

    columns: dict[str, str]
    has_time_default: bool = True
    sequence: str = ""
    sequence_cache: int = 1


def _look_at(alias: str, table: str) -> _Table:
    with connections[alias].cursor() as cursor:
        cursor.execute(_COLUMNS, [table])
        columns: dict[str, str] = dict(cursor.fetchall())
        if not {"id", "create_time"} <= set(columns):
            return _Table(columns)
        cursor.execute(_HAS_TIME_DEFAULT, [table])
        (has_time_default,) = cursor.fetchone()
        cursor.execute(_SEQUENCE, [table])
        sequence = cursor.fetchone()
    return _Table(columns, has_time_default, *(sequence or ()))


def _readable_settings() -> OutboxSettings | None:
    """Return the settings, None if `check_settings` reports mistakes in them."""
    try:
        return outbox_settings()
    except OutboxError:
        return None
