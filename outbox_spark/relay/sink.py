"""The format `outbox_kafka_txn`: a stream of format `outbox` into Kafka, exactly once; logic in `shard_writer.py`.

Each partition of the stream is one shard with a transactional.id of its own. So steps between may filter and change
columns, but not move rows to other partitions: no repartition, join or aggregation.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from outbox_core.kafka.identity import TransactionalIdentity
from outbox_spark.relay.options import COMMON_OPTIONS, config_of, identity_of
from outbox_spark.relay.rows import from_arrow
from outbox_spark.relay.shard_writer import ShardWriter
from outbox_spark.runtime.options import Options
from outbox_spark.runtime.task import current_task


class KafkaSink(DataSource):
    """Records into topics."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "outbox_kafka_txn"

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802  Spark's name
        """Make the writer of a stream."""
        del schema, overwrite
        return ShardsWriter(self.options)


class ShardsWriter(DataSourceStreamArrowWriter):
    """A writer of each partition by a `ShardWriter`."""

    def __init__(self, given: Mapping[str, str]) -> None:
        self._options = Options("outbox_kafka_txn", given, COMMON_OPTIONS)
        self._options.kafka()
        self._config = config_of(self._options)

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        """Publish one shard of one batch, on a worker."""
        mark, records = from_arrow(iterator)
        if mark is None:
            return WriterCommitMessage()
        identity = identity_of(self._options, self._config)
        shard = TransactionalIdentity.of(self._config, identity).of_shard(current_task().partition)
        leader = self._config.leader_names(identity)
        server_id = self._options.optional("server") or ""
        writer = ShardWriter(shard, leader, mark.term, server_id=server_id, failpoint=self.failpoint)
        writer.write(records)
        return WriterCommitMessage()

    def failpoint(self, step: str) -> None:
        """Do nothing at a step of a shard; tests override it to fail there."""
