"""The cost of history and archive for a delivery (`make bench-retention`).

The speed of a machine drifts by more than they cost. So the three kinds of harvester drain the same records on the same
services, one right after the other, in another order each round; the result is the median of the rounds' quotients.
Beside the rate stands the CPU time of harvester and database together, which other work on the machine disturbs less.
"""

from __future__ import annotations

import argparse
import statistics
from typing import NamedTuple

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.stage import VALUE_BYTES, Services, cpu_seconds, fill, fresh_topic, harvest, machine, services
from outbox_core.retention.archive import archive_statements, drop_archive_statements
from outbox_core.schema import TableName, create_history_sql, events_beside, statistics_beside

_KEYS = 10_000
_WARM_UP = 100_000
_NAME = TableName("outbox")
_KINDS = {"bare": [], "metrics and history": ["metrics=on"], "archive": ["retention=archive"]}


class _Run(NamedTuple):
    """The records per second of a drain, and the microseconds of CPU that each took."""

    rate: float
    cpu: float


def main() -> None:
    """Measure and print a table for each delivery."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--rows", type=int, default=600_000)
    parser.add_argument("--delivery", choices=("exactly-once", "at-least-once"), action="append")
    options = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    with services() as place:
        for delivery in options.delivery or ("at-least-once", "exactly-once"):
            _one_run(place, "bare", delivery, min(_WARM_UP, options.rows))
            rounds = []
            for number in range(options.rounds):
                kinds = list(_KINDS)
                turned = kinds[number % 3 :] + kinds[: number % 3]
                rounds.append({kind: _one_run(place, kind, delivery, options.rows) for kind in turned})
            what = "records/s (microseconds of CPU for each)"
            _print(console, f"{delivery}, {options.rows:,} records, {VALUE_BYTES}-byte values: {what}", rounds)


def _one_run(place: Services, kind: str, delivery: str, rows: int) -> _Run:
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        for statement in drop_archive_statements(_NAME):
            connection.execute(statement)
        for table in (statistics_beside(_NAME), events_beside(_NAME)):
            connection.execute(f"DROP TABLE IF EXISTS {table.quoted}")
    fill(place.dsn, fresh_topic("bench"), rows=rows, keys=_KEYS)
    with psycopg.connect(place.dsn, autocommit=True) as connection:
        if kind == "metrics and history":
            connection.execute(create_history_sql(_NAME))
        if kind == "archive":
            for statement in archive_statements(_NAME):
                connection.execute(statement)
    before = cpu_seconds(place.postgres_pid)
    measured = harvest(place, delivery, rows=rows, limits=_KINDS[kind])
    seconds = cpu_seconds(place.postgres_pid) - before + measured["cpu_seconds"]
    return _Run(measured["rate"], seconds / rows * 1_000_000)


def _print(console: Console, title: str, rounds: list[dict[str, _Run]]) -> None:
    table = Table(title=title)
    for kind in _KINDS:
        table.add_column(kind, justify="right")
    for runs in rounds:
        table.add_row(*(f"{runs[kind].rate:,.0f} ({runs[kind].cpu:.2f})" for kind in _KINDS))
    console.print(table)
    for kind in list(_KINDS)[1:]:
        rate = statistics.median(runs[kind].rate / runs["bare"].rate for runs in rounds)
        cpu = statistics.median(runs[kind].cpu / runs["bare"].cpu for runs in rounds)
        console.print(f"{kind}: {rate:.1%} of the bare rate, {cpu:.1%} of its CPU time")


if __name__ == "__main__":
    main()
