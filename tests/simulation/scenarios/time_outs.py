"""Records, calls and transactions that time out."""

from __future__ import annotations

from typing import Any

from confluent_kafka import TopicPartition
from confluent_kafka.cimpl import NewTopic

from tests.simulation.scenarios.scenario import (
    LEARN,
    LONG,
    RETRY_MS,
    SHORT,
    Sender,
    failure_of,
    next_of,
    scenario,
    settled,
    transactional,
    tried,
    views,
)
from tests.simulation.worlds import World


@scenario(
    (
        "_FENCED fatal",
        "_FENCED fatal",
        "_FENCED fatal",
        {"committed": [(1, "later")], "uncommitted": [(0, "a"), (1, "later")]},
    )
)
def coordinator_times_a_transaction_out_commit(world: World) -> Any:
    """The commit of a transaction that was open for too long is fenced."""
    topic = world.topic()
    sender = transactional(world, topic, transaction_timeout_ms=1000).begin("a")
    plain = Sender(world.producer(), topic)
    plain.sent("later")
    settled(world, topic)
    return sender.commit(), sender.abort(), tried(sender.producer.begin_transaction), views(world, topic)


@scenario(
    (
        [["INVALID_PRODUCER_EPOCH"], "_FENCED fatal", "_FENCED fatal"],
        ["ok", "ok", "ok"],
        {"committed": [(1, "later"), (3, "c")], "uncommitted": [(0, "a"), (1, "later"), (3, "c")]},
    )
)
def coordinator_times_a_transaction_out_produce(world: World) -> Any:
    """A record of a transaction that was open for too long is fenced."""
    topic = world.topic()
    sender = transactional(world, topic, transaction_timeout_ms=1000).begin("a")
    plain = Sender(world.producer(), topic)
    plain.sent("later")
    settled(world, topic)
    said = [sender.sent("b"), sender.commit(), sender.abort()]
    return said, transactional(world, topic).whole("c"), views(world, topic)


@scenario(
    (
        [
            [],
            ["_MSG_TIMED_OUT"],
            "_STATE",
            "_INCONSISTENT abortable",
            "ok",
            ["_PURGE_QUEUE"],
            ["refused: _STATE"],
            "OUT_OF_ORDER_SEQUENCE_NUMBER abortable",
        ],
        {"committed": [], "uncommitted": [(0, "a"), (2, "late")]},
    )
)
def late_produce_of_a_record_that_timed_out_in_the_queue(world: World) -> Any:
    """The commit fails for a record that timed out; the next transaction fails by the gap in the sequence numbers."""
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


@scenario(
    (
        [[], ["_MSG_TIMED_OUT"], "ok", [], ["ok"], "ok"],
        {"committed": [(2, "late"), (3, "b")], "uncommitted": [(0, "a"), (2, "late"), (3, "b")]},
    )
)
def late_produce_of_a_record_that_timed_out_joins_the_next_transaction(world: World) -> Any:
    """A record that was reported as timed out is committed with the next transaction."""
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


@scenario(
    (
        [["_MSG_TIMED_OUT"], "_STATE", ["ok"], "_INCONSISTENT abortable"],
        "ok",
        ["ok", "_PURGE_QUEUE", "OUT_OF_ORDER_SEQUENCE_NUMBER abortable"],
        {"committed": [], "uncommitted": [(0, "a")]},
    )
)
def record_that_was_never_sent_times_out(world: World) -> Any:
    """The transaction fails with its commit, and the next one by the gap in the sequence numbers."""
    topic = world.topic(2)
    sender = transactional(world, topic, delivery_timeout_ms=1500).begin("a")
    world.refuse()
    said = [sender.sent("b"), tried(sender.producer.begin_transaction), sender.send("c"), sender.commit()]
    world.mend()
    return said, sender.abort(), sender.whole("d"), views(world, topic)


@scenario((["_MSG_TIMED_OUT"], []))
def record_times_out_with_its_transaction(world: World) -> Any:
    """A record's time is that of its transaction where nothing else is set."""
    topic = world.topic()
    sender = transactional(world, topic, transaction_timeout_ms=2000).begin("a")
    world.refuse()
    said = sender.sent("b")
    world.mend()
    return said, [value for _, value in world.read(topic)]


@scenario(
    (
        ["_TIMED_OUT retriable", ["_MSG_TIMED_OUT"]],
        "ok",
        ["ok", "ok", "ok"],
        {"committed": [(2, "c")], "uncommitted": [(0, "a"), (2, "c")]},
    )
)
def record_times_out_while_its_transaction_aborts(world: World) -> Any:
    """An abort waits for what is under way."""
    topic = world.topic()
    sender = transactional(world, topic, delivery_timeout_ms=1500).begin("a")
    world.cut()
    sender.send("b")
    world.sleep(0.2)
    said = [sender.abort(LONG / 10), sender.reports_of("b")]
    world.mend()
    return said, sender.abort(), sender.whole("c"), views(world, topic)


@scenario(
    (
        [["_MSG_TIMED_OUT"], "_TIMED_OUT abortable", ["_STATE"], "_TIMED_OUT abortable"],
        "ok",
        ["ok", "ok", "ok"],
        {"committed": [(2, "d")], "uncommitted": [(0, "a"), (2, "d")]},
    )
)
def record_times_out_in_a_transaction(world: World) -> Any:
    """A record that times out under way fails its transaction; the abort ends the epoch."""
    topic = world.topic()
    sender = transactional(world, topic, delivery_timeout_ms=1500)
    sender.begin("a")
    world.cut()
    said = [sender.sent("b"), *failure_of(world, sender), sender.send("c"), sender.commit()]
    world.mend()
    return said, sender.abort(), sender.whole("d"), views(world, topic)


@scenario(
    (
        ["_TIMED_OUT retriable", "_CONFLICT retriable", ["_STATE"], "_CONFLICT retriable"],
        "ok",
        ["ok", "ok", "ok"],
        {"committed": [(0, "a"), (2, "c")], "uncommitted": [(0, "a"), (2, "c")]},
    )
)
def commit_times_out_and_is_called_again(world: World) -> Any:
    """A commit that timed out goes on; other calls are refused meanwhile."""
    topic = world.topic()
    sender = transactional(world, topic, socket_timeout_ms=1000).begin("a")
    world.cut()
    said = [sender.commit(SHORT), tried(sender.producer.begin_transaction), sender.send("b"), sender.abort(SHORT)]
    world.mend()
    return said, sender.commit(), sender.whole("c"), views(world, topic)


@scenario(
    (
        ["_TIMED_OUT retriable", "_CONFLICT retriable", ["_STATE"], "_CONFLICT retriable"],
        "ok",
        ["ok", "ok", "ok"],
        {"committed": [(2, "c")], "uncommitted": [(0, "a"), (2, "c")]},
    )
)
def abort_times_out_and_is_called_again(world: World) -> Any:
    """An abort that timed out goes on; other calls are refused meanwhile."""
    topic = world.topic()
    sender = transactional(world, topic, socket_timeout_ms=1000).begin("a")
    world.cut()
    said = [sender.abort(SHORT), tried(sender.producer.begin_transaction), sender.send("b"), sender.commit(SHORT)]
    world.mend()
    return said, sender.abort(), sender.whole("c"), views(world, topic)


@scenario(
    (["_TIMED_OUT retriable", "_TIMED_OUT retriable", "_CONFLICT retriable"], "ok", ["ok", "ok", "ok"], [(0, "a")])
)
def init_times_out_and_is_called_again(world: World) -> Any:
    """`init_transactions` goes on after a time-out."""
    topic = world.topic()
    sender = Sender(world.producer(transactional_id="shop", socket_timeout_ms=1000), topic)
    world.cut()
    init = sender.producer.init_transactions
    said = [tried(init, SHORT), tried(init, SHORT), tried(sender.producer.begin_transaction)]
    world.mend()
    return said, tried(init, LONG), sender.whole("a"), settled(world, topic)


@scenario((["_TIMED_OUT retriable", ["none yet"], "ok", ["_PURGE_QUEUE"]], ["ok", "ok", "ok"], ["c"]))
def abort_while_a_record_is_under_way(world: World) -> Any:
    """An abort drops a record whose connection breaks."""
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


@scenario(
    (["_TIMED_OUT retriable"], "ok", ["ok"], {"committed": [(0, "a"), (1, "b")], "uncommitted": [(0, "a"), (1, "b")]})
)
def commit_waits_for_its_records(world: World) -> Any:
    """A commit waits for its records before it is sent."""
    topic = world.topic()
    sender = transactional(world, topic, socket_timeout_ms=1000).begin("a")
    world.cut()
    sender.send("b")
    said = [sender.commit(SHORT)]
    world.mend()
    return said, sender.commit(), sender.reports_of("b"), views(world, topic)


@scenario((["ok", ("_PARTITION_EOF", 0), "_TIMED_OUT", "_TIMED_OUT", "_TIMED_OUT", "_TIMED_OUT"], "ok"))
def cluster_does_not_answer(world: World) -> Any:
    """Questions time out."""
    producer = world.producer(socket_timeout_ms=1000)
    topic, admin = world.topic(), world.admin()
    consumer = world.consumer()
    consumer.assign([TopicPartition(topic, 0, 0)])
    admin.list_topics(timeout=LONG)
    said = [tried(producer.list_topics, timeout=LONG), next_of(world, consumer)]
    world.cut()
    said += [
        tried(producer.list_topics, timeout=1.0),
        tried(consumer.get_watermark_offsets, TopicPartition(topic, 0), timeout=1.0),
        tried(consumer.offsets_for_times, [TopicPartition(topic, 0, 0)], timeout=1.0),
        tried(admin.create_topics([NewTopic("t", 1, 1)], request_timeout=1.0)["t"].result),
    ]
    world.mend()
    return said, tried(producer.list_topics, timeout=LONG)
