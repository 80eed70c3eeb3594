"""The outbox table as tasks of a relay read it: one shard of a range of ids, on a connection of the task's own.

Rows of one key are in one shard, whatever their topics; rows without a key are spread. Every row is in some shard,
whatever its id (a table that was made by hand may have ids below zero).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import psycopg

from outbox_core.config import HarvestConfig
from outbox_core.errors import OutboxTableError, RowsHidden, StoreUnavailable
from outbox_core.row_security import is_refusal
from outbox_core.stores.interface import NO_FLOOR, Floor, RowQuery, StoredRecord
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.connection import one_line
from outbox_core.stores.postgres.store import PostgresStore, scan_parts
from outbox_spark.batches import batches

# Rule 1 of docs/spark-relay.md: a key is in one shard, and each row is in one. The sign is cut off: a remainder of a
# negative number is negative.
_IN_SHARD = """
(CASE WHEN kafka_key IS NULL THEN id::bigint ELSE hashtextextended(kafka_key::text, 0) END
 & 9223372036854775807) %% %(shards)s::bigint = %(shard)s::bigint
"""

# Rule 8: what was proven holds for one incarnation of table and sequence, on one run of one server.
_SAME_PLACE = """
pg_relation_filenode(to_regclass(%(name)s::text)) = %(table_file)s::oid
AND pg_relation_filenode(to_regclass(%(sequence)s::text)) = %(sequence_file)s::oid
AND pg_sequence_last_value(to_regclass(%(sequence)s::text)) >= %(drawn)s::bigint
AND extract(epoch FROM pg_postmaster_start_time())::text = %(started)s
"""

_SETTLED = f"""
id BETWEEN %(first)s::bigint AND (SELECT CASE WHEN {_SAME_PLACE} THEN %(up_to)s::bigint END) AND {_IN_SHARD}
"""

_FROM_FLOOR = f"""
id >= (SELECT CASE WHEN {_SAME_PLACE} THEN %(first)s::bigint ELSE {{lowest}} END)
AND (%(up_to)s::bigint IS NULL OR id <= %(up_to)s::bigint) AND {_IN_SHARD}
"""

_STARTED = "SELECT extract(epoch FROM pg_postmaster_start_time())::text"
_HIGHEST = "SELECT max(id) FROM {table}"

_READ = f"""
SELECT id, {{topic}}, kafka_key, kafka_value, NULLIF(kafka_header_keys, '{{{{}}}}'),
       NULLIF(kafka_header_values, '{{{{}}}}'), {{partition}}, {{microseconds}}
FROM {{table}} WHERE {_IN_SHARD} ORDER BY id
"""

_MOST_ROWS_AT_ONCE = 10_000
_MOST_BYTES_AT_ONCE = 16 * 2**20  # but for the last row of a list
_LOWEST = NO_FLOOR.id + 1
_HIGHEST_ID = 2**63 - 1


class Place(NamedTuple):
    """The files of table and sequence, and the start of the server, for which settled ids were proven."""

    sequence: str
    table_file: str
    sequence_file: str
    started: str


_NOWHERE = Place("pg_catalog.pg_class", "0", "0", "")


class Sight(NamedTuple):
    """The last id drawn, the open writers after that, and the place; without one `unusable` has the reason.

    `connection` is the driver's: one that was lost may mean that the server crashed, which sets sequences back.
    """

    last_id: int
    writers: frozenset[str]
    place: Place | None
    unusable: str = ""
    connection: object = None


@dataclass(frozen=True, slots=True)
class ShardRange:
    """Shard `number` of `of`, of the rows above the id `after` and up to the id `up_to` (None: of all above).

    If it `is_settled` no row appears in it any more, and it can be read piece by piece. If not, rows may still appear
    anywhere above `after`, which is settled.
    """

    number: int
    of: int
    after: int = NO_FLOOR.id
    up_to: int | None = None
    is_settled: bool = False
    place: Place | None = None
    rows: int | None = None  # of a transaction at first; None: as many as the plan allows


class ShardStore(PostgresStore):
    """An outbox table that is read by shards. Used by one thread at a time."""

    @classmethod
    def of(cls, config: HarvestConfig, *, statement_timeout: float = 0.0) -> ShardStore:
        """Make the store of a harvester's settings; `statement_timeout` is in seconds, 0.0 for none."""
        return cls(
            config.data_source,
            config.outbox_table,
            application_name=f"kafka-outbox-spark {config.name}"[:63],
            statement_timeout=statement_timeout,
            max_message_bytes=config.max_message_bytes,
            archive_days=config.archive_days if config.retention == "archive" else None,
        )

    def found_in(self, config: HarvestConfig) -> HarvestConfig:
        """Return settings with the table's schema: in a session of a worker another path may lead to another table."""
        return config.model_copy(update={"outbox_table": self.table.quoted})

    def sight(self) -> Sight:
        """Read the last id drawn; then, by a later statement, the open writers. Raises OutboxTableError."""
        try:
            snapshot = self.sequence.snapshot()
        except StoreUnavailable:
            if self.table.connection is not None:  # the database has answered
                self.check()  # a table that is away is more than replaced at this moment
            raise
        if snapshot.unusable:
            return Sight(NO_FLOOR.id, frozenset(), None, snapshot.unusable)
        files = self.sequence.floor_parameters(Floor(snapshot.last_id, snapshot.place))
        if files["sequence"] is None:
            return Sight(NO_FLOOR.id, frozenset(), None, "table or sequence have no file of their own")
        started = str(self.table.query(_STARTED)[0][0])
        place = Place(files["sequence"], files["table_file"], files["sequence_file"], started)
        return Sight(snapshot.last_id, snapshot.writers, place, connection=self.table.connected())

    def scan_shard(self, query: RowQuery, wanted: ShardRange) -> Sequence[StoredRecord]:
        """Return the earliest rows of a shard, by ascending id, unchanged; `query.after` does not count.

        Of a settled range in another place than the one it was proven for there are none; of another range all rows
        from the head are read then.
        """
        if wanted.after >= _HIGHEST_ID:
            return []
        place = wanted.place or _NOWHERE
        parameters = {
            **self._parameters(query._replace(after=NO_FLOOR)),
            **place._asdict(),
            "first": str(wanted.after + 1),
            "drawn": str(max(wanted.after, _LOWEST)),
            "up_to": None if wanted.up_to is None else str(wanted.up_to),
            "shard": wanted.number,
            "shards": wanted.of,
        }
        above = (_SETTLED if wanted.is_settled else _FROM_FLOOR).format(lowest=f"({_LOWEST})::bigint")
        parts = scan_parts(self.table.layout(), query) | {"above": above}
        return self._read(sql.SCAN, parameters, parts)

    def highest_id(self) -> int:
        """Return the highest visible id, the lowest of all ids if there is none."""
        found = self.table.query(_HIGHEST)[0][0]
        return _LOWEST if found is None else int(found)

    def read_shard(self, number: int, of: int) -> Iterator[Sequence[StoredRecord]]:
        """Yield all rows of a shard of the table, by ascending id, in lists. Raises StoreUnavailable."""
        partition = "kafka_partition" if self.table.layout().has_partition else "NULL::integer"
        statement = self.table.format(_READ, partition=partition)
        try:
            connection = self.table.connected()
            connection.purpose = "the rows of a shard"
            with self.table.seeing_all(), connection.cursor() as cursor:
                # Row by row: a fetch of many would take as many large ones.
                fields = cursor.stream(statement, {"shard": number, "shards": of}, binary=True)
                rows = map(StoredRecord._make, fields)
                yield from batches(rows, _MOST_ROWS_AT_ONCE, _MOST_BYTES_AT_ONCE, _parts)
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise StoreUnavailable(f"table {self.table.name}: {one_line(error)}") from None
        except psycopg.Error as error:
            if is_refusal(error):
                raise RowsHidden(f"table {self.table.name}: {one_line(error)}") from None
            raise OutboxTableError(f"table {self.table.name}: {one_line(error)}") from None


def _parts(row: StoredRecord) -> Iterable[bytes | str | None]:
    return (row.key, row.value, *(row.header_values or ()))
