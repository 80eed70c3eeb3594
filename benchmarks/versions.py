"""Throughput of a delivery, in turn with another version of the code (`make bench-versions OTHER=...`).

The speed of a machine drifts by more than versions differ. So both drain the same records on the same services, one
right after the other, and every second round in the other order; the result is the median of the rounds' quotients.
Beside the rates stand the microseconds of CPU that a record costs in harvester, PostgreSQL and broker: they drift less.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from benchmarks.stage import ROOT, VALUE_BYTES, Services, cpu_seconds, fill, fresh_topic, harvest, machine, services

_KEYS = 10_000
_WARM_UP = 100_000


class Run(NamedTuple):
    """One drain: records/s, and microseconds of CPU for each record."""

    rate: float
    harvester: float
    postgres: float
    broker: float


def main() -> None:
    """Measure and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("other", type=Path, help="a checkout of the version to compare with (git worktree add ...)")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--rows", type=int, default=400_000)
    parser.add_argument("--keys", type=int, default=_KEYS)
    parser.add_argument("--delivery", choices=("exactly-once", "at-least-once"), default="exactly-once")
    options = parser.parse_args()
    console = Console(width=120)
    console.print(machine())
    with services() as place:
        _one_run(place, ROOT, options.delivery, min(_WARM_UP, options.rows), options.keys)
        rounds = []
        for number in range(options.rounds):
            runs = {}
            for checkout in (ROOT, options.other) if number % 2 else (options.other, ROOT):
                runs[checkout] = _one_run(place, checkout, options.delivery, options.rows, options.keys)
            rounds.append((runs[options.other], runs[ROOT]))
    sizes = f"{options.rows:,} records, {VALUE_BYTES}-byte values, {options.keys:,} keys"
    table = Table(title=f"{options.delivery}, {sizes}")
    for column in ("", "records/s", *(f"{part}, µs" for part in Run._fields[1:]), "of the other"):
        table.add_column(column, justify="right")
    for other, this in rounds:
        table.add_row("other", *_cells(other), "")
        table.add_row("this", *_cells(this), f"{this.rate / other.rate:.0%}", end_section=True)
    for name, runs_of_one in zip(("other", "this"), zip(*rounds, strict=True), strict=True):
        table.add_row(f"median, {name}", *_cells(Run(*map(statistics.median, zip(*runs_of_one, strict=True)))), "")
    console.print(table)
    ratio = statistics.median(this.rate / other.rate for other, this in rounds)
    console.print(f"this version, of the other's rate: {ratio:.1%}")


def _cells(run: Run) -> list[str]:
    return [f"{run.rate:,.0f}", *(f"{each:.1f}" for each in run[1:])]


def _one_run(place: Services, checkout: Path, delivery: str, rows: int, keys: int) -> Run:
    fill(place.dsn, fresh_topic("bench"), rows=rows, keys=keys)
    services_pids = place.postgres_pid, place.broker_pid
    before = [cpu_seconds(pid) for pid in services_pids]
    drained = harvest(place, delivery, rows=rows, checkout=checkout)
    after = [cpu_seconds(pid) for pid in services_pids]
    used = [drained["cpu_seconds"], *(end - begin for begin, end in zip(before, after, strict=True))]
    return Run(drained["rate"], *(1e6 * seconds / rows for seconds in used))


if __name__ == "__main__":
    main()
