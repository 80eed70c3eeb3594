"""Options and errors that the commands share which are doors onto those of the core."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from django.core.management.base import BaseCommand, CommandError, CommandParser

from outbox_core.cli.harvest import EXIT_NOT_STARTED, sentences
from outbox_core.cli.terminal import EXIT_BROKEN_PIPE, EXIT_INTERRUPTED, FULL, drop_output, hide_values
from outbox_core.errors import OutboxError


class DiscreetCommand(BaseCommand):
    """A command whose parser shows no password of a DSN that was not put in quotes."""

    def create_parser(self, prog_name: str, subcommand: str, **kwargs: Any) -> CommandParser:
        """Build the parser, which Django does not let us choose."""
        parser = super().create_parser(prog_name, subcommand, **kwargs)
        end = parser.error
        parser.error = lambda message: end(hide_values(message))  # type: ignore[method-assign]
        return parser


class Door(DiscreetCommand):
    """A command that ends without a traceback on Ctrl-C and when its output cannot be written."""

    requires_system_checks = ()

    def execute(self, *args: Any, **options: Any) -> str | None:
        """Run the command."""
        try:
            output = super().execute(*args, **options)
            sys.stdout.flush()
        except KeyboardInterrupt:
            raise CommandError("interrupted", returncode=EXIT_INTERRUPTED) from None
        except BrokenPipeError:  # `manage.py outbox_peek | head`
            drop_output()
            sys.exit(EXIT_BROKEN_PIPE)
        except OSError as error:
            if error.errno not in FULL:
                raise
            drop_output()
            raise CommandError(f"the output cannot be written: {error.strerror}", returncode=EXIT_NOT_STARTED) from None
        return output


def add_database_argument(parser: argparse.ArgumentParser) -> None:
    """Add Django's alias of the outbox's database."""
    parser.add_argument("--database", metavar="ALIAS", help="alias in DATABASES; default: where stash writes")


def add_place_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the alias, and the outbox table."""
    add_database_argument(parser)
    parser.add_argument("--table", metavar="NAME", help="`table` or `schema.table`; default: OUTBOX['TABLE']")


@contextmanager
def command_errors() -> Iterator[None]:
    """Turn the core's errors into CommandError, a line for each mistake; so for a package that is not installed."""
    try:
        yield
    except OutboxError as error:
        raise CommandError("\n".join(sentences(error)), returncode=EXIT_NOT_STARTED) from None
    except ModuleNotFoundError as error:
        message = f"needs {error.name}, which is not installed; pip install 'kafka-outbox[harvester]'"
        raise CommandError(message, returncode=EXIT_NOT_STARTED) from error
