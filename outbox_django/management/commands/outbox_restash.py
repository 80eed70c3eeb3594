"""`manage.py outbox_restash`: `outbox restash`, on Django's own connection."""

from __future__ import annotations

import argparse
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error

from outbox_core.cli.database import operator
from outbox_core.cli.harvest import EXIT_NOT_STARTED, sentences, shown
from outbox_core.cli.restash import DESCRIPTION, add_arguments, parse_time, run_restash
from outbox_core.errors import OutboxError
from outbox_core.retention.archive import Archive
from outbox_core.schema import TableName
from outbox_django.databases import direct_alias, pinned_search_path, postgres_connection
from outbox_django.management.doors import Door, add_place_arguments
from outbox_django.settings import outbox_settings


class Command(Door):
    """A door onto `outbox_core.retention.archive`."""

    help = DESCRIPTION

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the outbox's alias and the options that say what to stash anew."""
        add_place_arguments(parser)
        add_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Stash them anew, and print the number."""
        del args
        for name in ("since", "until"):  # text, if it comes as a keyword argument of call_command
            if isinstance(options[name], str):
                options[name] = _time(options[name])
        try:
            outbox = TableName.parse(options["table"]) if options["table"] else outbox_settings().table
            connection = postgres_connection(direct_alias(options["database"]))
            with pinned_search_path(connection, outbox) as found:
                report = run_restash(connection, Archive(found, operator()), argparse.Namespace(**options))
        except OutboxError as error:
            raise CommandError("\n".join(sentences(error)), returncode=EXIT_NOT_STARTED) from None
        except Error as error:
            raise CommandError(" ".join(shown(error).split()), returncode=EXIT_NOT_STARTED) from None
        self.stdout.write(report, ending="")


def _time(text: str) -> object:
    try:
        return parse_time(text)
    except argparse.ArgumentTypeError as error:
        raise CommandError(str(error), returncode=EXIT_NOT_STARTED) from None
