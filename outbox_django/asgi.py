"""ASGI's lifespan for a Django project, whose own application has none.

    # asgi.py
    embedded = EmbeddedHarvester(harvest_config())
    application = with_lifespan(get_asgi_application(), embedded)

The context is entered when the server starts and left when it shuts down. See `docs/how-to-embedding.md`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from contextlib import AbstractAsyncContextManager
from typing import Any

__all__ = ["with_lifespan"]

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
Application = Callable[[Any, Any, Any], Awaitable[Any]]


def with_lifespan(application: Application, context: AbstractAsyncContextManager[object]) -> Application:
    """Return an ASGI application that is inside the context while the server runs.

    Args:
        application: the project's own, which gets every request.
        context: entered once, when the server starts. If that raises, the server does not start.
    """

    async def with_context(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] == "lifespan":
            await _live(context, receive, send)
        else:
            await application(scope, receive, send)

    return with_context


async def _live(context: AbstractAsyncContextManager[object], receive: Receive, send: Send) -> None:
    await receive()  # lifespan.startup
    phase = "startup"
    try:
        async with context:
            await send({"type": "lifespan.startup.complete"})
            phase = "shutdown"
            await receive()  # lifespan.shutdown
    except Exception as error:
        await send({"type": f"lifespan.{phase}.failed", "message": str(error)})
        raise
    await send({"type": "lifespan.shutdown.complete"})
