"""The console as an ASGI application, to mount in FastAPI, Starlette or any other ASGI server, below any prefix.

    from outbox_core.console.asgi import ConsoleApp

    app.mount("/ops/outbox", ConsoleApp({"shop": load_config(read_document("outbox.yaml"))}, authorize=whose_request))

`authorize`, a function or a coroutine function, gets the scope of each request and returns a `User`, or None to refuse.
Without it nobody gets in.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Collection, Mapping, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from outbox_core.console.access import NOT_AUTHORIZED, User, checked_user
from outbox_core.console.console import Console
from outbox_core.console.messages import LONGEST_BODY_BYTES, Request, Response

if TYPE_CHECKING:
    from outbox_core.config import HarvestConfig

__all__ = ["ConsoleApp"]

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]
Authorize = Callable[[Scope], User | None] | Callable[[Scope], Awaitable[User | None]]

_THREADS = 8


class ConsoleApp:
    """An ASGI application on asyncio. Its questions wait on threads of its own, so that the event loop does not.

    Args:
        outboxes: the settings of each outbox, by the name that it has on the page.
        authorize: gets the scope of a request, and returns its user, or None to refuse it.
        trusted_origins: further origins from which actions are taken, for proxies that do not pass Host on.

    Raises:
        InvalidConfig: for outboxes that cannot be shown.
    """

    def __init__(
        self,
        outboxes: Mapping[str, HarvestConfig],
        *,
        authorize: Authorize | None = None,
        trusted_origins: Collection[str] = (),
    ) -> None:
        self._console = Console(outboxes, trusted_origins=trusted_origins)
        self._authorize = authorize
        self._threads = ThreadPoolExecutor(_THREADS, "outbox-console")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        if scope["type"] == "lifespan":
            await _live(receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        else:
            await self._answer(scope, receive, send)

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        user = await self._user(scope)
        refusal = NOT_AUTHORIZED if self._authorize is None else ""
        body = b"" if user is None else await _body(scope, receive)  # nobody makes us keep what is refused
        request = _request_of(scope, body, user, refusal)
        loop = asyncio.get_running_loop()
        await _send(await loop.run_in_executor(self._threads, self._console.handle, request), send)

    async def _user(self, scope: Scope) -> User | None:
        if self._authorize is None:
            return None
        answer: Any = self._authorize(scope)
        return checked_user(await answer if inspect.isawaitable(answer) else answer)


def _request_of(scope: Scope, body: bytes, user: User | None, refusal: str) -> Request:
    headers: dict[str, str] = {}
    for name, value in scope["headers"]:
        known = name.decode("latin-1").lower()
        # HTTP/2 may split cookies into several headers.
        headers[known] = f"{headers[known]}; {value.decode('latin-1')}" if known in headers else value.decode("latin-1")
    base_path = scope.get("root_path", "").rstrip("/")
    return Request(
        method=scope["method"],
        # By the specification `path` has the mount's prefix; servers and frameworks of old leave it out.
        path=scope["path"].removeprefix(base_path),
        base_path=base_path,
        query=scope.get("query_string", b"").decode("latin-1"),
        headers=headers,
        body=body,
        is_secure=scope.get("scheme") == "https",
        user=user,
        refusal=refusal,
    )


async def _body(scope: Scope, receive: Receive) -> bytes:
    if scope["method"] != "POST":
        return b""
    body = bytearray()
    while len(body) <= LONGEST_BODY_BYTES:
        message = await receive()
        body += message.get("body", b"")
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            break
    return bytes(body)


async def _send(answer: Response, send: Send) -> None:
    headers = [*answer.headers, ("Content-Length", str(len(answer.body)))]
    encoded = [(name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in headers]
    await send({"type": "http.response.start", "status": answer.status, "headers": encoded})
    await send({"type": "http.response.body", "body": answer.body})


async def _live(receive: Receive, send: Send) -> None:
    while True:
        message = await receive()
        await send({"type": f"{message['type']}.complete"})
        if message["type"] == "lifespan.shutdown":
            return
