"""`manage.py outbox_status`: `outbox status`, configured by the Django settings."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandParser

from outbox_core.cli.doctor import STATUS_DESCRIPTION, STATUS_EPILOG, add_status_arguments, run_status
from outbox_core.cli.harvest import add_source_arguments, overrides_from
from outbox_django.management.doors import Door, add_database_argument, command_errors
from outbox_django.settings import outbox_settings


class Command(Door):
    """A door onto `outbox_core.cli.doctor`."""

    help = f"{STATUS_DESCRIPTION} {STATUS_EPILOG}"

    def add_arguments(self, parser: CommandParser) -> None:
        """Add Django's alias of the database, and the options that say where to look."""
        add_database_argument(parser)
        add_source_arguments(parser)
        add_status_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the status."""
        del args
        with command_errors():
            from outbox_django.harvesting import harvest_config

            config = harvest_config(outbox_settings(), options["database"], overrides_from(options))
            exit_code = run_status(config, self.stdout, options)
        if exit_code:
            sys.exit(exit_code)
