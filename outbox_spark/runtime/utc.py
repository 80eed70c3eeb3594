"""Times in UTC, by microseconds since 1970: Spark's dates, truncations and casts go by the session's time zone."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_DAY = 24 * 60 * 60 * 1_000_000
_HOUR = 60 * 60 * 1_000_000


def day(time: str) -> str:
    """Return a SQL expression of the date of a timestamp, in UTC."""
    return f"date_from_unix_date(cast({_floored(time, _DAY)} div {_DAY} AS INT))"


def hour(time: str) -> str:
    """Return a SQL expression of the microsecond at which the hour of a timestamp begins; for `from_micros`."""
    return _floored(time, _HOUR)


def micros(time: str) -> str:
    """Return a SQL expression of a timestamp as a number that can be collected; for `from_micros`."""
    return f"unix_micros({time})"


def text(time: str) -> str:
    """Return a SQL expression of a timestamp as text with its offset from UTC, to the microsecond."""
    return f"(cast({time} AS STRING) || date_format({time}, 'xxxxx'))"


def from_micros(number: int | None) -> datetime | None:
    """Return the time of a collected number."""
    return None if number is None else _EPOCH + timedelta(microseconds=number)


def _floored(time: str, unit: int) -> str:
    return f"(unix_micros({time}) - pmod(unix_micros({time}), {unit}))"
