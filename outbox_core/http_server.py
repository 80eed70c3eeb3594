"""A small HTTP server on one thread, for public pages: it costs the same whatever clients do.

Every connection gets one answer and is closed. There are at most `MOST_CONNECTIONS`; one more closes the oldest, so
that idle clients do not keep others out. A request has a deadline as a whole, its answer included.
"""

from __future__ import annotations

import errno
import logging
import selectors
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple, Self
from urllib.parse import urlsplit

MOST_CONNECTIONS = 16
_REQUEST_SECONDS = 10.0
_LONGEST_REQUEST_BYTES = 16 * 1024
_READ_BYTES = 4096
_TICK_SECONDS = 0.1
_BACKLOG = 64
_EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM}

_log = logging.getLogger(__name__)


class Request(NamedTuple):
    """A request without its body, which no page here needs; names of headers are in lower case."""

    method: str
    path: str
    query: str
    headers: dict[str, str]


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer, with headers apart from length and connection; HEAD leaves out the body."""

    status: int
    phrase: str
    headers: list[tuple[str, str]]
    body: bytes

    def encode(self, *, head_only: bool) -> bytes:
        """Return the answer's bytes."""
        headers = [*self.headers, ("Content-Length", str(len(self.body))), ("Connection", "close")]
        lines = [f"HTTP/1.1 {self.status} {self.phrase}", *(f"{name}: {value}" for name, value in headers), "", ""]
        return "\r\n".join(lines).encode("latin-1", "replace") + (b"" if head_only else self.body)


class _Connection:
    def __init__(self, client: socket.socket) -> None:
        self.client = client
        self.deadline = time.monotonic() + _REQUEST_SECONDS
        self.received = bytearray()
        self.unsent = memoryview(b"")


class HttpServer:
    """A server on a thread of its own until closed. `respond` is called there, so it must be quick."""

    def __init__(self, host: str, port: int, respond: Callable[[Request], Answer], name: str) -> None:
        self._respond = respond
        self._connections: dict[socket.socket, _Connection] = {}  # oldest first
        self._closing = threading.Event()
        self._listener = _listen(host, port)
        self._port: int = self._listener.getsockname()[1]
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._port

    @property
    def connections(self) -> int:
        """Number of open connections."""
        return len(self._connections)

    def close(self) -> None:
        """Stop serving, drop all connections, free the port. Idempotent."""
        self._closing.set()
        self._thread.join()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _run(self) -> None:
        try:
            while not self._closing.is_set():
                for key, _ in self._selector.select(_TICK_SECONDS):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif (connection := self._connections.get(key.data)) is not None:
                        self._step(connection)
                self._drop_late()
        finally:
            for connection in list(self._connections.values()):
                self._drop(connection)
            self._selector.close()
            self._listener.close()

    def _accept(self) -> None:
        try:
            client, _ = self._listener.accept()
        except OSError as error:
            if error.errno in _EXHAUSTED and not self._drop_oldest():
                self._closing.wait(_TICK_SECONDS)  # the client goes on waiting, so that select would return at once
            return
        if len(self._connections) >= MOST_CONNECTIONS:
            self._drop_oldest()
        client.setblocking(False)
        self._connections[client] = _Connection(client)
        self._selector.register(client, selectors.EVENT_READ, client)

    def _step(self, connection: _Connection) -> None:
        try:
            if not connection.unsent:
                self._read(connection)
            if connection.unsent:
                self._write(connection)
        except BlockingIOError:
            return
        except OSError as error:
            _log.debug("a client went away: %s", error)
            self._drop(connection)

    def _read(self, connection: _Connection) -> None:
        part = connection.client.recv(_READ_BYTES)
        if not part:
            self._drop(connection)
            return
        connection.received += part
        end = _end_of_head(connection.received)
        size = end if end >= 0 else len(connection.received)
        if size > _LONGEST_REQUEST_BYTES:
            connection.unsent = memoryview(_TOO_LARGE)
        elif end >= 0:
            connection.unsent = memoryview(self._answer(bytes(connection.received[:end])))
        else:
            return
        self._selector.modify(connection.client, selectors.EVENT_WRITE, connection.client)

    def _write(self, connection: _Connection) -> None:
        sent = connection.client.send(connection.unsent)
        connection.unsent = connection.unsent[sent:]
        if connection.unsent:
            return
        with suppress(OSError):
            # What was not read, a body for example, would turn the close into a reset, and that discards the answer.
            connection.client.shutdown(socket.SHUT_WR)
            connection.client.recv(_LONGEST_REQUEST_BYTES)
        self._drop(connection)

    def _answer(self, head: bytes) -> bytes:
        request = _parse(head)
        if request is None:
            return _BAD_REQUEST
        try:
            answer = self._respond(request)
        except Exception:
            _log.debug("no answer to %s", request.path, exc_info=True)
            return _FAILED
        return answer.encode(head_only=request.method == "HEAD")

    def _drop_late(self) -> None:
        at = time.monotonic()
        for connection in list(self._connections.values()):
            if connection.deadline < at:
                _log.debug("a client was too slow")
                self._drop(connection)

    def _drop_oldest(self) -> bool:
        oldest = next(iter(self._connections.values()), None)
        if oldest is not None:
            self._drop(oldest)
        return oldest is not None

    def _drop(self, connection: _Connection) -> None:
        del self._connections[connection.client]
        self._selector.unregister(connection.client)
        connection.client.close()


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind((host, port))
        listener.listen(_BACKLOG)
        listener.setblocking(False)
    except BaseException:
        listener.close()
        raise
    return listener


def _end_of_head(received: bytearray) -> int:
    """Return where the head of a request ends, -1 if it has not ended yet."""
    ends = [end for end in (received.find(b"\r\n\r\n"), received.find(b"\n\n")) if end >= 0]
    return min(ends, default=-1)


def _parse(head: bytes) -> Request | None:
    first, *lines = head.decode("latin-1").splitlines() or [""]
    words = first.split(" ")
    if len(words) != 3 or words[2] not in ("HTTP/1.0", "HTTP/1.1") or not words[0].isalpha():
        return None
    try:
        target = urlsplit(words[1])
    except ValueError:
        return None
    headers = {name.strip().lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
    return Request(words[0], target.path, target.query, headers)


def text_answer(status: int, phrase: str, text: str, content_type: str = "text/plain; charset=utf-8") -> Answer:
    """Return an answer of text."""
    return Answer(status, phrase, [("Content-Type", content_type)], text.encode())


_BAD_REQUEST = text_answer(400, "Bad Request", "not an HTTP request\n").encode(head_only=False)
_TOO_LARGE = text_answer(431, "Request Header Fields Too Large", "too long\n").encode(head_only=False)
_FAILED = text_answer(500, "Internal Server Error", "no answer; see the log at debug level\n").encode(head_only=False)
