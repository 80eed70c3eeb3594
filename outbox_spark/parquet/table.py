"""A Parquet table that knows the position of its topics: Spark writes it, the driver commits it in its commit log."""

from __future__ import annotations

import itertools
import logging
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from outbox_spark.parquet.commit_log import STAGING, CommitLog, TableFile
from outbox_spark.parquet.folder import Folder
from outbox_spark.topics.positions import Positions

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_log = logging.getLogger(__name__)

# Columns that order compacted rows, where a table has them.
_ORDER = ("topic", "_topic", "partition", "_partition", "offset", "_offset")


class ParquetTable:
    """A folder of Parquet files with a commit log. Used by one thread; one process may write to it at a time."""

    def __init__(
        self,
        spark: SparkSession,
        url: str,
        schema: str,
        partition_columns: Sequence[str] = (),
        *,
        target_size: int = 128 * 2**20,  # bytes of a compacted file
        small_files: int = 24,
    ) -> None:
        self._spark = spark
        self._folder = Folder(spark, url)
        self._schema = schema
        self._partition_columns = list(partition_columns)
        self._target_size = target_size
        self._small_files = small_files
        self._commits = CommitLog.open(self._folder)

    @property
    def url(self) -> str:
        """Return the folder's URL, with its file system."""
        return self._folder.url

    @property
    def positions(self) -> Positions:
        """Return the next offset of each partition in the table."""
        return self._commits.positions

    @property
    def is_empty(self) -> bool:
        """Tell whether the table has no commit."""
        return self._commits.number == 0

    def recover(self) -> None:
        """Finish the last commit of a dead writer, and remove its uncommitted files. For the next writer."""
        self._commits = CommitLog.open(self._folder)
        self._commits.finish()

    def read(
        self, *, only: Mapping[str, Sequence[str]] | None = None, since: Mapping[str, str] | None = None
    ) -> DataFrame:
        """Read the rows of all committed files.

        `only` selects folders by their values, for example `{"topic": ["orders"]}`; `since` those with this value or a
        later one, for example `{"date": "2026-11-21"}`, and the folder without a value.
        """
        paths = [path for path in self._commits.files if _is_in(path, only or {}, since or {})]
        return self._read(sorted(paths)) if paths else self._spark.createDataFrame([], self._schema)

    def append(self, rows: DataFrame, positions: Positions) -> int:
        """Write rows, in their order, and commit them with the positions after them; return their number."""
        from pyspark.sql import Observation
        from pyspark.sql import functions as F  # noqa: N812

        seen = Observation()
        added = self._write(rows.observe(seen, F.count(F.lit(1)).alias("rows")))
        count = int(seen.get["rows"])
        self._commits.commit("append", added if count else [], positions, rows=count)
        return count

    def compact(self) -> int:
        """Merge the small files of each folder that has too many; return the number of files replaced."""
        small = sorted(file.path for file in self._commits.files.values() if file.size < self._target_size / 2)
        replaced = 0
        for folder, of_folder in itertools.groupby(small, key=lambda path: path.rpartition("/")[0]):
            paths = list(of_folder)
            if len(paths) < self._small_files:
                continue
            frame = self._read(paths)
            number = math.ceil(sum(self._commits.files[path].size for path in paths) / self._target_size)
            order = [name for name in _ORDER if name in frame.columns]
            spread = frame.repartitionByRange(number, *order) if number > 1 else frame.coalesce(1)
            added = self._write(spread.sortWithinPartitions(*order))
            self._commits.commit("compact", added, self.positions, removed=paths)
            _log.info("compacted %d files of %s into %d", len(paths), folder or self.url, len(added))
            replaced += len(paths)
        return replaced

    def _read(self, paths: Sequence[str]) -> DataFrame:
        reader = self._spark.read.schema(self._schema).option("basePath", self.url)
        return reader.parquet(*(f"{self.url}/{path}" for path in paths))

    def _write(self, rows: DataFrame) -> list[TableFile]:
        """Write staged files; each one's final name tells the entry that adds it."""
        staging = f"{STAGING}/{uuid.uuid4().hex}"
        writer = rows.write.partitionBy(*self._partition_columns) if self._partition_columns else rows.write
        writer.parquet(f"{self.url}/{staging}")
        written = [file for file in self._folder.files(staging) if file.path.endswith(".parquet")]
        added = []
        for position, file in enumerate(written):
            folder, slash, _ = file.path.removeprefix(f"{staging}/").rpartition("/")
            place = f"{folder}{slash}{self._commits.number + 1:010d}-{position:05d}.parquet"
            added.append(TableFile(place, file.path, file.size))
        return added


def _is_in(path: str, only: Mapping[str, Sequence[str]], since: Mapping[str, str]) -> bool:
    """Tell whether a file's folders have these values."""
    folders = dict(part.split("=", 1) for part in path.split("/")[:-1])
    # `__HIVE_DEFAULT_PARTITION__`, the folder without a value, sorts after digits.
    return all(folders.get(name) in values for name, values in only.items()) and all(
        folders.get(name, "") >= value for name, value in since.items()
    )


@dataclass(frozen=True)
class ParquetTarget:
    """A table as a target of a `Follower`; `kind` names it in messages, `write` appends a batch and returns counts."""

    kind: str
    table: ParquetTable
    write: Callable[[DataFrame, Positions], Mapping[str, int]]

    @property
    def name(self) -> str:
        """Return the table's name in messages."""
        return f"{self.kind} {self.table.url}"

    def recover(self) -> None:
        """Finish the commit of a dead writer."""
        self.table.recover()

    def positions(self) -> Positions:
        """Return the committed positions."""
        return self.table.positions

    def compact(self) -> None:
        """Merge small files."""
        self.table.compact()
