"""`manage.py outbox_hold`: `outbox hold`, on Django's own connection."""

from __future__ import annotations

from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser
from django.db import Error

from outbox_core.cli.database import operator
from outbox_core.cli.harvest import shown
from outbox_core.cli.hold import add_actions, run_action
from outbox_core.errors import OutboxError
from outbox_core.holds import Holds
from outbox_core.schema import TableName
from outbox_django.databases import pinned_search_path, postgres_connection, write_alias
from outbox_django.settings import outbox_settings


class Command(BaseCommand):
    """A door onto `outbox_core.holds`."""

    help = (
        "Say what the harvester is not to publish, and what is to become of records that Kafka refused. Everything may "
        "be done while it runs, and again; it takes effect within a second."
    )
    requires_system_checks = ()

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the outbox's alias and the actions of `outbox hold`."""
        parser.add_argument("--database", metavar="ALIAS", help="alias in DATABASES; default: where stash writes")
        parser.add_argument("--table", metavar="NAME", help="`table` or `schema.table`; default: OUTBOX['TABLE']")
        add_actions(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the action, and print its report."""
        del args
        try:
            name = TableName.parse(options["table"]) if options["table"] else outbox_settings().table
            connection = postgres_connection(options["database"] or write_alias("Hold"))
            with pinned_search_path(connection, name) as found:
                told = run_action(connection, Holds(found, operator()), options)
        except (OutboxError, Error) as error:
            raise CommandError(" ".join(shown(error).split())) from None
        self.stdout.write(told, ending="")
