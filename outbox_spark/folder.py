"""A folder on any file system that Spark knows, as the Parquet tables and their ledgers need it.

`HadoopFolder` goes through Spark's own file system classes (local, HDFS, S3A, ...), on the driver.
"""

from __future__ import annotations

import uuid
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from outbox_core.errors import OutboxError

if TYPE_CHECKING:
    from pyspark.sql import SparkSession


class StoredFile(NamedTuple):
    """A file, by its path below the folder."""

    path: str
    size: int


class FileTaken(OutboxError):
    """A file that must be new exists already: another process writes to the same folder."""


class Folder(Protocol):
    """What is asked of a file system. Paths are relative, with `/`."""

    @property
    def url(self) -> str:
        """The folder itself, as Spark reads it."""

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""

    def files(self, path: str) -> list[StoredFile]:
        """All files below, sorted; empty if there is no such folder."""

    def read(self, path: str) -> str:
        """A file's text."""

    def create(self, path: str, text: str) -> None:
        """Write a file as a whole or not at all. Raises FileTaken if it is there already."""

    def move(self, source: str, destination: str) -> None:
        """Move a file; one that was moved before is left alone."""

    def delete(self, path: str) -> None:
        """Delete a file or a folder; one that is not there is no error."""


class HadoopFolder:
    """A folder on a file system of Hadoop's, which are the ones Spark reads and writes.

    Args:
        spark: a session on a driver of its own (Spark Connect has no access to file systems).
        url: a path, or a URL such as `hdfs://...` or `s3a://...`.
    """

    def __init__(self, spark: SparkSession, url: str) -> None:
        jvm: Any = spark._jvm  # noqa: SLF001  there is no public way to Hadoop's file systems
        self._jvm = jvm
        root: Any = self._jvm.org.apache.hadoop.fs.Path(url)
        self._fs: Any = root.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001
        self._root: Any = self._fs.makeQualified(root)

    @property
    def url(self) -> str:
        """The folder with its file system."""
        return str(self._root.toString())

    def exists(self, path: str) -> bool:
        """Whether there is a file or folder."""
        return bool(self._fs.exists(self._path(path)))

    def files(self, path: str) -> list[StoredFile]:
        """All files below, sorted."""
        if not self.exists(path):
            return []
        prefix = self._root.toUri().getPath().rstrip("/") + "/"
        listing, found = self._fs.listFiles(self._path(path), True), []
        while listing.hasNext():
            status = listing.next()
            found.append(StoredFile(status.getPath().toUri().getPath().removeprefix(prefix), status.getLen()))
        return sorted(found)

    def read(self, path: str) -> str:
        """A file's text."""
        stream = self._fs.open(self._path(path))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def create(self, path: str, text: str) -> None:
        """Write it beside, then rename it; who finds another's text there has come second."""
        target = self._path(path)
        draft = self._path(f"{path.rpartition('/')[0]}/.{uuid.uuid4().hex}")
        stream = self._fs.create(draft, False)
        stream.write(text.encode())
        stream.close()
        renamed = not self._fs.exists(target) and self._fs.rename(draft, target)
        if not renamed or self.read(path) != text:
            self._fs.delete(draft, False)
            raise FileTaken(f"{target.toString()} exists already: another process writes to this folder")

    def move(self, source: str, destination: str) -> None:
        """Move a file, if it was not moved before."""
        target = self._path(destination)
        self._fs.mkdirs(target.getParent())
        moved = self._fs.exists(self._path(source)) and self._fs.rename(self._path(source), target)
        if not moved and not self._fs.exists(target):
            raise OutboxError(f"{self.url}/{source} cannot be moved to {destination}: look at the folder's rights")

    def delete(self, path: str) -> None:
        """Delete a file or a folder."""
        self._fs.delete(self._path(path), True)

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, path) if path else self._root
