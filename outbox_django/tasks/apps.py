"""The Django application that keeps the results of tasks."""

from django.apps import AppConfig


class OutboxTasksConfig(AppConfig):
    """The table of results and its admin. The backend and `run_tasks` work without it."""

    name = "outbox_django.tasks"
    label = "outbox_tasks"
    verbose_name = "Tasks over the outbox"
    default_auto_field = "django.db.models.BigAutoField"
