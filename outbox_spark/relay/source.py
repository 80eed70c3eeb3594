"""The format `outbox`: an outbox table as rows, for batch reads, which change nothing.

spark.read.format("outbox").option("dsn", dsn).load()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing

import pyarrow as pa
from pydantic import Field
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.types import StructType

from outbox_spark.relay.rows import SCHEMA, to_arrow
from outbox_spark.relay.shard_store import ShardStore
from outbox_spark.runtime.options import SourceOptions


class _Options(SourceOptions):
    dsn: str = Field(repr=False)
    table: str = "outbox"
    shards: int = Field(default=2, ge=1, le=1000)
    outbox_name: str | None = Field(default=None, validation_alias="outboxName")


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
        return OutboxReader(self.options)


class OutboxReader(DataSourceReader):
    """A read of the table by shards; pickled to the workers. Raises InvalidConfig."""

    def __init__(self, given: Mapping[str, str]) -> None:
        options = _Options.read("outbox", given)
        self._table = options.dsn, options.table
        self._shards = options.shards
        self._outbox_name = options.outbox_name

    def partitions(self) -> Sequence[InputPartition]:
        """Return the shards, once the table is known to be an outbox."""
        with closing(self._connect()) as store:
            name = self._outbox_name or store.check()
        return [InputPartition((number, name)) for number in range(self._shards)]

    def read(self, partition: InputPartition) -> Iterator[pa.RecordBatch]:
        """Read a shard, on a worker."""
        number, name = partition.value
        with closing(self._connect()) as store:
            for rows in store.read_shard(number, self._shards):
                yield to_arrow(rows, name)

    def _connect(self) -> ShardStore:
        return ShardStore(*self._table, application_name="kafka-outbox-spark")
