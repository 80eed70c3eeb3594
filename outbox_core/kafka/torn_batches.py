"""The rows of a torn batch that are in Kafka, found by reading its topics back.

Something ended its transaction in the middle: the opening is committed, the manifest is not, and only the records
produced before the end are in Kafka. No guess is safe: it would lose rows, or repeat them.

So recovery reads the batch's topics from a little before the opening's time, as a read_committed client, and takes a
row for published if a record has its id in the id header (`<outbox name>:<id>`) and the same key and value. Timestamps
only say where to begin, less a margin for clocks that differ (a topic with LogAppendTime has its broker's). Where that
is not enough, or a topic may not be read, a row is repeated and none is lost.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.clients import Consumer, KafkaError, KafkaException, Message, TopicPartition, make_consumer
from outbox_core.kafka.errors import grant
from outbox_core.kafka.manifest import Opening
from outbox_core.kafka.messages import headers_of
from outbox_core.kafka.reader import PartitionReader, Place, partition_ends, reader_settings
from outbox_core.kafka.tracking import ManifestNotRead
from outbox_core.stores.interface import StoredRecord
from outbox_core.topic_names import is_legal

_log = logging.getLogger(__name__)

_MARGIN_MS = 60_000
_ANSWER_SECONDS = 10.0
_AT_ONCE = 100
_QUIET_SECONDS = 20.0  # longer than most transactions of others last
_CHUNK = 500
_NUMBER = re.compile(rb"-?[0-9]{1,19}")


class Seen(NamedTuple):
    """A record in Kafka, with the row's id from the id header."""

    id: int
    key: bytes | None
    value: bytes | None


def published_rows(
    seen: Iterable[Seen], find: Callable[[Sequence[int]], Sequence[StoredRecord]]
) -> Iterator[list[StoredRecord]]:
    """Yield the rows that were seen in Kafka, some at a time, so that memory is bounded."""
    chunk: dict[int, set[tuple[bytes | None, bytes | None]]] = {}
    for record in seen:
        chunk.setdefault(record.id, set()).add((record.key, record.value))
        if len(chunk) >= _CHUNK:
            yield _matching(chunk, find(sorted(chunk)))
            chunk = {}
    if chunk:
        yield _matching(chunk, find(sorted(chunk)))


def _matching(
    seen: Mapping[int, set[tuple[bytes | None, bytes | None]]], rows: Sequence[StoredRecord]
) -> list[StoredRecord]:
    # Ids come back (TRUNCATE ... RESTART IDENTITY): the id alone would take a fresh row for a published one.
    return [row for row in rows if (_bytes(row.key), _bytes(row.value)) in seen[row.id]]


def _bytes(text: str | bytes | memoryview | None) -> bytes | None:
    if text is None:
        return None
    return text.encode() if isinstance(text, str) else bytes(text)


def read_back(
    kafka: Mapping[str, Any],
    group: str,
    opening: Opening,
    *,
    id_header: str,
    outbox_name: str,
    give_up: Callable[[], bool],
) -> Iterator[Seen]:
    """Yield the records of a torn batch that are in Kafka, or raise ManifestNotRead if not all could be read."""
    settings = reader_settings(kafka, group)
    consumer = make_consumer(settings)
    prefix = f"{outbox_name}:".encode()

    def on_denied(error: KafkaError, topic: str) -> None:
        _log.error("topic %s: %s; rows for it may be repeated: %s", topic, error.str(), grant("READ", kafka))

    # Writers may name any other: its rows were refused before they were sent.
    topics = filter(is_legal, opening.topics or ())
    try:
        ends = partition_ends(settings, topics, timeout_seconds=_ANSWER_SECONDS, on_denied=on_denied)
        starts = _starts(consumer, ends, opening.written_at_ms - _MARGIN_MS)
        for message in _messages(consumer, starts, ends, give_up, on_denied):
            identity = _id_of(message, id_header, prefix)
            if identity is not None and opening.first <= identity <= opening.last:
                yield Seen(identity, message.key(), message.value())
    except KafkaException as error:
        raise ManifestNotRead(f"a torn batch cannot be read back: {error.args[0].str()}") from None
    except KafkaUnavailable as error:
        raise ManifestNotRead(f"a torn batch cannot be read back: {error}") from None
    finally:
        consumer.close()


def _starts(consumer: Consumer, ends: Mapping[Place, int], since_ms: int) -> list[TopicPartition]:
    asked = [TopicPartition(topic, partition, max(0, since_ms)) for topic, partition in ends]
    found = consumer.offsets_for_times(asked, timeout=_ANSWER_SECONDS) if asked else []
    for place in found:
        if place.error is not None:
            raise KafkaException(place.error)
    # Below zero: no record is as late as that.
    return [place for place in found if 0 <= place.offset < ends[place.topic, place.partition]]


def _messages(
    consumer: Consumer,
    starts: list[TopicPartition],
    ends: Mapping[Place, int],
    give_up: Callable[[], bool],
    on_denied: Callable[[KafkaError, str], None],
) -> Iterator[Message]:
    """Yield all records before the ends, however many: a term that gave up would leave more to the next one."""

    def check_patience() -> None:
        if give_up():
            raise ManifestNotRead("a torn batch was not read back in time")

    def on_error(error: KafkaError, topic: str) -> None:
        if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
            on_denied(error, topic)
            reader.skip(topic)
        elif error.fatal() or not error.retriable():
            raise KafkaException(error)

    reader = PartitionReader(
        consumer,
        starts,
        ends,
        on_error=on_error,
        on_silence=_raise_unfinished,
        silence_seconds=_QUIET_SECONDS,
        give_up=check_patience,
        at_once=_AT_ONCE,
    )
    for messages in reader:
        yield from messages


def _raise_unfinished(left: set[Place]) -> None:
    topic, partition = min(left)
    raise ManifestNotRead(
        f"a torn batch cannot be read back: topic {topic}, partition {partition} is not read to its end; if a "
        "transaction of another producer stays open there, have it aborted (kafka-transactions.sh)"
    )


def _id_of(message: Message, id_header: str, prefix: bytes) -> int | None:
    for name, value in reversed(headers_of(message)):  # ours is the last one: a row may have brought its own
        if name == id_header:
            text = value or b""
            digits = text[len(prefix) :]
            return int(digits) if text.startswith(prefix) and _NUMBER.fullmatch(digits) else None
    return None
