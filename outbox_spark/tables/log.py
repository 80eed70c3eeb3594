"""The log of a lakehouse table, as a `Table` needs it: which files belong to it, and how far it has read the topics.

Each commit is one atomic step of a library: files come, files go, positions advance, or nothing does. No commit is
repeated blindly: a conflict with another writer is told to the caller, who looks again.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable
from datetime import datetime
from typing import Generic, NamedTuple, TypeVar

import pyarrow as pa

from outbox_core.errors import OutboxError, OutboxTableError
from outbox_spark.topics.positions import Positions

T = TypeVar("T")  # the library's table

_NO_DAY = "__HIVE_DEFAULT_PARTITION__"


class DataFile(NamedTuple):
    """A Parquet file of a table: its URL, size in bytes, number of rows, and day (ISO) or None."""

    url: str
    size: int
    rows: int
    day: str | None


class Written(NamedTuple):
    """New files by their URLs, as the driver sees them, and the number of rows that the executors wrote."""

    urls: Collection[str]
    rows: int

    def must_be_complete(self, files: Iterable[int]) -> None:
        """Raise OutboxTableError unless files of these numbers of rows are all that was written."""
        found = sum(files)
        if found != self.rows:
            raise OutboxTableError(
                f"executors wrote {self.rows:,} rows, and the driver finds {found:,} of them: not all machines share "
                "the folder. Name one on shared storage (s3a://, hdfs://, a network file system)"
            )


class CommitConflict(Exception):
    """A commit that was not made, because another one came first."""


class TableTaken(OutboxError):
    """A table whose positions another process has changed."""


class TableLog(ABC, Generic[T]):
    """A table's log, of one format. State is that of the last `load` or `commit`; used by one thread."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._table: T | None = None
        self.positions: Positions = {}

    @property
    def exists(self) -> bool:
        """Tell whether there was a table at the last `load`."""
        return self._table is not None

    def _open(self) -> T:
        if self._table is None:
            raise OutboxTableError(f"there is no table {self._name}")
        return self._table

    @property
    @abstractmethod
    def version(self) -> object:
        """Return a value that every commit changes."""

    @property
    @abstractmethod
    def schema(self) -> pa.Schema:
        """Return the table's columns; none if there is no table."""

    @property
    def location(self) -> str:
        """Return the folder below which data files are written, as a URL for Spark."""
        return self._name

    @abstractmethod
    def load(self) -> None:
        """Read the table's present state. Raises StoreUnavailable, OutboxTableError."""

    @abstractmethod
    def create(self, schema: pa.Schema) -> None:
        """Create the table, unless it exists, and load it."""

    @abstractmethod
    def evolve(self, schema: pa.Schema) -> Collection[str]:
        """Add missing columns; return those whose files must be rewritten in a wider type.

        Raises OutboxTableError for a column of a type that cannot be widened to the wanted one.
        """

    @abstractmethod
    def files(self) -> list[DataFile]:
        """List the table's files."""

    @abstractmethod
    def commit(self, added: Written, removed: Collection[str], positions: Positions) -> list[DataFile]:
        """Add and remove files, by URL, and advance the positions; return the added ones.

        Raises CommitConflict if another commit came first, OutboxTableError if files are missing.
        """

    def rewrite(self, added: Written, schema: pa.Schema) -> list[DataFile]:
        """Replace all files and the schema in one commit; return the added files. Raises CommitConflict."""
        raise NotImplementedError  # of a format that reads old files in wider types

    @abstractmethod
    def expire(self, before: datetime) -> int:
        """Forget versions older than `before`, and delete files that no other version has; return their number."""


def day_of(url: str) -> str | None:
    """Return the day of a file by the folder that Spark wrote it to; None for records without a time."""
    found = re.search(r"/\w+=([^/]+)/[^/]+\Z", url)
    return None if found is None or found[1] == _NO_DAY else found[1]


def for_library(url: str) -> str:
    """Return a URL of Hadoop's file systems in the form that libraries know."""
    return re.sub(r"^file:/+", "/", re.sub(r"^s3[an]://", "s3://", url))


def for_spark(url: str) -> str:
    """Return a library's URL in the form that Hadoop's file systems know."""
    return re.sub(r"^s3://", "s3a://", url)
