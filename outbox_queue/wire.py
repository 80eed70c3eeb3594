"""The marker: what is written to the marker topic, and read by trackers in Go and in Python.

Fields 1 to 6 are those of kafka-mq-go's `kafka_mq_v1.proto`; its processes skip the others, which are ours:

    message Marker {
      Version version = 1;              // V1 = 0
      Type type = 2;                    // START = 0, END = 1, KEEPALIVE = 2
      MessageID message_id = 3;         // { int32 partition = 1; int64 offset = 2; } in the message topic
      uint64 redeliver_after_ms = 4;    // START, KEEPALIVE: from this marker's timestamp
      bytes key = 5;                    // START: the queue's id
      bytes value = 6;                  // START: the payload
      optional int32 attempt = 100;     // START; in a KEEPALIVE it replaces the START's
      uint64 enqueued_at_ms = 101;      // START: when the first copy was sent
      MessageID origin = 102;           // START: the place of the first copy, if this is another
      repeated Header headers = 103;    // START: the user's headers; { string name = 1; optional bytes value = 2; }
      string reason = 104;              // KEEPALIVE: why the message was given back; END: `redelivered`, by a tracker
      optional int32 max_attempts = 105; // START: the queue's, 0 for no limit; without it, the tracker's
    }

A copy that is redelivered is attempt `attempt + 1`; a START without the field, from Go, is of attempt 1. So a delayed
message is one whose START says one attempt less than the message had, and that nobody works on.

The classes are made from a descriptor when this module is imported: nothing is generated, and no protoc is needed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final

from google.protobuf import descriptor_pb2, descriptor_pool, message_factory

START: Final = 0
END: Final = 1
KEEPALIVE: Final = 2
VERSION_1: Final = 0

_PACKAGE = "outbox_queue.markers"
_Field = descriptor_pb2.FieldDescriptorProto


def _field(
    message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: Any, *, of: str = "", repeated: bool = False
) -> _Field:
    label = _Field.LABEL_REPEATED if repeated else _Field.LABEL_OPTIONAL
    field = message.field.add(name=name, number=number, type=kind, label=label)
    if of:
        field.type_name = f".{_PACKAGE}.{of}"
    return field


def _present(message: descriptor_pb2.DescriptorProto, name: str, number: int, kind: Any) -> None:
    """A field that tells "not there" from zero (proto3's `optional`)."""
    field = _field(message, name, number, kind)
    field.proto3_optional = True
    field.oneof_index = len(message.oneof_decl)
    message.oneof_decl.add(name=f"_{name}")


def _file() -> descriptor_pb2.FileDescriptorProto:
    file = descriptor_pb2.FileDescriptorProto(name="outbox_queue/marker.proto", package=_PACKAGE, syntax="proto3")
    place = file.message_type.add(name="MessageID")
    _field(place, "partition", 1, _Field.TYPE_INT32)
    _field(place, "offset", 2, _Field.TYPE_INT64)
    header = file.message_type.add(name="Header")
    _field(header, "name", 1, _Field.TYPE_STRING)
    _present(header, "value", 2, _Field.TYPE_BYTES)
    marker = file.message_type.add(name="Marker")
    version = marker.enum_type.add(name="Version")
    version.value.add(name="V1", number=VERSION_1)
    kinds = marker.enum_type.add(name="Type")
    for name, number in (("START", START), ("END", END), ("KEEPALIVE", KEEPALIVE)):
        kinds.value.add(name=name, number=number)
    _field(marker, "version", 1, _Field.TYPE_ENUM, of="Marker.Version")
    _field(marker, "type", 2, _Field.TYPE_ENUM, of="Marker.Type")
    _field(marker, "message_id", 3, _Field.TYPE_MESSAGE, of="MessageID")
    _field(marker, "redeliver_after_ms", 4, _Field.TYPE_UINT64)
    _field(marker, "key", 5, _Field.TYPE_BYTES)
    _field(marker, "value", 6, _Field.TYPE_BYTES)
    _present(marker, "attempt", 100, _Field.TYPE_INT32)
    _field(marker, "enqueued_at_ms", 101, _Field.TYPE_UINT64)
    _field(marker, "origin", 102, _Field.TYPE_MESSAGE, of="MessageID")
    _field(marker, "headers", 103, _Field.TYPE_MESSAGE, of="Header", repeated=True)
    _field(marker, "reason", 104, _Field.TYPE_STRING)
    _present(marker, "max_attempts", 105, _Field.TYPE_INT32)
    return file


_pool = descriptor_pool.DescriptorPool()  # ours alone: other packages may bring a `kafka_mq_v1.proto`
_pool.Add(_file())


def _class(name: str) -> Any:
    return message_factory.GetMessageClass(_pool.FindMessageTypeByName(f"{_PACKAGE}.{name}"))


Place: Any = _class("MessageID")
"""Where a copy of a message is in the message topic; attributes `partition` and `offset`."""
Header: Any = _class("Header")
Marker: Any = _class("Marker")
"""A marker; `Marker.FromString(data)` reads one, and raises `google.protobuf.message.DecodeError`."""


def start_marker(
    partition: int,
    offset: int,
    redeliver_after_ms: int,
    key: bytes,
    value: bytes | None,
    *,
    attempt: int,
    enqueued_at_ms: int,
    max_attempts: int,
    origin: tuple[int, int] | None = None,
    headers: Iterable[tuple[str, bytes | None]] = (),
) -> bytes:
    """Begins the tracking of a message.

    Args:
        partition: of the message topic.
        offset: in that partition.
        redeliver_after_ms: counted from the marker's own timestamp.
        key: the queue's id.
        value: the payload; None, a tombstone written by a stranger, becomes empty.
        attempt: the number of this attempt, or of the one before if nobody is going to work on this copy.
        enqueued_at_ms: since 1970, when the first copy was sent.
        max_attempts: the queue's, 0 for no limit.
        origin: partition and offset of the first copy, if this is another.
        headers: the user's, without ours.
    """
    marker = Marker(
        message_id=Place(partition=partition, offset=offset),
        redeliver_after_ms=redeliver_after_ms,
        key=key,
        value=value,
        attempt=attempt,
        enqueued_at_ms=enqueued_at_ms,
        max_attempts=max_attempts,
    )
    if origin is not None:
        marker.origin.partition, marker.origin.offset = origin
        marker.origin.SetInParent()  # also 0-0, where every field has its default
    for name, content in headers:
        marker.headers.add(name=name, value=content)
    data: bytes = marker.SerializeToString()
    return data


def end_marker(partition: int, offset: int, *, reason: str = "") -> bytes:
    """Ends the tracking of a message.

    Args:
        partition: of the message topic.
        offset: in that partition.
        reason: why, for people who read the topic; empty for an acknowledgement.
    """
    place = Place(partition=partition, offset=offset)
    data: bytes = Marker(type=END, message_id=place, reason=reason).SerializeToString()
    return data


def keep_alive_marker(
    partition: int, offset: int, redeliver_after_ms: int, *, attempt: int | None = None, reason: str = ""
) -> bytes:
    """Moves the deadline of a message.

    Args:
        partition: of the message topic.
        offset: in that partition.
        redeliver_after_ms: counted from the marker's own timestamp; 0 gives the message back at once.
        attempt: replaces what the start marker said, where an attempt is not to be counted.
        reason: why the message was given back; kept if it becomes a dead letter.
    """
    marker = Marker(
        type=KEEPALIVE,
        message_id=Place(partition=partition, offset=offset),
        redeliver_after_ms=redeliver_after_ms,
        reason=reason,
    )
    if attempt is not None:
        marker.attempt = attempt
    data: bytes = marker.SerializeToString()
    return data
