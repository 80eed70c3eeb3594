"""`outbox hold`, shared with Django's `outbox_hold`: list, add, release, skip and dead-letter.

Importing this needs only the base install; running it needs psycopg 3, and nothing else of the extra `[harvester]`.
"""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

from outbox_core.cli.database import DATA_SOURCE_VARIABLE, connect, operator
from outbox_core.errors import InvalidConfig, OutboxTableError, StoreUnavailable
from outbox_core.holds import Hold, Holds
from outbox_core.printable import printable, printable_json
from outbox_core.schema import TableName

if TYPE_CHECKING:
    from collections.abc import Mapping

    from outbox_core.stasher import Connection

_SHOWN = 1000
_DESCRIPTION = (
    "Say what the harvester is not to publish, and what is to become of records that Kafka refused. Everything may be "
    "done while it runs, and again; it takes effect within a second."
)


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `hold` and its own commands to the commands of `outbox`."""
    hold = commands.add_parser("hold", help="pause topics, look after refused records", description=_DESCRIPTION)
    place = argparse.ArgumentParser(add_help=False)
    place.add_argument(
        "--dsn",
        metavar="DSN",
        help=f"the database: key=value pairs or a postgresql:// URL; default: {DATA_SOURCE_VARIABLE}",
    )
    place.add_argument(
        "--table",
        metavar="NAME",
        default=os.environ.get("OUTBOX_TABLE") or "outbox",
        help="the outbox: `table` or `schema.table`; default: OUTBOX_TABLE, else outbox",
    )
    add_actions(hold, [place])
    hold.set_defaults(command=_run)


def add_actions(parser: argparse.ArgumentParser, parents: list[argparse.ArgumentParser] | None = None) -> None:
    """Add the actions, with their arguments, to the parser of a command."""
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")

    def action(name: str, text: str, description: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=description, parents=parents or []
        )
        return made

    listing = action("list", "what is held, and why", "Show what is held, one hold a line, tab-separated.")
    _add_lane(listing, "only holds of this topic", "only holds of this key of the topic")
    listing.add_argument("--json", action="store_true", help="one JSON object a line, with everything")
    listing.add_argument(
        "--limit", type=int, default=_SHOWN, metavar="N", help="so many at most; 0 for all; default: %(default)s"
    )

    adding = action("add", "pause a topic, a key or a record", "Pause a topic, one of its keys, or a record.")
    _add_lane(adding, "the topic", "only this key of it")
    adding.add_argument("--record", type=int, metavar="ID", help="this record, and its key behind it")
    adding.add_argument("--reason", default="", metavar="TEXT", help="why, for those who look at the list")

    releasing = action(
        "release",
        "publish what was held",
        "Publish held records, a key or a topic again, in order. A topic alone means its own hold: keys and records "
        "of it that are held stay so.",
    )
    _add_records(releasing)
    for name, text in (
        ("skip", "delete held records"),
        ("dead-letter", "publish held records to the dead-letter topic instead"),
    ):
        after = "for good" if name == "skip" else "The harvester does it, and removes them"
        described = (
            f"{text[0].upper()}{text[1:]} {after}." if name == "skip" else f"{text[0].upper()}{text[1:]}. {after}."
        )
        _add_records(action(name, text, f"{described} What waited behind them goes on."))


def run_action(connection: Connection, holds: Holds, options: Mapping[str, Any]) -> str:
    """Do what the options of `add_actions` say, on a connection that commits each statement, and return the report."""
    run = {"list": _list, "add": _add, "release": _release, "skip": _skip, "dead-letter": _dead_letter}
    return run[options["action"]](connection, holds, options)


def _add_lane(parser: argparse.ArgumentParser, topic: str, key: str) -> None:
    parser.add_argument("--topic", metavar="TOPIC", help=topic)
    parser.add_argument("--key", metavar="KEY", help=key)


def _add_records(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", nargs="*", type=int, metavar="ID", help="ids of held records")
    parser.add_argument("--all", action="store_true", help="every held record (of the topic, or of the key, if named)")
    _add_lane(parser, "of this topic", "of this key of the topic")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the outbox's history")


def _list(connection: Connection, holds: Holds, options: Mapping[str, Any]) -> str:
    limit = options["limit"] or None
    if limit is not None and limit < 0:
        raise InvalidConfig("--limit: must not be negative")
    wanted = None if limit is None else limit + 1
    found = holds.list(connection, topic=options["topic"], key=options["key"], limit=wanted)
    shown = found if limit is None else found[:limit]
    lines = [_as_json(hold) if options["json"] else _as_line(hold) for hold in shown]
    if len(shown) < len(found) and not options["json"]:
        lines.append("... and more: --limit 0 shows all, --topic and --key those of one")
    return "".join(f"{line}\n" for line in lines)


def _as_line(hold: Hold) -> str:
    what = "topic" if hold.key is None else "key"
    if hold.record_id is not None:
        what = f"record {hold.record_id}"
    asked = "waits for the dead-letter topic" if hold.dead_letter else ""
    words = [hold.reason, hold.error or "", asked]
    parts = [what, printable(hold.topic), "-" if hold.key is None else printable(hold.key)]
    since = hold.create_time.isoformat(timespec="seconds")
    return "\t".join([*parts, since, "; ".join(printable(word) for word in words if word)])


def _as_json(hold: Hold) -> str:
    return printable_json({**hold._asdict(), "create_time": hold.create_time.isoformat()})


def _add(connection: Connection, holds: Holds, options: Mapping[str, Any]) -> str:
    topic, key, record, reason = (options[name] for name in ("topic", "key", "record", "reason"))
    if (topic is None) == (record is None) or (record is not None and key is not None):
        raise InvalidConfig("add: name a --topic, a --topic and a --key, or a --record")
    if record is not None:
        what, added = f"record {record}", holds.add_record(connection, record, reason=reason)
    else:
        what = f"topic {topic}" if key is None else f"key {key} of topic {topic}"
        added = holds.add(connection, topic, key, reason=reason)
    return f"{printable(what)} is held\n" if added else f"{printable(what)} was held already\n"


def _selected(options: Mapping[str, Any]) -> dict[str, Any]:
    if bool(options["records"]) == bool(options["all"]):
        raise InvalidConfig(f"{options['action']}: name the ids of held records, or say --all")
    names = ("topic", "key", "reason")
    return {"records": options["records"] or None, **{name: options[name] for name in names}}


def _release(connection: Connection, holds: Holds, options: Mapping[str, Any]) -> str:
    topic, key = options["topic"], options["key"]
    if options["records"] or options["all"]:
        selected = _selected(options)
        if options["all"]:
            number = holds.release_records(connection, topic=topic, key=key, reason=options["reason"])
        else:
            number = holds.release(connection, **selected)
    elif topic is None:
        raise InvalidConfig("release: name the ids of held records, a --topic, a --topic and a --key, or say --all")
    else:
        number = holds.release(connection, topic=topic, key=key, reason=options["reason"])
    return f"released {_count(number, 'hold')}\n"


def _skip(connection: Connection, holds: Holds, options: Mapping[str, Any]) -> str:
    number = holds.skip(connection, **_selected(options))
    return f"skipped {_count(number, 'record')}{_not_held(number, options)}\n"


def _dead_letter(connection: Connection, holds: Holds, options: Mapping[str, Any]) -> str:
    number = holds.dead_letter(connection, **_selected(options))
    promised = "; the harvester publishes what it was asked for to the dead-letter topic" if number else ""
    return f"asked for {_count(number, 'record')}{_not_held(number, options)}{promised}\n"


def _not_held(number: int, options: Mapping[str, Any]) -> str:
    missing = len(set(options["records"])) - number
    return f" ({missing} of the given ids: nothing to do)" if options["records"] and missing > 0 else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _run(options: argparse.Namespace) -> int:
    try:
        name = TableName.parse(options.table)
    except InvalidConfig as error:
        raise InvalidConfig(f"--table: {error}") from None
    connection, name = connect(options.dsn, name)
    holds = Holds(name, operator())
    with connection:
        import psycopg

        try:
            report = run_action(connection, holds, vars(options))
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
            raise OutboxTableError(f"{holds.table} is no table of holds: {error.diag.message_primary}") from None
        except psycopg.errors.InsufficientPrivilege as error:
            needs = f"rights on {holds.table} and, to skip, DELETE on {holds.outbox}"
            raise OutboxTableError(f"{error.diag.message_primary}; role {connection.info.user} needs {needs}") from None
        except psycopg.OperationalError as error:
            raise StoreUnavailable(f"the database failed: {error}; run the command again") from None
    sys.stdout.write(report)
    return 0
