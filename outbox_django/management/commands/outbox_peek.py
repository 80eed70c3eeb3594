"""`manage.py outbox_peek`: `outbox peek`, in the database of the Django settings."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandParser

from outbox_core.cli.peek import DESCRIPTION, add_peek_arguments, run_peek
from outbox_django.databases import direct_alias
from outbox_django.management.doors import Door, add_place_arguments, command_errors
from outbox_django.settings import outbox_settings


class Command(Door):
    """A door onto `outbox_core.cli.peek`."""

    help = DESCRIPTION

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the outbox's alias and the options that select records."""
        add_place_arguments(parser)
        add_peek_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Print the records."""
        del args
        with command_errors():
            from outbox_django.harvesting import data_source

            table = options["table"] or outbox_settings().table.quoted
            run_peek(data_source(direct_alias(options["database"])), table, options, self.stdout)
