"""Waiting and unfinished messages, read from the topics: for commands that look at queues from outside.

No group is joined. A message waits if it is behind the offset that its queue's group has committed; it is in progress
by the markers behind the offset that the trackers' group has committed.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Generator, Iterator
from typing import NamedTuple

from outbox_core.kafka.clients import KafkaException, TopicPartition, make_admin, make_consumer
from outbox_core.kafka.errors import grant
from outbox_queue.config import QueueConfig
from outbox_queue.dead_letters.store import DeadLetters
from outbox_queue.errors import QueueError
from outbox_queue.operations.topic_reader import partition_ends, read_to_end
from outbox_queue.protocol import headers as message_headers
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol.clients import TRACKER_GROUP, common_settings, consumer_settings, group_of
from outbox_queue.protocol.headers import place_text, queue_name
from outbox_queue.redelivery.in_progress import Unfinished
from outbox_queue.redelivery.partition import MarkerPartition

_PATIENCE_SECONDS = 30.0
_GROUP_PREFIX = group_of("")


class QueueStats(NamedTuple):
    """Numbers of one queue."""

    queue: str
    waiting: int  # messages that no consumer has taken yet
    in_progress: int  # messages that are worked on, delayed, or whose consumer died
    oldest_unfinished_seconds: float | None  # age of the oldest of these; None if there are none
    dead_letters: int


class Glance(NamedTuple):
    """One message, waiting or in progress."""

    queue: str
    place: str  # of this copy in the message topic, `partition-offset`
    id: str  # place of its first copy
    attempt: int  # number of the attempt that it waits for, or that is being made; 0 for a delayed one
    enqueued_at_ms: int | None  # when its first copy was sent, if that is known
    headers: tuple[message_headers.Header, ...]  # the user's
    payload: bytes


def queue_stats(config: QueueConfig, queue: str | None = None) -> list[QueueStats]:
    """Count the messages of one queue, or of every queue with a group or messages on these topics."""
    now_ms = time.time() * 1000  # an age that people read; no decision goes by it
    queues = [queue] if queue is not None else _queues_with_groups(config)
    found = ((name, _committed(config, group_of(name), config.message_topic)) for name in queues)
    committed = {name: offsets for name, offsets in found if offsets}  # other groups are at work on other topics
    waiting: Counter[str] = Counter()
    for message in read_to_end(config, config.message_topic, {} if queue is None else committed.get(queue, {})):
        name = queue_name(message.key or b"")
        if queue is not None and name != queue:
            continue
        if name not in committed:
            # Lists of groups leave out those that we may not see; asked for by name, such a one is an error.
            committed[name] = _committed(config, group_of(name), config.message_topic)
        if message.offset >= committed.get(name, {}).get(message.partition, 0):
            waiting[name] += 1
    unfinished: Counter[str] = Counter()
    oldest: dict[str, float] = {}
    for entry in _unfinished(config):
        name = queue_name(entry.queue)
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
    """Yield messages that no consumer has taken yet, by partition and offset; delayed ones are among them."""
    committed = _committed(config, group_of(queue), config.message_topic)
    for message in read_to_end(config, config.message_topic, committed):
        if message.key != queue.encode():
            continue
        travelled = message_headers.read(message.headers)
        place = (message.partition, message.offset)
        yield Glance(
            queue=queue,
            place=place_text(place),
            id=place_text(travelled.origin or place),
            attempt=travelled.attempt,
            enqueued_at_ms=travelled.enqueued_at_ms or message.timestamp[1],
            headers=travelled.headers,
            payload=message.value or b"",
        )


def messages_in_progress(config: QueueConfig, queue: str) -> Generator[Glance, None, None]:
    """Yield messages that are worked on, delayed, or left by a consumer that died."""
    for entry in _unfinished(config):
        if entry.queue != queue.encode():
            continue
        marker = wire.Marker.FromString(entry.start[1])
        yield Glance(
            queue=queue,
            place=place_text(entry.message_id),
            id=place_text(wire.origin_of(marker) or entry.message_id),
            attempt=wire.attempt_of(marker) if entry.attempt is None else entry.attempt,
            enqueued_at_ms=marker.enqueued_at_ms or None,
            headers=tuple(wire.headers_of(marker)),
            payload=marker.value,
        )


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
    consumer = make_consumer(consumer_settings(config, group))
    try:
        asked = [TopicPartition(topic, number) for number in partition_ends(config, topic)]
        found = consumer.committed(asked, timeout=_PATIENCE_SECONDS)
    except KafkaException as error:
        # The client is silent about a group that it may not see.
        hint = f"; if it may not be seen: {grant('DESCRIBE', config.kafka, f'group {group!r}')}"
        raise QueueError(f"cannot read the offsets of group {group!r}: {error.args[0].str()}{hint}") from None
    finally:
        consumer.close()
    for partition in found:
        if partition.error is not None:  # its offset looks like that of a group which has not begun
            raise QueueError(f"cannot read the offsets of group {group!r}: {partition.error.str()}")
    return {partition.partition: partition.offset for partition in found if partition.offset >= 0}


def _queues_with_groups(config: QueueConfig) -> list[str]:
    admin = make_admin(common_settings(config))  # kept in a name: the client drops its requests with the last reference
    try:
        listed = admin.list_consumer_groups(request_timeout=_PATIENCE_SECONDS).result(_PATIENCE_SECONDS)
    except (KafkaException, TimeoutError) as error:
        reason = error.args[0].str() if isinstance(error, KafkaException) else "no answer"
        servers = config.bootstrap_servers
        raise QueueError(f"cannot list the consumer groups at bootstrap.servers={servers}: {reason}") from None
    if listed.errors:  # of a broker: its groups would look as if they did not exist
        raise QueueError(f"cannot list all consumer groups: {listed.errors[0].args[0].str()}")
    groups = {group.group_id for group in listed.valid} - {TRACKER_GROUP}
    return sorted(group.removeprefix(_GROUP_PREFIX) for group in groups if group.startswith(_GROUP_PREFIX))
