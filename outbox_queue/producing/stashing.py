"""Stashing of messages: from a session or connection to the outbox of its framework.

An adapter claims sessions by an entry point of the group `outbox.stash` or `outbox.astash`: its name is the top-level
module of their classes, its value a function of (session, record), as in `sqlalchemy = "outbox_sqlalchemy:stash"`.

On other sessions, taken for DB-API connections, `outbox_core.Stasher` writes into the table `outbox`. For another
table, hand `Queue.record(...)` to the adapter's own object.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import cache
from importlib.metadata import entry_points
from typing import Any

from outbox_core import stasher
from outbox_core.errors import InvalidRecord, MissingExtra
from outbox_core.record import OutboxRecord
from outbox_core.stasher import Stasher

SYNCHRONOUS = "outbox.stash"
ASYNCHRONOUS = "outbox.astash"

_stasher = Stasher()


def stash(session: Any, record: OutboxRecord) -> None:
    """Write a record in the transaction of a session or connection; MissingExtra if its adapter cannot be imported."""
    write = _adapter(_class_of(session), SYNCHRONOUS)
    if write is not None:
        write(session, record)
    elif hasattr(session, "cursor") or _is_kept_in_memory():
        _stasher.stash(session, record)
    else:
        raise InvalidRecord(
            f"stash: expected a session or connection of SQLAlchemy, Django or a DB-API driver, got {_name(session)}"
        )


async def astash(session: Any, record: OutboxRecord) -> None:
    """Write a record in the transaction of an asynchronous session or connection, as `stash` does."""
    write: Callable[[Any, OutboxRecord], Awaitable[None]] | None = _adapter(_class_of(session), ASYNCHRONOUS)
    if write is None and _is_kept_in_memory():
        _stasher.stash(session, record)
        return
    if write is None:
        raise InvalidRecord(
            f"astash: expected an asynchronous session or connection of SQLAlchemy, got {_name(session)}"
        )
    await write(session, record)


def _is_kept_in_memory() -> bool:
    """Return True in a test with an outbox in memory, which takes any stand-in for a session."""
    return stasher.interceptor is not None and not stasher.interceptor.writes


def _class_of(session: object) -> type:
    return type(session)  # hashable to mypy, unlike type(session) of an Any


@cache
def _adapter(kind: type, group: str) -> Callable[[Any, OutboxRecord], Any] | None:
    """Load the function that an adapter has registered for a class, or for a base of it."""
    modules = {base.__module__.partition(".")[0] for base in kind.__mro__}
    for entry in entry_points(group=group):
        if entry.name in modules:
            try:
                write: Callable[[Any, OutboxRecord], Any] = entry.load()
            except ImportError as error:
                raise MissingExtra(f"{entry.value} is needed to stash with {kind.__name__}: {error}") from error
            return write
    return None


def _name(session: object) -> str:
    return f"{type(session).__module__}.{type(session).__qualname__}"
