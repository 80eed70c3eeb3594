"""The outbox table, its holds, its history, and the inbox table, as SQLAlchemy sees them: made, mapped, or recognised.

They equal the DDL of `outbox_core.schema`, storage parameters included; a test compares the catalogs. The types are the
PostgreSQL dialect's own, because Alembic renders the element of a generic `ARRAY(LargeBinary())` without its module, in
a migration that does not run.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any, Literal
from uuid import UUID

from sqlalchemy import ARRAY as GENERIC_ARRAY
from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    DateTime,
    Double,
    Identity,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    String,
    Table,
    Text,
    Uuid,
    event,
    text,
)
from sqlalchemy.dialects.postgresql import ARRAY, BYTEA
from sqlalchemy.orm import Mapped, Mapper, mapped_column
from sqlalchemy.sql.elements import conv
from sqlalchemy.types import TypeEngine

from outbox_core.errors import OutboxTableError
from outbox_core.schema import (
    BINARY_LAYOUT,
    CHECKS,
    REQUIRED_COLUMNS,
    STORAGE_PARAMETERS,
    TableLayout,
    TableName,
    events_beside,
    hold_beside,
    inbox_index,
    statistics_beside,
)
from outbox_core.topic_names import MAX_TOPIC_LENGTH

_NOW = "now()"
_EMPTY_ARRAY = "'{}'"


def make_outbox_table(
    metadata: MetaData, name: str = "outbox", schema: str | None = None, *, layout: TableLayout = BINARY_LAYOUT
) -> Table:
    """Add an outbox table to `metadata`, for `create_all` and Alembic's autogenerate to find.

    Args:
        metadata: usually the application's own, `Base.metadata`.
        name: `outbox`, or with its schema `billing.outbox`; else `InvalidConfig`.
        schema: the schema, if it is not in `name`.
        layout: types of the columns; `TEXT_LAYOUT` for a table as goharvest makes it.
    """
    parsed = TableName(name, schema) if schema is not None else TableName.parse(name)
    return Table(
        parsed.table,
        metadata,
        *(_binary_columns(layout) if layout.values == "binary" else _text_columns(layout)),
        *_checks(layout),
        schema=parsed.schema,
        **storage_options(STORAGE_PARAMETERS),
    )


def storage_options(parameters: Mapping[str, str]) -> dict[str, Any]:
    """Return the arguments that give a `Table` or `op.create_table` PostgreSQL storage parameters.

    SQLAlchemy 2.1 has `postgresql_with` for that, which 2.0 refuses, and a migration that one has written may be run by
    the other. Both write the access method (PostgreSQL's is `heap`) as it is given, and WITH may follow that.
    """
    return {"postgresql_using": f"heap WITH ({', '.join(f'{key} = {value}' for key, value in parameters.items())})"}


def make_inbox_table(metadata: MetaData, name: str = "inbox", schema: str | None = None) -> Table:
    """Add an inbox table to `metadata`; arguments as of `make_outbox_table`."""
    parsed = TableName(name, schema) if schema is not None else TableName.parse(name)
    return Table(
        parsed.table,
        metadata,
        Column("source", Text, primary_key=True),
        Column("message_id", Text, primary_key=True),
        Column("accept_time", DateTime(timezone=True), nullable=False, server_default=text(_NOW)),
        Index(inbox_index(parsed), "accept_time"),
        schema=parsed.schema,
    )


def make_hold_table(metadata: MetaData, outbox: str = "outbox", schema: str | None = None) -> Table:
    """Add an outbox's table of holds to `metadata`; arguments as of `make_outbox_table`.

    The name is the outbox's; the table's own has `_hold` behind it.
    """
    parsed = hold_beside(TableName(outbox, schema) if schema is not None else TableName.parse(outbox))
    return Table(
        parsed.table,
        metadata,
        Column("id", BigInteger, Identity(always=False), primary_key=True),
        Column("outbox", Text, nullable=False),
        Column("kafka_topic", Text, nullable=False),
        Column("kafka_key", Text),
        Column("record_id", BigInteger),
        Column("reason", Text, nullable=False, server_default=text("''")),
        Column("error", Text),
        Column("dead_letter", Boolean, nullable=False, server_default=text("false")),
        Column("create_time", DateTime(timezone=True), nullable=False, server_default=text(_NOW)),
        schema=parsed.schema,
    )


def make_history_tables(metadata: MetaData, outbox: str = "outbox", schema: str | None = None) -> tuple[Table, Table]:
    """Add the tables of an outbox's history to `metadata`, both; arguments as of `make_hold_table`."""
    parsed = TableName(outbox, schema) if schema is not None else TableName.parse(outbox)
    names = statistics_beside(parsed), events_beside(parsed)
    columns = _statistics_columns(), _event_columns()
    statistics, events = (
        Table(name.table, metadata, *its, schema=name.schema) for name, its in zip(names, columns, strict=True)
    )
    return statistics, events


def _statistics_columns() -> list[Column[Any]]:
    """Make the columns of a table of statistics."""
    return [
        *_columns_of_history(),
        Column("instance", Text, nullable=False),
        Column("interval_seconds", Double, nullable=False),
        Column("published", BigInteger, nullable=False),
        Column("failed", BigInteger, nullable=False),
        Column("published_bytes", BigInteger, nullable=False),
        Column("deliverable", BigInteger),
        Column("deliverable_age", Double),
        Column("held", BigInteger),
        Column("held_age", Double),
        Column("latency_p50", Double),
        Column("latency_p99", Double),
    ]


def _event_columns() -> list[Column[Any]]:
    """Make the columns of a table of events."""
    return [
        *_columns_of_history(),
        Column("kind", Text, nullable=False),
        Column("actor", Text, nullable=False),
        Column("reason", Text, nullable=False, server_default=text("''")),
        Column("leader_id", Uuid),
        Column("term", BigInteger),
        Column("kafka_topic", Text),
        Column("kafka_key", Text),
        Column("record_id", BigInteger),
    ]


def _columns_of_history() -> list[Column[Any]]:
    return [
        Column("id", BigInteger, Identity(always=False), primary_key=True),
        Column("create_time", DateTime(timezone=True), nullable=False, server_default=text(_NOW)),
        Column("outbox", Text, nullable=False),
    ]


def _checks(layout: TableLayout) -> list[CheckConstraint]:
    """Make the CHECK constraints, with their names whatever naming convention the application's metadata has."""
    return [
        CheckConstraint(text(rule), name=conv(name))
        for name, rule in CHECKS.items()
        if layout.has_partition or "kafka_partition" not in rule
    ]


def _binary_columns(layout: TableLayout) -> list[Column[Any]]:
    return [
        Column("id", BigInteger, Identity(always=False), primary_key=True),
        Column(
            "create_time",
            DateTime(timezone=True),
            nullable=False,
            server_default=text(_NOW) if layout.has_time_default else None,
        ),
        Column("kafka_topic", String(MAX_TOPIC_LENGTH), nullable=False),
        Column("kafka_key", _characters(layout.key_length), nullable=not layout.key_required),
        Column("kafka_value", BYTEA),
        Column("kafka_header_keys", ARRAY(Text), nullable=False, server_default=text(_EMPTY_ARRAY)),
        Column(
            "kafka_header_values",
            ARRAY(BYTEA),
            nullable=False,
            server_default=text(_EMPTY_ARRAY),
        ),
        *_partition_column(layout),
        Column("leader_id", Uuid),
    ]


def _text_columns(layout: TableLayout) -> list[Column[Any]]:
    return [
        Column("id", BigInteger, primary_key=True),
        Column(
            "create_time",
            DateTime(timezone=True),
            nullable=False,
            server_default=text(_NOW) if layout.has_time_default else None,
        ),
        Column("kafka_topic", String(MAX_TOPIC_LENGTH), nullable=False),
        Column("kafka_key", _characters(layout.key_length), nullable=not layout.key_required),
        Column("kafka_value", _characters(layout.value_length)),
        Column("kafka_header_keys", ARRAY(Text), nullable=False),
        Column("kafka_header_values", ARRAY(Text), nullable=False),
        *_partition_column(layout),
        Column("leader_id", Uuid),
    ]


def _partition_column(layout: TableLayout) -> list[Column[Any]]:
    return [Column("kafka_partition", Integer)] if layout.has_partition else []


def _characters(length: int | None) -> String:
    return Text() if length is None else String(length)


class OutboxMixin:
    """The columns of an outbox table for a declarative model.

        class Outbox(OutboxMixin, Base):
            __tablename__ = "outbox"

    With a schema: `__table_args__ = {**OutboxMixin.__table_args__, "schema": "billing"}`. Write to it by
    `outbox_sqlalchemy.Outbox(model)`, which checks each record; the harvester removes the rows.
    """

    __table_args__: Any = storage_options(STORAGE_PARAMETERS)

    id: Mapped[int] = mapped_column(BigInteger, Identity(always=False), primary_key=True)
    create_time: Mapped[datetime] = mapped_column(DateTime(timezone=True), server_default=text(_NOW))
    kafka_topic: Mapped[str] = mapped_column(String(MAX_TOPIC_LENGTH))
    kafka_key: Mapped[str | None] = mapped_column(Text)
    kafka_value: Mapped[bytes | None] = mapped_column(BYTEA)
    kafka_header_keys: Mapped[list[str]] = mapped_column(ARRAY(Text), server_default=text(_EMPTY_ARRAY))
    kafka_header_values: Mapped[list[bytes | None]] = mapped_column(ARRAY(BYTEA), server_default=text(_EMPTY_ARRAY))
    kafka_partition: Mapped[int | None] = mapped_column(Integer)
    leader_id: Mapped[UUID | None] = mapped_column(Uuid)


@event.listens_for(OutboxMixin, "after_mapper_constructed", propagate=True)
def _add_checks(mapper: Mapper[Any], _model: type[Any]) -> None:
    """Give a model's table its constraints here: `__table_args__` stays a dict that models can extend."""
    table = mapper.local_table
    if isinstance(table, Table) and not {check.name for check in table.constraints} & set(CHECKS):
        for check in _checks(BINARY_LAYOUT):
            table.append_constraint(check)


def layout_of(table: Table) -> TableLayout:
    """Return the layout of a table, made here or reflected; OutboxTableError names the column that is wrong."""
    columns = {column.name: column for column in table.columns}
    missing = [name for name in REQUIRED_COLUMNS if name not in columns]
    if missing:
        raise OutboxTableError(f"table {table.fullname!r} is no outbox: it has no column {', '.join(missing)}")
    values = _kind(table, "kafka_value", columns["kafka_value"].type)
    headers = columns["kafka_header_values"].type
    item_type = headers.item_type if isinstance(headers, GENERIC_ARRAY) else headers
    if not isinstance(headers, GENERIC_ARRAY) or _kind(table, "kafka_header_values", item_type) != values:
        expected = "bytea[]" if values == "binary" else "text[]"
        raise OutboxTableError(
            f"table {table.fullname!r} is no outbox: beside its kafka_value, kafka_header_values has to be {expected}, "
            f"not {headers!r}"
        )
    return TableLayout(
        values=values,
        has_partition="kafka_partition" in columns,
        key_required=not columns["kafka_key"].nullable,
        key_length=getattr(columns["kafka_key"].type, "length", None),
        value_length=getattr(columns["kafka_value"].type, "length", None) if values == "text" else None,
        has_time_default=columns["create_time"].server_default is not None,
    )


def _kind(table: Table, column: str, kind: TypeEngine[Any]) -> Literal["binary", "text"]:
    if isinstance(kind, LargeBinary):
        return "binary"
    if isinstance(kind, String):
        return "text"
    raise OutboxTableError(
        f"table {table.fullname!r} is no outbox: {column} has to hold bytea or text (or varchar), not {kind!r}"
    )
