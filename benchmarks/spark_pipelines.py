"""Rates of the Spark pipelines `archive`, `project` and `audit`, warm, on local[2] (`make bench-pipelines`).

The topic has JSON values of about 100 bytes. Beside each rate stands the raw read of the same topic by a bare consumer
in the same run. Rates are of whole batches, from the start of the batch to the commit of the target; a first, small one
warms the session and is not counted.

The audit compares two Parquet folders of `--audit-records` records, the second with one record missing, one twice, and
two exchanged; then the first with itself. Its memory is the JVM's peak, which also runs the tasks.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from confluent_kafka import Consumer, TopicPartition
from pyspark.sql import SparkSession
from rich.console import Console
from rich.table import Table

from benchmarks.stage import PARTITIONS, Services, fresh_topic, machine, make_topic, services
from outbox_core.kafka.clients import make_producer
from outbox_spark.config import ArchiveSettings, AuditSettings, ProjectSettings
from outbox_spark.pipelines import archive, audit, project
from outbox_spark.pipelines.follower import Follower
from outbox_spark.session import start_session

_WARM = 20_000
_SCHEMA = "n BIGINT NOT NULL, customer STRING, total_cents BIGINT NOT NULL, note STRING"


def produce(bootstrap: str, topic: str, first: int, count: int) -> None:
    """Produce records with id headers over 10,000 keys."""
    producer = make_producer({"bootstrap.servers": bootstrap, "linger.ms": 5, "queue.buffering.max.messages": 500_000})
    for number in range(first, first + count):
        value = json.dumps(
            {"n": number, "customer": f"c{number % 997}", "total_cents": number % 9999, "note": "x" * 40}
        )
        headers = [("outbox-id", b"bench.public.outbox:%d" % number)]
        producer.produce(topic, value, f"key-{number % 10_000}", headers=headers)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()


def raw_read(bootstrap: str, topic: str, count: int) -> float:
    """Return the records/s of a bare consumer."""
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": "raw", "isolation.level": "read_committed"})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    began, read = time.perf_counter(), 0
    while read < count:
        read += len(consumer.consume(5_000, 1.0))
    seconds = time.perf_counter() - began
    consumer.close()
    return count / seconds


class Stopwatch:
    """A sum of the records and seconds of batches, the first one left out."""

    def __init__(self) -> None:
        self._batches: list[tuple[int, float]] = []

    def __call__(self, report: Any) -> None:
        """Add a batch's report."""
        self._batches.append((report.counts.get("records", 0), report.seconds))

    @property
    def rate(self) -> float:
        """Return the records/s."""
        counted = self._batches[1:]
        return sum(records for records, _ in counted) / sum(seconds for _, seconds in counted)


def measure(spark: SparkSession, running: Services, folder: Path, records: int) -> dict[str, float]:
    """Return the records/s of both pipelines and of the raw read."""
    topic = make_topic(running.bootstrap, fresh_topic("spark"))
    common = {"topics": [topic], "max_records": 200_000}
    to_archive = ArchiveSettings(name="a", checkpoint=str(folder / "a"), path=str(folder / "archive"), **common)
    to_table = ProjectSettings(
        name="p",
        checkpoint=str(folder / "p"),
        schema=_SCHEMA,
        postgres={"dsn": running.dsn, "table": f"projected_{time.time_ns()}"},
        **common,
    )
    watches: dict[str, Stopwatch] = {"archive": Stopwatch(), "project": Stopwatch()}
    runs: list[tuple[str, Callable[..., Any], Any]] = [
        ("archive", archive.targets, to_archive),
        ("project", project.targets, to_table),
    ]
    for first, count in ((0, _WARM), (_WARM, records)):
        produce(running.bootstrap, topic, first, count)
        for name, targets, settings in runs:
            kafka = {"bootstrap.servers": running.bootstrap}
            follower = Follower(spark, kafka, settings, targets(spark, settings), watches[name])
            follower.run(once=True, stop=threading.Event())
    rates = {name: watch.rate for name, watch in watches.items()}
    return {"raw read": raw_read(running.bootstrap, topic, records), **rates}


def make_sides(spark: SparkSession, folder: Path, records: int) -> None:
    """Write two folders that differ in four places."""
    expected = spark.range(records).selectExpr(
        "'orders' AS topic",
        "cast(pmod(id, 8) AS INT) AS partition",
        "id AS offset",
        "timestamp_micros(1790000000000000 + id * 1000) AS timestamp",
        "cast(concat('key-', pmod(id, 100000)) AS BINARY) AS key",
        "concat('bench.public.outbox:', id) AS outbox_id",
    )
    expected.write.parquet(str(folder / "expected"))
    lost, twice, behind, before = records // 3, records // 2, records // 5, records // 5 + 100_000
    found = expected.where(f"offset != {lost}").selectExpr(
        "* EXCEPT (offset)",
        f"CASE offset WHEN {behind} THEN {before}L WHEN {before} THEN {behind}L ELSE offset END AS offset",
    )
    again = expected.where(f"offset = {twice}").selectExpr("* EXCEPT (offset)", f"{records * 2}L AS offset")
    found.unionByName(again).write.parquet(str(folder / "found"))


def run_audit(folder: str, found: str, memory: str) -> None:
    """Run an audit in this process; print its result, seconds and the JVM's peak memory as JSON."""
    spark = start_session(
        "bench", {"spark.driver.memory": memory, "spark.sql.shuffle.partitions": "16"}, master="local[2]"
    )
    spark.sparkContext.setLogLevel("ERROR")
    settings = AuditSettings(expected={"parquet": f"{folder}/expected"}, found={"parquet": f"{folder}/{found}"})
    began = time.perf_counter()
    result = audit.run(spark, {}, settings)
    seconds = time.perf_counter() - began
    jvm = spark.sparkContext._gateway.proc.pid  # type: ignore[union-attr]  # noqa: SLF001
    lines = Path(f"/proc/{jvm}/status").read_text().splitlines()
    peak = next(int(line.split()[1]) // 1024 for line in lines if line.startswith("VmHWM"))
    kinds = {kind: result.total(kind) for kind in audit.KINDS}
    ids = sorted(example["id"] for example in result.examples)
    sys.stdout.write(json.dumps({"kinds": kinds, "ids": ids, "seconds": seconds, "peak_mib": peak}) + "\n")
    spark.stop()


def show_audit(console: Console, spark: SparkSession, folder: Path, records: int) -> None:
    """Run audits in processes of their own, with a bound on the driver's memory, and print them."""
    make_sides(spark, folder, records)
    spark.stop()
    for found in ("found", "expected"):
        command = [sys.executable, "-m", "benchmarks.spark_pipelines", "--one-audit", str(folder), found]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        result = json.loads(done.stdout.splitlines()[-1])
        planted = "with planted faults" if found == "found" else "clean"
        console.print(
            f"audit of {records:,} records, {planted}: {result['kinds']} "
            f"{result['ids']}, {result['seconds']:.0f} s ({records / result['seconds']:,.0f}/s), JVM peak "
            f"{result['peak_mib']} MiB"
        )


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=400_000)
    parser.add_argument("--audit-records", type=int, default=10_000_000, help="0 for no audit")
    parser.add_argument("--one-audit", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one_audit:
        run_audit(*options.one_audit, memory="1g")
        return
    console = Console(width=120)
    console.print(machine())
    folder = Path(tempfile.mkdtemp(prefix="bench-spark-"))
    spark = start_session("bench", {"spark.driver.memory": "2g"}, master="local[2]")
    spark.sparkContext.setLogLevel("ERROR")
    try:
        if options.records:
            with services() as running:
                rates = measure(spark, running, folder, options.records)
            table = Table(*rates, title=f"{options.records:,} records, records/s")
            table.add_row(*(f"{rate:,.0f}" for rate in rates.values()))
            console.print(table)
        if options.audit_records:
            show_audit(console, spark, folder, options.audit_records)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
