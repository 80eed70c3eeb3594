"""A thread that owns one store, so that the harvest thread never waits for the database.

Executors of `concurrent.futures` refuse work once the main thread has returned, when marks must still be cleared.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from queue import SimpleQueue
from typing import Any, TypeVar

from outbox_core.stores.interface import OutboxStore

T = TypeVar("T")


class StoreThread:
    """A thread that runs calls on a store, one after the other, until `close`; `on_done` is called on it after each."""

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
        except BaseException as error:
            future.set_exception(error)
            del future  # the error's traceback knows this frame: a cycle
