"""The format `outbox_postgres`: rows into a PostgreSQL table, batch and streaming; logic in `upsert.py`.

    stream.writeStream.format("outbox_postgres").outputMode("append")
        .option("dsn", dsn).option("table", "revenue").option("keys", "product,hour").option("query", "revenue")

The columns of the stream are columns of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import pyarrow as pa
from pyspark.sql.datasource import (
    DataSource,
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    DataSourceStreamWriter,
    DataSourceWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from outbox_core.config.data_source import normalise_data_source
from outbox_core.errors import OutboxTableError
from outbox_spark.postgres.upsert import PROGRESS_TABLE, Task, Upsert, UpsertTarget
from outbox_spark.runtime.options import Options
from outbox_spark.runtime.task import current_task

_OPTIONS = ("dsn", "table", "keys", "query", "onConflict", "progressTable")


def target_of(given: Mapping[str, str]) -> UpsertTarget:
    """Read the target from the options. Raises InvalidConfig."""
    options = Options("outbox_postgres", given, _OPTIONS, takes_kafka=False)
    given_dsn = options.text("dsn")
    try:
        dsn = normalise_data_source(given_dsn)
    except ValueError as error:
        raise options.error("dsn", str(error)) from None
    return UpsertTarget(
        dsn=dsn,
        table=options.text("table"),
        keys=options.names("keys", default=()),
        on_conflict=options.choice("onConflict", {"update", "ignore"}, "update"),
        progress=options.text("progressTable", PROGRESS_TABLE),
    )


class PostgresSink(DataSource):
    """Rows into a table."""

    @classmethod
    def name(cls) -> str:
        """Return the format's name."""
        return "outbox_postgres"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Make the writer of a batch, which leaves no notes: batches are not replayed."""
        if overwrite:
            raise OutboxTableError("outbox_postgres does not overwrite a table: use mode append")
        return _BatchWriter(target_of(self.options), schema.fieldNames())

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802  Spark's name
        """Make the writer of a stream: each batch once. Output mode `complete` upserts all rows, and removes none."""
        del overwrite
        options = Options("outbox_postgres", self.options, _OPTIONS, takes_kafka=False)
        return _StreamWriter(target_of(self.options), schema.fieldNames(), options.text("query"))


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, target: UpsertTarget, columns: Sequence[str]) -> None:
        self._target = target
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        Upsert(self._target, self._columns).write(rows_of(iterator))
        return WriterCommitMessage()


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, target: UpsertTarget, columns: Sequence[str], query: str) -> None:
        self._target = target
        self._columns = columns
        self._query = query

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        here = current_task()
        task = Task(self._query, here.query_id, here.batch, here.partition)
        Upsert(self._target, self._columns).write(rows_of(iterator), task)
        return WriterCommitMessage()


def rows_of(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[object, ...]]:
    """Yield the rows of Arrow batches as tuples of Python values."""
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
