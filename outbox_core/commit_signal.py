"""Signals of commits: code that commits records notifies the harvesters in its process. Safe in any thread.

A harvester's `CommitFlag` takes them, and those that NOTIFY brings from other processes (`upkeep.wakeup`). A spurious
signal costs one query, a missed one at most one polling interval.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

__all__ = [
    "has_subscribers",
    "notify",
    "subscribe",
]

_lock = threading.Lock()
_subscribers: tuple[Callable[[], None], ...] = ()  # replaced as a whole, so that `notify` needs no lock


def notify() -> None:
    """Tell all subscribers that records may have been committed."""
    for subscriber in _subscribers:
        subscriber()


def has_subscribers() -> bool:
    """Return True if `notify` has any effect in this process."""
    return bool(_subscribers)


def subscribe(callback: Callable[[], None]) -> Callable[[], None]:
    """Have a callback called at every `notify`, on the notifying thread; return an idempotent function to unsubscribe.

    The callback must be short and must not raise.
    """
    global _subscribers  # noqa: PLW0603  one signal for the process

    def entry() -> None:
        callback()

    def unsubscribe() -> None:
        global _subscribers  # noqa: PLW0603
        with _lock:
            _subscribers = tuple(other for other in _subscribers if other is not entry)

    with _lock:
        _subscribers = (*_subscribers, entry)
    return unsubscribe


class CommitFlag:
    """A flag that any thread sets when records may be committed, and the harvest thread clears when a poll starts."""

    def __init__(self, wake: threading.Event) -> None:
        self._wake = wake
        self._is_set = False
        # while every commit is signalled, so that polling without a signal can be rare
        self.is_reliable = False

    def notify(self) -> None:
        """Signal that something may have been committed."""
        self._is_set = True
        self._wake.set()

    def clear(self) -> None:
        """Clear the flag: a poll that starts now sees every commit that was signalled before."""
        self._is_set = False

    def __bool__(self) -> bool:
        return self._is_set
