"""Rows into a PostgreSQL table, each once, without Spark.

One task writes one partition of one batch, in one transaction: COPY into a temporary table, INSERT ... ON CONFLICT into
the target, and a row in `outbox_spark_progress` that says (query, partition) has come as far as this batch. So after a
commit there are both the rows and the note, after a crash neither:

- a task of an older batch, a replay or one that was thought dead, finds a later note and writes nothing;
- a task of the same batch, tried again or replayed, upserts anew, which leaves the same rows, as the key decides. It
  must not be skipped: the batch may be cut differently this time, if settings were changed. Rows without a key are only
  added, so there the note does decide: change nothing about the query before it has got over the replay;
- the note names the run of the query (the identity that Spark keeps in the checkpoint). With a new checkpoint batches
  are counted from 0 again, and what the old notes say does not apply. Then rows are upserted anew, which leaves the
  same rows, as the key decides;
- the note also holds how many tasks the batch had: if it was cut differently when it is replayed, its rows are
  upserted anew for the same reason.

Rows of one key must be in one partition if their order matters; of several in a partition the last one wins.
"""

from __future__ import annotations

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
from outbox_spark.postgres import connect, one_line, with_parameters

_log = logging.getLogger(__name__)

PROGRESS_TABLE = "outbox_spark_progress"
_LOCK = 0x6F7574626F78  # "outbox": tasks that find the table missing make it one after the other

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
    """Which part of a stream a task writes.

    Attributes:
        query: name of the query, chosen by the user; notes belong to it.
        run: identity of its checkpoint.
        batch: number of the batch.
        partition: number of the partition.
    """

    query: str
    run: str
    batch: int
    partition: int


@dataclass(frozen=True, slots=True)
class Written:
    """What a task did.

    Attributes:
        rows: how many rows it was given.
        skipped: whether the note said that they are there.
    """

    rows: int
    skipped: bool = False


@dataclass(frozen=True)
class UpsertTarget:
    """Where rows go.

    Attributes:
        dsn: libpq connection string or URL of the database.
        table: the table, `table` or `schema.table`; it must exist.
        keys: columns of its primary key or of a unique index; none for rows that are only added.
        on_conflict: what becomes of a row whose key is there: `update` replaces it, `ignore` keeps the old one.
        progress: the table of notes, made if it is missing.
    """

    dsn: str = field(repr=False)
    table: str
    keys: tuple[str, ...] = ()
    on_conflict: str = "update"
    progress: str = PROGRESS_TABLE


class Upsert:
    """Writes one partition of one batch.

    Args:
        target: where to.
        columns: names of the rows' values, in their order; columns of the table.
    """

    def __init__(self, target: UpsertTarget, columns: Sequence[str]) -> None:
        missing = [key for key in target.keys if key not in columns]
        if missing:
            raise InvalidConfig(f"key column(s) {', '.join(missing)} are not among the columns {', '.join(columns)}")
        self._target = target
        self._names = tuple(columns)
        table, progress = TableName.parse(target.table), TableName.parse(target.progress)
        self._table, self._progress_name = table, progress
        self._found, self._found_progress = table, progress  # where they are, once connected
        identifiers = sql.SQL(", ").join(map(sql.Identifier, columns))
        self._parts: dict[str, Any] = {
            "columns": identifiers,
            "keys": sql.SQL(", ").join(map(sql.Identifier, target.keys)),
            "action": self._action(),
        }

    def write(self, rows: Iterable[Sequence[Any]], task: Task | None = None) -> Written:
        """Write rows, unless the note says that it has been done.

        Args:
            rows: values in the order of the columns.
            task: which part of a stream they are; None for rows of a batch job, which leave no note.

        Raises:
            InvalidConfig: if the DSN cannot be read.
            StoreUnavailable: if the database is away; nothing was written, or all of it (try again).
            OutboxTableError: if the table or a value does not fit.
        """
        connection, (self._found, self._found_progress) = connect(
            self._target.dsn, self._table, self._progress_name, what=f"table {self._table}"
        )
        self._parts["target"] = sql.SQL(self._found.quoted)
        self._parts["progress"] = sql.SQL(with_parameters(self._found_progress))  # its statements all have parameters
        try:
            with connection:
                if task is not None:
                    self._make_progress_table(connection)
                    if self._is_done(connection, task):
                        return Written(sum(1 for _ in rows), skipped=True)
                count = self._upsert(connection, rows)
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
        if note is None:
            return False
        run, batch = note
        if run != task.run:
            return False
        return bool(batch > task.batch or (batch == task.batch and not self._target.keys))

    def _make_progress_table(self, connection: psycopg.Connection[Any]) -> None:
        found = connection.execute("SELECT to_regclass(%s)", (self._found_progress.quoted,)).fetchone()
        if found is not None and found[0] is None:
            connection.execute("SELECT pg_advisory_xact_lock(%s)", (_LOCK,))
            connection.execute(self._sql(_CREATE_PROGRESS), ())
        connection.commit()

    def _upsert(self, connection: psycopg.Connection[Any], rows: Iterable[Sequence[Any]]) -> int:
        types = self._types(connection)
        iterator = iter(rows)
        first = next(iterator, None)
        if first is None:
            return 0
        connection.execute(self._sql(_STAGE))
        count = 0
        with connection.cursor().copy(self._sql(_COPY)) as copy:
            for count, row in enumerate(_fitting([first], iterator, types), start=1):
                copy.write_row((*row, count))
        connection.execute(self._sql(_UPSERT if self._target.keys else _APPEND))
        return count

    def _types(self, connection: psycopg.Connection[Any]) -> list[str]:
        """The types of our columns in the table."""
        found = dict(connection.execute(_COLUMNS, (self._found.quoted,)).fetchall())
        if not found:
            raise OutboxTableError(f"table {self._table} does not exist; create it before the query starts")
        strangers = [name for name in self._names if name not in found]
        if strangers:
            raise OutboxTableError(
                f"table {self._table} has no column(s) {', '.join(strangers)}; it has {', '.join(found)}"
            )
        return [found[name] for name in self._names]

    def _action(self) -> sql.Composable:
        values = [name for name in self._names if name not in self._target.keys]
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


def _fitting(first: list[Sequence[Any]], others: Iterator[Sequence[Any]], types: list[str]) -> Iterator[Sequence[Any]]:
    """The rows with structures as JSON, where the table wants JSON, and lists as arrays elsewhere."""
    as_json = [position for position, kind in enumerate(types) if kind in {"json", "jsonb"}]
    if not as_json:
        yield from first
        yield from others
        return
    for source in (first, others):
        for row in source:
            values = list(row)
            for position in as_json:
                if values[position] is not None and not isinstance(values[position], str):
                    values[position] = json.dumps(_plain(values[position]), default=str)
            yield values


def _plain(value: Any) -> Any:
    """A value as JSON can hold it: bytes as text, a NaN as null."""
    if isinstance(value, dict):
        return {str(name): _plain(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, bytes):
        return value.decode("utf-8", "replace")
    return None if isinstance(value, float) and not math.isfinite(value) else value
