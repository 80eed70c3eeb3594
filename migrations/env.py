"""Runs the outbox's revisions on one outbox table, with its holds, its history and its inbox, of one database.

    alembic upgrade head                                           # OUTBOX_POSTGRES_DSN, tables `outbox` and `inbox`
    alembic -x dsn=postgresql://... -x table=billing.outbox upgrade head
    alembic -x notify=on upgrade head                              # with the trigger for NOTIFY; -x notify=off drops it

The inbox is named after its outbox (`inbox`, `payments_inbox` for `payments_outbox`) unless `-x inbox=...` says
otherwise, each time. Each outbox keeps its own version table (`outbox_alembic_version` beside `outbox`), so that
neither a host application's `alembic_version` nor another outbox is touched. A host with Alembic of its own does not
need this environment: see `outbox_sqlalchemy.alembic`.
"""

import os

from alembic import context
from alembic.util import CommandError
from sqlalchemy import MetaData, create_engine, pool
from sqlalchemy.exc import DBAPIError, OperationalError

from outbox_core.errors import OutboxError
from outbox_core.schema import (
    TableName,
    drop_notify_sql,
    events_beside,
    hold_beside,
    inbox_beside,
    notify_sql,
    statistics_beside,
)
from outbox_sqlalchemy import (
    make_history_tables,
    make_hold_table,
    make_inbox_table,
    make_outbox_table,
    sqlalchemy_url,
)

LOCK_NOT_AVAILABLE = "55P03"

arguments = {
    "dsn": context.config.attributes.get("outbox_dsn") or os.environ.get("OUTBOX_POSTGRES_DSN"),
    "table": context.config.attributes.get("outbox_table") or "outbox",
    "inbox": context.config.attributes.get("outbox_inbox"),
    "notify": context.config.attributes.get("outbox_notify"),
    **context.get_x_argument(as_dictionary=True),
}


def settings(name: TableName, inbox: TableName) -> dict[str, object]:
    """What online and offline runs have in common."""
    versions = version_table(name)
    metadata = MetaData()
    make_outbox_table(metadata, name.quoted)
    make_inbox_table(metadata, inbox.quoted)
    make_hold_table(metadata, name.quoted)
    make_history_tables(metadata, name.quoted)
    tables = (name, inbox, hold_beside(name), statistics_beside(name), events_beside(name))

    def ours(kind_of: object, table: str | None, kind: str, _reflected: bool, _other: object) -> bool:
        return kind != "table" or TableName(str(table), getattr(kind_of, "schema", None)) in tables

    return {
        "target_metadata": metadata,
        "outbox_table": name.quoted,
        "outbox_inbox": inbox.quoted,
        "version_table": versions,
        "version_table_schema": name.schema,
        "include_schemas": name.schema is not None or inbox.schema is not None,
        "include_object": ours,
    }


def set_notify(name: TableName) -> None:
    """Make or drop the trigger for NOTIFY, as asked: no revision, so that it can be switched at any time."""
    if arguments["notify"] is not None:
        context.execute(notify_sql(name) if arguments["notify"] == "on" else drop_notify_sql(name))


def version_table(name: TableName) -> str:
    """The outbox's version table; PostgreSQL would cut off a longer name, and two outboxes might share one."""
    table = f"{name.table}_alembic_version"
    if len(table.encode()) > 63:
        raise CommandError(f"the name of the outbox's version table is too long: {table}")
    return table


def run() -> None:
    """Run the asked command, on the database or as a script of SQL (`--sql`)."""
    unknown = set(arguments) - {"dsn", "table", "inbox", "notify"}
    if unknown:
        raise CommandError(
            f"-x {', '.join(sorted(unknown))}: unknown; there are `-x dsn=...`, `-x table=...`, `-x inbox=...` and "
            "`-x notify=on|off`"
        )
    if arguments["notify"] not in (None, "on", "off"):
        raise CommandError(f"-x notify={arguments['notify']}: write on or off")
    name = TableName.parse(arguments["table"])
    common = settings(name, TableName.parse(arguments["inbox"]) if arguments["inbox"] else inbox_beside(name))
    if context.is_offline_mode():
        context.configure(dialect_name="postgresql", literal_binds=True, **common)
        with context.begin_transaction():
            context.run_migrations()
            set_notify(name)
        return
    if not arguments["dsn"]:
        raise CommandError("no database: set OUTBOX_POSTGRES_DSN or pass `-x dsn=postgresql://...`")
    engine = create_engine(sqlalchemy_url(arguments["dsn"]), poolclass=pool.NullPool)
    if engine.dialect.is_async:
        raise CommandError(f"{engine.dialect.driver} is asynchronous; write postgresql:// or name another driver")
    try:
        connection = engine.connect()
    except OperationalError as error:
        raise CommandError(f"cannot connect to the database: {error.orig}") from error
    with connection:
        context.configure(connection=connection, **common)
        with context.begin_transaction():
            context.run_migrations()
            set_notify(name)


try:
    run()
except OutboxError as error:
    raise CommandError(str(error)) from error
except DBAPIError as error:
    if getattr(error.orig, "sqlstate", None) == LOCK_NOT_AVAILABLE:
        raise CommandError(
            f"{arguments['table']} is locked by another session; `outbox doctor` names it. Once it has ended, run "
            "the command again"
        ) from error
    raise CommandError(f"error of the database: {str(error.orig).partition(chr(10))[0]}") from error
