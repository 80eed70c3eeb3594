"""The stage of every benchmark: services, filled tables, harvesters as processes of their own."""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psycopg

from devstack.stack import DevStack
from outbox_core.kafka.clients import NewTopic, make_admin
from outbox_core.schema import TableName, create_hold_sql, create_table_sql, hold_beside

ROOT = Path(__file__).resolve().parent.parent
VALUE_BYTES = 100
PARTITIONS = 4


@dataclass(frozen=True)
class Services:
    """A database and a broker for one benchmark, with the processes that they began with."""

    dsn: str
    bootstrap: str
    postgres_pid: int = 0  # 0: somebody else's
    broker_pid: int = 0


@contextmanager
def services() -> Iterator[Services]:
    """Start a real Postgres and a real broker for this run."""
    with DevStack(embedded=False) as stack:
        dsn = stack.postgres.create_database("bench")
        bootstrap = stack.kafka.bootstrap
        yield Services(dsn, bootstrap, stack.postgres.pid or 0, stack.kafka.pid or 0)


def cpu_seconds(pid: int) -> float:
    """Return the CPU time of a process and its children, ended ones included."""
    ticks = 0
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
            except OSError:  # it has just ended
                continue
            if pid in (int(entry.name), int(fields[1])):
                ticks += sum(map(int, fields[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def fill(dsn: str, topic: str, *, rows: int, keys: int, table: str = "outbox") -> None:
    """Make a fresh outbox table with `rows` records of ~100 bytes over `keys` keys, settled on disk."""
    name = TableName.parse(table)
    with psycopg.connect(dsn, autocommit=True) as connection:
        connection.execute(f"DROP TABLE IF EXISTS {name.quoted}")
        connection.execute(create_table_sql(name))
        connection.execute(f"DROP TABLE IF EXISTS {hold_beside(name).quoted}")
        connection.execute(create_hold_sql(name))
        connection.execute(
            f"INSERT INTO {name.quoted} (kafka_topic, kafka_key, kafka_value) "
            "SELECT %s, 'key-' || (random() * %s)::int, convert_to(repeat('x', %s), 'UTF8') "
            "FROM generate_series(1, %s)",
            (topic, keys - 1, VALUE_BYTES, rows),
        )
        connection.execute(f"VACUUM ANALYZE {name.quoted}")
        connection.execute("CHECKPOINT")


def fresh_topic(prefix: str) -> str:
    """Return a new topic name."""
    return f"{prefix}-{time.time_ns()}"


def make_topic(bootstrap: str, topic: str, settings: Mapping[str, str] | None = None) -> str:
    """Make a topic of `PARTITIONS` partitions, and return its name."""
    admin = make_admin({"bootstrap.servers": bootstrap})
    admin.create_topics([NewTopic(topic, PARTITIONS, config=dict(settings or {}))])[topic].result(10)
    return topic


def harvest(
    services: Services, delivery: str, *, rows: int, limits: Sequence[str] = (), checkout: Path = ROOT
) -> dict[str, Any]:
    """Drain the table with one harvester process; return its figures (see `benchmarks.drain`).

    Args:
        services: database and broker.
        delivery: `at-least-once` or `exactly-once`.
        rows: number of records in the table.
        limits: limits of the harvester, as `name=value`.
        checkout: folder with the code of the harvester.
    """
    command = [sys.executable, "-m", "benchmarks.drain", services.dsn, services.bootstrap, str(rows), delivery, *limits]
    done = subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.PIPE, text=True)
    measured: dict[str, Any] = json.loads(done.stdout)
    return measured


def machine() -> str:
    """Describe the machine in one line, for the record."""
    model = "unknown CPU"
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        names = [line.split(":", 1)[1].strip() for line in cpuinfo.read_text().splitlines() if "model name" in line]
        model = names[0] if names else model
    load = os.getloadavg()[0]
    return f"{os.cpu_count()} cores, {model}, Python {platform.python_version()}, load {load:.1f} at the start"
