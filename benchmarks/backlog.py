"""A backlog of millions: throughput and memory of one harvester that drains it (`make bench-backlog`).

Prints, for each delivery mode, the rates over the first and the last tenth of the records, their ratio, and the highest
resident set; writes docs/images/throughput-over-backlog.png. Then the same with values of 1 MB, for the memory.
"""

from __future__ import annotations

import argparse
import itertools
from typing import Any

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks import charts
from benchmarks.stage import VALUE_BYTES, Services, fill, fresh_topic, harvest, machine, services
from benchmarks.throughput import mark_and_delete, produce, produce_in_transactions, scan_and_delete

_LIMIT_ROWS = 400_000
_LARGE_BYTES = 1_000_000
_KEYS = 10_000
_LINGER = 25  # readings that a point of the chart is the mean of


def fill_with_large(at: Services, topic: str, rows: int) -> None:
    """Fill an outbox with incompressible values of just under 1 MB."""
    fill(at.dsn, topic, rows=0, keys=1)
    with psycopg.connect(at.dsn, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) SELECT %s, n::text, "
            "(SELECT string_agg(decode(md5(n::text || part), 'hex'), '') FROM generate_series(1, %s) AS part) "
            "FROM generate_series(1, %s) AS n",
            (topic, _LARGE_BYTES // 16 - 1000, rows),
        )


def rate_between(progress: list[list[float]], first: float, last: float) -> float:
    """Return the records/s while the number of published records went from `first` to `last`."""
    return (last - first) / (_time_of(progress, last) - _time_of(progress, first))


def _time_of(progress: list[list[float]], count: float) -> float:
    """Interpolate the time at which `count` records were published from the readings around it."""
    for (began, before), (ended, after) in itertools.pairwise(progress):
        if before <= count <= after:
            return began + (ended - began) * (count - before) / max(1, after - before)
    return progress[-1][0]


def raw_limit(at: Services, delivery: str) -> float:
    """Return the records/s of reading and deleting, then producing, one after the other, each alone."""
    fill(at.dsn, fresh_topic("raw"), rows=_LIMIT_ROWS, keys=_KEYS)
    if delivery == "at-least-once":
        database, broker = mark_and_delete(at.dsn, _LIMIT_ROWS), produce
    else:
        database, broker = scan_and_delete(at.dsn, _LIMIT_ROWS), produce_in_transactions
    return 1 / (1 / database + 1 / broker(at.bootstrap, fresh_topic("raw"), _LIMIT_ROWS, _KEYS))


def drained(at: Services, delivery: str, rows: int) -> dict[str, Any]:
    """Fill and drain; return the measurements with the figures of table and chart."""
    limit = raw_limit(at, delivery)
    fill(at.dsn, fresh_topic("backlog"), rows=rows, keys=_KEYS)
    measured = harvest(at, delivery, rows=rows)
    progress = [[0.0, 0], *measured["progress"], [measured["seconds"], rows]]
    first, last = rate_between(progress, 0, rows / 10), rate_between(progress, rows * 0.9, rows)
    return measured | {"limit": limit, "first": first, "last": last, "progress": progress}


def over_backlog(measured: dict[str, Any], rows: int) -> list[tuple[float, float]]:
    """Return points of the chart: millions left, and the rate there."""
    progress = measured["progress"]
    step = max(1, len(progress) // _LINGER)
    pairs = zip(progress[::step], progress[step::step], strict=False)
    return [((rows - after) / 1e6, (after - before) / (ended - began)) for (began, before), (ended, after) in pairs]


def memory_over_backlog(measured: dict[str, Any], rows: int) -> list[tuple[float, float]]:
    """Return points of the chart: millions left, and the resident set there."""
    seconds = measured["seconds"]
    share = ((min(1.0, at / seconds), mib) for at, mib in measured["memory"] if at >= 0)
    return [(rows * (1 - done) / 1e6, mib) for done, mib in share]


def main() -> None:
    """Measure, print tables, draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--large-rows", type=int, default=2_000)
    parser.add_argument("--modes", nargs="*", default=["at-least-once", "exactly-once"])
    options = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    table = Table(title=f"{options.rows:,} records, {VALUE_BYTES}-byte values, {_KEYS:,} keys; records/s")
    for column in ("delivery", "limit", "harvester", "of limit", "first tenth", "last tenth", "ratio", "RSS MiB"):
        table.add_column(column, justify="right")
    large = Table(title=f"{options.large_rows:,} records of 1 MB")
    for column in ("delivery", "MB/s", "RSS MiB", "growth in the 2nd half"):
        large.add_column(column, justify="right")
    results = {}
    with services() as running:
        for delivery in options.modes:
            result = results[delivery] = drained(running, delivery, options.rows)
            first, last = result["first"], result["last"]
            rates = [f"{result[name]:,.0f}" for name in ("limit", "rate")]
            ends = [f"{first:,.0f}", f"{last:,.0f}", f"{last / first:.0%}", f"{result['rss_mib']:.0f}"]
            console.print(f"{delivery}: {' '.join([*rates, *ends])}")  # so that a long run shows something
            table.add_row(delivery, *rates, f"{result['rate'] / result['limit']:.0%}", *ends)
            if options.large_rows:
                fill_with_large(running, fresh_topic("large"), options.large_rows)
                heavy = harvest(running, delivery, rows=options.large_rows)
                rss = f"{heavy['rss_mib']:.0f}", f"{heavy['rss_growth_mib']:+.0f}"
                large.add_row(delivery, f"{heavy['rate'] * _LARGE_BYTES / 1e6:,.0f}", *rss)
    console.print(table)
    console.print(large)
    console.print(
        charts.backlog(
            {delivery: over_backlog(result, options.rows) for delivery, result in results.items()},
            {delivery: memory_over_backlog(result, options.rows) for delivery, result in results.items()},
        )
    )


if __name__ == "__main__":
    main()
