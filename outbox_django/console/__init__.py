"""The console in Django's admin."""

from outbox_django.console.view import console_view, may_view

__all__ = ["console_view", "may_view"]
