"""Connections to PostgreSQL whose calls end by themselves: no thread waits for a server that says nothing.

`statement_timeout` is the server's, and `connect_timeout` covers the handshake only. A backend that stands still behind
a live kernel, a pooler in session mode that has lost its server, or a proxy whose other end is gone answer nothing, and
TCP is content. So each wait for an answer has a deadline of this side: `patience` seconds without a byte or room for
one, after which the connection is shut down under the driver. The driver then ends the call as for a server that went
away, and the call raises `ConnectionGivenUp`, which says how long there was no answer, from where and to what.

psycopg carries out each call on a connection, `COPY` and `COMMIT` included, as a generator that `Connection.wait`
resumes when the socket is ready, and with nothing in hand each tenth of a second. The deadline is looked at there, on
the thread that waits: no other thread is needed, a descriptor cannot be another connection's by then, and a process
that was forked has the same.

A statement that reads a whole table has no such timeout, and may be silent for long. While a harvester waits for one,
it sees now and then if the server takes another connection: one that does not is not at work on the statement, either.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Generator
from typing import Any, TypeVar

import psycopg

from outbox_core.row_security import PolicyWatch

SETUP_SECONDS = 10.0
"""The patience with a session that is being set up: a few statements that read the catalogs."""

GRACE_SECONDS = 10.0
"""The patience beyond the statement timeout in force, within which the server should have said that it cancels."""

LONG_SECONDS = 900.0
"""The patience with statements that have no timeout, as they read whole tables or build indexes."""

LOOK_SECONDS = 15.0
"""The silence of a statement that reads a whole table before it is seen if the server takes another connection."""

_LOOK_TIMEOUT_SECONDS = 10

T = TypeVar("T")
Row_co = TypeVar("Row_co", covariant=True)


class ConnectionGivenUp(psycopg.OperationalError):
    """The server did not answer within the connection's patience; the connection is closed."""


class BoundedConnection(psycopg.Connection[Row_co]):
    """A connection that is given up when the server does not answer. Used by one thread at a time.

    Attributes:
        patience: seconds without a byte of an answer.
        purpose: the statement or the work under way, for the error: no values of rows.
        looks_after: seconds of silence after which, again and again, it is seen if the server takes another connection.
        role: whose rights its statements have, which ALTER ROLE may have set; "" until `pin_search_path` has asked.
        policies: the watch over deliberate policies, if its tables have any (`row_security`).
    """

    patience = SETUP_SECONDS
    purpose = "the session's first statements"
    looks_after = float("inf")
    role = ""
    policies: PolicyWatch | None = None
    _looked_at = 0.0
    _given_up: ConnectionGivenUp | None = None

    def wait(self, gen: Generator[Any, Any, T], *args: Any, **options: Any) -> T:
        """Wait as the driver does, within `patience`. Raises ConnectionGivenUp."""
        return super().wait(self._bounded(gen), *args, **options)

    def set_patience(self, statement_timeout: float, *, purpose: str | None = None) -> None:
        """Fit the patience to a statement timeout in seconds, 0.0 for none."""
        self.patience = statement_timeout + GRACE_SECONDS if statement_timeout else LONG_SECONDS
        if purpose is not None:
            self.purpose = purpose

    def _bounded(self, gen: Generator[Any, Any, T]) -> Generator[Any, Any, T]:
        try:
            wanted = next(gen)
            heard_at = time.monotonic()
            while True:
                ready = yield wanted
                if ready:
                    heard_at = time.monotonic()
                elif self._given_up is None and (complaint := self._complaint(heard_at)):
                    self._given_up = ConnectionGivenUp(
                        f"{self._place()} {complaint} ({self.purpose}); the connection was given up"
                    )
                    self._shut_down()
                wanted = gen.send(ready)
        except StopIteration as end:
            value: T = end.value
            return value
        except psycopg.Error as error:
            if self._given_up is not None:
                raise self._given_up from error
            raise

    def _complaint(self, heard_at: float) -> str:
        """Return why there is nothing to wait for any more; '' if there is."""
        silence = time.monotonic() - heard_at
        if silence >= self.patience:
            return f"has not answered for {self.patience:.0f} s"
        if silence < self.looks_after or time.monotonic() - self._looked_at < self.looks_after:
            return ""
        takes_others = self._takes_others()
        self._looked_at = time.monotonic()
        return "" if takes_others else f"has not answered for {silence:.0f} s, and takes no other connection"

    def _takes_others(self) -> bool:
        """Tell whether the server answers another connection, be it to refuse it."""
        info = self.info
        settings: dict[str, Any] = {
            "host": info.host,
            "port": info.port,
            "password": info.password,
            "connect_timeout": _LOOK_TIMEOUT_SECONDS,
        }
        try:
            BoundedConnection.connect(info.dsn, **settings).close()
        except psycopg.errors.ConnectionTimeout:
            return False
        except psycopg.Error:
            return True
        return True

    def _place(self) -> str:
        info = self.info
        host = info.host or "the local socket"
        return f"database {info.dbname} at {host if host.startswith('/') else f'{host}:{info.port}'}"

    def _shut_down(self) -> None:
        """End the connection under the driver, which keeps its descriptor, and finds the end of the stream."""
        ours = socket.socket(fileno=self.pgconn.socket)  # needs no further descriptor: there may be none
        try:
            ours.shutdown(socket.SHUT_RDWR)
        except OSError:
            pass  # ended by the other side at this moment
        finally:
            ours.detach()
