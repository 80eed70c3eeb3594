"""From records of the message topic to messages with their start markers.

A message that is not due yet gets a start marker whose redelivery timeout is the time that is left, and whose attempt
is one less than it had: the tracker sends it again when it is due, and nobody has worked on it. It is *parked*.

Nobody waits for longer than `max_delay`: the start marker would not be kept until then.

A message that cannot be tracked is set aside before anything else happens: one of another producer may be too large for
a start marker, one that a tracker without counting has redelivered may have had more attempts than it may have, and
one may have headers that cannot be read: how often it was tried, and what its handler should see, is then unknown.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

from outbox_core.kafka import TIMESTAMP_NOT_AVAILABLE, KafkaException, headers_of
from outbox_queue import headers, wire
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.dead_letter_writer import DeadLetterWriter
from outbox_queue.errors import SendFailed
from outbox_queue.markers import MarkerKeys, MarkerRecord
from outbox_queue.message import Message, Settler, now_ms
from outbox_queue.metrics import QueueCounters
from outbox_queue.payloads import MARKER_OVERHEAD
from outbox_queue.starts import NotStarted

_log = logging.getLogger(__name__)


class Prepared(NamedTuple):
    """What a batch of records has become.

    Attributes:
        markers: start markers, of messages that are due and of those that are parked.
        due: to be handed over once the markers are written.
        parked: how many are not due.
    """

    markers: list[MarkerRecord]
    due: list[Message]
    parked: int


class Starter:
    """Prepares the start of messages; used by the fetcher's thread.

    Args:
        config: of the queue.
        queue: its name.
        keys: of its markers.
        dead_letters: for messages that cannot be tracked.
        counters: of the queue.
    """

    def __init__(
        self, config: QueueConfig, queue: str, keys: MarkerKeys, dead_letters: DeadLetterWriter, counters: QueueCounters
    ) -> None:
        self._queue = queue
        self._key = queue.encode()
        self._keys = keys
        self._dead_letters = dead_letters
        self._counters = counters
        self._max_attempts = config.max_attempts
        self._largest = config.max_message_bytes - MARKER_OVERHEAD
        self._timeout_ms = milliseconds(config.redelivery_timeout)
        self._longest_delay_ms = milliseconds(config.max_delay)

    def prepare(self, settler: Settler, records: Sequence[Any]) -> Prepared:
        """Make messages and start markers.

        Args:
            settler: what the messages turn to.
            records: of this queue, as the Kafka client gives them.

        Raises:
            NotStarted: if a message that cannot be tracked could not be set aside.
        """
        prepared = Prepared([], [], 0)
        wall_ms = now_ms()
        deadline = time.monotonic() + self._timeout_ms / 1000
        parked = 0
        for record in records:
            travelled = headers.read(headers_of(record))
            message, delay_ms = self._message(settler, record, travelled, wall_ms)
            if travelled.is_unreadable:
                self._set_aside(message, headers.UNREADABLE)
                continue
            marker = self._marker(message, delay_ms)
            if not self._can_be_tracked(message, marker):
                continue
            prepared.markers.append(marker)
            if delay_ms:
                parked += 1
                continue
            message._marker_partition = marker.partition
            message._deadline = deadline
            prepared.due.append(message)
        return prepared._replace(parked=parked)

    def count(self, prepared: Prepared) -> None:
        """Count what has been started."""
        self._counters.in_progress(len(prepared.due))
        if prepared.parked:
            self._counters.parked(prepared.parked)

    def _message(
        self, settler: Settler, record: Any, travelled: headers.Travelled, wall_ms: int
    ) -> tuple[Message, int]:
        """The message of a record, and for how many milliseconds it must not be handed out."""
        kind, timestamp = record.timestamp()
        enqueued_at_ms = travelled.enqueued_at_ms or (wall_ms if kind == TIMESTAMP_NOT_AVAILABLE else timestamp)
        message = Message(
            settler,
            self._queue,
            record.value() or b"",
            (record.partition(), record.offset()),
            travelled,
            enqueued_at_ms=max(0, enqueued_at_ms),
            max_attempts=self._max_attempts,
        )
        deliver_at = travelled.deliver_at_ms
        return message, 0 if deliver_at is None else self._bounded(message, deliver_at - wall_ms)

    def _bounded(self, message: Message, delay_ms: int) -> int:
        """A delay that a tracker can keep, whatever a stranger, or a clock that is set wrong, has asked for."""
        if delay_ms > self._longest_delay_ms:
            _log.warning(
                "queue %r: message %s asks for a delay of %d ms more; it gets max_delay, %d ms",
                self._queue,
                message.id,
                delay_ms,
                self._longest_delay_ms,
            )
        return min(max(0, delay_ms), self._longest_delay_ms)

    def _marker(self, message: Message, delay_ms: int) -> MarkerRecord:
        place, origin = message._place, message._origin
        key = self._keys.key(place)
        value = wire.start_marker(
            *place,
            delay_ms or self._timeout_ms,
            self._key,
            message.payload,
            attempt=message.attempt - 1 if delay_ms else message.attempt,
            enqueued_at_ms=message._enqueued_at_ms,
            max_attempts=self._max_attempts or 0,
            origin=None if origin == place else origin,
            headers=message.headers,
        )
        return MarkerRecord(self._keys.partition(key), key, value)

    def _can_be_tracked(self, message: Message, marker: MarkerRecord) -> bool:
        """Whether it may be started; if not, it is a dead letter now."""
        if len(marker.value) + len(marker.key) > self._largest:
            reason = f"its start marker would be {len(marker.value)} bytes, too large for max_message_bytes"
        elif self._max_attempts is not None and message.attempt > self._max_attempts:
            reason = f"it has had {message.attempt - 1} attempts already, and max_attempts is {self._max_attempts}"
        else:
            return True
        self._set_aside(message, reason)
        return False

    def _set_aside(self, message: Message, reason: str) -> None:
        """Make a message that is not started a dead letter. Raises NotStarted."""
        _log.warning("queue %r: message %s is set aside: %s", self._queue, message.id, reason)
        try:
            self._dead_letters.write(message, reason, attempts=message.attempt - 1, now_ms=now_ms(), may_be_empty=True)
        except SendFailed as error:
            said = error.__cause__
            raise NotStarted(str(error), said.args[0] if isinstance(said, KafkaException) else None) from None
        self._counters.rejected()
