"""Checks of PostgreSQL for `outbox doctor` and `outbox status`. They only read, and none reads a whole table."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from outbox_core.doctor.findings import Commands, Finding, fine, problem, warning
from outbox_core.doctor.session import DatabaseSession
from outbox_core.doctor.table import HEAD_ROWS
from outbox_core.printable import plural
from outbox_core.schema import HOLD_COLUMNS, OUTBOX_FIRST, quote

_OLDEST_SERVER = 140_000
_OLD_SECONDS = 60
_OLD_TRANSACTIONS = 100_000  # those of some seconds on a busy server, between two messages of a standby
MOST_TOPICS = 20
_COUNT_BOUND = 100_000
_CROWDED = 0.9

_SERVER = """
SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_is_in_recovery(),
       (SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'client backend'),
       current_setting('max_connections')::int, pg_backend_pid()
"""

# Whether transactions only read by default, this session does not tell, which has set that for itself.
_DEFAULTS = """
SELECT current_database(), current_setting('synchronous_commit'), current_setting('autovacuum')::bool,
       current_setting('server_encoding'),
       (SELECT reset_val::bool FROM pg_settings WHERE name = 'default_transaction_read_only')
"""

# Whoever holds an old snapshot keeps vacuum from removing what was purged since, a query on a standby included that
# tells of it (hot_standby_feedback); its age in seconds is not known. A logical slot keeps dead rows of catalogs alone.
_SNAPSHOTS = """
SELECT 'pid ' || pid || coalesce(' (' || nullif(application_name, '') || ')', ''),
       extract(epoch FROM clock_timestamp() - xact_start)::float8, NULL, format('SELECT pg_terminate_backend(%%s)', pid)
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND datname = current_database()
  AND pid <> pg_backend_pid() AND xact_start < clock_timestamp() - make_interval(secs => %(old)s)
UNION ALL
SELECT 'prepared transaction ' || quote_literal(gid), extract(epoch FROM clock_timestamp() - prepared)::float8, NULL,
       -- Whoever may INSERT chooses the name, which an operator is to copy: only a plain one is shown as a command.
       CASE WHEN gid ~ '^[A-Za-z0-9_ .:-]+$' THEN format('ROLLBACK PREPARED %%L', gid)
            ELSE 'SELECT gid, owner, prepared FROM pg_prepared_xacts' END
FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => %(old)s)
UNION ALL
SELECT 'replication slot ' || quote_literal(slot_name), NULL,
       CASE WHEN xmin IS NOT NULL THEN 'keeps vacuum from its work'
            ELSE 'keeps ' || pg_size_pretty(pg_wal_lsn_diff(
                CASE WHEN pg_is_in_recovery() THEN pg_last_wal_replay_lsn() ELSE pg_current_wal_lsn() END, restart_lsn))
                || ' of WAL, and more until its reader comes back or the disk is full' END,
       format('SELECT pg_drop_replication_slot(%%L)', slot_name)
FROM pg_replication_slots
WHERE NOT active AND (xmin IS NOT NULL
                      OR catalog_xmin IS NOT NULL AND restart_lsn IS NOT NULL AND database = current_database())
UNION ALL
SELECT 'standby ' || quote_literal(application_name), NULL, to_char(age(held), 'FM999,999,999,999'),
       'SELECT pid, xact_start, query FROM pg_stat_activity WHERE backend_xmin IS NOT NULL'
FROM (
    SELECT application_name, coalesce(r.backend_xmin, s.xmin) AS held
    FROM pg_stat_replication AS r LEFT JOIN pg_replication_slots AS s ON s.active_pid = r.pid
) AS standbys
WHERE age(held) > %(old_transactions)s
ORDER BY 2 DESC NULLS LAST
LIMIT 3
"""

_MAY_SEE_ALL = "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"

_HOLD_TABLE = """
SELECT array_agg(attname) FILTER (WHERE attnum > 0 AND NOT attisdropped) FROM pg_attribute
WHERE attrelid = to_regclass(%s)
"""

_HOLD_RIGHTS = """
SELECT name FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS name
WHERE to_regclass(%(holds)s) IS NOT NULL AND NOT has_table_privilege(to_regclass(%(holds)s), name)
"""

_HELD = """
SELECT count(*) FILTER (WHERE record_id IS NOT NULL),
       count(*) FILTER (WHERE record_id IS NULL AND kafka_key IS NOT NULL),
       coalesce(array_agg(kafka_topic ORDER BY kafka_topic)
                FILTER (WHERE record_id IS NULL AND kafka_key IS NULL), '{{}}')
FROM {holds} WHERE outbox = %s
"""

_NO_HOLDS = "SELECT NULL::text AS kafka_topic, NULL::text AS kafka_key, NULL::bigint AS record_id WHERE false"
_ALL_HOLDS = "SELECT kafka_topic, kafka_key, record_id FROM {holds} WHERE outbox = %(outbox)s"

# A record is held by the hold of its topic, of its key (its own, or of another record of the key), or its own.
_HEAD = f"""
WITH {OUTBOX_FIRST}, holds AS MATERIALIZED ({{holds}}),
head AS (
    SELECT kafka_topic, kafka_key IS NULL AS is_keyless, leader_id, create_time,
           kafka_topic IN (SELECT kafka_topic FROM holds WHERE kafka_key IS NULL AND record_id IS NULL)
           OR kafka_key IS NOT NULL AND (kafka_topic, kafka_key) IN
               (SELECT kafka_topic, kafka_key FROM holds WHERE kafka_key IS NOT NULL)
           OR id IN (SELECT record_id FROM holds WHERE record_id IS NOT NULL) AS is_held
    FROM (SELECT id, kafka_topic, kafka_key, leader_id, create_time FROM {{table}} ORDER BY id LIMIT {{rows}}) AS oldest
)
SELECT kafka_topic, count(*), count(leader_id), count(*) FILTER (WHERE is_held), bool_or(is_keyless),
       max(CASE WHEN isfinite(create_time) AND NOT is_held
                THEN extract(epoch FROM clock_timestamp() - create_time)::float8 END),
       max(CASE WHEN isfinite(create_time) AND is_held
                THEN extract(epoch FROM clock_timestamp() - create_time)::float8 END)
FROM head GROUP BY kafka_topic ORDER BY count(*) DESC, kafka_topic
"""

_BACKLOG = """
SELECT counted, (SELECT reltuples::bigint FROM pg_class WHERE oid = to_regclass(%(name)s)),
       (SELECT CASE WHEN isfinite(create_time) THEN extract(epoch FROM clock_timestamp() - create_time)::float8 END
        FROM {table} ORDER BY id LIMIT 1)
FROM (SELECT count(*) AS counted FROM (SELECT FROM {table} LIMIT {bound}) AS head) AS bounded
"""


class TopicAtHead(NamedTuple):
    """The records for a topic among the oldest 10,000."""

    topic: str
    waiting: int
    marked: int  # with the mark of an at-least-once harvester
    held: int
    has_keyless: bool
    oldest_deliverable_seconds: float | None
    oldest_held_seconds: float | None


class Held(NamedTuple):
    """The number of held records and keys of an outbox, and its paused topics."""

    records: int
    keys: int
    topics: list[str]

    def in_words(self) -> str:
        """Return `1 record, 2 keys, topic orders`, without what is not held."""
        counts = ((self.records, "record"), (self.keys, "key"))
        parts = [plural(number, noun) for number, noun in counts if number]
        if self.topics:
            parts.append(f"topic{'' if len(self.topics) == 1 else 's'} {', '.join(self.topics)}")
        return ", ".join(parts)


class Backlog(NamedTuple):
    """The records in the table, counted up to 100,000 and estimated beyond, and the age of the first."""

    pending: int
    is_estimate: bool
    oldest_age_seconds: float | None  # None if there is none, or its time is infinite


class PostgresChecks:
    """The checks of a database, and the numbers of its outbox. The errors are those of `DatabaseSession.ask`."""

    def __init__(self, session: DatabaseSession, commands: Commands) -> None:
        self._session = session
        self._commands = commands
        self.is_standby = False  # not known before `server`

    def server(self) -> Iterator[Finding]:
        """Check the server and its settings."""
        ((number, version, self.is_standby, used, most, pid),) = self._session.ask(_SERVER)
        if number < _OLDEST_SERVER:
            yield problem("server", f"PostgreSQL {version}", "harvesting needs PostgreSQL 14 or newer")
        else:
            yield fine("server", f"PostgreSQL {version}, {self._session.place}")
        if self.is_standby:
            yield problem("server", "is a standby", "connect to the primary: target_session_attrs=read-write")
        if pid != self._session.connection.info.backend_pid:
            yield warning(
                "pooler",
                "the data source leads to a pooler; one that lends its connections for one transaction at a time "
                "(PgBouncer's pool_mode=transaction) cannot be used for harvesting",
                "name the database itself, or a pool of sessions",
            )
        yield from self._defaults()
        if used >= _CROWDED * most:
            yield warning(
                "connections",
                f"{used} of {most} are in use, and a harvester needs four",
                "close idle ones (SELECT pid, usename, application_name, state FROM pg_stat_activity), or raise "
                "max_connections",
            )

    def _defaults(self) -> Iterator[Finding]:
        ((database, synchronous_commit, autovacuum, encoding, only_reads),) = self._session.ask(_DEFAULTS)
        if only_reads:
            role = self._session.role
            yield problem(
                "default_transaction_read_only",
                f"is on for role {role} in this database: no row can be marked or deleted",
                f"ALTER ROLE {role} IN DATABASE {quote(database)} SET default_transaction_read_only = off",
            )
        if encoding == "SQL_ASCII":
            yield warning(
                "encoding",
                "is SQL_ASCII: a record whose text is not UTF-8 ends the harvester",
                f"ALTER DATABASE {quote(database)} SET client_encoding = 'UTF8'",
            )
        if synchronous_commit == "off":
            yield warning(
                "synchronous_commit",
                "is off by default: a crash can undo commits, with the records stashed in them",
                f"ALTER DATABASE {quote(database)} SET synchronous_commit = on",
            )
        if not autovacuum:
            yield warning(
                "autovacuum",
                "is off: every published row leaves a dead one behind",
                "ALTER SYSTEM SET autovacuum = on; SELECT pg_reload_conf()",
            )

    def holds(self, *, needed: bool, only_reads: bool) -> Iterator[Finding]:
        """Check the table of holds, without which a harvester with a dead-letter topic (`needed`) does not start."""
        judge = problem if needed else warning
        holds, role = self._session.holds, self._session.role
        columns = self._session.ask(_HOLD_TABLE, (holds.quoted,))[0][0]
        if not columns:
            yield judge(
                "holds",
                f"there is no table {holds}: nothing can be paused, and a bad record is tried forever",
                f"make it with {self._commands.make_tables()}",
            )
            return
        lacking = [name for name in HOLD_COLUMNS if name not in columns]
        if lacking:
            yield problem(
                "holds",
                f"table {holds} lacks the column(s) {', '.join(lacking)}: nothing is published meanwhile",
                f"put them back; or, if nothing is held in it, DROP TABLE {holds.quoted}, and make it anew with "
                f"{self._commands.make_tables()}",
            )
            return
        missing = [name for (name,) in self._session.ask(_HOLD_RIGHTS, {"holds": holds.quoted})]
        if missing and not (only_reads and "SELECT" not in missing):
            judge = problem if needed or "SELECT" in missing else warning
            grant = f"GRANT {', '.join(missing)} ON {holds.quoted} TO {role}"
            yield judge("holds", f"on {holds} role {role} lacks the right(s) {', '.join(missing)}", grant)

    def held_findings(self) -> Iterator[Finding]:
        """Tell how much is held."""
        held = self.held()
        if held is None:
            return
        if not any(held):
            yield fine("holds", f"{self._session.holds}, nothing is held")
            return
        yield warning(
            "holds",
            f"held: {held.in_words()}",
            f"{self._commands.hold('list')} shows why; release, skip or dead-letter them",
        )

    def held(self) -> Held | None:
        """Count the holds; None without a table of holds, or without the right to read it."""
        if not self._may_read_holds():
            return None
        statement = _HELD.format(holds=self._session.holds.quoted.replace("%", "%%"))
        ((records, keys, topics),) = self._session.ask(statement, (self._outbox,))
        return Held(records, keys, list(topics))

    def topics_at_head(self) -> list[TopicAtHead]:
        """Return the topics of the oldest 10,000 records, the most frequent first."""
        holds = _ALL_HOLDS.format(holds=self._session.holds.quoted.replace("%", "%%"))
        table = self._session.table.quoted.replace("%", "%%")
        statement = _HEAD.format(table=table, rows=HEAD_ROWS, holds=holds if self._may_read_holds() else _NO_HOLDS)
        return [TopicAtHead(*row) for row in self._session.ask(statement, {"outbox": self._outbox})]

    def backlog(self) -> Backlog:
        """Count the waiting records."""
        table = self._session.table.quoted
        statement = _BACKLOG.format(table=table.replace("%", "%%"), bound=_COUNT_BOUND)
        ((counted, estimate, age),) = self._session.ask(statement, {"name": table})
        is_estimate = counted >= _COUNT_BOUND
        return Backlog(max(counted, estimate) if is_estimate else counted, is_estimate, age and max(0.0, age))

    def snapshots(self) -> Iterator[Finding]:
        """Check for transactions and slots that keep vacuum from its work."""
        rows = self._session.ask(_SNAPSHOTS, {"old": _OLD_SECONDS, "old_transactions": _OLD_TRANSACTIONS})
        for who, age, keeps, remedy in rows:
            if age is not None:
                does = (
                    f"has been open for {age:,.0f} s; vacuum keeps what was deleted since. End it, if it is not needed"
                )
            elif who.startswith("standby"):
                does = (
                    f"has a query with a snapshot {keeps} transactions old (hot_standby_feedback); vacuum keeps what "
                    "was deleted since. Find it there, and end it if it is not needed"
                )
            else:
                does = f"is not in use and {keeps}. Start its reader; drop it, if it is not needed"
            yield warning("old snapshot", f"{who} {does}", remedy)
        if rows:
            return
        ((sees_all,),) = self._session.ask(_MAY_SEE_ALL)
        whose = "" if sees_all else f" of role {self._session.role}"
        others = "" if sees_all else "; pg_read_all_stats is needed to see the others"
        yield fine("snapshots", f"none{whose} older than {_OLD_SECONDS} s{others}")

    @property
    def _outbox(self) -> str:
        return f"{self._session.table.schema}.{self._session.table.table}"

    def _may_read_holds(self) -> bool:
        holds = self._session.holds.quoted
        columns = self._session.ask(_HOLD_TABLE, (holds,))[0][0]
        missing = [name for (name,) in self._session.ask(_HOLD_RIGHTS, {"holds": holds})]
        return bool(columns) and set(HOLD_COLUMNS) <= set(columns) and "SELECT" not in missing
