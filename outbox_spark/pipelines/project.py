"""`project`: topics -> a typed, deduplicated table in PostgreSQL, a lakehouse or both, exactly once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

from pyspark.sql import SparkSession

from outbox_spark.config import ProjectSettings
from outbox_spark.metrics import BatchReport
from outbox_spark.pipelines.follower import Follower, Target
from outbox_spark.pipelines.project_lakehouse import targets
from outbox_spark.pipelines.project_postgres import PostgresTarget
from outbox_spark.pipelines.typed_rows import changes, columns_of, project

__all__ = ["changes", "project", "run", "targets"]


def run(
    spark: SparkSession,
    kafka: Mapping[str, str],
    settings: ProjectSettings,
    *,
    once: bool,
    stop: threading.Event,
    report: Callable[[BatchReport], None],
) -> Mapping[str, int]:
    """Project until `stop` is set, or, with `once`, up to the present end of the topics; return counts.

    Raises:
        InvalidConfig: a setting does not fit the schema.
        OutboxTableError: a table of the target has other columns.
        StoreUnavailable: the target's database cannot be reached.
    """
    found: list[Target] = []
    if settings.postgres is not None:
        found.append(PostgresTarget(spark, settings, settings.postgres, columns_of(spark, settings)))
    found += targets(spark, settings)
    return Follower(spark, kafka, settings, found, report).run(once=once, stop=stop)
