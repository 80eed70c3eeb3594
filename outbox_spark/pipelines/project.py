"""`project`: topics -> a typed, deduplicated table in PostgreSQL, a lakehouse or both, exactly once."""

from __future__ import annotations

from pyspark.sql import SparkSession

from outbox_spark.config import ProjectSettings
from outbox_spark.pipelines import project_lakehouse
from outbox_spark.pipelines.follower import Target
from outbox_spark.pipelines.project_postgres import PostgresTable
from outbox_spark.pipelines.typed_rows import changes, project

__all__ = ["changes", "project", "targets"]


def targets(spark: SparkSession, settings: ProjectSettings) -> list[Target]:
    """Return the tables as targets. Raises InvalidConfig if a setting does not fit the schema."""
    found = []
    if settings.postgres is not None:
        table = PostgresTable(spark, settings, settings.postgres)
        found.append(Target(table, table.write))
    if settings.lakehouse is not None:
        found += project_lakehouse.targets(spark, settings, settings.lakehouse)
    return found
