"""The record that an application stashes: a frozen value, validated when it is made.

A bad record fails where it is written, not hours later in the harvester. Checks that depend on the table (column
lengths, text or binary columns) follow when it is stashed (`outbox_core.schema.TableLayout.row`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from datetime import date, datetime, time, timedelta
from decimal import Decimal
from enum import Enum
from typing import Any, Final, Literal, NamedTuple
from uuid import UUID

from outbox_core.errors import InvalidRecord
from outbox_core.formats.serializer import Serializer, serialize
from outbox_core.plain import plain
from outbox_core.topic_names import topic_problem

__all__ = [
    "MAX_HEADERS_BYTES",
    "MAX_KEY_BYTES",
    "MAX_VALUE_BYTES",
    "Header",
    "OutboxRecord",
    "json_default",
]

MAX_KEY_BYTES = 64 * 2**10
"""Keys are held in memory for their order, a lane each, and travel with every statement while they are held."""
MAX_HEADERS_BYTES = 2**20
"""Names and values of a record's headers together: as much as a topic takes of a whole record by default."""
MAX_VALUE_BYTES = 1_000_000_000
"""More than this no librdkafka producer sends, whatever its `message.max.bytes`."""
BY_OUTBOX: Final = "outbox"
"""The serializer of a record whose value is left to that of its outbox."""
_MAX_PARTITION = 2**31 - 1


class Header(NamedTuple):
    """One Kafka record header: a name, and a value that may be bytes, text (stored as UTF-8) or None."""

    key: str
    value: bytes | str | None


@dataclass(frozen=True, slots=True)
class OutboxRecord:
    """A Kafka message that is written with the caller's transaction.

    Text, bytes and whole numbers may be of the caller's own types: an Enum of texts counts as its value, a lazy text
    as what it says.

    Attributes:
        topic: name of the Kafka topic: 1 to 249 of the characters a-z A-Z 0-9 . _ - Topics that Kafka and the outbox
            are run through are refused: `__...`, names that end in `.neli`, `.manifests` or `.relay-manifests`, and
            `<database>.<schema>.<table>.dead-letter`.
        key: decides the partition and the order: records of one topic and key are published in the order of their
            stashing. `str`, UTF-8 `bytes`, `int` and `UUID` are kept as text, at most 64 KiB. None: no key, no
            order. An empty key is a key: its records keep their order, in partition 0.
        value: `bytes` as they are, `str` as UTF-8, None is a tombstone, anything else becomes JSON
            (`datetime`, `date`, `time`, `UUID` and `Decimal` as strings).
        headers: a mapping or an iterable of (name, value) pairs; a name may occur more than once. Text values are
            sent as UTF-8. At most 1 MiB together. The harvester leaves out a header of its own name, `outbox-id`.
        partition: explicit partition, or None to let the partitioner choose by key.
        serializer: makes bytes or text of a value that is not None, before this returns: any function of the value,
            such as `orjson.dumps`, or a serializer of confluent-kafka. None leaves it to the outbox that stashes the
            record, if that has a serializer for the topic, and else to the rules of `value`. "outbox" does so too,
            also for values that JSON cannot express: `value` stays as it is until then. `bytes` keeps bytes as they
            are, whatever the outbox has.

    Raises:
        InvalidRecord: naming the field that is wrong.
        SerializationFailed: an `InvalidRecord`, naming topic, field and cause.
    """

    topic: str
    key: str | bytes | int | UUID | None = None
    value: Any = None
    headers: Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]] = ()
    partition: int | None = None
    serializer: Serializer | Literal["outbox"] | None = field(default=None, repr=False, compare=False)
    _given: Any = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        set_field = object.__setattr__
        set_field(self, "topic", _topic(self.topic))
        set_field(self, "key", _key(self.key))
        set_field(self, "headers", _headers(self.headers))
        set_field(self, "partition", _partition(self.partition))
        serializer, value = self.serializer, self.value
        set_field(self, "_given", value)
        if serializer is None or value is None:
            set_field(self, "value", _value(value))
        elif callable(serializer):
            serialized = self.serialized(serializer)
            set_field(self, "value", serialized.value)
            set_field(self, "headers", serialized.headers)
            set_field(self, "serializer", _as_it_is)
        elif serializer != BY_OUTBOX:
            raise InvalidRecord(f"serializer: expected a function, {BY_OUTBOX!r} or None, got {serializer!r:.200}")

    def serialized(self, serializer: Serializer) -> OutboxRecord:
        """Return the record with the value that it was made with, serialized; a tombstone stays one.

        Raises:
            SerializationFailed: naming topic, field and cause.
        """
        if self._given is None:
            return self
        value, headers = serialize(serializer, self._given, self.topic, self.headers)  # type: ignore[arg-type]
        return self._changed(value=_value(value), headers=_headers(headers), serializer=_as_it_is)

    def with_headers(self, more: Iterable[tuple[str, bytes | str | None]]) -> OutboxRecord:
        """Return the record with more headers behind its own; InvalidRecord names a header that is wrong."""
        return self._changed(headers=_headers((*self.headers, *more)))

    def claimed(self, claim: tuple[str, str]) -> OutboxRecord:
        """Return the record without its value, and with a header that says where the value is."""
        return self._changed(value="", headers=_headers((*self.headers, claim)))

    def _changed(self, **changes: Any) -> OutboxRecord:
        """Return a copy with other fields, which have been checked already."""
        copy = object.__new__(OutboxRecord)
        for name in self.__slots__:
            object.__setattr__(copy, name, changes[name] if name in changes else getattr(self, name))
        return copy


def _as_it_is(value: bytes | str) -> bytes | str:
    """Return a value that is serialized already: so `dataclasses.replace` of its record does not do it again."""
    return value


def _topic(topic: object) -> str:
    topic = plain(topic)
    if not isinstance(topic, str) or not topic:
        raise InvalidRecord(f"topic: a record needs the name of a Kafka topic, got {type(topic).__name__} {topic!r}")
    problem = topic_problem(topic)
    if problem is not None:
        raise InvalidRecord(f"topic: {problem}")
    return topic


def _partition(partition: object) -> int | None:
    partition = plain(partition)
    if partition is None:
        return None
    if not isinstance(partition, int) or isinstance(partition, bool) or not 0 <= partition <= _MAX_PARTITION:
        raise InvalidRecord(f"partition: expected a whole number from 0 to {_MAX_PARTITION} or None, got {partition!r}")
    return partition


def _key(key: object) -> str | None:
    key = plain(key)
    if key is None:
        return None
    if isinstance(key, bytes):
        try:
            key = key.decode()
        except UnicodeDecodeError:
            raise InvalidRecord("key: bytes that are not UTF-8 do not fit the text column kafka_key") from None
    if isinstance(key, UUID):
        return UUID.__str__(key)
    if isinstance(key, int) and not isinstance(key, bool):
        try:
            return str(key)
        except ValueError as error:
            raise InvalidRecord(f"key: {error}") from None
    if not isinstance(key, str):
        raise InvalidRecord(f"key: expected str, bytes, int, UUID or None, got {type(key).__name__}")
    _check_size(_text(key, "key"), MAX_KEY_BYTES, "key")
    return key


def _value(value: object) -> bytes | str | None:
    value = plain(value)
    if value is None:
        return None
    text = value if isinstance(value, bytes | str) else _json(value)
    if isinstance(text, str):
        _check_encodable(text, "value")
    _check_size(text, MAX_VALUE_BYTES, "value")
    return text


def _json(value: object) -> str:
    try:
        return json.dumps(value, default=json_default, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRecord(
            f"value: cannot be written as JSON ({error}); pass bytes or str instead, or a serializer"
        ) from error


def json_default(value: object) -> object:
    """Return what stands for a value that JSON has no type for, for the `default` of `json.dumps` or `orjson.dumps`.

    Times are ISO 8601, durations too; UUIDs, decimals and Django's lazy texts are text; an Enum is its value; of
    a dataclass and of a pydantic model it is the object of its fields.

    Raises:
        TypeError: if the library has nothing for it either.
    """
    own = plain(value)
    if isinstance(own, str | int):
        return own
    if isinstance(value, datetime | date | time | timedelta):
        return _iso_duration(value) if isinstance(value, timedelta) else value.isoformat()
    if isinstance(value, UUID | Decimal):
        return str(value)
    if isinstance(value, Enum):
        return value.value
    if is_dataclass(value) and not isinstance(value, type):
        return {each.name: getattr(value, each.name) for each in fields(value)}
    dump = getattr(value, "model_dump", None)
    if callable(dump) and not isinstance(value, type):
        return dump(mode="json")
    hint = "; make a list of it" if isinstance(value, set | frozenset) else ""
    raise TypeError(f"{type(value).__name__} is not JSON serializable{hint}")


def _iso_duration(value: timedelta) -> str:
    sign, value = ("-", -value) if value < timedelta(0) else ("", value)
    minutes, seconds = divmod(value.seconds, 60)
    hours, minutes = divmod(minutes, 60)
    fraction = f".{value.microseconds:06}" if value.microseconds else ""
    return f"{sign}P{value.days}DT{hours:02}H{minutes:02}M{seconds:02}{fraction}S"


def _headers(headers: object) -> tuple[Header, ...]:
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise InvalidRecord(f"headers: expected a mapping or (name, value) pairs, got {type(headers).__name__}")
    checked = tuple(_header(position, pair) for position, pair in enumerate(pairs))
    size = sum(_bytes_of(part) for header in checked for part in header)
    if size > MAX_HEADERS_BYTES:
        raise InvalidRecord(f"headers: {size} bytes of names and values, at most {MAX_HEADERS_BYTES} are allowed")
    return checked


def _header(position: int, pair: object) -> Header:
    where = f"headers[{position}]"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InvalidRecord(f"{where}: expected a (name, value) pair, got {pair!r:.200}")
    key, value = map(plain, pair)
    if not isinstance(key, str):
        raise InvalidRecord(f"{where}: the name must be str, got {type(key).__name__}")
    if isinstance(value, str):
        _check_encodable(value, where)
    elif value is not None and not isinstance(value, bytes):
        raise InvalidRecord(f"{where}: the value of {key!r} must be bytes, str or None, got {type(value).__name__}")
    return Header(_text(key, where), value)


def _text(text: str, where: str) -> str:
    """Return text for a Postgres text column: encodable, and without NUL, which such a column cannot hold."""
    _check_encodable(text, where)
    if "\0" in text:
        raise InvalidRecord(f"{where}: contains a NUL character, which a text column cannot hold")
    return text


def _bytes_of(part: str | bytes | None) -> int:
    if part is None or isinstance(part, bytes):
        return len(part or b"")
    return len(part) if part.isascii() else len(part.encode())


def _check_size(part: str | bytes, limit: int, where: str) -> None:
    size = _bytes_of(part)
    if size > limit:
        raise InvalidRecord(f"{where}: {size} bytes, at most {limit} are allowed")


def _check_encodable(text: str, where: str) -> None:
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidRecord(f"{where}: cannot be encoded as UTF-8 ({error.reason} at {error.start})") from None
