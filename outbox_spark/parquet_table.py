"""A Parquet table that says itself how far its topics are in it: written by Spark, committed by its ledger.

`append` writes a batch and commits it with the positions after it; `compact` makes few large files out of many small
ones, folder by folder. Each is one entry of the ledger (see `ledger.py`): all of it or nothing.

The driver does the commits; rows stay on the executors.
"""

from __future__ import annotations

import itertools
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from outbox_spark.folder import HadoopFolder
from outbox_spark.ledger import STAGING, Ledger, TableFile
from outbox_spark.positions import Positions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger(__name__)

_ORDER = ("topic", "_topic", "partition", "_partition", "offset", "_offset")
"""Columns by which merged rows are ordered, where a table has them."""


class ParquetTable:
    """A folder of Parquet files with a ledger. Used by one thread; one process may write to it at a time.

    Args:
        spark: the session.
        url: the folder.
        schema: all columns, as Spark's DDL.
        partition_columns: columns that are folders, in this order.
        target_size: what small files are compacted to, in bytes.
        small_files: how many small files of one folder are compacted into one.
    """

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        schema: str,
        partition_columns: Sequence[str] = (),
        *,
        target_size: int = 128 * 2**20,
        small_files: int = 24,
    ) -> None:
        self._spark = spark
        self._folder = HadoopFolder(spark, url)
        self._schema = schema
        self._partition_columns = list(partition_columns)
        self._target_size = target_size
        self._small_files = small_files
        self._ledger = Ledger.open(self._folder)

    @property
    def url(self) -> str:
        """The folder, with its file system."""
        return self._folder.url

    @property
    def positions(self) -> Positions:
        """The next offset of each partition that is in the table."""
        return self._ledger.positions

    @property
    def is_empty(self) -> bool:
        """Whether nothing was ever written."""
        return self._ledger.number == 0

    def recover(self) -> None:
        """Finish what a writer that died had committed, and remove what it had not. For the next writer."""
        self._ledger = Ledger.open(self._folder)
        self._ledger.settle()

    def read(
        self, *, only: Mapping[str, Sequence[str]] | None = None, since: Mapping[str, str] | None = None
    ) -> DataFrame:
        """The rows of all committed files.

        Args:
            only: files in folders with these values, for example `{"topic": ["orders"]}`.
            since: files in folders with this value or a later one, for example `{"date": "2026-11-21"}`; and those
                of the folder without a value.
        """
        paths = [path for path in self._ledger.files if _is_in(path, only or {}, since or {})]
        if not paths:
            return self._spark.createDataFrame([], self._schema)
        reader = self._spark.read.schema(self._schema).option("basePath", self.url)
        return reader.parquet(*(f"{self.url}/{path}" for path in sorted(paths)))

    def append(self, rows: DataFrame, positions: Positions) -> int:
        """Write rows and commit them, with the positions after them; return how many rows they were.

        Args:
            rows: with the table's columns, in the order in which files shall have them.
            positions: of all partitions, after these rows.
        """
        from pyspark.sql import Observation
        from pyspark.sql import functions as F  # noqa: N812

        seen = Observation()
        added = self._write(rows.observe(seen, F.count(F.lit(1)).alias("rows")))
        count = int(seen.get["rows"])
        self._ledger.commit("append", added if count else [], positions, rows=count)
        return count

    def compact(self) -> int:
        """Merge the small files of folders that have too many of them; return how many files were replaced."""
        replaced = 0
        for folder, files in self._crowded().items():
            rows = self._spark.read.schema(self._schema).option("basePath", self.url)
            frame = rows.parquet(*(f"{self.url}/{file.path}" for file in files))
            number = math.ceil(sum(file.size for file in files) / self._target_size)
            order = [name for name in _ORDER if name in frame.columns]
            spread = frame.repartitionByRange(number, *order) if number > 1 else frame.coalesce(1)
            added = self._write(spread.sortWithinPartitions(*order))
            self._ledger.commit("compact", added, self.positions, removed=[file.path for file in files])
            _log.info("compacted %d files of %s into %d", len(files), folder or self.url, len(added))
            replaced += len(files)
        return replaced

    def _crowded(self) -> dict[str, list[TableFile]]:
        """Folders with so many small files that merging them is worth it."""
        small = sorted(
            (file for file in self._ledger.files.values() if file.size < self._target_size / 2),
            key=lambda file: file.path,
        )
        folders = itertools.groupby(small, key=lambda file: file.path.rpartition("/")[0])
        found = {folder: list(files) for folder, files in folders}
        return {folder: files for folder, files in found.items() if len(files) >= self._small_files}

    def _write(self, rows: DataFrame) -> list[TableFile]:
        staging = f"{STAGING}/{uuid.uuid4().hex}"
        writer = rows.write.partitionBy(*self._partition_columns) if self._partition_columns else rows.write
        writer.parquet(f"{self.url}/{staging}")
        number = self._ledger.number + 1
        written = [file for file in self._folder.files(staging) if file.path.endswith(".parquet")]
        return [
            TableFile(_final_path(file.path.removeprefix(f"{staging}/"), number, position), file.path, file.size)
            for position, file in enumerate(written)
        ]


def _final_path(path: str, number: int, position: int) -> str:
    """The file's place: its folder, and a name that says which entry has added it."""
    folder, slash, _ = path.rpartition("/")
    return f"{folder}{slash}{number:010d}-{position:05d}.parquet"


def _is_in(path: str, only: Mapping[str, Sequence[str]], since: Mapping[str, str]) -> bool:
    """Whether a file's folders have these values; `__HIVE_DEFAULT_PARTITION__`, for none, comes after all digits."""
    folders = dict(part.split("=", 1) for part in path.split("/")[:-1])
    return all(folders.get(name) in values for name, values in only.items()) and all(
        folders.get(name, "") >= value for name, value in since.items()
    )
