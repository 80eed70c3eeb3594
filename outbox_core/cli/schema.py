"""`outbox schema`: the DDL of an outbox table and its holds, or of an inbox table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from outbox_core.errors import InvalidConfig
from outbox_core.schema import TableName, create_hold_sql, create_inbox_sql, create_table_sql, notify_sql

if TYPE_CHECKING:
    import argparse


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `schema` to the commands of `outbox`."""
    parser = commands.add_parser(
        "schema",
        help="print the DDL of an outbox table",
        description="Print the DDL of an outbox table and its holds, or with --inbox that of an inbox table.",
    )
    parser.add_argument("--dialect", choices=["postgresql"], default="postgresql", help="default: %(default)s")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument("--table", metavar="NAME", default="outbox", help="`table` or `schema.table`; default: outbox")
    tables.add_argument(
        "--inbox",
        metavar="NAME",
        nargs="?",
        const="inbox",
        help="print an inbox table instead; its name; default: inbox",
    )
    parser.add_argument(
        "--only",
        choices=["outbox", "hold"],
        help="print one of the two: the outbox table, or the table of its holds",
    )
    parser.add_argument(
        "--layout",
        choices=["binary", "text"],
        default="binary",
        help="binary: bytea values, any key (default); text: goharvest's table",
    )
    parser.add_argument(
        "--notify",
        action="store_true",
        help="print the trigger for harvesters with `notify` too; any outbox may be given it later",
    )
    parser.set_defaults(command=_print_schema)


def _print_schema(options: argparse.Namespace) -> int:
    if options.inbox is not None:
        if options.notify:
            raise InvalidConfig("--notify: belongs to an outbox table, not to an inbox")
        if options.only:
            raise InvalidConfig("--only: an inbox is one table; leave it out")
        sys.stdout.write(create_inbox_sql(_name("--inbox", options.inbox)))
        return 0
    name = _name("--table", options.table)
    if options.only != "hold":
        sys.stdout.write(create_table_sql(name, options.layout))
    if options.only != "outbox":
        sys.stdout.write(create_hold_sql(name))
    if options.notify:
        sys.stdout.write(notify_sql(name))
    return 0


def _name(option: str, text: str) -> TableName:
    try:
        return TableName.parse(text)
    except InvalidConfig as error:
        raise InvalidConfig(f"{option}: {error}") from None
