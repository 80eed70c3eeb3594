"""Dead letters, read from Kafka: the newest of the dead-letter topic, within a bounded number, time and size.

Anybody who may write to the topic chooses what a letter has in it, so what is kept of one is cut at once: 100,000
headers, or a key of a megabyte, are as easily written as a large value. The topic is read backwards, in ranges that
grow: if time is over, the newest have been read. An answer that leaves something out says so, and why: that letters
cannot be read now, as an open transaction hides them, is not that there are none.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, NamedTuple

from outbox_core.console.messages import not_found
from outbox_core.console.outboxes import ConsoleOutbox
from outbox_core.console.values import (
    MOST_HEADERS,
    MOST_LISTED_HEADERS,
    ShownHeader,
    headers_as_json,
    shown_headers,
    value_as_json,
    within_budget,
)
from outbox_core.errors import KafkaUnavailable, OutboxError
from outbox_core.kafka.clients import Consumer, KafkaError, KafkaException, Message, TopicPartition, make_consumer
from outbox_core.kafka.messages import (
    ERROR_HEADER,
    ID_HEADER,
    ORIGIN_HEADER,
    ORIGIN_PARTITION_HEADER,
    headers_of,
)
from outbox_core.kafka.reader import PartitionReader, Place, partition_ends, reader_settings
from outbox_core.retention.dead_letters import DeadLetterRestash, LetterPlace, Restashed

MOST_READ = 1_000
_CONNECT_SECONDS = 3.0
_READ_SECONDS = 3.0
_WAIT_SECONDS = 3.0
_FIRST_RANGE = 10  # offsets of a partition; each range is twice as long as the one before
_LONGEST_TOLD = 4_000  # characters of what the harvester tells in a header
_LONGEST_KEY = 4_000  # bytes, in lists
# Compressed bytes, of which some thousands may become gigabytes: but for one batch, which the client takes whole.
_FETCHED_BYTES = 4 * 1024
_FETCHED_AHEAD_KB = 4 * 1024  # not compressed: the client fetches no more when it has so many, or one batch
_PARTITION = re.compile("[0-9]{1,9}")
OWN_HEADERS = frozenset({ID_HEADER, ORIGIN_HEADER, ORIGIN_PARTITION_HEADER, ERROR_HEADER})
"""Headers that the harvester adds to a dead letter, by which the record did not come."""


class Limits(NamedTuple):
    """The most that is kept of a letter: bytes of its value and of each header, bytes of its key, headers."""

    value_bytes: int
    key_bytes: int
    headers: int


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter; what the harvester has written into its headers, and the record's own."""

    place: LetterPlace
    at: datetime | None
    key: str | None
    value: bytes | None
    """Its beginning, as far as it was asked for."""
    size_bytes: int
    """Of the whole value."""
    headers: tuple[ShownHeader, ...]
    """The first of them."""
    header_count: int
    """The number of all of them."""
    is_whole: bool
    """False if something of key, value or headers was left out."""
    told: dict[str, str]

    def as_json(self, identity: str, restashed: Restashed | None) -> dict[str, Any]:
        """Return it as JSON can have it; `identity` is that of the console's outbox."""
        partition, size = self.told.get(ORIGIN_PARTITION_HEADER), self.size_bytes
        writer, _, record_id = self.told.get(ID_HEADER, "").rpartition(":")
        return {
            "partition": self.place.partition,
            "offset": str(self.place.offset),
            "at": self.at and self.at.isoformat(),
            "record_id": record_id or None,
            "foreign_outbox": writer if writer and writer != identity else None,
            "original_topic": self.told.get(ORIGIN_HEADER),
            "original_partition": int(partition) if partition and _PARTITION.fullmatch(partition) else None,
            "error": self.told.get(ERROR_HEADER, ""),
            "key": self.key,
            "value": value_as_json(self.value, size),
            "headers": headers_as_json(self.headers),
            "header_count": self.header_count,
            "is_whole": self.is_whole,
            "size_bytes": size,
            "restashed": restashed and {"at": restashed.at.isoformat(), "by": restashed.by},
        }


_NOTHING = Limits(0, 0, 0)


class _Found(NamedTuple):
    """Letters that were read, and why others were not; "" if all were."""

    letters: list[Letter]
    left_out: str


def newest(outbox: ConsoleOutbox, topic: str | None, limit: int, value_bytes: int) -> dict[str, Any]:
    """Return the newest dead letters, of one original topic if it is given. Raises KafkaUnavailable."""
    name, identity = outbox.dead_letter_topic, outbox.identity
    limits = Limits(value_bytes, _LONGEST_KEY, MOST_LISTED_HEADERS)
    with _reading(outbox) as consumer:
        found, left_out = _newest(outbox, consumer, topic, limit, limits)
    found.sort(key=lambda letter: (letter.at or datetime.min.replace(tzinfo=UTC), letter.place), reverse=True)
    known = restashed_letters(outbox, name)
    shown = within_budget(letter.as_json(identity, known.get(letter.place)) for letter in found[:limit])
    if len(shown) < min(limit, len(found)):
        left_out = "; ".join([*filter(None, [left_out]), "the others are too large for one answer"])
    return {
        "dead_letter_topic": name,
        "is_cut": bool(left_out) or len(found) > limit,
        "left_out": left_out,
        "letters": shown,
    }


def one(outbox: ConsoleOutbox, place: LetterPlace, value_bytes: int) -> dict[str, Any]:
    """Return one dead letter. Raises KafkaUnavailable, and ApiError if it is not there."""
    limits = Limits(value_bytes, value_bytes, MOST_HEADERS)
    letter = read_letter(outbox, place, limits)
    return letter.as_json(outbox.identity, restashed_letters(outbox, outbox.dead_letter_topic).get(place))


def read_letter(outbox: ConsoleOutbox, place: LetterPlace, limits: Limits = _NOTHING) -> Letter:
    """Read a dead letter, as much of it as is asked for.

    Raises:
        KafkaUnavailable: if it cannot be read now: Kafka does not answer, or a transaction is open before it.
        ApiError: if it is not there.
    """
    name = outbox.dead_letter_topic
    absent = not_found(f"there is no dead letter at offset {place.offset} of partition {place.partition} of {name}")
    with _reading(outbox) as consumer:
        where = (name, place.partition)
        bounds = _bounds(outbox, consumer).get(where)
        if bounds is None or not bounds.first <= place.offset < bounds.end:
            raise absent
        if place.offset >= bounds.readable_end:
            raise KafkaUnavailable(f"{name}: {_hidden(where, bounds)}; ask again when it has ended")
        found: list[Letter] = []
        ranges = {where: (place.offset, place.offset + 1)}
        if not _read(consumer, ranges, found, limits, time.monotonic() + _READ_SECONDS):
            raise KafkaUnavailable(
                f"{name}: offset {place.offset} of partition {place.partition} was not read within "
                f"{_READ_SECONDS:g} s; ask again"
            )
    if not found:
        raise absent
    return found[0]


def restashed_letters(outbox: ConsoleOutbox, name: str) -> dict[LetterPlace, Restashed]:
    """Return the letters that were stashed anew; none if the database or its history does not tell."""
    try:
        with outbox.session() as session:
            return DeadLetterRestash(session.table).known(session.connection, name)
    except OutboxError:
        return {}


@contextmanager
def _reading(outbox: ConsoleOutbox) -> Iterator[Consumer]:
    """Yield a consumer of committed records, one of few at a time; its errors become KafkaUnavailable."""
    if not outbox.letter_readers.acquire(timeout=_WAIT_SECONDS):
        raise KafkaUnavailable("dead letters are being read for others; ask again in a moment")
    try:
        consumer = make_consumer(_settings(outbox))
        try:
            yield consumer
        except KafkaException as error:
            raise KafkaUnavailable(f"{outbox.dead_letter_topic} cannot be read: {error.args[0].str()}") from None
        finally:
            consumer.close()
    finally:
        outbox.letter_readers.release()


def _settings(outbox: ConsoleOutbox) -> dict[str, Any]:
    config = outbox.config
    settings = reader_settings(config.base_kafka_config, f"{config.name}-console")
    # Small: two readers at once must not fill the memory.
    return settings | {
        "fetch.message.max.bytes": _FETCHED_BYTES,
        "queued.max.messages.kbytes": _FETCHED_AHEAD_KB,
    }


class _Bounds(NamedTuple):
    """The first offset of a partition, the end of what is committed, and the end behind open transactions."""

    first: int
    readable_end: int
    end: int


def _bounds(outbox: ConsoleOutbox, consumer: Consumer) -> dict[Place, _Bounds]:
    name = outbox.dead_letter_topic
    ends = partition_ends(_settings(outbox), [name], timeout_seconds=_CONNECT_SECONDS)
    found = {}
    for place, end in ends.items():
        first, readable = consumer.get_watermark_offsets(TopicPartition(*place), _CONNECT_SECONDS, cached=False)
        found[place] = _Bounds(first, min(readable, end), end)
    return found


def _newest(outbox: ConsoleOutbox, consumer: Consumer, topic: str | None, limit: int, limits: Limits) -> _Found:
    """Read backwards from the ends until there are enough letters, or enough was read."""
    bounds = _bounds(outbox, consumer)
    give_up_at = time.monotonic() + _READ_SECONDS
    starts = {place: partition.readable_end for place, partition in bounds.items()}
    hidden = [
        _hidden(place, partition) for place, partition in bounds.items() if partition.readable_end < partition.end
    ]
    letters: list[Letter] = []
    read, depth, length = 0, 0, _FIRST_RANGE
    while read < MOST_READ:
        length = min(length, max(1, (MOST_READ - read) // len(starts))) if starts else 0
        ranges = {
            place: (max(bounds[place].first, start - length), start)
            for place, start in starts.items()
            if start > bounds[place].first
        }
        if not ranges:
            return _Found(letters, "; ".join(hidden))
        found: list[Letter] = []
        is_done = _read(consumer, ranges, found, limits, give_up_at)
        letters += [letter for letter in found if topic in (None, letter.told.get(ORIGIN_HEADER))]
        if not is_done:
            hidden.append(f"reading took more than {_READ_SECONDS:g} s: there may be large letters, or others at work")
            break
        starts.update({place: start for place, (start, _) in ranges.items()})
        read, depth, length = read + sum(end - start for start, end in ranges.values()), depth + length, 2 * length
        if depth >= limit and len(letters) > limit:  # of each partition as many are known as are shown
            break
    if any(start > bounds[place].first for place, start in starts.items()) and not hidden:
        hidden.append(f"only the newest {read:,} of the topic were read")
    return _Found(letters, "; ".join(hidden))


def _hidden(place: Place, bounds: _Bounds) -> str:
    return f"a transaction is open in partition {place[1]} since offset {bounds.readable_end}, and hides what is behind"


def _read(
    consumer: Consumer, ranges: dict[Place, tuple[int, int]], found: list[Letter], limits: Limits, give_up_at: float
) -> bool:
    """Append the letters of ranges of offsets; return False if the time was over before their ends."""

    def give_up() -> None:
        if time.monotonic() > give_up_at:
            raise TimeoutError

    starts = [TopicPartition(topic, partition, start) for (topic, partition), (start, _) in ranges.items()]
    ends = {place: end for place, (_, end) in ranges.items()}
    # One by one: the headers of many at once may be a gigabyte.
    reader = PartitionReader(consumer, starts, ends, on_error=_fail, give_up=give_up)
    try:
        for messages in reader:
            found += [_letter(message, limits) for message in messages]
    except TimeoutError:
        return False
    return True


def _fail(error: KafkaError, topic: str) -> None:
    raise KafkaUnavailable(f"{topic} cannot be read: {error.str()}")


def _letter(message: Message, limits: Limits) -> Letter:
    """Return what is kept of a message."""
    headers = headers_of(message)
    told = {
        name: (value or b"")[:_LONGEST_TOLD].decode(errors="replace") for name, value in headers if name in OWN_HEADERS
    }
    own = [header for header in headers if header[0] not in OWN_HEADERS]
    kind, milliseconds = message.timestamp()
    key, value = (None if part is None else _as_bytes(part) for part in (message.key(), message.value()))
    most = limits.value_bytes
    shown = shown_headers(own[: limits.headers], most)
    return Letter(
        LetterPlace(message.partition() or 0, message.offset() or 0),
        _time(milliseconds) if kind else None,
        None if key is None else key[: limits.key_bytes].decode(errors="replace"),
        None if value is None else value[:most],
        len(value or b""),
        shown,
        len(own),
        len(value or b"") <= most
        and len(key or b"") <= limits.key_bytes
        and [(header.name, header.value) for header in shown] == own,
        told,
    )


def _time(milliseconds: int) -> datetime | None:
    """Return Kafka's time, None for one that no calendar has: a producer may write any number."""
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC)
    except (ValueError, OverflowError, OSError):
        return None


def _as_bytes(content: Any) -> bytes:
    return content.encode() if isinstance(content, str) else bytes(content)
