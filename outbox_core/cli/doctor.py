"""`outbox doctor` and `outbox status`, shared with Django's commands; importing them needs only the base install."""

from __future__ import annotations

import argparse
import json
import os
import sys
from contextlib import closing
from dataclasses import asdict
from math import isfinite
from typing import TYPE_CHECKING, Any, Protocol

from outbox_core.cli.harvest import add_source_arguments, missing_extra, overrides_from, shown
from outbox_core.doctor.findings import Finding, Verdict, fine, problem, warning
from outbox_core.errors import InvalidConfig, OutboxError
from outbox_core.printable import printable
from outbox_core.schema import TableName

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from outbox_core.config import HarvestConfig
    from outbox_core.stores.interface import SequenceSnapshot

EXIT_PROBLEM = 1


class Output(Protocol):
    """The output: `sys.stdout`, or the one of a Django command."""

    def write(self, text: str, /) -> object:
        """Print text that ends in a newline."""


_SIGNS = {Verdict.OK: "ok     ", Verdict.WARNING: "warning", Verdict.PROBLEM: "PROBLEM"}
_DATABASE, _KAFKA = "database", "Kafka"


def add_commands(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add `status` and `doctor` to the commands of `outbox`."""
    _add(commands, "status", print_status, "show what waits, and which harvesters stand by", STATUS_DESCRIPTION)
    _add(commands, "doctor", print_findings, "look for what could keep records from Kafka", DOCTOR_DESCRIPTION)


STATUS_DESCRIPTION = "Show how many records wait, for how long and for which topics, and which harvester leads."
DOCTOR_DESCRIPTION = (
    "Look at database, table and Kafka for whatever could keep records from being published, or out of order, and say "
    "how to mend it. Changes nothing. Exit code 1 if there is a problem, 0 if there are none but warnings."
)


def add_format_argument(parser: argparse.ArgumentParser) -> None:
    """Add the option that both commands have."""
    parser.add_argument("--json", action="store_true", help="print one JSON document for programs to read")


def print_findings(config: HarvestConfig, out: Output, *, as_json: bool) -> int:
    """Examine database and Kafka, print the findings, and return the exit code."""
    findings = list(_findings(config))
    if as_json:
        shapes = [asdict(found) | {"verdict": found.verdict.value} for found in findings]
        _print_json(shapes, out)
    else:
        width = max(len(found.subject) for found in findings)
        for found in findings:
            out.write(f"{_SIGNS[found.verdict]}  {found.subject:{width}}  {printable(found.detail)}\n")
            if found.remedy:
                out.write(f"{'':{width + 11}}-> {printable(found.remedy)}\n")
    return EXIT_PROBLEM if any(found.verdict is Verdict.PROBLEM for found in findings) else 0


def print_status(config: HarvestConfig, out: Output, *, as_json: bool) -> int:
    """Print the backlog, the holds and the harvesters, and return the exit code."""
    status = _status(config)
    if as_json:
        _print_json(status, out)
        return 0

    def write(line: str) -> None:
        out.write(f"{printable(line)}\n")

    write(f"outbox   {status['outbox']}, delivery {config.delivery}")
    age = status["oldest_age_seconds"]
    oldest = "the oldest for ever" if age is None else f"the oldest for {age:,.1f} s"
    write(f"waiting  {status['pending']:,} records, {oldest}")
    for topic in status["topics"]:
        marked = f", {topic['marked']:,} marked" if topic["marked"] else ""
        write(f"         {topic['topic']}: {topic['waiting']:,} of the oldest 10,000{marked}")
    held = status["held"]
    if held is not None and any(held.values()):
        paused = f"; paused: {', '.join(held['topics'])}" if held["topics"] else ""
        write(f"held     {held['records']:,} records, {held['keys']:,} keys{paused}")
    write(f"group    {status['leader_group']}")
    for contender in status["harvesters"]:
        role = "leads" if contender["leads"] else "stands by"
        write(f"         {contender['client_id']} on {contender['host']} {role}")
    if not status["harvesters"]:
        write("         no harvester")
    return 0


def _add(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    name: str,
    act: Callable[..., int],
    summary: str,
    description: str,
) -> None:
    parser = commands.add_parser(name, help=summary, description=description)
    parser.add_argument("-f", "--file", metavar="FILE", help="the YAML file of `outbox harvest`")
    add_source_arguments(parser)
    add_format_argument(parser)

    def command(options: argparse.Namespace) -> int:
        return act(_config(options), sys.stdout, as_json=options.json)

    parser.set_defaults(command=command)


def _config(options: argparse.Namespace) -> HarvestConfig:
    try:
        from outbox_core.config import load_config, read_document
    except ImportError as error:
        raise missing_extra(error) from None
    document = read_document(options.file) if options.file is not None else None
    return load_config(document, environ=os.environ, overrides=overrides_from(vars(options)))


def _findings(config: HarvestConfig) -> Iterator[Finding]:
    """Yield all findings, the database's first: the names of everything in Kafka derive from the table's identity."""
    try:
        TableName.parse(config.outbox_table)
    except InvalidConfig as error:
        raise InvalidConfig(f"outbox_table: {error}") from None
    identity: str | None = None
    server_id = ""
    topics: list[str] = []
    try:
        examined, identity, server_id, topics = _examine_database(config)
        yield from examined
    except OutboxError as error:
        yield problem(_DATABASE, shown(error), "the harvester would say the same, and not start")
    try:
        yield from _examine_kafka(config, identity, server_id, topics)
    except OutboxError as error:
        yield problem(_KAFKA, shown(error), "the harvester would say the same, and not start")


def _examine_database(config: HarvestConfig) -> tuple[list[Finding], str, str, list[str]]:
    store, checks = _database(config)
    with closing(store), closing(checks):
        identity = store.check()
        findings = [
            *checks.findings(without_marks=config.delivery == "exactly-once"),
            *(_obstacle(what, checks.role) for what in store.table.obstacles()),
            checks.holds(needed=config.on_poison == "dead-letter"),
        ]
        if config.notify:
            findings.append(_examine_notices(config))
        findings.append(_settled_floor(store.sequence.snapshot()))
        return findings, identity, store.server_id(), [head.topic for head in checks.topics_at_head()]


def _examine_notices(config: HarvestConfig) -> Finding:
    from outbox_core.stores.postgres.notify import CommitNotices, NoNotices

    notices = CommitNotices(config.data_source, config.outbox_table, application_name="kafka-outbox doctor")
    try:
        notices.open()
    except NoNotices as error:
        return warning("notices", str(error), "until then the harvester looks at intervals, up to markBackoff")
    finally:
        notices.dispose()
    return fine("notices", "the trigger is there, and notices come through")


def _obstacle(what: str, role: str) -> Finding:
    """Return the finding on something between the harvester and the rows that it deletes and marks."""
    is_certain = what.startswith("rule ") or what.endswith("(it has no policy)")
    return (problem if is_certain else warning)(
        "obstacle",
        f"the table has {what}: rows that it hides are not published; if it keeps rows from being marked or deleted, "
        "publishing stops",
        f"exempt role {role} from it, or take it from the table",
    )


def _settled_floor(sight: SequenceSnapshot) -> Finding:
    if sight.unusable:
        remedy = "nothing is lost, but while old snapshots are open harvesting gets slower the more is harvested"
        return warning("settled floor", f"is off: {sight.unusable}", remedy)
    return fine("settled floor", "can be proven")


def _examine_kafka(config: HarvestConfig, identity: str | None, server_id: str, topics: list[str]) -> Iterator[Finding]:
    with _kafka(config) as kafka:
        yield kafka.cluster()
        if identity is None:
            return
        group, leader_topic = config.leader_names(identity)
        tracking = config.tracking_names(identity)
        is_needed = config.delivery == "exactly-once"
        yield from kafka.leader_topic(leader_topic)
        members = kafka.leader_group(group)
        yield members
        if members.verdict is Verdict.OK:  # else there are none, or they are not ours
            yield _leader(config, identity, server_id)
        # The head names the outbox; ids and times take eight bytes each.
        manifest_bytes = 2048 + 16 * config.limits.mark_query_records
        yield from kafka.tracking_topic(tracking.topic, needed=is_needed, manifest_bytes=manifest_bytes)
        yield from kafka.transactional_id(tracking.transactional_id, tracking.topic, needed=is_needed)
        yield from kafka.relay_topic(tracking.relay_topic)
        if config.on_poison == "dead-letter":
            yield from kafka.dead_letter_topic(config.dead_letter_name(identity))
        yield kafka.writers([leader_topic, tracking.topic, tracking.relay_topic])
        if topics:
            yield from kafka.topics(topics)


def _leader(config: HarvestConfig, identity: str, server_id: str) -> Finding:
    """Return the finding on the leader, by its heartbeats: it must lead for this very outbox."""
    from outbox_core.election import NeliConfig
    from outbox_core.election.observer import next_heartbeat

    contest = NeliConfig.of(config, identity, server_id)
    heartbeat = next_heartbeat(contest)
    if heartbeat is None:
        return warning(
            "leader",
            f"no heartbeat of a leader was read on {contest.topic}",
            "look again; if it stays so, the log of the harvesters says what keeps them from leading",
        )
    if not contest.contest.agrees(heartbeat.contest):
        return problem(
            "leader",
            f"{heartbeat.name} leads {contest.group_id} for {heartbeat.contest}, and this is {contest.contest}",
            "set another leaderGroupID (leader_group_id) for one of the two: only one of them is published",
        )
    return fine("leader", f"{heartbeat.name} leads")


def _status(config: HarvestConfig) -> dict[str, Any]:
    store, checks = _database(config)
    with closing(store), closing(checks):
        identity = store.check()
        backlog = store.backlog()
        topics = [head._asdict() for head in checks.topics_at_head()]
        held = checks.held()
    group, _ = config.leader_names(identity)
    with _kafka(config) as kafka:
        harvesters = [contender._asdict() for contender in kafka.contenders(group)]
    return {
        "outbox": identity,
        "pending": backlog.pending,
        # A time of '-infinity' has no age, and JSON no number for it.
        "oldest_age_seconds": round(backlog.oldest_age_seconds, 3) if isfinite(backlog.oldest_age_seconds) else None,
        "topics": topics,
        "held": held._asdict() if held is not None else None,
        "leader_group": group,
        "harvesters": harvesters,
    }


def _database(config: HarvestConfig) -> tuple[Any, Any]:
    try:
        from outbox_core.doctor.postgres import PostgresChecks
        from outbox_core.stores.postgres.store import PostgresStore
    except ImportError as error:
        raise missing_extra(error) from None
    store = PostgresStore(config.data_source, config.outbox_table, application_name="kafka-outbox doctor")
    return store, PostgresChecks(config.data_source, config.outbox_table)


def _kafka(config: HarvestConfig) -> Any:
    try:
        from outbox_core.doctor.kafka import KafkaChecks
    except ImportError as error:
        raise missing_extra(error) from None
    return KafkaChecks(config.base_kafka_config)


def _print_json(document: object, out: Output) -> None:
    out.write(json.dumps(document, indent=2, allow_nan=False) + "\n")
