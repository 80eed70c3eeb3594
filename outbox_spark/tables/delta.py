"""The log of a Delta table, by the library deltalake.

Positions are the log's own *application transactions*: for each partition of a topic the identity `<topic>/<partition>`
and, as its version, the next offset. The table's property `kafka-outbox.topics` names the topics, because identities
can be looked up, but not listed.

RESTORE takes rows away and leaves these entries. So commits that write them are named in the table's history: where the
last one is followed by a RESTORE, the positions are those of the version restored.
"""

from __future__ import annotations

import itertools
import json
import math
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyarrow import parquet
from pyarrow.fs import PyFileSystem

from outbox_core.errors import MissingExtra, OutboxTableError, StoreUnavailable
from outbox_spark.tables.log import CommitConflict, DataFile, TableLog, Written, day_of, for_library
from outbox_spark.topics.positions import Positions

try:
    import deltalake
    from deltalake import DeltaTable
    from deltalake import exceptions as errors
    from deltalake.fs import DeltaStorageHandler
    from deltalake.transaction import AddAction, RemoveAction
except ImportError:
    raise MissingExtra("deltalake is not installed: pip install 'kafka-outbox[delta]'") from None

_TOPICS = "kafka-outbox.topics"
_NAMED = "kafka-outbox.positions"  # the entry in the history
_LOOKED_AT = 100  # entries of the history: those of others since our last one
_UNKNOWN = -1  # the version of a partition without a position, so that the next one is found
_WIDER = {
    "byte": ("short", "integer", "long", "double"),
    "short": ("integer", "long", "double"),
    "integer": ("long", "double"),
    "float": ("double",),
}


class DeltaLog(TableLog[DeltaTable]):
    """The log of the Delta table in a folder; `date` is the column by which it is partitioned."""

    def __init__(self, url: str, date: str) -> None:
        super().__init__(url)
        self._uri = for_library(url)
        self._date = date
        self._entries: Positions = {}  # the log's, which are later ones than the positions behind a RESTORE

    @property
    def version(self) -> object:
        """Return the number of the last commit."""
        return -1 if self._table is None else self._table.version()

    @property
    def schema(self) -> pa.Schema:
        """Return the table's columns; none if there is no table."""
        return pa.schema([] if self._table is None else self._table.schema().to_arrow())

    def load(self) -> None:
        """Read the table's present state. Raises StoreUnavailable."""
        with _translated(self._uri):
            self._table = DeltaTable(self._uri) if DeltaTable.is_deltatable(self._uri) else None
            self._entries = {} if self._table is None else _entries(self._table)
            self.positions = {} if self._table is None else _entries(_restored(self._table))

    def create(self, schema: pa.Schema) -> None:
        """Create the table, unless it exists, and load it."""
        with _translated(self._uri):
            DeltaTable.create(self._uri, schema, mode="ignore", partition_by=[self._date])
        self.load()

    def evolve(self, schema: pa.Schema) -> Collection[str]:
        """Add missing columns; return those whose files must be rewritten in a wider type."""
        table, wanted = self._open(), deltalake.Schema.from_arrow(schema)
        if (columns := table.metadata().partition_columns) != [self._date]:
            raise OutboxTableError(
                f"{self._uri} must be partitioned by {self._date}, and is by {', '.join(columns) or 'no column'}: name "
                "another folder"
            )
        found = {field.name: field.type for field in table.schema().fields}
        wider = [field for field in wanted.fields if field.name in found and found[field.name] != field.type]
        for field in wider:
            if not _widens(found[field.name], field.type):
                raise OutboxTableError(
                    f"{self._uri}: the column {field.name} is {_name(found[field.name])} and cannot become "
                    f"{_name(field.type)}; cast it to its old type, or name another folder"
                )
        missing = [field for field in wanted.fields if field.name not in found]
        if missing:
            with _translated(self._uri):
                table.alter.add_columns(missing)
            self.load()
        return [field.name for field in wider]

    def files(self) -> list[DataFile]:
        """List the table's files."""
        if pa.table(self._open().deletion_vectors()).num_rows:
            raise OutboxTableError(
                f"{self._uri} has deletion vectors: rewrite its files (REORG TABLE ... APPLY (PURGE))"
            )
        listed = pa.table(self._open().get_add_actions()).select(["path", "size_bytes", "num_records", "partition"])
        return [
            DataFile(f"{self._name}/{path}", size, rows or 0, None if day is None else str(day))
            for path, size, rows, partition in zip(*listed.to_pydict().values(), strict=True)
            for day in partition.values()
        ]

    def commit(self, added: Written, removed: Collection[str], positions: Positions) -> list[DataFile]:
        """Add and remove files, by URL, and advance the positions; return the added ones. Raises CommitConflict."""
        table = self._open()
        files = self._described(added)
        # Merged rows are no new ones: to readers of the table's changes they have not changed.
        is_change = positions != self.positions
        added_files = [self._add(file, is_new=is_change) for file in files]
        self._name_topics(positions)
        places, before = positions.keys() | self._entries.keys(), (self.positions, self._entries)
        transactions = [
            deltalake.Transaction(f"{topic}/{number}", positions.get((topic, number), _UNKNOWN))
            for topic in {topic for known in before for (topic, _), _ in positions.items() ^ known.items()}
            for number in range(1 + max(partition for name, partition in places if name == topic))
        ]
        self._transact(
            [*added_files, *self._removals(removed, is_change=is_change)], "append", table.schema(), transactions
        )
        self.positions = self._entries = positions
        return files

    def rewrite(self, added: Written, schema: pa.Schema) -> list[DataFile]:
        """Replace all files and the schema in one commit; return the added files. Raises CommitConflict."""
        files = self._described(added)
        self._transact(
            [self._add(file, is_new=False) for file in files], "overwrite", deltalake.Schema.from_arrow(schema)
        )
        return files

    def expire(self, before: datetime) -> int:
        """Delete files that no version since `before` has, and entries of the log that no checkpoint needs."""
        table = self._open()
        hours = max(0, math.ceil((datetime.now(UTC) - before).total_seconds() / 3600))
        with _translated(self._uri):
            deleted = table.vacuum(hours, dry_run=False, enforce_retention_duration=False, full=True)
            table.create_checkpoint()
            table.cleanup_metadata()
        self.load()
        return len(deleted)

    def _transact(
        self, actions: Sequence[AddAction | RemoveAction], mode: str, schema: Any, transactions: Sequence[Any] = ()
    ) -> None:
        """Commit as the version behind the loaded one, or not at all."""
        table = self._open()
        wanted = table.version() + 1
        properties = deltalake.CommitProperties(
            {_NAMED: str(len(transactions))} if transactions else None, 0, list(transactions)
        )
        with _translated(self._uri):
            table.create_write_transaction(list(actions), mode, schema, [self._date], commit_properties=properties)
            # Not a later version: its positions are not those that we know.
            table.load_as_version(wanted)

    def _name_topics(self, positions: Positions) -> None:
        table, named, topics = self._open(), set(_topics(self._open())), {topic for topic, _ in positions}
        if not topics <= named:
            before, known = table.version(), ",".join(sorted(named | topics))
            with _translated(self._uri):
                table.alter.set_table_properties({_TOPICS: known}, raise_if_not_exists=False)
                table.update_incremental()
            if table.version() != before + 1:
                raise CommitConflict("another process has changed the table while its topics were named")

    def _described(self, written: Written) -> list[DataFile]:
        """Return the files of these URLs, with the number of rows in their footers."""
        with _translated(self._uri):
            system, files = PyFileSystem(DeltaStorageHandler.from_table(self._open()._table)), []  # noqa: SLF001
            for url in written.urls:
                with system.open_input_file(self._relative(url)) as opened:
                    files.append(DataFile(url, opened.size(), parquet.read_metadata(opened).num_rows, day_of(url)))
        written.must_be_complete(file.rows for file in files)
        return files

    def _add(self, file: DataFile, *, is_new: bool) -> AddAction:
        statistics = json.dumps({"numRecords": file.rows})
        days = {self._date: file.day}
        return AddAction(self._relative(file.url), file.size, days, _now(), is_new, statistics)

    def _removals(self, urls: Collection[str], *, is_change: bool) -> Iterator[RemoveAction]:
        for file in self.files() if urls else ():
            if file.url in urls:
                yield RemoveAction(self._relative(file.url), is_change, _now(), file.size, {self._date: file.day})

    def _relative(self, url: str) -> str:
        return url.removeprefix(f"{self._name}/")


@contextmanager
def _translated(uri: str) -> Iterator[None]:
    """Raise CommitConflict for a lost race, and StoreUnavailable in place of errors of the storage."""
    try:
        yield
    except errors.CommitFailedError as error:
        raise CommitConflict(str(error)) from None
    except (errors.DeltaError, OSError) as error:
        raise StoreUnavailable(f"the Delta table {uri}: {str(error).strip() or type(error).__name__}") from None


def _topics(table: DeltaTable) -> list[str]:
    return [topic for topic in table.metadata().configuration.get(_TOPICS, "").split(",") if topic]


def _restored(table: DeltaTable) -> DeltaTable:
    """Return the version to which the table was restored after our last commit; the table itself if it was not."""
    at: int = table.version()
    for entry in table.history(_LOOKED_AT):
        if entry["version"] > at:
            continue
        if _NAMED in entry:
            break
        if entry.get("operation") == "RESTORE":
            version = entry.get("operationParameters", {}).get("version")
            if version is None:
                raise OutboxTableError(
                    f"{table.table_uri} was restored to a time, which does not tell its position in the topics: "
                    "restore it to a version"
                )
            at = int(version)
    return table if at == table.version() else DeltaTable(table.table_uri, version=at)


def _entries(table: DeltaTable) -> Positions:
    found = {}
    for topic in _topics(table):
        for number in itertools.count():
            offset = table.transaction_version(f"{topic}/{number}")
            if offset is None:
                break
            if offset != _UNKNOWN:
                found[topic, number] = offset
    return found


def _widens(found: Any, wanted: Any) -> bool:
    """Tell whether all values of a type are values of the wanted one."""
    names = (_name(found), _name(wanted))
    decimals = [[int(part) for part in name[8:-1].split(",")] for name in names if name.startswith("decimal(")]
    if len(decimals) == 2:
        (precision, scale), (wider, other) = decimals
        return wider - other >= precision - scale and other >= scale
    return names[1] in _WIDER.get(names[0], ())


def _name(kind: Any) -> str:
    return str(json.loads(kind.to_json())).strip("'\"")


def _now() -> int:
    """Return the time in milliseconds since 1970."""
    return int(time.time() * 1000)
