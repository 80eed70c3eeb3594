"""Readers, topics, and clusters that do not answer."""

from __future__ import annotations

from typing import Any

from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.cimpl import NewTopic

from tests.simulation.scenarios.scenario import LONG, Sender, next_of, scenario, told, transactional, tried
from tests.simulation.worlds import World


@scenario(([["ok"], ("a", 0), ("_PARTITION_EOF", 1)], ["ok"], ("b", 1)))
def clients_say_that_brokers_are_away(world: World) -> Any:
    """Producers and consumers say that no broker can be reached, and go on later."""
    topic, heard = world.topic(), {"producer": [], "consumer": []}  # type: dict[str, list[str]]
    producer = world.producer(error_cb=lambda error: heard["producer"].append(told(error)))
    consumer = world.consumer(error_cb=lambda error: heard["consumer"].append(told(error)))
    sender = Sender(producer, topic)
    said = [sender.sent("a")]
    consumer.assign([TopicPartition(topic, 0, 0)])
    said += [next_of(world, consumer), next_of(world, consumer)]
    world.refuse()
    sender.send("b")

    def have_both_said_so() -> bool:
        producer.poll(0.01)
        consumer.poll(0.01)
        return all("_ALL_BROKERS_DOWN" in each for each in heard.values())

    world.wait_until(have_both_said_so)
    world.mend()
    producer.flush(LONG)
    return said, sender.reports_of("b"), next_of(world, consumer)


@scenario(([("_PARTITION_EOF", 2)], ("c", 2), ("_PARTITION_EOF", 3), [0]))
def reader_from_the_end_sees_later_records_only(world: World) -> Any:
    """A reader from the end sees later records only."""
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    sender.sent("a", "b")
    reader = world.consumer()
    reader.assign([TopicPartition(topic, 0, OFFSET_END)])
    said = [next_of(world, reader)]
    sender.sent("c")
    return said, next_of(world, reader), next_of(world, reader), [place.partition for place in reader.assignment()]


@scenario(([("first", 0), ("_PARTITION_EOF", 1)], ("later", 2), ("_PARTITION_EOF", 4)))
def reader_waits_at_an_open_transaction(world: World) -> Any:
    """A reader of committed records goes on when the transaction ends."""
    topic = world.topic()
    sender, plain = transactional(world, topic), Sender(world.producer(), topic)
    plain.sent("first")
    sender.begin("aborted")
    plain.sent("later")
    reader = world.consumer(isolation_level="read_committed")
    reader.assign([TopicPartition(topic, 0, 0)])
    said = [next_of(world, reader), next_of(world, reader)]
    sender.abort()
    return said, next_of(world, reader), next_of(world, reader)


@scenario([0, -1])
def offsets_for_times_of_records(world: World) -> Any:
    """There is an offset for a time in the past, and none for one in the future."""
    topic = world.topic()
    sender = Sender(world.producer(), topic)
    sender.sent("a", "b")
    reader = world.consumer()
    found = [reader.offsets_for_times([TopicPartition(topic, 0, time)], timeout=LONG) for time in (0, 1 << 42)]
    return [each[0].offset for each in found]


@scenario(("TOPIC_ALREADY_EXISTS", [0, 1, 2], "ok", "none"))
def topics_and_their_settings(world: World) -> Any:
    """A topic is created once."""
    topic, none = world.topic(3, **{"cleanup.policy": "compact"}), world.name("none")
    admin = world.admin()
    again = admin.create_topics([NewTopic(topic, 1, 1)], request_timeout=LONG)[topic]
    known = admin.list_topics(topic, timeout=LONG).topics[topic]
    return tried(again.result, 60.0), sorted(known.partitions), told(known.error), none[:4]
