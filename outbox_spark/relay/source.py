"""The format `outbox`: an outbox table as rows, for batch reads, which change nothing.

spark.read.format("outbox").option("dsn", dsn).load()
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from typing import Any

import pyarrow as pa
from pydantic import Field
from pyspark.sql.datasource import DataSource, DataSourceReader, InputPartition
from pyspark.sql.pandas.types import from_arrow_schema
from pyspark.sql.types import StructType

from outbox_core.stores.interface import StoredRecord
from outbox_spark.relay.shard_store import ShardStore
from outbox_spark.runtime.options import SourceOptions
from outbox_spark.topics.source import HEADERS, TIME

_ARROW = pa.schema(
    {
        "id": pa.int64(),
        "create_time": TIME,
        "topic": pa.string(),
        "key": pa.string(),
        "value": pa.binary(),
        "header_list": HEADERS,
        "partition": pa.int32(),
        "outbox_id": pa.string(),
    }
)


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

    def schema(self) -> StructType:
        """Return the columns of a row."""
        return from_arrow_schema(_ARROW)

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
                yield _to_arrow(rows, name)

    def _connect(self) -> ShardStore:
        return ShardStore(*self._table, application_name="kafka-outbox-spark")


def _headers(names: Sequence[Any], texts: Sequence[Any]) -> list[tuple[str, bytes | None]] | None:
    """Return headers; None for none, and for arrays that are no headers: any writer may leave these."""
    values = [text.encode() if isinstance(text, str) else text for text in texts]
    if len(names) != len(values) or not all(isinstance(name, str) for name in names) or any(map(_is_array, values)):
        return None
    return list(zip(names, values, strict=True)) or None


def _is_array(value: object) -> bool:
    return isinstance(value, list)


def _to_arrow(rows: Sequence[StoredRecord], outbox_name: str) -> pa.RecordBatch:
    ids, topics, keys, values, header_keys, header_values, partitions, create_times = zip(*rows, strict=True)
    headers = [_headers(names or (), texts or ()) for names, texts in zip(header_keys, header_values, strict=True)]
    identities = [f"{outbox_name}:{number}" for number in ids]
    columns = (ids, create_times, topics, keys, values, headers, partitions, identities)
    return pa.RecordBatch.from_pydict(dict(zip(_ARROW.names, columns, strict=True)), schema=_ARROW)
