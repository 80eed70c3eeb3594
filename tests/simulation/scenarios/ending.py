"""Transactions that end well, and calls out of order."""

from __future__ import annotations

from typing import Any

from tests.simulation.scenarios.scenario import LONG, Sender, ends_of, scenario, settled, transactional, tried, views
from tests.simulation.worlds import World


@scenario(
    (
        [["ok", "ok", "ok", "ok"], "ok", ["ok", "ok", "ok"]],
        {"a": 0, "b": 1, "c": 3, "d": 5},
        {"committed": [(0, "a"), (1, "b"), (5, "d")], "uncommitted": [(0, "a"), (1, "b"), (3, "c"), (5, "d")]},
    ),
    quick=True,
)
def commit_is_visible_and_abort_is_not(world: World) -> Any:
    """Readers of committed records do not see an aborted one; each end takes an offset."""
    topic = world.topic()
    sender = transactional(world, topic)
    said = [sender.whole("a", "b")]
    sender.begin("c")
    said += [sender.abort(), sender.whole("d")]
    return said, sender.offsets, views(world, topic)


@scenario(([["ok"], [], [], "ok", "ok", "ok"], [(0, "a"), (4, "e")], [(0, "b")]))
def transactions_over_two_partitions(world: World) -> Any:
    """A transaction ends on all of its partitions."""
    topic = world.topic(2)
    sender = transactional(world, topic)
    sender.begin("a")
    said = [sender.sent("b", partition=1), world.read(topic, partition=0), world.read(topic, partition=1)]
    said += [sender.commit()]
    sender.begin("c")
    sender.sent("d", partition=1)
    said += [sender.abort(), sender.begin("e").commit()]
    return said, settled(world, topic), world.read(topic, partition=1)


@scenario(
    (
        [["ok", "ok", "ok"], ["ok", "ok", "ok"], ["ok", "ok", "ok"], ["ok", "ok", "ok"], ["ok", "ok", "ok"]],
        [(0, "0"), (2, "1"), (4, "2"), (6, "3"), (8, "4")],
    )
)
def transactions_follow_each_other_at_once(world: World) -> Any:
    """A transaction may begin before the markers of the last one are written."""
    topic = world.topic()
    sender = transactional(world, topic)
    return [sender.whole(str(number)) for number in range(5)], settled(world, topic)


@scenario(
    (
        {"committed": [(0, "first")], "uncommitted": [(0, "first"), (1, "open"), (2, "later")]},
        {"read_committed": (0, 1), "read_uncommitted": (0, 3)},
        "ok",
        {
            "committed": [(0, "first"), (1, "open"), (2, "later")],
            "uncommitted": [(0, "first"), (1, "open"), (2, "later")],
        },
        {"read_committed": (0, 4), "read_uncommitted": (0, 4)},
    ),
    quick=True,
)
def open_transaction_hides_later_records(world: World) -> Any:
    """Readers of committed records stop at the first record of an open transaction."""
    topic = world.topic()
    sender, plain = transactional(world, topic), Sender(world.producer(), topic)
    plain.sent("first")
    sender.begin("open")
    plain.sent("later")
    before, ends = views(world, topic, is_open=True), ends_of(world, topic)
    return before, ends, sender.commit(), views(world, topic), ends_of(world, topic)


@scenario(
    (
        [["ok", "ok"], "ok", ["ok", "ok", "ok"]],
        {"committed": [(0, "a")], "uncommitted": [(0, "a")]},
        {"read_committed": (0, 2), "read_uncommitted": (0, 2)},
    )
)
def transactions_without_records(world: World) -> Any:
    """No marker is written for an empty transaction."""
    topic = world.topic()
    sender = transactional(world, topic)
    said = [sender.whole()]
    sender.begin()
    said += [sender.abort(), sender.whole("a")]
    return said, views(world, topic), ends_of(world, topic)


@scenario(
    (
        [
            "_STATE",
            ["_STATE"],
            "_STATE",
            "_STATE",
            ["_STATE"],
            "_STATE",
            "_STATE",
            "_STATE",
            ["ok"],
            "_STATE",
            "ok",
            ["_STATE"],
            "_STATE",
            "_STATE",
        ],
        [(0, "c")],
    )
)
def calls_in_a_wrong_state(world: World) -> Any:
    """Calls out of order are refused, and harm nothing."""
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


@scenario(([["ok", "ok", "ok"], "_STATE"], "_STATE", "ok", [(0, "a"), (2, "b")]))
def init_is_called_again(world: World) -> Any:
    """`init_transactions` works once."""
    topic = world.topic()
    sender = transactional(world, topic)
    said = [sender.whole("a"), tried(sender.producer.init_transactions, LONG)]
    sender.begin("b")
    return said, tried(sender.producer.init_transactions, LONG), sender.commit(), settled(world, topic)
