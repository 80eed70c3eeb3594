"""A full table under a client quota (`make bench-quota`): seconds, and records that are repeated.

The brokers let so many bytes a second of each client pass (`producer_byte_rate`), after a burst of ten seconds' worth.
Beside the harvester, a bare producer with the client's own timeout (two minutes) sends the same under the same quota.
OTHER=/path measures another checkout, too.
"""

from __future__ import annotations

import argparse
import subprocess
import time
from pathlib import Path
from typing import Never

from rich.console import Console
from rich.table import Table

from benchmarks.stage import ROOT, VALUE_BYTES, Services, fill, fresh_topic, harvest, machine, make_topic, services
from devstack.jars import kafka_jars
from devstack.java import find_java
from outbox_core.kafka.clients import KafkaError, KafkaException, TopicPartition, make_consumer, make_producer
from outbox_core.kafka.reader import PartitionReader, partition_ends, reader_settings

_DELIVERIES = ("at-least-once", "exactly-once")
_AT_ONCE = 10_000


def _set_quota(bootstrap: str, bytes_a_second: int) -> None:
    java = find_java()
    command = ["-Xmx128m", "-cp", f"{kafka_jars(java, lambda _: None)}/*", "kafka.admin.ConfigCommand", "--alter"]
    what = ["--entity-type", "clients", "--entity-default", "--add-config", f"producer_byte_rate={bytes_a_second}"]
    subprocess.run([java, *command, "--bootstrap-server", bootstrap, *what], check=True, stdout=subprocess.DEVNULL)


def _bare(bootstrap: str, topic: str, rows: int, keys: int) -> None:
    settings = {"bootstrap.servers": bootstrap, "enable.idempotence": True, "queue.buffering.max.messages": rows + 1}
    producer = make_producer(settings)
    for number in range(rows):
        producer.produce(topic, b"x" * VALUE_BYTES, key=f"key-{number % keys}")
    producer.flush()


def _fail(error: KafkaError, _: str) -> Never:
    raise KafkaException(error)


def _count(bootstrap: str, topic: str) -> int:
    """Count the committed records of a topic."""
    settings = reader_settings({"bootstrap.servers": bootstrap}, "bench-quota")
    ends = partition_ends(settings, [topic], timeout_seconds=30)
    consumer = make_consumer(settings)
    starts = [TopicPartition(*place, 0) for place in ends]
    try:
        return sum(map(len, PartitionReader(consumer, starts, ends, on_error=_fail, at_once=_AT_ONCE)))
    finally:
        consumer.close()


def _drain(place: Services, delivery: str, options: argparse.Namespace, checkout: Path) -> tuple[float, int]:
    """Return the seconds of a drain, and how many records are in the topic more than once."""
    topic = make_topic(place.bootstrap, fresh_topic("quota"))
    fill(place.dsn, topic, rows=options.rows, keys=options.keys)
    rate = harvest(place, delivery, rows=options.rows, checkout=checkout)["rate"]
    return options.rows / rate, _count(place.bootstrap, topic) - options.rows


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rate", type=int, default=500_000, help="bytes a second of each client")
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--keys", type=int, default=50_000)
    parser.add_argument("--other", type=Path, help="another checkout")
    options = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    table = Table(
        title=f"{options.rows:,} records of {VALUE_BYTES} bytes under a quota of {options.rate:,} bytes a second"
    )
    for column in ("", "seconds", "repeated"):
        table.add_column(column, justify="right" if column else "left")
    with services() as place:
        _set_quota(place.bootstrap, options.rate)
        topic, began = make_topic(place.bootstrap, fresh_topic("quota")), time.monotonic()
        _bare(place.bootstrap, topic, options.rows, options.keys)
        table.add_row("a bare producer", f"{time.monotonic() - began:.1f}", "")
        for delivery in _DELIVERIES:
            for checkout in filter(None, (options.other, ROOT)):
                seconds, repeats = _drain(place, delivery, options, checkout)
                name = delivery if checkout == ROOT else f"{delivery}, {checkout}"
                table.add_row(name, f"{seconds:.1f}", f"{repeats:,} ({repeats / options.rows:.1%})")
    console.print(table)


if __name__ == "__main__":
    main()
