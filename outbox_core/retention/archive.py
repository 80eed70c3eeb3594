"""The archive of an outbox: published records, kept for some days, to look at and to publish again.

With `retention: archive` the harvester moves each row that it deletes into `outbox_archive`, in the statement that
deletes it: a row is in one of the two tables, whatever dies. The archive has a partition for each day (UTC) of
`archive_time`, when the row left the outbox; what is too old is dropped with its partition.

Partitions are made and dropped by a function that runs with the rights of the archive's owner, so that the harvester
needs none but to call it. It makes those of four days; rows of a day without one go into a default partition.

`Archive.restash` stashes archived records anew: they get new ids, and the header `outbox-restash` with the old one.
"""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from typing import Any, NamedTuple

from outbox_core.drivers import plain_cursor
from outbox_core.errors import InvalidConfig, OutboxTableError
from outbox_core.plain import column_text, named
from outbox_core.row_security import fetch_on, refuse_hidden
from outbox_core.schema import EventKind, TableName, archive_beside, archive_rotation, events_beside, iso_time_sql
from outbox_core.stasher import Connection

__all__ = ["RESTASH_HEADER", "Archive", "Selected", "archive_statements", "drop_archive_statements"]

RESTASH_HEADER = "outbox-restash"
"""The header of a record that was stashed anew: `<schema>.<table>:<id>`, its identity in the archive."""

_TABLE = """\
CREATE TABLE {archive} (
    LIKE {outbox},
    archive_time timestamp with time zone NOT NULL DEFAULT now(),
    dead_letter  boolean NOT NULL DEFAULT false -- published to the dead-letter topic
) PARTITION BY RANGE (archive_time)
"""

_DEFAULT_PARTITION = "CREATE TABLE {default} PARTITION OF {archive} DEFAULT"

# A publication FOR ALL TABLES would refuse the function's DELETE, as the rows have no key.
_IDENTIFY_DEFAULT = "ALTER TABLE {default} REPLICA IDENTITY FULL"

# It runs with its owner's rights and takes a number, nothing else. The schema is written into it: it must not depend on
# the caller's search path. A partition cannot be made while the default one has rows of its day: they stay there.
_ROTATION = """\
DO $make$
DECLARE
    place text := (SELECT quote_ident(n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
                   WHERE c.oid = {archive_literal}::regclass);
BEGIN
    EXECUTE replace($body$
CREATE OR REPLACE FUNCTION @place@.{rotate}(keep_days integer) RETURNS integer
LANGUAGE plpgsql SECURITY DEFINER SET search_path = pg_catalog, pg_temp SET lock_timeout = '2s' AS $rotate$
DECLARE
    today date := (now() AT TIME ZONE 'UTC')::date;
    day date;
    partition text;
    dropped integer := 0;
BEGIN
    IF keep_days IS NULL OR keep_days < 1 THEN  -- whoever may rotate need not be allowed to delete
        RAISE EXCEPTION 'keep_days must be at least 1, got %', keep_days;
    END IF;
    FOR day IN SELECT today + n FROM generate_series(0, 3) AS n LOOP
        partition := {name_literal} || to_char(day, '_YYYYMMDD');
        IF to_regclass('@place@.' || quote_ident(partition)) IS NULL THEN
            BEGIN
                EXECUTE format(
                    'CREATE TABLE @place@.%I PARTITION OF @place@.{archive_name} FOR VALUES FROM (%L) TO (%L)',
                    partition, day::text || ' 00:00+00', (day + 1)::text || ' 00:00+00');
            EXCEPTION WHEN check_violation OR duplicate_table THEN
                NULL;
            END;
        END IF;
    END LOOP;
    FOR partition IN
        SELECT c.relname FROM pg_inherits AS i JOIN pg_class AS c ON c.oid = i.inhrelid
        WHERE i.inhparent = '@place@.{archive_name}'::regclass AND c.relname ~ '_[0-9]{{8}}$'
          AND to_date(right(c.relname, 8), 'YYYYMMDD') < today - keep_days
    LOOP
        EXECUTE format('DROP TABLE @place@.%I', partition);
        dropped := dropped + 1;
    END LOOP;
    DELETE FROM @place@.{default_name} WHERE archive_time < now() - make_interval(days => keep_days);
    RETURN dropped;
END
$rotate$
$body$, '@place@', place);
END
$make$
"""

_CLOSE = "REVOKE EXECUTE ON FUNCTION {rotate}(integer) FROM PUBLIC"
_FIRST = "SELECT {rotate}(36500)"


def archive_statements(outbox: TableName) -> list[str]:
    """Return the PostgreSQL DDL of an outbox's archive, statement by statement; the outbox has to exist.

    Raises:
        InvalidConfig: for a name with characters that PostgreSQL's functions would need escaped.
    """
    if {"'", "%", "$", "@"} & set(str(outbox)):
        raise InvalidConfig(f"{outbox}: an outbox with an archive has none of ' % $ @ in its name")
    archive, rotate = archive_beside(outbox), archive_rotation(outbox)
    default = TableName(f"{archive.table}_default", archive.schema)
    names = {
        "outbox": outbox.quoted,
        "archive": archive.quoted,
        "archive_literal": f"'{archive.quoted}'",
        "archive_name": TableName(archive.table).quoted,
        "name_literal": f"'{archive.table}'",
        "default": default.quoted,
        "default_name": TableName(default.table).quoted,
    }
    tables = [statement.format(**names) for statement in (_TABLE, _DEFAULT_PARTITION, _IDENTIFY_DEFAULT)]
    made = _ROTATION.format(**names, rotate=TableName(rotate.table).quoted)
    others = [statement.format(**names, rotate=rotate.quoted) for statement in (_CLOSE, _FIRST)]
    return [*tables, made, *others]


def drop_archive_statements(outbox: TableName) -> list[str]:
    """Return the PostgreSQL DDL that removes the archive with all that is in it."""
    return [
        f"DROP FUNCTION IF EXISTS {archive_rotation(outbox).quoted}(integer)",
        f"DROP TABLE IF EXISTS {archive_beside(outbox).quoted}",
    ]


# Of the outbox: what it is called, the type of its values, and which columns a stash has to write.
_IDENTIFY = """
SELECT n.nspname || '.' || c.relname, to_regclass(%s) IS NOT NULL,
       (SELECT atttypid = 'bytea'::regtype FROM pg_attribute WHERE attrelid = c.oid AND attname = 'kafka_value'),
       EXISTS (SELECT FROM pg_attribute WHERE attrelid = c.oid AND attname = 'kafka_partition' AND NOT attisdropped),
       (SELECT atthasdef FROM pg_attribute WHERE attrelid = c.oid AND attname = 'create_time'),
       has_table_privilege(to_regclass(%s)::oid, 'INSERT')
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
"""

_WHERE = """
WHERE kafka_topic = %s AND (%s::text IS NULL OR kafka_key = %s) AND dead_letter = %s
  AND (%s::text IS NULL OR archive_time >= %s::timestamptz) AND (%s::text IS NULL OR archive_time < %s::timestamptz)
"""

_FIRST_AND_LAST = f"{iso_time_sql('min(archive_time)')}, {iso_time_sql('max(archive_time)')}"
_COUNT = f"SELECT count(*), {_FIRST_AND_LAST} FROM {{archive}} {{where}}"

# In the order of the old ids: that is the order in which they were published.
_RESTASH = """
WITH restashed AS (
    INSERT INTO {outbox} ({columns})
    SELECT {values} FROM {archive} {where} ORDER BY id
    RETURNING id
){noted}
SELECT count(*) FROM restashed
"""

_PAIRED = "(ARRAY(SELECT unnest(kafka_header_{0})))[:cardinality(kafka_header_{1})]"

# An event whose id is taken is left out, as in `stores.postgres.statements.NOTE_CHANGES`.
_NOTED = """, noted AS (
    INSERT INTO {events} (outbox, kind, actor, reason, kafka_topic, kafka_key)
    SELECT %s::text, %s::text, coalesce(%s::text || ' as ', '') || session_user,
           concat_ws(': ', count(*) || CASE count(*) WHEN 1 THEN ' record' ELSE ' records' END, nullif(%s::text, '')),
           %s::text, %s::text
    FROM restashed HAVING count(*) > 0 ON CONFLICT DO NOTHING
)"""


class Selected(NamedTuple):
    """Archived records that a restash would take: how many, and when the first and the last left the outbox."""

    number: int
    first: datetime | None
    last: datetime | None


class Archive:
    """The archive of one outbox. Immutable; drivers and transactions are as for `outbox_core.Holds`.

    Args:
        outbox: name of the outbox table, `outbox` or `billing.outbox`.
        actor: the person or program that acts, for the outbox's history.

    Raises:
        InvalidConfig: if an argument, here or of a method, cannot be used.
        OutboxTableError: by every method, if there is no outbox or no archive.
        RowsHidden: by every method, if row level security hides rows of the archive from the connection's role.
    """

    __slots__ = ("actor", "outbox", "table")

    def __init__(self, outbox: str | TableName = "outbox", actor: str | None = None) -> None:
        self.outbox = TableName.parse(outbox) if isinstance(outbox, str) else outbox
        self.table = archive_beside(self.outbox)
        self.actor = column_text(actor, "actor")

    def select(
        self,
        connection: Connection,
        topic: str,
        key: str | None = None,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        dead_letters: bool = False,
    ) -> Selected:
        """Count the records that `restash` would take, with the same arguments."""
        matching = _matching(topic, key, since, until, dead_letters)
        self._identify(connection)
        sql = _COUNT.format(archive=_escaped(self.table), where=_WHERE)
        number, first, last = self._fetch(connection, sql, matching)[0]
        return Selected(number, first and datetime.fromisoformat(first), last and datetime.fromisoformat(last))

    def restash(
        self,
        connection: Connection,
        topic: str,
        key: str | None = None,
        *,
        since: datetime | None = None,
        until: datetime | None = None,
        dead_letters: bool = False,
        reason: str = "",
    ) -> int:
        """Stash archived records anew, in their old order, and return how many; they stay in the archive, too.

        Consumers take them for new records, unless they look at the header `outbox-restash`.

        Args:
            connection: to the outbox's database, for a role that may insert into the outbox and read the archive.
            topic: of the records.
            key: of the records; None for all of the topic.
            since: the earliest time at which a record left the outbox; a time without a zone is the session's.
            until: the first time that is too late.
            dead_letters: take the records that went to the dead-letter topic, instead of the published ones.
            reason: for the history.
        """
        matching = _matching(topic, key, since, until, dead_letters)
        why = column_text(reason, "reason")
        place = self._identify(connection)
        marker = [f"{place.outbox}:"]
        sql = _RESTASH.format(
            outbox=_escaped(self.outbox),
            archive=_escaped(self.table),
            columns=", ".join(place.columns),
            values=", ".join(place.values),
            where=_WHERE,
            noted=_NOTED.format(events=_escaped(events_beside(self.outbox))) if place.has_events else "",
        )
        parameters = [*marker, *matching]
        if place.has_events:
            parameters += [place.outbox, str(EventKind.RESTASHED), self.actor, why, *matching[:2]]
        count: int = self._fetch(connection, sql, parameters)[0][0]
        return count

    def _identify(self, connection: Connection) -> _Place:
        names = [self.table.quoted, events_beside(self.outbox).quoted, self.outbox.quoted]
        rows = self._fetch(connection, _IDENTIFY, names)
        if not rows:
            raise OutboxTableError(f"outbox table {self.outbox} does not exist in this database")
        outbox, has_archive, is_binary, has_partition, has_time_default, has_events = rows[0]
        if not has_archive:
            raise OutboxTableError(
                f"there is no table {self.table}, so nothing was archived; make it with "
                f"`outbox schema --archive --table {self.outbox}`, with Alembic's outbox_archive() or with Django's "
                "ArchivePublished(), and harvest with `retention: archive`"
            )
        refuse_hidden(fetch_on(connection), [self.table])
        value = "convert_to(%s::text || id, 'UTF8')" if is_binary else "(%s::text || id)"
        columns = {
            "kafka_topic": "kafka_topic",
            "kafka_key": "kafka_key",
            "kafka_value": "kafka_value",
            # A dead letter's may be arrays of arrays, and more names than values: the pairs are what was published.
            "kafka_header_keys": f"{_PAIRED.format('keys', 'values')} || '{RESTASH_HEADER}'::text",
            "kafka_header_values": f"{_PAIRED.format('values', 'keys')} || {value}",
        }
        if has_partition:
            columns["kafka_partition"] = "kafka_partition"
        if not has_time_default:
            columns["create_time"] = "now()"
        return _Place(outbox, list(columns), list(columns.values()), bool(has_events))

    @staticmethod
    def _fetch(connection: Connection, sql: str, parameters: list[Any]) -> list[tuple[Any, ...]]:
        with closing(plain_cursor(connection)) as cursor:
            cursor.execute(sql, parameters)
            rows: list[tuple[Any, ...]] = cursor.fetchall()
            return rows


class _Place(NamedTuple):
    """The outbox as `schema.table`, the columns that a restash writes and their values, and if there are events."""

    outbox: str
    columns: list[str]
    values: list[str]
    has_events: bool


def _matching(
    topic: str, key: str | None, since: datetime | None, until: datetime | None, dead_letters: bool
) -> list[Any]:
    topic, key = named(topic, "topic"), column_text(key, "key")
    first, last = (None if time is None else time.isoformat() for time in (since, until))
    return [topic, key, key, dead_letters, first, first, last, last]


def _escaped(name: TableName) -> str:
    return name.quoted.replace("%", "%%")
