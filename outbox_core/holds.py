"""Holds: records, keys and topics that the harvester must not publish.

A hold is a row beside the outbox (`outbox_core.schema.create_hold_sql`). It holds

- a **record**, if it names one: Kafka refused it, or an operator set it aside. If the record has a key, the later
  records of the key wait behind it, in order;
- a **key** of a topic, if it names a key and no record;
- a **topic**, if it names neither.

The harvester reads the holds at most half a second before it reads the outbox, and hands them to that statement as
parameters. It sets holds itself, for records that Kafka refuses and topics it may not write to.

`Holds` changes them from outside, at any time, whether a harvester runs or not:

    Holds().add(connection, "orders")                # pause a topic
    Holds().release(connection, topic="orders")      # and go on, where it stopped
    Holds().skip(connection, records=[17])           # delete a held record; its key goes on
    Holds().dead_letter(connection, records=[17])    # have the harvester publish it to the dead-letter topic instead

Each call is one statement, which may be repeated. Only held records are ever skipped or dead-lettered, so there is no
race with the harvester. A release lets a record be published before its followers, as if it had never been held.

The same statement writes an event for each change into the outbox's history (`outbox_core.retention.history`), if there
is one and the role may: what was done, by whom, and why.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from contextlib import closing
from datetime import datetime
from typing import Any, Literal, NamedTuple

from outbox_core.drivers import plain_cursor
from outbox_core.errors import InvalidConfig, OutboxError, OutboxTableError
from outbox_core.plain import column_text, named, plain
from outbox_core.row_security import fetch_on, hides_sql, refuse_hidden
from outbox_core.schema import (
    OUTBOX_FIRST,
    EventKind,
    TableName,
    events_beside,
    hold_beside,
    hold_id,
    iso_time_sql,
    shown_key_sql,
)
from outbox_core.stasher import Connection
from outbox_core.topic_names import is_legal

__all__ = [
    "Hold",
    "HoldCause",
    "HoldKind",
    "Holds",
]

HoldKind = Literal["record", "key", "topic"]
"""The kinds of what a hold keeps back."""

_DIGITS = re.compile("[0-9]+")
_CAUSE = "coalesce(nullif(held.error, ''), held.reason)"
# Numbers differ from record to record: offsets, sizes.
_PATTERN = f"regexp_replace({_CAUSE}, '[0-9]+', '#', 'g')"


def kind_sql(alias: str) -> str:
    """Return SQL for the `HoldKind` of a row of holds."""
    return (
        f"CASE WHEN {alias}.record_id IS NOT NULL THEN 'record' WHEN {alias}.kafka_key IS NOT NULL THEN 'key' "
        "ELSE 'topic' END"
    )


# Both tables must be there: without this the subqueries below would find nothing, and no error would say so.
_NAME = """
SELECT n.nspname || '.' || c.relname, to_regclass(%s) IS NOT NULL,
       has_table_privilege(to_regclass(%s)::oid, 'INSERT')
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""

_LIST = f"""
SELECT id, kafka_topic, {shown_key_sql("kafka_key")}, record_id, reason, error, dead_letter,
       {iso_time_sql("create_time")}
FROM {{holds}} AS held
WHERE {{filter}} ORDER BY kafka_topic, kafka_key NULLS FIRST, record_id NULLS FIRST, id LIMIT %s
"""

# Of two that are added at once only the primary key sees both (`hold_id`). What was written by other means has another
# id, hence the condition.
_ADD = """
INSERT INTO {holds} (id, outbox, kafka_topic, kafka_key, record_id, reason)
SELECT %s::bigint, %s, %s, %s, %s::bigint, %s WHERE NOT EXISTS (
    SELECT FROM {holds} WHERE outbox = %s AND kafka_topic = %s AND kafka_key IS NOT DISTINCT FROM %s::text
    AND record_id IS NOT DISTINCT FROM %s::bigint
)
ON CONFLICT (id) DO NOTHING
RETURNING kafka_topic, kafka_key, record_id
"""

# A hold of a record without a topic, which a table made by hand may have, has an empty one.
_TOPIC = "coalesce(kafka_topic, '') AS kafka_topic"

# Three joins, each of which can be hashed: thousands of holds and thousands of records are not compared pairwise.
_BEHIND = f"""
WITH head AS MATERIALIZED (
    SELECT id, {_TOPIC}, kafka_key FROM {{table}} ORDER BY id LIMIT {{rows}}
), chosen AS MATERIALIZED (
    SELECT id, kafka_topic, kafka_key, record_id FROM {{holds}} AS held WHERE {{filter}}
)
SELECT hold, count(*) FROM (
    SELECT chosen.id AS hold FROM chosen JOIN head USING (kafka_topic)
    WHERE chosen.kafka_key IS NULL AND chosen.record_id IS NULL
    UNION ALL
    SELECT chosen.id FROM chosen JOIN head USING (kafka_topic, kafka_key)
    WHERE chosen.record_id IS NULL OR head.id >= chosen.record_id
    UNION ALL
    SELECT chosen.id FROM chosen JOIN head ON head.id = chosen.record_id WHERE chosen.kafka_key IS NULL
) AS kept GROUP BY hold
"""

# A key's first held record keeps all that its later ones keep: only it counts, or records would count twice.
_CAUSES = f"""
WITH kept AS ({_BEHIND.strip()}), named AS (
    SELECT held.*, {kind_sql("held")} AS kind, {_PATTERN} AS pattern, {_CAUSE} AS cause FROM {{holds}} AS held
    WHERE {{filter}}
), placed AS (
    SELECT named.*, row_number() OVER (
        PARTITION BY kafka_topic, kind, pattern, kafka_key, CASE WHEN kafka_key IS NULL THEN record_id END
        ORDER BY record_id, id
    ) = 1 AS is_first
    FROM named
)
SELECT held.kafka_topic, kind, pattern, min(cause), count(*),
       count(*) FILTER (WHERE held.dead_letter), {iso_time_sql("min(held.create_time)")},
       {iso_time_sql("max(held.create_time)")},
       coalesce(sum(kept.count) FILTER (WHERE is_first), 0)::bigint,
       (array_agg(held.record_id ORDER BY held.record_id))[1:{{examples}}]
FROM placed AS held LEFT JOIN kept ON kept.hold = held.id
GROUP BY 1, 2, 3 ORDER BY 5 DESC, 1, 2, 3 LIMIT %s
"""

_MATCHING = "SELECT count(*) FROM {holds} AS held WHERE {filter}"

_LANES = f"""
SELECT kafka_topic, count(*), bool_or(kafka_key = %s)
FROM (SELECT {_TOPIC}, kafka_key FROM {{table}} ORDER BY id LIMIT {{rows}}) AS head GROUP BY kafka_topic
"""

_HEAD_ROWS = 10_000
_EXAMPLES = 5

_LANE_OF_RECORD = f"SELECT {_TOPIC}, kafka_key FROM {{table}} WHERE id = %s"

_RELEASE = "DELETE FROM {holds} AS held WHERE {filter} RETURNING kafka_topic, kafka_key, record_id"

# The row must be of the hold's topic and key: ids come back when a table is truncated or restored. Without its row a
# hold must not go if the row may only be hidden: it would be published.
_SKIP = f"""
WITH {OUTBOX_FIRST}, released AS (
    DELETE FROM {{holds}} AS held WHERE {{filter}} AND record_id IS NOT NULL AND NOT {{hides}}
    RETURNING record_id, kafka_topic, kafka_key
), changed AS (
    DELETE FROM {{table}} AS stored USING released
    WHERE stored.id = released.record_id AND coalesce(stored.kafka_topic, '') = released.kafka_topic
      AND stored.kafka_key IS NOT DISTINCT FROM released.kafka_key
    RETURNING released.kafka_topic, stored.kafka_key, stored.id AS record_id
){{noted}}
SELECT count(*) FROM changed
"""

_DEAD_LETTER = """
UPDATE {holds} AS held SET dead_letter = true WHERE {filter} AND record_id IS NOT NULL AND NOT dead_letter
RETURNING kafka_topic, kafka_key, record_id
"""

_CHANGE = "WITH changed AS ({change}){noted} SELECT count(*) FROM changed"

# An event whose id is taken is left out, as in `stores.postgres.statements.NOTE_CHANGES`.
_NOTED = """, noted AS (
    INSERT INTO {events} (outbox, kind, actor, reason, kafka_topic, kafka_key, record_id)
    SELECT %s::text, %s::text, coalesce(%s::text || ' as ', '') || session_user, %s::text, kafka_topic, kafka_key,
           record_id
    FROM changed ON CONFLICT DO NOTHING
)"""

_BIGINTS = range(-(2**63), 2**63)


class Hold(NamedTuple):
    """One hold, as it is listed; of a record if it has a `record_id`, else of a key or a topic.

    `id` is below zero if the library set the hold. `error` is Kafka's answer, if any. With `dead_letter` the harvester
    must publish the record to the dead-letter topic. `create_time` is the beginning of the hold. A key that is longer
    than a stash allows is cut.
    """

    id: int
    topic: str
    key: str | None
    record_id: int | None
    reason: str
    error: str | None
    dead_letter: bool
    create_time: datetime

    @property
    def kind(self) -> HoldKind:
        """The kind of what it keeps back."""
        return "record" if self.record_id is not None else "topic" if self.key is None else "key"

    @property
    def cause(self) -> str:
        """Kafka's answer, or else the reason; each number in it as `#`, so that like causes are equal."""
        return _DIGITS.sub("#", self.error or self.reason)


class HoldCause(NamedTuple):
    """The holds of one topic and kind with the same cause, as `Holds.causes` groups them.

    `cause` is as of `Hold`, `example` one with its numbers. `asked` counts the holds with `dead_letter`, `waiting` the
    records that all of them keep, among the oldest 10,000. `records` are the first of the held ones.
    """

    topic: str
    kind: HoldKind
    cause: str
    example: str
    holds: int
    asked: int
    first: datetime
    last: datetime
    waiting: int
    records: tuple[int, ...]


class Doubt(NamedTuple):
    """A reason why a hold may be a typing error, and what may have been meant."""

    text: str
    suggestions: list[str]


_Rows = list[tuple[Any, ...]]
_Listing = list[Hold]
_Causes = list[HoldCause]


class Holds:
    """The holds of one outbox. Immutable; may be shared between threads, each with its own connection.

    Works with psycopg 3, psycopg2 and every other PostgreSQL driver of paramstyle `format`. No method commits: outside
    autocommit a call takes effect when its transaction is committed. `key` always needs its `topic`.

    Args:
        outbox: name of the outbox table, `outbox` or `billing.outbox`.
        actor: the person or program that acts, for the history, which also gets the role of the session. The `reason`
            of a method is for the history, too.

    Raises:
        InvalidConfig: if an argument, here or of a method, cannot be used.
        OutboxTableError: by every method, if there is no outbox or no table of holds.
        RowsHidden: by every method, if row level security hides rows of one of them from the connection's role.
    """

    __slots__ = ("actor", "outbox", "table")

    def __init__(self, outbox: str | TableName = "outbox", actor: str | None = None) -> None:
        self.outbox = TableName.parse(outbox) if isinstance(outbox, str) else outbox
        self.table = hold_beside(self.outbox)
        self.actor = column_text(actor, "actor")

    def __repr__(self) -> str:
        return f"Holds({str(self.outbox)!r})"

    def list(
        self,
        connection: Connection,
        *,
        topic: str | None = None,
        key: str | bytes | None = None,
        records: Iterable[int] | None = None,
        cause: str | None = None,
        kind: HoldKind | None = None,
        limit: int | None = None,
    ) -> _Listing:
        """List the holds, by topic, key and record: at most `limit` of those that match all that is given."""
        outbox = self._identify(connection).outbox
        wanted = _Selection(outbox, records, topic, column_text(key, "key"), cause=cause, kind=kind)
        rows = self._fetch(connection, self._sql(_LIST, wanted.filter), [*wanted.parameters, plain(limit)])
        return [Hold._make([*row[:-1], datetime.fromisoformat(row[-1])]) for row in rows]

    def causes(self, connection: Connection, *, limit: int | None = None) -> _Causes:
        """Group the holds by topic, kind and cause, and return at most `limit` groups, the largest first."""
        wanted = _Selection(self._identify(connection).outbox)
        statement = self._sql(_CAUSES, wanted.filter, rows=_HEAD_ROWS)
        rows = self._fetch(connection, statement, [*wanted.parameters, *wanted.parameters, plain(limit)])
        return [
            HoldCause._make([*row[:6], *map(datetime.fromisoformat, row[6:8]), row[8], _without_none(row[9])])
            for row in rows
        ]

    def count(
        self,
        connection: Connection,
        *,
        holds: Iterable[int] | None = None,
        records: Iterable[int] | None = None,
        topic: str | None = None,
        key: str | bytes | None = None,
        cause: str | None = None,
        kind: HoldKind | None = None,
    ) -> int:
        """Count the holds that match all that is given: what an action would change."""
        outbox = self._identify(connection).outbox
        wanted = _Selection(outbox, records, topic, column_text(key, "key"), cause=cause, kind=kind, holds=holds)
        count: int = self._fetch(connection, self._sql(_MATCHING, wanted.filter), wanted.parameters)[0][0]
        return count

    def doubt(self, connection: Connection, topic: str, key: str | None = None) -> Doubt | None:
        """Return why holding a topic or a key may be a typing error: no record waits for it. None if one does.

        Raises:
            InvalidConfig: if Kafka accepts no topic of that name.
        """
        topic, key = named(topic, "topic"), column_text(key, "key")
        if not is_legal(topic):
            raise InvalidConfig(f"{topic[:300]!r} is not a topic name that Kafka accepts")
        waiting = self.waiting_topics(connection, key)
        if topic in waiting:
            none_of_key = f"none of the oldest 10,000 records has key {key} of {topic}"
            return None if key is None or waiting[topic] else Doubt(none_of_key, [])
        close = difflib.get_close_matches(topic, waiting, 3)
        meant = f"; did you mean {close[0]}?" if close else ""
        known = f" (they are for {', '.join(list(waiting)[:5])})" if waiting else ""
        return Doubt(f"none of the oldest 10,000 records is for topic {topic}{known}{meant}", close)

    def count_behind(
        self, connection: Connection, *, topic: str | None = None, key: str | bytes | None = None
    ) -> dict[int, int]:
        """Count the records that each hold keeps, by the hold's id, among the oldest 10,000; holds of none are absent.

        Of a key's held record that is the record and those behind it.
        """
        wanted = _Selection(self._identify(connection).outbox, topic=topic, key=column_text(key, "key"))
        statement = self._sql(_BEHIND, wanted.filter, rows=_HEAD_ROWS)
        return dict(self._fetch(connection, statement, wanted.parameters))

    def waiting_topics(self, connection: Connection, key: str | bytes | None = None) -> dict[str, bool]:
        """Return the topics of the oldest 10,000 records, and of each whether one of them has this key."""
        refuse_hidden(fetch_on(connection), [self.outbox])
        rows = self._fetch(connection, self._sql(_LANES, rows=_HEAD_ROWS), [column_text(key, "key")])
        return {topic: bool(has_key) for topic, _, has_key in sorted(rows, key=lambda row: -row[1])}

    def add(self, connection: Connection, topic: str, key: str | bytes | None = None, *, reason: str = "") -> bool:
        """Pause a topic, or one key of it; return False if it was paused already.

        The topic need not exist. The `reason` is for readers of the list.
        """
        which = named(topic, "topic"), column_text(key, "key"), None
        return self._add(connection, self._identify(connection), which, reason)

    def add_record(self, connection: Connection, record_id: int, *, reason: str = "") -> bool:
        """Hold one record, and with its key all that follow it; return False if it was held already.

        A record that the harvester has sent by then is published all the same.

        Raises:
            OutboxError: if there is no such record.
        """
        place = self._identify(connection)
        identity = _number(record_id)
        found = self._fetch(connection, self._sql(_LANE_OF_RECORD), [identity])
        if not found:
            raise OutboxError(f"there is no record {identity} in {self.outbox}: it is published, or never was there")
        topic, key = found[0]
        return self._add(connection, place, (topic, key, identity), reason)

    def release(
        self,
        connection: Connection,
        *,
        records: Iterable[int] | None = None,
        topic: str | None = None,
        key: str | bytes | None = None,
        reason: str = "",
    ) -> int:
        """Let records, a key or a topic be published again; return how many holds that ended.

        Args:
            connection: to the outbox's database.
            records: the holds of these records.
            topic: alone: the hold of the topic, while held keys and records of it stay held.
            key: with `topic`: all holds of this key, its held records too.
            reason: for the history.
        """
        if records is None and topic is None:
            raise InvalidConfig("release: name records, a topic, or a topic and a key")
        place = self._identify(connection)
        wanted = _Selection(place.outbox, records, topic, column_text(key, "key"))
        if records is None and key is None:
            wanted = _Selection(place.outbox, topic=topic, kind="topic")
        return self._release(connection, place, wanted, reason)

    def release_records(
        self,
        connection: Connection,
        *,
        topic: str | None = None,
        key: str | bytes | None = None,
        cause: str | None = None,
        reason: str = "",
    ) -> int:
        """Let every held record be published again (of a topic, of a key of it, of a cause); return how many."""
        place = self._identify(connection)
        wanted = _Selection(place.outbox, topic=topic, key=column_text(key, "key"), cause=cause, kind="record")
        return self._release(connection, place, wanted, reason)

    def release_holds(self, connection: Connection, ids: Iterable[int], *, reason: str = "") -> int:
        """End exactly these holds, by the ids that `list` shows; return how many."""
        place = self._identify(connection)
        return self._release(connection, place, _Selection(place.outbox, holds=ids), reason)

    def resume(self, connection: Connection, topic: str, key: str | bytes | None = None, *, reason: str = "") -> int:
        """End the pause of a topic, or of a key of it, while held records stay held; return how many holds ended."""
        place = self._identify(connection)
        kind: HoldKind = "topic" if key is None else "key"
        wanted = _Selection(place.outbox, topic=named(topic, "topic"), key=column_text(key, "key"), kind=kind)
        return self._release(connection, place, wanted, reason)

    def skip(
        self,
        connection: Connection,
        *,
        records: Iterable[int] | None = None,
        topic: str | None = None,
        key: str | bytes | None = None,
        cause: str | None = None,
        holds: Iterable[int] | None = None,
        reason: str = "",
    ) -> int:
        """Delete held records for good, with their holds, and let their followers go on; return how many.

        Every held record is deleted, unless `records`, `topic`, `key`, the `cause` or the ids of `holds` say which.
        """
        place = self._identify(connection)
        wanted = _Selection(place.outbox, records, topic, column_text(key, "key"), cause=cause, holds=holds)
        noted = self._noted(place, EventKind.SKIPPED, reason)
        return self._count(connection, self._sql(_SKIP, wanted.filter, noted.sql), wanted.parameters, noted)

    def dead_letter(
        self,
        connection: Connection,
        *,
        records: Iterable[int] | None = None,
        topic: str | None = None,
        key: str | bytes | None = None,
        cause: str | None = None,
        holds: Iterable[int] | None = None,
        reason: str = "",
    ) -> int:
        """Ask the harvester to publish held records to the dead-letter topic, and to remove them; return how many.

        They stay held until that is done. If the dead-letter topic refuses one, it is held as before, with that error.
        Every held record is requested, unless `records`, `topic`, `key`, the `cause` or the ids of `holds` say which.
        """
        place = self._identify(connection)
        wanted = _Selection(place.outbox, records, topic, column_text(key, "key"), cause=cause, holds=holds)
        noted = self._noted(place, EventKind.DEAD_LETTER_ASKED, reason)
        return self._change(connection, self._sql(_DEAD_LETTER, wanted.filter), wanted.parameters, noted)

    def _add(
        self, connection: Connection, place: _Place, which: tuple[str, str | None, int | None], reason: str
    ) -> bool:
        name = place.outbox
        parameters = [hold_id(name, *which), name, *which, column_text(reason, "reason"), name, *which]
        return self._change(connection, self._sql(_ADD), parameters, self._noted(place, EventKind.HELD, reason)) > 0

    def _release(self, connection: Connection, place: _Place, wanted: _Selection, reason: str) -> int:
        noted = self._noted(place, EventKind.RELEASED, reason)
        return self._change(connection, self._sql(_RELEASE, wanted.filter), wanted.parameters, noted)

    def _identify(self, connection: Connection) -> _Place:
        names = [self.table.quoted, events_beside(self.outbox).quoted, self.outbox.quoted]
        rows = self._fetch(connection, _NAME, names)
        if not rows:
            raise OutboxTableError(f"outbox table {self.outbox} does not exist in this database")
        if not rows[0][1]:
            raise OutboxTableError(
                f"there is no table {self.table}, so nothing can be held; make it with "
                f"`outbox schema --apply --table {self.outbox}`, with Alembic or with `manage.py migrate`"
            )
        refuse_hidden(fetch_on(connection), [self.outbox, self.table])
        return _Place(rows[0][0], bool(rows[0][2]))

    def _sql(self, statement: str, condition: str = "", noted: str = "", rows: int = 0) -> str:
        escaped = {"table": self.outbox.quoted.replace("%", "%%"), "holds": self.table.quoted.replace("%", "%%")}
        parts = {"filter": condition, "noted": noted, "rows": rows, "examples": _EXAMPLES}
        return statement.format(**escaped, **parts, hides=f"coalesce({hides_sql(self.outbox)}, false)")

    def _noted(self, place: _Place, kind: EventKind, reason: str) -> _Noted:
        if not place.has_events:
            return _Noted("", [])
        events = events_beside(self.outbox).quoted.replace("%", "%%")
        parameters = [place.outbox, str(kind), self.actor, column_text(reason, "reason") or ""]
        return _Noted(_NOTED.format(events=events), parameters)

    def _change(self, connection: Connection, change: str, parameters: Sequence[Any], noted: _Noted) -> int:
        return self._count(connection, _CHANGE.format(change=change, noted=noted.sql), parameters, noted)

    def _count(self, connection: Connection, statement: str, parameters: Sequence[Any], noted: _Noted) -> int:
        count: int = self._fetch(connection, statement, [*parameters, *noted.parameters])[0][0]
        return count

    @staticmethod
    def _fetch(connection: Connection, sql: str, parameters: Sequence[Any]) -> _Rows:
        with closing(plain_cursor(connection)) as cursor:
            cursor.execute(sql, parameters)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows


class _Place(NamedTuple):
    """The outbox as `schema.table`; and if it has a table of events that the role may write."""

    outbox: str
    has_events: bool


class _Noted(NamedTuple):
    """The end of a statement that writes an event for each changed hold, and its parameters."""

    sql: str
    parameters: list[Any]


_KINDS: dict[HoldKind, str] = {
    "record": "held.record_id IS NOT NULL",
    "key": "held.record_id IS NULL AND held.kafka_key IS NOT NULL",
    "topic": "held.record_id IS NULL AND held.kafka_key IS NULL",
}


class _Selection:
    def __init__(
        self,
        outbox: str,
        records: Iterable[int] | None = None,
        topic: str | None = None,
        key: str | None = None,
        *,
        cause: str | None = None,
        kind: HoldKind | None = None,
        holds: Iterable[int] | None = None,
    ) -> None:
        if key is not None and topic is None:
            raise InvalidConfig("a key is one of a topic: name the topic, too")
        self.filter = "held.outbox = %s"
        self.parameters: list[Any] = [outbox]
        if kind is not None:
            self.filter += f" AND {_KINDS[kind]}"
        for column, ids in (("record_id", records), ("id", holds)):
            if ids is not None:
                self.filter += f" AND held.{column} = ANY (%s::bigint[])"
                self.parameters.append(f"{{{','.join(str(_number(identity)) for identity in ids)}}}")
        if cause is not None:
            self.filter += f" AND {_PATTERN} = %s"
            self.parameters.append(column_text(cause, "cause"))
        if topic is not None:
            self.filter += " AND held.kafka_topic = %s"
            self.parameters.append(named(topic, "topic"))
        if key is not None:
            self.filter += " AND held.kafka_key = %s"
            self.parameters.append(key)


def _without_none(ids: Iterable[int | None]) -> tuple[int, ...]:
    return tuple(identity for identity in ids if identity is not None)


def _number(identity: object) -> int:
    identity = plain(identity)
    if not isinstance(identity, int) or isinstance(identity, bool) or identity not in _BIGINTS:
        raise InvalidConfig(f"a record is named by its id, a whole number, not by {identity!r:.100}")
    return identity
