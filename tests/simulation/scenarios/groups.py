"""Members of a consumer group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from confluent_kafka import TopicPartition

from tests.simulation.scenarios.scenario import scenario
from tests.simulation.worlds import World

_GROUP = {
    "partition_assignment_strategy": "cooperative-sticky",
    "session_timeout_ms": 3000,
    "heartbeat_interval_ms": 500,
}


class Member:
    """A member of a group, and what it was told."""

    def __init__(self, world: World, topic: str, name: str) -> None:
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


@scenario(([["assigned"], []], ["assigned", "revoked"], ["assigned"]))
def group_keeps_its_owner_until_it_leaves(world: World) -> Any:
    """A member that joins takes nothing away; it gets the partition of one that leaves."""
    topic = world.topic()
    one = Member(world, topic, "one")
    _polled(world, [one], lambda: one.told == ["assigned"])
    other = Member(world, topic, "other")
    _polled_for(world, [one, other], 3.0)
    said = [list(one.told), list(other.told)]
    one.consumer.close()
    _polled(world, [other], lambda: bool(other.told))
    return said, list(one.told), list(other.told)


@scenario(["assigned", "lost", "assigned"])
def member_that_hears_nothing_loses_its_partition(world: World) -> Any:
    """A member that is cut off loses its partition after its session's time-out, and joins again."""
    topic = world.topic()
    one = Member(world, topic, "one")
    _polled(world, [one], lambda: one.told == ["assigned"])
    world.cut()
    _polled(world, [one], lambda: "lost" in one.told)
    world.mend()
    _polled(world, [one], lambda: one.told.count("assigned") == 2)
    return list(one.told)
