"""The PostgreSQL side of `project`: typed rows -> tasks with whole partitions -> `ProjectionStore`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import DataType

from outbox_core.errors import InvalidConfig
from outbox_spark.config import PostgresTarget, ProjectSettings
from outbox_spark.pipelines.typed_rows import columns_of, is_replay, parse
from outbox_spark.postgres.projection import Misfit, ProjectedRecord, Projection
from outbox_spark.postgres.projection_store import ProjectionStore
from outbox_spark.runtime import utc
from outbox_spark.session import tasks_at_once
from outbox_spark.topics.positions import Positions

_TYPES = {
    "bigint": "bigint",
    "int": "integer",
    "smallint": "smallint",
    "tinyint": "smallint",
    "string": "text",
    "double": "double precision",
    "float": "real",
    "boolean": "boolean",
    "date": "date",
    "timestamp": "timestamptz",
    "timestamp_ntz": "timestamp",
    "binary": "bytea",
}
_LONGEST_INDEXED = 2_400  # bytes: with a topic's name of 249, an index of PostgreSQL takes 2,704
_NESTED = ("array", "struct", "map", "variant")
_SUMMABLE = ("bigint", "integer", "smallint", "numeric", "real", "double precision")


class PostgresTable:
    """The table in PostgreSQL as a `Follower` needs it."""

    def __init__(self, spark: SparkSession, settings: ProjectSettings, target: PostgresTarget) -> None:
        self._spark = spark
        self._settings = settings
        self._dsn = target.dsn
        self._types = columns_of(spark, settings)
        self._projection = _projection(settings, target, self._types)

    @property
    def name(self) -> str:
        """Return the table's name in messages."""
        return f"the table {self._projection.table}"

    def recover(self) -> None:
        """Create missing tables, and check all."""
        with self._store() as store:
            store.prepare()

    @property
    def positions(self) -> Positions:
        """Return the committed positions."""
        with self._store() as store:
            return store.positions()

    def write(self, records: DataFrame, positions: Positions) -> Mapping[str, int]:
        """Write records in the transactions of several tasks; return counts."""
        dsn, projection, tasks = self._dsn, self._projection, tasks_at_once(self._spark)

        def write(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
            with ProjectionStore(dsn, projection) as store:
                counts = store.write(_records(batches, list(projection.columns)), positions)
            yield pa.RecordBatch.from_pydict({"name": list(counts), "count": list(counts.values())})

        # `ProjectionStore.write` needs whole partitions of the topics in one task, in order.
        parsed = parse(records, self._settings, keyed=self._settings.keep == "latest")
        spread = _for_copy(parsed, self._settings, self._types).repartition(tasks, "topic", "partition")
        rows = spread.sortWithinPartitions("topic", "partition", "offset")
        counts: Counter[str] = Counter()
        for name, count in rows.mapInArrow(write, "name STRING, count BIGINT").collect():
            counts[name] += count
        with self._store() as store:
            store.advance(positions)
        return {"records": 0} | dict(counts)

    def compact(self) -> None:
        """Do nothing: autovacuum compacts tables."""

    def _store(self) -> ProjectionStore:
        return ProjectionStore(self._dsn, self._projection)


def _records(batches: Iterable[pa.RecordBatch], columns: list[str]) -> Iterator[ProjectedRecord]:
    for batch in batches:
        columnar = batch.to_pydict()
        rows = columnar.pop("rows")
        for values, structs in zip(zip(*columnar.values(), strict=True), rows, strict=True):
            topic, partition, offset, time, outbox_id, key_text, problem, is_tombstone, is_replay, *raw = values
            misfit = None
            if problem is not None:
                key, value, headers = raw
                misfit = Misfit(problem, key, value, [(header["key"], header["value"]) for header in headers or ()])
            row_values = [[struct[name] for name in columns] for struct in structs or ()]
            place = (topic, partition, offset, time, outbox_id, key_text)
            yield ProjectedRecord(*place, is_tombstone, row_values, misfit, is_replay)


def _for_copy(rows: DataFrame, settings: ProjectSettings, types: Mapping[str, DataType]) -> DataFrame:
    """Turn times and nested values into text for COPY, which is faster than Python objects."""
    values = ", ".join(f"{_as_text(f'row.`{name}`', kind)} AS `{name}`" for name, kind in types.items())
    texts = rows.withColumn("rows", F.expr(f"transform(rows, row -> struct({values}))"))
    checked = texts.withColumn("problem", F.expr(_misfit(settings, types)))
    return checked.withColumn("is_replay", is_replay(settings.replay_header)).selectExpr(
        *("topic", "partition", "offset", f"{utc.text('timestamp')} AS time", "outbox_id", "key_text", "problem"),
        *("value IS NULL AS is_tombstone", "is_replay", "rows"),
        *(f"IF(problem IS NULL, NULL, {name}) AS {name}" for name in ("key", "value", "headers")),
    )


def _as_text(value: str, kind: DataType) -> str:
    name = kind.typeName()
    if name in _NESTED:
        return f"to_json({value})"
    if name == "timestamp":
        return utc.text(value)
    return f"cast({value} AS STRING)" if name in ("date", "timestamp_ntz") else value


def _misfit(settings: ProjectSettings, types: Mapping[str, DataType]) -> str:
    """Return a SQL expression of the reason why PostgreSQL cannot hold a parsed record, or of its earlier problem."""
    nul = "PostgreSQL cannot store the character U+0000, which is in"
    cases = [
        ("contains(key_text, char(0))", f"{nul} the key"),
        ("contains(outbox_id, char(0))", f"{nul} the outbox id"),
    ]
    indexed, words = ("key_text", "key") if settings.keep == "latest" else ("outbox_id", "outbox id")
    too_long = f"the {words} has more than {_LONGEST_INDEXED} bytes, which no index of PostgreSQL holds"
    cases.append((f"octet_length({indexed}) > {_LONGEST_INDEXED}", too_long))
    for name, kind in types.items():
        text, sign = f"row.`{name}`", "char(0)"
        if kind.typeName() in _NESTED:
            text, sign = rf"replace({text}, r'\\', '')", r"r'\u0000'"  # JSON, in which \\u0000 is text
        if kind.typeName() == "string" or kind.typeName() in _NESTED:
            cases.append((f"exists(rows, row -> contains({text}, {sign}))", f"{nul} {name}"))
    if settings.postgres is not None and settings.postgres.totals is not None:
        by = [name for name in settings.postgres.totals.by if types[name].typeName() in ("string", "binary", *_NESTED)]
        size = " + ".join(["0", *(f"coalesce(octet_length(row.`{name}`), 0)" for name in by)])
        too_long = f"{', '.join(by)}: more than {_LONGEST_INDEXED} bytes, which no index of PostgreSQL holds"
        cases.append((f"exists(rows, row -> {size} > {_LONGEST_INDEXED})", too_long))
    whens = " ".join(f"WHEN {condition} THEN '{words}'" for condition, words in cases)
    return f"coalesce(problem, CASE {whens} END)"


def _projection(settings: ProjectSettings, target: PostgresTarget, types: Mapping[str, DataType]) -> Projection:
    columns = {name: _postgres_type(kind) for name, kind in types.items()}
    if (totals := target.totals) is not None:
        used = {**dict.fromkeys(totals.by, "by"), **dict.fromkeys(totals.sums.values(), "sums")}
        for name, where in used.items():
            if name not in columns:
                raise InvalidConfig(f"postgres.totals.{where}: {name!r} is not one of the columns {', '.join(columns)}")
        for name in totals.sums.values():
            if columns[name].partition("(")[0] not in _SUMMABLE:
                raise InvalidConfig(f"postgres.totals.sums: {name!r} is {columns[name]}, which cannot be summed")
    return Projection.of(settings, target, columns)


def _postgres_type(kind: DataType) -> str:
    name = kind.simpleString()
    if name.startswith("decimal"):
        return name.replace("decimal", "numeric")
    if kind.typeName() in _NESTED:
        return "jsonb"
    if name not in _TYPES:
        raise InvalidConfig(f"columns: there is no PostgreSQL type for {name}; cast it to another")
    return _TYPES[name]
