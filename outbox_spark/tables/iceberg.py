"""The log of an Iceberg table, by the library pyiceberg and the catalog that its settings name.

Positions are a property of snapshots, `kafka-outbox.positions` (JSON): each snapshot of ours has all of them. Where
another program wrote the last snapshot, they are those of its nearest ancestor of ours; a table that is rolled back
has the positions of that time.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from typing import Any

import pyarrow as pa
from pyspark.sql import SparkSession

from outbox_core.errors import MissingExtra, OutboxTableError, StoreUnavailable
from outbox_spark.tables.folder import Folder
from outbox_spark.tables.log import CommitConflict, DataFile, TableLog, Written, for_library, for_spark
from outbox_spark.topics.positions import Positions, from_json, to_json

try:
    from pyiceberg import exceptions as errors
    from pyiceberg.catalog import load_catalog
    from pyiceberg.io.pyarrow import parquet_file_to_data_file
    from pyiceberg.manifest import DataFile as IcebergFile
    from pyiceberg.table import Table, Transaction
    from pyiceberg.transforms import DayTransform
except ImportError:
    raise MissingExtra("pyiceberg is not installed: pip install 'kafka-outbox[iceberg]'") from None

_POSITIONS = "kafka-outbox.positions"
_MAPPING = "schema.name-mapping.default"
_RETRIES = "commit.retry.num-retries"
_PROPERTIES = {
    "write.metadata.delete-after-commit.enabled": "true",
    "write.metadata.previous-versions-max": "100",
}


class IcebergLog(TableLog[Table]):
    """The log of a table by its name with its namespace; partitioned by the day of `time`, it has no column `date`."""

    def __init__(self, spark: SparkSession, name: str, catalog: Mapping[str, str], time: str, date: str) -> None:
        super().__init__(name)
        self._spark = spark
        self._time = time
        self._date = date
        with _translated(name):
            self._catalog = load_catalog(**{"name": "default", **catalog})

    @property
    def version(self) -> object:
        """Return the id of the current snapshot; None for none."""
        snapshot = self._table.current_snapshot() if self._table is not None else None
        return snapshot and snapshot.snapshot_id

    @property
    def schema(self) -> pa.Schema:
        """Return the table's columns; none if there is no table."""
        return pa.schema([] if self._table is None else self._table.schema().as_arrow())

    @property
    def location(self) -> str:
        """Return the table's folder, as its catalog tells it; its name if there is no table."""
        return self._name if self._table is None else for_spark(for_library(self._table.location()))

    def load(self) -> None:
        """Read the table's present state. Raises StoreUnavailable, OutboxTableError."""
        with _translated(self._name):
            try:
                self._hold(self._catalog.load_table(self._name))
            except errors.NoSuchTableError:
                self._table = None
        self.positions = {} if self._table is None else _positions(self._table)

    def create(self, schema: pa.Schema) -> None:
        """Create the table, unless it exists, and load it."""
        with _translated(self._name):
            self._catalog.create_namespace_if_not_exists(self._name.rpartition(".")[0])
            try:
                columns = self._without_date(schema)
                creation = self._catalog.create_table_transaction(self._name, columns, properties=_PROPERTIES)
                with creation, creation.update_spec() as spec:
                    spec.add_field(self._time, DayTransform(), f"{self._time}_day")
            except errors.TableAlreadyExistsError:
                pass
        self.load()

    def evolve(self, schema: pa.Schema) -> Collection[str]:
        """Add missing columns, and widen others; no file must be rewritten."""
        table = self._open()
        spec = [
            (str(field.transform), table.schema().find_column_name(field.source_id)) for field in table.spec().fields
        ]
        if spec != [("day", self._time)]:
            raise OutboxTableError(f"{self._name} must be partitioned by day({self._time}), and is by {table.spec()}")
        with _translated(self._name):
            try:
                with table.update_schema() as update:
                    update.union_by_name(self._without_date(schema))
            except (errors.ValidationError, ValueError) as error:
                raise OutboxTableError(
                    f"{self._name}: {error}; cast it to its old type, or name another table"
                ) from None
        self.load()
        return []

    def files(self) -> list[DataFile]:
        """List the table's files."""
        return [_described(file) for file in self._files()]

    def commit(self, added: Written, removed: Collection[str], positions: Positions) -> list[DataFile]:
        """Add and remove files, by URL, and advance the positions; return the added ones. Raises CommitConflict."""
        table, gone = self._open(), {for_library(url) for url in removed}
        with _translated(self._name):
            files = [parquet_file_to_data_file(table.io, table.metadata, for_library(url)) for url in added.urls]
            added.must_be_complete(file.record_count for file in files)
            transaction = Transaction(table)
            if table.name_mapping() is None:  # Spark's files name columns, and do not number them
                transaction.set_properties({_MAPPING: table.schema().name_mapping.model_dump_json()})
            snapshot = transaction.update_snapshot({_POSITIONS: json.dumps(to_json(positions), sort_keys=True)})
            with snapshot.overwrite() if gone else snapshot.merge_append() as update:
                for file in files:
                    update.append_data_file(file)
                for file in self._files() if gone else ():
                    if for_library(file.file_path) in gone:
                        update.delete_data_file(file)
            self._hold(transaction.commit_transaction())
        self.positions = positions
        return [_described(file) for file in files]

    def expire(self, before: datetime) -> int:
        """Forget snapshots older than `before`, and delete files that no other one has."""
        table = self._open()
        with _translated(self._name):
            table.maintenance.expire_snapshots().older_than(before.astimezone(UTC)).commit()
            self.load()
            needed, folder = self._needed(), Folder(self._spark, self.location)
            old = [file for kind in ("data", "metadata") for file in folder.files(kind) if file.modified < before]
            gone = [file for file in old if f"{for_library(folder.url)}/{file.path}" not in needed]
            for file in gone:
                folder.delete(file.path)
        return len(gone)

    def _needed(self) -> set[str]:
        """Return all files that a snapshot, or the table's present metadata, names."""
        table = self._open()
        named = {table.metadata_location, *(entry.metadata_file for entry in table.metadata.metadata_log)}
        for snapshot in table.snapshots():
            named.add(snapshot.manifest_list)
            for manifest in snapshot.manifests(table.io):
                if manifest.manifest_path not in named:  # most snapshots share most manifests
                    named.add(manifest.manifest_path)
                    named |= {entry.data_file.file_path for entry in manifest.fetch_manifest_entry(table.io)}
        return {for_library(url) for url in named}

    def _files(self) -> Iterator[IcebergFile]:
        with _translated(self._name):
            for task in self._open().scan().plan_files():
                if task.delete_files:
                    raise OutboxTableError(f"{self._name} has rows deleted by delete files: rewrite its data files")
                yield task.file

    def _without_date(self, schema: pa.Schema) -> pa.Schema:
        return schema.remove(schema.get_field_index(self._date))

    def _hold(self, table: Table) -> None:
        # The library would append the same files again behind another writer's. This is our copy alone.
        table.metadata.properties[_RETRIES] = "0"
        self._table = table


@contextmanager
def _translated(name: str) -> Iterator[None]:
    """Raise CommitConflict for a lost race, and StoreUnavailable for the storage's and the catalog's errors."""
    try:
        yield
    except errors.CommitFailedException as error:
        raise CommitConflict(str(error)) from None
    except (CommitConflict, OutboxTableError, StoreUnavailable):
        raise
    except Exception as error:  # catalogs raise errors of their own clients
        raise StoreUnavailable(f"the Iceberg table {name}: {str(error).strip() or type(error).__name__}") from error


def _positions(table: Table) -> Positions:
    snapshot = table.current_snapshot()
    if snapshot is None:
        return {}
    while snapshot is not None:
        if snapshot.summary is not None and (text := snapshot.summary.additional_properties.get(_POSITIONS)):
            return from_json(json.loads(text))
        parent = snapshot.parent_snapshot_id
        snapshot = table.snapshot_by_id(parent) if parent is not None else None
    raise OutboxTableError(
        f"{'.'.join(table.name())} has records, but no snapshot with {_POSITIONS}: another program wrote it, or has "
        "expired our snapshots; name another table"
    )


def _described(file: IcebergFile) -> DataFile:
    day: Any = file.partition[0]
    if isinstance(day, int):
        day = date(1970, 1, 1) + timedelta(days=day)
    size, rows = file.file_size_in_bytes, file.record_count
    return DataFile(for_spark(for_library(file.file_path)), size, rows, None if day is None else day.isoformat())
