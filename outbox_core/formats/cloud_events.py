"""CloudEvents 1.0 in Kafka's binary content mode: attributes in headers `ce_...`, data as the record's value.

The producer's half is `cloud_event_record`, the consumer's `CloudEvent.of`. Both follow the Kafka protocol binding
1.0.2: attribute values are UTF-8, `datacontenttype` is the header `content-type`, and an event's `partitionkey` is the
record's key.
"""

from __future__ import annotations

import base64
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

from outbox_core.errors import InvalidRecord, OutboxError
from outbox_core.formats.serializer import Serializer
from outbox_core.plain import plain
from outbox_core.record import OutboxRecord

__all__ = ["CloudEvent", "InvalidCloudEvent", "cloud_event_record"]

_LEAP_SECOND = re.compile(r"(?P<minute>T\d\d:\d\d):60(?:\.\d+)?")
_PREFIX = "ce_"
_CONTENT_TYPE = "content-type"
_STRUCTURED = "application/cloudevents"
_VERSION = "1.0"
_JSON = re.compile(r"application/(.+\+)?json\s*(;.*)?\Z", re.IGNORECASE)
_NAME = re.compile(r"[a-z0-9]{1,20}\Z")
_REQUIRED = ("id", "source", "specversion", "type")
_OPTIONAL = ("dataschema", "subject", "time")


class InvalidCloudEvent(OutboxError, ValueError):
    """A received record is no CloudEvent in binary mode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CloudEvent:
    """A received event.

    Attributes:
        id: unique within its source.
        source: a URI reference of where it happened.
        type: what happened, such as `com.example.order.paid`.
        data: bytes as they were sent; None for an event without data.
        datacontenttype: media type of the data.
        dataschema: URI of its schema.
        subject: what it is about, within the source.
        time: when it happened.
        extensions: the other attributes, as text.
    """

    id: str
    source: str
    type: str
    data: bytes | None = field(default=None, repr=False)
    datacontenttype: str | None = None
    dataschema: str | None = None
    subject: str | None = None
    time: datetime | None = None
    extensions: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def of(cls, headers: Iterable[tuple[str, bytes | str | None]] | None, value: bytes | None) -> CloudEvent:
        """Read a record: `CloudEvent.of(message.headers(), message.value())`.

        Raises:
            InvalidCloudEvent: naming the attribute that is missing or cannot be read, or if the record has another
                content mode or version.
        """
        found = dict(_attribute(name, content) for name, content in headers or () if _is_ours(name))
        content_type = found.pop(_CONTENT_TYPE, None)
        if content_type is not None and content_type.lower().startswith(_STRUCTURED):
            raise InvalidCloudEvent(f"content-type: {content_type} is the structured mode, only the binary one is read")
        for name in _REQUIRED:
            if not found.get(name):
                raise InvalidCloudEvent(f"{_PREFIX}{name}: the record has no such header, so it is no CloudEvent")
        if found.pop("specversion") != _VERSION:
            raise InvalidCloudEvent(f"{_PREFIX}specversion: only {_VERSION} is read")
        taken: dict[str, Any] = {name: found.pop(name) for name in ("id", "source", "type")}
        optional: dict[str, Any] = {name: found.pop(name, None) for name in _OPTIONAL}
        optional["time"] = _read_time(optional["time"])
        return cls(**taken, **optional, data=value, datacontenttype=content_type, extensions=found)

    def json(self) -> Any:
        """Return the data, read as JSON; InvalidCloudEvent if it is none."""
        if self.data is None or (self.datacontenttype is not None and not _JSON.match(self.datacontenttype)):
            raise InvalidCloudEvent(f"data: expected JSON, got {self.datacontenttype or 'no data'}")
        try:
            return json.loads(self.data)
        except (ValueError, RecursionError) as error:
            raise InvalidCloudEvent(f"data: is no JSON ({type(error).__name__})") from None


def cloud_event_record(
    topic: str,
    data: Any = None,
    *,
    type: str,  # noqa: A002  the attribute's name
    source: str,
    id: str | UUID | None = None,  # noqa: A002
    time: datetime | None = None,
    subject: str | None = None,
    datacontenttype: str | None = None,
    dataschema: str | None = None,
    extensions: Mapping[str, str | int | bool | bytes | datetime] | None = None,
    key: str | bytes | int | UUID | None = None,
    headers: Iterable[tuple[str, bytes | str | None]] = (),
    partition: int | None = None,
    serializer: Any = None,
) -> OutboxRecord:
    """Make a record of an event, for any outbox.

    Args:
        topic: the record's topic, as `key`, `headers` and `partition` are the record's.
        data: the record's value, by the rules of `OutboxRecord.value` or by `serializer`.
        type: what happened, such as `com.example.order.paid`.
        source: a URI reference of where it happened, such as `/shop/orders`.
        id: unique within the source; None for a random UUID. The same event keeps its id when it is sent again.
        time: when it happened, with a time zone; None for now.
        subject: what it is about, within the source.
        datacontenttype: media type of the data; None for `application/json` if the value becomes JSON, else not sent.
        dataschema: URI of the schema.
        extensions: more attributes; names of 1 to 20 of the characters a-z and 0-9. A `partitionkey` is the key, if
            that is None.
        key: the record's key.
        headers: more headers.
        partition: the record's partition.
        serializer: the record's serializer.

    Raises:
        InvalidRecord: naming the attribute or field that is wrong.
    """
    if datacontenttype is None and serializer is None and not isinstance(plain(data), bytes | str | None):
        datacontenttype = "application/json"
    more = dict(extensions or {})
    given = {
        "specversion": _VERSION,
        "id": str(uuid4() if id is None else plain(id)),
        "source": source,
        "type": type,
        "time": datetime.now(UTC) if time is None else time,
        "subject": subject,
        "dataschema": dataschema,
    }
    for name in more:
        if not isinstance(name, str) or not _NAME.match(name) or name in {*given, "data", "datacontenttype"}:
            raise InvalidRecord(
                f"extensions: {name!r:.100} is no name of 1 to 20 of a-z and 0-9, or not an extension's"
            )
    pairs: list[tuple[str, bytes | str | None]] = [
        (_PREFIX + name, _text(name, value)) for name, value in {**given, **more}.items() if value is not None
    ]
    if datacontenttype is not None:
        pairs.append((_CONTENT_TYPE, _text("datacontenttype", datacontenttype)))
    if key is None and "partitionkey" in more:
        key = _text("partitionkey", more["partitionkey"])
    given_serializer: Serializer | None = serializer
    return OutboxRecord(topic, key, data, [*pairs, *headers], partition, given_serializer)


def _text(name: str, value: object) -> str:
    value = plain(value)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidRecord(f"{name}: expected a time with a time zone, got {value!r}")
        return value.astimezone(UTC).isoformat().replace("+00:00", "Z")
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    if isinstance(value, int):
        return str(value)
    if not isinstance(value, str) or not value:
        raise InvalidRecord(f"{name}: expected text that is not empty, got {value!r:.100}")
    return value


def _is_ours(name: str) -> bool:
    return name.startswith(_PREFIX) or name.lower() == _CONTENT_TYPE


def _attribute(name: str, content: bytes | str | None) -> tuple[str, str]:
    short = _CONTENT_TYPE if name.lower() == _CONTENT_TYPE else name.removeprefix(_PREFIX)
    if content is None:
        return short, ""
    try:
        return short, content.decode() if isinstance(content, bytes) else content
    except UnicodeDecodeError:
        raise InvalidCloudEvent(f"{name}: is not UTF-8") from None


def _read_time(text: str | None) -> datetime | None:
    if text is None:
        return None
    try:
        # RFC 3339 has small letters, too, and leap seconds, which Python has not.
        read = datetime.fromisoformat(_LEAP_SECOND.sub(r"\g<minute>:59.999999", text.upper()))
    except ValueError:
        raise InvalidCloudEvent(f"{_PREFIX}time: {text!r:.100} is no time of RFC 3339") from None
    return read if read.tzinfo is not None else read.replace(tzinfo=UTC)
