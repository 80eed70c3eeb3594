"""`manage.py run_harvester`: the harvester of `outbox harvest`, configured by the Django settings."""

from __future__ import annotations

import logging
import sys
from typing import Any

from django.core.management.base import CommandParser

from outbox_core.cli.harvest import add_harvest_arguments, overrides_from, run
from outbox_core.cli.logs import add_log_format_argument, configure_logging
from outbox_django.management.doors import DiscreetCommand, add_database_argument, command_errors
from outbox_django.settings import outbox_settings

_LEVELS = (logging.WARNING, logging.INFO, logging.DEBUG)


class Command(DiscreetCommand):
    """A door onto `outbox_core.cli.harvest`; it never opens a connection of Django's."""

    help = (
        "Publish the outbox's records to Kafka, in order, until stopped: the first SIGTERM, SIGINT or SIGHUP drains, "
        "a second one exits. DATABASES and OUTBOX say what and how; options win over them."
    )
    # An error is one line. The checks would also load every URL and template of the project.
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add Django's alias of the database, and the options of `outbox harvest`."""
        add_database_argument(parser)
        add_harvest_arguments(parser)
        add_log_format_argument(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Harvest. Exit codes as of `outbox harvest`: 2 if it could not start, 1 if an error ended it."""
        del args
        with command_errors():
            from outbox_django.harvesting import harvest_config

            if not logging.getLogger("outbox_core").hasHandlers():
                configure_logging(_LEVELS[min(options["verbosity"], 2)], options["log_format"] or "text")
            config = harvest_config(outbox_settings(), options["database"], overrides_from(options))
        exit_code = run(config, drain=options["drain"], tell=lambda text: self.stderr.write(f"CommandError: {text}"))
        if exit_code:
            sys.exit(exit_code)
