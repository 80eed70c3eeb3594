"""Exactly once into a topic that takes 64 KiB a batch, beside one that takes 1 MiB (`make bench-small-topic`).

In each round both topics get the same rows, one after the other, and the order changes from round to round. The raw
limits of `benchmarks.throughput` are taken right before each harvest: *database*, *produce* (the same records in
transactions of a bare producer, into a topic of the same size, with batches that fit it) and, one after the other,
1 / (1/a + 1/b). The last line is the result: the part of the rate at 1 MiB that is left at 64 KiB.
"""

from __future__ import annotations

import argparse
import statistics

from rich.console import Console
from rich.table import Table

from benchmarks.stage import VALUE_BYTES, Services, fill, fresh_topic, harvest, machine, make_topic, services
from benchmarks.throughput import produce_in_transactions, scan_and_delete
from outbox_core.kafka.batch_sizes import LARGEST_BATCH_BYTES

_SMALL_BYTES = 64 * 2**10
_LARGE_BYTES = 2**20
_KEYS = 10_000
_WARM_UP = 100_000
_COLUMNS = ("max.message.bytes", "database", "produce", "limit", "harvester", "of limit")


def _one_run(place: Services, max_bytes: int, rows: int) -> dict[str, float]:
    """Measure the raw limits, then a harvest of the same size."""
    topic, raw = (
        make_topic(place.bootstrap, fresh_topic(prefix), {"max.message.bytes": str(max_bytes)})
        for prefix in ("bench", "raw")
    )
    batch_bytes = min(max_bytes, LARGEST_BATCH_BYTES)
    fill(place.dsn, topic, rows=rows, keys=_KEYS)
    database = scan_and_delete(place.dsn, rows)
    produce = produce_in_transactions(place.bootstrap, raw, rows, _KEYS, batch_bytes=batch_bytes)
    fill(place.dsn, topic, rows=rows, keys=_KEYS)
    rate = harvest(place, "exactly-once", rows=rows)["rate"]
    return {"database": database, "produce": produce, "limit": 1 / (1 / database + 1 / produce), "harvester": rate}


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--rows", type=int, default=400_000)
    options = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    runs: dict[int, list[dict[str, float]]] = {_SMALL_BYTES: [], _LARGE_BYTES: []}
    with services() as place:
        _one_run(place, _LARGE_BYTES, min(_WARM_UP, options.rows))
        for number in range(options.rounds):
            for max_bytes in sorted(runs, reverse=number % 2 == 1):
                runs[max_bytes].append(_one_run(place, max_bytes, options.rows))
    console.print(_table(runs, options.rows))
    shares = [small["harvester"] / large["harvester"] for small, large in zip(*runs.values(), strict=True)]
    console.print(
        f"64 KiB, of the rate at 1 MiB: {statistics.median(shares):.0%} "
        f"(median of the rounds' {', '.join(f'{share:.0%}' for share in shares)}); goal 50%"
    )


def _table(runs: dict[int, list[dict[str, float]]], rows: int) -> Table:
    rounds = len(runs[_SMALL_BYTES])
    table = Table(
        title=f"exactly once, {rows:,} records, {VALUE_BYTES}-byte values, {_KEYS:,} keys, "
        f"medians of {rounds} rounds, records/s"
    )
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for max_bytes, results in runs.items():
        medians = [f"{statistics.median(result[name] for result in results):,.0f}" for name in results[0]]
        share = statistics.median(result["harvester"] / result["limit"] for result in results)
        table.add_row(f"{max_bytes:,}", *medians, f"{share:.0%}")
    return table


if __name__ == "__main__":
    main()
