"""Comparing stashed records with what a test expects, and saying how they differ."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from difflib import SequenceMatcher
from types import EllipsisType
from typing import Any
from uuid import UUID

from outbox_core.errors import InvalidRecord
from outbox_core.plain import plain
from outbox_core.record import Header, OutboxRecord

__all__ = ["Expectation", "ExpectedHeaders", "ExpectedKey", "bytes_of", "describe", "headers_of", "is_same"]

ExpectedKey = str | bytes | int | UUID | None | EllipsisType
ExpectedHeaders = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]] | EllipsisType

_LONGEST = 200  # characters of a value or a difference
_MISSING = object()


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectation:
    """A description of a record by some of its fields; the others (`...`) may be anything.

    Attributes:
        topic: the very name.
        key: compared as the table keeps it: 7, "7" and b"7" are one key. None: without a key.
        value: `bytes` and `str` are compared with the record's bytes, None with a tombstone. Anything else is compared
            with the value read as JSON, and may have objects in it that equal others, such as `unittest.mock.ANY`.
        headers: these are among the record's, with these values.
        partition: the explicit partition; None: none was given.
    """

    topic: str | EllipsisType = ...
    key: ExpectedKey = ...
    value: Any = ...
    headers: ExpectedHeaders = ...
    partition: int | EllipsisType | None = ...

    def __post_init__(self) -> None:
        # What no record can have is a mistake in the test, not a record that was not stashed.
        key = None if isinstance(self.key, EllipsisType) else self.key
        headers = () if isinstance(self.headers, EllipsisType) else self.headers
        topic = "any" if isinstance(self.topic, EllipsisType) else self.topic
        checked = OutboxRecord(topic, key, headers=headers)
        object.__setattr__(self, "value", plain(self.value))
        if not isinstance(self.topic, EllipsisType):
            object.__setattr__(self, "topic", checked.topic)
        if not isinstance(self.key, EllipsisType):
            object.__setattr__(self, "key", checked.key)
        if not isinstance(self.headers, EllipsisType):
            object.__setattr__(self, "headers", checked.headers)

    def matches(self, record: OutboxRecord) -> bool:
        """Return True if the record is as described."""
        return not any(self.differences(record))

    def differences(self, record: OutboxRecord) -> Iterator[str]:
        """Yield a line for each part of a record that is not as described."""
        for field in ("topic", "key", "partition"):
            expected, actual = getattr(self, field), getattr(record, field)
            if expected is not ... and expected != actual:
                yield f"{field}: expected {_short(expected)}, got {_short(actual)}"
        if self.value is not ...:
            yield from _value_differences(self.value, record)
        if self.headers is not ...:
            yield from _header_differences(self.headers, record)

    def likeness(self, record: OutboxRecord) -> float:
        """Return how near a record comes to the description: the fewer and smaller differences, the more."""
        likeness = 0.0
        if isinstance(self.topic, str):
            likeness += 4 if self.topic == record.topic else 2 * SequenceMatcher(None, self.topic, record.topic).ratio()
        if self.key is not ...:
            likeness += 2 * (self.key == record.key)
        for expected, differences in ((self.value, _value_differences), (self.headers, _header_differences)):
            if expected is not ...:
                likeness += 1 / (1 + len(list(differences(expected, record))))
        return likeness

    def __str__(self) -> str:
        where = "on any topic" if self.topic is ... else f"on topic {self.topic!r}"
        parts = [f"{name} {_short(value)}" for name, value in self._others() if value is not ...]
        return f"{where} with {', '.join(parts)}" if parts else where

    def _others(self) -> list[tuple[str, Any]]:
        headers = self.headers if isinstance(self.headers, EllipsisType) else dict(self.headers)
        return [("key", self.key), ("value", self.value), ("headers", headers), ("partition", self.partition)]


def is_same(record: OutboxRecord, other: object) -> bool:
    """Return True if both are the same message on Kafka, whether their values were given as text or as bytes."""
    return isinstance(other, OutboxRecord) and _on_kafka(record) == _on_kafka(other)


def _on_kafka(record: OutboxRecord) -> tuple[object, ...]:
    headers = [(name, bytes_of(value)) for name, value in headers_of(record)]
    return record.topic, record.key, bytes_of(record.value), headers, record.partition


def describe(record: OutboxRecord) -> str:
    """Return a record in one line."""
    headers = ", ".join(f"{name}={_short(_text(value))}" for name, value in headers_of(record))
    parts = [
        record.topic,
        f"key={_short(record.key)}",
        f"value={_short(_text(record.value))}",
        f"headers: {headers}" if headers else "",
        f"partition={record.partition}" if record.partition is not None else "",
    ]
    return "  ".join(filter(None, parts))


def _value_differences(expected: Any, record: OutboxRecord) -> Iterator[str]:
    actual = bytes_of(record.value)
    if expected is None or isinstance(expected, str | bytes) or actual is None:
        wanted = bytes_of(expected) if expected is None or isinstance(expected, str) else expected
        if wanted != actual:
            yield f"value: expected {_short(expected)}, got {_short(_text(record.value))}"
        return
    try:
        document = json.loads(actual)
    except ValueError:
        yield f"value: expected {_short(expected)}, got {_short(_text(record.value))}, which is not JSON"
        return
    if document != expected and document != _as_json(expected):
        yield from _document_differences(_as_json(expected), document, "value")


def _as_json(expected: Any) -> Any:
    """Return the value as a reader of the record sees it: dates and decimals as text, tuples as lists."""
    try:
        return json.loads(bytes_of(OutboxRecord("any", value=[expected]).value) or b"")[0]  # text alone is no JSON
    except InvalidRecord:  # it has an object in it that compares by itself
        return expected


def _document_differences(expected: Any, actual: Any, path: str) -> Iterator[str]:
    if isinstance(expected, Mapping) and isinstance(actual, dict):
        for name in {**expected, **actual}:
            yield from _document_differences(expected.get(name, _MISSING), actual.get(name, _MISSING), f"{path}.{name}")
    elif isinstance(expected, list | tuple) and isinstance(actual, list) and len(expected) == len(actual):
        for position, (one, other) in enumerate(zip(expected, actual, strict=True)):
            yield from _document_differences(one, other, f"{path}[{position}]")
    elif actual is _MISSING:
        yield f"{path}: expected {_short(expected)}, but it is missing"
    elif expected is _MISSING:
        yield f"{path}: not expected, got {_short(actual)}"
    elif expected != actual and _as_json(expected) != actual:
        yield f"{path}: expected {_short(expected)}, got {_short(actual)}"


def _header_differences(expected: Any, record: OutboxRecord) -> Iterator[str]:
    actual = [(name, bytes_of(value)) for name, value in headers_of(record)]
    wanted: tuple[Header, ...] = expected
    for name, value in wanted:
        if (name, bytes_of(value)) in actual:
            continue
        others = [_short(_text(found)) for other, found in actual if other == name]
        got = f"got {', '.join(others)}" if others else "but it is missing"
        yield f"header {name}: expected {_short(_text(value))}, {got}"


def headers_of(record: OutboxRecord) -> tuple[Header, ...]:
    """Return the headers of a record."""
    return record.headers  # type: ignore[return-value]  # as it keeps them, whatever it was given


def bytes_of(value: bytes | str | None) -> bytes | None:
    """Return text as it is stored."""
    return value.encode() if isinstance(value, str) else value


def _text(value: Any) -> Any:
    """Return bytes as text where they are some."""
    try:
        return value.decode() if isinstance(value, bytes) else value
    except UnicodeDecodeError:
        return value


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}... ({len(text)} characters)"
