"""`manage.py outbox_doctor`: `outbox doctor`, configured by the Django settings."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import CommandParser

from outbox_core.cli.doctor import DOCTOR_DESCRIPTION, DOCTOR_EPILOG, add_doctor_arguments, run_doctor
from outbox_core.cli.harvest import add_source_arguments, overrides_from
from outbox_core.doctor.findings import ManagePy
from outbox_django.databases import direct_alias, option_of
from outbox_django.management.doors import Door, add_database_argument, command_errors
from outbox_django.settings import outbox_settings


class Command(Door):
    """A door onto `outbox_core.cli.doctor`."""

    help = f"{DOCTOR_DESCRIPTION} {DOCTOR_EPILOG}"

    def add_arguments(self, parser: CommandParser) -> None:
        """Add Django's alias of the database, and the options that say where to look."""
        add_database_argument(parser)
        add_source_arguments(parser)
        add_doctor_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the findings."""
        del args
        with command_errors():
            from outbox_django.harvesting import harvest_config

            alias = direct_alias(options["database"])
            config = harvest_config(outbox_settings(), alias, overrides_from(options))
            commands = ManagePy(option_of(alias), options["table"] or "")
            exit_code = run_doctor(config, self.stdout, options, commands)
        if exit_code:
            sys.exit(exit_code)
