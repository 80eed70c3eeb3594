"""How the harvest thread waits for statements that run on other threads, without outstaying its leadership."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Any, TypeVar

from outbox_core.election.leadership import now
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest.store_thread import StoreThread
from outbox_core.harvest.surroundings import Surroundings, Timing
from outbox_core.ports import OutboxStore

T = TypeVar("T")

_TICK_SECONDS = 0.05


class Waiting:
    """Waits that end when the leadership does, or a bounded time later.

    Args:
        over: whether the leadership is over.
        timing: limits.
        surroundings: the wake-up and the database's state.
    """

    def __init__(self, over: Callable[[], bool], timing: Timing, surroundings: Surroundings) -> None:
        self._over = over
        self._timing = timing
        self._with = surroundings

    def until_done(self, future: Future[Any], give_up_at: float | None = None) -> bool:
        """Wait for a statement to end: until a time, or without one until some time after the leadership's end."""
        over_since: float | None = None
        while not future.done():
            if give_up_at is None and over_since is None and self._over():
                over_since = now()
            remaining = (give_up_at or (over_since or now()) + self._timing.drain_timeout) - now()
            if remaining <= 0:
                return False
            wait_for_futures([future], timeout=min(_TICK_SECONDS, remaining))
        return True

    def pause(self, seconds: float) -> None:
        """Wait a while, or until something happens."""
        if seconds > 0 and not self._over():
            self._with.wake.wait(seconds)
            self._with.wake.clear()

    def rest(self, seconds: float) -> None:
        """Wait a while, whatever happens: what failed is not to be tried again for every commit that is told of."""
        rested_at = now() + seconds
        while (remaining := rested_at - now()) > 0 and not self._over():
            self._with.wake.wait(remaining)
            self._with.wake.clear()

    def result(self, future: Future[T]) -> T | None:
        """The result of a statement that has ended; None, after a pause, if the database is away."""
        try:
            result = future.result()
        except StoreUnavailable as error:
            self.rest(self._with.note_outage(error, self._timing.io_error_backoff))
            return None
        self._with.database.ended()
        return result

    def insist(self, thread: StoreThread, work: Callable[[OutboxStore], T]) -> T | None:
        """Run a statement until it succeeds; None if the leadership ends first."""
        while not self._over():
            future = thread.submit(work)
            if not self.until_done(future):
                return None
            result = self.result(future)
            if result is not None:
                return result
        return None
