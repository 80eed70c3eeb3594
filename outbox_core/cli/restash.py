"""`outbox restash`, shared with Django's `outbox_restash`: stash archived records anew. Running it needs psycopg 3."""

from __future__ import annotations

import argparse
import sys
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from outbox_core.cli.database import IS_READ_ONLY, add_place_arguments, connect, find_place, operator
from outbox_core.cli.inbox import parse_age
from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.printable import plural, printable
from outbox_core.retention.archive import RESTASH_HEADER, Archive

if TYPE_CHECKING:
    from outbox_core.stasher import Connection

DESCRIPTION = (
    "Stash archived records of a topic anew, in their old order: the harvester publishes them again, with new ids and "
    f"the header {RESTASH_HEADER}, which has the old one. They stay in the archive. Times are those at which records "
    "left the outbox."
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `restash` to the commands of `outbox`."""
    parser = commands.add_parser("restash", help="publish archived records again", description=DESCRIPTION)
    add_place_arguments(parser)
    add_arguments(parser)
    parser.set_defaults(command=_run)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that say what to stash anew."""
    when = "a time like 2026-11-23T14:00+01:00, or an age like 3h or 1d12h; without a zone it is UTC"
    parser.add_argument("--topic", required=True, metavar="TOPIC", help="the topic")
    parser.add_argument("--key", metavar="KEY", help="only this key of it")
    parser.add_argument(
        "--since", type=parse_time, metavar="TIME", help=f"only what was published from then on: {when}"
    )
    parser.add_argument("--until", type=parse_time, metavar="TIME", help="only what was published before")
    parser.add_argument(
        "--dead-letters", action="store_true", help="what went to the dead-letter topic, instead of what was published"
    )
    parser.add_argument("--dry-run", action="store_true", help="only count them")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the outbox's history")


def run_restash(connection: Connection, archive: Archive, options: argparse.Namespace) -> str:
    """Do what the options say, on a connection that commits each statement, and return the report."""
    which = {"key": options.key, "since": options.since, "until": options.until, "dead_letters": options.dead_letters}
    topic = printable(options.topic)
    if not options.dry_run:
        number = archive.restash(connection, options.topic, **which, reason=options.reason)
        return f"stashed {plural(number, 'record')} of topic {topic} anew\n"
    found = archive.select(connection, options.topic, **which)
    if found.first is None or found.last is None:
        return f"no archived record of topic {topic} matches\n"
    times = f"from {found.first.isoformat(timespec='seconds')} to {found.last.isoformat(timespec='seconds')}"
    return f"would stash {plural(found.number, 'record')} of topic {topic} anew, archived {times}\n"


def parse_time(text: str) -> datetime:
    """Read a time, in UTC unless it has a zone, or an age, which counts from now; raise ArgumentTypeError."""
    try:
        return datetime.now(UTC) - parse_age(text)
    except ValueError:
        pass
    try:
        time = datetime.fromisoformat(text)
    except ValueError:
        raise argparse.ArgumentTypeError(
            f"{text!r} is neither a time, as 2026-11-23T14:00+01:00, nor an age, as 3h"
        ) from None
    return time if time.tzinfo else time.replace(tzinfo=UTC)


def _run(options: argparse.Namespace) -> int:
    dsn, name = find_place(options)
    connection, name = connect(dsn, name)
    archive = Archive(name, operator())
    with connection:
        import psycopg

        try:
            report = run_restash(connection, archive, options)
        except psycopg.errors.InsufficientPrivilege as error:
            needs = f"INSERT on {archive.outbox} and SELECT on {archive.table}"
            raise OutboxTableError(f"{error.diag.message_primary}; role {connection.role} needs {needs}") from None
        except psycopg.IntegrityError as error:  # the outbox has got constraints since
            why = f"{error.diag.message_primary}; nothing was stashed: name keys or times without such a record"
            raise OutboxTableError(why) from None
        except psycopg.errors.ReadOnlySqlTransaction:
            raise StoreUnavailable(IS_READ_ONLY) from None
        except psycopg.OperationalError as error:
            raise StoreUnavailable(f"the database failed: {error}; see with --dry-run, then run it again") from None
    sys.stdout.write(report)
    return 0
