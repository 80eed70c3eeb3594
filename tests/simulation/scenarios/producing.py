"""Records that are acknowledged, repeated, refused, or too many."""

from __future__ import annotations

from typing import Any

from tests.simulation.scenarios.scenario import (
    LONG,
    RETRY_MS,
    SHORT,
    Sender,
    failure_of,
    scenario,
    settled,
    transactional,
    views,
)
from tests.simulation.worlds import World


@scenario(
    (
        ["ok", "ok"],
        ["ok"],
        {"a": 0, "b": 1, "c": 2},
        {"committed": [(0, "a"), (1, "b"), (2, "c")], "uncommitted": [(0, "a"), (1, "b"), (2, "c")]},
    )
)
def records_are_acknowledged_with_their_offsets(world: World) -> Any:
    """Delivery reports tell the offsets."""
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    return sender.sent("a", "b"), sender.sent("c"), sender.offsets, views(world, topic)


@scenario(
    (
        ["ok"],
        ["ok"],
        ["ok"],
        {"a": 0, "b": 1, "c": 2},
        {"committed": [(0, "a"), (1, "b"), (2, "c")], "uncommitted": [(0, "a"), (1, "b"), (2, "c")]},
    ),
    quick=True,
)
def idempotent_repeat_after_a_lost_answer_gives_no_duplicate(world: World) -> Any:
    """The broker knows a repeat by its sequence number, and tells the first copy's offset."""
    topic = world.topic()
    sender = Sender(world.producer(enable_idempotence=True), topic)
    world.hold("PRODUCE", nth=2).deliver()
    return sender.sent("a"), sender.sent("b"), sender.sent("c"), sender.offsets, views(world, topic)


@scenario((["ok"], [(0, "a"), (1, "a")]))
def repeat_after_a_lost_answer_gives_a_duplicate_without_idempotence(world: World) -> Any:
    """Without idempotence a repeat is another record."""
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    world.hold("PRODUCE").deliver()
    return sender.sent("a"), world.read(topic)


@scenario(([["ok"], ["ok"]], ["ok"], [(0, "a"), (1, "b"), (2, "c")]))
def late_copy_of_an_idempotent_produce_is_no_duplicate(world: World) -> Any:
    """A first copy that arrives after its repeat, and after a later record, is known, too."""
    topic = world.topic()
    sender = Sender(world.producer(enable_idempotence=True), topic)
    held = world.hold("PRODUCE")
    said = [sender.sent("a"), sender.sent("b")]
    held.deliver()
    return said, sender.sent("c"), world.read(topic)


@scenario(([["ok"], ["ok"]], [(0, "a"), (1, "b"), (2, "a")]))
def late_copy_of_a_produce_is_a_duplicate_without_idempotence(world: World) -> Any:
    """Without idempotence a late first copy is another record, behind a later one."""
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    held = world.hold("PRODUCE")
    said = [sender.sent("a"), sender.sent("b")]
    held.deliver()
    return said, world.read(topic)


@scenario(([["ok"], ["_MSG_TIMED_OUT"]], ["ok", "ok"], [(0, "a"), (1, "c"), (2, "d")]))
def idempotent_producer_goes_on_after_a_record_timed_out(world: World) -> Any:
    """It gets another producer ID, with which later records pass."""
    topic = world.topic()
    sender = Sender(world.producer(enable_idempotence=True, delivery_timeout_ms=4000, socket_timeout_ms=1000), topic)
    said = [sender.sent("a")]
    world.cut()
    said += [sender.sent("b")]
    world.mend()
    return said, sender.sent("c", "d"), world.read(topic)


@scenario(([["ok"], ["_MSG_TIMED_OUT", "_MSG_TIMED_OUT"]], ["ok"], [(0, "a"), (1, "d")]))
def delivery_times_out_without_a_transaction(world: World) -> Any:
    """Records that time out are reported, and later ones pass."""
    topic = world.topic()
    sender = Sender(world.producer(delivery_timeout_ms=1000, socket_timeout_ms=1000), topic)
    said = [sender.sent("a")]
    world.cut()
    said += [sender.sent("b", "c")]
    world.mend()
    return said, sender.sent("d"), world.read(topic)


@scenario((["ok"], ["refused: _UNKNOWN_PARTITION"], ["ok"]))
def partition_that_does_not_exist(world: World) -> Any:
    """The client refuses the record, as it knows the topic."""
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    return sender.sent("a"), sender.sent("b", partition=7), sender.sent("c")


@scenario((["refused: _UNKNOWN_PARTITION"], "ok", "_STATE", ["ok", "ok", "ok"], [(0, "a"), (2, "c")]))
def partition_that_does_not_exist_in_a_transaction(world: World) -> Any:
    """A refusal by the client harms no transaction."""
    topic = world.topic()
    sender = transactional(world, topic)
    sender.begin("a")
    return sender.sent("b", partition=7), sender.commit(), sender.abort(), sender.whole("c"), settled(world, topic)


@scenario((["ok"], ["MSG_SIZE_TOO_LARGE"], ["ok"]))
def record_that_is_too_large_for_the_topic(world: World) -> Any:
    """The broker refuses the record."""
    topic = world.topic(**{"max.message.bytes": "1000"})
    sender = Sender(world.producer(), topic)
    return sender.sent("a"), sender.sent("b" * 5000), sender.sent("c")


@scenario(
    (
        [
            ["MSG_SIZE_TOO_LARGE"],
            "MSG_SIZE_TOO_LARGE abortable",
            "ok",
            ["ok", "_PURGE_QUEUE", "OUT_OF_ORDER_SEQUENCE_NUMBER abortable"],
            "ok",
            ["ok", "ok", "ok"],
        ],
        [(3, "d")],
    )
)
def record_that_is_too_large_for_the_topic_in_a_transaction(world: World) -> Any:
    """A refusal by the broker wants an abort; the gap in the sequence numbers fails the next transaction."""
    topic = world.topic(**{"max.message.bytes": "1000"})
    sender = transactional(world, topic)
    sender.begin("a")
    said = [sender.sent("b" * 5000), sender.commit(), sender.abort()]
    said += [sender.whole("c"), sender.abort(), sender.whole("d")]
    return said, settled(world, topic)


@scenario(
    ([["MSG_SIZE_TOO_LARGE"], ["_PURGE_QUEUE"], "MSG_SIZE_TOO_LARGE abortable", "ok", ["ok"], "ok"], [], [(0, "d")])
)
def failed_transaction_purges_what_waits(world: World) -> Any:
    """A transaction that has failed drops records that wait."""
    topic = world.topic(2, **{"max.message.bytes": "1000"})
    sender = transactional(world, topic, retry_backoff_ms=RETRY_MS).begin("a")
    held = world.hold("ADD_PARTITIONS_TO_TXN")
    sender.send("b", partition=1)
    held.wait()
    said = [sender.sent("c" * 5000), sender.reports_of("b"), *failure_of(world, sender), sender.abort()]
    sender.producer.begin_transaction()
    said += [sender.sent("d", partition=1), sender.commit()]
    return said, settled(world, topic), world.read(topic, partition=1)


@scenario((["ok"], ["MSG_SIZE_TOO_LARGE"], ["ok"], ["ok"], [(0, "a"), (1, "c"), (2, "d")]))
def record_that_is_too_large_for_the_topic_of_an_idempotent_producer(world: World) -> Any:
    """The gap in the sequence numbers is hidden by another producer ID."""
    topic = world.topic(**{"max.message.bytes": "1000"})
    sender = Sender(world.producer(enable_idempotence=True), topic)
    return sender.sent("a"), sender.sent("b" * 5000), sender.sent("c"), sender.sent("d"), world.read(topic)


@scenario((["refused: MSG_SIZE_TOO_LARGE"], "ok", [(0, "a")]))
def record_that_is_too_large_for_the_client(world: World) -> Any:
    """A refusal by the client harms no transaction."""
    topic = world.topic()
    sender = transactional(world, topic, message_max_bytes=1000)
    sender.begin("a")
    return sender.sent("b" * 5000), sender.commit(), settled(world, topic)


@scenario((["ok", "ok", "queue full"], (2, 2), 0, ["ok"], [(0, "a"), (1, "b"), (2, "d")]))
def queue_is_full(world: World) -> Any:
    """A full queue is said by `produce`, and `flush` says how many are left."""
    topic = world.topic()
    sender = Sender(world.producer(queue_buffering_max_messages=2, socket_timeout_ms=1000), topic)
    world.cut()
    said = sender.send("a", "b", "c")
    left = sender.producer.flush(SHORT), len(sender.producer)
    world.mend()
    return said, left, sender.producer.flush(LONG), sender.sent("d"), world.read(topic)


@scenario(([["ok"], 0, ["_PURGE_INFLIGHT", "_PURGE_QUEUE", "_PURGE_QUEUE"]], ["ok"], ["a", "e"]))
def purge_drops_what_waits(world: World) -> Any:
    """Reports of purged records say whether the record was under way."""
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
