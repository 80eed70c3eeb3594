"""`outbox schema`: the DDL of an outbox with its holds and history, or of an inbox, or the grants of an outbox."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Literal

from outbox_core.cli.database import DATA_SOURCE_VARIABLE, TABLE_VARIABLE, connect_to_schema, find_place
from outbox_core.errors import InvalidConfig, OutboxTableError, StoreUnavailable
from outbox_core.retention.archive import archive_statements
from outbox_core.schema import (
    TableName,
    add_checks_sql,
    checks_of,
    create_history_sql,
    create_hold_sql,
    create_inbox_sql,
    create_table_sql,
    grants_sql,
    notify_sql,
    validate_checks_sql,
    violations_sql,
)

if TYPE_CHECKING:
    import argparse

    from outbox_core.stores.postgres.schema_changes import Part


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `schema` to the commands of `outbox`."""
    parser = commands.add_parser(
        "schema",
        help="print the DDL of an outbox table, or apply it",
        description="Print the DDL of an outbox table, its holds and its history, or with --inbox that of an inbox "
        "table, or with --grants the rights that its roles need. With --apply make the tables in the database.",
    )
    parser.add_argument("--dialect", choices=["postgresql"], default="postgresql", help="default: %(default)s")
    tables = parser.add_mutually_exclusive_group()
    tables.add_argument(
        "--table",
        metavar="NAME",
        help=f"`table` or `schema.table`; default: outbox; environment, for --apply and --version: {TABLE_VARIABLE}",
    )
    inbox = "print an inbox table instead; its name; default: inbox"
    tables.add_argument("--inbox", metavar="NAME", nargs="?", const="inbox", help=inbox)
    parser.add_argument(
        "--only",
        choices=["outbox", "hold", "history", "checks"],
        help="print one thing: the outbox table, the table of its holds, the two tables of its history, or the CHECK "
        "constraints for an outbox that was made before there were any",
    )
    parser.add_argument(
        "--grants",
        nargs=2,
        metavar=("WRITER", "HARVESTER"),
        help="print the GRANTs of an existing outbox instead: for the role of the applications that stash, and for the "
        "harvester's",
    )
    archive = "print the archive of an existing outbox instead, for `retention: archive`"
    parser.add_argument("--archive", action="store_true", help=archive)
    parser.add_argument(
        "--layout",
        choices=["binary", "text"],
        default="binary",
        help="binary: bytea values, any key (default); text: goharvest's table",
    )
    trigger = "print the trigger for harvesters with `notify` too; any outbox may be given it later"
    parser.add_argument("--notify", action="store_true", help=trigger)
    _add_database_arguments(parser)
    parser.set_defaults(command=_run)


def _add_database_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--apply",
        action="store_true",
        help="make in the database what is missing there, and say what was done; may be repeated",
    )
    parser.add_argument(
        "--version", action="store_true", help="show which parts of the schema the database has, with their revisions"
    )
    database = parser.add_argument_group("the database, for --apply and --version")
    database.add_argument("-f", "--file", metavar="FILE", help="the YAML file of `outbox harvest`")
    database.add_argument("--dsn", metavar="DSN", help=f"the database; environment: {DATA_SOURCE_VARIABLE}")


def _run(options: argparse.Namespace) -> int:
    if options.apply or options.version:
        return _on_database(options)
    if options.file or options.dsn:
        raise InvalidConfig("--dsn and --file go with --apply or --version: without them no database is asked")
    return _print_schema(options)


def _on_database(options: argparse.Namespace) -> int:
    if options.inbox is not None or options.grants or options.archive:
        raise InvalidConfig("--apply and --version are for an outbox; leave out --inbox, --grants and --archive")
    dsn, wanted = find_place(options)
    connection, found, schema = connect_to_schema(dsn, wanted)
    import psycopg

    from outbox_core.stores.postgres.schema_changes import apply_schema, inspect_schema

    if not found.schema:
        if schema is None:
            raise InvalidConfig(f"--table: no schema of the search path exists; write `schema.{found.table}`")
        found = TableName(found.table, schema)
    with connection:
        try:
            if options.version:
                lines = [f"{state.revision or '-':4}  {state.detail}" for state in inspect_schema(connection, found)]
            else:
                with connection.transaction():
                    lines = apply_schema(connection, found, options.layout, _parts(options))
        except psycopg.errors.LockNotAvailable:
            raise StoreUnavailable(f"{found} is locked by another session; `outbox doctor` names it") from None
        except psycopg.OperationalError as error:
            raise StoreUnavailable(f"the database failed: {error}; run the command again") from None
        except psycopg.Error as error:
            raise OutboxTableError(f"{error.diag.message_primary}, for role {connection.role}") from None
    sys.stdout.write("".join(f"{line}\n" for line in lines))
    return 0


def _parts(options: argparse.Namespace) -> list[Part]:
    parts: list[Part] = [options.only] if options.only else ["outbox", "hold", "history", "checks"]
    return [*parts, "notify"] if options.notify else parts


def _print_schema(options: argparse.Namespace) -> int:
    if options.inbox is not None:
        sys.stdout.write(_inbox(options))
        return 0
    name = _name("--table", options.table or "outbox")
    if options.archive or options.grants:
        sys.stdout.write(_beside(options, name))
        return 0
    if options.only in {None, "outbox"}:
        sys.stdout.write(create_table_sql(name, options.layout))
    if options.only in {None, "hold"}:
        sys.stdout.write(create_hold_sql(name))
    if options.only in {None, "history"}:
        sys.stdout.write(create_history_sql(name))
    if options.only == "checks":
        sys.stdout.write(_checks(name, options.layout))
    if options.notify:
        sys.stdout.write(notify_sql(name))
    return 0


def _beside(options: argparse.Namespace, name: TableName) -> str:
    """Return the archive or the grants of an outbox that exists."""
    if options.only or options.notify or (options.archive and options.grants):
        option = "--archive" if options.archive else "--grants"
        raise InvalidConfig(f"{option}: print nothing else; leave out --only, --notify and the like")
    if options.grants:
        return grants_sql(name, options.grants[0], options.grants[1], options.layout)
    return "".join(f"{statement.rstrip()};\n" for statement in archive_statements(name))


def _inbox(options: argparse.Namespace) -> str:
    if options.notify:
        raise InvalidConfig("--notify: belongs to an outbox table, not to an inbox")
    if options.archive:
        raise InvalidConfig("--archive: belongs to an outbox table, not to an inbox")
    if options.only:
        raise InvalidConfig("--only: an inbox is one table; leave it out")
    if options.grants:
        raise InvalidConfig("--grants: belong to an outbox table; an inbox needs SELECT, INSERT and DELETE")
    return create_inbox_sql(_name("--inbox", options.inbox))


def _checks(name: TableName, layout: Literal["binary", "text"]) -> str:
    """Return the DDL of the constraints, with the next steps as a comment: rows may have to be mended in between."""
    checks = checks_of(layout)
    later = (
        "Rows from before are not looked at. When this finds none:",
        *violations_sql(name, checks).splitlines(),
        "this makes the constraints hold for all rows, while the table is in use:",
        *validate_checks_sql(name, checks).splitlines(),
    )
    return add_checks_sql(name, checks) + "".join(f"-- {line}\n" for line in later)


def _name(option: str, text: str) -> TableName:
    try:
        return TableName.parse(text)
    except InvalidConfig as error:
        raise InvalidConfig(f"{option}: {error}") from None
