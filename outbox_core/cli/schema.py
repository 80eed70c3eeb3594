"""`outbox schema`: the DDL of an outbox table."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from outbox_core.errors import InvalidConfig
from outbox_core.schema import TableName, create_table_sql

if TYPE_CHECKING:
    import argparse


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `schema` to the commands of `outbox`."""
    parser = commands.add_parser(
        "schema", help="print the DDL of an outbox table", description="Print the DDL of an outbox table."
    )
    parser.add_argument("--dialect", choices=["postgresql"], default="postgresql", help="default: %(default)s")
    parser.add_argument("--table", metavar="NAME", default="outbox", help="`table` or `schema.table`; default: outbox")
    parser.add_argument(
        "--layout",
        choices=["binary", "text"],
        default="binary",
        help="binary: bytea values, any key (default); text: goharvest's table",
    )
    parser.set_defaults(command=_print_schema)


def _print_schema(options: argparse.Namespace) -> int:
    try:
        name = TableName.parse(options.table)
    except InvalidConfig as error:
        raise InvalidConfig(f"--table: {error}") from None
    sys.stdout.write(create_table_sql(name, options.layout))
    return 0
