"""The results of tasks in Django's admin: to look at, and to delete."""

from __future__ import annotations

from typing import TYPE_CHECKING

from django.contrib import admin

from outbox_django.stashing import stash_alias
from outbox_django.tasks.models import Result

if TYPE_CHECKING:
    from django.db import models
    from django.http import HttpRequest

    ResultAdminBase = admin.ModelAdmin[Result]
else:
    ResultAdminBase = admin.ModelAdmin


@admin.register(Result)
class ResultAdmin(ResultAdminBase):
    """Tasks, the latest first. Deleting a result deletes no task: its message is in the queue."""

    list_display = ("id", "task_path", "queue_name", "status", "attempts", "enqueued_at", "finished_at")
    list_filter = ("status", "queue_name")
    search_fields = ("=id", "task_path__startswith")
    search_help_text = "An id, or the beginning of a task's path"
    ordering = ("-enqueued_at",)
    show_full_result_count = False
    list_per_page = 50
    fields = readonly_fields = (
        "id",
        "task_path",
        "queue_name",
        "backend",
        "status",
        "args",
        "kwargs",
        "run_after",
        "enqueued_at",
        "started_at",
        "last_attempted_at",
        "finished_at",
        "worker_ids",
        "return_value",
        "tracebacks",
    )

    def get_queryset(self, request: HttpRequest) -> models.QuerySet[Result]:
        """Return the rows of the database where `enqueue` writes."""
        return super().get_queryset(request).using(stash_alias())

    def has_add_permission(self, request: HttpRequest) -> bool:
        """Refuse: `enqueue` makes tasks."""
        del request
        return False

    def has_change_permission(self, request: HttpRequest, obj: Result | None = None) -> bool:
        """Refuse: workers change results."""
        del request, obj
        return False

    @admin.display(description="attempts")
    def attempts(self, result: Result) -> int:
        """Return how often the task was begun."""
        return len(result.worker_ids)

    @admin.display(description="errors")
    def tracebacks(self, result: Result) -> str:
        """Return the traceback of each failed attempt."""
        return "\n".join(traceback for _, traceback in result.errors) or "-"
