"""A thread that owns one store, so that the harvest thread never waits for the database.

Not an executor of `concurrent.futures`: those refuse work as soon as the main thread has returned, and what is in
flight must still be settled then.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from outbox_core.ports import OutboxStore

T = TypeVar("T")


class StoreThread:
    """Runs calls on a store, one after the other, from its making until `close`.

    Args:
        store: used on this thread only.
        name: the thread's name.
        on_done: called on this thread after each call, to wake whoever waits for the result.
    """

    def __init__(self, store: OutboxStore, name: str, on_done: Callable[[], None]) -> None:
        self._store = store
        self._on_done = on_done
        self._submitted: SimpleQueue[tuple[Future[Any], Callable[[OutboxStore], Any]] | None] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def submit(self, work: Callable[[OutboxStore], T]) -> Future[T]:
        """Run `work(store)` after what was submitted before. After `close` nothing is run any more."""
        future: Future[T] = Future()
        self._submitted.put((future, work))
        return future

    def close(self) -> None:
        """Close the store once the work under way is done. Does not wait for it."""
        self._submitted.put(None)

    def _run(self) -> None:
        try:
            while (submitted := self._submitted.get()) is not None:
                self._carry_out(*submitted)
                del submitted  # while waiting for the next, nothing of this one is kept
                self._on_done()
        finally:
            self._store.close()

    def _carry_out(self, future: Future[Any], work: Callable[[OutboxStore], Any]) -> None:
        try:
            future.set_result(work(self._store))
        except BaseException as error:
            future.set_exception(error)
            del future  # the error's traceback knows this frame: a cycle
