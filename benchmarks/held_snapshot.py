"""Throughput while an old snapshot is open, over the records harvested (`make bench-snapshot`).

A REPEATABLE READ transaction that has read the outbox stays open for the whole run, so that vacuum can remove none
of the rows that are deleted. Each delivery mode drains a filled table twice, with the settled floor and without it.

*Start* is the rate from the 20,000th record (the process has warmed up) to the 100,000th; *late* is the rate from the
300,000th to the 400,000th. The goal is late >= 90% of start. The chart is of the last round.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path

import matplotlib as mpl
import psycopg
from matplotlib import pyplot as plt
from rich.console import Console
from rich.table import Table

from benchmarks.stage import ROOT, Services, fill, fresh_topic, machine, services
from outbox_core.config import HarvestConfig, Limits
from outbox_core.election.lease import now
from outbox_core.events import Event, LeaderAcquired, MeterRead
from outbox_core.harvest import Harvester
from outbox_core.stores.interface import SequenceSnapshot
from outbox_core.stores.postgres.sequence import PostgresSequence
from outbox_core.stores.postgres.store import PostgresStore

_ROWS = 420_000
_KEYS = 10_000
_START = (20_000, 100_000)
_LATE = (300_000, 400_000)
_POINT_EVERY = 20_000
_MODES = ("at-least-once", "exactly-once")
_CHART = ROOT / "docs" / "images" / "held-snapshot.png"

Progress = list[tuple[float, int]]
"""(seconds since leadership, records published so far)"""


class _Unusable(PostgresSequence):
    """A sequence that proves nothing."""

    def snapshot(self) -> SequenceSnapshot:
        return super().snapshot()._replace(unusable="the benchmark compares")


class _StoreWithoutFloor(PostgresStore):
    """A store without a settled floor."""

    def __init__(self, dsn: str) -> None:
        super().__init__(dsn)
        self.sequence = _Unusable(self.table)


def _drain(dsn: str, bootstrap: str, delivery: str, *, floor: bool) -> None:
    """Drain the table and print the progress as JSON, in a process of its own."""
    began = [0.0]
    progress: Progress = [(0.0, 0)]

    def on_event(event: Event) -> None:
        if isinstance(event, LeaderAcquired):
            began[0] = now()
        elif isinstance(event, MeterRead):
            progress.append((now() - began[0], event.stats.total_count))

    config = HarvestConfig(
        data_source=dsn,
        base_kafka_config={"bootstrap.servers": bootstrap},
        delivery=delivery,
        limits=Limits(min_metrics_interval="100ms"),
    )
    kind = PostgresStore if floor else _StoreWithoutFloor
    with Harvester(config, on_event, drain=True, store_factory=lambda: kind(dsn)) as harvester:
        harvester.join()
    json.dump(progress, sys.stdout)


def _run(services: Services, delivery: str, *, floor: bool) -> Progress:
    """Drain a full table under a held snapshot."""
    fill(services.dsn, fresh_topic("held"), rows=_ROWS, keys=_KEYS)
    with psycopg.connect(services.dsn) as holder:
        holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
        holder.execute("SELECT FROM outbox LIMIT 1")
        arguments = [services.dsn, services.bootstrap, delivery, "floor" if floor else "none"]
        command = [sys.executable, "-m", "benchmarks.held_snapshot", "--drain", *arguments]
        done = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE, text=True)
    progress: Progress = [tuple(point) for point in json.loads(done.stdout)]
    return progress


def _moment(progress: Progress, count: int) -> float:
    """Interpolate the time at which the `count`-th record was published from the meter's readings."""
    for (time, seen), (later, more) in pairwise(progress):
        if seen <= count <= more and more > seen:
            return time + (later - time) * (count - seen) / (more - seen)
    raise SystemExit(f"only {progress[-1][1]} records were counted")


def _rate(progress: Progress, between: tuple[int, int]) -> float:
    first, last = between
    return (last - first) / (_moment(progress, last) - _moment(progress, first))


def _draw(runs: dict[str, Progress], path: Path) -> None:
    figure, axes = plt.subplots(figsize=(8, 4.5))
    for name, progress in runs.items():
        counts = range(_POINT_EVERY, _LATE[1] + 1, _POINT_EVERY)
        rates = [_rate(progress, (count - _POINT_EVERY, count)) for count in counts]
        style = {"linestyle": "--", "alpha": 0.7} if "without" in name else {"linewidth": 2}
        axes.plot([count / 1000 for count in counts], [rate / 1000 for rate in rates], label=name, **style)
    axes.set(
        xlabel="records harvested since the snapshot was taken, thousands",
        ylabel="thousand records/s",
        title="Throughput while an old snapshot stays open",
    )
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, bbox_inches="tight")


def main() -> None:
    """Measure, print a table, draw the chart."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--chart", type=Path, default=_CHART)
    parser.add_argument("--drain", nargs=4, metavar=("DSN", "BOOTSTRAP", "DELIVERY", "FLOOR"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.drain:
        dsn, bootstrap, delivery, floor = options.drain
        _drain(dsn, bootstrap, delivery, floor=floor == "floor")
        return
    mpl.use("Agg")
    console = Console(width=110)
    console.print(machine())
    table = Table(title=f"Records/s under a held snapshot, median of {options.rounds} rounds")
    for column in ("delivery", "settled floor", "start", "late", "late of start"):
        table.add_column(column, justify="right")
    charted: dict[str, Progress] = {}
    with ExitStack() as stack:
        running = stack.enter_context(services())
        for delivery in _MODES:
            for floor in (True, False):
                runs = [_run(running, delivery, floor=floor) for _ in range(options.rounds)]
                charted[delivery if floor else f"{delivery}, without the floor"] = runs[-1]
                start, late = ([_rate(run, part) for run in runs] for part in (_START, _LATE))
                ratio = statistics.median(b / a for a, b in zip(start, late, strict=True))
                medians = [f"{statistics.median(rates):,.0f}" for rates in (start, late)]
                table.add_row(delivery, "yes" if floor else "no", *medians, f"{ratio:.0%}")
    console.print(table)
    _draw(charted, options.chart)


if __name__ == "__main__":
    main()
