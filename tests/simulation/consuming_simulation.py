"""One run behind the topic: consumers with an inbox, handlers of queues and workers of tasks, on a database that fails.

`consume` (on a driver's connection and in Django), the inbox, queue handlers and Django's tasks run as they are, with
Django's own `atomic` and ORM. An application stashes records and enqueues tasks; what it has committed is published at
least once, by a stand-in for the harvester that repeats some records.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

import psycopg
from confluent_kafka import KafkaException
from django.db import Error as DjangoError
from django.db import close_old_connections, transaction

from outbox_core.consuming import ID_HEADER, backoff, consume, message_id_of
from outbox_core.errors import AcceptanceLost, OutboxError
from outbox_core.inbox import Inbox
from outbox_core.kafka import clients as product_clients
from outbox_core.record import OutboxRecord
from outbox_queue import Message, QueueConfig, QueueService, Reject
from tests.simulation import clients, queue_kafka
from tests.simulation.consuming_django import connections, django_in
from tests.simulation.consuming_kafka import Consumer
from tests.simulation.consuming_oracle import EVENTS, RESULTS, TASKS, Call, Oracle
from tests.simulation.disturbances import Disturbances
from tests.simulation.network import Server
from tests.simulation.queue_simulation import _ANSWERS, _SMALL, QueuePlan, QueueSimulation, TrackerNode, _Log, _Node
from tests.simulation.running import heard, run_to_its_end
from tests.simulation.scheduling import Process, current
from tests.simulation.simulation import Outcome, Simulation, _cut_seconds
from tests.simulation.tables import CONNECT, FAILS, DriverConnection, Place, Row, Tables
from tests.simulation.threads import Event, patched

from outbox_django import stash  # isort: skip  after `consuming_django`, which sets Django up
from outbox_django.consuming import consume as consume_in_django  # isort: skip
from outbox_django.tasks import worker  # isort: skip
from outbox_django.tasks.backend import OutboxTaskBackend  # isort: skip
from outbox_django.tasks.library import Task  # isort: skip

MODE = "consumers"
FAULTS = (
    "break", "cut", "crash", "at a statement", "at a call", "in a handler", "broker", "move", "suspend", "restart",
    "database", "terminate",
)  # fmt: skip
GROUPS = ("bare", "django", "queue", TASKS)
CONDUCTS = (
    "slow", "too slow", "fail", "swallow", "savepoint", "roll back", "roll back and work", "commit", "lose", "mark",
    "unkeepable", "exit", "no autocommit", "receivers",
)  # fmt: skip
_TOPICS = {EVENTS: 3, "messages": 3, "markers": 2, "dead": 1}
_OUTBOX = "shop.public.outbox"
_QUEUE = "emails"
_POLL_INTERVAL_SECONDS = 4.0
_TIMEOUT_SECONDS = 4.0
_PROCESSING_SECONDS = 9.0
_MOST_ATTEMPTS = 4
_MOST_QUIET_SECONDS = 120.0
_RESTART_SECONDS = 4.0
_TABLE = Inbox()
_STATEMENTS = {"roll back": "ROLLBACK", "commit": "COMMIT"}
_EFFECT = "INSERT INTO effect (source, message_id) VALUES (%s, %s)"


class HandlerFails(Exception):
    """An error of a handler or a task."""


class ReceiverFails(Exception):
    """An error of a receiver of signals."""


_EXPECTED = (HandlerFails, psycopg.Error, DjangoError, OutboxError, KafkaException)
"""The errors of `consume` for what its handlers and the world do; any other ends the run."""


def _task(function: Callable[..., object]) -> Task[Any, Any]:
    return Task(priority=0, func=function, backend="default", queue_name="default")


@_task
def work(token: str) -> object:
    """Do the work of a task, as the world of the process that runs wants it."""
    process: Any = current().process
    return process.world.do_task(token)


@dataclass
class ConsumerPlan(QueuePlan):
    """The parts of a run; a seed draws them, and shrinking takes some away."""

    groups: tuple[str, ...] = GROUPS
    conducts: tuple[str, ...] = CONDUCTS
    commit: str = "sync"
    retries: bool = False
    repeats: float = 0.05  # the share of records that are published twice
    max_age: float | None = 0  # of Django's connections, in seconds; None: they live for ever
    health_checks: bool = False
    KINDS = ("faults", "conducts", "groups")
    NUMBERS = ("consumers", "trackers")

    @classmethod
    def of(cls, seed: int, mode: str = MODE) -> ConsumerPlan:
        """Draw a plan: each seed switches a random subset of faults, groups and conducts of handlers on."""
        random = Random(seed * 611_953 + 7)
        share = random.choice((0.2, 0.4, 0.7))
        faults = tuple(fault for fault in FAULTS if random.random() < share)
        groups = tuple(group for group in GROUPS if random.random() < 0.5)
        # Not more records than a consumer can take that waits for the database five times for each.
        latency, pause = random.choice(((0.001, 0.5), (0.001, 1.5), (0.005, 1.0), (0.03, 3.0)))
        return cls(
            seed,
            mode,
            faults or ("at a statement",),
            harvesters=0,
            writers=1,
            seconds=random.choice((20.0, 40.0, 80.0)),
            late=random.choice((0.0, 0.4, 0.9)),
            latency=latency,
            pause=pause,
            drift=random.choice((0.0, 0.0, 1e-4)),
            consumers=random.choice((1, 2, 2)),
            trackers=random.choice((1, 1, 2)),
            is_transactional=random.random() < 0.5,
            groups=groups or (random.choice(GROUPS),),
            conducts=tuple(conduct for conduct in CONDUCTS if random.random() < 0.5),
            commit=random.choice(("sync", "sync", "stored")),
            retries=random.random() < 0.5,
            max_age=random.choice((0, 2.0, None)),
            health_checks=random.random() < 0.5,
            step_share=random.choice((0.01, 0.05)),
        )

    def calm(self) -> ConsumerPlan:
        """Return a plan that is long, with one kind of consumers, few records and rare faults."""
        random = Random(self.seed)
        return replace(
            self,
            seconds=random.choice((1200.0, 2400.0, 3600.0)),
            pause=random.choice((3.0, 10.0)),
            fault_pause=random.choice((5.0, 20.0)),
            step_share=0.02,
            groups=(random.choice(self.groups),),
            trackers=1,
        )


SITUATION: Mapping[str, Any] = MappingProxyType({})
"""Changes of the plans of all runs: the situation in which a rule counts that is broken on purpose."""

SENTINELS_IN_LOG = {
    "acceptance lost, tried again": "AcceptanceLost",
    "handled, offset not committed": "is handled, and will be seen again",
    "state of a task not written": "its state cannot be written",
    "successful before": "was successful before",
}

CONSUMER_SENTINELS = (
    "handled", "repeat", "acceptance lost", "outcome of a COMMIT unknown",
    "COMMIT taken effect, and its answer lost", "statement refused", "session terminated", "database restarts",
    "waits for another transaction", "fault at a statement", "crash in a handler", "fault at a call", "set back",
    "not polled for too long", "stored offsets committed", "partitions revoked", "partitions lost", "member expired",
    "commit of offsets repeated", "committed offset went back", "suspended", "late request",
    "rolled back by the application", "published twice", "task started again", "task given back",
    "task not successful", "a receiver raised",
    "task of a process that died", "copies of one task at once",
    *(f"handler: {conduct}" for conduct in CONDUCTS if conduct != "receivers"),
    *SENTINELS_IN_LOG,
)  # fmt: skip
"""States that a number of runs should reach; a report names those that were never reached."""


class _ConsumerLog(_Log):
    """Counts the log lines of consumers, too."""

    def emit(self, record: logging.LogRecord) -> None:
        super().emit(record)
        text = record.getMessage()
        for sentinel, part in SENTINELS_IN_LOG.items():
            self._simulation.seen[sentinel] += part in text


# -- processes


class _Consuming(_Node):
    """A process with one consumer, which runs `consume` again and again."""

    group = ""

    def work(self) -> None:
        simulation = self.simulation
        consumer = Consumer(
            {
                "bootstrap.servers": "simulated:9092",
                "group.id": self.group,
                "session.timeout.ms": 3000,
                "heartbeat.interval.ms": 500,
                "max.poll.interval.ms": _POLL_INTERVAL_SECONDS * 1000,
                "enable.auto.offset.store": False,
                "enable.auto.commit": simulation.plan.commit == "stored",
                "auto.commit.interval.ms": 1000,
            }
        )
        consumer.subscribe([EVENTS])
        while not self.stopping.is_set():
            before = simulation.acknowledged_by[current().process]
            try:
                consumed = self.consume(
                    consumer,
                    commit=simulation.plan.commit,
                    retry=backoff(simulation.scheduler.random.randrange(1, 5)) if simulation.plan.retries else None,
                    max_records=simulation.scheduler.random.choice((3, 20)),
                    stop=self.stopping,
                )
            except _EXPECTED as error:
                simulation.scheduler.note("%s: %s: %s", self.name, type(error).__name__, error)
                simulation.seen["acceptance lost"] += isinstance(error, AcceptanceLost)
                Event().wait(0.1)
            else:
                simulation.seen["handled"] += consumed.handled
                simulation.seen["repeat"] += consumed.repeats
                committed = simulation.acknowledged_by[current().process] - before
                if consumed.handled > committed:
                    simulation.broken(
                        f"{self.name} reports {consumed.handled} records as handled, and committed {committed}"
                    )
        consumer.close()

    def consume(self, consumer: Any, **options: Any) -> Any:
        """Call the product's function."""
        raise NotImplementedError


class BareConsumer(_Consuming):
    """A process that consumes on a driver's connections."""

    group = "bare"

    def consume(self, consumer: Any, **options: Any) -> Any:
        def handle(connection: DriverConnection, message: Any) -> None:
            self.simulation.handle_record(self.group, message_id_of(message), connection, connection.execute)

        return consume(consumer, handle, lambda: DriverConnection(self.simulation), **options)


class DjangoConsumer(_Consuming):
    """A process that consumes in Django's transactions."""

    group = "django"

    def consume(self, consumer: Any, **options: Any) -> Any:
        def handle(message: Any) -> None:
            with connections["default"].cursor() as cursor:
                wire = connections["default"].connection
                self.simulation.handle_record(self.group, message_id_of(message), wire, cursor.execute)

        return consume_in_django(consumer, handle, **options)


class QueueNode(_Node):
    """A process with handlers of a queue that accept each message once."""

    def work(self) -> None:
        queue = QueueService(self.simulation.settings()).queue(_QUEUE)
        while not self.stopping.is_set():
            try:
                queue.run(
                    self.simulation.handle_message,
                    concurrency=2,
                    drain_timeout=timedelta(seconds=3),
                    stop=self.stopping,
                    on_signals=False,
                )
            except OutboxError as error:
                self.simulation.scheduler.note("%s: %s: %s", self.name, type(error).__name__, error)
                Event().wait(0.5)


class TaskNode(_Node):
    """A process that runs Django's tasks."""

    def work(self) -> None:
        while not self.stopping.is_set():
            with suppress(OutboxError):
                worker.run_tasks(
                    self.simulation.task_backend(),
                    ["default"],
                    concurrency=2,
                    drain_timeout=timedelta(seconds=3),
                    stop=self.stopping,
                )
            Event().wait(0.5)


class Application(_Node):
    """A process that stashes records, tasks and messages, in transactions of which some are rolled back."""

    def work(self) -> None:
        simulation, random = self.simulation, self.simulation.scheduler.random
        tasks, queue = simulation.task_backend(), QueueService(simulation.settings()).queue(_QUEUE)
        number = 0
        while not self.stopping.is_set():
            Event().wait(random.expovariate(1 / simulation.plan.pause))
            if not (simulation.is_writing and simulation.plan.groups):
                continue
            number += 1
            with suppress(DjangoError, HandlerFails):
                close_old_connections()
                with transaction.atomic():
                    for place in range(random.choice((1, 1, 2, 5))):
                        self._write(random.choice(simulation.plan.groups), f"{number}.{place}", tasks, queue)
                    if random.random() < 0.1:
                        simulation.seen["rolled back by the application"] += 1
                        raise HandlerFails

    def _write(self, group: str, token: str, tasks: OutboxTaskBackend, queue: Any) -> None:
        token = f"{self.process.name if self.process else ''}:{token}"
        if group == TASKS:
            tasks.enqueue(work, (token,), {})
        elif group == "queue":
            queue.stash(connections["default"], token)
        else:
            stash(OutboxRecord(topic=EVENTS, key=token[-1], value=token))


# -- the world


class ConsumerSimulation(QueueSimulation):
    """A world with consumers, their database and their queues."""

    plan: ConsumerPlan
    longest_seconds = _PROCESSING_SECONDS - 1.0
    timeout_seconds = _TIMEOUT_SECONDS

    def __init__(self, plan: ConsumerPlan, *, trace: int = 0) -> None:
        super().__init__(plan, trace=trace)
        self.tables = Tables(self.scheduler, self.database.server)
        self.tables.reached = self._reached
        self.truth = Oracle(self)
        self.tables.on_commit = self.truth.committed
        self.connection_settings = {"CONN_MAX_AGE": plan.max_age, "CONN_HEALTH_CHECKS": plan.health_checks}
        self.acknowledged_by: Counter[Process] = Counter()
        self.disturbances = self._disturbances
        self.database_disturbances = Disturbances()
        kinds = {"bare": BareConsumer, "django": DjangoConsumer, "queue": QueueNode, TASKS: TaskNode}
        workers = [kinds[group](self, f"{group}-{number}") for group in plan.groups for number in range(plan.consumers)]
        self.trackers = [TrackerNode(self, f"tracker-{number}") for number in range(plan.trackers)]
        self.trackers = self.trackers if {"queue", TASKS} & set(plan.groups) else []
        self.consumers = []
        nodes: Any = [*self.trackers, *workers, Application(self, "application")]
        self.nodes = nodes
        self._relayed: set[int] = set()
        self._published: set[str] = set()
        commit = self.cluster.offsets.commit

        def committing(group: str, offsets: Mapping[Any, int]) -> None:
            self.truth.offsets_committed(group, dict(offsets))
            commit(group, offsets)

        self.cluster.offsets.commit = committing  # type: ignore[method-assign]

    def settings(self) -> QueueConfig:
        """Return the settings of all processes: short times, so that much happens."""
        return QueueConfig(**self._queue_options())

    def _queue_options(self) -> dict[str, Any]:
        return {
            "bootstrap_servers": "simulated:9092",
            "message_topic": "messages",
            "marker_topic": "markers",
            "dead_letter_topic": "dead",
            "message_partitions": _TOPICS["messages"],
            "marker_partitions": _TOPICS["markers"],
            "marker_retention": timedelta(hours=2),
            "redelivery_timeout": timedelta(seconds=_TIMEOUT_SECONDS),
            "max_processing_time": timedelta(seconds=_PROCESSING_SECONDS),
            "max_delay": timedelta(seconds=4),
            "max_attempts": _MOST_ATTEMPTS,
            "max_in_progress": 4,
            "receive_buffer_capacity": 10,
            "transactional": self.plan.is_transactional,
            "transaction_timeout": timedelta(seconds=self.plan.transaction_seconds),
            "delivery_timeout": timedelta(seconds=8),
            "close_timeout": timedelta(seconds=3),
        }

    def task_backend(self) -> OutboxTaskBackend:
        """Return a backend of tasks for a process."""
        return OutboxTaskBackend("default", {"QUEUES": [], "OPTIONS": {"queue": self._queue_options()}})

    def run(self) -> None:
        """Run everything with faults for the plan's time, mend everything, and wait until nothing waits."""
        for topic, width in _TOPICS.items():
            settings = {"retention.ms": "7200000", "message.timestamp.type": "CreateTime"}
            if topic == "markers":
                settings["message.timestamp.type"] = "LogAppendTime"
            self.cluster.create(topic, width, settings)
        self.has_begun = True
        for node in self.nodes:
            node.start()
        relay: Any = Process(self.scheduler, "relay")
        relay.world = self
        relay.spawn(self._relay, "relay")
        self.scheduler.after(3.0, self._next_fault)
        self._run_for(self.plan.seconds)
        self._mend()
        self._quiet_since = self.scheduler.now
        self._run_for(2.0)
        self.is_writing = False
        self._run_for(_MOST_QUIET_SECONDS, until_done=True)
        self.has_begun = False
        if not self.problem:
            self._check_all()
        for node in self.nodes:
            node.crash()
        relay.crash()

    def _mend(self) -> None:
        super()._mend()
        for disturbances in (self._disturbances, self.database_disturbances):
            disturbances.add(self.scheduler.now, 2.0)

    # -- what is published

    def _relay(self) -> None:
        """Publish what is committed in the outbox, at least once; a row goes when Kafka has its record."""
        producer = queue_kafka.Producer({"bootstrap.servers": "simulated:9092", "delivery.timeout.ms": 8000})
        while True:
            for number, row in list(self.tables.rows.get("outbox", {}).items()):
                if number not in self._relayed:
                    self._relayed.add(number)
                    is_repeated = self.is_faulty and self.scheduler.random.random() < self.plan.repeats
                    self.seen["published twice"] += is_repeated
                    for _ in range(1 + is_repeated):
                        self._publish(producer, number, row)
            producer.poll(0)
            Event().wait(0.1)

    def _publish(self, producer: Any, number: int, row: Row) -> None:
        name = f"{_OUTBOX}:{number}"
        headers = list(zip(row["kafka_header_keys"], row["kafka_header_values"], strict=True))
        value, partition = row["kafka_value"], row["kafka_partition"]

        def reported(error: Any, _: Any) -> None:
            if error is not None:
                self._relayed.discard(number)
            else:
                self.tables.rows["outbox"].pop(number, None)
                self._published |= {name} if row["kafka_topic"] == EVENTS else set()

        key = None if row["kafka_key"] is None else row["kafka_key"].encode()
        partition = self.scheduler.random.randrange(3) if partition is None else partition
        producer.produce(
            row["kafka_topic"], value, key, partition, headers=[*headers, (ID_HEADER, name.encode())],
            on_delivery=reported,
        )  # fmt: skip

    # -- handlers

    def handle_record(self, group: str, name: str, connection: DriverConnection, run: Callable[..., object]) -> None:
        """Handle a record on a connection, as the plan wants: its effect is a row."""
        process = current().process
        self._at_work[process.name] += 1
        try:
            self._die_now_and_then(process)
            self._work_in(self._conduct_of(), (group, name), connection, run)
            self._die_now_and_then(process)
        finally:
            self._at_work[process.name] -= 1

    def _conduct_of(self, *without: str) -> str:
        random = self.scheduler.random
        conducts = [each for each in self.plan.conducts if each not in without] if self.is_faulty else []
        conduct = random.choice(conducts) if conducts and random.random() < 0.3 else ""
        self.seen[f"handler: {conduct}"] += 1
        return conduct

    def _work_in(
        self, conduct: str, key: tuple[str, str], connection: DriverConnection, run: Callable[..., object]
    ) -> None:
        self.scheduler.note("%s handles %s: %s", current().process.name, key[1], conduct or "well")
        self._begin_work(conduct, run)
        run(_EFFECT, key)
        if conduct == "fail":
            raise HandlerFails("the handler fails")
        if conduct == "swallow":
            with suppress(psycopg.Error, DjangoError):
                run(FAILS)
        elif conduct in _STATEMENTS:
            run(_STATEMENTS[conduct])
        elif conduct == "lose":
            self.network.break_connection(connection.wire)
            with suppress(psycopg.Error, DjangoError):
                run("SELECT 1")
        elif conduct == "mark" and connections["default"].in_atomic_block:
            transaction.set_rollback(True)

    def _begin_work(self, conduct: str, run: Callable[..., object]) -> None:
        random, wait = self.scheduler.random, current().wait
        wait(random.choice((0.0, 0.02, 0.2)) * random.random())
        if conduct == "slow":
            wait(random.uniform(0.5, 2.5))
        elif conduct == "too slow":
            wait(_POLL_INTERVAL_SECONDS * random.uniform(1.0, 2.0))
        elif conduct == "roll back and work":
            run("ROLLBACK")
        elif conduct == "savepoint":
            run("SAVEPOINT mine")
            with suppress(psycopg.Error, DjangoError):
                run(FAILS)
            run("ROLLBACK TO SAVEPOINT mine")

    def handle_message(self, message: Message) -> None:
        """Accept a message of a queue once, by its id, and handle it in that transaction: the docs' recipe."""
        with DriverConnection(self) as connection:
            if _TABLE.accept(connection, "queue", message.id):
                self.handle_record("queue", message.id, connection, connection.execute)
                _TABLE.confirm(connection, "queue", message.id)
        if not self.truth.accepted["queue", message.id]:
            self.broken(f"message {message.id} is reported as done, and was not accepted")

    def do_task(self, token: str) -> object:
        """Do the work of a task, and leave its connection as the plan wants."""
        call: Call = vars(current())["call"]
        self.scheduler.note("%s runs task %s, attempt %d", call.process.name, call.task, call.attempt)
        self.truth.started(call)
        self.seen["task started again"] += self.truth.tasks[call.task].starts > 1
        others = [each for each in self.truth.tasks[call.task].calls if each.has_started and not each.outcome]
        self.seen["copies of one task at once"] += len(others) > 1
        raised: BaseException | None = None
        self._at_work[call.process.name] += 1
        try:
            return self._do_task(call, token)
        except BaseException as error:
            raised = error
            raise
        finally:
            self._at_work[call.process.name] -= 1
            if not call.process.is_dead:
                call.failures = 0  # those behind this moment may keep the result from being written
                self.truth.left(call, raised)
            else:
                self.seen["task of a process that died"] += 1

    def _do_task(self, call: Call, token: str) -> object:
        random, connection = self.scheduler.random, connections["default"]
        conduct = self._conduct_of("mark", "savepoint", "roll back and work", "commit")
        self._die_now_and_then(call.process)
        current().wait(random.choice((0.0, 0.02, 0.3)) * random.random())
        if conduct == "slow":
            current().wait(random.uniform(0.5, 6.0))
        elif conduct == "too slow":
            current().wait(_PROCESSING_SECONDS * random.uniform(0.9, 1.6))
        with transaction.atomic(), connection.cursor() as cursor:
            cursor.execute(_EFFECT, (TASKS, call.task))
            if conduct == "fail":
                raise HandlerFails("the task fails")
        if conduct == "exit":
            raise SystemExit("the task exits")
        if conduct == "unkeepable":
            self.truth.fails_by(call, Reject)
            return object()
        if conduct in ("lose", "swallow", "roll back"):
            connection.ensure_connection()
            if conduct != "lose":
                self.truth.fails_by(call, worker.TransactionLeftOpen)
                connection.set_autocommit(False)
            else:
                self.network.break_connection(connection.connection.wire)
            with suppress(DjangoError), connection.cursor() as cursor:
                cursor.execute(FAILS)
        elif conduct == "no autocommit":
            connection.set_autocommit(False)
        self._die_now_and_then(call.process)
        return token

    def hear(self, **_: object) -> None:
        """Hear that a task has started or finished, as receivers that fail do."""
        if self.is_faulty and "receivers" in self.plan.conducts and self.scheduler.random.random() < 0.2:
            self.seen["a receiver raised"] += 1
            raise ReceiverFails("the receiver fails")

    def acknowledged(self, process: Process, changes: dict[Place, Row]) -> None:
        """Note that a process knows of a commit."""
        self.acknowledged_by[process] += sum(table == "inbox" for table, _ in changes)

    def failed(self) -> None:
        """Note that a statement of the thread that runs has failed, or got no answer."""
        call = vars(current()).get("call")
        if call is not None:
            call.failures += 1

    def in_doubt(self, *, has_committed: bool) -> None:
        """Note that the connection of the thread that runs was lost in a COMMIT."""
        self.seen["outcome of a COMMIT unknown"] += 1
        self.seen["COMMIT taken effect, and its answer lost"] += has_committed
        call = vars(current()).get("call")
        if call is not None and not call.has_started:
            call.is_in_doubt = True

    def is_stopping(self, process: Process) -> bool:
        """Tell whether a process was asked to stop, or is gone."""
        node: Any = next((node for node in self.nodes if node.process is process), None)
        return node is None or node.stopping.is_set()

    # -- faults

    def _reached(self, what: str) -> None:
        self.seen[what] += 1

    def at_statement(self, connection: DriverConnection, sql: str) -> str:
        """Do something now and then to a statement that is about to be sent, most often to a COMMIT."""
        random, plan, process = self.scheduler.random, self.plan, current().process
        share = plan.step_share * (4 if sql == "COMMIT" else 1)
        if "at a statement" not in plan.faults or not self.is_faulty or random.random() > share:
            return ""
        if not self.may_fault():
            return ""
        kind = random.choice(("break", "break", "break first", "refuse", "refuse", "crash", "crash soon", "cut"))
        self.seen["fault at a statement"] += 1
        self.scheduler.note("%s: %s at %s", process.name, kind, sql.strip()[:40])
        if kind == "break first":
            self.network.break_connection(connection.wire)
        elif kind == "crash":
            self._die(process)
        elif kind == "crash soon":
            node: Any = next(node for node in self.nodes if node.process is process)
            self.scheduler.after(random.random() * 4 * plan.latency, lambda: self._crash(node, process))
        elif kind == "cut":
            self._cut(process, self.database.server)
        return kind if kind == "break" or (kind == "refuse" and sql not in (CONNECT, "ROLLBACK")) else ""

    def _crash(self, node: Any, process: Process) -> None:
        if node.process is process and node.is_up:
            node.crash()
            self.restart_later(node)

    def _any_server(self, random: Random) -> Any:
        return random.choice([*self.cluster.brokers, self.database.server, self.database.server])

    def _next_fault(self) -> None:
        if not self.is_faulty:
            return
        random = self.scheduler.random
        kinds = [fault for fault in self.plan.faults if not fault.startswith(("in a", "at a"))]
        if kinds and self.may_fault():
            getattr(self, f"_fault_{random.choice(kinds)}")(random)
        self.scheduler.after(random.expovariate(1 / self.plan.fault_pause), self._next_fault)

    def _fault_break(self, random: Random) -> None:
        self.database_disturbances.add(self.scheduler.now)
        super()._fault_break(random)

    def _cut(self, process: Process, server: Server | None = None, seconds: float | None = None) -> None:
        if server is not self.database.server:
            super()._cut(process, server, seconds)
            return
        seconds = seconds or _cut_seconds(self.scheduler.random)
        self.database_disturbances.add(self.scheduler.now, seconds, process.name)
        Simulation._cut(self, process, server, seconds)

    def _break(self, process: Process) -> None:
        self.database_disturbances.add(self.scheduler.now, process=process.name)
        super()._break(process)

    def _fault_database(self, random: Random) -> None:
        self.scheduler.note("the database restarts")
        self.seen["database restarts"] += 1
        self.database_disturbances.add(self.scheduler.now, _RESTART_SECONDS)
        server = self.database.server
        server.is_up, server.began_at = False, self.scheduler.now
        self.tables.end_all()
        self.network.break_some(lambda connection: connection.server is server)
        self.scheduler.after(random.random() * _RESTART_SECONDS, lambda: setattr(server, "is_up", True))

    def _fault_terminate(self, random: Random) -> None:
        self.scheduler.note("the database ends sessions")
        self.seen["session terminated"] += 1
        self.database_disturbances.add(self.scheduler.now)
        self.tables.terminate(random.choice((0.3, 1.0)), self.network)

    # -- promises

    @property
    def _is_done(self) -> bool:
        self.oracle.scan()
        is_open = any(partition.open for topic in _TOPICS for partition in self.cluster.topics[topic])
        is_behind = self.tables.rows.get("outbox") or self.oracle.is_any_waiting or is_open or self._unhandled()
        return not is_behind

    def _unhandled(self) -> list[tuple[str, str]]:
        groups = [group for group in ("bare", "django") if group in self.plan.groups]
        return [(group, name) for group in groups for name in self._published if not self.truth.accepted[group, name]]

    def _check_all(self) -> None:
        self.seen["late request"] += self.network.delivered_late
        self.seen["committed offset went back"] += self.cluster.offsets.times_gone_back
        self.oracle.scan()
        waiting: list[Any] = [*self._unhandled(), *self.oracle.waiting, *self.tables.rows.get("outbox", {})]
        if waiting:
            what = f"{len(waiting)} records, messages or rows wait"
            self.broken(f"{what} {_MOST_QUIET_SECONDS:g} s after the last fault: {sorted(map(str, waiting))[:5]}")
            return
        self._check_messages()
        dead = {token for letters in self.oracle.dead.values() for token, _, _ in letters}
        self.truth.check_end({name for name in self.truth.tasks if any(name in token for token in dead)})
        rows = self.tables.rows.get(RESULTS, {}).values()
        self.seen["task not successful"] += sum(row["status"] != "SUCCESSFUL" for row in rows)

    def _check_messages(self) -> None:
        """Each message of the queue with an inbox that was acknowledged was accepted."""
        for place, copy in self.oracle.copies.items():
            entry = self.cluster.stamped("messages")[place[0]].log[place[1]]
            name = f"{copy.origin[0]}-{copy.origin[1]}"
            is_done = (
                entry.key == _QUEUE.encode() and self._is_acknowledged(place) and copy.origin not in self.oracle.dead
            )
            if is_done and not self.truth.accepted["queue", name]:
                self.broken(f"message {name} is finished, and was not accepted")


@contextmanager
def _product_in(simulation: ConsumerSimulation) -> Iterator[None]:
    """Put simulated clients, threads, clocks and connections in the place of the real ones."""
    call_handler = worker.TaskRunner.__call__

    def calling(runner: worker.TaskRunner, message: Message) -> None:
        call = simulation.truth.handed(message, current().process)
        vars(current())["call"] = call
        try:
            call_handler(runner, message)
        except Exception as error:
            if not call.process.is_dead:
                simulation.truth.ended(call, message, error)
            raise
        else:
            simulation.truth.ended(call, message, None)
        finally:
            del vars(current())["call"]

    handler = _ConsumerLog(simulation)
    doubles = {"Producer": queue_kafka.Producer, "Consumer": queue_kafka.Consumer, "AdminClient": clients.AdminClient}
    names = ("outbox_core", "outbox_queue", "outbox_django", "django.dispatch", "django_tasks")
    levels = {name: logging.INFO if name.startswith("outbox") else logging.CRITICAL + 1 for name in names}
    with ExitStack() as stack:
        for name, double in doubles.items():
            stack.enter_context(patch.object(product_clients, name, double))
        for small in (*_SMALL, *_ANSWERS):
            stack.enter_context(patch.object(*small))
        stack.enter_context(patch.object(worker.TaskRunner, "__call__", calling))
        stack.enter_context(django_in(simulation.scheduler.random, simulation.hear))
        stack.enter_context(heard(handler, levels))
        stack.enter_context(patched(simulation.scheduler))
        yield


def run(plan: ConsumerPlan, *, trace: int = 0) -> Outcome:
    """Run a plan."""
    plan = replace(plan, **SITUATION)
    simulation = ConsumerSimulation(plan, trace=trace)
    run_to_its_end(simulation, _product_in(simulation))
    return Outcome.of(plan, simulation, sum(simulation.truth.effects.values()))
