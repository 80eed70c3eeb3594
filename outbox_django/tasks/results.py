"""Results of tasks in their table: made with the task, changed by the workers that run it.

Each change is one statement. A worker that dies leaves RUNNING behind; the next attempt goes on from there.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime, timedelta
from decimal import Decimal
from typing import Any

from django.db import connections, transaction
from django.utils import timezone

from outbox_core.row_security import fetch_on, refuse_hidden
from outbox_core.schema import TableName
from outbox_django.databases import bounded
from outbox_django.tasks.jobs import InvalidJob, Job, change, import_task
from outbox_django.tasks.library import TaskError, TaskResult, TaskResultStatus
from outbox_django.tasks.models import Result

_BEGUN = ("started_at", "last_attempted_at", "finished_at", "worker_ids")


def create(result: TaskResult[..., Any], alias: str) -> None:
    """Write the row of a new result."""
    task = result.task
    Result.objects.using(alias).create(
        id=result.id,
        task_path=task.module_path,
        queue_name=task.queue_name,
        backend=result.backend,
        status=str(result.status),
        args=result.args,
        kwargs=result.kwargs,
        run_after=task.run_after,
        enqueued_at=result.enqueued_at,
    )


def read(result_id: str, alias: str) -> TaskResult[..., Any] | None:
    """Return a result, None if there is none of this id; ImportError if its task is gone."""
    row = Result.objects.using(alias).filter(pk=result_id).first()
    if row is None:
        return None
    task = import_task(row.task_path, row.backend)
    task = task.using(queue_name=row.queue_name, run_after=row.run_after, backend=row.backend)
    result: TaskResult[..., Any] = TaskResult(
        task=task,
        id=row.pk,
        status=TaskResultStatus(row.status),
        enqueued_at=row.enqueued_at,
        started_at=None,
        finished_at=None,
        last_attempted_at=None,
        args=row.args,
        kwargs=row.kwargs,
        backend=row.backend,
        errors=[],
        worker_ids=[],
    )
    _copy(row, result)
    return result


def begin(result: TaskResult[..., Any], worker_id: str, at: datetime, alias: str) -> None:
    """Count an attempt that begins now, in the table and in `result`, unless the task was successful already.

    `result` then says so; without a row, since it was pruned, it counts this attempt alone. Called twice for one
    attempt, as the first commit's outcome is not known, it counts once. Raises RowsHidden if no row is seen, and row
    level security hides rows: the task may have been successful.
    """
    with bounded(alias, "the beginning of a task"), transaction.atomic(using=alias):
        row = Result.objects.using(alias).select_for_update().filter(pk=result.id).first()
        if row is not None:
            _refuse_another(row, result)
            _copy(row, result)
        else:
            table = Result._meta.db_table  # noqa: SLF001  Django's documented API
            refuse_hidden(fetch_on(connections[alias]), [TableName.parse(table)])
            result.worker_ids.clear()
        is_counted = result.last_attempted_at == at and worker_id in result.worker_ids
        if result.status == TaskResultStatus.SUCCESSFUL or is_counted:
            return
        change(
            result,
            status=TaskResultStatus.RUNNING,
            started_at=result.started_at or at,
            last_attempted_at=at,
            finished_at=None,
        )
        result.worker_ids.append(worker_id)
        _update(result, alias, {name: getattr(result, name) for name in _BEGUN})


def _refuse_another(row: Result, result: TaskResult[..., Any]) -> None:
    """Refuse a message with the id of another task, whose result it would write, and keep it from running.

    The backend may have got another alias since.
    """
    task = result.task
    told, given = [list(result.args), dict(result.kwargs)], [row.args, row.kwargs]
    is_same = (row.task_path, row.queue_name) == (task.module_path, task.queue_name)
    if not is_same or (given != told and _exact(given) != _exact(told)):
        raise InvalidJob(f"the result {row.pk} belongs to another task, {row.task_path}, or to other arguments of it")


def _exact(value: Any) -> Any:
    """Return JSON with decimals: the table writes 1e23 in digits, and a float of that is another number."""
    return json.loads(json.dumps(value), parse_float=Decimal)


def write(result: TaskResult[..., Any], alias: str) -> None:
    """Write what became of an attempt, unless another worker, after this one had lost the message, succeeded.

    Of another attempt under way (a message that came twice) everything else stays, its worker among it.
    """
    errors = [[error.exception_class_path, error.traceback] for error in result.errors]
    value = getattr(result, "_return_value", None)
    with bounded(alias, "the result of a task"):
        _update(result, alias, {"finished_at": result.finished_at, "return_value": value, "errors": errors})


def give_up(job: Job, error: TaskError, alias: str) -> None:
    """Note that a task becomes a dead letter before it could begin; without a row of this task, do nothing."""
    with bounded(alias, "the result of a task"), transaction.atomic(using=alias):
        rows = Result.objects.using(alias).select_for_update().exclude(status=TaskResultStatus.SUCCESSFUL)
        row = rows.filter(pk=job.id, task_path=job.task, args=job.args, kwargs=job.kwargs).first()
        if row is not None:
            row.status, row.finished_at = TaskResultStatus.FAILED, timezone.now()
            row.errors.append([error.exception_class_path, error.traceback])
            row.save(update_fields=["status", "finished_at", "errors"])


def prune(older_than: timedelta, alias: str) -> int:
    """Delete the results of tasks that finished longer ago; return their number."""
    finished = Result.objects.using(alias).filter(finished_at__lt=timezone.now() - older_than)
    return finished.delete()[0]


def _update(result: TaskResult[..., Any], alias: str, values: Mapping[str, object]) -> None:
    rows = Result.objects.using(alias).filter(pk=result.id).exclude(status=TaskResultStatus.SUCCESSFUL)
    rows.update(status=str(result.status), **values)


def _copy(row: Result, result: TaskResult[..., Any]) -> None:
    change(
        result,
        status=TaskResultStatus(row.status),
        started_at=row.started_at,
        last_attempted_at=row.last_attempted_at,
        finished_at=row.finished_at,
        _return_value=row.return_value,
        errors=[TaskError(exception_class_path=path, traceback=text) for path, text in row.errors],
        worker_ids=list(row.worker_ids),
    )
