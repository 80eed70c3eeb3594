"""The results of tasks, for those who have "outbox_django.tasks" in INSTALLED_APPS."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Result(models.Model):
    """A task that was enqueued, and what became of it. Its row is written in the transaction that enqueues the task."""

    id = models.CharField(max_length=64, primary_key=True)
    task_path = models.TextField("task")
    queue_name = models.TextField("queue")
    backend = models.TextField()
    status = models.CharField(max_length=10)
    args = models.JSONField(default=list)
    kwargs = models.JSONField(default=dict)
    run_after = models.DateTimeField(null=True)
    enqueued_at = models.DateTimeField(null=True)
    started_at = models.DateTimeField(null=True)
    last_attempted_at = models.DateTimeField(null=True)
    finished_at = models.DateTimeField(null=True)
    return_value = models.JSONField(null=True)
    errors = models.JSONField(default=list)
    worker_ids = models.JSONField(default=list)

    class Meta:
        """The index by which finished tasks are pruned."""

        db_table = "outbox_task_result"
        required_db_vendor = "postgresql"
        verbose_name = "task result"
        verbose_name_plural = "task results"
        indexes: ClassVar = [
            models.Index(
                fields=["finished_at"],
                condition=models.Q(finished_at__isnull=False),
                name="outbox_task_result_finished",
            )
        ]

    def __str__(self) -> str:
        return f"{self.task_path} {self.pk}: {self.status}"
