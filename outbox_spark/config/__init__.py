"""Settings of the pipelines, validated before the work begins. Importing this imports no PySpark."""

from __future__ import annotations

import warnings
from typing import Any

from outbox_spark.config.document import PIPELINES, PipelineFile, load_pipeline, read_document, validate
from outbox_spark.config.models import (
    ArchiveSettings,
    AuditSettings,
    AuditSide,
    FileSettings,
    IcebergTable,
    LakehouseTable,
    LakehouseTarget,
    Period,
    PostgresTarget,
    ProjectSettings,
    RelaySettings,
    ReplaySettings,
    RowSettings,
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
    "FileSettings",
    "IcebergTable",
    "LakehouseTable",
    "LakehouseTarget",
    "Period",
    "PipelineFile",
    "PostgresTarget",
    "ProjectSettings",
    "RelaySettings",
    "ReplaySettings",
    "RowSettings",
    "SnapshotTable",
    "SparkSettings",
    "StreamSettings",
    "TotalsSettings",
    "load_pipeline",
    "read_document",
    "validate",
]


def __getattr__(name: str) -> Any:
    """Return `validate` by its deprecated name."""
    if name != "understand":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    warnings.warn("outbox_spark.config.understand is now validate", DeprecationWarning, stacklevel=2)
    return validate
