"""Building of messages and their start markers from records of the message topic.

A message that is not due yet is *parked*: its start marker has the remaining delay (`max_delay` at most) as its
redelivery timeout, and one attempt less. No handler gets this copy; the tracker sends the next one when it is due.

A message that cannot be tracked becomes a dead letter: too large for a start marker (of another producer), past
`max_attempts` (redelivered by a tracker without counting), or with unreadable headers.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

from outbox_core import election
from outbox_core.kafka.clients import TIMESTAMP_NOT_AVAILABLE, KafkaException
from outbox_core.kafka.messages import headers_of
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.consuming.delivery import Delivery, ReceivedMessage
from outbox_queue.consuming.marker_writer import MarkerKeys, MarkerRecord
from outbox_queue.consuming.start_writers import NotStarted
from outbox_queue.dead_letters.writer import DeadLetterWriter
from outbox_queue.errors import SendFailed
from outbox_queue.metrics import QueueCounters
from outbox_queue.producing.payloads import MARKER_OVERHEAD
from outbox_queue.protocol import headers
from outbox_queue.protocol import markers as wire
from outbox_queue.times import now_ms

_log = logging.getLogger(__name__)


class Batch(NamedTuple):
    """Messages to start."""

    markers: list[MarkerRecord]  # start markers of due and parked messages
    due: list[Delivery]  # deliveries for the buffer, once the markers are written
    parked: int  # number of messages that are not due


class StartMarkers:
    """The builder of one queue's start markers, on the reader's thread."""

    def __init__(
        self, config: QueueConfig, queue: str, keys: MarkerKeys, dead_letters: DeadLetterWriter, counters: QueueCounters
    ) -> None:
        self._config = config
        self.queue = queue
        self._keys = keys
        self._dead_letters = dead_letters
        self._counters = counters
        self._encoder = wire.StartEncoder(queue.encode(), config.max_attempts or 0)
        self._timeout_ms = milliseconds(config.redelivery_timeout)
        self._longest_bytes = config.max_message_bytes - MARKER_OVERHEAD

    def build(self, records: Sequence[Any]) -> Batch:
        """Make messages and start markers; raise NotStarted if a dead letter could not be written."""
        markers: list[MarkerRecord] = []
        due: list[Delivery] = []
        wall_ms = now_ms()
        deadline = election.now() + self._timeout_ms / 1000
        for record in records:
            travelled = headers.read(headers_of(record))
            message = self._message(record, travelled, wall_ms)
            deliver_at_ms = travelled.deliver_at_ms
            delay_ms = 0 if deliver_at_ms is None else self._delay(message, deliver_at_ms - wall_ms)
            marker = self._marker(message, delay_ms)
            if obstacle := headers.UNREADABLE if travelled.is_unreadable else self._obstacle(message, marker):
                self._set_aside(message, obstacle)
                continue
            markers.append(marker)
            if not delay_ms:
                due.append(Delivery(message, marker.partition, marker.key, deadline))
        return Batch(markers, due, len(markers) - len(due))

    def _message(self, record: Any, travelled: headers.Travelled, wall_ms: int) -> ReceivedMessage:
        kind, timestamp = record.timestamp()
        enqueued_at_ms = travelled.enqueued_at_ms or (wall_ms if kind == TIMESTAMP_NOT_AVAILABLE else timestamp)
        place = (record.partition(), record.offset())
        return ReceivedMessage(
            self.queue,
            record.value() or b"",
            travelled.headers,
            travelled.attempt,
            self._config.max_attempts,
            place,
            travelled.origin or place,
            max(0, enqueued_at_ms),
        )

    def _delay(self, message: ReceivedMessage, delay_ms: int) -> int:
        """Cut a delay to the longest that a tracker can keep: wrong clocks and other producers ask for more."""
        longest_ms = milliseconds(self._config.max_delay)
        if delay_ms > longest_ms:
            _log.warning(
                "queue %r: message %s asks for a delay of %d ms more; it gets max_delay, %d ms",
                self.queue,
                message.id,
                delay_ms,
                longest_ms,
            )
        return min(max(0, delay_ms), longest_ms)

    def _marker(self, message: ReceivedMessage, delay_ms: int) -> MarkerRecord:
        key = self._keys.key(message.place)
        value = self._encoder.encode(
            message.place,
            delay_ms or self._timeout_ms,
            message.payload,
            attempt=message.attempt - 1 if delay_ms else message.attempt,
            enqueued_at_ms=message.enqueued_at_ms,
            origin=None if message.origin == message.place else message.origin,
            headers=message.headers,
        )
        return MarkerRecord(self._keys.partition(key), key, value)

    def _obstacle(self, message: ReceivedMessage, marker: MarkerRecord) -> str:
        if len(marker.value) + len(marker.key) > self._longest_bytes:
            return f"its start marker would be {len(marker.value)} bytes, too large for max_message_bytes"
        if message.max_attempts is not None and message.attempt > message.max_attempts:
            return f"it has had {message.attempt - 1} attempts already, and max_attempts is {message.max_attempts}"
        return ""

    def _set_aside(self, message: ReceivedMessage, reason: str) -> None:
        _log.warning("queue %r: message %s becomes a dead letter: %s", self.queue, message.id, reason)
        try:
            self._dead_letters.write(message, reason, attempts=message.attempt - 1, now_ms=now_ms(), may_be_empty=True)
        except SendFailed as error:
            cause = error.__cause__
            raise NotStarted(str(error), cause.args[0] if isinstance(cause, KafkaException) else None) from None
        self._counters.count("rejected")
