"""`manage.py outbox_doctor`: `outbox doctor`, configured by the Django settings."""

from __future__ import annotations

import sys
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox_core.cli.doctor import DOCTOR_DESCRIPTION, DOCTOR_EPILOG, add_doctor_arguments, run_doctor
from outbox_core.cli.harvest import EXIT_NOT_STARTED, add_source_arguments, overrides_from, sentences
from outbox_core.doctor.findings import ManagePy
from outbox_core.errors import OutboxError
from outbox_django.settings import outbox_settings
from outbox_django.stashing import stash_alias


class Command(BaseCommand):
    """A door onto `outbox_core.cli.doctor`."""

    help = f"{DOCTOR_DESCRIPTION} {DOCTOR_EPILOG}"
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add Django's alias of the database, and the options that say where to look."""
        parser.add_argument("--database", metavar="ALIAS", help="alias in DATABASES; default: where stash writes")
        add_source_arguments(parser)
        add_doctor_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the findings."""
        del args
        try:
            from outbox_django.harvesting import harvest_config

            config = harvest_config(outbox_settings(), options["database"] or stash_alias(), overrides_from(options))
            chosen = ("--database", options["database"]) if options["database"] else ()
            exit_code = run_doctor(config, self.stdout, options, ManagePy(chosen))
        except OutboxError as error:
            raise CommandError("\n".join(sentences(error)), returncode=EXIT_NOT_STARTED) from None
        except ModuleNotFoundError as error:
            message = f"needs {error.name}, which is not installed; pip install 'kafka-outbox[harvester]'"
            raise CommandError(message, returncode=EXIT_NOT_STARTED) from error
        if exit_code:
            sys.exit(exit_code)
