"""A thread that owns one store, so that the harvest thread never waits for the database."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TypeVar

from outbox_core.ports import OutboxStore

T = TypeVar("T")


class StoreThread:
    """Runs calls on a store, one after the other.

    Args:
        store: used on this thread only.
        name: the thread's name.
        on_done: called on this thread after each call, to wake whoever waits for the result.
    """

    def __init__(self, store: OutboxStore, name: str, on_done: Callable[[], None]) -> None:
        self._store = store
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)
        self._on_done = on_done

    def submit(self, work: Callable[[OutboxStore], T]) -> Future[T]:
        """Run `work(store)` after what was submitted before."""
        future = self._executor.submit(work, self._store)
        future.add_done_callback(lambda _: self._on_done())
        return future

    def close(self) -> None:
        """Close the store once the work under way is done. Does not wait for it."""
        self._executor.submit(self._store.close)
        self._executor.shutdown(wait=False)
