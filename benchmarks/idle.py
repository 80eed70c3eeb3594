"""The cost of an idle leader: statements a second, and share of a core (`make bench-idle`).

Statements are counted by the server (`pg_stat_database.xact_commit`), so everything is counted that the harvester
sends, its metrics included. CPU time is the harvester process's own.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.stage import ROOT, Services, cpu_seconds, fill, fresh_topic, machine, services
from outbox_core.schema import TableName, notify_sql

_SETTLE_SECONDS = 15  # pauses have grown to their ceiling by then


def idle(at: Services, delivery: str, seconds: float, *, notify: bool) -> tuple[float, float]:
    """Return statements a second and cores of an idle leader."""
    fill(at.dsn, fresh_topic("idle"), rows=0, keys=1)
    command = [sys.executable, "-m", "outbox_core", "harvest", "--dsn", at.dsn, "--bootstrap-servers", at.bootstrap]
    command += ["--delivery", delivery, "--log-level", "error"]
    with psycopg.connect(at.dsn, autocommit=True) as connection:
        connection.execute(notify_sql(TableName("outbox")))
    harvester = subprocess.Popen([*command, *(["--notify"] if notify else [])], cwd=ROOT)
    try:
        time.sleep(_SETTLE_SECONDS)
        with psycopg.connect(at.dsn, dbname="postgres", autocommit=True) as outside:
            readings = []
            for pause in (seconds, 0.0):
                row = outside.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = 'bench'").fetchone()
                readings.append((time.monotonic(), row[0] if row else 0, cpu_seconds(harvester.pid)))
                time.sleep(pause)
    finally:
        harvester.terminate()
        harvester.wait()
    (began, sent, used), (ended, sent_after, used_after) = readings
    return (sent_after - sent) / (ended - began), (used_after - used) / (ended - began)


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=20.0)
    options = parser.parse_args()
    console = Console()
    console.print(machine())
    table = Table(title=f"an idle leader, {options.seconds:.0f} s each")
    for column in ("delivery", "notify", "statements/s", "cores"):
        table.add_column(column, justify="right")
    with services() as running:
        for delivery in ("at-least-once", "exactly-once"):
            for notify in (False, True):
                statements, cores = idle(running, delivery, options.seconds, notify=notify)
                table.add_row(delivery, "on" if notify else "off", f"{statements:.2f}", f"{cores:.3f}")
    console.print(table)


if __name__ == "__main__":
    main()
