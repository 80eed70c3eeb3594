"""A lakehouse table that knows the position of its topics: Spark writes its files, a library commits them.

Exactly once: a commit holds the files of a batch and the positions behind it, so that a driver which died between this
commit and Spark's finds its batch in the table. Files without a commit belong to no table; `maintain` deletes them.

Of two writers, one gets its commit; the other one looks again: where the positions are those that it knew, only
something else has changed (a merge of files, say), and it commits the same files; where they are not, it stops.
"""

from __future__ import annotations

import logging
import math
import uuid
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from pyspark.sql import DataFrame, Observation, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.pandas.types import from_arrow_schema, to_arrow_schema
from pyspark.sql.types import ArrayType, MapType, StructField, StructType

from outbox_core.errors import InvalidConfig, StoreUnavailable
from outbox_spark.config import FileSettings
from outbox_spark.runtime import utc
from outbox_spark.tables import ledger
from outbox_spark.tables.folder import Folder
from outbox_spark.tables.log import CommitConflict, DataFile, TableLog, TableTaken, Written, for_library
from outbox_spark.topics.positions import Positions

_log = logging.getLogger(__name__)

# Columns that order merged rows, where a table has them.
_ORDER = ("topic", "_topic", "partition", "_partition", "offset", "_offset")
_NESTED = (ArrayType, MapType, StructType)
_ATTEMPTS = 5  # to commit, while others change the table without changing its positions


@dataclass(frozen=True)
class Layout:
    """A table's columns as Spark's DDL, the last one the day (UTC) of the column `time`, and the size of its files."""

    schema: str
    time: str
    date: str
    files: FileSettings
    name: str = "table"  # in messages

    def __str__(self) -> str:
        return f"{self.schema}, {self.date} DATE"


class Table:
    """A Delta or Iceberg table. Used by one thread; one process may write to it at a time."""

    def __init__(self, spark: SparkSession, log: TableLog[Any], layout: Layout, earlier: Folder | None = None) -> None:
        self._spark = spark
        self._log = log
        self._layout = layout
        self._earlier = earlier if earlier is not None and ledger.is_ledger(earlier) else None
        self._small: defaultdict[str | None, list[DataFile]] = defaultdict(list)
        log.load()

    @property
    def name(self) -> str:
        """Return the table's name in messages."""
        return f"the {self._layout.name} {self.url}"

    @property
    def url(self) -> str:
        """Return the table's URL, with its file system."""
        return self._log.location

    @property
    def positions(self) -> Positions:
        """Return the next offset of each partition in the table."""
        return self._log.positions

    @property
    def is_empty(self) -> bool:
        """Tell whether the table has no position."""
        return not self._log.positions

    @property
    def is_of_earlier_version(self) -> bool:
        """Tell whether the folder is still one of an earlier version, which the next writer moves into the table."""
        return self.is_empty and self._earlier is not None

    def recover(self) -> None:
        """Create the table, or read its state and give it the wanted columns. For the next writer."""
        self._log.load()
        try:
            if not self._log.exists:
                self._log.create(_arrow(self._wanted))
            elif wider := self._log.evolve(_arrow(self._wanted)):
                _log.info("rewriting %s: %s becomes wider", self.url, ", ".join(wider))
                schema = self._schema(wider)
                self._log.rewrite(self._write(self.read(), schema), _arrow(schema))
        except CommitConflict as conflict:
            raise StoreUnavailable(f"{self.url} is being changed by another process: {conflict}") from None
        self._load()
        if self.is_of_earlier_version:
            ledger.move(self._spark, self._earlier, self, str(self._layout))  # type: ignore[arg-type]  # it is one

    def read(self, *, since: str | None = None) -> DataFrame:
        """Read the rows of all committed files, or of days from `since` (ISO) on, and of no day."""
        files = [file for file in self._log.files() if since is None or file.day is None or file.day >= since]
        return self._read(files)

    def append(self, rows: DataFrame, positions: Positions) -> int:
        """Write rows, in their order, and commit them with the positions after them; return their number.

        Raises TableTaken if another process has changed the positions meanwhile.
        """
        added = self._commit(self._write(rows), positions=positions)
        self._note_small(added)
        return sum(file.rows for file in added)

    def with_keys(self, keys: DataFrame) -> tuple[list[DataFile], DataFrame]:
        """Return the files that have rows with these values of the columns of `keys`, and all rows of these files."""
        files = self._log.files()
        if files:
            found = self._read(files).select(*keys.columns, "_metadata.file_path").join(keys, keys.columns, "left_semi")
            paths = {for_library(unquote(row.file_path)) for row in found.select("file_path").distinct().collect()}
            files = [file for file in files if for_library(file.url) in paths]
        return files, self._read(files)

    def replace(self, files: Collection[DataFile], rows: DataFrame, positions: Positions) -> int:
        """Write rows in place of files, and commit them with the positions after them; return their number.

        Raises TableTaken as `append`, and StoreUnavailable if another process has merged the files: try again.
        """
        gone = {file.url for file in files}
        order = [self._layout.date, *(name for name in _ORDER if name in rows.columns)]
        spread = rows.repartitionByRange(max(1, self._targets(files)), *order).sortWithinPartitions(*order)
        try:
            added = self._commit(self._write(spread), gone, positions)
        except CommitConflict as conflict:
            raise StoreUnavailable(f"{self.url} is being changed by another process: {conflict}") from None
        for day, small in self._small.items():
            self._small[day] = [file for file in small if file.url not in gone]
        self._note_small(added)
        return sum(file.rows for file in added)

    def compact(self, small_files: int | None = None) -> int:
        """Merge the small files of each day that has too many; return the number of files replaced."""
        least, replaced = small_files or self._layout.files.small_files, 0
        for day, files in list(self._small.items()):
            if len(files) >= least:
                try:
                    merged = self._merge(files)
                except CommitConflict:
                    _log.info("another process has merged files of %s in %s", day, self.url)
                    break
                self._small[day] = []
                self._note_small(merged)
                _log.info("merged %d files of %s in %s into %d", len(files), day, self.url, len(merged))
                replaced += len(files)
        return replaced

    def _merge(self, files: Collection[DataFile]) -> list[DataFile]:
        frame = self._read(files)
        number = self._targets(files)
        order = [name for name in _ORDER if name in frame.columns]
        spread = frame.repartitionByRange(number, *order) if number > 1 else frame.coalesce(1)
        return self._commit(self._write(spread.sortWithinPartitions(*order)), [file.url for file in files])

    def maintain(self) -> tuple[int, int]:
        """Merge small files, delete those that no version of the last `keep_versions` has; return both numbers.

        Raises InvalidConfig if there is no table.
        """
        if not self._log.exists and self._earlier is None:
            raise InvalidConfig(f"there is no {self._layout.name} in {self.url}")
        self.recover()
        merged = self.compact(2)
        try:
            return merged, self._log.expire(datetime.now(UTC) - self._layout.files.keep_versions)
        except CommitConflict as conflict:
            raise StoreUnavailable(f"{self.url} is being changed by another process: {conflict}") from None

    def _commit(
        self, added: Written, removed: Collection[str] = (), positions: Positions | None = None
    ) -> list[DataFile]:
        """Commit files, and positions if there are new ones; return the added files."""
        before, gone = self.positions, set(removed)
        for _ in range(_ATTEMPTS):
            known = self._log.version
            try:
                return self._log.commit(added, removed, self.positions if positions is None else positions)
            except CommitConflict as conflict:
                reason = conflict
            present = {file.url: file for file in self._load()}
            is_ours = present.keys() >= set(added.urls) and not present.keys() & gone
            if is_ours and positions in (None, self.positions):
                return [present[url] for url in added.urls]  # the answer to our own commit was lost
            if positions is not None and self.positions != before:
                raise TableTaken(f"{self.url} was changed by another process: run one driver for each table")
            if not present.keys() >= gone:
                raise CommitConflict("another process has removed the same files")
            if self._log.version == known:
                break
        raise StoreUnavailable(f"{self.url}: the commit failed: {reason}")

    def _load(self) -> list[DataFile]:
        self._log.load()
        files = self._log.files()
        self._small.clear()
        self._note_small(files)
        return files

    def _note_small(self, files: Collection[DataFile]) -> None:
        for file in files:
            if file.size < self._layout.files.target_file_size / 2:
                self._small[file.day].append(file)

    @property
    def _wanted(self) -> StructType:
        schema: Any = StructType.fromDDL(str(self._layout))
        return schema  # type: ignore[no-any-return]

    def _schema(self, changed: Collection[str] = ()) -> StructType:
        """Return the columns of files: the table's, of which some are no longer wanted, in its types; the day is last.

        Those that are `changed`, or nested, have the wanted type.
        """
        wanted = self._wanted
        found = from_arrow_schema(self._log.schema, prefer_timestamp_ntz=True)
        kept = [field for field in found if field.name not in wanted.names]
        types = {field.name: field.dataType for field in found if field.name not in changed}
        return StructType(
            kept
            + [
                field
                if isinstance(field.dataType, _NESTED)
                else StructField(field.name, types.get(field.name, field.dataType))
                for field in wanted
            ]
        )

    def _targets(self, files: Collection[DataFile]) -> int:
        """Return the number of files of the wanted size that these become."""
        return math.ceil(sum(file.size for file in files) / self._layout.files.target_file_size)

    def _read(self, files: Collection[DataFile]) -> DataFrame:
        if not files:
            return self._spark.createDataFrame([], self._schema())
        # Days are not in the files. Without a lookup below folders, Spark would look for columns in their names.
        columns = StructType(self._schema().fields[:-1])
        reader = self._spark.read.schema(columns).option("recursiveFileLookup", "true")
        rows = reader.parquet(*sorted(file.url for file in files))
        return rows.withColumn(self._layout.date, F.expr(utc.day(self._layout.time)))

    def _write(self, rows: DataFrame, schema: StructType | None = None) -> Written:
        """Write files of one day each, in a folder of their own."""
        place = f"data/{uuid.uuid4().hex}"
        columns = [column for column in schema or self._schema() if column.name in rows.columns]
        named = rows.select(*(F.col(column.name).cast(column.dataType).alias(column.name) for column in columns))
        written = Observation()
        named = named.observe(written, F.count(F.lit(1)).alias("rows"))
        # Neither format knows Spark's older form of timestamps.
        named.sparkSession.conf.set("spark.sql.parquet.outputTimestampType", "TIMESTAMP_MICROS")
        folder = Folder(self._spark, self.url)
        # A mark of success would stay for ever: it belongs to no version, and its name keeps it from being deleted.
        writer = named.write.option("mapreduce.fileoutputcommitter.marksuccessfuljobs", "false")
        writer.partitionBy(self._layout.date).parquet(f"{folder.url}/{place}")
        urls = [f"{self.url}/{file.path}" for file in folder.files(place) if file.path.endswith(".parquet")]
        return Written(urls, written.get["rows"])


def _arrow(schema: StructType) -> pa.Schema:
    return to_arrow_schema(schema, timezone="UTC")
