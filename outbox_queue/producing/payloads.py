"""Encoding of messages as records of the message topic.

A message must fit twice: as a record, and as a start marker, which adds fields. Larger ones are refused here, since no
consumer could start them.
"""

from __future__ import annotations

from datetime import timedelta
from typing import Any, NamedTuple

from outbox_core import tracing
from outbox_core.claims import CLAIM_HEADER, ClaimCheck
from outbox_core.errors import InvalidRecord
from outbox_core.plain import plain
from outbox_core.record import OutboxRecord
from outbox_queue.config import QueueConfig, milliseconds
from outbox_queue.errors import InvalidMessage, MessageTooLarge
from outbox_queue.protocol import headers as message_headers
from outbox_queue.protocol.clients import TRACKER_GROUP, group_of
from outbox_queue.protocol.headers import Header, UserHeaders
from outbox_queue.times import delay_milliseconds, now_ms

RECORD_OVERHEAD = 500  # more than a start marker or a copy has besides payload, the user's headers and queue id
MARKER_OVERHEAD = 200  # more than a record in a batch has besides key and value

_HEADER_OVERHEAD = 20
_LONGEST_QUEUE_NAME = 200


class Payload(NamedTuple):
    """A message's record value and headers, `kmq-deliver-at` included."""

    value: bytes  # of the record
    headers: list[Header]  # of the record; the user's, and `kmq-deliver-at` if it is delayed
    claim: str | None  # name of the payload in the claim store, if it went there


class PayloadCheck:
    """The encoding of one queue's messages."""

    def __init__(self, config: QueueConfig, queue: str, claims: ClaimCheck | None = None) -> None:
        self._queue = queue
        self._topic = config.message_topic
        self._claims = claims
        self._limit = config.max_message_bytes
        names = 2 if config.marker_key == "queue" else 1  # of the queue: in the start marker, and as its key
        self._free = config.max_message_bytes - RECORD_OVERHEAD - names * len(queue.encode())
        self._longest_delay_ms = milliseconds(config.max_delay)

    def encode(self, payload: Any, headers: UserHeaders, delay: timedelta | None) -> Payload:
        """Return the value and headers of a message's record; for arguments and errors see `Producer.send`."""
        value = payload if type(payload) is bytes else _value(payload)
        pairs = message_headers.of_users(headers) if headers else []
        deliver_at_ms = now_ms() + self._delay_ms(delay) if delay else None
        claim = self._claims.deposit(self._topic, value) if self._claims is not None else None
        if claim is not None:
            value = b""
            pairs.append((CLAIM_HEADER, claim.encode()))
        size = len(value) + sum(len(name) * 4 + len(content or b"") + _HEADER_OVERHEAD for name, content in pairs)
        if size > self._free:
            if self._claims is not None and claim is not None:
                self._claims.withdraw(claim)
            raise MessageTooLarge(
                f"a message of {len(value)} bytes{_with(pairs)} is too large for queue {self._queue!r}: its start "
                f"marker has to fit into max_message_bytes ({self._limit}), so payload and headers may have "
                f"{self._free} bytes; keep the data elsewhere and send a reference, or raise max_message_bytes and "
                "both topics' max.message.bytes"
            )
        if deliver_at_ms is not None:
            pairs.append((message_headers.DELIVER_AT, b"%d" % deliver_at_ms))
        return Payload(value, pairs, claim)

    def _delay_ms(self, delay: timedelta) -> int:
        result = delay_milliseconds(delay)
        if result > self._longest_delay_ms:
            raise InvalidMessage(f"delay: {result} ms is more than max_delay, {self._longest_delay_ms} ms")
        return result


def check_queue_name(name: object) -> str:
    """Check a queue's name (`InvalidMessage`): it becomes a record key, and part of a consumer group's id."""
    name = plain(name)
    if not isinstance(name, str) or not name or "\0" in name or len(name) > _LONGEST_QUEUE_NAME:
        raise InvalidMessage(
            f"a queue's name must be text of 1 to {_LONGEST_QUEUE_NAME} characters without NUL, got {name!r:.300}"
        )
    try:
        name.encode()
    except UnicodeEncodeError:
        raise InvalidMessage("a queue's name must be text that UTF-8 can encode") from None
    if group_of(name) == TRACKER_GROUP:
        raise InvalidMessage(f"a queue's name cannot be {name!r}: its consumers would join the trackers' group")
    return name


def with_creation(queue: str, headers: UserHeaders) -> UserHeaders:
    """Return headers with the context of the message's `create` span, if there is tracing."""
    spans = tracing.active()
    if spans is None:
        return headers
    return spans.create_headers(queue, message_headers.of_users(headers))


def _with(pairs: list[Header]) -> str:
    return f" with {len(pairs)} headers" if pairs else ""


def _value(payload: Any) -> bytes:
    if payload is None:
        raise InvalidMessage("payload: None would be a tombstone, which a queue cannot carry; send b'' or JSON")
    try:
        value = OutboxRecord(topic="queue", value=payload).value
    except InvalidRecord as error:
        raise InvalidMessage(str(error).replace("value:", "payload:", 1)) from None
    return value.encode() if isinstance(value, str) else bytes(value)
