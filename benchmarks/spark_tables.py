"""Rates of `archive` into Delta and Iceberg tables beside the same rows into plain Parquet (`make bench-tables`).

All three read the same topic with the same runner, batches and columns on local[2], and take turns, round after round.
Plain Parquet is what Spark writes for `df.write.partitionBy("date").parquet(folder)`: without commits, positions and
merged files. A rate counts from the end of a run's first batch to the end of its last: Spark's own logs, commits and
merges of small files are in it.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import tempfile
import threading
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pyspark.sql import DataFrame, SparkSession
from rich.console import Console
from rich.table import Table

from benchmarks.spark_pipelines import produce
from benchmarks.stage import fresh_topic, machine, make_topic, services
from outbox_spark.config import ArchiveSettings
from outbox_spark.metrics import BatchReport
from outbox_spark.pipelines import archive
from outbox_spark.pipelines.follower import Follower, Target
from outbox_spark.session import start_session
from outbox_spark.topics.positions import Positions

_GOAL = 0.85


class PlainParquet:
    """A folder of Parquet files that nothing commits."""

    name = "plain Parquet"

    def __init__(self, spark: SparkSession, folder: Path) -> None:
        self._tasks = spark.sparkContext.defaultParallelism
        self._folder = str(folder)
        self.positions: Positions = {}  # remembered by this process alone

    def recover(self) -> None:
        """Do nothing."""

    def compact(self) -> None:
        """Do nothing."""

    def write(self, records: DataFrame, positions: Positions) -> Mapping[str, int]:
        """Write rows as the archive does, into the folder alone."""
        rows = archive.archive(records).coalesce(self._tasks)
        sorted_rows = rows.sortWithinPartitions("date", "topic", "partition", "offset")
        sorted_rows.write.mode("append").partitionBy("date").parquet(self._folder)
        self.positions = positions
        return {}


def place_of(kind: str, folder: Path) -> dict[str, Any]:
    """Return the settings of a table of one format in a folder."""
    if kind != "Iceberg":
        return {"path": str(folder / "table")}
    catalog = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"file://{folder}/warehouse"}
    return {"iceberg": {"table": "bench.archive", "catalog": catalog}}


def measure(spark: SparkSession, bootstrap: str, topic: str, kind: str, *, records: int, batch: int) -> float:
    """Return the records/s of one run into a new table or folder, which is removed."""
    folder = Path(tempfile.mkdtemp(prefix="bench-tables-"))
    common = {"name": "bench", "topics": [topic], "max_records": batch, "checkpoint": str(folder / "checkpoint")}
    settings = ArchiveSettings(**common, **place_of(kind, folder))
    ends: list[float] = []

    def note(_: BatchReport) -> None:
        ends.append(time.perf_counter())

    plain = PlainParquet(spark, folder / "plain")
    targets: list[Target] = [Target(plain, plain.write)] if kind == "Parquet" else [*archive.targets(spark, settings)]
    try:
        Follower(spark, {"bootstrap.servers": bootstrap}, settings, targets, note).run(
            once=True, stop=threading.Event()
        )
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counted = records * (len(ends) - 1) / len(ends)  # batches are equally large
    return counted / (ends[-1] - ends[0])


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=600_000)
    parser.add_argument("--batch", type=int, default=100_000, help="records of one batch and commit")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    rates: dict[str, list[float]] = defaultdict(list)
    spark = start_session("bench", {"spark.driver.memory": "2g"}, master="local[2]")
    spark.sparkContext.setLogLevel("ERROR")
    with services() as running:
        topic = make_topic(running.bootstrap, fresh_topic("tables"))
        produce(running.bootstrap, topic, 0, options.records)
        for number in range(options.rounds + 1):  # the first one warms the session
            for kind in ("Parquet", "Delta", "Iceberg"):
                rate = measure(spark, running.bootstrap, topic, kind, records=options.records, batch=options.batch)
                if number:
                    rates[kind].append(rate)
    batches = f"{options.records:,} records in batches of {options.batch:,}"
    table = Table("", "median, records/s", "rounds", "of plain Parquet", title=f"{batches}, local[2]")
    for kind, found in rates.items():
        shares = [rate / plain for rate, plain in zip(found, rates["Parquet"], strict=True)]
        rounds = ", ".join(f"{rate:,.0f}" for rate in found)
        table.add_row(kind, f"{statistics.median(found):,.0f}", rounds, f"{statistics.median(shares):.0%}")
    console.print(table)
    console.print(f"goal: {_GOAL:.0%} of plain Parquet")


if __name__ == "__main__":
    main()
