"""`archive`: topics -> a Delta or Iceberg table by event date, exactly once; repeats stay, for `audit` to find."""

from __future__ import annotations

from collections.abc import Mapping

from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from outbox_core.errors import InvalidConfig
from outbox_spark.config import ArchiveSettings, FileSettings, IcebergTable, Period
from outbox_spark.pipelines.follower import Target
from outbox_spark.runtime import utc
from outbox_spark.session import tasks_at_once
from outbox_spark.tables import Layout, Table, open_table
from outbox_spark.topics.positions import Positions

SCHEMA = (
    "partition INT, offset BIGINT, timestamp TIMESTAMP, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, outbox_id STRING, topic STRING"
)
"""Columns of an archive, besides `date`, the day (UTC) of `timestamp`, which Iceberg has as a hidden partition."""


def archive(records: DataFrame) -> DataFrame:
    """Turn rows of `outbox_kafka` into rows of an archive."""
    return records.selectExpr(
        *("partition", "offset", "timestamp", "key", "value", "header_list AS headers", "outbox_id", "topic"),
        f"{utc.day('timestamp')} AS date",
    )


def open_archive(spark: SparkSession, place: str | IcebergTable, files: FileSettings | None = None) -> Table:
    """Open the archive in a folder or table; it is empty if there is none."""
    return open_table(spark, place, Layout(SCHEMA, "timestamp", "date", files or FileSettings(), "archive"))


def within(records: DataFrame, period: Period) -> DataFrame:
    """Select the records of a period."""
    if period.since is not None:
        records = records.where(F.col("timestamp") >= F.lit(period.since))
    if period.until is not None:
        records = records.where(F.col("timestamp") < F.lit(period.until))
    return records


def must_be_archive(table: Table, setting: str) -> Table:
    """Return a table with records. Raises InvalidConfig if it has none."""
    if table.is_of_earlier_version:
        raise InvalidConfig(
            f"{setting}: {table.url} is an archive of an earlier version; `outbox-spark archive -f FILE --maintain` "
            "makes it a Delta table"
        )
    if table.is_empty:
        raise InvalidConfig(f"{setting}: there is no archive in {table.url}")
    return table


def targets(spark: SparkSession, settings: ArchiveSettings) -> list[Target]:
    """Return the archive as a target."""
    table = open_archive(spark, settings.place, settings)

    def write(records: DataFrame, positions: Positions) -> Mapping[str, int]:
        rows = (
            archive(records).coalesce(tasks_at_once(spark)).sortWithinPartitions("date", "topic", "partition", "offset")
        )
        return {"records": table.append(rows, positions)}

    return [Target(table, write)]
