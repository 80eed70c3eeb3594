"""The connection on which PostgreSQL tells of inserts: LISTEN, for the trigger of `notify_sql`.

The channel is named after the table's oid, which no two tables share. A table that is dropped and made anew has another
one, so `check` must be called now and then; that also shows a connection that died without a word.

A notice only ever shortens a wait. A pooler that lends its connections for one transaction at a time (PgBouncer's
`pool_mode=transaction`) accepts the LISTEN and delivers no notice. So `open` sends one over a second connection, and
waits for it.
"""

from __future__ import annotations

import selectors
import socket
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from uuid import uuid4

import psycopg

from outbox_core.errors import OutboxError, StoreSilent, StoreUnavailable
from outbox_core.schema import NOTIFY_CHANNEL_PREFIX, TableName
from outbox_core.stores.postgres.connection import Connection, connect_to_primary, one_line
from outbox_core.stores.postgres.deadlines import ConnectionGivenUp

_PROBE_SECONDS = 2.0
_STATEMENT_SECONDS = 10.0  # they read the catalogs

_FIND = """
SELECT c.oid::bigint, EXISTS (
    SELECT FROM pg_trigger AS t JOIN pg_proc AS p ON p.oid = t.tgfoid
    WHERE t.tgrelid = c.oid AND t.tgenabled IN ('O', 'A') AND p.prosrc LIKE %(mark)s)
FROM pg_class AS c WHERE c.oid = to_regclass(%(table)s)
"""


class NoNotices(OutboxError):
    """Notices of commits do not come; the message says why and what to do. Harvesting goes on by polling."""


class CommitNotices:
    """One LISTEN connection. Used by one thread, apart from `interrupt`."""

    def __init__(self, data_source: str, table: str, *, application_name: str) -> None:
        self._data_source = data_source
        self._name = self._table = TableName.parse(table)  # as it was named; with its schema, once it was found
        self._application_name = application_name
        self._connection: Connection | None = None
        self._channel = ""
        self._heard: list[str] = []  # payloads; they may also arrive with the answer to a statement
        self._bell, self._button = socket.socketpair()
        self._bell.setblocking(False)
        self._button.setblocking(False)

    def open(self) -> None:
        """Connect, listen, and check that notices come, else raise NoNotices."""
        self.close()
        with self._closed_on_error():
            self._connection, (self._table,) = self._connect(self._name)
            self._connection.add_notify_handler(lambda notice: self._heard.append(notice.payload))
            self._channel = self._find_channel(self._connection)
            self._connection.execute(f"LISTEN {self._channel}".encode())
            self._probe()

    def check(self) -> None:
        """Check that the connection lives and that the trigger is still there; errors as of `open`."""
        with self._closed_on_error():
            if self._connection is None or self._find_channel(self._connection) != self._channel:
                self.open()

    @contextmanager
    def _closed_on_error(self) -> Iterator[None]:
        try:
            yield
        except ConnectionGivenUp as error:
            self.close()
            raise StoreSilent(str(error)) from None
        except psycopg.Error as error:
            self.close()
            raise StoreUnavailable(one_line(error)) from None
        except OutboxError:
            self.close()
            raise

    def wait(self, seconds: float) -> bool:
        """Wait for a notice, at most so long; return True if one came. Also returns after `interrupt`."""
        try:
            if not self._heard:
                self._sleep(seconds)
        except (psycopg.Error, OSError) as error:
            self.close()
            raise StoreUnavailable(f"the connection that listens was lost: {error}") from None
        heard, self._heard = self._heard, []
        return bool(heard)

    def interrupt(self) -> None:
        """End a `wait` under way, or else the next one. From any thread."""
        with suppress(OSError):  # full (nobody waits), or closed
            self._button.send(b"!")

    def close(self) -> None:
        """Close the connection; `open` makes another."""
        connection, self._connection = self._connection, None
        self._heard = []
        if connection is not None:
            connection.close()

    def dispose(self) -> None:
        """Close everything, for good."""
        self.close()
        self._bell.close()
        self._button.close()

    def _connect(self, *names: TableName) -> tuple[Connection, list[TableName]]:
        connection, found = connect_to_primary(
            self._data_source, self._application_name, *names, statement_timeout=_STATEMENT_SECONDS
        )
        connection.purpose = "LISTEN for notices"
        return connection, found

    def _find_channel(self, connection: Connection) -> str:
        parameters = {"table": self._table.quoted, "mark": f"%{NOTIFY_CHANNEL_PREFIX}%"}
        row = connection.execute(_FIND, parameters).fetchone()
        if row is None or not row[1]:
            raise NoNotices(
                f"notify is on, but no trigger of table {self._name} tells of inserts; "
                f"`outbox schema --table {self._name} --notify` prints it"
            )
        return f"{NOTIFY_CHANNEL_PREFIX}{row[0]}"

    def _probe(self) -> None:
        token = str(uuid4())
        connection, _ = self._connect()
        with connection as second:
            second.execute("SELECT pg_notify(%s, %s)", (self._channel, token))
        give_up_at = time.monotonic() + _PROBE_SECONDS
        while token not in self._heard and (remaining := give_up_at - time.monotonic()) > 0:
            self._sleep(remaining)
        if token in self._heard:
            return
        raise NoNotices(
            "notify is on, but notices do not come through: behind a pooler of transactions, the harvester needs "
            "the address of the database itself"
        )

    def _sleep(self, seconds: float) -> None:
        connection = self._connection
        with selectors.DefaultSelector() as selector:
            selector.register(self._bell, selectors.EVENT_READ)
            if connection is not None:
                selector.register(connection.fileno(), selectors.EVENT_READ)
            selector.select(seconds)
        with suppress(BlockingIOError):
            self._bell.recv(4096)
        if connection is not None:
            connection.pgconn.consume_input()  # raises if the connection was closed at the other end
            while notice := connection.pgconn.notifies():
                self._heard.append(notice.extra.decode(errors="replace"))
