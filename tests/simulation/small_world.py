"""Two harvesters that both believe to lead, three records, and the faults of one path: what an exhaustive search runs.

The exactly-once terms are the product's own, with all that they use; the election is a script. A leads from the first
step on. B may begin to lead at any step, while A goes on to believe that it does. When the last leader has crashed,
another one follows.
"""

from __future__ import annotations

import functools
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from unittest.mock import patch
from uuid import UUID

from outbox_core.commit_signal import CommitFlag
from outbox_core.config import HarvestConfig, Limits
from outbox_core.election.lease import Leadership
from outbox_core.harvest.at_least_once.send_window import SendWindow
from outbox_core.harvest.context import DeadLetterTopic, HarvestContext, HarvestLimits
from outbox_core.harvest.exactly_once.terms import ExactlyOnce
from outbox_core.harvest.store_calls import StoreThread
from outbox_core.harvest.watermark import LowWatermark
from outbox_core.kafka import clients as product_clients
from outbox_core.kafka.batch_sizes import BatchSizes
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.metrics import HarvestMetrics
from outbox_core.monitoring.meter import Meter
from outbox_core.outage import Outage
from outbox_core.stores.interface import StoredRecord
from tests.simulation import clients
from tests.simulation.brokers import COMMITTED, OPEN, Cluster
from tests.simulation.choices import ChosenNetwork, Event, StillScheduler, label
from tests.simulation.fingerprints import Fingerprint
from tests.simulation.postgres import OUTBOX, Database, Store
from tests.simulation.scheduling import Process
from tests.simulation.threads import Event as ThreadEvent
from tests.simulation.threads import patched

_silent = logging.getLogger("tests.simulation.silent")
_TOPIC = "orders"
_LEASE_SECONDS = 5.0
_KEYS = ("k", "l")  # of different partitions
_NAMES = "ABCD"


@dataclass(frozen=True)
class Scope:
    """The bounds of what may happen on one path."""

    records: int = 3
    batch: int = 2
    harvesters: int = 2
    crashes: int = 1
    late: int = 1
    hangs: bool = True  # a held request's client may not hear of it, or hear that the connection is lost
    lost_answers: bool = True
    lease_ends: bool = True


class _Elector:
    """The leadership that a script gives; it is renewed all the time until another one has it."""

    def __init__(self, process: Process, number: int) -> None:
        self.process = process
        self.leader_id = UUID(int=number)
        self.ends_at: float | None = None
        self.is_over = False
        self.failure = self.trouble = None

    @property
    def leadership(self) -> Leadership | None:
        """Return the lease."""
        if self.is_over:
            return None
        deadline = self.process.boottime() + _LEASE_SECONDS if self.ends_at is None else self.ends_at
        return Leadership(self.leader_id, self.leader_id.int, deadline)

    def is_succeeded(self) -> None:
        """Renew the lease no more."""
        if self.ends_at is None:
            self.ends_at = self.process.boottime() + _LEASE_SECONDS

    def end(self) -> None:
        """End the lease at once."""
        self.is_over = True


class Life:
    """One process with one leadership."""

    def __init__(self, world: World, number: int) -> None:
        process: Any = Process(world.scheduler, _NAMES[number])
        process.world = world
        self._world = world
        self.process: Process = process
        self.elector = _Elector(process, number + 1)
        self.leadership: ExactlyOnce | None = None
        self.has_ended = False
        self.error: BaseException | None = None
        self._context: HarvestContext | None = None
        process.spawn(self._main, "main")

    @property
    def leads(self) -> bool:
        """True while it is the last that got the leadership, and runs."""
        return not self.process.is_dead and self.elector.ends_at is None

    @property
    def is_deposed(self) -> bool:
        """True while it goes on to believe that it leads."""
        elector = self.elector
        return not (self.process.is_dead or self.has_ended or elector.ends_at is None or elector.is_over)

    @property
    def is_busy(self) -> bool:
        """True while it publishes something."""
        if self.process.is_dead or self.has_ended:
            return False
        return self.leadership is None or self.leadership.in_flight_records > 0

    def _main(self) -> None:
        ctx = self._context = _context(self._world, self.elector)
        transactions = TransactionalIdentity.of(self._world.config, OUTBOX)
        self.leadership = ExactlyOnce(self.elector.leader_id, ctx, transactions)
        try:
            self.leadership.run()
        except Exception as error:
            self.error = error
        finally:
            self.has_ended = True
            ctx.marker.close()
            ctx.purger.close()

    def add_to(self, state: Fingerprint) -> None:
        """Add everything of this process to a state."""
        state.add((self.process.name, self.process.is_dead, self.has_ended))
        if self.process.is_dead or self.has_ended:
            return
        state.add((self.elector.ends_at, self.elector.is_over, self._context))
        for task in self.process._tasks:
            state.add(task)
            if task._greenlet:
                state.add_frame(task._greenlet.gr_frame)


def _context(world: World, elector: Any) -> HarvestContext:
    config, wake, metrics = world.config, ThreadEvent(), HarvestMetrics()
    make = Store

    def store() -> Any:
        return make(world.database, world.network)

    def nothing(*_: object) -> None:
        return None

    return HarvestContext(
        elector=elector,
        limits=HarvestLimits.of(config),
        marker=StoreThread(store(), "mark", wake.set),
        purger=StoreThread(store(), "purge", wake.set),
        watermark=LowWatermark(metrics, elector.process.boottime),
        metrics=metrics,
        meter=Meter(3600.0, elector.process.boottime),
        emit=nothing,
        wake=wake,  # type: ignore[arg-type]
        commits=CommitFlag(wake),  # type: ignore[arg-type]
        database=Outage("database", _silent),
        kafka=Outage("delivery to Kafka", _silent),
        dead_letters=DeadLetterTopic(topic="dead", on_poison=False, ensure=nothing, forbidden=lambda _: set()),
        grant_write="",
        send_window=SendWindow(5.0, metrics),
        batches=BatchSizes(clock=elector.process.boottime),
        removal=Outage("removal", _silent),
    )


class World:
    """Everything, at one moment of a path."""

    def __init__(self, scope: Scope) -> None:
        self.scope = scope
        self.config = _config(scope)
        self.scheduler = StillScheduler()
        self.network = ChosenNetwork(self.scheduler)
        self.cluster = Cluster(self.scheduler)
        self.database = Database(self.scheduler)
        self.crashes, self.late = scope.crashes, scope.late
        self.records = _records(scope.records)
        self.database.last_id = scope.records
        self.database.commit(self.records)
        self.cluster.create(_TOPIC, len(_KEYS), {})
        for number, partition in enumerate(self.cluster.topics[_TOPIC]):
            partition.leader = 1 + number  # the coordinator and the tracking topic have broker 0
        self._is_fresh = True  # a server has changed since the last event
        self._tokens = [bytes(record.value or b"") for record in self.records]
        self.lives = [Life(self, 0)]
        self._settle()

    def close(self) -> None:
        """End all tasks."""
        for life in self.lives:
            if not life.process.is_dead:
                life.process.crash()

    # -- what may happen

    def events(self) -> list[Event]:
        """Return what may happen next, the ordinary course first."""
        urgent = [*self._arrivals(), *self._markers()]
        first = urgent + self._retries() if urgent else [*self._retries()[:1], *self._when_quiet()][:1]
        return [*first, *self._faults()]

    def _arrivals(self) -> Iterator[Event]:
        network = self.network
        for connection, request in network.heads():
            yield Event(label(connection.process, request), lambda c=connection, r=request: network.arrive(c, r))  # type: ignore[misc]

    def _markers(self) -> Iterator[Event]:
        if self.scheduler.markers:
            yield Event("the markers are written", self._mark)

    def _mark(self) -> None:
        markers, self.scheduler.markers = self.scheduler.markers, []
        for step in markers:
            step()

    def _retries(self) -> list[Event]:
        return [
            Event(f"{process.name} asks again", lambda retry=(process, step): self._retry(retry), changes_server=False)  # type: ignore[misc]
            for process, step in self.scheduler.retries
            if not self.scheduler.markers and not self.network.has_under_way(process)
        ]

    def _retry(self, retry: tuple[Process, Callable[[], object]]) -> None:
        self.scheduler.retries.remove(retry)
        retry[1]()

    def _when_quiet(self) -> Iterator[Event]:
        if not any(life.leads for life in self.lives):
            yield Event(f"{_NAMES[len(self.lives)]} begins to lead", self._succeed, changes_server=False)
        elif self.is_done and self.network.held is not None:
            yield Event("the held request arrives", self.network.deliver_held)
        elif not self.is_done:
            yield Event("time passes", self.scheduler.pass_time, changes_server=False)

    @property
    def is_done(self) -> bool:
        """True if nothing is left to be published, deleted or ended."""
        is_open = any(partition.open for topic in self.cluster.topics.values() for partition in topic)
        busy = any(life.is_busy for life in self.lives)
        return not (self.database.rows or is_open or busy)

    # -- faults

    def _faults(self) -> Iterator[Event]:
        if self._is_fresh:
            yield from self._fresh_faults()
        late = self.scope.late and self.late
        for life in self.lives:
            offer = None if life.process.is_dead else self.network.take_offer(life.process)
            if offer is not None and late:
                yield from self._late_faults(*offer)
            # A crash makes a difference before a write arrives, or after another one has arrived meanwhile.
            may_lose = offer is not None or (self._is_fresh and self.network.has_write_of(life.process))
            if may_lose and self.crashes and not life.process.is_dead:
                yield Event(f"{life.process.name} crashes", lambda life=life: self._crash(life), changes_server=False)  # type: ignore[misc]

    def _fresh_faults(self) -> Iterator[Event]:
        if len(self.lives) < self.scope.harvesters and self.database.rows:
            yield Event(f"{_NAMES[len(self.lives)]} begins to lead", self._succeed, changes_server=False)
        if self.network.held is not None:
            yield Event("the held request arrives", self.network.deliver_held)
        if self.scope.lease_ends:
            for life in self.lives:
                if life.is_deposed:
                    yield Event(f"{life.process.name}'s lease ends", life.elector.end, changes_server=False)

    def _late_faults(self, connection: Any, request: Any) -> Iterator[Event]:
        name, network = label(connection.process, request), self.network

        def hold(breaks: bool) -> Callable[[], None]:
            return lambda: self._spend_late(lambda: network.hold(connection, request, breaks=breaks))

        def lose() -> None:
            self._spend_late(lambda: network.arrive(connection, request, is_answer_lost=True))

        yield Event(f"{name} is held, and its connection breaks", hold(True), changes_server=False)
        if self.scope.hangs:
            yield Event(f"{name} is held, and its connection stands still", hold(False), changes_server=False)
        if self.scope.lost_answers:
            yield Event(f"{name} arrives, and the connection breaks", lose)

    def _spend_late(self, step: Callable[[], None]) -> None:
        self.late -= 1
        step()

    def _succeed(self) -> None:
        for life in self.lives:
            life.elector.is_succeeded()
        self.lives.append(Life(self, len(self.lives)))

    def _crash(self, life: Life) -> None:
        self.crashes -= 1
        life.process.crash()

    # -- one event

    def take(self, event: Event) -> None:
        """Let an event happen."""
        event.run()
        self._is_fresh = event.changes_server
        self._settle()

    def _settle(self) -> None:
        self.scheduler.settle()
        self.network.tidy()

    # -- the state

    def fingerprint(self) -> int:
        """Return the number of this state."""
        return self.state().number

    def state(self) -> Fingerprint:
        """Return this state."""
        scheduler = self.scheduler
        state = Fingerprint(scheduler.now)
        is_fresh = self._is_fresh and (self.crashes > 0 or any(True for _ in self._fresh_faults()))
        state.add((self.crashes, self.late, is_fresh))
        for row in self.database.rows:
            state.add(row)
        for topic in self.cluster.topics.values():
            for partition in topic:
                state.add((partition.log, partition.producers, partition.open))
        state.add(self.cluster.transactions)
        for life in self.lives:
            life.add_to(state)
        self.network.add_to(state, tells_offers=bool(self.crashes or self.late))
        scheduler.add_to(state)
        return state

    def problem(self) -> str:
        """Return which promise is broken in this state, '' if none is."""
        for life in self.lives:
            if life.error is not None:
                return f"{life.process.name} ended with {type(life.error).__name__}: {life.error}"
        seen = [entry for partition in self.cluster.topics[_TOPIC] for entry in partition.log]
        committed = [entry.value for entry in seen if entry.state == COMMITTED]
        counts = Counter(committed)
        repeated = sorted(token for token, count in counts.items() if count > 1)
        if repeated:
            return f"repeated: {repeated}"
        order = [token for token in committed if token in self._tokens[0::2]]
        if order != sorted(order):
            return f"out of order: {order}"
        deciding = {each.producer for each in self.cluster.transactions.values() if each.state == "committing"}
        safe = counts.keys() | {entry.value for entry in seen if entry.state == OPEN and entry.producer in deciding}
        lost = [token for number, token in enumerate(self._tokens) if number + 1 not in self.database.rows]
        lost = [token for token in lost if token not in safe]
        return f"deleted, and not in Kafka: {lost}" if lost else ""

    def final_problem(self) -> str:
        """Return which promise is broken once nothing more happens."""
        problem = self.problem()
        if problem or self.is_done:
            return problem
        return f"rows {list(self.database.rows)} wait, or a transaction is open, and nothing happens"


def _records(number: int) -> list[StoredRecord]:
    keys = [_KEYS[place % len(_KEYS)] for place in range(number)]
    return [
        StoredRecord(place + 1, _TOPIC, key, f"r{place + 1}".encode(), None, None, -1, 7_000 + place)
        for place, key in enumerate(keys)
    ]


@functools.cache
def _config(scope: Scope) -> HarvestConfig:
    return HarvestConfig(
        base_kafka_config={"bootstrap.servers": "simulated:9092"},
        data_source="postgresql://simulated/shop",
        name="simulated",
        delivery="exactly-once",
        limits=Limits(
            mark_query_records=scope.batch,
            transaction_timeout=timedelta(seconds=10),
            drain_timeout=timedelta(seconds=5),
        ),
    )


@contextmanager
def product_in_small_world() -> Iterator[None]:
    """Put the simulated clients, threads and clocks in the place of the real ones."""
    with (
        patch.multiple(
            product_clients, Producer=clients.Producer, Consumer=clients.Consumer, AdminClient=clients.AdminClient
        ),
        patched(StillScheduler()),
    ):
        yield


assert len({zlib.crc32(key.encode()) % len(_KEYS) for key in _KEYS}) == len(_KEYS)
