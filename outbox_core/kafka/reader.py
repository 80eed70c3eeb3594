"""Readers of partitions from given offsets up to given ends, outside of any consumer group.

The ends come from the caller: the offset of its own acknowledged message, or `partition_ends`. A partition is finished
when its last wanted offset was seen, or the client reports an end at or behind the wanted one. An earlier reported end
proves nothing: a broker that was cut off does not know the rest, and an open transaction hides it. Offsets have holes
(transaction markers, aborted and compacted records), so the reader waits for no single one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.clients import (
    Consumer,
    KafkaConfig,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    make_consumer,
)
from outbox_core.kafka.errors import CONSUMER_RECOVERS, NO_SUCH_PARTITION

Place = tuple[str, int]
"""A topic, and the number of a partition."""

_POLL_SECONDS = 0.1


def reader_settings(kafka: KafkaConfig, group: str) -> dict[str, Any]:
    """Return librdkafka settings of a read_committed consumer that is assigned partitions and reads to their ends."""
    return {
        **{name: value for name, value in kafka.items() if name != "group.instance.id"},
        "group.id": group,  # the client requires one; it joins no group and commits nothing
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "isolation.level": "read_committed",
        # Where the first records are gone (DeleteRecords), what is left is all there is.
        "auto.offset.reset": "earliest",
        "fetch.wait.max.ms": 10,  # at the end of the topic nothing more comes: do not wait for it
        "allow.auto.create.topics": False,
    }


def partition_ends(
    settings: KafkaConfig,
    topics: Iterable[str],
    *,
    timeout_seconds: float,
    on_denied: Callable[[KafkaError, str], None] | None = None,
) -> dict[Place, int]:
    """Return the end of each partition, behind open transactions, or raise KafkaException for an unreadable topic.

    With `on_denied`, topics that we may not see are told to it, and left out.
    """
    # A read_committed client is told where the first open transaction begins.
    consumer = make_consumer({**settings, "isolation.level": "read_uncommitted", "allow.auto.create.topics": False})
    try:
        ends = {}
        for topic in topics:
            found = consumer.list_topics(topic, timeout=timeout_seconds).topics[topic]
            if found.error is not None and found.error.code() not in NO_SUCH_PARTITION:
                if on_denied is None or found.error.code() != KafkaError.TOPIC_AUTHORIZATION_FAILED:
                    raise KafkaException(found.error)
                on_denied(found.error, topic)
            for partition in sorted(found.partitions):
                ends[topic, partition] = _end(consumer, TopicPartition(topic, partition), timeout_seconds)
        return ends
    finally:
        consumer.close()


def _end(consumer: Consumer, at: TopicPartition, timeout_seconds: float) -> int:
    """Ask for a partition's end, again while its leader changes: a new topic has none for a moment."""
    give_up_at = time.monotonic() + timeout_seconds
    while True:
        try:
            _, end = consumer.get_watermark_offsets(at, timeout_seconds, cached=False)
        except KafkaException as error:
            cause: KafkaError = error.args[0]
            if cause.code() not in CONSUMER_RECOVERS or time.monotonic() > give_up_at:
                raise
            time.sleep(_POLL_SECONDS)
        else:
            return int(end)


class PartitionReader:
    """The records of partitions before given ends, as an iterable of lists. Used by one thread."""

    def __init__(
        self,
        consumer: Consumer,  # made with `enable.partition.eof`; the caller closes it
        starts: Iterable[TopicPartition],
        ends: Mapping[Place, int],  # the offset behind the last wanted one
        *,
        on_error: Callable[[KafkaError, str], None],  # gets a topic; raises, or returns to read on
        on_silence: Callable[[set[Place]], None] = lambda _: None,  # gets the unfinished partitions; raises
        silence_seconds: float = float("inf"),  # without a record; the caller's time for a list does not count
        give_up: Callable[[], None] = lambda: None,  # called now and then; raises to stop reading
        at_once: int = 1,  # the longest list; the client waits a moment for more than one
    ) -> None:
        self._consumer = consumer
        self._ends = ends
        self._on_error = on_error
        self._on_silence = on_silence
        self._silence = silence_seconds
        self._give_up = give_up
        self._at_once = at_once
        self._starts = [start for start in starts if max(0, start.offset) < ends[start.topic, start.partition]]
        # The most offsets that each unfinished partition may have left.
        self._left = {
            (start.topic, start.partition): ends[start.topic, start.partition] - max(0, start.offset)
            for start in self._starts
        }

    def skip(self, topic: str) -> None:
        """Read no more of a topic."""
        self._left = {place: left for place, left in self._left.items() if place[0] != topic}

    def __iter__(self) -> Iterator[list[Message]]:
        if self._left:
            self._consumer.assign(self._starts)
        heard_at = time.monotonic()
        while self._left:
            self._give_up()
            unfinished = len(self._left)
            # No more than can come: the client waits for as many as it was asked for.
            wanted = self._sift(self._consumer.consume(min(self._at_once, sum(self._left.values())), _POLL_SECONDS))
            if wanted:
                yield wanted
            if wanted or len(self._left) < unfinished:
                heard_at = time.monotonic()
            elif time.monotonic() - heard_at > self._silence:
                self._on_silence(set(self._left))

    def _sift(self, messages: Iterable[Message]) -> list[Message]:
        wanted = []
        for message in messages:
            place, error = (message.topic() or "", message.partition() or 0), message.error()
            if error is not None and error.code() != KafkaError._PARTITION_EOF:  # noqa: SLF001  a public constant
                self._on_error(error, place[0])
            elif place in self._left:
                offset = message.offset()
                if offset is None or offset < 0:
                    raise KafkaUnavailable(f"{place[0]}[{place[1]}]: the client does not tell a record's offset")
                if error is None and offset < self._ends[place]:
                    wanted.append(message)
                self._left[place] = self._ends[place] - offset - (error is None)
                if self._left[place] <= 0:
                    del self._left[place]
        return wanted
