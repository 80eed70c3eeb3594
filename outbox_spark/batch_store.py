"""Every statement that a relay sends to PostgreSQL beyond a harvester's, once, together.

A batch is the set of rows that carry one mark (`outbox_core.relay_marks`). It is made by a single statement, so it is
there whole or not at all, and it stays the same until it is purged: reading it again gives the same rows. It can only
lose rows: those that were purged, and those that another leader has taken over.

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
from outbox_core.ports import NO_HOLDS, StoredRecord
from outbox_core.relay_marks import FIRST, LAST, RelayMark, term_bounds
from outbox_core.stores.postgres import HELD, MICROSECONDS, SIZE, TOPIC, PostgresStore

# A row that moved while it was being marked is left out: `selected` tells (see outbox_core.stores.postgres).
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

MOST_BYTES = 64 * 2**20
"""No row is added to a batch whose values and headers hold that much: a task has its shard in memory."""


@dataclass(frozen=True, slots=True)
class Batch:
    """The rows of one mark.

    Attributes:
        mark: what they are marked with.
        rows: how many there are.
        first: the lowest id.
        last: the highest id.
    """

    mark: RelayMark
    rows: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Shard:
    """A part of a batch, or of the whole table.

    Attributes:
        number: which shard, from 0.
        of: how many there are.
        batch: the batch; None for the whole table.
    """

    number: int
    of: int
    batch: Batch | None = None


class BatchStore(PostgresStore):
    """An outbox table in PostgreSQL, for relays. Used by one thread at a time."""

    _found: tuple[bool, bool] | None = None

    def mark_batch(self, mark: RelayMark, limit: int | None, up_to: int | None = None) -> Batch | None:
        """Mark the earliest rows that are free and not held, no more once they are `MOST_BYTES`. None if none are left.

        Args:
            mark: of the new batch.
            limit: how many rows at most; None for all.
            up_to: the highest id to take; None for no bound.

        Raises:
            StoreUnavailable: if the database is away. With `in_doubt` the batch may have been marked all the same.
            RowsHeld: if a constraint keeps some rows from being marked: they are held now, and none is marked.
        """
        parameters = {
            "mark": mark.leader_id,
            "limit": limit,
            "up_to": up_to,
            "first_of_term": term_bounds(mark.term)[0],
            "last_of_relays": LAST,
            "max_bytes": MOST_BYTES,
        }
        holds = self.holds() or NO_HOLDS
        parameters |= self._held_parameters.of(holds)
        parts = {"locator": "ctid", "locators": "id, ctid", "locator_type": "tid"}
        if not self._layout()[1]:
            parts = {"locator": "id", "locators": "id", "locator_type": "bigint"}
        statement = self._format(_MARK_BATCH, size=SIZE, held=HELD if holds else "", **parts)
        while True:
            try:
                selected, rows, first, last = self._query(statement, parameters)[0]
            except OutboxTableError as error:
                self._cannot_mark(error)
            if rows == selected:
                return Batch(mark, rows, first, last) if rows else None
            # Somebody else is marking the same rows. What was skipped would come too late for its key.
            self.release(mark.leader_id, mark.leader_id)

    def batches(self, term: int) -> list[Batch]:
        """The batches of a term that are in the table, by number."""
        return sorted(self._batches(*term_bounds(term)), key=lambda batch: batch.mark.batch)

    def adopt(self, term: int) -> int:
        """Give the batches of all other terms to this one, under the numbers they have; return how many rows.

        A number that this term has already, or that two terms had, goes to the latest; the other rows are set free. So
        are those whose number no relay ever comes to: their writer chose it, and there would be none after it.
        A mark that a constraint keeps from being changed stays; the next batch finds its row, and holds it.
        """
        fulfilled = self._new_rules().fulfilled
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
            count += self._execute(self._format(_ADOPT, fulfilled=fulfilled), marks).rowcount
        return count

    def release(self, first: UUID = FIRST, last: UUID = LAST) -> int:
        """Clear relays' marks in a range, but for those that a constraint keeps; return how many."""
        statement = self._format(_RELEASE, fulfilled=self._new_rules().fulfilled)
        return self._execute(statement, {"first": first, "last": last}).rowcount

    def purge_batch(self, batch: Batch) -> int:
        """Delete what is left of a batch; return how many rows.

        Raises:
            RowsRemain: if rows of it are still there: later they would be published again.
        """
        parameters = {"mark": batch.mark.leader_id, "first_id": batch.first, "last_id": batch.last}
        purged = self._execute(self._format(_PURGE_BATCH), parameters).rowcount
        if purged < batch.rows:
            self._see_what_remains(_UNPURGED_OF_BATCH, parameters)
        return purged

    def highest_id(self) -> int:
        """The highest id that is visible, 0 if there is none."""
        return int(self._query(self._format(_HIGHEST))[0][0] or 0)

    def read(self, shard: Shard) -> Iterator[Sequence[StoredRecord]]:
        """The rows of a shard, by ascending id, in lists.

        Raises:
            StoreUnavailable: if the database goes away.
        """
        batch = shard.batch
        statement = self._format(
            _READ,
            topic=TOPIC,
            partition="kafka_partition" if self._layout()[0] else "NULL::integer",
            microseconds=MICROSECONDS,
            condition=_OF_BATCH if batch is not None else "true",
        )
        parameters: dict[str, Any] = {"shard": shard.number, "shards": shard.of}
        if batch is not None:
            parameters |= {"mark": batch.mark.leader_id, "first_id": batch.first, "last_id": batch.last}
        try:
            yield from self._stream(statement, parameters)
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise StoreUnavailable(f"table {self._name}: {str(error).strip()}") from None
        except psycopg.Error as error:
            raise OutboxTableError(f"table {self._name}: {str(error).strip()}") from None

    def _layout(self) -> tuple[bool, bool]:
        """Whether there is a column for the partition, and whether rows can be found by their address."""
        if self._found is None:
            self._connected()  # only now is it known where the table is
            rows = self._query(_LAYOUT, (self._table.quoted,))
            if not rows:
                raise OutboxTableError(f"outbox table {self._name} does not exist")
            self._found = (rows[0][0], rows[0][1])
        return self._found

    def _stream(self, statement: str, parameters: dict[str, Any]) -> Iterator[Sequence[StoredRecord]]:
        connection = self._connected()
        with connection.transaction(), connection.cursor("outbox_shard", binary=True) as cursor:
            cursor.execute(statement, parameters)
            while rows := cursor.fetchmany(_ROWS_PER_FETCH):
                yield rows  # type: ignore[misc]

    def _batches(self, first: UUID, last: UUID) -> Iterator[Batch]:
        for leader_id, rows, lowest, highest in self._query(self._format(_BATCHES), {"first": first, "last": last}):
            mark = RelayMark.of(leader_id)
            if mark is not None:
                yield Batch(mark, rows, lowest, highest)
