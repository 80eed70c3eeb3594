"""`manage.py prune_task_results`: forget tasks that finished long ago."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox_core.cli.inbox import parse_age
from outbox_django.stashing import stash_alias
from outbox_django.tasks import results


class Command(BaseCommand):
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
        except ValueError as error:
            raise CommandError(str(error)) from None
        self.stdout.write(f"Deleted results: {results.prune(age, stash_alias())}")
