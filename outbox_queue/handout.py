"""The messages of one consumer that are in progress: waiting to be handed out, or handed out and not settled.

    fetcher --offer--> [ waiting ] --take--> [ handed out ] --settle--> gone
                 ^                                              |
                 +------------------- room ---------------------+

Back-pressure: the fetcher asks for `room` before it starts messages, so start markers, and what is redelivered if this
process dies, are bounded by `max_in_progress`. Messages that wait here are kept from other consumers. So a consumer
begins with few of them. It fetches twice as many ahead whenever they had all been taken and there were more, and half
as many once one of them had to wait for a second.

A message waits no longer than it may be processed, and not past its deadline: then it is *withdrawn*, for others to
have. Once messages had to be withdrawn for that, or were dropped as hung, there is no room until somebody takes
again: whoever works here may hang altogether.

Invariants, under one lock, for any sequence of calls from any threads:

- waiting + handed out = in progress <= max_in_progress, and handed out <= concurrency;
- a message is taken once, and settled once; none is taken whose deadline has passed;
- after `stop`, nothing is taken any more.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence

from outbox_queue.message import Message

_FEWEST_AHEAD = 8
_LONGEST_WAIT_SECONDS = 1.0


class Handout:
    """Hands messages from the fetcher to whoever processes them.

    Args:
        concurrency: how many may be handed out and not settled; None for `max_in_progress`.
        max_in_progress: how many may be in progress.
        capacity: how many may wait.
        processing_seconds: for how long a message is kept alive once it was handed out, and how long it waits at most.
    """

    def __init__(
        self, *, concurrency: int | None, max_in_progress: int, capacity: int, processing_seconds: float
    ) -> None:
        self._concurrency = concurrency or max_in_progress
        self._max_in_progress = max_in_progress
        self._capacity = capacity
        self._processing_seconds = processing_seconds
        self._fewest = min(capacity, max(_FEWEST_AHEAD, concurrency or 1))
        self._ahead = self._fewest
        self._shrunk_at = 0.0
        self._waiting: deque[Message] = deque()
        self._late: list[Message] = []  # found when they were to be taken; to be withdrawn
        self._in_progress: dict[Message, None] = {}  # in the order in which they were started
        self._stopped = False
        self._failure: BaseException | None = None
        self._listeners: list[Callable[[], None]] = []
        self._lock = threading.Lock()
        self._takeable = threading.Condition(self._lock)
        self._roomy = threading.Condition(self._lock)
        self._settled = threading.Condition(self._lock)
        self._takers = 0
        self._is_room_wanted = False
        self._is_neglected = False

    @property
    def in_progress(self) -> int:
        """How many are waiting or handed out."""
        return len(self._in_progress)

    @property
    def handed_out(self) -> int:
        """How many are handed out."""
        return len(self._in_progress) - len(self._waiting)

    @property
    def is_stopped(self) -> bool:
        """Whether nothing is handed out any more."""
        return self._stopped

    def wait_for_room(self, seconds: float) -> int:
        """How many messages may be started now; 0 if there is no room after so many seconds, or after `stop`."""
        with self._lock:
            if self._room() == 0 and not self._stopped:
                self._is_room_wanted = True
                self._roomy.wait(seconds)
                self._is_room_wanted = False
            return 0 if self._stopped else self._room()

    def _tell_of_room(self) -> None:
        """Wake the fetcher only if there is something to fetch for: it would wake for every message otherwise."""
        if self._is_room_wanted and self._room():
            self._roomy.notify()

    def _room(self) -> int:
        waiting = len(self._waiting)
        if waiting > self._ahead // 2 or self._is_neglected:
            return 0
        return max(0, min(self._ahead - waiting, self._max_in_progress - len(self._in_progress)))

    def offer(self, messages: Sequence[Message], *, there_are_more: bool) -> bool:
        """Take in messages whose start markers are written and whose offsets are committed.

        Args:
            messages: no more than there was room for.
            there_are_more: whether Kafka had more than that.

        Returns:
            False after `stop`: they are not taken in, and whoever offers them gives them back.
        """
        now = time.monotonic()
        with self._lock:
            if self._stopped:
                return False
            if there_are_more and not self._waiting:
                self._ahead = min(self._capacity, self._ahead * 2)
            for message in messages:
                message._received_at = now
                self._in_progress[message] = None
            self._waiting.extend(messages)
            self._takeable.notify(min(len(messages), self._takers))
            self._tell_listeners()
        return True

    def take(self, seconds: float | None) -> Message | None:
        """The next message; None if there is none after so many seconds (None: without end), or after `stop`.

        Raises:
            BaseException: what `fail` was told.
        """
        taken = self.take_many(1, seconds)
        return taken[0] if taken else None

    def take_many(self, most: int, seconds: float | None) -> list[Message]:
        """The next messages, at least one unless the time is over or `stop` was called.

        Raises:
            BaseException: what `fail` was told.
        """
        end = None if seconds is None else time.monotonic() + seconds
        with self._lock:
            if self._is_neglected:
                self._is_neglected = False
                self._tell_of_room()
            while True:
                if not self._takeable_now():
                    self._wait_to_take(end)
                if self._failure is not None:
                    raise self._failure
                number = min(most, self._takeable_now())
                if number <= 0 or self._stopped:
                    return []
                taken = self._take(number)
                if taken:
                    return taken

    def _takeable_now(self) -> int:
        return min(len(self._waiting), self._concurrency - len(self._in_progress) + len(self._waiting))

    def _wait_to_take(self, end: float | None) -> None:
        self._takers += 1
        try:
            while not self._takeable_now() and not self._stopped and self._failure is None:
                left = None if end is None else end - time.monotonic()
                if left is not None and left <= 0:
                    return
                self._takeable.wait(left)
        finally:
            self._takers -= 1

    def _take(self, number: int) -> list[Message]:
        now = time.monotonic()
        taken: list[Message] = []
        until = now + self._processing_seconds
        while self._waiting and len(taken) < number:
            message = self._waiting.popleft()
            if message._deadline > now:
                message._keep_alive_until = until
                taken.append(message)
            else:
                del self._in_progress[message]
                self._late.append(message)
        if not taken:
            self._tell_of_room()
            return taken
        if now - taken[0]._received_at > _LONGEST_WAIT_SECONDS and now - self._shrunk_at > _LONGEST_WAIT_SECONDS:
            self._ahead = max(self._fewest, self._ahead // 2)
            self._shrunk_at = now
        for message in taken:
            message._received_at = now
        self._tell_of_room()
        return taken

    def settle(self, message: Message) -> bool:
        """A message is done with; False if it was before, or has been dropped as hung."""
        with self._lock:
            return self._drop(message)

    def _drop(self, message: Message) -> bool:
        if message not in self._in_progress:
            return False
        was_full = len(self._in_progress) - len(self._waiting) >= self._concurrency
        del self._in_progress[message]
        self._tell_of_room()
        self._settled.notify_all()
        if was_full and self._waiting:
            self._takeable.notify()
            self._tell_listeners()
        return True

    def due(self, horizon: float) -> list[Message]:
        """The messages whose deadline comes before this moment of the monotonic clock."""
        with self._lock:
            return [message for message in self._in_progress if message._deadline <= horizon]

    def drop_hung(self, now: float) -> list[Message]:
        """Forget the messages that were processed for too long, and whose deadline has passed: others may have them."""
        with self._lock:
            hung = [m for m in self._in_progress if m._keep_alive_until <= now and m._deadline <= now]
            if hung:
                self._note_neglect()
            for message in hung:
                self._drop(message)
            return hung

    def withdraw(self, now: float) -> list[Message]:
        """Forget what has waited here for too long, or past its deadline, and was not handed out: to be given back."""
        with self._lock:
            withdrawn, self._late = self._late, []
            left = [message for message in self._waiting if self._may_wait(message, now)]
            if len(left) < len(self._waiting):
                gone = [message for message in self._waiting if not self._may_wait(message, now)]
                if any(message._deadline > now for message in gone):
                    self._note_neglect()
                self._waiting = deque(left)
                for message in gone:
                    self._drop(message)
                withdrawn += gone
            return withdrawn

    def _may_wait(self, message: Message, now: float) -> bool:
        return message._deadline > now and now - message._received_at < self._processing_seconds

    def _note_neglect(self) -> None:
        """Unless somebody is waiting to take, what is started here would only lie around."""
        if not self._takers:
            self._is_neglected = True
            self._tell_listeners()  # who takes by being told would never ask otherwise

    def fail(self, failure: BaseException) -> None:
        """Let every `take` raise from now on."""
        with self._lock:
            self._failure = failure
            self._wake_all()

    def stop(self) -> None:
        """Hand out nothing any more; `take` returns None."""
        with self._lock:
            self._stopped = True
            self._wake_all()

    def release(self) -> list[Message]:
        """After `stop`: what was never handed out, to be given back."""
        with self._lock:
            waiting = list(self._waiting)
            self._waiting.clear()
            for message in waiting:
                self._drop(message)
            late, self._late = self._late, []
            return waiting + late

    def wait_until_settled(self, seconds: float) -> bool:
        """Whether everything that was handed out is settled, at the latest after so many seconds."""
        with self._lock:
            return self._settled.wait_for(lambda: len(self._in_progress) == len(self._waiting), seconds)

    def listen(self, listener: Callable[[], None]) -> None:
        """Call it whenever a `take` may succeed that could not before. It must not wait, and calls nothing here."""
        with self._lock:
            self._listeners.append(listener)

    def _wake_all(self) -> None:
        self._takeable.notify_all()
        self._roomy.notify_all()
        self._tell_listeners()

    def _tell_listeners(self) -> None:
        for listener in self._listeners:
            listener()
