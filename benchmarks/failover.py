"""The gap in publishing when the leader is killed, and when it is asked to stop (`make bench-failover`).

Two harvester processes share one outbox, into which a record is committed every 5 ms. The leader is ended by SIGKILL
or SIGTERM; a consumer of the topic notes when the first record arrives that was committed after the signal. The time
from the signal to that arrival is the gap, as an application sees it.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
import urllib.request
from contextlib import suppress

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.stage import PARTITIONS, ROOT, Services, fill, fresh_topic, machine, make_topic, services
from devstack.ports import free_ports
from outbox_core.kafka.clients import Consumer, TopicPartition, make_consumer

_COMMIT_EVERY_SECONDS = 0.005
_GIVE_UP_SECONDS = 60.0
_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Harvester:
    """One `outbox harvest` process with its health page."""

    def __init__(self, at: Services) -> None:
        self._port = free_ports(1)[0]
        command = [sys.executable, "-m", "outbox_core", "harvest", "--dsn", at.dsn, "--bootstrap-servers", at.bootstrap]
        command += ["--metrics-port", str(self._port), "--log-level", "error"]
        self._process = subprocess.Popen(command, cwd=ROOT)

    def is_leader(self) -> bool:
        """Tell whether it leads, by its health page."""
        try:
            with _DIRECT.open(f"http://127.0.0.1:{self._port}/healthz", timeout=1) as answer:
                return bool(json.load(answer)["leader"])
        except OSError:
            return False

    def end(self, number: signal.Signals) -> None:
        """Send a signal, and reap the process in the background."""
        os.kill(self._process.pid, number)
        threading.Thread(target=self._process.wait, daemon=True).start()

    def close(self) -> None:
        """Kill it, if it still runs."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()


class Writer(threading.Thread):
    """A thread that commits a record every few milliseconds; its value is the time of its commit."""

    def __init__(self, dsn: str, topic: str) -> None:
        super().__init__(daemon=True)
        self._dsn = dsn
        self._topic = topic
        self.stopping = threading.Event()

    def run(self) -> None:
        """Write until `stopping` is set."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            while not self.stopping.wait(_COMMIT_EVERY_SECONDS):
                connection.execute(
                    "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, %s)",
                    (self._topic, str(time.monotonic_ns() % 100), repr(time.monotonic()).encode()),
                )


def tail(at: Services, topic: str) -> Consumer:
    """Make a new topic; return a consumer of all of it."""
    make_topic(at.bootstrap, topic)
    consumer = make_consumer({"bootstrap.servers": at.bootstrap, "group.id": "bench", "fetch.wait.max.ms": 5})
    consumer.assign([TopicPartition(topic, number, 0) for number in range(PARTITIONS)])
    return consumer


def first_committed_after(moment: float, consumer: Consumer) -> float:
    """Return the arrival time of the first record that was committed after the moment."""
    give_up_at = time.monotonic() + _GIVE_UP_SECONDS
    while time.monotonic() < give_up_at:
        message = consumer.poll(0.1)
        if message is not None and message.error() is None and float(message.value()) > moment:
            return time.monotonic()
    raise SystemExit(f"no successor within {_GIVE_UP_SECONDS:.0f} s")


def gap(at: Services, number: signal.Signals) -> float:
    """Return the seconds from the signal to the first record committed after it."""
    topic = fresh_topic("failover")
    fill(at.dsn, topic, rows=0, keys=1)
    harvesters = [Harvester(at), Harvester(at)]
    writer = Writer(at.dsn, topic)
    try:
        consumer = tail(at, topic)
        writer.start()
        first_committed_after(time.monotonic(), consumer)
        time.sleep(3)  # both are members of the group by now
        leader = next(harvester for harvester in harvesters if harvester.is_leader())
        began = time.monotonic()
        leader.end(number)
        # Records that the leader had in flight still arrive; the gap ends with the successor's first one.
        while time.monotonic() < began + 0.005:
            consumer.poll(0)
        return first_committed_after(began + 0.02, consumer) - began
    finally:
        writer.stopping.set()
        for harvester in harvesters:
            harvester.close()


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    console = Console()
    console.print(machine())
    table = Table(title="seconds from the signal to the first record committed after it")
    for column in ("signal", "rounds", "best", "median", "worst"):
        table.add_column(column, justify="right")
    with services() as running:
        for number in (signal.SIGKILL, signal.SIGTERM):
            gaps = sorted(gap(running, number) for _ in range(options.rounds))
            table.add_row(
                number.name,
                str(len(gaps)),
                f"{gaps[0]:.2f}",
                f"{statistics.median(gaps):.2f}",
                f"{gaps[-1]:.2f}",
            )
    console.print(table)


if __name__ == "__main__":
    main()
