"""The format `outbox_postgres`: rows into a PostgreSQL table, batch and streaming. Logic is in `upsert.py`.

    stream.writeStream.format("outbox_postgres").outputMode("append")
        .option("dsn", dsn).option("table", "revenue").option("keys", "product,hour").option("query", "revenue")

The columns of the stream are columns of the table.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

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
from outbox_spark.options import Options
from outbox_spark.task import current_task
from outbox_spark.upsert import PROGRESS_TABLE, Task, Upsert, UpsertTarget

_OPTIONS = ("dsn", "table", "keys", "query", "onConflict", "progressTable")


@dataclass(frozen=True)
class RowsWritten(WriterCommitMessage):
    """What a task has written.

    Attributes:
        rows: number of rows.
        skipped: whether they had been written by an earlier attempt.
    """

    rows: int
    skipped: bool


def target_of(given: Mapping[str, str]) -> UpsertTarget:
    """Where rows go, from the options. Raises InvalidConfig."""
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
        """Name of the format."""
        return "outbox_postgres"

    def writer(self, schema: StructType, overwrite: bool) -> DataSourceWriter:
        """Batch: rows are upserted; there is no note, as nothing is replayed."""
        if overwrite:
            raise OutboxTableError("outbox_postgres does not overwrite a table: use mode append")
        return _BatchWriter(target_of(self.options), schema.fieldNames())

    def streamWriter(self, schema: StructType, overwrite: bool) -> DataSourceStreamWriter:  # noqa: N802  Spark's name
        """Streaming: each batch once. In output mode `complete` all rows are upserted, none are removed."""
        del overwrite
        options = Options("outbox_postgres", self.options, _OPTIONS, takes_kafka=False)
        return _StreamWriter(target_of(self.options), schema.fieldNames(), options.text("query"))


class _BatchWriter(DataSourceArrowWriter):
    def __init__(self, target: UpsertTarget, columns: Sequence[str]) -> None:
        self._target = target
        self._columns = columns

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        written = Upsert(self._target, self._columns).write(rows_of(iterator))
        return RowsWritten(written.rows, written.skipped)


class _StreamWriter(DataSourceStreamArrowWriter):
    def __init__(self, target: UpsertTarget, columns: Sequence[str], query: str) -> None:
        self._target = target
        self._columns = columns
        self._query = query

    def write(self, iterator: Iterator[pa.RecordBatch]) -> WriterCommitMessage:
        here = current_task()
        task = Task(self._query, here.query_id, here.batch, here.partition)
        written = Upsert(self._target, self._columns).write(rows_of(iterator), task)
        return RowsWritten(written.rows, written.skipped)


def rows_of(batches: Iterator[pa.RecordBatch]) -> Iterator[tuple[object, ...]]:
    """The rows of Arrow batches as tuples of Python values."""
    for batch in batches:
        yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
