"""`project`: topics -> a typed, deduplicated table in PostgreSQL, Parquet or both, exactly once.

Values are JSON by a declared schema (`json_values.py`). What does not fit goes to the quarantine with the reason and
its position, and is counted. A record becomes one row, or with `explode` one for each element of an array; `columns`
says what is in them.

PostgreSQL: each task has whole partitions of the topics and writes them in one transaction, positions included
(`projection.py`). Parquet: the rows of a batch, without those whose `outbox_id` is among the rows of the last
`deduplicate_within`, are one entry of the table's ledger (`parquet_table.py`).
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from outbox_core.errors import InvalidConfig
from outbox_core.schema import TableName
from outbox_spark import json_values, utc
from outbox_spark.config import ParquetTarget, PostgresTarget, ProjectSettings
from outbox_spark.parquet_table import ParquetTable
from outbox_spark.pipelines.following import BatchReport, Follower, Target
from outbox_spark.positions import Positions
from outbox_spark.projection import POSITIONS_TABLE, Misfit, ProjectedRecord, Projection, ProjectionStore, Totals

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.types import DataType, StructType

_POSTGRES_TYPES = {
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
_NESTED = ("array", "struct", "map", "variant")
_QUARANTINE_SCHEMA = (
    "topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, outbox_id STRING, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, reason STRING"
)
_UNREADABLE = "a header name is not UTF-8, so the headers, the outbox-id among them, cannot be read"


def project(records: DataFrame, settings: ProjectSettings) -> DataFrame:
    """Rows of `outbox_kafka` as typed rows.

    Args:
        records: with the columns of the format `outbox_kafka`.
        settings: schema, `explode`, `columns` and `where`.

    Returns:
        the settings' columns behind `_outbox_id`, `_row` (the number within the record), `_topic`, `_key`,
        `_partition`, `_offset`, `_time` and `_problem`. A record that does not fit is one row without values that has
        the reason in `_problem`; tombstones are not among the rows.
    """
    from pyspark.sql import functions as F  # noqa: N812

    rows = parse(records, settings).selectExpr(
        "outbox_id AS _outbox_id",
        "topic AS _topic",
        "key AS _key",
        "partition AS _partition",
        "offset AS _offset",
        "timestamp AS _time",
        "problem AS _problem",
        "posexplode(IF(problem IS NULL, rows, array(NULL))) AS (_row, _values)",
    )
    text = rows.withColumn("_key", F.col("_key").cast("string"))
    order = ("_outbox_id", "_row", "_topic", "_key", "_partition", "_offset", "_time", "_problem")
    return text.select(*order, "_values.*")


def parse(records: DataFrame, settings: ProjectSettings) -> DataFrame:
    """Rows of `outbox_kafka`, each with `problem` (why it does not fit, or NULL) and `rows` (an array of structs).

    Raises:
        InvalidConfig: an expression of the settings is wrong.
    """
    from pyspark.errors import AnalysisException, ParseException
    from pyspark.sql import functions as F  # noqa: N812

    schema = json_values.parse_schema(settings.value_schema)
    text = F.expr("try_validate_utf8(cast(value AS STRING))")
    found = records.select("*", text.alias("_text")).withColumn("_parsed", json_values.parsed(F.col("_text"), schema))
    record = F.struct(
        F.expr("coalesce(outbox_id, concat_ws('-', topic, partition, offset))").alias("outbox_id"),
        F.expr("try_validate_utf8(cast(key AS STRING))").alias("key"),
        *("topic", "partition", "offset", "timestamp", F.col("header_list").alias("headers")),
    )
    of_value = json_values.problem("value", "_text", "_parsed", schema)
    reason = F.expr(f"CASE WHEN header_list IS NULL THEN '{_UNREADABLE}' ELSE {of_value} END").alias("problem")
    # What the value holds may have any name: everything else is within these two.
    fields = [F.get(f"_parsed.{json_values.SINGLE}", 0)[field.name].alias(field.name) for field in schema.fields]
    named = found.select(record.alias("record"), F.struct("key", "value", reason).alias("_raw"), *fields)
    try:
        return named.select(
            *(f"record.{name}" for name in ("outbox_id", "topic", "partition", "offset", "timestamp")),
            *("_raw.key", "_raw.value", F.col("record.headers").alias("headers"), "_raw.problem"),
            F.expr(f"IF(_raw.problem IS NULL AND _raw.value IS NOT NULL, {_rows(settings, schema)}, NULL)").alias(
                "rows"
            ),
        )
    except (AnalysisException, ParseException) as error:
        raise InvalidConfig(f"columns, where or explode: {str(error).strip().splitlines()[0]}") from None


def _rows(settings: ProjectSettings, schema: StructType) -> str:
    """A SQL expression: the rows of a record."""
    names = settings.columns or {name: f"`{name}`" for name in schema.names}
    row = "struct(" + ", ".join(f"({expression}) AS `{name}`" for name, expression in names.items()) + ")"
    where = f"coalesce(({settings.where}), false)" if settings.where else "true"
    if settings.explode is None:
        return f"IF({where}, array({row}), array())"
    items = f"coalesce({settings.explode}, array())"
    return f"transform(filter({items}, item -> {where}), item -> {row})"


def run(
    spark: SparkSession,
    kafka: Mapping[str, str],
    settings: ProjectSettings,
    *,
    once: bool,
    stop: threading.Event,
    report: Callable[[BatchReport], None],
) -> Mapping[str, int]:
    """Project until told to stop, or, with `once`, what is there now; return counts.

    Raises:
        InvalidConfig: a setting does not fit the schema.
        OutboxTableError: a table of the target is another one.
        StoreUnavailable: the target's database cannot be reached.
    """
    targets: list[Target] = []
    if settings.postgres is not None:
        targets.append(_PostgresTarget(spark, settings, settings.postgres))
    if settings.parquet is not None:
        targets += [
            _QuarantineTarget(spark, settings, settings.parquet),
            _ParquetTarget(spark, settings, settings.parquet),
        ]
    return Follower(spark, kafka, settings, targets, report).run(once=once, stop=stop)


def columns_of(spark: SparkSession, settings: ProjectSettings) -> dict[str, DataType]:
    """The projected columns with their types. Raises InvalidConfig if an expression is wrong."""
    from outbox_spark.kafka_source import SCHEMA

    fields = parse(spark.createDataFrame([], SCHEMA), settings).schema["rows"].dataType.elementType.fields  # type: ignore[attr-defined]
    return {field.name: field.dataType for field in fields}


class _PostgresTarget:
    """The table in PostgreSQL as a target."""

    def __init__(self, spark: SparkSession, settings: ProjectSettings, target: PostgresTarget) -> None:
        self._settings = settings
        self._dsn = target.dsn
        self._types = columns_of(spark, settings)
        self._projection = make_projection(settings, target, self._types)
        self._tasks = max(2, spark.sparkContext.defaultParallelism)

    @property
    def name(self) -> str:
        return f"the table {self._projection.table}"

    def recover(self) -> None:
        with self._store() as store:
            store.prepare()

    def positions(self) -> Positions:
        with self._store() as store:
            return store.positions()

    def write(self, records: DataFrame, positions: Positions) -> Mapping[str, int]:
        # Whole partitions of the topics in one task, in order: what `projection.py` asks for.
        rows = (
            _for_copy(parse(records, self._settings), self._settings, self._types)
            .repartition(self._tasks, "topic", "partition")
            .sortWithinPartitions("topic", "partition", "offset")
        )
        task = _WriteTask(self._dsn, self._projection, positions)
        counts: Counter[str] = Counter()
        for name, count in rows.mapInArrow(task, "name STRING, count BIGINT").collect():
            counts[name] += count
        with self._store() as store:
            store.advance(positions)
        return {"records": 0} | dict(counts)

    def tidy(self) -> None:
        """Nothing: PostgreSQL looks after itself."""

    def _store(self) -> ProjectionStore:
        return ProjectionStore(self._dsn, self._projection)


@dataclass(frozen=True)
class _WriteTask:
    """What a task does with its rows; sent to the workers."""

    dsn: str
    projection: Projection
    end: Positions

    def __repr__(self) -> str:
        return f"write to {self.projection.table}"  # without the DSN: Spark shows it

    def __call__(self, batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        import pyarrow as pa

        with ProjectionStore(self.dsn, self.projection) as store:
            counts = store.write(_records(batches, list(self.projection.columns)), self.end)
        yield pa.RecordBatch.from_pydict(
            {"name": list(counts), "count": list(counts.values())},
            schema=pa.schema([("name", pa.string()), ("count", pa.int64())]),
        )


def _for_copy(rows: DataFrame, settings: ProjectSettings, types: Mapping[str, DataType]) -> DataFrame:
    """What PostgreSQL takes as text is text: times (faster than objects of Python) and what is nested, as JSON."""
    from pyspark.sql import functions as F  # noqa: N812

    values = ", ".join(f"{_as_text(f'row.`{name}`', kind)} AS `{name}`" for name, kind in types.items())
    texts = rows.withColumn("rows", F.expr(f"transform(rows, row -> struct({values}))")).withColumn(
        "key_text", F.expr("try_validate_utf8(cast(key AS STRING))")
    )
    checked = texts.withColumn("problem", F.expr(_misfit(settings, types)))
    is_replay = F.coalesce(F.exists("headers", lambda header: header["key"] == settings.replay_header), F.lit(False))
    return checked.select(
        *("topic", "partition", "offset", F.expr(utc.text("timestamp")).alias("time"), "outbox_id"),
        *("key_text", "problem", F.expr("value IS NULL").alias("is_tombstone"), is_replay.alias("is_replay"), "rows"),
        *(F.expr(f"IF(problem IS NULL, NULL, {name})").alias(name) for name in ("key", "value", "headers")),
    )


def _misfit(settings: ProjectSettings, types: Mapping[str, DataType]) -> str:
    """A SQL expression: why a record that was parsed cannot be in PostgreSQL's table, or the problem that it had."""
    nul = "PostgreSQL cannot store the character U+0000, which is in"
    cases = [
        ("key IS NOT NULL AND key_text IS NULL", "the key is not UTF-8 text"),
        ("contains(key_text, char(0))", f"{nul} the key"),
        ("contains(outbox_id, char(0))", f"{nul} the outbox id"),
    ]
    if settings.keep == "latest":
        cases.append(("key IS NULL", "there is no key, by which the latest record could be known"))
    for name, kind in types.items():
        sign = "'\\\\u0000'" if kind.typeName() in _NESTED else "char(0)"
        if kind.typeName() == "string" or kind.typeName() in _NESTED:
            cases.append((f"exists(rows, row -> contains(row.`{name}`, {sign}))", f"{nul} {name}"))
    whens = " ".join(f"WHEN {condition} THEN '{words}'" for condition, words in cases)
    return f"coalesce(problem, CASE {whens} END)"


def _as_text(value: str, kind: DataType) -> str:
    name = kind.typeName()
    if name in _NESTED:
        return f"to_json({value})"
    if name == "timestamp":
        return utc.text(value)
    return f"cast({value} AS STRING)" if name in ("date", "timestamp_ntz") else value


def _records(batches: Iterable[pa.RecordBatch], columns: list[str]) -> Iterator[ProjectedRecord]:
    for batch in batches:
        columnar = batch.to_pydict()
        rows = columnar.pop("rows")
        for values, structs in zip(zip(*columnar.values(), strict=True), rows, strict=True):
            topic, partition, offset, time, outbox_id, key_text, problem, is_tombstone, is_replay, *raw = values
            yield ProjectedRecord(
                topic=topic,
                partition=partition,
                offset=offset,
                time=time,
                outbox_id=outbox_id,
                key=key_text,
                is_tombstone=is_tombstone,
                rows=[[struct[name] for name in columns] for struct in structs or ()],
                misfit=None if problem is None else _misfit_of(problem, *raw),
                is_replay=is_replay,
            )


def _misfit_of(
    problem: str, key: bytes | None, value: bytes | None, headers: Iterable[Mapping[str, Any]] | None
) -> Misfit:
    return Misfit(problem, key, value, [(header["key"], header["value"]) for header in headers or ()])


def make_projection(settings: ProjectSettings, target: PostgresTarget, types: Mapping[str, DataType]) -> Projection:
    """The tables of a projection.

    Raises:
        InvalidConfig: the totals name a column that does not exist, or sum one that is no number.
    """
    table, quarantine = _tables(target)
    columns = {name: postgres_type(kind) for name, kind in types.items()}
    totals = None
    if target.totals is not None:
        used = {**dict.fromkeys(target.totals.by, "by"), **dict.fromkeys(target.totals.sums.values(), "sums")}
        for name, where in used.items():
            if name not in columns:
                raise InvalidConfig(f"postgres.totals.{where}: {name!r} is not one of the columns {', '.join(columns)}")
        for name in target.totals.sums.values():
            if columns[name].partition("(")[0] not in _SUMMABLE:
                raise InvalidConfig(f"postgres.totals.sums: {name!r} is {columns[name]}, which cannot be summed")
        totals = Totals(
            table=TableName.parse(target.totals.table),
            by=tuple(target.totals.by),
            sums=dict(target.totals.sums),
            count=target.totals.count,
        )
    return Projection(settings.name, table, quarantine, columns, settings.keep, totals)


def postgres_type(kind: DataType) -> str:
    """The PostgreSQL type of a Spark type.

    Raises:
        InvalidConfig: there is none.
    """
    name = kind.simpleString()
    if name.startswith("decimal"):
        return name.replace("decimal", "numeric")
    if kind.typeName() in _NESTED:
        return "jsonb"
    if name not in _POSTGRES_TYPES:
        raise InvalidConfig(f"columns: there is no PostgreSQL type for {name}; cast it to another")
    return _POSTGRES_TYPES[name]


_SUMMABLE = ("bigint", "integer", "smallint", "numeric", "real", "double precision")


def _tables(target: PostgresTarget) -> tuple[TableName, TableName]:
    """The projected table, and its quarantine."""
    table = TableName.parse(target.table)
    beside = TableName(table.table + "_quarantine", table.schema)
    return table, TableName.parse(target.quarantine) if target.quarantine else beside


def rights_on(settings: ProjectSettings, target: PostgresTarget) -> dict[TableName, tuple[str, ...]]:
    """The tables of a projection, each with the rights that it takes to write to them."""
    table, quarantine = _tables(target)
    rights: dict[TableName, tuple[str, ...]] = {
        table: ("SELECT", "INSERT", "DELETE") if settings.keep == "latest" else ("SELECT", "INSERT"),
        quarantine: ("SELECT", "INSERT"),
        TableName(POSITIONS_TABLE, table.schema): ("SELECT", "INSERT", "UPDATE"),
    }
    if target.totals is not None:
        rights[TableName.parse(target.totals.table)] = ("SELECT", "INSERT", "UPDATE", "DELETE")
    return rights


class _ParquetTarget:
    """The Parquet table as a target."""

    def __init__(self, spark: SparkSession, settings: ProjectSettings, target: ParquetTarget) -> None:
        self._settings = settings
        self._within = target.deduplicate_within
        columns = ", ".join(f"`{name}` {kind.simpleString()}" for name, kind in columns_of(spark, settings).items())
        self._table = _open(
            spark,
            target.path,
            "_outbox_id STRING, _row INT, _topic STRING, _key STRING, _partition INT, _offset BIGINT, "
            f"_time TIMESTAMP, {columns}, _date DATE",
            target,
        )
        self._tasks = spark.sparkContext.defaultParallelism

    @property
    def name(self) -> str:
        return f"the table {self._table.url}"

    def recover(self) -> None:
        self._table.recover()

    def positions(self) -> Positions:
        return self._table.positions

    def write(self, records: DataFrame, positions: Positions) -> Mapping[str, int]:
        from pyspark.sql import functions as F  # noqa: N812

        rows = project(records, self._settings).where("_problem IS NULL").drop("_problem")
        rows = rows.withColumn("_date", F.expr(utc.day("_time"))).persist()
        try:
            found = rows.agg(F.count(F.lit(1)), F.count_if(F.col("_row") == 0), F.min("_date")).first()
            count, records_, since = found if found is not None else (0, 0, None)
            fresh = rows.dropDuplicates(["_outbox_id", "_row"])
            if since is not None:
                fresh = fresh.join(self._seen(since), ["_outbox_id", "_row"], "left_anti").select(rows.columns)
            written = self._table.append(
                fresh.coalesce(self._tasks).sortWithinPartitions("_date", "_topic", "_partition", "_offset"), positions
            )
        finally:
            rows.unpersist()
        return {"records": records_, "rows": written, "repeated": count - written}

    def _seen(self, since: Any) -> DataFrame:
        """What the table has of that day and of as long before as repeats are looked for."""
        days = self._within // timedelta(days=1) + 1
        first = since - timedelta(days=days)
        return self._table.read(since={"_date": first.isoformat()}).select("_outbox_id", "_row")

    def tidy(self) -> None:
        self._table.compact()


class _QuarantineTarget:
    """What does not fit, as a Parquet table of its own."""

    def __init__(self, spark: SparkSession, settings: ProjectSettings, target: ParquetTarget) -> None:
        self._settings = settings
        path = target.quarantine or target.path.rstrip("/") + "_quarantine"
        self._table = _open(spark, path, f"{_QUARANTINE_SCHEMA}, _date DATE", target)

    @property
    def name(self) -> str:
        return f"the quarantine {self._table.url}"

    def recover(self) -> None:
        self._table.recover()

    def positions(self) -> Positions:
        return self._table.positions

    def write(self, records: DataFrame, positions: Positions) -> Mapping[str, int]:
        from pyspark.sql import functions as F  # noqa: N812

        bad = parse(records, self._settings).where("problem IS NOT NULL")
        rows = bad.withColumnRenamed("problem", "reason").drop("rows").withColumn("_date", F.expr(utc.day("timestamp")))
        return {"quarantined": self._table.append(rows.coalesce(1), positions)}

    def tidy(self) -> None:
        self._table.compact()


def _open(spark: SparkSession, path: str, schema: str, target: ParquetTarget) -> ParquetTable:
    return ParquetTable(
        spark, path, schema, ["_date"], target_size=target.target_file_size, small_files=target.small_files
    )
