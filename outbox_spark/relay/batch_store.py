"""The statements of a relay in PostgreSQL beyond a harvester's.

A batch is the set of rows that carry one mark (`outbox_core.stores.relay_marks`). One statement marks it, whole or not
at all; a replay reads the same rows until they are purged, or another leader takes them over.

The mark takes the earliest rows that no batch of this term or a later one has: a relay that does not know that it was
deposed cannot take rows away from its successor.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any
from uuid import UUID

import psycopg

from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.stores.interface import NO_HOLDS, StoredRecord
from outbox_core.stores.postgres.conversion import HeldParameters
from outbox_core.stores.postgres.statements import WITHOUT_HELD, locators
from outbox_core.stores.postgres.store import PostgresStore
from outbox_core.stores.relay_marks import FIRST, LAST, RelayMark, term_bounds

# A row that moved while it was being marked is left out: `selected` tells (see outbox_core.stores.postgres.store).
_MARK_BATCH = """
WITH head AS MATERIALIZED (
    SELECT array_agg({locator}) AS rows, count(*) AS selected
    FROM (
        SELECT {locator}, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - size AS before
        FROM (
            SELECT {locators}, {size} AS size FROM {table}
            WHERE (leader_id IS NULL OR leader_id NOT BETWEEN %(first_of_term)s AND %(last_of_relays)s)
              AND (%(up_to)s::bigint IS NULL OR id <= %(up_to)s) {held}
            ORDER BY id
            LIMIT %(limit)s
        ) AS earliest
    ) AS sized
    WHERE before < %(max_bytes)s
), marked AS (
    UPDATE {table} SET leader_id = %(mark)s
    WHERE {locator} = ANY ((SELECT rows FROM head)::{locator_type}[])
    RETURNING id
)
SELECT (SELECT selected FROM head), count(*), coalesce(min(id), 0), coalesce(max(id), 0) FROM marked
"""

_BATCHES = """
SELECT leader_id, count(*), min(id), max(id) FROM {table}
WHERE leader_id BETWEEN %(first)s AND %(last)s
GROUP BY leader_id
"""

_ADOPT = "UPDATE {table} SET leader_id = %(new)s WHERE leader_id = %(old)s AND {fulfilled}"

_RELEASE = "UPDATE {table} SET leader_id = NULL WHERE leader_id BETWEEN %(first)s AND %(last)s AND {fulfilled}"

_PURGE_BATCH = """
DELETE FROM {table} WHERE id BETWEEN %(first_id)s AND %(last_id)s AND leader_id = %(mark)s
"""

_UNPURGED_OF_BATCH = """
SELECT count(*), min(id) FROM {table} WHERE id BETWEEN %(first_id)s AND %(last_id)s AND leader_id = %(mark)s
"""

_HIGHEST = "SELECT max(id) FROM {table}"

# Rows of one key are in one shard; rows without a key are spread. Every row is in some shard, whatever its id and
# topic (a table that was made by hand may have NULL): one in none would be purged with its batch, and lost.
_READ = """
SELECT id, {topic}, kafka_key, kafka_value, NULLIF(kafka_header_keys, '{{}}'),
       NULLIF(kafka_header_values, '{{}}'), {partition}, {microseconds}
FROM {table}
WHERE {condition} AND (
    CASE WHEN kafka_key IS NULL THEN id %% %(shards)s
         ELSE hashtextextended({topic} || '/' || kafka_key, 0) %% %(shards)s
    END + %(shards)s) %% %(shards)s = %(shard)s
ORDER BY id
"""

_OF_BATCH = "id BETWEEN %(first_id)s AND %(last_id)s AND leader_id = %(mark)s"

# Addresses are unique within one physical table only.
_LAYOUT = """
SELECT EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attname = 'kafka_partition'
               AND attnum > 0 AND NOT attisdropped),
       c.relkind = 'r' AND NOT c.relispartition AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid)
FROM pg_class AS c WHERE c.oid = to_regclass(%s)
"""

_ROWS_PER_FETCH = 10_000
_MOST_BATCHES = 2**40

MOST_BYTES = 64 * 2**20  # no row is added to a batch of that much: a task has its shard in memory


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one mark: their number, their lowest and their highest id."""

    mark: RelayMark
    rows: int
    first: int
    last: int

    @property
    def parameters(self) -> dict[str, Any]:
        """Return the parameters of statements on its rows."""
        return {"mark": self.mark.leader_id, "first_id": self.first, "last_id": self.last}


@dataclass(frozen=True, slots=True)
class Shard:
    """Part `number` of `of` parts of a batch, or, without one, of the whole table."""

    number: int
    of: int
    batch: Batch | None = None


class BatchStore:
    """The batches of an outbox table; `outbox` is the table as harvesters use it. Used by one thread at a time."""

    def __init__(self, data_source: str, table: str = "outbox", *, application_name: str = "kafka-outbox") -> None:
        self.outbox = PostgresStore(data_source, table, application_name=application_name)
        self._table = self.outbox.table
        self._known_layout: tuple[bool, bool] | None = None

    def close(self) -> None:
        """Close the connection. The next call opens another one."""
        self.outbox.close()

    def mark_batch(self, mark: RelayMark, limit: int | None, up_to: int | None = None) -> Batch | None:
        """Mark the earliest free rows that are not held, up to the id `up_to`; return None if there are none.

        Raises:
            StoreUnavailable: the database is away. With `in_doubt` the batch may have been marked all the same.
            RowsHeld: a constraint keeps some rows from being marked: they are held now, and none is marked.
        """
        holds = self.outbox.holds.read() or NO_HOLDS
        parameters = {
            "mark": mark.leader_id,
            "limit": limit,
            "up_to": up_to,
            "first_of_term": term_bounds(mark.term)[0],
            "last_of_relays": LAST,
            "max_bytes": MOST_BYTES,
            **HeldParameters().of(holds),
        }
        parts = {"held": WITHOUT_HELD if holds else "", **locators(by_address=self._layout()[1])}
        while True:
            try:
                selected, rows, first, last = self._table.query(_MARK_BATCH, parameters, **parts)[0]
            except OutboxTableError as error:
                self.outbox.hold_violations(error)
            if rows == selected:
                return Batch(mark, rows, first, last) if rows else None
            # Another leader is marking the same rows. The skipped ones would come too late for their keys.
            self.release(mark.leader_id, mark.leader_id)

    def batches(self, term: int) -> list[Batch]:
        """Return the batches of a term, by number."""
        return sorted(self._batches(*term_bounds(term)), key=lambda batch: batch.mark.batch)

    def adopt(self, term: int) -> int:
        """Give the batches of all other terms to this one, under their numbers; return the number of rows.

        A number of two terms goes to the latest; the other rows' marks are cleared. So are marks with a number that no
        relay ever reaches: a writer has forged them, and no batch could follow. A mark that a constraint keeps from
        being changed stays; the next batch finds its row, and holds it.
        """
        fulfilled = self._table.new_rules().fulfilled
        count = 0
        found = sorted(self._batches(FIRST, LAST), key=lambda batch: batch.mark, reverse=True)
        taken = {batch.mark.batch for batch in found if batch.mark.term == term}
        for batch in found:
            is_forged = batch.mark.batch > _MOST_BATCHES
            if batch.mark.term == term and not is_forged:
                continue
            if is_forged or batch.mark.batch in taken:
                self.release(batch.mark.leader_id, batch.mark.leader_id)
                continue
            taken.add(batch.mark.batch)
            marks = {"old": batch.mark.leader_id, "new": RelayMark(term, batch.mark.batch).leader_id}
            count += self._table.execute(_ADOPT, marks, fulfilled=fulfilled)
        return count

    def release(self, first: UUID = FIRST, last: UUID = LAST) -> int:
        """Clear relays' marks in a range, except those that a constraint keeps; return their number."""
        fulfilled = self._table.new_rules().fulfilled
        return self._table.execute(_RELEASE, {"first": first, "last": last}, fulfilled=fulfilled)

    def purge_batch(self, batch: Batch) -> int:
        """Delete the batch's rows; return their number. Raises RowsRemain for others: they would be published again."""
        purged = self._table.execute(_PURGE_BATCH, batch.parameters)
        if purged < batch.rows:
            self._table.refuse_what_remains(_UNPURGED_OF_BATCH, batch.parameters)
        return purged

    def highest_id(self) -> int:
        """Return the highest visible id, 0 if there is none."""
        return int(self._table.query(_HIGHEST)[0][0] or 0)

    def read(self, shard: Shard) -> Iterator[Sequence[StoredRecord]]:
        """Yield the rows of a shard, by ascending id, in lists. Raises StoreUnavailable if the database goes away."""
        statement = self._table.format(
            _READ,
            partition="kafka_partition" if self._layout()[0] else "NULL::integer",
            condition=_OF_BATCH if shard.batch is not None else "true",
        )
        parameters = {"shard": shard.number, "shards": shard.of} | (shard.batch.parameters if shard.batch else {})
        try:
            connection = self._table.connected()
            with connection.transaction(), connection.cursor("outbox_shard", binary=True) as cursor:
                cursor.execute(statement, parameters)
                while rows := cursor.fetchmany(_ROWS_PER_FETCH):
                    yield [StoredRecord(*row) for row in rows]
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise StoreUnavailable(f"table {self._table.name}: {str(error).strip()}") from None
        except psycopg.Error as error:
            raise OutboxTableError(f"table {self._table.name}: {str(error).strip()}") from None

    def _layout(self) -> tuple[bool, bool]:
        """Tell whether there is a column for the partition, and whether an address (ctid) identifies a row."""
        if self._known_layout is None:
            rows = self._table.query(_LAYOUT, (self._table.quoted,))
            if not rows:
                raise OutboxTableError(f"outbox table {self._table.name} does not exist")
            self._known_layout = (rows[0][0], rows[0][1])
        return self._known_layout

    def _batches(self, first: UUID, last: UUID) -> Iterator[Batch]:
        for leader_id, rows, lowest, highest in self._table.query(_BATCHES, {"first": first, "last": last}):
            mark = RelayMark.of(leader_id)
            if mark is not None:
                yield Batch(mark, rows, lowest, highest)
