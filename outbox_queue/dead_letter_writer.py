"""Setting messages aside from a consumer: the dead letter first, then the end marker.

The consumer writes the end marker only after this has returned. If the process dies in between, the message is
redelivered, and rejected once more: a dead letter may come twice, and is never missing.

What another producer has sent may be too large even for the dead letter topic. Its letter is written without payload
and headers where that is asked for, so that it does not hold up what follows it: it tells the place in the message
topic.
"""

from __future__ import annotations

import logging
import threading
from typing import TYPE_CHECKING, Any

from outbox_core.kafka import KafkaError, KafkaException, Producer, explained, make_producer
from outbox_queue import dead_letters
from outbox_queue.clients import producer_settings
from outbox_queue.config import QueueConfig
from outbox_queue.errors import SendFailed
from outbox_queue.headers import Header, place_text
from outbox_queue.markers import PARTITIONER
from outbox_queue.transaction import TOO_LARGE

if TYPE_CHECKING:
    from outbox_queue.message import Message

_LARGEST_RECORD = 1_000_000_000
_SLACK_SECONDS = 1.0

_log = logging.getLogger(__name__)


class DeadLetterWriter:
    """Writes dead letters, one at a time, from any thread; its producer is made with the first.

    Args:
        config: of the queue.
        queue: the queue's id.
    """

    def __init__(self, config: QueueConfig, queue: bytes) -> None:
        self._config = config
        self._queue = queue
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        self._is_closed = False

    def close(self) -> None:
        """Let go of the client: its threads and connections end, those of a letter under way when it is written."""
        self._is_closed = True
        self._producer = None

    def write(self, message: Message, reason: str, *, attempts: int, now_ms: int, may_be_empty: bool = False) -> None:
        """Write a dead letter, and wait until Kafka has it.

        Args:
            message: what is set aside.
            reason: why.
            attempts: how many were made.
            now_ms: since 1970.
            may_be_empty: write it without payload and headers if Kafka takes it for too large.

        Raises:
            SendFailed: if it cannot be written, or that is not known; from what Kafka says, if it has said anything.
        """
        about: dict[str, Any] = {
            "attempts": attempts,
            "enqueued_at_ms": message._enqueued_at_ms,
            "origin": message._origin,
            "dead_at_ms": now_ms,
        }
        letter = dead_letters.record(self._queue, message.payload, headers=message.headers, reason=reason, **about)
        with self._lock:
            error = self._deliver(letter)
            if error is not None and may_be_empty and error.code() in TOO_LARGE:
                reason = (
                    f"{reason}; its {len(message.payload)} bytes are too large for the dead letter topic, too, and are "
                    f"at {place_text(message._place)} in {self._config.message_topic}"
                )
                _log.error("queue %r: message %s: %s", message.queue, message.id, reason)
                error = self._deliver(dead_letters.record(self._queue, b"", headers=(), reason=reason, **about))
        if error is not None:
            raise self._failed(message, explained(error, self._config.kafka)) from KafkaException(error)

    def _deliver(self, letter: tuple[bytes, bytes, list[Header]]) -> KafkaError | None:
        """Write a letter, and wait; None if Kafka has it."""
        key, value, headers = letter
        errors: list[KafkaError] = []

        def report(error: KafkaError | None, _: object) -> None:
            if error is not None:
                errors.append(error)

        producer = self._ready()
        if self._is_closed:
            self._producer = None  # we may have kept it after `close` has let go
        try:
            producer.produce(self._config.dead_letters, value, key, headers=list(headers), on_delivery=report)
        except (KafkaException, BufferError) as error:
            errors.append(error.args[0] if isinstance(error, KafkaException) else _full())
        else:
            if producer.flush(self._config.delivery_timeout.total_seconds() + _SLACK_SECONDS) and not errors:
                errors.append(KafkaError(KafkaError._TIMED_OUT, "no acknowledgement in time"))
        if not errors:
            return None
        self._producer = None  # the next one does not wait behind it
        return errors[0]

    def _ready(self) -> Producer:
        producer = self._producer  # `close` does not wait for us
        if producer is None:
            settings = producer_settings(self._config, linger_ms=0)
            # What the message topic has taken is not refused by the client.
            producer = make_producer({**settings, **PARTITIONER, "message.max.bytes": _LARGEST_RECORD})
            self._producer = producer
        return producer

    def _failed(self, message: Message, reason: str) -> SendFailed:
        return SendFailed(
            f"message {message.id} of queue {message.queue!r} cannot be set aside in {self._config.dead_letters!r}: "
            f"{reason}; it is not settled",
            {reason: 1},
        )


def _full() -> KafkaError:
    return KafkaError(KafkaError._QUEUE_FULL)
