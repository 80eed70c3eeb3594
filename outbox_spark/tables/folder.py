"""A folder on any file system that Spark knows."""

from __future__ import annotations

import uuid
from datetime import UTC, datetime
from typing import Any, NamedTuple

from pyspark.sql import SparkSession

from outbox_core.errors import InvalidConfig, OutboxError
from outbox_spark.session import is_connect


class StoredFile(NamedTuple):
    """A file, by its path below the folder, its size in bytes, and its time."""

    path: str
    size: int
    modified: datetime


class FileTaken(OutboxError):
    """A file that exists although it must be new: another process writes to the same folder."""


class Folder:
    """A folder, through Spark's file system classes (local, HDFS, S3A, ...), on the driver. Paths are relative."""

    def __init__(self, spark: SparkSession, url: str) -> None:
        if is_connect(spark):
            raise InvalidConfig(
                f"{url}: clients of Spark Connect do not reach Spark's file systems. Run this with a driver of its "
                "own: set spark.master to the cluster's URL"
            )
        jvm: Any = spark._jvm  # noqa: SLF001  there is no public way to Hadoop's file systems
        self._jvm = jvm
        root: Any = self._jvm.org.apache.hadoop.fs.Path(url)
        self._fs: Any = root.getFileSystem(spark._jsc.hadoopConfiguration())  # noqa: SLF001
        self._root: Any = self._fs.makeQualified(root)

    @property
    def url(self) -> str:
        """Return the folder's URL, with its file system."""
        return str(self._root.toString())

    def exists(self, path: str) -> bool:
        """Tell whether there is a file or folder."""
        return bool(self._fs.exists(self._path(path)))

    def files(self, path: str) -> list[StoredFile]:
        """List all files below, sorted; none if there is no such folder."""
        if not self.exists(path):
            return []
        prefix = self._root.toUri().getPath().rstrip("/") + "/"
        listing, found = self._fs.listFiles(self._path(path), True), []
        while listing.hasNext():
            status = listing.next()
            path = status.getPath().toUri().getPath().removeprefix(prefix)
            modified = datetime.fromtimestamp(status.getModificationTime() / 1000, UTC)
            found.append(StoredFile(path, status.getLen(), modified))
        return sorted(found)

    def read(self, path: str) -> str:
        """Return a file's text."""
        stream = self._fs.open(self._path(path))
        try:
            return str(self._jvm.org.apache.commons.io.IOUtils.toString(stream, "UTF-8"))
        finally:
            stream.close()

    def create(self, path: str, text: str) -> None:
        """Write a file as a whole or not at all. Raises FileTaken if it is there already."""
        target = self._path(path)
        draft = self._path(f"{path.rpartition('/')[0]}/.{uuid.uuid4().hex}")
        stream = self._fs.create(draft, False)
        stream.write(text.encode())
        stream.close()
        renamed = not self._fs.exists(target) and self._fs.rename(draft, target)
        # Not every file system refuses to rename onto a file: the text tells which of two writers came first.
        if not renamed or self.read(path) != text:
            self._fs.delete(draft, False)
            raise FileTaken(f"{target.toString()} exists already: another process writes to this folder")

    def move(self, source: str, destination: str) -> None:
        """Move a file. Raises OutboxError if it cannot be moved."""
        target = self._path(destination)
        self._fs.mkdirs(target.getParent())
        if not self._fs.rename(self._path(source), target):
            raise OutboxError(f"{self.url}/{source} cannot be moved to {destination}: check the folder's permissions")

    def delete(self, path: str) -> None:
        """Delete a file or a folder, if it is there."""
        self._fs.delete(self._path(path), True)

    def _path(self, path: str) -> Any:
        return self._jvm.org.apache.hadoop.fs.Path(self._root, path) if path else self._root
