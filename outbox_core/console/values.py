"""Values of records as JSON can have them, exactly as they are stored: text, or base64 of what is no text."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterable
from datetime import datetime
from typing import Any, Final, NamedTuple, Self

from outbox_core.doctor.pending import PendingRecord

MOST_HEADERS: Final = 1_000
"""The headers of a record or letter that is shown alone; of more only the first."""
MOST_LISTED_HEADERS: Final = 20
"""The same in lists."""
_ANSWER_BYTES: Final = 4 * 2**20
_HEADERS_BYTES: Final = 2 * 2**20  # of one record or letter


class ShownHeader(NamedTuple):
    """A header, with the beginning of its value, and the size of the whole."""

    name: str
    value: bytes | None
    size_bytes: int

    @classmethod
    def of(cls, name: str, value: bytes | None, most: int) -> Self:
        """Return a header with at most so much of its name and value."""
        return cls(name[:most], None if value is None else value[:most], len(value or b""))


def shown_headers(headers: Iterable[tuple[str, bytes | None]], most: int) -> tuple[ShownHeader, ...]:
    """Return the first headers, with at most so much of the name and value of each, as many as one answer may have."""
    found: list[ShownHeader] = []
    left = _HEADERS_BYTES
    for name, value in headers:
        if left <= 0:
            break
        found.append(ShownHeader.of(name, value, min(most, left)))
        left -= len(found[-1].name) + len(found[-1].value or b"")
    return tuple(found)


def within_budget(documents: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the first documents of a list, as many as one answer may have; at least one, if there is any."""
    found: list[dict[str, Any]] = []
    left = _ANSWER_BYTES
    for document in documents:
        left -= len(json.dumps(document, ensure_ascii=False))
        if left < 0 and found:
            break
        found.append(document)
    return found


def value_as_json(content: bytes | None, size_bytes: int | None = None) -> dict[str, Any]:
    """Return a value, of which `content` may be the beginning; `size_bytes` is the size of the whole."""
    if content is None:
        return {"kind": "tombstone", "text": None, "base64": None, "size_bytes": 0, "is_cut": False}
    size = len(content) if size_bytes is None else size_bytes
    is_cut = len(content) < size
    text = _text(content, is_cut=is_cut)
    kind = "binary" if text is None else "json" if not is_cut and _is_json(text) else "text"
    encoded = base64.b64encode(content).decode() if text is None else None
    return {"kind": kind, "text": text, "base64": encoded, "size_bytes": size, "is_cut": is_cut}


def record_as_json(record: PendingRecord, header_bytes: int) -> dict[str, Any]:
    """Return a pending record; of the names and values of its headers at most so much."""
    hold = None
    if record.hold_id is not None:
        hold = {"id": str(record.hold_id), "what": record.hold_kind, "cause": record.hold_reason}
    return {
        "id": str(record.id),
        "topic": record.topic,
        "key": record.key,
        "partition": record.partition,
        "create_time": iso_time(record.create_time),
        "age_seconds": None if record.age_seconds is None else round(record.age_seconds, 3),
        "is_marked": record.is_marked,
        "size_bytes": record.size_bytes,
        "value": value_as_json(record.value, record.size_bytes),
        "headers": headers_as_json(shown_headers(record.headers, header_bytes)),
        "header_count": record.header_count,
        "hold": hold,
    }


def headers_as_json(headers: Iterable[ShownHeader]) -> list[list[Any]]:
    """Return headers, pairs of name and value, in their order."""
    return [[name, value_as_json(value, size)] for name, value, size in headers]


def _text(content: bytes, *, is_cut: bool) -> str | None:
    """Return bytes as text, None if they are none; a cut may have gone through the last character."""
    for dropped in range(4 if is_cut else 1):
        try:
            text = content[: len(content) - dropped].decode()
        except UnicodeDecodeError:
            continue
        return None if "\0" in text else text
    return None


def _is_json(text: str) -> bool:
    try:
        # Numbers may be of any length: none is made of them. NaN and Infinity are no JSON.
        json.loads(text, parse_int=len, parse_float=len, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return False
    return True


def _refuse(constant: str) -> None:
    raise ValueError(constant)


def iso_time(text: str) -> str:
    """Return a time as PostgreSQL writes it in ISO 8601; one that Python cannot express stays as it is."""
    try:
        return datetime.fromisoformat(text).isoformat()
    except ValueError:  # infinity, or before the year 1
        return text
