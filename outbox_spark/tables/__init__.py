"""Delta and Iceberg tables that record their own position in the topics."""

from __future__ import annotations

from pyspark.sql import SparkSession

from outbox_spark.config import IcebergTable
from outbox_spark.tables.folder import Folder
from outbox_spark.tables.log import TableLog
from outbox_spark.tables.table import Layout, Table, TableTarget

__all__ = [
    "Layout",
    "Table",
    "TableTarget",
    "open_table",
]


def open_table(spark: SparkSession, place: str | IcebergTable, layout: Layout) -> Table:
    """Open the Delta table in a folder, or an Iceberg table by its name; it is empty if there is none.

    Raises:
        MissingExtra: the format's library is not installed.
        StoreUnavailable: the storage or the catalog cannot be reached.
    """
    log: TableLog
    folder: Folder | None = None
    if isinstance(place, IcebergTable):
        from outbox_spark.tables.iceberg import IcebergLog

        log = IcebergLog(spark, place.table, place.catalog, layout.time, layout.date)
    else:
        from outbox_spark.tables.delta import DeltaLog

        folder = Folder(spark, place)
        log = DeltaLog(folder.url, layout.date)
    return Table(spark, log, layout, folder)
