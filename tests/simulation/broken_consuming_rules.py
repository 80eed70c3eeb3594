"""Rules of consumers, the inbox and tasks, each broken on purpose: a simulation that does not notice proves nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from datetime import datetime, timedelta
from itertools import count
from typing import Any
from unittest.mock import patch

import psycopg
from django.db import Error as DjangoError
from django.db import OperationalError

from outbox_core import consuming
from outbox_core.drivers import plain_cursor
from outbox_core.inbox import Inbox, confirming
from outbox_queue import Message
from outbox_queue.consuming import worker as queue_worker
from tests.simulation import consuming_simulation

from outbox_django.tasks import results, worker  # isort: skip  after `consuming_simulation`, which sets Django up
from outbox_django.tasks.models import Result  # isort: skip

_original_accept = Inbox.accept
_original_work_on = consuming._Loop.work_on
_original_begin = results.begin
_original_begin_attempt = worker._Attempt.begin
Double = tuple[object, str, Any]


# -- consumers and the inbox


def _ask_for_soundness(self: Inbox, connection: Any, *_: object) -> None:
    """Believe each transaction that is not aborted."""
    del self
    with confirming(), closing(plain_cursor(connection)) as cursor:
        cursor.execute("SELECT 1")


def _bookmark_first(self: Any, message: Any, *rest: Any) -> bool | None:
    self.bookmark(message)
    return _original_work_on(self, message, *rest)


def _believe_in_doubt(self: Any, message: Any, attempt: Callable[[Any, str], bool], *rest: Any) -> bool | None:
    """Take a connection that is lost at the end for a success."""

    def believing(record: Any, name: str) -> bool:
        try:
            return attempt(record, name)
        except (psycopg.OperationalError, OperationalError) as error:
            if "closed the connection" in str(error):
                return True
            raise

    return _original_work_on(self, message, believing, *rest)


def _accept_all(self: Inbox, *message: Any) -> bool:
    _original_accept(self, *message)
    return True


def _accept_at_once(self: Inbox, connection: Any, *message: Any) -> bool:
    """Commit the acceptance before the work."""
    is_new = _original_accept(self, connection, *message)
    getattr(connection, "connection", connection).execute("COMMIT")
    return is_new


def _acknowledge_first(self: Any, message: Message) -> None:
    """Finish a message before its handler is called."""
    message.ack()
    with suppress(Exception):
        self._handler(message)


# -- tasks


def _give_back_and_count(self: Any, message: Message, why: str) -> None:
    del self
    message.nack(timedelta(seconds=1), why[:200])


def _once_on_any_connection(self: Any, call: Callable[[str], None]) -> None:
    del self
    call(worker.stash_alias())


def _again_on_any_connection(self: Any, call: Callable[[str], None]) -> None:
    """Try twice, on the connection as it is."""
    del self
    try:
        with suppress(OperationalError):
            call(worker.stash_alias())
            return
        call(worker.stash_alias())
    except DjangoError as error:
        raise worker._NotWritten from error


def _write_carelessly(self: Any) -> None:
    """Write what became of an attempt on the connection that its task has left, if that works."""
    with suppress(DjangoError):
        results.write(self._result, worker.stash_alias())


def _write_on_what_is_left(self: Any) -> None:
    """Write on the connection that the task has left, if it answers."""
    self._used.on_a_working_one(lambda alias: results.write(self._result, alias))


def _update_all(result: Any, alias: str, values: Any) -> None:
    """Write the result of a message, whoever has it by now."""
    Result.objects.using(alias).filter(pk=result.id).update(status=str(result.status), **values)


def _begin_all(self: Any, worker_id: str) -> bool:
    _original_begin_attempt(self, worker_id)
    return True


_beginnings = count(1)


def _begin_anew(result: Any, worker_id: str, at: datetime, alias: str) -> None:
    """Count each try to begin."""
    _original_begin(result, worker_id, at + timedelta(microseconds=next(_beginnings)), alias)


def _close_nothing(self: Any) -> None:
    del self


class _Sends:
    """A signal whose receivers' errors are its sender's."""

    def __init__(self, signal: Any) -> None:
        self.send_robust = signal.send


_NO_CONFIRMATION: Double = (Inbox, "confirm", lambda *_: None)

CONSUMER_RULES: dict[str, tuple[Double, ...]] = {
    "success is what the database confirms": (_NO_CONFIRMATION,),
    "what was begun again is not confirmed": ((Inbox, "confirm", _ask_for_soundness),),
    "an offset is committed behind its transaction": ((consuming._Loop, "work_on", _bookmark_first),),
    "an outcome in doubt is no success of a record": ((consuming._Loop, "work_on", _believe_in_doubt),),
    "an error sets the consumer back": ((consuming._Loop, "_set_back", lambda *_: None),),
    "a repeat has no effect": ((Inbox, "accept", _accept_all), _NO_CONFIRMATION),
    "acceptance and work are one transaction": ((Inbox, "accept", _accept_at_once), _NO_CONFIRMATION),
    "a message is finished behind its handler": ((queue_worker.HandlerCall, "__call__", _acknowledge_first),),
    "what never began is no attempt": ((worker.TaskRunner, "_give_back", _give_back_and_count),),
    "a broken connection is no failure of a task": (
        (worker._Connections, "on_a_working_one", _once_on_any_connection),
    ),
    "a broken connection is replaced": (
        (worker._Connections, "close_unusable", _close_nothing),
        (worker._Connections, "on_a_working_one", _again_on_any_connection),
    ),
    "a second try has a connection of its own": ((worker._Connections, "on_a_working_one", _again_on_any_connection),),
    "an outcome is written on a connection of its own": ((worker._Attempt, "_write", _write_on_what_is_left),),
    "an outcome that is not written is told": ((worker._Attempt, "_write", _write_carelessly),),
    "a receiver's error is not the task's": (
        (worker, "task_started", _Sends(worker.task_started)),
        (worker, "task_finished", _Sends(worker.task_finished)),
    ),
    "a success is not written over": ((results, "_update", _update_all),),
    "a successful task does not run again": ((worker._Attempt, "begin", _begin_all),),
    "a beginning in doubt counts once": ((results, "begin", _begin_anew),),
}

_WITH_TASKS = {"groups": ("tasks",)}

_SITUATIONS: dict[str, dict[str, Any]] = {
    # Tasks outlive their message, and end when another worker was successful.
    "a success is not written over": {**_WITH_TASKS, "conducts": ("too slow",), "consumers": 2},
    "a successful task does not run again": {**_WITH_TASKS, "conducts": ("too slow",), "consumers": 2},
    "a repeat has no effect": {"groups": ("bare", "django"), "conducts": ("slow", "fail")},
    "a message is finished behind its handler": {"groups": ("queue",)},
    # The answer to the COMMIT of a beginning is lost.
    "a beginning in doubt counts once": {**_WITH_TASKS, "faults": ("at a statement",), "step_share": 0.05},
    "what never began is no attempt": {**_WITH_TASKS, "faults": ("at a statement",), "step_share": 0.05},
    "a broken connection is no failure of a task": _WITH_TASKS,
    "a broken connection is replaced": _WITH_TASKS,
    "a second try has a connection of its own": {**_WITH_TASKS, "faults": ("at a statement",), "step_share": 0.05},
    "an outcome is written on a connection of its own": _WITH_TASKS,
    "an outcome that is not written is told": _WITH_TASKS,
    "a receiver's error is not the task's": _WITH_TASKS,
}
"""Changes of the plans of their runs, for rules that count in rare situations, or for tasks alone."""


@contextmanager
def consumers_broken(name: str) -> Iterator[None]:
    """Break a rule for as long as the context lasts; '' breaks none."""
    with ExitStack() as patches:
        for double in CONSUMER_RULES[name] if name else ():
            patches.enter_context(patch.object(*double))
        patches.enter_context(patch.object(consuming_simulation, "SITUATION", _SITUATIONS.get(name, {})))
        yield
