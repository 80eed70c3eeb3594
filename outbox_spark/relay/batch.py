"""A batch of a relay as a Spark job of one task for each shard. Nothing but plans and outcomes crosses the JVM."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import replace
from functools import partial
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from outbox_core.config import HarvestConfig
from outbox_core.errors import InvalidConfig
from outbox_spark.relay.plan import BatchPlan, ShardOutcome
from outbox_spark.relay.shard_task import ShardTask
from outbox_spark.runtime.secrets import filled_harvest
from outbox_spark.session import is_connect

_TAG = "outbox-relay-batch"
_POLL_SECONDS = 0.05


def publish(spark: SparkSession, plan: BatchPlan, go_on: Callable[[], bool]) -> list[ShardOutcome] | None:
    """Publish a batch, and return what its shards did; None if `go_on`, asked now and then, has ended it.

    Raises Spark's error if a task has failed as often as Spark lets it.
    """

    def run() -> list[Any]:
        spark.addTag(_TAG)  # of this thread
        if not is_connect(spark):
            spark.sparkContext.setJobDescription(plan.title)
        shards = spark.range(0, len(plan.ranges), 1, len(plan.ranges))
        return shards.mapInArrow(partial(_publish_shards, plan), "outcome binary").collect()

    with ThreadPoolExecutor(1, thread_name_prefix="outbox-relay-batch") as thread:
        job = thread.submit(run)
        is_ended = False
        while not job.done():
            if is_ended or not go_on():
                is_ended = True
                spark.interruptTag(_TAG)  # more than once: the job may not have begun
            wait([job], _POLL_SECONDS)
        if is_ended:
            return None
        return [pickle.loads(row.outcome) for row in job.result()]  # noqa: S301  from tasks of our own


def has_ended(spark: SparkSession) -> bool:
    """Tell whether the session can run no more jobs: its JVM, its server or its context is gone."""
    try:
        _ = spark.version  # asks the JVM
        context = getattr(spark, "_sc", None)  # none with Spark Connect
        return context is not None and bool(context._jsc.sc().isStopped())  # noqa: SLF001
    except Exception:
        return True


def _publish_shards(plan: BatchPlan, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """Publish the shards of these numbers, on a worker."""
    plan = replace(plan, harvest=filled_harvest(plan.harvest))
    for batch in batches:
        outcomes = [pickle.dumps(ShardTask(plan, number).run()) for number in batch.column(0).to_pylist()]
        yield pa.RecordBatch.from_pydict({"outcome": pa.array(outcomes, pa.binary())})


def refuse_functions(config: HarvestConfig) -> None:
    """Raise InvalidConfig for a Kafka setting that Spark cannot hand to its workers."""
    for name, value in (*config.base_kafka_config.items(), *config.producer_kafka_config.items()):
        if callable(value) or not isinstance(value, str | int | float | bool):
            raise InvalidConfig(f"Kafka setting {name}: a function cannot be handed to Spark's workers; use text")
