"""Setting messages aside from a consumer: the dead letter first, then the end marker.

The consumer writes the end marker only after this has returned. If the process dies in between, the message is
redelivered, and rejected once more: a dead letter may come twice, and is never missing.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from outbox_core.kafka import KafkaError, KafkaException, Producer, make_producer
from outbox_queue import dead_letters
from outbox_queue.clients import producer_settings
from outbox_queue.config import QueueConfig
from outbox_queue.errors import SendFailed
from outbox_queue.markers import PARTITIONER

if TYPE_CHECKING:
    from outbox_queue.message import Message

_LARGEST_RECORD = 1_000_000_000
_SLACK_SECONDS = 1.0


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

    def write(self, message: Message, reason: str, *, attempts: int, now_ms: int) -> None:
        """Write a dead letter, and wait until Kafka has it.

        Args:
            message: what is set aside.
            reason: why.
            attempts: how many were made.
            now_ms: since 1970.

        Raises:
            SendFailed: if it cannot be written, or that is not known.
        """
        key, value, headers = dead_letters.record(
            self._queue,
            message.payload,
            headers=message.headers,
            attempts=attempts,
            enqueued_at_ms=message._enqueued_at_ms,
            origin=message._origin,
            reason=reason,
            dead_at_ms=now_ms,
        )
        errors: list[KafkaError] = []

        def report(error: KafkaError | None, _: object) -> None:
            if error is not None:
                errors.append(error)

        with self._lock:
            producer = self._ready()
            try:
                producer.produce(self._config.dead_letters, value, key, headers=list(headers), on_delivery=report)
            except (KafkaException, BufferError) as error:
                self._producer = None
                raise self._failed(message, str(error)) from None
            left = producer.flush(self._config.delivery_timeout.total_seconds() + _SLACK_SECONDS)
            if left or errors:
                self._producer = None  # the next one does not wait behind it
                raise self._failed(message, errors[0].str() if errors else "no acknowledgement in time")

    def _ready(self) -> Producer:
        if self._producer is None:
            settings = producer_settings(self._config, linger_ms=0)
            # What the message topic has taken is not refused by the client.
            self._producer = make_producer({**settings, **PARTITIONER, "message.max.bytes": _LARGEST_RECORD})
        return self._producer

    def _failed(self, message: Message, reason: str) -> SendFailed:
        return SendFailed(
            f"message {message.id} of queue {message.queue!r} cannot be set aside in {self._config.dead_letters!r}: "
            f"{reason}; it is not settled",
            {reason: 1},
        )
