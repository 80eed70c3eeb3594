"""Every statement that harvesting sends to PostgreSQL, once, together; and the connection that sends them.

Each method is one statement on an autocommit connection, so each is one transaction. The connection belongs to one
thread at a time. `synchronous_commit` is on whatever the database's default: a purge that vanished in a crash would
come back as a repeat.

Why the mark looks as it does. The rows are found by walking the primary key from its beginning, and updated by their
physical address (`ctid`), which saves a second walk: with a half-empty page (fillfactor 50) the new version stays on
the same page and no index is touched. Address and row part company when another transaction updates the row in
between: then the update silently skips it. The mark therefore returns how many rows it *selected* beside those it
updated; see `MarkedBatch`. It never uses SKIP LOCKED, which would skip a row that is just being marked by another
leader and return it later, out of order.

Marks and scans are limited by rows and by bytes, from the first one on: thousands of large values must not be fetched
to find out that they are large. A row is taken if those before it do not fill the limit, so one that exceeds it alone
is taken too.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from operator import itemgetter
from typing import Any, NamedTuple, NoReturn
from uuid import UUID

import psycopg

from outbox_core import relay_marks
from outbox_core.errors import OutboxTableError, RowsHeld, RowsRemain, StoreUnavailable
from outbox_core.ports import (
    HEADER_BYTES,
    KEY_DIGEST_PREFIX,
    LONGEST_KEY_OF_HOLD,
    NO_FLOOR,
    NO_HOLDS,
    NO_LIMIT,
    Backlog,
    Floor,
    HeldKey,
    HoldSet,
    LaneKey,
    MarkedBatch,
    MarkedRows,
    NewHold,
    OpenWriter,
    Sight,
    StoredRecord,
    Withheld,
    held_key,
)
from outbox_core.schema import HOLD_COLUMNS, REQUIRED_COLUMNS, TableName, hold_beside, hold_id, quote
from outbox_core.stores.sessions import Connection, connect_to_primary, is_lent_by_transaction, milliseconds, one_line

_log = logging.getLogger(__name__)

_INSPECT = """
SELECT c.relkind, c.relispartition OR EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid) AS has_family,
       current_database(), n.nspname, c.relname,
       has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'DELETE')
           AND (SELECT has_column_privilege(c.oid, attnum, 'UPDATE') FROM pg_attribute
                WHERE attrelid = c.oid AND attname = 'leader_id'),
       pg_backend_pid(),
       (SELECT jsonb_object_agg(attname, format_type(atttypid, NULL)) FROM pg_attribute
        WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped),
       (SELECT max(s.seqcache) FROM pg_depend AS d JOIN pg_sequence AS s ON s.seqrelid = d.objid
        JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid AND a.attname = 'id'
        WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(%s)
"""

# Made by initdb: two databases of one name on different servers differ in it, a server and its standbys do not.
_SERVER_ID = "SELECT system_identifier::text FROM pg_catalog.pg_control_system()"

# Whether a message would be larger than any client of ours takes is looked at for each row that is returned only if one
# of them is.
_MARK = """
WITH head AS MATERIALIZED (
    SELECT array_agg({locator}) AS rows, count(*) AS selected, max(size) > %(max_message)s AS may_be_large
    FROM (
        SELECT {locator}, size, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - size AS before
        FROM (
            SELECT {locators}, {size} AS size FROM {table}
            WHERE {above} AND leader_id IS DISTINCT FROM %(leader_id)s {exclusion}
            ORDER BY id
            LIMIT %(limit)s
        ) AS earliest
    ) AS sized
    WHERE before < %(max_bytes)s
)
UPDATE {table} SET leader_id = %(leader_id)s
WHERE {locator} = ANY ((SELECT rows FROM head)::{locator_type}[])
RETURNING id, {topic}, {key}, {value}, {names}, {values}, {partition}, 0,
          CASE WHEN {is_large} THEN {content} END, (SELECT selected FROM head)
"""

# What a mark would begin with. One that has updated nothing returns no row, and so not how many it selected.
_IS_SELECTED = """
SELECT EXISTS (SELECT FROM {table} WHERE {above} AND leader_id IS DISTINCT FROM %(leader_id)s {exclusion})
"""

# Exact for every time that a clock shows. The others, which only somebody who writes them by hand can draw, are all 0:
# infinite ones, those that a 64-bit number cannot hold, and none.
MICROSECONDS = """
CASE WHEN create_time > '-infinity' AND create_time < '294000-01-01 00:00+00'
     THEN (extract(epoch FROM create_time) * 1000000)::bigint ELSE 0 END
"""

_SCAN = """
SELECT id, {topic}, {key}, {value}, {names}, {values}, partition, microseconds, CASE WHEN {is_large} THEN {content} END
FROM (
    SELECT *, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - size AS before
    FROM (
        SELECT id, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values,
               {partition} AS partition, {microseconds} AS microseconds, {size} AS size
        FROM {table}
        WHERE {above} AND {other_ids} {exclusion}
        ORDER BY id
        LIMIT %(limit)s
    ) AS earliest
) AS sized
WHERE before < %(max_bytes)s
ORDER BY id
"""

# No column of a table of our own making is NULL there, but one that was made by hand may have it: such a record has no
# legal topic, and is held for that.
TOPIC = "coalesce(kafka_topic, '')"

# As `outbox_core.ports.held_key` has it. No character takes more than four bytes; the length of a value that is stored
# out of line is known without reading it only in bytes.
_HELD_KEY = f"""
CASE WHEN (octet_length(kafka_key) <= {LONGEST_KEY_OF_HOLD}
           OR octet_length(kafka_key) <= {4 * LONGEST_KEY_OF_HOLD} AND length(kafka_key) <= {LONGEST_KEY_OF_HOLD})
          AND NOT starts_with(kafka_key, '{KEY_DIGEST_PREFIX}') THEN kafka_key
     ELSE '{KEY_DIGEST_PREFIX}' || encode(sha256(convert_to(kafka_key, 'UTF8')), 'hex') END
"""

# An array's size in memory. That of a compressed one is found by decompressing it: a megabyte may take kilobytes on
# disk. An empty array takes 16 bytes or less.
_RAW_ARRAY = """
CASE WHEN pg_column_compression({array}) IS NULL THEN pg_column_size({array}) ELSE octet_length(array_send({array})) END
"""

_ARRAY_SIZE = f"""
CASE WHEN pg_column_size({{array}}) >= 24 THEN {_RAW_ARRAY} + {HEADER_BYTES} * cardinality({{array}}) ELSE 0 END
"""

# No more than what a message has of it, so that nothing is withheld that a client would take.
_ARRAY_CONTENT = f"""
CASE WHEN pg_column_size({{array}}) >= 24 THEN {_RAW_ARRAY} - 32 - 7 * cardinality({{array}}) ELSE 0 END
"""

_TEXTS = "coalesce(octet_length(kafka_key), 0) + coalesce(octet_length(kafka_value), 0)"


def _of_headers(expression: str) -> str:
    arrays = ("kafka_header_keys", "kafka_header_values")
    return "".join(f" + ({expression.format(array=array).strip()})" for array in arrays)


# What a row takes in memory, near enough (`outbox_core.ports.size_of`). Known without reading values that are stored
# out of line, except compressed headers.
SIZE = f"{_TEXTS} + coalesce(octet_length(kafka_topic), 0){_of_headers(_ARRAY_SIZE)}"

_CONTENT = f"({_TEXTS}{_of_headers(_ARRAY_CONTENT)})"

_SETTLE = """
DELETE FROM {table} AS stored
USING unnest(%(ids)s::bigint[], %(create_times)s::bigint[]) AS published (id, microseconds)
WHERE stored.id = published.id AND {microseconds} = published.microseconds
"""

# Reads the whole table: a mark may be anywhere, behind any number of rows of keys that were left out of the marks.
# What a relay marked (outbox_core.relay_marks) is not counted: its manifests tell what it published.
_MARKED = """
SELECT count(*), coalesce(min(id), 0), coalesce(max(id), 0) FROM {table}
WHERE leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}'
"""

# Stops at the first one. They are counted for the message alone.
_IS_MARKED = """
SELECT EXISTS (SELECT FROM {table} WHERE leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}')
"""

# The first ones. Their keys are as holds have them: they may be of any length. A mark that a constraint, a policy or a
# trigger keeps from being cleared stays, and its row is found until it is held.
_FIND_MARKED = """
SELECT id, {topic}, {held_key}, concat_ws(', ', {broken}) FROM {table} AS stored
WHERE leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}'
  AND NOT EXISTS (SELECT FROM {holds} AS held WHERE {is_of_record})
ORDER BY id LIMIT %(limit)s
"""

# Constraints that hold for every new version of a row, a mark's included, but were not there before these rows.
_NEW_CONSTRAINTS = """
SELECT quote_ident(conname), pg_get_expr(conbin, conrelid) FROM pg_constraint
WHERE conrelid = to_regclass(%(name)s) AND contype = 'c' AND NOT convalidated
"""

# Those that are held already come last: there may be more than are found at once.
_FIND_VIOLATIONS = """
SELECT id, {topic}, {held_key}, concat_ws(', ', {broken}) FROM {table} AS stored WHERE NOT {fulfilled}
ORDER BY EXISTS (SELECT FROM {holds} AS held WHERE {is_of_record}), id LIMIT {limit}
"""

_CLEAR_MARKS_OF = """
UPDATE {table} SET leader_id = NULL
WHERE id = ANY (%(ids)s::bigint[]) AND leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}'
  AND {fulfilled}
"""

_CLEAR_MARKS_OF_HELD = """
UPDATE {table} AS stored SET leader_id = NULL
WHERE leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}' AND {fulfilled}
  AND EXISTS (SELECT FROM {holds} AS held WHERE {is_of_record})
"""

_RELEASE_MARKED = "DELETE FROM {holds} WHERE outbox = %(outbox)s AND record_id IS NOT NULL AND reason = %(reason)s"

_CLEAR_MARKS = "UPDATE {table} SET leader_id = NULL WHERE leader_id IS NOT NULL AND {fulfilled}"

# The floor holds for one incarnation of table and sequence, and while the sequence is not set back. Both are looked at
# by the statement that uses it, which by then has the table's lock: TRUNCATE ... RESTART IDENTITY, say, comes before
# it or after it. (A subquery is evaluated once, and its value is an index condition. CASE guards the right to read the
# sequence.)
_ABOVE = """id >= (
            SELECT CASE
                WHEN pg_relation_filenode(to_regclass(%(name)s::text)) = %(table_file)s::oid
                 AND pg_relation_filenode(to_regclass(%(sequence)s::text)) = %(sequence_file)s::oid
                THEN CASE WHEN pg_sequence_last_value(to_regclass(%(sequence)s::text)) >= %(floor)s::bigint
                     THEN %(floor)s::bigint + 1 ELSE {lowest} END
                ELSE {lowest} END)"""

# Where the ids come from: the sequence of an identity column, or the one that its default names.
_SEQUENCE = """
SELECT quote_ident(n.nspname) || '.' || quote_ident(s.relname),
       a.attidentity <> '' OR pg_get_expr(d.adbin, d.adrelid) = format('nextval(%%L::regclass)', s.oid::regclass::text),
       has_sequence_privilege(s.oid, 'SELECT')
FROM pg_attribute AS a
LEFT JOIN pg_attrdef AS d ON d.adrelid = a.attrelid AND d.adnum = a.attnum
JOIN pg_depend AS p ON CASE
    WHEN a.attidentity <> '' THEN p.refclassid = 'pg_class'::regclass AND p.refobjid = a.attrelid
        AND p.refobjsubid = a.attnum AND p.classid = 'pg_class'::regclass AND p.deptype = 'i'
    ELSE p.classid = 'pg_attrdef'::regclass AND p.objid = d.oid AND p.refclassid = 'pg_class'::regclass END
JOIN pg_class AS s ON s.relkind = 'S' AND s.oid = CASE WHEN a.attidentity <> '' THEN p.objid ELSE p.refobjid END
JOIN pg_namespace AS n ON n.oid = s.relnamespace
WHERE a.attrelid = to_regclass(%(name)s) AND a.attname = 'id'
"""

# A sequence that nobody has drawn from says 1 and means 0: to take it at its word would hide the first record.
_DRAWN = """
SELECT CASE WHEN is_called THEN last_value
            ELSE last_value - (SELECT seqincrement FROM pg_sequence WHERE seqrelid = to_regclass(%(sequence)s)) END,
       pg_relation_filenode(to_regclass(%(name)s)), pg_relation_filenode(to_regclass(%(sequence)s))
FROM {sequence}
"""

# An INSERT, whatever its form, takes this lock before it draws its id, and keeps it until its rows are visible or gone.
# Not by pid: a prepared transaction has none, and keeps its locks. Whatever could make the ids prove nothing is looked
# at here, after they were read: by a snapshot taken before, a change in between would be overlooked.
_WRITERS = """
SELECT ARRAY(SELECT DISTINCT virtualtransaction FROM pg_locks
             WHERE locktype = 'relation' AND relation = c.oid AND mode = 'RowExclusiveLock' AND granted
               AND database = (SELECT oid FROM pg_database WHERE datname = current_database())),
       c.relkind = 'r' AND NOT c.relispartition AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid),
       s.seqcache, s.seqincrement > 0 AND NOT s.seqcycle
FROM pg_class AS c, pg_sequence AS s
WHERE c.oid = to_regclass(%(name)s) AND s.seqrelid = to_regclass(%(sequence)s)
"""

_DESCRIBE = """
SELECT l.virtualtransaction, l.pid, p.gid,
       coalesce(extract(epoch FROM clock_timestamp() - coalesce(a.xact_start, p.prepared)), 0)::float8,
       coalesce(a.application_name, ''), coalesce(a.state, '')
FROM pg_locks AS l
LEFT JOIN pg_stat_activity AS a ON a.pid = l.pid
LEFT JOIN pg_locks AS t ON l.pid IS NULL AND t.pid IS NULL AND t.locktype = 'transactionid'
    AND t.virtualtransaction = l.virtualtransaction
LEFT JOIN pg_prepared_xacts AS p ON p.transaction = t.transactionid
WHERE l.locktype = 'relation' AND l.relation = to_regclass(%(name)s) AND l.mode = 'RowExclusiveLock' AND l.granted
  AND l.database = (SELECT oid FROM pg_database WHERE datname = current_database())
  AND l.virtualtransaction = ANY (%(writers)s::text[])
"""

# Hot keys and failing ones. A subquery that does not depend on the row is hashed, also in a generic plan; `<> ALL
# (parameter)` is searched there from its beginning for every row.
_EXCLUSION = f"""
AND (kafka_key IS NULL OR ({TOPIC}, {_HELD_KEY}) NOT IN
     (SELECT * FROM unnest(%(excluded_topics)s::text[], %(excluded_keys)s::text[])))
"""

# Ids come in runs: a multirange is searched by halves, where an array is walked.
_OTHER_IDS = "NOT (id::bigint <@ %(ids)s::int8multirange)"

# What is held was read by an earlier statement and comes as parameters. Read here, in the same snapshot, a release
# would take effect for a statement that was prepared for the hold: one that begins behind the rows it releases.
HELD = f"""
AND NOT (id::bigint <@ %(held_ids)s::int8multirange)
AND {TOPIC} NOT IN (SELECT unnest(%(held_topics)s::text[]))
AND (kafka_key IS NULL OR ({TOPIC}, {_HELD_KEY}) NOT IN
     (SELECT * FROM unnest(%(held_lane_topics)s::text[], %(held_lane_keys)s::text[])))
"""

_INSPECT_HOLDS = """
SELECT has_table_privilege(c.oid, 'SELECT'),
       (SELECT array_agg(attname::text) FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped)
FROM pg_class AS c WHERE c.oid = to_regclass(%s)
"""

# One row at least: whether there is anything to tell of or not, rights may have been granted or withdrawn. The holds
# themselves come only if they are others than those that were read last: thousands of them are read several times a
# second. Which versions of which rows there are tells that, whatever was inserted, changed or deleted.
_HOLDS = """
WITH known AS MATERIALIZED (
    SELECT count(*) AS number, coalesce(bit_xor(hashint8extended(id, xmin::text::bigint)), 0) AS versions
    FROM {holds} WHERE outbox = %(outbox)s
)
SELECT rights.may_change, known.number, known.versions, held.outbox IS NOT NULL, held.kafka_topic, held.held_key,
       held.record_id, held.dead_letter, held.error, held.is_long
FROM (SELECT has_table_privilege(oid, 'INSERT') AND has_table_privilege(oid, 'UPDATE')
             AND has_table_privilege(oid, 'DELETE') AS may_change
      FROM pg_class WHERE oid = to_regclass(%(name)s)) AS rights
CROSS JOIN known
LEFT JOIN (
    SELECT *, held_key IS DISTINCT FROM kafka_key AS is_long
    FROM (SELECT *, {held_key} AS held_key FROM {holds} WHERE outbox = %(outbox)s) AS keyed
) AS held ON (known.number, known.versions) IS DISTINCT FROM (%(number)s::bigint, %(versions)s::bigint)
"""

# That nothing is held twice is for the primary key to see (`hold_id`): looked for by the other columns, each new hold
# would be compared with every old one.
_HOLD = """
INSERT INTO {holds} (id, outbox, kafka_topic, kafka_key, record_id, reason, error, dead_letter)
SELECT wanted.id, %(outbox)s, wanted.topic,
       -- A long key comes as its digest: the record itself has it.
       CASE WHEN starts_with(wanted.key, '{digest}')
            THEN coalesce((SELECT kafka_key FROM {table} WHERE id = wanted.record_id AND {held_key} = wanted.key),
                          wanted.key)
            ELSE wanted.key END,
       wanted.record_id, wanted.reason, wanted.error, wanted.dead
FROM unnest(%(hold_ids)s::bigint[], %(topics)s::text[], %(keys)s::text[], %(ids)s::bigint[], %(reasons)s::text[],
            %(errors)s::text[], %(dead)s::boolean[])
     AS wanted (id, topic, key, record_id, reason, error, dead)
ON CONFLICT (id) DO NOTHING
"""

_FETCH = """
SELECT id, {topic}, {key}, {value}, {names}, {values}, {partition}, {microseconds},
       CASE WHEN {is_large} THEN {content} END
FROM {table} AS stored
WHERE id = ANY (%(ids)s::bigint[]) AND EXISTS (SELECT FROM {holds} AS held WHERE {is_of_record})
ORDER BY id
"""

_FIND = """
SELECT id, kafka_topic, kafka_key, kafka_value, NULLIF(kafka_header_keys, '{{}}'),
       NULLIF(kafka_header_values, '{{}}'), {partition}, {microseconds}
FROM {table} AS stored
WHERE id = ANY (%(ids)s::bigint[])
ORDER BY id
"""

# Ids may come back: a hold is of the row that has its topic and key, too.
_IS_OF_RECORD = """
held.outbox = %(outbox)s AND held.record_id = stored.id AND held.kafka_topic = coalesce(stored.kafka_topic, '')
AND held.kafka_key IS NOT DISTINCT FROM stored.kafka_key
"""

_BURY = """
WITH buried AS (
    DELETE FROM {table} AS stored
    USING unnest(%(ids)s::bigint[], %(create_times)s::bigint[]) AS published (id, microseconds)
    WHERE stored.id = published.id AND {microseconds} = published.microseconds
    RETURNING stored.id, stored.kafka_topic, stored.kafka_key
), released AS (
    DELETE FROM {holds} AS held USING buried AS stored WHERE {is_of_record}
)
SELECT count(*) FROM buried
"""

_KEEP = """
UPDATE {holds} AS held SET dead_letter = false, error = %(error)s
FROM {table} AS stored WHERE stored.id = ANY (%(ids)s::bigint[]) AND {is_of_record}
"""

_RELEASE_GONE = """
DELETE FROM {holds} AS held
WHERE outbox = %(outbox)s AND record_id IS NOT NULL AND NOT EXISTS (SELECT FROM {table} AS stored WHERE {is_of_record})
"""

_PURGE = "DELETE FROM {table} WHERE id = ANY (%(ids)s::bigint[]) AND leader_id = %(leader_id)s"

_RESET = "UPDATE {table} SET leader_id = NULL WHERE id = ANY (%(ids)s::bigint[]) AND leader_id = %(leader_id)s"

_RESET_FULFILLING = f"{_RESET} AND {{fulfilled}}"

# A DELETE may succeed and delete nothing. Asked only when it deleted less than it was to.
_UNSETTLED = """
SELECT count(*), min(stored.id) FROM {table} AS stored
JOIN unnest(%(ids)s::bigint[], %(create_times)s::bigint[]) AS published (id, microseconds)
  ON stored.id = published.id AND {microseconds} = published.microseconds
"""

_UNPURGED = "SELECT count(*), min(id) FROM {table} WHERE id = ANY (%(ids)s::bigint[]) AND leader_id = %(leader_id)s"

# What may keep this role from deleting or marking what it reads.
_OBSTACLES = """
WITH family AS (SELECT to_regclass(%(name)s) AS oid
                UNION SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(%(name)s))
SELECT 'row level security' || coalesce(
           (SELECT ' (policies: ' || string_agg(quote_ident(polname), ', ' ORDER BY polname) || ')'
            FROM pg_policy WHERE polrelid = family.oid), ' (it has no policy)')
FROM family WHERE row_security_active(oid)
UNION ALL
SELECT 'trigger ' || quote_ident(tgname) FROM pg_trigger JOIN family ON tgrelid = family.oid
WHERE NOT tgisinternal AND tgenabled IN ('O', 'A')
  AND tgtype & 3 = 3 AND tgtype & 24 <> 0  -- BEFORE ... FOR EACH ROW; of DELETE or UPDATE
UNION ALL
SELECT 'rule ' || quote_ident(rulename) FROM pg_rewrite JOIN family ON ev_class = family.oid
WHERE ev_type IN ('2', '4') AND ev_enabled IN ('O', 'A')
ORDER BY 1
"""

_IS_EMPTY = "SELECT NOT EXISTS (SELECT FROM {table})"

# Counting millions of rows takes seconds; beyond the bound the planner's statistics are good enough for a gauge.
_BACKLOG = """
SELECT CASE WHEN counted < {bound} THEN counted
            ELSE greatest(counted, (SELECT reltuples::bigint FROM pg_class WHERE oid = to_regclass(%(name)s)))
       END,
       -- An infinite time has no age.
       coalesce((SELECT CASE WHEN isfinite(create_time)
                             THEN extract(epoch FROM clock_timestamp() - create_time)::float8 END
                 FROM {table} ORDER BY id LIMIT 1), 0)
FROM (SELECT count(*) AS counted FROM (SELECT FROM {table} LIMIT {bound}) AS head) AS bounded
"""

_BACKLOG_COUNT_BOUND = 100_000

_RELAYS = {"first_of_relays": relay_marks.FIRST, "last_of_relays": relay_marks.LAST}

_LONGEST_TIMEOUT_SECONDS = 86_400.0

_TEXT_TYPES = {"text", "character varying", "character"}
_TIME_TYPES = {"timestamp with time zone", "timestamp without time zone", "date"}
_id_of = itemgetter(0)
# A server that has become a standby is as good as away: the next connection may find the new primary.
_PASSING = (psycopg.OperationalError, psycopg.InterfaceError, psycopg.errors.ReadOnlySqlTransaction)
# No right to the function, or no such function (servers that only speak PostgreSQL's protocol).
_SERVER_ID_WITHHELD = (
    psycopg.errors.InsufficientPrivilege,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.FeatureNotSupported,
)
# Of the server and its resources: a transaction or session that was ended, no more memory or connections, a shutdown,
# an internal error. None of them says anything about the table.
_PASSING_CLASSES = ("08", "25", "53", "57", "58", "XX")
_OF_ANOTHER_TABLE = (
    psycopg.errors.FeatureNotSupported,  # "cached plan must not change result type"
    psycopg.errors.UndefinedColumn,
    psycopg.errors.UndefinedFunction,
    psycopg.errors.DatatypeMismatch,
)
_KEY = 2
_VALUE = 3
_WITHHELD = 8
_SELECTED = 9
_withheld_of = itemgetter(_WITHHELD)
_LARGEST_INTEGER = 2**63 - 1
MARKED = "marked"
"""The reason of the holds of records that an at-least-once leader may have sent."""

_SLOW_SECONDS = 1.0
_SKIPPED_SECONDS = 3.0
_LOOK_FOR_SKIPPED_EVERY_SECONDS = 10.0  # while marks return nothing: that costs as much as a mark of nothing
_VIOLATIONS_AT_ONCE = 1_000
_VIOLATES = "the row is older than the CHECK constraint, which now keeps it from being marked; correct it, or skip it"

_MARKED_ERROR = (
    "its column leader_id was set: an at-least-once leader that did not stop in good order may have sent it, or its "
    "writer set it. Release it to publish it, perhaps again, or skip it; --accept-marked releases all of these"
)
# Before, a transaction took another name when it was prepared.
_TRANSACTIONS_KEEP_THEIR_NAMES = 140001


class _Place(NamedTuple):
    """Where a floor holds: on this connection, and while table and sequence are stored in these files."""

    session: object
    table_file: int | None
    sequence_file: int | None


class _NewRules(NamedTuple):
    """What CHECK constraints that are NOT VALID say of a row, as SQL.

    Attributes:
        broken: the names of those that it violates, each NULL if it does not.
        fulfilled: whether it violates none, so that it can be changed.
    """

    broken: str
    fulfilled: str


class _Sequence(NamedTuple):
    """Where a table's ids come from, or why that tells nothing."""

    name: str
    unusable: str


class PostgresStore:
    """An outbox table in PostgreSQL; implements `outbox_core.ports.OutboxStore`.

    Args:
        data_source: libpq connection string or URL.
        table: name of the outbox table.
        application_name: shown in pg_stat_activity.
        statement_timeout: after how many seconds a statement is given up; 0.0 for never.
        max_message_bytes: how many bytes key, value and headers of a message may have together; what has more is not
            read (`outbox_core.ports.Withheld`).
    """

    def __init__(
        self,
        data_source: str,
        table: str = "outbox",
        *,
        application_name: str = "kafka-outbox",
        statement_timeout: float = 0.0,
        max_message_bytes: int = NO_LIMIT,
    ) -> None:
        self._max_message_bytes = max_message_bytes
        self._statement_timeout = statement_timeout
        self._data_source = data_source
        self._name = self._table = TableName.parse(table)  # as it was named; with its schema, once it was found
        self._application_name = application_name
        self._connection: Connection | None = None
        self._session = object()
        self._sequence: _Sequence | None = None
        self._mark = self._mark_excluding = self._scan = self._scan_excluding = ""
        self._is_selected = self._is_selected_excluding = ""
        self._skipped_since: float | None = None
        self._look_for_skipped_at = 0.0
        self._reading_timeout = statement_timeout
        self._hold_name = self._hold_table = hold_beside(self._name)
        self._outbox = ""  # <schema>.<table>, as holds know it
        self._has_holds: bool | None = None
        self._may_change_holds = True
        self._role = ""
        self._fetch = self._find = ""
        self._was_altered = False  # since the last mark or scan that succeeded
        self._formatted: dict[tuple[object, ...], str] = {}
        self._holds = NO_HOLDS
        self._versions_of_holds: list[int | None] = [None, None]  # of which those are
        self._held_parameters = _HeldParameters()

    def check(self) -> str:
        """Look at the table, prepare for its layout, and return `<database>.<schema>.<table>`.

        Raises:
            OutboxTableError: if the table is missing, is no outbox, or must not be harvested from here; or if it has
                holds, and we may not read them.
            StoreUnavailable: if the database does not answer.
        """
        if not self._table.schema:
            self.close()  # another session may find it
        self._connected()
        rows = self._query(_INSPECT, (self._table.quoted,))
        if not rows:
            raise OutboxTableError(
                f"outbox table {self._name} does not exist; make it with `outbox schema --table {self._name}`, "
                "with Alembic or with `manage.py migrate`, or name the right one as outbox_table"
            )
        kind, has_family, database, schema, table, may_harvest, pid, columns, cache = rows[0]
        connection = self._connected()
        if pid != connection.info.backend_pid and self._is_lent_by_transaction(connection):
            raise OutboxTableError(
                "data_source leads to a pooler that lends its connections for one transaction at a time (PgBouncer's "
                "pool_mode=transaction): the harvester's settings would come to other applications and be lost to it. "
                "Name the database itself, or a pool of sessions"
            )
        if kind not in {"r", "p"}:
            raise OutboxTableError(f"{self._name} is not a table, so it cannot be harvested")
        self._check_columns(columns)
        if not may_harvest:
            raise OutboxTableError(
                f"missing rights on {self._name}: harvesting needs SELECT, DELETE and UPDATE (leader_id); "
                f"GRANT SELECT, DELETE, UPDATE (leader_id) ON TABLE {self._table.quoted} TO {self._quoted_role}"
            )
        if cache is not None and cache > 1:
            _log.warning(
                "the sequence of %s.id has CACHE %d: ids are not drawn in order, so neither are records of "
                "transactions in different sessions, and the settled floor is off; ALTER SEQUENCE ... CACHE 1",
                self._name,
                cache,
            )
        for obstacle in self.obstacles():
            _log.warning(
                "table %s has %s: records that it hides from role %s are not published, and publishing stops if it "
                "keeps others from being marked or removed",
                self._name,
                obstacle,
                self._quoted_role,
            )
        self._check_holds()
        self._outbox = f"{schema}.{table}"
        self._prepare_reads(columns, by_address=kind == "r" and not has_family)
        return f"{database}.{schema}.{table}"

    def _is_lent_by_transaction(self, connection: Connection) -> bool:
        try:
            return is_lent_by_transaction(connection, self._data_source)
        except psycopg.Error as error:  # it takes a second connection, which a pool of sessions may not have to give
            self._raise(error)

    def server_id(self) -> str:
        """Return the server's system identifier, '' where it may not be read (some hosted databases).

        Raises:
            StoreUnavailable: if the database does not answer.
        """
        try:
            return str(self._query(_SERVER_ID)[0][0])
        except OutboxTableError as error:
            if isinstance(error.__cause__, _SERVER_ID_WITHHELD):
                return ""
            raise

    def mark(
        self,
        leader_id: UUID,
        limit: int,
        excluding: Collection[LaneKey] = (),
        resting: Collection[int] = (),
        floor: Floor = NO_FLOOR,
        *,
        max_bytes: int = NO_LIMIT,
        holds: HoldSet = NO_HOLDS,
    ) -> MarkedBatch:
        """Mark the earliest rows above the floor, but for what is held and the given lanes and ids; return them.

        Raises:
            StoreUnavailable: also if some cannot be marked, whatever is tried.
        """
        if not self._mark:
            self.check()
        parameters: dict[str, Any] = {"leader_id": leader_id, "limit": limit, "max_bytes": max_bytes}
        parameters |= {"max_message": self._max_message_bytes, **self._above(floor)}
        statement, is_selected = self._mark, self._is_selected
        if excluding or resting or holds:
            statement, is_selected = self._mark_excluding, self._is_selected_excluding
            parameters |= {**_excluded(excluding), "ids": _multirange(resting), **self._held_parameters.of(holds)}
        began = time.monotonic()
        try:
            rows = self._read(statement, parameters)
        except OutboxTableError as error:
            self._cannot_mark(error)
        # Behind many dead rows a second look would take as long as the first.
        if rows or time.monotonic() - began < _SLOW_SECONDS:
            self._see_skipped(rows, is_selected, parameters)
        if not rows:
            return MarkedBatch(0, ())
        rows.sort(key=_id_of)
        return MarkedBatch(rows[0][_SELECTED], self._without_large_values(rows))

    def _see_skipped(self, rows: list[tuple[Any, ...]], is_selected: str, parameters: dict[str, Any]) -> None:
        """See whether marks select rows that they do not get, and that not because another leader is at work.

        Raises:
            StoreUnavailable: if that has been so for some seconds, and there is something to be blamed for it.
        """
        at = time.monotonic()
        if rows:
            skips = rows[0][_SELECTED] != len(rows)
        elif self._skipped_since is None and at < self._look_for_skipped_at:
            return
        else:
            self._look_for_skipped_at = at + _LOOK_FOR_SKIPPED_EVERY_SECONDS
            skips = bool(self._query(is_selected, parameters)[0][0])  # or they have come since
        if not skips:
            self._skipped_since = None
            return
        self._skipped_since = self._skipped_since or at
        if at - self._skipped_since >= _SKIPPED_SECONDS and (obstacles := self.obstacles()):
            raise StoreUnavailable(
                f"rows of {self._name} can be read and cannot be marked: {', '.join(obstacles)}. Nothing is published "
                f"until role {self._quoted_role} can mark every row that it can see",
                in_doubt=True,
            )

    def purge(self, leader_id: UUID, ids: Sequence[int]) -> int:
        """Delete the rows of these ids that are still marked by `leader_id`; return how many."""
        purged = self._change(_PURGE, leader_id, ids)
        if purged < len(ids):
            self._see_what_remains(_UNPURGED, {"leader_id": leader_id, "ids": _array(ids)})
        return purged

    def reset(self, leader_id: UUID, ids: Sequence[int]) -> int:
        """Clear the mark on the rows of these ids that are still marked by `leader_id`; return how many.

        A row that a constraint keeps from being changed is held, and keeps its mark.
        """
        try:
            return self._change(_RESET, leader_id, ids)
        except OutboxTableError as error:
            if not self._hold_violations(error):
                raise
        return self._change(_RESET_FULFILLING, leader_id, ids, fulfilled=self._new_rules().fulfilled)

    def scan(
        self,
        limit: int,
        in_flight: Collection[int],
        excluding: Collection[LaneKey] = (),
        floor: Floor = NO_FLOOR,
        *,
        max_bytes: int = NO_LIMIT,
        holds: HoldSet = NO_HOLDS,
    ) -> Sequence[StoredRecord]:
        """The earliest rows above the floor, by id; not what is held, nor the given ids and lanes. Changes nothing."""
        if not self._scan:
            self.check()
        parameters: dict[str, Any] = {"limit": limit, "ids": _multirange(in_flight), "max_bytes": max_bytes}
        parameters |= {"max_message": self._max_message_bytes, **self._above(floor)}
        if excluding or holds:
            parameters |= _excluded(excluding)
            rows = self._read(self._scan_excluding, parameters | self._held_parameters.of(holds))
        else:
            rows = self._read(self._scan, parameters)
        return self._without_large_values(rows)

    def sight(self) -> Sight:
        """How far ids have been drawn; then, by a later statement, who is writing to the table."""
        try:
            session = self._connected() and self._session
            sequence = self._sequence = self._sequence or self._find_sequence()
            if sequence.unusable:
                return Sight(NO_FLOOR.id, None, frozenset(), sequence.unusable)
            names = {"name": self._table.quoted, "sequence": sequence.name}
            drawn = self._query(_DRAWN.format(sequence=sequence.name.replace("%", "%%")), names)
            found = self._query(_WRITERS, names)
        except OutboxTableError as error:  # it has gone, or may not be read: the next mark says what is wrong
            return Sight(NO_FLOOR.id, None, frozenset(), str(error))
        if not found or self._session is not session:
            raise StoreUnavailable(f"table {self._name} or sequence {sequence.name} was replaced at this moment")
        (last_id, *files), (writers, is_alone, cache, ascends) = drawn[0], found[0]
        unusable = self._why_unusable(is_alone=is_alone, cache=cache, ascends=ascends)
        return Sight(last_id, _Place(session, *files), frozenset(writers), unusable)

    def describe(self, writers: Collection[str]) -> Sequence[OpenWriter]:
        """Those of these writers that are still open."""
        rows = self._query(_DESCRIBE, {"name": self._table.quoted, "writers": list(writers)})
        return [OpenWriter(*row) for row in rows]

    def settle(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete the rows of which both id and create time match, whoever marked them; return how many."""
        statement = self._format(_SETTLE, microseconds=MICROSECONDS)
        parameters = {"ids": _array(ids), "create_times": _array(create_times)}
        settled = self._execute(statement, parameters).rowcount
        if settled < len(ids):
            self._see_what_remains(_UNSETTLED, parameters)
        return settled

    def holds(self) -> HoldSet | None:
        """What is held now, None if this outbox has no table of holds.

        Raises:
            StoreUnavailable: also if we may not read it (any more): what nobody can see may be held all the same.
        """
        with self._rights_may_come():
            if not self._has_holds and not self._find_holds():
                return None
            number, versions = self._versions_of_holds
            parameters = {"outbox": self._known_as(), "number": number, "versions": versions}
            try:
                statement = self._format(_HOLDS, held_key=_HELD_KEY)
                found = self._query(statement, {**parameters, "name": self._hold_table.quoted})
            except OutboxTableError as error:
                self._has_holds = None  # dropped, perhaps
                if _is_about_rights(error) or self._find_holds():
                    raise
                return None
        if not found:
            raise StoreUnavailable(f"table {self._hold_name} was replaced at this moment")
        may_change, *read = found[0][:3]
        self._tell_of_rights(may_change=may_change)
        if read != self._versions_of_holds or may_change != self._holds.may_change:
            if read == self._versions_of_holds and read[0]:  # the requests that were not there for want of rights
                self._versions_of_holds = [None, None]
                return self.holds()
            self._holds = _hold_set([row[4:] for row in found if row[3]], may_change=may_change)
            self._versions_of_holds = read
        return self._holds

    def hold(self, holds: Sequence[NewHold]) -> None:
        """Hold what is not held yet."""
        topics, keys, ids, reasons, errors, dead = (list(column) for column in zip(*holds, strict=True))
        outbox = self._known_as()
        parameters = {
            "outbox": outbox,
            "hold_ids": [hold_id(outbox, hold.topic, hold.key, hold.record_id) for hold in holds],
            "topics": topics,
            "keys": [None if key is None else held_key(key) for key in keys],
            "ids": ids,
            "dead": dead,
            "reasons": reasons,
            "errors": [error.replace("\0", "") for error in errors],
        }
        with self._rights_may_come():
            self._execute(self._format(_HOLD, digest=KEY_DIGEST_PREFIX, held_key=_HELD_KEY), parameters)

    def fetch(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        """The held rows of these ids, by ascending id, whoever marked them."""
        parameters = {"ids": _array(ids), "outbox": self._known_as(), "max_message": self._max_message_bytes}
        return self._without_large_values(self._query(self._fetch, parameters))

    def find(self, ids: Sequence[int]) -> Sequence[StoredRecord]:
        """The rows of these ids, by ascending id, whoever marked them."""
        if not self._find:
            self.check()
        return self._query(self._find, {"ids": _array(ids)})  # type: ignore[return-value]

    def bury(self, ids: Sequence[int], create_times: Sequence[int]) -> int:
        """Delete held rows of which both id and create time match, and with them their holds; return how many rows."""
        parameters = {"ids": _array(ids), "create_times": _array(create_times), "outbox": self._known_as()}
        statement = self._format(_BURY, microseconds=MICROSECONDS, is_of_record=_IS_OF_RECORD)
        with self._rights_may_come():
            buried = int(self._query(statement, parameters)[0][0])
        if buried < len(ids):
            self._see_what_remains(_UNSETTLED, parameters)
        return buried

    def keep(self, ids: Sequence[int], error: str) -> int:
        """Let records be held as before, as the dead-letter topic refused them; return how many."""
        parameters = {"ids": _array(ids), "error": error.replace("\0", ""), "outbox": self._known_as()}
        with self._rights_may_come():
            return self._execute(self._format(_KEEP, is_of_record=_IS_OF_RECORD), parameters).rowcount

    def release_gone(self) -> int:
        """Delete the holds of records that are no longer there; return how many."""
        statement = self._format(_RELEASE_GONE, is_of_record=_IS_OF_RECORD)
        with self._rights_may_come():
            return self._execute(statement, {"outbox": self._known_as()}).rowcount

    def marked(self) -> MarkedRows:
        """The rows that carry a harvester's mark."""
        with self._without_timeout():
            is_any = self._query(self._format(_IS_MARKED, **_RELAYS))[0][0]
            return MarkedRows(*self._query(self._format(_MARKED, **_RELAYS))[0] if is_any else (0, 0, 0))

    def hold_marked(self, limit: int) -> int:
        """Hold some of the rows that carry a harvester's mark, and clear their marks; return how many they were."""
        with self._without_timeout():
            rules = self._new_rules()
            parts = {"topic": TOPIC, "held_key": _HELD_KEY, "is_of_record": _IS_OF_RECORD, **rules._asdict()}
            statement = self._format(_FIND_MARKED, **parts, **_RELAYS)
            found = self._query(statement, {"limit": limit, "outbox": self._known_as()})
            if found:
                self.hold([_hold_of_marked(*row) for row in found])
                ids = _array([identity for identity, *_ in found])
                self._execute(self._format(_CLEAR_MARKS_OF, fulfilled=rules.fulfilled, **_RELAYS), {"ids": ids})
            else:  # what was held before for something else
                statement = self._format(_CLEAR_MARKS_OF_HELD, **parts, **_RELAYS)
                self._execute(statement, {"outbox": self._known_as()})
        return len(found)

    def release_marked(self) -> int:
        """Let go of what `hold_marked` held; return how many records."""
        if self.holds() is None:
            return 0
        parameters = {"outbox": self._known_as(), "reason": MARKED}
        with self._rights_may_come():
            return self._execute(self._format(_RELEASE_MARKED), parameters).rowcount

    def _cannot_mark(self, error: OutboxTableError) -> NoReturn:
        """A mark failed: if rows violate new constraints hold them, so that a mark that leaves them out succeeds.

        Raises:
            RowsHeld: if they are held now.
            OutboxTableError: if it was something else, or nothing can be held here.
        """
        number = self._hold_violations(error)
        if not number:
            raise error
        raise RowsHeld(
            f"{number} row(s) of {self._name} violate CHECK constraints that the table got after them, and are held"
        ) from error

    def _new_rules(self) -> _NewRules:
        """The CHECK constraints that rows from before may violate, as SQL."""
        rules = self._query(_NEW_CONSTRAINTS, {"name": self._table.quoted})
        escaped = [(name.replace("%", "%%"), rule.replace("%", "%%")) for name, rule in rules]
        return _NewRules(
            broken=", ".join(f"CASE WHEN NOT ({rule}) THEN {_literal(name)} END" for name, rule in escaped) or "NULL",
            fulfilled="((" + ") AND (".join([rule for _, rule in escaped] or ["true"]) + ") IS NOT FALSE)",
        )

    def _hold_violations(self, error: OutboxTableError) -> int:
        """Hold rows that cannot be changed, as they violate a CHECK constraint that the table got after them.

        Returns:
            How many are held, some of them perhaps before; 0 if the error is about something else.

        Raises:
            OutboxTableError: if nothing can be held here.
        """
        if not isinstance(error.__cause__, psycopg.errors.CheckViolation):
            return 0
        may_hold = self.holds()
        if may_hold is None or not may_hold.may_change:
            raise OutboxTableError(
                f"{error}. Such rows were there before the constraint; `outbox doctor` shows how to find them. Delete "
                f"or correct them, or let them be held: make {self._hold_name}, with all rights on it"
            ) from error
        with self._without_timeout():
            parts = {"topic": TOPIC, "held_key": _HELD_KEY, "is_of_record": _IS_OF_RECORD}
            parts |= self._new_rules()._asdict()
            statement = self._format(_FIND_VIOLATIONS, limit=_VIOLATIONS_AT_ONCE, **parts)
            found = self._query(statement, {"outbox": self._known_as()})
        if found:
            self.hold([NewHold(topic, key, row, f"violates {broken}", _VIOLATES) for row, topic, key, broken in found])
        return len(found)

    def obstacles(self) -> list[str]:
        """What may keep this role from marking and deleting rows that it can read: policies, triggers, rules."""
        self._connected()
        return [what for (what,) in self._query(_OBSTACLES, {"name": self._table.quoted})]

    def clear_marks(self) -> int:
        """Clear all marks, whosever they are, but for those that a constraint keeps; return how many."""
        with self._without_timeout():
            statement = self._format(_CLEAR_MARKS, fulfilled=self._new_rules().fulfilled)
            return self._execute(statement, ()).rowcount

    def is_empty(self) -> bool:
        """Whether no row is visible."""
        return bool(self._query(self._format(_IS_EMPTY))[0][0])

    def backlog(self) -> Backlog:
        """Count what waits: exactly up to 100,000 rows, by the planner's statistics beyond."""
        statement = self._format(_BACKLOG, bound=_BACKLOG_COUNT_BOUND)
        pending, age = self._query(statement, {"name": self._table.quoted})[0]
        return Backlog(int(pending), max(0.0, age))

    def close(self) -> None:
        """Close the connection. The next call opens another one."""
        connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    def _format(self, statement: str, **parts: object) -> str:
        """A statement with the names of the tables, which are known once there is a connection."""
        self._connected()
        key = (statement, *parts.values())
        if key not in self._formatted:
            names = {"table": self._table.quoted, "holds": self._hold_table.quoted}
            escaped = {what: name.replace("%", "%%") for what, name in names.items()}
            self._formatted[key] = statement.format(**escaped, **parts)
        return self._formatted[key]

    def _known_as(self) -> str:
        """What holds call this outbox."""
        if not self._outbox:
            self.check()
        return self._outbox

    def _check_holds(self) -> None:
        """See that what is held can be read."""
        rows = self._query(_INSPECT_HOLDS, (self._hold_table.quoted,))
        if rows and not rows[0][0] and not _missing_in_holds(rows):
            raise OutboxTableError(
                f"missing rights on {self._hold_name}: what is held there would be published; {self._grant()}"
            )

    def _find_holds(self) -> bool:
        """See whether there is a table of holds; say it if there is none, once for each time it is so."""
        before = self._has_holds
        self._connected()  # only now is it known where the table is
        rows = self._query(_INSPECT_HOLDS, (self._hold_table.quoted,))
        missing = _missing_in_holds(rows)
        self._has_holds = bool(rows) and not missing
        if before is None and not self._has_holds:
            why = f"there is no table {self._hold_name}; make it with `outbox schema --only hold`, or migrate"
            if missing:
                why = f"table {self._hold_name} lacks the column(s) {', '.join(missing)}"
            _log.warning("nothing can be held or paused, and a bad record is tried for ever: %s", why)
        return self._has_holds

    def _tell_of_rights(self, *, may_change: bool) -> None:
        """Say it once when what is held can be read, and not changed."""
        if self._may_change_holds and not may_change:
            _log.warning(
                "missing rights on %s: what is held there is not published, but nothing can be added to it, so a bad "
                "record is tried for ever, and no record goes to the dead-letter topic; %s",
                self._hold_name,
                self._grant(),
            )
        self._may_change_holds = may_change

    @property
    def _quoted_role(self) -> str:
        """The role that we are connected as, or were last, as statements name it."""
        return quote(self._role)

    def _grant(self) -> str:
        """What would give us the rights that are missing."""
        return f"GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE {self._hold_name.quoted} TO {self._quoted_role}"

    @contextmanager
    def _rights_may_come(self) -> Iterator[None]:
        """On the table of holds, rights that were withdrawn are waited for: going on could publish what is held."""
        try:
            yield
        except OutboxTableError as error:
            if not _is_about_rights(error):
                raise
            said = str(error).partition(": ")[2]
            raise StoreUnavailable(f"{self._hold_name}: {said}; {self._grant()}", in_doubt=True) from error

    def _check_columns(self, columns: dict[str, str]) -> None:
        missing = [column for column in REQUIRED_COLUMNS if column not in columns]
        if missing:
            raise OutboxTableError(f"table {self._name} is no outbox: it lacks the column(s) {', '.join(missing)}")
        values, headers = columns["kafka_value"], columns["kafka_header_values"].removesuffix("[]")
        names = columns["kafka_header_keys"].removesuffix("[]")
        wrong = [
            f"{column} is {columns[column]}, expected {expected}"
            for column, expected, right in (
                ("id", "bigint", columns["id"] in {"bigint", "integer"}),
                ("leader_id", "uuid", columns["leader_id"] == "uuid"),
                ("kafka_topic", "text", columns["kafka_topic"] in _TEXT_TYPES),
                ("kafka_key", "text", columns["kafka_key"] in _TEXT_TYPES),
                ("create_time", "timestamp with time zone", columns["create_time"] in _TIME_TYPES),
                ("kafka_value", "bytea or text", values in _TEXT_TYPES | {"bytea"}),
                ("kafka_header_keys", "text[]", names in _TEXT_TYPES),
                ("kafka_header_values", "bytea[] or text[]", headers in _TEXT_TYPES | {"bytea"}),
            )
            if not right
        ]
        if wrong:
            raise OutboxTableError(f"table {self._name} is no outbox: {'; '.join(wrong)}")

    def _prepare_reads(self, columns: dict[str, str], *, by_address: bool) -> None:
        """Choose mark and scan for this table. Addresses are unique within one physical table only."""
        parts = {
            "locator": "ctid" if by_address else "id",
            "locator_type": "tid" if by_address else "bigint",
            "locators": "id, ctid" if by_address else "id",
            "size": SIZE,
            "content": _CONTENT,
            "topic": TOPIC,
            "partition": "coalesce(kafka_partition, -1)" if "kafka_partition" in columns else "-1",
            "above": _ABOVE.format(lowest=f"({NO_FLOOR.id + 1})::bigint"),
        }
        large = f"{_CONTENT} > %(max_message)s"
        # The content is added up only where the size, which is known by then, says that it may be too much.
        of_mark = parts | _unless_large(f"(SELECT may_be_large FROM head) AND {large}")
        self._mark = self._format(_MARK, exclusion="", **of_mark)
        excluding = f"{_EXCLUSION} AND {_OTHER_IDS} {HELD}"
        self._mark_excluding = self._format(_MARK, exclusion=excluding, **of_mark)
        self._is_selected = self._format(_IS_SELECTED, exclusion="", above=parts["above"])
        self._is_selected_excluding = self._format(_IS_SELECTED, exclusion=excluding, above=parts["above"])
        parts |= {"microseconds": MICROSECONDS, "other_ids": _OTHER_IDS}
        of_scan = parts | _unless_large(f"size > %(max_message)s AND {large}")
        self._scan = self._format(_SCAN, exclusion="", **of_scan)
        self._scan_excluding = self._format(_SCAN, exclusion=f"{_EXCLUSION} {HELD}", **of_scan)
        self._fetch = self._format(_FETCH, is_of_record=_IS_OF_RECORD, **parts, **_unless_large(large))
        self._find = self._format(_FIND, **parts)

    def _without_large_values(self, rows: list[tuple[Any, ...]]) -> Sequence[StoredRecord]:
        """Records of these rows; `Withheld` stands for what was not read of those that are too large."""
        if any(map(_withheld_of, rows)):
            limit = self._max_message_bytes
            rows = [
                row
                if row[_WITHHELD] is None
                else (*row[:_KEY], _as_held(row[_KEY]), Withheld(row[_WITHHELD], limit), *row[_VALUE + 1 :])
                for row in rows
            ]
        return rows  # type: ignore[return-value]

    def _see_what_remains(self, question: str, parameters: dict[str, Any]) -> None:
        """After a DELETE of less than was asked for: see whether the rest is gone.

        Raises:
            RowsRemain: if it is not.
        """
        number, first = self._query(self._format(question, microseconds=MICROSECONDS), parameters)[0]
        if not number:
            return
        obstacles = ", ".join(self.obstacles()) or "no policy, trigger or rule that could be seen is to blame"
        raise RowsRemain(
            f"{number} published rows of {self._name} (the first is {first}) are still there after they were deleted: "
            f"{obstacles}. Nothing more is published, as it would be repeated, until role "
            f"{self._quoted_role} can remove rows from this table"
        )

    def _above(self, floor: Floor) -> dict[str, Any]:
        """Parameters of a floor; on another connection than the one it was proven on, it is none."""
        self._connected()
        name, place, sequence = self._table.quoted, floor.place, self._sequence
        if (
            sequence is None
            or not isinstance(place, _Place)
            or place.session is not self._session
            or None in place  # a partitioned table has no file
        ):
            return {"name": name, "floor": None, "sequence": None, "table_file": None, "sequence_file": None}
        return {
            "name": name,
            "floor": str(floor.id),
            "sequence": sequence.name,
            "table_file": str(place.table_file),
            "sequence_file": str(place.sequence_file),
        }

    def _find_sequence(self) -> _Sequence:
        """The sequence that the table's ids come from."""
        found = self._query(_SEQUENCE, {"name": self._table.quoted})
        if len(found) != 1 or not found[0][1]:
            return _Sequence("", f"the ids of {self._name} are not simply drawn from one sequence")
        name, _, may_read = found[0]
        if self._connected().info.server_version < _TRANSACTIONS_KEEP_THEIR_NAMES:
            return _Sequence(name, "it needs PostgreSQL 14.1 or later")
        return _Sequence(name, "" if may_read else f"GRANT SELECT ON SEQUENCE {name} TO {self._quoted_role}")

    def _why_unusable(self, *, is_alone: bool, cache: int, ascends: bool) -> str:
        if not is_alone:
            return f"{self._name} is partitioned or inherited from: an insert into a part does not lock the whole"
        if cache > 1:
            return (
                f"the sequence of {self._name}.id has CACHE {cache}, so ids are drawn ahead; "
                "ALTER SEQUENCE ... CACHE 1, and restart the applications"
            )
        return "" if ascends else f"the sequence of {self._name}.id descends or cycles"

    def _change(self, statement: str, leader_id: UUID, ids: Sequence[int], **parts: object) -> int:
        return self._execute(self._format(statement, **parts), {"leader_id": leader_id, "ids": _array(ids)}).rowcount

    def _query(self, statement: str, parameters: Any = ()) -> list[tuple[Any, ...]]:
        return self._execute(statement, parameters).fetchall()

    def _read(self, statement: str, parameters: Any) -> list[tuple[Any, ...]]:
        """A mark or a scan. One that timed out begins at the head again: only with more time does it ever end."""
        timeout = self._reading_timeout
        if timeout != self._statement_timeout:
            self._set_timeout(timeout)
        began = time.monotonic()
        try:
            rows = self._query(statement, parameters)
        except StoreUnavailable as error:
            was_cancelled = isinstance(error.__cause__, psycopg.errors.QueryCanceled)
            if was_cancelled and 0 < 0.9 * timeout < time.monotonic() - began:  # and not by somebody
                self._give_more_time()
            raise
        self._was_altered = False
        if timeout != self._statement_timeout:
            self._reading_timeout = self._statement_timeout
            self._set_timeout(self._statement_timeout)
        return rows

    def _give_more_time(self) -> None:
        if self._reading_timeout == self._statement_timeout:
            _log.warning(
                "reading %s from its head takes longer than statementTimeout (%g s): next time it may take twice as "
                "long, and so on until it succeeds. Dead rows that vacuum cannot remove (is an old snapshot open?), a "
                "large backlog that is held, or somebody's lock are in the way",
                self._name,
                self._statement_timeout,
            )
        self._reading_timeout = min(2 * self._reading_timeout, max(_LONGEST_TIMEOUT_SECONDS, self._statement_timeout))

    def _set_timeout(self, seconds: float) -> None:
        self._execute("SELECT set_config('statement_timeout', %s, false)", (milliseconds(seconds),))

    @contextmanager
    def _without_timeout(self) -> Iterator[None]:
        """For the statements that read the whole table, once, when a leadership begins."""
        self._set_timeout(0.0)
        yield
        self._set_timeout(self._statement_timeout)

    def _execute(self, statement: str, parameters: Any) -> psycopg.Cursor[tuple[Any, ...]]:
        connection = self._connected()
        try:
            return connection.execute(statement, parameters, prepare=True, binary=True)
        except psycopg.Error as error:
            self._raise(error)

    def _connected(self) -> Connection:
        """The connection; if there is none, another one, on which nothing holds that was seen on the last."""
        if self._connection is None or self._connection.closed:
            # Found once: another session's path must not lead to another table.
            names = () if self._table.schema else (self._name, hold_beside(self._name))
            self._connection, found = connect_to_primary(
                self._data_source, self._application_name, *names, statement_timeout=self._statement_timeout
            )
            self._versions_of_holds = [None, None]
            if found:
                self._table, hold_table = found
                self._hold_table = hold_table if hold_table.schema else hold_beside(self._table)
                self._formatted.clear()
            self._session = object()
            self._sequence = None
            self._role = self._connection.info.user
        return self._connection

    def _raise(self, error: psycopg.Error) -> NoReturn:
        """Translate, and give up the connection: after an error its state is not worth a guess."""
        was_cut = self._connection is None or self._connection.closed
        self.close()
        message = one_line(error)
        if was_cut or isinstance(error, _PASSING) or (error.sqlstate or "")[:2] in _PASSING_CLASSES:
            raise StoreUnavailable(message, in_doubt=True) from error
        if isinstance(error, _OF_ANOTHER_TABLE) and self._mark and not self._was_altered:
            # The table was altered under our prepared statements. It is looked at again before the next mark or scan.
            self._was_altered = True
            self._mark = self._mark_excluding = self._scan = self._scan_excluding = ""
            raise StoreUnavailable(f"table {self._name} was altered: {message}", in_doubt=True) from error
        if isinstance(error, psycopg.errors.InsufficientPrivilege):
            raise OutboxTableError(
                f"missing rights on {self._name}: {message}, for role {self._quoted_role}"
            ) from error
        raise OutboxTableError(f"outbox table {self._name}: {message}") from error


def _literal(text: str) -> str:
    return "'" + text.replace("'", "''") + "'"


def _missing_in_holds(rows: Sequence[tuple[Any, ...]]) -> list[str]:
    """The columns that a table of holds lacks; none if there is no table."""
    return [column for column in HOLD_COLUMNS if column not in rows[0][1]] if rows else []


def _is_about_rights(error: OutboxTableError) -> bool:
    return isinstance(error.__cause__, psycopg.errors.InsufficientPrivilege)


def _array(numbers: Sequence[int]) -> str:
    """An array as one text parameter: psycopg would adapt a list element by element."""
    return f"{{{','.join(map(str, numbers))}}}"


def _unless_large(is_large: str) -> dict[str, str]:
    """The columns of a record as they are read, where this tells whether its message would be too large."""
    return {
        "is_large": is_large,
        "key": f"CASE WHEN {is_large} THEN {_HELD_KEY} ELSE kafka_key END",
        "value": f"CASE WHEN {is_large} THEN NULL ELSE kafka_value END",
        "names": f"CASE WHEN {is_large} THEN NULL ELSE NULLIF(kafka_header_keys, '{{}}') END",
        "values": f"CASE WHEN {is_large} THEN NULL ELSE NULLIF(kafka_header_values, '{{}}') END",
    }


def _as_held(key: str | None) -> HeldKey | None:
    return None if key is None else HeldKey(key)


def _hold_of_marked(identity: int, topic: str, key: str | None, broken: str) -> NewHold:
    kept = f". The mark stays, as the row violates {broken}, which is newer than the row" if broken else ""
    return NewHold(topic, _as_held(key), identity, MARKED, f"{_MARKED_ERROR}{kept}")


def _excluded(lanes: Collection[LaneKey]) -> dict[str, Any]:
    """Parameters of `_EXCLUSION`."""
    return {
        "excluded_topics": _text_array(topic for topic, _ in lanes),
        "excluded_keys": _text_array(held_key(key) for _, key in lanes),
    }


def _hold_set(rows: Sequence[tuple[Any, ...]], *, may_change: bool) -> HoldSet:
    """What these rows of `_HOLDS` hold."""
    return HoldSet(
        frozenset(topic for topic, key, record_id, *_ in rows if key is None and record_id is None),
        frozenset((topic, key) for topic, key, *_ in rows if key is not None),
        # Those with a long key need not be looked up by it, which means reading it.
        frozenset(
            record_id for _, key, record_id, *_, is_long in rows if record_id is not None and (key is None or is_long)
        ),
        {
            record_id: error or ""
            for _, _, record_id, dead, error, _ in rows
            if may_change and dead and record_id is not None
        },
        {topic: error for topic, key, record_id, _, error, _ in rows if key is None and record_id is None and error},
        may_change=may_change,
    )


def _multirange(ids: Collection[int]) -> str:
    """Exactly these ids, as a multirange literal of their runs."""

    def run(first: int, last: int) -> str:
        # Behind the last of all ids no range can end.
        return f"[{first},)" if last == _LARGEST_INTEGER else f"[{first},{last}]"

    runs: list[str] = []
    first: int | None = None
    last: int | None = None
    for identity in sorted(ids):
        if last is not None and identity == last + 1:
            last = identity
            continue
        if first is not None and last is not None:
            runs.append(run(first, last))
        first = last = identity
    if first is not None and last is not None:
        runs.append(run(first, last))
    return f"{{{','.join(runs)}}}"


class _HeldParameters:
    """The parameters of what is held, written anew only when it has changed: there may be ten thousand keys."""

    def __init__(self) -> None:
        self._lanes: frozenset[LaneKey] = frozenset()
        self._ids: frozenset[int] = frozenset()
        self._written = {"held_lane_topics": "{}", "held_lane_keys": "{}", "held_ids": "{}"}

    def of(self, holds: HoldSet) -> dict[str, Any]:
        """As parameters of `HELD`."""
        if holds.lanes is not self._lanes or holds.ids is not self._ids:
            self._lanes, self._ids = holds.lanes, holds.ids
            lanes = list(holds.lanes)
            self._written = {
                "held_lane_topics": _text_array(topic for topic, _ in lanes),
                "held_lane_keys": _text_array(key for _, key in lanes),
                "held_ids": _multirange(holds.ids),
            }
        return {**self._written, "held_topics": _text_array(holds.topics)}


def _text_array(texts: Iterable[str]) -> str:
    """An array of text as one text parameter."""
    quoted = ('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in texts)
    return f"{{{','.join(quoted)}}}"
