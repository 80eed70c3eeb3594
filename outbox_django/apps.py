"""The Django application."""

from django.apps import AppConfig
from django.core.checks import Tags, register


class OutboxDjangoConfig(AppConfig):
    """Kafka outbox: the table, its admin, its checks and `run_harvester`."""

    name = "outbox_django"
    label = "outbox_django"
    verbose_name = "Kafka outbox"
    default_auto_field = "django.db.models.BigAutoField"

    def ready(self) -> None:
        """Register the system checks."""
        from outbox_django import checks

        register(checks.check_settings)
        register(checks.check_databases)
        register(checks.check_harvester)
        register(checks.check_tables, Tags.database)
