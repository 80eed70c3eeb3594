"""The format `outbox_kafka_txn`: what a stream of format `outbox` reads into Kafka, exactly once.

Logic is in `shard_writer.py`.

    stream = spark.readStream.format("outbox").options(**options).load()
    stream.writeStream.format("outbox_kafka_txn").options(**options).option("checkpointLocation", path).start()

Each partition of the stream is one shard with a transactional.id of its own. So nothing may move rows between
partitions on the way: filter and change columns, but do not repartition, join or aggregate.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from outbox_core.harvest.recovery import Transactions
from outbox_spark.options import Options
from outbox_spark.outbox_options import COMMON_OPTIONS, config_of, identity_of
from outbox_spark.outbox_rows import from_arrow
from outbox_spark.shard_writer import ShardWriter
from outbox_spark.task import current_task


@dataclass(frozen=True)
class RecordsPublished(WriterCommitMessage):
    """What a task has published.

    Attributes:
        sent: number of records.
        found: how many more an earlier attempt had published.
    """

    sent: int
    found: int


class KafkaSink(DataSource):
    """Records into topics."""

    @classmethod
    def name(cls) -> str:
        """Name of the format."""
        return "outbox_kafka_txn"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802  Spark's name
        """Streaming."""
        del schema, overwrite
        return ShardsWriter(self.options)


class ShardsWriter(DataSourceStreamArrowWriter):
    """Publishes each partition by a `ShardWriter`.

    Args:
        given: the sink's options.
    """

    def __init__(self, given: Mapping[str, str]) -> None:
        self._options = Options("outbox_kafka_txn", given, COMMON_OPTIONS)
        self._options.kafka()
        self._config = config_of(self._options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """On a worker: one shard of one batch."""
        mark, records = from_arrow(iterator)
        if mark is None:
            return RecordsPublished(0, 0)
        identity = identity_of(self._options, self._config)
        shard = Transactions.of(self._config, identity).of_shard(current_task().partition)
        leader = self._config.leader_names(identity)
        server_id = self._options.optional("server") or ""
        writer = ShardWriter(shard, leader, mark.term, server_id=server_id, reached=self.reached)
        written = writer.write(records)
        return RecordsPublished(written.sent, written.found)

    def reached(self, step: str) -> None:
        """Called at each step of a shard; tests override it to fail there."""
