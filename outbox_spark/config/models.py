"""Settings of the pipelines: frozen, validated once, with units in their types."""

from __future__ import annotations

import re
import warnings
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal, Self, TypeVar

from pydantic import AfterValidator, BeforeValidator, ByteSize, Field, PlainValidator, field_validator, model_validator

from outbox_core.config import normalise_data_source, parse_duration, redact_settings
from outbox_core.config.problems import InvalidSettings, Problem, Settings
from outbox_core.errors import InvalidConfig
from outbox_core.schema import TableName
from outbox_core.topic_names import must_be_legal

S = TypeVar("S", bound=Settings)

MOST_ROWS = 50_000  # of a relay's transaction: its manifest is one record, and brokers take 1 MB by default


def _matching(pattern: str, otherwise: str) -> AfterValidator:
    def check(text: str) -> str:
        if not re.fullmatch(pattern, text):
            raise ValueError(otherwise)
        return text

    return AfterValidator(check)


def _table(name: str | TableName) -> TableName:
    try:
        return name if isinstance(name, TableName) else TableName.parse(name)
    except (InvalidConfig, TypeError) as error:
        raise ValueError(str(error)) from None


def _single_to_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _distinct(values: list[str]) -> list[str]:
    if len(set(values)) < len(values):
        raise ValueError("names something twice")
    return values


def _duration(value: object) -> timedelta:
    duration = parse_duration(value)
    if duration <= timedelta(0):
        raise ValueError("must be longer than nothing")
    return duration


def _an_hour(value: timedelta) -> timedelta:
    if value < timedelta(hours=1):
        raise ValueError("must be 1h or more: files that are being written are not of a version yet")
    return value


def _with_zone(value: datetime) -> datetime:
    if value.tzinfo is None:
        raise ValueError("needs a time zone; write for example `2026-11-21T00:00:00Z`")
    return value


def _with_one_of(settings: S, *names: str) -> S:
    if sum(getattr(settings, name) is not None for name in names) != 1:
        raise InvalidSettings([Problem((), f"needs exactly one of {', '.join(names)}")])
    return settings


def _single_values(values: dict[str, Any]) -> dict[str, Any]:
    nested = [
        name for name, value in values.items() if value is None or isinstance(value, Mapping | list | tuple | set)
    ]
    if nested:
        words = "must be a single value: write a name with dots in one piece, a list with commas"
        raise InvalidSettings([Problem((name,), words) for name in nested])
    return values


def _as_text(values: dict[str, Any]) -> dict[str, str]:
    return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in values.items()}


Topic = Annotated[str, AfterValidator(must_be_legal)]
Topics = Annotated[
    list[Topic], BeforeValidator(_single_to_list), Field(min_length=1, max_length=1000), AfterValidator(_distinct)
]
Name = Annotated[str, _matching(r"[A-Za-z0-9._-]{1,100}", "must be 1 to 100 of the characters a-z A-Z 0-9 . _ -")]
Column = Annotated[
    str,
    _matching(r"[A-Za-z][A-Za-z0-9_]{0,62}", "is not a column name: a letter, then letters, digits and _, 63 at most"),
]
Table = Annotated[TableName, PlainValidator(_table)]
DataSource = Annotated[str, AfterValidator(normalise_data_source)]
Duration = Annotated[timedelta, BeforeValidator(_duration)]
Time = Annotated[datetime, AfterValidator(_with_zone)]
Path = Annotated[str, Field(min_length=1)]
HeaderName = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=100_000_000, strict=True)]
Properties = Annotated[dict[str, Any], AfterValidator(_single_values)]
Texts = Annotated[Properties, AfterValidator(_as_text)]
Bytes = Annotated[ByteSize, Field(ge=1024, le=2**40)]


class SparkSettings(Settings):
    """Spark's master URL (None: this machine, or the choice of `spark-submit`), and any of its settings by name."""

    master: str | None = None
    settings: Texts = Field(default_factory=dict, repr=False)  # the keys of storage accounts, say

    @field_validator("settings")
    @classmethod
    def _are_of_spark(cls, settings: dict[str, str]) -> dict[str, str]:
        others = [name for name in settings if not name.startswith("spark.")]
        if others:
            raise InvalidSettings([Problem((name,), "unknown setting: Spark's begin with `spark.`") for name in others])
        return settings


class StreamSettings(Settings):
    """Settings of the pipelines that follow topics.

    Attributes:
        name: of the query, under which its target keeps its position; one for each pipeline and target.
        checkpoint: folder of Spark's checkpoint: any URL that Spark's file systems know.
        starting_offsets: beginning without a checkpoint and a position.
        max_records: maximum number of records in a batch.
        trigger: time from the start of one batch to the next.
        accept_gap: go on although records are missing after the target's position.
        id_header: header of records that tells repeats apart, the `idHeader` of their harvester.
        metrics_port: the port of `/metrics` and `/healthz`; 0 for any free port, None for no server.
        metrics_host: the address to serve them on.
    """

    name: Name
    topics: Topics
    checkpoint: Path
    starting_offsets: Literal["earliest", "latest"] = "earliest"
    max_records: Count = 200_000
    trigger: Duration = timedelta(seconds=5)
    accept_gap: bool = False
    id_header: HeaderName = "outbox-id"
    metrics_port: Annotated[int, Field(ge=0, le=65535, strict=True)] | None = None
    metrics_host: Annotated[str, Field(min_length=1)] = "127.0.0.1"


class TotalsSettings(Settings):
    """Sums over the projected table, kept up to date in the same transaction; the table is created if it is missing.

    `sums` maps a column of the totals to the column that it sums; `count` is the column that counts rows.
    """

    table: Table
    by: Annotated[list[Column], Field(min_length=1), AfterValidator(_distinct)]
    sums: dict[Column, Column] = Field(default_factory=dict)
    count: Column = "rows"

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        _distinct([*self.by, *self.sums, self.count])
        return self

    @property
    def sources(self) -> list[str]:
        """Return the columns of the projected table that the totals need."""
        return list(dict.fromkeys([*self.by, *self.sums.values()]))


class PostgresTarget(Settings):
    """A table in PostgreSQL, created if it is missing; `quarantine` is by default its name and `_quarantine`."""

    dsn: DataSource = Field(repr=False)
    table: Table
    quarantine: Table | None = None
    totals: TotalsSettings | None = None

    @property
    def quarantine_table(self) -> TableName:
        """Return the table of misfits."""
        return self.quarantine or TableName(f"{self.table.table}_quarantine", self.table.schema)


class IcebergTable(Settings):
    """An Iceberg table by its name with its namespace.

    `catalog` has pyiceberg's properties: `type`, `uri`, `warehouse` and others; `name` is `default` unless it is given,
    and those that pyiceberg's own configuration has for that name need not be repeated.
    """

    table: Annotated[str, Field(pattern=r"^[^.\s]+(\.[^.\s]+)+$")]
    catalog: Texts = Field(default_factory=dict, repr=False)


def _place(value: object) -> object:
    return IcebergTable(**value) if isinstance(value, Mapping) else value


Archive = Annotated[Path | IcebergTable, BeforeValidator(_place)]
"""The folder of a Delta table, or an Iceberg table."""


class FileSettings(Settings):
    """Sizes and ages of a table's files.

    Files of one day are merged to files of `target_file_size` (bytes, or text such as `128 MiB`) when `small_files` of
    them have less than half that size. `--maintain` deletes files that no version of the last `keep_versions` has, and
    those of a batch that takes longer.
    """

    target_file_size: Bytes = ByteSize(128 * 2**20)
    small_files: Annotated[int, Field(ge=2, le=10_000, strict=True)] = 24
    keep_versions: Annotated[Duration, AfterValidator(_an_hour)] = timedelta(days=7)


class LakehouseTable(FileSettings):
    """A Delta table in the folder `path`, any URL that Spark's file systems and deltalake know, or an Iceberg table."""

    path: Path | None = None
    iceberg: IcebergTable | None = None

    @model_validator(mode="after")
    def _one_place(self) -> Self:
        return _with_one_of(self, "path", "iceberg")

    @property
    def place(self) -> str | IcebergTable:
        """Return the one that is given."""
        return self.path or self.iceberg  # type: ignore[return-value]


class LakehouseTarget(LakehouseTable):
    """A table without repeats within `deduplicate_within`; `quarantine` is by default its place and `_quarantine`."""

    quarantine: Path | None = None
    deduplicate_within: Duration = timedelta(days=1)

    @property
    def quarantine_place(self) -> str | IcebergTable:
        """Return the place of the quarantine, which has the table's format and catalog."""
        if self.iceberg is not None:
            name = self.quarantine or f"{self.iceberg.table}_quarantine"
            return IcebergTable(table=name, catalog=self.iceberg.catalog)
        return self.quarantine or str(self.path).rstrip("/") + "_quarantine"


class RowSettings(Settings):
    """Records -> typed rows.

    Attributes:
        value_schema: fields of the values in Spark's DDL; `NOT NULL` fields are required. YAML: `schema`.
        format: of the values; `avro` and `protobuf` have their writers' schemas in a schema registry.
        registry: properties of confluent-kafka's `SchemaRegistryClient`: `url`, `basic.auth.user.info` and others.
        explode: array in the value, each element of which becomes a row; None for one row.
        columns: column -> SQL expression over the value's fields, `record` (with `key`, `topic`, `partition`, `offset`,
            `timestamp`, `headers`, `outbox_id`, and `event`, the attributes of a CloudEvent) and, with `explode`,
            `item`; empty for the fields as they are.
        where: Spark SQL condition on records or items; None for all.
    """

    value_schema: str = Field(validation_alias="schema", min_length=1)
    format: Literal["json", "avro", "protobuf"] = "json"
    registry: Properties | None = Field(default=None, repr=False)
    explode: str | None = None
    columns: dict[Column, str] = Field(default_factory=dict)
    where: str | None = None

    @model_validator(mode="after")
    def _has_registry(self) -> Self:
        if self.format != "json" and "url" not in (self.registry or {}):
            raise InvalidSettings([Problem(("registry", "url"), f"is missing: schemas of {self.format} are there")])
        if self.format == "json" and self.registry is not None:
            raise InvalidSettings([Problem(("registry",), "is for the formats avro and protobuf")])
        return self


class ProjectSettings(StreamSettings, RowSettings):
    """Topics -> a typed, deduplicated table in PostgreSQL, in a lakehouse (Delta, Iceberg) or both.

    Attributes:
        keep: `every` record as a row, or the `latest` of each key: a record replaces the rows of its key, a tombstone
            removes them.
        replay_header: header of replays, which with `keep: latest` replace only older records.
    """

    keep: Literal["every", "latest"] = "every"
    postgres: PostgresTarget | None = None
    lakehouse: LakehouseTarget | None = None
    replay_header: HeaderName = "outbox-replay"

    @model_validator(mode="before")
    @classmethod
    def _earlier_name(cls, values: Any) -> Any:
        if isinstance(values, Mapping) and "parquet" in values and "lakehouse" not in values:
            warnings.warn("project.parquet is now project.lakehouse", DeprecationWarning, stacklevel=2)
            return {"lakehouse" if name == "parquet" else name: value for name, value in values.items()}
        return values

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.postgres is None and self.lakehouse is None:
            raise InvalidSettings([Problem((), "needs a target: postgres, lakehouse or both")])
        return self


class ArchiveSettings(StreamSettings, LakehouseTable):
    """Topics -> a Delta or Iceberg table by event date."""


class Period(Settings):
    """A choice of records: those that Kafka took at or after `since`, and before `until`; None for no bound."""

    since: Time | None = None
    until: Time | None = None

    @model_validator(mode="after")
    def _is_in_order(self) -> Self:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise InvalidSettings([Problem(("until",), "must be later than since")])
        return self


class ReplaySettings(Period):
    """Archive -> topics.

    Attributes:
        name: of this replay, in a header of every record; it happens once, and goes on after an interruption.
        keys: only records of these keys (text); None for all.
        to: topic -> target topic; others are replayed to themselves.
        keep_partitions: send each record to the partition it was archived from; else its key decides.
        header: header that marks replayed records, with the replay's name as value.
        transaction_records: number of records in a transaction.
    """

    archive: Archive
    name: Name
    topics: Topics | None = None
    keys: Annotated[list[str], BeforeValidator(_single_to_list), Field(min_length=1)] | None = None
    to: dict[Topic, Topic] = Field(default_factory=dict)
    keep_partitions: bool = True
    header: HeaderName = "outbox-replay"
    transaction_records: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 5_000

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.topics is not None and (unknown := sorted(set(self.to) - set(self.topics))):
            raise InvalidSettings([Problem(("to", unknown[0]), "is not one of the topics that are replayed")])
        return self


class SnapshotTable(Settings):
    """A table of stashed records in PostgreSQL: the outbox, a copy of it, or the application's own ledger.

    It has the outbox's columns `id`, `kafka_topic` and `kafka_key`. `outbox_name` is the text before the id in the id
    header; None for database, schema and table.
    """

    dsn: DataSource = Field(repr=False)
    table: Table
    outbox_name: str | None = None


class AuditSide(Settings):
    """One side of the comparison: exactly one of these; only the expected side can be a table.

    `parquet` is a folder of files with the columns `topic`, `key`, `outbox_id`, `partition`, `offset` and `timestamp`.
    """

    archive: Archive | None = None
    parquet: Path | None = None
    topics: Topics | None = None
    table: SnapshotTable | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        return _with_one_of(self, "archive", "parquet", "topics", "table")


class AuditSettings(Period):
    """Archive, or stashed records, against topics.

    Attributes:
        topics: compare only these; None for all topics of the expected side (and all of the found one).
        examples: number of examples of each kind that the report shows for a topic.
        report: path of the JSON report; None for standard output. `html` is the path of a page with charts.
        findings: folder for all findings as Parquet; None for none.
        replay_header: header of replays, which repeat others by intention.
        id_header: header of records in `topics` that tells repeats apart.
    """

    expected: AuditSide
    found: AuditSide
    topics: Topics | None = None
    examples: Annotated[int, Field(ge=1, le=1000, strict=True)] = 20
    report: Path | None = None
    html: Path | None = None
    findings: Path | None = None
    replay_header: HeaderName = "outbox-replay"
    id_header: HeaderName = "outbox-id"

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.found.table is not None:
            raise InvalidSettings([Problem(("found", "table"), "only the expected side can be a table")])
        return self


class RelaySettings(Settings):
    """Outbox table -> topics, by `shards` tasks at once; the section `harvest` names the outbox."""

    shards: Annotated[int, Field(ge=1, le=1000, strict=True)] = 2
    batch_records: Annotated[int, Field(ge=1, le=MOST_ROWS, strict=True)] = Field(
        default=20_000, validation_alias="batchRecords"
    )


class KafkaSettings(Settings):
    """librdkafka's properties for every client: `bootstrap.servers`, TLS, SASL and others."""

    properties: Texts

    def __repr_args__(self) -> Any:
        yield "properties", redact_settings(self.properties)
