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
from outbox_queue.transaction import Failure, Transaction

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

    A transaction whose outcome is unknown, or whose end may have been sent twice, is settled by a new producer of the
    same `transactional.id` before anything is read again. Nobody else has that id: zombies are fenced by the group's
    generation.

    Args:
        config: of the queue.
        queue: the queue's id.
        consumer: the one whose offsets are committed; used by the same thread.
    """

    def __init__(self, config: QueueConfig, queue: str, consumer: Consumer) -> None:
        self._config = config
        self._consumer = consumer
        # Begins like the group, so that an ACL on a prefix covers both.
        self._settings = transactional_settings(config, f"{group_of(queue)}-{uuid.uuid4()}") | PARTITIONER
        # Made at once: settings that do not go together are told where the consumer is made.
        self._transaction: Transaction | None = Transaction(self._settings)
        self._is_ready = False

    def close(self) -> None:
        """See `Starts`."""
        transaction, self._transaction, self._is_ready = self._transaction, None, False
        if transaction is not None:
            transaction.discard()

    def write(self, markers: Sequence[MarkerRecord], offsets: Mapping[int, int], seconds_left: SecondsLeft) -> None:
        """See `Starts`."""

        def give_up() -> bool:
            return seconds_left() <= 0

        def fill() -> None:
            topic = self._config.marker_topic
            for marker in markers:
                if not transaction.produce(topic, marker.value, marker.key, marker.partition, give_up=give_up):
                    raise KafkaException(KafkaError(KafkaError._QUEUE_FULL))  # noqa: SLF001  a public constant
            group = self._consumer.consumer_group_metadata()
            transaction.send_offsets(positions(self._config, offsets), group, max(0.0, seconds_left()))

        transaction, failure = self._ready(seconds_left)
        if failure is None:
            failure = transaction.run(fill, give_up)
        if failure is None:
            return
        if failure.is_over:
            self.close()
        raise NotStarted(failure.reason, failure.error)

    def _ready(self, seconds_left: SecondsLeft) -> tuple[Transaction, Failure | None]:
        """A transaction in which no late end of another can arrive, or why it cannot be begun."""
        if self._transaction is not None and self._transaction.must_replace:
            self.close()
        transaction = self._transaction = self._transaction or Transaction(self._settings)
        failure = None if self._is_ready else transaction.start(max(0.0, seconds_left()))
        self._is_ready = failure is None
        return transaction, failure


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
