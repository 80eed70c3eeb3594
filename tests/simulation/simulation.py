"""One run: harvesters, writers and faults in a world that follows from a seed, and the promises that must hold."""

from __future__ import annotations

import logging
from collections import Counter, deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from functools import cached_property
from random import Random
from typing import Any, ClassVar, Self
from unittest.mock import patch

from greenlet import getcurrent

from outbox_core.config import HarvestConfig, Limits
from outbox_core.election import member
from outbox_core.election.lease import Leadership
from outbox_core.election.messages import Claim, Heartbeat, decode
from outbox_core.errors import OutboxError
from outbox_core.events import Event as ProductEvent
from outbox_core.events import LeaderAcquired, LeaderFenced, LeaderRevoked
from outbox_core.harvest import Harvester
from outbox_core.harvest.at_least_once import loop
from outbox_core.harvest.failures.holds import READ_EVERY_SECONDS
from outbox_core.kafka import clients as product_clients
from outbox_core.kafka.identity import Failpoint
from outbox_core.kafka.manifest import Manifest
from outbox_core.stores.interface import NewHold, StoredRecord
from tests.simulation import bounds, clients
from tests.simulation.brokers import ABORTED, COMMITTED, PLAIN, POISON, Cluster, Entry, Sent
from tests.simulation.illnesses import ILLNESSES, Illnesses
from tests.simulation.liveness import Liveness
from tests.simulation.network import LONGEST_DELAY_SECONDS, Cut, Network, Server
from tests.simulation.outages import Outages
from tests.simulation.postgres import OUTBOX, Database, HoldTime, Standby, Store, covers
from tests.simulation.running import heard, run_to_its_end
from tests.simulation.scheduling import Process, ProcessDied, Scheduler, current
from tests.simulation.threads import Event, patched

MODES = ("exactly-once", "at-least-once")
FAULTS = (
    "break", "cut", "crash", "at a step", "broker", "move", "suspend", "database", "truncate", "restart", "hold",
    "isolate", "reassign", "expire", "hide", "widen", "fail over", "leader topic",
)  # fmt: skip
_TOPICS = {"orders": 2, "bills": 1}
_MOST_QUIET_SECONDS = 300.0  # however many records are refused
_LEASE_SECONDS = 5.0
_TICK_SECONDS = 0.003
_LOOK_SECONDS = 0.002
_MOST_PROBLEMS = 4
_MIXED_SHARE = 0.3  # of the plans with four harvesters
_WIDEST = 4  # partitions
_MADE_BY_A_PRODUCER = (1, 4)  # partitions of a topic that is made by writing to it, as brokers allow by default
_WAKE_SECONDS = 0.05  # the longest until a thread that is ready runs
_SLOWEST_ANSWER = 10.0  # in multiples of the latency
_SLACK_SECONDS = 0.01  # of clocks that drift
_STOP_SECONDS = 60.0  # in which a harvester ends that is asked to, whatever is cut off or suspended meanwhile
_NEIGHBOUR = 1  # an ID that no other producer has
_SESSION_SECONDS = 6.0  # of the group, after which it has another owner


def _cut_seconds(random: Random) -> float:
    return random.choice((0.3, 2.0, 9.0)) * (0.5 + random.random())


@dataclass
class Plan:
    """The parts of a run; a seed draws them, and shrinking takes some away."""

    seed: int
    mode: str
    faults: tuple[str, ...]
    harvesters: int = 2
    writers: int = 3
    seconds: float = 60.0
    late: float = 0.0
    latency: float = 0.001
    pause: float = 0.3  # of a writer between two transactions
    drift: float = 0.0
    step_share: float = 0.02  # of the steps of a transaction at which something happens
    late_ends: float = 0.0  # the share of EndTxn requests that are sent twice
    late_produces: float = 0.0  # and of Produce requests
    late_changes: float = 0.0  # the share of statements that change rows whose connection breaks before they arrive
    database_distance: float = 1.0  # by which the latency is multiplied
    slow_statements: float = 0.1  # the share of statements that take up to `slowest_statement`
    slow_answers: float = 0.0  # the share of statements that take effect up to `slowest_statement` before their answer
    slowest_statement: float = 0.02  # seconds
    poison: float = 0.0  # the share of records that Kafka refuses
    step_faults: tuple[str, ...] = ("crash", "suspend", "cut", "break", "break")
    longest_late: float = 8.0
    most_faults: int = 1_000_000
    slow: float = 0.003  # the share of messages that the network delays by up to 0.2 s
    foreign: bool = False  # at first the tracking topic holds the manifest of another outbox
    neighbour: bool = False  # another producer has transactions on the tracking topic, too, which it aborts
    is_mixed: bool = False  # every other harvester has the other delivery, and larger batches
    changes_to: str = ""  # the delivery of all harvesters after half of the time
    fault_pause: float = 1.5  # between two faults, on average
    outage: float = 1.0  # by which the time is multiplied for which something is cut off, suspended or down
    illnesses: tuple[str, ...] = ()  # of one harvester alone, for minutes
    illness_pause: float = 60.0  # between two of them, on average
    KINDS: ClassVar[tuple[str, ...]] = ("faults", "illnesses")  # of what shrinking takes one away
    NUMBERS: ClassVar[tuple[str, ...]] = ("harvesters", "writers")  # which it makes smaller

    @classmethod
    def of(cls, seed: int, mode: str = "") -> Plan:
        """Draw a plan: each seed switches a random subset of faults on, so that rare ones meet each other."""
        random = Random(seed * 7919 + 17)
        drawn, share = random.choice(MODES), random.choice((0.2, 0.4, 0.7))
        # Not more records than batches of twenty can take.
        latency, pause = random.choice(((0.001, 0.1), (0.001, 0.3), (0.005, 0.3), (0.03, 1.0)))
        faults = tuple(fault for fault in FAULTS if random.random() < share)
        return cls(
            seed,
            mode or drawn,
            faults or ("break",),
            harvesters=random.choice((1, 2, 2, 3)),
            writers=random.choice((1, 3, 5)),
            seconds=random.choice((20.0, 40.0, 80.0)),
            late=random.choice((0.0, 0.4, 0.9)),
            latency=latency,
            pause=pause,
            drift=random.choice((0.0, 0.0, 1e-4)),
            late_ends=random.choice((0.0, 0.0, 0.1)),
            poison=random.choice((0.0, 0.0, 0.005)),
            late_changes=random.choice((0.0, 0.0, 0.01)),
            database_distance=random.choice((1.0, 1.0, 10.0)) if latency < 0.005 else 1.0,
        )

    @property
    def only_fault(self) -> str:
        """The one kind of fault that there is, '' if there are several."""
        others = self.late or self.late_ends or self.late_produces or self.late_changes or self.poison or self.illnesses
        is_alone = len(self.faults) == 1 and not (others or self.changes_to or self.foreign or self.neighbour)
        return self.faults[0] if is_alone else ""

    @property
    def is_quiet(self) -> bool:
        """True if faults are rare."""
        return self.fault_pause > Plan.fault_pause * self.outage

    def quiet(self) -> Plan:
        """Return a plan of the same kinds of faults that is long: few transactions, and rare faults."""
        random = Random(self.seed)
        return replace(
            self,
            seconds=random.choice((1200.0, 2400.0, 3600.0)),
            harvesters=min(self.harvesters, 2),
            faults=(*self.faults, "put back", "lock"),
            pause=random.choice((3.0, 10.0)),
            fault_pause=random.choice((5.0, 20.0, 60.0)),
        )

    def crowded(self) -> Plan:
        """Return a plan of the same kinds of faults with four harvesters, and outages that may be long."""
        outage = Random(self.seed).choice((1.0, 4.0, 12.0))
        rare = {"pause": self.pause * outage, "fault_pause": Plan.fault_pause * outage}
        return replace(
            self,
            harvesters=4,
            faults=(*self.faults, "expel"),
            outage=outage,
            seconds=60.0 * outage,
            is_mixed=Random(-self.seed).random() < _MIXED_SHARE,
            **rare,
        )

    def lone(self) -> Plan:
        """Return a plan with two or three harvesters, of which one or another is ill alone for minutes."""
        random = Random(self.seed)
        return replace(
            self,
            harvesters=random.choice((2, 2, 3)),
            seconds=random.choice((200.0, 400.0)),
            pause=max(self.pause, 1.0),
            faults=tuple(fault for fault in self.faults if random.random() < 0.2),
            fault_pause=60.0,
            illnesses=tuple(each for each in ILLNESSES if random.random() < 0.5) or ILLNESSES[:1],
            illness_pause=random.choice((60.0, 120.0)),
            poison=0.0,
        )

    def smaller(self) -> Iterator[Self]:
        """Return plans that have one part less than this one."""
        for kind in self.KINDS:
            for one in getattr(self, kind):
                yield replace(self, **{kind: tuple(other for other in getattr(self, kind) if other != one)})
        for number in self.NUMBERS:
            if getattr(self, number) > 1:
                yield replace(self, **{number: getattr(self, number) - 1})
        if self.seconds > 10:
            yield replace(self, seconds=self.seconds / 2)
        if self.late:
            yield replace(self, late=0.0)
        if self.drift:
            yield replace(self, drift=0.0)
        most = min(self.most_faults, 64)
        for fewer in (most // 2, most - 1):
            if 0 <= fewer < self.most_faults:
                yield replace(self, most_faults=fewer)


@dataclass
class Outcome:
    """The result of a run."""

    plan: Plan
    problem: str = ""
    virtual_seconds: float = 0.0
    steps: int = 0
    records: int = 0
    faults: int = 0
    seen: Counter[str] = field(default_factory=Counter)
    trace: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan, simulation: Any, records: int) -> Self:
        """Return the result of a simulation that has ended, with the number of records that counted."""
        scheduler, trace = simulation.scheduler, simulation.scheduler.trace
        seen = scheduler.now, scheduler.steps, records, simulation.faults, simulation.seen
        return cls(plan, simulation.problem, *seen, list(trace or ()))


class _Log(logging.Handler):
    """Counts the product's log lines by their format, and adds them to the trace."""

    def __init__(self, simulation: Simulation) -> None:
        super().__init__()
        self._simulation = simulation
        self._scheduler = simulation.scheduler
        self._seen = simulation.seen

    def emit(self, record: logging.LogRecord) -> None:
        self._simulation.note_invariant(record)
        text = str(record.msg)
        for sentinel, part in SENTINELS_IN_LOG.items():
            if part in text:
                self._seen[sentinel] += 1
        task = getattr(getcurrent(), "task", None)
        if task is None or not task.process.is_dead:
            self._simulation.outages.take_in(text, record.getMessage())
        if self._scheduler.trace is not None:
            try:
                name = current().process.name
            except AttributeError:
                name = "world"
            self._scheduler.note(f"{name:12} {record.levelname.lower()}: {record.getMessage()}")


TORN = "torn transaction read back"
"""A state that no run reaches while no transaction begins in an epoch with a late EndTxn: see that broken rule."""

SENTINELS_IN_LOG = {
    TORN: "reading back which from",
    "published rows purged by a successor": "that the last term had published",
    "rows taken by another leader": "some carry another leader's mark",
    "records in flight at a hand-over": "records were still in flight",
    "outage of the database": "%s: %s; retrying",
}

SENTINELS = (
    "leader acquired", "leader revoked", "leader fenced", "crash while leading", "fault at a step", "late request",
    "EndTxn sent twice", "EndTxn repeated", "produce repeated", "delivery timed out", "producer fenced",
    "fenced in mid-batch", "late abort", "init aborts a transaction", "transaction timed out", "member expired",
    "partition lost", "partition handed over", "truncated", "suspended", "late commit", "rolled back", "poison held",
    "held", "hold released below the floor", "produce outside of a transaction", "cut off from the group alone",
    "lease lost with a scan under way", "arrived after its delivery timeout", "late record of a replaced producer",
    *(SENTINELS_IN_LOG.keys() - {TORN}),
)  # fmt: skip
"""States that a number of runs should reach; a report names those that were never reached."""


class ProcessPlace:
    """A place where something runs, process after process."""

    harvester: Harvester | None = None

    def __init__(self, simulation: Simulation, name: str) -> None:
        self.simulation: Any = simulation
        self.name = name
        self.process: Process | None = None
        self._lives = 0

    @property
    def is_up(self) -> bool:
        """True while its process lives, suspended or not."""
        return self.process is not None and not self.process.is_dead

    def start(self) -> None:
        """Start a process."""
        simulation, self._lives = self.simulation, self._lives + 1
        drift = simulation.plan.drift * simulation.scheduler.random.uniform(-1, 1)
        process: Any = Process(simulation.scheduler, f"{self.name}.{self._lives}", drift)
        process.world = simulation
        self.process = process
        process.spawn(self._main, "main")

    def crash(self) -> None:
        """Kill the process; what it had sent may arrive all the same."""
        process = self.process
        if process is None or process.is_dead:
            return
        self.simulation.scheduler.note("%s crashes", process.name)
        process.crash()
        self.simulation.network.break_some(lambda connection: connection.process is process)

    def _main(self) -> None:
        raise NotImplementedError


class Node(ProcessPlace):
    """A place where a harvester runs, process after process."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        super().__init__(simulation, f"harvester-{number}")
        self.harvester: Harvester | None = None
        self.is_stopping = False

    @cached_property
    def leader_topic(self) -> str:
        """Name of the topic of its election."""
        return str(self.simulation.config(self.name).leader_names(OUTBOX).topic)

    def start(self) -> None:
        self.harvester, self.is_stopping = None, False
        super().start()

    def crash(self) -> None:
        self.simulation.seen["crash while leading"] += self.lease_left > 0
        super().crash()
        self.harvester = None

    def _main(self) -> None:
        while True:
            harvester = Harvester(
                self.simulation.config(self.name),
                self._on_event,
                store_factory=lambda: Store(self.simulation.database, self.simulation.network),
                reached=self._reached,
            )
            try:
                harvester.start()
                self.harvester = harvester
                harvester.join()
            except OutboxError as error:
                self.simulation.scheduler.note("%s ended: %s", self.name, error)
            except Exception as error:
                self.simulation.broken(f"{self.name} ended with {type(error).__name__}: {error}")
            else:
                return
            self.harvester = None
            Event().wait(0.5)

    @property
    def threads(self) -> list[str]:
        """Names of its process's threads."""
        return [] if self.process is None else sorted(task.name for task in self.process._tasks)

    def end(self) -> None:
        """Ask the harvester to stop in good order, for good; kill the process if there is none."""
        harvester, process = self.harvester, self.process
        if harvester is None or process is None:
            self.crash()
        else:
            process.spawn(harvester.stop, "end")

    def stop(self) -> None:
        """Ask the harvester to stop in good order; its process ends with it, and another one begins."""
        harvester, process = self.harvester, self.process
        if harvester is None or process is None or process.is_suspended:
            return
        self.is_stopping = True
        process.spawn(lambda: self._stop(harvester, process), "stop")

    def _stop(self, harvester: Harvester, process: Process) -> None:
        harvester.stop()
        with suppress(OutboxError):
            if not harvester.join(_STOP_SECONDS):
                self.simulation.broken(f"{process.name} has not ended {_STOP_SECONDS:g} s after it was asked to stop")
        self.simulation.scheduler.after(0.3, lambda: self._replace(process))

    def _replace(self, process: Process) -> None:
        if self.process is process and not self.simulation.is_over:
            self.crash()
            self.start()

    def _on_event(self, event: ProductEvent) -> None:
        name = {LeaderAcquired: "leader acquired", LeaderRevoked: "leader revoked", LeaderFenced: "leader fenced"}
        self.simulation.seen[name.get(type(event), "other event")] += 1
        self.simulation.scheduler.note("%s %s", self.name, event)
        if isinstance(event, LeaderAcquired):
            self.simulation.liveness.began_to_lead(self)
        elif isinstance(event, LeaderRevoked | LeaderFenced):
            self.simulation.liveness.ended_to_lead(self)
        self.simulation.check_leases()

    def _reached(self, step: Failpoint) -> None:
        simulation = self.simulation
        random = simulation.scheduler.random
        plan = simulation.plan
        if "at a step" not in plan.faults or not simulation.is_faulty or random.random() > plan.step_share:
            return
        if not simulation.may_fault():
            return
        simulation.seen["fault at a step"] += 1
        process, kind = current().process, random.choice(plan.step_faults)
        simulation.scheduler.note("%s: %s at %s", self.name, kind, step)
        if kind == "crash":
            process.is_dead = True
            simulation.scheduler.after(0.0, lambda: self._died(process))
            raise ProcessDied
        pause = random.choice((0.0, 6.0)) * random.random() * simulation.network.latency
        simulation.scheduler.after(pause, lambda: getattr(simulation, f"_{kind}")(process))

    def _died(self, process: Process) -> None:
        process.is_dead = False
        self.crash()
        self.simulation.restart_later(self)

    @property
    def lease_left(self) -> float:
        """Seconds until its lease ends on its own clock, negative without one."""
        leadership, process = self._leadership, self.process
        return -1.0 if leadership is None or process is None else leadership.deadline - process.boottime()

    @property
    def floor(self) -> int:
        """The id that its marks and scans begin behind."""
        harvester = self.harvester
        return 0 if harvester is None or harvester._ctx is None else harvester._ctx.watermark.floor.id

    @property
    def lease_term(self) -> int:
        """Offset of the claim that its lease rests on, -1 without one."""
        return -1 if self._leadership is None else self._leadership.term

    @property
    def _leadership(self) -> Leadership | None:
        harvester, process = self.harvester, self.process
        if harvester is None or process is None or process.is_dead or harvester._ctx is None:
            return None
        return harvester._ctx.elector.leadership


class Writer:
    """An application: one transaction after the other, each with some records of its own keys."""

    def __init__(self, simulation: Simulation, number: int) -> None:
        self._simulation = simulation
        self._random = Random(simulation.plan.seed * 1000 + number)
        self._name = f"w{number}"
        self._counts: Counter[str] = Counter()
        self._transactions = 0

    def begin(self) -> None:
        """Open a transaction, and write its records."""
        simulation, random = self._simulation, self._random
        if not simulation.is_writing:
            return
        self._transactions += 1
        name = f"{self._name}-{self._transactions}"
        database = simulation.database
        database.writers.add(name)
        create_time = database.create_time()
        records = []
        for _ in range(random.choice((1, 1, 2, 3, 6))):
            key = random.choice((None, f"{self._name}a", f"{self._name}b", f"{self._name}c"))
            self._counts[key or ""] += 1
            token = f"{key or self._name + '-'}:{self._counts[key or '']}"
            if simulation.plan.poison and simulation.is_faulty and random.random() < simulation.plan.poison:
                token += POISON.decode()
            topic = random.choice(tuple(_TOPICS)) if key is None else ("orders", "bills")[ord(key[-1]) % 2]
            records.append(StoredRecord(database.draw(), topic, key, token.encode(), None, None, -1, create_time))
        long = random.random() < 0.05
        pause = random.random() * (4.0 if long else 0.01)
        simulation.seen["late commit"] += long
        simulation.scheduler.after(pause, lambda: self._end(name, records))

    def _end(self, name: str, records: list[StoredRecord]) -> None:
        simulation, random = self._simulation, self._random
        tokens = [str(record.value, "utf-8") for record in records if isinstance(record.value, bytes)]
        if random.random() < 0.1 or name not in simulation.database.writers:
            simulation.seen["rolled back"] += 1
            simulation.rolled_back.update(tokens)
        else:
            simulation.database.commit(records)
            simulation.committed.update(tokens)
            simulation.records.update(zip(tokens, records, strict=True))
        simulation.database.writers.discard(name)
        simulation.scheduler.after(random.expovariate(1 / simulation.plan.pause), self.begin)


@dataclass(slots=True)
class _Election:
    """The signals on a leader topic, as far as it was read."""

    read: int = 0
    claims: list[tuple[int, float]] = field(default_factory=list)  # offsets and times
    heartbeat_at: dict[int, float] = field(default_factory=dict)  # by claim: time of the last one


class Simulation:
    """A world with everything in it."""

    def __init__(self, plan: Plan, *, trace: int = 0) -> None:
        self.plan = plan
        self.mode = "at-least-once" if plan.is_mixed else plan.mode
        self.scheduler = Scheduler(plan.seed)
        self.seen: Counter[str] = Counter()
        if trace:
            self.scheduler.trace = deque(maxlen=trace)
        self.network = Network(self.scheduler)
        self.network.late, self.network.latency, self.network.slow = plan.late, plan.latency, plan.slow
        self.network.late_ends, self.network.longest_late = plan.late_ends, plan.longest_late
        self.network.late_produces = plan.late_produces
        self.cluster = Cluster(self.scheduler)
        self.cluster.seen = self.seen
        self.cluster.is_late = lambda: self.network.is_late
        self.database = Database(self.scheduler)
        self.database.slow_statements, self.database.slowest_statement = plan.slow_statements, plan.slowest_statement
        self.database.slow_answers = plan.slow_answers
        self.database.late_changes, self.database.server.distance = plan.late_changes, plan.database_distance
        self.database.on_hidden = lambda record: self.broken(f"the floor hides row {record.id}, which nobody has seen")
        self.committed: set[str] = set()
        self.records: dict[str, StoredRecord] = {}
        self.rolled_back: set[str] = set()
        self.skipped: set[str] = set()  # by an operator
        self.truncated: set[str] = set()
        self.lost: set[str] = set()  # by the database, in a failover
        self.revived: set[str] = set()  # by it
        self._outdated_holds: set[NewHold] = set()  # of truncated rows
        self.is_writing = self.is_faulty = True
        self.is_over = False
        self.faults = 0
        self.problem = ""
        self._problems = 0
        self._elections: dict[str, _Election] = {}
        self._leases_end_at = 0.0  # of those that rest on a leader topic that is gone
        self._resumed: dict[str, list[float]] = {}  # times, by process
        self._leading: set[Process] = set()  # at the last look
        self.nodes = [Node(self, number) for number in range(plan.harvesters)]
        self.outbox = OUTBOX
        self.liveness = Liveness(self)
        self.outages = Outages(self)
        self._illnesses = Illnesses(self)
        self._writers = [Writer(self, number) for number in range(plan.writers)]

    def config(self, name: str) -> HarvestConfig:
        """Return a harvester's configuration: small batches, so that much happens in a short time."""
        is_other = self.plan.is_mixed and int(name.rpartition("-")[2]) % 2 == 1
        return HarvestConfig(
            base_kafka_config={
                "bootstrap.servers": "simulated:9092",
                "heartbeat.interval.ms": 500 if self.plan.is_quiet else 200,  # the longest, and the default
            },
            data_source="postgresql://simulated/shop",
            name=name,
            delivery="exactly-once" if is_other else self.mode,
            limits=Limits(
                mark_query_records=35 if is_other else 20,
                max_in_flight_records=60,
                lane_capacity=8,
                transaction_timeout=timedelta(seconds=10),
                drain_timeout=timedelta(seconds=5),
            ),
        )

    def broken(self, problem: str) -> None:
        """Note that a promise is broken; the run ends, and what it has published is looked at."""
        if self._problems < _MOST_PROBLEMS:
            self._problems += 1
            self.problem = f"{self.problem}; {problem}" if self.problem else problem
            self.scheduler.note("BROKEN: %s", problem)

    def note_invariant(self, record: logging.LogRecord) -> None:
        """Note that the product has found an invariant broken: a broken promise, whichever thread the error ends."""
        task = getattr(getcurrent(), "task", None)
        if record.levelno >= logging.CRITICAL and (task is None or not task.process.is_dead):
            self.broken(f"{'the world' if task is None else task.process.name}: {record.getMessage()}")

    def run(self) -> None:
        """Run writers and faults for the plan's time, mend everything, and wait until nothing waits."""
        self._set_up()
        for node in self.nodes:
            node.start()
        for writer in self._writers:
            self.scheduler.after(1.0, writer.begin)
        self.scheduler.after(3.0, self._next_fault)
        self.scheduler.after(12.0, self._next_illness)
        self._watch()
        if self.plan.poison:
            self._skip_held()
        self._run_for(self.plan.seconds)
        self._mend()
        self._run_for(5.0)
        self.is_writing = False
        self._run_until_quiet()
        if not self.problem:
            self._check_all()
            self._end_all()
        for node in self.nodes:
            node.crash()

    def _set_up(self) -> None:
        for topic, width in _TOPICS.items():
            self.cluster.create(topic, width, {})
        if self.plan.foreign:
            self._write_foreign_manifest()
        if self.plan.neighbour:
            self.scheduler.after(3.0, self._begin_beside)
        if self.plan.changes_to:
            self.scheduler.after(self.plan.seconds / 2, self._change_delivery)

    def _end_all(self) -> None:
        """Ask all harvesters to stop: each ends in time, and leaves no thread."""
        if self.problem:
            return
        self.is_over = True
        for node in self.nodes:
            node.end()
        end = self.scheduler.now + _STOP_SECONDS
        self.scheduler.run(end, lambda: bool(self.problem) or not any(node.threads for node in self.nodes))
        for node in self.nodes:
            if node.threads:
                self.broken(f"{node.name} was asked to stop {_STOP_SECONDS:g} s ago, and has threads: {node.threads}")

    def _write_foreign_manifest(self) -> None:
        """Put another outbox's manifest where ours are, and have an operator take it away after a while."""
        names = self.config(self.nodes[0].name).tracking_names(OUTBOX)
        self.cluster.create(names.topic, 1, {"cleanup.policy": "compact"})
        value = Manifest("other.public.outbox", list(range(1, 61)), [0] * 60).encode()
        entry = Entry(0, COMMITTED, names.transactional_id.encode(), value, None, 0.0, -1)
        self.cluster.topics[names.topic][0].log.append(entry)
        self.scheduler.after(10.0, lambda: setattr(entry, "state", ABORTED))

    def _begin_beside(self) -> None:
        """Open another producer's transaction on the tracking topic, for a while."""
        topic = self.cluster.topics.get(self.config(self.nodes[0].name).tracking_names(OUTBOX).topic)
        if topic is not None and self.is_faulty:
            now, partition = self.scheduler.now, topic[0]
            epoch, record = int(now), Sent(b"neighbour", b"", None)
            partition.append(_NEIGHBOUR, epoch, 0, [record], now, is_transactional=True)
            self.scheduler.after(
                self.scheduler.random.uniform(4.0, 8.0),  # longer than it takes until another one leads
                lambda: partition.end_transaction(_NEIGHBOUR, epoch, self.scheduler.now, is_committed=False),
            )
        if self.is_faulty:
            self.scheduler.after(9.0, self._begin_beside)

    def _change_delivery(self) -> None:
        """Kill all harvesters, and start them with the other delivery."""
        self.scheduler.note("the delivery changes to %s", self.plan.changes_to)
        self.mode = self.plan.changes_to
        for node in self.nodes:
            node.crash()
            node.start()

    def _skip_held(self) -> None:
        """Have an operator delete records that Kafka has refused, and their holds."""
        rows = self.database.rows
        for hold in [hold for hold in self.database.holds if hold.record_id is not None]:
            row = rows.get(hold.record_id or 0)
            if row is not None and row.record.value is not None and POISON in row.record.value:
                self.seen["poison held"] += 1
                row.version += 1
                del rows[row.record.id]
                self.skipped.add(str(row.record.value, "utf-8"))
            elif row is not None and hold in self._outdated_holds:
                self.seen["held for a row that is gone"] += 1  # its id has come back
            elif row is not None:
                self.seen["held without need"] += 1
                self.broken(f"{row.record.value!r} is held, and Kafka would take it: {hold.error}")
            self._release(hold)
        self.scheduler.after(3.0, self._skip_held)

    def _run_for(self, seconds: float, *, until_done: bool = False) -> None:
        end = self.scheduler.now + seconds

        def stop() -> bool:
            return bool(self.problem) or (until_done and self._is_done)

        if not self.problem:
            self.scheduler.run(end, stop)

    @property
    def _is_done(self) -> bool:
        is_open = any(partition.open for topic in _TOPICS for partition in self.cluster.topics[topic])
        return not self.database.rows and not self.database.writers and not is_open

    def _run_until_quiet(self) -> None:
        """Run until nothing waits, and no transaction is open."""
        self._run_for(_MOST_QUIET_SECONDS, until_done=True)

    @property
    def is_disturbed(self) -> bool:
        """True while something fails for all harvesters."""
        servers = [*self.cluster.brokers, self.database.server]
        is_refusing = self.plan.poison > 0 and any(
            POISON in (row.record.value or b"") for row in self.database.rows.values()
        )
        is_locked = self.scheduler.now < self.database.locked_until
        return is_refusing or is_locked or bool(self.database.hidden) or not all(server.is_up for server in servers)

    def _watch(self) -> None:
        self.check_leases()  # and at each change of leadership
        bounds.check(self)
        self.liveness.watch()
        self.scheduler.after(0.25 if self.plan.is_quiet else 0.05, self._watch)

    def check_leases(self) -> None:
        """Note a broken promise unless at most one harvester has a valid lease."""
        leases = {node: left for node in self.nodes if (left := node.lease_left) > 0}
        self._note_lost_leases({node.process for node in leases if node.process is not None})
        heard = next(iter(self.cluster.groups.values())).heard_at if leases else {}
        for node, left in leases.items():
            if left > _LEASE_SECONDS + 0.001:
                self.broken(f"the lease of {node.name} lasts for {left:g} s more")
            renewed_at = self.scheduler.now + left - _LEASE_SECONDS
            if self.scheduler.now > self._leases_end_at:
                self._check_claims(node, renewed_at)
            if node.process is not None and renewed_at > heard.get(node.process.name, 0.0) + _SESSION_SECONDS:
                self.seen["cut off from the group alone"] += 1
        if len(leases) > 1:
            self.broken(f"two lead at once: {', '.join(node.name for node in leases)}")

    def _note_lost_leases(self, leading: set[Process]) -> None:
        lost, self._leading = self._leading - leading, leading
        for process in lost & self.database.reading:
            self.seen["lease lost with a scan under way"] += not process.is_dead

    def _check_claims(self, node: Node, renewed_at: float) -> None:
        """Note a broken promise unless a lease counts from the sending of a heartbeat, before any higher claim.

        A heartbeat that was sent after a claim stands behind it, so its sender has read the claim before it.
        """
        term, election = node.lease_term, self._election_of(node)
        if renewed_at > election.heartbeat_at.get(term, 0.0) + _SLACK_SECONDS:
            self.broken(f"the lease of {node.name} counts from {renewed_at:.3f}, when it had sent no heartbeat")
        for offset, time in reversed(election.claims):
            if offset <= term:
                break
            if time < renewed_at - _SLACK_SECONDS:
                self.broken(f"{node.name} leads on against the claim {offset}, which is higher than its own, {term}")

    def _election_of(self, node: Node) -> _Election:
        """Return the signals on a harvester's leader topic."""
        election = self._elections.setdefault(node.leader_topic, _Election())
        log = self.cluster.topics[node.leader_topic][0].log if node.leader_topic in self.cluster.topics else []
        for entry in log[election.read :]:
            match decode(entry.value):
                case Claim():
                    election.claims.append((entry.offset, entry.time))
                case Heartbeat(claim):
                    election.heartbeat_at[claim] = entry.time
        election.read = len(log)
        return election

    # -- faults

    def may_fault(self) -> bool:
        """Count a fault; False once the plan's number of them is reached."""
        self.faults += 1
        return self.faults <= self.plan.most_faults

    def _next_fault(self) -> None:
        if not self.is_faulty:
            return
        random = self.scheduler.random
        kinds = [fault for fault in self.plan.faults if fault != "at a step"]
        if kinds and self.may_fault():
            kind = random.choice(kinds)
            getattr(self, f"_fault_{kind.replace(' ', '_')}")(random)
        self.scheduler.after(random.expovariate(1 / self.plan.fault_pause), self._next_fault)

    def _next_illness(self) -> None:
        if self.is_faulty and self.plan.illnesses:
            if self.may_fault():
                self._illnesses.begin(self.scheduler.random.choice(self.plan.illnesses))
            self.scheduler.after(self.scheduler.random.expovariate(1 / self.plan.illness_pause), self._next_illness)

    def _any_server(self, random: Random) -> Server:
        return random.choice([*self.cluster.brokers, self.database.server])

    def _up_node(self, random: Random) -> Node | None:
        up = [node for node in self.nodes if node.is_up]
        return random.choice(up) if up else None

    def _fault_break(self, random: Random) -> None:
        server, share = self._any_server(random), random.choice((0.3, 1.0))
        self.scheduler.note("connections to %s break", server.name)
        self.liveness.disturb()
        self.network.break_some(lambda connection: connection.server is server, share)

    def _fault_cut(self, random: Random) -> None:
        node = self._up_node(random)
        if node is not None and node.process is not None:
            self._cut(node.process, self._any_server(random))

    def _fault_isolate(self, random: Random) -> None:
        node = self._up_node(random)
        if node is not None and node.process is not None:
            seconds = _cut_seconds(random) * self.plan.outage
            for broker in self.cluster.brokers:
                self._cut(node.process, broker, seconds)

    def _cut(self, process: Process, server: Server | None = None, seconds: float | None = None) -> None:
        server = server or self.scheduler.random.choice(self.cluster.brokers)
        self.scheduler.note("%s is cut off from %s", process.name, server.name)
        self.sever(process, server, Cut(), seconds or _cut_seconds(self.scheduler.random) * self.plan.outage)

    def sever(self, process: Process, server: Server, cut: Cut, seconds: float) -> None:
        """Put a fault on a link for a while, unless it has one."""
        breaks = self.scheduler.random.random() < 0.7
        if (process, server) in self.network.cut:
            return
        self.network.sever(process, server, cut)

        def mend() -> None:
            if self.network.cut.get((process, server)) is not cut:
                return
            self.scheduler.note("%s reaches %s again", process.name, server.name)
            if breaks and not cut.is_hung:
                self.network.break_some(lambda each: each.process is process and each.server is server)
            self.network.mend(process, server)

        self.scheduler.after(seconds, mend)

    def _break(self, process: Process) -> None:
        for node in self.nodes:
            if node.process is process:
                self.liveness.fell_ill(node)
        self.network.break_some(lambda connection: connection.process is process)

    def _fault_crash(self, random: Random) -> None:
        node = self._up_node(random)
        if node is not None:
            node.crash()
            self.restart_later(node)

    def restart_later(self, node: Node) -> None:
        """Start a crashed harvester again after a while."""
        pause = self.scheduler.random.choice((0.1, 1.0, 8.0)) * self.scheduler.random.random()
        self.scheduler.after(pause, lambda: None if node.is_up else node.start())

    def _fault_broker(self, random: Random) -> None:
        up = [number for number, broker in enumerate(self.cluster.brokers) if broker.is_up]
        if len(up) < 2:
            return
        number = random.choice(up)
        server = self.cluster.brokers[number]
        self.scheduler.note("%s crashes", server.name)
        self.cluster.crash(number)
        self.network.break_some(lambda connection: connection.server is server)
        self.scheduler.after((0.3 + 6 * random.random()) * self.plan.outage, lambda: self.cluster.restart(number))

    def _fault_move(self, random: Random) -> None:
        del random
        self.scheduler.note("all partitions get other leaders")
        self.liveness.disturb()
        self.cluster.move_leaders()

    def _fault_suspend(self, random: Random) -> None:
        node = self._up_node(random)
        if node is None or node.process is None:
            return
        if random.random() < 0.5:
            self._suspend(node.process)
        else:
            self._suspend_sending(node, self.scheduler.now + 1.0)

    def _suspend_sending(self, node: Node, give_up_at: float) -> None:
        """Suspend a harvester as soon as it has records in flight."""
        harvester, process = node.harvester, node.process
        if harvester is not None and process is not None and harvester.in_flight_records:
            self._suspend(process)
        elif self.is_faulty and self.scheduler.now < give_up_at:
            self.scheduler.after(_LOOK_SECONDS, lambda: self._suspend_sending(node, give_up_at))

    def _suspend(self, process: Process) -> None:
        random = self.scheduler.random
        self.suspend(process, random.choice((0.2, 3.0, 12.0)) * (0.5 + random.random()) * self.plan.outage)

    def suspend(self, process: Process, seconds: float) -> None:
        """Stop all steps of a process for a while."""
        if process.is_suspended or process.is_dead:
            return
        self.seen["suspended"] += 1
        self.scheduler.note("%s is suspended", process.name)
        process.suspend()

        def resume() -> None:
            if process.is_suspended:
                self.scheduler.note("%s goes on", process.name)
                self._resume(process)

        self.scheduler.after(seconds, resume)

    def _resume(self, process: Process) -> None:
        self._resumed.setdefault(process.name, []).append(self.scheduler.now)
        process.resume()

    def _fault_reassign(self, random: Random) -> None:
        self.scheduler.note("the group gives its partition to another member")
        self.liveness.disturb()
        self.cluster.reassign()
        for process in sorted(self._leading, key=lambda each: each.name):
            if random.random() < 0.5:
                server = random.choice((self.database.server, self._any_server(random)))
                self._cut(process, server, random.choice((2.0, 9.0)) * (0.5 + random.random()))

    def _fault_expel(self, random: Random) -> None:
        self.scheduler.note("the group removes its owner, whose connections break")
        self.liveness.disturb()
        self.cluster.expel()
        for process in sorted(self._leading, key=lambda each: each.name):
            self.scheduler.after(random.random() * _SESSION_SECONDS / 10, lambda process=process: self._break(process))

    def _fault_database(self, random: Random) -> None:
        server = self.database.server
        self.scheduler.note("the database restarts")
        self.outages.begin()
        server.is_up = False
        self.network.break_some(lambda connection: connection.server is server)
        self.scheduler.after(random.random() * 4 * self.plan.outage, lambda: setattr(server, "is_up", True))

    def _fault_truncate(self, random: Random) -> None:
        tokens = {str(row.record.value, "utf-8") for row in self.database.rows.values()}
        if random.random() < 0.3 and self.database.truncate():
            self.seen["truncated"] += 1
            self.liveness.disturb()
            self.truncated |= tokens
            self._outdated_holds.update(self.database.holds)
            self.scheduler.note("TRUNCATE ... RESTART IDENTITY of %d rows", len(tokens))

    def _fault_expire(self, random: Random) -> None:
        seconds = random.choice((0.3, 3.0))
        self.scheduler.note("transactional.ids and producers that were idle for %g s expire", seconds)
        self.seen["producers expire"] += 1
        self.liveness.disturb()
        self.cluster.expire(seconds)

    def _fault_hide(self, random: Random) -> None:
        hidden = random.choice(({"rows"}, {"rows"}, {"holds"}, {"rows", "holds"}))
        self.scheduler.note("a policy hides %s", " and ".join(sorted(hidden)))
        self.seen["rows or holds hidden"] += 1
        self.database.hidden |= hidden
        seconds = random.choice((0.3, 2.0, 9.0)) * random.random() * self.plan.outage
        self.scheduler.after(seconds, self.database.hidden.clear)

    def _fault_lock(self, random: Random) -> None:
        seconds = random.choice((5.0, 25.0, 50.0))
        self.scheduler.note("the table is locked against changes for %.0f s", seconds)
        self.seen["table locked"] += 1
        self.database.locked_until = max(self.database.locked_until, self.scheduler.now + seconds)

    def _fault_widen(self, random: Random) -> None:
        topic = random.choice(sorted(_TOPICS))
        if len(self.cluster.topics[topic]) < _WIDEST:
            self.scheduler.note("%s gets another partition", topic)
            self.seen["topic widened"] += 1
            self.cluster.widen(topic)

    def _fault_fail_over(self, random: Random) -> None:
        standby = self.database.standby()
        self.scheduler.after(random.choice((0.0, 0.1, 0.5)) * random.random(), lambda: self._fail_over(standby))

    def _fail_over(self, standby: Standby) -> None:
        lost, revived = self.database.promote(standby)
        self.scheduler.note("a standby is promoted: %d rows are lost, %d come back", len(lost), len(revived))
        self.seen["failover with lost or revived rows"] += bool(lost or revived)
        self.lost.update(map(_token, lost))
        self.revived.update(map(_token, revived))
        self._fault_database(self.scheduler.random)

    def _fault_put_back(self, random: Random) -> None:
        del random
        records = self.database.put_back()
        self.scheduler.note("%d rows are put back into the table, with their marks", len(records))
        self.seen["rows put back"] += bool(records)
        self.revived.update(map(_token, records))

    def _fault_leader_topic(self, random: Random) -> None:
        topic = self.nodes[0].leader_topic
        if topic not in self.cluster.topics:
            return
        self.scheduler.note("the leader topic is deleted")
        self.seen["leader topic deleted"] += 1
        self.liveness.disturb()
        self.cluster.delete(topic)
        self._elections.pop(topic, None)
        self._leases_end_at = self.scheduler.now + _LEASE_SECONDS
        width = random.choice(_MADE_BY_A_PRODUCER)
        self.scheduler.after(random.random(), lambda: self.cluster.create(topic, width, {}))

    def _fault_restart(self, random: Random) -> None:
        node = self._up_node(random)
        if node is not None:
            self.scheduler.note("%s is asked to stop", node.name)
            if node.process is not None and random.random() < 0.3:
                self._cut(node.process, random.choice(self.cluster.brokers))
            self.scheduler.after(0.1 * random.random(), node.stop)

    def _fault_hold(self, random: Random) -> None:
        key = f"w{random.randrange(self.plan.writers)}{random.choice('abc')}"
        topic = ("orders", "bills")[ord(key[-1]) % 2]
        hold = NewHold(topic, key if random.random() < 0.8 else None, None, "paused", f"{self.scheduler.now}")
        self.seen["held"] += 1
        self.database.set_holds([*self.database.holds, hold])
        self.scheduler.after(random.random() * 5, lambda: self._release(hold))

    def _release(self, hold: NewHold) -> None:
        if hold not in self.database.holds:
            return
        floor = max((node.floor for node in self.nodes), default=0)
        held = [row.record for row in self.database.rows.values() if covers(hold, row.record)]
        self.seen["hold released below the floor"] += any(record.id <= floor for record in held)
        self.database.set_holds([other for other in self.database.holds if other is not hold])

    def _mend(self) -> None:
        self.scheduler.note("everything is mended")
        self.is_faulty = False
        self.liveness.disturb()
        self.network.late_ends = self.network.late_produces = 0.0
        self.database.late_changes = self.database.slow_answers = 0.0
        self.database.set_holds([])
        self.database.server.is_up = True
        self.database.hidden.clear()
        self.database.locked_until = 0.0
        for process, server in list(self.network.cut):
            self.network.break_some(
                lambda each, process=process, server=server: each.process is process and each.server is server
            )
            self.network.mend(process, server)
        for number in range(len(self.cluster.brokers)):
            self.cluster.restart(number)
        for node in self.nodes:
            if node.process is not None:
                node.process.clock_error = 0.0
            if node.process is not None and node.process.is_suspended:
                self._resume(node.process)
            if not node.is_up:
                node.start()

    # -- promises

    def _check_all(self) -> None:
        self.seen["late request"] += self.network.delivered_late
        left = sorted(str(row.record.value, "utf-8") for row in self.database.rows.values())
        if left:
            self.broken(f"{len(left)} rows still wait {_MOST_QUIET_SECONDS:g} s after the last fault: {left[:5]}")
        counts: Counter[str] = Counter()
        for topic in _TOPICS:
            for partition in self.cluster.topics[topic]:
                if partition.stable_end < partition.end:
                    self.broken(f"a transaction is open on {topic}[{partition.number}]")
                published = [each for each in partition.log if each.state in (PLAIN, COMMITTED) and each.value]
                self._check_order(published)
                for entry in published:
                    token = (entry.value or b"").decode()
                    counts[token] += 1
                    self._check_holds(entry, token)
        self._check_counts(counts, set(left))

    def _check_order(self, published: list[Entry]) -> None:
        """Note a broken promise, once for a partition, if a record comes after a later one of its key.

        At least once, one that arrives after its delivery timeout is excused: its lease may have ended.
        """
        last: dict[bytes, int] = {}
        misplaced = []
        for entry in published:
            token = (entry.value or b"").decode()
            if entry.key is None or token in self.revived:
                continue
            number, before = int(token.partition(":")[2]), last.get(entry.key, 0)
            if entry.is_overdue and self.mode == "at-least-once":
                self.seen["late record of a replaced producer"] += number < before
                continue
            last[entry.key] = number
            if number < before:
                misplaced.append(f"{token} comes after {before} of its key")
        if misplaced:
            self.broken(", ".join(misplaced[:3]))

    def _check_holds(self, entry: Entry, token: str) -> None:
        """Note a broken promise if a process sent a record that it had read when it must have known of a hold."""
        record, sent = self.records.get(token), entry.sent
        if record is None or sent is None:
            return
        readings = self.database.read_at.get(token, ())
        before = [time for time, process in readings if process == sent.sender and time <= sent.handed_over_at]
        read_at = max(before, default=0.0)
        for time in self.database.hold_times:
            is_known = self._is_known(time, sent.sender, read_at) and sent.handed_over_at <= time.until
            if is_known and covers(time.hold, record):
                self.broken(f"{token} was published, and is held since {time.since:.3f}")

    def _is_known(self, time: HoldTime, process: str, now: float) -> bool:
        """Tell whether a process must have known of a hold; what it reads is as old as the answer when it goes on."""
        longest = self.plan.latency * self.plan.database_distance * _SLOWEST_ANSWER + LONGEST_DELAY_SECONDS
        since = max([time.since, *(each for each in self._resumed.get(process, ()) if each <= now)])
        return since + READ_EVERY_SECONDS + longest + _WAKE_SECONDS < now

    def _check_counts(self, counts: Counter[str], left: set[str]) -> None:
        invented = self.rolled_back & counts.keys()
        if invented:
            self.broken(f"published, and never committed: {sorted(invented)[:5]}")
        lost = self.committed - counts.keys() - self.truncated - self.skipped - self.lost - left
        if lost:
            self.broken(f"lost: {sorted(lost)[:5]} ({len(lost)} of {len(self.committed)})")
        repeated = sorted(token for token, count in counts.items() if count > 1 and token not in self.revived)
        self.seen["repeated"] += len(repeated)
        if repeated and self.mode == "exactly-once":
            self.broken(f"repeated: {repeated[:5]} ({len(repeated)})")


def _token(record: StoredRecord) -> str:
    return str(record.value, "utf-8")


@contextmanager
def _product_in(simulation: Simulation) -> Iterator[None]:
    """Put the simulated client library, threads and clocks in the place of the real ones."""
    originals = product_clients.Producer, product_clients.Consumer, product_clients.AdminClient
    scope: Any = product_clients
    scope.Producer, scope.Consumer, scope.AdminClient = clients.Producer, clients.Consumer, clients.AdminClient
    # A loop that looks every millisecond for reports that take many of them is half of the steps of a run.
    plan = simulation.plan
    tick = _TICK_SECONDS + plan.latency / 2
    # So is, in a long run, a member that looks twenty times a second whether it shall stop.
    look = member._LONGEST_WAIT_SECONDS * (5 if plan.is_quiet else 1)
    try:
        with (
            heard(_Log(simulation), {"outbox_core": logging.INFO}),
            patched(simulation.scheduler),
            patch.object(loop, "_TICK_SECONDS", tick),
            patch.object(member, "_LONGEST_WAIT_SECONDS", look),
        ):
            yield
    finally:
        scope.Producer, scope.Consumer, scope.AdminClient = originals


def run(plan: Plan, *, trace: int = 0) -> Outcome:
    """Run a plan."""
    simulation = Simulation(plan, trace=trace)
    run_to_its_end(simulation, _product_in(simulation))
    return Outcome.of(plan, simulation, len(simulation.committed))
