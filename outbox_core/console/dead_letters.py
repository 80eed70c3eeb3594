"""Dead letters, read from Kafka: the newest of the dead-letter topic, within a bounded number and time."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from outbox_core.console.messages import not_found
from outbox_core.console.outboxes import ConsoleOutbox
from outbox_core.console.values import headers_as_json, value_as_json
from outbox_core.errors import KafkaUnavailable, OutboxError
from outbox_core.kafka.clients import KafkaError, KafkaException, Message, TopicPartition, make_consumer
from outbox_core.kafka.messages import (
    ERROR_HEADER,
    ID_HEADER,
    ORIGIN_HEADER,
    ORIGIN_PARTITION_HEADER,
    headers_of,
)
from outbox_core.kafka.reader import PartitionReader, partition_ends, reader_settings
from outbox_core.retention.dead_letters import DeadLetterRestash, LetterPlace, Restashed

MOST_READ = 1_000
_CONNECT_SECONDS = 3.0
_READ_SECONDS = 3.0
_WAIT_SECONDS = 3.0
_AT_ONCE = 50
_PARTITION = re.compile("[0-9]{1,9}")
OWN_HEADERS = frozenset({ID_HEADER, ORIGIN_HEADER, ORIGIN_PARTITION_HEADER, ERROR_HEADER})
"""Headers that the harvester adds to a dead letter, by which the record did not come."""

Header = tuple[str, bytes | None]


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
    headers: tuple[Header, ...]
    told: dict[str, str]

    def as_json(self, most_bytes: int, restashed: Restashed | None) -> dict[str, Any]:
        """Return it as JSON can have it, with at most so many bytes of its value."""
        shown = None if self.value is None else self.value[:most_bytes]
        partition, size = self.told.get(ORIGIN_PARTITION_HEADER), self.size_bytes
        return {
            "partition": self.place.partition,
            "offset": str(self.place.offset),
            "at": self.at and self.at.isoformat(),
            "record_id": self.told.get(ID_HEADER, "").rpartition(":")[2] or None,
            "original_topic": self.told.get(ORIGIN_HEADER),
            "original_partition": int(partition) if partition and _PARTITION.fullmatch(partition) else None,
            "error": self.told.get(ERROR_HEADER, ""),
            "key": self.key,
            "value": value_as_json(shown, size),
            "headers": headers_as_json(self.headers, most_bytes),
            "size_bytes": size,
            "restashed": restashed and {"at": restashed.at.isoformat(), "by": restashed.by},
        }


def newest(outbox: ConsoleOutbox, topic: str | None, limit: int, value_bytes: int) -> dict[str, Any]:
    """Return the newest dead letters, of one original topic if it is given. Raises KafkaUnavailable."""
    name = outbox.dead_letter_topic
    if not outbox.letter_readers.acquire(timeout=_WAIT_SECONDS):
        raise KafkaUnavailable("dead letters are being read for others; ask again in a moment")
    try:
        found, is_cut = _read(outbox, name, MOST_READ, value_bytes)
    finally:
        outbox.letter_readers.release()
    matching = [letter for letter in found if topic in (None, letter.told.get(ORIGIN_HEADER))]
    matching.sort(key=lambda letter: (letter.at or datetime.min.replace(tzinfo=UTC), letter.place), reverse=True)
    known = restashed_letters(outbox, name)
    return {
        "dead_letter_topic": name,
        "is_cut": is_cut or len(matching) > limit,
        "letters": [letter.as_json(value_bytes, known.get(letter.place)) for letter in matching[:limit]],
    }


def one(outbox: ConsoleOutbox, place: LetterPlace, value_bytes: int) -> dict[str, Any]:
    """Return one dead letter. Raises KafkaUnavailable, and ApiError if it is not there."""
    name = outbox.dead_letter_topic
    letter = read_letter(outbox, place, value_bytes)
    return letter.as_json(value_bytes, restashed_letters(outbox, name).get(place))


def read_letter(outbox: ConsoleOutbox, place: LetterPlace, value_bytes: int = 0) -> Letter:
    """Read a dead letter, and the beginning of its value. Raises KafkaUnavailable, and ApiError if it is not there."""
    name = outbox.dead_letter_topic
    found, _ = _read(outbox, name, 1, value_bytes, place)
    if not found:
        raise not_found(f"there is no dead letter at offset {place.offset} of partition {place.partition} of {name}")
    return found[0]


def restashed_letters(outbox: ConsoleOutbox, name: str) -> dict[LetterPlace, Restashed]:
    """Return the letters that were stashed anew; none if the database or its history does not tell."""
    try:
        with outbox.session() as session:
            return DeadLetterRestash(session.table).known(session.connection, name)
    except OutboxError:
        return {}


def _read(
    outbox: ConsoleOutbox, name: str, most: int, value_bytes: int, place: LetterPlace | None = None
) -> tuple[list[Letter], bool]:
    """Read the last letters of each partition, or the one at a place; tell also if older ones were left out."""
    config = outbox.config
    settings = reader_settings(config.base_kafka_config, f"{config.name}-console")
    try:
        ends = partition_ends(settings, [name], timeout_seconds=_CONNECT_SECONDS)
        if place is None:
            each = max(1, most // max(1, len(ends)))
            starts = {where: max(0, end - each) for where, end in ends.items()}
        else:
            where = (name, place.partition)
            ends = {where: place.offset + 1} if 0 <= place.offset < ends.get(where, 0) else {}
            starts = dict.fromkeys(ends, place.offset)
        letters = _consume(settings, starts, ends, value_bytes)
    except KafkaException as error:
        raise KafkaUnavailable(f"{name} cannot be read: {error.args[0].str()}") from None
    wanted = [letter for letter in letters if place in (None, letter.place)]
    return wanted, any(start > 0 for start in starts.values())


def _consume(
    settings: dict[str, Any], starts: dict[tuple[str, int], int], ends: dict[tuple[str, int], int], value_bytes: int
) -> list[Letter]:
    give_up_at = time.monotonic() + _READ_SECONDS
    found: list[Letter] = []

    def give_up() -> None:
        # An open transaction hides what is behind it: show what there is.
        if time.monotonic() > give_up_at:
            raise TimeoutError

    consumer = make_consumer(settings)
    try:
        places = [TopicPartition(topic, partition, start) for (topic, partition), start in starts.items()]
        reader = PartitionReader(consumer, places, ends, on_error=_fail, give_up=give_up, at_once=_AT_ONCE)
        for messages in reader:
            # Cut at once: a thousand whole values may be a gigabyte.
            found += [_letter(message, value_bytes) for message in messages]
    except TimeoutError:
        pass
    finally:
        consumer.close()
    return found


def _fail(error: KafkaError, topic: str) -> None:
    raise KafkaUnavailable(f"{topic} cannot be read: {error.str()}")


def _letter(message: Message, value_bytes: int) -> Letter:
    headers = headers_of(message)
    told = {name: (value or b"").decode(errors="replace") for name, value in headers if name in OWN_HEADERS}
    kind, milliseconds = message.timestamp()
    key = message.key()
    value = None if message.value() is None else _as_bytes(message.value())
    return Letter(
        LetterPlace(message.partition() or 0, message.offset() or 0),
        _time(milliseconds) if kind else None,
        None if key is None else _as_bytes(key).decode(errors="replace"),
        None if value is None else value[:value_bytes],
        len(value or b""),
        tuple((name, value) for name, value in headers if name not in OWN_HEADERS),
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
