"""`outbox inbox prune`, and the notation of ages that Django's `prune_inbox` shares; pruning needs psycopg 3."""

from __future__ import annotations

import argparse
import os
import re
import sys
from datetime import timedelta
from typing import TYPE_CHECKING

from outbox_core.cli.database import DATA_SOURCE_VARIABLE, IS_READ_ONLY, connect, read_harvest_file
from outbox_core.cli.terminal import Progress
from outbox_core.errors import InvalidConfig, OutboxTableError, StoreUnavailable
from outbox_core.inbox import PRUNE_BATCH, Inbox
from outbox_core.printable import plural
from outbox_core.schema import TableName

if TYPE_CHECKING:
    from outbox_core.stores.postgres.connection import Connection

_SECONDS = {"d": 86_400, "h": 3_600, "m": 60, "s": 1}
_PART = re.compile(r"([0-9]+)([dhms])")
_LONGEST = timedelta(days=36_500)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `inbox` and its own commands to the commands of `outbox`."""
    inbox = commands.add_parser("inbox", help="prune an inbox table", description="Prune an inbox table.")
    actions = inbox.add_subparsers(title="commands", metavar="COMMAND", required=True)
    description = (
        "Delete what was accepted longer ago, in batches, the oldest first. A message that is repeated later than that "
        "is accepted again."
    )
    parser = actions.add_parser("prune", help="delete messages that were accepted long ago", description=description)
    parser.add_argument("-f", "--file", metavar="FILE", help="the YAML file of `outbox harvest`, for the database")
    parser.add_argument(
        "--dsn",
        metavar="DSN",
        help=f"the database: key=value pairs or a postgresql:// URL; environment: {DATA_SOURCE_VARIABLE}",
    )
    parser.add_argument("--table", metavar="NAME", default="inbox", help="`table` or `schema.table`; default: inbox")
    add_prune_arguments(parser)
    parser.set_defaults(command=_prune)


def add_prune_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of pruning."""
    parser.add_argument("--older-than", type=_age, required=True, metavar="AGE", help="for example 7d, 12h or 1d12h")
    parser.add_argument(
        "--batch", type=_count, default=PRUNE_BATCH, metavar="ROWS", help="rows of a transaction; default: %(default)s"
    )


def parse_age(text: str) -> timedelta:
    """Read `7d`, `12h`, `30m`, `45s` or several of them in a row, or raise ValueError with the right notation."""
    parts = _PART.findall(text)
    if not parts or "".join(number + unit for number, unit in parts) != text:
        raise ValueError(f"{text!r} is not an age; write for example `7d`, `12h` or `1d12h`")
    seconds = sum(int(number) * _SECONDS[unit] for number, unit in parts)
    if not 0 < seconds <= _LONGEST.total_seconds():
        raise ValueError(f"{text!r} is not an age from a second to a hundred years")
    return timedelta(seconds=seconds)


def report(pruned: int, table: object) -> str:
    """Return the report of a run."""
    return f"pruned {plural(pruned, 'message')} from {table}\n"


def _prune(options: argparse.Namespace) -> int:
    try:
        name = TableName.parse(options.table)
    except InvalidConfig as error:
        raise InvalidConfig(f"--table: {error}") from None
    dsn = options.dsn or os.environ.get(DATA_SOURCE_VARIABLE)
    if options.file is not None:
        dsn = dsn or read_harvest_file(options.file).get("dataSource")
    connection, found = connect(dsn, name)
    with connection:
        pruned = _prune_on(connection, Inbox(found), options)
    sys.stdout.write(report(pruned, name))
    return 0


def _prune_on(connection: Connection, inbox: Inbox, options: argparse.Namespace) -> int:
    import psycopg

    try:
        with Progress(sys.stderr, "pruned") as progress:
            return inbox.prune(connection, options.older_than, batch=options.batch, on_batch=progress)
    except psycopg.errors.UndefinedTable:
        raise OutboxTableError(
            f"there is no table {inbox.table}; `outbox schema --inbox {inbox.table}` prints it"
        ) from None
    except (psycopg.errors.UndefinedColumn, psycopg.errors.InvalidSchemaName) as error:
        raise OutboxTableError(f"{inbox.table} is no inbox: {error.diag.message_primary}") from None
    except psycopg.errors.InsufficientPrivilege as error:
        needs = f"role {connection.role} needs SELECT and DELETE to prune"
        raise OutboxTableError(f"{error.diag.message_primary}; {needs}") from None
    except psycopg.errors.ReadOnlySqlTransaction:
        raise StoreUnavailable(IS_READ_ONLY) from None
    except psycopg.OperationalError as error:
        raise StoreUnavailable(f"the database failed: {error}; run the command again to go on") from None


def _age(text: str) -> timedelta:
    try:
        return parse_age(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or int(text) == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return int(text)
