"""A projected table in PostgreSQL, with its quarantine, totals and positions, written in one transaction. No Spark.

A transaction commits the rows of a range of records with the next offset of their partitions. A writer with the same
records again finds the offset, and leaves them out. It locks the position's row first, so a task that was given up for
dead and its successor run one after the other.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator
from typing import Any, Self

import psycopg

from outbox_core.errors import OutboxTableError
from outbox_core.kafka.reader import Place
from outbox_core.row_security import seeing_all
from outbox_spark.postgres.connection import connect, one_line, with_parameters
from outbox_spark.postgres.projection import QUARANTINE_COLUMNS, Misfit, ProjectedRecord, Projection, quoted
from outbox_spark.topics.positions import Positions

_READ_POSITIONS = "SELECT topic, partition, next_offset FROM {positions} WHERE query = %s"
_MAKE_POSITION = "INSERT INTO {positions} VALUES (%s, %s, %s, 0) ON CONFLICT DO NOTHING"
_LOCK_POSITION = "SELECT next_offset FROM {positions} WHERE (query, topic, partition) = (%s, %s, %s) FOR UPDATE"
_ADVANCE = """
INSERT INTO {positions} AS p VALUES (%s, %s, %s, %s) ON CONFLICT (query, topic, partition)
DO UPDATE SET next_offset = greatest(p.next_offset, excluded.next_offset)
"""
_MOST_BYTES = 8 * 2**20  # of misfits in memory
_QUARANTINE = "INSERT INTO {quarantine} ({columns}) VALUES ({values}) ON CONFLICT DO NOTHING"


class ProjectionStore:
    """A connection to a projection's database. Used by one thread.

    Raises InvalidConfig and StoreUnavailable, RowsHidden among these.
    """

    def __init__(self, dsn: str, projection: Projection) -> None:
        name = f"outbox-spark {projection.query}"
        self._connection, tables = connect(dsn, *projection.tables, what=str(projection.table), application_name=name)
        self._projection = projection.at(tables)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def prepare(self) -> None:
        """Create missing tables, and check the columns of all. Raises OutboxTableError."""
        try:
            with self._connection.transaction():
                self._connection.execute("SELECT pg_advisory_xact_lock(hashtext('outbox_spark'))")
                for statement in self._projection.ddl():
                    self._connection.execute(statement)
        except psycopg.Error as error:
            raise OutboxTableError(f"cannot make {self._projection.table}: {one_line(error)}") from None
        for table, probe in self._projection.probes():
            try:
                with self._connection.transaction():
                    self._connection.execute(probe)
            except psycopg.Error as error:
                raise OutboxTableError(
                    f"{table} is not a table of this projection: {one_line(error)}; name another or drop it"
                ) from None

    def positions(self) -> Positions:
        """Return the next offset of each partition."""
        statement = _READ_POSITIONS.format(positions=with_parameters(self._projection.positions))
        with seeing_all(self._connection):
            found = self._connection.execute(statement, (self._projection.query,)).fetchall()
        return {(topic, partition): offset for topic, partition, offset in found}

    def advance(self, positions: Positions) -> None:
        """Advance positions; later ones stay."""
        with seeing_all(self._connection):
            _advance(self._connection, self._projection, positions)

    def write(self, records: Iterable[ProjectedRecord], end: Positions) -> dict[str, int]:
        """Write records of whole partitions, by offset, and their `end` in one transaction; return counts."""
        with seeing_all(self._connection):
            return _Writing(self._connection, self._projection, end).run(records)


class _Writing:
    """One transaction: stages partition by partition, then applies all staged rows at once."""

    def __init__(self, connection: psycopg.Connection[Any], projection: Projection, end: Positions) -> None:
        self._cursor = connection.cursor()
        self._projection = projection
        self._end = end
        self._last: dict[tuple[str, str], ProjectedRecord] = {}
        self._misfits: list[tuple[Any, ...]] = []
        self._staged = 0
        self._counts = {"records": 0, "rows": 0, "repeated": 0, "replaced": 0, "tombstones": 0, "quarantined": 0}

    def run(self, records: Iterable[ProjectedRecord]) -> dict[str, int]:
        for statement in self._projection.staging():
            self._cursor.execute(statement)
        for place, of_partition in itertools.groupby(records, key=lambda record: record[:2]):
            begin, end = self._lock(place), self._end[place]
            self._stage(record for record in of_partition if begin <= record.offset < end)
            _advance(self._cursor, self._projection, {place: end})
        self._apply()
        return self._counts

    def _lock(self, place: Place) -> int:
        """Lock the partition's position until the transaction ends; return its next offset."""
        table, row_key = with_parameters(self._projection.positions), (self._projection.query, *place)
        self._cursor.execute(_MAKE_POSITION.format(positions=table), row_key)
        row = self._cursor.execute(_LOCK_POSITION.format(positions=table), row_key).fetchone()
        return int(row[0]) if row else 0

    def _stage(self, records: Iterator[ProjectedRecord]) -> None:
        are_left = True
        while are_left:
            with self._cursor.copy(f"COPY stage ({quoted(self._projection.all_columns)}) FROM STDIN") as copy:
                are_left = self._copy(records, copy)
            self._quarantine()

    def _copy(self, records: Iterator[ProjectedRecord], copy: psycopg.Copy) -> bool:
        """Copy rows, up to the end or to as many misfits as memory may hold; tell whether records may be left."""
        size = 0
        for record in records:
            self._counts["records"] += 1
            if record.misfit is not None:
                self._misfits.append(_quarantined(record, record.misfit))
                size += len(record.misfit.key or b"") + len(record.misfit.value or b"")
                if size >= _MOST_BYTES:
                    return True
                continue
            if self._projection.keep == "latest" and not self._is_latest(record):
                self._counts["repeated"] += 1
                continue
            self._counts["tombstones"] += record.is_tombstone
            place = (record.topic, record.key, record.partition, record.offset, record.time)
            for number, row in enumerate(record.rows):
                copy.write_row((record.outbox_id, number, *place, *row))
                self._staged += 1
        return False

    def _quarantine(self) -> None:
        quarantine = _QUARANTINE.format(
            quarantine=with_parameters(self._projection.quarantine),
            columns=", ".join(QUARANTINE_COLUMNS),
            values=", ".join(["%s"] * len(QUARANTINE_COLUMNS)),
        )
        self._cursor.executemany(quarantine, self._misfits)
        self._counts["quarantined"] += len(self._misfits)
        self._misfits.clear()

    def _is_latest(self, record: ProjectedRecord) -> bool:
        """Note the record as the latest of its key so far, unless it replays that one or an older one."""
        lane = record.topic, record.key or ""
        if record.is_replay and lane in self._last:
            before, mine = self._last[lane].number, record.number
            if before is not None and mine is not None and before[0] == mine[0] and before[1] >= mine[1]:
                return False
        self._last[lane] = record._replace(rows=())  # these are staged
        return True

    def _apply(self) -> None:
        if self._last:
            with self._cursor.copy("COPY last FROM STDIN") as copy:
                for (topic, key), record in self._last.items():
                    copy.write_row((topic, key, record.offset, *((record.is_replay and record.number) or (None, None))))
        if any(record.is_replay for record in self._last.values()):
            self._cursor.execute(self._projection.drop_stale_replays())
            self._counts["repeated"] += self._cursor.rowcount
        for name, statement in self._projection.apply():
            self._cursor.execute(statement)
            if name in self._counts:
                self._counts[name] += max(0, self._cursor.rowcount)
        if self._projection.keep == "every":
            self._counts["repeated"] = self._staged - self._counts["rows"]


def _quarantined(record: ProjectedRecord, misfit: Misfit) -> tuple[Any, ...]:
    headers = [[name, None if value is None else value.decode("utf-8", "replace")] for name, value in misfit.headers]
    # PostgreSQL takes no U+0000 in text; key and value are kept as bytes.
    shown = json.dumps(headers).replace("\\u0000", "\ufffd")
    place = record.topic, record.partition, record.offset, record.time, record.outbox_id.replace("\0", "\ufffd")
    return (*place, misfit.key, misfit.value, shown, misfit.reason)


def _advance(connection: Any, projection: Projection, positions: Positions) -> None:
    statement = _ADVANCE.format(positions=with_parameters(projection.positions))
    for place, offset in sorted(positions.items()):
        connection.execute(statement, (projection.query, *place, offset))
