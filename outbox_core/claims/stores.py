"""Stores of payloads: a folder, anything that fsspec opens (S3 among it), a table of PostgreSQL."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

from outbox_core.claims.claims import ClaimMissing, ClaimName
from outbox_core.drivers import plain_cursor
from outbox_core.errors import InvalidConfig, MissingExtra
from outbox_core.row_security import fetch_on, refuse_hidden
from outbox_core.schema import TableName
from outbox_core.watched_calls import LONG_SECONDS, watched

_CREATE = """\
CREATE TABLE IF NOT EXISTS {table} (
    name    text PRIMARY KEY,
    payload bytea NOT NULL
);
ALTER TABLE {table} ALTER COLUMN payload SET STORAGE EXTERNAL;
"""


class FolderStore:
    """Payloads as files below a folder, which all writers and readers share: a volume, NFS. Links in it are refused.

    Args:
        folder: made if it is missing.
        mode: who may read and write the files that are made; folders can be entered by whoever may read. 0o640 is for
            readers of the same group.

    Raises:
        InvalidConfig: if `mode` is none.
    """

    def __init__(self, folder: str | os.PathLike[str], *, mode: int = 0o600) -> None:
        if isinstance(mode, bool) or not isinstance(mode, int) or mode & ~0o666 or mode & 0o600 != 0o600:
            raise InvalidConfig(f"mode: expected that of a file which its owner reads and writes, got {mode!r}")
        self._folder = Path(folder)
        self._mode = mode
        self._folder_mode = mode | (mode & 0o444) >> 2

    def __repr__(self) -> str:
        return f"FolderStore({str(self._folder)!r})"

    def put(self, name: str, payload: bytes) -> None:
        """Write a file, and flush it and its folder to the disk."""
        path = self._path(name)
        self._folder.mkdir(self._folder_mode, parents=True, exist_ok=True)
        path.parent.mkdir(self._folder_mode, exist_ok=True)
        with open(path, "xb", opener=self._open) as file:
            file.write(payload)
            file.flush()
            os.fsync(file.fileno())
        for folder in (path.parent, self._folder):
            _flush_folder(folder)

    def get(self, name: str) -> bytes:
        """Read a file."""
        try:
            with open(self._path(name), "rb", opener=self._open) as file:
                return file.read()
        except (FileNotFoundError, NotADirectoryError):
            raise ClaimMissing(f"{self._folder} has no payload {name}") from None

    def names(self) -> Iterator[str]:
        """Yield the names of all files."""
        for path in self._folder.glob("*/*"):
            yield path.relative_to(self._folder).as_posix()

    def delete(self, name: str) -> None:
        """Delete a file."""
        self._path(name).unlink(missing_ok=True)

    def _path(self, name: str) -> Path:
        return self._folder / _checked(name)

    def _open(self, path: str, flags: int) -> int:
        """Open a file that is no link, in a folder that is none: another user could have it lead anywhere."""
        if Path(path).parent.is_symlink():
            raise OSError(errno.ELOOP, "the topic's folder is a link", path)
        return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), self._mode)


class FsspecStore:
    """Payloads in a file system of fsspec: S3, GCS, Azure, and what obstore opens (`obstore.fsspec.FsspecStore`).

    Args:
        filesystem: one whose writes are durable when they return, as those of object stores are.
        prefix: bucket and path, without a slash at the end.
    """

    def __init__(self, filesystem: Any, prefix: str) -> None:
        self._filesystem = filesystem
        self._prefix = prefix.rstrip("/")

    @classmethod
    def of_url(cls, url: str, **options: Any) -> FsspecStore:
        """Return the store of a URL, such as `s3://bucket/claims`; options are those of fsspec's file system.

        Raises:
            MissingExtra: if fsspec, or its package for this kind of URL, is not installed.
            InvalidConfig: if fsspec does not know this kind of URL.
        """
        try:
            from fsspec.core import url_to_fs

            filesystem, path = url_to_fs(url, **options)
        except ImportError as error:
            raise MissingExtra(f"claim store {url.partition('://')[0]}: {error}") from None
        except ValueError as error:
            raise InvalidConfig(f"claim store: {error}") from None
        return cls(filesystem, path)

    def __repr__(self) -> str:
        return f"FsspecStore({type(self._filesystem).__name__}, {self._prefix!r})"

    def put(self, name: str, payload: bytes) -> None:
        """Write an object."""
        path = self._path(name)
        self._filesystem.makedirs(path.rpartition("/")[0], exist_ok=True)
        self._filesystem.pipe_file(path, payload)

    def get(self, name: str) -> bytes:
        """Read an object."""
        try:
            return bytes(self._filesystem.cat_file(self._path(name)))
        except (FileNotFoundError, NotADirectoryError):
            raise ClaimMissing(f"{self!r} has no payload {name}") from None

    def names(self) -> Iterator[str]:
        """Yield the names of all objects."""
        self._filesystem.invalidate_cache()  # of listings
        with suppress(FileNotFoundError):
            for path in self._filesystem.find(self._prefix):
                yield "/".join(str(path).rsplit("/", 2)[-2:])

    def delete(self, name: str) -> None:
        """Delete an object."""
        with suppress(FileNotFoundError):
            self._filesystem.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._prefix}/{_checked(name)}"


class TableStore:
    """Payloads in a table of PostgreSQL.

    Args:
        connect: makes a connection of psycopg 3 or psycopg2, used for one call and closed; such as
            `lambda: psycopg.connect(dsn)`.
        table: name of the table; `create_sql` makes it.
        with_record: True for a table of the outbox's own database: payloads are written on the connection of the stash,
            so that a rollback or a crash takes them along and leaves no orphan. Messages of queues, and records of an
            outbox in memory, have a transaction of their own all the same, as with False.

    Attributes:
        insert_into: the table, if stashes write to it; else None.
    """

    def __init__(self, connect: Callable[[], Any], table: str = "outbox_claim", *, with_record: bool = False) -> None:
        self._connect = connect
        self._table = TableName.parse(table)
        self.insert_into = self._table if with_record else None
        self._escaped = self._table.quoted.replace("%", "%%")

    def __repr__(self) -> str:
        return f"TableStore({str(self._table)!r})"

    @property
    def create_sql(self) -> str:
        """The PostgreSQL DDL of the table."""
        return _CREATE.format(table=self._table.quoted)

    def put(self, name: str, payload: bytes) -> None:
        """Insert a row, and commit."""
        self._run(f"INSERT INTO {self._escaped} (name, payload) VALUES (%s, %s)", [_checked(name), payload])

    def get(self, name: str) -> bytes:
        """Select a row; RowsHidden if it is not seen, and row level security hides rows from the role."""
        rows = self._run(f"SELECT payload FROM {self._escaped} WHERE name = %s", [name])
        if not rows:
            with closing(self._connect()) as connection:
                refuse_hidden(fetch_on(connection), [self._table])
            raise ClaimMissing(f"table {self._table} has no payload {name}")
        return bytes(rows[0][0])

    def names(self) -> Iterator[str]:
        """Yield all names."""
        for (name,) in self._run(f"SELECT name FROM {self._escaped}", []):
            yield name

    def delete(self, name: str) -> None:
        """Delete a row."""
        self._run(f"DELETE FROM {self._escaped} WHERE name = %s", [name])

    def _run(self, statement: str, parameters: list[object]) -> list[Any]:
        # Also for one payload: it may be large, and the link slow.
        with closing(self._connect()) as connection, watched(connection, LONG_SECONDS, f"payloads in {self._table}"):
            with closing(plain_cursor(connection)) as cursor:
                cursor.execute(statement, parameters)
                rows = cursor.fetchall() if cursor.description else []
            connection.commit()
        return rows


def store_of(url: str) -> FolderStore | FsspecStore | TableStore:
    """Return the store that a command's option names: a folder, `postgresql://...` (table `outbox_claim`), or a URL."""
    scheme, found, _ = url.partition("://")
    if not found:
        return FolderStore(url)
    if scheme in ("postgresql", "postgres"):
        import psycopg

        return TableStore(lambda: psycopg.connect(url))
    return FsspecStore.of_url(url)


def _checked(name: str) -> str:
    if ClaimName.parse(name) is None:
        raise InvalidConfig(f"{name!r:.400} is no name of a payload")
    return name


def _flush_folder(folder: Path) -> None:
    """Make the entries of a folder survive a crash of the machine."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
