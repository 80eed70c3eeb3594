"""Requests whose answer is lost, or whose first copy arrives after its repeat."""

from __future__ import annotations

from typing import Any

from tests.simulation.scenarios.scenario import (
    LEARN,
    RETRY_MS,
    Sender,
    ends_of,
    scenario,
    settled,
    transactional,
    tried,
    views,
)
from tests.simulation.worlds import World


@scenario(
    ("ok", ["ok", "ok", "ok"], {"committed": [(0, "a"), (2, "b")], "uncommitted": [(0, "a"), (2, "b")]}), quick=True
)
def lost_answer_of_a_commit(world: World) -> Any:
    """A commit is repeated silently."""
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    world.hold("END_TXN commit").deliver()
    return sender.commit(), sender.whole("b"), views(world, topic)


@scenario(("ok", ["ok", "ok", "ok"], {"committed": [(2, "b")], "uncommitted": [(0, "a"), (2, "b")]}))
def lost_answer_of_an_abort(world: World) -> Any:
    """An abort is repeated silently."""
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    world.hold("END_TXN abort").deliver()
    return sender.abort(), sender.whole("b"), views(world, topic)


@scenario(
    (
        [
            "ok",
            {"committed": [(0, "a"), (2, "b")], "uncommitted": [(0, "a"), (2, "b")]},
            ["INVALID_TXN_STATE"],
            "INVALID_TXN_STATE abortable",
            "INVALID_TXN_STATE fatal",
            ["INVALID_TXN_STATE fatal"],
        ],
        {"committed": [(0, "a"), (2, "b")], "uncommitted": [(0, "a"), (2, "b")]},
    ),
    quick=True,
)
def late_commit_ends_a_later_transaction(world: World) -> Any:
    """A late first copy commits a later transaction; its next record is refused, and the producer breaks."""
    topic = world.topic(2)
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN commit")
    said = [sender.commit()]
    sender.begin("b")
    held.deliver()
    said += [views(world, topic), sender.sent("c"), sender.commit(), sender.abort()]
    said += [sender.whole("d")]
    return said, views(world, topic)


@scenario((["ok", ["ok"], "ok"], {"committed": [], "uncommitted": [(0, "a"), (2, "b")]}, [(0, "manifest")]), quick=True)
def late_abort_ends_a_later_transaction(world: World) -> Any:
    """A late first copy aborts a later transaction; what goes to another partition opens it again, and is committed."""
    topic = world.topic(2)
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN abort")
    said = [sender.abort()]
    sender.begin("b")
    held.deliver()
    said += [sender.sent("manifest", partition=1), sender.commit()]
    return said, views(world, topic), world.read(topic, partition=1)


@scenario(
    (
        ["ok"],
        "ok",
        ["ok", "ok", "ok"],
        {"committed": [(0, "a"), (2, "b"), (4, "c")], "uncommitted": [(0, "a"), (2, "b"), (4, "c")]},
    )
)
def late_commit_and_nothing_more_is_produced(world: World) -> Any:
    """The commit of a transaction that a late copy has committed succeeds."""
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN commit")
    said = [sender.commit()]
    sender.begin("b")
    held.deliver()
    return said, sender.commit(), sender.whole("c"), views(world, topic)


@scenario(
    (
        ["ok"],
        "INVALID_TXN_STATE fatal",
        "INVALID_TXN_STATE fatal",
        {"committed": [(0, "a"), (2, "b")], "uncommitted": [(0, "a"), (2, "b")]},
    )
)
def late_commit_and_an_abort(world: World) -> Any:
    """The abort of a transaction that a late copy has committed breaks the producer."""
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN commit")
    said = [sender.commit()]
    sender.begin("b")
    held.deliver()
    return said, sender.abort(), tried(sender.producer.begin_transaction), views(world, topic)


@scenario(
    (
        ["ok", {"committed": [(0, "a")], "uncommitted": [(0, "a"), (2, "b")]}, ["ok"], "ok"],
        {"committed": [(0, "a"), (2, "b"), (3, "c")], "uncommitted": [(0, "a"), (2, "b"), (3, "c")]},
    ),
    quick=True,
)
def late_commit_of_an_old_epoch_is_refused(world: World) -> Any:
    """After `init_transactions` a late copy harms nothing."""
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    held = world.hold("END_TXN commit")
    said = [sender.commit()]
    new = transactional(world, topic).begin("b")
    held.deliver()
    said += [views(world, topic, is_open=True), new.sent("c"), new.commit()]
    return said, views(world, topic)


@scenario((["ok"], "ok", {"committed": [(2, "b"), (3, "c")], "uncommitted": [(0, "a"), (2, "b"), (3, "c")]}))
def late_produce_of_an_old_epoch_is_refused(world: World) -> Any:
    """After `init_transactions` a late record harms nothing."""
    topic = world.topic()
    old = Sender(world.producer("old", transactional_id="shop"), topic).init().begin("a")
    held = world.hold("PRODUCE", "old")
    world.hold("PRODUCE", "old")
    old.send("late")
    held.wait()
    new = transactional(world, topic, "new").begin("b")
    held.deliver()
    return new.sent("c"), new.commit(), views(world, topic)


@scenario(
    (["ok", ["_PURGE_QUEUE"]], ["ok", "ok", "ok"], {"committed": [(2, "b")], "uncommitted": [(0, "a"), (2, "b")]})
)
def late_produce_between_transactions_is_refused(world: World) -> Any:
    """A late record is refused while no transaction is open, and harms none of those that follow."""
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


@scenario(
    (
        [
            "ok",
            ["_PURGE_QUEUE"],
            ["ok", "ok", "ok"],
            ["ok", "OUT_OF_ORDER_SEQUENCE_NUMBER", "OUT_OF_ORDER_SEQUENCE_NUMBER fatal"],
        ],
        {"committed": [(2, "b")], "uncommitted": [(0, "a"), (2, "b")]},
    )
)
def abort_gives_a_sequence_number_away(world: World) -> Any:
    """A late record whose sequence number was given to another is refused, and so are later ones of its epoch."""
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


@scenario(
    (
        ["ok"],
        ["ok"],
        ["ok"],
        "ok",
        {"committed": [(2, "late"), (3, "b")], "uncommitted": [(0, "a"), (2, "late"), (3, "b")]},
    )
)
def late_produce_takes_the_sequence_number_of_another_record(world: World) -> Any:
    """A late record of an aborted transaction is committed with the next one, whose own record is lost."""
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


@scenario(
    (
        ["ok"],
        [],
        ["OUT_OF_ORDER_SEQUENCE_NUMBER"],
        "OUT_OF_ORDER_SEQUENCE_NUMBER fatal",
        {"committed": [], "uncommitted": [(0, "a"), (2, "late"), (3, "later")]},
    )
)
def late_batch_takes_the_sequence_numbers_of_a_record(world: World) -> Any:
    """A late batch of another length breaks the producer."""
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


@scenario(
    (
        [["ok", "ok", "ok"], ["ok", "ok", "ok"], ["ok", "ok", "ok"]],
        {"committed": [(0, "a"), (2, "b"), (4, "c")], "uncommitted": [(0, "a"), (2, "b"), (4, "c")]},
        {"read_committed": (0, 6), "read_uncommitted": (0, 6)},
    )
)
def late_add_partitions(world: World) -> Any:
    """A late copy opens a transaction that the next commit ends."""
    topic = world.topic()
    sender = transactional(world, topic)
    held = world.hold("ADD_PARTITIONS_TO_TXN")
    said = [sender.whole("a")]
    held.deliver()
    said += [sender.whole("b"), sender.whole("c")]
    return said, views(world, topic), ends_of(world, topic)


@scenario(("_FENCED fatal", "_FENCED fatal", {"committed": [], "uncommitted": [(0, "a")]}))
def late_init_fences(world: World) -> Any:
    """A late copy of its own InitProducerId fences a producer."""
    topic = world.topic()
    held = world.hold("INIT_PRODUCER_ID")
    sender = transactional(world, topic)
    sender.begin("a")
    held.deliver()
    return sender.commit(), sender.abort(), views(world, topic)


@scenario((["ok", "ok", "ok"], [(0, "a")]))
def lost_answer_of_init(world: World) -> Any:
    """InitProducerId is repeated silently."""
    topic = world.topic()
    world.hold("INIT_PRODUCER_ID").deliver()
    return transactional(world, topic).whole("a"), settled(world, topic)
