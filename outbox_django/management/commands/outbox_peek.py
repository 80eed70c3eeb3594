"""`manage.py outbox_peek`: `outbox peek`, in the database of the Django settings."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox_core.cli.harvest import EXIT_NOT_STARTED, sentences
from outbox_core.cli.peek import DESCRIPTION, add_peek_arguments, run_peek
from outbox_core.errors import OutboxError
from outbox_django.settings import outbox_settings
from outbox_django.stashing import stash_alias


class Command(BaseCommand):
    """A door onto `outbox_core.cli.peek`."""

    help = DESCRIPTION
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the outbox's alias and the options that select records."""
        parser.add_argument("--database", metavar="ALIAS", help="alias in DATABASES; default: where stash writes")
        parser.add_argument("--table", metavar="NAME", help="`table` or `schema.table`; default: OUTBOX['TABLE']")
        add_peek_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the records."""
        del args
        try:
            from outbox_django.harvesting import data_source

            table = options["table"] or outbox_settings().table.quoted
            run_peek(data_source(options["database"] or stash_alias()), table, options, self.stdout)
        except OutboxError as error:
            raise CommandError("\n".join(sentences(error)), returncode=EXIT_NOT_STARTED) from None
        except ModuleNotFoundError as error:
            message = f"needs {error.name}, which is not installed; pip install 'kafka-outbox[harvester]'"
            raise CommandError(message, returncode=EXIT_NOT_STARTED) from error
