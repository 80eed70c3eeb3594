"""Links that pass one direction alone, and a broker that takes requests and does nothing about them."""

from __future__ import annotations

from typing import Any

from tests.simulation.scenarios.scenario import SHORT, Sender, scenario, transactional, views
from tests.simulation.worlds import World

_BOTH = {isolation: [(0, "a"), (2, "b")] for isolation in ("committed", "uncommitted")}


@scenario((["_MSG_TIMED_OUT"], {"committed": [(0, "a"), (1, "b")], "uncommitted": [(0, "a"), (1, "b")]}))
def answers_do_not_come_back(world: World) -> Any:
    """A record whose acknowledgement does not come back has timed out, and is there."""
    topic = world.topic()
    sender = Sender(world.producer(delivery_timeout_ms=3000), topic)
    sender.sent("a")
    world.cut(passes="requests")
    said = sender.sent("b")
    world.mend()
    return said, views(world, topic)


@scenario((["_MSG_TIMED_OUT"], {"committed": [(0, "a"), (1, "b")], "uncommitted": [(0, "a"), (1, "b")]}))
def broker_hangs(world: World) -> Any:
    """A record that a broker takes and does nothing about times out, and is written when the broker goes on."""
    topic = world.topic()
    sender = Sender(world.producer(delivery_timeout_ms=3000), topic)
    sender.sent("a")
    world.hang()
    said = sender.sent("b")
    world.go_on()
    world.wait_until(lambda: len(world.read(topic)) > 1)
    return said, views(world, topic)


@scenario(("_TIMED_OUT retriable", "ok", ["ok", "ok", "ok"], _BOTH))
def commit_without_an_answer(world: World) -> Any:
    """A commit whose answer does not come back may be called again, and is done once."""
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    world.cut(passes="requests")
    said = sender.commit(SHORT)
    world.mend()
    return said, sender.commit(), sender.whole("b"), views(world, topic)


@scenario(("_TIMED_OUT retriable", "ok", ["ok", "ok", "ok"], _BOTH))
def commit_while_the_broker_hangs(world: World) -> Any:
    """A commit that a broker takes and does nothing about may be called again, and is done when that goes on."""
    topic = world.topic()
    sender = transactional(world, topic).begin("a")
    world.hang()
    said = sender.commit(SHORT)
    world.go_on()
    return said, sender.commit(), sender.whole("b"), views(world, topic)
