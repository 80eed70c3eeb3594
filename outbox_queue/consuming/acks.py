"""Settling messages, and keeping them alive until then: every marker that follows a start marker.

A message gets two keep-alives per redelivery timeout: while it waits in the buffer, then for `max_processing_time`, or
as long as it is extended. Deadlines count from the moment at which the client gets a marker, before the broker stamps
it: this process never takes a message for its own that a tracker has redelivered, unless the marker itself was held up.

One lock orders state and markers: no keep-alive follows the marker that settles its message, also when it is written
again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from datetime import timedelta
from functools import partial

from outbox_core import election
from outbox_core.printable import plural
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.consuming.buffer import PrefetchBuffer
from outbox_queue.consuming.delivery import Delivery, State
from outbox_queue.consuming.marker_writer import IsWanted, MarkerRecord, MarkerWriter
from outbox_queue.dead_letters.writer import DeadLetterWriter
from outbox_queue.errors import InvalidMessage, MessageSettled, QueueClosed
from outbox_queue.metrics import QueueCounters
from outbox_queue.protocol import markers as wire
from outbox_queue.times import now_ms

_KEPT_ALIVE = (State.IN_PROGRESS, State.REJECTED)  # rejected: until its dead letter is written

_log = logging.getLogger(__name__)


class AckHandler:
    """The deliveries of one consumer after their start. Any thread may settle; one calls `heartbeat`."""

    def __init__(
        self, config: QueueConfig, buffer: PrefetchBuffer, dead_letters: DeadLetterWriter, counters: QueueCounters
    ) -> None:
        self.is_closed = False
        self._config = config
        self._timeout = config.redelivery_timeout.total_seconds()
        self._buffer = buffer
        self._dead_letters = dead_letters
        self._counters = counters
        self._markers = MarkerWriter(config)
        self._ends = wire.EndEncoder()
        self._lock = threading.Lock()

    def count_started(self, due: int, *, parked: int) -> None:
        """Count messages whose start markers are written."""
        self._counters.in_progress(due)
        if parked:
            self._counters.count("parked", parked)

    def acknowledge(self, delivery: Delivery) -> None:
        """Write the end marker."""
        with self._lock:
            self._claim(delivery, State.ACKNOWLEDGED)
            self._write(delivery, self._ends.encode(delivery.message.place))
        self._forget(delivery, "acknowledged")

    def nack(self, delivery: Delivery, delay_ms: int, reason: str, *, counts: bool) -> None:
        """Write a keep-alive that ends after the delay, and takes the attempt back if it does not count."""
        message, longest = delivery.message, milliseconds(self._config.max_delay)
        if delay_ms > longest:
            raise InvalidMessage(f"nack: a delay of {delay_ms} ms is more than max_delay, {longest} ms")
        if counts and message.max_attempts is not None and message.attempt >= message.max_attempts:
            delay_ms = 0  # it becomes a dead letter, and that need not wait
        attempt = None if counts else message.attempt - 1
        with self._lock:
            self._claim(delivery, State.NACKED)
            self._write(delivery, wire.keep_alive_marker(*message.place, delay_ms, attempt=attempt, reason=reason))
        self._forget(delivery, "nacked")

    def reject(self, delivery: Delivery, reason: str) -> None:
        """Write a dead letter, then the end marker."""
        with self._lock:
            self._claim(delivery, State.REJECTED)
        try:
            self._dead_letters.write(delivery.message, reason, attempts=delivery.message.attempt, now_ms=now_ms())
        except BaseException:
            delivery.state = State.IN_PROGRESS
            raise
        with self._lock:
            self._write(delivery, self._ends.encode(delivery.message.place))
        self._forget(delivery, "rejected")

    def interrupt(self, delivery: Delivery) -> None:
        """Write no more keep-alives."""
        with self._lock:
            self._claim(delivery, State.INTERRUPTED)
        self._forget(delivery)

    def extend(self, delivery: Delivery, duration: timedelta) -> None:
        """Write a keep-alive for the duration, and others if it ends before `max_processing_time`."""
        if duration > self._config.marker_retention / 2:
            raise InvalidMessage("extend: the duration is more than half of marker_retention")
        self._check_open()
        until = election.now() + duration.total_seconds()
        delivery.keep_alive_until = max(delivery.keep_alive_until, until)
        self._keep_alive(delivery, until)

    def return_unused(self, deliveries: Sequence[Delivery]) -> None:
        """Have messages that no handler got redelivered at once, without counting an attempt."""
        for delivery in deliveries:
            with self._lock:
                delivery.state = State.NACKED
                attempt = delivery.message.attempt - 1
                self._write(delivery, wire.keep_alive_marker(*delivery.message.place, 0, attempt=attempt))
        self._counters.in_progress(-len(deliveries))

    def heartbeat(self, now: float) -> None:
        """Retry failed markers, write due keep-alives, and return messages that have waited for too long."""
        with self._lock:
            self._markers.retry_failed()
        for delivery in self._buffer.due(now + self._timeout / 2):
            if now < delivery.keep_alive_until:
                self._keep_alive(delivery, now + self._timeout)
        overdue = self._buffer.remove_overdue(now)
        if overdue:
            queue, count = overdue[0].message.queue, len(overdue)
            _log.warning("queue %r: given back %s that waited too long for a handler", queue, plural(count, "message"))
            self.return_unused(overdue)
        for delivery in self._buffer.remove_hung(now):
            self._counters.in_progress(-1)
            _log.warning(
                "queue %r: message %s is in progress for longer than max_processing_time; it will be redelivered",
                delivery.message.queue,
                delivery.message.id,
            )

    def flush(self, timeout_seconds: float, *, discard: bool) -> int:
        """Deliver the last markers; return the number of those not delivered in time."""
        if not discard:
            return self._markers.flush(timeout_seconds)
        self._dead_letters.close()
        return self._markers.close(timeout_seconds)

    def _claim(self, delivery: Delivery, state: State) -> None:
        """Settle a message, with the lock held, unless another thread has done so."""
        self._check_open()
        if delivery.state is not State.IN_PROGRESS:
            raise MessageSettled(f"message {delivery.message.id} has been {delivery.state.value} meanwhile")
        delivery.state = state

    def _forget(self, delivery: Delivery, outcome: str | None = None) -> None:
        # Only after its marker is written: the process may end as soon as the last message is gone.
        took = election.now() - delivery.received_at
        self._counters.settled(outcome, took, was_in_progress=self._buffer.settle(delivery))

    def _keep_alive(self, delivery: Delivery, until: float) -> None:
        """Move a deadline, never to an earlier moment."""
        with self._lock:
            if delivery.state not in _KEPT_ALIVE:
                return
            until = max(until, delivery.deadline)
            after_ms = max(1, int((until - election.now()) * 1000))
            delivery.deadline = until
            marker = wire.keep_alive_marker(*delivery.message.place, after_ms)
            self._write(delivery, marker, partial(_is_latest, delivery, until))

    def _write(self, delivery: Delivery, value: bytes, is_wanted: IsWanted | None = None) -> None:
        self._markers.write(MarkerRecord(delivery.marker_partition, delivery.marker_key, value), is_wanted)

    def _check_open(self) -> None:
        if self.is_closed:
            raise QueueClosed("the consumer has been closed: the message is redelivered")


def _is_latest(delivery: Delivery, deadline: float) -> bool:
    return delivery.deadline == deadline > election.now() and delivery.state in _KEPT_ALIVE
