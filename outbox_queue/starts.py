"""Writing start markers and committing the offsets of their messages: together, or one after the other.

Either way, after `write` has returned the markers are in Kafka and the offsets are committed. If it raises, either of
them may have happened. The caller then reads the messages again from where it was, and starts them again. A tracker
takes a second start marker of a message for a keep-alive. What must never happen is an offset that is committed
although its marker is missing: then nobody would know of the message if this process died.

`PlainStarts` therefore commits only after every marker is acknowledged. `TransactionalStarts` does both in a
transaction, so that a marker without its commit is never seen: without it, a message whose offset was not committed
before the process died is redelivered by the tracker *and* read again by another consumer.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from outbox_core.kafka import Consumer, KafkaError, KafkaException, Producer, TopicPartition, discard, make_producer
from outbox_queue.clients import group_of, producer_settings, transactional_settings
from outbox_queue.config import QueueConfig
from outbox_queue.markers import PARTITIONER, MarkerRecord

_SLICE_SECONDS = 0.2

_log = logging.getLogger(__name__)

SecondsLeft = Callable[[], float]
"""How much longer a step may take: less once the consumer is being closed."""


class NotStarted(Exception):
    """Messages were not started, or it is not known that they were.

    Attributes:
        cause: what Kafka has said, if it has said anything.
    """

    def __init__(self, reason: str, cause: KafkaError | None = None) -> None:
        super().__init__(reason)
        self.cause = cause


class Starts(Protocol):
    """Starts messages."""

    def write(self, markers: Sequence[MarkerRecord], offsets: Mapping[int, int], seconds_left: SecondsLeft) -> None:
        """Write start markers and commit offsets.

        Args:
            markers: one for each message.
            offsets: the next offset to read, by partition of the message topic.
            seconds_left: asked again and again while waiting.

        Raises:
            NotStarted: if it did not happen, or is not known to have happened.
        """

    def close(self) -> None:
        """Throw the producer away; nothing is started any more."""


class PlainStarts:
    """Markers first, then offsets.

    Args:
        config: of the queue.
        consumer: the one whose offsets are committed; used by the same thread.
    """

    def __init__(self, config: QueueConfig, consumer: Consumer) -> None:
        self._config = config
        self._consumer = consumer
        self._errors: list[KafkaError] = []
        self._producer = self._make()

    def close(self) -> None:
        """See `Starts`."""
        discard(self._producer)

    def _make(self) -> Producer:
        return make_producer({**producer_settings(self._config, linger_ms=0), **PARTITIONER})

    def write(self, markers: Sequence[MarkerRecord], offsets: Mapping[int, int], seconds_left: SecondsLeft) -> None:
        """See `Starts`."""
        self._errors.clear()
        try:
            for marker in markers:
                self._produce(marker)
            self._flush(seconds_left)
            commit(self._config, self._consumer, offsets)
        except KafkaException as error:
            if error.args[0].fatal():
                discard(self._producer)
                self._producer = self._make()
            raise NotStarted(error.args[0].str(), error.args[0]) from None

    def _produce(self, marker: MarkerRecord) -> None:
        topic = self._config.marker_topic
        while True:
            try:
                self._producer.produce(topic, marker.value, marker.key, marker.partition, on_delivery=self._report)
            except BufferError:
                self._producer.poll(_SLICE_SECONDS)
            else:
                return

    def _flush(self, seconds_left: SecondsLeft) -> None:
        while self._producer.flush(min(_SLICE_SECONDS, max(0.0, seconds_left()))):
            if self._errors or seconds_left() <= 0:
                self._producer.purge()
                self._producer.flush(_SLICE_SECONDS)
                break
        if self._errors:
            raise KafkaException(self._errors[0])

    def _report(self, error: KafkaError | None, _: object) -> None:
        if error is not None:
            self._errors.append(error)


class TransactionalStarts:
    """Markers and offsets in one transaction.

    A transaction whose outcome is unknown is settled by a new producer of the same `transactional.id` before anything
    is read again.

    Args:
        config: of the queue.
        queue: the queue's id.
        consumer: the one whose offsets are committed; used by the same thread.
    """

    def __init__(self, config: QueueConfig, queue: str, consumer: Consumer) -> None:
        self._config = config
        self._consumer = consumer
        # Begins like the group, so that an ACL on a prefix covers both. Zombies are fenced by the group's generation.
        self._settings = transactional_settings(config, f"{group_of(queue)}-{uuid.uuid4()}") | PARTITIONER
        # Made at once: settings that do not go together are told where the consumer is made.
        self._fresh: Producer | None = make_producer(self._settings)
        self._producer: Producer | None = None

    def close(self) -> None:
        """See `Starts`."""
        producer, self._producer, self._fresh = self._producer, None, None
        if producer is not None:
            discard(producer)

    def write(self, markers: Sequence[MarkerRecord], offsets: Mapping[int, int], seconds_left: SecondsLeft) -> None:
        """See `Starts`."""
        try:
            producer = self._ready(seconds_left)
            producer.begin_transaction()
            self._fill(producer, markers, offsets, seconds_left)
            producer.commit_transaction(max(0.0, seconds_left()))
        except (KafkaException, BufferError) as error:
            self._give_up(seconds_left)
            if isinstance(error, KafkaException):
                raise NotStarted(error.args[0].str(), error.args[0]) from None
            raise NotStarted(str(error)) from None

    def _ready(self, seconds_left: SecondsLeft) -> Producer:
        if self._producer is None:
            fresh, self._fresh = self._fresh, None
            producer = make_producer(self._settings) if fresh is None else fresh
            producer.init_transactions(max(0.0, seconds_left()))
            self._producer = producer
        return self._producer

    def _fill(
        self,
        producer: Producer,
        markers: Sequence[MarkerRecord],
        offsets: Mapping[int, int],
        seconds_left: SecondsLeft,
    ) -> None:
        topic = self._config.marker_topic
        for marker in markers:
            producer.produce(topic, marker.value, marker.key, marker.partition)
        producer.send_offsets_to_transaction(
            positions(self._config, offsets), self._consumer.consumer_group_metadata(), max(0.0, seconds_left())
        )

    def _give_up(self, seconds_left: SecondsLeft) -> None:
        """Abort; if that does not succeed, or the outcome is unknown, a new producer settles it."""
        producer, self._producer = self._producer, None
        if producer is None:
            return
        try:
            producer.abort_transaction(max(0.0, seconds_left()))
        except KafkaException as error:
            _log.debug("a transaction is left to the next producer: %s", error.args[0].str())
            discard(producer)
        else:
            self._producer = producer


def positions(config: QueueConfig, offsets: Mapping[int, int]) -> list[TopicPartition]:
    """Offsets of the message topic as the client wants them."""
    return [TopicPartition(config.message_topic, partition, offset) for partition, offset in offsets.items()]


def commit(config: QueueConfig, consumer: Consumer, offsets: Mapping[int, int]) -> None:
    """Commit offsets, and wait for it.

    Raises:
        KafkaException: if any was not.
    """
    for partition in consumer.commit(offsets=positions(config, offsets), asynchronous=False) or ():
        if partition.error is not None:
            raise KafkaException(partition.error)


def deadline(seconds: float) -> SecondsLeft:
    """A countdown from now."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()
