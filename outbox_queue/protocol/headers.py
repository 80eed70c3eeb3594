"""The headers of messages and dead letters.

Headers of ours begin with `kmq-`; kafka-mq-go ignores them. The first copy of a message has none, unless it is delayed.

| Header            | On                   | Value |
|-------------------|----------------------|-------|
| `kmq-id`          | redelivered copies   | place of the first copy: `partition-offset` |
| `kmq-attempt`     | redelivered copies   | number of this attempt, 2 for the first redelivery |
| `kmq-enqueued-at` | redelivered copies   | milliseconds since 1970: when the first copy was sent |
| `kmq-deliver-at`  | delayed messages     | milliseconds since 1970: not before then |
| `kmq-queue`       | dead letters         | id of the queue |
| `kmq-reason`      | dead letters         | the consumer's reason, or that the attempts were used up |
| `kmq-dead-at`     | dead letters         | milliseconds since 1970: when it became one |

A dead letter also has `kmq-id`, `kmq-attempt` (the attempts that were made) and `kmq-enqueued-at`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from outbox_core.kafka.messages import UnreadableHeaders
from outbox_core.plain import plain
from outbox_queue.errors import InvalidMessage

PREFIX = "kmq-"
ID = "kmq-id"
ATTEMPT = "kmq-attempt"
ENQUEUED_AT = "kmq-enqueued-at"
DELIVER_AT = "kmq-deliver-at"
QUEUE = "kmq-queue"
REASON = "kmq-reason"
DEAD_AT = "kmq-dead-at"

Header = tuple[str, bytes | None]
UserHeaders = Mapping[str, bytes | str | None] | Iterable[tuple[str, bytes | str | None]]

UNREADABLE = "it has a header name that is not UTF-8, so none of its headers can be read"
LONGEST_REASON = 2000  # characters: it travels in markers and headers
_LARGEST_INT32 = 2**31 - 1


class Travelled(NamedTuple):
    """Content of a record's headers."""

    attempt: int = 1  # 1 for the first
    enqueued_at_ms: int | None = None  # when the first copy was sent; None on the first copy itself
    origin: tuple[int, int] | None = None  # place of the first copy; None on the first copy itself
    deliver_at_ms: int | None = None  # not before then; None for at once
    reason: str = ""  # of a dead letter, else empty
    headers: tuple[Header, ...] = ()  # the user's
    is_unreadable: bool = False  # some header cannot be read; then all other fields are unknown


NOTHING = Travelled()


def read(headers: Sequence[Header] | None) -> Travelled:
    """Read a record's headers. An unreadable `kmq-` header counts as missing: other programs write here, too."""
    if not headers:
        return Travelled(is_unreadable=True) if isinstance(headers, UnreadableHeaders) else NOTHING
    ours = {name: value for name, value in headers if value is not None and name.startswith(PREFIX)}
    users = tuple(header for header in headers if not header[0].startswith(PREFIX))
    if not ours:
        return Travelled(headers=users)
    return Travelled(
        attempt=min(max(1, number(ours.get(ATTEMPT)) or 1), _LARGEST_INT32 - 1),
        enqueued_at_ms=number(ours.get(ENQUEUED_AT)),
        origin=place(ours.get(ID)),
        deliver_at_ms=number(ours.get(DELIVER_AT)),
        reason=ours.get(REASON, b"").decode(errors="replace"),
        headers=users,
    )


def of_copy(
    headers: Iterable[Header], *, attempt: int, enqueued_at_ms: int | None, origin: tuple[int, int]
) -> list[Header]:
    """Return the headers of a redelivered copy: the user's, and ours."""
    result = [*headers, (ID, place_text(origin).encode()), (ATTEMPT, b"%d" % attempt)]
    if enqueued_at_ms:
        result.append((ENQUEUED_AT, b"%d" % enqueued_at_ms))
    return result


def of_dead_letter(
    headers: Iterable[Header],
    *,
    attempts: int,
    enqueued_at_ms: int | None,
    origin: tuple[int, int],
    reason: str,
    dead_at_ms: int,
) -> list[Header]:
    """Return the headers of a dead letter: the user's, and ours; the reason is cut after 2,000 characters."""
    return [
        *of_copy(headers, attempt=attempts, enqueued_at_ms=enqueued_at_ms, origin=origin),
        (REASON, reason[:LONGEST_REASON].encode(errors="replace")),
        (DEAD_AT, b"%d" % dead_at_ms),
    ]


def dead_letter_record(
    queue: bytes,
    payload: bytes | None,
    *,
    headers: Iterable[Header],
    attempts: int,
    enqueued_at_ms: int | None,
    origin: tuple[int, int],
    reason: str,
    dead_at_ms: int,
) -> tuple[bytes, bytes, list[Header]]:
    """Return key, value and headers of a dead letter; an empty value for None, which would be a tombstone."""
    described = of_dead_letter(
        headers,
        attempts=attempts,
        enqueued_at_ms=enqueued_at_ms,
        origin=origin,
        reason=reason,
        dead_at_ms=dead_at_ms,
    )
    return queue + b"/" + place_text(origin).encode(), payload or b"", [*described, (QUEUE, queue)]


def of_users(headers: UserHeaders) -> list[Header]:
    """Convert a user's headers to those of a record; `InvalidMessage` names the header that is wrong."""
    pairs = headers.items() if isinstance(headers, Mapping) else headers
    if isinstance(pairs, str | bytes) or not isinstance(pairs, Iterable):
        raise InvalidMessage(f"headers: expected a mapping or (name, value) pairs, got {type(headers).__name__}")
    return [_checked(position, pair) for position, pair in enumerate(pairs)]


def queue_name(queue: bytes) -> str:
    """Decode a queue's id; other producers may write any bytes."""
    return bytes(queue).decode(errors="replace")


def place_text(place: tuple[int, int]) -> str:
    """Format a place as `partition-offset`."""
    return f"{place[0]}-{place[1]}"


def _checked(position: int, pair: object) -> Header:
    where = f"headers[{position}]"
    if not isinstance(pair, tuple | list) or len(pair) != 2:
        raise InvalidMessage(f"{where}: expected a (name, value) pair")
    name, value = map(plain, pair)
    if not isinstance(name, str) or not name or "\0" in name:
        raise InvalidMessage(f"{where}: the name must be text without NUL, got {name!r:.100}")
    if name.startswith(PREFIX):
        raise InvalidMessage(f"{where}: names that begin with {PREFIX!r} are the queue's own, got {name!r:.100}")
    try:
        name.encode()
        content = value.encode() if isinstance(value, str) else value
    except UnicodeEncodeError as error:
        raise InvalidMessage(f"{where}: cannot be encoded as UTF-8 ({error.reason})") from None
    if content is not None and not isinstance(content, bytes):
        raise InvalidMessage(f"{where}: the value of {name!r} must be bytes, str or None, got {type(value).__name__}")
    return name, content


def number(value: bytes | None) -> int | None:
    """Parse a header's number; None if it is none, or has more digits than any of ours."""
    if value is None or not value.isdigit() or len(value) > 18:
        return None
    return int(value)


def place(value: bytes | None) -> tuple[int, int] | None:
    """Parse the text of `place_text`; None if it is no place."""
    if value is None:
        return None
    partition, _, offset = value.partition(b"-")
    numbers = number(partition), number(offset)
    if numbers[0] is None or numbers[1] is None or numbers[0] > _LARGEST_INT32:
        return None
    return numbers[0], numbers[1]
