"""Writing dead letters from a consumer: the letter first, then the message's end marker.

If the process dies in between, the message is redelivered and rejected once more: a dead letter may come twice, and is
never missing. A message too large even for the dead letter topic may get a letter without payload and headers, which
names its place in the message topic: it does not hold up those behind it.
"""

from __future__ import annotations

import logging
import threading
from functools import partial

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.clients import KafkaError, KafkaException, Producer, make_producer
from outbox_core.kafka.errors import NEVER_ACCEPTED, explained
from outbox_queue.config import QueueConfig
from outbox_queue.consuming.delivery import ReceivedMessage
from outbox_queue.errors import SendFailed
from outbox_queue.protocol.clients import PARTITIONER, producer_settings
from outbox_queue.protocol.headers import Header, dead_letter_record, place_text

_LARGEST_RECORD = 1_000_000_000
_SLACK_SECONDS = 1.0

_log = logging.getLogger(__name__)


class DeadLetterWriter:
    """The writer of dead letters, one at a time, for any thread; its producer is made with the first."""

    def __init__(self, config: QueueConfig) -> None:
        self._config = config
        self._lock = threading.Lock()
        self._producer: Producer | None = None
        self._is_closed = False

    def close(self) -> None:
        """Let go of the client: its threads and connections end, at the latest when the letter under way is written."""
        self._is_closed = True
        self._producer = None

    def write(
        self, message: ReceivedMessage, reason: str, *, attempts: int, now_ms: int, may_be_empty: bool = False
    ) -> None:
        """Write a dead letter, and wait until Kafka has it; raise SendFailed, caused by Kafka's error, otherwise."""
        letter = partial(
            dead_letter_record,
            message.queue.encode(),
            attempts=attempts,
            enqueued_at_ms=message.enqueued_at_ms,
            origin=message.origin,
            dead_at_ms=now_ms,
        )
        with self._lock:
            error = self._deliver(*letter(message.payload, headers=message.headers, reason=reason))
            if error is not None and may_be_empty and error.code() in NEVER_ACCEPTED:
                reason = (
                    f"{reason}; its {len(message.payload)} bytes are too large for the dead letter topic, too, and are "
                    f"at {place_text(message.place)} in {self._config.message_topic}"
                )
                _log.error("queue %r: message %s: %s", message.queue, message.id, reason)
                error = self._deliver(*letter(b"", headers=(), reason=reason))
        if error is not None:
            why = explained(error, self._config.kafka)
            raise SendFailed(
                f"message {message.id} of queue {message.queue!r} cannot be written to "
                f"{self._config.dead_letters!r}: {why}; it is not settled",
                {why: 1},
            ) from KafkaException(error)

    def _deliver(self, key: bytes, value: bytes, headers: list[Header]) -> KafkaError | None:
        errors: list[KafkaError] = []

        def report(error: KafkaError | None, _: object) -> None:
            if error is not None:
                errors.append(error)

        try:
            producer = self._ready()
        except KafkaUnavailable as error:
            return KafkaError(KafkaError._TRANSPORT, str(error))  # noqa: SLF001  confluent's public constant
        if self._is_closed:
            self._producer = None  # `close`, which does not wait for us, has let go of an older one
        try:
            producer.produce(self._config.dead_letters, value, key, headers=list(headers), on_delivery=report)
        except KafkaException as error:
            errors.append(error.args[0])
        except BufferError:
            errors.append(KafkaError(KafkaError._QUEUE_FULL))  # noqa: SLF001  confluent's public constants
        else:
            if producer.flush(self._config.delivery_timeout.total_seconds() + _SLACK_SECONDS) and not errors:
                errors.append(KafkaError(KafkaError._TIMED_OUT, "no acknowledgement in time"))  # noqa: SLF001
        if not errors:
            return None
        self._producer = None  # the next letter does not wait behind this one
        return errors[0]

    def _ready(self) -> Producer:
        producer = self._producer  # `close` may let go of it meanwhile
        if producer is None:
            settings = producer_settings(self._config, linger_ms=0)
            # The client refuses no message that the message topic has taken.
            producer = make_producer({**settings, **PARTITIONER, "message.max.bytes": _LARGEST_RECORD})
            self._producer = producer
        return producer
