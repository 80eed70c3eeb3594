"""`outbox_django.asgi.with_lifespan`: a context is entered when the server starts, and left when it shuts down."""

import asyncio
from contextlib import asynccontextmanager

import pytest

from outbox_django.asgi import with_lifespan


def _live(*, fails_at=None):
    """Start and shut down; return what was sent, and what happened, in order."""
    events = []

    @asynccontextmanager
    async def context():
        if fails_at == "startup":
            raise ValueError("no database")
        events.append("entered")
        yield
        if fails_at == "shutdown":
            raise ValueError("no end")
        events.append("left")

    async def application(scope, *_):
        events.append(scope["type"])

    async def send(message):
        events.append((message["type"], message.get("message")))

    async def run():
        received = asyncio.Queue()
        for message in ("startup", "shutdown"):
            received.put_nowait({"type": f"lifespan.{message}"})
        wrapped = with_lifespan(application, context())
        await wrapped({"type": "http"}, received.get, send)
        await wrapped({"type": "lifespan"}, received.get, send)

    try:
        asyncio.run(run())
    except ValueError as error:
        events.append(str(error))
    return events


def _complete(phase):
    return f"lifespan.{phase}.complete", None


def test_it_lives_as_long_as_the_server():
    """Requests go to the application, the lifespan to the context."""
    assert _live() == ["http", "entered", _complete("startup"), "left", _complete("shutdown")]


@pytest.mark.parametrize(
    ("phase", "events"),
    [
        ("startup", [("lifespan.startup.failed", "no database"), "no database"]),
        (
            "shutdown",
            ["entered", ("lifespan.startup.complete", None), ("lifespan.shutdown.failed", "no end"), "no end"],
        ),
    ],
)
def test_errors_are_told(phase, events):
    """The server hears of an error in either phase."""
    assert _live(fails_at=phase) == ["http", *events]
