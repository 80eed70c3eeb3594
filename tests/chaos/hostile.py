"""Hostile rows: a role with INSERT alone writes every row of `tests.hostile_rows` all the time.

It cleans up behind itself, as an operator would: holds of such rows are released and the rows removed, so that a long
run does not measure the growth of the table of holds.
"""

import random
import threading
import time
from collections import Counter
from contextlib import suppress
from typing import Self

import psycopg
from psycopg import sql
from psycopg.conninfo import make_conninfo

from tests.hostile_rows import HostileRow, OutboxNames, hostile_rows, insert

_ROLE = "hostile_writer"
_PASSWORD = "of no use elsewhere"
_ROWS_PER_SECOND = 25
_CLEANED_EVERY_SECONDS = 4.0
_HEAVY_SHARE = 0.1
_IS_OF_LOAD = "octet_length(kafka_value) > 0 AND get_byte(kafka_value, 0) BETWEEN 48 AND 57"


class HostileWriter:
    """A writer of hostile rows until `stop`. A context manager, which begins at once.

    Args:
        dsn: the database, as its owner.
        table: the outbox.
        topics: topics of others' records, too.
        constrained: whether the table keeps its CHECK constraints; without them it is one of an older release.

    Attributes:
        written: counts of the written rows, and of the refused ones by the database's error.
    """

    def __init__(self, dsn: str, table: str, topics: list[str], *, constrained: bool) -> None:
        self.written: Counter[str] = Counter()
        self._dsn = dsn
        self._table = table
        with psycopg.connect(dsn) as connection:
            database = connection.info.dbname
            self._make_role(connection)
            if not constrained:
                self._drop_constraints(connection)
        names = OutboxNames.of(f"{database}.public.{table}")
        self._rows = [row for topic in topics for row in hostile_rows(names, topic)]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Stop, and clean up."""
        if not self._stopping.is_set():
            self._stopping.set()
            self._thread.join()
            self._clean()

    def _make_role(self, connection: psycopg.Connection) -> None:
        if not connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [_ROLE]).fetchone():
            connection.execute(f"CREATE ROLE {_ROLE} LOGIN PASSWORD '{_PASSWORD}'")
        connection.execute(f"GRANT INSERT ON {self._table} TO {_ROLE}")

    def _drop_constraints(self, connection: psycopg.Connection) -> None:
        found = connection.execute(
            "SELECT conname FROM pg_constraint WHERE conrelid = %s::regclass AND contype = 'c'", [self._table]
        ).fetchall()
        for (name,) in found:
            drop = sql.SQL("ALTER TABLE {} DROP CONSTRAINT {}")
            connection.execute(drop.format(sql.Identifier(self._table), sql.Identifier(name)))

    def _run(self) -> None:
        generator, cleaned_at = random.Random(), time.monotonic()
        as_writer = make_conninfo(self._dsn, user=_ROLE, password=_PASSWORD)
        connection: psycopg.Connection | None = None
        while not self._stopping.wait(generator.expovariate(_ROWS_PER_SECOND)):
            row = generator.choice(self._rows)
            if row.is_heavy and generator.random() > _HEAVY_SHARE:
                continue
            try:
                connection = connection or psycopg.connect(as_writer, autocommit=True)
                self._write(connection, row)
                if time.monotonic() - cleaned_at > _CLEANED_EVERY_SECONDS:
                    cleaned_at = time.monotonic()
                    self._clean()
            except psycopg.OperationalError:  # the server is away
                if connection is not None:
                    connection.close()
                connection = None
                self._stopping.wait(0.5)
        if connection is not None:
            connection.close()

    def _write(self, connection: psycopg.Connection, row: HostileRow) -> None:
        try:
            connection.execute(*insert(self._table, row))
            self.written["written"] += 1
        except psycopg.OperationalError:
            raise
        except psycopg.Error as error:
            self.written[type(error).__name__] += 1

    def _clean(self) -> None:
        """Remove the held hostile rows, and then their holds; the other rows are left to the harvester."""
        held = f"SELECT record_id FROM {self._table}_hold WHERE record_id IS NOT NULL"
        strange = f"NOT coalesce({_IS_OF_LOAD}, false)"
        with suppress(psycopg.OperationalError), psycopg.connect(self._dsn) as connection:
            connection.execute(f"DELETE FROM {self._table} WHERE id IN ({held}) AND {strange}")
            connection.execute(
                f"DELETE FROM {self._table}_hold AS hold WHERE record_id IS NOT NULL "
                f"AND NOT EXISTS (SELECT FROM {self._table} AS row WHERE row.id = hold.record_id)"
            )
