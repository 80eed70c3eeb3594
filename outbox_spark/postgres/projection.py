"""The tables of a projection in PostgreSQL, and their SQL. No Spark.

Two ways to keep records, by `keep`:

- `every`: a record is one or more rows, identified by (`_outbox_id`, `_row`); a row that exists already is a repeat.
- `latest`: a record replaces all rows of its topic and key, a tombstone removes them. Records of a key are in one
  partition, and partitions are read in order, so the last one stays. A replay comes later and is older: it does not
  replace a record stashed after it, as both ids tell if they are of one outbox (`<outbox>:<number>`).

Totals are sums over the table, changed by added and removed rows, never computed anew.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

from outbox_core.schema import TableName, quote
from outbox_spark.config import PostgresTarget, ProjectSettings, TotalsSettings

_POSITIONS_TABLE = "outbox_spark_positions"
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
QUARANTINE_COLUMNS = {
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
_POSITIONS_COLUMNS = {"query": "text", "topic": "text", "partition": "integer", "next_offset": "bigint"}

_STAGE = "CREATE TEMPORARY TABLE stage ON COMMIT DROP AS SELECT {columns} FROM {table} WITH NO DATA"

_LAST = """
CREATE TEMPORARY TABLE last (topic text, key text, at bigint, replayed_from text, number bigint) ON COMMIT DROP
"""

_DROP_STALE_REPLAYS = f"""
DELETE FROM last USING {{table}} AS t WHERE t._topic = last.topic AND t._key = last.key
AND substring(t._outbox_id FROM '^(.*):[0-9]{{{{1,{_DIGITS}}}}}$') = last.replayed_from
AND substring(t._outbox_id FROM ':([0-9]{{{{1,{_DIGITS}}}}})$')::bigint >= last.number
"""

_DELETE_REPLACED = "DELETE FROM {table} AS t USING last WHERE t._topic = last.topic AND t._key = last.key"

_LATEST_ROWS = "stage AS s JOIN last ON s._topic = last.topic AND s._key = last.key AND s._offset = last.at"

# All writers insert in one order, so that none waits for another in a circle.
_INSERT_ROWS = "INSERT INTO {table} AS t ({columns}) SELECT {values} FROM {source} ORDER BY {order}{conflict}"

_NOTE_CHANGES = """
WITH changed AS ({statement} RETURNING {returned}) INSERT INTO change SELECT {columns}, {sign} FROM changed
"""

_ADD_TO_TOTALS = """
INSERT INTO {totals} AS t ({by}, {columns}) SELECT {by}, {sums} FROM change GROUP BY {by} ORDER BY {by}
ON CONFLICT ({by}) DO UPDATE SET {updates}
"""

_DELETE_EMPTY_TOTALS = "DELETE FROM {totals} AS t USING change WHERE {same} AND t.{count} = 0"


class Misfit(NamedTuple):
    """The rest of a record that cannot be projected: why, key, value, and (name, value) headers."""

    reason: str
    key: bytes | None
    value: bytes | None
    headers: Sequence[tuple[str, bytes | None]]


class ProjectedRecord(NamedTuple):
    """A record, and the rows that it becomes. Text has no U+0000; with `keep: latest` there is a key."""

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
        """Return its outbox, and its id there, which grows with every record; None for other identities."""
        outbox, colon, number = self.outbox_id.rpartition(":")
        is_number = number.isascii() and number.isdecimal() and len(number) <= _DIGITS
        return (outbox, int(number)) if colon and is_number else None


@dataclass(frozen=True)
class Projection:
    """The tables of a pipeline's records, and their columns; `found_positions` is set once its schema is known."""

    query: str
    table: TableName
    quarantine: TableName
    columns: Mapping[str, str]
    keep: Literal["every", "latest"]
    totals: TotalsSettings | None = None
    found_positions: TableName | None = None

    @classmethod
    def of(cls, settings: ProjectSettings, target: PostgresTarget, columns: Mapping[str, str]) -> Projection:
        """Return the projection of a pipeline into a table with these columns: name -> PostgreSQL's type."""
        return cls(settings.name, target.table, target.quarantine_table, columns, settings.keep, target.totals)

    @property
    def positions(self) -> TableName:
        """Return the table of positions; it is in the schema of the projected table."""
        return self.found_positions or TableName(_POSITIONS_TABLE, self.table.schema)

    @property
    def tables(self) -> list[TableName]:
        """List all tables; `at` takes them in the same order."""
        return [self.table, self.quarantine, self.positions, *([self.totals.table] if self.totals else [])]

    def at(self, tables: Sequence[TableName]) -> Projection:
        """Return the same projection with its tables at their places."""
        table, quarantine, positions, *others = tables
        totals = self.totals.model_copy(update={"table": others[0]}) if self.totals is not None else None
        return replace(self, table=table, quarantine=quarantine, totals=totals, found_positions=positions)

    def rights(self) -> dict[TableName, tuple[str, ...]]:
        """Return the tables, each with the privileges that writing to it needs."""
        rows = ("SELECT", "INSERT", "DELETE") if self.keep == "latest" else ("SELECT", "INSERT")
        others = ("SELECT", "INSERT"), ("SELECT", "INSERT", "UPDATE"), ("SELECT", "INSERT", "UPDATE", "DELETE")
        return dict(zip(self.tables, (rows, *others), strict=False))

    @property
    def all_columns(self) -> list[str]:
        """List the table's columns, ours first."""
        return [*_META, *self.columns]

    def ddl(self) -> Iterator[str]:
        """Yield statements that create missing tables."""
        own = {quote(name): type_ for name, type_ in self.columns.items()}
        yield _create(self.table, {**_META, **own}, f"PRIMARY KEY ({', '.join(_KEYS[self.keep])})")
        yield _create(self.quarantine, QUARANTINE_COLUMNS, 'PRIMARY KEY (topic, partition, "offset")')
        yield _create(self.positions, _POSITIONS_COLUMNS, "PRIMARY KEY (query, topic, partition)")
        if self.totals is not None:
            columns = {quote(name): self.columns[name] for name in self.totals.by}
            for name, column in self.totals.sums.items():
                columns[quote(name)] = f"{_sum_type(self.columns[column])} NOT NULL"
            columns[quote(self.totals.count)] = "bigint NOT NULL"
            yield _create(self.totals.table, columns, f"UNIQUE NULLS NOT DISTINCT ({quoted(self.totals.by)})")

    def probes(self) -> Iterator[tuple[TableName, str]]:
        """Yield statements that fail if a table has other columns."""
        yield self.table, f"SELECT {quoted(self.all_columns)} FROM {self.table.quoted} LIMIT 0"
        yield self.quarantine, f"SELECT {', '.join(QUARANTINE_COLUMNS)} FROM {self.quarantine.quoted} LIMIT 0"
        if self.totals is not None:
            names = [*self.totals.by, *self.totals.sums, self.totals.count]
            yield self.totals.table, f"SELECT {quoted(names)} FROM {self.totals.table.quoted} LIMIT 0"

    def staging(self) -> Iterator[str]:
        """Yield statements that create a transaction's temporary tables."""
        yield _STAGE.format(columns=quoted(self.all_columns), table=self.table.quoted)
        if self.keep == "latest":
            yield _LAST
        if self.totals is not None:
            columns = ", ".join(f"{quote(name)} {self.columns[name]}" for name in self.totals.sources)
            yield f"CREATE TEMPORARY TABLE change ({columns}, sign integer) ON COMMIT DROP"

    def drop_stale_replays(self) -> str:
        """Return a statement that removes replays from `last` whose record, or a later one, is in the table."""
        return _DROP_STALE_REPLAYS.format(table=self.table.quoted)

    def apply(self) -> Iterator[tuple[str, str]]:
        """Yield statements that bring the staged rows into the tables, in order, each with a name for its count."""
        source, conflict = "stage AS s", f" ON CONFLICT ({', '.join(_KEYS['every'])}) DO NOTHING"
        if self.keep == "latest":
            yield "replaced", self._noted(_DELETE_REPLACED.format(table=self.table.quoted), -1)
            source, conflict = _LATEST_ROWS, ""
        insert = _INSERT_ROWS.format(
            table=self.table.quoted,
            columns=quoted(self.all_columns),
            values=quoted(self.all_columns, "s."),
            source=source,
            order=", ".join(f"s.{name}" for name in _KEYS[self.keep]),
            conflict=conflict,
        )
        yield "rows", self._noted(insert, 1)
        if self.totals is not None:
            table, by = self.totals.table.quoted, self.totals.by
            names = [*self.totals.sums, self.totals.count]
            sums = [f"coalesce(sum({quote(column)} * sign), 0)" for column in self.totals.sums.values()]
            yield (
                "totals",
                _ADD_TO_TOTALS.format(
                    totals=table,
                    by=quoted(by),
                    columns=quoted(names),
                    sums=", ".join([*sums, "sum(sign)"]),
                    updates=", ".join(f"{name} = t.{name} + excluded.{name}" for name in map(quote, names)),
                ),
            )
            same = " AND ".join(f"t.{name} IS NOT DISTINCT FROM change.{name}" for name in map(quote, by))
            yield "totals", _DELETE_EMPTY_TOTALS.format(totals=table, same=same, count=quote(self.totals.count))

    def _noted(self, statement: str, sign: int) -> str:
        """Extend a statement, if there are totals, so that it notes its changes for them."""
        if self.totals is None:
            return statement
        sources = self.totals.sources
        return _NOTE_CHANGES.format(
            statement=statement, returned=quoted(sources, "t."), columns=quoted(sources), sign=sign
        )


def _create(table: TableName, columns: Mapping[str, str], constraint: str) -> str:
    body = ", ".join(f"{name} {type_}" for name, type_ in columns.items())
    return f"CREATE TABLE IF NOT EXISTS {table.quoted} ({body}, {constraint})"


def _sum_type(type_: str) -> str:
    # Sums of whole numbers do not fit their type, sums of decimals not their precision.
    return type_ if type_ in ("real", "double precision", "interval") else "numeric"


def quoted(names: Iterable[str], prefix: str = "") -> str:
    """Return a list of columns in SQL."""
    return ", ".join(f"{prefix}{quote(name)}" for name in names)
