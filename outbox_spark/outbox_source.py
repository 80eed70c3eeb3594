"""The format `outbox`: an outbox table as rows, batch and streaming. Logic is in `outbox_stream.py`.

    spark.readStream.format("outbox").option("dsn", dsn).option("kafka.bootstrap.servers", "localhost:9092").load()

A stream takes the rows out of the table: what a batch holds is marked, and deleted when Spark has finished the batch.
So it contends for leadership with the outbox's harvesters. A batch read changes nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from outbox_core.config import HarvestConfig
from outbox_core.election.leadership import now
from outbox_core.harvest.recovery import Transactions
from outbox_core.kafka import ensure_tracking_topic
from outbox_spark import takeover
from outbox_spark.batch_store import BatchStore, Shard
from outbox_spark.leadership import GivenTerm, OwnElection
from outbox_spark.options import Options
from outbox_spark.outbox_options import COMMON_OPTIONS, config_of, identity_of, server_id_of
from outbox_spark.outbox_rows import SCHEMA, to_arrow
from outbox_spark.outbox_stream import BEGINNING, Election, Offset, OutboxStream, StreamSettings
from outbox_spark.shard_writer import MOST_ROWS

DEFAULT_SHARDS = 2
_OWN_OPTIONS = ("shards", "maxRecordsPerBatch")
_SETTLE_SECONDS = 60.0


class OutboxSource(DataSource):
    """An outbox table as rows."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return "outbox"

    def schema(self) -> str:
        """Columns of a row."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Batch."""
        del schema
        return _BatchReader(SourceOptions(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Streaming."""
        del schema
        options = SourceOptions(self.options)
        if not options.given.has_kafka:
            raise options.given.error("kafka.bootstrap.servers", "is missing: a stream leads through Kafka")
        return _StreamReader(options)


class SourceOptions:
    """Options of the source; pickled to the workers.

    Raises:
        InvalidConfig: naming what is wrong.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = Options("outbox", given, (*COMMON_OPTIONS, *_OWN_OPTIONS))
        self.given.text("dsn")
        self.shards = self.given.number("shards", DEFAULT_SHARDS, at_most=1000) or DEFAULT_SHARDS
        self.limit = self.given.number("maxRecordsPerBatch", MOST_ROWS, at_most=10_000_000) or MOST_ROWS
        self.term = self.given.number("term", None, at_least=0, at_most=2**48)
        self.config: HarvestConfig = config_of(self.given)

    @property
    def identity(self) -> str:
        """The outbox's identity."""
        return identity_of(self.given, self.config)

    def make_store(self) -> BatchStore:
        """A connection."""
        name = f"kafka-outbox-spark {self.config.name}"[:63]
        return BatchStore(self.config.data_source, self.config.outbox_table, application_name=name)


class _Part(InputPartition):
    """What one task reads."""

    def __init__(self, shard: Shard, outbox_name: str) -> None:
        super().__init__(shard.number)
        self.shard = shard
        self.outbox_name = outbox_name


class _Reading:
    """What both readers share; pickled to the workers."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if not isinstance(partition, _Part):
            return iter(())
        return self._rows(partition.shard, partition.outbox_name)

    def parts(self, shards: Sequence[Shard]) -> list[InputPartition]:
        name = self.options.config.outbox_name or self.options.identity
        return [_Part(shard, name) for shard in shards]

    def _rows(self, shard: Shard, outbox_name: str) -> Iterator[pa.RecordBatch]:
        store = self.options.make_store()
        mark = shard.batch.mark if shard.batch is not None else None
        try:
            for rows in store.read(shard):
                yield to_arrow(rows, outbox_name, mark)
        finally:
            store.close()


class _BatchReader(_Reading, DataSourceReader):
    """Reads what is in the table, and changes nothing."""

    def partitions(self) -> Sequence[InputPartition]:
        self.options.make_store().check()
        return self.parts([Shard(number, self.options.shards) for number in range(self.options.shards)])


class _StreamReader(_Reading, DataSourceStreamReader, SupportsTriggerAvailableNow):
    """Reads batch after batch, and takes them out of the table."""

    @cached_property
    def _stream(self) -> OutboxStream:
        options, identity = self.options, self.options.identity
        transactions = Transactions.of(options.config, identity)
        election: Election = (
            GivenTerm(options.term)
            if options.term is not None
            else OwnElection(options.config, identity, server_id_of(options.config))
        )
        settings = StreamSettings(shards=options.shards, limit=options.limit)
        return OutboxStream(settings, election, options.make_store, _settling(transactions, options.shards))

    def __getstate__(self) -> dict[str, Any]:
        """Without connections: workers get a copy."""
        return {"options": self.options}

    def initialOffset(self) -> Offset:  # type: ignore[override]  # noqa: N802
        return BEGINNING

    def getDefaultReadLimit(self) -> ReadLimit:  # noqa: N802
        return ReadMaxRows(self.options.limit)

    def latestOffset(self, start: Offset, limit: ReadLimit) -> Offset:  # type: ignore[override]  # noqa: N802
        return self._stream.latest(start, limit.max_rows if isinstance(limit, ReadMaxRows) else None)

    def prepareForTriggerAvailableNow(self) -> None:  # noqa: N802
        self._stream.stop_at_present_end()

    def partitions(self, start: Offset, end: Offset) -> Sequence[InputPartition]:  # type: ignore[override]
        return self.parts(self._stream.shards(start, end))

    def commit(self, end: Offset) -> None:  # type: ignore[override]
        self._stream.commit(end)

    def stop(self) -> None:
        if "_stream" in self.__dict__:
            self._stream.stop()


def _settling(transactions: Transactions, shards: int) -> Callable[[BatchStore, Callable[[], bool]], None]:
    """What to do when a term begins."""

    def settle(store: BatchStore, over: Callable[[], bool]) -> None:
        give_up_at = now() + _SETTLE_SECONDS
        ensure_tracking_topic(transactions.kafka, transactions.relay_topic, width=shards)
        takeover.settle(transactions, store, lambda: over() or now() > give_up_at)
        takeover.refuse_marks(transactions, store)

    return settle
