"""The console as a WSGI application, to mount in Flask, Django or any other WSGI server, below any prefix.

    from outbox_core.console.wsgi import ConsoleApp

    console = ConsoleApp({"shop": load_config(read_document("outbox.yaml"))}, authorize=whose_request)
    app.wsgi_app = DispatcherMiddleware(app.wsgi_app, {"/ops/outbox": console})

`authorize` gets the environ of each request and returns a `User`, or None to refuse. Without it nobody gets in.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

from outbox_core.console.access import NOT_AUTHORIZED, User, checked_user
from outbox_core.console.console import Console
from outbox_core.console.messages import LONGEST_BODY_BYTES, Request, Response

if TYPE_CHECKING:
    from outbox_core.config import HarvestConfig

__all__ = ["ConsoleApp"]

Environ = Mapping[str, Any]
StartResponse = Callable[[str, list[tuple[str, str]]], Any]


class ConsoleApp:
    """A WSGI application. Holds nothing of a request, so that any number of processes and threads may serve it.

    Args:
        outboxes: the settings of each outbox, by the name that it has on the page.
        authorize: gets the environ of a request, and returns its user, or None to refuse it.
        trusted_origins: further origins from which actions are taken, for proxies that do not pass Host on.

    Raises:
        InvalidConfig: for outboxes that cannot be shown.
    """

    def __init__(
        self,
        outboxes: Mapping[str, HarvestConfig],
        *,
        authorize: Callable[[Environ], User | None] | None = None,
        trusted_origins: Collection[str] = (),
    ) -> None:
        self._console = Console(outboxes, trusted_origins=trusted_origins)
        self._authorize = authorize

    def __call__(self, environ: Environ, start_response: StartResponse) -> Iterable[bytes]:
        """Answer one request."""
        user = None if self._authorize is None else checked_user(self._authorize(environ))
        refusal = NOT_AUTHORIZED if self._authorize is None else ""
        most = 0 if user is None else LONGEST_BODY_BYTES  # nobody makes us keep what is refused
        return send(self._console.handle(request_of(environ, user, refusal, most_bytes=most)), start_response)


def request_of(environ: Environ, user: User | None = None, refusal: str = "", *, most_bytes: int) -> Request:
    """Return the request of an environ; reads so much of its body, and one byte to tell that it is longer."""
    headers = {
        name.removeprefix("HTTP_").replace("_", "-").lower(): str(value)
        for name, value in environ.items()
        if name.startswith("HTTP_") or name == "CONTENT_TYPE"
    }
    return Request(
        method=environ["REQUEST_METHOD"],
        path=_text(environ.get("PATH_INFO", "")),
        base_path=_text(environ.get("SCRIPT_NAME", "")),
        query=environ.get("QUERY_STRING", ""),
        headers=headers,
        body=_body(environ, most_bytes),
        is_secure=environ.get("wsgi.url_scheme") == "https",
        user=user,
        refusal=refusal,
    )


def send(answer: Response, start_response: StartResponse) -> Iterable[bytes]:
    """Hand an answer to the server."""
    headers = [*answer.headers, ("Content-Length", str(len(answer.body)))]
    start_response(f"{answer.status} {answer.phrase}", headers)
    return [answer.body]


def _body(environ: Environ, most_bytes: int) -> bytes:
    try:
        length = int(environ.get("CONTENT_LENGTH") or 0)
    except ValueError:
        length = 0
    if environ["REQUEST_METHOD"] != "POST" or length <= 0 or not most_bytes:
        return b""
    content: bytes = environ["wsgi.input"].read(min(length, most_bytes + 1))
    return content


def _text(path: str) -> str:
    """Return a path of an environ, which has its bytes as characters."""
    return path.encode("latin-1", "replace").decode(errors="replace")
