"""One run of queues: producers, real consumers and trackers, and faults, in a world that follows from a seed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from random import Random
from types import MappingProxyType
from typing import Any
from unittest.mock import patch

from greenlet import getcurrent

from outbox_core.errors import OutboxError
from outbox_core.kafka import clients as product_clients
from outbox_core.kafka.transactions import Committed, TransactionalProducer
from outbox_queue import Message, QueueConfig, QueueService, Reject, duty
from outbox_queue.consuming import reader
from outbox_queue.consuming.worker import backoff
from outbox_queue.errors import SendFailed
from outbox_queue.protocol import markers as wire
from outbox_queue.redelivery import in_progress, tracked_partition
from outbox_queue.redelivery.in_progress import Unfinished
from outbox_queue.redelivery.partition import MarkerPartition
from outbox_queue.redelivery.tracker import RedeliveryTracker
from tests.simulation import clients, queue_kafka
from tests.simulation.brokers import COMMITTED, PLAIN
from tests.simulation.disturbances import Disturbances
from tests.simulation.network import Server
from tests.simulation.queue_bounds import CONCURRENCY, Books, bounded, partitions_of
from tests.simulation.queue_kafka import QueueCluster, leaders_of, members_of, unreachable_brokers
from tests.simulation.queue_oracle import REDELIVERED, Oracle, Place
from tests.simulation.running import heard, run_to_its_end
from tests.simulation.scheduling import Process, ProcessDied, current
from tests.simulation.simulation import Outcome, ProcessPlace, Simulation, _cut_seconds
from tests.simulation.simulation import Plan as HarvestersPlan
from tests.simulation.threads import Event, patched

MODE = "queue"
FAULTS = ("break", "cut", "crash", "in a handler", "at a call", "broker", "move", "suspend", "restart", "clock")
CONDUCTS = ("slow", "fail", "hang", "reject", "nack", "extend", "interrupt")
LINKS_ALONE: Mapping[str, Any] = MappingProxyType(
    {
        "faults": ("link",),
        "trackers": 2,
        "consumers": 2,
        "seconds": 260.0,
        "conducts": ("fail", "nack"),
        "pause": 1.0,
    }
)
"""Differences of a plan in which a tracker and a consumer lose the link to one broker, for long, and nothing else."""
_QUEUES = ("emails", "bills")
_TOPICS = {"messages": 4, "markers": 3, "dead": 2}
_TIMEOUT_SECONDS = 4.0
_PROCESSING_SECONDS = 9.0
_MOST_ATTEMPTS = 4
_MOST_IN_PROGRESS = 12
_MOST_QUIET_SECONDS = 120.0
_SETTLE_SECONDS = 30.0
_MOST_WAITS_FOR_OFFSETS = 4
_OVERDUE_SECONDS = 15.0
_LONGEST_SUSPEND_SECONDS = 18.0
_LONGEST_BROKER_CRASH_SECONDS = 7.0
_PROMISED_SECONDS = 50.0  # with one tracker and one consumer ill, at most: 45, and what a busy member needs
_LONG_ENOUGH_SECONDS = 65.0  # at work, to be no newcomer
_ILL_SECONDS = (50.0, 100.0)
_HELD_UP_SECONDS = 1.0  # for which a keep-alive may be held up: it is due half of a timeout before
_EARLY_SECONDS = 0.01
_CLOCK_TOLERANCE_SECONDS = 1.5  # clocks that differ by less than a second are just followed


@dataclass
class QueuePlan(HarvestersPlan):
    """The parts of a run; a seed draws them, and shrinking takes some away."""

    consumers: int = 2
    trackers: int = 2
    queues: int = 1
    is_transactional: bool = False
    marker_key: str = "message"
    conducts: tuple[str, ...] = CONDUCTS
    transaction_seconds: float = 5.0
    hangs: float = 0.3  # the share of handlers that hang, of those that may
    KINDS = ("faults", "conducts")
    NUMBERS = ("consumers", "trackers", "writers", "queues")

    @classmethod
    def of(cls, seed: int, mode: str = MODE) -> QueuePlan:
        """Draw a plan: each seed switches a random subset of faults and conducts of handlers on."""
        random = Random(seed * 104_729 + 31)
        share = random.choice((0.2, 0.4, 0.7))
        faults = tuple(fault for fault in FAULTS if random.random() < share)
        plan = cls(
            seed,
            mode,
            faults or ("crash",),
            harvesters=0,
            writers=random.choice((1, 2, 3)),
            seconds=random.choice((20.0, 40.0, 80.0)),
            late=random.choice((0.0, 0.4, 0.9)),
            latency=random.choice((0.001, 0.001, 0.005, 0.03)),
            pause=random.choice((0.3, 1.0)),
            drift=random.choice((0.0, 0.0, 1e-4)),
            consumers=random.choice((1, 2, 2, 3)),
            trackers=random.choice((1, 2, 2, 3)),
            queues=random.choice((1, 1, 2)),
            is_transactional=random.random() < 0.5,
            marker_key=random.choice(("message", "message", "queue")),
            conducts=tuple(conduct for conduct in CONDUCTS if random.random() < 0.5),
            hangs=random.choice((0.3, 0.3, 1.0)),
            step_share=random.choice((0.02, 0.1)),
            transaction_seconds=random.choice((5.0, 12.0)),
        )
        return replace(plan, **LINKS_ALONE) if Random(seed * 7919 + 5).random() < 0.15 else plan


SITUATION: Mapping[str, Any] = MappingProxyType({})
"""Changes of the plans of all runs: the situation in which a rule counts that is broken on purpose."""

_SMALL = ((tracked_partition, "_REDELIVERED_AT_ONCE", 3), (reader, "_READ_AT_ONCE", 20), (in_progress, "_SLACK", 8))
"""Batches and limits of the product that are small here, so that much happens between two of them."""

_ANSWERS: tuple[tuple[Any, str, Any], ...] = (
    (duty, "silent_brokers", lambda settings: unreachable_brokers(settings, duty._REACH_SECONDS)),
    (duty, "unreachable_brokers", unreachable_brokers),
    (duty.GroupDuty, "_leaders", lambda self: leaders_of(self._topic)),
    (duty.GroupDuty, "_members", lambda self: members_of(self._group, duty._ASK_SECONDS)),
)
"""Answers of the network in the place of those of real clients."""

SENTINELS_IN_LOG = {
    "consumer could not start messages": "messages are not started yet",
    "starting took too long": "took longer than redelivery_timeout",
    "waited for a handler for too long": "that waited too long for a handler",
    "handler hung": "is in progress for longer than max_processing_time",
    "markers undelivered": "delivering markers",
    "redelivery failed": "redelivery: ",
    "tracker's offsets not committed": "of the marker topic was not committed",
    "handlers did not finish before the end": "handlers did not finish within drain_timeout",
    "closed before its markers were delivered": "closed before its last markers were delivered",
    "handler done too late": "done after the consumer was closed",
    "left its group": " leaves group ",
    "joined again": " joins group ",
}

QUEUE_SENTINELS = (
    "redelivered", "redelivered after a crash", "crash in a handler", "kept alive", "end marker late",
    "given back unused", "started twice", "dead letter after the last attempt", "rejected", "delayed",
    "rebalance with messages in progress", "tracker took over messages in progress", "marker partition moved",
    "partitions assigned", "partitions revoked", "partitions lost", "member expired", "offsets in an open transaction",
    "committed offset went back",
    "commit of offsets repeated", "copies of one message at once", "suspended", "late request", "produce repeated",
    "delivery timed out", "producer fenced", "init aborts a transaction", "transaction timed out",
    "EndTxn sent twice", "sent by an aborted transaction", "clock set forward", "clock set back", "fault at a call",
    "transactional start given up", "started again after its redelivery", "redelivered while at work, held up",
    "keep-alive late", "marker partition with two trackers", "tracker ends with markers unread",
    "expired messages left for another turn", "finished since the tick", "kept alive since the tick",
    *SENTINELS_IN_LOG,
)  # fmt: skip
"""States that a number of runs should reach; a report names those that were never reached."""


class _Log(logging.Handler):
    """Counts the product's log lines by their format, and adds them to the trace."""

    def __init__(self, simulation: QueueSimulation) -> None:
        super().__init__()
        self._simulation = simulation

    def emit(self, record: logging.LogRecord) -> None:
        simulation = self._simulation
        task = getattr(getcurrent(), "task", None)
        if task is not None and task.process.is_dead:
            return
        simulation.note_invariant(record)
        text = record.getMessage()
        for sentinel, part in SENTINELS_IN_LOG.items():
            simulation.seen[sentinel] += part in text
        if simulation.plan.is_transactional:
            simulation.seen["transactional start given up"] += (
                SENTINELS_IN_LOG["consumer could not start messages"] in text
            )
        if text.startswith("caught up: ") and not text.startswith("caught up: 0 "):
            simulation.seen["tracker took over messages in progress"] += 1
        if simulation.scheduler.trace is not None:
            name = "world" if task is None else task.process.name
            simulation.scheduler.note(f"{name:12} {record.levelname.lower()}: {text[:300]}")


class _Node(ProcessPlace):
    """A place where a process of one kind runs, life after life."""

    def __init__(self, simulation: QueueSimulation, name: str) -> None:
        super().__init__(simulation, name)
        self.stopping: Any = None

    def start(self) -> None:
        self.stopping = Event()
        super().start()

    def crash(self) -> None:
        super().crash()
        if self.process is not None:
            self.simulation.gives_up(self.process)
            self.simulation.forget(self.process.name)

    def stop(self) -> None:
        """Ask the process to end in good order; another one begins then."""
        if self.is_up:
            self.stopping.set()

    def _main(self) -> None:
        process = self.process
        while True:
            try:
                self.work()
                break
            except OutboxError as error:
                self.simulation.scheduler.note("%s: %s: %s", self.name, type(error).__name__, error)
            except Exception as error:
                self.simulation.broken(f"{self.name} ended with {type(error).__name__}: {error}")
                raise
            Event().wait(0.5)
        pause = self.simulation.scheduler.random.choice((0.3, 6.0))  # in which handlers may be at work
        self.simulation.scheduler.after(pause, lambda: self._replace(process))

    def _replace(self, process: Process | None) -> None:
        if self.process is process and self.simulation.has_begun:
            self.crash()
            self.start()

    def work(self) -> None:
        """Work until asked to stop."""
        raise NotImplementedError


class ConsumerNode(_Node):
    """A process with workers of all queues."""

    def work(self) -> None:
        service = QueueService(self.simulation.settings())
        done = [Event() for _ in self.simulation.queues]
        for event, name in zip(done, self.simulation.queues, strict=True):
            current().process.spawn(lambda event=event, name=name: self._serve(service, name, event), name)
        for event in done:
            event.wait()

    def _serve(self, service: QueueService, name: str, event: Any) -> None:
        while not self.stopping.is_set():
            try:
                service.queue(name).run(
                    self.simulation.handle,
                    concurrency=CONCURRENCY,
                    retry_delay=backoff(timedelta(seconds=0.5), timedelta(seconds=3)),
                    drain_timeout=timedelta(seconds=3),
                    stop=self.stopping,
                    on_signals=False,
                )
            except OutboxError as error:
                self.simulation.scheduler.note("%s: %s: %s", self.name, type(error).__name__, error)
                Event().wait(0.5)
            except Exception as error:
                self.simulation.broken(f"{self.name} ended with {type(error).__name__}: {error}")
                raise
        event.set()


class TrackerNode(_Node):
    """A process with a tracker."""

    tracker: RedeliveryTracker | None = None

    def start(self) -> None:
        self.tracker = None
        super().start()

    @property
    def marker_partitions(self) -> list[MarkerPartition]:
        """The partitions that it tracks."""
        return [] if self.tracker is None else partitions_of(self.tracker)

    @property
    def marker_numbers(self) -> set[int]:
        """The numbers of these."""
        return {each.number for each in self.marker_partitions}

    def work(self) -> None:
        self.tracker = tracker = QueueService(self.simulation.settings()).tracker()
        tracker.start()
        while not tracker.join(0.2):
            if self.stopping.is_set():
                tracker.stop()


class SenderNode(_Node):
    """An application that sends messages, and knows which of them are in Kafka."""

    def __init__(self, simulation: QueueSimulation, number: int) -> None:
        super().__init__(simulation, f"sender-{number}")
        self._random = Random(simulation.plan.seed * 1000 + number)
        self._is_transactional = self._random.random() < 0.3
        self._count = 0

    def work(self) -> None:
        send = self._send_transactions if self._is_transactional else self._send
        send(QueueService(self.simulation.settings()))

    def _tokens(self) -> Iterator[list[str]]:
        """Return the batches to send, until there are to be no more."""
        while not self.stopping.is_set():
            if self.simulation.is_writing:
                number = self._random.choice((1, 1, 2, 3, 6))
                self._count += number
                yield [f"{self.name}:{self._count - place}" for place in range(number)]
            Event().wait(self._random.expovariate(1 / self.simulation.plan.pause))

    def _send(self, service: QueueService) -> None:
        queues = [service.queue(name).producer() for name in self.simulation.queues]
        for tokens in self._tokens():
            producer = self._random.choice(queues)
            try:
                for token in tokens:
                    delay = self._random.choice((0.5, 3.0)) if self._random.random() < 0.15 else 0.0
                    self.simulation.seen["delayed"] += bool(delay)
                    producer.send(token, delay=timedelta(seconds=delay) if delay else None)
                producer.flush()
            except SendFailed as error:
                self.simulation.scheduler.note("%s: %s", self.name, error)
            else:
                self.simulation.sent.update(tokens)

    def _send_transactions(self, service: QueueService) -> None:
        """Send as a harvester does: records of a queue, in transactions that may be aborted."""
        config = self.simulation.settings()
        settings = {
            "bootstrap.servers": config.bootstrap_servers,
            "transactional.id": self.name,
            "transaction.timeout.ms": 10_000,
            "partitioner": "random",
        }
        producer = TransactionalProducer(settings, timeout_seconds=10.0)
        if producer.init(self.stopping.is_set) is not None:
            producer.discard()
            return
        for tokens in self._tokens():
            if producer.begin() is not None:
                break
            for token in tokens:
                record = service.queue(self._random.choice(self.simulation.queues)).record(token)
                producer.produce(record.topic, record.value, record.key)
            if self._random.random() < 0.1:
                self.simulation.seen["sent by an aborted transaction"] += 1
                self.simulation.never_sent.update(tokens)
                outcome: object = producer.abort()
            else:
                outcome = producer.commit()
            if isinstance(outcome, Committed):
                self.simulation.sent.update(tokens)
            elif not hasattr(outcome, "record_at_fault"):
                break
        producer.discard()


class QueueSimulation(Simulation):
    """A world with queues in it."""

    plan: QueuePlan
    cluster: QueueCluster

    def __init__(self, plan: QueuePlan, *, trace: int = 0) -> None:
        super().__init__(plan, trace=trace)
        self.cluster = QueueCluster(self.scheduler)
        self.cluster.seen = self.seen
        self.oracle = Oracle(self.cluster)
        self.queues = _QUEUES[: plan.queues]
        self.sent: set[str] = set()
        self.never_sent: set[str] = set()
        self.has_begun = False
        self.trackers = [TrackerNode(self, f"tracker-{number}") for number in range(plan.trackers)]
        self.consumers = [ConsumerNode(self, f"consumer-{number}") for number in range(plan.consumers)]
        senders = [SenderNode(self, number) for number in range(plan.writers)]
        nodes: Any = [*self.trackers, *self.consumers, *senders]
        self.nodes = nodes
        self._handed: dict[Place, str] = {}  # copies that a handler got, and in which process
        self._tries: set[tuple[str, int]] = set()
        self._handling: Counter[str] = Counter()
        self._at_work: Counter[str] = Counter()
        self._kept_alive: dict[Place, Message] = {}  # copies whose handlers are at work, and not for too long
        self._quiet_since = 0.0
        self._disturbances = Disturbances()
        self._well_from = {"tracker": 0.0, "consumer": 0.0}  # when the last one of a kind that was ill is mended
        self.books = Books(self.settings(), self.oracle, len(self.queues))

    def settings(self) -> QueueConfig:
        """Return the settings of all processes: short times, so that much happens."""
        return QueueConfig(
            bootstrap_servers="simulated:9092",
            dead_letter_topic="dead",
            message_partitions=_TOPICS["messages"],
            marker_partitions=_TOPICS["markers"],
            marker_retention=timedelta(hours=2),
            redelivery_timeout=timedelta(seconds=_TIMEOUT_SECONDS),
            max_processing_time=timedelta(seconds=_PROCESSING_SECONDS),
            max_delay=timedelta(seconds=20),
            max_attempts=_MOST_ATTEMPTS,
            max_in_progress=_MOST_IN_PROGRESS,
            receive_buffer_capacity=10,
            marker_key=self.plan.marker_key,
            transactional=self.plan.is_transactional,
            transaction_timeout=timedelta(seconds=self.plan.transaction_seconds),
            delivery_timeout=timedelta(seconds=8),
            close_timeout=timedelta(seconds=3),
        )

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
        self.scheduler.after(3.0, self._next_fault)
        self._watch()
        self._run_for(self.plan.seconds)
        self._mend()
        self._quiet_since = self.scheduler.now
        self._run_for(5.0)
        self.is_writing = False
        self._run_for(_MOST_QUIET_SECONDS, until_done=True)
        self._run_for(5.0)  # in which offsets are committed
        for _ in range(_MOST_WAITS_FOR_OFFSETS):  # a group may have to wait for one that died while it joined
            if not self.problem and any(self._offsets_behind()):
                self._run_for(5.0)
        self.has_begun = False
        if not self.problem:
            self._check_all()
        for node in self.nodes:
            node.crash()

    @property
    def _is_done(self) -> bool:
        self.oracle.scan()
        is_open = any(partition.open for topic in _TOPICS for partition in self.cluster.topics[topic])
        return not self.oracle.is_any_waiting and not is_open

    # -- handlers

    def handle(self, message: Message) -> None:
        """Handle a message as the plan wants: in time, slowly, badly or not at all."""
        process = current().process
        token = message.payload.decode()
        self._check_handed(message, token)
        if self._handling[token]:
            self.seen["copies of one message at once"] += 1
        self._handling[token] += 1
        self._at_work[process.name] += 1
        try:
            self._die_now_and_then(process)
            self._conduct(message)
            self._die_now_and_then(process)
        finally:
            self._handling[token] -= 1
            self._at_work[process.name] -= 1
            self._kept_alive.pop(message._delivery.message.place, None)

    def _die_now_and_then(self, process: Process) -> None:
        if "in a handler" not in self.plan.faults or not self.is_faulty or self.scheduler.random.random() > 0.02:
            return
        if self.may_fault():
            self.seen["crash in a handler"] += 1
            self._die(process)

    def _die(self, process: Process) -> None:
        """Crash the process that runs."""
        node = next(node for node in self.nodes if node.process is process)
        process.is_dead = True
        self.scheduler.after(0.0, lambda: self._died(process, node))
        raise ProcessDied

    def at_call(self, what: str) -> None:
        """Do something now and then to a process that is about to make a call of its client."""
        random, process, plan = self.scheduler.random, current().process, self.plan
        if "at a call" not in plan.faults or not self.is_faulty or random.random() > plan.step_share:
            return
        if not self.may_fault():
            return
        self.seen["fault at a call"] += 1
        kind = random.choice(plan.step_faults)
        self.scheduler.note("%s: %s at %s", process.name, kind, what)
        if kind == "crash":
            self._die(process)
        getattr(self, f"_{kind}")(process)
        if kind == "suspend":
            current().wait(0.0)

    def _died(self, process: Process, node: Any) -> None:
        process.is_dead = False
        node.crash()
        self.restart_later(node)

    def gives_up(self, process: Process) -> None:
        """Note that a member of a group gives up its partitions."""
        self.seen["rebalance with messages in progress"] += self._at_work[process.name] > 0
        for node in self.trackers:
            if node.process is process and not process.is_dead:
                ends = [log.stable_end for log in self.cluster.stamped("markers")]
                positions = [(each.number, each.position or 0) for each in node.marker_partitions]
                self.seen["tracker ends with markers unread"] += any(at < ends[number] for number, at in positions)

    def forget(self, process: str) -> None:
        """Forget the handlers of a process that is dead."""
        kept = self._kept_alive.items()
        self._kept_alive = {place: message for place, message in kept if self._handed[place] != process}

    def _conduct(self, message: Message) -> None:
        random = self.scheduler.random
        wait = current().wait
        conducts = self.plan.conducts if self.is_faulty else ()
        conduct = random.choice(conducts) if conducts and random.random() < 0.3 else ""
        if conduct in ("", "slow"):
            self._kept_alive[message._delivery.message.place] = message
        if conduct == "slow":
            wait(_TIMEOUT_SECONDS * random.uniform(0.5, 1.8))
        elif conduct == "fail":
            raise ValueError("the handler fails")
        elif conduct == "hang" and random.random() < self.plan.hangs:
            wait(_PROCESSING_SECONDS * random.uniform(1.0, 1.8))
        elif conduct == "reject":
            raise Reject("the handler rejects it")
        elif conduct == "nack":
            message.nack(timedelta(seconds=random.choice((0.0, 0.2, 2.0))), "not now")
        elif conduct == "extend":
            message.extend(timedelta(seconds=random.choice((0.5, 6.0, 12.0))))
            wait(random.uniform(0.0, 8.0))
        elif conduct == "interrupt":
            message.interrupt()
        else:
            wait(random.choice((0.0, 0.02, 0.3)) * random.random())

    def _check_handed(self, message: Message, token: str) -> None:
        received = message._delivery.message
        place, process = received.place, current().process.name
        self.oracle.scan()
        self.scheduler.note("%s handles %s at %s, attempt %d", process, token, place, message.attempt)
        if token in self.never_sent:
            self.broken(f"{token} was handed out, and its transaction was aborted")
        is_read_again = not self.plan.is_transactional and self.cluster.offsets.went_back_over(
            f"kafka-mq-{received.queue}", ("messages", place[0]), place[1]
        )
        if place in self._handed and not is_read_again:
            self.broken(f"{token} at {place} was handed out twice: in {self._handed[place]} and in {process}")
        self._handed[place] = process
        ends = self.oracle.ends(place)
        if any(mark.reason != REDELIVERED for mark in ends) and not is_read_again:
            self.broken(f"{token} at {place} was handed out after its end marker")
        if ends:
            self._check_still_ours(place, token)
        if not 1 <= message.attempt <= _MOST_ATTEMPTS:
            self.broken(f"{token} was handed out for attempt {message.attempt} of {_MOST_ATTEMPTS}")
        if self.plan.is_transactional and (token, message.attempt) in self._tries:
            self.broken(f"{token} was handed out twice for attempt {message.attempt}")
        self._tries.add((token, message.attempt))

    def _check_still_ours(self, place: Place, token: str) -> None:
        """A consumer hands out no copy whose redelivery it had to expect, unless it was held up.

        Without transactions another consumer may have started the same copy. A redelivery that came too early is none
        that it had to expect: see `judged`.
        """
        marks = self.oracle.marks[place]
        starts = [mark.at for mark in marks if mark.kind == wire.START]
        end = min((mark for mark in marks if mark.kind == wire.END), key=lambda mark: mark.offset)
        deadline = self.oracle.deadline(place, end.offset)
        if deadline is None or end.at < deadline:
            return
        if not self.plan.is_transactional and (len(starts) > 1 or self.oracle.is_started_again(place)):
            return
        last = max(mark.at for mark in marks if mark.kind != wire.END and mark.offset < end.offset)
        if not self._is_held_up(place, last if len(starts) == 1 else min(starts)):
            self.broken(f"{token} at {place} was handed out after it was redelivered")

    # -- trackers

    def judged(self, markers: MarkerPartition, tick: int | None, batch: list[Unfinished]) -> None:
        """Check what a tracker is about to redeliver: by all that it has read, or could have read without a tick."""
        self.oracle.scan()
        log = self.cluster.stamped("markers")[markers.number]
        read_to = log.stable_end if tick is None else markers.position or 0
        now = self.scheduler.now if tick is None else log.appended[tick]
        self.seen["expired messages left for another turn"] += bool(batch) and markers.has_expired
        owners = [node for node in self.trackers if node.is_up and markers.number in node.marker_numbers]
        self.seen["marker partition with two trackers"] += len(owners) > 1
        for entry in batch:
            process = self._handed.get(entry.message_id, "")
            is_up = any(node.process is not None and node.process.name == process for node in self.nodes)
            self.seen["redelivered after a crash"] += bool(process) and not is_up
            deadline = self.oracle.deadline(entry.message_id, read_to)
            tolerance = self._tolerance(entry, markers, read_to)
            if deadline is None:
                self.broken(f"the message at {entry.message_id} was finished, and is redelivered")
            elif deadline > now + tolerance:
                self.broken(f"the message at {entry.message_id} is redelivered {deadline - now:.3f} s too early")
            elif deadline <= now + _EARLY_SECONDS and tolerance < float("inf"):
                self._check_not_at_work(entry.message_id)

    def _check_not_at_work(self, place: Place) -> None:
        """A message whose handler is at work is kept alive, unless its consumer is closed, or that is held up."""
        if place not in self._kept_alive or self._kept_alive[place]._acks.is_closed:
            return
        if self._is_held_up(place, max(mark.at for mark in self.oracle.marks[place] if mark.kind != wire.END)):
            self.seen["redelivered while at work, held up"] += 1
        else:
            self.broken(f"the message at {place} is redelivered, and its handler is at work")

    def _is_held_up(self, place: Place, since: float) -> bool:
        """Tell whether keep-alives of a copy that was handed out may have come too late since a moment."""
        held_up = self._disturbances.seconds(self._handed[place], since, self.scheduler.now)
        return held_up > _HELD_UP_SECONDS

    def _tolerance(self, entry: Unfinished, markers: MarkerPartition, read_to: int) -> float:
        """Return how early a redelivery may be: in history, a clock that is set forward looks like time that passed."""
        if not self.seen["clock set"]:
            return _EARLY_SECONDS
        last = max(mark.offset for mark in self.oracle.marks[entry.message_id] if mark.offset < read_to)
        live_since = getattr(markers, "live_since", 0)
        return _CLOCK_TOLERANCE_SECONDS if last > live_since else float("inf")

    # -- faults

    def _any_server(self, random: Random) -> Server:
        return random.choice(self.cluster.brokers)

    def _next_fault(self) -> None:
        if not self.is_faulty:
            return
        random = self.scheduler.random
        kinds = [fault for fault in self.plan.faults if fault not in ("in a handler", "at a call")]
        if kinds and self.may_fault():
            getattr(self, f"_fault_{random.choice(kinds)}")(random)
        self.scheduler.after(random.expovariate(1 / 1.5), self._next_fault)

    def _fault_break(self, random: Random) -> None:
        self._disturbances.add(self.scheduler.now)
        super()._fault_break(random)

    def _fault_broker(self, random: Random) -> None:
        self._disturbances.add(self.scheduler.now, _LONGEST_BROKER_CRASH_SECONDS)
        super()._fault_broker(random)

    def _fault_move(self, random: Random) -> None:
        self.seen["marker partition moved"] += 1
        self._disturbances.add(self.scheduler.now)
        super()._fault_move(random)

    def _fault_link(self, random: Random) -> None:
        """Cut one link of a tracker or a consumer for minutes; one of each kind is ill at a time."""
        for kind, nodes in (("tracker", self.trackers), ("consumer", self.consumers)):
            if self.scheduler.now < self._well_from[kind] + _LONG_ENOUGH_SECONDS or random.random() > 0.2:
                continue
            node, seconds = random.choice(nodes), random.uniform(*_ILL_SECONDS)
            if node.is_up and node.process is not None:
                self._well_from[kind] = self.scheduler.now + seconds
                self._cut(node.process, self._any_server(random), seconds)

    def _cut(self, process: Process, server: Server | None = None, seconds: float | None = None) -> None:
        seconds = _cut_seconds(self.scheduler.random) if seconds is None else seconds
        self._disturbances.add(self.scheduler.now, seconds, process.name)
        super()._cut(process, server, seconds)

    def _fault_restart(self, random: Random) -> None:
        busy = [node for node in self.nodes if node.is_up and self._at_work[node.process.name]]
        node = random.choice(busy) if busy and random.random() < 0.5 else self._up_node(random)
        if node is None or node.process is None:
            return
        self.scheduler.note("%s is asked to stop", node.name)
        if random.random() < 0.5:
            seconds = _cut_seconds(random)
            for server in random.choice((self.cluster.brokers, [self._any_server(random)])):
                self._cut(node.process, server, seconds)
        self.scheduler.after(0.1 * random.random(), node.stop)

    def _break(self, process: Process) -> None:
        self._disturbances.add(self.scheduler.now, process=process.name)
        super()._break(process)

    def _suspend(self, process: Process) -> None:
        self._disturbances.add(self.scheduler.now, _LONGEST_SUSPEND_SECONDS, process.name)
        super()._suspend(process)

    def _fault_clock(self, random: Random) -> None:
        broker, error = random.randrange(3), random.choice((-3600.0, -5.0, 0.0, 0.0, 0.3, 5.0, 3600.0))
        self.seen["clock set"] += 1
        before = self.cluster.clock_errors.get(broker, 0.0)
        self.seen["clock set forward"] += error > before
        self.seen["clock set back"] += error < before
        self.scheduler.note("the clock of broker-%d is set to %+g s", broker, error)
        self.cluster.clock_errors[broker] = error

    # -- promises

    def _watch(self) -> None:
        self.oracle.scan()
        now = self.scheduler.now
        for what in self.books.excess(self._live_trackers()):
            self.broken(what)
        if self.plan.faults == ("link",):
            self._check_somebody_works(now)
        if not self.is_faulty and now > self._quiet_since + _SETTLE_SECONDS:
            for place in self.oracle.waiting:
                deadline = self.oracle.deadline(place)
                if deadline is not None and deadline + _OVERDUE_SECONDS < now:
                    self.broken(f"the message at {place} expired {now - deadline:.1f} s ago, and does not come again")
        self.scheduler.after(1.0, self._watch)

    def _check_somebody_works(self, now: float) -> None:
        """Nothing waits for long while a tracker and a consumer of each queue reach all brokers."""
        for place in self.oracle.waiting:
            deadline = self.oracle.deadline(place)
            since = self.oracle.copies[place].at if deadline is None else deadline
            if since + _PROMISED_SECONDS < now:
                what = "is not started" if deadline is None else "expired and does not come again"
                self.broken(f"the message at {place} {what} for {now - since:.0f} s, and others could do it")

    def _live_trackers(self) -> list[tuple[Process, RedeliveryTracker]]:
        return [
            (node.process, node.tracker)
            for node in self.trackers
            if node.is_up and node.process is not None and node.tracker is not None
        ]

    def _check_all(self) -> None:
        self.seen["late request"] += self.network.delivered_late
        self.seen["committed offset went back"] += self.cluster.offsets.times_gone_back
        oracle = self.oracle
        oracle.scan()
        self._count_marks()
        waiting = oracle.waiting
        if waiting:
            self.broken(
                f"{len(waiting)} messages still wait {_MOST_QUIET_SECONDS:g} s after the last fault: {waiting[:5]}"
            )
            return
        finished = {oracle.copies[place].token for place in oracle.copies if self._is_acknowledged(place)}
        finished |= {token for letters in oracle.dead.values() for token, _, _ in letters}
        lost = self.sent - finished
        if lost:
            self.broken(f"lost: {sorted(lost)[:5]} ({len(lost)} of {len(self.sent)})")
        self._check_copies()
        for behind in self._offsets_behind():
            self.broken(behind)
        for node in self.trackers:
            if node.is_up and node.process is not None and node.tracker is not None:
                for what in self.books.left_by_tracker(node.process, node.tracker, node.process.boottime() * 1000):
                    self.broken(what)
        for what in self.books.left_by_consumers():
            self.broken(what)

    def _is_acknowledged(self, place: Place) -> bool:
        return any(mark.reason != REDELIVERED for mark in self.oracle.ends(place))

    def _count_marks(self) -> None:
        oracle, seen = self.oracle, self.seen
        for marks in oracle.marks.values():
            ends = [mark for mark in marks if mark.kind == wire.END]
            seen["redelivered"] += sum(mark.reason == REDELIVERED for mark in ends)
            seen["kept alive"] += any(mark.kind == wire.KEEPALIVE and mark.deadline > mark.at for mark in marks)
            seen["started twice"] += sum(mark.kind == wire.START for mark in marks) > 1
            seen["end marker late"] += len(ends) > 1 and ends[0].reason == REDELIVERED
            kinds = [mark.kind for mark in marks]
            after_end = kinds[kinds.index(wire.END) :] if ends else []
            seen["keep-alive late"] += wire.KEEPALIVE in after_end
            seen["started again after its redelivery"] += wire.START in after_end
        for place, copy in oracle.copies.items():
            seen["given back unused"] += copy.is_of_tracker and copy.attempt == 1 and place != copy.origin
        for letters in oracle.dead.values():
            for _, attempts, reason in letters:
                kind = "rejected" if reason == "the handler rejects it" else "dead letter after the last attempt"
                seen[kind] += 1
                if kind != "rejected" and attempts != _MOST_ATTEMPTS:
                    self.broken(f"a message became a dead letter after {attempts} attempts: {reason}")

    def _check_copies(self) -> None:
        """Each redelivery has ended a copy, and has made one copy or dead letter: neither more nor less."""
        oracle = self.oracle
        ended = 0
        for place, marks in oracle.marks.items():
            is_started = False
            for mark in sorted(marks, key=lambda mark: mark.offset):
                if mark.kind == wire.START:
                    is_started = True
                elif mark.kind == wire.END and mark.reason == REDELIVERED:
                    ended += 1
                    if not is_started:
                        self.broken(f"the message at {place} was redelivered twice")
                    is_started = False
        made = sum(copy.is_of_tracker for copy in oracle.copies.values()) + oracle.dead_by_tracker
        if made != ended:
            self.broken(f"{ended} copies were ended by trackers, which made {made} copies and dead letters")

    def _offsets_behind(self) -> Iterator[str]:
        """Return where a successor of a process would not begin at the end: there records are read again for ever."""
        for partition in self.cluster.stamped("messages"):
            last = max((entry.offset for entry in partition.log if entry.state in (PLAIN, COMMITTED)), default=-1)
            for queue in self.queues:
                yield from self._behind(f"kafka-mq-{queue}", ("messages", partition.number), last)
        starts = [
            (mark.partition, mark.offset)
            for marks in self.oracle.marks.values()
            for mark in marks
            if mark.kind == wire.START
        ]
        for number, last in dict(sorted(starts)).items():
            yield from self._behind("kafka-mq-redelivery", ("markers", number), last)

    def _behind(self, group: str, place: tuple[str, int], last: int) -> Iterator[str]:
        offsets = self.cluster.offsets
        offset = offsets.committed.get((group, place), 0)
        if offset <= last and not offsets.went_back_over(group, place, last):
            yield f"{group} has committed {offset} of {place[0]}[{place[1]}], behind {last}"


@contextmanager
def _product_in(simulation: QueueSimulation) -> Iterator[None]:
    """Put simulated clients, threads and clocks in the place of the real ones, and look at what trackers decide."""
    read_tick, take_expired = MarkerPartition._read_tick, MarkerPartition.take_expired
    judgements: dict[int, tuple[object, int]] = {}

    def reading(self: MarkerPartition, token: bytes, timestamp: tuple[int, int], now: float) -> None:
        is_judging = self.tick is not None and self.tick.token == token and self.tick.may_judge
        was_caught_up, tick = self.is_caught_up, (self.position or 1) - 1
        read_tick(self, token, timestamp, now)
        if is_judging:
            judgements[id(self)] = self._judgement, tick
        if self.is_caught_up and not was_caught_up:
            self.live_since = tick  # type: ignore[attr-defined]

    def taking(self: MarkerPartition, most: int, most_bytes: int) -> list[Unfinished]:
        expired, (judged_at, _) = list(self._judgement.expired), self._judgement
        batch = take_expired(self, most, most_bytes)
        for entry in expired[len(self._judgement.expired) :]:
            has_ended = self._in_progress.get(entry.message_id) is not entry
            simulation.seen["finished since the tick"] += has_ended
            simulation.seen["kept alive since the tick"] += not has_ended and entry.deadline > judged_at
        judgement, tick = judgements.get(id(self), (None, 0))
        simulation.judged(self, tick if judgement is self._judgement else None, batch)
        return batch

    handler, doubles = _Log(simulation), {"Producer": queue_kafka.Producer, "Consumer": queue_kafka.Consumer}
    doubles["AdminClient"] = clients.AdminClient
    with ExitStack() as stack:
        for name, double in doubles.items():
            stack.enter_context(patch.object(product_clients, name, double))
        for small in (*_SMALL, *_ANSWERS):
            stack.enter_context(patch.object(*small))
        stack.enter_context(patch.object(MarkerPartition, "_read_tick", reading))
        stack.enter_context(patch.object(MarkerPartition, "take_expired", taking))
        stack.enter_context(bounded(simulation.books, simulation.broken))
        stack.enter_context(heard(handler, dict.fromkeys(("outbox_core", "outbox_queue"), logging.INFO)))
        stack.enter_context(patched(simulation.scheduler))
        yield


def run(plan: QueuePlan, *, trace: int = 0) -> Outcome:
    """Run a plan."""
    plan = replace(plan, **SITUATION)
    simulation = QueueSimulation(plan, trace=trace)
    run_to_its_end(simulation, _product_in(simulation))
    return Outcome.of(plan, simulation, len(simulation.sent))
