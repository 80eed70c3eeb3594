"""Reading partitions from somewhere to their present ends, outside of any group: what commands show."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka import (
    OFFSET_BEGINNING,
    Consumer,
    KafkaError,
    KafkaException,
    TopicPartition,
    headers_of,
    make_consumer,
    why_unreadable,
)
from outbox_queue.clients import common_settings, consumer_settings
from outbox_queue.config import QueueConfig
from outbox_queue.errors import QueueTopicError
from outbox_queue.headers import Header

_PATIENCE_SECONDS = 30.0
_BATCH = 1000
_ABOUT_THE_TOPIC = frozenset(
    {
        KafkaError.UNKNOWN_TOPIC_OR_PART,
        KafkaError._UNKNOWN_TOPIC,  # noqa: SLF001
        KafkaError._UNKNOWN_PARTITION,  # noqa: SLF001
        KafkaError.TOPIC_AUTHORIZATION_FAILED,
    }
)


class TopicRecord(NamedTuple):
    """A record that was read.

    Attributes:
        partition: where it is.
        offset: where it is.
        timestamp: what kind it is of, and milliseconds since 1970.
        key: of the record.
        value: of the record.
        headers: of the record; `UnreadableHeaders` if the client cannot decode them.
    """

    partition: int
    offset: int
    timestamp: tuple[int, int]
    key: bytes | None
    value: bytes | None
    headers: list[Header]


def read_to_end(config: QueueConfig, topic: str, begin: Mapping[int, int] | None = None) -> Iterator[TopicRecord]:
    """Every committed record up to the ends that the partitions have now.

    Args:
        config: of the queues.
        topic: its name.
        begin: where to begin, by partition; the beginning, for those it does not name.

    Raises:
        QueueTopicError: if there is no such topic, or it may not be read.
        KafkaUnavailable: if the cluster does not answer, or an open transaction does not end, for half a minute.
    """
    extra = {"enable.partition.eof": True, "fetch.wait.max.ms": 50}
    consumer = make_consumer(consumer_settings(config, f"kafka-mq-reader-{uuid.uuid4()}", extra))
    try:
        ends = partition_ends(config, topic)
        starts = [TopicPartition(topic, number, (begin or {}).get(number, OFFSET_BEGINNING)) for number in ends]
        consumer.assign(starts)
        yield from _read(consumer, topic, ends)
    except KafkaException as error:
        cause: KafkaError = error.args[0]
        if cause.code() in _ABOUT_THE_TOPIC:
            why = why_unreadable(cause, config.kafka, topic)
            raise QueueTopicError(f"topic {topic!r} cannot be read: {why}") from None
        raise _unavailable(config, cause) from None
    finally:
        consumer.close()


def partition_ends(config: QueueConfig, topic: str) -> dict[int, int]:
    """The end of each partition, open transactions included: a read_committed client would be told where they begin.

    Raises:
        QueueTopicError: if there is no such topic.
        KafkaUnavailable: if the cluster does not answer.
    """
    settings = {**common_settings(config), "group.id": f"kafka-mq-reader-{uuid.uuid4()}"}
    consumer = make_consumer({**settings, "isolation.level": "read_uncommitted"})
    try:
        found = consumer.list_topics(timeout=_PATIENCE_SECONDS).topics.get(topic)
        if found is None or found.error is not None:
            raise QueueTopicError(f"there is no topic {topic!r}")
        ends = {}
        for number in sorted(found.partitions):
            marks = consumer.get_watermark_offsets(TopicPartition(topic, number), timeout=_PATIENCE_SECONDS)
            ends[number] = marks[1]
    except KafkaException as error:
        raise _unavailable(config, error.args[0]) from None
    else:
        return ends
    finally:
        consumer.close()


def _read(consumer: Consumer, topic: str, ends: Mapping[int, int]) -> Iterator[TopicRecord]:
    unread = {number for number, end in ends.items() if end > 0}
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while unread:
        found: list[Any] = consumer.consume(_BATCH, 0.1)
        for message in found:
            number, offset = message.partition(), message.offset()
            error = message.error()
            if error is not None and error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED:
                continue  # no group is joined: the client looks for its coordinator all the same, now and then
            if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001  a public constant
                raise KafkaException(error)
            deadline = time.monotonic() + _PATIENCE_SECONDS
            if error is None and offset < ends[number]:
                yield _record(message)
            # A partition may end with what no reader sees, such as the end of a transaction.
            if offset + (error is None) >= ends[number]:
                unread.discard(number)
        if time.monotonic() > deadline:
            raise KafkaUnavailable(f"topic {topic!r}: the ends of partitions {sorted(unread)} cannot be read")


def _record(message: Any) -> TopicRecord:
    return TopicRecord(
        message.partition(),
        message.offset(),
        message.timestamp(),
        message.key(),
        message.value(),
        headers_of(message),
    )


def _unavailable(config: QueueConfig, error: KafkaError) -> KafkaUnavailable:
    return KafkaUnavailable(f"cannot reach Kafka at bootstrap_servers={config.bootstrap_servers}: {error.str()}")
