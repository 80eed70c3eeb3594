"""Topics read by ranges of offsets. No Spark.

`plan_batch` plans a batch from a position and the ends of the log; `read_range` reads each of its ranges, on any
machine, any number of times, with the same result: the committed messages from the first offset up to, and not
including, the last.

- A range never goes beyond the last stable offset: records behind an open transaction are not visible yet.
- Offsets have holes: transaction markers, aborted records, compaction. So a range ends not with its last offset, but
  with a message at or behind its end, or with the client's report of the end of the partition.
- Retention may have removed the beginning of a range: that is lost data, and an error, unless it is allowed.
"""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Literal

from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxError
from outbox_core.kafka.clients import Consumer, KafkaError, KafkaException, Message, TopicPartition, make_consumer
from outbox_core.kafka.errors import CONSUMER_RECOVERS, why_unreadable
from outbox_core.kafka.reader import PartitionReader
from outbox_spark.runtime.secrets import filled

Position = dict[str, dict[str, int]]
"""Topic -> partition, as text -> offset. JSON has no numbers as keys."""

EARLIEST, LATEST = -2, -1
_GROUP = "kafka-outbox-spark"
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.1
_MESSAGES_PER_POLL = 5_000
_SILENCE_SECONDS = 60.0


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


def parse_offsets(text: str) -> Position | Literal["earliest", "latest"]:
    """Read `earliest`, `latest`, or `{"topic": {"0": 17, "1": -2}}` with -2 for earliest. Raises InvalidConfig."""
    word = text.strip().lower()
    if word == "earliest":
        return "earliest"
    if word == "latest":
        return "latest"
    try:
        position = {
            str(topic): {str(int(partition)): int(offset) for partition, offset in offsets.items()}
            for topic, offsets in json.loads(text).items()
        }
    except (ValueError, AttributeError, TypeError):
        position = {}
    if not position or any(offset < EARLIEST for offsets in position.values() for offset in offsets.values()):
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

    def bounds(self) -> tuple[Position, Position]:
        """Return the present beginning and end of each partition. Raises InvalidConfig and KafkaUnavailable."""
        firsts: Position = {}
        ends: Position = {}
        consumer = self._consumer = self._consumer or _make_consumer(self._kafka)
        for topic in self._topics:
            firsts[topic], ends[topic] = {}, {}
            for partition in self._partitions(consumer, topic):
                low, high = _watermarks(consumer, topic, partition)
                firsts[topic][str(partition)], ends[topic][str(partition)] = low, high
        return firsts, ends

    def starting(self, wanted: Position | Literal["earliest", "latest"], *, others: int = EARLIEST) -> Position:
        """Resolve offsets; `others` (`EARLIEST` or `LATEST`) is for partitions not mentioned. Raises as `bounds`."""
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


def refuse_shortened(start: Position, ends: Position) -> None:
    """Raise RecordsExpired for a partition that ends before its position: perhaps another topic of that name."""
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
    """Return the end of a batch that begins at `start`, or, for partitions that are new, at `firsts`.

    Within the limit of offsets, each partition gets a share by its lag, and at least one offset, so that all progress.
    """
    whole = _partitions_between(start, ends, firsts)
    total = sum(map(len, whole))
    batch: Position = {topic: {} for topic in ends}
    for part in whole:
        share = len(part)
        if share and limit is not None and total > limit:
            share = min(share, max(1, limit * share // total))
        batch[part.topic][str(part.partition)] = part.first + share
    return batch


def ranges_between(start: Position, end: Position, firsts: Position, at_least: int = 1) -> list[OffsetRange]:
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


def _partitions_between(start: Position, end: Position, firsts: Position) -> list[OffsetRange]:
    return [
        OffsetRange(topic, int(partition), start.get(topic, {}).get(partition, firsts[topic][partition]), offset)
        for topic, offsets in end.items()
        for partition, offset in offsets.items()
    ]


def _make_consumer(kafka: Mapping[str, Any]) -> Consumer:
    return make_consumer(
        {
            "group.id": _GROUP,
            "isolation.level": "read_committed",
            "fetch.wait.max.ms": 50,
            "queued.max.messages.kbytes": 32_768,
            **{name: value for name, value in filled(kafka).items() if name != "group.instance.id"},
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "enable.partition.eof": True,
            "auto.offset.reset": "error",
            "allow.auto.create.topics": False,
        }
    )


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
