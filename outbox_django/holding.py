"""Holds in Django: `outbox_core.holds` on Django's own connection, for views, admin actions and tests.

    from outbox_django import holds

    holds().add("orders", reason="the consumer is being repaired")
    holds().release(topic="orders")

Each call is one statement, in the current transaction if there is one. The holds are in the outbox's own database,
wherever routers would send the model: the harvester reads them there.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from outbox_core.holds import Holds
from outbox_django.databases import postgres_connection, write_alias
from outbox_django.settings import outbox_settings

if TYPE_CHECKING:
    from collections.abc import Callable

_METHODS = frozenset(
    {
        "list",
        "causes",
        "count",
        "count_behind",
        "doubt",
        "waiting_topics",
        "add",
        "add_record",
        "release",
        "release_holds",
        "release_records",
        "skip",
        "resume",
        "dead_letter",
    }
)


class OutboxHolds:
    """The holds of the project's outbox: the methods of `outbox_core.Holds`, without their connection."""

    __slots__ = ("_holds", "_using")

    def __init__(self, using: str | None = None, actor: str | None = None) -> None:
        self._holds = Holds(outbox_settings().table, actor)
        self._using = using

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in _METHODS:
            raise AttributeError(f"{type(self).__name__} has no {name!r}")
        return partial(getattr(self._holds, name), postgres_connection(self._using or write_alias("Outbox")))


def holds(using: str | None = None, actor: str | None = None) -> OutboxHolds:
    """Return the holds of the outbox that the settings name; `actor` is the person who acts, for its history."""
    return OutboxHolds(using, actor)
