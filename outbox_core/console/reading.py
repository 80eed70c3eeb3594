"""The sights of an outbox in the console: each function answers one route, from its parameters.

None counts a whole table: searches walk the head by its primary key, and end after a bounded number of rows.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Any

from outbox_core.console import dead_letters as letters
from outbox_core.console.fields import Fields, bigint
from outbox_core.console.messages import ApiError, Response, not_found
from outbox_core.console.outboxes import ConsoleOutbox, unavailable
from outbox_core.console.timeline import leaderships
from outbox_core.console.values import MOST_HEADERS, MOST_LISTED_HEADERS, record_as_json, within_budget
from outbox_core.doctor.findings import CommandLine
from outbox_core.doctor.pending import SEARCHED_ROWS, PeekQuery, peek, search_end
from outbox_core.doctor.postgres import PostgresChecks
from outbox_core.doctor.session import DatabaseSession
from outbox_core.doctor.table import HEAD_ROWS
from outbox_core.doctor.writers import read_writers
from outbox_core.errors import OutboxError
from outbox_core.holds import Hold, HoldCause, Holds
from outbox_core.retention.dead_letters import LetterPlace
from outbox_core.retention.history import EventKind, History, HistoryEvent
from outbox_core.schema import shown_key_sql

PREVIEW_BYTES = 400
WHOLE_BYTES = 2**20
_DOWNLOAD_BYTES = 16 * 2**20  # as many as a dead letter may have; some readers at once must not fill the memory
_LONGEST_HOURS = 168.0
_POINTS = 500
_MOST_EVENTS = 1000
_MOST_CAUSES = 200
_MOST_KEYS = 50
_KINDS = ("record", "key", "topic")
_LEADERSHIP = (EventKind.LEADER_ACQUIRED, EventKind.LEADER_HANDED_OVER, EventKind.LEADER_FENCED)

_KEYS = f"""
SELECT {shown_key_sql("head.kafka_key")}, count(*), bool_or(head.kafka_key IS NOT NULL)
FROM (SELECT kafka_topic, kafka_key FROM {{table}} ORDER BY id LIMIT {{rows}}) AS head
WHERE head.kafka_topic = %s AND starts_with(head.kafka_key, %s)
GROUP BY head.kafka_key ORDER BY count(*) DESC, head.kafka_key LIMIT %s
"""


def outbox(one: ConsoleOutbox) -> dict[str, Any]:
    """Describe an outbox by its settings."""
    config = one.config
    return {
        "name": one.name,
        "table": config.outbox_table,
        "delivery": config.delivery,
        "on_poison": config.on_poison,
        "retention": config.retention,
        "place": one.place,
    }


def status(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with both halves of the status."""
    query.finish()
    return outbox.status()


def statistics(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with the statistics of the last hours, in columns."""
    since = _hours(query, 3)
    query.finish()
    now = datetime.now(UTC)

    def ask(session: DatabaseSession) -> dict[str, Any]:
        points = History(session.table).points(session.connection, since, most=_POINTS)
        names = ("time", *points[0]._fields[1:]) if points else _COLUMNS
        columns = dict(zip(names, map(list, zip(*points, strict=True)), strict=True)) if points else {}
        return {
            "step_seconds": round(max(1.0, since.total_seconds() / (_POINTS - 1)), 3),
            "from": (now - since).timestamp(),
            "to": now.timestamp(),
            "columns": {name: columns.get(name, []) for name in _COLUMNS},
        }

    return outbox.read(ask)


_COLUMNS = (
    "time",
    "published_per_second",
    "failed_per_second",
    "bytes_per_second",
    "deliverable",
    "deliverable_age",
    "held",
    "held_age",
    "latency_p50",
    "latency_p99",
)


def events(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with the events of the last hours, newest first."""
    since, limit = _hours(query, 24), query.integer("limit", 200, 1, _MOST_EVENTS)
    given = query.text("kinds")
    kinds = None if given is None else [_kind(name) for name in given.split(",")]
    query.finish()

    def ask(session: DatabaseSession) -> dict[str, Any]:
        found = History(session.table).events(session.connection, since, kinds=kinds, limit=limit + 1)
        return {"events": [_event(event) for event in found[:limit]], "is_cut": len(found) > limit}

    return outbox.read(ask)


def timeline(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with the leaderships of the last hours, and with what happened to holds."""
    since = _hours(query, 24)
    query.finish()
    now = datetime.now(UTC)

    def ask(session: DatabaseSession) -> dict[str, Any]:
        history = History(session.table)
        led = history.events(session.connection, since, kinds=_LEADERSHIP, limit=_MOST_EVENTS + 1)
        others = [kind for kind in EventKind if kind not in _LEADERSHIP]
        marks = history.events(session.connection, since, kinds=others, limit=_MOST_EVENTS + 1)
        return {
            "from": (now - since).isoformat(),
            "to": now.isoformat(),
            "leaderships": [one.as_json() for one in leaderships(reversed(led[:_MOST_EVENTS]))],
            "marks": [_event(event) for event in marks[:_MOST_EVENTS]],
            "is_cut": max(len(led), len(marks)) > _MOST_EVENTS,
        }

    return outbox.read(ask)


def topics(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with the topics that an operator may mean: of waiting records, paused, or in the last day's events."""
    query.finish()

    def ask(session: DatabaseSession) -> dict[str, Any]:
        checks = PostgresChecks(session, CommandLine())
        held = checks.held()
        paused = [] if held is None else held.topics
        found = [
            {
                "topic": head.topic,
                "waiting": head.waiting,
                "deliverable": head.waiting - head.held,
                "held": head.held,
                "is_paused": head.topic in paused,
                "has_keyless": head.has_keyless,
            }
            for head in checks.topics_at_head()
        ]
        known = {topic["topic"] for topic in found}
        others = [topic for topic in [*paused, *_topics_of_events(session)] if topic not in known]
        found += [_idle_topic(topic, is_paused=topic in paused) for topic in dict.fromkeys(others)]
        return {"topics": found, "head_rows": HEAD_ROWS}

    return outbox.read(ask)


def keys(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with keys of a topic."""
    topic, starts = query.required("topic"), query.text("starts") or ""
    query.finish()

    def ask(session: DatabaseSession) -> dict[str, Any]:
        statement = _KEYS.format(table=session.table.quoted.replace("%", "%%"), rows=HEAD_ROWS)
        rows = session.ask(statement, (topic, starts, _MOST_KEYS + 1))
        paused = {hold.key for hold in Holds(session.table).list(session.connection, topic=topic, kind="key")}
        found = [{"key": key, "waiting": number, "is_paused": key in paused} for key, number, _ in rows[:_MOST_KEYS]]
        return {"keys": found, "is_cut": len(rows) > _MOST_KEYS}

    return outbox.read(ask)


def records(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with a page of pending records, the oldest first."""
    chosen = PeekQuery(
        topic=query.text("topic"),
        key=query.text("key"),
        record_id=query.bigint("id"),
        header=query.text("header"),
        header_value=query.text("header_value"),
        after=query.bigint("after"),
        limit=query.integer("limit", 50, 1, 200),
        value_bytes=PREVIEW_BYTES,
        headers=MOST_LISTED_HEADERS,
    )
    query.finish()
    is_filtered = any(one is not None for one in (chosen.topic, chosen.key, chosen.header))
    is_search = chosen.record_id is None and is_filtered  # else a page that is not full is the last

    def ask(session: DatabaseSession) -> dict[str, Any]:
        # Before the search: what the harvester deletes in between has it look further than this, and leave out none.
        next_after = search_end(session, chosen.after) if is_search else None
        found = peek(session, chosen)
        shown = within_budget(record_as_json(record, PREVIEW_BYTES) for record in found)
        if chosen.record_id is None and (len(found) == chosen.limit or len(shown) < len(found)):
            next_after = found[len(shown) - 1].id
        return {
            "records": shown,
            "next_after": None if next_after is None else str(next_after),
            "is_end": next_after is None,
            "searched": SEARCHED_ROWS,
        }

    return outbox.read(ask)


def record(outbox: ConsoleOutbox, query: Fields, identity: str) -> Any:
    """Answer with one record, its headers and its value."""
    query.finish()
    return outbox.read(lambda session: record_as_json(_pending(session, identity, WHOLE_BYTES), WHOLE_BYTES))


def record_value(outbox: ConsoleOutbox, query: Fields, identity: str) -> Any:
    """Answer with the bytes of a record's value, to save them."""
    query.finish()
    found: list[bytes] = []

    def ask(session: DatabaseSession) -> None:
        pending = _pending(session, identity, _DOWNLOAD_BYTES)
        value = pending.value or b""
        if len(value) < pending.size_bytes:
            raise ApiError(
                413,
                "too_large",
                f"the value has {pending.size_bytes} bytes, and the console saves at most {_DOWNLOAD_BYTES}",
                remedy="save it with psql",
            )
        found.append(value)

    answer = outbox.read(ask)
    if not found:
        return answer
    headers = (
        ("Content-Type", "application/octet-stream"),
        ("Content-Disposition", f'attachment; filename="record-{int(identity)}.bin"'),
        ("Cache-Control", "no-store"),
    )
    return Response(200, headers, found[0])


def holds(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with the holds, grouped by cause."""
    query.finish()

    def ask(session: DatabaseSession) -> dict[str, Any]:
        found = Holds(session.table)
        causes = found.causes(session.connection, limit=_MOST_CAUSES + 1)
        return {
            "causes": [_cause(cause) for cause in causes[:_MOST_CAUSES]],
            "holds": found.count(session.connection) if len(causes) > _MOST_CAUSES else sum(c.holds for c in causes),
            "is_cut": len(causes) > _MOST_CAUSES,
            "head_rows": HEAD_ROWS,
        }

    return outbox.read(ask)


def hold_list(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with the holds one by one."""
    topic, key, cause = query.text("topic"), query.text("key"), query.text("cause_pattern")
    kind: Any = query.choice("what", _KINDS)
    limit = query.integer("limit", 100, 1, 1000)
    query.finish()

    def ask(session: DatabaseSession) -> dict[str, Any]:
        found = Holds(session.table)
        listed = found.list(session.connection, topic=topic, key=key, cause=cause, kind=kind, limit=limit + 1)
        waiting = found.count_behind(session.connection, topic=topic, key=key) if listed else {}
        return {
            "holds": [_hold(hold, waiting.get(hold.id, 0)) for hold in listed[:limit]],
            "is_cut": len(listed) > limit,
        }

    return outbox.read(ask)


def findings(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with the doctor's last findings, and have it examine the outbox anew when they are old."""
    if query.flag("fresh"):
        outbox.findings.expire()
    query.finish()
    reading = outbox.findings.get(0)
    return {
        "data": {
            "is_running": outbox.findings.is_running,
            "at": reading and reading.at.isoformat(),
            "findings": [finding.as_json() for finding in reading.value] if reading else [],
        },
        "unavailable": None,
    }


def writers(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with the transactions below which the floor stays."""
    query.finish()
    return outbox.read(lambda session: read_writers(session).as_json())


def dead_letters(outbox: ConsoleOutbox, query: Fields) -> Any:
    """Answer with the newest dead letters."""
    topic, limit = query.text("topic"), query.integer("limit", 50, 1, 200)
    query.finish()
    try:
        return {"data": letters.newest(outbox, topic, limit, PREVIEW_BYTES), "unavailable": None}
    except OutboxError as error:
        return {"data": None, "unavailable": unavailable("kafka", error).as_json()}


def dead_letter(outbox: ConsoleOutbox, query: Fields, partition: str, offset: str) -> Any:
    """Answer with one dead letter."""
    query.finish()
    place = LetterPlace(bigint(partition, "path.partition"), bigint(offset, "path.offset"))
    try:
        return {"data": letters.one(outbox, place, WHOLE_BYTES), "unavailable": None}
    except OutboxError as error:
        return {"data": None, "unavailable": unavailable("kafka", error).as_json()}


def _pending(session: DatabaseSession, identity: str, value_bytes: int) -> Any:
    number = bigint(identity, "path.id")
    found = peek(session, PeekQuery(record_id=number, limit=1, value_bytes=value_bytes, headers=MOST_HEADERS))
    if not found:
        raise not_found(f"there is no record {number}: it is published, or never was there")
    return found[0]


def _hours(query: Fields, default: float) -> timedelta:
    return timedelta(hours=query.number("hours", default, 0.1, _LONGEST_HOURS))


def _kind(name: str) -> EventKind:
    one = Fields({"kinds": name}, "query")
    return EventKind(one.choice("kinds", [str(kind) for kind in EventKind]) or "")


def _topics_of_events(session: DatabaseSession) -> Iterable[str]:
    try:
        found = History(session.table).events(session.connection, timedelta(days=1), limit=_MOST_EVENTS)
    except OutboxError:  # without a history there are no such topics
        return []
    return [event.topic for event in found if event.topic is not None]


def _idle_topic(topic: str, *, is_paused: bool) -> dict[str, Any]:
    return {
        "topic": topic,
        "waiting": 0,
        "deliverable": 0,
        "held": 0,
        "is_paused": is_paused,
        "has_keyless": False,
    }


def _event(event: HistoryEvent) -> dict[str, Any]:
    return {
        "id": str(event.id),
        "at": event.create_time.isoformat(),
        "kind": event.kind,
        "actor": event.actor,
        "reason": event.reason,
        "leader_id": event.leader_id and str(event.leader_id),
        "term": None if event.term is None else str(event.term),
        "topic": event.topic,
        "key": event.key,
        "record_id": None if event.record_id is None else str(event.record_id),
    }


def _cause(cause: HoldCause) -> dict[str, Any]:
    return {
        "topic": cause.topic,
        "what": cause.kind,
        "cause": cause.example,
        "cause_pattern": cause.cause,
        "holds": cause.holds,
        "dead_letter_asked": cause.asked,
        "since": cause.first.isoformat(),
        "until": cause.last.isoformat(),
        "waiting": cause.waiting,
        "records": [str(identity) for identity in cause.records],
    }


def _hold(hold: Hold, waiting: int) -> dict[str, Any]:
    return {
        "id": str(hold.id),
        "what": hold.kind,
        "topic": hold.topic,
        "key": hold.key,
        "record_id": None if hold.record_id is None else str(hold.record_id),
        "reason": hold.reason,
        "error": hold.error,
        "cause_pattern": hold.cause,
        "dead_letter_asked": hold.dead_letter,
        "since": hold.create_time.isoformat(),
        "waiting": waiting,
    }
