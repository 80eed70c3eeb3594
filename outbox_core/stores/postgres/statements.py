"""All statements that harvesting sends to PostgreSQL.

`OutboxTable.query` and `OutboxTable.execute` fill in the names of the tables and the fragments of `FRAGMENTS`.

The mark walks the primary key from its beginning, and updates rows by their physical address (`ctid`), which saves
a second walk: with a half-empty page (fillfactor 50) the new version stays on the same page and no index is touched.
If another transaction updates the row in between, the update silently skips it. So the mark notes how many rows it
*selected* (`SELECTED`) beside those it updated; see `MarkedBatch`. It never uses SKIP LOCKED, which would skip a row
that another leader is just marking and return it later, out of order.

Marks and scans are limited by rows and by bytes, from the first one on: thousands of large values must not be fetched
to find out that they are large. A row is taken if those before it do not fill the limit, however large it is.
"""

from __future__ import annotations

from outbox_core.schema import HAS_UNIQUE_ID_SQL, MOST_MEASURED_ELEMENTS, OUTBOX_FIRST
from outbox_core.stores import relay_marks
from outbox_core.stores.interface import HEADER_BYTES, KEY_DIGEST_PREFIX, LONGEST_KEY_OF_HOLD, MARKED, NO_FLOOR

# -- fragments

# No column of a table of our own making is NULL there, but one that was made by hand may have it: such a record has no
# legal topic, and is held for that.
TOPIC = "coalesce(kafka_topic, '')"

# Exact for every time that a clock shows: until 2040 by floating point (below 2^51 no digit is lost), which takes a
# tenth of the time. The others, which only somebody who writes them by hand can draw, are all 0: infinite ones, those
# that a 64-bit number cannot hold, and none.
MICROSECONDS = """
CASE WHEN create_time >= '1970-01-01 00:00+00' AND create_time < '2040-01-01 00:00+00'
     THEN (date_part('epoch', create_time) * 1000000)::bigint
     WHEN create_time > '-infinity' AND create_time < '294000-01-01 00:00+00'
     THEN (extract(epoch FROM create_time) * 1000000)::bigint ELSE 0 END
"""

# The same as `held_key` in Python. No character takes more than four bytes; of a value that is stored out of line only
# the length in bytes is known without reading it.
HELD_KEY = f"""
CASE WHEN (octet_length(kafka_key) <= {LONGEST_KEY_OF_HOLD}
           OR octet_length(kafka_key) <= {4 * LONGEST_KEY_OF_HOLD} AND length(kafka_key) <= {LONGEST_KEY_OF_HOLD})
          AND NOT starts_with(kafka_key, '{KEY_DIGEST_PREFIX}') THEN kafka_key
     ELSE '{KEY_DIGEST_PREFIX}' || encode(sha256(convert_to(kafka_key, 'UTF8')), 'hex') END
"""

# An array's size in memory. That of a compressed one is found by decompressing it, unless it has too many elements. An
# empty array takes 16 bytes or less.
_RAW_ARRAY = f"""
CASE WHEN cardinality({{array}}) > {MOST_MEASURED_ELEMENTS} THEN 1073741824
     WHEN pg_column_compression({{array}}) IS NULL THEN pg_column_size({{array}})
     ELSE octet_length(array_send({{array}})) END
"""

_ARRAY_SIZE = f"""
CASE WHEN pg_column_size({{array}}) > 16
     THEN {_RAW_ARRAY} + {HEADER_BYTES}::bigint * cardinality({{array}}) ELSE 0 END
"""

# No more than what a message has of it, so that nothing is withheld that a client would take: a byte for the length of
# each name and value at least, as millions of NULL take next to nothing in a row.
_ARRAY_CONTENT = f"""
CASE WHEN pg_column_size({{array}}) > 16
     THEN greatest({_RAW_ARRAY} - 32 - 7 * cardinality({{array}}), cardinality({{array}})) ELSE 0 END
"""

_TEXTS = "coalesce(octet_length(kafka_key), 0) + coalesce(octet_length(kafka_value), 0)"


def _of_headers(expression: str) -> str:
    arrays = ("kafka_header_keys", "kafka_header_values")
    return "".join(f" + ({expression.format(array=array).strip()})" for array in arrays)


# About what a row takes in memory (`sizes_of` in Python), without reading values that are stored out of line, except
# compressed headers. No more than an integer holds: sums of larger ones are slow. Empty arrays are not looked at twice.
SIZE = f"""
least(coalesce(octet_length(kafka_topic), 0)::bigint + {_TEXTS}
      + CASE WHEN pg_column_size(kafka_header_keys) <= 16 AND pg_column_size(kafka_header_values) <= 16 THEN 0
             ELSE 0{_of_headers(_ARRAY_SIZE)} END, {2**31 - 1})::integer
"""

CONTENT = f"(0::bigint + {_TEXTS}{_of_headers(_ARRAY_CONTENT)})"

# Ids may come back: a hold is of the row that has its topic and key, too.
IS_OF_RECORD = """
held.outbox = %(outbox)s AND held.record_id = stored.id AND held.kafka_topic = coalesce(stored.kafka_topic, '')
AND held.kafka_key IS NOT DISTINCT FROM stored.kafka_key
"""

# -- the table

INSPECT = f"""
SELECT c.relkind,
       c.relkind = 'r' AND EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid) OR NOT {HAS_UNIQUE_ID_SQL},
       current_database(), n.nspname, c.relname,
       has_table_privilege(c.oid, 'SELECT') AND has_table_privilege(c.oid, 'DELETE')
           AND (SELECT has_column_privilege(c.oid, attnum, 'UPDATE') FROM pg_attribute
                WHERE attrelid = c.oid AND attname = 'leader_id'),
       (SELECT jsonb_object_agg(attname, format_type(atttypid, NULL)) FROM pg_attribute
        WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped),
       (SELECT max(s.seqcache) FROM pg_depend AS d JOIN pg_sequence AS s ON s.seqrelid = d.objid
        JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid AND a.attname = 'id'
        WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = c.oid)
FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.oid = to_regclass(%s)
"""

# A schema that a role may not use is skipped on its search path without a word.
SCHEMAS_WITHHELD = """
SELECT n.nspname FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace
WHERE c.relname = %s AND c.relkind IN ('r', 'p') AND NOT starts_with(n.nspname, 'pg_')
  AND NOT has_schema_privilege(n.oid, 'USAGE')
ORDER BY 1
"""

# Made by initdb: two databases of one name on different servers differ in it, a server and its standbys do not.
SERVER_ID = "SELECT system_identifier::text FROM pg_catalog.pg_control_system()"

# Constraints, of partitions too, that hold for each new version of a row, a mark's included. A row may violate one that
# came after it, or a CHECK by a function that has another answer now. (NOT NULL is among them from PostgreSQL 18 on.)
CONSTRAINTS = """
SELECT quote_ident(conname), concat('tableoid NOT IN (SELECT relid FROM pg_partition_tree(' ||
           nullif(conrelid, to_regclass(%(name)s))::oid || ')) OR ',
           CASE contype WHEN 'c' THEN pg_get_expr(conbin, conrelid)
                ELSE (SELECT quote_ident(attname) || ' IS NOT NULL' FROM pg_attribute
                      WHERE attrelid = conrelid AND attnum = conkey[1]) END)
FROM pg_constraint
WHERE contype IN ('c', 'n') AND (conrelid = to_regclass(%(name)s)
    OR coninhcount = 0 AND conrelid IN (SELECT relid FROM pg_partition_tree(to_regclass(%(name)s))))
"""

# What may keep this role from deleting or marking what it reads, beside row level security.
OBSTACLES = """
WITH family AS (SELECT to_regclass(%(name)s) AS oid
                UNION SELECT inhrelid FROM pg_inherits WHERE inhparent = to_regclass(%(name)s))
SELECT 'trigger ' || quote_ident(tgname) FROM pg_trigger JOIN family ON tgrelid = family.oid
WHERE NOT tgisinternal AND tgenabled IN ('O', 'A')
  AND tgtype & 3 = 3 AND tgtype & 24 <> 0  -- BEFORE ... FOR EACH ROW; of DELETE or UPDATE
UNION ALL
SELECT 'rule ' || quote_ident(rulename) FROM pg_rewrite JOIN family ON ev_class = family.oid
WHERE ev_type IN ('2', '4') AND ev_enabled IN ('O', 'A')
ORDER BY 1
"""

IS_EMPTY = "SELECT NOT EXISTS (SELECT FROM {table})"

# A session that waits for its client has nothing to do with the database: the connection does not pass what it sends.
# PgBouncer may append the client's address to each name (application_name_add_host).
AT_WORK = r"""
SELECT coalesce(wait_event_type, '')
FROM pg_stat_activity
WHERE datname = current_database() AND usename = session_user AND pid <> pg_backend_pid()
  AND regexp_replace(application_name, ' - \S+$', '')
      = regexp_replace(current_setting('application_name'), ' - \S+$', '')
  AND state = 'active' AND wait_event_type IS DISTINCT FROM 'Client'
  AND query_start <= clock_timestamp() - make_interval(secs => %(seconds)s::float8)
"""

# Counting millions of rows takes seconds. Beyond the bound the ids tell about how many there are: the table is a queue,
# and few ids are missing in it. Where many are, a few old rows before many that were published since, the planner's
# statistics say less.
COUNT_ROWS = """
SELECT topic, number, coalesce((SELECT CASE WHEN isfinite(create_time)  -- An infinite time has no age.
                                            THEN extract(epoch FROM clock_timestamp() - create_time)::float8 END
                                FROM {table} AS stored WHERE stored.id = counted.first LIMIT 1), 0)
FROM (
    SELECT topic, count(*) AS number, min(id) AS first, grouping(topic) AS is_total
    FROM (SELECT {topic} AS topic, id FROM {table} WHERE {condition} ORDER BY id LIMIT {bound}) AS head
    GROUP BY GROUPING SETS ((topic), ())
) AS counted
ORDER BY is_total DESC, number DESC
LIMIT {topics}
"""

ESTIMATE_ROWS = """
SELECT least(
    (SELECT max(id)::float8 FROM {table}) - (SELECT min(id) FROM {table}) + 1,
    greatest((SELECT reltuples FROM pg_class WHERE oid = to_regclass(%(name)s)), {bound})
)
"""

# -- marks and scans

# The floor holds for one incarnation of table and sequence, and while the sequence is not set back. Both are looked at
# by the statement that uses it, which by then has the table's lock: TRUNCATE ... RESTART IDENTITY, say, comes before
# it or after it. (A subquery is evaluated once, and its value is an index condition. CASE guards the right to read the
# sequence.)
ABOVE = """id >= (
            SELECT CASE
                WHEN pg_relation_filenode(to_regclass(%(name)s::text)) = %(table_file)s::oid
                 AND pg_relation_filenode(to_regclass(%(sequence)s::text)) = %(sequence_file)s::oid
                THEN CASE WHEN pg_sequence_last_value(to_regclass(%(sequence)s::text)) >= %(floor)s::bigint
                     THEN %(floor)s::bigint + 1 ELSE {lowest} END
                ELSE {lowest} END)"""

# Hot keys and failing ones. A subquery that does not depend on the row is hashed, also in a generic plan; `<> ALL
# (parameter)` is searched there from its beginning for every row.
WITHOUT_KEYS = f"""
AND (kafka_key IS NULL OR ({TOPIC}, {HELD_KEY}) NOT IN
     (SELECT * FROM unnest(%(excluded_topics)s::text[], %(excluded_keys)s::text[])))
"""

# Ids come in runs: a multirange is searched by halves, where an array is walked. Only a row with one of these ids is
# looked at twice: after TRUNCATE ... RESTART IDENTITY it may be another one.
WITHOUT_ROWS = f"""
(NOT (id::bigint <@ %(ids)s::int8multirange)
 OR (id::bigint, {MICROSECONDS}) NOT IN
    (SELECT * FROM unnest(%(row_ids)s::bigint[], %(row_times)s::bigint[])))
"""

ONLY_ROWS = f"""
AND id = ANY (%(only_ids)s::bigint[])
AND (id::bigint, {MICROSECONDS}) IN (SELECT * FROM unnest(%(only_ids)s::bigint[], %(only_times)s::bigint[]))
"""

# A hold by id is of a record without a key, or with one that is too long to be read for every row. Another row that got
# the id later is left to the holds of its own key.
IS_HELD_BY_ID = f"(kafka_key IS NULL OR octet_length(kafka_key) > {LONGEST_KEY_OF_HOLD})"

# What is held was read by an earlier statement and comes as parameters. Read here, in the same snapshot, a release
# would take effect for a statement that was prepared for the hold: one that begins behind the rows it releases.
WITHOUT_HELD = f"""
AND NOT (id::bigint <@ %(held_ids)s::int8multirange AND {IS_HELD_BY_ID})
AND {TOPIC} NOT IN (SELECT unnest(%(held_topics)s::text[]))
AND (kafka_key IS NULL OR ({TOPIC}, {HELD_KEY}) NOT IN
     (SELECT * FROM unnest(%(held_lane_topics)s::text[], %(held_lane_keys)s::text[])))
"""

OVERSIZED = 2**40
"""A message that is larger than any client of ours takes is not read: in the place of its row's partition, which is no
larger than 2^31, is its size, and this above it."""


def _columns(is_large: str, content: str) -> str:
    """Return the columns of a record."""
    return f"""id, {TOPIC}, CASE WHEN {is_large} THEN {HELD_KEY} ELSE kafka_key END,
       CASE WHEN {is_large} THEN NULL ELSE kafka_value END,
       CASE WHEN NOT ({is_large}) AND cardinality(kafka_header_keys) > 0 THEN kafka_header_keys END,
       CASE WHEN NOT ({is_large}) AND cardinality(kafka_header_values) > 0 THEN kafka_header_values END,
       CASE WHEN {is_large} THEN {OVERSIZED} + {content} ELSE {{partition}} END, {MICROSECONDS}"""


_COLUMNS = _columns(
    "(SELECT may_be_large FROM head) AND id::bigint = ANY ((SELECT ids FROM large)::bigint[])",
    "(SELECT contents FROM large)[array_position((SELECT ids FROM large), id::bigint)]",
)

_CHOSEN = "FROM {table} WHERE {above} AND {others} {exclusion} ORDER BY id"

# The rows of a query are chosen by their sizes.
_HEAD = f"""sum(size) AS bytes, max(size) > %(max_message)s AS may_be_large
    FROM (SELECT id, ctid, tableoid, {{size}} AS size {_CHOSEN} LIMIT %(limit)s) AS earliest"""

# Looked at only if some row may be so large. Each message is measured once: each copy of the expression would
# decompress the headers, and keep what it has decompressed.
_LARGE = f"""large AS MATERIALIZED (
    SELECT coalesce(array_agg(id::bigint), '{{{{}}}}') AS ids, array_agg(content) AS contents
    FROM (
        SELECT id, {CONTENT} AS content
        FROM (SELECT id, kafka_key, kafka_value, kafka_header_keys, kafka_header_values, {{size}} AS size
              {_CHOSEN} LIMIT %(limit)s) AS earliest
        WHERE size > %(max_message)s OFFSET 0
    ) AS measured
    WHERE content > %(max_message)s
)"""

# Only if rows do not fit together it is found out how many of them do: a running sum costs more than all the rest.
_FITTING = f"""FROM (
                SELECT *, sum(size) OVER (ORDER BY id ROWS UNBOUNDED PRECEDING) - size AS before
                FROM (SELECT id, ctid, tableoid, {{size}} AS size {_CHOSEN} LIMIT %(limit)s) AS earliest
            ) AS sized WHERE before < %(max_bytes)s"""

# A mark that finds rows and updates none must not look like an empty table, above which the settled floor rises. So it
# notes how many rows it selected where the same session can ask for it: to return that beside the rows, by a common
# table expression around the update, would cost a copy of each row.
MARK = f"""
WITH head AS MATERIALIZED (
    SELECT array_agg({{chosen}}) AS rows, {_HEAD}
), {_LARGE}, chosen AS MATERIALIZED (
    SELECT rows, set_config('outbox.selected', %(mark)s::text || ' ' || coalesce(cardinality(rows), 0), false) AS noted
    FROM (
        SELECT CASE WHEN bytes > %(max_bytes)s THEN (SELECT array_agg({{chosen}}) {_FITTING}) ELSE rows END AS rows
        FROM head
    ) AS fitting
)
UPDATE {{table}} SET leader_id = %(leader_id)s
WHERE {{locator}} = ANY ((SELECT CASE WHEN noted <> '' THEN rows END FROM chosen)::{{locator_type}}[]) {{of_table}}
RETURNING {_COLUMNS}
"""

SELECTED = "SELECT current_setting('outbox.selected', true)"

# Not EXISTS, which forgets the order, and with it the index: the table may be full of dead rows.
FINDS_ANY = f"SELECT (SELECT id {_CHOSEN} LIMIT 1) IS NOT NULL"

# Rows that carry our mark and are not in our hands. No mark selects them; this walks as far as one would that begins at
# the head of the table.
FIND_LOST = f"""
SELECT count(*), coalesce(min(id), 0), coalesce(max(id), 0)
FROM (SELECT id, leader_id {_CHOSEN} LIMIT %(limit)s) AS earliest WHERE leader_id = %(leader_id)s
"""

SCAN = f"""
WITH head AS MATERIALIZED (
    SELECT count(*) AS number, {_HEAD}
), {_LARGE}
SELECT {_COLUMNS} {_CHOSEN}
LIMIT (SELECT CASE WHEN bytes > %(max_bytes)s THEN (SELECT count(*) {_FITTING}) ELSE number END FROM head)
"""

FIND = """
SELECT id, kafka_topic, kafka_key, kafka_value, NULLIF(kafka_header_keys, '{{}}'),
       NULLIF(kafka_header_values, '{{}}'), {partition}, {microseconds}
FROM {table} AS stored
WHERE id = ANY (%(ids)s::bigint[])
ORDER BY id
"""

# -- purge, reset, deletion

# The index is searched with all ids at once. A join would search it for each, or, planned for an empty table, compare
# each row of a full one with each id. `width_bucket` finds the last place of an id among ascending ones by halving. A
# table of hashes takes twice as long to make, and is made only for a row of another time: two rows may have one id.
OF_IDS = f"""
id = ANY (%(ids)s::bigint[])
  AND ({MICROSECONDS} = (%(create_times)s::bigint[])[width_bucket(id::bigint, %(ids)s::bigint[])]
       OR (id::bigint, {MICROSECONDS}) IN (SELECT * FROM unnest(%(ids)s::bigint[], %(create_times)s::bigint[])))
"""

PURGE = f"DELETE FROM {{table}} AS stored WHERE {OF_IDS} AND leader_id = %(leader_id)s"

RESET = "UPDATE {table} SET leader_id = NULL WHERE id = ANY (%(ids)s::bigint[]) AND leader_id = %(leader_id)s"

RESET_FULFILLING = f"{RESET} AND {{fulfilled}}"

DELETE_PUBLISHED = f"DELETE FROM {{table}} AS stored WHERE {OF_IDS}"

# A DELETE may succeed and delete nothing. Asked only when it deleted less than it was to.
UNDELETED_PUBLISHED = f"SELECT count(*), min(id) FROM {{table}} WHERE {OF_IDS}"

UNPURGED = f"{UNDELETED_PUBLISHED} AND leader_id = %(leader_id)s"

# Digits of a second: -1 is as many as there are.
TIME_PRECISION = """
SELECT atttypmod FROM pg_attribute WHERE attrelid = to_regclass(%s) AND attname = 'create_time' AND NOT attisdropped
"""

# Around a deletion of rows that are called `stored`: they go into the archive by the statement that deletes them, or
# not at all. The number of rows is that of the deleted ones.
DELETE_INTO_ARCHIVE = """
WITH gone AS ({delete} RETURNING {of_stored})
INSERT INTO {archive} ({columns}) SELECT {columns} FROM gone
"""

ARCHIVE_DEAD_LETTERS = """, archived AS (
    INSERT INTO {archive} ({columns}, dead_letter) SELECT {columns}, true FROM stored
)"""

INSPECT_ARCHIVE = """
SELECT has_table_privilege(c.oid, 'INSERT'),
       coalesce(has_function_privilege(to_regprocedure(%(rotate)s)::oid, 'EXECUTE'), false)
FROM pg_class AS c WHERE c.oid = to_regclass(%(archive)s)
"""

# As for the history, without a wait for a synchronous standby: the next one does again what was lost.
ROTATE_ARCHIVE = "SELECT {rotate}(%(days)s) WHERE {locally}"

# -- holds

INSPECT_HOLDS = """
SELECT has_table_privilege(c.oid, 'SELECT'),
       (SELECT array_agg(attname::text) FROM pg_attribute WHERE attrelid = c.oid AND attnum > 0 AND NOT attisdropped)
FROM pg_class AS c WHERE c.oid = to_regclass(%s)
"""

# One row at least: whether there is anything to tell of or not, rights may have been granted or withdrawn. The holds
# themselves come only if they are others than those that were read last: thousands of them are read several times a
# second. Which versions of which rows there are tells that, whatever was inserted, changed or deleted.
READ_HOLDS = """
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
ADD_HOLDS = """
INSERT INTO {holds} (id, outbox, kafka_topic, kafka_key, record_id, reason, error, dead_letter)
SELECT wanted.id, %(outbox)s, wanted.topic,
       -- A long key comes as its digest: the record itself has it.
       CASE WHEN starts_with(wanted.key, '{digest}')
            THEN coalesce((SELECT kafka_key FROM {table} WHERE id = wanted.record_id AND {held_key} = wanted.key),
                          wanted.key)
            ELSE wanted.key END,
       wanted.record_id, wanted.reason, wanted.error, wanted.dead
FROM unnest(%(hold_ids)s::bigint[], %(topics)s::text[], %(keys)s::text[], %(ids)s::bigint[], %(reasons)s::text[],
            %(errors)s::text[], %(dead)s::boolean[], %(create_times)s::bigint[])
     AS wanted (id, topic, key, record_id, reason, error, dead, microseconds)
-- After TRUNCATE ... RESTART IDENTITY another row may have its id.
WHERE wanted.microseconds IS NULL
   OR EXISTS (SELECT FROM {table} AS stored WHERE stored.id = wanted.record_id AND {microseconds} = wanted.microseconds)
ON CONFLICT (id) DO NOTHING
RETURNING kafka_topic, kafka_key, record_id, concat_ws(': ', nullif(reason, ''), nullif(error, '')) AS reason
"""

# OFFSET 0 keeps the planner from measuring in each place that uses the sum.
FETCH_HELD = f"""
SELECT {_columns("measured.content > %(max_message)s", "measured.content")}
FROM {{table}} AS stored CROSS JOIN LATERAL (SELECT {{content}} AS content OFFSET 0) AS measured
WHERE id = ANY (%(ids)s::bigint[]) AND EXISTS (SELECT FROM {{holds}} AS held WHERE {{is_of_record}})
ORDER BY id
"""

DELETE_DEAD_LETTERED = """
WITH stored AS (
    DELETE FROM {table} AS stored
    USING unnest(%(ids)s::bigint[], %(create_times)s::bigint[]) AS published (id, microseconds)
    WHERE stored.id = published.id AND {microseconds} = published.microseconds
    RETURNING stored.*
), released AS (
    DELETE FROM {holds} AS held USING stored WHERE {is_of_record}
), changed AS (
    SELECT kafka_topic, kafka_key, id AS record_id, '' AS reason FROM stored
){noted}{archived}
SELECT count(*) FROM changed
"""

# Around the statements below, and around `ADD_HOLDS`.
CHANGE_HOLDS = f"WITH {OUTBOX_FIRST}, changed AS ({{change}}){{noted}} SELECT count(*) FROM changed"

REFUSE_DEAD_LETTERS = """
UPDATE {holds} AS held SET dead_letter = false, error = %(error)s
FROM {table} AS stored WHERE stored.id = ANY (%(ids)s::bigint[]) AND {is_of_record}
RETURNING held.kafka_topic, held.kafka_key, held.record_id, held.error AS reason
"""

# A row that is away may come back: with its partition, or copied into the table that takes the place of this one. What
# was refused is refused again then, but what people hold is for people to release, unless they gave it up; and so are
# rows with a mark where partitions come and go.
_IS_GONE = """
outbox = %(outbox)s AND record_id IS NOT NULL AND NOT EXISTS (SELECT FROM {table} AS stored WHERE {is_of_record})
AND CASE reason WHEN '{marked}' THEN (SELECT relkind FROM pg_class WHERE oid = to_regclass(%(name)s)) <> 'p'
                ELSE error <> '' OR dead_letter END
"""

# Asked first, several times a minute: it needs no lock that anybody else's work on the history could keep from it.
FINDS_GONE = f"WITH {OUTBOX_FIRST} SELECT EXISTS (SELECT FROM {{holds}} AS held WHERE {_IS_GONE})"

RELEASE_GONE = f"""
DELETE FROM {{holds}} AS held WHERE {_IS_GONE}
RETURNING kafka_topic, kafka_key, record_id, 'its record is gone' AS reason
"""

# Those that are held already come last: there may be more than are found at once.
FIND_VIOLATIONS = """
SELECT id, {topic}, {held_key}, concat_ws(', ', {broken}) FROM {table} AS stored WHERE NOT {fulfilled}
ORDER BY EXISTS (SELECT FROM {holds} AS held WHERE {is_of_record}), id LIMIT {limit}
"""

# -- history

# NULL where there is no such table. A change of holds must not fail for what a policy says of its event, nor wait for
# somebody who keeps others from writing events, or is about to: the last column says that.
HISTORY_RIGHTS = """
SELECT has_table_privilege(to_regclass(%(statistics)s)::oid, 'INSERT')
           AND has_table_privilege(to_regclass(%(statistics)s)::oid, 'SELECT')
           AND has_table_privilege(to_regclass(%(statistics)s)::oid, 'DELETE')
           AND NOT row_security_active(to_regclass(%(statistics)s)::oid),
       has_table_privilege(to_regclass(%(events)s)::oid, 'INSERT')
           AND has_table_privilege(to_regclass(%(events)s)::oid, 'SELECT')
           AND has_table_privilege(to_regclass(%(events)s)::oid, 'DELETE')
           AND NOT row_security_active(to_regclass(%(events)s)::oid),
       EXISTS (SELECT FROM pg_locks
               WHERE locktype = 'relation' AND relation = to_regclass(%(events)s)::oid
                 AND database = (SELECT oid FROM pg_database WHERE datname = current_database())
                 AND mode IN ('ShareLock', 'ShareRowExclusiveLock', 'ExclusiveLock', 'AccessExclusiveLock'))
"""

# The history is worth no wait for a synchronous standby: where that is away each commit waits for it, also when its
# client has given up and comes back, and the server's processes pile up.
LOCALLY = "(SELECT set_config('synchronous_commit', 'local', true)) = 'local'"

ADD_STATISTICS = """
INSERT INTO {statistics} (outbox, instance, interval_seconds, published, failed, published_bytes, deliverable,
                          deliverable_age, held, held_age, latency_p50, latency_p99)
SELECT %(outbox)s, %(instance)s, %(interval_seconds)s, %(published)s, %(failed)s, %(published_bytes)s,
       %(deliverable)s, %(deliverable_age)s, %(held)s, %(held_age)s, %(latency_p50)s, %(latency_p99)s
WHERE {locally}
"""

# By the database's clock, like all times here: the harvester says only how long ago it was. An event may have been
# written although its client gave up: it is one of the last ones then.
ADD_EVENT = """
INSERT INTO {events} (create_time, outbox, kind, actor, reason, leader_id, term)
SELECT clock_timestamp() - make_interval(secs => %(age_seconds)s), %(outbox)s::text, %(kind)s::text, %(actor)s::text,
       %(reason)s, %(leader_id)s::uuid, %(term)s::bigint
WHERE {locally} AND NOT EXISTS (
    SELECT FROM (SELECT * FROM {events} ORDER BY id DESC LIMIT 1000) AS latest
    WHERE outbox = %(outbox)s::text AND kind = %(kind)s::text AND actor = %(actor)s::text
      AND leader_id IS NOT DISTINCT FROM %(leader_id)s::uuid AND term IS NOT DISTINCT FROM %(term)s::bigint
)
"""

PRUNE_STATISTICS = """
DELETE FROM {statistics}
WHERE outbox = %(outbox)s AND create_time < now() - make_interval(secs => %(seconds)s) AND {locally}
"""

PRUNE_EVENTS = """
DELETE FROM {events}
WHERE outbox = %(outbox)s AND create_time < now() - make_interval(secs => %(seconds)s) AND {locally}
"""

# Part of the statement that changes holds, so that no change is without its event. {changed} returns topic, key, record
# and reason. Only events whose ids are taken are left out (logical replication copies the rows and not their sequence),
# and all of them while their table is locked.
NOTE_CHANGES = """, noted AS (
    INSERT INTO {events} (outbox, kind, actor, reason, kafka_topic, kafka_key, record_id)
    SELECT %(outbox)s, %(kind)s, regexp_replace(current_setting('application_name'), '^kafka-outbox ', ''),
           reason, kafka_topic, kafka_key, record_id
    FROM changed ON CONFLICT DO NOTHING
)"""

# -- marks of other leaders

# Reads the whole table: a mark may be anywhere, behind any number of rows of keys that were left out of the marks.
# What a relay marked (outbox_core.stores.relay_marks) is not counted: its manifests tell what it published.
COUNT_MARKED = """
SELECT count(*), coalesce(min(id), 0), coalesce(max(id), 0) FROM {table}
WHERE leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}'
"""

# Stops at the first one. They are counted for the message alone.
ANY_IS_MARKED = """
SELECT EXISTS (SELECT FROM {table} WHERE leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}')
"""

# The first ones. Their keys are as holds have them: they may be of any length. A mark that a constraint, a policy or a
# trigger keeps from being cleared stays, and its row is found until it is held.
FIND_MARKED = """
SELECT id, {topic}, {held_key}, concat_ws(', ', {broken}) FROM {table} AS stored
WHERE leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}'
  AND NOT EXISTS (SELECT FROM {holds} AS held WHERE {is_of_record})
ORDER BY id LIMIT %(limit)s
"""

CLEAR_MARKS_OF = """
UPDATE {table} SET leader_id = NULL
WHERE id = ANY (%(ids)s::bigint[]) AND leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}'
  AND {fulfilled}
"""

CLEAR_MARKS_OF_HELD = """
UPDATE {table} AS stored SET leader_id = NULL
WHERE leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}' AND {fulfilled}
  AND EXISTS (SELECT FROM {holds} AS held WHERE {is_of_record})
"""

RELEASE_FOR = """
DELETE FROM {holds} WHERE outbox = %(outbox)s AND record_id IS NOT NULL AND reason = %(reason)s
RETURNING kafka_topic, kafka_key, record_id, 'no longer held for: ' || reason AS reason
"""

CLEAR_MARKS = "UPDATE {table} SET leader_id = NULL WHERE leader_id IS NOT NULL AND {fulfilled}"

# -- the sequence

# Where the ids come from: the sequence of an identity column, or the one that its default names.
FIND_SEQUENCE = """
SELECT quote_ident(n.nspname) || '.' || quote_ident(s.relname),
       a.attidentity <> '' OR pg_get_expr(d.adbin, d.adrelid) = format('nextval(%%L::regclass)', s.oid::regclass::text),
       has_sequence_privilege(s.oid, 'SELECT'), pg_relation_filenode(a.attrelid)
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
LAST_ID_DRAWN = """
SELECT CASE WHEN is_called THEN last_value
            ELSE last_value - (SELECT seqincrement FROM pg_sequence WHERE seqrelid = to_regclass(%(sequence)s)) END,
       pg_relation_filenode(to_regclass(%(name)s)), pg_relation_filenode(to_regclass(%(sequence)s))
FROM {sequence}
"""

# An INSERT, whatever its form, takes this lock before it draws its id, and keeps it until its rows are visible or gone.
# Not by pid: a prepared transaction has none, and keeps its locks. Whatever could make the ids prove nothing is looked
# at here, after they were read: by a snapshot taken before, a change in between would be overlooked.
OPEN_WRITERS = """
SELECT ARRAY(SELECT DISTINCT virtualtransaction FROM pg_locks
             WHERE locktype = 'relation' AND relation = c.oid AND mode = 'RowExclusiveLock' AND granted
               AND database = (SELECT oid FROM pg_database WHERE datname = current_database())),
       c.relkind = 'r' AND NOT c.relispartition AND NOT EXISTS (SELECT FROM pg_inherits WHERE inhparent = c.oid),
       s.seqcache, s.seqincrement > 0 AND NOT s.seqcycle
FROM pg_class AS c, pg_sequence AS s
WHERE c.oid = to_regclass(%(name)s) AND s.seqrelid = to_regclass(%(sequence)s)
"""

DESCRIBE_WRITERS = """
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

# -- parts of statements

FRAGMENTS = {
    "topic": TOPIC,
    "microseconds": MICROSECONDS,
    "held_key": HELD_KEY,
    "size": SIZE,
    "content": CONTENT,
    "is_of_record": IS_OF_RECORD,
    "above": ABOVE.format(lowest=f"({NO_FLOOR.id + 1})::bigint"),
    "digest": KEY_DIGEST_PREFIX,
    "locally": LOCALLY,
    "marked": MARKED,
    "first_of_relays": relay_marks.FIRST,
    "last_of_relays": relay_marks.LAST,
}
"""Parts that every statement may name in braces."""

MARK_EXCLUSION = f"{WITHOUT_KEYS} AND {WITHOUT_ROWS} {WITHOUT_HELD}"
SCAN_EXCLUSION = f"{WITHOUT_KEYS} {WITHOUT_HELD}"

UNMARKED = "leader_id IS DISTINCT FROM %(leader_id)s"
UNKNOWN = "NOT (id::bigint <@ %(known)s::int8multirange)"

BY_ID = {"locator": "id", "locator_type": "bigint", "chosen": "id", "of_table": ""}
"""Parts by which a mark finds rows again."""


def by_address(table: str) -> dict[str, str]:
    """Return the parts by which a mark finds rows again at their addresses, which are unique within one table only.

    `table` is its quoted name, with its schema. It tells its rows from those of partitions and heirs that it has got
    since it was looked at: they are selected, and not marked.
    """
    name = table.replace("'", "''").replace("%", "%%")
    is_own = f"tableoid = '{name}'::regclass"
    return {
        "locator": "ctid",
        "locator_type": "tid",
        "chosen": f"CASE WHEN {is_own} THEN ctid END",
        "of_table": f"AND {is_own}",
    }


PLANNED_ONCE = frozenset(
    {MARK, SELECTED, FINDS_ANY, SCAN, PURGE, RESET, DELETE_PUBLISHED, IS_EMPTY, READ_HOLDS, LAST_ID_DRAWN, OPEN_WRITERS}
)
"""Statements that run again and again. Their plans must suit a table of any size, so they join it to nothing."""
