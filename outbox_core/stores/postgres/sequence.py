"""The sequence that ids are drawn from, and the transactions that write: the evidence of `LowWatermark`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

from psycopg.errors import UndefinedTable

from outbox_core.errors import OutboxTableError, RightsMissing, StoreUnavailable
from outbox_core.stores.interface import NO_FLOOR, Floor, OpenWriter, SequenceSnapshot
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.connection import Connection
from outbox_core.stores.postgres.table import OutboxTable

# Before, a transaction took another name when it was prepared.
_TRANSACTIONS_KEEP_THEIR_NAMES = 140001
_HIGHEST_FLOOR = 2**63 - 2  # a sequence at its end has drawn an id that nothing is above
_NO_FLOOR_PARAMETERS = {"floor": None, "sequence": None, "table_file": None, "sequence_file": None}


class _Place(NamedTuple):
    """The validity of a floor: this connection, while table and sequence are stored in these files."""

    connection: Connection
    table_file: int | None
    sequence_file: int | None


class _IdSequence(NamedTuple):
    connection: Connection
    name: str
    unusable: str
    table_file: int | None = None


class PostgresSequence:
    """The sequence of an outbox table's ids; implements `outbox_core.stores.interface.SequenceStore`."""

    def __init__(self, table: OutboxTable) -> None:
        self._table = table
        self._sequence: _IdSequence | None = None

    def snapshot(self) -> SequenceSnapshot:
        """Read the last id drawn; then, by a later statement, the open writers."""
        table = self._table
        table.refuse_unseen()
        try:
            connection = table.connected()
            if self._sequence is None or self._sequence.connection is not connection:
                self._sequence = self._find(connection)
            sequence = self._sequence
            if sequence.unusable:
                return SequenceSnapshot(NO_FLOOR.id, None, frozenset(), sequence.unusable)
            names = {"name": table.quoted, "sequence": sequence.name}
            drawn = table.query(sql.LAST_ID_DRAWN, names, sequence=sequence.name.replace("%", "%%"))
            found = table.query(sql.OPEN_WRITERS, names)
        except (OutboxTableError, RightsMissing) as error:
            if isinstance(error.__cause__, UndefinedTable):  # the next attempt looks for both
                raise StoreUnavailable(f"table {table.name} or its sequence was replaced: {error}") from error
            return SequenceSnapshot(NO_FLOOR.id, None, frozenset(), str(error))  # it may not be read
        if not found or table.connection is not connection:
            raise StoreUnavailable(f"table {table.name} or sequence {sequence.name} was replaced at this moment")
        (last_id, *files), (writers, is_alone, cache, ascends) = drawn[0], found[0]
        if files[0] != sequence.table_file:  # a table made anew may have another sequence, while the old one is there
            self._sequence = None
            return self.snapshot()
        unusable = self._why_unusable(is_alone=is_alone, cache=cache, ascends=ascends)
        return SequenceSnapshot(last_id, _Place(connection, *files), frozenset(writers), unusable)

    def describe(self, writers: Collection[str]) -> Sequence[OpenWriter]:
        """Describe those of these writers that are still open."""
        rows = self._table.query(sql.DESCRIBE_WRITERS, {"name": self._table.quoted, "writers": list(writers)})
        return [OpenWriter(*row) for row in rows]

    def floor_parameters(self, floor: Floor) -> dict[str, Any]:
        """Return the parameters of a floor; on another connection than the one it was proven on, it is none."""
        connection, place, sequence = self._table.connected(), floor.place, self._sequence
        name = {"name": self._table.quoted}
        if (
            sequence is None
            or not isinstance(place, _Place)
            or not place.connection is sequence.connection is connection
            or place.table_file is None  # a partitioned table has no file
            or place.sequence_file is None
        ):
            return name | _NO_FLOOR_PARAMETERS
        files = {"table_file": str(place.table_file), "sequence_file": str(place.sequence_file)}
        return name | files | {"floor": str(min(floor.id, _HIGHEST_FLOOR)), "sequence": sequence.name}

    def _find(self, connection: Connection) -> _IdSequence:
        table = self._table
        found = table.query(sql.FIND_SEQUENCE, {"name": table.quoted})
        if not found and not table.query(sql.INSPECT, (table.quoted,)):
            raise StoreUnavailable(f"table {table.name} is away at this moment")
        if len(found) != 1 or not found[0][1]:
            return _IdSequence(connection, "", f"the ids of {table.name} are not simply drawn from one sequence")
        name, _, may_read, table_file = found[0]
        unusable = "" if may_read else f"GRANT SELECT ON SEQUENCE {name} TO {table.quoted_role}"
        if connection.info.server_version < _TRANSACTIONS_KEEP_THEIR_NAMES:
            unusable = "it needs PostgreSQL 14.1 or later"
        return _IdSequence(connection, name, unusable, table_file)

    def _why_unusable(self, *, is_alone: bool, cache: int, ascends: bool) -> str:
        name = self._table.name
        if not is_alone:
            return f"{name} is partitioned or inherited from: an insert into a part does not lock the whole"
        if cache > 1:
            return (
                f"the sequence of {name}.id has CACHE {cache}, so ids are drawn ahead; "
                "ALTER SEQUENCE ... CACHE 1, and restart the applications"
            )
        return "" if ascends else f"the sequence of {name}.id descends or cycles"
