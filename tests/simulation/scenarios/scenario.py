"""The parts of scenarios: their registry, a producer that keeps its reports, and readers.

A scenario is a function of a `World`, and returns plain values: results of calls and delivery reports by the names of
their errors, and the offsets and values that readers see. Beside it stands its outcome, once, for both worlds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from confluent_kafka import KafkaError, KafkaException, TopicPartition

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
            committed.get_watermark_offsets(place, timeout=LONG)
            == everything.get_watermark_offsets(place, timeout=LONG)
        )

    world.wait_until(is_settled)
    committed.close()
    everything.close()
    return world.read(topic)


def ends_of(world: World, topic: str) -> dict[str, Any]:
    """Return the first and last offset as readers of committed records and of all see them."""
    place = TopicPartition(topic, 0)
    ends = {}
    for isolation in ("read_committed", "read_uncommitted"):
        reader = world.consumer(isolation_level=isolation)
        ends[isolation] = reader.get_watermark_offsets(place, timeout=LONG)
        reader.close()
    return ends


def failure_of(world: World, sender: Sender) -> list[str]:
    """Return the error of an open transaction once it has failed: delivery reports may come before it has."""
    found: list[str] = []

    def look() -> bool:
        found[:] = [tried(sender.producer.begin_transaction)]
        return found != ["_STATE"]

    world.wait_until(look)
    return found


def next_of(world: World, reader: Any) -> Any:
    """Return a reader's next value or error, and its offset."""
    end = world.time() + LONG
    while world.time() < end:
        message = reader.poll(1.0)
        if message is not None:
            error = message.error()
            return (error.name() if error else str(message.value(), "utf-8")), message.offset()
    return "nothing"
