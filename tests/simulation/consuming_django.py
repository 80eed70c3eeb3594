"""Django in the simulated world: its own wrapper of PostgreSQL over a simulated driver, one connection for each thread.

Everything above the driver is Django's: `atomic`, savepoints, the ORM, and when it closes a connection.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import UTC, datetime, timedelta
from random import Random
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import django
from django.apps import apps
from django.db import connections
from django.db.backends.base import base as django_base
from django.db.backends.postgresql import base
from django.utils import timezone

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "tests.django_settings")
if not apps.ready:
    django.setup()

from outbox_django.tasks import backend, worker
from outbox_django.tasks.library import task_finished, task_started
from tests.simulation.scheduling import current
from tests.simulation.tables import DriverConnection

_BEGIN = datetime(1970, 1, 1, tzinfo=UTC)
_LETTERS = "abcdefghijklmnopqrstuvwxyz0123456789"


class Wrapper(base.DatabaseWrapper):
    """Django's connection to the simulated PostgreSQL of a process."""

    pg_version = 170_000

    def ensure_connection(self) -> None:
        if self.connection is None:
            with self.wrap_database_errors:
                self.connect()

    def get_new_connection(self, conn_params: Any) -> Any:
        del conn_params
        process: Any = current().process
        return DriverConnection(process.world, autocommit=True)

    def init_connection_state(self) -> None:
        """Set nothing: the simulated session is as Django wants it."""

    def create_cursor(self, name: str | None = None) -> Any:
        del name
        return self.connection.cursor()


class _OfThread:
    """Django's connections of the thread that runs."""

    def __getattr__(self, alias: str) -> Any:
        try:
            return current().__dict__.setdefault("django", {})[alias]
        except KeyError:
            raise AttributeError(alias) from None

    def __setattr__(self, alias: str, connection: Any) -> None:
        current().__dict__.setdefault("django", {})[alias] = connection

    def __delattr__(self, alias: str) -> None:
        del current().__dict__["django"][alias]


class _Nothing(dict[str, Any]):
    """A cache that keeps nothing: processes share no service."""

    def __setitem__(self, key: str, value: Any) -> None:
        """Forget it."""


def _connection(alias: str) -> Wrapper:
    process: Any = current().process
    return Wrapper({**connections.settings[alias], **process.world.connection_settings}, alias)


def _monotonic() -> float:
    return current().process.monotonic()


def now() -> datetime:
    """Return the time of day of the process that runs: no two threads are told the same, though steps take no time."""
    told = vars(current().process)
    told["microseconds"] = max(told.get("microseconds", 0) + 1, int(current().process.wall_clock() * 1_000_000))
    return _BEGIN + timedelta(microseconds=told["microseconds"])


@contextmanager
def django_in(random: Random, receivers: Any) -> Iterator[None]:
    """Put simulated connections, clocks and names in the place of Django's, and have receivers told of tasks."""

    def draw(length: int = 12) -> str:
        return "".join(random.choice(_LETTERS) for _ in range(length))

    @contextmanager
    def no_signals(_: object) -> Iterator[None]:
        yield

    with ExitStack() as stack:
        for double in (
            (connections, "create_connection", _connection),
            (connections, "_connections", _OfThread()),
            (timezone, "now", now),
            (django_base, "time", SimpleNamespace(monotonic=_monotonic)),
            (backend, "get_random_string", draw),
            (worker, "get_random_string", draw),
            (worker, "stop_on_signals", no_signals),
            (backend, "_services", _Nothing()),
        ):
            stack.enter_context(patch.object(*double))
        for signal in (task_started, task_finished):
            signal.connect(receivers, weak=False)
            stack.callback(signal.disconnect, receivers)
        yield
