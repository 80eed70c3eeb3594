"""`outbox peek`, shared with Django's `outbox_peek`: pending records, without taking them."""

from __future__ import annotations

import argparse
import sys
from typing import TYPE_CHECKING, Any

from outbox_core.cli.database import DATA_SOURCE_VARIABLE, add_place_arguments, as_libpq_reads_it, find_place
from outbox_core.cli.terminal import Output, is_terminal, write_table
from outbox_core.errors import InvalidConfig, MissingExtra
from outbox_core.printable import preview, printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox_core.doctor.pending import PendingRecord

DESCRIPTION = (
    "Show pending records, the oldest first, without taking them: a table on a terminal, elsewhere one record a line, "
    "tab-separated. Needs SELECT. The search ends after the oldest 100,000 records."
)
_TITLES = ("ID", "TOPIC", "KEY", "AGE", "HELD", "BYTES", "VALUE")


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `peek` to the commands of `outbox`."""
    parser = commands.add_parser("peek", help="show pending records, without taking them", description=DESCRIPTION)
    add_place_arguments(parser)
    add_peek_arguments(parser)
    parser.set_defaults(command=_run)


def add_peek_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that select records."""
    parser.add_argument("--topic", metavar="TOPIC", help="only of this topic")
    parser.add_argument("--key", metavar="KEY", help="only with this key")
    parser.add_argument("--header", metavar="NAME", help="only with a header of this name")
    parser.add_argument("--id", type=int, metavar="ID", help="only this record, with its headers and whole value")
    parser.add_argument("--after", type=int, metavar="ID", help="only with larger ids, for the next page")
    parser.add_argument("--limit", type=int, default=20, metavar="N", help="at most N; default: %(default)s")
    parser.add_argument("--json", action="store_true", help="one JSON object a line, with headers and whole values")


def run_peek(data_source: str, table: str, options: Mapping[str, Any], out: Output) -> None:
    """Print the records that the options of `add_peek_arguments` select."""
    try:
        from outbox_core.doctor.pending import MOST_RECORDS, PeekQuery, peek
        from outbox_core.doctor.session import DatabaseSession
    except ImportError as error:
        raise MissingExtra(f"needs {error.name}, which is not installed; pip install 'psycopg[binary]'") from None
    if not 1 <= options["limit"] <= MOST_RECORDS:
        raise InvalidConfig(f"--limit: must be a number from 1 to {MOST_RECORDS}")
    whole = options["json"] or options["id"] is not None
    query = PeekQuery(
        topic=options["topic"],
        key=options["key"],
        record_id=options["id"],
        header=options["header"],
        limit=options["limit"],
        after=options["after"],
        value_bytes=2**30 if whole else 400,
    )
    with DatabaseSession(data_source, table, application_name="kafka-outbox peek") as session:
        records = peek(session, query)
    if options["json"]:
        for record in records:
            out.write(printable_json(record.as_json()) + "\n")
    elif options["id"] is not None:
        if not records:
            raise InvalidConfig(f"--id: there is no record {options['id']}: it is published, or never was there")
        _write_whole(records[0], out)
    elif records:
        write_table(out, _TITLES, [_as_row(record) for record in records])
    elif is_terminal(out):
        out.write("no such record among the oldest 100,000\n")


def _run(options: argparse.Namespace) -> int:
    dsn, name = find_place(options)
    if not dsn:
        raise InvalidConfig(f"no database: pass --dsn or -f, or set {DATA_SOURCE_VARIABLE}")
    run_peek(as_libpq_reads_it(dsn), name.quoted, vars(options), sys.stdout)
    return 0


def _as_row(record: PendingRecord) -> list[str]:
    return [
        str(record.id),
        record.topic,
        "-" if record.key is None else record.key,
        "-" if record.age_seconds is None else f"{record.age_seconds:.0f} s",
        "-" if record.hold_id is None else record.hold_reason or "yes",
        "tombstone" if record.value is None else str(record.size_bytes),
        "" if record.value is None else preview(record.value),
    ]


def _write_whole(record: PendingRecord, out: Output) -> None:
    shown = record.as_json()
    headers, value = shown.pop("headers"), shown.pop("value")
    for name, content in shown.items():
        if content not in (None, "") and name != "value_is_cut":
            out.write(f"{name:12}  {printable(str(content))}\n")
    for name, content in headers:
        out.write(f"{'header':12}  {printable(name)}: {_as_text(content)}\n")
    out.write(f"{'value':12}  {_as_text(value)}\n")


def _as_text(content: object) -> str:
    if content is None:
        return "null (a tombstone)"
    return printable(content) if isinstance(content, str) else printable_json(content)
