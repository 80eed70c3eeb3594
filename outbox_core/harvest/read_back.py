"""Which rows of a torn batch are in Kafka? Reads its topics back and compares.

A transaction is torn when something ended it in the middle, for which `outbox_core.harvest.transaction` leaves no way
that we know of. Its opening is committed, its manifest is not. What was produced before the end is in Kafka, the
rest is not, and no belief about it is safe: taken for published, rows would be lost; taken for not published, repeated.

So recovery reads what the batch's topics hold from a little before the opening's time, as a read_committed client, and
takes a row for published if a record has its id in the id header (`<outbox name>:<id>`) and the same key and value.
Timestamps only say where to begin: the first record that is not older than the opening, less a margin for clocks that
differ (a topic with LogAppendTime has its broker's). Where that is not enough, or a topic may not be read, a row is
repeated and none is lost.
"""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from outbox_core.harvest.manifest import Opening
from outbox_core.harvest.tracking import ManifestNotRead, reader_settings
from outbox_core.kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    grant,
    headers_of,
    make_consumer,
)
from outbox_core.ports import StoredRecord

_log = logging.getLogger(__name__)

_MARGIN_MS = 60_000
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.1
_QUIET_SECONDS = 20.0  # longer than most transactions of others last
_CHUNK = 500
_NUMBER = re.compile(rb"-?[0-9]{1,19}")
_MISSING = (KafkaError.UNKNOWN_TOPIC_OR_PART, KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC)  # noqa: SLF001

Place = tuple[str, int]


class Seen(NamedTuple):
    """A record that Kafka has.

    Attributes:
        id: the row's id, of the id header.
        key: its Kafka key.
        value: its Kafka value.
    """

    id: int
    key: bytes | None
    value: bytes | None


def published_rows(
    seen: Iterable[Seen], find: Callable[[Sequence[int]], Sequence[StoredRecord]]
) -> Iterator[list[StoredRecord]]:
    """The rows that were seen in Kafka, some at a time, so that memory is bounded.

    Args:
        seen: what Kafka has.
        find: reads rows from the table by id.
    """
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
    return [row for row in rows if (_bytes(row[2]), _bytes(row[3])) in seen[row[0]]]


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
    """What Kafka has of a torn batch.

    Args:
        kafka: librdkafka settings of the cluster.
        group: a group.id that we may use; it is not joined.
        opening: of the batch; it names its topics.
        id_header: name of the header with the record's identity.
        outbox_name: identity of the outbox, written before the record's id.
        give_up: asked now and then.

    Raises:
        ManifestNotRead: if the topics could not be read to their ends.
    """
    settings = reader_settings(kafka, group)
    consumer = make_consumer(settings)
    try:
        ends = _ends(settings, opening.topics or ())
        starts = _starts(consumer, ends, opening.written_at_ms - _MARGIN_MS)
        for message in _messages(consumer, starts, ends, give_up, grant("READ", kafka)):
            identity = _id_of(message, id_header, f"{outbox_name}:".encode())
            if identity is not None and opening.first <= identity <= opening.last:
                yield Seen(identity, message.key(), message.value())
    except KafkaException as error:
        raise ManifestNotRead(f"a torn batch cannot be read back: {error.args[0].str()}") from None
    finally:
        consumer.close()


def _ends(settings: Mapping[str, Any], topics: Sequence[str]) -> dict[Place, int]:
    """The ends of all partitions, open transactions of other producers included: we wait for those."""
    consumer = make_consumer({**settings, "isolation.level": "read_uncommitted"})
    try:
        ends = {}
        for topic in topics:
            found = consumer.list_topics(topic, timeout=_ANSWER_SECONDS).topics[topic]
            if found.error is not None and found.error.code() not in _MISSING:
                raise KafkaException(found.error)
            for partition in found.partitions:
                place = TopicPartition(topic, partition)
                ends[topic, partition] = consumer.get_watermark_offsets(place, _ANSWER_SECONDS, cached=False)[1]
        return ends
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
    grant_read: str,
) -> Iterator[Message]:
    left = {(place.topic, place.partition) for place in starts}
    if left:
        consumer.assign(starts)
    for message in _answers(consumer, left, give_up):
        place, offset = (message.topic() or "", message.partition() or 0), message.offset() or 0
        error = message.error()
        if error is None:
            if place in left:
                yield message
            if offset + 1 >= ends[place]:
                left.discard(place)
        elif error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  confluent's public constant
            if offset >= ends[place]:
                left.discard(place)
        else:
            left &= _without_what_failed(left, place[0], error, grant_read)


def _answers(consumer: Consumer, left: set[Place], give_up: Callable[[], bool]) -> Iterator[Message]:
    """Yield what the consumer says, for as long as there is something left to be read.

    However much that is: what would be given up today would be more tomorrow. But records have to come.
    """
    heard_at = time.monotonic()
    while left:
        if give_up():
            raise ManifestNotRead("a torn batch was not read back in time")
        message = consumer.poll(_POLL_SECONDS)
        if message is not None:
            is_record = message.error() is None
            yield message
            heard_at = time.monotonic() if is_record else heard_at  # not before: the rows are deleted meanwhile
        elif time.monotonic() - heard_at > _QUIET_SECONDS:
            raise _nothing_comes(min(left))


def _nothing_comes(place: Place) -> ManifestNotRead:
    topic, partition = place
    return ManifestNotRead(
        f"a torn batch cannot be read back: topic {topic}, partition {partition} is not read to its end; if a "
        "transaction of another producer stays open there, have it aborted (kafka-transactions.sh)"
    )


def _without_what_failed(left: set[Place], topic: str, error: KafkaError, grant_read: str) -> set[Place]:
    """What is still to be read after an error: without the topic if it may not be read."""
    if error.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED:
        _log.error("topic %s: %s; rows for it may be repeated: %s", topic, error.str(), grant_read)
        return {place for place in left if place[0] != topic}
    if error.fatal() or not error.retriable():
        raise KafkaException(error)
    return left


def _id_of(message: Message, id_header: str, prefix: bytes) -> int | None:
    """The row's id, if the record is one of this outbox."""
    for name, value in reversed(headers_of(message)):  # ours is the last one: a row may have brought its own
        if name == id_header:
            text = value or b""
            digits = text[len(prefix) :]
            return int(digits) if text.startswith(prefix) and _NUMBER.fullmatch(digits) else None
    return None
