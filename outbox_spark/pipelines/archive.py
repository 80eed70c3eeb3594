"""`archive`: topics -> Parquet by topic and event date, exactly once.

Every record that was committed to the topics is in the archive once, as it is: repeats that an at-least-once harvester
has published are records of their own, so that `audit` can find them. Order within a partition is by `offset`.

The folder is a `ParquetTable`: `topic=.../date=.../*.parquet`, and `_ledger/`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from outbox_spark import utc
from outbox_spark.config import ArchiveSettings
from outbox_spark.parquet_table import ParquetTable
from outbox_spark.pipelines.following import BatchReport, Follower
from outbox_spark.positions import Positions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SCHEMA = (
    "partition INT, offset BIGINT, timestamp TIMESTAMP, key BINARY, value BINARY, "
    "headers ARRAY<STRUCT<key: STRING, value: BINARY>>, outbox_id STRING, topic STRING, date DATE"
)
"""Columns of an archive. `date` is the day (UTC) of `timestamp`; both are folders."""

PARTITION_COLUMNS = ("topic", "date")


def archive(records: DataFrame) -> DataFrame:
    """Rows of `outbox_kafka` as rows of an archive.

    Args:
        records: with the columns of the format `outbox_kafka`.
    """
    from pyspark.sql import functions as F  # noqa: N812

    return records.select(
        "partition",
        "offset",
        "timestamp",
        "key",
        "value",
        F.col("header_list").alias("headers"),
        "outbox_id",
        "topic",
        F.expr(utc.day("timestamp")).alias("date"),
    )


def open_archive(
    spark: SparkSession, path: str, *, target_size: int = 128 * 2**20, small_files: int = 24
) -> ParquetTable:
    """The archive in a folder, empty if there is none."""
    return ParquetTable(spark, path, SCHEMA, PARTITION_COLUMNS, target_size=target_size, small_files=small_files)


def run(
    spark: SparkSession,
    kafka: Mapping[str, str],
    settings: ArchiveSettings,
    *,
    once: bool,
    stop: threading.Event,
    report: Callable[[BatchReport], None],
) -> Mapping[str, int]:
    """Archive until told to stop, or, with `once`, what is there now; return counts."""
    target = _ArchiveTarget(spark, settings)
    return Follower(spark, kafka, settings, [target], report).run(once=once, stop=stop)


class _ArchiveTarget:
    """The archive as a target."""

    def __init__(self, spark: SparkSession, settings: ArchiveSettings) -> None:
        self._table = open_archive(
            spark, settings.path, target_size=settings.target_file_size, small_files=settings.small_files
        )
        self._tasks = spark.sparkContext.defaultParallelism

    @property
    def name(self) -> str:
        return f"the archive {self._table.url}"

    def recover(self) -> None:
        self._table.recover()

    def positions(self) -> Positions:
        return self._table.positions

    def write(self, records: DataFrame, positions: Positions) -> Mapping[str, int]:
        rows = archive(records).coalesce(self._tasks).sortWithinPartitions("topic", "date", "partition", "offset")
        return {"records": self._table.append(rows, positions)}

    def tidy(self) -> None:
        self._table.compact()
