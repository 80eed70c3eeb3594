"""Outbox, inbox, holds and history as Alembic revisions, for a host application's chain or by themselves.

In one revision of the host's own chain:

    from outbox_sqlalchemy.alembic import outbox_0001

    upgrade, downgrade = outbox_0001()          # or outbox_0001("billing.outbox")

Every numbered revision is frozen: it makes the same table for ever. A later version that needs more adds another
revision, and its changelog says so. Applications without Alembic use the environment in `migrations/`, see
`alembic_config`.

A name is a table with or without its (existing) schema, `outbox` or `billing.outbox`; `InvalidConfig` refuses others.
The default is the one that `env.py` passed to `context.configure`, else `outbox`.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal, NamedTuple

import sqlalchemy as sa
from alembic import op
from alembic.config import Config
from sqlalchemy.dialects import postgresql

from outbox_core.errors import OutboxError
from outbox_core.retention.archive import archive_statements, drop_archive_statements
from outbox_core.schema import (
    TableName,
    add_checks_sql,
    drop_checks_sql,
    drop_notify_statements,
    events_beside,
    grant_statements,
    hold_beside,
    inbox_beside,
    inbox_index,
    notify_statements,
    revoke_statements,
    statistics_beside,
)
from outbox_sqlalchemy.table import storage_options

__all__ = [
    "Revision",
    "alembic_config",
    "migrations_folder",
    "outbox_0001",
    "outbox_0002",
    "outbox_0003",
    "outbox_0004",
    "outbox_0005",
    "outbox_archive",
    "outbox_grants",
    "outbox_notify",
]


class Revision(NamedTuple):
    """The two functions of an Alembic revision."""

    upgrade: Callable[[], None]
    downgrade: Callable[[], None]


def outbox_0001(table: str | None = None) -> Revision:
    """Return the outbox table as of version 0.1."""
    named = None if table is None else TableName.parse(table)

    def upgrade() -> None:
        name = named or _table_of_environment()
        op.create_table(
            name.table,
            sa.Column("id", sa.BigInteger(), sa.Identity(always=False), primary_key=True),
            sa.Column("create_time", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
            sa.Column("kafka_topic", sa.String(249), nullable=False),
            sa.Column("kafka_key", sa.Text()),
            sa.Column("kafka_value", postgresql.BYTEA()),
            sa.Column("kafka_header_keys", postgresql.ARRAY(sa.Text()), server_default=sa.text("'{}'"), nullable=False),
            sa.Column(
                "kafka_header_values",
                postgresql.ARRAY(postgresql.BYTEA()),
                server_default=sa.text("'{}'"),
                nullable=False,
            ),
            sa.Column("kafka_partition", sa.Integer()),
            sa.Column("leader_id", sa.Uuid()),
            schema=name.schema,
            **storage_options(
                {
                    "fillfactor": "50",
                    "autovacuum_vacuum_scale_factor": "0",
                    "autovacuum_vacuum_threshold": "10000",
                    "autovacuum_vacuum_insert_scale_factor": "0",
                    "autovacuum_vacuum_insert_threshold": "100000",
                    "autovacuum_vacuum_cost_delay": "0",
                    "autovacuum_analyze_scale_factor": "0",
                    "autovacuum_analyze_threshold": "100000",
                }
            ),
        )

    def downgrade() -> None:
        name = named or _table_of_environment()
        op.drop_table(name.table, schema=name.schema)

    return Revision(upgrade, downgrade)


def outbox_0002(inbox: str | None = None) -> Revision:
    """Return the inbox table as of version 0.1, for hosts that accept messages.

    Args:
        inbox: by default the one of `env.py`, else `inbox` beside `outbox`, `payments_inbox` beside `payments_outbox`.
    """
    named = None if inbox is None else TableName.parse(inbox)

    def upgrade() -> None:
        name = named or _inbox_of_environment()
        op.create_table(
            name.table,
            sa.Column("source", sa.Text(), primary_key=True),
            sa.Column("message_id", sa.Text(), primary_key=True),
            sa.Column("accept_time", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
            schema=name.schema,
        )
        op.create_index(inbox_index(name), name.table, ["accept_time"], schema=name.schema)

    def downgrade() -> None:
        name = named or _inbox_of_environment()
        op.drop_table(name.table, schema=name.schema)

    return Revision(upgrade, downgrade)


def outbox_0003(table: str | None = None) -> Revision:
    """Return the table of the holds of the outbox `table` as of version 0.2; its name has `_hold` behind it."""
    named = None if table is None else TableName.parse(table)

    def upgrade() -> None:
        name = hold_beside(named or _table_of_environment())
        op.create_table(
            name.table,
            sa.Column("id", sa.BigInteger(), sa.Identity(always=False), primary_key=True),
            sa.Column("outbox", sa.Text(), nullable=False),
            sa.Column("kafka_topic", sa.Text(), nullable=False),
            sa.Column("kafka_key", sa.Text()),
            sa.Column("record_id", sa.BigInteger()),
            sa.Column("reason", sa.Text(), server_default=sa.text("''"), nullable=False),
            sa.Column("error", sa.Text()),
            sa.Column("dead_letter", sa.Boolean(), server_default=sa.text("false"), nullable=False),
            sa.Column("create_time", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
            schema=name.schema,
        )

    def downgrade() -> None:
        name = hold_beside(named or _table_of_environment())
        op.drop_table(name.table, schema=name.schema)

    return Revision(upgrade, downgrade)


_CHECKS_0004 = {
    "outbox_id_in_range": "id > 0 AND id < 9223372036854775807",
    "outbox_create_time_in_range": (
        "create_time >= '1970-01-01 00:00:00+00' AND create_time < '9999-01-01 00:00:00+00'"
    ),
    "outbox_headers_in_pairs": "cardinality(kafka_header_keys) = cardinality(kafka_header_values)",
    "outbox_partition_in_range": "kafka_partition >= 0",
}


def outbox_0004(table: str | None = None) -> Revision:
    """Return the outbox's CHECK constraints as of version 0.3.

    Takes the table's lock until the transaction ends, and waits for it for five seconds, or for the session's
    lock_timeout. Existing rows are not checked: on a table in use the constraints are NOT VALID until `ALTER TABLE ...
    VALIDATE CONSTRAINT` is run, which `outbox doctor` shows.
    """
    named = None if table is None else TableName.parse(table)

    def upgrade() -> None:
        op.execute(sa.text(_escaped(add_checks_sql(named or _table_of_environment(), _CHECKS_0004))))

    def downgrade() -> None:
        op.execute(sa.text(_escaped(drop_checks_sql(named or _table_of_environment(), _CHECKS_0004))))

    return Revision(upgrade, downgrade)


def outbox_0005(table: str | None = None) -> Revision:
    """Return the two tables of the history of the outbox `table`, statistics and events, as of version 0.4."""
    named = None if table is None else TableName.parse(table)

    def upgrade() -> None:
        name = named or _table_of_environment()
        op.create_table(
            statistics_beside(name).table,
            *_columns_of_history(),
            sa.Column("instance", sa.Text(), nullable=False),
            sa.Column("interval_seconds", sa.Double(), nullable=False),
            sa.Column("published", sa.BigInteger(), nullable=False),
            sa.Column("failed", sa.BigInteger(), nullable=False),
            sa.Column("published_bytes", sa.BigInteger(), nullable=False),
            sa.Column("deliverable", sa.BigInteger()),
            sa.Column("deliverable_age", sa.Double()),
            sa.Column("held", sa.BigInteger()),
            sa.Column("held_age", sa.Double()),
            sa.Column("latency_p50", sa.Double()),
            sa.Column("latency_p99", sa.Double()),
            schema=name.schema,
        )
        op.create_table(
            events_beside(name).table,
            *_columns_of_history(),
            sa.Column("kind", sa.Text(), nullable=False),
            sa.Column("actor", sa.Text(), nullable=False),
            sa.Column("reason", sa.Text(), server_default=sa.text("''"), nullable=False),
            sa.Column("leader_id", sa.Uuid()),
            sa.Column("term", sa.BigInteger()),
            sa.Column("kafka_topic", sa.Text()),
            sa.Column("kafka_key", sa.Text()),
            sa.Column("record_id", sa.BigInteger()),
            schema=name.schema,
        )

    def downgrade() -> None:
        name = named or _table_of_environment()
        for table_name in (events_beside(name), statistics_beside(name)):
            op.drop_table(table_name.table, schema=table_name.schema)

    return Revision(upgrade, downgrade)


def _columns_of_history() -> list[sa.Column[Any]]:
    return [
        sa.Column("id", sa.BigInteger(), sa.Identity(always=False), primary_key=True),
        sa.Column("create_time", sa.DateTime(timezone=True), server_default=sa.text("now()"), nullable=False),
        sa.Column("outbox", sa.Text(), nullable=False),
    ]


def outbox_notify(table: str | None = None) -> Revision:
    """Return the trigger that notifies harvesters with `notify` of inserts. Not part of the chain.

    Takes the table's lock as `outbox_0004` does.
    """
    named = None if table is None else TableName.parse(table)

    def upgrade() -> None:
        for statement in notify_statements(named or _table_of_environment()):  # asyncpg takes one at a time
            op.execute(sa.text(_escaped(statement)))

    def downgrade() -> None:
        for statement in drop_notify_statements(named or _table_of_environment()):
            op.execute(sa.text(_escaped(statement)))

    return Revision(upgrade, downgrade)


def outbox_archive(table: str | None = None) -> Revision:
    """Return the archive of the outbox `table`, for harvesters with `retention: archive`. Not part of the chain.

    The downgrade drops it with all that is in it.
    """
    named = None if table is None else TableName.parse(table)

    def upgrade() -> None:
        for statement in archive_statements(named or _table_of_environment()):
            op.execute(sa.text(_escaped(statement)))

    def downgrade() -> None:
        for statement in drop_archive_statements(named or _table_of_environment()):
            op.execute(sa.text(_escaped(statement)))

    return Revision(upgrade, downgrade)


def outbox_grants(
    writer: str, harvester: str, table: str | None = None, *, layout: Literal["binary", "text"] = "binary"
) -> Revision:
    """Return the rights of an outbox's roles, column by column, as `outbox schema --grants` prints them.

    Not part of the chain: roles are the host's, and have to exist. It needs the tables of `outbox_0001` and
    `outbox_0003`, and comes after `outbox_0005` if there is a history. The downgrade takes back the granted rights, but
    for USAGE of the schema.

    Args:
        writer: the role of the applications that stash.
        harvester: the role of the harvester, and of `outbox status`, `doctor` and `hold`.
        table: the outbox.
        layout: of the table; `text` if it is goharvest's.
    """
    named = None if table is None else TableName.parse(table)

    def upgrade() -> None:
        for statement in grant_statements(named or _table_of_environment(), writer, harvester, layout):
            op.execute(sa.text(_escaped(statement)))

    def downgrade() -> None:
        for statement in revoke_statements(named or _table_of_environment(), writer, harvester, layout):
            op.execute(sa.text(_escaped(statement)))

    return Revision(upgrade, downgrade)


def _escaped(statements: str) -> str:
    """Escape colons, which would begin a parameter."""
    return re.sub(r"(?<!:):(?!:)", r"\:", statements)


def _table_of_environment() -> TableName:
    return TableName.parse(op.get_context().opts.get("outbox_table") or "outbox")


def _inbox_of_environment() -> TableName:
    given = op.get_context().opts.get("outbox_inbox")
    return TableName.parse(given) if given else inbox_beside(_table_of_environment())


def alembic_config(
    dsn: str | None = None, table: str = "outbox", inbox: str | None = None, *, notify: bool | None = None
) -> Config:
    """Return a configuration for `alembic.command` that runs the outbox's own environment.

    Args:
        dsn: the database, as `sqlalchemy_url` takes it, with a synchronous driver; by default the environment variable
            OUTBOX_POSTGRES_DSN.
        table: name of the outbox table. Each outbox has a version table of its own beside it.
        inbox: name of its inbox table; by default `inbox` beside `outbox`, `payments_inbox` beside `payments_outbox`.
        notify: make or drop the trigger that notifies harvesters of inserts; None leaves it as it is.
    """
    config = Config()
    config.set_main_option("script_location", str(migrations_folder()).replace("%", "%%"))
    config.attributes.update(outbox_dsn=dsn, outbox_table=table, outbox_inbox=inbox)
    if notify is not None:
        config.attributes["outbox_notify"] = "on" if notify else "off"
    return config


def migrations_folder() -> Path:
    """Return the folder of the Alembic environment: inside an installed package, beside the packages in a checkout."""
    package = Path(__file__).resolve().parent
    for folder in (package / "migrations", package.parent / "migrations"):
        if (folder / "env.py").is_file():
            return folder
    raise OutboxError(f"no Alembic environment beside {package}; the package is not installed completely")
