"""`outbox hold`, shared with Django's `outbox_hold`: list, add, release, skip and dead-letter.

Importing this needs only the base install; running it needs psycopg 3, and nothing else of the extra `[harvester]`.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox_core.cli.database import IS_READ_ONLY, add_place_arguments, connect, find_place, operator
from outbox_core.cli.terminal import Output, is_terminal, write_table
from outbox_core.errors import InvalidConfig, OutboxError, OutboxTableError, StoreUnavailable
from outbox_core.holds import Hold, Holds
from outbox_core.printable import printable, printable_json

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from outbox_core.stasher import Connection

_SHOWN = 1000
_NAMED = 20
LOCK_TIMEOUT = "10s"  # longer than the harvester's statements have rows locked; a migration takes minutes
_TITLES = ("WHAT", "TOPIC", "KEY", "SINCE", "KEPT", "WHY")
_DESCRIPTION = (
    "Say what the harvester is not to publish, and what is to become of records that Kafka refused. Everything may be "
    "done while it runs, and again; it takes effect within a second."
)
EPILOG = (
    "Exit codes: 0 done, or nothing was to do; 1 not confirmed; 2 wrong options or settings, or the database failed."
)
EXIT_NOT_CONFIRMED = 1


@dataclass(frozen=True, slots=True)
class Desk:
    """The output of an action, its notes to the user, and a question to a user who is there.

    Attributes:
        out: for what was asked for.
        notes: for hints that a program reading `out` must not get.
        ask: asks a yes-or-no question; None if nobody is there to answer.
        command: the command as the user typed it, for hints: `outbox hold`, `manage.py outbox_hold`.
    """

    out: Output
    notes: Output
    ask: Callable[[str], bool] | None
    command: str

    def note(self, text: str) -> None:
        """Write a hint."""
        self.notes.write(f"note: {printable(text)}\n")


class NotConfirmed(OutboxError):
    """The user has not confirmed the action, so nothing was done."""


def ask_on_terminal(question: str) -> bool:
    """Ask on standard input, and take no answer for no."""
    try:
        return input(f"{question} [y/N] ").strip().lower() in ("y", "yes")
    except (EOFError, KeyboardInterrupt):
        return False


def asker() -> Callable[[str], bool] | None:
    """Return `ask_on_terminal` if somebody is there to answer."""
    return ask_on_terminal if sys.stdin is not None and sys.stdin.isatty() and is_terminal(sys.stdout) else None


def add_command(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `hold` and its own commands to the commands of `outbox`."""
    hold = commands.add_parser(
        "hold", help="pause topics, decide about refused records", description=_DESCRIPTION, epilog=EPILOG
    )
    place = argparse.ArgumentParser(add_help=False)
    add_place_arguments(place)
    add_actions(hold, [place])
    hold.set_defaults(command=_run)


def add_actions(parser: argparse.ArgumentParser, parents: list[argparse.ArgumentParser] | None = None) -> None:
    """Add the actions, with their arguments, to the parser of a command."""
    actions = parser.add_subparsers(title="commands", metavar="COMMAND", required=True, dest="action")

    def action(name: str, text: str, description: str) -> argparse.ArgumentParser:
        made: argparse.ArgumentParser = actions.add_parser(
            name, help=text, description=description, parents=parents or [], epilog=EPILOG
        )
        return made

    listing = action(
        "list",
        "list what is held, and why",
        "Show what is held: a table on a terminal; elsewhere one hold a line, tab-separated, without titles. KEPT is "
        "the number of records that a hold keeps, among the oldest 10,000.",
    )
    _add_lane(listing, "only holds of this topic", "only holds of this key of the topic")
    listing.add_argument("--json", action="store_true", help="one JSON object a line, with everything")
    listing.add_argument(
        "--limit", type=int, default=_SHOWN, metavar="N", help="so many at most; 0 for all; default: %(default)s"
    )

    adding = action("add", "pause a topic, a key or a record", "Pause a topic, one of its keys, or a record.")
    _add_lane(adding, "the topic", "only this key of it")
    adding.add_argument("--record", type=int, metavar="ID", help="this record, and its key behind it")
    adding.add_argument("--reason", default="", metavar="TEXT", help="why, for those who look at the list")
    _add_care(adding)

    _add_endings(action)


def _add_endings(action: Callable[[str, str, str], argparse.ArgumentParser]) -> None:
    """Add the actions that end a hold."""
    releasing = action(
        "release",
        "publish what was held",
        "Publish held records, a key or a topic again, in order. A topic alone means its own hold: keys and records "
        "of it that are held stay so.",
    )
    _add_records(releasing)
    _add_care(releasing, asks=False)
    skipping = action(
        "skip",
        "delete held records",
        "Delete held records for good. What waited behind them goes on. Asks before it does so; with --all and without "
        "a terminal it wants --yes.",
    )
    _add_records(skipping)
    _add_care(skipping)
    burying = action(
        "dead-letter",
        "publish held records to the dead-letter topic instead",
        "Publish held records to the dead-letter topic instead. The harvester does it, and removes them. What waited "
        "behind them goes on.",
    )
    _add_records(burying)
    _add_care(burying, asks=False)


def run_action(connection: Connection, holds: Holds, options: Mapping[str, Any], desk: Desk) -> None:
    """Do what the options of `add_actions` say, on a connection that commits each statement, and report it.

    Raises:
        NotConfirmed: if the user does not want it.
        OutboxError: of the kind that fits the problem.
    """
    run = {"list": _list, "add": _add, "release": _release, "skip": _skip, "dead-letter": _dead_letter}
    run[options["action"]](connection, holds, options, desk)


def _add_lane(parser: argparse.ArgumentParser, topic: str, key: str) -> None:
    parser.add_argument("--topic", metavar="TOPIC", help=topic)
    parser.add_argument("--key", metavar="KEY", help=key)


def _add_records(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("records", nargs="*", type=int, metavar="ID", help="ids of held records")
    parser.add_argument("--all", action="store_true", help="every held record (of the topic, or of the key, if named)")
    _add_lane(parser, "of this topic", "of this key of the topic")
    parser.add_argument("--reason", default="", metavar="TEXT", help="why, for the outbox's history")


def _add_care(parser: argparse.ArgumentParser, *, asks: bool = True) -> None:
    without_effect = "accepted, as by the others; this one never asks"
    parser.add_argument("-y", "--yes", action="store_true", help="do not ask" if asks else without_effect)
    parser.add_argument("-n", "--dry-run", action="store_true", help="show what would be done, and do nothing")


def _list(connection: Connection, holds: Holds, options: Mapping[str, Any], desk: Desk) -> None:
    limit = options["limit"] or None
    if limit is not None and limit < 0:
        raise InvalidConfig("--limit: must not be negative")
    wanted = None if limit is None else limit + 1
    lane = {"topic": options["topic"], "key": options["key"]}
    found = holds.list(connection, **lane, limit=wanted)
    shown = found if limit is None else found[:limit]
    kept = _kept(connection, holds, options) if shown else {}
    if options["json"]:
        for hold in shown:
            desk.out.write(f"{_as_json(hold, kept.get(hold.id, 0))}\n")
        return
    _write_holds(shown, kept, desk.out)
    if len(shown) < len(found):
        desk.note("there are more: --limit 0 shows all, --topic and --key those of one")
    if not found and is_terminal(desk.out):
        desk.note("nothing is held")


def _kept(connection: Connection, holds: Holds, options: Mapping[str, Any]) -> dict[int, int]:
    return holds.count_behind(connection, topic=options["topic"], key=options["key"])


def _write_holds(holds: Sequence[Hold], kept: Mapping[int, int], out: Output) -> None:
    if holds:
        write_table(out, _TITLES, [_as_row(hold, kept.get(hold.id, 0)) for hold in holds])


def _as_row(hold: Hold, kept: int) -> list[str]:
    what = "topic" if hold.key is None else "key"
    if hold.record_id is not None:
        what = f"record {hold.record_id}"
    asked = "waits for the dead-letter topic" if hold.dead_letter else ""
    why = "; ".join(word for word in (hold.reason, hold.error or "", asked) if word)
    since = hold.create_time.isoformat(timespec="seconds")
    return [what, hold.topic, "-" if hold.key is None else hold.key, since, str(kept), why]


def _as_json(hold: Hold, kept: int) -> str:
    return printable_json({**hold._asdict(), "create_time": hold.create_time.isoformat(), "records_kept": kept})


def _add(connection: Connection, holds: Holds, options: Mapping[str, Any], desk: Desk) -> None:
    topic, key, record, reason = (options[name] for name in ("topic", "key", "record", "reason"))
    if (topic is None) == (record is None) or (record is not None and key is not None):
        raise InvalidConfig("add: name a --topic, a --topic and a --key, or a --record")
    what = (
        f"record {record}" if record is not None else f"topic {topic}" if key is None else f"key {key} of topic {topic}"
    )
    doubtful = None if record is not None else holds.doubt(connection, topic, key)
    doubt = "" if doubtful is None else doubtful.text
    if options["dry_run"]:
        desk.out.write(f"{printable(what)} would be held\n")
    elif doubt and not options["yes"] and desk.ask is not None and not desk.ask(f"{printable(doubt)}. Hold it?"):
        raise NotConfirmed(f"{what} is not held")
    else:
        added = (
            holds.add_record(connection, record, reason=reason)
            if record is not None
            else holds.add(connection, topic, key, reason=reason)
        )
        desk.out.write(f"{printable(what)} {'is held' if added else 'was held already'}\n")
    if doubt and (desk.ask is None or options["yes"] or options["dry_run"]):
        desk.note(doubt)


def _selected(options: Mapping[str, Any]) -> dict[str, Any]:
    if bool(options["records"]) == bool(options["all"]):
        raise InvalidConfig(f"{options['action']}: name the ids of held records, or say --all")
    return {"records": options["records"] or None, "topic": options["topic"], "key": options["key"]}


def _chosen(connection: Connection, holds: Holds, selected: Mapping[str, Any]) -> list[Hold]:
    return [hold for hold in holds.list(connection, **selected) if hold.record_id is not None]


def _release(connection: Connection, holds: Holds, options: Mapping[str, Any], desk: Desk) -> None:
    topic, key = options["topic"], options["key"]
    if options["records"] or options["all"]:
        selected = _selected(options)
    elif topic is None:
        raise InvalidConfig("release: name the ids of held records, a --topic, a --topic and a --key, or say --all")
    else:
        selected = {"topic": topic, "key": key}
    if options["dry_run"]:
        _show_release(connection, holds, options, selected, desk)
        return
    number = (
        holds.release_records(connection, topic=topic, key=key, reason=options["reason"])
        if options["all"]
        else holds.release(connection, **selected, reason=options["reason"])
    )
    desk.out.write(f"released {_count(number, 'hold')}\n")
    if number == 0:
        _note_what_stays(connection, holds, topic, desk)


def _show_release(
    connection: Connection, holds: Holds, options: Mapping[str, Any], selected: Mapping[str, Any], desk: Desk
) -> None:
    found = holds.list(connection, **selected)
    if options["all"]:
        found = [hold for hold in found if hold.record_id is not None]
    elif not options["records"] and options["key"] is None:
        found = [hold for hold in found if hold.key is None and hold.record_id is None]
    _write_holds(found, _kept(connection, holds, options), desk.out)
    desk.out.write(f"would release {_count(len(found), 'hold')}\n")


def _note_what_stays(connection: Connection, holds: Holds, topic: str | None, desk: Desk) -> None:
    """Say what else is held, so that nobody takes `released 0 holds` for the end of all holds."""
    left = holds.list(connection, topic=topic, limit=_SHOWN)
    if not left:
        desk.note(f"nothing is held{f' for topic {topic}' if topic else ''}")
        return
    kinds = {
        "record": sum(hold.record_id is not None for hold in left),
        "key": sum(hold.record_id is None and hold.key is not None for hold in left),
        "topic": sum(hold.record_id is None and hold.key is None for hold in left),
    }
    more = " at least" if len(left) == _SHOWN else ""
    counted = " and ".join(_count(number, kind) for kind, number in kinds.items() if number)
    where = f" of topic {topic}" if topic else ""
    desk.note(
        f"held{where}{more}: {counted}; `{desk.command} list` shows them. Name topics by --topic, keys by --topic and "
        "--key, records by their ids or --all"
    )


def _skip(connection: Connection, holds: Holds, options: Mapping[str, Any], desk: Desk) -> None:
    selected = _selected(options)
    if options["dry_run"] or not options["yes"]:
        found = _chosen(connection, holds, selected)
        if options["dry_run"]:
            _write_holds(found, _kept(connection, holds, options), desk.out)
            desk.out.write(f"would skip {_count(len(found), 'record')}\n")
            return
        if found:
            _confirm_skip(found, _kept(connection, holds, options), options, desk)
    number = holds.skip(connection, **selected, reason=options["reason"])
    desk.out.write(f"skipped {_count(number, 'record')}{_not_held(number, options)}\n")


def _confirm_skip(found: Sequence[Hold], kept: Mapping[int, int], options: Mapping[str, Any], desk: Desk) -> None:
    if desk.ask is None:
        if options["all"]:
            raise InvalidConfig(
                f"skip --all: this deletes {_count(len(found), 'record')} for good; say --yes if that is meant, or see "
                "them with --dry-run"
            )
        return
    _write_holds(found[:_NAMED], kept, desk.out)
    more = f" (and {len(found) - _NAMED} more)" if len(found) > _NAMED else ""
    if not desk.ask(f"Delete {_count(len(found), 'record')}{more} for good?"):
        raise NotConfirmed("nothing was deleted")


def _dead_letter(connection: Connection, holds: Holds, options: Mapping[str, Any], desk: Desk) -> None:
    selected = _selected(options)
    if options["dry_run"]:
        found = _chosen(connection, holds, selected)
        _write_holds(found, _kept(connection, holds, options), desk.out)
        desk.out.write(f"would ask for {_count(len(found), 'record')}\n")
        return
    number = holds.dead_letter(connection, **selected, reason=options["reason"])
    promised = "; the harvester publishes what it was asked for to the dead-letter topic" if number else ""
    desk.out.write(f"asked for {_count(number, 'record')}{_not_held(number, options)}{promised}\n")


def _not_held(number: int, options: Mapping[str, Any]) -> str:
    missing = len(set(options["records"])) - number
    return f" ({missing} of the given ids: nothing to do)" if options["records"] and missing > 0 else ""


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _run(options: argparse.Namespace) -> int:
    dsn, name = find_place(options)
    connection, name = connect(dsn, name)
    holds = Holds(name, operator())
    with connection:
        import psycopg

        try:
            connection.execute("SELECT pg_catalog.set_config('lock_timeout', %s, false)", [LOCK_TIMEOUT])
            run_action(connection, holds, vars(options), Desk(sys.stdout, sys.stderr, asker(), "outbox hold"))
        except NotConfirmed as error:
            sys.stderr.write(f"outbox: {printable(str(error))}\n")
            return EXIT_NOT_CONFIRMED
        except (psycopg.errors.UndefinedTable, psycopg.errors.UndefinedColumn) as error:
            raise OutboxTableError(f"{holds.table} is no table of holds: {error.diag.message_primary}") from None
        except psycopg.errors.InsufficientPrivilege as error:
            needs = f"rights on {holds.table} and, to skip, DELETE on {holds.outbox}"
            raise OutboxTableError(f"{error.diag.message_primary}; role {connection.role} needs {needs}") from None
        except psycopg.errors.LockNotAvailable:
            raise StoreUnavailable(f"{holds.outbox} is locked by another session; `outbox doctor` names it") from None
        except psycopg.errors.ReadOnlySqlTransaction:
            raise StoreUnavailable(IS_READ_ONLY) from None
        except psycopg.OperationalError as error:
            raise StoreUnavailable(f"the database failed: {error}; run the command again") from None
    return 0
