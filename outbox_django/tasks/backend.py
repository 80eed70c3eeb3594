"""The backend of Django's tasks: `enqueue` stashes the task in the current transaction, as a message of a queue."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from datetime import timedelta
from functools import cached_property
from typing import TYPE_CHECKING, Any

from django.apps import apps
from django.core.checks import CheckMessage, Error
from django.core.checks import Warning as CheckWarning
from django.db import connections, transaction
from django.utils import timezone
from django.utils.crypto import get_random_string
from django.utils.module_loading import autodiscover_modules

from outbox_core.errors import InvalidConfig, MissingExtra, OutboxError, TransactionRequired
from outbox_django.databases import postgres_connection
from outbox_django.settings import outbox_settings
from outbox_django.stashing import stash, stash_alias
from outbox_django.tasks.arguments import checked_arguments, foreign_parameters
from outbox_django.tasks.jobs import Job
from outbox_django.tasks.library import (
    BaseTaskBackend,
    Task,
    TaskResult,
    TaskResultDoesNotExist,
    TaskResultStatus,
    task_enqueued,
)

if TYPE_CHECKING:
    from outbox_queue import Queue, QueueService

_APP = "outbox_django.tasks"
_REQUIRED = ("bootstrap_servers", "message_topic", "marker_topic")

_SHORTEST_STEP = timedelta(seconds=1)

_known_tasks: dict[str, Task[..., Any]] = {}  # by path; for the system check
# Django makes a backend for each thread, and each request under ASGI; the settings are validated once.
_services: dict[str, tuple[dict[str, Any], QueueService]] = {}


class OutboxTaskBackend(BaseTaskBackend):
    """A backend whose tasks share the fate of the transaction that enqueues them.

    OPTIONS has the key `queue`: settings of `outbox_queue.QueueConfig`, of which `bootstrap_servers`, `message_topic`
    and `marker_topic` are required; and maybe `modules`: names of modules and packages from which workers import tasks
    besides those of installed applications. QUEUES are names of queues over these topics.

    Raises:
        InvalidConfig: at the first use, if OPTIONS are wrong; the system checks report it, too.
    """

    supports_defer = True
    supports_async_task = True
    supports_priority = False

    @property
    def supports_get_result(self) -> bool:  # type: ignore[override]  # as an attribute of the class in Django
        """True if results are kept: "outbox_django.tasks" is in INSTALLED_APPS."""
        return apps.is_installed(_APP)

    @cached_property
    def service(self) -> QueueService:
        """The queues of this backend's topics."""
        known = _services.get(self.alias)
        if known is None or known[0] != self.options:
            known = _services[self.alias] = (self.options, _make_service(self.alias, self.options))
        return known[1]

    def queue(self, name: str) -> Queue:
        """Return the queue of the tasks with this `queue_name`."""
        return self.service.queue(name)

    def validate_task(self, task: Task[..., Any]) -> None:
        """Check a task as Django does, and note it for the system check."""
        super().validate_task(task)
        _known_tasks[task.module_path] = task

    def enqueue(self, task: Task[Any, Any], args: Any, kwargs: Any) -> TaskResult[Any, Any]:
        """Enqueue a task in the current transaction of the outbox's database; without one, in one of its own.

        Raises:
            TypeError: if the task does not take these arguments, or one of them is not JSON (the table of results: not
                PostgreSQL's JSON, which has no NUL); nothing was written.
            InvalidMessage: if the arguments are too large for a message; nothing was written.
            InvalidRecord: if they are too long for an outbox in goharvest's text layout; nothing was written.
            TransactionRequired: in a transaction of another database alone; nothing was written.
            InvalidConfig: if TASKS or OUTBOX are wrong.
            django.db.Error: of a failed statement.
        """
        self.validate_task(task)
        if task.run_after is not None and self.service.config.max_delay < _SHORTEST_STEP:
            raise InvalidConfig(
                f"TASKS[{self.alias!r}]['OPTIONS']['queue']: max_delay must be 1s or more for tasks with run_after, "
                "which are written again after each"
            )
        positional, named = checked_arguments(task, args, kwargs, for_table=self.supports_get_result)
        result: TaskResult[Any, Any] = TaskResult(
            task=task,
            id=get_random_string(32),
            status=TaskResultStatus.READY,
            enqueued_at=timezone.now(),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=positional,
            kwargs=named,
            backend=self.alias,
            errors=[],
            worker_ids=[],
        )
        self.stash(Job.of(result), task.queue_name, result)
        task_enqueued.send(type(self), task_result=result)
        return result

    def stash(self, job: Job, queue_name: str, new: TaskResult[Any, Any] | None = None) -> None:
        """Stash the message of a job, and keep its result if it is new, in one transaction.

        A job that must wait longer than a message can be delayed is stashed again by the worker that gets it.
        """
        queue = self.queue(queue_name)
        wait = min(job.wait, queue.config.max_delay)
        spread = outbox_settings().table_layout.has_partition
        record = queue.record(job.encode(), delay=wait or None, spread=spread)
        alias = stash_alias()
        with _transaction(alias):
            stash(record, using=alias)
            if new is not None and self.supports_get_result:
                from outbox_django.tasks import results

                results.create(new, alias)

    def get_result(self, result_id: str) -> TaskResult[..., Any]:
        """Return a result from the table.

        Raises:
            TaskResultDoesNotExist: if there is none of this id.
            NotImplementedError: if results are not kept.
        """
        if not self.supports_get_result:
            return super().get_result(result_id)
        from outbox_django.tasks import results

        found = results.read(result_id, stash_alias())
        if found is None or found.backend != self.alias:
            raise TaskResultDoesNotExist(result_id)
        return found

    def check(self, **_: Any) -> list[Any]:
        """Check OPTIONS and the annotations of all known tasks: outbox_tasks.E001, E002 and W001."""
        return list(self._messages())

    def _messages(self) -> Iterator[CheckMessage]:
        try:
            for name in self.queues:
                self.queue(name)
        except OutboxError as error:
            yield Error(str(error), id="outbox_tasks.E001")
        if not apps.is_installed("outbox_django"):
            yield Error(
                f"TASKS[{self.alias!r}] writes to the outbox, but 'outbox_django' is not in INSTALLED_APPS.",
                hint="Add it, and run `manage.py migrate`.",
                id="outbox_tasks.E002",
            )
        autodiscover_modules("tasks")
        for path, task in sorted(_known_tasks.items()):
            if task.backend == self.alias:
                for name, annotation in foreign_parameters(task):
                    yield CheckWarning(
                        f"Task {path}: its argument {name!r} is annotated as {annotation}, which is not JSON.",
                        hint="Pass what JSON has, for example a primary key or the text of a time.",
                        id="outbox_tasks.W001",
                    )


def _transaction(alias: str) -> AbstractContextManager[object]:
    """Return the caller's transaction, or one that begins here: what is written then is durable at the end."""
    connection = postgres_connection(alias)
    if connection.in_atomic_block or not connection.get_autocommit():
        return nullcontext()
    for other in connections.all(initialized_only=True):
        if other.in_atomic_block:
            raise TransactionRequired(
                f"enqueue in a transaction of database {other.alias!r}, which the task would not share: the outbox is "
                f"in {alias!r}. Put both inside `with transaction.atomic(using={alias!r}):`"
            )
    return transaction.atomic(using=alias)


def _make_service(alias: str, options: dict[str, Any]) -> QueueService:
    where = f"TASKS[{alias!r}]['OPTIONS']"
    if unknown := options.keys() - {"queue", "modules"}:
        raise InvalidConfig(f"{where}: {min(map(str, unknown))!r} is no option; there are 'queue' and 'modules'")
    modules = options.get("modules", [])
    if not isinstance(modules, list | tuple) or not all(isinstance(name, str) and name for name in modules):
        raise InvalidConfig(f"{where}['modules']: expected a list of names of modules, got {modules!r:.200}")
    settings = options.get("queue")
    if not isinstance(settings, dict):
        raise InvalidConfig(
            f"{where}['queue']: expected a dict with {', '.join(_REQUIRED)}, got {type(settings).__name__}"
        )
    if missing := [name for name in _REQUIRED if name not in settings]:
        raise InvalidConfig(
            f"{where}['queue']: {', '.join(missing)} missing (projects with the same topics run each other's tasks)"
        )
    try:
        from outbox_queue import QueueConfig, QueueService
    except ImportError as error:
        raise MissingExtra(f"needs {error.name}, which is not installed; pip install 'kafka-outbox[queue]'") from None
    try:
        return QueueService(QueueConfig(**settings))
    except InvalidConfig as error:
        raise InvalidConfig(f"{where}['queue']: {error}") from None
