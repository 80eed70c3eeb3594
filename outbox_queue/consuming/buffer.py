"""The messages of one consumer that are in progress: waiting to be received, or received and not settled.

    reader --put--> [ waiting ] --get--> [ received ] --settle--> gone
              ^                                          |
              +---------------- capacity ----------------+

Back-pressure: the reader asks for `capacity` before it starts messages, so `max_in_progress` bounds start markers.
Other consumers miss waiting messages, so a consumer prefetches few at first. It doubles that whenever all had been
received and Kafka had more, and halves it once a message had to wait for a second.

A message that waits for longer than it may be processed, or past its deadline, is *overdue*, and returned for other
consumers. If no handler asked for it, or a handler hangs, there is no capacity until the next `get`: all may hang.

Invariants, under one lock, for any sequence of calls from any threads:

- waiting + received = in progress <= max_in_progress, and received <= concurrency;
- a message is received once, and settled once; none is received past its deadline, or after `stop`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from outbox_core import election
from outbox_core.errors import must
from outbox_queue.consuming.delivery import Delivery

_LEAST_PREFETCH = 8
_LONGEST_WAIT_SECONDS = 1.0


class BufferLimits(NamedTuple):
    """Bounds of a buffer."""

    concurrency: int  # how many messages may be received and not settled
    in_progress: int  # how many may wait or be received
    processing_seconds: float  # for how long a received message is kept alive, and one waits at most


class _Prefetch:
    """The number of messages to fetch ahead of `get`."""

    def __init__(self, least: int, most: int) -> None:
        self._least = min(least, most)
        self._most = most
        self._size = self._least
        self._halved_at = 0.0
        self.is_suspended = False
        self.is_awaited = False  # the reader waits in `capacity`

    def wanted(self, waiting: int) -> int:
        return 0 if self.is_suspended or waiting > self._size // 2 else self._size - waiting

    def double(self) -> None:
        self._size = min(self._most, self._size * 2)

    def halve(self, now: float) -> None:
        if now - self._halved_at > _LONGEST_WAIT_SECONDS:
            self._size = max(self._least, self._size // 2)
            self._halved_at = now


class PrefetchBuffer:
    """The way of deliveries from the reader to the threads that receive."""

    def __init__(
        self, *, concurrency: int | None, max_in_progress: int, capacity: int, processing_seconds: float
    ) -> None:
        self._limits = BufferLimits(concurrency or max_in_progress, max_in_progress, processing_seconds)
        self._prefetch = _Prefetch(max(_LEAST_PREFETCH, concurrency or 1), capacity)
        self._waiting: deque[Delivery] = deque()
        self._overdue: list[Delivery] = []  # found by a `get`
        self._in_progress: dict[Delivery, None] = {}  # in the order of their start
        self._is_stopped = False
        self._failure: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []
        self._receivers = 0  # threads that wait in `get`
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)  # for `get`; after `stop` for `wait_until_settled`
        self._freed = threading.Condition(self._lock)  # for `capacity`

    @property
    def in_progress(self) -> int:
        """Number of messages that wait or are received."""
        return len(self._in_progress)

    @property
    def received(self) -> int:
        """Number of messages that are received and not settled."""
        return len(self._in_progress) - len(self._waiting)

    @property
    def is_stopped(self) -> bool:
        """True if `stop` was called."""
        return self._is_stopped

    def capacity(self, timeout_seconds: float) -> int:
        """Wait for capacity; return the number of messages to start, 0 if there is none in time, or after `stop`."""
        with self._lock:
            if not self._is_stopped and not self._free():
                self._prefetch.is_awaited = True
                self._freed.wait(timeout_seconds)
                self._prefetch.is_awaited = False
            return 0 if self._is_stopped else self._free()

    def _free(self) -> int:
        wanted = self._prefetch.wanted(len(self._waiting))
        return max(0, min(wanted, self._limits.in_progress - len(self._in_progress)))

    def _notify_reader(self) -> None:
        if self._prefetch.is_awaited and self._free():  # else it would wake for every message
            self._freed.notify()

    def put(self, deliveries: Sequence[Delivery], *, there_are_more: bool) -> bool:
        """Take in messages whose start markers are written and offsets committed; refuse them (False) after `stop`."""
        now = election.now()
        with self._lock:
            if self._is_stopped:
                return False
            total, most = len(self._in_progress) + len(deliveries), self._limits.in_progress
            must(total <= most, "no more than max_in_progress, %d, must be in progress; not %d", most, total)
            if there_are_more and not self._waiting:
                self._prefetch.double()
            for delivery in deliveries:
                delivery.received_at = now
                self._in_progress[delivery] = None
            self._waiting.extend(deliveries)
            self._changed.notify(len(deliveries))
            self._notify_listeners()
        return True

    def get(self, most: int, timeout_seconds: float | None) -> list[Delivery]:
        """Receive at least one message, none after the time (None: unlimited) or `stop`; raise after `fail`."""
        with self._lock:
            if self._prefetch.is_suspended:
                self._prefetch.is_suspended = False
                self._notify_reader()
            return self._receive(most) or self._wait(most, timeout_seconds)

    def _wait(self, most: int, timeout_seconds: float | None) -> list[Delivery]:
        end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
        self._receivers += 1
        try:
            while not (received := self._receive(most)) and not self._is_stopped:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    break
                self._changed.wait(left)
        finally:
            self._receivers -= 1
        return received

    def _receive(self, most: int) -> list[Delivery]:
        if self._failure is not None:
            raise self._failure
        received: list[Delivery] = []
        waiting, now = self._waiting, election.now()
        number = 0 if self._is_stopped else min(most, self._limits.concurrency - self.received)
        while waiting and len(received) < number:
            delivery = waiting.popleft()
            if delivery.deadline <= now:
                del self._in_progress[delivery]
                self._overdue.append(delivery)
                continue
            if now - delivery.received_at > _LONGEST_WAIT_SECONDS:
                self._prefetch.halve(now)
            delivery.received_at = now
            delivery.keep_alive_until = now + self._limits.processing_seconds
            received.append(delivery)
        self._notify_reader()
        return received

    def settle(self, delivery: Delivery) -> bool:
        """Remove a message; return False if it was removed before."""
        with self._lock:
            return self._remove(delivery)

    def _remove(self, delivery: Delivery) -> bool:
        if delivery not in self._in_progress:
            return False
        was_full = len(self._in_progress) - len(self._waiting) >= self._limits.concurrency
        del self._in_progress[delivery]
        self._notify_reader()
        if self._is_stopped:
            self._changed.notify_all()
        elif was_full and self._waiting:
            self._changed.notify()
            self._notify_listeners()
        return True

    def due(self, horizon: float) -> list[Delivery]:
        """Return the messages whose deadline comes before this moment of `election.now`."""
        with self._lock:
            return [delivery for delivery in self._in_progress if delivery.deadline <= horizon]

    def remove_hung(self, now: float) -> list[Delivery]:
        """Remove the messages that were processed for too long, and whose deadline has passed."""
        with self._lock:
            hung = [one for one in self._in_progress if one.keep_alive_until <= now and one.deadline <= now]
            if hung:
                self._suspend_prefetch()
            for delivery in hung:
                self._remove(delivery)
            return hung

    def remove_overdue(self, now: float) -> list[Delivery]:
        """Remove the messages that have waited here for too long, or past their deadline."""
        with self._lock:
            overdue = [one for one in self._waiting if not self._may_wait(one, now)]
            if overdue:
                if any(delivery.deadline > now for delivery in overdue):
                    self._suspend_prefetch()
                self._waiting = deque(one for one in self._waiting if self._may_wait(one, now))
                for delivery in overdue:
                    self._remove(delivery)
            overdue, self._overdue = self._overdue + overdue, []
            return overdue

    def _may_wait(self, delivery: Delivery, now: float) -> bool:
        return delivery.deadline > now and now - delivery.received_at < self._limits.processing_seconds

    def _suspend_prefetch(self) -> None:
        if not self._receivers:
            self._prefetch.is_suspended = True
            self._notify_listeners()  # receivers that rely on listeners would not call `get` otherwise

    def fail(self, failure: BaseException) -> None:
        """Have every `get` raise from now on."""
        with self._lock:
            self._failure = failure
            self._wake_all()

    def stop(self) -> None:
        """Pass on no more messages: `get` returns an empty list."""
        with self._lock:
            self._is_stopped = True
            self._wake_all()

    def remove_waiting(self) -> list[Delivery]:
        """After `stop`: remove the messages that were never received."""
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
            for delivery in waiting:
                self._remove(delivery)
            waiting, self._overdue = waiting + self._overdue, []
            return waiting

    def wait_until_settled(self, timeout_seconds: float) -> bool:
        """After `stop`: wait until all received messages are settled; return whether they are."""
        with self._lock:
            return self._changed.wait_for(lambda: not self.received, timeout_seconds)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call the listener whenever a `get` may newly succeed. It must not wait, or call the buffer."""
        with self._lock:
            self._listeners.append(listener)

    def _wake_all(self) -> None:
        self._changed.notify_all()
        self._freed.notify_all()
        self._notify_listeners()

    def _notify_listeners(self) -> None:
        for listener in self._listeners:
            listener()
