"""Writing start markers and committing the offsets of their messages: together, or one after the other.

After `write` has returned, the markers are in Kafka and the offsets are committed. If it raises, either may have
happened; the caller starts the messages again, and trackers take a second start marker for a keep-alive. An offset is
never committed without its marker: no tracker would know of the message if this process died.

`PlainStartWriter` commits only after every marker is acknowledged; if the process dies in between, the tracker
redelivers a message *and* another consumer reads it. `TransactionalStartWriter` avoids that by one transaction.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.clients import (
    Consumer,
    KafkaError,
    KafkaException,
    Producer,
    TopicPartition,
    discard,
    make_producer,
)
from outbox_core.kafka.transactions import TransactionalProducer
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.consuming.marker_writer import MarkerRecord
from outbox_queue.protocol import transaction
from outbox_queue.protocol.clients import (
    PARTITIONER,
    UNTIL_FLUSH_MS,
    group_of,
    producer_settings,
    transactional_settings,
)
from outbox_queue.protocol.transaction import Failure

_SLICE_SECONDS = 0.2
_LEAST_PATIENCE_MS = 1000

SecondsLeft = Callable[[], float]  # of a step; it shrinks when the consumer is being closed


class NotStarted(Exception):
    """Messages were not started, or are not known to be; `cause` is Kafka's error, if there was one."""

    def __init__(self, reason: str, cause: KafkaError | None = None) -> None:
        super().__init__(reason)
        self.cause = cause


class StartWriter(Protocol):
    """A way of starting messages.

    Attributes:
        is_in_doubt: messages that were not started may be committed: after `settle` the group's offsets tell.
    """

    is_in_doubt: bool

    def write(self, markers: Sequence[MarkerRecord], offsets: Mapping[int, int], seconds_left: SecondsLeft) -> None:
        """Write start markers and commit offsets; raise `NotStarted` if that is not known to have happened."""

    def settle(self, seconds_left: SecondsLeft) -> None:
        """End what is in doubt, so that it has happened, or never will; raise `NotStarted` if it cannot."""

    def close(self) -> None:
        """Discard the producer."""


class PlainStartWriter:
    """Markers first, then the offsets of a consumer, on the consumer's thread."""

    is_in_doubt = False  # markers that are written again do no harm

    def __init__(self, config: QueueConfig, consumer: Consumer) -> None:
        self._config = config
        self._consumer = consumer
        self._producer: Producer | None = self._make()

    def close(self) -> None:
        """See `StartWriter`."""
        producer, self._producer = self._producer, None
        if producer is not None:
            discard(producer)

    def _make(self) -> Producer:
        config = self._config
        # If some of a batch's markers cannot be written, the others are written again before these messages expire.
        patience = min(config.delivery_timeout, config.redelivery_timeout / 2)
        settings = producer_settings(config, linger_ms=UNTIL_FLUSH_MS) | {
            "delivery.timeout.ms": max(_LEAST_PATIENCE_MS, milliseconds(patience))
        }
        return make_producer({**settings, **PARTITIONER})

    def settle(self, seconds_left: SecondsLeft) -> None:
        """See `StartWriter`."""

    def write(self, markers: Sequence[MarkerRecord], offsets: Mapping[int, int], seconds_left: SecondsLeft) -> None:
        """See `StartWriter`."""
        errors: list[KafkaError] = []  # of these markers: reports of an earlier `write` that come late do not count

        def note(error: KafkaError | None, _: object) -> None:
            if error is not None:
                errors.append(error)

        producer = self._ready()
        try:
            self._produce(producer, markers, note)
            _flush(producer, errors, seconds_left)
        except KafkaException as error:
            # The old one would give the next markers the sequence numbers of these: a broker that has got these after
            # all would take the next for repeats, and acknowledge without writing (`outbox_core.kafka.transactions`).
            self.close()
            raise NotStarted(error.args[0].str(), error.args[0]) from None
        try:
            commit(self._config, self._consumer, offsets)
        except KafkaException as error:
            raise NotStarted(error.args[0].str(), error.args[0]) from None

    def _ready(self) -> Producer:
        if self._producer is None:
            try:
                self._producer = self._make()
            except KafkaUnavailable as error:
                raise NotStarted(str(error)) from None
        return self._producer

    def _produce(
        self, producer: Producer, markers: Sequence[MarkerRecord], note: Callable[[KafkaError | None, object], None]
    ) -> None:
        topic, produce = self._config.marker_topic, producer.produce
        for partition, key, value in markers:
            while True:
                try:
                    produce(topic, value, key, partition, note)
                except BufferError:
                    producer.poll(_SLICE_SECONDS)
                else:
                    break


def _flush(producer: Producer, errors: list[KafkaError], seconds_left: SecondsLeft) -> None:
    while producer.flush(min(_SLICE_SECONDS, max(0.0, seconds_left()))):
        if errors or seconds_left() <= 0:
            producer.purge()
            if producer.flush(_SLICE_SECONDS) and not errors:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))  # noqa: SLF001  a public constant
            break
    if errors:
        raise KafkaException(errors[0])


class TransactionalStartWriter:
    """Markers and offsets of a consumer in one transaction, on the consumer's thread.

    After a transaction whose outcome is unknown, or whose end may have been sent twice, a new producer of the same
    `transactional.id` finishes it first. The id is this process's alone: the group's generation fences zombies.
    """

    def __init__(self, config: QueueConfig, queue: str, consumer: Consumer) -> None:
        self._config = config
        self._consumer = consumer
        # Begins like the group, so that an ACL on a prefix covers both.
        self._settings = transactional_settings(config, f"{group_of(queue)}-{uuid.uuid4()}") | PARTITIONER
        # Made at once, so that contradicting settings raise where the consumer is made.
        self._producer: TransactionalProducer | None = transaction.transactional_producer(self._settings)
        self._is_ready = False
        self.is_in_doubt = False

    def close(self) -> None:
        """See `StartWriter`."""
        producer, self._producer, self._is_ready = self._producer, None, False
        if producer is not None:
            producer.discard()

    def settle(self, seconds_left: SecondsLeft) -> None:
        """See `StartWriter`."""
        _, failure = self._ready(seconds_left)
        if failure is not None:
            raise self._not_started(failure)

    def write(self, markers: Sequence[MarkerRecord], offsets: Mapping[int, int], seconds_left: SecondsLeft) -> None:
        """See `StartWriter`."""

        def give_up() -> bool:
            return seconds_left() <= 0

        def fill() -> None:
            topic = self._config.marker_topic
            for marker in markers:
                if not producer.produce(topic, marker.value, marker.key, marker.partition, give_up=give_up):
                    raise KafkaException(KafkaError(KafkaError._QUEUE_FULL))  # noqa: SLF001  a public constant
            group = self._consumer.consumer_group_metadata()
            producer.send_offsets(positions(self._config, offsets), group, max(0.0, seconds_left()))

        producer, failure = self._ready(seconds_left)
        if failure is None:
            failure = transaction.run(producer, fill, give_up)
        if failure is not None:
            raise self._not_started(failure)

    def _not_started(self, failure: Failure) -> NotStarted:
        if failure.is_over:
            self.close()
            self.is_in_doubt = True
        return NotStarted(failure.reason, failure.error)

    def _ready(self, seconds_left: SecondsLeft) -> tuple[TransactionalProducer, Failure | None]:
        """Return a producer whose next transaction no late end of another can meet, or the reason why there is none.

        Raises NotStarted if none can be made.
        """
        if self._producer is not None and self._producer.must_replace:
            self.close()
        try:
            producer = self._producer = self._producer or transaction.transactional_producer(self._settings)
        except KafkaUnavailable as error:
            raise NotStarted(str(error)) from None
        failure = None if self._is_ready else transaction.start(producer, max(0.0, seconds_left()))
        self._is_ready = failure is None
        return producer, failure


def positions(config: QueueConfig, offsets: Mapping[int, int]) -> list[TopicPartition]:
    """Convert offsets of the message topic for the client."""
    return [TopicPartition(config.message_topic, partition, offset) for partition, offset in offsets.items()]


def commit(config: QueueConfig, consumer: Consumer, offsets: Mapping[int, int]) -> None:
    """Commit offsets, and wait for the answer; raise KafkaException if any is not committed."""
    for partition in consumer.commit(offsets=positions(config, offsets), asynchronous=False) or ():
        if partition.error is not None:
            raise KafkaException(partition.error)


def deadline(seconds: float) -> SecondsLeft:
    """Start a countdown."""
    end = time.monotonic() + seconds
    return lambda: end - time.monotonic()
