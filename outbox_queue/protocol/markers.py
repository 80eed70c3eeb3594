"""Encoding of markers; `markers.proto` beside this file is their definition, shared with kafka-mq-go."""

from __future__ import annotations

from collections.abc import Iterable

try:
    from outbox_queue.protocol import markers_pb2
except ModuleNotFoundError as error:
    if error.name not in {"google", "google.protobuf"}:  # the package of that name is another one
        raise
    message = "outbox_queue needs protobuf: pip install 'kafka-outbox[queue]'"
    raise ModuleNotFoundError(message, name="protobuf") from None

Marker, MessageID = markers_pb2.Marker, markers_pb2.MessageID

# Looked up on the class, each would cost as much as reading a field.
START, END, KEEPALIVE = Marker.START, Marker.END, Marker.KEEPALIVE
VERSION_1 = Marker.V1


class StartEncoder:
    """An encoder of one queue's start markers, for one thread at a time.

    All share a protobuf object: making one for each would take longer than filling and encoding it.
    """

    def __init__(self, queue: bytes, max_attempts: int) -> None:
        """Take the id of the queue, and its attempts, 0 for no limit."""
        self._marker = Marker(key=queue, max_attempts=max_attempts, message_id=MessageID())
        self._place = self._marker.message_id

    def encode(
        self,
        place: tuple[int, int],
        redeliver_after_ms: int,
        value: bytes,
        *,
        attempt: int,
        enqueued_at_ms: int,
        origin: tuple[int, int] | None = None,
        headers: Iterable[tuple[str, bytes | None]] = (),
    ) -> bytes:
        """Encode the start of a message's tracking; `redeliver_after_ms` counts from the marker's own timestamp.

        A copy that is not handed out has the attempt of the one before; `origin` is the place of the first copy, if
        this is another one.
        """
        marker = self._marker
        self._place.partition, self._place.offset = place
        marker.redeliver_after_ms = redeliver_after_ms
        marker.value = value
        marker.attempt = attempt
        marker.enqueued_at_ms = enqueued_at_ms
        if origin is None and not headers:
            return marker.SerializeToString()
        whole = Marker()
        whole.CopyFrom(marker)  # the next marker has none of these
        if origin is not None:
            whole.origin.partition, whole.origin.offset = origin
            whole.origin.SetInParent()  # also 0-0, where every field has its default
        for name, content in headers:
            whole.headers.add(name=name, value=content)
        return whole.SerializeToString()


class EndEncoder:
    """An encoder of the end markers of acknowledged messages, like `StartEncoder`."""

    def __init__(self) -> None:
        self._marker = Marker(type=Marker.END, message_id=MessageID())
        self._place = self._marker.message_id

    def encode(self, place: tuple[int, int]) -> bytes:
        """Encode the end of a message's tracking."""
        self._place.partition, self._place.offset = place
        return self._marker.SerializeToString()


def end_marker(partition: int, offset: int, *, reason: str = "") -> bytes:
    """Encode the end of a message's tracking; the reason is for people, empty for an acknowledgement."""
    place = MessageID(partition=partition, offset=offset)
    return Marker(type=Marker.END, message_id=place, reason=reason).SerializeToString()


def keep_alive_marker(
    partition: int, offset: int, redeliver_after_ms: int, *, attempt: int | None = None, reason: str = ""
) -> bytes:
    """Encode a new deadline, counted from the marker's own timestamp; 0 has the message redelivered at once.

    `attempt` replaces the start marker's, where an attempt does not count; a dead letter keeps a nack's `reason`.
    """
    marker = Marker(
        type=Marker.KEEPALIVE,
        message_id=MessageID(partition=partition, offset=offset),
        redeliver_after_ms=redeliver_after_ms,
        reason=reason,
    )
    if attempt is not None:
        marker.attempt = attempt
    return marker.SerializeToString()


def tick_marker(token: bytes) -> bytes:
    """Encode a tracker's question for the time: a keep-alive of no possible message, which Go's trackers skip."""
    nowhere = MessageID(partition=-1, offset=-1)
    return Marker(type=Marker.KEEPALIVE, message_id=nowhere, value=token).SerializeToString()


def attempt_of(marker: markers_pb2.Marker) -> int:
    """Return the number of a start marker's attempt; kafka-mq-go writes none, and means the first."""
    return marker.attempt if marker.HasField("attempt") else 1


def headers_of(marker: markers_pb2.Marker) -> list[tuple[str, bytes | None]]:
    """Return the user's headers in a start marker."""
    return [(header.name, header.value if header.HasField("value") else None) for header in marker.headers]


def origin_of(marker: markers_pb2.Marker) -> tuple[int, int] | None:
    """Return the place of the first copy, None if the marker is about that."""
    return (marker.origin.partition, marker.origin.offset) if marker.HasField("origin") else None
