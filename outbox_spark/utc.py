"""Times in UTC, whatever time zone the Spark session, the driver and the database have.

Spark's `to_date`, `date_trunc` and casts to text go by the session's time zone, and times that are collected come as
local times of the driver. These expressions go by the microseconds since 1970, which have no zone.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = 24 * 60 * 60 * 1_000_000
_HOUR = 60 * 60 * 1_000_000


def day(time: str) -> str:
    """A SQL expression: the date of a timestamp, in UTC."""
    return f"date_from_unix_date(cast({_floored(time, _DAY)} div {_DAY} AS INT))"


def hour(time: str) -> str:
    """A SQL expression: the microsecond at which the hour of a timestamp begins; for `from_micros`."""
    return _floored(time, _HOUR)


def micros(time: str) -> str:
    """A SQL expression: a timestamp as a number that can be collected; for `from_micros`."""
    return f"unix_micros({time})"


def text(time: str) -> str:
    """A SQL expression: a timestamp as text with its offset from UTC, to the microsecond."""
    return f"(cast({time} AS STRING) || date_format({time}, 'xxxxx'))"


def from_micros(number: int | None) -> datetime | None:
    """The time that was collected as a number."""
    return None if number is None else _EPOCH + timedelta(microseconds=number)


def _floored(time: str, unit: int) -> str:
    return f"(unix_micros({time}) - pmod(unix_micros({time}), {unit}))"
