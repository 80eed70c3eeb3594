"""Running tasks: the handler of the queues of a backend, and the threads of `manage.py run_tasks`.

One message is one attempt. What the handler raises is retried by the queue after a backoff, until `max_attempts`; then
the message becomes a dead letter, and the result FAILED. A worker that dies leaves its messages to the others. So a
task runs at least once; with a table of results, one that was successful does not run again.

What fails while the database is away does not count, nor what fails before the task has begun or after it has ended:
the message comes again with the same attempt. The state of a task is written on a connection that works, whatever
became of the one that the task has used. A transaction that the task leaves open ends before that, and the attempt has
failed. A connection that was in a transaction before the message came is a test's, and left alone.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from datetime import timedelta
from typing import Any

from django.db import DataError, InterfaceError, InternalError, OperationalError, connections
from django.db.backends.base.base import BaseDatabaseWrapper
from django.dispatch import Signal
from django.utils import timezone
from django.utils.crypto import get_random_string

from outbox_core.cli.signals import stop_on_signals
from outbox_core.drivers import IN_TRANSACTION, sqlstate, transaction_status
from outbox_core.errors import is_unfinished, traceback_of
from outbox_django.databases import end_generators
from outbox_django.stashing import stash_alias
from outbox_django.tasks.backend import OutboxTaskBackend
from outbox_django.tasks.jobs import InvalidJob, Job, change
from outbox_django.tasks.library import (
    TaskContext,
    TaskError,
    TaskResult,
    TaskResultStatus,
    normalize_json,
    task_finished,
    task_started,
)
from outbox_queue import Message, Reject

_EARLY = timedelta(seconds=1)  # clocks differ; what is due within it runs now
_LONGEST_TRACEBACK = 20_000
_LOOK_SECONDS = 1.0
_PATIENCE_SECONDS = 5.0
_AGAIN_SECONDS = 0.1
_READ_ONLY = "25006"  # the server has become a standby, or refuses to write for another cause
_UNABLE = (OperationalError, InterfaceError, InternalError)  # the last of a server that is read-only
_OUTAGE_DELAY = timedelta(seconds=10)
_OUTAGE_PAUSE_SECONDS = 1.0  # of a thread: it must not take message after message meanwhile

_log = logging.getLogger(__name__)


class _NotWritten(Exception):
    """The state of a task could not be written, or read: not the task has failed."""


class TaskAborted(Exception):
    """A task raised what would have ended its worker, SystemExit for example."""


class TransactionLeftOpen(Exception):
    """A task returned inside a transaction, which was rolled back."""


class TaskRunner:
    """The handler of the messages of a backend's queues; any thread may call it."""

    def __init__(self, backend: OutboxTaskBackend, worker_id: str | None = None) -> None:
        self._backend = backend
        self.worker_id = worker_id or f"{socket.gethostname()[:30]}-{os.getpid()}-{get_random_string(8)}"

    def __call__(self, message: Message) -> None:
        """Run the task of a message once.

        Raises:
            Reject: if it can never be run, or raised that itself.
            Exception: what the task raised.
        """
        used = _Connections()
        used.close_unusable()
        try:
            self._handle(message, used)
        except InvalidJob as error:
            raise Reject(str(error)) from error
        except _NotWritten as error:
            self._give_back(message, f"its state cannot be written, and the attempt does not count: {error.__cause__}")
        except _UNABLE as error:
            if not used.is_database_away(error):
                raise
            self._give_back(message, f"the database is away, and the attempt does not count: {error}")
        finally:
            used.end_transactions()
            used.close_unusable()

    def _give_back(self, message: Message, why: str) -> None:
        _log.warning("%r: %s", message, why)
        longest = self._backend.queue(message.queue).config.max_delay
        message.nack(min(_OUTAGE_DELAY, longest), counts=False)
        time.sleep(_OUTAGE_PAUSE_SECONDS)

    def _handle(self, message: Message, used: _Connections) -> None:
        job = Job.decode(message.payload)
        if job.wait > _EARLY:
            # It has to wait longer than a message can be delayed.
            used.on_a_working_one(lambda _: self._backend.stash(job, message.queue))
            return
        try:
            result = job.result(message.queue, self._backend.alias)
        except Exception as error:
            if self._backend.supports_get_result and (isinstance(error, InvalidJob) or _is_last(message)):
                from outbox_django.tasks import results

                told = _task_error(error)
                used.on_a_working_one(lambda alias: results.give_up(job, told, alias))
            raise
        attempt = _Attempt(result, message, self._backend, used)
        if attempt.begin(self.worker_id):
            attempt.run()


class _Attempt:
    """One attempt to run a task. Without a table of results, the result is for the task's context and signals alone."""

    def __init__(
        self, result: TaskResult[..., Any], message: Message, backend: OutboxTaskBackend, used: _Connections
    ) -> None:
        self._result = result
        self._used = used
        self._message = message
        self._backend = backend
        self._keeps_result = backend.supports_get_result

    def begin(self, worker_id: str) -> bool:
        """Count the attempt; return False if the task was successful already."""
        if not self._keeps_result:
            now = timezone.now()
            workers = [worker_id] * self._message.attempt
            status = TaskResultStatus.RUNNING
            change(self._result, status=status, started_at=now, last_attempted_at=now, worker_ids=workers)
            return True
        from outbox_django.tasks import results

        at = timezone.now()
        self._used.on_a_working_one(lambda alias: results.begin(self._result, worker_id, at, alias))
        if self._result.status == TaskResultStatus.SUCCESSFUL:
            _log.info("task %s was successful before, and does not run again", self._result.id)
            return False
        return True

    def run(self) -> None:
        """Run the task, and keep what became of it."""
        task, result = self._result.task, self._result
        self._tell(task_started)
        context = (TaskContext(task_result=result),) if task.takes_context else ()
        self._used.end_transactions()  # of receivers
        try:
            value = task.call(*context, *result.args, **result.kwargs)
            self._used.refuse_open_transactions()
            _refuse_unfinished(value)
        except KeyboardInterrupt:
            raise
        except BaseException as error:
            if left := self._used.end_transactions(error):
                error.add_note(f"And {left}.")
            self._failed(error)
            if isinstance(error, Exception):
                raise
            raise TaskAborted(f"the task raised {type(error).__name__}") from error
        self._succeeded(value)

    def _succeeded(self, value: object) -> None:
        try:
            kept = normalize_json(value) if self._keeps_result else value
            change(self._result, status=TaskResultStatus.SUCCESSFUL, finished_at=timezone.now(), _return_value=kept)
            self._write()
        except (TypeError, ValueError, RecursionError, DataError) as error:
            # PostgreSQL's JSON has no NaN, NUL or lone surrogate, and none has what contains itself.
            change(self._result, _return_value=None)
            refusal = Reject(f"the task has run, but what it returned cannot be kept: {error}")
            self._failed(refusal)
            raise refusal from error
        self._announce()

    def _failed(self, error: BaseException) -> None:
        self._result.errors.append(_task_error(error))
        if _is_last(self._message) or isinstance(error, Reject):
            change(self._result, status=TaskResultStatus.FAILED, finished_at=timezone.now())
            self._write()
            self._announce()
        else:
            change(self._result, status=TaskResultStatus.READY)
            self._write()

    def _announce(self) -> None:
        self._tell(task_finished)

    def _tell(self, signal: Signal) -> None:
        try:
            signal.send_robust(sender=type(self._backend), task_result=self._result)  # Django logs what receivers raise
        except (Exception, KeyboardInterrupt):
            raise
        except BaseException as error:  # SystemExit, say: it must not end the worker
            _log.error(
                "task %s: a receiver of a signal raised, and those behind it were not told\n%s",
                self._result.id,
                traceback_of(error),
            )

    def _write(self) -> None:
        if self._keeps_result:
            from outbox_django.tasks import results

            self._used.end_transactions()
            self._used.close_unusable()  # which the task may have left broken
            self._used.on_a_working_one(lambda alias: results.write(self._result, alias))


class _Connections:
    """The connections of this thread, while it handles one message, but those of a test around it."""

    def __init__(self) -> None:
        self._of_test = {each.alias for each in connections.all(initialized_only=True) if each.in_atomic_block}

    def _ours(self) -> list[BaseDatabaseWrapper]:
        return [each for each in connections.all(initialized_only=True) if each.alias not in self._of_test]

    def close_unusable(self) -> None:
        """Close connections that are broken or too old, as between requests."""
        for connection in self._ours():
            connection.close_if_unusable_or_obsolete()

    def end_transactions(self, error: BaseException | None = None) -> str:
        """Roll back what was left open, by a generator in the traceback of an error, say; return a clause about it."""
        left = [each.alias for each in self._ours() if _is_in_transaction(each)]
        if not left:
            return ""
        # A generator that holds an `atomic` block must end now: later it would end the block of another task.
        end_generators(error)
        for connection in self._ours():
            if _is_in_transaction(connection):
                with suppress(Exception):
                    connection.close()
                del connections[connection.alias]  # with the state of its blocks
        return f"a transaction of {', '.join(map(repr, left))} was left open, and was rolled back"

    def refuse_open_transactions(self) -> None:
        """Raise TransactionLeftOpen if one was left open, which ends."""
        if left := self.end_transactions():
            raise TransactionLeftOpen(f"the task has returned, but {left}")

    def on_a_working_one(self, call: Callable[[str], None]) -> None:
        """Read or write the state of a task; on other connections, for some seconds, if this one does not serve.

        Raises _NotWritten if none does: they may all be those of a pool, and lost, or of a server that is read-only.
        """
        alias = stash_alias()
        end = None
        while True:
            try:
                _call_and_commit(call, alias)
            except _UNABLE as error:
                now = time.monotonic()
                if alias in self._of_test or (end is not None and now >= end):
                    raise _NotWritten from error
                end = end or now + _PATIENCE_SECONDS  # counted from here: the first try may have hung
                connections[alias].close()  # a deadlock or a serialization failure needs none; there is no harm in it
                time.sleep(_AGAIN_SECONDS)
            else:
                return

    def is_database_away(self, error: Exception) -> bool:
        """Tell whether the outbox's database takes no connection or, as it was read-only for the task, is so still."""
        self.close_unusable()
        connection = connections[stash_alias()]
        try:
            if sqlstate(error) != _READ_ONLY or connection.alias in self._of_test:
                connection.ensure_connection()
                return False
            connection.close()  # it may lead to a server that is a standby by now
            with connection.cursor() as cursor:
                cursor.execute("SELECT pg_catalog.current_setting('transaction_read_only')")
                return bool(cursor.fetchone() == ("on",))
        except (OperationalError, InterfaceError):
            return True


def _refuse_unfinished(value: object) -> None:
    """Refuse what a task returns that has only begun its work, and with which nobody goes on."""
    if is_unfinished(value):
        raise Reject(f"the task returned {type(value).__name__}, which is not awaited: the work is not done")


def _is_in_transaction(connection: BaseDatabaseWrapper) -> bool:
    """Tell whether a transaction is open: of `atomic`, of a BEGIN, or of autocommit that is off."""
    # Other databases than PostgreSQL tell less.
    return connection.in_atomic_block or transaction_status(connection.connection) in IN_TRANSACTION


def _call_and_commit(call: Callable[[str], None], alias: str) -> None:
    call(alias)
    connection = connections[alias]
    if not connection.in_atomic_block and not connection.get_autocommit():
        connection.commit()


def _is_last(message: Message) -> bool:
    return message.max_attempts is not None and message.attempt >= message.max_attempts


def _task_error(error: BaseException) -> TaskError:
    text = traceback_of(error).replace("\0", "\N{REPLACEMENT CHARACTER}")
    text = text.encode(errors="replace").decode()  # lone surrogates
    kind = f"{type(error).__module__}.{type(error).__qualname__}"
    return TaskError(exception_class_path=kind, traceback=text[-_LONGEST_TRACEBACK:])


def run_tasks(
    backend: OutboxTaskBackend,
    queue_names: Sequence[str],
    *,
    concurrency: int = 4,
    drain_timeout: timedelta = timedelta(seconds=30),
    with_tracker: bool = False,
    stop: threading.Event | None = None,
) -> bool:
    """Run the tasks of some queues until SIGTERM, SIGINT or `stop`; return whether all of them finished in time.

    Args:
        backend: whose tasks.
        queue_names: of which queues.
        concurrency: threads for each queue.
        drain_timeout: time that tasks have to finish after the stop; the others run again elsewhere.
        with_tracker: run a redelivery tracker, too, without which nothing is retried or deferred.
        stop: ends the work when it is set.

    Raises:
        QueueError: if a queue cannot be read, or an error ends the tracker; the other queues are stopped first.
    """
    stop = stop or threading.Event()
    runner = TaskRunner(backend)

    def work(name: str) -> bool:
        try:
            return backend.queue(name).run(
                runner, concurrency=concurrency, drain_timeout=drain_timeout, stop=stop, on_signals=False
            )
        finally:
            stop.set()  # one that cannot go on ends the others
            connections.close_all()

    with ExitStack() as stack:
        stack.enter_context(stop_on_signals(stop.set))
        tracker = stack.enter_context(backend.service.tracker()) if with_tracker else None
        pool = stack.enter_context(ThreadPoolExecutor(len(queue_names), thread_name_prefix="outbox-tasks"))
        futures = [pool.submit(work, name) for name in queue_names]
        _log.info("running the tasks of %s as %s", ", ".join(queue_names), runner.worker_id)
        try:
            while not stop.wait(_LOOK_SECONDS):
                if tracker is not None:
                    tracker.join(0)  # raises the error that has ended it
        finally:
            stop.set()
        return min(future.result() for future in futures)
