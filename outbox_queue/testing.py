"""A queue within a test: stashed messages are handed to the project's own handler, without Kafka.

    emails = InProcessQueue(queue, outbox_records)
    emails.run(send_email)              # what is due
    emails.clock.advance(timedelta(minutes=5))
    emails.run(send_email)              # what was delayed, or failed and is tried again

It follows the rules of a worker: attempts are counted, failed messages come again after their delay, and become dead
letters after the last attempt. Unlike a worker it calls the handler in the calling thread, one message after the other
in the order of their due times, so that the handler sees the test's own transaction.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from datetime import timedelta
from typing import NamedTuple

from outbox_core.record import OutboxRecord
from outbox_core.testing import StashedRecords
from outbox_core.testing.expectation import bytes_of, headers_of
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.consuming.delivery import Delivery, ReceivedMessage, State
from outbox_queue.consuming.message import Message
from outbox_queue.consuming.worker import Handler, HandlerCall, RetryDelay, backoff, call_handler, check_handler
from outbox_queue.errors import InvalidMessage, Reject
from outbox_queue.protocol import headers as message_headers
from outbox_queue.service import Queue
from outbox_queue.times import now_ms

__all__ = ["DeadLetter", "FakeClock", "InProcessQueue"]

_MOST_ATTEMPTS_AT_ONCE = 1000


class FakeClock:
    """The machine's clock, moved ahead by a test; libraries that stop time, such as freezegun, stop it, too."""

    def __init__(self) -> None:
        self._ahead_ms = 0

    def now_ms(self) -> int:
        """Return milliseconds since 1970."""
        return now_ms() + self._ahead_ms

    def advance(self, duration: timedelta) -> None:
        """Move ahead by a duration of zero or more."""
        if duration < timedelta(0):
            raise ValueError(f"advance: a clock goes ahead only, got {duration!r}")
        self._ahead_ms += milliseconds(duration)


class DeadLetter(NamedTuple):
    """A message that was rejected, or whose attempts were used up."""

    payload: bytes
    headers: tuple[tuple[str, bytes | None], ...]
    attempts: int
    reason: str


class InProcessQueue:
    """The messages of one queue among the records that a test has stashed. Used by one thread.

    Args:
        queue: the project's own queue; its settings hold.
        stashed: of a capture, or an outbox in memory. Records that are rolled back are not delivered.
        clock: shared by several queues of a test; by default one of its own.

    Attributes:
        clock: decides what is due.
    """

    def __init__(self, queue: Queue, stashed: StashedRecords, *, clock: FakeClock | None = None) -> None:
        self.clock = clock or FakeClock()
        self._queue = queue
        self._claim_store = None if queue.claims is None else queue.claims.store
        self._stashed = stashed
        self._latest = 0  # number of the last record that was taken
        self._backlog = _Backlog(queue.config, self.clock)

    def __len__(self) -> int:
        """Return the number of messages that wait, due or not."""
        self._take_stashed()
        return len(self._backlog.waiting)

    @property
    def dead_letters(self) -> list[DeadLetter]:
        """The messages that became dead letters, in the order of their deaths."""
        return self._backlog.dead_letters

    def run(self, handler: Handler, *, retry_delay: RetryDelay | None = None, raise_errors: bool = True) -> int:
        """Call a handler for each message that is due, until none is left; return the number of calls.

        Messages that the handler stashes are delivered, too.

        Args:
            handler: as of `Queue.run`.
            retry_delay: as of `Queue.run`.
            raise_errors: raise what the handler raises, after the message is given back for its next attempt; False
                goes on with the next message, as a worker does. A `Reject` is never raised.

        Raises:
            InvalidMessage: if the handler is asynchronous.
            Exception: of the handler.
        """
        check_handler(handler)
        errors: list[Exception] = []
        longest = min(timedelta(minutes=5), self._queue.config.max_delay / 2)
        call = HandlerCall(_noting(handler, errors), retry_delay or backoff(longest=longest))
        calls = 0
        while (message := self._next_due()) is not None:
            calls += 1
            delivery = Delivery(message, marker_partition=0, marker_key=b"", deadline=float("inf"))
            call(Message(delivery, self._backlog, self._claim_store))
            if errors and raise_errors:
                raise errors[0]
        return calls

    def _next_due(self) -> ReceivedMessage | None:
        self._take_stashed()
        return self._backlog.next_due()

    def _take_stashed(self) -> None:
        own = (self._queue.config.message_topic, self._queue.name)
        for entry in self._stashed.entries():
            if entry.number > self._latest and (entry.record.topic, entry.record.key) == own:
                self._latest = entry.number
                self._backlog.enter(entry.record)


class _Backlog:
    """The messages that wait, and the consequences of settling them: the part of markers and trackers."""

    def __init__(self, config: QueueConfig, clock: FakeClock) -> None:
        self.waiting: list[tuple[int, int, ReceivedMessage]] = []  # due time, order of entry, message
        self.dead_letters: list[DeadLetter] = []
        self._config = config
        self._clock = clock
        self._entries = 0

    def enter(self, record: OutboxRecord) -> None:
        """Add a record of this queue as a message."""
        pairs = [(header, bytes_of(value)) for header, value in headers_of(record)]
        travelled = message_headers.read(pairs)
        now, place = self._clock.now_ms(), (record.partition or 0, self._entries)
        message = ReceivedMessage(
            queue=str(record.key),
            payload=bytes_of(record.value) or b"",
            headers=travelled.headers,
            attempt=1,
            max_attempts=self._config.max_attempts,
            place=place,
            origin=place,
            enqueued_at_ms=now,
        )
        self._add(travelled.deliver_at_ms or now, message)

    def next_due(self) -> ReceivedMessage | None:
        """Take the message that is due for the longest time, if there is one."""
        if not self.waiting or self.waiting[0][0] > self._clock.now_ms():
            return None
        return heapq.heappop(self.waiting)[2]

    def acknowledge(self, delivery: Delivery) -> None:
        delivery.state = State.ACKNOWLEDGED

    def nack(self, delivery: Delivery, delay_ms: int, reason: str, *, counts: bool) -> None:
        message, longest = delivery.message, milliseconds(self._config.max_delay)
        if delay_ms > longest:
            raise InvalidMessage(f"nack: a delay of {delay_ms} ms is more than max_delay, {longest} ms")
        if message.attempt >= _MOST_ATTEMPTS_AT_ONCE and delay_ms == 0:
            raise InvalidMessage(f"nack: message {message.id} was given back {message.attempt} times without a delay")
        delivery.state = State.NACKED
        self._redeliver(message if counts else message._replace(attempt=message.attempt - 1), delay_ms, reason)

    def reject(self, delivery: Delivery, reason: str) -> None:
        delivery.state = State.REJECTED
        self._bury(delivery.message, reason)

    def interrupt(self, delivery: Delivery) -> None:
        delivery.state = State.INTERRUPTED
        self._redeliver(delivery.message, milliseconds(self._config.redelivery_timeout), "")

    def extend(self, delivery: Delivery, duration: timedelta) -> None:
        del delivery  # no other consumer could take it here
        if duration > self._config.marker_retention / 2:
            raise InvalidMessage("extend: the duration is more than half of marker_retention")

    def _redeliver(self, message: ReceivedMessage, delay_ms: int, reason: str) -> None:
        if message.max_attempts is not None and message.attempt >= message.max_attempts:
            self._bury(message, reason)
        else:
            self._add(self._clock.now_ms() + delay_ms, message._replace(attempt=message.attempt + 1))

    def _add(self, due_ms: int, message: ReceivedMessage) -> None:
        heapq.heappush(self.waiting, (due_ms, self._entries, message))
        self._entries += 1

    def _bury(self, message: ReceivedMessage, reason: str) -> None:
        self.dead_letters.append(DeadLetter(message.payload, message.headers, message.attempt, reason))


def _noting(handler: Handler, errors: list[Exception]) -> Callable[[Message], object]:
    """Return the handler, with its errors noted but those that only reject a message."""

    def noting(message: Message) -> None:
        try:
            call_handler(handler, message)
        except Reject:
            raise
        except Exception as error:
            errors.append(error)
            raise

    return noting
