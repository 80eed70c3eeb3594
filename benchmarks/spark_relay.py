"""The Spark sources and the relay, warm, beside raw reads of the same source (`python -m benchmarks.spark_relay`).

Each figure is of one Spark session on this machine, after a run of the same kind that is not counted:

- *outbox*: a stream of the format `outbox`, marked, read as Arrow and purged, into nothing; beside it the same marks,
  reads and purges by one connection, without Spark;
- *outbox_kafka*: a stream of the format `outbox_kafka` into nothing; beside it a bare consumer;
- *relay*: outbox to topics, exactly once; beside it a bare loop of mark, read, transaction and purge, without Spark.

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
from collections.abc import Callable
from typing import Any
from uuid import uuid4

from confluent_kafka.admin import AdminClient, NewTopic

from benchmarks.stage import ROOT, Services, fill, fresh_topic, machine, services
from outbox_core.config import HarvestConfig
from outbox_core.kafka.clients import make_producer
from outbox_core.stores.relay_marks import RelayMark
from outbox_spark.relay.batch_store import BatchStore, Shard
from outbox_spark.topics.ranges import TopicLog, ranges_between, read_range

_BATCH = 50_000
_KEYS = 10_000
_PARTITIONS = 4


def raw_outbox(running: Services, rows: int, publish: Callable[[Any], None] = lambda _: None) -> float:
    """Return the rows/s of marks, reads and purges on one connection."""
    store, done, number = BatchStore(running.dsn), 0, 0
    began = time.perf_counter()
    while done < rows:
        number += 1
        batch = store.mark_batch(RelayMark(0, number), _BATCH)
        if batch is None:
            break
        for read in store.read(Shard(0, 1, batch)):
            publish(read)
        done += store.purge_batch(batch)
    store.close()
    return rows / (time.perf_counter() - began)


def raw_relay(running: Services, topic: str, rows: int) -> float:
    """Return the rows/s of the same with a transaction for each batch."""
    producer = make_producer(
        {
            "bootstrap.servers": running.bootstrap,
            "transactional.id": f"raw-{uuid4()}",
            "queue.buffering.max.messages": 200_000,
            "linger.ms": 5,
        }
    )
    producer.init_transactions(30)

    def publish(read: Any) -> None:
        producer.begin_transaction()
        for row in read:
            producer.produce(topic, row[3], row[2], headers=[("outbox-id", b"bench.public.outbox:%d" % row[0])])
        producer.commit_transaction(60)

    return raw_outbox(running, rows, publish)


def raw_kafka(running: Services, topic: str) -> float:
    """Return the rows/s of bare consumers, one partition after the other."""
    kafka = {"bootstrap.servers": running.bootstrap}
    log = TopicLog(kafka, [topic])
    firsts, ends = log.bounds()
    began = time.perf_counter()
    count = sum(len(batch) for wanted in ranges_between(firsts, ends, firsts) for batch in read_range(kafka, wanted))
    return count / (time.perf_counter() - began)


def make_topic(running: Services, prefix: str) -> str:
    """Make a topic of some partitions; return its name."""
    topic = fresh_topic(prefix)
    admin = AdminClient({"bootstrap.servers": running.bootstrap})
    admin.create_topics([NewTopic(topic, _PARTITIONS, 1)])[topic].result()
    return topic


def produce(running: Services, topic: str, rows: int) -> None:
    """Fill a topic with records as the harvester writes them."""
    producer = make_producer({"bootstrap.servers": running.bootstrap, "queue.buffering.max.messages": 500_000})
    for number in range(rows):
        headers = [("outbox-id", b"bench.public.outbox:%d" % number)]
        producer.produce(topic, b"x" * 100, f"key-{number % _KEYS}", headers=headers)
        if number % 1000 == 0:
            producer.poll(0)
    producer.flush()


def in_spark(running: Services, master: str, what: str, rows: int, topic: str) -> dict[str, Any]:
    """Measure one thing in a session of its own process."""
    command = [sys.executable, "-m", "benchmarks.spark_relay", "--session", master, what, str(rows), topic]
    done = subprocess.run(
        [*command, running.dsn, running.bootstrap], cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True
    )
    measured: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return measured


def session(running: Services, master: str, what: str, rows: int, topic: str) -> None:
    """Run a warm-up of a fifth, then the measured run, in this process; print the result."""
    from outbox_spark.session import start_session

    spark = start_session("bench", {"spark.driver.memory": "2g"}, master=master)
    spark.sparkContext.setLogLevel("ERROR")
    if what != "outbox_kafka":
        fill(running.dsn, topic, rows=rows // 4, keys=_KEYS)
    run(spark, what, running, topic)
    if what != "outbox_kafka":
        fill(running.dsn, topic, rows=rows, keys=_KEYS)
    progress = run(spark, what, running, topic)
    seconds = sum(batch["durationMs"]["triggerExecution"] for batch in progress) / 1000
    steps: dict[str, float] = {}
    for batch in progress:
        for step, milliseconds in batch["durationMs"].items():
            steps[step] = steps.get(step, 0) + milliseconds / len(progress)
    count = sum(batch["numInputRows"] for batch in progress)
    print(json.dumps({"rate": count / seconds, "rows": count, "batches": len(progress), "steps_ms": steps}))


def run(spark: Any, what: str, running: Services, topic: str) -> list[dict[str, Any]]:
    """Run once with availableNow; return its batches."""
    checkpoint = tempfile.mkdtemp(prefix="bench-checkpoint-")
    kafka = {"kafka.bootstrap.servers": running.bootstrap}
    told: list[dict[str, Any]] = []
    try:
        if what == "relay":
            from outbox_spark.pipelines.relay import RelayConfig, run_relay

            harvest = HarvestConfig(data_source=running.dsn, base_kafka_config={"bootstrap.servers": running.bootstrap})
            config = RelayConfig(harvest=harvest, checkpoint=checkpoint, shards=2, batch_records=_BATCH)
            run_relay(spark, config, once=True, on_progress=told.append)
            return told
        options = (
            {"dsn": running.dsn, "shards": "2", "maxRecordsPerBatch": str(_BATCH)}
            if what == "outbox"
            else {"subscribe": topic, "startingOffsets": "earliest", "maxOffsetsPerTrigger": "200000"}
        )
        stream = spark.readStream.format(what).options(**kafka, **options).load()
        query = (
            stream.writeStream.format("noop")
            .option("checkpointLocation", checkpoint)
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [dict(batch) for batch in query.recentProgress if batch["numInputRows"]]
    finally:
        shutil.rmtree(checkpoint, ignore_errors=True)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--only", choices=["outbox", "outbox_kafka", "relay"], help="one of them")
    parser.add_argument("--session", nargs=6, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.session:
        master, what, rows, topic, dsn, bootstrap = options.session
        session(Services(dsn, bootstrap), master, what, int(rows), topic)
        return
    print(machine())
    with services() as running:
        for what in ("outbox", "outbox_kafka", "relay"):
            if options.only in (None, what):
                measure(running, what, options.rows)


def measure(running: Services, what: str, rows: int) -> None:
    """Print one row of the table for each master."""
    topic = make_topic(running, what)
    if what == "outbox_kafka":
        produce(running, topic, rows)
        raw = raw_kafka(running, topic)
    else:
        fill(running.dsn, topic, rows=rows, keys=_KEYS)
        raw = raw_outbox(running, rows) if what == "outbox" else raw_relay(running, topic, rows)
    for master in ("local[1]", "local[2]"):
        measured = in_spark(running, master, what, rows, topic)
        steps = ", ".join(f"{step} {milliseconds:.0f}" for step, milliseconds in measured["steps_ms"].items())
        share = measured["rate"] / raw
        print(
            f"{what:13s} {master}: {measured['rate']:9,.0f} rows/s; raw {raw:9,.0f}; {share:4.0%}; "
            f"{measured['batches']} batches, ms each: {steps}",
            flush=True,
        )


if __name__ == "__main__":
    main()
