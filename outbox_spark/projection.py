"""A projected table in PostgreSQL, with its quarantine, its totals and its positions, in one transaction. No Spark.

Everything that follows from a range of records is committed together: rows, totals, quarantined records, and the next
offset of their partitions (`outbox_spark_positions`). Whoever comes with the same records again finds the offset, and
leaves them out. The position's row is locked first, so a task that was given up for dead and its successor come one
after the other.

Two ways to keep records, by `keep`:

- `every`: a record is one or more rows, known by (`_outbox_id`, `_row`); what is there already is a repeat.
- `latest`: a record replaces all rows of its topic and key, a tombstone removes them. Records of a key are in one
  partition, and partitions are read in order, so the last one stays. But for a replay, which comes later and is older:
  it does not replace what was stashed after it, which both ids tell if they are of one outbox (`<outbox>:<number>`).

Totals are sums over the table. They are never computed anew: rows that come are added, rows that go are subtracted.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Self

from outbox_core.config import redact
from outbox_core.errors import OutboxTableError
from outbox_core.schema import TableName
from outbox_spark.positions import Positions, flat
from outbox_spark.postgres import connect, with_parameters

if TYPE_CHECKING:
    import psycopg

POSITIONS_TABLE = "outbox_spark_positions"
_DIGITS = 18  # of any bigint

_META = {
    "_outbox_id": "text NOT NULL",
    "_row": "integer NOT NULL",
    "_topic": "text NOT NULL",
    "_key": "text",
    "_partition": "integer NOT NULL",
    "_offset": "bigint NOT NULL",
    "_time": "timestamptz",
}
_KEYS = {"every": ("_outbox_id", "_row"), "latest": ("_topic", "_key", "_row")}
_QUARANTINE = {
    "topic": "text",
    "partition": "integer",
    '"offset"': "bigint",
    "time": "timestamptz",
    "outbox_id": "text",
    "key": "bytea",
    "value": "bytea",
    "headers": "jsonb",
    "reason": "text",
}


class Misfit(NamedTuple):
    """What the quarantine keeps of a record that cannot be projected, beside its place.

    Attributes:
        reason: why.
        key: its key.
        value: its value.
        headers: (name, value) pairs.
    """

    reason: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class ProjectedRecord(NamedTuple):
    """A record, and the rows that it becomes. Text has no U+0000.

    Attributes:
        topic: where it is.
        partition: where it is.
        offset: where it is.
        time: when Kafka has taken it.
        outbox_id: its identity; topic, partition and offset if it has none.
        key: its key; with `keep: latest` there is one.
        is_tombstone: whether it has no value.
        rows: values of the columns.
        misfit: None, or why it cannot be projected.
        is_replay: whether it is published again, from an archive.
    """

    topic: str
    partition: int
    offset: int
    time: Any
    outbox_id: str
    key: str | None
    is_tombstone: bool
    rows: Sequence[Sequence[Any]]
    misfit: Misfit | None = None
    is_replay: bool = False

    @property
    def number(self) -> tuple[str, int] | None:
        """Its outbox, and its id there, which grows with every record; None if its identity is no such pair."""
        outbox, colon, number = self.outbox_id.rpartition(":")
        is_number = number.isascii() and number.isdecimal() and len(number) <= _DIGITS
        return (outbox, int(number)) if colon and is_number else None


@dataclass(frozen=True)
class Totals:
    """Sums over the table.

    Attributes:
        table: where they are.
        by: columns to group by.
        sums: column of the totals -> column of the table.
        count: the column that counts rows.
    """

    table: TableName
    by: tuple[str, ...]
    sums: Mapping[str, str]
    count: str


@dataclass(frozen=True)
class Projection:
    """Where records go and in which form; knows its SQL.

    Attributes:
        query: the pipeline's name.
        table: the projected table.
        quarantine: the table of records that cannot be projected.
        columns: the table's own columns, with their PostgreSQL types.
        keep: see the module.
        totals: sums, or None.
        found_positions: the table of positions, where it was looked for.
    """

    query: str
    table: TableName
    quarantine: TableName
    columns: Mapping[str, str]
    keep: Literal["every", "latest"]
    totals: Totals | None = None
    found_positions: TableName | None = None

    @property
    def positions(self) -> TableName:
        """Where the positions are: in the schema of the table, as it was named."""
        return self.found_positions or TableName(POSITIONS_TABLE, self.table.schema)

    @property
    def tables(self) -> list[TableName]:
        """All its tables; `at` takes them in the same order."""
        return [self.table, self.quarantine, self.positions, *([self.totals.table] if self.totals else [])]

    def at(self, tables: Sequence[TableName]) -> Projection:
        """The same, with the tables where they were found."""
        table, quarantine, positions, *others = tables
        totals = replace(self.totals, table=others[0]) if self.totals is not None else None
        return replace(self, table=table, quarantine=quarantine, totals=totals, found_positions=positions)

    @property
    def all_columns(self) -> list[str]:
        """The table's columns, ours first."""
        return [*_META, *self.columns]

    def ddl(self) -> Iterator[str]:
        """Statements that make what is missing."""
        columns = {**_META, **{_quote(name): type_ for name, type_ in self.columns.items()}}
        yield _create(self.table, columns, _KEYS[self.keep])
        yield _create(self.quarantine, _QUARANTINE, ("topic", "partition", '"offset"'))
        yield _create(
            self.positions,
            {"query": "text", "topic": "text", "partition": "integer", "next_offset": "bigint"},
            ("query", "topic", "partition"),
        )
        if self.totals is not None:
            types = {name: self.columns[name] for name in self.totals.by}
            sums = {name: _sum_type(self.columns[column]) for name, column in self.totals.sums.items()}
            columns = {_quote(name): type_ for name, type_ in types.items()}
            columns |= {_quote(name): f"{type_} NOT NULL" for name, type_ in sums.items()}
            columns[_quote(self.totals.count)] = "bigint NOT NULL"
            by = ", ".join(map(_quote, self.totals.by))
            body = ", ".join(f"{name} {type_}" for name, type_ in columns.items())
            yield (f"CREATE TABLE IF NOT EXISTS {self.totals.table.quoted} ({body}, UNIQUE NULLS NOT DISTINCT ({by}))")

    def probes(self) -> Iterator[tuple[TableName, str]]:
        """Statements that fail if a table is not what it should be."""
        yield self.table, f"SELECT {_list(self.all_columns)} FROM {self.table.quoted} LIMIT 0"
        yield self.quarantine, f"SELECT {', '.join(_QUARANTINE)} FROM {self.quarantine.quoted} LIMIT 0"
        if self.totals is not None:
            names = [*self.totals.by, *self.totals.sums, self.totals.count]
            yield self.totals.table, f"SELECT {_list(names)} FROM {self.totals.table.quoted} LIMIT 0"

    def make_stage(self) -> Iterator[str]:
        """Temporary tables of a transaction."""
        yield (
            f"CREATE TEMPORARY TABLE stage ON COMMIT DROP AS SELECT {_list(self.all_columns)} "
            f"FROM {self.table.quoted} WITH NO DATA"
        )
        if self.keep == "latest":
            yield (
                "CREATE TEMPORARY TABLE last (topic text, key text, at bigint, replayed_from text, number bigint) "
                "ON COMMIT DROP"
            )
        if self.totals is not None:
            columns = ", ".join(f"{_quote(name)} {self.columns[name]}" for name in self._summed)
            yield f"CREATE TEMPORARY TABLE change ({columns}, sign integer) ON COMMIT DROP"

    def leave_out_old_replays(self) -> str:
        """A statement that takes out of `last` the replays of what the table has a later record than, or the same."""
        return (
            f"DELETE FROM last USING {self.table.quoted} AS t WHERE t._topic = last.topic AND t._key = last.key "
            f"AND substring(t._outbox_id FROM '^(.*):[0-9]{{1,{_DIGITS}}}$') = last.replayed_from "
            f"AND substring(t._outbox_id FROM ':([0-9]{{1,{_DIGITS}}})$')::bigint >= last.number"
        )

    def apply(self) -> Iterator[tuple[str, str]]:
        """Statements that bring what is staged into the tables, in order, with a name for the rows they count."""
        if self.keep == "latest":
            gone = f"DELETE FROM {self.table.quoted} AS t USING last WHERE t._topic = last.topic AND t._key = last.key"
            yield "replaced", self._noted(gone, -1, "t.")
            source = "stage AS s JOIN last ON s._topic = last.topic AND s._key = last.key AND s._offset = last.at"
            conflict = ""
        else:
            source, conflict = "stage AS s", f" ON CONFLICT ({', '.join(_KEYS['every'])}) DO NOTHING"
        names = _list(self.all_columns)
        # In one order for all writers, so that none waits for another in a circle.
        order = ", ".join(f"s.{name}" for name in _KEYS[self.keep])
        new = (
            f"INSERT INTO {self.table.quoted} AS t ({names}) "
            f"SELECT {', '.join(f's.{_quote(name)}' for name in self.all_columns)} FROM {source} "
            f"ORDER BY {order}{conflict}"
        )
        yield "rows", self._noted(new, 1, "t.")
        if self.totals is not None:
            yield "totals", self._sum_up(self.totals)
            yield "totals", self._clear(self.totals)

    @property
    def _summed(self) -> list[str]:
        assert self.totals is not None  # noqa: S101  only asked then
        return list(dict.fromkeys([*self.totals.by, *self.totals.sums.values()]))

    def _noted(self, statement: str, sign: int, prefix: str) -> str:
        """The statement; with totals, one that keeps what it changed."""
        if self.totals is None:
            return statement
        names = ", ".join(f"{prefix}{_quote(name)}" for name in self._summed)
        return (
            f"WITH changed AS ({statement} RETURNING {names}) "
            f"INSERT INTO change SELECT {_list(self._summed)}, {sign} FROM changed"
        )

    @staticmethod
    def _sum_up(totals: Totals) -> str:
        by, target = _list(totals.by), totals.table.quoted
        sums = [f"coalesce(sum({_quote(column)} * sign), 0)" for column in totals.sums.values()]
        names = [*map(_quote, totals.sums), _quote(totals.count)]
        updates = ", ".join(f"{name} = t.{name} + excluded.{name}" for name in names)
        return (
            f"INSERT INTO {target} AS t ({by}, {', '.join(names)}) "
            f"SELECT {by}, {', '.join([*sums, 'sum(sign)'])} FROM change GROUP BY {by} "
            f"ORDER BY {by} ON CONFLICT ({by}) DO UPDATE SET {updates}"
        )

    @staticmethod
    def _clear(totals: Totals) -> str:
        """Groups without rows go."""
        same = " AND ".join(f"t.{name} IS NOT DISTINCT FROM change.{name}" for name in map(_quote, totals.by))
        return f"DELETE FROM {totals.table.quoted} AS t USING change WHERE {same} AND t.{_quote(totals.count)} = 0"


class ProjectionStore:
    """A connection to a projection's database. Used by one thread.

    Args:
        dsn: the database.
        projection: what is there.

    Raises:
        InvalidConfig: the DSN cannot be read.
        StoreUnavailable: it cannot be reached.
    """

    def __init__(self, dsn: str, projection: Projection) -> None:
        self._connection, tables = connect(
            dsn,
            *projection.tables,
            what=str(projection.table),
            application_name=f"outbox-spark {projection.query}",
        )
        self._projection = projection.at(tables)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def prepare(self) -> None:
        """Make what is missing, and see that the tables are what they should be.

        Raises:
            OutboxTableError: naming the table and what is wrong.
        """
        import psycopg

        try:
            with self._connection.transaction():
                self._connection.execute("SELECT pg_advisory_xact_lock(hashtext('outbox_spark'))")
                for statement in self._projection.ddl():
                    self._connection.execute(statement)
        except psycopg.Error as error:
            raise OutboxTableError(f"cannot make {self._projection.table}: {_first_line(error)}") from None
        for table, probe in self._projection.probes():
            try:
                with self._connection.transaction():
                    self._connection.execute(probe)
            except psycopg.Error as error:
                raise OutboxTableError(
                    f"{table} is not a table of this projection: {_first_line(error)}; name another or drop it"
                ) from None

    def positions(self) -> dict[str, dict[str, int]]:
        """The next offset of each partition."""
        found: dict[str, dict[str, int]] = {}
        table = with_parameters(self._projection.positions)
        statement = f"SELECT topic, partition, next_offset FROM {table} WHERE query = %s"
        with self._connection.transaction():
            for topic, partition, offset in self._connection.execute(statement, (self._projection.query,)):
                found.setdefault(topic, {})[str(partition)] = offset
        return found

    def advance(self, positions: Positions) -> None:
        """Set positions, where they are not there yet."""
        with self._connection.transaction():
            _advance(self._connection, self._projection, flat(positions))

    def write(self, records: Iterable[ProjectedRecord], end: Positions) -> dict[str, int]:
        """Take records in one transaction; return counts.

        Args:
            records: of whole partitions of a batch, each partition's in the order of its offsets.
            end: where each partition is after the batch.
        """
        with self._connection.transaction():
            return _Writing(self._connection, self._projection, end).run(records)


class _Writing:
    """One transaction: partition by partition, then everything that was staged at once."""

    def __init__(self, connection: psycopg.Connection, projection: Projection, end: Positions) -> None:
        self._cursor = connection.cursor()
        self._projection = projection
        self._end = end
        self._last: dict[tuple[str, str], ProjectedRecord] = {}
        self._bad: list[tuple[Any, ...]] = []
        self._staged = 0
        self._counts = {"records": 0, "rows": 0, "repeated": 0, "replaced": 0, "tombstones": 0, "quarantined": 0}

    def run(self, records: Iterable[ProjectedRecord]) -> dict[str, int]:
        for statement in self._projection.make_stage():
            self._cursor.execute(statement)
        for (topic, partition), of_partition in itertools.groupby(records, key=lambda record: record[:2]):
            begin, end = self._lock(topic, partition), self._end[topic][str(partition)]
            self._stage(record for record in of_partition if begin <= record.offset < end)
            _advance(self._cursor, self._projection, [(topic, str(partition), end)])
        self._apply()
        return self._counts

    def _lock(self, topic: str, partition: int) -> int:
        """The partition's next offset, which nobody else can change until we are done."""
        table, place = with_parameters(self._projection.positions), (self._projection.query, topic, partition)
        self._cursor.execute(f"INSERT INTO {table} VALUES (%s, %s, %s, 0) ON CONFLICT DO NOTHING", place)
        self._cursor.execute(
            f"SELECT next_offset FROM {table} WHERE (query, topic, partition) = (%s, %s, %s) FOR UPDATE", place
        )
        row = self._cursor.fetchone()
        return int(row[0]) if row else 0

    def _stage(self, records: Iterator[ProjectedRecord]) -> None:
        with self._cursor.copy(f"COPY stage ({_list(self._projection.all_columns)}) FROM STDIN") as copy:
            for record in records:
                self._counts["records"] += 1
                if record.misfit is not None:
                    self._bad.append(_quarantined(record, record.misfit))
                    continue
                if self._projection.keep == "latest" and not self._is_last(record):
                    self._counts["repeated"] += 1
                    continue
                self._counts["tombstones"] += record.is_tombstone
                place = (record.topic, record.key, record.partition, record.offset, record.time)
                for number, row in enumerate(record.rows):
                    copy.write_row((record.outbox_id, number, *place, *row))
                    self._staged += 1

    def _is_last(self, record: ProjectedRecord) -> bool:
        """Whether it is the last of its key so far; a replay of what is not later than the last one is not."""
        lane = record.topic, record.key or ""
        if record.is_replay and lane in self._last:
            before, mine = self._last[lane].number, record.number
            if before is not None and mine is not None and before[0] == mine[0] and before[1] >= mine[1]:
                return False
        self._last[lane] = record
        return True

    def _apply(self) -> None:
        if self._last:
            with self._cursor.copy("COPY last FROM STDIN") as copy:
                for (topic, key), record in self._last.items():
                    copy.write_row((topic, key, record.offset, *((record.is_replay and record.number) or (None, None))))
        if any(record.is_replay for record in self._last.values()):
            self._cursor.execute(self._projection.leave_out_old_replays())
            self._counts["repeated"] += self._cursor.rowcount
        self._quarantine()
        for name, statement in self._projection.apply():
            self._cursor.execute(statement)
            if name in self._counts:
                self._counts[name] += max(0, self._cursor.rowcount)
        if self._projection.keep == "every":
            self._counts["repeated"] = self._staged - self._counts["rows"]

    def _quarantine(self) -> None:
        marks = ", ".join(["%s"] * len(_QUARANTINE))
        statement = (
            f"INSERT INTO {with_parameters(self._projection.quarantine)} ({', '.join(_QUARANTINE)}) VALUES ({marks}) "
            "ON CONFLICT DO NOTHING"
        )
        self._cursor.executemany(statement, self._bad)
        self._counts["quarantined"] = len(self._bad)


def _quarantined(record: ProjectedRecord, misfit: Misfit) -> tuple[Any, ...]:
    headers = [[name, None if value is None else value.decode("utf-8", "replace")] for name, value in misfit.headers]
    # PostgreSQL takes no U+0000 in text; key and value are kept as bytes.
    shown = json.dumps(headers).replace("\\u0000", "\ufffd")
    place = record.topic, record.partition, record.offset, record.time, record.outbox_id.replace("\0", "\ufffd")
    return (*place, misfit.key, misfit.value, shown, misfit.reason)


def _advance(connection: Any, projection: Projection, positions: Iterable[tuple[str, str, int]]) -> None:
    statement = (
        f"INSERT INTO {with_parameters(projection.positions)} AS p VALUES (%s, %s, %s, %s) "
        "ON CONFLICT (query, topic, partition) "
        "DO UPDATE SET next_offset = greatest(p.next_offset, excluded.next_offset)"
    )
    for topic, partition, offset in sorted(positions):
        connection.execute(statement, (projection.query, topic, int(partition), offset))


def _create(table: TableName, columns: Mapping[str, str], key: Sequence[str]) -> str:
    body = ", ".join(f"{name} {type_}" for name, type_ in columns.items())
    return f"CREATE TABLE IF NOT EXISTS {table.quoted} ({body}, PRIMARY KEY ({', '.join(key)}))"


def _sum_type(type_: str) -> str:
    """Sums of whole numbers do not fit their type, sums of decimals not their precision."""
    return type_ if type_ in ("real", "double precision", "interval") else "numeric"


def _list(names: Iterable[str]) -> str:
    return ", ".join(map(_quote, names))


def _quote(name: str) -> str:
    return '"' + name.replace('"', '""') + '"'


def _first_line(error: Exception) -> str:
    return redact(str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__)
