"""Reading of a topic to its present end, outside of any group: for commands."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka import reader as kafka_reader
from outbox_core.kafka.clients import (
    OFFSET_BEGINNING,
    KafkaError,
    KafkaException,
    TopicPartition,
    make_consumer,
)
from outbox_core.kafka.errors import UNREADABLE_TOPIC, why_unreadable
from outbox_core.kafka.messages import headers_of
from outbox_core.kafka.reader import PartitionReader
from outbox_queue.config import QueueConfig
from outbox_queue.errors import QueueTopicError
from outbox_queue.protocol.clients import common_settings, consumer_settings
from outbox_queue.protocol.headers import Header

_PATIENCE_SECONDS = 30.0
_BATCH = 1000


class TopicRecord(NamedTuple):
    """A record of a topic."""

    partition: int
    offset: int
    timestamp: tuple[int, int]  # kind, and milliseconds since 1970
    key: bytes | None
    value: bytes | None
    headers: list[Header]  # `UnreadableHeaders` if the client cannot decode them


def read_to_end(config: QueueConfig, topic: str, begin: Mapping[int, int] | None = None) -> Iterator[TopicRecord]:
    """Yield every committed record up to the present ends of the partitions, from offsets or the beginning.

    Raises `KafkaUnavailable` if the cluster is silent, or an open transaction does not end, for half a minute.
    """
    extra = {"enable.partition.eof": True, "fetch.wait.max.ms": 50}
    consumer = make_consumer(consumer_settings(config, f"kafka-mq-reader-{uuid.uuid4()}", extra))
    try:
        ends = partition_ends(config, topic)
        starts = [TopicPartition(topic, number, (begin or {}).get(number, OFFSET_BEGINNING)) for number in ends]
        reader = PartitionReader(
            consumer,
            starts,
            {(topic, number): end for number, end in ends.items()},
            on_error=_raise_unless_about_group,
            on_silence=_raise_unread,
            silence_seconds=_PATIENCE_SECONDS,
            at_once=_BATCH,
        )
        for messages in reader:
            yield from map(_record, messages)
    except KafkaException as error:
        raise _translated(config, topic, error.args[0]) from None
    finally:
        consumer.close()


def partition_ends(config: QueueConfig, topic: str) -> dict[int, int]:
    """Return the end of each partition, open transactions included; errors are those of `read_to_end`."""
    settings = {**common_settings(config), "group.id": f"kafka-mq-reader-{uuid.uuid4()}"}
    try:
        found = kafka_reader.partition_ends(settings, [topic], timeout_seconds=_PATIENCE_SECONDS)
    except KafkaException as error:
        raise _translated(config, topic, error.args[0]) from None
    if not found:
        raise QueueTopicError(f"there is no topic {topic!r}")
    return {number: end for (_, number), end in found.items()}


def _raise_unless_about_group(error: KafkaError, _: str) -> None:
    # No group is joined: the client looks for its coordinator all the same, now and then.
    if error.code() != KafkaError.GROUP_AUTHORIZATION_FAILED:
        raise KafkaException(error)


def _raise_unread(left: set[kafka_reader.Place]) -> None:
    topic, numbers = min(left)[0], sorted(number for _, number in left)
    raise KafkaUnavailable(f"topic {topic!r}: the ends of partitions {numbers} cannot be read")


def _record(message: Any) -> TopicRecord:
    return TopicRecord(
        message.partition(),
        message.offset(),
        message.timestamp(),
        message.key(),
        message.value(),
        headers_of(message),
    )


def _translated(config: QueueConfig, topic: str, error: KafkaError) -> QueueTopicError | KafkaUnavailable:
    if error.code() in UNREADABLE_TOPIC:
        return QueueTopicError(f"topic {topic!r} cannot be read: {why_unreadable(error, config.kafka, topic)}")
    return KafkaUnavailable(f"cannot reach Kafka at bootstrap_servers={config.bootstrap_servers}: {error.str()}")
