"""`manage.py prune_task_results`: forget tasks that finished long ago."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error

from outbox_core.cli.harvest import EXIT_NOT_STARTED, shown
from outbox_core.cli.inbox import parse_age
from outbox_core.errors import OutboxError
from outbox_django.databases import postgres_connection
from outbox_django.management.doors import Door
from outbox_django.stashing import stash_alias
from outbox_django.tasks import results


class Command(Door):
    """A door onto `outbox_django.tasks.results`."""

    help = "Delete the results of tasks that finished longer ago, successful or not."

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the age."""
        parser.add_argument("--older-than", required=True, metavar="AGE", help="for example 7d, 12h or 1d12h")

    def handle(self, *args: Any, **options: Any) -> None:
        """Prune, and print the number."""
        del args
        try:
            age = parse_age(options["older_than"])
            pruned = results.prune(age, postgres_connection(stash_alias()).alias)
        except (OutboxError, ValueError, Error) as error:
            raise CommandError(" ".join(shown(error).split()), returncode=EXIT_NOT_STARTED) from None
        self.stdout.write(f"Deleted results: {pruned}")
