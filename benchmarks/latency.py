"""Latency from a commit in the database to the record at a consumer (`make bench-latency`).

Records are committed one by one at a steady rate; each value is the time right before its commit. A consumer of the
same topic (read_committed) notes when it has them. For exactly-once delivery a bare loop stands beside it in the same
run: begin, produce the due records, commit, again at once, through the same broker and consumer. A record every two
seconds shows the cost of an idle harvester's pauses, without and with NOTIFY. Writes docs/images/latency-over-rate.png.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks import charts
from benchmarks.failover import tail
from benchmarks.stage import ROOT, Services, fill, fresh_topic, machine, services
from outbox_core.kafka.clients import Consumer, make_producer
from outbox_core.schema import TableName, notify_sql

_INSERT = "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, %s)"


def at_rate(rate: float, count: int, act: Callable[[int], None]) -> None:
    """Call `act` with 0, 1, 2, ... at a steady rate; when late, at once."""
    began = time.monotonic()
    for number in range(count):
        pause = began + number / rate - time.monotonic()
        if pause > 0:
            time.sleep(pause)
        act(number)


def collect(consumer: Consumer, count: int) -> list[float]:
    """Return the seconds from the time in each value to its arrival."""
    latencies: list[float] = []
    give_up_at = time.monotonic() + 120
    while len(latencies) < count:
        messages = [message for message in consumer.consume(500, 0.001) if message.error() is None]
        arrived = time.monotonic()
        latencies.extend(arrived - float(message.value() or b"nan") for message in messages)
        if time.monotonic() > give_up_at:
            raise SystemExit(f"only {len(latencies)} of {count} records arrived")
    return latencies


def measure(at: Services, topic: str, count: int, write: Callable[[], None]) -> list[float]:
    """Return the latencies in milliseconds of the records that `write` writes, without the first tenth."""
    consumer = tail(at, topic)
    writer = threading.Thread(target=write)
    writer.start()
    latencies = collect(consumer, count)
    writer.join()
    consumer.close()
    return sorted(1000 * latency for latency in latencies[count // 10 :])


def through_outbox(at: Services, delivery: str, rate: float, seconds: float, *, notify: bool = False) -> list[float]:
    """Return the latencies through a harvester process of its own."""
    topic, count = fresh_topic("latency"), int(rate * seconds)
    fill(at.dsn, topic, rows=0, keys=1)
    with psycopg.connect(at.dsn, autocommit=True) as connection:
        if notify:
            connection.execute(notify_sql(TableName("outbox")))
    command = [sys.executable, "-m", "outbox_core", "harvest", "--dsn", at.dsn, "--bootstrap-servers", at.bootstrap]
    command += ["--delivery", delivery, "--log-level", "error", *(["--notify"] if notify else [])]
    harvester = subprocess.Popen(command, cwd=ROOT)

    def write() -> None:
        with psycopg.connect(at.dsn, autocommit=True) as connection:
            time.sleep(3)  # the harvester leads by now
            at_rate(rate, count, lambda number: _insert(connection, topic, number))

    try:
        return measure(at, topic, count, write)
    finally:
        harvester.terminate()
        harvester.wait()


def _insert(connection: psycopg.Connection[tuple[object, ...]], topic: str, number: int) -> None:
    connection.execute(_INSERT, (topic, str(number % 1000), repr(time.monotonic()).encode()), prepare=True)


def bare_transactions(at: Services, rate: float, seconds: float) -> list[float]:
    """Return the latencies of a bare transactional producer that takes all due records into each transaction."""
    topic, count = fresh_topic("bare"), int(rate * seconds)
    producer = make_producer(
        {"bootstrap.servers": at.bootstrap, "transactional.id": topic, "linger.ms": 0, "acks": "all"}
    )

    def write() -> None:
        producer.init_transactions(30)
        began, sent = time.monotonic(), 0
        while sent < count:
            due = min(count, int((time.monotonic() - began) * rate) + 1)
            if due == sent:
                time.sleep(0.0005)
                continue
            producer.begin_transaction()
            for number in range(sent, due):
                producer.produce(topic, repr(began + number / rate).encode(), str(number % 1000))
            producer.commit_transaction(30)
            sent = due

    return measure(at, topic, count, write)


def sparse(at: Services, delivery: str, seconds: float, *, notify: bool) -> list[float]:
    """Return the latencies of a record every two seconds."""
    return through_outbox(at, delivery, 0.5, seconds, notify=notify)


def main() -> None:
    """Measure, print a table, draw the chart."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    parser.add_argument("--rates", type=float, nargs="*", default=[10, 100, 1000, 3000], help="records per second")
    parser.add_argument("--sparse-seconds", type=float, default=60.0, help="0 leaves out a record every two seconds")
    options = parser.parse_args()
    console = Console()
    console.print(machine())
    table = Table(title=f"milliseconds from commit to consumer, {options.seconds:.0f} s each")
    for column in ("records/s", "through", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    os.environ.pop("OUTBOX_POSTGRES_DSN", None)
    points: dict[str, dict[str, list[tuple[float, float]]]] = {"p50": {}, "p99": {}}

    def add(rate: float, name: str, latencies: list[float]) -> None:
        percentiles = statistics.quantiles(latencies, n=100, method="inclusive")
        table.add_row(f"{rate:,g}", name, *(f"{percentiles[index]:.1f}" for index in (49, 89, 98)))
        if rate >= 1:
            points["p50"].setdefault(name, []).append((rate, percentiles[49]))
            points["p99"].setdefault(name, []).append((rate, percentiles[98]))

    with services() as running:
        for rate in options.rates:
            for name, latencies in (
                ("at least once", through_outbox(running, "at-least-once", rate, options.seconds)),
                ("exactly once", through_outbox(running, "exactly-once", rate, options.seconds)),
                ("bare transactions", bare_transactions(running, rate, options.seconds)),
            ):
                add(rate, name, latencies)
        for delivery in ("at-least-once", "exactly-once") if options.sparse_seconds else ():
            for notify in (False, True):
                name = f"{delivery.replace('-', ' ')}{', NOTIFY' if notify else ''}"
                add(0.5, name, sparse(running, delivery, options.sparse_seconds, notify=notify))
    console.print(table)
    if options.rates:
        console.print(charts.latency(points))


if __name__ == "__main__":
    main()
