"""Settings of the pipelines: a YAML file with a section for each, validated before anything is started.

Importing this imports no PySpark.
"""

from __future__ import annotations

from outbox_spark.config.document import PIPELINES, PipelineFile, load_pipeline, read_document, understand
from outbox_spark.config.models import (
    ArchiveSettings,
    AuditSettings,
    AuditSide,
    ParquetTarget,
    PostgresTarget,
    ProjectSettings,
    RelaySettings,
    ReplaySettings,
    SnapshotTable,
    SparkSettings,
    StreamSettings,
    TotalsSettings,
)

__all__ = [
    "PIPELINES",
    "ArchiveSettings",
    "AuditSettings",
    "AuditSide",
    "ParquetTarget",
    "PipelineFile",
    "PostgresTarget",
    "ProjectSettings",
    "RelaySettings",
    "ReplaySettings",
    "SnapshotTable",
    "SparkSettings",
    "StreamSettings",
    "TotalsSettings",
    "load_pipeline",
    "read_document",
    "understand",
]
