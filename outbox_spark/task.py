"""Which batch a Spark task belongs to, as seen from the worker that runs it."""

from __future__ import annotations

from typing import NamedTuple

from pyspark import TaskContext

_BATCH = "streaming.sql.batchId"
_QUERY = "sql.streaming.queryId"


class TaskOfStream(NamedTuple):
    """A task of a streaming query.

    Attributes:
        query_id: identity of the query, which Spark keeps in its checkpoint.
        batch: number of the micro-batch.
        partition: number of the partition that the task works on.
        attempt: how often the partition was tried before.
    """

    query_id: str
    batch: int
    partition: int
    attempt: int


def current_task() -> TaskOfStream:
    """The task that runs here.

    Raises:
        RuntimeError: if this is no worker of a streaming query.
    """
    context = TaskContext.get()
    batch = context.getLocalProperty(_BATCH) if context is not None else None
    query = context.getLocalProperty(_QUERY) if context is not None else None
    if context is None or batch is None or query is None:
        raise RuntimeError("not within a task of a streaming query")
    return TaskOfStream(query, int(batch), context.partitionId(), context.attemptNumber())
