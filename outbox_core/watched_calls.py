"""Deadlines for our statements on connections that others have made, of any driver: Django's, or a claim store's.

Connections of our own end their calls by themselves (`outbox_core.stores.postgres.deadlines`). A driver that waits in C
cannot be asked to. So one thread of the process watches the calls under way, and shuts down the socket of one that has
no answer by its deadline; the driver then raises as for a server that went away.

Two invariants make that safe whatever happens at the same moment:

- A call is shut down only while it is registered, and under the lock under which its end removes it. So it never meets
  the next call on the connection.
- What is shut down is a duplicate of the descriptor, made when the call began. The driver may close its own in the
  middle, and the number may be another connection's at once; the duplicate still leads to the old one.

A forked process has neither the thread nor the calls of its parent; the first call starts a thread of its own.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, Final

_log = logging.getLogger(__name__)

SHORT_SECONDS: Final = 60.0
"""The patience with a statement that changes or reads a few rows."""

LONG_SECONDS: Final = 900.0
"""The patience with a statement that may read or change many."""


class _Call:
    """One call under way: the duplicate of its socket, its deadline, and, once it was given up, why."""

    def __init__(self, descriptor: int, seconds: float, purpose: str) -> None:
        self.seconds = seconds
        self.purpose = purpose
        self.give_up_at = time.monotonic() + seconds
        self.given_up = ""
        self._socket = socket.socket(fileno=os.dup(descriptor))

    def give_up(self) -> None:
        silence = f"the database{self._place()} has not answered for {self.seconds:.0f} s ({self.purpose})"
        self.given_up = f"{silence}; the connection was given up"
        with suppress(OSError):  # ended by the other side at this moment
            self._socket.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self._socket.close()

    def _place(self) -> str:
        with suppress(OSError):
            address: Any = self._socket.getpeername()
            return f" at {address[0]}:{address[1]}" if isinstance(address, tuple) else f" at {address or 'its socket'}"
        return ""


class _Watch:
    """The calls under way, and the thread that ends those that are late. For any thread."""

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._changed = threading.Condition(threading.Lock())
        self._calls: set[_Call] = set()
        self._thread: threading.Thread | None = None
        self._wakes_at = float("inf")

    def add(self, call: _Call) -> None:
        with self._changed:
            self._calls.add(call)
            if self._thread is None:
                thread = threading.Thread(target=self._run, name="kafka-outbox-deadlines", daemon=True)
                with suppress(RuntimeError):  # no more threads: the call is as it was without us
                    thread.start()
                    self._thread = thread
            if call.give_up_at < self._wakes_at:
                self._changed.notify()

    def remove(self, call: _Call) -> None:
        with self._changed:
            self._calls.discard(call)
        call.close()

    def forget(self) -> None:
        """Begin anew in a process that was forked: the descriptors are copies, and the lock may be held for ever."""
        calls = self._calls
        self._begin()
        for call in calls:
            call.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                now = time.monotonic()
                for call in self._calls:
                    if call.give_up_at <= now and not call.given_up:
                        call.give_up()
                waiting = (call.give_up_at for call in self._calls if not call.given_up)
                self._wakes_at = min(waiting, default=float("inf"))
                self._changed.wait(None if self._wakes_at == float("inf") else self._wakes_at - now)


_watch = _Watch()
os.register_at_fork(after_in_child=_watch.forget)


@contextmanager
def watched(connection: Any, seconds: float, purpose: str) -> Iterator[None]:
    """Give the connection up if the block has not ended in time: it then raises the driver's error for a lost server.

    Args:
        connection: of psycopg 3, psycopg2 or pg8000, or Django's that has one of these.
        seconds: for the whole block, which sends statements on this connection alone.
        purpose: for the log line; no values of rows.
    """
    descriptor, call = _descriptor_of(connection), None
    if descriptor is not None:
        with suppress(OSError):  # no descriptor is left: the call is as it was without us
            call = _Call(descriptor, seconds, purpose)
    if call is None:  # or the connection is closed, or of another driver
        yield
        return
    _watch.add(call)
    try:
        yield
    except Exception as error:
        if call.given_up:
            error.add_note(call.given_up)
        raise
    finally:
        _watch.remove(call)
        if call.given_up:  # here, as a slow handler of the log must hold up nobody else's calls
            _log.warning("%s", call.given_up)


def _descriptor_of(connection: Any) -> int | None:
    """Return the descriptor of a connection's socket, None if there is none."""
    raw = getattr(connection, "connection", connection)  # Django's, which may not be connected
    source = getattr(raw, "_usock", raw)  # pg8000 keeps a socket
    try:
        descriptor: int = source.fileno()
    except Exception:
        return None
    return descriptor if descriptor >= 0 else None
