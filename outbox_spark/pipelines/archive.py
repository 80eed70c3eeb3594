"""`archive`: topics -> Parquet by topic and event date, exactly once; repeats in a topic stay, for `audit` to find."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from outbox_spark.config import ArchiveSettings
from outbox_spark.parquet.table import ParquetTable, ParquetTarget
from outbox_spark.pipelines.follower import BatchReport, Follower
from outbox_spark.runtime import utc
from outbox_spark.topics.positions import Positions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = (
    "partition INT, offset BIGINT, timestamp TIMESTAMP, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, outbox_id STRING, topic STRING, date DATE"
)
"""Columns of an archive. `date` is the day (UTC) of `timestamp`; topic and date are folders."""


def archive(records: DataFrame) -> DataFrame:
    """Turn rows of `outbox_kafka` into rows of an archive."""
    return records.selectExpr(
        *("partition", "offset", "timestamp", "key", "value", "header_list AS headers", "outbox_id", "topic"),
        f"{utc.day('timestamp')} AS date",
    )


def open_archive(
    spark: SparkSession, path: str, *, target_size: int = 128 * 2**20, small_files: int = 24
) -> ParquetTable:
    """Open the archive in a folder; it is empty if there is none."""
    return ParquetTable(spark, path, SCHEMA, ("topic", "date"), target_size=target_size, small_files=small_files)


def run(
    spark: SparkSession,
    kafka: Mapping[str, str],
    settings: ArchiveSettings,
    *,
    once: bool,
    stop: threading.Event,
    report: Callable[[BatchReport], None],
) -> Mapping[str, int]:
    """Archive until `stop` is set, or, with `once`, up to the present end of the topics; return counts."""
    table = open_archive(spark, settings.path, target_size=settings.target_file_size, small_files=settings.small_files)
    tasks = spark.sparkContext.defaultParallelism

    def write(records: DataFrame, positions: Positions) -> Mapping[str, int]:
        rows = archive(records).coalesce(tasks).sortWithinPartitions("topic", "date", "partition", "offset")
        return {"records": table.append(rows, positions)}

    target = ParquetTarget("the archive", table, write)
    return Follower(spark, kafka, settings, [target], report).run(once=once, stop=stop)
