"""The cost of the NOTIFY trigger for writers (`make bench-notify`).

PostgreSQL gives notices the order of commits: a transaction that sends one holds a lock of the whole server from before
its commit until the commit is on disk, so such transactions commit one after the other. Here threads commit
transactions of one insert each, without the trigger and with it, harvester or not: the cost is the writers'.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.stage import Services, fill, fresh_topic, machine, services
from outbox_core.schema import TableName, notify_sql

_INSERT = "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, %s)"


def commits(at: Services, writers: int, seconds: float, *, notify: bool) -> float:
    """Return the commits/s of so many connections."""
    topic = fresh_topic("notify")
    fill(at.dsn, topic, rows=0, keys=1)
    if notify:
        with psycopg.connect(at.dsn, autocommit=True) as connection:
            connection.execute(notify_sql(TableName("outbox")))
    stop_at = time.monotonic() + seconds
    done = [0] * writers

    def write(number: int) -> None:
        with psycopg.connect(at.dsn, autocommit=True) as connection:
            while time.monotonic() < stop_at:
                connection.execute(_INSERT, (topic, "k", b"x" * 100), prepare=True)
                done[number] += 1

    threads = [threading.Thread(target=write, args=(number,)) for number in range(writers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return sum(done) / seconds


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--writers", type=int, nargs="*", default=[1, 4, 16])
    options = parser.parse_args()
    console = Console()
    console.print(machine())
    table = Table(title=f"commits/s, median of {options.rounds} rounds of {options.seconds:.0f} s")
    for column in ("writers", "without", "with the trigger", "ratio"):
        table.add_column(column, justify="right")
    with services() as running:
        for writers in options.writers:
            rounds = [
                tuple(commits(running, writers, options.seconds, notify=notify) for notify in (False, True))
                for _ in range(options.rounds)
            ]
            without, with_trigger = (statistics.median(column) for column in zip(*rounds, strict=True))
            table.add_row(str(writers), f"{without:,.0f}", f"{with_trigger:,.0f}", f"{with_trigger / without:.0%}")
    console.print(table)


if __name__ == "__main__":
    main()
