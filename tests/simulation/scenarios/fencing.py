"""Producers that another one with their transactional.id has fenced."""

from __future__ import annotations

from typing import Any

from tests.simulation.scenarios.scenario import ends_of, scenario, transactional, tried, views
from tests.simulation.worlds import World


@scenario(
    (
        ["_FENCED fatal", "_FENCED fatal", "ok", "_FENCED fatal", "_FENCED fatal", "_FENCED fatal", ["_FATAL"]],
        ["ok", "ok", "ok"],
        {"committed": [(2, "b")], "uncommitted": [(0, "a"), (2, "b")]},
    ),
    quick=True,
)
def fenced_in_an_open_transaction_commit(world: World) -> Any:
    """A fenced commit breaks the producer: `poll` says so once, each later call says it again."""
    topic = world.topic()
    old = transactional(world, topic).begin("a")
    new = transactional(world, topic)
    said = [old.commit(), tried(old.producer.poll, 0), tried(old.producer.poll, 0)]
    said += [old.commit(), old.abort(), tried(old.producer.begin_transaction), old.send("c")]
    return said, new.whole("b"), views(world, topic)


@scenario(
    (
        "_FENCED fatal",
        "_FENCED fatal",
        ["_FATAL"],
        ["ok", "ok", "ok"],
        {"committed": [(2, "b")], "uncommitted": [(0, "a"), (2, "b")]},
    )
)
def fenced_in_an_open_transaction_abort(world: World) -> Any:
    """A fenced abort breaks the producer."""
    topic = world.topic()
    old = transactional(world, topic).begin("a")
    new = transactional(world, topic)
    return old.abort(), old.abort(), old.send("c"), new.whole("b"), views(world, topic)


@scenario(
    (
        ["INVALID_PRODUCER_EPOCH"],
        ["_FENCED fatal"],
        ["_FATAL"],
        "_FENCED fatal",
        "_FENCED fatal",
        ["ok", "ok", "ok"],
        {"committed": [(2, "d")], "uncommitted": [(0, "a"), (2, "d")]},
    ),
    quick=True,
)
def fenced_in_an_open_transaction_produce(world: World) -> Any:
    """A fenced record breaks the producer."""
    topic = world.topic()
    old = transactional(world, topic).begin("a")
    new = transactional(world, topic)
    return old.sent("b"), old.raised, old.send("c"), old.commit(), old.abort(), new.whole("d"), views(world, topic)


@scenario(
    (
        [["ok", "ok", "ok"], "ok", ["_PURGE_QUEUE"], "_FENCED fatal", "_FENCED fatal"],
        ["ok", "ok", "ok"],
        {"committed": [(0, "a"), (2, "c")], "uncommitted": [(0, "a"), (2, "c")]},
    )
)
def fenced_between_transactions(world: World) -> Any:
    """A fenced producer learns of it with its first record."""
    topic = world.topic()
    old = transactional(world, topic)
    said = [old.whole("a")]
    new = transactional(world, topic)
    said += [tried(old.producer.begin_transaction), old.sent("b"), old.commit(), old.abort()]
    return said, new.whole("c"), views(world, topic)


@scenario(
    (
        ["ok", "ok", "ok", ["_PURGE_QUEUE"], "_FENCED fatal"],
        ["ok", "ok", "ok"],
        {"committed": [(0, "b")], "uncommitted": [(0, "b")]},
    )
)
def fenced_before_the_first_record(world: World) -> Any:
    """Transactions without records do not learn of a fence."""
    topic = world.topic()
    old = transactional(world, topic)
    said = [tried(old.producer.begin_transaction)]
    new = transactional(world, topic)
    said += [old.commit(), tried(old.producer.begin_transaction), old.sent("a"), old.abort()]
    return said, new.whole("b"), views(world, topic)


@scenario(
    (
        {"committed": [], "uncommitted": [(0, "a"), (2, "b")]},
        "ok",
        {"committed": [(2, "b")], "uncommitted": [(0, "a"), (2, "b")]},
        {"read_committed": (0, 4), "read_uncommitted": (0, 4)},
    )
)
def init_aborts_an_open_transaction(world: World) -> Any:
    """A new producer aborts what the last one has left open."""
    topic = world.topic()
    transactional(world, topic).begin("a")
    new = transactional(world, topic)
    new.begin("b")
    before = views(world, topic, is_open=True)
    return before, new.commit(), views(world, topic), ends_of(world, topic)
