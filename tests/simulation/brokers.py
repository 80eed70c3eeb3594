"""Three brokers as Kafka 4.x behaves for clients of transaction protocol v1: logs, idempotence, transactions, groups.

What a partition has acknowledged is on all replicas, so a broker that crashes loses no record: its partitions, its
transaction coordinators and its groups are led by another one a while later.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import KafkaError

from tests.simulation.network import Respond, Server
from tests.simulation.scheduling import Scheduler

OPEN, PLAIN, COMMITTED, ABORTED, CONTROL = "open", "plain", "committed", "aborted", "control"
POISON = b":poison"
"""The end of a value that no topic takes."""
_MARKER_SECONDS = 0.004
_MOST_AHEAD_SECONDS = 3600.0  # `message.timestamp.after.max.ms`
Coordinated = tuple[str, str]
"""A group or a transaction, "group" or "transaction", with its ID."""


@dataclass(slots=True, eq=False)
class Entry:
    """A record, or the marker that ends a transaction."""

    offset: int
    state: str
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]] | None
    time: float
    producer: int
    sent: Sent | None = None

    @property
    def is_overdue(self) -> bool:
        """True if its client had given it up before it was written, by a clock that no suspension stops."""
        return self.sent is not None and self.time > self.sent.until


@dataclass(slots=True)
class Sent:
    """A record of a batch, with what no broker knows: who handed it to a client, and when."""

    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]] | None
    sender: str = ""  # a process
    handed_over_at: float = 0.0
    until: float = float("inf")  # when its delivery timeout ends
    clock_error: float = 0.0  # seconds by which its time stamp is ahead


@dataclass(slots=True)
class _ProducerState:
    epoch: int
    next_sequence: int = 0
    batches: deque[tuple[int, int, int]] = field(default_factory=lambda: deque(maxlen=5))  # first, last, offset
    used_at: float = 0.0


class Partition:
    """The log of a partition."""

    def __init__(self, topic: str, number: int, leader: int) -> None:
        self.topic = topic
        self.number = number
        self.leader = leader
        self.log: list[Entry] = []
        self.producers: dict[int, _ProducerState] = {}
        self.open: dict[int, list[Entry]] = {}
        self.unverified: dict[int, tuple[int, int]] = {}  # epoch, lowest sequence that came without a transaction
        self.on_progress: list[Callable[[], None]] = []

    @property
    def end(self) -> int:
        """The high watermark."""
        return len(self.log)

    @property
    def stable_end(self) -> int:
        """The last stable offset."""
        return min((entries[0].offset for entries in self.open.values() if entries), default=len(self.log))

    def has_open(self, producer: int, epoch: int) -> bool:
        """Tell whether a producer's transaction has a record here: then brokers do not ask its coordinator."""
        return producer in self.open and self.producers[producer].epoch == epoch

    def note_unverified(self, producer: int, epoch: int, first: int) -> None:
        """Remember a sequence number; higher ones are refused until a record of a transaction, or a marker, comes."""
        known_epoch, lowest = self.unverified.get(producer, (-1, -1))
        if epoch > known_epoch or (epoch == known_epoch and first < lowest):
            self.unverified[producer] = epoch, first

    def append(
        self, producer: int, epoch: int, first: int, records: list[Sent], now: float, *, is_transactional: bool
    ) -> tuple[int | None, int]:
        """Append a batch; return an error code or None, and the offset of its first record."""
        if producer >= 0:
            # Of one that is not known, or no more, any number may be the first.
            state = self.producers.setdefault(producer, _ProducerState(epoch, first))
            state.used_at = now
            if epoch < state.epoch:
                return KafkaError.INVALID_PRODUCER_EPOCH, -1
            if epoch > state.epoch:
                if first != 0:
                    return KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
                state.epoch, state.next_sequence = epoch, 0
                state.batches.clear()
            last = first + len(records) - 1
            for known_first, known_last, offset in state.batches:
                if (known_first, known_last) == (first, last):
                    return None, offset
            _, lowest = self.unverified.get(producer, (-1, first))
            if first != state.next_sequence or first > lowest:
                return KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, -1
            self.unverified.pop(producer, None)
            state.next_sequence = last + 1
            state.batches.append((first, last, self.end))
        offset = self.end
        kind = OPEN if is_transactional else PLAIN
        entries = [
            Entry(offset + place, kind, each.key, each.value, each.headers, now, producer, each)
            for place, each in enumerate(records)
        ]
        self.log += entries
        if is_transactional:
            self.open.setdefault(producer, []).extend(entries)
        self._progress()
        return None, offset

    def end_transaction(self, producer: int, epoch: int, now: float, *, is_committed: bool) -> None:
        """Write the marker of a transaction's end."""
        state = self.producers.setdefault(producer, _ProducerState(epoch))
        if epoch > state.epoch:
            state.epoch, state.next_sequence = epoch, 0
            state.batches.clear()
        for entry in self.open.pop(producer, ()):
            entry.state = COMMITTED if is_committed else ABORTED
        self.unverified.pop(producer, None)
        self.log.append(Entry(self.end, CONTROL, None, None, None, now, producer))
        self._progress()

    def _progress(self) -> None:
        waiting, self.on_progress = self.on_progress, []
        for step in waiting:
            step()


@dataclass(eq=False)
class Transaction:
    """A coordinator's knowledge of a transactional.id."""

    producer: int
    epoch: int = -1
    state: str = "empty"  # ongoing, committing, aborting, committed, aborted
    timeout: float = 60.0
    number: int = 0
    partitions: set[Partition] = field(default_factory=set)
    used_at: float = 0.0


@dataclass(eq=False)
class Member:
    """A member of a group."""

    name: str
    session: float
    expires_at: float
    respond: Respond | None = None
    owns: bool = False  # as it said when it joined


@dataclass(eq=False)
class Group:
    """A consumer group of one topic's partition 0: its owner keeps it as long as it is a member (sticky)...

    ...or until it is asked for it: then the others wait until it has handed over, and joined again.
    """

    members: dict[str, Member] = field(default_factory=dict)
    owner: str = ""
    successor: str = ""  # a member that is to own the partition
    is_asked: bool = False  # the owner, for the partition
    generation: int = 0
    is_joining: bool = False
    round: int = 0
    heard_at: dict[str, float] = field(default_factory=dict)  # by the first part of a member's name, its process


class Cluster:
    """All brokers, with one view of who leads what."""

    def __init__(self, scheduler: Scheduler, brokers: int = 3) -> None:
        self.scheduler = scheduler
        self.brokers = [Server(f"broker-{number}") for number in range(brokers)]
        self.topics: dict[str, list[Partition]] = {}
        self.settings: dict[str, dict[str, str]] = {}
        self.longest: dict[str, int] = {}  # bytes of a batch, for topics with a limit of their own
        self.transactions: dict[str, Transaction] = {}
        self.groups: dict[str, Group] = {}
        self.coordinators: dict[Coordinated, int] = {}
        self.verifies_partitions = True
        self.seen: dict[str, int] = {}
        self.is_late: Callable[[], bool] = lambda: False  # tells of the request that is being handled
        self._next_producer = 1000

    def reached(self, state: str) -> None:
        """Count a state that a run should reach."""
        self.seen[state] = self.seen.get(state, 0) + 1

    # -- brokers and topics

    def create(self, topic: str, partitions: int, settings: dict[str, str]) -> bool:
        """Create a topic; return False if it is there."""
        if topic in self.topics:
            return False
        up = [number for number, broker in enumerate(self.brokers) if broker.is_up] or [0]
        self.topics[topic] = [
            Partition(topic, number, self.scheduler.random.choice(up)) for number in range(partitions)
        ]
        if "max.message.bytes" in settings:
            self.longest[topic] = int(settings["max.message.bytes"])
        self.settings[topic] = {"cleanup.policy": "delete", "max.message.bytes": "1048588", **settings}
        return True

    def widen(self, topic: str) -> None:
        """Give a topic another partition."""
        partitions = self.topics[topic]
        up = [number for number, broker in enumerate(self.brokers) if broker.is_up] or [0]
        partitions.append(Partition(topic, len(partitions), self.scheduler.random.choice(up)))

    def delete(self, topic: str) -> None:
        """Delete a topic, with all that is in it."""
        del self.topics[topic], self.settings[topic]
        self.longest.pop(topic, None)

    def crash(self, number: int) -> None:
        """Stop a broker. What it leads moves after a while."""
        self.brokers[number].is_up = False
        self.scheduler.after(0.5 + self.scheduler.random.random() * 2.5, lambda: self._move(number))

    def _move(self, number: int) -> None:
        up = [other for other, broker in enumerate(self.brokers) if broker.is_up]
        if self.brokers[number].is_up or not up:
            return
        for partitions in self.topics.values():
            for partition in partitions:
                if partition.leader == number:
                    partition.leader = self.scheduler.random.choice(up)
                    partition._progress()
        for what, leader in self.coordinators.items():
            if leader == number:
                self.coordinators[what] = self.scheduler.random.choice(up)

    def restart(self, number: int) -> None:
        """Start a broker again."""
        self.brokers[number].is_up = True

    def move_leaders(self) -> None:
        """Elect other leaders, as after a reassignment."""
        for number in range(len(self.brokers)):
            self._move(number)
        up = [other for other, broker in enumerate(self.brokers) if broker.is_up]
        if up:
            for partitions in self.topics.values():
                for partition in partitions:
                    partition.leader = self.scheduler.random.choice(up)
                    partition._progress()
            for what in self.coordinators:
                self.coordinators[what] = self.scheduler.random.choice(up)

    def coordinator(self, kind: str, name: str) -> int:
        """Return the broker that coordinates a "group" or a "transaction"."""
        if (kind, name) not in self.coordinators:
            up = [number for number, broker in enumerate(self.brokers) if broker.is_up]
            self.coordinators[kind, name] = self.scheduler.random.choice(up or [0])
        return self.coordinators[kind, name]

    def expire(self, idle_seconds: float) -> None:
        """Forget transactional.ids and producers that have written nothing for so long."""
        latest = self.scheduler.now - idle_seconds
        for name, transaction in list(self.transactions.items()):
            if transaction.used_at <= latest and transaction.state in ("empty", "committed", "aborted"):
                del self.transactions[name]
        for partitions in self.topics.values():
            for partition in partitions:
                for producer, state in list(partition.producers.items()):
                    if state.used_at <= latest and producer not in partition.open:
                        del partition.producers[producer]

    # -- producers

    def new_producer(self) -> tuple[int, int]:
        """Return the ID and epoch of an idempotent producer."""
        self._next_producer += 1
        return self._next_producer, 0

    def produce(self, broker: int, place: tuple[str, int], batch: Any, respond: Respond) -> None:
        """Append a batch: (transactional.id or '', producer ID, epoch, first sequence, records)."""
        partition = self._led_by(broker, place)
        if isinstance(partition, int):
            respond((partition, -1))
            return
        transactional_id, producer, epoch, first, records = batch
        if any(each.value is not None and each.value.endswith(POISON) for each in records):
            respond((KafkaError.INVALID_RECORD, -1))
            return
        if transactional_id and self.verifies_partitions:
            code = self._verify(partition, transactional_id, producer, epoch, first)
            if code is not None:
                respond((code, -1))
                return
        if any(each.clock_error > _MOST_AHEAD_SECONDS for each in records):
            respond((KafkaError.INVALID_TIMESTAMP, -1))
            return
        longest = self.longest.get(place[0])
        if longest is not None and sum(len(each.value or b"") for each in records) > longest:
            respond((KafkaError.MSG_SIZE_TOO_LARGE, -1))
            return
        respond(
            partition.append(
                producer, epoch, first, records, self.scheduler.now, is_transactional=bool(transactional_id)
            )
        )

    def _verify(self, partition: Partition, transactional_id: str, producer: int, epoch: int, first: int) -> int | None:
        """Ask the coordinator whether a partition is in the transaction, for its first record there."""
        if partition.has_open(producer, epoch):
            return None
        partition.note_unverified(producer, epoch, first)
        transaction = self.transactions.get(transactional_id)
        if transaction is None or transaction.producer != producer or transaction.epoch != epoch:
            return KafkaError.INVALID_PRODUCER_EPOCH
        if transaction.state in ("committing", "aborting"):
            return KafkaError.NOT_ENOUGH_REPLICAS  # CONCURRENT_TRANSACTIONS in the words for clients of protocol v1
        if transaction.state != "ongoing" or partition not in transaction.partitions:
            self.reached("produce outside of a transaction")
            return KafkaError.INVALID_TXN_STATE
        return None

    def _led_by(self, broker: int, place: tuple[str, int]) -> Partition | int:
        topic, number = place
        partitions = self.topics.get(topic)
        if partitions is None or number >= len(partitions):
            return KafkaError.UNKNOWN_TOPIC_OR_PART
        return partitions[number] if partitions[number].leader == broker else KafkaError.NOT_LEADER_FOR_PARTITION

    # -- transactions

    def init_producer(self, broker: int, who: tuple[str, int, int], timeout: float, respond: Respond) -> None:
        """Fence the last user of a transactional.id; answer with (code, producer ID, epoch).

        A producer that only wants a higher epoch says which one it has; it is refused if that is not the last one.
        """
        transactional_id, *known = who
        if self.coordinator("transaction", transactional_id) != broker:
            respond((KafkaError.NOT_COORDINATOR, -1, -1))
            return
        transaction = self.transactions.get(transactional_id)
        if transaction is None:
            self._next_producer += 1
            transaction = self.transactions[transactional_id] = Transaction(self._next_producer)
            known = [-1, -1]  # it has expired
        transaction.used_at = self.scheduler.now
        if known[0] >= 0 and known != [transaction.producer, transaction.epoch]:
            respond((KafkaError.PRODUCER_FENCED, -1, -1))
            return
        if transaction.state == "ongoing":
            self.reached("init aborts a transaction")
            self._abort(transaction)
        if transaction.state in ("committing", "aborting"):
            respond((KafkaError.CONCURRENT_TRANSACTIONS, -1, -1))
            return
        transaction.epoch += 1
        transaction.timeout = timeout
        transaction.state = "empty"
        respond((None, transaction.producer, transaction.epoch))

    def _abort(self, transaction: Transaction) -> None:
        transaction.epoch += 1
        self._end(transaction, is_committed=False)

    def add_partitions(self, broker: int, who: tuple[str, int, int], places: Any, respond: Respond) -> None:
        """Add partitions to a transaction, which begins with that; answer with a code or None."""
        transaction = self._of(broker, who)
        if isinstance(transaction, int):
            respond(transaction)
        elif transaction.state in ("committing", "aborting"):
            respond(KafkaError.CONCURRENT_TRANSACTIONS)
        elif any(number >= len(self.topics.get(topic, ())) for topic, number in places):
            respond(KafkaError.UNKNOWN_TOPIC_OR_PART)
        else:
            if transaction.state != "ongoing":
                transaction.state = "ongoing"
                transaction.number += 1
                self._watch(transaction, transaction.number)
            transaction.partitions.update(self.topics[topic][number] for topic, number in places)
            respond(None)

    def _watch(self, transaction: Transaction, number: int) -> None:
        def give_up() -> None:
            if transaction.state == "ongoing" and transaction.number == number:
                self.reached("transaction timed out")
                self._abort(transaction)

        self.scheduler.after(transaction.timeout, give_up)

    def end_transaction(self, broker: int, who: tuple[str, int, int], commit: bool, respond: Respond) -> None:
        """Commit or abort; answer with a code or None once that is certain, before the markers are written."""
        transaction = self._of(broker, who)
        if self.is_late() and not commit:
            self.reached("late abort")
        if isinstance(transaction, int):
            respond(transaction)
            return
        same = ("committing", "committed") if commit else ("aborting", "aborted")
        if transaction.state == "ongoing":
            self._end(transaction, is_committed=commit)
            respond(None)
        elif transaction.state == same[1]:
            self.reached("EndTxn repeated")
            respond(None)
        elif transaction.state in ("committing", "aborting"):
            wrong = transaction.state != same[0]
            respond(KafkaError.INVALID_TXN_STATE if wrong else KafkaError.CONCURRENT_TRANSACTIONS)
        else:
            respond(KafkaError.INVALID_TXN_STATE)

    def _of(self, broker: int, who: tuple[str, int, int]) -> Transaction | int:
        transactional_id, producer, epoch = who
        if self.coordinator("transaction", transactional_id) != broker:
            return KafkaError.NOT_COORDINATOR
        transaction = self.transactions.get(transactional_id)
        if transaction is None or transaction.producer != producer:
            return KafkaError.INVALID_PRODUCER_ID_MAPPING
        transaction.used_at = self.scheduler.now
        return transaction if transaction.epoch == epoch else KafkaError.PRODUCER_FENCED

    def _end(self, transaction: Transaction, *, is_committed: bool) -> None:
        transaction.state = "committing" if is_committed else "aborting"
        left, transaction.partitions = transaction.partitions, set()
        producer, epoch, random = transaction.producer, transaction.epoch, self.scheduler.random
        left_to_mark = set(left)

        def mark(partition: Partition) -> None:
            if not self.brokers[partition.leader].is_up:
                self.scheduler.after(0.1, lambda: mark(partition))
                return
            partition.end_transaction(producer, epoch, self.scheduler.now, is_committed=is_committed)
            left_to_mark.discard(partition)
            complete()

        def complete() -> None:
            if not left_to_mark:
                transaction.state = "committed" if is_committed else "aborted"

        for partition in sorted(left, key=lambda each: (each.topic, each.number)):
            slow = 0.3 * random.random() if random.random() < 0.03 else 0.0
            self.scheduler.after(_MARKER_SECONDS * random.random() + slow, lambda partition=partition: mark(partition))
        complete()

    # -- groups

    def join(self, broker: int, group_id: str, name: str, session: float, respond: Respond, *, owns: bool) -> None:
        """Join a group; the answer, (code, generation, owns), comes when all members have joined.

        A member says if it owns the partition; it is answered None if it is to hand that over.
        """
        if self.coordinator("group", group_id) != broker:
            respond((KafkaError.NOT_COORDINATOR, -1, False))
            return
        group = self.groups.setdefault(group_id, Group())
        member = group.members.get(name)
        if member is None:
            member = group.members[name] = Member(name, session, 0.0)
        member.respond, member.owns = respond, owns
        if group.is_asked and name == group.owner and not owns:
            self.reached("partition handed over")
            group.owner, group.successor, group.is_asked = group.successor, "", False
        self._expire_later(group, member)
        self._begin_round(group, session)
        self._conclude_if_all(group)

    def _begin_round(self, group: Group, patience: float) -> None:
        if not group.is_joining:
            group.is_joining = True
            group.round += 1
            number = group.round
            self.scheduler.after(patience, lambda: self._conclude(group, number))

    def reassign(self) -> None:
        """Give each group's partition to another member, as assignors may: its owner is asked to hand it over."""
        for group in self.groups.values():
            others = sorted(group.members.keys() - {group.owner})
            if group.owner in group.members and others and not group.successor:
                group.successor = self.scheduler.random.choice(others)
                self._begin_round(group, max(member.session for member in group.members.values()))

    def expel(self) -> None:
        """Remove each group's owner, as if its session were over; its next heartbeat tells it."""
        for group in self.groups.values():
            self._remove(group, group.owner)

    def heartbeat(self, broker: int, group_id: str, name: str, generation: int, respond: Respond) -> None:
        """Note a sign of life; answer with a code or None."""
        group = self.groups.get(group_id)
        if self.coordinator("group", group_id) != broker:
            respond(KafkaError.NOT_COORDINATOR)
        elif group is None or name not in group.members:
            respond(KafkaError.UNKNOWN_MEMBER_ID)
        else:
            group.heard_at[name.partition("-member-")[0]] = self.scheduler.now
            self._expire_later(group, group.members[name])
            respond(KafkaError.REBALANCE_IN_PROGRESS if group.is_joining or generation != group.generation else None)

    def describe_group(self, broker: int, group_id: str, respond: Respond) -> None:
        """Answer with a code or None, and the names of a group's members."""
        group = self.groups.get(group_id)
        if self.coordinator("group", group_id) != broker:
            respond((KafkaError.NOT_COORDINATOR, ()))
        elif group is None:
            respond((KafkaError.GROUP_ID_NOT_FOUND, ()))
        else:
            respond((None, tuple(group.members)))

    def leave(self, broker: int, group_id: str, name: str, respond: Respond) -> None:
        """Leave a group."""
        group = self.groups.get(group_id)
        if self.coordinator("group", group_id) == broker and group is not None:
            self._remove(group, name)
        respond(None)

    def _expire_later(self, group: Group, member: Member) -> None:
        member.expires_at = self.scheduler.now + member.session

        def look() -> None:
            if group.members.get(member.name) is not member:
                return
            left = member.expires_at - self.scheduler.now
            if left > 1e-9:
                return
            if member.respond is not None:  # it waits for the others
                return
            self.reached("member expired")
            self._remove(group, member.name)

        self.scheduler.after(member.session, look)

    def _remove(self, group: Group, name: str) -> None:
        if group.members.pop(name, None) is None:
            return
        if group.owner == name:
            group.owner, group.is_asked = "", False
        if group.members:
            self._begin_round(group, max(member.session for member in group.members.values()))
        self._conclude_if_all(group)

    def _conclude_if_all(self, group: Group) -> None:
        if group.is_joining and all(member.respond is not None for member in group.members.values()):
            self._conclude(group, group.round)

    def _conclude(self, group: Group, number: int) -> None:
        if not group.is_joining or group.round != number:
            return
        group.is_joining = False
        for name in [name for name, member in group.members.items() if member.respond is None]:
            del group.members[name]
        if group.owner not in group.members:
            group.owner = self.scheduler.random.choice(sorted(group.members)) if group.members else ""
            group.is_asked = False
        owner = group.members.get(group.owner)
        group.is_asked = group.is_asked or (bool(group.successor) and owner is not None and owner.owns)
        group.successor = group.successor if group.is_asked else ""
        group.generation += 1
        for member in group.members.values():
            respond, member.respond = member.respond, None
            self._expire_later(group, member)
            if respond is not None:
                is_owner = None if member is owner and group.is_asked else member is owner
                respond((None, group.generation, is_owner))
