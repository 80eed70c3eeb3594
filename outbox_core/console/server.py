"""The HTTP server of `outbox console`: a thread for each request, and a bounded number of them.

Without a token it answers only requests for the machine's own names: another site's name could be made to lead here by
its DNS, and its pages would then be of the console's origin.
"""

from __future__ import annotations

import logging
import re
import socket
import socketserver
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from typing import Any, Self
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer

from outbox_core.console.access import User
from outbox_core.console.console import LONGEST_LOGIN_BYTES, Console
from outbox_core.console.messages import LONGEST_BODY_BYTES
from outbox_core.console.wsgi import Environ, StartResponse, request_of, send
from outbox_core.printable import printable

_log = logging.getLogger(__name__)

_MOST_REQUESTS = 32
_CLIENT_SECONDS = 15.0
_REQUEST_SECONDS = 30.0  # for a body, from its head on
_HEAD_SECONDS = 5.0  # for a head, with the body if it is that of a login
_PLACE_SECONDS = 0.5
_TICK_SECONDS = 0.2
_CONNECTION = "kafka_outbox.connection"  # in the environ
_TEXT = (("Content-Type", "text/plain; charset=utf-8"), ("Server", "kafka-outbox"))
_HOST = re.compile(r"(?P<name>\[[0-9A-Fa-f:.]+\]|[^\[\]@/:]+)(?::[0-9]+)?")
_OWN_NAMES = frozenset({"localhost", "127.0.0.1", "::1"})


class _Handler(WSGIRequestHandler):
    timeout = _CLIENT_SECONDS

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  the name in the base class
        """Log without the query, in which keys may stand."""
        _log.debug("%s %s", self.address_string(), printable(format % args).partition("?")[0])

    def get_environ(self) -> dict[str, Any]:
        """Return the environ of a request, with its connection."""
        return {**super().get_environ(), _CONNECTION: self.connection}

    def handle(self) -> None:
        """Answer one request; a client that is too slow, or gone, is no error."""
        try:
            super().handle()
        except (TimeoutError, ConnectionError) as error:
            _log.debug("a client went away: %s", error)


class _Server(socketserver.ThreadingMixIn, WSGIServer):
    daemon_threads = True
    request_queue_size = 64

    def __init__(self, host: str, port: int) -> None:
        self._slots = threading.BoundedSemaphore(_MOST_REQUESTS)
        # By connection: when to end those whose request has not come whole, the oldest first.
        self._unfinished: dict[Any, float] = {}
        if ":" in host:
            self.address_family = socket.AF_INET6
        super().__init__((host, port), _Handler)

    def server_bind(self) -> None:
        """Bind, without asking DNS for the host's name."""
        socketserver.TCPServer.server_bind(self)
        self.server_name, self.server_port = self.server_address[:2]  # type: ignore[assignment]
        self.setup_environ()

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer on a thread, if there are not too many."""
        if not self._slots.acquire(blocking=False) and not self._take_place():
            self.shutdown_request(request)
            return
        self._unfinished[request] = time.monotonic() + _HEAD_SECONDS
        try:
            super().process_request(request, client_address)
        except Exception:  # no thread can be had
            self._end(request)
            raise

    def _take_place(self) -> bool:
        """Take the place of the oldest client that has not sent its whole request; return False if none has one."""
        oldest = next(iter(self._unfinished.copy()), None)
        if oldest is None:
            return False
        self._unfinished.pop(oldest, None)  # or it would be ended again in the place of the next one
        _end_reading(oldest)
        return self._slots.acquire(timeout=_PLACE_SECONDS)

    def long_body_comes(self, request: Any) -> None:
        """Note that the head of a request was read, and that its body may take longer."""
        self._unfinished[request] = time.monotonic() + _REQUEST_SECONDS  # it stays as old as it is

    def has_come(self, request: Any) -> None:
        """Note that a request was read: it keeps its place."""
        self._unfinished.pop(request, None)

    def service_actions(self) -> None:
        """End requests that do not come to their end: a byte now and then must not keep others out."""
        now = time.monotonic()
        for request, end in self._unfinished.copy().items():
            if now > end:
                _end_reading(request)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        """Answer, and let another one in."""
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._end(request)

    def _end(self, request: Any) -> None:
        self._unfinished.pop(request, None)
        self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Log what failed."""
        del request
        _log.debug("no answer to %s", client_address, exc_info=True)


def _end_reading(request: Any) -> None:
    with suppress(OSError):
        request.shutdown(socket.SHUT_RD)  # an answer may go on


class ConsoleServer:
    """A console at an address, from its making until it is closed.

    Args:
        console: answers the requests.
        host: address to listen on.
        port: 0 for any free one.
        user: everyone, where the console has no login of its own. Then only requests for the machine's own names are
            answered.

    Raises:
        OSError: if the address cannot be had.
    """

    def __init__(self, console: Console, host: str, port: int, user: User | None) -> None:
        self._console = console
        self._user = user
        self._server = _Server(host, port)
        self._server.set_app(self._answer)
        self._host = host

    @property
    def url(self) -> str:
        """The console's address."""
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"http://{host}:{self._server.server_port}/"

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.server_port

    def serve(self) -> None:
        """Answer requests until `stop`."""
        self._server.serve_forever(_TICK_SECONDS)

    def stop(self) -> None:
        """Have `serve` return; for any other thread."""
        self._server.shutdown()

    def close(self) -> None:
        """Free the port. Idempotent."""
        self._server.server_close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _answer(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        try:
            return self._console_answer(environ, start_response)
        except TimeoutError:
            start_response("408 Request Timeout", [*_TEXT])
            return [b"the request took too long"]

    def _console_answer(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        host = environ.get("HTTP_HOST", "")
        if self._user is not None and not is_own_name(host):
            text = (
                f"this console answers at {self.url} only, and was asked for {printable(host)[:200]!r}; started with a "
                "token it answers at every name"
            )
            start_response("421 Misdirected Request", [*_TEXT])
            return [text.encode()]
        if environ.get("HTTP_TRANSFER_ENCODING"):
            start_response("411 Length Required", [*_TEXT])
            return [b"send the body with Content-Length"]
        # Whoever logs in, or tries to, has no more to say than a token.
        is_login = environ.get("PATH_INFO", "").strip("/") == "api/login"
        connection = environ[_CONNECTION]
        if not is_login:
            self._server.long_body_comes(connection)
        most_bytes = LONGEST_LOGIN_BYTES if is_login else LONGEST_BODY_BYTES
        request = request_of(environ, self._user, most_bytes=most_bytes)
        self._server.has_come(connection)
        answer = self._console.handle(request)
        # Without this header the server would tell the version of Python.
        return send(answer, lambda status, headers: start_response(status, [*headers, _TEXT[1]]))


def is_own_name(host: str) -> bool:
    """Tell whether a header Host names this machine itself."""
    found = _HOST.fullmatch(host)
    return found is not None and found["name"].strip("[]").lower() in _OWN_NAMES
