"""Folders of Parquet files with a commit log in `_ledger/`, as earlier versions wrote them, moved into a Delta table.

The move is a batch like any other: all rows and the positions in one commit, so it happens once. It begins with an
entry in `_ledger/` that no earlier version understands, so that none writes behind our back. The old files stay until
`--maintain` deletes them, because they belong to no version of the table.
"""

from __future__ import annotations

import json
import logging
from typing import TYPE_CHECKING, Any

from outbox_core.errors import OutboxTableError
from outbox_spark.topics.positions import Positions, from_json

if TYPE_CHECKING:
    from collections.abc import Iterator

    from pyspark.sql import DataFrame, SparkSession

    from outbox_spark.tables.folder import Folder
    from outbox_spark.tables.table import Table

_log = logging.getLogger(__name__)

_FOLDER = "_ledger"
_FORMAT = 1
_MOVED = 2  # the format of the entry that closes the log


def is_ledger(folder: Folder) -> bool:
    """Tell whether an earlier version wrote to this folder."""
    return folder.exists(_FOLDER)


def move(spark: SparkSession, folder: Folder, table: Table, schema: str) -> None:
    """Copy the rows and positions of a folder into its new, empty table. Raises OutboxTableError if it is damaged."""
    _log.info("moving %s into a Delta table", folder.url)
    last, entries = _entries(folder)
    if entries and entries[-1]["format"] == _FORMAT:
        last += 1
        folder.create(f"{_FOLDER}/{last:020d}.json", json.dumps({"format": _MOVED}))
    rows, positions = _read(spark, folder, [entry for entry in entries if entry["format"] == _FORMAT], schema)
    table.append(rows, positions)


def _entries(folder: Folder) -> tuple[int, list[dict[str, Any]]]:
    """Return the number of the last entry, and all entries from the last complete list of files on."""
    names = {file.path.rpartition("/")[2].removesuffix(".json"): file.path for file in folder.files(_FOLDER)}
    numbers = sorted(int(name) for name in names if name.isdecimal())
    entries: list[dict[str, Any]] = []
    for number in reversed(numbers):
        path = f"{_FOLDER}/{number:020d}.json"
        try:
            entry = json.loads(folder.read(path))
            if entry["format"] not in (_FORMAT, _MOVED) or any(map(_is_outside, _paths(entry))):
                raise ValueError  # noqa: TRY301
        except (ValueError, KeyError, TypeError) as error:
            raise OutboxTableError(f"{folder.url}/{path} is not an entry of a commit log: {error!r}") from None
        entries.insert(0, entry)
        if entry.get("files") is not None or number == 1:
            break
        if number - 1 not in numbers:
            raise OutboxTableError(f"{folder.url}: entry {number - 1} of {_FOLDER} is missing: restore it")
    return (numbers[-1] if numbers else 0), entries


def _paths(entry: dict[str, Any]) -> Iterator[str]:
    for file in (*entry.get("added", ()), *(entry.get("files") or ())):
        yield from (file["path"], file["staged"])


def _is_outside(path: str) -> bool:
    """Tell whether a path leads out of its folder: a forged log must not move files elsewhere."""
    first, *_ = parts = path.split("/")
    return not first or ":" in first or ".." in parts


def _read(
    spark: SparkSession, folder: Folder, entries: list[dict[str, Any]], schema: str
) -> tuple[DataFrame, Positions]:
    files: set[str] = set()
    for entry in entries:
        if entry.get("files") is not None:
            files = {file["path"] for file in entry["files"]}
        files = (files | {file["path"] for file in entry["added"]}) - set(entry["removed"])
    for file in entries[-1]["added"] if entries else ():  # its writer may have died before it moved them
        if not folder.exists(file["path"]):
            folder.move(file["staged"], file["path"])
    positions: Positions = from_json(entries[-1]["positions"]) if entries else {}
    if not files:
        return spark.createDataFrame([], schema), positions
    reader = spark.read.schema(schema).option("basePath", folder.url)
    return reader.parquet(*(f"{folder.url}/{path}" for path in sorted(files))), positions
