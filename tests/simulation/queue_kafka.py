"""Kafka as queues need it beyond the harvester: groups that share partitions, their offsets, and brokers' clocks.

A group rebalances as with librdkafka's default assignors: all members give up everything, then each gets a range. The
partition of `__consumer_offsets` coordinates all groups; offsets in a transaction wait there for its end.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from confluent_kafka import OFFSET_INVALID, TIMESTAMP_LOG_APPEND_TIME, KafkaError, KafkaException, TopicPartition

from outbox_core.errors import KafkaUnavailable
from tests.simulation import clients
from tests.simulation.brokers import Cluster, Entry, Partition, Sent
from tests.simulation.clients import Message, Place
from tests.simulation.network import LOST, Respond
from tests.simulation.scheduling import Scheduler, current
from tests.simulation.threads import Event

OFFSETS = "__consumer_offsets"
_UNSTABLE = "unstable"
_RETRIES_OF_COMMIT = 3
_AGAIN = (KafkaError._TRANSPORT, KafkaError.NOT_COORDINATOR, KafkaError.CONCURRENT_TRANSACTIONS)
_NO_MEMBER = (KafkaError.UNKNOWN_MEMBER_ID, KafkaError.ILLEGAL_GENERATION)
Who = tuple[str, str, int]
"""A member of a group: the group, its name, the generation."""


class StampedPartition(Partition):
    """A partition whose leader stamps records with a clock of its own; the true times are kept beside."""

    def __init__(self, topic: str, number: int, leader: int, clock_errors: Mapping[int, float]) -> None:
        super().__init__(topic, number, leader)
        self.appended: dict[int, float] = {}
        self._clock_errors = clock_errors

    def append(
        self, producer: int, epoch: int, first: int, records: list[Sent], now: float, *, is_transactional: bool
    ) -> tuple[int | None, int]:
        before, stamp = self.end, now + self._clock_errors.get(self.leader, 0.0)
        answer = super().append(producer, epoch, first, records, stamp, is_transactional=is_transactional)
        self.appended.update(dict.fromkeys(range(before, self.end), now))
        return answer

    def visible(self, since: int) -> list[Entry]:
        """Return the entries from an offset on that a reader of committed records may have read."""
        return self.log[since : self.stable_end]


class OffsetsPartition(Partition):
    """The partition that keeps the offsets of all groups; its leader coordinates them."""

    def __init__(self) -> None:
        super().__init__(OFFSETS, 0, 0)
        self.committed: dict[tuple[str, Place], int] = {}
        self.pending: dict[int, list[tuple[str, Mapping[Place, int]]]] = {}  # by producer
        self._gone_back: dict[tuple[str, Place], list[range]] = {}

    def commit(self, group: str, offsets: Mapping[Place, int]) -> None:
        """Note a group's offsets; a request that comes late takes them back."""
        for place, offset in offsets.items():
            before = self.committed.get((group, place), 0)
            if offset < before:
                self._gone_back.setdefault((group, place), []).append(range(offset, before))
            self.committed[group, place] = offset

    @property
    def times_gone_back(self) -> int:
        """How often a group's offset was lower than before."""
        return sum(map(len, self._gone_back.values()))

    def went_back_over(self, group: str, place: Place, offset: int) -> bool:
        """Tell whether a record that a group had committed may have been read again."""
        return any(offset in gone_back for gone_back in self._gone_back.get((group, place), ()))

    def is_unstable(self, group: str, place: Place) -> bool:
        """Tell whether an open transaction has an offset of this partition."""
        waiting = (offsets for one in self.pending.values() for name, offsets in one if name == group)
        return any(place in offsets for offsets in waiting)

    def end_transaction(self, producer: int, epoch: int, now: float, *, is_committed: bool) -> None:
        del epoch, now
        for group, offsets in self.pending.pop(producer, ()):
            if is_committed:
                self.commit(group, offsets)


@dataclass(eq=False)
class _Member:
    name: str
    topic: str
    session: float
    expires_at: float = 0.0
    respond: Respond | None = None


@dataclass(eq=False)
class _Group:
    members: dict[str, _Member] = field(default_factory=dict)
    generation: int = 0
    is_joining: bool = False


class QueueCluster(Cluster):
    """Brokers with groups that share the partitions of a topic, and with clocks that can be wrong."""

    def __init__(self, scheduler: Scheduler) -> None:
        super().__init__(scheduler)
        self.clock_errors: dict[int, float] = {}
        self.offsets = OffsetsPartition()
        self.topics[OFFSETS] = [self.offsets]
        self.append_timed: set[str] = set()
        self._groups: dict[str, _Group] = {}

    def create(self, topic: str, partitions: int, settings: dict[str, str]) -> bool:
        """See `Cluster.create`."""
        if not super().create(topic, partitions, settings):
            return False
        made = self.topics[topic]
        self.topics[topic] = [StampedPartition(topic, each.number, each.leader, self.clock_errors) for each in made]
        if settings.get("message.timestamp.type") == "LogAppendTime":
            self.append_timed.add(topic)
        return True

    def stamped(self, topic: str) -> list[StampedPartition]:
        """Return a topic's partitions."""
        return [each for each in self.topics[topic] if isinstance(each, StampedPartition)]

    # -- members

    def members_of(self, group_id: str) -> frozenset[str]:
        """Return the IDs of a group's members."""
        return frozenset(self._groups[group_id].members) if group_id in self._groups else frozenset()

    def join_queue(self, broker: int, who: Who, topic: str, session: float, respond: Respond) -> None:
        """Join; the answer, (code, generation, partitions), comes when all members have given up theirs."""
        if self.offsets.leader != broker:
            respond((KafkaError.NOT_COORDINATOR, -1, []))
            return
        group_id, name, _ = who
        group = self._groups.setdefault(group_id, _Group())
        member = group.members.setdefault(name, _Member(name, topic, session))
        member.respond = respond
        group.is_joining = True
        self._keep(group, member)
        self._conclude_queue(group)

    def heartbeat_queue(self, broker: int, who: Who, respond: Respond) -> None:
        """Note a sign of life; answer with a code or None."""
        group = self._groups.get(who[0], _Group())
        code = self._refusal(broker, who)
        if code is None:
            self._keep(group, group.members[who[1]])
        respond(KafkaError.REBALANCE_IN_PROGRESS if code is None and group.is_joining else code)

    def leave_queue(self, broker: int, who: Who, respond: Respond) -> None:
        """Leave."""
        group = self._groups.get(who[0])
        if self.offsets.leader == broker and group is not None:
            self._drop(group, who[1])
        respond(None)

    def _refusal(self, broker: int, who: Who) -> int | None:
        group_id, name, generation = who
        group = self._groups.get(group_id)
        if self.offsets.leader != broker:
            return KafkaError.NOT_COORDINATOR
        if group is None or name not in group.members:
            return KafkaError.UNKNOWN_MEMBER_ID
        return None if generation == group.generation else KafkaError.ILLEGAL_GENERATION

    def _keep(self, group: _Group, member: _Member) -> None:
        member.expires_at = self.scheduler.now + member.session

        def look() -> None:
            is_member = group.members.get(member.name) is member
            if is_member and member.respond is None and member.expires_at - self.scheduler.now <= 1e-9:
                self.reached("member expired")
                self._drop(group, member.name)

        self.scheduler.after(member.session, look)

    def _drop(self, group: _Group, name: str) -> None:
        if group.members.pop(name, None) is not None:
            group.is_joining = True
            self._conclude_queue(group)

    def _conclude_queue(self, group: _Group) -> None:
        members = [group.members[name] for name in sorted(group.members)]
        if not group.is_joining or any(member.respond is None for member in members):
            return
        group.is_joining = False
        group.generation += 1
        for place, member in enumerate(members):
            respond, member.respond = member.respond, None
            self._keep(group, member)
            width, count = len(self.topics[member.topic]), len(members)
            numbers = range(place * width // count, (place + 1) * width // count)
            if respond is not None:
                respond((None, group.generation, [(member.topic, number) for number in numbers]))

    # -- offsets

    def commit_offsets(self, broker: int, who: Who, offsets: Mapping[Place, int], respond: Respond) -> None:
        """Commit a member's offsets; answer with a code or None."""
        code = self._refusal(broker, who)
        if code is None:
            self.offsets.commit(who[0], offsets)
        respond(code)

    def fetch_offsets(self, broker: int, group_id: str, places: Sequence[Place], respond: Respond) -> None:
        """Answer with the committed offsets, a code, or that some are in an open transaction."""
        if self.offsets.leader != broker:
            respond(KafkaError.NOT_COORDINATOR)
        elif any(self.offsets.is_unstable(group_id, place) for place in places):
            self.reached("offsets in an open transaction")
            respond(_UNSTABLE)
        else:
            respond({place: self.offsets.committed.get((group_id, place), 0) for place in places})

    def add_offsets(
        self, broker: int, producer: tuple[str, int, int], who: Who, offsets: Mapping[Place, int], respond: Respond
    ) -> None:
        """Add a member's offsets to a transaction; answer with a code or None."""
        transactional_id, number, epoch = producer
        transaction = self.transactions.get(transactional_id)
        if self.offsets.leader != broker:
            respond(KafkaError.NOT_COORDINATOR)
        elif transaction is None or transaction.producer != number or transaction.epoch != epoch:
            respond(KafkaError.INVALID_PRODUCER_EPOCH)
        elif transaction.state != "ongoing" or self.offsets not in transaction.partitions:
            respond(KafkaError.INVALID_TXN_STATE)
        else:
            code = self._refusal(broker, who)
            if code is None:
                self.offsets.pending.setdefault(number, []).append((who[0], offsets))
            respond(code)


def unreachable_brokers(_: object, timeout_seconds: float) -> list[str]:
    """Stand in for `outbox_core.kafka.reach`: to wait for a broker that does not answer takes all the time."""
    return [f"broker {number}" for number in _silent(timeout_seconds)]


def leaders_of(topic: str) -> dict[int, str]:
    """Return the leader of each partition, as `unreachable_brokers` names it."""
    process: Any = current().process
    return {part.number: f"broker {part.leader}" for part in process.world.cluster.topics[topic]}


def _silent(timeout_seconds: float) -> list[int]:
    process: Any = current().process
    world = process.world
    listed = [number for number, broker in enumerate(world.cluster.brokers) if broker.is_up]
    silent = [number for number in listed if (process, world.cluster.brokers[number]) in world.network.cut]
    current().wait(timeout_seconds if silent else 0.02)
    if len(silent) == len(listed):
        raise KafkaUnavailable("no broker answers")
    return silent


def members_of(group_id: str, timeout_seconds: float) -> frozenset[str] | None:
    """Return the IDs of a group's members, None if its coordinator does not answer."""
    process: Any = current().process
    cluster = process.world.cluster
    coordinator = cluster.brokers[cluster.offsets.leader]
    if not coordinator.is_up or (process, coordinator) in process.world.network.cut:
        current().wait(timeout_seconds)
        return None
    current().wait(0.01)
    members: frozenset[str] = cluster.members_of(group_id)
    return members


def _at_call(what: str) -> None:
    """Let the world disturb the process that calls."""
    process: Any = current().process
    process.world.at_call(what)


class Stamped(Message):
    """A record with the broker's time."""

    __slots__ = ()

    def timestamp(self) -> tuple[int, int]:
        return TIMESTAMP_LOG_APPEND_TIME, super().timestamp()[1]


class Producer(clients.Producer):
    """`confluent_kafka.Producer` with random partitions, and with offsets in transactions."""

    def init_transactions(self, timeout: float) -> None:
        _at_call("init_transactions")
        super().init_transactions(timeout)

    def commit_transaction(self, timeout: float) -> None:
        _at_call("commit_transaction")
        super().commit_transaction(timeout)

    def abort_transaction(self, timeout: float) -> None:
        _at_call("abort_transaction")
        super().abort_transaction(timeout)

    def produce(
        self, topic: str, value: Any = None, key: Any = None, partition: int = -1, *report: Any, **more: Any
    ) -> None:
        if partition < 0 and self.settings.get("partitioner") == "random":
            partition = self.scheduler.random.randrange(len(self.cluster.topics.get(topic, ())) or 1)
        super().produce(topic, value, key, partition, *report, **more)

    def send_offsets_to_transaction(self, places: list[TopicPartition], member: Who, timeout: float) -> None:
        """Add offsets to the open transaction; a call that timed out goes on until the transaction ends."""
        _at_call("send_offsets_to_transaction")
        self._raise_failure()
        end, outcome = self.process.monotonic() + timeout, []
        self._lanes.setdefault((OFFSETS, 0), clients._Lane((OFFSETS, 0))).is_registered = True
        offsets = {(each.topic, each.partition): each.offset for each in places}
        self._add_offsets(member, offsets, outcome, self._end_number)
        while not outcome and self._fatal is None:
            left = end - self.process.monotonic()
            if left <= 0:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "offsets", retriable=True))
            self._news.clear()
            self._news.wait(left)
        if outcome and outcome[0] in clients._FENCED:
            self._fail(KafkaError(KafkaError._FENCED, "fenced", fatal=True))
        elif outcome and outcome[0] is not None:
            self._must_abort(outcome[0])
        self._raise_failure()

    def _raise_failure(self) -> None:
        if self._fatal is not None or self._error is not None:
            raise KafkaException(self._fatal or self._error)

    def _add_offsets(self, member: Who, offsets: Mapping[Place, int], outcome: list[int | None], number: int) -> None:
        """Add the group's partition to the transaction, then the offsets; each is repeated until it is answered."""
        cluster: Any = self.cluster

        def add() -> None:
            who = self._who
            self.send_to_coordinator(
                "transaction",
                self._id,
                lambda broker: lambda respond: cluster.add_partitions(broker, who, [(OFFSETS, 0)], respond),
                lambda answer: answered(answer, add, commit),
            )

        def commit() -> None:
            broker, who = cluster.offsets.leader, self._who
            self.send(
                broker,
                lambda respond: cluster.add_offsets(broker, who, member, offsets, respond),
                lambda answer: answered(answer, commit, lambda: tell(None)),
            )

        def answered(answer: Any, again: Callable[[], None], on_success: Callable[[], None]) -> None:
            code = KafkaError._TRANSPORT if answer is LOST else answer
            if self._end_number != number or self._state != "open":
                return
            if code is None:
                on_success()
            elif code in _AGAIN:
                self.process.after(self._backoff, again)
            else:
                tell(code)

        def tell(code: int | None) -> None:
            outcome.append(code)
            self._news.set()

        add()


class Consumer(clients.Consumer):
    """`confluent_kafka.Consumer` as a member of a group that shares a topic's partitions."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self.group = str(settings.get("group.id", ""))
        self._on_commit = settings.get("on_commit")
        self._commits: deque[tuple[KafkaError | None, list[TopicPartition]]] = deque()
        self._paused: set[Place] = set()
        self._positions: dict[Place, int] = {}  # of the application
        self._unknown: set[Place] = set()  # places whose committed offsets are not known yet
        self.cluster: QueueCluster

    # -- positions

    def unassign(self) -> None:
        super().unassign()  # what is paused stays so
        self._positions.clear()
        self._unknown.clear()

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        """Read these partitions, too, from the group's offsets where none are given."""
        known = [each for each in places if each.offset != OFFSET_INVALID]
        self._positions.update({(each.topic, each.partition): each.offset for each in known})
        unknown = [(each.topic, each.partition) for each in places if each.offset == OFFSET_INVALID]
        self._unknown.update(unknown)
        self._places.update(dict.fromkeys(unknown, 0))
        if unknown:
            self._find(unknown, self._assignment)
        super().incremental_assign(known)

    def _find(self, places: list[Place], number: int) -> None:
        broker, group = self.cluster.offsets.leader, self.group

        def answered(answer: Any) -> None:
            if not self._unknown.issuperset(places) or number != self._assignment:
                return
            if not isinstance(answer, dict):
                self.process.after(0.1, lambda: self._find(places, number))
                return
            self._unknown.difference_update(places)
            self._positions.update(answer)
            self._places.update(answer)
            for place in places:
                self._fetch(place, self._assignment)

        self.send(broker, lambda respond: self.cluster.fetch_offsets(broker, group, places, respond), answered)

    def pause(self, places: list[TopicPartition]) -> None:
        """Read these no more; what was fetched is dropped, and fetched again later."""
        self._paused.update((each.topic, each.partition) for each in places)
        self._start_again()

    def resume(self, places: list[TopicPartition]) -> None:
        """Read these again."""
        self._paused.difference_update((each.topic, each.partition) for each in places)
        self._start_again()

    def _start_again(self) -> None:
        self._assignment += 1
        self._messages.clear()
        self._told_end.clear()
        if self._unknown:
            self._find(sorted(self._unknown), self._assignment)
        for place, position in self._positions.items():
            self._places[place] = position
            self._fetch(place, self._assignment)

    def _fetch(self, place: Place, number: int) -> None:
        if place not in self._paused and place not in self._unknown:
            super()._fetch(place, number)

    def _read(self, partition: Partition, position: int, respond: Respond, wait_until: float, broker: int) -> None:
        # An end that was told is not told again: wait for records behind it.
        tells = self._tells_end
        self._tells_end = tells and self._told_end.get((partition.topic, partition.number)) != position
        super()._read(partition, position, respond, wait_until, broker)
        self._tells_end = tells

    # -- the application's thread

    def poll(self, timeout: float = -1) -> Message | None:
        self._serve_commits()
        message = super().poll(timeout)
        return None if message is None else self._hand_out(message)

    def consume(self, number: int, timeout: float) -> list[Message]:
        """Return messages; the batch may hold some from before a rebalance that was told meanwhile."""
        self._serve_commits()
        self.serve_complaints()
        if self.scheduler.random.random() < 0.5 and self._member is not None:
            self._member.tell()
        if not self._messages and timeout:
            self._news.clear()
            self._news.wait(timeout)
        batch = [self._messages.popleft() for _ in range(min(number, len(self._messages)))]
        batch = [self._hand_out(message) for message in batch]
        if self._member is not None:
            self._member.tell()
        return batch

    def _hand_out(self, message: Message) -> Message:
        if message.error() is not None:
            return message
        offset = message.offset()
        assert offset is not None
        self._positions[message.topic(), message.partition()] = offset + 1
        if message.topic() not in self.cluster.append_timed:
            return message
        return Stamped(
            (message.topic(), message.partition()), offset, message.key(), message.value(), message.headers(),
            message._time,
        )  # fmt: skip

    # -- the group

    def subscribe(self, topics: list[str], on_assign: Any = None, on_revoke: Any = None, on_lost: Any = None) -> None:
        """Join the group."""
        member: Any = _GroupMember(self, topics[0], on_assign, on_revoke, on_lost)
        self._member, self._left = member, None

    def unsubscribe(self) -> None:
        """Leave the group, once the next poll has told of the partitions that are revoked."""
        member: Any = self._member
        member.leave_when_told()

    @property
    def who(self) -> Who:
        """This member of its group."""
        member: Any = self._member
        who: Who = member.who
        return who

    @property
    def is_idle(self) -> bool:
        """True if the application has not polled for longer than `max.poll.interval.ms`."""
        return False

    def memberid(self) -> str:
        """Return the ID of this member."""
        return self.who[1]

    def consumer_group_metadata(self) -> Any:
        """Return what a transaction says about this member."""
        return self.who

    def committed(self, places: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        """Return the group's offsets, once no open transaction has any of these."""
        names, end = [(each.topic, each.partition) for each in places], self.process.monotonic() + timeout
        while self.process.monotonic() < end:
            broker, event, answers = self.cluster.offsets.leader, Event(), list[Any]()

            def done(answer: Any, event: Event = event, answers: list[Any] = answers) -> None:
                answers.append(answer)
                event.set()

            def ask(respond: Respond, broker: int = broker) -> None:
                self.cluster.fetch_offsets(broker, self.group, names, respond)

            self.send(broker, ask, done)
            event.wait(max(0.0, end - self.process.monotonic()))
            if answers and isinstance(answers[0], dict):
                return [TopicPartition(*name, offset) for name, offset in answers[0].items()]
            Event().wait(0.1)
        raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "offsets"))

    def commit(self, *, offsets: list[TopicPartition], asynchronous: bool) -> list[TopicPartition]:
        """Commit offsets; wait for the answer, or have `on_commit` called."""
        if not asynchronous:
            _at_call("commit")
        event, outcome = Event(), []

        def done(code: int | None) -> None:
            error = None if code is None else KafkaError(code, "not committed")
            outcome.append(error)
            event.set()
            if asynchronous:
                self._commits.append((error, offsets))

        self._send_commit({(each.topic, each.partition): each.offset for each in offsets}, done, 0)
        if asynchronous:
            return offsets
        event.wait()
        if outcome[0] is not None:
            raise KafkaException(outcome[0])
        return offsets

    def _send_commit(self, offsets: Mapping[Place, int], done: Callable[[int | None], None], attempt: int) -> None:
        broker, who = self.cluster.offsets.leader, self.who

        def answered(answer: Any) -> None:
            code = KafkaError._TRANSPORT if answer is LOST else answer
            if code in _AGAIN and attempt < _RETRIES_OF_COMMIT and self.scheduler.random.random() < 0.7:
                self.cluster.reached("commit of offsets repeated")
                self.process.after(0.1, lambda: self._send_commit(offsets, done, attempt + 1))
            else:
                done(code)

        self.send(broker, lambda respond: self.cluster.commit_offsets(broker, who, offsets, respond), answered)

    def _serve_commits(self) -> None:
        while self._commits:
            error, offsets = self._commits.popleft()
            if self._on_commit is not None:
                self._on_commit(error, offsets)


class _GroupMember:
    """The background of a member: it joins, gives signs of life, and gives everything up when others come or go."""

    def __init__(self, consumer: Consumer, topic: str, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self._consumer, self._topic = consumer, topic
        self._callbacks = on_assign, on_revoke, on_lost or on_revoke
        self._session = float(consumer.settings["session.timeout.ms"]) / 1000
        self._interval = float(consumer.settings.get("heartbeat.interval.ms", 3000)) / 1000
        self._to_tell: deque[tuple[str, list[Place]]] = deque()
        self._owned: list[Place] = []
        self._state = "joining"  # member, leaving
        self._joins = 0
        self._is_lost = False
        self._renew()
        self._join()
        self._beat()

    def _renew(self) -> None:
        consumer = self._consumer
        name = f"{consumer.process.name}-member-{consumer.scheduler.random.getrandbits(32):08x}"
        self.who: Who = (consumer.group, name, -1)
        self._answered_at = consumer.process.monotonic()

    def tell(self) -> bool:
        """Call what is to be called; return False if there was nothing."""
        told = bool(self._to_tell)
        while self._to_tell:
            what, places = self._to_tell.popleft()
            if what == "assign":
                self._assign(places)
            elif what == "leave":
                self._consumer._left = self.leave()
            else:
                self._give_up()
                if self._is_lost:
                    self._renew()
                self._is_lost = False
                self._join()
        return told

    def _assign(self, places: list[Place]) -> None:
        self._owned = places
        before, on_assign = self._consumer._assignment, self._callbacks[0]
        self._consumer.cluster.reached("partitions assigned")
        named = [TopicPartition(*place) for place in places]
        if on_assign is not None:
            on_assign(self._consumer, named)
        if self._consumer._assignment == before:
            self._consumer.assign(named)

    def _give_up(self) -> None:
        owned, self._owned = self._owned, []
        callback = self._callbacks[2 if self._is_lost else 1]
        self._consumer.cluster.reached("partitions lost" if self._is_lost else "partitions revoked")
        world: Any = self._consumer.process
        world.world.gives_up(self._consumer.process)
        if owned and callback is not None:
            callback(self._consumer, [TopicPartition(*place) for place in owned])
        self._consumer.unassign()

    def leave_when_told(self) -> None:
        """Leave as soon as the application polls, and join no more."""
        self._joins += 1
        self._state = "gone"
        self._to_tell.clear()
        self._to_tell.append(("leave", []))
        self._consumer._news.set()

    def leave(self) -> Event:
        """Hand the partitions over, and leave; return the event of Kafka's answer."""
        if self._owned:
            self._give_up()
        self._to_tell.clear()
        return self._tell_group()

    def _tell_group(self) -> Event:
        """Tell the coordinator that this member leaves; return the event of its answer."""
        broker, event, who = self._consumer.cluster.offsets.leader, Event(), self.who
        self._consumer.send(
            broker, lambda respond: self._consumer.cluster.leave_queue(broker, who, respond), lambda _: event.set()
        )
        return event

    def _rebalance(self) -> None:
        if self._state == "member":
            self._state = "leaving"
            self._to_tell.append(("revoke", []))
            self._consumer._news.set()

    def _lose(self) -> None:
        self._is_lost = True
        self.who = (*self.who[:2], -1)
        self._rebalance()

    def _join(self) -> None:
        self._joins += 1
        self._state = "joining"
        consumer, number, who = self._consumer, self._joins, self.who
        broker = consumer.cluster.offsets.leader

        def answered(answer: Any) -> None:
            if number != self._joins or consumer.is_closed:
                return
            code, generation, places = (KafkaError._TRANSPORT, -1, []) if answer is LOST else answer
            if code is not None:
                consumer.process.after(0.1, lambda: self._join() if number == self._joins else None)
                return
            self._state = "member"
            self._answered_at = consumer.process.monotonic()
            self.who = (*who[:2], generation)
            self._to_tell.append(("assign", places))
            consumer._news.set()

        topic, session = self._topic, self._session
        consumer.send(
            broker, lambda respond: consumer.cluster.join_queue(broker, who, topic, session, respond), answered
        )

    def _beat(self) -> None:
        consumer = self._consumer
        if consumer.is_closed or self._state == "gone":
            return
        consumer.process.after(self._interval, self._beat)
        if self._state == "joining" or self._is_lost:
            return
        if consumer.is_idle:
            consumer.cluster.reached("not polled for too long")
            self._tell_group()
            self._lose()
            return
        if consumer.process.monotonic() - self._answered_at > self._session:
            self._lose()
            return
        broker, who, sent_at = consumer.cluster.offsets.leader, self.who, consumer.process.monotonic()

        def answered(answer: Any) -> None:
            if consumer.is_closed or who != self.who:
                return
            if answer in _NO_MEMBER:
                self._lose()
            elif answer is None or answer == KafkaError.REBALANCE_IN_PROGRESS:
                self._answered_at = max(self._answered_at, sent_at)
                if answer is not None:
                    self._rebalance()

        consumer.send(broker, lambda respond: consumer.cluster.heartbeat_queue(broker, who, respond), answered)
