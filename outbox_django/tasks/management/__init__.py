"""The commands of `outbox_django.tasks`."""
