"""What history and archive cost a delivery (`make bench-retention`).

The speed of a machine drifts by more than they cost. So the three kinds of harvester drain the same records on the same
services, one right after the other, in another order each round; the result is the median of the rounds' quotients.
"""

from __future__ import annotations

import argparse
import statistics

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.stage import VALUE_BYTES, Services, fill, fresh_topic, harvest, machine, services
from outbox_core.retention.archive import archive_statements, drop_archive_statements
from outbox_core.schema import TableName, create_history_sql, events_beside, statistics_beside

_KEYS = 10_000
_WARM_UP = 100_000
_NAME = TableName("outbox")
_KINDS = {"bare": [], "metrics and history": ["metrics=on"], "archive": ["retention=archive"]}


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
                rates = {kind: _one_run(place, kind, delivery, options.rows) for kind in turned}
                rounds.append(rates)
            _print(console, f"{delivery}, {options.rows:,} records, {VALUE_BYTES}-byte values, records/s", rounds)


def _one_run(place: Services, kind: str, delivery: str, rows: int) -> float:
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
    rate: float = harvest(place, delivery, rows=rows, limits=_KINDS[kind])["rate"]
    return rate


def _print(console: Console, title: str, rounds: list[dict[str, float]]) -> None:
    table = Table(title=title)
    for kind in _KINDS:
        table.add_column(kind, justify="right")
    for rates in rounds:
        shares = (f"{rates[kind]:,.0f} ({rates[kind] / rates['bare']:.0%})" for kind in _KINDS)
        table.add_row(*shares)
    console.print(table)
    for kind in list(_KINDS)[1:]:
        share = statistics.median(rates[kind] / rates["bare"] for rates in rounds)
        console.print(f"{kind}: {share:.1%} of the bare rate")


if __name__ == "__main__":
    main()
