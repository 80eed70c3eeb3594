"""Names, layouts and SQL of the outbox and of the tables beside it: its holds, its history, and the inbox.

Two layouts are supported. Both have the columns of goharvest's outbox table (seed 001):

- **binary** (our default): `kafka_value` is `bytea` and `kafka_header_values` is `bytea[]`, so that Avro and Protobuf
  payloads fit; `kafka_partition` may name a partition; the key may be NULL; key and value have no length limit.
- **text**: goharvest's own table, written by programs in any language; text columns with a maximum length.

The harvester inspects the table to see which one it has; the stash functions ask the adapter's table object.

Any role that may INSERT chooses the content of a row, so two things keep odd rows out: CHECK constraints (`CHECKS`),
and grants by column (`grant_statements`), which leave `id`, `create_time` and `leader_id` to the database and the
harvester. The harvester survives tables without either.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from hashlib import sha256
from typing import Literal

from outbox_core.errors import InvalidConfig, InvalidRecord
from outbox_core.record import MAX_KEY_BYTES, Header, OutboxRecord

__all__ = [
    "BINARY_LAYOUT",
    "CHECKS",
    "STORAGE_PARAMETERS",
    "TEXT_LAYOUT",
    "EventKind",
    "TableLayout",
    "TableName",
    "add_checks_sql",
    "create_history_sql",
    "create_hold_sql",
    "create_inbox_sql",
    "create_table_sql",
    "drop_checks_sql",
    "drop_notify_sql",
    "grant_statements",
    "grants_sql",
    "notify_sql",
    "revoke_statements",
    "validate_checks_sql",
]

COLUMNS = (
    "create_time",
    "kafka_topic",
    "kafka_key",
    "kafka_value",
    "kafka_header_keys",
    "kafka_header_values",
    "kafka_partition",
)
"""The columns that a stash may write, in order: the first unless it has a default; the text layout lacks the last."""

REQUIRED_COLUMNS = ("id", *COLUMNS[:-1], "leader_id")
"""The columns without which a table is no outbox."""

STORAGE_PARAMETERS = {
    # A mark rewrites the row; half-empty pages let the new version stay on its page (HOT), without index work.
    "fillfactor": "50",
    # Every row is inserted, updated and deleted within seconds: vacuum by count, not by a share of the table, and
    # without pauses, or the head of the index fills with dead entries.
    "autovacuum_vacuum_scale_factor": "0",
    "autovacuum_vacuum_threshold": "10000",
    "autovacuum_vacuum_insert_scale_factor": "0",
    "autovacuum_vacuum_insert_threshold": "100000",
    "autovacuum_vacuum_cost_delay": "0",
    "autovacuum_analyze_scale_factor": "0",
    "autovacuum_analyze_threshold": "100000",
}
"""Storage parameters of the table, the same by every schema route, with the reasons beside them."""

CHECKS = {
    "outbox_id_in_range": "id > 0 AND id < 9223372036854775807",
    # A clock that forgot the time begins in 1970. What lies outside does not fit the microseconds of a manifest.
    "outbox_create_time_in_range": (
        "create_time >= '1970-01-01 00:00:00+00' AND create_time < '9999-01-01 00:00:00+00'"
    ),
    "outbox_headers_in_pairs": "cardinality(kafka_header_keys) = cardinality(kafka_header_values)",
    "outbox_partition_in_range": "kafka_partition >= 0",
}
"""The CHECK constraints of an outbox table, by name; the same by every schema route.

The harvester alone judges marks and topics: the table does not know the names of the harvester's own.
"""

_IDENTIFIER = re.compile(r"[A-Za-z_\x80-\uffff][\w$]*\Z")
_MAX_IDENTIFIER_BYTES = 63


@dataclass(frozen=True, slots=True)
class TableName:
    """A table's name, with or without its schema. Unquoted names are taken exactly as written, upper case included."""

    table: str
    schema: str | None = None

    @classmethod
    def parse(cls, text: str) -> TableName:
        """Read `outbox` or `billing.outbox`, quoted or not; raise InvalidConfig if it is no table name."""
        parts = re.findall(r'"((?:[^"]|"")+)"|([^."]+)', text)
        rebuilt = ".".join(f'"{quoted}"' if quoted else plain for quoted, plain in parts)
        names = [quoted.replace('""', '"') if quoted else plain for quoted, plain in parts]
        plain_is_legal = all(quoted or _IDENTIFIER.match(plain) for quoted, plain in parts)
        if rebuilt != text or not 1 <= len(names) <= 2 or not plain_is_legal:
            raise InvalidConfig(f"{text!r} is not a table name; write `table` or `schema.table`")
        for name in names:
            if len(name.encode()) > _MAX_IDENTIFIER_BYTES or "\0" in name:
                raise InvalidConfig(f"{name!r} is longer than the {_MAX_IDENTIFIER_BYTES} bytes of an identifier")
        return cls(names[-1], names[0] if len(names) == 2 else None)

    @property
    def quoted(self) -> str:
        """The name as it is written into SQL."""
        return f"{quote(self.schema)}.{quote(self.table)}" if self.schema else quote(self.table)

    def __str__(self) -> str:
        return f"{self.schema}.{self.table}" if self.schema else self.table


def quote(identifier: str) -> str:
    """Return an identifier quoted for SQL."""
    return '"' + identifier.replace('"', '""') + '"'


# Begins a statement that changes or reads holds before rows. PostgreSQL locks tables as it meets them in the text: a
# migration that alters the outbox and then its holds, in one transaction, would wait for a session that waits for it.
OUTBOX_FIRST = "outbox_first AS (SELECT FROM {table} LIMIT 0)"

HAS_UNIQUE_ID_SQL = """EXISTS (
    SELECT FROM pg_index JOIN pg_attribute ON attrelid = indrelid AND attnum = indkey[0] AND attname = 'id'
    WHERE indrelid = c.oid AND indisunique AND indisvalid AND indpred IS NULL AND indnkeyatts = 1)"""
"""The condition that no two rows of a table `c` of pg_class have one id."""


def iso_time_sql(time: str) -> str:
    """Return SQL for a time as text in ISO 8601, whatever the session's DateStyle is."""
    return f"btrim(to_json({time})::text, '\"')"


def shown_key_sql(key: str) -> str:
    """Return SQL for a key as readers get it: any writer may leave one of a gigabyte, which is cut."""
    return f"left({key}, {MAX_KEY_BYTES})"


HEADERS_TOO_LARGE = "(the headers are too large to be shown)"


MOST_MEASURED_ELEMENTS = 100_000
"""An array of more elements is not measured: no message has so many headers, and to count their bytes takes minutes."""


def small_headers_sql(most_bytes: str, of: str = "") -> str:
    """Return SQL that tells if a row's headers are small enough to be shown: any writer may leave gigabytes of them.

    A compressed array is measured by decompressing it, unless the number of its elements tells enough. `of` is the
    row's name in the statement, with a dot.
    """
    names, values = f"{of}kafka_header_keys", f"{of}kafka_header_values"
    size = " + ".join(f"coalesce(octet_length(array_send({array})), 0)" for array in (names, values))
    many = f"greatest(cardinality({names}), cardinality({values})) > {MOST_MEASURED_ELEMENTS}"
    return f"CASE WHEN {many} THEN false ELSE {size} <= {most_bytes} END"


Row = tuple[str, str | None, bytes | str | None, list[str], list[bytes | str | None], int | None]
"""Values of COLUMNS without create_time (the database's clock writes it), for one record."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TableLayout:
    """The columns of an outbox table: their types and limits.

    Attributes:
        values: `binary` (bytea) or `text`: the type of `kafka_value` and `kafka_header_values`.
        has_partition: True if there is a `kafka_partition` column.
        key_required: True if `kafka_key` is NOT NULL.
        key_length: longest key in characters, or None for no limit.
        value_length: longest value in characters (text layout), or None for no limit.
        has_time_default: True if `create_time` has a DEFAULT, as our own layout has. A stash then leaves it out, and
            writers need no right to set it.
    """

    values: Literal["binary", "text"] = "binary"
    has_partition: bool = True
    key_required: bool = False
    key_length: int | None = None
    value_length: int | None = None
    has_time_default: bool = True

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns that a stash writes with values of `row`, in its order (a row may have one element more)."""
        return COLUMNS[1:] if self.has_partition else COLUMNS[1:-1]

    def row(self, record: OutboxRecord) -> Row:
        """Return the record as column values for this table.

        Raises:
            InvalidRecord: if the record does not fit, naming field and column.
        """
        if not isinstance(record, OutboxRecord):
            raise InvalidRecord(f"expected an OutboxRecord, got {type(record).__name__}")
        if record.partition is not None and not self.has_partition:
            raise InvalidRecord("partition: this outbox table has no kafka_partition column")
        headers: tuple[Header, ...] = record.headers  # type: ignore[assignment]
        keys = [header.key for header in headers]
        values: list[bytes | str | None]
        value: bytes | str | None
        if self.values == "binary":
            values = [_as_bytes(header.value) for header in headers]
            value = _as_bytes(record.value)
        else:
            values = [_as_text(header.value, f"headers: the value of {header.key!r}") for header in headers]
            value = _as_text(record.value, "value")
            self._check_length(value, self.value_length, "value", "kafka_value")
        return record.topic, self._key(record.key), value, keys, values, record.partition  # type: ignore[arg-type]

    def _key(self, key: str | None) -> str | None:
        if key is None and self.key_required:
            raise InvalidRecord("key: this outbox table's kafka_key column is NOT NULL, so every record needs a key")
        self._check_length(key, self.key_length, "key", "kafka_key")
        return key

    @staticmethod
    def _check_length(text: bytes | str | None, limit: int | None, field: str, column: str) -> None:
        if text is not None and limit is not None and len(text) > limit:
            raise InvalidRecord(f"{field}: {len(text)} characters do not fit the column {column} of {limit}")


BINARY_LAYOUT = TableLayout()
"""The layout that our own schema routes make."""

TEXT_LAYOUT = TableLayout(
    values="text",
    has_partition=False,
    key_required=True,
    key_length=100,
    value_length=10_000,
    has_time_default=False,
)
"""The layout of goharvest's own table, with the lengths its documentation shows."""


def _as_bytes(value: bytes | str | None) -> bytes | None:
    return value.encode() if isinstance(value, str) else value


def _as_text(value: bytes | str | None, where: str) -> str | None:
    if isinstance(value, bytes):
        raise InvalidRecord(f"{where}: bytes do not fit a text column; use the binary layout, or pass str")
    if value is not None and "\0" in value:
        raise InvalidRecord(f"{where}: contains a NUL character, which a text column cannot hold")
    return value


_BINARY_TABLE = """\
CREATE TABLE {table} (
    id                  bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    create_time         timestamp with time zone NOT NULL DEFAULT now(),
    kafka_topic         varchar(249) NOT NULL,
    kafka_key           text,
    kafka_value         bytea,
    kafka_header_keys   text[] NOT NULL DEFAULT '{{}}',
    kafka_header_values bytea[] NOT NULL DEFAULT '{{}}',
    kafka_partition     integer,
    leader_id           uuid,
{checks}
) WITH (
{parameters}
);
"""

_TEXT_TABLE = """\
CREATE TABLE {table} (
    id                  bigserial PRIMARY KEY,
    create_time         timestamp with time zone NOT NULL,
    kafka_topic         varchar(249) NOT NULL,
    kafka_key           varchar(100) NOT NULL,  -- pick your own maximum key size
    kafka_value         varchar(10000),         -- pick your own maximum value size
    kafka_header_keys   text[] NOT NULL,
    kafka_header_values text[] NOT NULL,
    leader_id           uuid,
{checks}
) WITH (
{parameters}
);
"""


def create_table_sql(name: TableName, layout: Literal["binary", "text"] = "binary") -> str:
    """Return the PostgreSQL DDL of an outbox table: one statement, ending in a newline."""
    template = _BINARY_TABLE if layout == "binary" else _TEXT_TABLE
    parameters = ",\n".join(f"    {key} = {value}" for key, value in STORAGE_PARAMETERS.items())
    checks = ",\n".join(f"    CONSTRAINT {key} CHECK ({rule})" for key, rule in checks_of(layout).items())
    return template.format(table=name.quoted, checks=checks, parameters=parameters)


def checks_of(layout: Literal["binary", "text"]) -> dict[str, str]:
    """Return the CHECK constraints of a layout, by name."""
    return {name: rule for name, rule in CHECKS.items() if layout == "binary" or "kafka_partition" not in rule}


# Inserts queue behind a statement that waits for an open transaction, so it does not wait for long.
_WAIT_BRIEFLY = """\
DO {quote}
DECLARE
    patience text := current_setting('lock_timeout');
BEGIN
    PERFORM set_config('lock_timeout', CASE patience WHEN '0' THEN '5s' ELSE patience END, true);
{statements}
    PERFORM set_config('lock_timeout', patience, true);
END
{quote}"""

# One short lock: rows from before are not looked at, so nothing that violates a constraint is in the way. Fresh tables
# get constraints that are valid at once, as by CREATE TABLE.
_ADD_CHECKS = """\
    ALTER TABLE {table}
{drop},
{add};
    IF pg_relation_size({name}) = 0 THEN
        ALTER TABLE {table}
{validate};
    END IF;"""


def _wait_briefly(statements: str) -> str:
    """Return a statement that runs others, and waits for each lock for five seconds or the session's lock_timeout."""
    return _WAIT_BRIEFLY.format(quote=_dollars(statements), statements=statements)


def add_checks_sql(name: TableName, checks: Mapping[str, str] = CHECKS) -> str:
    """Return the PostgreSQL DDL that gives an older outbox its CHECK constraints: one repeatable statement.

    They hold for rows that are written from then on, marks included. On a table that was in use they are NOT VALID
    until `validate_checks_sql` has been run. The text layout takes `checks_of("text")`.
    """
    statements = _ADD_CHECKS.format(
        table=name.quoted,
        name=_literal(name.quoted),
        drop=",\n".join(f"        DROP CONSTRAINT IF EXISTS {key}" for key in checks),
        add=",\n".join(f"        ADD CONSTRAINT {key} CHECK ({rule}) NOT VALID" for key, rule in checks.items()),
        validate=",\n".join(f"            VALIDATE CONSTRAINT {key}" for key in checks),
    )
    return f"{_wait_briefly(statements)};\n"


def validate_checks_sql(name: TableName, checks: Mapping[str, str] = CHECKS) -> str:
    """Return the PostgreSQL DDL that validates the constraints, while the table is read and written."""
    actions = ",\n".join(f"    VALIDATE CONSTRAINT {key}" for key in checks)
    return f"ALTER TABLE {name.quoted}\n{actions};\n"


def violations_sql(name: TableName, checks: Mapping[str, str] = CHECKS) -> str:
    """Return the SELECT that finds rows which violate the constraints."""
    broken = " AND ".join(f"({rule})" for rule in checks.values())
    return f"SELECT id, create_time, kafka_topic FROM {name.quoted} WHERE NOT ({broken});\n"


def drop_checks_sql(name: TableName, checks: Mapping[str, str] = CHECKS) -> str:
    """Return the PostgreSQL DDL that removes the CHECK constraints: one repeatable statement."""
    actions = ",\n".join(f"        DROP CONSTRAINT IF EXISTS {key}" for key in checks)
    statement = _wait_briefly(f"    ALTER TABLE {name.quoted}\n{actions};")
    return f"{statement};\n"


_GRANTS_OF_WRITER = """\
-- Rights on the whole table would go beyond those on columns.
REVOKE INSERT, UPDATE ON TABLE {table} FROM {writer}, {harvester};
-- The applications that stash. They cannot choose {kept}.
GRANT USAGE ON SCHEMA {schema} TO {writer};
GRANT INSERT ({columns}) ON TABLE {table} TO {writer};
"""
# The default of a bigserial column is evaluated with the writer's rights, an identity column's is not.
_GRANT_TO_DRAW_IDS = "GRANT USAGE ON SEQUENCE {sequence} TO {writer};\n"
_GRANTS_OF_HARVESTER = """\
-- The harvester.
GRANT USAGE ON SCHEMA {schema} TO {harvester};
GRANT SELECT, DELETE, UPDATE (leader_id) ON TABLE {table} TO {harvester};
GRANT SELECT ON SEQUENCE {sequence} TO {harvester};
GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE {holds} TO {harvester};
-- History and archive may be missing. Nobody changes what is in them.
{grant_history};
{grant_archive};
-- Whoever may create functions in a schema can have others run them unawares (PostgreSQL 15 has this by itself).
REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC;
"""
_REVOKES = """\
REVOKE INSERT ({columns}) ON TABLE {table} FROM {writer};
REVOKE USAGE ON SEQUENCE {sequence} FROM {writer};
REVOKE SELECT, DELETE, UPDATE (leader_id) ON TABLE {table} FROM {harvester};
REVOKE SELECT ON SEQUENCE {sequence} FROM {harvester};
REVOKE SELECT, INSERT, UPDATE, DELETE ON TABLE {holds} FROM {harvester};
{revoke_history};
{revoke_archive};
"""


def grants_sql(name: TableName, writer: str, harvester: str, layout: Literal["binary", "text"] = "binary") -> str:
    """Return the GRANTs of an outbox as one script; see `grant_statements`."""
    return "".join(f"{statement};\n" for statement in grant_statements(name, writer, harvester, layout))


def grant_statements(
    name: TableName, writer: str, harvester: str, layout: Literal["binary", "text"] = "binary"
) -> list[str]:
    """Return the GRANTs of an outbox that one of our routes made: the least rights with which everything works.

    `writer` is the role of the applications that stash, `harvester` that of the harvester, and of `outbox status`,
    `doctor` and `hold`. An outbox without a schema is in `public`.
    """
    draw_ids = "" if layout == "binary" else _GRANT_TO_DRAW_IDS
    return _grants(_GRANTS_OF_WRITER + draw_ids + _GRANTS_OF_HARVESTER, name, writer, harvester, layout)


def revoke_statements(
    name: TableName, writer: str, harvester: str, layout: Literal["binary", "text"] = "binary"
) -> list[str]:
    """Return the REVOKEs for `grant_statements`, but for USAGE of the schema, which other tables may need.

    Rights that those statements took away do not come back.
    """
    return _grants(_REVOKES, name, writer, harvester, layout)


def _grants(script: str, name: TableName, writer: str, harvester: str, layout: Literal["binary", "text"]) -> list[str]:
    """Return the statements of a script, each with the comment above it; the names may contain semicolons."""
    shape = BINARY_LAYOUT if layout == "binary" else TEXT_LAYOUT
    columns = shape.columns if shape.has_time_default else ("create_time", *shape.columns)
    schema = name.schema or "public"
    table = TableName(name.table, schema)
    # As PostgreSQL calls the sequence of an identity or bigserial column.
    sequence = TableName(_with_suffix(name.table, "_id_seq"), schema).quoted
    role, archive = quote(harvester), archive_beside(table)
    history = statistics_beside(table), events_beside(table)
    execute = f"EXECUTE ON FUNCTION {archive_rotation(table).quoted}(integer)"
    names = {
        "kept": "id, create_time or leader_id" if shape.has_time_default else "id or leader_id",
        "schema": quote(schema),
        "table": table.quoted,
        "holds": hold_beside(table).quoted,
        "sequence": sequence,
        "columns": ", ".join(columns),
        "writer": quote(writer),
        "harvester": quote(harvester),
        "grant_history": _if_there(history, f"GRANT SELECT, INSERT, DELETE ON TABLE {{table}} TO {role}"),
        "revoke_history": _if_there(history, f"REVOKE SELECT, INSERT, DELETE ON TABLE {{table}} FROM {role}"),
        "grant_archive": _if_there(
            [archive], f"GRANT SELECT, INSERT ON TABLE {{table}} TO {role}", f"GRANT {execute} TO {role}"
        ),
        "revoke_archive": _if_there(
            [archive], f"REVOKE SELECT, INSERT ON TABLE {{table}} FROM {role}", f"REVOKE {execute} FROM {role}"
        ),
    }
    return [statement.format(**names) for statement in script.removesuffix(";\n").split(";\n")]


def _if_there(tables: Iterable[TableName], *statements: str) -> str:
    """Return the statements for each of these tables that exists: one block of PL/pgSQL."""
    block = "".join(
        f"IF to_regclass({_literal(name.quoted)}) IS NOT NULL THEN "
        + "".join(f"{statement.replace('{table}', name.quoted)}; " for statement in statements)
        + "END IF; "
        for name in tables
    )
    return f"DO {_dollars(block)}BEGIN {block}END{_dollars(block)}"


def _dollars(text: str) -> str:
    """Return a dollar quote that the text does not contain."""
    tag = "$do$"
    while tag in text:
        tag = f"{tag[:-1]}_$"
    return tag


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _with_suffix(table: str, suffix: str) -> str:
    """Return the name with a suffix, shortened by bytes as PostgreSQL would."""
    return table.encode()[: _MAX_IDENTIFIER_BYTES - len(suffix)].decode(errors="ignore") + suffix


HOLD_COLUMNS = (
    "id",
    "outbox",
    "kafka_topic",
    "kafka_key",
    "record_id",
    "reason",
    "error",
    "dead_letter",
    "create_time",
)
"""The columns of a table of holds."""

# Without a unique constraint: keys may be longer than an index can hold. What the library writes is unique by its id
# (`hold_id`); two equal holds, one of which was written by other means, mean what one means.
_HOLD_TABLE = """\
CREATE TABLE {table} (
    id          bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    outbox      text NOT NULL,                 -- schema.table
    kafka_topic text NOT NULL,
    kafka_key   text,                          -- with neither key nor record, all of the topic is held
    record_id   bigint,                        -- this record, and with its key what waits behind it
    reason      text NOT NULL DEFAULT '',
    error       text,                          -- what Kafka said
    dead_letter boolean NOT NULL DEFAULT false, -- the harvester is to publish the record to the dead-letter topic
    create_time timestamp with time zone NOT NULL DEFAULT now()
);
"""


def create_hold_sql(outbox: TableName) -> str:
    """Return the PostgreSQL DDL of an outbox's table of holds: one statement, ending in a newline."""
    return _HOLD_TABLE.format(table=hold_beside(outbox).quoted)


def hold_beside(outbox: TableName) -> TableName:
    """Return the table of an outbox's holds: `outbox_hold`, `payments_outbox_hold`."""
    return TableName(_with_suffix(outbox.table, "_hold"), outbox.schema)


def hold_id(outbox: str, topic: str, key: str | None = None, record_id: int | None = None) -> int:
    """Return the id of a hold, the same for the same hold: however many set it at once, the primary key admits one.

    Ids are below zero, so that they never meet those of rows that are written by other means. `outbox` is
    `schema.table`; `key` is None for a topic, `record_id` for a key or a topic.
    """
    name = json.dumps([outbox, topic, key, record_id])
    return -1 - (int.from_bytes(sha256(name.encode()).digest()[:8]) >> 1)


_STATISTICS_TABLE = """\
CREATE TABLE {table} (
    id               bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    create_time      timestamp with time zone NOT NULL DEFAULT now(),
    outbox           text NOT NULL,             -- schema.table
    instance         text NOT NULL,             -- the harvester
    interval_seconds double precision NOT NULL, -- up to create_time
    published        bigint NOT NULL,           -- records in that time
    failed           bigint NOT NULL,           -- attempts
    published_bytes  bigint NOT NULL,           -- of values
    deliverable      bigint,                    -- rows at its end; NULL: not counted
    deliverable_age  double precision,          -- seconds, of the first of them
    held             bigint,
    held_age         double precision,
    latency_p50      double precision,          -- seconds from a record's create_time to Kafka; NULL: none
    latency_p99      double precision
);
"""

_EVENT_TABLE = """\
CREATE TABLE {table} (
    id          bigint GENERATED BY DEFAULT AS IDENTITY PRIMARY KEY,
    create_time timestamp with time zone NOT NULL DEFAULT now(),
    outbox      text NOT NULL,             -- schema.table
    kind        text NOT NULL,
    actor       text NOT NULL,             -- a harvester, or an operator and the role of the session
    reason      text NOT NULL DEFAULT '',
    leader_id   uuid,
    term        bigint,
    kafka_topic text,
    kafka_key   text,
    record_id   bigint
);
"""


class EventKind(StrEnum):
    """The kinds of events in an outbox's history."""

    LEADER_ACQUIRED = "leader_acquired"
    LEADER_HANDED_OVER = "leader_handed_over"
    LEADER_FENCED = "leader_fenced"
    HELD = "held"
    RELEASED = "released"
    SKIPPED = "skipped"
    DEAD_LETTER_ASKED = "dead_letter_asked"
    DEAD_LETTER_REFUSED = "dead_letter_refused"
    DEAD_LETTERED = "dead_lettered"
    RESTASHED = "restashed"


def create_history_sql(outbox: TableName) -> str:
    """Return the PostgreSQL DDL of an outbox's history, statistics and events: two statements."""
    statistics, events = statistics_beside(outbox), events_beside(outbox)
    return _STATISTICS_TABLE.format(table=statistics.quoted) + _EVENT_TABLE.format(table=events.quoted)


def statistics_beside(outbox: TableName) -> TableName:
    """Return the table of an outbox's statistics: `outbox_statistics`."""
    return TableName(_with_suffix(outbox.table, "_statistics"), outbox.schema)


def events_beside(outbox: TableName) -> TableName:
    """Return the table of an outbox's events: `outbox_event`."""
    return TableName(_with_suffix(outbox.table, "_event"), outbox.schema)


_DAY_SUFFIX_BYTES = len("_20991231")


def archive_beside(outbox: TableName) -> TableName:
    """Return the table of an outbox's archive, `outbox_archive`; a day's partition has `_20991231` behind it."""
    kept = outbox.table.encode()[: _MAX_IDENTIFIER_BYTES - len("_archive") - _DAY_SUFFIX_BYTES]
    return TableName(kept.decode(errors="ignore") + "_archive", outbox.schema)


def archive_rotation(outbox: TableName) -> TableName:
    """Return the function that makes and drops the partitions of an outbox's archive."""
    return TableName(archive_beside(outbox).table + "_rotate", outbox.schema)


NOTIFY_CHANNEL_PREFIX = "kafka_outbox_"
"""The text before the table's oid in the name of the channel on which inserts are told of."""

_NOTIFY = (
    """\
CREATE OR REPLACE FUNCTION {function}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM pg_notify('{prefix}' || TG_RELID::text, '');
    RETURN NULL;
END
$$""",
    "CREATE OR REPLACE TRIGGER {trigger} AFTER INSERT ON {table} FOR EACH STATEMENT EXECUTE FUNCTION {function}()",
)
_NO_NOTIFY = ("DROP TRIGGER IF EXISTS {trigger} ON {table}", "DROP FUNCTION IF EXISTS {function}()")


def notify_sql(name: TableName) -> str:
    """Return the PostgreSQL DDL of the trigger that notifies harvesters of inserts: two repeatable statements."""
    return "".join(f"{statement};\n" for statement in notify_statements(name))


def notify_statements(name: TableName) -> list[str]:
    """Return the statements of `notify_sql` one by one, for drivers that take no script."""
    function, trigger = (_about_notify(statement, name) for statement in _NOTIFY)
    return [function, _wait_briefly(f"    {trigger};")]


def drop_notify_sql(name: TableName) -> str:
    """Return the PostgreSQL DDL that removes the trigger of `notify_sql`: two repeatable statements."""
    return "".join(f"{statement};\n" for statement in drop_notify_statements(name))


def drop_notify_statements(name: TableName) -> list[str]:
    """Return the statements of `drop_notify_sql` one by one."""
    trigger, function = (_about_notify(statement, name) for statement in _NO_NOTIFY)
    return [_wait_briefly(f"    {trigger};"), function]


def _about_notify(statement: str, name: TableName) -> str:
    return statement.format(table=name.quoted, prefix=NOTIFY_CHANNEL_PREFIX, **_notify_names(name))


def _notify_names(name: TableName) -> dict[str, str]:
    own = _with_suffix(name.table, "_notify")
    return {"trigger": quote(own), "function": TableName(own, name.schema).quoted}


INBOX_COLUMNS = ("source", "message_id", "accept_time")
"""The columns of an inbox; the first two are its primary key."""

_INBOX_TABLE = """\
CREATE TABLE {table} (
    source      text NOT NULL,
    message_id  text NOT NULL,
    accept_time timestamp with time zone NOT NULL DEFAULT now(),
    PRIMARY KEY (source, message_id)
);
CREATE INDEX {index} ON {table} (accept_time);
"""


def create_inbox_sql(name: TableName) -> str:
    """Return the PostgreSQL DDL of an inbox table and its index for pruning: two statements, ending in a newline."""
    return _INBOX_TABLE.format(table=name.quoted, index=quote(inbox_index(name)))


def inbox_index(name: TableName) -> str:
    """Return the name of the index by which an inbox is pruned, the one that PostgreSQL itself would choose."""
    return _with_suffix(name.table, "_accept_time_idx")


def inbox_beside(outbox: TableName) -> TableName:
    """Return the default inbox beside an outbox: `inbox`, `payments_inbox`, `mailbox_inbox`."""
    head, found, tail = outbox.table.rpartition("outbox")
    return TableName(f"{head}inbox{tail}" if found else _with_suffix(outbox.table, "_inbox"), outbox.schema)
