"""Rows into a PostgreSQL table, each once. No Spark.

One task writes one partition of one batch, in one transaction: COPY into a temporary table, INSERT ... ON CONFLICT into
the target, and a note in `outbox_spark_progress`: (query, partition) has reached this batch. So:

- a task of an older batch, a replay or one that was given up for dead, finds a later note and writes nothing;
- a task of the same batch upserts again, which leaves the same rows by their keys. It must not be skipped: changed
  settings may split the batch differently. Rows without a key are only added, so there the note does decide: change no
  settings of the query before it has finished the replay;
- the note names the query's identity in Spark's checkpoint. A new checkpoint counts batches from 0 again: old notes do
  not apply, and rows are upserted again.

Rows of one key must be in one partition if their order matters; of several in a partition the last one wins.
"""

from __future__ import annotations

import itertools
import json
import logging
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import psycopg
from psycopg import sql

from outbox_core.errors import InvalidConfig, OutboxError, OutboxTableError, StoreUnavailable
from outbox_core.schema import TableName
from outbox_spark.postgres.connection import connect, one_line, with_parameters

_log = logging.getLogger(__name__)

PROGRESS_TABLE = "outbox_spark_progress"
_LOCK = 0x6F7574626F78  # "outbox": tasks that find the table missing create it one after the other

_CREATE_PROGRESS = """
CREATE TABLE IF NOT EXISTS {progress} (
    query text NOT NULL,
    "partition" integer NOT NULL,
    run text NOT NULL,
    batch bigint NOT NULL,
    written_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (query, "partition")
)
"""

_COLUMNS = """
SELECT attname, format_type(atttypid, NULL) FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""

# The lock on the note's row also keeps two attempts of one task apart; so there must be one before the first batch.
_MAKE_NOTE = """
INSERT INTO {progress} (query, "partition", run, batch) VALUES (%s, %s, %s, -1) ON CONFLICT DO NOTHING
"""

_READ_NOTE = """
SELECT run, batch FROM {progress} WHERE query = %s AND "partition" = %s FOR UPDATE
"""

_WRITE_NOTE = """
INSERT INTO {progress} (query, "partition", run, batch) VALUES (%s, %s, %s, %s)
ON CONFLICT (query, "partition") DO UPDATE SET run = excluded.run, batch = excluded.batch, written_at = now()
"""

_STAGE = """
CREATE TEMPORARY TABLE outbox_spark_stage ON COMMIT DROP
AS SELECT {columns}, 0::bigint AS outbox_spark_row FROM {target} WITH NO DATA
"""

_COPY = "COPY outbox_spark_stage ({columns}, outbox_spark_row) FROM STDIN"

_APPEND = "INSERT INTO {target} ({columns}) SELECT {columns} FROM outbox_spark_stage ORDER BY outbox_spark_row"

_UPSERT = """
INSERT INTO {target} ({columns})
SELECT DISTINCT ON ({keys}) {columns} FROM outbox_spark_stage ORDER BY {keys}, outbox_spark_row DESC
ON CONFLICT ({keys}) DO {action}
"""


@dataclass(frozen=True, slots=True)
class Task:
    """The part of a stream that a task writes: query (named by the user), run (of its checkpoint), batch, partition."""

    query: str
    run: str
    batch: int
    partition: int


@dataclass(frozen=True, slots=True)
class Written:
    """The outcome of a task: the number of its rows, and whether an earlier task had written them."""

    rows: int
    skipped: bool = False


@dataclass(frozen=True)
class UpsertTarget:
    """The table that rows go to, which must exist, and the table of notes (`progress`), created if it is missing.

    `keys` are the columns of a unique index; rows without keys are only added. `on_conflict` is `update` (replace a row
    whose key exists) or `ignore` (keep it).
    """

    dsn: str = field(repr=False)
    table: str
    keys: tuple[str, ...] = ()
    on_conflict: str = "update"
    progress: str = PROGRESS_TABLE


class Upsert:
    """A writer of one partition of one batch; `columns` name the rows' values, in their order."""

    def __init__(self, target: UpsertTarget, columns: Sequence[str]) -> None:
        missing = [key for key in target.keys if key not in columns]
        if missing:
            raise InvalidConfig(f"key column(s) {', '.join(missing)} are not among the columns {', '.join(columns)}")
        self._target = target
        self._columns = tuple(columns)
        self._table, self._progress = TableName.parse(target.table), TableName.parse(target.progress)
        self._parts: dict[str, Any] = {
            "columns": sql.SQL(", ").join(map(sql.Identifier, columns)),
            "keys": sql.SQL(", ").join(map(sql.Identifier, target.keys)),
            "action": self._action(),
        }

    def write(self, rows: Iterable[Sequence[Any]], task: Task | None = None) -> Written:
        """Write rows, unless a note tells that they have been written; a batch job has no `task`, and leaves no note.

        Raises:
            InvalidConfig: the DSN cannot be read.
            StoreUnavailable: the database is away; all or none of the rows were written (try again).
            OutboxTableError: the table or a value does not fit.
        """
        connection, (table, progress) = connect(
            self._target.dsn, self._table, self._progress, what=f"table {self._table}"
        )
        self._parts["target"] = sql.SQL(table.quoted)
        self._parts["progress"] = sql.SQL(with_parameters(progress))  # its statements all have parameters
        try:
            with connection:
                if task is not None:
                    self._make_progress_table(connection, progress)
                    if self._is_done(connection, task):
                        return Written(sum(1 for _ in rows), skipped=True)
                count = self._upsert(connection, table, rows)
                if task is not None:
                    note = (task.query, task.partition, task.run, task.batch)
                    connection.execute(self._sql(_WRITE_NOTE), note)
                return Written(count)
        except (psycopg.OperationalError, psycopg.InterfaceError) as error:
            raise StoreUnavailable(f"table {self._table}: {one_line(error)}", in_doubt=True) from None
        except psycopg.Error as error:
            raise self._explain(error) from None

    def _is_done(self, connection: psycopg.Connection[Any], task: Task) -> bool:
        connection.execute(self._sql(_MAKE_NOTE), (task.query, task.partition, task.run))
        note = connection.execute(self._sql(_READ_NOTE), (task.query, task.partition)).fetchone()
        if note is None or note[0] != task.run:
            return False
        return bool(note[1] > task.batch or (note[1] == task.batch and not self._target.keys))

    def _make_progress_table(self, connection: psycopg.Connection[Any], progress: TableName) -> None:
        found = connection.execute("SELECT to_regclass(%s)", (progress.quoted,)).fetchone()
        if found is not None and found[0] is None:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            connection.execute(self._sql(_CREATE_PROGRESS), ())
        connection.commit()

    def _upsert(self, connection: psycopg.Connection[Any], table: TableName, rows: Iterable[Sequence[Any]]) -> int:
        types = self._types(connection, table)
        iterator = iter(rows)
        first = next(iterator, None)
        if first is None:
            return 0
        connection.execute(self._sql(_STAGE))
        count = 0
        with connection.cursor().copy(self._sql(_COPY)) as copy:
            for count, row in enumerate(_fitting(itertools.chain([first], iterator), types), start=1):
                copy.write_row((*row, count))
        connection.execute(self._sql(_UPSERT if self._target.keys else _APPEND))
        return count

    def _types(self, connection: psycopg.Connection[Any], table: TableName) -> list[str]:
        found = dict(connection.execute(_COLUMNS, (table.quoted,)).fetchall())
        if not found:
            raise OutboxTableError(f"table {self._table} does not exist; create it before the query starts")
        if missing := [name for name in self._columns if name not in found]:
            raise OutboxTableError(
                f"table {self._table} has no column(s) {', '.join(missing)}; it has {', '.join(found)}"
            )
        return [found[name] for name in self._columns]

    def _action(self) -> sql.Composable:
        values = [name for name in self._columns if name not in self._target.keys]
        if self._target.on_conflict == "ignore" or not values:
            return sql.SQL("NOTHING")
        each = [sql.SQL("{0} = excluded.{0}").format(sql.Identifier(name)) for name in values]
        return sql.SQL("UPDATE SET {}").format(sql.SQL(", ").join(each))

    def _sql(self, statement: str) -> sql.Composed:
        return sql.SQL(statement).format(**self._parts)

    def _explain(self, error: psycopg.Error) -> OutboxError:
        message = one_line(error)
        if isinstance(error, psycopg.errors.InvalidColumnReference):
            keys = ", ".join(self._target.keys)
            message = f"it has no unique index or primary key on ({keys}), which the upsert needs to recognise a row"
        elif isinstance(error, psycopg.errors.InsufficientPrivilege):
            message = f"missing rights: {message}"
        return OutboxTableError(f"table {self._table}: {message}")


def _fitting(rows: Iterable[Sequence[Any]], types: list[str]) -> Iterator[Sequence[Any]]:
    """Turn structures into JSON for JSON columns; elsewhere lists are arrays."""
    as_json = [position for position, kind in enumerate(types) if kind in {"json", "jsonb"}]
    if not as_json:
        yield from rows
        return
    for row in rows:
        values = list(row)
        for position in as_json:
            if values[position] is not None and not isinstance(values[position], str):
                values[position] = json.dumps(_plain(values[position]), default=str)
        yield values


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value
