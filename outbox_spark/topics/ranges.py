"""Topics read by ranges of offsets. No Spark.

`plan_batch` plans a batch from a position and the ends of the log; `read_range` reads each of its ranges, on any
machine, any number of times, with the same result: the committed messages from the first offset up to, and not
including, the last.

- A range never goes beyond the last stable offset: records behind an open transaction are not visible yet.
- Offsets have holes: transaction markers, aborted records, compaction. So a range ends not with its last offset, but
  with a message at or behind its end, or with the client's report of the end of the partition.
- A topic that was deleted and made anew is noticed by its ID, however long it is by now: other records, with the same
  offsets.
- Retention may have removed the beginning of a range: that is lost data, and an error, unless it is allowed.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from typing import Any, Literal

from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxError
from outbox_core.kafka.admin import Inquiry
from outbox_core.kafka.clients import (
    TIMESTAMP_NOT_AVAILABLE,
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicCollection,
    TopicPartition,
    make_consumer,
)
from outbox_core.kafka.errors import CONSUMER_RECOVERS, why_unreadable
from outbox_core.kafka.reader import PartitionReader, reader_settings
from outbox_spark.runtime.secrets import filled
from outbox_spark.topics.positions import Positions, TopicIds, from_json, made_anew

EARLIEST, LATEST = -2, -1
_GROUP = "kafka-outbox-spark"
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.1
_MESSAGES_PER_POLL = 5_000
_SILENCE_SECONDS = 60.0
_GLANCE_SECONDS = 1.0
_SMALL_FETCH = {"max.partition.fetch.bytes": "1024"}  # it reads but the first record of each partition


_NO_ID = "A" * 22  # of brokers before 2.8


class RecordsExpired(OutboxError):
    """Records to be read that are no longer in the topic."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """A part of one partition; `end` is the offset after the last."""

    topic: str
    partition: int
    first: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.first)

    def __str__(self) -> str:
        return f"{self.topic}[{self.partition}]"


def parse_offsets(text: str) -> Positions | Literal["earliest", "latest"]:
    """Read `earliest`, `latest`, or `{"topic": {"0": 17, "1": -2}}` with -2 for earliest. Raises InvalidConfig."""
    word = text.strip().lower()
    if word == "earliest":
        return "earliest"
    if word == "latest":
        return "latest"
    try:
        position = from_json(json.loads(text))
    except (ValueError, AttributeError, TypeError):
        position = {}
    if not position or min(position.values()) < EARLIEST:
        raise InvalidConfig(
            f'must be earliest, latest, or JSON like {{"topic": {{"0": 17, "1": -2}}}} '
            f"(-2 for earliest, -1 for latest), is {text!r}"
        )
    return position


class TopicLog:
    """The beginnings and ends of topics."""

    def __init__(self, kafka: Mapping[str, Any], topics: Sequence[str]) -> None:
        self._kafka = kafka
        self._topics = topics
        self._consumer: Consumer | None = None
        self._inquiry: Inquiry | None = None

    def ids(self) -> TopicIds:
        """Return the topics' IDs, as far as the cluster tells them. Raises KafkaUnavailable."""
        self._inquiry = inquiry = self._inquiry or Inquiry(filled(self._kafka), _ANSWER_SECONDS)
        inquiry.extend(_ANSWER_SECONDS)
        if not inquiry.can_create():  # the mock cluster
            return {}
        asked = inquiry.admin.describe_topics(TopicCollection([*self._topics]), request_timeout=inquiry.remaining)
        found = {}
        for topic, answer in asked.items():
            with suppress(KafkaException):  # whether it can be read is seen elsewhere
                found[topic] = str(inquiry.wait_for(answer, f"topic {topic}").topic_id)
        return {topic: each for topic, each in found.items() if each != _NO_ID}

    def bounds(self) -> tuple[Positions, Positions]:
        """Return the present beginning and end of each partition. Raises InvalidConfig and KafkaUnavailable."""
        consumer = self._connected()
        places = [(topic, partition) for topic in self._topics for partition in self._partitions(consumer, topic)]
        found = {place: _watermarks(consumer, *place) for place in places}
        return {place: low for place, (low, _) in found.items()}, {place: high for place, (_, high) in found.items()}

    def starting(self, wanted: Positions | Literal["earliest", "latest"], *, others: int = EARLIEST) -> Positions:
        """Resolve offsets; `others` (`EARLIEST` or `LATEST`) is for partitions not mentioned. Raises as `bounds`."""
        firsts, ends = self.bounds()
        if wanted == "earliest":
            return firsts
        if wanted == "latest":
            return ends
        for topic, partition in wanted.keys() - firsts:
            raise InvalidConfig(f"offsets name {topic}[{partition}], which is not there")
        asked = {place: wanted.get(place, others) for place in firsts}
        words = {place: {EARLIEST: first, LATEST: ends[place]} for place, first in firsts.items()}
        return {place: words[place].get(offset, offset) for place, offset in asked.items()}

    def behind(self, position: Positions) -> tuple[int, float | None]:
        """Return the number of offsets behind a position, and the age (in seconds) of the first record there.

        The age, by the record's timestamp, is None if Kafka does not show the record in a moment. Raises as `bounds`.
        """
        firsts, ends = self.bounds()
        waiting = [found for found in _partitions_between(position, ends, firsts) if len(found)]
        return sum(map(len, waiting)), self._age_of_first(waiting) if waiting else 0.0

    def _age_of_first(self, waiting: Sequence[OffsetRange]) -> float | None:
        consumer, give_up_at = self._connected(), time.monotonic() + _GLANCE_SECONDS
        unread = {(found.topic, found.partition) for found in waiting}
        times: list[int] = []
        try:
            consumer.assign([TopicPartition(found.topic, found.partition, found.first) for found in waiting])
            while unread and time.monotonic() < give_up_at:
                message = consumer.poll(_POLL_SECONDS)
                place = (message.topic() or "", message.partition() or 0) if message is not None else None
                if message is None or place not in unread:
                    continue
                unread.discard(place)  # by its first record, or its end: aborted transactions may be all there is
                kind, milliseconds = message.timestamp()
                if message.error() is None and kind != TIMESTAMP_NOT_AVAILABLE:
                    times.append(milliseconds)
            consumer.unassign()
        except KafkaException:
            return None
        return max(0.0, time.time() - min(times) / 1000) if times else None

    def close(self) -> None:
        """Close the connection; it is opened again when needed."""
        consumer, self._consumer = self._consumer, None
        inquiry, self._inquiry = self._inquiry, None
        for each in (consumer, inquiry):
            if each is not None:
                each.close()

    def _connected(self) -> Consumer:
        self._consumer = self._consumer or _make_consumer({**self._kafka, **_SMALL_FETCH})
        return self._consumer

    def _partitions(self, consumer: Consumer, topic: str) -> list[int]:
        found = _retry(lambda: consumer.list_topics(topic, timeout=_ANSWER_SECONDS), f"topic {topic}").topics[topic]
        if found.error is not None or not found.partitions:
            reason = "it has no partitions"
            if found.error is not None:
                reason = why_unreadable(found.error, self._kafka, topic)
            raise InvalidConfig(f"topic {topic!r} cannot be read: {reason}")
        return sorted(found.partitions)


def _watermarks(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """Return the first offset, and the end of the committed records."""
    at = TopicPartition(topic, partition)
    low, high = _retry(
        lambda: consumer.get_watermark_offsets(at, timeout=_ANSWER_SECONDS, cached=False),
        f"the offsets of {topic}[{partition}]",
    )
    return low, high


def _retry(ask: Callable[[], Any], what: str) -> Any:
    give_up_at = time.monotonic() + 3 * _ANSWER_SECONDS
    while True:
        try:
            return ask()
        except KafkaException as error:
            if time.monotonic() > give_up_at:
                raise KafkaUnavailable(f"cannot find out {what}: {error.args[0].str()}") from None
            time.sleep(_POLL_SECONDS)


def refuse_shortened(start: Positions, ends: Positions) -> None:
    """Raise RecordsExpired for a partition that ends before its position: perhaps another topic of that name."""
    for (topic, partition), end in ends.items():
        reached = start.get((topic, partition), end)
        if end < reached:
            raise RecordsExpired(
                f"{topic}[{partition}] was read up to offset {reached}, and now ends at {end}: is it another topic of "
                "that name? Begin with a new checkpoint, or wait with option failOnDataLoss=false until it is that "
                "long again"
            )


def refuse_made_anew(before: TopicIds, now: TopicIds) -> None:
    """Raise RecordsExpired for a topic with another ID than before."""
    for topic in made_anew(before, now):
        raise RecordsExpired(
            f"topic {topic} was deleted and made anew since it was read: the offsets read are those of another topic. "
            "Begin with a new checkpoint, or read the new topic from its beginning with option failOnDataLoss=false"
        )


def plan_batch(start: Positions, ends: Positions, firsts: Positions, limit: int | None) -> Positions:
    """Return the end of a batch that begins at `start`, or, for partitions that are new, at `firsts`.

    Within the limit of offsets, each partition gets a share by its lag, and at least one offset, so that all progress.
    """
    whole = _partitions_between(start, ends, firsts)
    total = sum(map(len, whole))
    batch = {}
    for part in whole:
        share = len(part)
        if share and limit is not None and total > limit:
            share = min(share, max(1, limit * share // total))
        batch[part.topic, part.partition] = part.first + share
    return batch


def ranges_between(start: Positions, end: Positions, firsts: Positions, at_least: int = 1) -> list[OffsetRange]:
    """Return the ranges between two positions, split into about `at_least` ranges, if there are enough offsets."""
    whole = [found for found in _partitions_between(start, end, firsts) if len(found)]
    total = sum(map(len, whole))
    if len(whole) >= at_least or not total:
        return whole
    pieces: list[OffsetRange] = []
    for found in whole:
        number = max(1, min(len(found), round(at_least * len(found) / total)))
        cuts = [found.first + len(found) * cut // number for cut in range(number + 1)]
        pieces += [OffsetRange(found.topic, found.partition, *cut) for cut in itertools.pairwise(cuts)]
    return pieces


def _partitions_between(start: Positions, end: Positions, firsts: Positions) -> list[OffsetRange]:
    # A batch that Spark repeats may be of a topic that is not followed any more, of which `firsts` tells nothing.
    return [OffsetRange(*place, start[place] if place in start else firsts[place], to) for place, to in end.items()]


def _make_consumer(kafka: Mapping[str, Any]) -> Consumer:
    chosen = {"group.id": _GROUP, "fetch.wait.max.ms": 50, "queued.max.messages.kbytes": 32_768, **filled(kafka)}
    ours = {"auto.offset.reset": "error", "fetch.wait.max.ms": chosen["fetch.wait.max.ms"]}
    return make_consumer({**reader_settings(chosen, chosen["group.id"]), **ours})


def read_range(kafka: Mapping[str, Any], wanted: OffsetRange, *, fail_on_loss: bool = True) -> Iterator[list[Message]]:
    """Yield a range's messages, in lists, by ascending offset; `fail_on_loss` refuses one that retention has shortened.

    Raises RecordsExpired, or KafkaUnavailable if no message comes for a minute.
    """

    def on_error(error: KafkaError, _: str) -> None:
        passes = error.retriable() or error.code() in CONSUMER_RECOVERS
        if error.code() == KafkaError._AUTO_OFFSET_RESET or not passes:  # noqa: SLF001  confluent's public constant
            raise KafkaUnavailable(f"{wanted}: {why_unreadable(error, kafka, wanted.topic)}")

    def on_silence(_: object) -> None:
        raise KafkaUnavailable(
            f"{wanted}: no message for {_SILENCE_SECONDS:g} s, before offset {wanted.end} was reached"
        )

    if not len(wanted):
        return
    with closing(_make_consumer(kafka)) as consumer:
        low, _ = _watermarks(consumer, wanted.topic, wanted.partition)
        if low > wanted.first and fail_on_loss:
            raise RecordsExpired(
                f"{wanted}: offsets {wanted.first} to {min(low, wanted.end) - 1} were removed before they were read "
                "(retention, or records deleted); keep records longer, or go on without them with option "
                "failOnDataLoss=false"
            )
        yield from PartitionReader(
            consumer,
            [TopicPartition(wanted.topic, wanted.partition, max(low, wanted.first))],
            {(wanted.topic, wanted.partition): wanted.end},
            on_error=on_error,
            on_silence=on_silence,
            silence_seconds=_SILENCE_SECONDS,
            at_once=_MESSAGES_PER_POLL,
        )
