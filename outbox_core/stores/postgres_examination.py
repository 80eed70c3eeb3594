"""What `outbox doctor` and `outbox status` ask PostgreSQL. Every statement only reads, and none reads a whole table."""

from __future__ import annotations

from typing import Any, NamedTuple

import psycopg

from outbox_core.errors import InvalidConfig, StoreUnavailable
from outbox_core.examination import Finding, fine, problem, warning
from outbox_core.schema import STORAGE_PARAMETERS, TableName, hold_beside
from outbox_core.stores.sessions import one_line, pin_search_path

_OLDEST_SERVER = 140_000
_OLD_SECONDS = 60
_HEAD_ROWS = 10_000
_MOST_TOPICS = 20

_SERVER = """
SELECT current_setting('server_version_num')::int, current_setting('server_version'), pg_is_in_recovery(),
       current_setting('synchronous_commit'), current_setting('autovacuum')::bool
"""

_TABLE = """
SELECT coalesce((SELECT jsonb_object_agg(split_part(option, '=', 1), split_part(option, '=', 2))
                 FROM unnest(c.reloptions) AS option), '{}'),
       coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0), a.atttypid = 'integer'::regtype
FROM pg_class AS c
JOIN pg_attribute AS a ON a.attrelid = c.oid AND a.attname = 'id'
LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
WHERE c.oid = to_regclass(%s)
"""

_SEQUENCE = """
SELECT q.seqrelid::regclass::text, q.seqcache, q.seqincrement, q.seqcycle,
       CASE WHEN has_sequence_privilege(q.seqrelid, 'SELECT, USAGE') THEN pg_sequence_last_value(q.seqrelid) END
FROM pg_depend AS d
JOIN pg_sequence AS q ON q.seqrelid = d.objid
JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid AND a.attname = 'id'
WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = to_regclass(%s)
"""

# Whoever holds an old snapshot keeps vacuum from removing what was purged since.
_SNAPSHOTS = """
SELECT 'pid ' || pid || coalesce(' (' || nullif(application_name, '') || ')', ''),
       extract(epoch FROM clock_timestamp() - xact_start)::float8
FROM pg_stat_activity
WHERE (backend_xmin IS NOT NULL OR backend_xid IS NOT NULL) AND datname = current_database()
  AND pid <> pg_backend_pid() AND xact_start < clock_timestamp() - make_interval(secs => %(old)s)
UNION ALL
SELECT 'prepared transaction ' || quote_literal(gid), extract(epoch FROM clock_timestamp() - prepared)::float8
FROM pg_prepared_xacts
WHERE database = current_database() AND prepared < clock_timestamp() - make_interval(secs => %(old)s)
UNION ALL
SELECT 'replication slot ' || quote_literal(slot_name), NULL
FROM pg_replication_slots
WHERE NOT active AND (xmin IS NOT NULL OR (catalog_xmin IS NOT NULL AND database = current_database()))
ORDER BY 2 DESC NULLS LAST
LIMIT 3
"""

_MAY_SEE_ALL = "SELECT pg_has_role(current_user, 'pg_read_all_stats', 'USAGE')"

_HOLD_RIGHTS = """
SELECT name FROM unnest(ARRAY['SELECT', 'INSERT', 'UPDATE', 'DELETE']) AS name
WHERE to_regclass(%(holds)s) IS NOT NULL AND NOT has_table_privilege(to_regclass(%(holds)s), name)
"""

_HELD = """
SELECT count(*) FILTER (WHERE record_id IS NOT NULL),
       count(*) FILTER (WHERE record_id IS NULL AND kafka_key IS NOT NULL),
       coalesce(array_agg(kafka_topic ORDER BY kafka_topic)
                FILTER (WHERE record_id IS NULL AND kafka_key IS NULL), '{{}}')
FROM {holds} WHERE outbox = (
    SELECT n.nspname || '.' || c.relname
    FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace WHERE c.oid = to_regclass(%s)
)
"""

_HEAD = """
SELECT kafka_topic, count(*), count(leader_id)
FROM (SELECT kafka_topic, leader_id FROM {table} ORDER BY id LIMIT {rows}) AS head
GROUP BY kafka_topic ORDER BY count(*) DESC, kafka_topic LIMIT {topics}
"""


class TopicAtHead(NamedTuple):
    """How many of the oldest 10,000 records are for a topic.

    Attributes:
        topic: its name.
        waiting: how many records.
        marked: how many of them carry the mark of an at-least-once harvester.
    """

    topic: str
    waiting: int
    marked: int


class Held(NamedTuple):
    """What an outbox's harvester is not to publish.

    Attributes:
        records: how many records are held.
        keys: how many keys.
        topics: the topics that are paused.
    """

    records: int
    keys: int
    topics: list[str]


class PostgresExamination:
    """Looks at a database and its outbox table, on a connection of its own.

    Args:
        data_source: libpq connection string or URL.
        table: the outbox table, which must exist.

    Raises:
        InvalidConfig: if the data source cannot be read.
        StoreUnavailable: if the database cannot be reached, or a question failed.
    """

    def __init__(self, data_source: str, table: str) -> None:
        name = TableName.parse(table)
        try:
            self._connection = psycopg.connect(
                data_source, autocommit=True, connect_timeout=10, application_name="kafka-outbox doctor"
            )
            self._name, holds = pin_search_path(self._connection, name, hold_beside(name))
        except psycopg.ProgrammingError:
            # Without the driver's words: they quote the DSN, perhaps its password.
            raise InvalidConfig("data_source is neither a libpq connection string nor a postgresql:// URL") from None
        except psycopg.Error as error:
            raise StoreUnavailable(f"cannot connect to the database: {one_line(error)}") from None
        self._holds = holds if holds.schema else hold_beside(self._name)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def findings(self) -> list[Finding]:
        """Everything but the topics."""
        return [*self._server(), *self._table(), *self._sequence(), *self._snapshots()]

    def topics_at_head(self) -> list[TopicAtHead]:
        """Topics of the oldest 10,000 records, the most frequent 20."""
        statement = _HEAD.format(table=self._name.quoted, rows=_HEAD_ROWS, topics=_MOST_TOPICS)
        return [TopicAtHead(*row) for row in self._ask(statement)]

    def held(self) -> Held | None:
        """What is held; None without a table of holds, or without the right to read it."""
        if not self._has_holds() or "SELECT" in self._missing_hold_rights():
            return None
        return self._count_held()

    def holds(self, *, needed: bool) -> Finding:
        """The table of holds.

        Args:
            needed: whether a harvester would not start without it, as bad records are to go to the dead-letter topic.
        """
        judge = problem if needed else warning
        if not self._has_holds():
            return judge(
                "holds",
                f"there is no table {self._holds}: nothing can be paused, and a bad record is tried for ever",
                "make it with `outbox schema --only hold`, with Alembic or with `manage.py migrate`",
            )
        missing = self._missing_hold_rights()
        if missing:
            judge = problem if needed or "SELECT" in missing else warning
            grant = f"GRANT {', '.join(missing)} ON {self._holds.quoted} TO the harvester's role"
            return judge("holds", f"{self._holds} lacks the right(s) {', '.join(missing)}", grant)
        held = self._count_held()
        if not any(held):
            return fine("holds", f"{self._holds}, nothing is held")
        paused = f"; paused: {', '.join(held.topics)}" if held.topics else ""
        return warning(
            "holds",
            f"{held.records:,} records and {held.keys:,} keys are held{paused}",
            "`outbox hold list` shows why; release, skip or dead-letter them",
        )

    def _has_holds(self) -> bool:
        return bool(self._ask("SELECT to_regclass(%s) IS NOT NULL", (self._holds.quoted,))[0][0])

    def _count_held(self) -> Held:
        (row,) = self._ask(_HELD.format(holds=self._holds.quoted.replace("%", "%%")), (self._name.quoted,))
        return Held(*row)

    def _missing_hold_rights(self) -> list[str]:
        return [name for (name,) in self._ask(_HOLD_RIGHTS, {"holds": self._holds.quoted})]

    def _server(self) -> list[Finding]:
        ((number, version, is_standby, synchronous_commit, autovacuum),) = self._ask(_SERVER)
        found = [fine("server", f"PostgreSQL {version}")]
        if number < _OLDEST_SERVER:
            found = [problem("server", f"PostgreSQL {version}", "harvesting needs PostgreSQL 14 or newer")]
        if is_standby:
            found.append(problem("server", "is a standby", "connect to the primary: target_session_attrs=read-write"))
        if synchronous_commit == "off":
            found.append(
                warning(
                    "synchronous_commit",
                    "is off by default: a crash can undo commits, with the records stashed in them",
                    "set it to on for the applications that stash",
                )
            )
        if not autovacuum:
            found.append(warning("autovacuum", "is off", "switch it on: every published row leaves a dead one behind"))
        return found

    def _table(self) -> list[Finding]:
        rows = self._ask(_TABLE, (self._name.quoted,))
        if not rows:
            return []
        options, live, dead, has_small_ids = rows[0]
        found = [fine("table", f"about {live:,} rows, {dead:,} dead ones not yet vacuumed")]
        if options.get("autovacuum_enabled") in {"false", "off"}:
            found.append(
                warning(
                    "storage",
                    "autovacuum is off for the table",
                    f"ALTER TABLE {self._name.quoted} RESET (autovacuum_enabled)",
                )
            )
        missing = {name: value for name, value in STORAGE_PARAMETERS.items() if options.get(name) != value}
        if missing:
            wanted = ", ".join(f"{name} = {value}" for name, value in missing.items())
            found.append(
                warning(
                    "storage",
                    f"{len(missing)} of the parameters that suit an outbox are not set, so marks and scans cost more",
                    f"ALTER TABLE {self._name.quoted} SET ({wanted})",
                )
            )
        if has_small_ids:
            found.append(
                warning(
                    "id column",
                    "is an integer: it runs out of values after 2,147,483,647 records",
                    f"ALTER TABLE {self._name.quoted} ALTER COLUMN id TYPE bigint",
                )
            )
        return found

    def _sequence(self) -> list[Finding]:
        rows = self._ask(_SEQUENCE, (self._name.quoted,))
        if not rows:
            return [
                warning(
                    "sequence",
                    "the id column owns none, so nobody can tell whether ids are drawn in order",
                    "use an identity column or bigserial, or ALTER SEQUENCE ... OWNED BY the id column",
                )
            ]
        name, cache, increment, cycles, last = rows[0]
        if cache > 1:
            return [
                problem(
                    "sequence",
                    f"{name} has CACHE {cache}: ids are not drawn in order, so records are published out of order",
                    f"ALTER SEQUENCE {name} CACHE 1",
                )
            ]
        if increment < 1 or cycles:
            return [problem("sequence", f"{name} does not only grow", f"ALTER SEQUENCE {name} INCREMENT BY 1 NO CYCLE")]
        return [fine("sequence", f"{name}, last value {last if last is not None else 'unknown'}")]

    def _snapshots(self) -> list[Finding]:
        return [
            warning(
                "old snapshot",
                f"{who} has been open for {age:,.0f} s; vacuum keeps what was deleted since"
                if age is not None
                else f"{who} is not in use and keeps vacuum from its work",
                "end it, or find out why it takes so long",
            )
            for who, age in self._ask(_SNAPSHOTS, {"old": _OLD_SECONDS})
        ] or [self._no_snapshots()]

    def _no_snapshots(self) -> Finding:
        ((sees_all,),) = self._ask(_MAY_SEE_ALL)
        if sees_all:
            return fine("snapshots", f"none older than {_OLD_SECONDS} s")
        return fine(
            "snapshots", f"none of this role older than {_OLD_SECONDS} s; pg_read_all_stats is needed to see the others"
        )

    def _ask(self, statement: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except psycopg.Error as error:
            raise StoreUnavailable(f"the database refused to answer: {one_line(error)}") from None
