"""Throughput of a delivery, in turn with another version of the code (`make bench-versions OTHER=...`).

The speed of a machine drifts by more than versions differ. So both drain the same records on the same services, one
right after the other, and every second round in the other order; the result is the median of the rounds' quotients.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.stage import ROOT, VALUE_BYTES, Services, fill, fresh_topic, harvest, machine, services

_KEYS = 10_000
_WARM_UP = 100_000


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of the version to compare with (git worktree add ...)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--delivery", choices=("exactly-once", "at-least-once"), default="exactly-once")
    options = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    with services() as place:
        _one_run(place, ROOT, options.delivery, min(_WARM_UP, options.rows))
        rounds = []
        for number in range(options.rounds):
            rates = {}
            for checkout in (ROOT, options.other) if number % 2 else (options.other, ROOT):
                rates[checkout] = _one_run(place, checkout, options.delivery, options.rows)
            rounds.append((rates[options.other], rates[ROOT]))
    sizes = f"{options.rows:,} records, {VALUE_BYTES}-byte values, {_KEYS:,} keys"
    table = Table(title=f"{options.delivery}, {sizes}, records/s")
    for column in ("other", "this", "of the other"):
        table.add_column(column, justify="right")
    for other, this in rounds:
        table.add_row(f"{other:,.0f}", f"{this:,.0f}", f"{this / other:.0%}")
    console.print(table)
    console.print(f"this version, of the other's rate: {statistics.median(this / other for other, this in rounds):.1%}")


def _one_run(place: Services, checkout: Path, delivery: str, rows: int) -> float:
    fill(place.dsn, fresh_topic("bench"), rows=rows, keys=_KEYS)
    rate: float = harvest(place, delivery, rows=rows, checkout=checkout)["rate"]
    return rate


if __name__ == "__main__":
    main()
