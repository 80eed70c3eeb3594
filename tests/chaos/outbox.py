"""One outbox of a chaos run: its table, its topics, the harvesters that contend for it, and the faults that meet it."""

import random
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

import psycopg
from confluent_kafka import KafkaException, Producer

from devstack.cluster import TRANSACTION_STATE, ProxyGroup
from devstack.errors import DevstackError
from devstack.frame_proxy import Api, Match
from devstack.links import LinkFault, Links, faulty
from devstack.processes import wait_until
from devstack.proxy import TcpProxy
from outbox_core.config import HarvestConfig
from outbox_core.config.models import TrackingNames
from outbox_core.errors import OutboxError
from outbox_core.holds import Holds
from tests.chaos.checker import STRANGER, Lane
from tests.chaos.failpoints import ArmedFailpoint
from tests.chaos.late import LATE_KINDS, LateArrival, LateKind, Net, caught_in, deliver, of_clients, of_transactions
from tests.chaos.process import HarvesterProcess
from tests.chaos.schedule import Fault
from tests.chaos.services import Services
from tests.chaos.worker import WorkerSettings

TRANSACTION_SECONDS = 2.0
LEASE_SECONDS = 2.0
SESSION_SECONDS = 3.0

_LIMITS = {
    "heartbeat_timeout": f"{LEASE_SECONDS:g}s",
    "transaction_timeout": f"{TRANSACTION_SECONDS:g}s",
    "mark_query_records": 250,
    "max_in_flight_records": 2000,
    "io_error_backoff": "100ms",
    "drain_timeout": "10s",
}
_KAFKA = {"session.timeout.ms": int(SESSION_SECONDS * 1000), "reconnect.backoff.max.ms": 500}
# Three brokers acknowledge a heartbeat later than one, on a small machine by a second: too late for a lease of two, of
# which at-least-once delivery needs 60% to send anything.
_CLUSTER_LIMITS = {"heartbeat_timeout": "5s", "transaction_timeout": "5s"}
_CLUSTER_KAFKA = {**_KAFKA, "session.timeout.ms": 6000}
_LEADER_SECONDS = 40.0
_SPRING_SECONDS = 30.0
_CATCH_SECONDS = 15.0
_PARTITIONS = 3
_RELEASE_SECONDS = 60.0


class Hit(NamedTuple):
    """A fault that was done.

    Attributes:
        what: its details.
        at: the time of its effect, in seconds since the epoch.
        late: the fate of a late request.
    """

    what: str
    at: float
    late: LateArrival | None = None


class Missed(Exception):
    """A fault that could not be done: there was no leader, or the step was not reached in time."""


@dataclass
class Crew:
    """The harvesters of one outbox: a member for each of its links, and extra ones that believe to lead, too."""

    members: list[HarvesterProcess | None]
    committed: list[int]
    extras: list[HarvesterProcess] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    started: int = 0


class ChaosOutbox:
    """An outbox with its crew. Its methods are called by one thread at a time.

    Args:
        services: database and broker.
        directory: for journals and logs.
        name: of the outbox; its table is called like it, and its topics begin with it.
        links: of each harvester; as many are kept running.
        delivery: the harvesters' mode.
        always_leads: whether all of its harvesters always believe to lead.
        as_shipped: whether its harvesters have the product's own limits, and no failpoints.
        limits: those that differ from the product's own, or else from the quick ones of the suite.
        breach: a rule that its harvesters break (`tests.chaos.worker.BREACHES`), '' for none.
    """

    def __init__(
        self,
        services: Services,
        directory: Path,
        name: str,
        links: Sequence[Links],
        *,
        delivery: str,
        always_leads: bool = False,
        as_shipped: bool = False,
        limits: dict[str, Any] | None = None,
        breach: str = "",
    ) -> None:
        self.name = name
        self.topics = [f"{name}-orders", f"{name}-payments"]
        self.compacted_topic = f"{name}-compacted"
        self._breach = breach
        self.delivery = delivery
        self._services = services
        self._directory = directory
        self._always_leads = always_leads
        self._as_shipped = as_shipped
        for_cluster = _CLUSTER_LIMITS if services.has_cluster else {}
        self._limits = {**({} if as_shipped else _LIMITS | for_cluster), **(limits or {})}
        for_cluster = _CLUSTER_KAFKA if services.has_cluster else _KAFKA
        self._kafka = {} if as_shipped else for_cluster
        self.links = links
        self._crew = Crew([None] * len(links), [0] * len(links))
        for link in links:
            link.database.start()

    # -- the crew

    def start(self) -> None:
        """Start all harvesters."""
        self.ensure()

    def ensure(self) -> None:
        """Replace the dead harvesters, as a supervisor would."""
        for side, process in enumerate(self._crew.members):
            if process is None or not process.is_running:
                if process is not None:
                    self._bury(process, side)
                self._crew.members[side] = self._new_process(side)
            elif process.is_frozen:  # its failpoint sprang after we had given up waiting for it
                process.thaw()

    def replace(self, side: int, delivery: str) -> None:
        """Send SIGTERM to one harvester, and start another in its place that delivers in this mode."""
        self.delivery = delivery
        process = self._crew.members[side]
        if process is not None:
            process.terminate()
        self.ensure()

    def leader(self, timeout: float = _LEADER_SECONDS) -> HarvesterProcess:
        """Wait for a leader; of several the one that began last, or any one if all always lead."""
        found: list[HarvesterProcess] = []

        def look() -> bool:
            self.ensure()
            found[:] = sorted(
                (process for process in self.running() if process.led_at is not None and not process.is_frozen),
                key=lambda process: process.led_at or 0.0,
            )
            return bool(found)

        if not wait_until(look, timeout=timeout, interval=0.05):
            raise Missed("nobody leads")
        return random.choice(found) if self._always_leads else found[-1]

    @property
    def members(self) -> list[HarvesterProcess | None]:
        """Return the harvester behind each of the links, running or not."""
        return self._crew.members

    @property
    def config(self) -> HarvestConfig:
        """Return the settings that harvesters take from the product's defaults."""
        return HarvestConfig(base_kafka_config={})

    @property
    def identity(self) -> str:
        """Return the name of the outbox in Kafka."""
        return f"postgres.public.{self.name}"

    def running(self) -> list[HarvesterProcess]:
        """Return the living members of the crew, each with its journal read up to now."""
        members = [process for process in self._crew.members if process is not None and process.is_running]
        for process in members:
            process.look()
        return members

    def stop(self) -> None:
        """Send SIGTERM to all."""
        for side, process in enumerate(self._crew.members):
            if process is not None:
                process.terminate()
                self._bury(process, side)
                self._crew.members[side] = None

    def discard(self) -> None:
        """End all processes that still run, in any state."""
        for process in (*self._crew.members, *self._crew.extras):
            if process is not None and process.is_running:
                process.kill()
        for link in self.links:
            link.database.stop()

    @property
    def failures(self) -> list[str]:
        """Return the harvesters that ended by themselves, with the ends of their logs."""
        return self._crew.failures

    @property
    def committed_by_side(self) -> list[int]:
        """Count the transactions committed by the harvesters of each side."""
        running = self._crew.members
        return [
            done + (process.committed if process is not None else 0)
            for done, process in zip(self._crew.committed, running, strict=True)
        ]

    def _bury(self, process: HarvesterProcess, side: int) -> None:
        process.look()
        self._crew.committed[side] += process.committed
        if process.exit_code not in {0, -9} or process.failure is not None:
            reason = process.failure or f"{process.name} ended with {process.exit_code}"
            self._crew.failures.append(f"{reason}\n{process.tail()}")

    def _new_process(self, side: int, *, always_leads: bool | None = None) -> HarvesterProcess:
        self._crew.started += 1
        name = f"{self.name}-{self._crew.started}"
        settings = WorkerSettings(
            name=name,
            dsn=self._services.through(self.links[side].database),
            bootstrap=self.links[side].brokers.bootstrap,
            table=self.name,
            journal=str(self._directory / f"{name}.jsonl"),
            delivery=self.delivery,
            always_leads=self._always_leads if always_leads is None else always_leads,
            kafka=self._kafka,
            limits=self._limits,
            traps=not self._as_shipped,
            breach=self._breach,
        )
        return HarvesterProcess(settings, self._directory / f"{name}.log")

    # -- the database

    def pending(self) -> int:
        """Count the load's rows in the outbox: their values begin with a number."""
        query = (
            f"SELECT count(*) FROM {self.name} "
            "WHERE octet_length(kafka_value) > 0 AND get_byte(kafka_value, 0) BETWEEN 48 AND 57"
        )
        with psycopg.connect(self._services.postgres.dsn) as connection:
            return connection.execute(query).fetchone()[0]

    def committed(self) -> dict[Lane, list[int]]:
        """Read all committed records, by lane."""
        lanes: dict[Lane, list[int]] = {}
        with psycopg.connect(self._services.postgres.dsn) as connection:
            query = f"SELECT topic, NULLIF(key, ''), array_agg(n) FROM {self.name}_ledger GROUP BY 1, 2"
            for topic, key, numbers in connection.execute(query):
                lanes[topic, key] = numbers
        return lanes

    # -- faults

    def suffer(self, fault: Fault) -> Hit:
        """Do a fault to this outbox, and end it.

        Raises:
            Missed: if it could not be done.
        """
        kind, _, what = fault.kind.partition(":")
        doing: dict[str, Callable[[], Hit]] = {
            "kill-leader": self._kill_leader,
            "freeze-leader": lambda: self._freeze_leader(fault),
            "kill": lambda: self._spring(ArmedFailpoint(what, fault.count, "kill", _delay(what, fault)))[1],
            "stop": lambda: self._spring_and_thaw(
                ArmedFailpoint(what, fault.count, "stop", _delay(what, fault)), fault
            ),
            "cut-database": lambda: self._cut_database(what, fault),
            "hold-topic": lambda: self._hold(what, fault, records=False),
            "hold-records": lambda: self._hold(what, fault, records=True),
            "two-leaders": lambda: self._two_leaders(fault),
            "rival": lambda: self._rival(fault, lingers=False),
            "rival-lingers": lambda: self._rival(fault, lingers=True),
            "late": lambda: self._late(LATE_KINDS[what], fault),
            "move-leader": lambda: self._move(fault, coordinator=False),
            "move-coordinator": lambda: self._move(fault, coordinator=True),
            "cut-leader": lambda: self._cut_one_broker(what, fault, coordinator=False),
            "cut-coordinator": lambda: self._cut_one_broker(what, fault, coordinator=True),
        }
        try:
            return doing[kind]()
        except DevstackError as error:  # a broker that is away cannot lead
            raise Missed(str(error)) from None

    @property
    def _transactional_id(self) -> str:
        return self._names.transactional_id

    @property
    def _names(self) -> TrackingNames:
        return self.config.tracking_names(self.identity)

    def _late(self, kind: LateKind, fault: Fault) -> Hit:
        """Catch a request of this outbox's leader, and deliver it when later transactions are open."""
        exactly_once = self.delivery == "exactly-once"
        identity = self._transactional_id if exactly_once else None
        of_both_sides = self._services.frame_proxies()
        leader = self.leader().name
        with (
            caught_in(Net(of_both_sides, lambda proxy: proxy.hold(self._match(kind)))) as net,
            self._provoked(kind),
        ):
            trap = net.wait(_CATCH_SECONDS)
            if trap is None:
                raise Missed("no such request came along")
            at = time.time()
            if not exactly_once and not self._goes_on_leading(leader, kind):
                trap.drop()  # bytes of a leader that was deposed meanwhile: only exactly once excludes their harm
                raise Missed("leadership changed while the request was held")
            arrival = deliver(trap, fault, of_both_sides, identity)
        code = "" if arrival.code is None else f", code {arrival.code}"
        return Hit(f"{arrival.request} {arrival.end} after {arrival.seconds:.2f} s{code}", at, arrival)

    def _match(self, kind: LateKind) -> Match:
        if kind.api in {Api.FETCH, Api.LIST_OFFSETS}:
            return of_clients(kind.api, f"{self.name}-")
        if self.delivery == "exactly-once":
            return of_transactions(kind.api, self._transactional_id, commits=kind.commits)
        return of_clients(kind.api, f"{self.name}-", mentions=self.topics[0].encode())

    @contextmanager
    def _provoked(self, kind: LateKind) -> Iterator[None]:
        """Let the harvester send such a request, if the load alone does not."""
        if kind.comes_with == "new-leader":
            self.leader().kill()
            self.ensure()
        if kind.comes_with != "bad-record":
            yield
            return
        # A record without a key is refused by a compacted topic, and its transaction aborted.
        self._execute(f"INSERT INTO {self.name} (kafka_topic, kafka_value) VALUES (%s, 'x')", self.compacted_topic)
        try:
            yield
        finally:
            with suppress(psycopg.Error, OutboxError, Missed):
                self._execute(f"DELETE FROM {self.name} WHERE kafka_topic = %s", self.compacted_topic)
                with psycopg.connect(self._services.postgres.dsn, autocommit=True) as connection:
                    Holds(self.name).release_records(connection, topic=self.compacted_topic)

    def _goes_on_leading(self, leader: str, kind: LateKind) -> bool:
        if kind.comes_with == "new-leader":
            return True
        time.sleep(1.0)  # the request has been repeated by now
        return any(process.name == leader and process.led_at is not None for process in self.running())

    def _execute(self, statement: str, *parameters: Any) -> None:
        try:
            with psycopg.connect(self._services.postgres.dsn, autocommit=True) as connection:
                connection.execute(statement, parameters)
        except psycopg.OperationalError as error:
            raise Missed(f"the database is away: {error}") from None

    def _broker_of(self, fault: Fault, *, coordinator: bool) -> tuple[int, str, int]:
        """Return the broker that coordinates our transactions, or leads one of our partitions; with that partition."""
        cluster = self._services.cluster
        if coordinator:
            partition = cluster.coordinating_partition(self._transactional_id)
            return cluster.coordinator_of(self._transactional_id), TRANSACTION_STATE, partition
        topic, partition = self.topics[fault.count % len(self.topics)], fault.count % _PARTITIONS
        return cluster.leader_of(topic, partition), topic, partition

    def _move(self, fault: Fault, *, coordinator: bool) -> Hit:
        broker, topic, partition = self._broker_of(fault, coordinator=coordinator)
        at, target = time.time(), (broker + fault.count) % 3 + 1
        if target == broker:
            target = broker % 3 + 1
        self._services.cluster.move_leader(topic, partition, target)
        return Hit(f"{topic}[{partition}] from {broker} to {target}", at)

    def _cut_one_broker(self, how: str, fault: Fault, *, coordinator: bool) -> Hit:
        leader = self.leader()
        side = self._crew.members.index(leader)
        broker, topic, partition = self._broker_of(fault, coordinator=coordinator)
        at, seconds = time.time(), 0.2 + 5 * fault.share
        cut_off(self.links[side].brokers.of[broker], how, seconds)
        return Hit(f"{topic}[{partition}]: broker {broker} from side {side} for {seconds:.1f} s", at)

    def _hold(self, then: str, fault: Fault, *, records: bool) -> Hit:
        """Pause a topic, or some keys by waiting records; release them after a while, perhaps under a new leader."""
        holds, began = Holds(self.name), time.time()
        try:
            with psycopg.connect(self._services.postgres.dsn, autocommit=True) as connection:
                self._add_holds(holds, connection, self.topics[fault.count % len(self.topics)], records=records)
            time.sleep(0.2 + 2.0 * fault.share)
            if then == "kill-and-release":
                self._kill_leader()
        except psycopg.OperationalError as error:
            raise Missed(f"the database is away: {error}") from None
        finally:
            released = wait_until(lambda: self._release(holds), _RELEASE_SECONDS)
        if not released:
            raise Missed("nothing could be released")  # the checker will find the records that stay held
        return Hit(f"{'records' if records else 'a topic'} for {time.time() - began:.1f} s", began)

    def _add_holds(self, holds: Holds, connection: psycopg.Connection[Any], topic: str, *, records: bool) -> None:
        if not records:
            holds.add(connection, topic)
            return
        waiting = connection.execute(f"SELECT id FROM {self.name} ORDER BY random() LIMIT 20").fetchall()
        for (identity,) in waiting:
            with suppress(OutboxError):  # published meanwhile
                holds.add_record(connection, identity)

    def _release(self, holds: Holds) -> bool:
        """Release everything; False if the database is away."""
        try:
            with psycopg.connect(self._services.postgres.dsn, autocommit=True) as connection:
                for topic in self.topics:
                    holds.release(connection, topic=topic)
                holds.release_records(connection)
        except psycopg.OperationalError:
            return False
        return True

    def _kill_leader(self) -> Hit:
        leader = self.leader()
        leader.kill()
        return Hit(leader.name, time.time())

    def _freeze_leader(self, fault: Fault) -> Hit:
        leader = self.leader()
        leader.freeze()
        return self._thaw_later(leader, fault)

    def _thaw_later(self, process: HarvesterProcess, fault: Fault) -> Hit:
        """Thaw a frozen process after its transaction's timeout, sometimes before and sometimes after a takeover."""
        frozen_at, seconds = time.time(), TRANSACTION_SECONDS + 0.7 + fault.share * (SESSION_SECONDS + 2.0)
        time.sleep(seconds)
        process.thaw()
        return Hit(f"{process.name} for {seconds:.1f} s", frozen_at)

    def _spring_and_thaw(self, failpoint: ArmedFailpoint, fault: Fault) -> Hit:
        return self._thaw_later(self._spring(failpoint)[0], fault)

    def _spring(self, failpoint: ArmedFailpoint) -> tuple[HarvesterProcess, Hit]:
        """Arm the leader and wait until it has died or frozen."""
        armed = [self.leader()]
        if failpoint.step == "after-init":  # a term must begin: another harvester takes over
            failpoint = replace(failpoint, count=1)
            armed[0].kill()
            self.ensure()
            armed = self.running()
        for process in armed:
            process.arm(failpoint)
        hit: list[HarvesterProcess] = []

        def sprung() -> bool:
            hit[:] = [process for process in armed if not process.is_running or process.is_frozen]
            return bool(hit)

        happened = wait_until(sprung, timeout=_SPRING_SECONDS, interval=0.01)
        at = time.time()
        for process in armed:
            if process not in hit:
                process.arm(None)
        if not happened:
            raise Missed(f"{failpoint} was not reached")
        return hit[0], Hit(f"{hit[0].name} at {failpoint}", at)

    def _cut_database(self, how: str, fault: Fault) -> Hit:
        leader, at = self.leader(), time.time()
        side = self._crew.members.index(leader)
        seconds = 0.2 + 4 * fault.share
        cut_off(self.links[side].database, how, seconds)
        return Hit(f"{leader.name} for {seconds:.1f} s", at)

    def _two_leaders(self, fault: Fault) -> Hit:
        """Start another process that believes to lead, for some seconds; then kill or stop it."""
        pretender = self._new_process(self._crew.started % len(self.links), always_leads=True)
        self._crew.extras.append(pretender)

        def works() -> bool:
            pretender.look()
            return pretender.committed > 0 or not pretender.is_running

        worked, at = wait_until(works, timeout=_LEADER_SECONDS), time.time()
        time.sleep(1 + 3 * fault.share)
        if fault.count % 2:
            pretender.kill()
        else:
            pretender.terminate()
        self._crew.extras.remove(pretender)
        pretender.look()
        if pretender.exit_code not in {0, -9}:
            self._crew.failures.append(f"{pretender.failure or pretender.name}\n{pretender.tail()}")
        if not worked:
            raise Missed("the second leader did not get to work")
        return Hit(f"{pretender.name} committed {pretender.committed}", at)

    def _rival(self, fault: Fault, *, lingers: bool) -> Hit:
        """Fence the leader by a producer of its transactional.id, which leaves a transaction open and goes away."""
        names = self._names
        bootstrap = self._services.kafka.bootstrap
        try:
            rival = fence(bootstrap, names, self.topics, timeout_seconds=TRANSACTION_SECONDS)
        except KafkaException as error:
            raise Missed(f"the rival did not get through: {error.args[0].str()}") from None
        at = time.time()
        if lingers:
            time.sleep(TRANSACTION_SECONDS * (0.5 + fault.share))
        del rival
        return Hit(names.transactional_id, at)


def fence(bootstrap: str, names: TrackingNames, topics: list[str], *, timeout_seconds: float) -> Producer:
    """Take an outbox's transactional.id, and leave a transaction open that holds records for all its topics.

    Raises:
        KafkaException: if the broker is away.
    """
    rival = Producer(
        {
            "bootstrap.servers": bootstrap,
            "transactional.id": names.transactional_id,
            "transaction.timeout.ms": int(timeout_seconds * 1000),
            "linger.ms": 0,
            "log_level": 0,
        }
    )
    rival.init_transactions(10)
    rival.begin_transaction()
    for topic in topics:
        rival.produce(topic, b"%d" % STRANGER, b"key-0")
    rival.produce(names.topic, b"half a manifest", names.transactional_id, 0)
    with suppress(KafkaException):  # it is fenced in its turn
        rival.flush(1)
    return rival


def cut_off(proxy: TcpProxy | ProxyGroup, how: str, seconds: float) -> None:
    """Cut a proxy's connections for a while.

    Args:
        proxy: between a harvester and a service.
        how: `hold`, a black hole that forwards in the end what it has held; `drop`, one that swallows everything, and
            in the end breaks the connections; `reset`, connections break at once and new ones are refused.
        seconds: for how long.
    """
    fault = LinkFault.REFUSE if how == "reset" else LinkFault.HOLE
    with faulty([proxy], fault, drop=how == "drop"):
        time.sleep(seconds)


def _delay(step: str, fault: Fault) -> float:
    """Return the delay of a fault: during a commit, a random moment of the milliseconds that it takes."""
    return 0.0005 + 0.012 * fault.share if step == "commit-sent" else 0.0
