"""The harvest thread's calls on the stores' threads: one at a time, collected later or waited for."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from typing import Generic, TypeVar

from outbox_core.election.lease import now
from outbox_core.errors import StoreUnavailable, must
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.store_thread import StoreThread
from outbox_core.stores.interface import OutboxStore

T = TypeVar("T")

_TICK_SECONDS = 0.05


class StoreCall(Generic[T]):
    """At most one call under way on a store's thread, with the outage log and backoff (`retry_at`) of its failures."""

    def __init__(self, thread: StoreThread, ctx: HarvestContext) -> None:
        self._thread = thread
        self._ctx = ctx
        self._future: Future[T] | None = None
        self.retry_at = 0.0

    @property
    def is_running(self) -> bool:
        """True from `start` until `result`."""
        return self._future is not None

    @property
    def is_done(self) -> bool:
        """True if `result` returns at once."""
        return self._future is not None and self._future.done()

    @property
    def can_start(self) -> bool:
        """True if no call is under way and the backoff is over."""
        return self._future is None and now() >= self.retry_at

    def start(self, work: Callable[[OutboxStore], T]) -> None:
        """Run `work(store)` on the store's thread."""
        must(self._future is None, "a call must not start while another is under way")
        self._future = self._thread.submit(work)

    def wait(self, seconds: float) -> None:
        """Wait for the call to end, at most so long."""
        if self._future is not None:
            wait_for_futures([self._future], timeout=seconds)

    def abandon(self) -> None:
        """Forget the call under way; its result is lost."""
        self._future = None

    def result(self) -> T:
        """Return the result of the call; on StoreUnavailable note the outage, and set `retry_at`."""
        future, self._future = self._future, None
        if future is None:
            raise RuntimeError("no call is under way")
        try:
            result = future.result()
        except StoreUnavailable as error:
            self.retry_at = now() + self._ctx.note_outage(error)
            raise
        self._ctx.database.recovered()
        return result


class LeadershipWait:
    """Waits that end when the leadership does, or a bounded time later."""

    def __init__(self, over: Callable[[], bool], ctx: HarvestContext) -> None:
        self._over = over
        self._ctx = ctx

    def until_done(self, call: StoreCall[T], give_up_at: float | None = None) -> bool:
        """Wait for a call to end: until a time, or without one until `drain_timeout` after the leadership's end."""
        over_since: float | None = None
        while not call.is_done:
            if give_up_at is None and over_since is None and self._over():
                over_since = now()
            remaining = (give_up_at or (over_since or now()) + self._ctx.limits.drain_timeout) - now()
            if remaining <= 0:
                return False
            call.wait(min(_TICK_SECONDS, remaining))
        return True

    def result(self, call: StoreCall[T]) -> T | None:
        """Return the result of a call that is done; None, after its backoff, if the database failed."""
        try:
            return call.result()
        except StoreUnavailable:
            self.back_off(call.retry_at - now())
            return None

    def retry_until_done(self, thread: StoreThread, work: Callable[[OutboxStore], T]) -> T | None:
        """Repeat a call until it succeeds; return None if the leadership ends first."""
        call: StoreCall[T] = StoreCall(thread, self._ctx)
        while not self._over():
            call.start(work)
            if not self.until_done(call):
                return None
            result = self.result(call)
            if result is not None:
                return result
        return None

    def pause(self, seconds: float) -> None:
        """Wait for so long, or until a wake-up."""
        if seconds > 0 and not self._over():
            self._ctx.wake.wait(seconds)
            self._ctx.wake.clear()

    def back_off(self, seconds: float) -> None:
        """Wait for so long, through all wake-ups: a failure is not repeated for every commit that is signalled."""
        end = now() + seconds
        while (remaining := end - now()) > 0 and not self._over():
            self._ctx.wake.wait(remaining)
            self._ctx.wake.clear()
