"""Receiving messages of a queue: one thread reads, another writes keep-alives (`AckHandler.heartbeat`).

The way of a message: reader -> start markers -> buffer -> receive -> Message -> acks -> markers that follow.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Self

from outbox_core import election
from outbox_core.claims import ClaimCheck
from outbox_queue.config import QueueConfig
from outbox_queue.consuming.acks import AckHandler
from outbox_queue.consuming.buffer import PrefetchBuffer
from outbox_queue.consuming.marker_writer import MarkerKeys
from outbox_queue.consuming.message import Message
from outbox_queue.consuming.reader import QueueReader
from outbox_queue.consuming.start_markers import StartMarkers
from outbox_queue.dead_letters.writer import DeadLetterWriter
from outbox_queue.errors import InvalidMessage, QueueClosed, refuse_forked
from outbox_queue.metrics import QueueCounters
from outbox_queue.protocol.topics import Topics
from outbox_queue.times import Timeout, now_ms, seconds

_SHORTEST_TICK_SECONDS = 0.02
_LONGEST_TICK_SECONDS = 0.5

_log = logging.getLogger(__name__)


class Consumer:
    """A member of a queue's group. Any thread may receive, and settle what any thread has received.

    Made by `Queue.consumer`; a context manager, and an iterator of messages that ends when the consumer is stopped.
    """

    def __init__(
        self,
        config: QueueConfig,
        queue: str,
        topics: Topics,
        counters: QueueCounters,
        *,
        concurrency: int | None,
        claims: ClaimCheck | None = None,
    ) -> None:
        self._config = config
        self._queue = queue
        self._counters = counters
        self._claim_store = None if claims is None else claims.store
        self._buffer = PrefetchBuffer(
            concurrency=concurrency,
            max_in_progress=max(config.max_in_progress, concurrency or 1),
            capacity=config.receive_buffer_capacity,
            processing_seconds=config.max_processing_time.total_seconds(),
        )
        dead_letters = DeadLetterWriter(config)
        keys = MarkerKeys(config, queue.encode(), topics.marker_partitions)
        start_markers = StartMarkers(config, queue, keys, dead_letters, counters)
        self._acks = AckHandler(config, self._buffer, dead_letters, counters)
        self._closing = threading.Lock()
        self._pid = os.getpid()
        self._reader = QueueReader(config, start_markers, self._buffer, self._acks, counters)
        self._heartbeat_ends = threading.Event()
        self._heartbeat = threading.Thread(target=self._run_heartbeat, name=f"outbox-queue-alive-{queue}", daemon=True)
        self._reader.start()
        self._heartbeat.start()

    def __repr__(self) -> str:
        return f"<Consumer of {self._queue!r}, {self._buffer.in_progress} in progress>"

    @property
    def in_progress(self) -> int:
        """Number of messages that are started and not settled."""
        return self._buffer.in_progress

    @property
    def trouble(self) -> str | None:
        """The reason why it has left the queue's group: a broker does not answer it. None while it is in the group."""
        return self._reader.trouble

    @property
    def is_stopped(self) -> bool:
        """True if `stop` was called."""
        return self._buffer.is_stopped

    def listen(self, listener: Callable[[], None]) -> None:
        """Have the listener called, on any thread, whenever a `receive` may newly succeed. It must not wait."""
        self._buffer.listen(listener)

    def receive(self, timeout: Timeout = None) -> Message | None:
        """Wait for the next message; return None if there is none in time, or the consumer has been stopped.

        Args:
            timeout: None for as long as the consumer runs.

        Raises:
            QueueError: if the queue cannot be read, also in a process that was forked after the consumer was made.
            QueueClosed: if the consumer has been closed.
        """
        messages = self.receive_many(1, timeout)
        return messages[0] if messages else None

    def receive_many(self, most: int, timeout: Timeout = None) -> list[Message]:
        """Wait for a message as `receive` does, and return it with others that are there, up to so many."""
        if self._acks.is_closed:
            raise QueueClosed(f"the consumer of queue {self._queue!r} has been closed")
        refuse_forked(self, self._pid)
        if most < 1:
            raise InvalidMessage(f"receive_many: expected to receive 1 or more, got {most!r}")
        deliveries = self._buffer.get(most, seconds(timeout))
        now = now_ms()
        for delivery in deliveries:
            self._counters.count("consumed", 1, max(0, now - delivery.message.enqueued_at_ms) / 1000)
        return [Message(delivery, self._acks, self._claim_store) for delivery in deliveries]

    def __iter__(self) -> Iterator[Message]:
        return self

    def __next__(self) -> Message:
        try:
            message = self.receive()
        except QueueClosed:
            message = None
        if message is None:
            raise StopIteration
        return message

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def acknowledge_all(self, messages: Sequence[Message]) -> None:
        """Acknowledge messages, in their order."""
        for message in messages:
            message.ack()

    def stop(self) -> None:
        """Hand out no more messages: iteration ends, and `receive` returns None. Returns at once; settling goes on."""
        self._buffer.stop()
        self._reader.stop(self._config.close_timeout.total_seconds())

    def drain(self, timeout: Timeout = None) -> bool:
        """Stop, and wait for received messages, by default for `close_timeout`; return whether all are settled."""
        self.stop()
        return self._buffer.wait_until_settled(seconds(self._config.close_timeout if timeout is None else timeout))

    def close(self) -> None:
        """Stop, deliver the last markers within `close_timeout`, and return messages that were never received.

        These are redelivered at once, without counting an attempt; received ones when their redelivery timeout has
        passed.
        """
        with self._closing:
            if self._acks.is_closed:
                return
            end = time.monotonic() + self._config.close_timeout.total_seconds()
            self.stop()
            has_read = self._reader.join(end - time.monotonic())
            if not has_read:
                _log.warning("queue %r: the reading thread does not end, and is left behind", self._queue)
            self._acks.return_unused(self._buffer.remove_waiting())
            self._acks.is_closed = True
            self._heartbeat_ends.set()
            self._heartbeat.join(max(_LONGEST_TICK_SECONDS, end - time.monotonic()))  # it ends at once, as a rule
            undelivered = "some"
            if not self._heartbeat.is_alive():
                # A thread that is left behind may still use the clients.
                left = self._acks.flush(max(0.0, end - time.monotonic()), discard=has_read)
                undelivered = str(left or "")
            self._counters.in_progress(-self._buffer.in_progress)
            if undelivered:
                text = "queue %r: closed before its last markers were delivered (%s); their messages are redelivered"
                _log.warning(text, self._queue, undelivered)

    def _run_heartbeat(self) -> None:
        timeout = self._config.redelivery_timeout.total_seconds()
        tick = min(_LONGEST_TICK_SECONDS, max(_SHORTEST_TICK_SECONDS, timeout / 20))
        while not self._heartbeat_ends.wait(tick):
            try:
                self._acks.heartbeat(election.now())
            except Exception:
                _log.exception("queue %r: keeping messages alive has failed, and is tried again", self._queue)
