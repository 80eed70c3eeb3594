"""Durations as Go writes them: `5s`, `100ms`, `1m30s`, `1.5h`."""

from __future__ import annotations

import re
from datetime import timedelta

_MICROSECONDS = {
    "ns": 0.001,
    "us": 1,
    "µs": 1,
    "μs": 1,
    "ms": 1_000,
    "s": 1_000_000,
    "m": 60_000_000,
    "h": 3_600_000_000,
}
_PART = re.compile(r"(\d+(?:\.\d*)?|\.\d+)(ns|us|µs|μs|ms|s|m|h)")
_LONGEST = timedelta(days=365)


def parse_duration(value: object) -> timedelta:
    """Read a `timedelta` or text in Go's notation, or raise ValueError with the right notation.

    Refuses a bare number: goharvest's YAML would take it for nanoseconds, Python programmers for seconds.
    """
    if isinstance(value, timedelta):
        return value
    text = value.strip() if isinstance(value, str) else value
    if text in ("0", 0) and not isinstance(text, bool):
        return timedelta(0)
    if not isinstance(text, str):
        raise ValueError(_how_to_write(text))  # noqa: TRY004  pydantic reports ValueErrors
    unsigned = text.removeprefix("+")
    parts = _PART.findall(unsigned)
    if not parts or "".join(number + unit for number, unit in parts) != unsigned:
        raise ValueError(_how_to_write(text))
    microseconds = sum(float(number) * _MICROSECONDS[unit] for number, unit in parts)
    if microseconds > _LONGEST / timedelta(microseconds=1):
        raise ValueError("is longer than a year")
    return timedelta(microseconds=microseconds)


def format_duration(duration: timedelta) -> str:
    """Return the duration as `parse_duration` reads it: `100ms`, `5s`, `1.5s`, `1m30s`."""
    microseconds = duration // timedelta(microseconds=1)
    if microseconds < 1_000_000:
        return f"{microseconds / 1000:g}ms" if microseconds else "0s"
    minutes, rest = divmod(microseconds, 60_000_000)
    hours, minutes = divmod(minutes, 60)
    text = (f"{hours}h" if hours else "") + (f"{minutes}m" if minutes else "")
    return text + (f"{rest / 1_000_000:.6f}".rstrip("0").rstrip(".") + "s" if rest else "")


def _how_to_write(value: object) -> str:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if is_number or (isinstance(value, str) and re.fullmatch(r"\d+(\.\d+)?", value)):
        return f"a duration needs a unit; write `{value}s` for seconds or `{value}ms` for milliseconds"
    return "is not a duration; write for example `5s`, `100ms` or `1m30s`"
