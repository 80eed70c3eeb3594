"""Readings that are shared: however many pages ask, a service is asked once in a while, and by one thread."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Generic, NamedTuple, TypeVar

_log = logging.getLogger(__name__)

T = TypeVar("T")


class Reading(NamedTuple, Generic[T]):
    """A value, and when it was read."""

    value: T
    at: datetime
    read_at: float
    """By the monotonic clock."""


class Cached(Generic[T]):
    """A value that is read on a thread of its own when it is asked for and older than `fresh_seconds`.

    For any thread. `read` must return within seconds; what it raises is a defect, which is logged.
    """

    def __init__(self, read: Callable[[], T], fresh_seconds: float, name: str) -> None:
        self._read = read
        self._fresh_seconds = fresh_seconds
        self._name = name
        self._changed = threading.Condition()
        self._reading: Reading[T] | None = None
        self._is_running = False
        self._expired = 0  # how often `expire` was called

    @property
    def is_running(self) -> bool:
        """True while a thread reads the value anew."""
        return self._is_running

    def get(self, wait_seconds: float) -> Reading[T] | None:
        """Return the value, waiting for a fresh one at most so long; then an older one, or None if there is none."""
        with self._changed:
            if not self._is_fresh() and not self._is_running:
                threading.Thread(target=self._refresh, name=self._name, daemon=True).start()
                self._is_running = True  # not before: where no thread can be had, the next request tries again
            self._changed.wait_for(self._is_settled, timeout=wait_seconds)
            return self._reading

    @property
    def latest(self) -> Reading[T] | None:
        """The last value, however old."""
        return self._reading

    def expire(self) -> None:
        """Have the value read anew when it is asked for next: something was changed."""
        with self._changed:
            self._expired += 1
            if self._reading is not None:
                self._reading = self._reading._replace(read_at=float("-inf"))

    def _is_settled(self) -> bool:
        return self._is_fresh() or not self._is_running

    def _is_fresh(self) -> bool:
        return self._reading is not None and time.monotonic() - self._reading.read_at <= self._fresh_seconds

    def _refresh(self) -> None:
        expired = self._expired
        value: Reading[T] | None = None
        try:
            value = Reading(self._read(), datetime.now(UTC), time.monotonic())
        except Exception:
            _log.exception("%s failed", self._name)
        finally:
            with self._changed:
                if value is not None:
                    # What was changed meanwhile may be missing in it.
                    is_old = self._expired != expired
                    self._reading = value._replace(read_at=float("-inf")) if is_old else value
                self._is_running = False
                self._changed.notify_all()
