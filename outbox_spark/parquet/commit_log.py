"""The commit log of a Parquet table: its files and positions, changed in one atomic step.

The table keeps its own position, because a checkpoint may be deleted or restored. Each change is an *entry*, a numbered
JSON file in `_ledger/` that appears as a whole or not at all:

1. Spark writes files below `_staging/`.
2. The entry that names them and the next offset of every partition is created: this is the commit.
3. The files are moved to their places, replaced files and the rest of `_staging/` are deleted. The next writer repeats
   this step, so a crash before or during it loses nothing.

Two writers cannot both create entry N: the second gets `FileTaken`. Every 20th entry lists all files, so that older
ones can be deleted.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from typing import Any

from outbox_core.errors import OutboxError
from outbox_spark.parquet.folder import Folder
from outbox_spark.topics.positions import Positions

LOG_FOLDER = "_ledger"
STAGING = "_staging"
_FORMAT = 1
_SNAPSHOT_EVERY = 20
_KEPT_SNAPSHOTS = 2


class CommitLogError(OutboxError):
    """A commit log that cannot be read, or is not one."""


@dataclass(frozen=True)
class TableFile:
    """A Parquet file of the table: its place below the table's folder, its staged place, and its size in bytes."""

    path: str
    staged: str
    size: int

    def __post_init__(self) -> None:
        _check_below(self.path)
        _check_below(self.staged)


def _check_below(path: str) -> None:
    """Raise ValueError if a path leads out of its folder: a forged log must not move or delete files elsewhere."""
    first, *_ = parts = path.split("/")
    if not first or ":" in first or ".." in parts:
        raise ValueError(f"{path!r} is not below the table's folder")


@dataclass(frozen=True)
class Entry:
    """One change of the table, `append` or `compact`.

    `positions` are the next offsets after it; `removed` names files that the added ones replace; `files` has all files
    after it, in every 20th entry.
    """

    number: int
    kind: str
    positions: Positions
    added: tuple[TableFile, ...]
    removed: tuple[str, ...] = ()
    rows: int = 0
    files: tuple[TableFile, ...] | None = None

    def to_json(self) -> str:
        """Encode the entry."""
        document: dict[str, Any] = {"format": _FORMAT, **vars(self), "added": [vars(file) for file in self.added]}
        if self.files is None:
            del document["files"]
        else:
            document["files"] = [vars(file) for file in self.files]
        return json.dumps(document, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, where: str) -> Entry:
        """Decode an entry. Raises CommitLogError if it is none, or of a later version."""
        try:
            document = json.loads(text)
            if document["format"] != _FORMAT:
                raise CommitLogError(f"{where} has format {document['format']}, this version reads {_FORMAT}")
            files = document.get("files")
            for path in document["removed"]:
                _check_below(path)
            return cls(
                number=document["number"],
                kind=document["kind"],
                positions=document["positions"],
                added=tuple(TableFile(**file) for file in document["added"]),
                removed=tuple(document["removed"]),
                rows=document["rows"],
                files=None if files is None else tuple(TableFile(**file) for file in files),
            )
        except (ValueError, KeyError, TypeError) as error:
            raise CommitLogError(f"{where} is not an entry of a commit log: {error!r}") from None


@dataclass
class CommitLog:
    """A table's files, by path, and positions, as of its last entry (0: none). Used by one thread."""

    folder: Folder
    number: int = 0
    positions: Positions = field(default_factory=dict)
    files: dict[str, TableFile] = field(default_factory=dict)
    _last: Entry | None = None

    @classmethod
    def open(cls, folder: Folder) -> CommitLog:
        """Read a folder's log; a folder without one is an empty table. Raises CommitLogError if it is damaged."""
        log, numbers = cls(folder), sorted(_numbers(folder))
        if not numbers:
            return log
        last = numbers[-1]
        needed = range(last - last % _SNAPSHOT_EVERY or 1, last + 1)  # from the last complete list of files on
        if missing := sorted(set(needed) - set(numbers)):
            raise CommitLogError(f"{folder.url}/{_path(missing[0])} is missing: the commit log is damaged; restore it")
        for number in needed:
            log._apply(Entry.from_json(folder.read(_path(number)), f"{folder.url}/{_path(number)}"))
        return log

    def commit(
        self, kind: str, added: Iterable[TableFile], positions: Positions, *, removed: Iterable[str] = (), rows: int = 0
    ) -> None:
        """Create the next entry, and move its files to their places. Raises FileTaken if another process was first."""
        entry = Entry(self.number + 1, kind, positions, tuple(added), tuple(removed), rows)
        if entry.number % _SNAPSHOT_EVERY == 0:
            files = {**self.files, **{file.path: file for file in entry.added}}
            entry = replace(entry, files=tuple(f for path, f in sorted(files.items()) if path not in entry.removed))
        self.folder.create(_path(entry.number), entry.to_json())
        self._apply(entry)
        self.finish()

    def finish(self) -> None:
        """Move the last entry's files to their places, and delete files that belong to no entry."""
        if self._last is not None:
            for file in self._last.added:
                self.folder.move(file.staged, file.path)
            for path in self._last.removed:
                self.folder.delete(path)
        self.folder.delete(STAGING)
        if self.number % _SNAPSHOT_EVERY == 0:
            for number in _numbers(self.folder):
                if number <= self.number - _KEPT_SNAPSHOTS * _SNAPSHOT_EVERY:
                    self.folder.delete(_path(number))

    def _apply(self, entry: Entry) -> None:
        if entry.files is not None:
            self.files = {file.path: file for file in entry.files}
        else:
            self.files.update({file.path: file for file in entry.added})
            for path in entry.removed:
                self.files.pop(path, None)
        self.number, self.positions, self._last = entry.number, entry.positions, entry


def _path(number: int) -> str:
    return f"{LOG_FOLDER}/{number:020d}.json"


def _numbers(folder: Folder) -> list[int]:
    names = [file.path.rpartition("/")[2] for file in folder.files(LOG_FOLDER)]
    return [int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdecimal()]
