"""Dead letters that are stashed anew, after an edit: into the outbox, with an event that remembers which letter it was.

A letter stays where it is, in the dead-letter topic of Kafka. The event, written in the transaction of the new record,
is what says that it was stashed anew: a second time is refused unless it is asked for.
"""

from __future__ import annotations

import re
from contextlib import closing
from datetime import datetime, timedelta
from typing import Any, Final, NamedTuple

from outbox_core.drivers import plain_cursor
from outbox_core.errors import OutboxError, OutboxTableError
from outbox_core.plain import column_text
from outbox_core.record import OutboxRecord
from outbox_core.retention.archive import RESTASH_HEADER
from outbox_core.retention.history import History
from outbox_core.row_security import ONE_SNAPSHOT, fetch_on, refuse_hidden
from outbox_core.schema import EventKind, TableLayout, TableName, events_beside, iso_time_sql
from outbox_core.stasher import Connection, insert_sql, require_transaction

__all__ = ["AlreadyRestashed", "DeadLetterRestash", "LetterPlace", "Restashed"]

_REMEMBERED: Final = timedelta(days=90)  # as long as the history keeps events
_MOST = 10_000
_REASON = re.compile(r"dead letter (?P<topic>[a-zA-Z0-9._-]+)\[(?P<partition>[0-9]+)\]@(?P<offset>[0-9]+)(?:: |$)")

# The shape of the outbox: how a record is written into it.
_IDENTIFY = """
SELECT n.nspname || '.' || c.relname, to_regclass(%s) IS NOT NULL, has_table_privilege(to_regclass(%s)::oid, 'INSERT'),
       coalesce((SELECT atttypid = 'bytea'::regtype FROM pg_attribute
                 WHERE attrelid = c.oid AND attname = 'kafka_value'), true),
       EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attname = 'kafka_partition' AND NOT attisdropped),
       coalesce((SELECT attnotnull FROM pg_attribute WHERE attrelid = c.oid AND attname = 'kafka_key'), false),
       coalesce((SELECT atthasdef FROM pg_attribute WHERE attrelid = c.oid AND attname = 'create_time'), false),
       current_setting('transaction_isolation')
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""

_LOCK = "SELECT pg_advisory_xact_lock(hashtextextended(%s, 0))"

_FIND = f"""
SELECT {iso_time_sql("create_time")}, actor FROM {{events}}
WHERE outbox = %s AND kind = %s AND (reason = %s OR starts_with(reason, %s)) ORDER BY id DESC LIMIT 1
"""

_NOTE = """
INSERT INTO {events} (outbox, kind, actor, reason, kafka_topic, kafka_key, record_id)
VALUES (%s, %s, coalesce(%s::text || ' as ', '') || session_user, %s, %s, %s, %s)
"""


class LetterPlace(NamedTuple):
    """The place of a dead letter in its topic."""

    partition: int
    offset: int


class Restashed(NamedTuple):
    """A restash of a dead letter: its time, and the person who did it."""

    at: datetime
    by: str


class AlreadyRestashed(OutboxError):
    """A dead letter was stashed anew before."""

    def __init__(self, before: Restashed) -> None:
        super().__init__(f"this dead letter was stashed anew at {before.at.isoformat()} by {before.by}")
        self.before = before


class _Place(NamedTuple):
    """The outbox as `schema.table`, whether it has events that the role may write, its shape; the isolation level."""

    outbox: str
    has_events: bool
    layout: TableLayout
    isolation: str


class DeadLetterRestash:
    """Restashes of dead letters into one outbox. Immutable; drivers are as for `outbox_core.Holds`.

    Args:
        outbox: name of the outbox table.
        actor: the person or program that acts, for the outbox's history.
    """

    __slots__ = ("actor", "outbox")

    def __init__(self, outbox: TableName, actor: str | None = None) -> None:
        self.outbox = outbox
        self.actor = column_text(actor, "actor")

    def known(self, connection: Connection, topic: str) -> dict[LetterPlace, Restashed]:
        """Return the letters of a dead-letter topic that were stashed anew, as far as the history remembers."""
        events = History(self.outbox).events(connection, _REMEMBERED, kinds=[EventKind.RESTASHED], limit=_MOST)
        found: dict[LetterPlace, Restashed] = {}
        for event in reversed(events):
            match = _REASON.match(event.reason)
            if match and match["topic"] == topic:
                place = LetterPlace(int(match["partition"]), int(match["offset"]))
                found[place] = Restashed(event.create_time, event.actor)
        return found

    def restash(
        self,
        connection: Connection,
        topic: str,
        place: LetterPlace,
        record: OutboxRecord,
        *,
        reason: str = "",
        again: bool = False,
    ) -> int:
        """Stash a record in the place of a dead letter, and return its id.

        Args:
            connection: in a transaction, which the caller commits, of a role that may insert into the outbox.
            topic: the dead-letter topic.
            place: of the letter there.
            record: what to stash; it gets the header `outbox-restash` with the letter's place.
            reason: for the history.
            again: also if the letter was stashed anew before.

        Raises:
            AlreadyRestashed: unless `again`, if the history remembers one.
            InvalidRecord: if the record does not fit the outbox table.
            OutboxError: unless `again`, in a transaction that cannot see what others commit meanwhile (REPEATABLE READ,
                SERIALIZABLE).
            OutboxTableError: if there is no outbox.
            RowsHidden: unless `again`, if row level security hides events from the connection's role.
        """
        require_transaction(connection)
        reason = column_text(reason, "reason") or ""
        known = self._identify(connection)
        self._ask(connection, _LOCK, [f"{known.outbox} {topic} {place}"])
        row = self._check(connection, known, topic, place, record, again=again)
        ((record_id,),) = self._ask(connection, insert_sql(self.outbox, known.layout) + " RETURNING id", list(row))
        if known.has_events:
            what = _what(topic, place)
            why = f"{what}: {reason}" if reason else what
            noted = [known.outbox, EventKind.RESTASHED, self.actor, why, record.topic, record.key, record_id]
            with closing(plain_cursor(connection)) as cursor:
                cursor.execute(self._sql(_NOTE), noted)
        return int(record_id)

    def check(
        self, connection: Connection, topic: str, place: LetterPlace, record: OutboxRecord, *, again: bool = False
    ) -> None:
        """Raise what `restash` would raise, and write nothing."""
        self._check(connection, self._identify(connection), topic, place, record, again=again)

    def _check(
        self,
        connection: Connection,
        known: _Place,
        topic: str,
        place: LetterPlace,
        record: OutboxRecord,
        *,
        again: bool,
    ) -> tuple[Any, ...]:
        """Return the row to write."""
        if known.has_events and not again:
            if known.isolation in ONE_SNAPSHOT:
                raise OutboxError(
                    f"a dead letter is not stashed anew in a transaction of isolation level {known.isolation}: it "
                    "cannot see if another one has stashed it meanwhile. Use READ COMMITTED"
                )
            refuse_hidden(fetch_on(connection), [events_beside(self.outbox)])  # or it would be stashed again
            what = _what(topic, place)
            found = self._ask(connection, self._sql(_FIND), [known.outbox, EventKind.RESTASHED, what, f"{what}: "])
            if found:
                raise AlreadyRestashed(Restashed(datetime.fromisoformat(found[0][0]), found[0][1]))
        marked = record.with_headers([(RESTASH_HEADER, f"{topic}:{place.partition}:{place.offset}")])
        return known.layout.row(marked)[: len(known.layout.columns)]

    def _identify(self, connection: Connection) -> _Place:
        events = events_beside(self.outbox).quoted
        rows = self._ask(connection, _IDENTIFY, [events, events, self.outbox.quoted])
        if not rows:
            raise OutboxTableError(f"outbox table {self.outbox} does not exist in this database")
        outbox, has_events, may_write, is_binary, has_partition, key_required, has_time_default, isolation = rows[0]
        layout = TableLayout(
            values="binary" if is_binary else "text",
            has_partition=has_partition,
            key_required=key_required,
            has_time_default=has_time_default,
        )
        return _Place(outbox, bool(has_events and may_write), layout, isolation)

    def _sql(self, statement: str) -> str:
        return statement.format(events=events_beside(self.outbox).quoted.replace("%", "%%"))

    @staticmethod
    def _ask(connection: Connection, sql: str, parameters: list[Any]) -> list[tuple[Any, ...]]:
        with closing(plain_cursor(connection)) as cursor:
            cursor.execute(sql, parameters)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows


def _what(topic: str, place: LetterPlace) -> str:
    """Return the beginning of the reason of a restash's event, by which it is found again; see `_REASON`."""
    return f"dead letter {topic}[{place.partition}]@{place.offset}"
