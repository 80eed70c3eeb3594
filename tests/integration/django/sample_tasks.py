"""Tasks that tests enqueue; workers import them from here."""

import os
import signal
import sys
from datetime import datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, Literal, NewType, TypedDict

import django
import psycopg
from django.apps import apps
from django.db import connections, transaction
from django.utils import timezone

from outbox_queue import Reject

if django.VERSION >= (6, 0):
    from django.tasks import task
else:
    from django_tasks import task

Cents = NewType("Cents", int)


class Line(TypedDict):
    product: int


def _groups() -> Any:
    """Return the manager of a model that not every project of the tests installs."""
    return apps.get_model("auth.Group").objects


@task
def noop(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""
    del args, kwargs


@task(queue_name="second")
async def add(left: int, right: int = 0) -> int:
    """Add, in a coroutine."""
    return left + right


@task(takes_context=True)
def attempt_of(context, name: str) -> list:
    """Return the name and the number of the attempt."""
    return [name, context.attempt]


@task
def fail(message: str = "no") -> None:
    """Raise."""
    raise ValueError(message)


@task(takes_context=True)
def overtaken(context) -> None:
    """Fail after another worker has succeeded."""
    from outbox_django.tasks.models import Result

    results = Result.objects.filter(pk=context.task_result.id)
    results.update(status="SUCCESSFUL", return_value="by another", finished_at=timezone.now())
    raise ValueError("too late")


@task(takes_context=True)
def accompanied(context) -> None:
    """Succeed while another worker has begun the same task, as its message came twice."""
    from outbox_django.tasks import results

    result = results.read(context.task_result.id, "default")
    results.begin(result, "another", timezone.now(), "default")


@task
def refuse() -> None:
    """Refuse for good."""
    raise Reject("makes no sense")


@task
def echo(value: str) -> Any:
    """Return what PostgreSQL's JSON does not have, or raise it."""
    if value == "raise":
        raise ValueError("\ud800\0")
    return {"nan": float("nan"), "nul": "\0", "surrogate": "\ud800"}[value]


def cut_database() -> None:
    """Close the connection, and let no other be made."""
    connections["default"].close()
    connections["default"].settings_dict["PORT"] = "1"


@task
def without_database(meanwhile: bool) -> None:
    """Lose the database, if it is there, and fail."""
    if meanwhile:
        cut_database()
    raise ValueError("by another cause")


def kill_backend() -> None:
    """Have the server end the connection's session, as an idle time-out or a restart does."""
    connection = connections["default"]
    connection.ensure_connection()
    parameters = connection.get_connection_params()
    pid = connection.connection.info.backend_pid
    given = {name: parameters[name] for name in ("host", "port", "user", "password", "dbname") if name in parameters}
    with psycopg.connect(**given, autocommit=True) as other:
        other.execute("SELECT pg_terminate_backend(%s)", [pid])


@task
def lose_connection(name: str) -> str:
    """Succeed, or fail, although the connection is lost meanwhile."""
    if name == "closed":
        connections["default"].connection.close()
    elif name == "read-only":
        connections["default"].cursor().execute("SET default_transaction_read_only = on")
    else:
        kill_backend()
    if name == "fails":
        raise ValueError("after the connection was lost")
    return name


def groups_in_a_transaction():
    """Yield rows inside a transaction that ends after the last one."""
    with transaction.atomic():
        yield from _groups().select_for_update().order_by("id")


@task
def leave_open(name: str) -> str:
    """Leave a transaction open, in one of the ways there are."""
    if name in ("error", "cycle"):
        _groups().create(name=name)
        kept = None
        groups = groups_in_a_transaction()  # alive in the traceback
        for group in groups:
            try:
                int(f"cannot handle {group.name}")
            except ValueError as error:
                kept = error if name == "cycle" else None
                raise
        return str(kept)
    if name == "atomic":
        transaction.atomic().__enter__()
    elif name == "begin":
        connections["default"].cursor().execute("BEGIN")
    elif name == "autocommit":
        connections["default"].set_autocommit(False)
    _groups().create(name=name)
    return name


@task
def make_group(name: str) -> None:
    """Write a row."""
    _groups().create(name=name)


@task
def time_out() -> None:
    """Run into a time-out of a statement."""
    with connections["default"].cursor() as cursor:
        cursor.execute("SET statement_timeout = '10ms'; SELECT pg_sleep(5)")


@task
def leave() -> None:
    """Raise what would end a worker."""
    sys.exit(3)


@task
def return_an_object() -> object:
    """Return what is not JSON."""
    return object()


@task
def return_itself() -> Any:
    """Return what contains itself."""
    node: dict[str, Any] = {}
    node["parent"] = node
    return node


async def _nothing() -> None:
    """Do nothing, in a coroutine."""


@task
def wrapped() -> Any:
    """Return a coroutine, as a decorator around an async function does."""
    return _nothing()


@task
def generate() -> Any:
    """Yield, which begins nothing."""
    yield 1


@task
def append_line(path: str, text: str, failures: int = 0) -> None:
    """Append a line to a file, and fail unless it is there more than `failures` times."""
    descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    try:
        os.write(descriptor, f"{text}\n".encode())
    finally:
        os.close(descriptor)
    if failures and Path(path).read_text().split().count(text) <= failures:
        raise ValueError("not yet")


@task
def annotated(
    *,
    number: Cents,
    line: Line,
    names: list[str] | None,
    kind: Literal["a", "b"],
    anything: Any,
    when: datetime,
    price: "Decimal | None" = None,
    lists: "list[set[int]]" = (),
) -> None:
    """Have arguments of many types, the last three of them not JSON."""


@task
def kill_worker_once(mark: str) -> None:
    """Kill the worker with SIGKILL the first time, which makes the file; do nothing the second time."""
    if not Path(mark).exists():
        Path(mark).touch()
        os.kill(os.getpid(), signal.SIGKILL)


NOT_A_TASK = print
