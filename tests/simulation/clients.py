"""The client library in the simulated world: producer, consumer and admin client as librdkafka 2.16 behaves.

What the product has to live with is here on purpose: EndTxn and Produce are repeated silently in the same epoch, an
abort gives the sequence numbers of purged records to later ones, a call that timed out goes on in the background, and a
producer is fenced, fails for good or asks for an abort. A partition has one batch on its way at a time.
"""

from __future__ import annotations

import zlib
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition
from confluent_kafka.admin import ConfigSource

from tests.simulation.brokers import ABORTED, CONTROL, Cluster, Coordinated, Partition, Sent
from tests.simulation.network import LOST, Connection, Handler, Respond
from tests.simulation.scheduling import current, spend
from tests.simulation.threads import Event, Future

_MOST_IN_BATCH = 100
_LOOK_SECONDS = 1.0
_FETCH_SECONDS = 0.5
_MOST_FETCHED = 200
_CONSUMER_SOCKET_SECONDS = 10.0
_FIND_SECONDS = 5.0
_PASSING = (KafkaError._TRANSPORT, KafkaError.NOT_LEADER_FOR_PARTITION, KafkaError.NOT_ENOUGH_REPLICAS)
_REFUSED = (
    KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError.MSG_SIZE_TOO_LARGE, KafkaError.INVALID_RECORD,
    KafkaError.INVALID_TIMESTAMP,
)  # fmt: skip
_FENCED = (KafkaError.INVALID_PRODUCER_EPOCH, KafkaError.PRODUCER_FENCED)
Place = tuple[str, int]


class Message:
    """A record that was read or delivered, or an error in the place of one."""

    __slots__ = ("_error", "_headers", "_key", "_offset", "_place", "_time", "_value")

    def __init__(
        self,
        place: Place,
        offset: int | None,
        key: bytes | None = None,
        value: bytes | None = None,
        headers: list[tuple[str, bytes]] | None = None,
        time: float = 0.0,
        error: KafkaError | None = None,
    ) -> None:
        self._place, self._offset, self._key, self._value = place, offset, key, value
        self._headers, self._time, self._error = headers, time, error

    def error(self) -> KafkaError | None:
        return self._error

    def topic(self) -> str:
        return self._place[0]

    def partition(self) -> int:
        return self._place[1]

    def offset(self) -> int | None:
        return self._offset

    def key(self) -> bytes | None:
        return self._key

    def value(self) -> bytes | None:
        return self._value

    def headers(self) -> list[tuple[str, bytes]] | None:
        return self._headers

    def timestamp(self) -> tuple[int, int]:
        return 1, int((1_700_000_000.0 + self._time) * 1000)

    def latency(self) -> float:
        return 0.001


class Client:
    """Connections to the brokers, and questions about the cluster."""

    def __init__(self, settings: dict[str, Any]) -> None:
        self.settings = settings
        self.process = current().process
        self.scheduler = self.process.scheduler
        world: Any = self.process
        self.cluster: Cluster = world.world.cluster
        self.network = world.world.network
        self.is_closed = False
        self._connections: dict[int, Connection] = {}
        self._leaders: dict[Place, int] = {}
        self._coordinators: dict[Coordinated, int] = {}
        names = [broker.name for broker in self.cluster.brokers]
        first = str(settings.get("bootstrap.servers", "")).partition(":")[0]
        self._knows_only = names.index(first) if first in names else None  # of the brokers
        self._away: set[int] = set()
        self._complaints: deque[KafkaError] = deque()
        self._socket_timeout = float(settings.get("socket.timeout.ms", 60_000)) / 1000

    def send(
        self, broker: int, handler: Callable[[Respond], None], on_answer: Callable[[object], None], name: str = ""
    ) -> None:
        """Send a request; a silent connection is given up after the socket's time-out."""
        connection = self._connections.get(broker)
        if connection is None or connection.is_broken:
            client, server = str(self.settings.get("client.id", "")), self.cluster.brokers[broker]
            connection = self._connections[broker] = self.network.connect(self.process, server, client)

        def answered(answer: object) -> None:
            if not self.is_closed:
                self._note_answer(broker, is_lost=answer is LOST)
                on_answer(answer)

        request = self.network.send(connection, handler, answered, name)

        def give_up() -> None:
            if not request.is_over and not self.is_closed:
                self.network.break_connection(connection)

        self.process.after(self._socket_timeout, give_up)

    def send_to_coordinator(
        self,
        kind: str,
        name: str,
        handler_at: Callable[[int], Handler],
        on_answer: Callable[[Any], None],
        what: str = "",
    ) -> int | None:
        """Send a request to the coordinator of a group or transaction; return the broker, None while it is looked for.

        A client asks any broker for it, and anew when that one does not answer or is the coordinator no more.
        """
        place = kind, name

        def answered(answer: Any) -> None:
            code = answer[0] if isinstance(answer, tuple) else answer
            if answer is LOST or code == KafkaError.NOT_COORDINATOR:
                self._coordinators.pop(place, None)
            on_answer(answer)

        def found(broker: Any) -> None:
            if broker is LOST:
                on_answer(LOST)
            else:
                self._coordinators[place] = broker
                self.send(broker, handler_at(broker), answered, what)

        broker = self._coordinators.get(place)
        if broker is None:
            self.ask(lambda: self.cluster.coordinator(*place), _FIND_SECONDS, found)
        else:
            self.send(broker, handler_at(broker), answered, what)
        return broker

    def _note_answer(self, broker: int, *, is_lost: bool) -> None:
        if not is_lost:
            self._away.discard(broker)
        elif broker not in self._away:
            self._away.add(broker)
            self._complaints.append(KafkaError(KafkaError._TRANSPORT, f"broker {broker}"))
            if len(self._away) == len(self.cluster.brokers):
                self._complaints.append(KafkaError(KafkaError._ALL_BROKERS_DOWN))

    def serve_complaints(self) -> None:
        """Tell `error_cb` about brokers that cannot be reached."""
        tell = self.settings.get("error_cb")
        while self._complaints:
            error = self._complaints.popleft()
            if tell is not None:
                tell(error)

    def reaches(self, broker: int) -> bool:
        """Tell whether a request can leave: on a connection that stands, or on a new one."""
        connection, server = self._connections.get(broker), self.cluster.brokers[broker]
        if connection is not None and not connection.is_broken:
            return True
        return server.is_up and (self.process, server) not in self.network.cut

    def any_broker(self) -> int:
        """Return some broker, one that is known to be up as a rule, and has not been lost last."""
        if self._knows_only is not None:
            return self._knows_only
        up = [number for number, broker in enumerate(self.cluster.brokers) if broker.is_up]
        return self.scheduler.random.choice([number for number in up if number not in self._away] or up or [0])

    def ask(self, question: Callable[[], Any], timeout: float, done: Callable[[Any], None]) -> None:
        """Ask any broker, again until it answers; `done` gets the answer, or `LOST` after the time-out."""
        end = self.process.monotonic() + timeout

        def attempt() -> None:
            if self.process.monotonic() >= end:
                done(LOST)
            else:
                self.send(self.any_broker(), lambda respond: respond(question()), answered)

        def answered(answer: object) -> None:
            if answer is LOST:
                self.process.after(0.1, attempt)
            else:
                done(answer)

        attempt()

    def call(self, question: Callable[[], Any], timeout: float) -> Any:
        """Ask any broker and wait for the answer; raise KafkaException without one."""
        event, found = Event(), []
        self.ask(question, timeout, lambda answer: (found.append(answer), event.set()))
        if not event.wait(timeout) or found[0] is LOST:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no broker answers"))
        return found[0]

    def leader(self, place: Place) -> int:
        """Return a partition's leader as the client knows it."""
        if place not in self._leaders:
            self.refresh(place)
        return self._leaders[place]

    def refresh(self, place: Place) -> None:
        """Learn a partition's leader anew."""
        partition = self.partition(place)
        self._leaders[place] = partition.leader if partition is not None else 0

    def partition(self, place: Place) -> Partition | None:
        """Return a partition of the cluster."""
        partitions = self.cluster.topics.get(place[0])
        return partitions[place[1]] if partitions is not None and place[1] < len(partitions) else None

    def list_topics(self, topic: str | None = None, timeout: float = -1) -> Any:
        """Return metadata."""
        return self.call(lambda: self._metadata(topic), timeout if timeout >= 0 else 60.0)

    def _broker(self, number: int) -> Any:
        return SimpleNamespace(id=number, host=self.cluster.brokers[number].name, port=9092)

    def _metadata(self, topic: str | None) -> Any:
        names = list(self.cluster.topics) if topic is None else [topic]
        topics = {}
        for name in names:
            partitions = self.cluster.topics.get(name)
            error = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART) if partitions is None else None
            parts = {part.number: SimpleNamespace(id=part.number, leader=part.leader) for part in partitions or ()}
            topics[name] = SimpleNamespace(error=error, partitions=parts)
        brokers = {number: self._broker(number) for number, each in enumerate(self.cluster.brokers) if each.is_up}
        return SimpleNamespace(topics=topics, brokers=brokers, controller_id=min(brokers, default=-1))


@dataclass(slots=True, eq=False)
class _Outgoing:
    place: Place
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes]] | None
    on_delivery: Callable[..., Any] | None
    at: float
    handed_over_at: float
    clock_error: float


@dataclass(slots=True, eq=False)
class _Batch:
    messages: list[_Outgoing]
    first: int
    producer: int
    epoch: int
    is_given_up: bool = False
    is_on_way: bool = False  # otherwise it waits for its repeat


@dataclass(slots=True, eq=False)
class _Lane:
    place: Place
    waiting: deque[_Outgoing] = field(default_factory=deque)
    under_way: _Batch | None = None
    next_sequence: int = 0
    acknowledged: int = 0  # the sequence number behind the last acknowledged record
    is_registered: bool = False
    is_registering: bool = False
    is_resting: bool = False  # after a refusal of its registration
    is_scheduled: bool = False


class Producer(Client):
    """`confluent_kafka.Producer`."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._id = str(settings.get("transactional.id", ""))
        self._is_idempotent = bool(self._id) or bool(settings.get("enable.idempotence", False))
        longest = settings.get("transaction.timeout.ms", 60_000) if self._id else 300_000
        timeout = settings.get("delivery.timeout.ms", settings.get("message.timeout.ms", longest))
        self._timeout = float(timeout) / 1000
        self._linger = float(settings.get("linger.ms", 5)) / 1000
        self._backoff = float(settings.get("retry.backoff.ms", 100)) / 1000
        self._retries = int(settings.get("retries", 1_000_000))
        self._longest_message = int(settings.get("message.max.bytes", 1_000_000))
        self._longest_queue = int(settings.get("queue.buffering.max.messages", 100_000)) or 10**9
        self._most_in_batch = int(settings.get("batch.num.messages", _MOST_IN_BATCH))
        self._reports_only_errors = bool(settings.get("delivery.report.only.error", False))
        self._lanes: dict[Place, _Lane] = {}
        self._reports: deque[tuple[Callable[..., Any], KafkaError | None, Message]] = deque()
        self._news = Event()
        self._unfinished = 0
        self._looks = False
        self._producer, self._epoch = -1, -1
        self._is_asking_for_id = self._must_renew = False
        # of transactions
        self._state = "new"  # ready, open, ending
        self._error: KafkaError | None = None  # abort is needed
        self._has_failed = False  # some record of the transaction
        self._fatal: KafkaError | None = None
        self._must_tell_fatal = self._must_bump = self._is_bumping = False
        self._call = ""  # that timed out, and goes on
        self._init: list[object] = []
        self._outcome: list[int | None] | None = None  # of EndTxn
        self._end_number = 0

    def _break_some(self, share: float, broker: int, attempt: int) -> None:
        """Break the connection of a share of the requests that are sent for the first time."""
        if not attempt and share and self.scheduler.random.random() < share:
            self.network.break_connection(self._connections[broker])

    # -- records

    def __len__(self) -> int:
        return self._unfinished + len(self._reports)

    def produce(
        self,
        topic: str,
        value: Any = None,
        key: Any = None,
        partition: int = -1,
        on_delivery: Callable[..., Any] | None = None,
        _alias: object = None,  # of `on_delivery`, as in the real client
        _timestamp: int = 0,
        headers: Any = None,
    ) -> None:
        """Queue a record."""
        if self._fatal is not None:
            raise KafkaException(KafkaError(KafkaError._FATAL, "the producer has failed"))
        if self._id and (self._state != "open" or self._error is not None or self._call):
            raise KafkaException(KafkaError(KafkaError._STATE, "the transaction takes no record"))
        key, value = _bytes(key), _bytes(value)
        if len(key or b"") + len(value or b"") > self._longest_message:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "larger than message.max.bytes"))
        if len(self) >= self._longest_queue:
            self.cluster.reached("queue full")
            raise BufferError("Local: Queue full")
        width = len(self.cluster.topics.get(topic, ())) or 1
        if partition >= width:
            raise KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION, "there is no such partition"))
        number = partition if partition >= 0 else zlib.crc32(key or b"") % width
        lane = self._lanes.setdefault((topic, number), _Lane((topic, number)))
        now = self.process.monotonic(), self.scheduler.now, self.process.clock_error
        lane.waiting.append(_Outgoing(lane.place, key, value, headers, on_delivery, *now))
        self._unfinished += 1
        if not self._looks:
            self._looks = True
            self.process.after(_LOOK_SECONDS, self._look_for_old)
        self._schedule(lane, self._linger)

    def _schedule(self, lane: _Lane, seconds: float) -> None:
        if not lane.is_scheduled:
            lane.is_scheduled = True

            def go_on() -> None:
                lane.is_scheduled = False
                self._pump(lane)

            self.process.after(seconds, go_on)

    def _pump(self, lane: _Lane) -> None:
        if self.is_closed or lane.under_way is not None or not lane.waiting or self._fatal is not None:
            return
        if self._id:
            if self._state != "open" or self._error is not None:
                return
            if not lane.is_registered:
                self._register(lane)
                return
        elif self._is_idempotent and (self._producer < 0 or self._must_renew):
            self._renew_id()
            return
        many = min(len(lane.waiting), self._most_in_batch)
        messages = [lane.waiting.popleft() for _ in range(many)]
        producer, epoch = (self._producer, self._epoch) if self._is_idempotent else (-1, -1)
        lane.under_way = _Batch(messages, lane.next_sequence, producer, epoch)
        self._send(lane, lane.under_way, 0)

    def _send(self, lane: _Lane, batch: _Batch, attempt: int) -> None:
        if batch.is_given_up:
            return
        broker = self.leader(lane.place)
        batch.is_on_way = self.reaches(broker)
        if not batch.is_on_way:
            self._note_answer(broker, is_lost=True)
            self.refresh(lane.place)
            self.process.after(self._backoff, lambda: self._send(lane, batch, attempt + 1))
            return
        sender = self.process.name
        records = [
            Sent(
                each.key,
                each.value,
                each.headers,
                sender,
                each.handed_over_at,
                each.handed_over_at + self._timeout,
                each.clock_error,
            )
            for each in batch.messages
        ]
        sent = self._id, batch.producer, batch.epoch, batch.first, records

        def handle(respond: Respond) -> None:
            if not self._id and self.scheduler.now > records[0].until:
                self.cluster.reached("arrived after its delivery timeout")
            self.cluster.produce(broker, lane.place, sent, respond)

        self.send(
            broker,
            handle,
            lambda answer: self._answered(lane, batch, attempt, answer),
            "PRODUCE",
        )
        self._break_some(self.network.late_produces, broker, attempt)

    def _answered(self, lane: _Lane, batch: _Batch, attempt: int, answer: Any) -> None:
        if batch.is_given_up:
            return
        batch.is_on_way = False
        code, offset = (KafkaError._TRANSPORT, -1) if answer is LOST else answer
        if code in _PASSING:
            self.refresh(lane.place)
        if code is None:
            self._acknowledge(lane, batch, offset)
        elif self._fatal is not None:
            self._give_up(lane, code)
        elif code in _PASSING and attempt < self._retries:
            self._repeat(lane, batch, attempt)
        elif self._id and code in _FENCED:
            self._give_up(lane, code)
            self._fail(KafkaError(KafkaError._FENCED, "fenced", fatal=True))
        elif code == KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER and self._id:
            self._lose_sequence(lane, batch, code)
        elif not self._id and self._is_idempotent and code not in _REFUSED:
            lane.waiting.extendleft(reversed(batch.messages))
            lane.under_way = None
            self._must_renew = True
            self._after_batch(lane)
        else:
            self._give_up(lane, code)

    def _acknowledge(self, lane: _Lane, batch: _Batch, offset: int) -> None:
        lane.under_way = None
        lane.next_sequence += len(batch.messages)
        lane.acknowledged = lane.next_sequence
        for place, message in enumerate(batch.messages):
            self._report(message, None, offset + place)
        self._after_batch(lane)

    def _repeat(self, lane: _Lane, batch: _Batch, attempt: int) -> None:
        self.cluster.reached("produce repeated")
        if self._error is not None:  # what waits is purged at once
            self._purge_queued()
            return
        pause = self._backoff * self.scheduler.random.uniform(0.8, 1.2)
        self.process.after(pause, lambda: self._send(lane, batch, attempt + 1))

    def _lose_sequence(self, lane: _Lane, batch: _Batch, code: int) -> None:
        """A gap behind a record that was refused ends with the epoch; without one, the broker knows more than we do."""
        if batch.first == lane.acknowledged:
            self._give_up(lane, code)
            self._fail(KafkaError(code, "sequence numbers differ", fatal=True))
        else:
            self._must_bump = True
            self._must_abort(code)
            self._purge_queued()

    def _after_batch(self, lane: _Lane) -> None:
        if self._must_renew:
            self._renew_id()
        self._pump(lane)

    def _give_up(self, lane: _Lane, code: int, *, waiting: bool = False) -> None:
        """Fail the batch under way, and what waits if told so."""
        batch, lane.under_way = lane.under_way, None
        error = KafkaError(code, "given up")
        if batch is not None:
            batch.is_given_up = True
            for message in batch.messages:
                self._report(message, error, None)
            if self._id:
                lane.next_sequence += len(batch.messages)
                is_late = code == KafkaError._MSG_TIMED_OUT
                self._must_bump = self._must_bump or is_late  # it may still arrive
                self._must_abort(KafkaError._TIMED_OUT if is_late else code)
            elif self._is_idempotent:
                self._must_renew = True  # its sequence numbers may be used up, or not
        if waiting:
            while lane.waiting:
                self._report(lane.waiting.popleft(), error, None)
        self._after_batch(lane)

    def _report(self, message: _Outgoing, error: KafkaError | None, offset: int | None) -> None:
        self._unfinished -= 1
        self._has_failed = self._has_failed or error is not None
        if message.on_delivery is not None and (error is not None or not self._reports_only_errors):
            report = Message(message.place, offset, message.key, message.value, message.headers, error=error)
            self._reports.append((message.on_delivery, error, report))
        self._news.set()

    def _look_for_old(self) -> None:
        oldest = self.process.monotonic() - self._timeout
        for lane in self._lanes.values():
            batch = lane.under_way
            if batch is not None and batch.messages[0].at <= oldest:
                self.cluster.reached("delivery timed out")
                if batch.is_on_way:
                    self._give_up(lane, KafkaError._MSG_TIMED_OUT)
                else:
                    lane.waiting.extendleft(reversed(batch.messages))
                    lane.under_way, batch.is_given_up = None, True
                    self._must_renew = self._must_renew or not self._id
            while lane.waiting and lane.waiting[0].at <= oldest:
                # Of one that waits, its transaction learns at the commit. Its sequence number is left out.
                self._report(lane.waiting.popleft(), KafkaError(KafkaError._MSG_TIMED_OUT), None)
                lane.next_sequence += bool(self._id)
            self._pump(lane)
        self._looks = bool(self._unfinished) and not self.is_closed
        if self._looks:
            self.process.after(_LOOK_SECONDS, self._look_for_old)

    def _renew_id(self) -> None:
        if self._is_asking_for_id or any(lane.under_way for lane in self._lanes.values()):
            return

        def got(answer: Any) -> None:
            self._is_asking_for_id = False
            if answer is not LOST:
                self._producer, self._epoch = answer
                self._must_renew = False
                for lane in self._lanes.values():
                    lane.next_sequence = lane.acknowledged = 0
            for lane in self._lanes.values():
                self._pump(lane)

        if self._producer >= 0:  # with nothing on its way it raises its epoch by itself
            got((self._producer, self._epoch + 1))
        else:
            self._is_asking_for_id = True
            self.ask(self.cluster.new_producer, 5.0, got)

    def poll(self, timeout: float = -1) -> int:
        """Serve delivery reports; wait for the first."""
        if not self._reports and not self._must_tell_fatal:
            if timeout > 0:
                self._news.clear()
                self._news.wait(timeout)
            else:
                spend(self.process)
        self.serve_complaints()
        self._tell_fatal()
        return self._serve()

    def _tell_fatal(self) -> None:
        """Raise the error that broke the producer, once, as the client does instead of calling `error_cb`."""
        if self._must_tell_fatal:
            self._must_tell_fatal = False
            raise KafkaException(self._fatal)

    def _serve(self) -> int:
        served = 0
        while self._reports:
            on_delivery, error, message = self._reports.popleft()
            on_delivery(error, message)
            served += 1
        return served

    def flush(self, timeout: float = -1) -> int:
        """Wait until all is delivered, serving reports."""
        end = self.process.monotonic() + timeout
        for lane in self._lanes.values():
            self._pump(lane)
        while True:
            self._serve()
            left = end - self.process.monotonic()
            if not len(self) or left <= 0:
                self._tell_fatal()
                return len(self)
            self._news.clear()
            self._news.wait(left)

    def purge(self, in_queue: bool = True, in_flight: bool = True, blocking: bool = True) -> None:
        """Drop records."""
        del blocking
        for lane in self._lanes.values():
            batch = lane.under_way
            if batch is not None and (in_flight if batch.is_on_way else in_queue):
                lane.under_way = None
                batch.is_given_up = True
                self._must_renew = self._must_renew or not self._id
                code = KafkaError._PURGE_INFLIGHT if batch.is_on_way else KafkaError._PURGE_QUEUE
                for message in batch.messages:
                    self._report(message, KafkaError(code), None)
            while in_queue and lane.waiting:
                self._report(lane.waiting.popleft(), KafkaError(KafkaError._PURGE_QUEUE), None)

    def close(self) -> None:
        """Drop what is there, and send no more."""
        self.purge()
        self.is_closed = True

    def _purge_queued(self) -> None:
        """Drop what is not on its way; its sequence numbers go to later records."""
        self.purge(in_flight=False)

    # -- transactions

    def _must_abort(self, code: int) -> None:
        if self._error is None and self._state == "open":
            self._error = KafkaError(code, "the transaction has failed", txn_requires_abort=True)
            self._purge_queued()
            self._news.set()

    def _fail(self, error: KafkaError) -> None:
        if self._fatal is None:
            self.cluster.reached("producer fenced")
            if self._state == "open" and any(lane.is_registered for lane in self._lanes.values()):
                self.cluster.reached("fenced in mid-batch")
            self._fatal = error
            self._must_tell_fatal = True
            self._purge_queued()
        self._news.set()

    def _begin_call(self, name: str, state: str) -> None:
        if self._fatal is not None:
            raise KafkaException(self._fatal)
        if self._call not in ("", name):
            raise KafkaException(KafkaError(KafkaError._CONFLICT, f"{self._call} is under way", retriable=True))
        if not self._call and self._state != state:
            raise KafkaException(KafkaError(KafkaError._STATE, f"{name} in state {self._state}"))

    def _wait_until(self, name: str, condition: Callable[[], bool], end: float) -> None:
        """Wait for something of a call, which may be called again when it has timed out."""
        self._call = name
        while not condition() and self._fatal is None:
            left = end - self.process.monotonic()
            if left <= 0:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, name, retriable=True))
            self._news.clear()
            self._news.wait(left)
            self._serve()
        self._call = ""
        if self._fatal is not None:
            raise KafkaException(self._fatal)

    def init_transactions(self, timeout: float) -> None:
        """Fence the last user of the transactional.id; a call that timed out goes on in the background."""
        self._begin_call("init_transactions", "new")
        if not self._call:
            self._try_init(-1, -1, self._init)
        self._wait_until("init_transactions", lambda: bool(self._init), self.process.monotonic() + timeout)
        self._state = "ready"

    def _try_init(self, known_producer: int, known_epoch: int, done: list[object]) -> None:
        who = self._id, known_producer, known_epoch
        timeout = float(self.settings.get("transaction.timeout.ms", 60_000)) / 1000

        def answered(answer: Any) -> None:
            code, producer, epoch = (KafkaError._TRANSPORT, -1, -1) if answer is LOST else answer
            if code is None:
                self._producer, self._epoch = producer, epoch
                for lane in self._lanes.values():
                    lane.next_sequence = lane.acknowledged = 0
                done.append("done")
                self._news.set()
            elif code in _FENCED:
                self._fail(KafkaError(KafkaError._FENCED, "fenced", fatal=True))
            else:
                pause = 0.05 if code == KafkaError.CONCURRENT_TRANSACTIONS else 0.3
                self.process.after(pause, lambda: self._try_init(known_producer, known_epoch, done))

        self.send_to_coordinator(
            "transaction",
            self._id,
            lambda broker: lambda respond: self.cluster.init_producer(broker, who, timeout, respond),
            answered,
            "INIT_PRODUCER_ID",
        )

    @property
    def _who(self) -> tuple[str, int, int]:
        return self._id, self._producer, self._epoch

    def begin_transaction(self) -> None:
        """Open a transaction."""
        if self._error is not None and not self._call:
            raise KafkaException(self._fatal or self._error)
        self._begin_call("begin_transaction", "ready")
        self._state, self._has_failed = "open", False

    def _register(self, lane: _Lane) -> None:
        if lane.is_registering or lane.is_resting:
            return
        lane.is_registering = True
        who, number = self._who, self._end_number

        def rested() -> None:
            lane.is_resting = False
            self._pump(lane)

        def answered(answer: Any) -> None:
            lane.is_registering = False
            if number != self._end_number:
                self._pump(lane)
                return
            code = KafkaError._TRANSPORT if answer is LOST else answer
            if code is None:
                lane.is_registered = True
                self._pump(lane)
            elif code in _FENCED:
                self._fail(KafkaError(KafkaError._FENCED, "fenced", fatal=True))
            elif code in (KafkaError._TRANSPORT, KafkaError.NOT_COORDINATOR, KafkaError.CONCURRENT_TRANSACTIONS):
                pause = 0.02 if code == KafkaError.CONCURRENT_TRANSACTIONS else self._backoff
                lane.is_resting = True
                self.process.after(pause, rested)
            else:
                self._must_abort(code)

        places = [lane.place]
        self.send_to_coordinator(
            "transaction",
            self._id,
            lambda broker: lambda respond: self.cluster.add_partitions(broker, who, places, respond),
            answered,
            "ADD_PARTITIONS_TO_TXN",
        )

    def commit_transaction(self, timeout: float) -> None:
        """Commit once all records are acknowledged; raises if that failed, or is not known in time."""
        self._begin_call("commit_transaction", "open")
        end = self.process.monotonic() + timeout
        for lane in self._lanes.values():
            self._pump(lane)
        self._wait_until("commit_transaction", lambda: not len(self) or self._error is not None, end)
        if self._has_failed:
            self._must_abort(KafkaError._INCONSISTENT)
        if self._error is not None:
            raise KafkaException(self._error)
        self._end("commit_transaction", end)

    def abort_transaction(self, timeout: float) -> None:
        """Abort; drops what is not on its way, whose sequence numbers later records get, and waits for the rest."""
        self._begin_call("abort_transaction", "open")
        end = self.process.monotonic() + timeout
        self._purge_queued()
        self._wait_until("abort_transaction", lambda: not self._unfinished, end)
        self._end("abort_transaction", end)

    def _end(self, name: str, end: float) -> None:
        if self._outcome is None:
            self._state = "ending"
            is_needed = any(lane.is_registered or lane.is_registering for lane in self._lanes.values())
            self._outcome = [] if is_needed else [None]
            if is_needed:
                self._send_end(name == "commit_transaction", self._outcome, 0)
        outcome = self._outcome
        self._wait_until(name, lambda: bool(outcome), end)
        code = outcome[0]
        if code is not None:
            self._fail(KafkaError(KafkaError._FENCED if code in _FENCED else code, "EndTxn", fatal=True))
            raise KafkaException(self._fatal)
        if self._must_bump:
            if not self._is_bumping:
                self._is_bumping, self._init = True, []
                self._try_init(self._producer, self._epoch, self._init)
            self._wait_until(name, lambda: bool(self._init), end)
        self._must_bump = self._is_bumping = False
        self._outcome = None
        self._end_number += 1
        for lane in self._lanes.values():
            lane.is_registered = False
        self._state, self._error = "ready", None

    def _send_end(self, commit: bool, outcome: list[int | None], attempt: int) -> None:
        who = self._who

        def answered(answer: Any) -> None:
            code = KafkaError._TRANSPORT if answer is LOST else answer
            passing = (KafkaError._TRANSPORT, KafkaError.NOT_COORDINATOR, KafkaError.CONCURRENT_TRANSACTIONS)
            if code in passing:
                if code == KafkaError._TRANSPORT:
                    self.cluster.reached("EndTxn sent twice")
                pause = min(self._backoff * 2**attempt, 1.0) * self.scheduler.random.uniform(0.8, 1.2)
                self.process.after(pause, lambda: self._send_end(commit, outcome, attempt + 1))
            else:
                outcome.append(code)
                self._news.set()

        broker = self.send_to_coordinator(
            "transaction",
            self._id,
            lambda broker: lambda respond: self.cluster.end_transaction(broker, who, commit, respond),
            answered,
            f"END_TXN {'commit' if commit else 'abort'}",
        )
        if broker is not None:
            self._break_some(self.network.late_ends, broker, attempt)


class Consumer(Client):
    """`confluent_kafka.Consumer`: assigned partitions, or a member of a group with the leader topic."""

    def __init__(self, settings: dict[str, Any]) -> None:
        super().__init__(settings)
        self._socket_timeout = min(self._socket_timeout, _CONSUMER_SOCKET_SECONDS)
        self._is_committed = settings.get("isolation.level", "read_committed") == "read_committed"
        self._tells_end = bool(settings.get("enable.partition.eof", False))
        self._messages: deque[Message] = deque()
        self._news = Event()
        self._places: dict[Place, int] = {}
        self._ends: dict[Place, int] = {}
        self._told_end: dict[Place, int] = {}
        self._assignment = 0
        self._member: _Member | None = None
        self._left: Event | None = None  # set once Kafka knows that it has left the group

    def assign(self, places: list[TopicPartition]) -> None:
        """Read these partitions from their offsets."""
        self.unassign()
        self.incremental_assign(places)

    def unassign(self) -> None:
        """Read no partition."""
        self._assignment += 1
        self._places.clear()
        self._messages.clear()
        self._told_end.clear()

    def incremental_assign(self, places: list[TopicPartition]) -> None:
        """Read these partitions, too."""
        for each in places:
            place = each.topic, each.partition
            self._places[place] = each.offset
            self._fetch(place, self._assignment)

    def assignment(self) -> list[TopicPartition]:
        """Return the partitions that are read."""
        return [TopicPartition(*place) for place in self._places]

    def pause(self, places: list[TopicPartition]) -> None:
        """Read these no more; there are none in this world, as the leader topic has one partition."""

    def _fetch(self, place: Place, number: int) -> None:
        if self.is_closed or number != self._assignment or place not in self._places:
            return
        broker, position = self.leader(place), self._places[place]

        def handle(respond: Respond) -> None:
            partition = self.partition(place)
            if partition is None or partition.leader != broker:
                respond(None)
                return
            self._read(partition, position, respond, self.scheduler.now + _FETCH_SECONDS, broker)

        self.send(broker, handle, lambda answer: self._fetched(place, number, answer))

    def _limit(self, partition: Partition) -> int:
        return partition.stable_end if self._is_committed else partition.end

    def _read(self, partition: Partition, position: int, respond: Respond, wait_until: float, broker: int) -> None:
        limit = self._limit(partition)
        if position > partition.end:  # of a topic that was made anew
            position = OFFSET_END if self.settings.get("auto.offset.reset", "latest") == "latest" else 0
        start = limit if position == OFFSET_END else max(0, position)
        if partition.leader != broker:
            respond(None)
        elif start < limit or position < 0 or self.scheduler.now >= wait_until or self._tells_end:
            entries = partition.log[start : min(limit, start + _MOST_FETCHED)]
            respond((entries, start + len(entries), limit))
        else:
            is_answered = False

            def again() -> None:
                nonlocal is_answered
                if not is_answered:
                    is_answered = True
                    self._read(partition, position, respond, wait_until, broker)

            partition.on_progress.append(again)
            self.scheduler.after(wait_until - self.scheduler.now, again)

    def _fetched(self, place: Place, number: int, answer: Any) -> None:
        if number != self._assignment or place not in self._places:
            return
        if answer is LOST or answer is None:
            self.refresh(place)
            self.process.after(0.1, lambda: self._fetch(place, number))
            return
        entries, position, limit = answer
        for entry in entries:
            if entry.state == CONTROL or (entry.state == ABORTED and self._is_committed):
                continue
            time = entry.time + (entry.sent.clock_error if entry.sent is not None else 0.0)
            self._messages.append(Message(place, entry.offset, entry.key, entry.value, entry.headers, time))
        self._places[place] = position
        self._ends[place] = limit
        pause = 0.0
        if self._tells_end and position >= limit:
            pause = 0.01
            if self._told_end.get(place) != position:
                self._told_end[place] = position
                self._messages.append(Message(place, position, error=KafkaError(KafkaError._PARTITION_EOF)))
        if self._messages:
            self._news.set()
        if len(self._messages) > 10 * _MOST_FETCHED or pause:
            self.process.after(max(pause, 0.01), lambda: self._fetch(place, number))
        else:
            self._fetch(place, number)

    def poll(self, timeout: float = -1) -> Message | None:
        """Serve the group's callbacks, and return a message; wait for it."""
        self.serve_complaints()
        if self._member is not None and self._member.tell():
            return None
        if not self._messages and timeout:
            self._news.clear()
            self._news.wait(timeout)
            if self._member is not None and self._member.tell():
                return None
        return self._messages.popleft() if self._messages else None

    def consume(self, number: int, timeout: float) -> list[Message]:
        """Return messages; wait for the first."""
        if not self._messages:
            self._news.clear()
            self._news.wait(timeout)
        return [self._messages.popleft() for _ in range(min(number, len(self._messages)))]

    def get_watermark_offsets(self, at: TopicPartition, timeout: float = 60.0, cached: bool = False) -> tuple[int, int]:
        """Return a partition's beginning and end."""
        place = at.topic, at.partition
        if cached:
            return 0, self._ends.get(place, 0)
        end = self.process.monotonic() + timeout
        while True:
            broker, event, found = self.leader(place), Event(), []
            partition = self.partition(place)

            def look(respond: Respond, broker: int = broker, partition: Partition | None = partition) -> None:
                is_leader = partition is not None and partition.leader == broker
                respond(self._limit(partition) if partition is not None and is_leader else None)

            self.send(broker, look, lambda answer, found=found, event=event: (found.append(answer), event.set()))
            event.wait(max(0.0, end - self.process.monotonic()))
            if found and isinstance(found[0], int):
                return 0, found[0]
            self.refresh(place)
            if self.process.monotonic() + 0.1 >= end:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer"))
            current().wait(0.1)

    def offsets_for_times(self, asked: list[TopicPartition], timeout: float) -> list[TopicPartition]:
        """Return the first offset of each partition whose record is as late as the time in milliseconds."""

        def look() -> list[TopicPartition]:
            found = []
            for each in asked:
                partition = self.partition((each.topic, each.partition))
                log = partition.log if partition is not None else []
                since = each.offset / 1000 - 1_700_000_000.0
                offset = next((entry.offset for entry in log if entry.time >= since), -1)
                found.append(TopicPartition(each.topic, each.partition, offset))
            return found

        answer: list[TopicPartition] = self.call(look, timeout)
        return answer

    def subscribe(self, topics: list[str], *, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        """Join the group."""
        self._member, self._left = _Member(self, topics[0], on_assign, on_revoke, on_lost), None

    def unsubscribe(self) -> None:
        """Leave the group: `subscribe` or `close` follows."""
        self._leave()
        self.unassign()

    def _leave(self) -> None:
        if self._member is not None and self._left is None and not self.is_closed:
            self._left = self._member.leave()

    def close(self) -> None:
        """Leave the group, and read no more."""
        self._leave()
        if self._left is not None and not self.is_closed:
            self._left.wait(1.0)
        self.is_closed = True
        self.unassign()


class _Member:
    """The background of a consumer that is a member of a group."""

    def __init__(self, consumer: Consumer, topic: str, on_assign: Any, on_revoke: Any, on_lost: Any) -> None:
        self._consumer = consumer
        self._places = [TopicPartition(topic, 0)]
        self._callbacks = {"assign": on_assign, "revoke": on_revoke, "lost": on_lost}
        settings = consumer.settings
        self._group = str(settings["group.id"])
        self._session = float(settings["session.timeout.ms"]) / 1000
        self._interval = float(settings["heartbeat.interval.ms"]) / 1000
        self._owns = self._hands_over = self._has_left = False
        self._to_tell: deque[str] = deque()
        self._joins = 0
        self._is_joining = False
        self._generation = -1
        self._new_name()
        self._join()
        self._beat()

    def _new_name(self) -> None:
        self._name = f"{self._consumer.process.name}-member-{self._consumer.scheduler.random.getrandbits(32):08x}"
        self._answered_at = self._consumer.process.monotonic()

    def tell(self) -> bool:
        """Call what is to be called; return False if there was nothing."""
        told = bool(self._to_tell)
        while self._to_tell:
            what = self._to_tell.popleft()
            if what == "lost":
                self._consumer.unassign()
            self._callbacks[what](self._consumer, self._places)
            if what == "revoke":
                self._consumer.unassign()
                if self._hands_over:  # else it has joined under a new name meanwhile
                    self._hands_over = False
                    self._join()
        return told

    @property
    def _is_over(self) -> bool:
        return self._has_left or self._consumer.is_closed

    def leave(self) -> Event:
        """Hand the partition over, and leave; return the event of Kafka's answer."""
        if self._owns:
            self._to_tell.clear()
            self._owns = False
            self._callbacks["revoke"](self._consumer, self._places)
        self._has_left = True
        cluster, event = self._consumer.cluster, Event()
        self._send(
            lambda broker: lambda respond: cluster.leave(broker, self._group, self._name, respond),
            lambda _: event.set(),
        )
        return event

    def _send(self, handler_at: Callable[[int], Handler], on_answer: Callable[[Any], None]) -> None:
        self._consumer.send_to_coordinator("group", self._group, handler_at, on_answer)

    def _lose(self) -> None:
        if self._owns:
            self._owns = False
            self._to_tell.append("lost")
            self._consumer.cluster.reached("partition lost")
            self._consumer._news.set()

    def _hand_over(self) -> None:
        self._owns, self._hands_over = False, True
        self._to_tell.append("revoke")
        self._consumer._news.set()

    def _rejoin_as_new(self) -> None:
        self._lose()
        self._hands_over = False
        self._new_name()
        self._join()

    def _join(self) -> None:
        if self._hands_over or self._is_over:
            return  # else once that is done
        self._joins += 1
        self._is_joining = True
        number = self._joins
        cluster, name, owns = self._consumer.cluster, self._name, self._owns

        def answered(answer: Any) -> None:
            if number != self._joins or self._is_over:
                return
            code, generation, is_owner = (KafkaError._TRANSPORT, -1, False) if answer is LOST else answer
            if code is not None:
                self._consumer.process.after(0.1, lambda: self._join() if number == self._joins else None)
                return
            self._is_joining = False
            self._answered_at = self._consumer.process.monotonic()
            self._generation = generation
            if is_owner and not self._owns:
                self._owns = True
                self._to_tell.append("assign")
                self._consumer._news.set()
            elif is_owner is None and self._owns:
                self._hand_over()
            elif is_owner is None:
                self._join()  # what it is to hand over it has lost meanwhile: as it says now
            elif not is_owner:
                self._lose()

        self._send(
            lambda broker: lambda respond: cluster.join(broker, self._group, name, self._session, respond, owns=owns),
            answered,
        )

    def _beat(self) -> None:
        consumer = self._consumer
        if self._is_over:
            return
        consumer.process.after(self._interval, self._beat)
        has_expired = consumer.process.monotonic() - self._answered_at > self._session
        if self._is_joining:
            if has_expired:
                self._lose()  # the answer may come when the others' sessions have ended
            return
        if has_expired:
            self._rejoin_as_new()
            return
        name, generation = self._name, self._generation
        sent_at = consumer.process.monotonic()

        def answered(answer: Any) -> None:
            if self._is_over or name != self._name or self._is_joining:
                return
            if answer is None:
                self._answered_at = max(self._answered_at, sent_at)
            elif answer == KafkaError.REBALANCE_IN_PROGRESS:
                self._answered_at = max(self._answered_at, sent_at)
                self._join()
            elif answer == KafkaError.UNKNOWN_MEMBER_ID:
                self._rejoin_as_new()

        self._send(
            lambda broker: lambda respond: consumer.cluster.heartbeat(broker, self._group, name, generation, respond),
            answered,
        )


class AdminClient(Client):
    """`confluent_kafka.admin.AdminClient`."""

    def poll(self, timeout: float = 0) -> int:
        del timeout
        return 0

    def __exit__(self, *_: object) -> None:
        self.is_closed = True

    def _future(self, question: Callable[[], Any], timeout: float) -> Future:
        future = Future()

        def done(answer: Any) -> None:
            if answer is LOST:
                future.set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer")))
            elif isinstance(answer, KafkaError):
                future.set_exception(KafkaException(answer))
            else:
                future.set_result(answer)

        self.ask(question, timeout, done)
        return future

    def describe_topics(self, topics: Any, request_timeout: float, **_: object) -> dict[str, Future]:
        def describe(name: str) -> Any:
            partitions = self.cluster.topics.get(name)
            if partitions is None:
                return KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
            parts = [SimpleNamespace(id=each.number, leader=self._broker(each.leader)) for each in partitions]
            return SimpleNamespace(partitions=parts, authorized_operations=None)

        return {name: self._future(lambda name=name: describe(name), request_timeout) for name in topics.topic_names}

    def describe_configs(self, resources: list[Any], request_timeout: float) -> dict[Any, Future]:
        def describe(name: str) -> Any:
            settings = self.cluster.settings.get(name)
            if settings is None:
                return KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
            own = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
            return {key: SimpleNamespace(value=value, source=own) for key, value in settings.items()}

        return {each: self._future(lambda each=each: describe(each.name), request_timeout) for each in resources}

    def describe_consumer_groups(self, groups: list[str], request_timeout: float) -> dict[str, Future]:
        return {name: self._describe_group(name, request_timeout) for name in groups}

    def _describe_group(self, name: str, timeout: float) -> Future:
        future, end = Future(), self.process.monotonic() + timeout

        def answered(answer: Any) -> None:
            if answer is not LOST and answer[0] is None:
                members = [SimpleNamespace(member_id=each) for each in answer[1]]
                future.set_result(SimpleNamespace(members=members, state=SimpleNamespace(name="STABLE")))
            elif answer is not LOST and answer[0] != KafkaError.NOT_COORDINATOR:
                future.set_exception(KafkaException(KafkaError(answer[0])))
            elif self.process.monotonic() >= end:
                future.set_exception(KafkaException(KafkaError(KafkaError._TIMED_OUT, "no answer")))
            else:
                self.process.after(0.1, attempt)

        def attempt() -> None:
            self.send_to_coordinator(
                "group",
                name,
                lambda broker: lambda respond: self.cluster.describe_group(broker, name, respond),
                answered,
            )

        attempt()
        return future

    def create_topics(self, topics: list[Any], request_timeout: float) -> dict[str, Future]:
        def create(new: Any) -> Any:
            made = self.cluster.create(new.topic, new.num_partitions, dict(new.config or {}))
            return None if made else KafkaError(KafkaError.TOPIC_ALREADY_EXISTS)

        return {new.topic: self._future(lambda new=new: create(new), request_timeout) for new in topics}


def _bytes(text: Any) -> bytes | None:
    return text.encode() if isinstance(text, str) else text
