"""The format `outbox_kafka`: topics as rows, batch and streaming, through confluent-kafka. Logic is in `topics.py`.

    spark.readStream.format("outbox_kafka")
        .option("kafka.bootstrap.servers", "localhost:9092").option("subscribe", "orders").load()

Only what is committed is read. The offsets of a batch are in the query's checkpoint; no consumer group is joined, and
nothing is committed to Kafka.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from outbox_core.kafka import TIMESTAMP_NOT_AVAILABLE, Message, UnreadableHeaders, headers_of
from outbox_spark.options import Options
from outbox_spark.topics import (
    LATEST,
    OffsetRange,
    Position,
    RangeReader,
    TopicLog,
    parse_offsets,
    plan_batch,
    ranges_between,
    refuse_shortened,
)

SCHEMA = (
    "key binary, value binary, headers map<string, binary>, header_list array<struct<key: string, value: binary>>, "
    "topic string, partition int, offset bigint, timestamp timestamp, outbox_id string"
)

_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
_ARROW = pa.schema(
    [
        pa.field("key", pa.binary()),
        pa.field("value", pa.binary()),
        pa.field("headers", pa.map_(pa.string(), pa.binary())),
        pa.field("header_list", pa.list_(pa.field("element", _HEADER))),
        pa.field("topic", pa.string()),
        pa.field("partition", pa.int32()),
        pa.field("offset", pa.int64()),
        pa.field("timestamp", pa.timestamp("us", tz="UTC")),
        pa.field("outbox_id", pa.string()),
    ]
)
_OPTIONS = (
    "subscribe",
    "startingOffsets",
    "endingOffsets",
    "maxOffsetsPerTrigger",
    "minPartitions",
    "failOnDataLoss",
    "idHeader",
)


_LAST_MILLISECOND = 253_402_300_799_999
"""Of the year 9999: Python's calendar ends there, and brokers may take any time."""


@dataclass(frozen=True)
class KafkaSourceOptions:
    """Options of the source.

    Attributes:
        kafka: librdkafka settings.
        topics: what to read.
        starting: where a new query begins.
        ending: where a batch read ends.
        limit: how many offsets a batch of a stream may have; None for all.
        min_partitions: the least number of tasks, where there is enough to read.
        fail_on_loss: whether it is an error if retention was faster than the reader.
        id_header: name of the header with a record's identity.
    """

    kafka: Mapping[str, Any] = field(repr=False)
    topics: tuple[str, ...]
    starting: Position | Literal["earliest", "latest"]
    ending: Position | Literal["earliest", "latest"]
    limit: int | None
    min_partitions: int
    fail_on_loss: bool
    id_header: str

    @classmethod
    def of(cls, given: Mapping[str, str], *, streaming: bool) -> KafkaSourceOptions:
        """Read the options. Raises InvalidConfig."""
        options = Options("outbox_kafka", given, _OPTIONS)
        return cls(
            kafka=options.kafka(),
            topics=options.names("subscribe"),
            starting=parse_offsets(
                "startingOffsets", options.text("startingOffsets", "latest" if streaming else "earliest")
            ),
            ending=parse_offsets("endingOffsets", options.text("endingOffsets", "latest")),
            limit=options.number("maxOffsetsPerTrigger", None),
            min_partitions=options.number("minPartitions", 1) or 1,
            fail_on_loss=options.flag("failOnDataLoss", default=True),
            id_header=options.text("idHeader", "outbox-id"),
        )


class KafkaSource(DataSource):
    """Topics as rows."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return "outbox_kafka"

    def schema(self) -> str:
        """Columns of a row."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Batch."""
        del schema
        return _BatchReader(KafkaSourceOptions.of(self.options, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Streaming."""
        del schema
        return _StreamReader(KafkaSourceOptions.of(self.options, streaming=True))


class _Part(InputPartition):
    """What one task reads."""

    def __init__(self, wanted: OffsetRange) -> None:
        super().__init__(wanted)
        self.wanted = wanted


class _Reading:
    """What both readers share; pickled to the workers."""

    def __init__(self, options: KafkaSourceOptions) -> None:
        self.options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options = self.options
        messages = RangeReader(options.kafka, partition.wanted, fail_on_loss=options.fail_on_loss)  # type: ignore[attr-defined]
        return (to_arrow(batch, options.id_header) for batch in messages)


class _BatchReader(_Reading, DataSourceReader):
    """Reads what is in the topics between the starting and the ending offsets."""

    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        log = TopicLog(options.kafka, options.topics)
        try:
            start, end = log.starting(options.starting), log.starting(options.ending, others=LATEST)
        finally:
            log.close()
        # Spark wants one partition at least, and reads nothing from one that is empty.
        parts = ranges_between(start, end, start, options.min_partitions) or [OffsetRange(options.topics[0], 0, 0, 0)]
        return [_Part(part) for part in parts]


class _StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads on from where the last batch ended."""

    def __init__(self, options: KafkaSourceOptions) -> None:
        super().__init__(options)
        self._target: Position | None = None  # where an availableNow run ends
        self._firsts: Position = {}

    @cached_property
    def _log(self) -> TopicLog:
        return TopicLog(self.options.kafka, self.options.topics)

    def __getstate__(self) -> dict[str, Any]:
        """Without the connection: workers get a copy."""
        return {"options": self.options, "_target": None, "_firsts": {}}

    def initialOffset(self) -> Position:  # noqa: N802
        return self._log.starting(self.options.starting)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable() if self.options.limit is None else ReadMaxRows(self.options.limit)

    def latestOffset(self, start: Position, limit: ReadLimit) -> Position:  # noqa: N802
        if self._target is None:
            self._firsts, ends = self._log.bounds()
        else:
            ends = self._target
        if self.options.fail_on_loss:
            refuse_shortened(start, ends)
        return plan_batch(start, ends, self._firsts, limit.max_rows if isinstance(limit, ReadMaxRows) else None)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._firsts, self._target = self._log.bounds()

    def reportLatestOffset(self) -> Position | None:  # noqa: N802
        return self._target

    def partitions(self, start: Position, end: Position) -> Sequence[InputPartition]:
        firsts = self._firsts or self._log.bounds()[0]
        return [_Part(part) for part in ranges_between(start, end, firsts, self.options.min_partitions)]

    def stop(self) -> None:
        self._log.close()


def to_arrow(messages: Sequence[Message], id_header: str) -> pa.RecordBatch:
    """Messages as rows. Of headers with the same name the map has the last, the list all, in their order.

    Headers that cannot be read (`headers_of`) are NULL; a message without any has an empty map and an empty list.
    """
    header_lists = [headers_of(message) for message in messages]
    unreadable = [isinstance(headers, UnreadableHeaders) for headers in header_lists]
    nulls = pa.array(unreadable) if any(unreadable) else None
    offsets, names, values = _flat(header_lists)
    entries = pa.StructArray.from_arrays([names, values], fields=list(_HEADER))
    lists = pa.ListArray.from_arrays(offsets, entries, type=_ARROW.field("header_list").type, mask=nulls)
    unique = [dict(headers) for headers in header_lists]
    if sum(map(len, unique)) != len(names):
        offsets, names, values = _flat([tuple(headers.items()) for headers in unique])
    maps = pa.MapArray.from_arrays(offsets, names, values, mask=nulls)
    identities = [
        identity.decode("utf-8", "replace") if (identity := headers.get(id_header)) is not None else None
        for headers in unique
    ]
    return pa.RecordBatch.from_arrays(
        [
            pa.array([message.key() for message in messages], pa.binary()),
            pa.array([message.value() for message in messages], pa.binary()),
            maps,
            lists,
            pa.array([message.topic() for message in messages], pa.string()),
            pa.array([message.partition() for message in messages], pa.int32()),
            pa.array([message.offset() for message in messages], pa.int64()),
            pa.array([_microseconds(message) for message in messages], pa.timestamp("us", tz="UTC")),
            pa.array(identities, pa.string()),
        ],
        schema=_ARROW,
    )


def _flat(header_lists: Sequence[Any]) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Lists of pairs as Arrow has them: where each list begins, all names, all values."""
    offsets = list(itertools.accumulate(map(len, header_lists), initial=0))
    pairs = list(itertools.chain.from_iterable(header_lists))
    names, values = zip(*pairs, strict=True) if pairs else ((), ())
    return pa.array(offsets, pa.int32()), pa.array(names, pa.string()), pa.array(values, pa.binary())


def _microseconds(message: Message) -> int | None:
    kind, milliseconds = message.timestamp()
    return None if kind == TIMESTAMP_NOT_AVAILABLE else min(milliseconds, _LAST_MILLISECOND) * 1000
