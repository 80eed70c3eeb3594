"""Delta and Iceberg tables that record their own position in the topics."""

from __future__ import annotations

from pyspark.sql import SparkSession

from outbox_spark.config import IcebergTable
from outbox_spark.tables.folder import Folder
from outbox_spark.tables.table import Layout, Table

__all__ = ["Layout", "Table", "open_table"]


def open_table(spark: SparkSession, place: str | IcebergTable, layout: Layout) -> Table:
    """Open the Delta table in a folder, or an Iceberg table by its name; it is empty if there is none.

    Raises MissingExtra without the format's library, StoreUnavailable if storage or catalog cannot be reached.
    """
    if isinstance(place, IcebergTable):
        from outbox_spark.tables.iceberg import IcebergLog

        return Table(spark, IcebergLog(spark, place.table, place.catalog, layout.time, layout.date), layout)
    from outbox_spark.tables.delta import DeltaLog

    folder = Folder(spark, place)
    return Table(spark, DeltaLog(folder.url, layout.date), layout, folder)
