"""Receiving messages of a queue, each to be settled on its own.

A consumer has two threads: one reads (`outbox_queue.fetching`), one writes keep-alives. A message is kept alive from
its start marker on, whether it waits here or is handed out, by a keep-alive whenever half of its redelivery timeout is
over; once it is handed out, for `max_processing_time`, or as long as it was extended. A message that has waited here
for that long, or past its deadline, is not handed out any more, but given back. Deadlines are counted from when a
marker was handed to the client, which is before the broker stamps it: this process never takes a message for alive that
the tracker has given away, unless the marker itself was held up.

Closing gives back what was never handed out, at once and without counting an attempt. What was handed out and not
settled is redelivered when its timeout has passed: this process may still be working on it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta
from functools import partial
from types import TracebackType
from typing import Any, Self

from outbox_queue import wire
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.dead_letter_writer import DeadLetterWriter
from outbox_queue.errors import InvalidMessage, MessageSettled, QueueClosed
from outbox_queue.fetching import Fetcher
from outbox_queue.handout import Handout
from outbox_queue.markers import MarkerKeys, MarkerRecord, MarkerWriter, Wanted
from outbox_queue.message import Message, State, now_ms
from outbox_queue.metrics import QueueCounters
from outbox_queue.starting import Starter
from outbox_queue.topics import Topics
from outbox_queue.waiting import Timeout, seconds

_SHORTEST_TICK_SECONDS = 0.02
_LONGEST_TICK_SECONDS = 0.5

_KEPT = (State.UNSETTLED, State.REJECTED)
"""While a dead letter is written, its message is kept."""

_log = logging.getLogger(__name__)


class Consumer:
    """Hands out the messages of a queue. Any thread may receive, and settle what any thread has received.

    Made by `Queue.consumer`; a context manager, and an iterator of messages that ends when the consumer is stopped.

    Args:
        config: of the queue.
        queue: its name.
        topics: what was found.
        counters: of the queue.
        concurrency: how many messages may be handed out and not settled; None for `max_in_progress`.
    """

    def __init__(
        self, config: QueueConfig, queue: str, topics: Topics, counters: QueueCounters, *, concurrency: int | None
    ) -> None:
        self._config = config
        self._queue = queue
        self._counters = counters
        self._timeout = config.redelivery_timeout.total_seconds()
        self._keys = MarkerKeys(config, queue.encode(), topics.marker_partitions)
        self._handout = Handout(
            concurrency=concurrency,
            max_in_progress=max(config.max_in_progress, concurrency or 1),
            capacity=config.receive_buffer_capacity,
            processing_seconds=config.max_processing_time.total_seconds(),
        )
        self._markers = MarkerWriter(config)
        self._dead_letters = DeadLetterWriter(config, queue.encode())
        self._starter = Starter(config, queue, self._keys, self._dead_letters, counters)
        self._settling = threading.Lock()
        self._closing = threading.Lock()
        self._is_closed = False
        self._tending_ends = threading.Event()
        self._fetcher = Fetcher(
            config,
            queue,
            room=self._handout.wait_for_room,
            start=self._start,
            counters=counters,
            fail=self._handout.fail,
        )
        self._tender = threading.Thread(target=self._tend, name=f"outbox-queue-alive-{queue}", daemon=True)
        self._fetcher.start()
        self._tender.start()

    def __repr__(self) -> str:
        return f"<Consumer of {self._queue!r}, {self._handout.in_progress} in progress>"

    @property
    def in_progress(self) -> int:
        """How many messages are started and not settled."""
        return self._handout.in_progress

    @property
    def is_stopped(self) -> bool:
        """Whether it hands out nothing any more."""
        return self._handout.is_stopped

    def listen(self, listener: Callable[[], None]) -> None:
        """Have it called, on any thread, whenever a `receive` may succeed that could not before. It must not wait."""
        self._handout.listen(listener)

    def receive(self, timeout: Timeout = None) -> Message | None:
        """The next message.

        Args:
            timeout: how long to wait for one; None for as long as the consumer runs.

        Returns:
            None if there is none in time, or the consumer has been stopped. Nothing is lost by a receive that ends so.

        Raises:
            QueueError: if the queue cannot be read.
            QueueClosed: if the consumer has been closed.
        """
        self._must_be_open()
        return self._take(seconds(timeout))

    def receive_many(self, most: int, timeout: Timeout = None) -> list[Message]:
        """What is there, up to so many messages; waits for the first one as `receive` does.

        Raises:
            QueueError: if the queue cannot be read.
            QueueClosed: if the consumer has been closed.
        """
        self._must_be_open()
        if most < 1:
            raise InvalidMessage(f"receive_many: expected to receive 1 or more, got {most!r}")
        messages = self._handout.take_many(most, seconds(timeout))
        for message in messages:
            self._count(message)
        return messages

    def _take(self, wait: float | None) -> Message | None:
        message = self._handout.take(wait)
        if message is not None:
            self._count(message)
        return message

    def _count(self, message: Message) -> None:
        self._counters.consumed(seconds=max(0, now_ms() - message._enqueued_at_ms) / 1000)

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        message = None if self._is_closed else self._take(None)
        if message is None:
            raise StopIteration
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stop(self) -> None:
        """Hand out nothing any more: iteration ends, and `receive` returns None. Returns at once; settling goes on."""
        self._handout.stop()
        self._fetcher.ask_to_stop(self._config.close_timeout.total_seconds())

    def drain(self, timeout: Timeout = None) -> bool:
        """Stop, and wait until what was handed out is settled.

        Args:
            timeout: None for the setting `close_timeout`.

        Returns:
            Whether everything is settled.
        """
        self.stop()
        return self._handout.wait_until_settled(seconds(self._config.close_timeout if timeout is None else timeout))

    def close(self) -> None:
        """Stop, give back what was not handed out, and deliver the last markers, within `close_timeout`.

        What is handed out and not settled is redelivered when its redelivery timeout has passed.
        """
        with self._closing:
            if self._is_closed:
                return
            end = time.monotonic() + self._config.close_timeout.total_seconds()
            self.stop()
            has_read = self._fetcher.join(end - time.monotonic())
            if not has_read:
                _log.warning("queue %r: reading does not end; it is left behind", self._queue)
            released = self._handout.release()
            self._give_back_unused(released)
            self._is_closed = True
            self._tending_ends.set()
            self._tender.join(max(_LONGEST_TICK_SECONDS, end - time.monotonic()))  # it ends at once, as a rule
            undelivered = self._let_go(max(0.0, end - time.monotonic()), has_read=has_read)
            self._counters.in_progress(-self._handout.in_progress)
            if undelivered:
                _log.warning(
                    "queue %r: closed before its last markers were delivered (%s); their messages are redelivered",
                    self._queue,
                    undelivered if undelivered > 0 else "some",
                )

    def _let_go(self, wait: float, *, has_read: bool) -> int:
        """Deliver the last markers, and let go of the clients; return how many markers are not delivered.

        What a thread that was left behind may still use stays until that has ended, and garbage is collected.
        """
        if self._tender.is_alive():
            return -1
        if not has_read:
            return self._markers.flush(wait)
        self._dead_letters.close()
        return self._markers.close(wait)

    # What messages ask for (`outbox_queue.message.Settler`).

    def acknowledge(self, message: Message) -> None:
        """End the tracking of the message."""
        self._claim(message, State.ACKNOWLEDGED)
        self._write(message, wire.end_marker(*message._place))
        self._forget(message)
        self._counters.acknowledged()

    def acknowledge_all(self, messages: Sequence[Message]) -> None:
        """Acknowledge messages, in their order."""
        for message in messages:
            message.ack()

    def give_back(self, message: Message, delay_ms: int, reason: str) -> None:
        """Have it redelivered after the delay."""
        longest = milliseconds(self._config.max_delay)
        if delay_ms > longest:
            raise InvalidMessage(f"nack: a delay of {delay_ms} ms is more than max_delay, {longest} ms")
        if message.max_attempts is not None and message.attempt >= message.max_attempts:
            delay_ms = 0  # there is nothing to wait for: it becomes a dead letter
        self._claim(message, State.GIVEN_BACK)
        self._write(message, wire.keep_alive_marker(*message._place, delay_ms, reason=reason))
        self._forget(message)
        self._counters.nacked()

    def set_aside(self, message: Message, reason: str) -> None:
        """Make it a dead letter, and end its tracking."""
        self._claim(message, State.REJECTED)
        try:
            self._dead_letters.write(message, reason, attempts=message.attempt, now_ms=now_ms())
        except BaseException:
            message._state = State.UNSETTLED
            raise
        self._write(message, wire.end_marker(*message._place))
        self._forget(message)
        self._counters.rejected()

    def interrupt(self, message: Message) -> None:
        """Keep it alive no longer."""
        self._claim(message, State.INTERRUPTED)
        self._forget(message)

    def extend(self, message: Message, duration: timedelta) -> None:
        """Keep it alive for at least so long."""
        if duration > self._config.marker_retention / 2:
            raise InvalidMessage("extend: the duration is more than half of marker_retention")
        self._must_be_open()
        until = time.monotonic() + duration.total_seconds()
        message._keep_alive_until = max(message._keep_alive_until, until)
        self._keep_alive(message, until)

    def _claim(self, message: Message, state: State) -> None:
        """From here on the message is this caller's to settle.

        Its marker is written next, and only then is it forgotten: who waits for the last message to be settled may end
        the process.
        """
        self._must_be_open()
        with self._settling:
            if message._state is not State.UNSETTLED:
                raise MessageSettled(f"message {message.id} has been {message._state.value} meanwhile")
            message._state = state

    def _forget(self, message: Message) -> None:
        took = time.monotonic() - message._received_at
        if self._handout.settle(message):
            self._counters.in_progress(-1)
        self._counters.processing_seconds(took)

    def _write(self, message: Message, value: bytes, wanted: Wanted | None = None) -> None:
        key = self._keys.key(message._place)
        self._markers.write(MarkerRecord(message._marker_partition, key, value), wanted)

    def _must_be_open(self) -> None:
        if self._is_closed:
            raise QueueClosed(f"the consumer of queue {self._queue!r} has been closed")

    # On the fetcher's thread.

    def _start(
        self, records: Sequence[Any], write: Callable[[Sequence[MarkerRecord]], None], there_are_more: bool
    ) -> None:
        """Start the messages of these records, and hand over those that are due."""
        prepared = self._starter.prepare(self, records)
        write(prepared.markers)
        self._starter.count(prepared)
        is_late = any(message._deadline <= time.monotonic() for message in prepared.due[:1])  # all have the same
        if is_late:
            _log.warning(
                "queue %r: to start %d messages took longer than redelivery_timeout; they are given back",
                self._queue,
                len(prepared.due),
            )
        if is_late or not self._handout.offer(prepared.due, there_are_more=there_are_more):
            self._give_back_unused(prepared.due)

    def _give_back_unused(self, messages: Sequence[Message]) -> None:
        """They were started and never handed out: that was no attempt."""
        for message in messages:
            with self._settling:  # no keep-alive comes after it
                message._state = State.GIVEN_BACK
                self._write(message, wire.keep_alive_marker(*message._place, 0, attempt=message.attempt - 1))
        self._counters.in_progress(-len(messages))

    # On the tender's thread.

    def _tend(self) -> None:
        tick = min(_LONGEST_TICK_SECONDS, max(_SHORTEST_TICK_SECONDS, self._timeout / 20))
        while not self._tending_ends.wait(tick):
            try:
                self._markers.tend()
                self._keep_all_alive(time.monotonic())
            except Exception:
                _log.exception("queue %r: keeping messages alive has failed, and is tried again", self._queue)

    def _keep_all_alive(self, now: float) -> None:
        for message in self._handout.due(now + self._timeout / 2):
            if now < message._keep_alive_until:
                self._keep_alive(message, now + self._timeout)
        withdrawn = self._handout.withdraw(now)
        if withdrawn:
            _log.warning(
                "queue %r: %d messages waited for too long to be handed out; they are given back",
                self._queue,
                len(withdrawn),
            )
            self._give_back_unused(withdrawn)
        for message in self._handout.drop_hung(now):
            self._counters.in_progress(-1)
            _log.warning(
                "queue %r: message %s is processed for longer than max_processing_time; others may get it",
                self._queue,
                message.id,
            )

    def _keep_alive(self, message: Message, until: float) -> None:
        """Move the deadline of a message; never to an earlier moment, and never after the marker that settles it."""
        with self._settling:
            if message._state not in _KEPT:
                return
            until = max(until, message._deadline)
            after_ms = max(1, int((until - time.monotonic()) * 1000))
            message._deadline = until
            self._write(message, wire.keep_alive_marker(*message._place, after_ms), partial(_still, message, until))


def _still(message: Message, deadline: float) -> bool:
    """Whether a keep-alive up to this deadline says something: no later one, no settling, and not only the past."""
    return message._deadline == deadline > time.monotonic() and message._state in _KEPT
