"""The actions of the console on an outbox: those of `outbox hold`, by the same `Holds`, and restashes of dead letters.

Each has a reason, which the outbox's history keeps with the user's name. `dry_run` counts, and changes nothing.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from outbox_core.console.access import Permission, User
from outbox_core.console.dead_letters import OWN_HEADERS, read_letter
from outbox_core.console.fields import Fields
from outbox_core.console.messages import ApiError, Done, Response, bad_parameter, json_response
from outbox_core.console.outboxes import ConsoleOutbox, unavailable
from outbox_core.doctor.session import DatabaseSession, TableLocked
from outbox_core.errors import InvalidConfig, InvalidRecord, KafkaUnavailable, OutboxError, StoreUnavailable
from outbox_core.holds import Holds
from outbox_core.printable import plural
from outbox_core.record import OutboxRecord
from outbox_core.retention.archive import RESTASH_HEADER
from outbox_core.retention.dead_letters import AlreadyRestashed, DeadLetterRestash, LetterPlace
from outbox_core.stasher import Connection

_MOST_IDS = 10_000
_LONGEST_REASON = 500


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of an action: on how many holds or records, in words, and further members of the answer."""

    count: int
    text: str
    more: dict[str, Any] = field(default_factory=dict)


class _Order(NamedTuple):
    """The members of a request that all actions have."""

    outbox: ConsoleOutbox
    user: User
    reason: str
    is_dry: bool

    @property
    def would(self) -> str:
        return "would have " if self.is_dry else ""


class Selection(NamedTuple):
    """Holds, or held records, that an action is for: exactly one of these."""

    holds: list[int] | None
    records: list[int] | None
    topic: str | None = None
    key: str | None = None
    cause: str | None = None


def act(outbox: ConsoleOutbox, user: User, action: str, body: Fields) -> Response:
    """Carry out an action and answer with its outcome. Raises ApiError."""
    is_dry = body.flag("dry_run")
    reason = body.text("reason", most=_LONGEST_REASON) if is_dry else body.required("reason", most=_LONGEST_REASON)
    order = _Order(outbox, user, (reason or "").strip(), is_dry)
    run = _ACTIONS[action].read(order, body)
    body.finish()
    outcome = _run(order, run)
    document = {"action": action, "dry_run": is_dry, "count": outcome.count, "text": outcome.text, **outcome.more}
    if is_dry:
        return json_response(document)
    outbox.changed()
    return json_response(document, done=Done(outbox.name, action, outcome.text, order.reason, user.name))


def permission_of(action: str) -> Permission | None:
    """Return the permission that an action needs, None if there is no such action."""
    found = _ACTIONS.get(action)
    return found and found.permission


_Run = Callable[[DatabaseSession], Outcome]


def _at_most(session: DatabaseSession, most: int | None, change: Callable[[], int]) -> int:
    """Make a change, and take it back if it is of more than `most`: than somebody has seen and agreed to."""
    if most is None:
        return change()
    with session.connection.transaction():
        count = change()
        if count > most:
            raise ApiError(
                409,
                "more_by_now",
                f"this is about {count:,} by now, and was to be about {most:,} at most; nothing was changed",
                where="body.at_most",
                remedy="see what has come in between, then repeat it",
            )
    return count


def _run(order: _Order, run: _Run) -> Outcome:
    try:
        with order.outbox.session(writes=not order.is_dry) as session:
            return run(session)
    except AlreadyRestashed as error:
        before = {"by": error.before.by, "at": error.before.at.isoformat()}
        remedy = "repeat with force, if a second record is meant"
        raise ApiError(409, "already_restashed", str(error), remedy=remedy, more=before) from None
    except InvalidRecord as error:
        raise _of_record(error) from None
    except InvalidConfig as error:
        raise ApiError(400, "bad_parameter", str(error), where="body") from None
    except StoreUnavailable as error:
        told = unavailable("database", error)
        remedy = told.remedy or "see what has happened, then repeat it: actions may be repeated"
        nothing = "" if not isinstance(error, TableLocked) else "; nothing was changed"
        raise ApiError(503, "unavailable", f"{told.reason}{nothing}", remedy=remedy) from None
    except KafkaUnavailable as error:  # letters are read first
        reason = f"{unavailable('kafka', error).reason}; nothing was changed"
        raise ApiError(503, "unavailable", reason, remedy="repeat it when Kafka answers") from None
    except OutboxError as error:
        remedy = "see which tables and rights the actions of the console need, in docs/console.md"
        raise ApiError(409, "cannot", unavailable("database", error).reason, remedy=remedy) from None


def _release(order: _Order, body: Fields) -> _Run:
    which, most = _selection(body), body.bigint("at_most")

    def run(session: DatabaseSession) -> Outcome:
        holds, connection = Holds(session.table, order.user.name), session.connection
        if order.is_dry:
            kind: Any = None if which.holds is not None or which.records is not None else "record"
            count = holds.count(connection, **which._asdict(), kind=kind)
        else:
            count = _at_most(session, most, lambda: _released(order, holds, connection, which))
        return Outcome(count, f"{order.would}released {plural(count, 'hold')}")

    return run


def _released(order: _Order, holds: Holds, connection: Connection, which: Selection) -> int:
    if which.holds is not None:
        return holds.release_holds(connection, which.holds, reason=order.reason)
    if which.records is not None:
        return holds.release(connection, records=which.records, reason=order.reason)
    lane = {"topic": which.topic, "key": which.key, "cause": which.cause}
    return holds.release_records(connection, **lane, reason=order.reason)


def _skip(order: _Order, body: Fields) -> _Run:
    return _on_records(order, body, Holds.skip, "deleted {} for good")


def _dead_letter(order: _Order, body: Fields) -> _Run:
    return _on_records(order, body, Holds.dead_letter, "asked for {} to go to the dead-letter topic")


def _on_records(order: _Order, body: Fields, change: Callable[..., int], text: str) -> _Run:
    which, most = _selection(body), body.bigint("at_most")

    def run(session: DatabaseSession) -> Outcome:
        holds, connection = Holds(session.table, order.user.name), session.connection
        if order.is_dry:
            count = holds.count(connection, **which._asdict(), kind="record")
        else:
            count = _at_most(session, most, lambda: change(holds, connection, **which._asdict(), reason=order.reason))
        return Outcome(count, order.would + text.format(plural(count, "record")))

    return run


def _pause(order: _Order, body: Fields) -> _Run:
    topic, key, record = body.text("topic"), body.text("key"), body.bigint("record")
    force = body.flag("force")
    if (topic is None) == (record is None) or (record is not None and key is not None):
        raise bad_parameter("body.topic", "name a topic, a topic and a key of it, or a record")

    def run(session: DatabaseSession) -> Outcome:
        holds, connection = Holds(session.table, order.user.name), session.connection
        if topic is None:
            return _hold_record(order, session, holds, record or 0)
        what = f"topic {topic}" if key is None else f"key {key} of topic {topic}"
        doubt = None if force else holds.doubt(connection, topic, key)
        if doubt is not None:
            more = {"suggestions": doubt.suggestions}
            remedy = "choose one of those that wait, or repeat with force"
            raise ApiError(409, "unknown_target", doubt.text, where="body.topic", remedy=remedy, more=more)
        if order.is_dry:
            is_held = holds.count(connection, topic=topic, key=key, kind="topic" if key is None else "key") > 0
            return Outcome(int(not is_held), f"{what} {'is paused already' if is_held else 'would be paused'}")
        added = holds.add(connection, topic, key, reason=order.reason)
        return Outcome(int(added), f"{what} {'is paused' if added else 'was paused already'}")

    return run


def _hold_record(order: _Order, session: DatabaseSession, holds: Holds, record: int) -> Outcome:
    if order.is_dry:
        is_held = holds.count(session.connection, records=[record]) > 0
        return Outcome(int(not is_held), f"record {record} {'is held already' if is_held else 'would be held'}")
    added = holds.add_record(session.connection, record, reason=order.reason)
    return Outcome(int(added), f"record {record} {'is held' if added else 'was held already'}")


def _resume(order: _Order, body: Fields) -> _Run:
    topic, key = body.required("topic"), body.text("key")
    what = f"topic {topic}" if key is None else f"key {key} of topic {topic}"

    def run(session: DatabaseSession) -> Outcome:
        holds, connection = Holds(session.table, order.user.name), session.connection
        if order.is_dry:
            count = holds.count(connection, topic=topic, key=key, kind="topic" if key is None else "key")
            return Outcome(count, f"{what} {'would go on' if count else 'is not paused'}")
        count = holds.resume(connection, topic, key, reason=order.reason)
        return Outcome(count, f"{what} {'goes on' if count else 'was not paused'}")

    return run


def _restash(order: _Order, body: Fields) -> _Run:
    letter, given = body.fields("letter"), body.fields("record")
    if letter is None or given is None:
        raise bad_parameter("body.letter" if letter is None else "body.record", "is needed")
    partition, offset = letter.integer("partition", -1, 0, 2**31 - 1), letter.bigint("offset")
    letter.finish()
    if partition < 0 or offset is None:
        raise bad_parameter("body.letter", "name its partition and its offset")
    record, again = _record(given), body.flag("force")
    place = LetterPlace(partition, offset)

    def run(session: DatabaseSession) -> Outcome:
        name = order.outbox.dead_letter_topic
        read_letter(order.outbox, place)
        restash = DeadLetterRestash(session.table, order.user.name)
        if order.is_dry:
            restash.check(session.connection, name, place, record, again=again)
            return Outcome(1, f"would have stashed a record for topic {record.topic}")
        with session.connection.transaction():
            record_id = restash.restash(session.connection, name, place, record, reason=order.reason, again=again)
        return Outcome(1, f"stashed a record for topic {record.topic}", {"record_id": str(record_id)})

    return run


def _record(given: Fields) -> OutboxRecord:
    """Return the record of a restash, checked as any that is stashed."""
    topic, key = given.required("topic"), given.text("key")
    partition = given.bigint("partition")
    value = _content(given.given("value"), given.place("value"))
    listed = given.given("headers")
    given.finish()
    where = given.place("headers")
    if listed is not None and not isinstance(listed, list):
        raise bad_parameter(where, "expected a list of [name, value] pairs")
    headers = []
    for number, pair in enumerate(listed or []):
        if not isinstance(pair, list) or len(pair) != 2 or not isinstance(pair[0], str):
            raise bad_parameter(f"{where}[{number}]", "expected a pair of a name and a value")
        if pair[0] not in OWN_HEADERS and pair[0] != RESTASH_HEADER:
            headers.append((pair[0], _content(pair[1], f"{where}[{number}]")))
    try:
        return OutboxRecord(topic=topic, key=key, value=value, headers=headers, partition=partition)
    except InvalidRecord as error:
        raise _of_record(error) from None


def _content(value: Any, where: str) -> bytes | None:
    """Return the bytes of `{"text": ...}` or `{"base64": ...}`, None for null."""
    if value is None:
        return None
    if isinstance(value, dict) and len(value) == 1:
        text, encoded = value.get("text"), value.get("base64")
        try:
            if isinstance(text, str):
                return text.encode()
            if isinstance(encoded, str):
                return base64.b64decode(encoded, validate=True)
        except (UnicodeEncodeError, binascii.Error, ValueError) as error:
            raise bad_parameter(where, f"cannot be decoded: {error}") from None
    raise bad_parameter(where, 'expected {"text": ...}, {"base64": ...} or null')


def _of_record(error: InvalidRecord) -> ApiError:
    field = str(error).partition(":")[0]
    where = f"body.record.{field}" if field.isascii() and " " not in field else "body.record"
    return ApiError(400, "bad_parameter", str(error), where=where)


def _selection(body: Fields) -> Selection:
    select = body.fields("select")
    if select is None:
        raise bad_parameter("body.select", "is needed: holds, records or matching")
    holds, records = select.bigints("holds", most=_MOST_IDS), select.bigints("records", most=_MOST_IDS)
    matching = select.fields("matching")
    select.finish()
    if sum(one is not None for one in (holds, records, matching)) != 1:
        raise bad_parameter("body.select", "name exactly one of holds, records and matching")
    if matching is not None:
        matching.refuse_null()
    if matching is None:
        return Selection(holds, records)
    topic, key, cause = matching.text("topic"), matching.text("key"), matching.text("cause_pattern")
    matching.finish()
    if key is not None and topic is None:
        raise bad_parameter("body.select.matching.key", "is one of a topic: name the topic, too")
    return Selection(None, None, topic, key, cause)


class _Action(NamedTuple):
    """An action: the permission that it needs, and the function that reads its members."""

    permission: Permission
    read: Callable[[_Order, Fields], _Run]


_ACTIONS = {
    "release": _Action(Permission.OPERATE, _release),
    "skip": _Action(Permission.OPERATE, _skip),
    "dead-letter": _Action(Permission.OPERATE, _dead_letter),
    "pause": _Action(Permission.OPERATE, _pause),
    "resume": _Action(Permission.OPERATE, _resume),
    "restash": _Action(Permission.RESTASH, _restash),
}
NAMES = tuple(_ACTIONS)
"""The names of all actions."""
