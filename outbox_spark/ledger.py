"""The ledger of a Parquet table: which files belong to it, and how far its topics are in it, in one atomic step.

Spark's checkpoint alone cannot give exactly once: a deleted one begins again, a restored one repeats. So the table
itself says what it holds. Each change is an *entry*, a numbered JSON file in `_ledger/` that appears as a whole or not
at all; the table is what the entries up to the last one say.

1. Files are written below `_staging/`.
2. The entry that names them is made: this is the commit. It also has the next offset of every partition.
3. They are moved to their places, and files that were replaced are deleted. That is repeated, harmlessly, whenever the
   table is opened, so a crash between 2 and 3 changes nothing.
4. What else is found below `_staging/` belongs to no entry, and is deleted.

Who has read the ledger sees exactly the committed files. Who lists the folders without it (other tools do) sees them
too, save between 2 and 3. Two writers cannot both make entry N: the second gets `FileTaken`.

Every 20th entry lists all files, so that older ones can go.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from outbox_core.errors import OutboxError
from outbox_spark.folder import Folder
from outbox_spark.positions import Positions

LEDGER = "_ledger"
STAGING = "_staging"
_FORMAT = 1
_SNAPSHOT_EVERY = 20
_KEPT_SNAPSHOTS = 2


class LedgerError(OutboxError):
    """A ledger cannot be read, or is not one."""


@dataclass(frozen=True)
class TableFile:
    """A Parquet file of the table.

    Attributes:
        path: its place below the table's folder.
        staged: where it was written.
        size: in bytes.
    """

    path: str
    staged: str
    size: int

    def __post_init__(self) -> None:
        """Raise ValueError if it is not below the table's folder."""
        _check_below(self.path)
        _check_below(self.staged)


def _check_below(path: str) -> None:
    """Raise ValueError if a path leads out of its folder: who may write the ledger must not name files elsewhere."""
    first, *_ = parts = path.split("/")
    if not first or ":" in first or ".." in parts:
        raise ValueError(f"{path!r} is not below the table's folder")


@dataclass(frozen=True)
class Entry:
    """One change of the table.

    Attributes:
        number: from 1.
        kind: `append` or `compact`.
        positions: the next offsets after it.
        added: new files.
        removed: paths of files that they replace.
        rows: how many rows were added by an append.
        files: all files after it, in every 20th entry.
    """

    number: int
    kind: str
    positions: Positions
    added: tuple[TableFile, ...]
    removed: tuple[str, ...] = ()
    rows: int = 0
    files: tuple[TableFile, ...] | None = None

    def to_json(self) -> str:
        """As the file's text."""
        document: dict[str, Any] = {
            "format": _FORMAT,
            "number": self.number,
            "kind": self.kind,
            "positions": self.positions,
            "added": [vars(file) for file in self.added],
            "removed": self.removed,
            "rows": self.rows,
        }
        if self.files is not None:
            document["files"] = [vars(file) for file in self.files]
        return json.dumps(document, sort_keys=True)

    @classmethod
    def from_json(cls, text: str, where: str) -> Entry:
        """From the file's text.

        Raises:
            LedgerError: it is no entry, or of a later version.
        """
        try:
            document = json.loads(text)
            if document["format"] != _FORMAT:
                raise LedgerError(f"{where} has format {document['format']}, this version reads {_FORMAT}")
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
            raise LedgerError(f"{where} is not an entry of a ledger: {error!r}") from None


@dataclass
class Ledger:
    """A table's files and positions, as of its last entry. Used by one thread.

    Attributes:
        folder: the table's folder.
        number: of the last entry, 0 if there is none.
        positions: the next offset of each partition.
        files: all files by their path.
    """

    folder: Folder
    number: int = 0
    positions: Positions = field(default_factory=dict)
    files: dict[str, TableFile] = field(default_factory=dict)
    _last: Entry | None = None

    @classmethod
    def open(cls, folder: Folder) -> Ledger:
        """Read it; a folder without one is an empty table.

        Raises:
            LedgerError: an entry is missing or cannot be read.
        """
        ledger = cls(folder)
        numbers = sorted(_numbers(folder))
        for number in _needed(folder, numbers):
            ledger._apply(_read(folder, number))
        return ledger

    def commit(
        self, kind: str, added: Iterable[TableFile], positions: Positions, *, removed: Iterable[str] = (), rows: int = 0
    ) -> None:
        """Make the next entry, and put its files into their places.

        Raises:
            FileTaken: another process has made it; nothing was changed.
        """
        entry = Entry(self.number + 1, kind, positions, tuple(added), tuple(removed), rows)
        if entry.number % _SNAPSHOT_EVERY == 0:
            files = {**self.files, **{file.path: file for file in entry.added}}
            kept = tuple(file for path, file in sorted(files.items()) if path not in entry.removed)
            entry = Entry(**{**vars(entry), "files": kept})
        self.folder.create(_path(entry.number), entry.to_json())
        self._apply(entry)
        self.settle()

    def settle(self) -> None:
        """Put the last entry's files into their places, and remove what belongs to no entry."""
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
    return f"{LEDGER}/{number:020d}.json"


def _numbers(folder: Folder) -> list[int]:
    names = [file.path.rpartition("/")[2] for file in folder.files(LEDGER)]
    return [int(name.removesuffix(".json")) for name in names if name.removesuffix(".json").isdecimal()]


def _needed(folder: Folder, numbers: list[int]) -> range:
    """The entries from the last complete list of files on."""
    if not numbers:
        return range(0)
    first = numbers[-1] - numbers[-1] % _SNAPSHOT_EVERY or 1
    missing = sorted(set(range(first, numbers[-1] + 1)) - set(numbers))
    if missing:
        raise LedgerError(f"{folder.url}/{_path(missing[0])} is missing: the ledger is damaged; restore it")
    return range(first, numbers[-1] + 1)


def _read(folder: Folder, number: int) -> Entry:
    return Entry.from_json(folder.read(_path(number)), f"{folder.url}/{_path(number)}")
