"""Durations that callers pass, and times as markers and headers hold them."""

from __future__ import annotations

import time
from datetime import UTC, datetime, timedelta
from typing import overload

from outbox_queue.config import milliseconds
from outbox_queue.errors import InvalidMessage

Timeout = timedelta | float | None  # seconds, if it is a number

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_LAST_MS = 253_402_300_799_999  # of the calendar


@overload
def seconds(timeout: None) -> None: ...
@overload
def seconds(timeout: timedelta | float) -> float: ...
@overload
def seconds(timeout: Timeout) -> float | None: ...
def seconds(timeout: Timeout) -> float | None:
    """Convert a timeout to seconds, at least 0; None stays None."""
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        return max(0.0, timeout.total_seconds())
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        return max(0.0, float(timeout))
    raise InvalidMessage(f"timeout: expected a timedelta, seconds or None, got {timeout!r}")


def delay_milliseconds(delay: timedelta | None) -> int:
    """Convert a delay to whole milliseconds; None is no delay."""
    if delay is None:
        return 0
    if not isinstance(delay, timedelta) or delay < timedelta(0):
        raise InvalidMessage(f"delay: expected a timedelta of none or more, got {delay!r}")
    return milliseconds(delay)


def utc_time(since_1970_ms: int) -> datetime:
    """Convert milliseconds since 1970; a time beyond the calendar becomes the calendar's last."""
    return _EPOCH + timedelta(milliseconds=min(max(0, since_1970_ms), _LAST_MS))


def now_ms() -> int:
    """Return the wall clock's milliseconds since 1970."""
    return time.time_ns() // 1_000_000
