"""How long callers are ready to wait."""

from __future__ import annotations

from datetime import timedelta
from typing import overload

from outbox_queue.errors import InvalidMessage

Timeout = timedelta | float | None
"""A timedelta or seconds; None: see the function that takes it."""


@overload
def seconds(timeout: None) -> None: ...
@overload
def seconds(timeout: timedelta | float) -> float: ...
@overload
def seconds(timeout: Timeout) -> float | None: ...
def seconds(timeout: Timeout) -> float | None:
    """A timeout in seconds, none of it less than 0.

    Raises:
        InvalidMessage: if it is neither a timedelta nor a number.
    """
    if timeout is None:
        return None
    if isinstance(timeout, timedelta):
        return max(0.0, timeout.total_seconds())
    if isinstance(timeout, int | float) and not isinstance(timeout, bool):
        return max(0.0, float(timeout))
    raise InvalidMessage(f"timeout: expected a timedelta, seconds or None, got {timeout!r}")
