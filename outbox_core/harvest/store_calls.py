"""The harvest thread's calls on the threads that own a store each: one at a time, collected later or waited for.

Executors of `concurrent.futures` refuse work once the main thread has returned, when marks must still be cleared; hence
threads of our own.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import wait as wait_for_futures
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from outbox_core.election.lease import now
from outbox_core.errors import OutboxTableError, StoreUnavailable, TableUnusable, must
from outbox_core.harvest.steps import STATEMENT, Step
from outbox_core.stores.interface import OutboxStore

if TYPE_CHECKING:
    from outbox_core.harvest.context import HarvestContext  # which has these threads

T = TypeVar("T")

_TICK_SECONDS = 0.05


class StoreThread:
    """A thread that runs calls on a store, one after the other, until `close`; `on_done` is called on it after each.

    An OutboxTableError is a TableUnusable here: what was wrong at the start would have ended the harvester then.
    """

    def __init__(self, store: OutboxStore, name: str, on_done: Callable[[], None]) -> None:
        self._store = store
        self._on_done = on_done
        self._submitted: SimpleQueue[tuple[Future[Any], Callable[[OutboxStore], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[OutboxStore], T]) -> Future[T]:
        """Run `work(store)` after earlier calls. After `close` no call is run."""
        future: Future[T] = Future()
        self._submitted.put((future, work))
        return future

    def close(self) -> None:
        """Close the store once the call under way is done, without waiting for that."""
        self._submitted.put(None)

    def _run(self) -> None:
        try:
            while (submitted := self._submitted.get()) is not None:
                self._carry_out(*submitted)
                del submitted  # keeps no result alive while it waits for the next call
                self._on_done()
        finally:
            self._store.close()

    def _carry_out(self, future: Future[Any], work: Callable[[OutboxStore], Any]) -> None:
        try:
            future.set_result(work(self._store))
        except OutboxTableError as error:
            # The table was checked before this thread was started. Nobody knows which one comes back, so whatever
            # rests on the old one is in doubt.
            unusable = TableUnusable(str(error), in_doubt=True)
            unusable.__cause__ = error
            future.set_exception(unusable)
            del future
        except BaseException as error:
            future.set_exception(error)
            del future  # the error's traceback knows this frame: a cycle


class StoreCall(Generic[T]):
    """At most one call under way on a store's thread, with the outage log and backoff (`retry_at`) of its failures."""

    def __init__(self, thread: StoreThread, ctx: HarvestContext, step: Step = STATEMENT) -> None:
        self._thread = thread
        self._step = step
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
        step, activity = self._step, self._ctx.metrics.activity
        if step.work:
            activity.tries_to(step.work)  # now: the thread may hang in the call of an earlier leadership

        def noted(store: OutboxStore) -> T:
            with activity.statement(*step):
                return work(store)

        self._future = self._thread.submit(noted)

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
            self.retry_at = now() + self._ctx.note_outage(error, self._thread)
            raise
        self._ctx.database.recovered(self._thread)
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

    def retry_until_done(
        self, thread: StoreThread, work: Callable[[OutboxStore], T], step: Step = STATEMENT
    ) -> T | None:
        """Repeat a call until it succeeds; return None if the leadership ends first."""
        call: StoreCall[T] = StoreCall(thread, self._ctx, step)
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
