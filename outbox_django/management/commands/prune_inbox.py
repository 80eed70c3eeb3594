"""`manage.py prune_inbox`: `outbox inbox prune`, on Django's own connection."""

from __future__ import annotations

from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error

from outbox_core.cli.harvest import EXIT_NOT_STARTED, shown
from outbox_core.cli.inbox import add_prune_arguments, parse_age, report
from outbox_core.drivers import sqlstate
from outbox_core.errors import OutboxError
from outbox_core.schema import TableName
from outbox_django.databases import direct_alias, pinned_search_path, postgres_connection
from outbox_django.inbox import InboxTable
from outbox_django.management.doors import Door
from outbox_django.settings import outbox_settings

_UNDEFINED_TABLE = "42P01"


class Command(Door):
    """A door onto `outbox_core.inbox`."""

    help = (
        "Delete from the inbox what was accepted longer ago, in batches, the oldest first. A message that is repeated "
        "later than that is accepted again."
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the table and the selection of its rows."""
        parser.add_argument("--database", metavar="ALIAS", help="alias in DATABASES; default: where accept writes")
        parser.add_argument("--table", metavar="NAME", help="`table` or `schema.table`; default: OUTBOX['INBOX_TABLE']")
        add_prune_arguments(parser)

    def handle(self, *args: Any, **options: Any) -> None:
        """Prune, and print the number."""
        del args
        try:
            name = TableName.parse(options["table"]) if options["table"] else outbox_settings().inbox_table
            connection = postgres_connection(direct_alias(options["database"], "Inbox"))
            given = options["older_than"]  # text, if it comes as a keyword argument of call_command
            age = parse_age(given) if isinstance(given, str) else given
            with pinned_search_path(connection, name) as found:
                pruned = InboxTable(found.quoted).prune(age, batch=options["batch"], using=connection.alias)
        except (OutboxError, ValueError, Error) as error:
            if sqlstate(error) == _UNDEFINED_TABLE:
                make = f"`manage.py migrate` makes Django's; `outbox schema --inbox {name}` prints any"
                raise CommandError(f"there is no table {name}; {make}", returncode=EXIT_NOT_STARTED) from None
            raise CommandError(" ".join(shown(error).split()), returncode=EXIT_NOT_STARTED) from None
        self.stdout.write(report(pruned, name), ending="")
