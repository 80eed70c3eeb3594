"""Readers of whole topics, to check the published records."""

import time
from dataclasses import dataclass

from confluent_kafka import OFFSET_BEGINNING, Consumer, KafkaError, KafkaException, TopicPartition


@dataclass(frozen=True)
class ReadMessage:
    """A message as a consumer sees it."""

    topic: str
    partition: int
    offset: int
    key: bytes | None
    value: bytes | None
    headers: list[tuple[str, bytes | None]]
    timestamp_ms: int = 0


def read_topic(bootstrap, topic, *, count=None, timeout=30.0, isolation="read_committed"):
    """Read all partitions from the beginning and return a list of `ReadMessage`, in order within each partition.

    Args:
        bootstrap: The broker.
        topic: Its name. A topic that does not exist is empty, or awaited if `count` is given.
        count: Return once so many were read; None: read up to the end at the time of the call (with read_committed,
            up to the first open transaction).
        timeout: Seconds; TimeoutError after that, with the number of messages read.
        isolation: "read_committed" or "read_uncommitted".
    """
    deadline = time.monotonic() + timeout
    consumer = Consumer(
        {
            "bootstrap.servers": bootstrap,
            "group.id": "kafka-reader",
            "enable.auto.commit": False,
            "isolation.level": isolation,
            "enable.partition.eof": True,
            "topic.metadata.refresh.interval.ms": 200,
            "fetch.wait.max.ms": 50,
        }
    )
    try:
        partitions = _partitions(consumer, topic, deadline if count is not None else 0)
        ends = _ends(bootstrap, topic, partitions, timeout)
        consumer.assign([TopicPartition(topic, n, OFFSET_BEGINNING) for n in partitions])
        return _read_to(consumer, ends, deadline) if count is None else _read_count(consumer, count, deadline)
    finally:
        consumer.close()


def _partitions(consumer, topic, deadline):
    while True:
        known = consumer.list_topics(topic, timeout=10).topics[topic].partitions
        if known or time.monotonic() > deadline:
            return list(known)
        time.sleep(0.1)


def _ends(bootstrap, topic, partitions, timeout):
    """Return the ends of the logs, open transactions included.

    A commit is decided before its markers reach the partitions: a read_committed client asked for the end right after
    one may get an earlier offset.
    """
    settings = {"bootstrap.servers": bootstrap, "group.id": "kafka-reader", "isolation.level": "read_uncommitted"}
    consumer = Consumer(settings)
    try:
        return {n: consumer.get_watermark_offsets(TopicPartition(topic, n), timeout=timeout)[1] for n in partitions}
    finally:
        consumer.close()


def _read_count(consumer, count, deadline):
    found = []
    while len(found) < count:
        message = _poll(consumer, deadline, f"{len(found)} of {count} messages")
        if message.error() is None:
            found.append(_read_message(message))
    return found


def _read_to(consumer, ends, deadline):
    """Read each partition to its end; the last offsets may be transaction markers, which only EOF shows."""
    found = []
    unread = {partition for partition, end in ends.items() if end > 0}
    while unread:
        message = _poll(consumer, deadline, f"{len(found)} messages, and partitions {sorted(unread)} not to their end")
        end = ends[message.partition()]
        if message.error() is None and message.offset() < end:
            found.append(_read_message(message))
        reached = message.offset() if message.error() else message.offset() + 1
        if reached >= end:
            unread.discard(message.partition())
    return found


def _poll(consumer, deadline, so_far):
    """Return the next message or end of a partition."""
    while time.monotonic() < deadline:
        message = consumer.poll(0.1)
        if message is None:
            continue
        if message.error() and message.error().code() != KafkaError._PARTITION_EOF:
            raise KafkaException(message.error())
        return message
    raise TimeoutError(f"read only {so_far}")


def _read_message(message):
    return ReadMessage(
        topic=message.topic(),
        partition=message.partition(),
        offset=message.offset(),
        key=message.key(),
        value=message.value(),
        headers=message.headers() or [],
        timestamp_ms=message.timestamp()[1],
    )
