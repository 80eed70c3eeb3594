"""The steps of the demo, in order: services, tables, harvesters, transactions, a kill, and the comparison."""

from __future__ import annotations

import json
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import psycopg

from devstack.stack import DevStack
from example_project.demo.applications import APPLICATIONS, Application, Batch
from example_project.demo.check import Received, Stashed, check
from example_project.demo.children import Child, Children, DemoError, child_environment, run_all
from example_project.demo.harvesters import Harvesters
from example_project.demo.reception import Reception
from example_project.demo.screen import Live, Result, Screen

_ROLLBACK_SHARE = 0.05
_CONCURRENCY = 8
_TICK_SECONDS = 0.2
_SECONDS_TO_MIGRATE = 60
_SECONDS_TO_LEAD = 60
_SECONDS_OF_SILENCE = 40
_SECONDS_IN_ALL = 300


@dataclass(frozen=True, kw_only=True)
class Options:
    """The options of the command line.

    Attributes:
        records: least number that both applications stash together.
        embedded: use the embedded broker even where a real one can be had.
        keep: leave Postgres and the broker running.
    """

    records: int
    embedded: bool
    keep: bool

    @property
    def load_seconds(self) -> float:
        """Return the least duration of the transactions: on a fast machine, too, they must go on around the kill."""
        return min(20.0, max(4.0, self.records / 1000))


@dataclass(kw_only=True)
class Outbox:
    """One application, its transactions and its harvesters, while the demo runs."""

    application: Application
    dsn: str
    batch: Batch
    harvesters: Harvesters
    load: Child

    def stashed(self) -> list[Stashed]:
        """Read the application's ledger."""
        with psycopg.connect(self.dsn) as connection:
            rows = connection.execute(self.application.ledger).fetchall()
        return [Stashed(*row) for row in rows]

    def count(self, connection: psycopg.Connection) -> int:
        """Count the rows of the ledger by now."""
        row = connection.execute(f"SELECT count(*) FROM ({self.application.ledger}) AS ledger").fetchone()
        return row[0] if row else 0

    @property
    def is_past_its_crisis(self) -> bool:
        """Tell whether all its transactions are over and its dead leader has a successor."""
        return not self.load.is_running and self.harvesters.took_over_after is not None

    @property
    def rolled_back(self) -> dict[str, int]:
        """Return records of transactions that rolled back, by topic, as the application counted them."""
        output = self.load.output
        if not output:
            raise DemoError(f"the transactions of {self.application.name} did not end in time")
        counts: dict[str, int] = json.loads(output)["rolled_back"]
        return counts


def run(options: Options, screen: Screen, log_directory: Path) -> list[Result]:
    """Run the demo; return a result for each outbox.

    Raises:
        DemoError: something failed that has nothing to do with the records.
        DevstackError: Postgres or the broker cannot be had.
    """
    with _services(options, screen) as stack:
        dsns = {application.name: stack.postgres.create_database(application.name) for application in APPLICATIONS}
        bootstrap = stack.kafka.bootstrap
        environment = {application.dsn_variable: dsns[application.name] for application in APPLICATIONS}
        # Each command reads OUTBOX_POSTGRES_DSN too; only payments' harvester has nothing more specific.
        environment |= {"OUTBOX_POSTGRES_DSN": dsns["payments"], "OUTBOX_KAFKA_BOOTSTRAP": bootstrap}
        topics = [topic for application in APPLICATIONS for topic in application.topics]
        with (
            Children(log_directory, child_environment(environment)) as children,
            Reception(bootstrap, topics) as reception,
        ):
            _migrate(children, screen)
            harvesters = _start_harvesters(children, screen)
            began = time.monotonic()
            outboxes = _start_transactions(options, children, dsns, harvesters)
            with screen.progress(sum(outbox.batch.records for outbox in outboxes)) as live:
                _watch(outboxes, reception, live, screen)
            screen.say("stopping the harvesters, reading every topic to its end")
            children.stop()
            received = reception.finish()
            return [_reckon(outbox, received, began) for outbox in outboxes]


@contextmanager
def _services(options: Options, screen: Screen) -> Iterator[DevStack]:
    stack = DevStack(embedded=True if options.embedded else None, report=screen.say)
    try:
        stack.start()
        yield stack
    except BaseException:
        stack.stop()
        raise
    if options.keep:
        screen.say(f"left running: {stack.postgres.dsn} (databases shop, payments), Kafka {stack.kafka.bootstrap}")
        screen.say(f"stop them by: python -m devstack down --dir {stack.directory}")
    else:
        stack.stop()


def _migrate(children: Children, screen: Screen) -> None:
    screen.say("migrating: manage.py migrate for the shop, alembic upgrade head for payments")
    migrations = [children.start(f"{application.name}-migrate", application.migrate) for application in APPLICATIONS]
    run_all(migrations, _SECONDS_TO_MIGRATE)


def _start_harvesters(children: Children, screen: Screen) -> list[Harvesters]:
    """Start two for each outbox; wait until one of each leads and the other stands by."""
    screen.say("starting two harvesters for each outbox")
    all_harvesters = [Harvesters(application, children) for application in APPLICATIONS]
    deadline = time.monotonic() + _SECONDS_TO_LEAD
    while not all(harvesters.are_ready for harvesters in all_harvesters):
        if time.monotonic() > deadline:
            raise DemoError(f"no harvester became leader within {_SECONDS_TO_LEAD} s")
        time.sleep(_TICK_SECONDS)
        for harvesters in all_harvesters:
            harvesters.look()
    return all_harvesters


def _start_transactions(
    options: Options, children: Children, dsns: dict[str, str], all_harvesters: Sequence[Harvesters]
) -> list[Outbox]:
    outboxes = []
    share = math.ceil(options.records / len(APPLICATIONS))
    for application, harvesters in zip(APPLICATIONS, all_harvesters, strict=True):
        batch = application.batch_for(share)
        command = [
            *application.load,
            f"--count={batch.transactions}",
            f"--concurrency={_CONCURRENCY}",
            f"--rollback-share={_ROLLBACK_SHARE}",
            f"--rate={batch.transactions / options.load_seconds}",
        ]
        load = children.start(f"{application.name}-load", command)
        dsn = dsns[application.name]
        outboxes.append(Outbox(application=application, dsn=dsn, batch=batch, harvesters=harvesters, load=load))
    return outboxes


def _watch(outboxes: Sequence[Outbox], reception: Reception, live: Live, screen: Screen) -> None:
    """Kill each leader half-way; return when all records are received, or when none has come for too long."""
    give_up_at = time.monotonic() + _SECONDS_IN_ALL
    silent_since, received = time.monotonic(), 0
    connections = [psycopg.connect(outbox.dsn, autocommit=True) for outbox in outboxes]
    try:
        while True:
            time.sleep(_TICK_SECONDS)
            counts = [outbox.count(connection) for outbox, connection in zip(outboxes, connections, strict=True)]
            for outbox, count in zip(outboxes, counts, strict=True):
                _follow(outbox, count, screen)
            reception.check()
            if reception.distinct != received:
                silent_since, received = time.monotonic(), reception.distinct
            live.update(sum(counts), received, "; ".join(map(_leadership, outboxes)))
            if all(outbox.is_past_its_crisis for outbox in outboxes) and received >= sum(counts):
                return
            if time.monotonic() > min(give_up_at, silent_since + _SECONDS_OF_SILENCE):
                return
    finally:
        for connection in connections:
            connection.close()


def _follow(outbox: Outbox, count: int, screen: Screen) -> None:
    """Find the leader, and kill it when half of the records are stashed."""
    harvesters = outbox.harvesters
    outbox.load.check()
    had_successor = harvesters.took_over_after is not None
    harvesters.look()
    if harvesters.leader is not None and harvesters.took_over_after is not None and not had_successor:
        screen.say(f"{harvesters.leader.name} leads, {harvesters.took_over_after:.1f} s after that")
    if harvesters.killed is None and harvesters.leader is not None and count >= outbox.batch.records / 2:
        victim = harvesters.kill_leader()
        screen.say(f"SIGKILL to {victim.name} (pid {victim.pid}), which led; {count:,} records are stashed by now")


def _leadership(outbox: Outbox) -> str:
    leader = outbox.harvesters.leader
    return f"{leader.name} leads" if leader else f"{outbox.application.name}: nobody leads"


def _reckon(outbox: Outbox, received: Sequence[Received], began: float) -> Result:
    topics = outbox.application.topics
    ours = [record for record in received if record.topic in topics]
    return Result(
        name=outbox.application.name,
        verdicts=check(topics, outbox.stashed(), ours),
        rolled_back=outbox.rolled_back,
        seconds=ours[-1].at - began if ours else 0.0,
        seconds_without_leader=outbox.harvesters.seconds_without_leader,
        best_second=max(Counter(int(record.at) for record in ours).values(), default=0),
    )
