"""The format `outbox_kafka`: topics as rows, batch and streaming; logic in `ranges.py`.

    spark.readStream.format("outbox_kafka")
        .option("kafka.bootstrap.servers", "localhost:9092").option("subscribe", "orders").load()

It reads only committed records, joins no consumer group, and commits no offsets to Kafka: they are in the checkpoint.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Annotated, Any, Literal

import pyarrow as pa
from pydantic import BeforeValidator, Field
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.streaming.datasource import ReadAllAvailable, ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from outbox_core.kafka.clients import TIMESTAMP_NOT_AVAILABLE, Message
from outbox_core.kafka.messages import UnreadableHeaders, headers_of
from outbox_spark.runtime.options import SourceOptions
from outbox_spark.topics.positions import Positions, TopicIds, from_json, ids_in, made_anew, to_json
from outbox_spark.topics.ranges import (
    LATEST,
    OffsetRange,
    TopicLog,
    parse_offsets,
    plan_batch,
    ranges_between,
    read_range,
    refuse_made_anew,
    refuse_shortened,
)

_HEADER = pa.struct({"key": pa.string(), "value": pa.binary()})
HEADERS = pa.list_(pa.field("element", _HEADER))
TIME = pa.timestamp("us", tz="UTC")
_ARROW = pa.schema(
    {
        "key": pa.binary(),
        "value": pa.binary(),
        "headers": pa.map_(pa.string(), pa.binary()),
        "header_list": HEADERS,
        "topic": pa.string(),
        "partition": pa.int32(),
        "offset": pa.int64(),
        "timestamp": TIME,
        "outbox_id": pa.string(),
    }
)
SCHEMA = from_arrow_schema(_ARROW)
_MILLISECONDS = -62_135_596_800_000, 253_402_300_799_999  # of the years 1 to 9999, Python's; brokers take any time


Offsets = Positions | Literal["earliest", "latest"]


def _names(text: object) -> object:
    return tuple(part.strip() for part in text.split(",") if part.strip()) if isinstance(text, str) else text


class KafkaSourceOptions(SourceOptions):
    """Options of the source, see docs/reference-spark-formats.md; `starting` is by default `latest` for a stream."""

    kafka: dict[str, Any] = Field(repr=False)
    topics: Annotated[tuple[str, ...], BeforeValidator(_names), Field(min_length=1)] = Field(
        validation_alias="subscribe"
    )
    starting: Annotated[Offsets, BeforeValidator(parse_offsets)] = Field(validation_alias="startingOffsets")
    ending: Annotated[Offsets, BeforeValidator(parse_offsets)] = Field(
        default="latest", validation_alias="endingOffsets"
    )
    limit: Annotated[int, Field(ge=1)] | None = Field(default=None, validation_alias="maxOffsetsPerTrigger")
    min_partitions: int = Field(default=1, ge=1, validation_alias="minPartitions")
    fail_on_loss: bool = Field(default=True, validation_alias="failOnDataLoss")
    id_header: str = Field(default="outbox-id", validation_alias="idHeader")

    @classmethod
    def of(cls, given: Mapping[str, str], *, streaming: bool) -> KafkaSourceOptions:
        """Read the options. Raises InvalidConfig."""
        begin = {"startingoffsets": "latest" if streaming else "earliest"}
        return cls.read("outbox_kafka", begin | {name.lower(): text for name, text in given.items() if text.strip()})


class KafkaSource(DataSource):
    """Topics as rows."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "outbox_kafka"

    def schema(self) -> StructType:
        """Return the columns of a row."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader of a batch."""
        del schema
        return _BatchReader(KafkaSourceOptions.of(self.options, streaming=False))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Make the reader of a stream."""
        del schema
        return _StreamReader(KafkaSourceOptions.of(self.options, streaming=True))


class _Reader:
    """The common part of both readers; pickled to the workers."""

    def __init__(self, options: KafkaSourceOptions) -> None:
        self.options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        options = self.options
        messages = read_range(options.kafka, partition.value, fail_on_loss=options.fail_on_loss)
        return (to_arrow(batch, options.id_header) for batch in messages)


class _BatchReader(_Reader, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        options = self.options
        with closing(TopicLog(options.kafka, options.topics)) as log:
            start, end = log.starting(options.starting), log.starting(options.ending, others=LATEST)
        # Spark wants one partition at least, which may be empty.
        parts = ranges_between(start, end, start, options.min_partitions) or [OffsetRange(options.topics[0], 0, 0, 0)]
        return [InputPartition(part) for part in parts]


class _StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    def __init__(self, options: KafkaSourceOptions) -> None:
        super().__init__(options)
        self._target: Positions | None = None  # the end of an availableNow run
        self._firsts: Positions = {}
        self._ids: TopicIds = {}  # asked for before the ends: those may be of a later topic, which is noticed then

    @cached_property
    def _log(self) -> TopicLog:
        return TopicLog(self.options.kafka, self.options.topics)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out the connection: workers get a copy."""
        return {"options": self.options, "_target": None, "_firsts": {}, "_ids": {}}

    def initialOffset(self) -> dict[str, Any]:  # noqa: N802
        ids = self._log.ids()
        return to_json(self._log.starting(self.options.starting), ids)

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadAllAvailable() if self.options.limit is None else ReadMaxRows(self.options.limit)

    def latestOffset(self, start: dict[str, Any], limit: ReadLimit) -> dict[str, Any]:  # noqa: N802
        most = limit.max_rows if isinstance(limit, ReadMaxRows) else None
        if self._target is None:
            self._ids = self._log.ids()
            self._firsts, ends = self._log.bounds()
        else:
            ends = self._target
        if self.options.fail_on_loss:
            refuse_made_anew(ids_in(start), self._ids)
            refuse_shortened(from_json(start), ends)
        begin = _begin(start, self._ids)
        return to_json(plan_batch(begin, ends, self._firsts, most), {**ids_in(start), **self._ids})

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._ids = self._log.ids()
        self._firsts, self._target = self._log.bounds()

    def reportLatestOffset(self) -> dict[str, Any] | None:  # noqa: N802
        return None if self._target is None else to_json(self._target)

    def partitions(self, start: dict[str, Any], end: dict[str, Any]) -> Sequence[InputPartition]:
        if self.options.fail_on_loss:  # Spark may repeat a batch that was planned long ago
            refuse_made_anew(ids_in(end), self._log.ids())
        firsts = self._firsts or self._log.bounds()[0]
        parts = ranges_between(_begin(start, ids_in(end)), from_json(end), firsts, self.options.min_partitions)
        return [InputPartition(part) for part in parts]

    def stop(self) -> None:
        self._log.close()


def _begin(start: dict[str, Any], ids: TopicIds) -> Positions:
    """Return the position of a batch's start, without topics that were made anew: these begin with their beginning."""
    new = made_anew(ids_in(start), ids)
    return {place: offset for place, offset in from_json(start).items() if place[0] not in new}


def to_arrow(messages: Sequence[Message], id_header: str) -> pa.RecordBatch:
    """Turn messages into rows. Of headers with the same name the map has the last, the list all, in their order.

    Unreadable headers (`headers_of`) are NULL; a message without headers has an empty map and an empty list.
    """
    header_lists = [headers_of(message) for message in messages]
    unreadable = [isinstance(headers, UnreadableHeaders) for headers in header_lists]
    nulls = pa.array(unreadable) if any(unreadable) else None
    offsets, names, values = _flat(header_lists)
    entries = pa.StructArray.from_arrays([names, values], fields=list(_HEADER))
    lists = pa.ListArray.from_arrays(offsets, entries, type=HEADERS, mask=nulls)
    unique = [dict(headers) for headers in header_lists]
    if sum(map(len, unique)) != len(names):
        offsets, names, values = _flat([tuple(headers.items()) for headers in unique])
    maps = pa.MapArray.from_arrays(offsets, names, values, mask=nulls)
    identities = [
        identity.decode("utf-8", "replace") if (identity := headers.get(id_header)) is not None else None
        for headers in unique
    ]
    return pa.RecordBatch.from_pydict(
        {
            "key": [message.key() for message in messages],
            "value": [message.value() for message in messages],
            "headers": maps,
            "header_list": lists,
            "topic": [message.topic() for message in messages],
            "partition": [message.partition() for message in messages],
            "offset": [message.offset() for message in messages],
            "timestamp": [_microseconds(message) for message in messages],
            "outbox_id": identities,
        },
        schema=_ARROW,
    )


def _flat(header_lists: Sequence[Any]) -> tuple[pa.Array, pa.Array, pa.Array]:
    """Return lists of pairs in Arrow's form: the beginning of each list, all names, all values."""
    offsets = list(itertools.accumulate(map(len, header_lists), initial=0))
    pairs = list(itertools.chain.from_iterable(header_lists))
    names, values = zip(*pairs, strict=True) if pairs else ((), ())
    return pa.array(offsets, pa.int32()), pa.array(names, pa.string()), pa.array(values, pa.binary())


def _microseconds(message: Message) -> int | None:
    kind, milliseconds = message.timestamp()
    first, last = _MILLISECONDS
    return None if kind == TIMESTAMP_NOT_AVAILABLE else min(max(milliseconds, first), last) * 1000
