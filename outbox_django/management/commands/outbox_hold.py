"""`manage.py outbox_hold`: `outbox hold`, on Django's own connection."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from django.core.management.base import CommandError, CommandParser
from django.db import Error

from outbox_core.cli.database import operator
from outbox_core.cli.harvest import EXIT_NOT_STARTED, shown
from outbox_core.cli.hold import (
    EPILOG,
    EXIT_NOT_CONFIRMED,
    LOCK_TIMEOUT,
    Desk,
    NotConfirmed,
    add_actions,
    asker,
    run_action,
)
from outbox_core.drivers import sqlstate
from outbox_core.errors import OutboxError
from outbox_core.holds import Holds
from outbox_core.schema import TableName
from outbox_django.databases import direct_alias, pinned_search_path, postgres_connection
from outbox_django.management.doors import Door, add_place_arguments
from outbox_django.settings import outbox_settings

_LOCK_NOT_AVAILABLE = "55P03"
_FLAGS_OF_DJANGO = ("--traceback", "--no-color", "--force-color", "--skip-checks")


class Command(Door):
    """A door onto `outbox_core.holds`."""

    help = (
        "Say what the harvester is not to publish, and what is to become of records that Kafka refused. Everything may "
        f"be done while it runs, and again; it takes effect within a second. {EPILOG}"
    )

    def add_arguments(self, parser: CommandParser) -> None:
        """Add the outbox's alias and the actions of `outbox hold`, before and behind which options may stand."""
        add_place_arguments(parser)
        behind = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
        add_place_arguments(behind)
        django = behind.add_argument_group("options of Django")
        django.add_argument("-v", "--verbosity", type=int, choices=range(4), help=argparse.SUPPRESS)
        django.add_argument("--settings", help=argparse.SUPPRESS)  # read before this parser is made
        django.add_argument("--pythonpath", help=argparse.SUPPRESS)
        for flag in _FLAGS_OF_DJANGO:
            django.add_argument(flag, action="store_true", help=argparse.SUPPRESS)
        add_actions(parser, [behind])

    def handle(self, *args: Any, **options: Any) -> None:
        """Run the action, and print its report."""
        del args
        desk = Desk(self.stdout, self.stderr, asker(), "manage.py outbox_hold")
        try:
            name = TableName.parse(options["table"]) if options.get("table") else outbox_settings().table
            connection = postgres_connection(direct_alias(options.get("database")))
            with pinned_search_path(connection, name, LOCK_TIMEOUT) as found:
                run_action(connection, Holds(found, operator()), options, desk)
        except NotConfirmed as error:
            self.stderr.write(str(error))
            sys.exit(EXIT_NOT_CONFIRMED)
        except (OutboxError, Error) as error:
            if sqlstate(error) == _LOCK_NOT_AVAILABLE:
                locked = f"{name} is locked by another session; `manage.py outbox_doctor` names it"
                raise CommandError(locked, returncode=EXIT_NOT_STARTED) from None
            raise CommandError(" ".join(shown(error).split()), returncode=EXIT_NOT_STARTED) from None
