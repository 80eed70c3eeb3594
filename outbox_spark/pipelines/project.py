"""`project`: topics -> a typed, deduplicated table in PostgreSQL, a lakehouse (Delta, Iceberg) or both, exactly once.

PostgreSQL: each task writes whole partitions of the topics in one transaction, positions included. Lakehouse: a batch
is one commit, without rows whose `outbox_id` came within the last `deduplicate_within`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from datetime import timedelta
from typing import TYPE_CHECKING

from outbox_spark.config import IcebergTable, LakehouseTarget, ProjectSettings
from outbox_spark.pipelines.follower import BatchReport, Follower, Target
from outbox_spark.pipelines.project_postgres import PostgresTarget
from outbox_spark.pipelines.typed_rows import columns_of, parse
from outbox_spark.runtime import utc
from outbox_spark.tables import Layout, Table, TableTarget, open_table
from outbox_spark.topics.positions import Positions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_ROW_SCHEMA = (
    "_outbox_id STRING, _row INT, _topic STRING, _key STRING, _partition INT, _offset BIGINT, _time TIMESTAMP, "
    "{columns}"
)
_QUARANTINE_SCHEMA = (
    "topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, outbox_id STRING, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, reason STRING"
)


def project(records: DataFrame, settings: ProjectSettings) -> DataFrame:
    """Turn rows of `outbox_kafka` into typed rows, by the settings `value_schema`, `explode`, `columns` and `where`.

    They have the settings' columns behind `_outbox_id`, `_row` (the number within the record), `_topic`, `_key`,
    `_partition`, `_offset`, `_time` and `_problem`. A misfit is one row without values that has the reason in
    `_problem`; tombstones have no row.
    """
    rows = parse(records, settings).selectExpr(
        *("outbox_id AS _outbox_id", "topic AS _topic", "cast(key AS STRING) AS _key", "partition AS _partition"),
        *("offset AS _offset", "timestamp AS _time", "problem AS _problem"),
        "posexplode(IF(problem IS NULL, rows, array(NULL))) AS (_row, _values)",
    )
    order = ("_outbox_id", "_row", "_topic", "_key", "_partition", "_offset", "_time", "_problem")
    return rows.select(*order, "_values.*")


def run(
    spark: SparkSession,
    kafka: Mapping[str, str],
    settings: ProjectSettings,
    *,
    once: bool,
    stop: threading.Event,
    report: Callable[[BatchReport], None],
) -> Mapping[str, int]:
    """Project until `stop` is set, or, with `once`, up to the present end of the topics; return counts.

    Raises:
        InvalidConfig: a setting does not fit the schema.
        OutboxTableError: a table of the target has other columns.
        StoreUnavailable: the target's database cannot be reached.
    """
    found: list[Target] = []
    if settings.postgres is not None:
        found.append(PostgresTarget(spark, settings, settings.postgres, columns_of(spark, settings)))
    found += targets(spark, settings)
    return Follower(spark, kafka, settings, found, report).run(once=once, stop=stop)


def targets(spark: SparkSession, settings: ProjectSettings) -> list[TableTarget]:
    """Return the lakehouse tables as targets, if there are any."""
    if settings.lakehouse is None:
        return []
    return [_quarantine(spark, settings, settings.lakehouse), _rows(spark, settings, settings.lakehouse)]


def _rows(spark: SparkSession, settings: ProjectSettings, target: LakehouseTarget) -> TableTarget:
    columns = ", ".join(f"`{name}` {kind.simpleString()}" for name, kind in columns_of(spark, settings).items())
    table = _open(spark, target.place, target, _ROW_SCHEMA.format(columns=columns), "_time")
    tasks = spark.sparkContext.defaultParallelism
    # Repeats are looked for in whole days of the table.
    back = timedelta(days=target.deduplicate_within // timedelta(days=1) + 1)

    def write(records: DataFrame, positions: Positions) -> Mapping[str, int]:
        from pyspark.sql import functions as F  # noqa: N812

        rows = project(records, settings).where("_problem IS NULL").drop("_problem")
        rows = rows.withColumn("_date", F.expr(utc.day("_time"))).persist()
        try:
            found = rows.agg(F.count(F.lit(1)), F.count_if(F.col("_row") == 0), F.min("_date")).first()
            count, projected, first_day = found if found is not None else (0, 0, None)
            fresh = rows.dropDuplicates(["_outbox_id", "_row"])
            if first_day is not None:
                seen = table.read(since=(first_day - back).isoformat()).select("_outbox_id", "_row")
                fresh = fresh.join(seen, ["_outbox_id", "_row"], "left_anti").select(rows.columns)
            ordered = fresh.coalesce(tasks).sortWithinPartitions("_date", "_topic", "_partition", "_offset")
            written = table.append(ordered, positions)
        finally:
            rows.unpersist()
        return {"records": projected, "rows": written, "repeated": count - written}

    return TableTarget("the table", table, write)


def _quarantine(spark: SparkSession, settings: ProjectSettings, target: LakehouseTarget) -> TableTarget:
    table = _open(spark, target.quarantine_place, target, _QUARANTINE_SCHEMA, "timestamp")

    def write(records: DataFrame, positions: Positions) -> Mapping[str, int]:
        from pyspark.sql import functions as F  # noqa: N812

        misfits = parse(records, settings).where("problem IS NOT NULL").withColumnRenamed("problem", "reason")
        rows = misfits.drop("rows").withColumn("_date", F.expr(utc.day("timestamp")))
        return {"quarantined": table.append(rows.coalesce(1), positions)}

    return TableTarget("the quarantine", table, write)


def _open(spark: SparkSession, place: str | IcebergTable, sizes: LakehouseTarget, schema: str, time: str) -> Table:
    return open_table(spark, place, Layout.of(sizes, schema, time=time, date="_date"))
