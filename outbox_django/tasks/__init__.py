"""Django's tasks over the outbox: a task that is enqueued in a transaction exists if and only if that commits.

    TASKS = {
        "default": {
            "BACKEND": "outbox_django.tasks.OutboxTaskBackend",
            "OPTIONS": {
                "queue": {
                    "bootstrap_servers": "broker:9092",
                    "message_topic": "shop.messages",
                    "marker_topic": "shop.markers",
                },
            },
        },
    }

`enqueue` stashes the task as a message of a queue, a harvester publishes it, `manage.py run_tasks` runs it. With
"outbox_django.tasks" in INSTALLED_APPS the results are kept in a table. See `docs/how-to-django-tasks.md`.

Tasks are those of `django.tasks` (Django 6), or of the package django-tasks (Django 5.2, extra `[django-tasks]`).
Needs the extra `[queue]`.
"""

from outbox_django.tasks.backend import OutboxTaskBackend

__all__ = ["OutboxTaskBackend"]
