"""The format `outbox`: an outbox table as rows, batch and streaming; logic in `stream.py`.

    spark.readStream.format("outbox").option("dsn", dsn).option("kafka.bootstrap.servers", "localhost:9092").load()

A stream takes the rows out of the table: it marks those of a batch, and deletes them when Spark has finished the batch.
So it contends for leadership with the outbox's harvesters. A batch read changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import cached_property
from typing import Any

import pyarrow as pa
from pyspark.sql.datasource import DataSource, DataSourceReader, DataSourceStreamReader, InputPartition
from pyspark.sql.streaming.datasource import ReadLimit, ReadMaxRows, SupportsTriggerAvailableNow
from pyspark.sql.types import StructType

from outbox_core.config import HarvestConfig
from outbox_core.election.lease import now
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.topics import ensure_tracking_topic
from outbox_core.kafka.transactions import GiveUp
from outbox_spark.relay import fencing
from outbox_spark.relay.batch_store import BatchStore, Shard
from outbox_spark.relay.leadership import FixedTerm, OwnElection
from outbox_spark.relay.options import COMMON_OPTIONS, config_of, identity_of, server_id_of
from outbox_spark.relay.rows import SCHEMA, to_arrow
from outbox_spark.relay.shard_writer import MOST_ROWS
from outbox_spark.relay.stream import BEGINNING, Election, Offset, OutboxStream, StreamSettings
from outbox_spark.runtime.options import Options

DEFAULT_SHARDS = 2
_OWN_OPTIONS = ("shards", "maxRecordsPerBatch")
_PURGE_SECONDS = 60.0


class OutboxSource(DataSource):
    """An outbox table as rows."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "outbox"

    def schema(self) -> str:
        """Return the columns of a row."""
        return SCHEMA

    def reader(self, schema: StructType) -> DataSourceReader:
        """Make the reader of a batch."""
        del schema
        return _BatchReader(SourceOptions(self.options))

    def streamReader(self, schema: StructType) -> DataSourceStreamReader:  # noqa: N802  Spark's name
        """Make the reader of a stream."""
        del schema
        options = SourceOptions(self.options)
        if not options.given.has_kafka:
            raise options.given.error("kafka.bootstrap.servers", "is missing: a stream leads through Kafka")
        return _StreamReader(options)


class SourceOptions:
    """Options of the source; pickled to the workers. Raises InvalidConfig."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self.given = Options("outbox", given, (*COMMON_OPTIONS, *_OWN_OPTIONS))
        self.given.text("dsn")
        self.shards = self.given.number("shards", DEFAULT_SHARDS, at_most=1000) or DEFAULT_SHARDS
        self.limit = self.given.number("maxRecordsPerBatch", MOST_ROWS, at_most=10_000_000) or MOST_ROWS
        self.term = self.given.number("term", None, at_least=0, at_most=2**48)
        self.config: HarvestConfig = config_of(self.given)

    @property
    def identity(self) -> str:
        """Return the outbox's identity."""
        return identity_of(self.given, self.config)

    def make_store(self) -> BatchStore:
        """Make a connection."""
        name = f"kafka-outbox-spark {self.config.name}"[:63]
        return BatchStore(self.config.data_source, self.config.outbox_table, application_name=name)


class _Reader:
    """The common part of both readers; pickled to the workers."""

    def __init__(self, options: SourceOptions) -> None:
        self.options = options

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        if partition.value is None:  # Spark's partition where there are none
            return
        shard, outbox_name = partition.value
        mark = shard.batch.mark if shard.batch is not None else None
        with closing(self.options.make_store()) as store:
            for rows in store.read(shard):
                yield to_arrow(rows, outbox_name, mark)

    def parts(self, shards: Sequence[Shard]) -> list[InputPartition]:
        name = self.options.config.outbox_name or self.options.identity
        return [InputPartition((shard, name)) for shard in shards]


class _BatchReader(_Reader, DataSourceReader):
    def partitions(self) -> Sequence[InputPartition]:
        with closing(self.options.make_store()) as store:
            store.outbox.check()
        return self.parts([Shard(number, self.options.shards) for number in range(self.options.shards)])


class _StreamReader(_Reader, DataSourceStreamReader, SupportsTriggerAvailableNow):
    @cached_property
    def _stream(self) -> OutboxStream:
        options, identity = self.options, self.options.identity
        transactional = TransactionalIdentity.of(options.config, identity)
        election: Election = (
            FixedTerm(options.term)
            if options.term is not None
            else OwnElection(options.config, identity, server_id_of(options.config))
        )

        def purge_published(store: BatchStore, give_up: GiveUp) -> None:
            give_up_at = now() + _PURGE_SECONDS
            ensure_tracking_topic(transactional.kafka, transactional.relay_topic, width=options.shards)
            fencing.fence_and_purge(transactional, store, lambda: give_up() or now() > give_up_at)
            fencing.refuse_marked_rows(transactional, store)

        settings = StreamSettings(shards=options.shards, limit=options.limit)
        return OutboxStream(settings, election, options.make_store, purge_published)

    def __getstate__(self) -> dict[str, Any]:
        """Leave out connections: workers get a copy."""
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
