"""The lakehouse side of `project`: a batch is one commit to a Delta or Iceberg table, and one to its quarantine.

Two ways to keep records, by `keep`:

- `every`: rows are added, without those whose `outbox_id` came within the last `deduplicate_within`.
- `latest`: the last record of a key replaces its rows: the files that have rows of keys in the batch are written anew
  without these, and with the new ones. A replay does not replace what was stashed after it, as in PostgreSQL.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import timedelta

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from outbox_spark.config import LakehouseTarget, ProjectSettings
from outbox_spark.pipelines.follower import Target
from outbox_spark.pipelines.typed_rows import columns_of, is_replay, number_in, outbox_in, parse, project
from outbox_spark.runtime import utc
from outbox_spark.session import tasks_at_once
from outbox_spark.tables import Layout, Table, open_table
from outbox_spark.topics.positions import Positions

_ROW_SCHEMA = (
    "_outbox_id STRING, _row INT, _topic STRING, _key STRING, _partition INT, _offset BIGINT, _time TIMESTAMP, "
    "{columns}"
)
_QUARANTINE_SCHEMA = (
    "topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, outbox_id STRING, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, reason STRING"
)
_PLACE = ["_topic", "_partition", "_offset"]
_LANE = ["_topic", "_key"]
# The last of a key's records, but for replays of what came before, in the order of the topic.
_LAST = """
reduce(
    array_sort(collect_list(struct(_partition, _offset, _is_replay, _outbox, _number))),
    CAST(NULL AS STRUCT<_partition: INT, _offset: BIGINT, _is_replay: BOOLEAN, _outbox: STRING, _number: BIGINT>),
    (last, next) -> IF(next._is_replay AND last._outbox = next._outbox AND last._number >= next._number, last, next)
)
"""


def targets(spark: SparkSession, settings: ProjectSettings, target: LakehouseTarget) -> list[Target]:
    """Return the tables of misfits and of rows as targets."""
    return [_quarantine(spark, settings, target), _rows(spark, settings, target)]


def _rows(spark: SparkSession, settings: ProjectSettings, target: LakehouseTarget) -> Target:
    columns = ", ".join(f"`{name}` {kind.simpleString()}" for name, kind in columns_of(spark, settings).items())
    table = open_table(spark, target.place, Layout(_ROW_SCHEMA.format(columns=columns), "_time", "_date", target))

    def write(records: DataFrame, positions: Positions) -> Mapping[str, int]:
        if settings.keep == "latest":
            return _merge(table, _records(records, settings), positions)
        return _add(table, project(records, settings), positions, target.deduplicate_within, tasks_at_once(spark))

    return Target(table, write)


def _add(table: Table, found: DataFrame, positions: Positions, within: timedelta, tasks: int) -> Mapping[str, int]:
    """Add rows that are not in the table; return counts."""
    rows = found.where("_problem IS NULL").withColumn("_date", F.expr(utc.day("_time"))).persist()
    try:
        counts = rows.agg(F.count(F.lit(1)), F.count_if(F.col("_row") == 0), F.min("_date")).first()
        count, projected, first_day = counts if counts is not None else (0, 0, None)
        fresh = rows.dropDuplicates(["_outbox_id", "_row"])
        if first_day is not None:
            # Repeats are looked for in whole days of the table.
            since = first_day - timedelta(days=within // timedelta(days=1) + 1)
            seen = table.read(since=since.isoformat()).select("_outbox_id", "_row")
            fresh = fresh.join(seen, ["_outbox_id", "_row"], "left_anti").select(rows.columns)
        written = table.append(fresh.coalesce(tasks).sortWithinPartitions("_date", *_PLACE), positions)
    finally:
        rows.unpersist()
    return {"records": projected, "rows": written, "repeated": count - written}


def _records(records: DataFrame, settings: ProjectSettings) -> DataFrame:
    """Return records with all their rows, tombstones among them, and what tells which one of a key is the latest."""
    columns = {
        "_topic": "topic",
        "_key": "key_text",
        "_partition": "partition",
        "_offset": "offset",
        "_time": "timestamp",
        "_outbox_id": "outbox_id",
        "_outbox": outbox_in("outbox_id"),
        "_number": number_in("outbox_id"),
        "_is_tombstone": "value IS NULL",
        "rows": "coalesce(rows, array())",
    }
    found = parse(records, settings, keyed=True).where("problem IS NULL")
    named = found.selectExpr("headers", *(f"{expression} AS {name}" for name, expression in columns.items()))
    return named.withColumn("_is_replay", is_replay(settings.replay_header)).drop("headers")


def _merge(table: Table, found: DataFrame, positions: Positions) -> Mapping[str, int]:
    """Replace the rows of the records' keys by those of the last record of each; return counts."""
    records = found.persist()
    last = records.groupBy(_LANE).agg(F.expr(_LAST).alias("last")).select("_topic", "last._partition", "last._offset")
    latest = records.join(last, _PLACE, "left_semi").persist()
    try:
        counts = records.agg(F.count(F.lit(1)), F.count_if("_is_tombstone"), F.count_if("_is_replay")).first()
        count, tombstones, replays = counts if counts is not None else (0, 0, 0)
        files, before = table.with_keys(latest.select(_LANE))
        taken = latest
        if replays:
            ids = (outbox_in("_outbox_id"), number_in("_outbox_id"))
            known = before.selectExpr(*_LANE, f"{ids[0]} AS _outbox", f"{ids[1]} AS newer")
            is_stale = F.expr("_is_replay AND newer >= _number")
            stale = latest.join(known, [*_LANE, "_outbox"]).where(is_stale).select(_PLACE)
            taken = latest.join(stale, _PLACE, "left_anti")
        new = taken.select("*", F.posexplode("rows").alias("_row", "_values"), F.expr(utc.day("_time")).alias("_date"))
        new = new.select(*(name for name in before.columns if name.startswith("_")), "_values.*")
        kept = before.join(taken.select(_LANE), _LANE, "left_anti")
        size = taken.agg(F.sum(F.size("rows"))).first()
        rows = (size[0] if size is not None else 0) or 0
        written = table.replace(files, kept.unionByName(new, allowMissingColumns=True), positions)
    finally:
        records.unpersist()
        latest.unpersist()
    replaced = sum(file.rows for file in files) - (written - rows)
    return {"records": count, "rows": rows, "replaced": replaced, "tombstones": tombstones}


def _quarantine(spark: SparkSession, settings: ProjectSettings, target: LakehouseTarget) -> Target:
    layout = Layout(_QUARANTINE_SCHEMA, "timestamp", "_date", target, "quarantine")
    table = open_table(spark, target.quarantine_place, layout)

    def write(records: DataFrame, positions: Positions) -> Mapping[str, int]:
        misfits = (
            parse(records, settings, keyed=settings.keep == "latest")
            .where("problem IS NOT NULL")
            .withColumnRenamed("problem", "reason")
        )
        rows = misfits.drop("rows").withColumn("_date", F.expr(utc.day("timestamp")))
        return {"quarantined": table.append(rows.coalesce(1), positions)}

    return Target(table, write)
