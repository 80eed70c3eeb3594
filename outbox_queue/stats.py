"""What waits and what is in progress, as the topics tell: for commands that look at queues from outside.

Nothing is kept between two looks, and no group is joined. A message waits from where its queue's group has committed;
it is in progress if the markers from where the trackers' group has committed say so.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator, Mapping
from typing import NamedTuple

from outbox_core.kafka import KafkaException, TopicPartition, make_admin, make_consumer
from outbox_queue import headers as message_headers
from outbox_queue import wire
from outbox_queue.clients import TRACKER_GROUP, common_settings, consumer_settings, group_of
from outbox_queue.config import QueueConfig
from outbox_queue.dead_letters import DeadLetters
from outbox_queue.errors import QueueError
from outbox_queue.in_progress import Unfinished
from outbox_queue.marker_partition import MarkerPartition
from outbox_queue.topic_reader import TopicRecord, partition_ends, read_to_end

_PATIENCE_SECONDS = 30.0
_GROUP_PREFIX = group_of("")
_FIRST_ATTEMPT = 1


class QueueStats(NamedTuple):
    """One queue.

    Attributes:
        queue: its id.
        waiting: messages that no consumer has taken yet.
        in_progress: messages that are worked on, delayed, or whose consumer died.
        oldest_unfinished_seconds: age of the first of these; None if there are none.
        dead_letters: messages that were set aside.
    """

    queue: str
    waiting: int
    in_progress: int
    oldest_unfinished_seconds: float | None
    dead_letters: int


class Glance(NamedTuple):
    """One message, waiting or in progress.

    Attributes:
        queue: id of its queue.
        place: of this copy in the message topic, `partition-offset`.
        id: place of its first copy.
        attempt: the number of the attempt that it waits for, or that is being made; 0 for a delayed one.
        enqueued_at_ms: when its first copy was sent, if that is known.
        headers: the user's.
        payload: what was sent.
    """

    queue: str
    place: str
    id: str
    attempt: int
    enqueued_at_ms: int | None
    headers: tuple[message_headers.Header, ...]
    payload: bytes


def queue_stats(config: QueueConfig, queue: str | None = None) -> list[QueueStats]:
    """Every queue that has a group at work on these topics, or anything in them; or just one.

    All queues are counted from the beginning of the topic, so it is read whole; one, from where its group is.

    Raises:
        QueueTopicError: if a topic is missing.
        KafkaUnavailable: if the cluster does not answer.
    """
    now_ms = time.time() * 1000  # an age that people read; no decision goes by it
    committed = _committed_of(config, [queue] if queue is not None else _queues_with_groups(config))
    begin = {} if queue is None else committed.get(queue, {})
    waiting = _count_waiting(config, committed, begin)
    unfinished: Counter[str] = Counter()
    oldest: dict[str, float] = {}
    for entry in _unfinished(config):
        name = _text(entry.queue)
        unfinished[name] += 1
        oldest[name] = min(entry.started, oldest.get(name, entry.started))
    dead = Counter(letter.queue for letter in DeadLetters(config).all())
    names = [queue] if queue is not None else sorted({*committed, *waiting, *unfinished, *dead})
    return [
        QueueStats(
            queue=name,
            waiting=waiting[name],
            in_progress=unfinished[name],
            oldest_unfinished_seconds=max(0.0, now_ms - oldest[name]) / 1000 if name in oldest else None,
            dead_letters=dead[name],
        )
        for name in names
    ]


def waiting_messages(config: QueueConfig, queue: str) -> Generator[Glance, None, None]:
    """What no consumer has taken yet, in the order of partitions and offsets, a delayed message among others.

    Raises:
        QueueTopicError: if there is no message topic.
        KafkaUnavailable: if the cluster does not answer.
    """
    committed = _committed(config, group_of(queue), config.message_topic)
    for message in read_to_end(config, config.message_topic, committed):
        if message.key == queue.encode():
            yield _glance(message, queue)


def messages_in_progress(config: QueueConfig, queue: str) -> Generator[Glance, None, None]:
    """What is worked on, delayed, or was left by a consumer that died.

    Raises:
        QueueTopicError: if there is no marker topic.
        KafkaUnavailable: if the cluster does not answer.
    """
    for entry in _unfinished(config):
        if entry.queue != queue.encode():
            continue
        marker = wire.Marker.FromString(entry.start[1])
        place = message_headers.place_text(entry.message_id)
        attempt = marker.attempt if marker.HasField("attempt") else _FIRST_ATTEMPT
        users = ((one.name, one.value if one.HasField("value") else None) for one in marker.headers)
        yield Glance(
            queue=queue,
            place=place,
            id=message_headers.place_text((marker.origin.partition, marker.origin.offset))
            if marker.HasField("origin")
            else place,
            attempt=attempt if entry.attempt is None else entry.attempt,
            enqueued_at_ms=marker.enqueued_at_ms or None,
            headers=tuple(users),
            payload=marker.value,
        )


def _glance(message: TopicRecord, queue: str) -> Glance:
    travelled = message_headers.read(message.headers)
    place = message_headers.place_text((message.partition, message.offset))
    return Glance(
        queue=queue,
        place=place,
        id=message_headers.place_text(travelled.origin) if travelled.origin else place,
        attempt=travelled.attempt,
        enqueued_at_ms=travelled.enqueued_at_ms or message.timestamp[1],
        headers=travelled.headers,
        payload=message.value or b"",
    )


def _committed_of(config: QueueConfig, queues: list[str]) -> dict[str, dict[int, int]]:
    """Where the groups of queues are; without those that are at work on other topics."""
    found = ((name, _committed(config, group_of(name), config.message_topic)) for name in queues)
    return {name: offsets for name, offsets in found if offsets}


def _count_waiting(
    config: QueueConfig, committed: Mapping[str, Mapping[int, int]], begin: Mapping[int, int]
) -> Counter[str]:
    """Records of each queue from where its group has committed; of a queue without a group, all that are read."""
    waiting: Counter[str] = Counter()
    for message in read_to_end(config, config.message_topic, begin):
        name = _text(message.key or b"")
        if message.offset >= committed.get(name, {}).get(message.partition, 0):
            waiting[name] += 1
    return waiting


def _unfinished(config: QueueConfig) -> Iterator[Unfinished]:
    committed = _committed(config, TRACKER_GROUP, config.marker_topic)
    partitions: dict[int, MarkerPartition] = {}
    for marker in read_to_end(config, config.marker_topic, committed):
        partition = partitions.get(marker.partition)
        if partition is None:
            partition = partitions[marker.partition] = MarkerPartition(marker.partition, tick_interval=0)
        partition.read(marker.offset, marker.timestamp, marker.key, marker.value, now=0.0)
    for _, partition in sorted(partitions.items()):
        yield from partition.unfinished()


def _committed(config: QueueConfig, group: str, topic: str) -> dict[int, int]:
    """Where a group has got to, by partition; without the partitions where it has not begun."""
    consumer = make_consumer(consumer_settings(config, group))
    try:
        asked = [TopicPartition(topic, number) for number in partition_ends(config, topic)]
        found = consumer.committed(asked, timeout=_PATIENCE_SECONDS)
    except KafkaException as error:
        raise QueueError(f"cannot ask how far group {group!r} is: {error.args[0].str()}") from None
    finally:
        consumer.close()
    return {partition.partition: partition.offset for partition in found if partition.offset >= 0}


def _queues_with_groups(config: QueueConfig) -> list[str]:
    admin = make_admin(common_settings(config))  # kept: a client that nobody holds gives up what it was asked
    try:
        listed = admin.list_consumer_groups(request_timeout=_PATIENCE_SECONDS).result(_PATIENCE_SECONDS)
    except (KafkaException, TimeoutError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else "no answer"
        raise QueueError(f"cannot list the consumer groups: {reason}") from None
    groups = (group.group_id for group in listed.valid)
    names = (group.removeprefix(_GROUP_PREFIX) for group in groups if group.startswith(_GROUP_PREFIX))
    own = TRACKER_GROUP.removeprefix(_GROUP_PREFIX)
    return sorted(name for name in names if name != own)


def _text(queue: bytes) -> str:
    return bytes(queue).decode(errors="replace")
