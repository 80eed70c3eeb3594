"""Reading topics by ranges of offsets, without Spark.

A position is an offset for each partition of each topic. From a position and the ends of the log a batch is planned
(`plan_batch`), and each of its ranges is read by `RangeReader`, on any machine, as often as need be, with the same
result: what is committed in the log from the first offset up to, and not including, the last.

Three things make the end of a range less than obvious:

- The end of the log, for read_committed, is the last stable offset: what lies behind an open transaction is not there
  yet. A range never goes beyond it, so that it reads the same when it is read again.
- Offsets have holes: transaction markers, aborted records, compaction. So a range is not over when its last offset was
  seen, but when something at or behind its end is seen, or the client reports the end of the partition.
- Retention may have removed the beginning of a range. That is lost data, and an error, unless it was allowed.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxError
from outbox_core.kafka import (
    Consumer,
    KafkaError,
    KafkaException,
    Message,
    TopicPartition,
    make_consumer,
    why_unreadable,
)

Position = dict[str, dict[str, int]]
"""Topic -> partition, as text -> offset. JSON has no numbers as keys."""

EARLIEST, LATEST = -2, -1
_GROUP = "kafka-outbox-spark"
_ASK_SECONDS = 10.0
_POLL_SECONDS = 0.1
_MESSAGES_PER_POLL = 5_000
_SILENCE_SECONDS = 60.0


class RecordsExpired(OutboxError):
    """Records that were to be read are no longer in the topic."""


@dataclass(frozen=True, slots=True)
class OffsetRange:
    """A part of one partition.

    Attributes:
        topic: its topic.
        partition: its partition.
        first: the first offset.
        end: the offset after the last.
    """

    topic: str
    partition: int
    first: int
    end: int

    def __len__(self) -> int:
        return max(0, self.end - self.first)


def parse_offsets(option: str, text: str) -> Position | Literal["earliest", "latest"]:
    """Read starting or ending offsets: `earliest`, `latest`, or `{"topic": {"0": 17, "1": -2}}`.

    Within JSON, -2 means earliest and -1 latest.

    Raises:
        InvalidConfig: if it is none of them.
    """
    word = text.strip().lower()
    if word == "earliest":
        return "earliest"
    if word == "latest":
        return "latest"
    try:
        found = json.loads(text)
        position = {
            str(topic): {str(int(partition)): int(offset) for partition, offset in offsets.items()}
            for topic, offsets in found.items()
        }
    except (ValueError, AttributeError, TypeError):
        position = {}
    if not position or any(offset < EARLIEST for offsets in position.values() for offset in offsets.values()):
        raise InvalidConfig(
            f'option {option} must be earliest, latest, or JSON like {{"topic": {{"0": 17, "1": -2}}}} '
            f"(-2 for earliest, -1 for latest), is {text!r}"
        )
    return position


class TopicLog:
    """Where topics begin and end.

    Args:
        kafka: librdkafka settings of the cluster.
        topics: the topics.
    """

    def __init__(self, kafka: Mapping[str, Any], topics: Sequence[str]) -> None:
        self._kafka = kafka
        self._topics = topics
        self._consumer: Consumer | None = None

    def bounds(self) -> tuple[Position, Position]:
        """Where each partition begins and ends at this moment.

        Raises:
            InvalidConfig: if a topic does not exist.
            KafkaUnavailable: if the cluster does not answer.
        """
        firsts: Position = {}
        ends: Position = {}
        consumer = self._consumer = self._consumer or make_consumer(consumer_settings(self._kafka))
        for topic in self._topics:
            firsts[topic], ends[topic] = {}, {}
            for partition in self._partitions(consumer, topic):
                low, high = _watermarks(consumer, topic, partition)
                firsts[topic][str(partition)], ends[topic][str(partition)] = low, high
        return firsts, ends

    def starting(self, wanted: Position | Literal["earliest", "latest"], *, others: int = EARLIEST) -> Position:
        """The position that starting or ending offsets stand for.

        Args:
            wanted: the offsets, or the word for all of them.
            others: `EARLIEST` or `LATEST`, for partitions that are not mentioned.

        Raises:
            InvalidConfig: if a topic or partition does not exist.
            KafkaUnavailable: if the cluster does not answer.
        """
        firsts, ends = self.bounds()
        if wanted == "earliest":
            return firsts
        if wanted == "latest":
            return ends
        for topic, offsets in wanted.items():
            strangers = [partition for partition in offsets if partition not in firsts.get(topic, {})]
            if strangers:
                raise InvalidConfig(f"offsets name {topic}[{', '.join(strangers)}], which is not there")
        return {
            topic: {
                partition: {EARLIEST: first, LATEST: ends[topic][partition]}.get(asked, asked)
                for partition, first in offsets.items()
                for asked in (wanted.get(topic, {}).get(partition, others),)
            }
            for topic, offsets in firsts.items()
        }

    def close(self) -> None:
        """Close the connection; it is opened again when needed."""
        consumer, self._consumer = self._consumer, None
        if consumer is not None:
            consumer.close()

    def _partitions(self, consumer: Consumer, topic: str) -> list[int]:
        found = _insist(lambda: consumer.list_topics(topic, timeout=_ASK_SECONDS), f"topic {topic}").topics[topic]
        if found.error is not None or not found.partitions:
            reason = "it has no partitions"
            if found.error is not None:
                reason = why_unreadable(found.error, self._kafka, topic)
            raise InvalidConfig(f"topic {topic!r} cannot be read: {reason}")
        return sorted(found.partitions)


def _watermarks(consumer: Consumer, topic: str, partition: int) -> tuple[int, int]:
    """The first offset, and the end of what is committed."""
    at = TopicPartition(topic, partition)
    low, high = _insist(
        lambda: consumer.get_watermark_offsets(at, timeout=_ASK_SECONDS, cached=False),
        f"the offsets of {topic}[{partition}]",
    )
    return low, high


def _insist(ask: Callable[[], Any], what: str) -> Any:
    """Ask until the cluster answers, for some seconds."""
    give_up_at = time.monotonic() + 3 * _ASK_SECONDS
    while True:
        try:
            return ask()
        except KafkaException as error:
            if time.monotonic() > give_up_at:
                raise KafkaUnavailable(f"cannot find out {what}: {error.args[0].str()}") from None
            time.sleep(_POLL_SECONDS)


def refuse_shortened(start: Position, ends: Position) -> None:
    """See that no partition ends before what was read of it: then it is another topic, or has lost its end.

    Raises:
        RecordsExpired: naming the partition.
    """
    for topic, offsets in ends.items():
        for partition, end in offsets.items():
            reached = start.get(topic, {}).get(partition, end)
            if end < reached:
                raise RecordsExpired(
                    f"{topic}[{partition}] was read up to offset {reached}, and now ends at {end}: is it another topic "
                    "of that name? Begin with a new checkpoint, or wait with option failOnDataLoss=false until it is "
                    "that long again"
                )


def plan_batch(start: Position, ends: Position, firsts: Position, limit: int | None) -> Position:
    """Where a batch ends that begins at `start`.

    With a limit, each partition gets its share of it, by how much it has, and at least one offset if it has any, so
    that none is forgotten.

    Args:
        start: where the last batch ended.
        ends: where the partitions end.
        firsts: where partitions that `start` does not know begin.
        limit: how many offsets the batch may have; None for no limit.
    """
    begin = {
        topic: {partition: start.get(topic, {}).get(partition, firsts[topic][partition]) for partition in offsets}
        for topic, offsets in ends.items()
    }
    lags = {
        (topic, partition): max(0, end - begin[topic][partition])
        for topic, offsets in ends.items()
        for partition, end in offsets.items()
    }
    total = sum(lags.values())
    if limit is None or total <= limit:
        return {topic: {p: max(end, begin[topic][p]) for p, end in offsets.items()} for topic, offsets in ends.items()}
    return {
        topic: {
            partition: begin[topic][partition] + min(lag, max(1, limit * lag // total) if lag else 0)
            for partition in offsets
            for lag in (lags[topic, partition],)
        }
        for topic, offsets in ends.items()
    }


def ranges_between(start: Position, end: Position, firsts: Position, at_least: int = 1) -> list[OffsetRange]:
    """What lies between two positions, split into about `at_least` ranges or more, if it is long enough for that."""
    whole = [
        OffsetRange(topic, int(partition), start.get(topic, {}).get(partition, firsts[topic][partition]), offset)
        for topic, offsets in end.items()
        for partition, offset in offsets.items()
    ]
    whole = [found for found in whole if len(found)]
    total = sum(map(len, whole))
    if len(whole) >= at_least or not total:
        return whole
    pieces: list[OffsetRange] = []
    for found in whole:
        number = max(1, min(len(found), round(at_least * len(found) / total)))
        cuts = [found.first + len(found) * cut // number for cut in range(number + 1)]
        pieces += [OffsetRange(found.topic, found.partition, *cut) for cut in itertools.pairwise(cuts)]
    return pieces


def consumer_settings(kafka: Mapping[str, Any]) -> dict[str, Any]:
    """Settings of a consumer that joins no group and commits nothing."""
    return {
        "group.id": _GROUP,
        "isolation.level": "read_committed",
        "fetch.wait.max.ms": 50,
        "queued.max.messages.kbytes": 32_768,
        **{name: value for name, value in kafka.items() if name != "group.instance.id"},
        "enable.auto.commit": False,
        "enable.auto.offset.store": False,
        "enable.partition.eof": True,
        "auto.offset.reset": "error",
        "allow.auto.create.topics": False,
    }


class RangeReader:
    """Reads one range.

    Args:
        kafka: librdkafka settings of the cluster.
        wanted: the range.
        fail_on_loss: whether it is an error if retention has removed a part of the range.
    """

    def __init__(self, kafka: Mapping[str, Any], wanted: OffsetRange, *, fail_on_loss: bool = True) -> None:
        self._kafka = kafka
        self._range = wanted
        self._fail_on_loss = fail_on_loss

    def __iter__(self) -> Iterator[list[Message]]:
        """The range's messages, in lists, by ascending offset.

        Raises:
            RecordsExpired: if retention has removed what was to be read.
            KafkaUnavailable: if nothing comes for a minute.
        """
        consumer = make_consumer(consumer_settings(self._kafka))
        try:
            yield from self._read(consumer)
        finally:
            consumer.close()

    def _read(self, consumer: Consumer) -> Iterator[list[Message]]:
        wanted = self._range
        if not len(wanted):
            return
        at = TopicPartition(wanted.topic, wanted.partition, self._first(consumer))
        if at.offset >= wanted.end:
            return
        consumer.assign([at])
        position = at.offset
        heard_at = time.monotonic()
        while True:
            # No more than can come: the client waits for as many as it was asked for.
            messages = consumer.consume(min(_MESSAGES_PER_POLL, wanted.end - position), _POLL_SECONDS)
            if messages:
                heard_at = time.monotonic()
                position = min(wanted.end - 1, max(position, (messages[-1].offset() or 0) + 1))
            elif time.monotonic() - heard_at > _SILENCE_SECONDS:
                raise KafkaUnavailable(
                    f"{wanted.topic}[{wanted.partition}]: nothing came for {_SILENCE_SECONDS:g} s, "
                    f"before offset {wanted.end} was reached"
                )
            is_over, kept = self._sift(messages)
            if kept:
                yield kept
            if is_over:
                return

    def _first(self, consumer: Consumer) -> int:
        """Where to begin: not before the log does."""
        wanted = self._range
        low, _ = _watermarks(consumer, wanted.topic, wanted.partition)
        if low > wanted.first and self._fail_on_loss:
            raise RecordsExpired(
                f"{wanted.topic}[{wanted.partition}]: offsets {wanted.first} to {min(low, wanted.end) - 1} were "
                "removed before they were read (retention, or records deleted); keep records longer, or go on without "
                "them with option failOnDataLoss=false"
            )
        return max(low, wanted.first)

    def _sift(self, messages: Sequence[Message]) -> tuple[bool, list[Message]]:
        """Whether the range's end was reached, and the messages that belong to it."""
        end = self._range.end
        kept: list[Message] = []
        for message in messages:
            error = message.error()
            offset = message.offset() or 0
            if error is not None:
                if error.code() == KafkaError._PARTITION_EOF:  # noqa: SLF001  confluent's public constant
                    if offset >= end:
                        return True, kept
                elif error.code() == KafkaError._AUTO_OFFSET_RESET or not (error.retriable() or _passes(error)):  # noqa: SLF001
                    why = why_unreadable(error, self._kafka, self._range.topic)
                    raise KafkaUnavailable(f"{self._range.topic}[{self._range.partition}]: {why}")
                continue
            if offset >= end:
                return True, kept
            kept.append(message)
            if offset == end - 1:
                return True, kept
        return False, kept


def _passes(error: KafkaError) -> bool:
    """Whether librdkafka gets over it by itself."""
    return error.code() in {
        KafkaError._TRANSPORT,  # noqa: SLF001
        KafkaError._ALL_BROKERS_DOWN,  # noqa: SLF001
        KafkaError._TIMED_OUT,  # noqa: SLF001
        KafkaError._RESOLVE,  # noqa: SLF001
        KafkaError.GROUP_AUTHORIZATION_FAILED,  # no group is joined; the client looks for its coordinator all the same
        KafkaError.LEADER_NOT_AVAILABLE,
        KafkaError.NOT_LEADER_FOR_PARTITION,
    }
