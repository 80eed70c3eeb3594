"""The settings of each pipeline: frozen, validated once, with units in their types."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import AfterValidator, BeforeValidator, Field, field_validator, model_validator

from outbox_core.config import normalise_data_source, parse_duration, redact_settings
from outbox_core.config.problems import InvalidSettings, Problem, Settings
from outbox_core.errors import InvalidConfig
from outbox_core.schema import TableName

_TOPIC = re.compile(r"[A-Za-z0-9._-]{1,249}\Z")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,100}\Z")
_COLUMN = re.compile(r"[A-Za-z][A-Za-z0-9_]{0,62}\Z")
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(KB|MB|GB|KiB|MiB|GiB|B)?\Z", re.IGNORECASE)
_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


def _topic(name: str) -> str:
    if not _TOPIC.match(name) or name in (".", ".."):
        raise ValueError("is not a topic name: 1 to 249 of the characters a-z A-Z 0-9 . _ -")
    return name


def _name(name: str) -> str:
    if not _NAME.match(name):
        raise ValueError("must be 1 to 100 of the characters a-z A-Z 0-9 . _ -")
    return name


def _column(name: str) -> str:
    if not _COLUMN.match(name):
        raise ValueError("is not a column name: a letter, then letters, digits and _, 63 at most")
    return name


def _table(name: str) -> str:
    try:
        TableName.parse(name)
    except InvalidConfig as error:
        raise ValueError(str(error)) from None
    return name


def _size(value: object) -> object:
    """`128 MiB` as a number of bytes."""
    found = _SIZE.match(value.strip()) if isinstance(value, str) else None
    return int(float(found[1]) * _UNITS[(found[2] or "").lower()]) if found else value


def _single_to_list(value: object) -> object:
    return [value] if isinstance(value, str) else value


def _several(values: list[str]) -> list[str]:
    if len(set(values)) < len(values):
        raise ValueError("names something twice")
    return values


def _duration(value: object) -> timedelta:
    duration = parse_duration(value)
    if duration <= timedelta(0):
        raise ValueError("must be longer than nothing")
    return duration


Topic = Annotated[str, AfterValidator(_topic)]
Topics = Annotated[
    list[Topic], BeforeValidator(_single_to_list), Field(min_length=1, max_length=1000), AfterValidator(_several)
]
Name = Annotated[str, AfterValidator(_name)]
Column = Annotated[str, AfterValidator(_column)]
Table = Annotated[str, AfterValidator(_table)]
DataSource = Annotated[str, AfterValidator(normalise_data_source)]
Duration = Annotated[timedelta, BeforeValidator(_duration)]
Path = Annotated[str, Field(min_length=1)]
Count = Annotated[int, Field(ge=1, le=100_000_000, strict=True)]
Bytes = Annotated[int, BeforeValidator(_size), Field(ge=1024, le=2**40)]


class SparkSettings(Settings):
    """How Spark is started, unless `spark-submit` has decided that.

    Attributes:
        master: Spark's master URL; None for `local[*]`, or what `spark-submit` says.
        settings: any Spark setting by its name.
    """

    master: str | None = None
    settings: dict[str, Any] = Field(default_factory=dict)

    @field_validator("settings")
    @classmethod
    def _as_text(cls, settings: dict[str, Any]) -> dict[str, str]:
        problems = [Problem((name,), "must be a single value") for name, value in settings.items() if _is_nested(value)]
        problems += [
            Problem((name,), "unknown setting: Spark's begin with `spark.`")
            for name in settings
            if not name.startswith("spark.")
        ]
        if problems:
            raise InvalidSettings(problems)
        return {name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in settings.items()}


class StreamSettings(Settings):
    """What every pipeline that follows topics has.

    Attributes:
        name: of the query, by which its target knows how far it is; one for each pipeline and target.
        topics: the topics to read.
        checkpoint: the folder (any URL that Spark's file systems know) of Spark's checkpoint.
        starting_offsets: where to begin when neither checkpoint nor target knows: `earliest` or `latest`.
        max_records: how many records one batch has at most.
        trigger: the time from the start of one batch to the next.
        accept_gap: go on although records are missing between what the target has and what can be read.
    """

    name: Name
    topics: Topics
    checkpoint: Path
    starting_offsets: Literal["earliest", "latest"] = "earliest"
    max_records: Count = 200_000
    trigger: Duration = timedelta(seconds=5)
    accept_gap: bool = False


class TotalsSettings(Settings):
    """Sums over the projected table, kept up to date in the same transaction.

    Attributes:
        table: `table` or `schema.table`; made if it is missing.
        by: the columns to group by.
        sums: columns of the totals table, each with the column of the projected table that is summed.
        count: the column that counts rows.
    """

    table: Table
    by: Annotated[list[Column], Field(min_length=1), AfterValidator(_several)]
    sums: dict[Column, Column] = Field(default_factory=dict)
    count: Column = "rows"

    @model_validator(mode="after")
    def _columns_differ(self) -> Self:
        _several([*self.by, *self.sums, self.count])
        return self


class PostgresTarget(Settings):
    """A table in PostgreSQL.

    Attributes:
        dsn: the database: `key=value` pairs or a `postgresql://` URL.
        table: `table` or `schema.table`; made if it is missing.
        quarantine: the table of records that cannot be projected; None for the table's name and `_quarantine`.
        totals: sums over the table, or None.
    """

    dsn: DataSource = Field(repr=False)
    table: Table
    quarantine: Table | None = None
    totals: TotalsSettings | None = None


class ParquetTarget(Settings):
    """A folder of Parquet files.

    Attributes:
        path: the folder, any URL that Spark's file systems know.
        quarantine: the folder of records that cannot be projected; None for the path and `_quarantine`.
        deduplicate_within: a record that was projected before is left out if it is repeated within this time.
        target_file_size: what small files are compacted to.
        small_files: how many small files of one folder are compacted into one.
    """

    path: Path
    quarantine: Path | None = None
    deduplicate_within: Duration = timedelta(days=1)
    target_file_size: Bytes = 128 * 2**20
    small_files: Annotated[int, Field(ge=2, le=10_000, strict=True)] = 24


class ProjectSettings(StreamSettings):
    """Topics -> a typed, deduplicated table.

    Attributes:
        value_schema: what the JSON values hold, as Spark's DDL; `NOT NULL` fields must be there. YAML: `schema`.
        keep: `every` record as a row, or the `latest` of each key: a record replaces the rows of its key, a tombstone
            removes them.
        explode: the field of the value, an array, each element of which becomes a row; None for one row.
        columns: the table's columns, each with a Spark SQL expression over the value's fields, `record` (with `key`,
            `topic`, `partition`, `offset`, `timestamp`, `headers`, `outbox_id`) and, with `explode`, `item`; empty for
            the fields as they are.
        where: a Spark SQL condition; records or items that do not meet it have no row. None for all.
        postgres: the table in PostgreSQL, or None.
        parquet: the Parquet folder, or None; only with `keep: every`.
        replay_header: records with this header are replays, which with `keep: latest` replace only what is older.
    """

    value_schema: str = Field(validation_alias="schema", min_length=1)
    keep: Literal["every", "latest"] = "every"
    explode: str | None = None
    columns: dict[Column, str] = Field(default_factory=dict)
    where: str | None = None
    postgres: PostgresTarget | None = None
    parquet: ParquetTarget | None = None
    replay_header: Annotated[str, Field(min_length=1)] = "outbox-replay"

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.postgres is None and self.parquet is None:
            raise InvalidSettings([Problem((), "needs a target: postgres, parquet or both")])
        if self.parquet is not None and self.keep == "latest":
            raise InvalidSettings([Problem(("keep",), "`latest` replaces rows, which Parquet cannot; use postgres")])
        return self


class ArchiveSettings(StreamSettings):
    """Topics -> Parquet by topic and event date.

    Attributes:
        path: the archive's folder.
        target_file_size: what small files are compacted to.
        small_files: how many small files of one day are compacted into one.
    """

    path: Path
    target_file_size: Bytes = 128 * 2**20
    small_files: Annotated[int, Field(ge=2, le=10_000, strict=True)] = 24


class ReplaySettings(Settings):
    """Archive -> topics.

    Attributes:
        archive: the archive's folder.
        name: of this replay, in the header of every record; a replay of a name happens once, and goes on where it was
            interrupted.
        topics: which topics of the archive; None for all.
        keys: only records of these keys (text); None for all.
        since: only records that Kafka has taken at or after this time.
        until: only records that Kafka has taken before this time.
        to: topic -> topic, where a topic is replayed to another one.
        keep_partitions: send each record to the partition it was archived from; else its key decides.
        header: the header that marks replayed records, with the replay's name as value.
        transaction_records: how many records a transaction has.
    """

    archive: Path
    name: Name
    topics: Topics | None = None
    keys: Annotated[list[str], BeforeValidator(_single_to_list), Field(min_length=1)] | None = None
    since: datetime | None = None
    until: datetime | None = None
    to: dict[Topic, Topic] = Field(default_factory=dict)
    keep_partitions: bool = True
    header: Annotated[str, Field(min_length=1)] = "outbox-replay"
    transaction_records: Annotated[int, Field(ge=1, le=100_000, strict=True)] = 5_000

    @field_validator("since", "until")
    @classmethod
    def _with_zone(cls, value: datetime | None) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError("needs a time zone; write for example `2026-11-21T00:00:00Z`")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.since is not None and self.until is not None and self.since >= self.until:
            raise InvalidSettings([Problem(("until",), "must be later than since")])
        if self.topics is not None and (unknown := sorted(set(self.to) - set(self.topics))):
            raise InvalidSettings([Problem(("to", unknown[0]), "is not one of the topics that are replayed")])
        return self


class SnapshotTable(Settings):
    """What was stashed, as a table in PostgreSQL: the outbox, a copy of it, or the application's own ledger.

    Attributes:
        dsn: the database.
        table: the outbox table, or a table or view with its columns `id`, `kafka_topic` and `kafka_key`.
        outbox_name: what stands before the id in the id header; None for database, schema and table.
    """

    dsn: DataSource = Field(repr=False)
    table: Table
    outbox_name: str | None = None


class AuditSide(Settings):
    """One side of the comparison: exactly one of these.

    Attributes:
        archive: the folder of an archive.
        parquet: a folder of Parquet files with the columns of an archive: `topic`, `key`, `outbox_id`, `partition`,
            `offset`, `timestamp`.
        topics: topics in Kafka.
        table: a table of what was stashed; only for what is expected.
    """

    _KINDS: ClassVar[tuple[str, ...]] = ("archive", "parquet", "topics", "table")

    archive: Path | None = None
    parquet: Path | None = None
    topics: Topics | None = None
    table: SnapshotTable | None = None

    @model_validator(mode="after")
    def _one_of_them(self) -> Self:
        given = [kind for kind in self._KINDS if getattr(self, kind) is not None]
        if len(given) != 1:
            raise InvalidSettings([Problem((), f"needs exactly one of {', '.join(self._KINDS)}")])
        return self


class AuditSettings(Settings):
    """Archive, or what was stashed, against topics.

    Attributes:
        expected: what should be there, in its order.
        found: what is there.
        topics: compare only these; None for all topics of the expected side (and all of the found one).
        since: only records at or after this time; on both sides.
        until: only records before this time; on both sides.
        examples: how many examples of each kind the report shows for a topic.
        report: the JSON report; None for standard output.
        html: the page with charts; None for none.
        findings: a folder for all findings as Parquet; None for none.
        replay_header: records with this header are replays, which repeat others by intention.
    """

    expected: AuditSide
    found: AuditSide
    topics: Topics | None = None
    since: datetime | None = None
    until: datetime | None = None
    examples: Annotated[int, Field(ge=1, le=1000, strict=True)] = 20
    report: Path | None = None
    html: Path | None = None
    findings: Path | None = None
    replay_header: Annotated[str, Field(min_length=1)] = "outbox-replay"

    @field_validator("since", "until")
    @classmethod
    def _with_zone(cls, value: datetime | None) -> datetime | None:
        if value is not None and value.tzinfo is None:
            raise ValueError("needs a time zone; write for example `2026-11-21T00:00:00Z`")
        return value

    @model_validator(mode="after")
    def _fit_together(self) -> Self:
        if self.found.table is not None:
            raise InvalidSettings([Problem(("found", "table"), "only what is expected can be a table")])
        return self


class RelaySettings(Settings):
    """Outbox table -> topics. What the outbox is stands in the section `harvest`, as for `outbox harvest`.

    Attributes:
        checkpoint: the folder of Spark's checkpoint.
        shards: how many tasks publish at once.
        batch_records: how many records a batch has at most.
    """

    checkpoint: Path
    shards: Annotated[int, Field(ge=1, le=1000, strict=True)] | None = None
    batch_records: Annotated[int, Field(ge=1, strict=True)] | None = Field(
        default=None, validation_alias="batchRecords"
    )


class KafkaSettings(Settings):
    """librdkafka's properties for every client.

    Attributes:
        properties: `bootstrap.servers`, TLS, SASL and whatever else.
    """

    properties: dict[str, Any]

    @field_validator("properties")
    @classmethod
    def _single_values(cls, properties: dict[str, Any]) -> dict[str, str]:
        problems = [
            Problem((name,), "must be a single value; write librdkafka's properties with dots, lists with commas")
            for name, value in properties.items()
            if _is_nested(value)
        ]
        if problems:
            raise InvalidSettings(problems)
        return {
            name: str(value).lower() if isinstance(value, bool) else str(value) for name, value in properties.items()
        }

    def __repr_args__(self) -> Any:
        yield "properties", redact_settings(self.properties)


def _is_nested(value: object) -> bool:
    return value is None or isinstance(value, Mapping | list | tuple | set)
