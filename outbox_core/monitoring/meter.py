"""Throughput of published records, total and per interval (the `MeterRead` event)."""

from __future__ import annotations

from collections.abc import Callable

from outbox_core.events import MeterStats


class Meter:
    """A counter of records that reports their rate at most once in `interval_seconds`."""

    def __init__(self, interval_seconds: float, clock: Callable[[], float]) -> None:
        self._interval = interval_seconds
        self._clock = clock
        self._started = self._interval_started = clock()
        self._total = self._in_interval = 0

    def add(self, count: int) -> MeterStats | None:
        """Count records; return a reading when one is due. An interval without records has none."""
        self._total += count
        self._in_interval += count
        now = self._clock()
        elapsed = now - self._interval_started
        if elapsed < self._interval or not elapsed:
            return None
        if not self._in_interval:
            self._interval_started = now
            return None
        total_elapsed = now - self._started
        stats = MeterStats(
            interval_seconds=elapsed,
            total_seconds=total_elapsed,
            interval_count=self._in_interval,
            total_count=self._total,
            interval_rate=self._in_interval / elapsed,
            total_rate=self._total / total_elapsed,
        )
        self._interval_started, self._in_interval = now, 0
        return stats
