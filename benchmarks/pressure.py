"""A harvester under pressure, as it runs for days: `make bench-pressure` (MINUTES=30 for each scenario and delivery).

A writer commits 2,000 records/s, a harvester publishes them, a consumer of committed records notes when they arrive,
and a bystander updates one row of another table every 50 ms. Beside the quiet scenario, which the others are compared
with:

- *held snapshot*: a REPEATABLE READ transaction that has looked at the outbox stays open, so vacuum removes nothing;
- *readers*: four sessions count the outbox again and again, in queries that keep their snapshots for 120 s;
- *overload*: for a minute, at most a tenth of the time, 1.5 times as much is written as a harvester drains from a full
  table here, then 2,000/s again;
- *burst*: a million records in one transaction; they are counted and not timed, as their transaction takes seconds.

Latency is from right before a commit to the consumer. The backlog is what was committed and has not arrived. Dead rows,
sizes and runs of autovacuum are of the outbox alone; WAL is of the whole server, the writer's and the bystander's
included, full pages too. Writes all samples as JSON and a chart for each delivery.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from multiprocessing.queues import Queue
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from rich.console import Console
from rich.table import Table

from benchmarks.failover import tail
from benchmarks.stage import ROOT, VALUE_BYTES, Services, fill, fresh_topic, harvest, machine, services

RATE = 2_000
SCENARIOS = ("quiet", "held snapshot", "readers", "overload", "burst")
DELIVERIES = ("at-least-once", "exactly-once")
_KEYS = 10_000
_TICK_SECONDS = 0.01  # between the writer's transactions
_LARGEST_TRANSACTION = 5_000
_BYSTANDER_SECONDS = 0.05
_READERS = 4
_READER_SECONDS = 120.0
_OVERLOAD = 1.5
_OVERLOAD_SECONDS = 60.0
_DISTURBED_AFTER = 0.2  # of the time: when overload and burst begin
_SAMPLES = 300  # of a scenario, but none is shorter than a second
_GENEROUS_SECONDS = 120.0  # for a process to start, or to tell
_UNTIMED = "untimed"  # the value of records whose latency does not count
_INSERT = (
    "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) SELECT %(topic)s, 'key-' || (%(first)s + n) %% %(keys)s,"
    f" convert_to(rpad(%(value)s, {VALUE_BYTES}, ' '), 'UTF8') FROM generate_series(1, %(count)s) AS n"
)
_STATE = (
    "SELECT n_dead_tup, autovacuum_count, pg_table_size(relid), pg_indexes_size(relid),"
    " pg_wal_lsn_diff(pg_current_wal_insert_lsn(), '0/0')::bigint FROM pg_stat_user_tables WHERE relname = 'outbox'"
)
_SPAWN = multiprocessing.get_context("spawn")


class Arrived(NamedTuple):
    """The records of an interval at the consumer: all so far, and the latencies of those in it, in milliseconds."""

    total: int
    p50: float
    p99: float


_NOTHING_ARRIVED = Arrived(0, 0.0, 0.0)


@dataclass(frozen=True)
class Sample:
    """The state at a moment; rates, latencies (ms) and the bystander's (ms) are of the time since the last sample."""

    second: float
    committed: int
    received: int
    rate: float
    p50: float
    p99: float
    dead_rows: int
    table_bytes: int
    index_bytes: int
    wal_bytes: int
    autovacuums: int
    bystander_p50: float
    bystander_p99: float

    @property
    def backlog(self) -> int:
        """Records that were committed and have not arrived."""
        return self.committed - self.received


@dataclass(frozen=True)
class Plan:
    """A scenario of one run: how long it takes, the rate that overload writes, and the size of the burst."""

    scenario: str
    delivery: str
    seconds: float
    overload_rate: float
    burst: int

    @property
    def disturbed_at(self) -> float:
        """The second at which overload or burst begins."""
        return self.seconds * _DISTURBED_AFTER

    def rate_at(self, second: float) -> float:
        """Return the records/s to write."""
        ends_at = self.disturbed_at + min(_OVERLOAD_SECONDS, self.seconds / 10)
        return self.overload_rate if self.scenario == "overload" and self.disturbed_at <= second < ends_at else RATE


def percentiles(latencies: Sequence[float]) -> tuple[float, float]:
    """Return p50 and p99, or zeros if there is nothing."""
    if len(latencies) < 2:
        return (latencies[0], latencies[0]) if latencies else (0.0, 0.0)
    cuts = statistics.quantiles(latencies, n=100, method="inclusive")
    return cuts[49], cuts[98]


# -- the processes beside the harvester


def write(dsn: str, topic: str, plan: Plan, committed: Any) -> None:
    """Commit records at the plan's rate until its time is over; `committed` counts them. A process of its own."""
    began = last = time.monotonic()
    owed, sent = 0.0, 0
    with psycopg.connect(dsn, autocommit=True) as connection:
        while (time_now := time.monotonic()) - began < plan.seconds:
            rate = plan.rate_at(time_now - began)
            owed = min(owed + rate * (time_now - last), rate)  # what cannot be written within a second is left out
            last = time_now
            count = min(int(owed), _LARGEST_TRANSACTION)
            if count:
                parameters = {"topic": topic, "first": sent, "keys": _KEYS, "count": count}
                connection.execute(_INSERT, {**parameters, "value": repr(time.monotonic())}, prepare=True)
                sent, owed = sent + count, owed - count
                with committed.get_lock():
                    committed.value += count
            if owed < 1:
                time.sleep(_TICK_SECONDS)


def consume(at: Services, topic: str, interval: float, told: Queue[Arrived | None], done: Any) -> None:
    """Tell what arrives in each interval, and at last the percentiles of the whole time. A process of its own."""
    consumer = tail(at, topic)
    total, everything, recent, tell_at = 0, array("d"), array("d"), 0.0
    told.put(_NOTHING_ARRIVED)  # it follows the topic
    while not done.is_set():
        values = [message.value() for message in consumer.consume(10_000, 0.001) if message.error() is None]
        now = time.monotonic()
        total += len(values)
        recent.extend(1000 * (now - float(value)) for value in values if not value.startswith(_UNTIMED.encode()))
        if now >= tell_at:
            told.put(Arrived(total, *percentiles(recent)))
            everything.extend(recent)
            recent, tell_at = array("d"), now + interval
    told.put(None)  # what follows is about the whole time
    told.put(Arrived(total, *percentiles(everything + recent)))
    consumer.close()


class Bystander(threading.Thread):
    """An application that has nothing to do with the outbox: one small transaction after the other."""

    def __init__(self, dsn: str) -> None:
        super().__init__(daemon=True)
        self.latencies: list[float] = []
        self.stopping = threading.Event()
        self._dsn = dsn

    def run(self) -> None:
        """Update a row of the thousand, again and again."""
        with psycopg.connect(self._dsn, autocommit=True) as connection:
            connection.execute("CREATE TABLE IF NOT EXISTS bystander (id int PRIMARY KEY, number int NOT NULL)")
            connection.execute(
                "INSERT INTO bystander SELECT n, 0 FROM generate_series(0, 999) AS n ON CONFLICT DO NOTHING"
            )
            number = 0
            while not self.stopping.wait(_BYSTANDER_SECONDS):
                number += 1
                began = time.perf_counter()
                connection.execute(
                    "UPDATE bystander SET number = number + 1 WHERE id = %s", (number % 1000,), prepare=True
                )
                self.latencies.append(1000 * (time.perf_counter() - began))


# -- what disturbs


@contextmanager
def disturbance(dsn: str, topic: str, plan: Plan, committed: Any) -> Iterator[None]:
    """Do to the database, for the time of the context, what the scenario is about."""
    with ExitStack() as stack:
        if plan.scenario == "held snapshot":
            holder = stack.enter_context(psycopg.connect(dsn))
            holder.isolation_level = psycopg.IsolationLevel.REPEATABLE_READ
            holder.execute("SELECT FROM outbox LIMIT 1")
        elif plan.scenario == "readers":
            for number in range(_READERS):
                reader = psycopg.connect(dsn, autocommit=True)
                stack.callback(_end_reader, reader, _started(_read_again_and_again, reader, plan.seconds, number))
        elif plan.scenario == "burst":
            _started(_burst, dsn, topic, plan, committed)
        yield


def _started(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _read_again_and_again(connection: psycopg.Connection[Any], seconds: float, number: int) -> None:
    lasts = min(_READER_SECONDS, seconds / 3)
    time.sleep(lasts * number / _READERS)  # so that at any time some snapshot is old
    while not connection.closed:
        try:
            connection.execute("SELECT pg_sleep(%s) FROM (SELECT count(*) FROM outbox) AS counted", (lasts,))
        except psycopg.Error:
            return  # the end: it was cancelled


def _end_reader(connection: psycopg.Connection[Any], thread: threading.Thread) -> None:
    while thread.is_alive():  # between two queries there is nothing to cancel
        connection.cancel()
        thread.join(0.1)
    connection.close()


def _burst(dsn: str, topic: str, plan: Plan, committed: Any) -> None:
    time.sleep(plan.disturbed_at)
    with psycopg.connect(dsn) as connection:
        parameters = {"topic": topic, "first": 0, "keys": _KEYS, "count": plan.burst, "value": _UNTIMED}
        connection.execute(_INSERT, parameters)
    with committed.get_lock():
        committed.value += plan.burst


# -- one run


@dataclass(frozen=True)
class Run:
    """One scenario with one delivery: samples, the percentiles of its whole time, and when all had arrived."""

    plan: Plan
    samples: list[Sample]
    p50: float
    p99: float
    bystander_p50: float
    bystander_p99: float
    caught_up_seconds: float | None  # after the writer's end; None if it did not within the time of the scenario

    @property
    def wal_bytes_per_record(self) -> float:
        """The WAL of the whole server for each committed record."""
        return (self.samples[-1].wal_bytes - self.samples[0].wal_bytes) / max(1, self.samples[-1].committed)

    def most(self, name: str) -> float:
        """Return the highest value of a sample's attribute."""
        return max(getattr(sample, name) for sample in self.samples)


def run(at: Services, plan: Plan) -> Run:
    """Run one scenario on an empty table of its own."""
    topic = fresh_topic("pressure")
    fill(at.dsn, topic, rows=0, keys=1)
    interval = max(1.0, plan.seconds / _SAMPLES)
    committed, told, done = _SPAWN.Value("q", 0), _SPAWN.Queue(), _SPAWN.Event()
    consumer = _SPAWN.Process(target=consume, args=(at, topic, interval, told, done))
    writer = _SPAWN.Process(target=write, args=(at.dsn, topic, plan, committed))
    bystander = Bystander(at.dsn)
    with ExitStack() as stack:
        stack.callback(consumer.join)
        stack.callback(done.set)
        consumer.start()
        told.get(timeout=_GENEROUS_SECONDS)
        stack.enter_context(_harvester(at, plan.delivery))
        _publish_one(at, topic, told, committed)
        stack.callback(bystander.stopping.set)
        bystander.start()
        observer = Observer(at.dsn, told, committed, bystander)
        with disturbance(at.dsn, topic, plan, committed):
            stack.callback(writer.join)
            writer.start()
            while writer.is_alive():
                observer.sample(interval)
            if writer.exitcode:
                raise RuntimeError(f"the writer failed with exit code {writer.exitcode}, so the run means nothing")
            ended = time.monotonic()
            while not observer.has_all and time.monotonic() < ended + plan.seconds:
                observer.sample(interval)
        caught_up = time.monotonic() - ended if observer.has_all else None
        done.set()
        last = observer.last_arrived()
    return Run(plan, observer.samples, last.p50, last.p99, *percentiles(bystander.latencies), caught_up)


@contextmanager
def _harvester(at: Services, delivery: str) -> Iterator[None]:
    command = [sys.executable, "-m", "outbox_core", "harvest", "--dsn", at.dsn, "--bootstrap-servers", at.bootstrap]
    process = subprocess.Popen([*command, "--delivery", delivery, "--log-level", "error"], cwd=ROOT)
    try:
        yield
    finally:
        process.terminate()
        process.wait()


def _publish_one(at: Services, topic: str, told: Queue[Arrived | None], committed: Any) -> None:
    """Wait until the harvester has published a record: it leads, then."""
    with psycopg.connect(at.dsn, autocommit=True) as connection:
        connection.execute(_INSERT, {"topic": topic, "first": 0, "keys": _KEYS, "count": 1, "value": _UNTIMED})
    committed.value = 1
    while (arrived := told.get(timeout=_GENEROUS_SECONDS)) is None or not arrived.total:
        pass


class Observer:
    """The samples of a run."""

    def __init__(self, dsn: str, told: Queue[Arrived | None], committed: Any, bystander: Bystander) -> None:
        self.samples: list[Sample] = []
        self._connection = psycopg.connect(dsn, autocommit=True)
        self._told = told
        self._committed = committed
        self._bystander = bystander
        self._seen_of_bystander = 0
        self._began = self._last = time.monotonic()

    @property
    def has_all(self) -> bool:
        """True if everything that was committed has arrived."""
        return bool(self.samples) and self.samples[-1].backlog <= 0

    def sample(self, interval: float) -> None:
        """Wait for the interval's end, and note the state."""
        time.sleep(interval)
        arrived = self._newest()
        committed = self._committed.value
        state = self._connection.execute(_STATE).fetchone()
        dead, autovacuums, table, index, wal = state or (0, 0, 0, 0, 0)
        of_bystander = self._bystander.latencies[self._seen_of_bystander :]
        self._seen_of_bystander += len(of_bystander)
        now, before = time.monotonic(), self.samples[-1].received if self.samples else 0
        rate, self._last = (arrived.total - before) / (now - self._last), now
        p50, p99 = percentiles(of_bystander)
        self.samples.append(
            Sample(
                second=now - self._began,
                committed=committed,
                received=arrived.total,
                rate=rate,
                p50=arrived.p50,
                p99=arrived.p99,
                dead_rows=dead,
                table_bytes=table,
                index_bytes=index,
                wal_bytes=wal,
                autovacuums=autovacuums,
                bystander_p50=p50,
                bystander_p99=p99,
            )
        )

    def _newest(self) -> Arrived:
        arrived = self._told.get(timeout=_GENEROUS_SECONDS) or _NOTHING_ARRIVED
        while not self._told.empty():
            arrived = self._told.get() or arrived
        return arrived

    def last_arrived(self) -> Arrived:
        """Return what the consumer told last, which is about the whole time."""
        self._connection.close()
        while self._told.get(timeout=_GENEROUS_SECONDS) is not None:
            pass
        last = self._told.get(timeout=_GENEROUS_SECONDS)
        if last is None:
            raise RuntimeError("the consumer told its end twice")
        return last


# -- what is told of them

_COLUMNS: dict[str, Callable[[Run, Run | None], str]] = {
    "scenario": lambda run, _: run.plan.scenario,
    "delivery": lambda run, _: run.plan.delivery,
    "records": lambda run, _: f"{run.samples[-1].committed:,}",
    "best rate": lambda run, _: f"{run.most('rate'):,.0f}/s",
    "p50 / p99 ms": lambda run, _: f"{run.p50:.1f} / {run.p99:.1f}",
    "of quiet p99": lambda run, quiet: f"{run.p99 / quiet.p99:.0%}" if quiet and quiet.p99 else "",
    "backlog": lambda run, _: f"{run.most('backlog'):,.0f}",
    "all arrived after": lambda run, _: "never" if run.caught_up_seconds is None else f"{run.caught_up_seconds:.0f} s",
    "dead rows": lambda run, _: f"{run.most('dead_rows'):,.0f}",
    "table / index MiB": lambda run, _: (
        f"{run.most('table_bytes') / 2**20:.0f} / {run.most('index_bytes') / 2**20:.0f}"
    ),
    "WAL bytes/record": lambda run, _: f"{run.wal_bytes_per_record:.0f}",
    "autovacuums": lambda run, _: f"{run.samples[-1].autovacuums}",
    "bystander p50 / p99 ms": lambda run, _: f"{run.bystander_p50:.2f} / {run.bystander_p99:.2f}",
    "of quiet p50": lambda run, quiet: (
        f"{run.bystander_p50 / quiet.bystander_p50:.0%}" if quiet and quiet.bystander_p50 else ""
    ),
}
"""The columns of the table: what each shows of a run, beside the quiet one of the same delivery, if there is one."""


def table_of(runs: Sequence[Run]) -> Table:
    """Return the highest values of each run, and the percentiles of its whole time."""
    quiet = {run.plan.delivery: run for run in runs if run.plan.scenario == "quiet"}
    table = Table(title=f"{RATE:,} records/s for {runs[0].plan.seconds / 60:.2g} minutes each; the highest values")
    for column in _COLUMNS:
        table.add_column(column, justify="right")
    for one in runs:
        table.add_row(*(show(one, quiet.get(one.plan.delivery)) for show in _COLUMNS.values()))
    return table


def save(runs: Sequence[Run], path: Path, began_on: str) -> None:
    """Write all samples; after each run, so that a long measurement that is broken off keeps what it has."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"machine": began_on, "runs": [asdict(one) for one in runs]}))


def draw(runs: Sequence[Run], delivery: str, folder: Path) -> Path:
    """Draw the samples of a delivery's runs over the minutes."""
    from benchmarks import charts  # here, as the processes beside the harvester import this module, too

    panels: dict[str, Callable[[Sample], float]] = {
        "records/s at the consumer": lambda sample: sample.rate,
        "p99, ms": lambda sample: sample.p99,
        "records that have not arrived": lambda sample: sample.backlog,
        "dead rows": lambda sample: sample.dead_rows,
        "bystander p50, ms": lambda sample: sample.bystander_p50,
        "table and index, MiB": lambda sample: (sample.table_bytes + sample.index_bytes) / 2**20,
    }
    of_delivery = [one for one in runs if one.plan.delivery == delivery]
    lines = {
        title: {
            one.plan.scenario: [(sample.second / 60, value(sample)) for sample in one.samples] for one in of_delivery
        }
        for title, value in panels.items()
    }
    return charts.pressure(lines, f"Under pressure, {delivery.replace('-', ' ')}", folder / f"pressure-{delivery}.png")


def main() -> None:
    """Measure, print a table, write samples and charts."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=30.0, help="of each scenario with each delivery")
    parser.add_argument("--scenario", choices=SCENARIOS, action="append", help="may be repeated; default: all")
    parser.add_argument("--delivery", choices=DELIVERIES, action="append", help="may be repeated; default: both")
    parser.add_argument("--burst", type=int, default=1_000_000, help="records of the burst")
    parser.add_argument(
        "--capacity-rows", type=int, default=400_000, help="records drained to find out what overload is"
    )
    parser.add_argument("--samples", type=Path, default=ROOT / "build" / "pressure.json")
    parser.add_argument("--charts", type=Path, default=ROOT / "docs" / "images", help="folder")
    options = parser.parse_args()
    console, began_on, runs = Console(width=240), machine(), list[Run]()
    console.print(began_on)
    deliveries, scenarios = options.delivery or DELIVERIES, options.scenario or SCENARIOS
    with services() as place:
        for delivery in deliveries:
            capacity = _capacity(place, delivery, options.capacity_rows) if "overload" in scenarios else 0.0
            for scenario in scenarios:
                plan = Plan(scenario, delivery, 60 * options.minutes, _OVERLOAD * capacity, options.burst)
                runs.append(run(place, plan))
                save(runs, options.samples, began_on)
                console.print(table_of(runs[-1:]))  # so that a long measurement shows something
    console.print(table_of(runs))
    for delivery in deliveries:
        console.print(draw(runs, delivery, options.charts))


def _capacity(at: Services, delivery: str, rows: int) -> float:
    """Return the records/s at which a full table is drained."""
    fill(at.dsn, fresh_topic("capacity"), rows=rows, keys=_KEYS)
    rate: float = harvest(at, delivery, rows=rows)["rate"]
    return rate


if __name__ == "__main__":
    main()
