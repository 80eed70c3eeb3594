"""Short stories about Kafka that must end in the same way in the simulated world and in the real one.

A scenario is a function of a `World`, and returns plain values: results of calls and delivery reports by the names of
their errors, and the offsets and values that readers see. Beside it stands its outcome, once, for both worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import OFFSET_END, KafkaError, KafkaException, TopicPartition
from confluent_kafka.cimpl import NewTopic

from tests.simulation.worlds import World

LONG = 30.0
SHORT = 0.5
RETRY_MS = 3000  # of clients that must not repeat a request before something else has happened
LEARN = 0.5  # seconds in which a client learns that its connection was reset


@dataclass(frozen=True)
class Scenario:
    """A scenario, and its outcome.

    Attributes:
        is_quick: whether `make test` runs it on the real broker, too.
    """

    play: Callable[[World], Any]
    outcome: Any
    is_quick: bool

    @property
    def name(self) -> str:
        """The name of its function."""
        return self.play.__name__


SCENARIOS: dict[str, Scenario] = {}


def scenario(outcome: Any, *, quick: bool = False) -> Callable[[Callable[[World], Any]], Callable[[World], Any]]:
    """Register a scenario with its outcome."""

    def register(play: Callable[[World], Any]) -> Callable[[World], Any]:
        SCENARIOS[play.__name__] = Scenario(play, outcome, quick)
        return play

    return register


def told(error: KafkaError | None) -> str:
    """Return an error's name and flags, "ok" for none."""
    if error is None:
        return "ok"
    flags = {"fatal": error.fatal(), "retriable": error.retriable(), "abortable": error.txn_requires_abort()}
    return " ".join([error.name(), *(flag for flag, is_set in flags.items() if is_set)])


def tried(call: Callable[..., Any], *arguments: Any, **more: Any) -> str:
    """Call, and return "ok" or the error."""
    try:
        call(*arguments, **more)
    except KafkaException as error:
        return told(error.args[0])
    except BufferError:
        return "queue full"
    return "ok"


class Sender:
    """A producer.

    Attributes:
        reports: the delivery reports of its records, by their values.
        raised: what `flush` raised meanwhile.
    """

    def __init__(self, producer: Any, topic: str) -> None:
        self.producer = producer
        self.topic = topic
        self.reports: dict[str, Any] = {}
        self.raised: list[str] = []

    def send(self, *values: str, topic: str = "", partition: int = 0) -> list[str]:
        """Produce records without waiting, and return what the calls say."""
        return [
            tried(self.producer.produce, topic or self.topic, value, partition=partition, on_delivery=self._note(value))
            for value in values
        ]

    def sent(self, *values: str, topic: str = "", partition: int = 0) -> list[str]:
        """Produce records, wait, and return their reports."""
        refused: dict[str, str] = {}
        for value, said in zip(values, self.send(*values, topic=topic, partition=partition), strict=True):
            if said != "ok":
                refused[value] = f"refused: {said}"
        while (said := tried(self.producer.flush, LONG)) != "ok":
            self.raised.append(said)
        return [refused.get(value) or told(self.reports[value].error()) for value in values]

    def reports_of(self, *values: str) -> list[str]:
        """Return the reports of these records so far."""
        tried(self.producer.poll, 0)
        return [told(self.reports[value].error()) if value in self.reports else "none yet" for value in values]

    @property
    def offsets(self) -> dict[str, int | None]:
        """The offsets of reported records."""
        return {value: message.offset() for value, message in self.reports.items()}

    def _note(self, value: str) -> Callable[..., None]:
        def note(_: KafkaError | None, message: Any) -> None:
            self.reports[value] = message

        return note

    def init(self) -> Sender:
        """Begin to be the only user of the transactional.id."""
        self.producer.init_transactions(LONG)
        return self

    def begin(self, *values: str) -> Sender:
        """Begin a transaction with these records, acknowledged."""
        self.producer.begin_transaction()
        assert self.sent(*values) == ["ok"] * len(values), self.reports
        return self

    def commit(self, timeout: float = LONG) -> str:
        """Commit, and return the outcome."""
        return tried(self.producer.commit_transaction, timeout)

    def abort(self, timeout: float = LONG) -> str:
        """Abort, and return the outcome."""
        return tried(self.producer.abort_transaction, timeout)

    def whole(self, *values: str) -> list[str]:
        """Run a transaction of these records to its end; return what each step says, beginning with `begin`."""
        begun = tried(self.producer.begin_transaction)
        return [begun, *self.sent(*values), self.commit()] if begun == "ok" else [begun]


def transactional(world: World, topic: str, name: str = "", **settings: Any) -> Sender:
    """Return a sender with the scenario's transactional.id, initialized."""
    return Sender(world.producer(name, transactional_id="shop", **settings), topic).init()


def views(world: World, topic: str, *, is_open: bool = False) -> dict[str, list[tuple[int, str]]]:
    """Return what a reader of committed records sees, and one of all.

    A commit is answered before its markers are written: they are waited for, unless a transaction is open.
    """
    if not is_open:
        settled(world, topic)
    return {isolation: world.read(topic, isolation) for isolation in ("committed", "uncommitted")}


def settled(world: World, topic: str) -> list[tuple[int, str]]:
    """Return the committed records, once no transaction is open."""
    committed, everything = (world.consumer(isolation_level=f"read_{each}") for each in ("committed", "uncommitted"))
    place = TopicPartition(topic, 0)

    def is_settled() -> bool:
        return bool(
            committed.get_watermark_offsets(place, timeout=LONG) == everything.get_watermark_offsets(place, timeout=LONG)
        )

    world.wait_until(is_settled)
    committed.close()
    everything.close()
    return world.read(topic)


# -- producing


@scenario(None, quick=True)
def records_are_acknowledged_with_their_offsets(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    return sender.sent("a", "b"), sender.sent("c"), sender.offsets, views(world, topic)


@scenario(None, quick=True)
def idempotent_repeat_after_a_lost_answer_gives_no_duplicate(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(enable_idempotence=True), topic)
    world.hold("PRODUCE", nth=2).deliver()
    return sender.sent("a"), sender.sent("b"), sender.sent("c"), sender.offsets, views(world, topic)


@scenario(None)
def repeat_after_a_lost_answer_gives_a_duplicate_without_idempotence(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    world.hold("PRODUCE").deliver()
    return sender.sent("a"), world.read(topic)


@scenario(None)
def late_copy_of_an_idempotent_produce_is_no_duplicate(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(enable_idempotence=True), topic)
    held = world.hold("PRODUCE")
    said = [sender.sent("a"), sender.sent("b")]
    held.deliver()
    return said, sender.sent("c"), world.read(topic)


@scenario(None)
def late_copy_of_a_produce_is_a_duplicate_without_idempotence(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    held = world.hold("PRODUCE")
    said = [sender.sent("a"), sender.sent("b")]
    held.deliver()
    return said, world.read(topic)


@scenario(None)
def idempotent_producer_goes_on_after_a_record_timed_out(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(enable_idempotence=True, delivery_timeout_ms=4000, socket_timeout_ms=1000), topic)
    said = [sender.sent("a")]
    world.cut()
    said += [sender.sent("b")]
    world.mend()
    return said, sender.sent("c", "d"), world.read(topic)


@scenario(None)
def delivery_times_out_without_a_transaction(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(delivery_timeout_ms=1000, socket_timeout_ms=1000), topic)
    said = [sender.sent("a")]
    world.cut()
    said += [sender.sent("b", "c")]
    world.mend()
    return said, sender.sent("d"), world.read(topic)


@scenario(None)
def partition_that_does_not_exist(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    return sender.sent("a"), sender.sent("b", partition=7), sender.sent("c")


@scenario(None)
def partition_that_does_not_exist_in_a_transaction(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic)
    sender.begin("a")
    return sender.sent("b", partition=7), sender.commit(), sender.abort(), sender.whole("c"), settled(world, topic)


@scenario(None)
def record_that_is_too_large_for_the_topic(world: World) -> Any:
    topic = world.topic(**{"max.message.bytes": "1000"})
    sender = Sender(world.producer(), topic)
    return sender.sent("a"), sender.sent("b" * 5000), sender.sent("c")


@scenario(None)
def record_that_is_too_large_for_the_topic_in_a_transaction(world: World) -> Any:
    topic = world.topic(**{"max.message.bytes": "1000"})
    sender = transactional(world, topic)
    sender.begin("a")
    said = [sender.sent("b" * 5000), sender.commit(), sender.abort()]
    said += [sender.whole("c"), sender.abort(), sender.whole("d")]
    return said, settled(world, topic)


@scenario(None)
def failed_transaction_purges_what_waits(world: World) -> Any:
    topic = world.topic(2, **{"max.message.bytes": "1000"})
    sender = transactional(world, topic, retry_backoff_ms=RETRY_MS).begin("a")
    held = world.hold("ADD_PARTITIONS_TO_TXN")
    sender.send("b", partition=1)
    held.wait()
    said = [sender.sent("c" * 5000), sender.reports_of("b"), *_failure(world, sender), sender.abort()]
    sender.producer.begin_transaction()
    said += [sender.sent("d", partition=1), sender.commit()]
    return said, settled(world, topic), world.read(topic, partition=1)


@scenario(None)
def record_that_is_too_large_for_the_topic_of_an_idempotent_producer(world: World) -> Any:
    topic = world.topic(**{"max.message.bytes": "1000"})
    sender = Sender(world.producer(enable_idempotence=True), topic)
    return sender.sent("a"), sender.sent("b" * 5000), sender.sent("c"), sender.sent("d"), world.read(topic)


@scenario(None)
def record_that_is_too_large_for_the_client(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, message_max_bytes=1000)
    sender.begin("a")
    return sender.sent("b" * 5000), sender.commit(), settled(world, topic)


@scenario(None)
def queue_is_full(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(queue_buffering_max_messages=2, socket_timeout_ms=1000), topic)
    world.cut()
    said = sender.send("a", "b", "c")
    left = sender.producer.flush(SHORT), len(sender.producer)
    world.mend()
    return said, left, sender.producer.flush(LONG), sender.sent("d"), world.read(topic)


@scenario(None)
def purge_drops_what_waits(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(max_in_flight_requests_per_connection=1), topic)
    said = [sender.sent("a")]
    world.cut()
    sender.send("b")
    world.sleep(SHORT)  # it is under way
    sender.send("c", "d")
    world.sleep(0.1)
    sender.producer.purge()
    said += [sender.producer.flush(LONG), sender.reports_of("b", "c", "d")]
    world.mend()
    return said, sender.sent("e"), [value for _, value in world.read(topic)]


# -- transactions that end


@scenario(None, quick=True)
def commit_is_visible_and_abort_is_not(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic)
    said = [sender.whole("a", "b")]
    sender.begin("c")
    said += [sender.abort(), sender.whole("d")]
    return said, sender.offsets, views(world, topic)


@scenario(None)
def transactions_over_two_partitions(world: World) -> Any:
    topic = world.topic(2)
    sender = transactional(world, topic)
    sender.begin("a")
    said = [sender.sent("b", partition=1), world.read(topic, partition=0), world.read(topic, partition=1)]
    said += [sender.commit()]
    sender.begin("c")
    sender.sent("d", partition=1)
    said += [sender.abort(), sender.begin("e").commit()]
    return said, settled(world, topic), world.read(topic, partition=1)


@scenario(None)
def transactions_follow_each_other_at_once(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic)
    return [sender.whole(str(number)) for number in range(5)], settled(world, topic)


@scenario(None, quick=True)
def open_transaction_hides_later_records(world: World) -> Any:
    topic = world.topic()
    sender, plain = transactional(world, topic), Sender(world.producer(), topic)
    plain.sent("first")
    sender.begin("open")
    plain.sent("later")
    before, ends = views(world, topic, is_open=True), _ends(world, topic)
    return before, ends, sender.commit(), views(world, topic), _ends(world, topic)


def _ends(world: World, topic: str) -> dict[str, Any]:
    place = TopicPartition(topic, 0)
    ends = {}
    for isolation in ("read_committed", "read_uncommitted"):
        reader = world.consumer(isolation_level=isolation)
        ends[isolation] = reader.get_watermark_offsets(place, timeout=LONG)
        reader.close()
    return ends


@scenario(None)
def transactions_without_records(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic)
    said = [sender.whole()]
    sender.begin()
    said += [sender.abort(), sender.whole("a")]
    return said, views(world, topic), _ends(world, topic)


@scenario(None)
def calls_in_a_wrong_state(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(transactional_id="shop"), topic)
    begin = sender.producer.begin_transaction
    said = [tried(begin), sender.send("a"), sender.commit(), sender.abort()]
    sender.init()
    said += [sender.send("b"), sender.commit(), sender.abort()]
    begin()
    said += [tried(begin), sender.sent("c"), tried(begin), sender.commit()]
    said += [sender.send("d"), sender.commit(), sender.abort()]
    return said, settled(world, topic)


@scenario(None)
def init_is_called_again(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic)
    said = [sender.whole("a"), tried(sender.producer.init_transactions, LONG)]
    sender.begin("b")
    return said, tried(sender.producer.init_transactions, LONG), sender.commit(), settled(world, topic)


# -- fencing


@scenario(None, quick=True)
def fenced_in_an_open_transaction_commit(world: World) -> Any:
    topic = world.topic()
    old = transactional(world, topic).begin("a")
    new = transactional(world, topic)
    said = [old.commit(), tried(old.producer.poll, 0), tried(old.producer.poll, 0)]
    said += [old.commit(), old.abort(), tried(old.producer.begin_transaction), old.send("c")]
    return said, new.whole("b"), views(world, topic)


@scenario(None)
def fenced_in_an_open_transaction_abort(world: World) -> Any:
    topic = world.topic()
    old = transactional(world, topic).begin("a")
    new = transactional(world, topic)
    return old.abort(), old.abort(), old.send("c"), new.whole("b"), views(world, topic)


@scenario(None)
def fenced_in_an_open_transaction_produce(world: World) -> Any:
    topic = world.topic()
    old = transactional(world, topic).begin("a")
    new = transactional(world, topic)
    return old.sent("b"), old.raised, old.send("c"), old.commit(), old.abort(), new.whole("d"), views(world, topic)


@scenario(None)
def fenced_between_transactions(world: World) -> Any:
    topic = world.topic()
    old = transactional(world, topic)
    said = [old.whole("a")]
    new = transactional(world, topic)
    said += [tried(old.producer.begin_transaction), old.sent("b"), old.commit(), old.abort()]
    return said, new.whole("c"), views(world, topic)


@scenario(None)
def fenced_before_the_first_record(world: World) -> Any:
    topic = world.topic()
    old = transactional(world, topic)
    said = [tried(old.producer.begin_transaction)]
    new = transactional(world, topic)
    said += [old.commit(), tried(old.producer.begin_transaction), old.sent("a"), old.abort()]
    return said, new.whole("b"), views(world, topic)


@scenario(None)
def init_aborts_an_open_transaction(world: World) -> Any:
    topic = world.topic()
    transactional(world, topic).begin("a")
    new = transactional(world, topic)
    new.begin("b")
    before = views(world, topic, is_open=True)
    return before, new.commit(), views(world, topic), _ends(world, topic)


# -- requests and answers that are lost, or late


@scenario(None, quick=True)
def lost_answer_of_a_commit(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    world.hold("END_TXN commit").deliver()
    return sender.commit(), sender.whole("b"), views(world, topic)


@scenario(None)
def lost_answer_of_an_abort(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    world.hold("END_TXN abort").deliver()
    return sender.abort(), sender.whole("b"), views(world, topic)


@scenario(None, quick=True)
def late_commit_ends_a_later_transaction(world: World) -> Any:
    topic = world.topic(2)
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN commit")
    said = [sender.commit()]
    sender.begin("b")
    held.deliver()
    said += [views(world, topic), sender.sent("c"), sender.commit(), sender.abort()]
    said += [sender.whole("d")]
    return said, views(world, topic)


@scenario(None)
def late_abort_ends_a_later_transaction(world: World) -> Any:
    topic = world.topic(2)
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN abort")
    said = [sender.abort()]
    sender.begin("b")
    held.deliver()
    said += [sender.sent("manifest", partition=1), sender.commit()]
    return said, views(world, topic), world.read(topic, partition=1)


@scenario(None)
def late_commit_and_nothing_more_is_produced(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN commit")
    said = [sender.commit()]
    sender.begin("b")
    held.deliver()
    return said, sender.commit(), sender.whole("c"), views(world, topic)


@scenario(None)
def late_commit_and_an_abort(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN commit")
    said = [sender.commit()]
    sender.begin("b")
    held.deliver()
    return said, sender.abort(), tried(sender.producer.begin_transaction), views(world, topic)


@scenario(None, quick=True)
def late_commit_of_an_old_epoch_is_refused(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN commit")
    said = [sender.commit()]
    new = transactional(world, topic).begin("b")
    held.deliver()
    said += [views(world, topic, is_open=True), new.sent("c"), new.commit()]
    return said, views(world, topic)


@scenario(None)
def late_produce_of_an_old_epoch_is_refused(world: World) -> Any:
    topic = world.topic()
    old = Sender(world.producer("old", transactional_id="shop"), topic).init().begin("a")
    held = world.hold("PRODUCE", "old")
    world.hold("PRODUCE", "old")
    old.send("late")
    held.wait()
    new = transactional(world, topic, "new").begin("b")
    held.deliver()
    return new.sent("c"), new.commit(), views(world, topic)


@scenario(None)
def late_produce_between_transactions_is_refused(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, retry_backoff_ms=RETRY_MS).begin("a")
    held = world.hold("PRODUCE")
    sender.send("late")
    held.wait()
    world.sleep(LEARN)
    said = [sender.abort(), sender.reports_of("late")]
    settled(world, topic)
    held.deliver()
    return said, sender.whole("b"), views(world, topic)


@scenario(None)
def abort_gives_a_sequence_number_away(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, retry_backoff_ms=RETRY_MS).begin("a")
    held = world.hold("PRODUCE")
    sender.send("late")
    held.wait()
    world.sleep(LEARN)
    said = [sender.abort(), sender.reports_of("late"), sender.whole("b")]
    settled(world, topic)
    held.deliver()
    said += [sender.whole("c")]
    return said, views(world, topic, is_open=True)


@scenario(None)
def late_produce_takes_the_sequence_number_of_another_record(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, retry_backoff_ms=RETRY_MS).begin("a")
    held = world.hold("PRODUCE")
    sender.send("late")
    held.wait()
    world.sleep(LEARN)
    said = [sender.abort()]
    sender.producer.begin_transaction()
    other = world.hold("PRODUCE")
    sender.send("lost")
    other.wait()
    held.deliver()
    return said, sender.sent("b"), sender.reports_of("lost"), sender.commit(), views(world, topic)


@scenario(None)
def late_batch_takes_the_sequence_numbers_of_a_record(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, retry_backoff_ms=RETRY_MS, linger_ms=200).begin("a")
    held = world.hold("PRODUCE")
    sender.send("late", "later")
    held.wait()
    world.sleep(LEARN)
    said = [sender.abort()]
    sender.producer.begin_transaction()
    other = world.hold("PRODUCE")
    sender.send("b")
    other.wait()
    held.deliver()
    return said, sender.sent(), sender.reports_of("b"), sender.commit(), views(world, topic, is_open=True)


@scenario(None)
def late_add_partitions(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic)
    held = world.hold("ADD_PARTITIONS_TO_TXN")
    said = [sender.whole("a")]
    held.deliver()
    said += [sender.whole("b"), sender.whole("c")]
    return said, views(world, topic), _ends(world, topic)


@scenario(None)
def late_init_fences(world: World) -> Any:
    topic = world.topic()
    held = world.hold("INIT_PRODUCER_ID")
    sender = transactional(world, topic)
    sender.begin("a")
    held.deliver()
    return sender.commit(), sender.abort(), views(world, topic)


@scenario(None)
def lost_answer_of_init(world: World) -> Any:
    topic = world.topic()
    world.hold("INIT_PRODUCER_ID").deliver()
    return transactional(world, topic).whole("a"), settled(world, topic)


# -- time-outs


@scenario(None)
def coordinator_times_a_transaction_out_commit(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, transaction_timeout_ms=1000).begin("a")
    plain = Sender(world.producer(), topic)
    plain.sent("later")
    settled(world, topic)
    return sender.commit(), sender.abort(), tried(sender.producer.begin_transaction), views(world, topic)


@scenario(None)
def coordinator_times_a_transaction_out_produce(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, transaction_timeout_ms=1000).begin("a")
    plain = Sender(world.producer(), topic)
    plain.sent("later")
    settled(world, topic)
    said = [sender.sent("b"), sender.commit(), sender.abort()]
    return said, transactional(world, topic).whole("c"), views(world, topic)


def _failure(world: World, sender: Sender) -> list[str]:
    """Return the error of an open transaction once it has failed: delivery reports may come before it has."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [tried(sender.producer.begin_transaction)]
        return found != ["_STATE"]

    world.wait_until(look)
    return found


@scenario(None)
def late_produce_of_a_record_that_timed_out_in_the_queue(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, delivery_timeout_ms=3000, retry_backoff_ms=1000)
    sender.begin("a")
    held = world.hold("PRODUCE")
    sender.send("late")
    held.wait()
    world.refuse()
    said = [sender.sent(), sender.reports_of("late"), tried(sender.producer.begin_transaction), sender.commit()]
    world.mend()
    said += [sender.abort()]
    settled(world, topic)
    sender.producer.begin_transaction()
    said += [sender.sent("b")]
    held.deliver()
    said += [sender.sent("c"), sender.commit()]
    return said, views(world, topic, is_open=True)


@scenario(None)
def late_produce_of_a_record_that_timed_out_joins_the_next_transaction(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, delivery_timeout_ms=3000, retry_backoff_ms=1000)
    sender.begin("a")
    held = world.hold("PRODUCE")
    sender.send("late")
    held.wait()
    world.refuse()
    said = [sender.sent(), sender.reports_of("late")]
    world.mend()
    said += [sender.abort()]
    settled(world, topic)
    sender.producer.begin_transaction()
    other = world.hold("PRODUCE")
    sender.send("b")
    other.wait()
    held.deliver()
    said += [sender.sent(), sender.reports_of("b"), sender.commit()]
    return said, views(world, topic)


@scenario(None)
def record_that_was_never_sent_times_out(world: World) -> Any:
    topic = world.topic(2)
    sender = transactional(world, topic, delivery_timeout_ms=1500).begin("a")
    world.refuse()
    said = [sender.sent("b"), tried(sender.producer.begin_transaction), sender.send("c"), sender.commit()]
    world.mend()
    return said, sender.abort(), sender.whole("d"), views(world, topic)


@scenario(None)
def record_times_out_with_its_transaction(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, transaction_timeout_ms=2000).begin("a")
    world.refuse()
    said = sender.sent("b")
    world.mend()
    return said, [value for _, value in world.read(topic)]


@scenario(None)
def record_times_out_while_its_transaction_aborts(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, delivery_timeout_ms=1500, socket_timeout_ms=1000).begin("a")
    world.cut()
    sender.send("b")
    world.sleep(0.2)
    said = [sender.abort(LONG / 10), sender.reports_of("b")]
    world.mend()
    return said, sender.abort(), sender.whole("c"), views(world, topic)


@scenario(None)
def record_times_out_in_a_transaction(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, delivery_timeout_ms=1500, socket_timeout_ms=1000)
    sender.begin("a")
    world.cut()
    said = [sender.sent("b"), *_failure(world, sender), sender.send("c"), sender.commit()]
    world.mend()
    return said, sender.abort(), sender.whole("d"), views(world, topic)


@scenario(None)
def commit_times_out_and_is_called_again(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, socket_timeout_ms=1000).begin("a")
    world.cut()
    said = [sender.commit(SHORT), tried(sender.producer.begin_transaction), sender.send("b"), sender.abort(SHORT)]
    world.mend()
    return said, sender.commit(), sender.whole("c"), views(world, topic)


@scenario(None)
def abort_times_out_and_is_called_again(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, socket_timeout_ms=1000).begin("a")
    world.cut()
    said = [sender.abort(SHORT), tried(sender.producer.begin_transaction), sender.send("b"), sender.commit(SHORT)]
    world.mend()
    return said, sender.abort(), sender.whole("c"), views(world, topic)


@scenario(None)
def init_times_out_and_is_called_again(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(transactional_id="shop", socket_timeout_ms=1000), topic)
    world.cut()
    init = sender.producer.init_transactions
    said = [tried(init, SHORT), tried(init, SHORT), tried(sender.producer.begin_transaction)]
    world.mend()
    return said, tried(init, LONG), sender.whole("a"), settled(world, topic)


@scenario(None)
def abort_while_a_record_is_under_way(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, retry_backoff_ms=RETRY_MS).begin("a")
    world.cut()
    sender.send("b")
    world.sleep(0.2)
    said = [sender.abort(SHORT), sender.reports_of("b")]
    world.mend()
    world.sleep(LEARN)
    said += [sender.abort(), sender.reports_of("b")]
    return said, sender.whole("c"), [value for _, value in settled(world, topic)]


@scenario(None)
def commit_waits_for_its_records(world: World) -> Any:
    topic = world.topic()
    sender = transactional(world, topic, socket_timeout_ms=1000).begin("a")
    world.cut()
    sender.send("b")
    said = [sender.commit(SHORT)]
    world.mend()
    return said, sender.commit(), sender.reports_of("b"), views(world, topic)


@scenario(None)
def cluster_does_not_answer(world: World) -> Any:
    producer = world.producer(socket_timeout_ms=1000)
    topic, admin = world.topic(), world.admin()
    consumer = world.consumer()
    consumer.assign([TopicPartition(topic, 0, 0)])
    admin.list_topics(timeout=LONG)
    said = [tried(producer.list_topics, timeout=LONG), _next(world, consumer)]
    world.cut()
    said += [
        tried(producer.list_topics, timeout=1.0),
        tried(consumer.get_watermark_offsets, TopicPartition(topic, 0), timeout=1.0),
        tried(consumer.offsets_for_times, [TopicPartition(topic, 0, 0)], timeout=1.0),
        tried(admin.create_topics([NewTopic("t", 1, 1)], request_timeout=1.0)["t"].result),
    ]
    world.mend()
    return said, tried(producer.list_topics, timeout=LONG)


# -- reading


@scenario(None)
def clients_say_that_brokers_are_away(world: World) -> Any:
    topic, heard = world.topic(), {"producer": [], "consumer": []}  # type: dict[str, list[str]]
    producer = world.producer(error_cb=lambda error: heard["producer"].append(told(error)))
    consumer = world.consumer(error_cb=lambda error: heard["consumer"].append(told(error)))
    sender = Sender(producer, topic)
    said = [sender.sent("a")]
    consumer.assign([TopicPartition(topic, 0, 0)])
    said += [_next(world, consumer), _next(world, consumer)]
    world.refuse()
    sender.send("b")

    def have_both_said_so() -> bool:
        producer.poll(0.01)
        consumer.poll(0.01)
        return all("_ALL_BROKERS_DOWN" in each for each in heard.values())

    world.wait_until(have_both_said_so)
    world.mend()
    producer.flush(LONG)
    return said, sender.reports_of("b"), _next(world, consumer)


@scenario(None)
def reader_from_the_end_sees_later_records_only(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    sender.sent("a", "b")
    reader = world.consumer()
    reader.assign([TopicPartition(topic, 0, OFFSET_END)])
    said = [_next(world, reader)]
    sender.sent("c")
    return said, _next(world, reader), _next(world, reader), [place.partition for place in reader.assignment()]


def _next(world: World, reader: Any) -> Any:
    end = world.time() + LONG
    while world.time() < end:
        message = reader.poll(1.0)
        if message is not None:
            error = message.error()
            return (error.name() if error else str(message.value(), "utf-8")), message.offset()
    return "nothing"


@scenario(None)
def reader_waits_at_an_open_transaction(world: World) -> Any:
    topic = world.topic()
    sender, plain = transactional(world, topic), Sender(world.producer(), topic)
    plain.sent("first")
    sender.begin("aborted")
    plain.sent("later")
    reader = world.consumer(isolation_level="read_committed")
    reader.assign([TopicPartition(topic, 0, 0)])
    said = [_next(world, reader), _next(world, reader)]
    sender.abort()
    return said, _next(world, reader), _next(world, reader)


@scenario(None)
def offsets_for_times_of_records(world: World) -> Any:
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    sender.sent("a", "b")
    reader = world.consumer()
    found = [reader.offsets_for_times([TopicPartition(topic, 0, time)], timeout=LONG) for time in (0, 1 << 42)]
    return [each[0].offset for each in found]


@scenario(None)
def topics_and_their_settings(world: World) -> Any:
    topic, none = world.topic(3, **{"cleanup.policy": "compact"}), world.name("none")
    admin = world.admin()
    again = admin.create_topics([NewTopic(topic, 1, 1)], request_timeout=LONG)[topic]
    known = admin.list_topics(topic, timeout=LONG).topics[topic]
    return tried(again.result, 60.0), sorted(known.partitions), told(known.error), none[:4]


# -- groups

_GROUP = {
    "partition_assignment_strategy": "cooperative-sticky",
    "session_timeout_ms": 3000,
    "heartbeat_interval_ms": 500,
}


class Member:
    """A member of a group, and what it was told."""

    def __init__(self, world: World, topic: str, name: str) -> None:
        self.name = name
        self.told: list[str] = []
        self.consumer = world.consumer(client_id=name, **_GROUP)
        self.consumer.subscribe(
            [topic],
            on_assign=self._note("assigned"),
            on_revoke=self._note("revoked"),
            on_lost=self._note("lost"),
        )

    def _note(self, what: str) -> Callable[[Any, Any], None]:
        def note(consumer: Any, places: list[TopicPartition]) -> None:
            if what == "assigned" and places:
                consumer.incremental_assign([TopicPartition(place.topic, place.partition, 0) for place in places])
            if places:
                self.told.append(what)

        return note


def _polled(world: World, members: list[Member], condition: Callable[[], bool]) -> None:
    def look() -> bool:
        for member in members:
            member.consumer.poll(0.02)
        return condition()

    world.wait_until(look)


def _polled_for(world: World, members: list[Member], seconds: float) -> None:
    end = world.time() + seconds
    _polled(world, members, lambda: world.time() > end)


@scenario(None)
def group_keeps_its_owner_until_it_leaves(world: World) -> Any:
    topic = world.topic()
    one = Member(world, topic, "one")
    _polled(world, [one], lambda: one.told == ["assigned"])
    other = Member(world, topic, "other")
    _polled_for(world, [one, other], 3.0)
    said = [list(one.told), list(other.told)]
    one.consumer.close()
    _polled(world, [other], lambda: bool(other.told))
    return said, list(one.told), list(other.told)


@scenario(None)
def member_that_hears_nothing_loses_its_partition(world: World) -> Any:
    topic = world.topic()
    one = Member(world, topic, "one")
    _polled(world, [one], lambda: one.told == ["assigned"])
    world.cut()
    _polled(world, [one], lambda: "lost" in one.told)
    world.mend()
    _polled(world, [one], lambda: one.told.count("assigned") == 2)
    return list(one.told)
