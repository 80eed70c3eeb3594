"""The Spark sources and the relay, warm, beside raw reads of the same source (`python -m benchmarks.spark_relay`).

Each figure is of one Spark session on this machine, after a run of the same kind that is not counted:

- *outbox*: a read of the format `outbox` into nothing; beside it one connection, without Spark;
- *outbox_kafka*: a stream of the format `outbox_kafka` into nothing; beside it a bare consumer;
- *relay*: outbox to topics, exactly once, by 1, 2 and 4 tasks at once; beside it one exactly-once harvester, and the
  relay of another checkout (`--beside FOLDER`), alternating. What a batch takes beyond its longest task is its serial
  part: plan, Spark's job, outcomes.

Rates are of the batches alone (from the first batch's start to the last one's end), as Spark's own start takes seconds.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.stage import ROOT, Services, fill, fresh_topic, harvest, machine, make_topic, services
from outbox_core.config import HarvestConfig
from outbox_core.kafka.clients import make_producer
from outbox_spark.relay.shard_store import ShardStore
from outbox_spark.topics.ranges import TopicLog, ranges_between, read_range

_KEYS = 10_000
_TASKS = (1, 2, 4)


def raw_outbox(running: Services) -> float:
    """Return the rows/s of a read on one connection."""
    store = ShardStore(running.dsn)
    began = time.perf_counter()
    count = sum(map(len, store.read_shard(0, 1)))
    rate = count / (time.perf_counter() - began)
    store.close()
    return rate


def raw_kafka(running: Services, topic: str) -> float:
    """Return the rows/s of bare consumers, one partition after the other."""
    kafka = {"bootstrap.servers": running.bootstrap}
    log = TopicLog(kafka, [topic])
    firsts, ends = log.bounds()
    began = time.perf_counter()
    count = sum(len(batch) for wanted in ranges_between(firsts, ends, firsts) for batch in read_range(kafka, wanted))
    return count / (time.perf_counter() - began)


def produce(running: Services, topic: str, rows: int) -> None:
    """Fill a topic with records as the harvester writes them."""
    producer = make_producer({"bootstrap.servers": running.bootstrap, "queue.buffering.max.messages": 500_000})
    for number in range(rows):
        headers = [("outbox-id", b"bench.public.outbox:%d" % number)]
        producer.produce(topic, b"x" * 100, f"key-{number % _KEYS}", headers=headers)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()


def in_spark(
    running: Services, master: str, what: str, rows: int, topic: str, *, checkout: Path = ROOT
) -> dict[str, Any]:
    """Measure one thing in a session of its own process, with the code of a checkout."""
    command = [sys.executable, "-m", "benchmarks.spark_relay", "--session", master, what, str(rows), topic]
    done = subprocess.run(
        [*command, running.dsn, running.bootstrap], cwd=checkout, check=True, stdout=subprocess.PIPE, text=True
    )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def session(running: Services, master: str, what: str, rows: int, topic: str) -> None:
    """Run a warm-up of a quarter, then the measured run, in this process; print the result."""
    from outbox_spark.session import start_session

    tasks = int(master.removeprefix("local[").removesuffix("]"))
    spark = start_session("bench", {"spark.driver.memory": "1g"}, master=master)
    spark.sparkContext.setLogLevel("ERROR")
    for number in (rows // 4, rows):
        if what != "outbox_kafka":
            fill(running.dsn, topic, rows=number, keys=_KEYS)
        progress = run(spark, what, running, topic, tasks)
    seconds = sum(batch["durationMs"]["triggerExecution"] for batch in progress) / 1000
    steps: dict[str, float] = {}
    for batch in progress:
        for step, milliseconds in batch["durationMs"].items():
            steps[step] = steps.get(step, 0) + milliseconds / len(progress)
    count = sum(batch["numInputRows"] for batch in progress)
    print(json.dumps({"rate": count / seconds, "rows": count, "batches": len(progress), "steps_ms": steps}))


def run(spark: Any, what: str, running: Services, topic: str, tasks: int) -> list[dict[str, Any]]:
    """Run once; return its batches."""
    if what == "relay":
        from outbox_spark.metrics import BatchReport
        from outbox_spark.pipelines.relay import RelayConfig, run_relay

        harvest = HarvestConfig(data_source=running.dsn, base_kafka_config={"bootstrap.servers": running.bootstrap})
        told: list[BatchReport] = []
        run_relay(spark, RelayConfig(harvest=harvest, shards=tasks), once=True, on_progress=told.append)
        return [
            {
                "numInputRows": batch.counts["records"],
                "durationMs": {"triggerExecution": batch.seconds * 1000, "longestTask": batch.longest_task * 1000},
            }
            for batch in told
        ]
    if what == "outbox":
        rows = spark.read.format("outbox").options(dsn=running.dsn, shards=tasks).load()
        count, began = rows.count(), time.perf_counter()
        rows.write.format("noop").mode("overwrite").save()
        took = round((time.perf_counter() - began) * 1000)
        return [{"numInputRows": count, "durationMs": {"triggerExecution": took}}]
    return stream(spark, running, topic)


def stream(spark: Any, running: Services, topic: str) -> list[dict[str, Any]]:
    """Read a topic as a stream; return its batches."""
    checkpoint = tempfile.mkdtemp(prefix="bench-checkpoint-")
    try:
        rows = (
            spark.readStream.format("outbox_kafka")
            .options(subscribe=topic, startingOffsets="earliest", maxOffsetsPerTrigger="200000")
            .option("kafka.bootstrap.servers", running.bootstrap)
            .load()
        )
        query = (
            rows.writeStream.format("noop").option("checkpointLocation", checkpoint).trigger(availableNow=True).start()
        )
        query.awaitTermination()
        return [dict(batch) for batch in query.recentProgress if batch["numInputRows"]]
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--rounds", type=int, default=1, help="of the relay")
    parser.add_argument("--only", choices=["outbox", "outbox_kafka", "relay"], help="one of them")
    parser.add_argument("--beside", type=Path, help="folder of another checkout, whose relay is measured, too")
    parser.add_argument("--session", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.session:
        master, what, rows, topic, dsn, bootstrap = options.session
        session(Services(dsn, bootstrap), master, what, int(rows), topic)
        return
    print(machine())
    with services() as running:
        for what in ("outbox", "outbox_kafka"):
            if options.only in (None, what):
                measure(running, what, options.rows)
        for number in range(options.rounds * (options.only in (None, "relay"))):
            print(f"round {number + 1}")
            measure_relay(running, options.rows, options.beside)


def measure(running: Services, what: str, rows: int) -> None:
    """Print one row of the table for each master."""
    topic = make_topic(running.bootstrap, fresh_topic(what))
    if what == "outbox_kafka":
        produce(running, topic, rows)
        raw = raw_kafka(running, topic)
    else:
        fill(running.dsn, topic, rows=rows, keys=_KEYS)
        raw = raw_outbox(running)
    for master in ("local[1]", "local[2]"):
        say(f"{what} {master}", in_spark(running, master, what, rows, topic), f"; raw {raw:9,.0f}")


def measure_relay(running: Services, rows: int, beside: Path | None) -> None:
    """Print the rates of a harvester, of another checkout's relay and of this one's."""
    topic = make_topic(running.bootstrap, fresh_topic("relay"))
    fill(running.dsn, topic, rows=rows, keys=_KEYS)
    found = harvest(running, "exactly-once", rows=rows)
    print(f"one harvester: {found['rate']:9,.0f} rows/s", flush=True)
    if beside is not None:
        say(f"{beside.name} local[2]", in_spark(running, "local[2]", "relay", rows, topic, checkout=beside))
    for tasks in _TASKS:
        say(f"relay local[{tasks}]", in_spark(running, f"local[{tasks}]", "relay", rows, topic))


def say(what: str, measured: dict[str, Any], more: str = "") -> None:
    """Print a rate, with the time of each step of a batch."""
    steps = measured["steps_ms"]
    told = ", ".join(f"{step} {milliseconds:.0f}" for step, milliseconds in steps.items())
    if "longestTask" in steps:
        serial = steps["triggerExecution"] - steps["longestTask"]
        more += f"; serial part {serial:.0f} ms, {serial / steps['triggerExecution']:.1%}"
    print(f"{what:18s} {measured['rate']:9,.0f} rows/s{more}; {measured['batches']} batches, ms: {told}", flush=True)


if __name__ == "__main__":
    main()
