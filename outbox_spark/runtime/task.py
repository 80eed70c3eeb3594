"""The Spark task that runs in this worker, and its batch."""

from __future__ import annotations

from typing import NamedTuple

from pyspark import TaskContext

_BATCH = "streaming.sql.batchId"
_QUERY = "sql.streaming.queryId"


class TaskOfStream(NamedTuple):
    """A task of a streaming query: the query's identity in its checkpoint, and numbers of micro-batch and partition."""

    query_id: str
    batch: int
    partition: int


def current_task() -> TaskOfStream:
    """Return the task that runs here. Raises RuntimeError outside the workers of a streaming query."""
    context = TaskContext.get()
    batch = context.getLocalProperty(_BATCH) if context is not None else None
    query = context.getLocalProperty(_QUERY) if context is not None else None
    if context is None or batch is None or query is None:
        raise RuntimeError("not within a task of a streaming query")
    return TaskOfStream(query, int(batch), context.partitionId())
