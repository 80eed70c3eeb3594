"""`outbox doctor` and `outbox status`, shared with Django's commands; importing them needs only the base install."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from math import isfinite
from typing import TYPE_CHECKING, Any, cast

from outbox_core.cli.harvest import add_source_arguments, missing_extra, overrides_from
from outbox_core.cli.terminal import GREEN, RED, YELLOW, Output, flush, is_terminal, paint
from outbox_core.doctor.findings import CommandLine, Commands, Finding, Verdict
from outbox_core.printable import plural, printable

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from outbox_core.config import HarvestConfig
    from outbox_core.doctor.status import Backlog, DatabaseStatus, KafkaStatus

EXIT_PROBLEM = 1
EXIT_NO_DATABASE = 3
EXIT_NO_KAFKA = 4
EXIT_NEITHER = 5
_CONNECT_SECONDS = 2.0
_WATCH_SECONDS = 2.0
_SHORTEST_WATCH_SECONDS = 0.1
_SUBJECT_WIDTH = 18
_CLEAR = "\x1b[2J\x1b[H"

_SIGNS = {Verdict.OK: ("ok     ", GREEN), Verdict.WARNING: ("warning", YELLOW), Verdict.PROBLEM: ("PROBLEM", RED)}

STATUS_DESCRIPTION = (
    "Show how many records wait, how many of them are held, for how long and for which topics, and which harvester "
    "leads. Needs SELECT on the outbox and its holds. What a service does not tell within two seconds is left out."
)
DOCTOR_DESCRIPTION = (
    "Look at database, table and Kafka for whatever could keep records from being published, or out of order, and say "
    "how to mend it. Changes nothing, and needs no right but SELECT; each finding is printed as soon as it is made."
)
STATUS_EPILOG = (
    f"Exit codes: 0 all is known; 2 wrong options or settings; {EXIT_NO_DATABASE} what waits is not known: the "
    "database did not answer, or the table is locked, missing or not readable; "
    f"{EXIT_NO_KAFKA} Kafka did not answer; {EXIT_NEITHER} neither is known."
)
DOCTOR_EPILOG = (
    f"Exit codes: 0 no problem; {EXIT_PROBLEM} a problem; 2 wrong options or settings; {EXIT_NO_DATABASE} the database "
    f"did not answer, or the table is locked; {EXIT_NO_KAFKA} Kafka did not answer; {EXIT_NEITHER} neither did."
)


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` and `doctor` to the commands of `outbox`."""
    status = commands.add_parser(
        "status",
        help="show what waits, and which harvesters stand by",
        description=STATUS_DESCRIPTION,
        epilog=STATUS_EPILOG,
    )
    _add_source(status)
    add_status_arguments(status)
    status.set_defaults(command=lambda options: run_status(_config(options), sys.stdout, vars(options)))
    doctor = commands.add_parser(
        "doctor",
        help="look for what could keep records from Kafka",
        description=DOCTOR_DESCRIPTION,
        epilog=DOCTOR_EPILOG,
    )
    _add_source(doctor)
    add_doctor_arguments(doctor)
    doctor.set_defaults(
        command=lambda options: run_doctor(_config(options), sys.stdout, vars(options), commands_of(options))
    )


def add_doctor_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `doctor` that say how to look."""
    parser.add_argument("--json", action="store_true", help="print one JSON document for programs to read")
    parser.add_argument(
        "--timeout",
        type=_seconds,
        default=_CONNECT_SECONDS,
        metavar="SECONDS",
        help="how long each service may take to answer at first; default: %(default)g",
    )


def add_status_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of `status` that say how to look."""
    add_doctor_arguments(parser)
    parser.add_argument(
        "--watch",
        type=_seconds,
        nargs="?",
        const=_WATCH_SECONDS,
        metavar="SECONDS",
        help="show it again at this interval until Ctrl-C; default: %(const)g. With --json one object a line",
    )


def commands_of(options: argparse.Namespace) -> CommandLine:
    """Return the commands that remedies name, with the options that lead them to the same outbox."""
    table = options.table or os.environ.get("OUTBOX_TABLE") or "outbox"
    return CommandLine(table, ("-f", options.file) if options.file else ())


def run_doctor(config: HarvestConfig, out: Output, options: Mapping[str, Any], commands: Commands) -> int:
    """Examine database and Kafka, print the findings as they come, and return the exit code."""
    try:
        from outbox_core.doctor.examination import examine
    except ImportError as error:
        raise missing_extra(error) from None
    findings = examine(config, commands, connect_seconds=options["timeout"])
    if options["json"]:
        listed = list(findings)
        _print_json([found.as_json() for found in listed], out)
        return _exit_code(listed)
    return _exit_code(_printed(findings, out))


def run_status(config: HarvestConfig, out: Output, options: Mapping[str, Any]) -> int:
    """Print backlog, holds and harvesters, each half as soon as it is known, and return the exit code."""
    interval: float | None = options["watch"]
    if interval is None:
        return _print_status(config, out, options)
    code = 0
    try:
        while True:
            if is_terminal(out):
                out.write(_CLEAR)
            elif not options["json"]:
                out.write(f"at       {time.strftime('%Y-%m-%dT%H:%M:%S%z')}\n")
            code = _print_status(config, out, options)
            flush(out)
            time.sleep(interval)
    except KeyboardInterrupt:
        return code


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("-f", "--file", metavar="FILE", help="the YAML file of `outbox harvest`")
    add_source_arguments(parser, variables=True)


def _config(options: argparse.Namespace) -> HarvestConfig:
    try:
        from outbox_core.config import load_config, read_document
    except ImportError as error:
        raise missing_extra(error) from None
    document = read_document(options.file) if options.file is not None else None
    return load_config(document, environ=os.environ, overrides=overrides_from(vars(options)))


def _printed(findings: Iterable[Finding], out: Output) -> Iterator[Finding]:
    for found in findings:
        sign, colour = _SIGNS[found.verdict]
        out.write(f"{paint(sign, colour, out)}  {found.subject:{_SUBJECT_WIDTH}}  {printable(found.detail)}\n")
        if found.remedy:
            out.write(f"{'':{_SUBJECT_WIDTH + 11}}-> {printable(found.remedy)}\n")
        flush(out)
        yield found


def _exit_code(findings: Iterable[Finding]) -> int:
    silent, has_problem = set(), False
    for found in findings:
        has_problem = has_problem or found.verdict is Verdict.PROBLEM
        silent.add(found.unanswered)
    return _exit_code_without("database" in silent, "kafka" in silent) or (EXIT_PROBLEM if has_problem else 0)


def _exit_code_without(database: bool, kafka: bool) -> int:
    if database and kafka:
        return EXIT_NEITHER
    return EXIT_NO_DATABASE if database else EXIT_NO_KAFKA if kafka else 0


def _print_status(config: HarvestConfig, out: Output, options: Mapping[str, Any]) -> int:
    try:
        from outbox_core.doctor.status import Status, Unknown, read_halves
    except ImportError as error:
        raise missing_extra(error) from None
    seconds: float = options["timeout"]
    write = _Lines(out)
    halves = read_halves(config, connect_seconds=seconds)
    database = cast("DatabaseStatus", next(halves))
    if not options["json"]:
        _write_database(database, config.delivery, write)
        _write_leadership(database, write)
        flush(out)
    kafka = cast("KafkaStatus", next(halves))
    next(halves, None)  # closes the client
    if not options["json"]:
        _write_kafka(kafka, write)
    elif options["watch"] is None:
        _print_json(Status(database, kafka).as_json(), out)
    else:
        out.write(json.dumps(Status(database, kafka).as_json(), allow_nan=False) + "\n")
    return _exit_code_without(isinstance(database.backlog, Unknown), isinstance(kafka.harvesters, Unknown))


class _Lines:
    """Lines with a word before each group, and no unprintable characters."""

    def __init__(self, out: Output) -> None:
        self._out = out

    def __call__(self, word: str, text: str) -> None:
        self._out.write(f"{word:9}{printable(text)}\n")

    def unknown(self, word: str, reason: str, remedy: str) -> None:
        self._out.write(f"{word:9}{paint('unknown', RED, self._out)}: {printable(reason)}\n")
        if remedy:
            self("", f"-> {remedy}")


def _write_database(status: DatabaseStatus, delivery: str, write: _Lines) -> None:
    from outbox_core.doctor.status import Unknown

    write("outbox", f"{status.outbox}, delivery {delivery}")
    backlog = status.backlog
    if isinstance(backlog, Unknown):
        write.unknown("waiting", backlog.reason, backlog.remedy)
        return
    about = "about " if backlog.is_estimate else ""
    write("waiting", f"{about}{plural(backlog.pending, 'record')}{_oldest(backlog.oldest_age_seconds)}")
    for topic in backlog.topics:
        marked = f", {topic.marked:,} marked" if topic.marked else ""
        held = f", {topic.held:,} held" if topic.held else ""
        among = " of the oldest 10,000" if backlog.pending > 10_000 else ""
        write("", f"{topic.topic}: {topic.waiting:,}{among}{held}{marked}")
    _write_held(backlog, write)


def _write_held(backlog: Backlog, write: _Lines) -> None:
    held = backlog.held
    if held is None:
        write("held", "unknown: the table of holds is missing, or this role may not read it")
        return
    if not any(held):
        return
    ready = min(backlog.pending, 10_000) - backlog.held_at_head
    among = " of the oldest 10,000" if backlog.pending > 10_000 else ""
    write("ready", f"{plural(ready, 'record')}{among}{_oldest(backlog.oldest_deliverable_seconds)}")
    kept = f"{plural(backlog.held_at_head, 'record')}{among}{_oldest(backlog.oldest_held_seconds)}"
    write("held", f"{kept}, by holds of {held.in_words()}")


_LEADERSHIPS = {
    "leader_acquired": "took leadership",
    "leader_handed_over": "handed leadership over",
    "leader_fenced": "lost leadership",
}


def _write_leadership(status: DatabaseStatus, write: _Lines) -> None:
    last = status.leadership
    if last is None:
        return
    does = _LEADERSHIPS.get(last.kind, last.kind)
    term = "" if last.term is None else f", term {last.term}"
    why = f": {last.reason}" if last.reason else ""
    write("history", f"{last.harvester} {does} {last.seconds_ago:,.0f} s ago{term}{why}")


def _oldest(age: float | None) -> str:
    if age is None:
        return ""
    return f", the oldest for {age:,.1f} s" if isfinite(age) else ", the oldest forever"


def _write_kafka(status: KafkaStatus, write: _Lines) -> None:
    from outbox_core.doctor.status import Unknown

    write("group", status.group)
    if isinstance(status.harvesters, Unknown):
        write.unknown("Kafka", status.harvesters.reason, status.harvesters.remedy)
        return
    for one in status.harvesters:
        write("", f"{one.client_id} on {one.host} {'leads' if one.leads else 'stands by'}")
    if not status.harvesters:
        write("", "no harvester")


def _print_json(document: object, out: Output) -> None:
    out.write(json.dumps(document, indent=2, allow_nan=False) + "\n")


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not _SHORTEST_WATCH_SECONDS <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.1 to 3600")
    return seconds
