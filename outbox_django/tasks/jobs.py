"""The message of a task: JSON with the task's path, its arguments, and the id of its result."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Self

from django.apps import apps
from django.utils import timezone
from django.utils.module_loading import import_string

from outbox_django.tasks.library import Task, TaskResult, TaskResultStatus, task_backends


class InvalidJob(ValueError):
    """A message of the queue is not the message of a task, and never will be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A task that was enqueued, as it travels. Times are ISO 8601.

    Attributes:
        id: of its result.
        task: path of the task in its module, `shop.tasks.send_confirmation`.
        run_after: time before which it must not run, or None.
    """

    id: str
    task: str
    args: list[Any]
    kwargs: dict[str, Any]
    enqueued_at: str
    run_after: str | None = None

    @classmethod
    def of(cls, result: TaskResult[..., Any]) -> Self:
        """Return the job of a result that was just made."""
        run_after = result.task.run_after
        return cls(
            id=result.id,
            task=result.task.module_path,
            args=result.args,
            kwargs=result.kwargs,
            enqueued_at=(result.enqueued_at or timezone.now()).isoformat(),
            run_after=None if run_after is None else run_after.isoformat(),
        )

    @classmethod
    def decode(cls, payload: bytes) -> Self:
        """Return the job of a message; InvalidJob if it has none."""
        try:
            job = cls(**json.loads(payload))
            times = [job.enqueued_at, *([] if job.run_after is None else [job.run_after])]
            is_whole = (
                isinstance(job.id, str)
                and isinstance(job.task, str)
                and isinstance(job.args, list)
                and isinstance(job.kwargs, dict)
                and all(datetime.fromisoformat(time) for time in times)
            )
        except (ValueError, TypeError, RecursionError) as error:
            raise InvalidJob(f"not the message of a task: {error}") from None
        if not is_whole:
            raise InvalidJob("not the message of a task: id and task must be text, args a list, kwargs an object")
        return job

    def encode(self) -> bytes:
        """Return the message's payload."""
        return json.dumps(asdict(self), allow_nan=False, separators=(",", ":")).encode()

    @property
    def wait(self) -> timedelta:
        """Time until it may run; zero if it may run now."""
        if self.run_after is None:
            return timedelta(0)
        run_after = datetime.fromisoformat(self.run_after)
        if timezone.is_naive(run_after):  # of a project with USE_TZ False, in which it may be aware all the same
            run_after = timezone.make_aware(run_after)
        return max(timedelta(0), run_after - datetime.now(UTC))

    def result(self, queue_name: str, backend: str) -> TaskResult[..., Any]:
        """Return the result that the task's function gets as its context, not yet begun.

        Raises:
            InvalidJob: if the path names something that is no task.
            ImportError: if there is nothing at the path: this code may be older than the one that enqueued it.
        """
        task = import_task(self.task, backend).using(
            queue_name=queue_name,
            backend=backend,
            run_after=None if self.run_after is None else datetime.fromisoformat(self.run_after),
        )
        return TaskResult(
            task=task,
            id=self.id,
            status=TaskResultStatus.READY,
            enqueued_at=datetime.fromisoformat(self.enqueued_at),
            started_at=None,
            finished_at=None,
            last_attempted_at=None,
            args=self.args,
            kwargs=self.kwargs,
            backend=backend,
            errors=[],
            worker_ids=[],
        )


def import_task(path: str, backend: str) -> Task[..., Any]:
    """Return the task at a path; InvalidJob if it can be none, ImportError if nothing is there, in this code at least.

    Writers of the message topic may name any module, and what is imported is run. So only modules of installed
    applications are, and those that OPTIONS["modules"] of the backend name, unless this process has imported them
    anyhow. Others are not there: a newer worker may know them.
    """
    module, _, name = path.rpartition(".")
    if "__main__" in path.split("."):
        raise InvalidJob(f"{path} is in a program, not a task")
    found = vars(sys.modules[module]).get(name) if module in sys.modules else None
    if found is None:
        if not any(f"{module}.".startswith(f"{known}.") for known in _known_modules(backend)):
            raise ImportError(
                f"{path} is no task of an installed application, nor of a module that "
                f"TASKS[{backend!r}]['OPTIONS']['modules'] names, and this process has not imported it"
            )
        try:
            found = import_string(path)
        except Exception:
            raise
        except BaseException as error:  # SystemExit, say, or one of the module's own: it must not end the worker
            raise InvalidJob(f"{path} is no task: its module raises {type(error).__name__}") from error
    if not isinstance(found, Task):
        raise InvalidJob(f"{path} is a {type(found).__name__}, not a task")
    return found


def _known_modules(backend: str) -> Iterator[str]:
    yield from (config.name for config in apps.get_app_configs())
    yield from task_backends.settings.get(backend, {}).get("OPTIONS", {}).get("modules", ())


def change(result: TaskResult[..., Any], **values: Any) -> None:
    """Change fields of a result, which is frozen."""
    for name, value in values.items():
        object.__setattr__(result, name, value)
