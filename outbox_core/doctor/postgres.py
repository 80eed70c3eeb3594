"""Checks of PostgreSQL for `outbox doctor` and `outbox status`. They only read, and none reads a whole table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import psycopg

from outbox_core.doctor.findings import Finding, fine, problem, warning
from outbox_core.errors import InvalidConfig, StoreUnavailable
from outbox_core.schema import CHECKS, COLUMNS, STORAGE_PARAMETERS, TableName, hold_beside, quote, violations_sql
from outbox_core.stores import relay_marks
from outbox_core.stores.postgres.connection import one_line, pin_search_path

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

_CHECKS = """
SELECT conname, convalidated FROM pg_constraint WHERE conrelid = to_regclass(%s) AND contype = 'c'
"""

_COLUMNS = """
SELECT attname, format_type(atttypid, NULL), attnotnull, atthasdef OR attidentity <> '' FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""

# By grants, not by what a role may do: the remedy has to name who was given the right.
_INSERTERS = """
WITH given AS (
    SELECT acl.grantee, NULL AS attname FROM pg_class AS c, aclexplode(c.relacl) AS acl
    WHERE c.oid = to_regclass(%(name)s) AND acl.privilege_type = 'INSERT' AND acl.grantee <> c.relowner
    UNION ALL
    SELECT acl.grantee, a.attname::text FROM pg_attribute AS a, aclexplode(a.attacl) AS acl
    WHERE a.attrelid = to_regclass(%(name)s) AND acl.privilege_type = 'INSERT'
      AND a.attname = ANY (%(columns)s::text[])
)
SELECT CASE grantee WHEN 0 THEN 'PUBLIC' ELSE quote_ident(rolname) END, bool_or(attname IS NULL),
       array_agg(attname) FILTER (WHERE attname IS NOT NULL)
FROM given LEFT JOIN pg_roles AS r ON r.oid = grantee
WHERE NOT coalesce(rolsuper, false)
GROUP BY 1 ORDER BY 1
"""

_CREATORS = """
SELECT quote_ident(n.nspname) FROM pg_class AS c JOIN pg_namespace AS n ON n.oid = c.relnamespace,
       aclexplode(n.nspacl) AS acl
WHERE c.oid = to_regclass(%s) AND acl.grantee = 0 AND acl.privilege_type = 'CREATE'
"""

_ODD_ROWS = """
SELECT count(*) FILTER (WHERE NOT ({rules})), min(id) FILTER (WHERE NOT ({rules})),
       count(*) FILTER (WHERE leader_id NOT BETWEEN '{first_of_relays}' AND '{last_of_relays}'),
       (SELECT max(id) FROM {table})
FROM (SELECT * FROM {table} ORDER BY id LIMIT {rows}) AS head
"""

_HEAD = """
SELECT kafka_topic, count(*), count(leader_id)
FROM (SELECT kafka_topic, leader_id FROM {table} ORDER BY id LIMIT {rows}) AS head
GROUP BY kafka_topic ORDER BY count(*) DESC, kafka_topic LIMIT {topics}
"""


class TopicAtHead(NamedTuple):
    """The records for a topic among the oldest 10,000."""

    topic: str
    waiting: int
    marked: int  # with the mark of an at-least-once harvester


class Held(NamedTuple):
    """The number of held records and keys of an outbox, and its paused topics."""

    records: int
    keys: int
    topics: list[str]


class PostgresChecks:
    """The checks of a database and its outbox table, on a connection of its own.

    Raises InvalidConfig for an unreadable data source, StoreUnavailable if the database cannot be reached or refuses.
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
        self.role = quote(self._connection.info.user)  # as statements name it
        self._holds = holds if holds.schema else hold_beside(self._name)

    def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    def findings(self, *, without_marks: bool = False) -> list[Finding]:
        """Return all findings except those on topics and holds."""
        odd = [*self._constraints(), *self._writers(), *self._rows(without_marks=without_marks)]
        return [*self._server(), *self._table(), *self._sequence(), *odd, *self._snapshots()]

    def topics_at_head(self) -> list[TopicAtHead]:
        """Return the 20 most frequent topics of the oldest 10,000 records."""
        statement = _HEAD.format(table=self._name.quoted, rows=_HEAD_ROWS, topics=_MOST_TOPICS)
        return [TopicAtHead(*row) for row in self._ask(statement)]

    def held(self) -> Held | None:
        """Count the holds; None without a table of holds, or without the right to read it."""
        if not self._has_holds() or "SELECT" in self._missing_hold_rights():
            return None
        return self._count_held()

    def holds(self, *, needed: bool) -> Finding:
        """Check the table of holds, without which a harvester with a dead-letter topic (`needed`) does not start."""
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
            grant = f"GRANT {', '.join(missing)} ON {self._holds.quoted} TO {self.role}"
            return judge("holds", f"on {self._holds} role {self.role} lacks the right(s) {', '.join(missing)}", grant)
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

    def _constraints(self) -> list[Finding]:
        table, checks = self._name.quoted, self._checks()
        there = dict(self._ask(_CHECKS, (table,)))
        found = []
        if set(checks) - set(there):
            layout = "" if self._is_binary() else " --layout text"
            found.append(
                warning(
                    "constraints",
                    f"the table lacks {_listed(set(checks) - set(there))}, so writers may insert rows that no "
                    "clock and no sequence makes",
                    f"run what `outbox schema --only checks{layout} --table {self._name}` prints; its lock is short",
                )
            )
        unvalidated = [name for name in checks if there.get(name) is False]
        if unvalidated:
            steps = ", ".join(f"VALIDATE CONSTRAINT {name}" for name in unvalidated)
            found.append(
                warning(
                    "constraints",
                    f"{_listed(unvalidated)}: not validated; rows from before that violate them cannot be marked",
                    f"ALTER TABLE {table} {steps}",
                )
            )
        _, is_not_null, has_default = self._columns()["create_time"]
        if not is_not_null:
            remedy = f"ALTER TABLE {table} ALTER COLUMN create_time SET NOT NULL"
            found.append(warning("create_time", "may be NULL, so that rows cannot be told apart by it", remedy))
        if not has_default and self._is_binary():
            remedy = f"ALTER TABLE {table} ALTER COLUMN create_time SET DEFAULT now()"
            found.append(warning("create_time", "has no DEFAULT, to which the adapters leave it", remedy))
        return found or [fine("constraints", "odd ids, times, partitions and headers are kept out")]

    def _writers(self) -> list[Finding]:
        """Check for roles that may write columns that are not theirs, or create functions beside the table."""
        columns = self._columns()
        kept = ["id", "leader_id", *(["create_time"] if columns["create_time"][2] else [])]
        granted = ", ".join(column for column in COLUMNS if column in columns and column not in kept)
        found = []
        for role, has_all, named in self._ask(_INSERTERS, {"name": self._name.quoted, "columns": kept}):
            what = "all columns" if has_all else _listed(named)
            again = f"; GRANT INSERT ({granted}) ON {self._name.quoted} TO {role}"
            found.append(
                warning(
                    "writers",
                    f"{role} may insert {what}, {' and '.join(kept)} included, with which a row can be put at the "
                    "table's head, or look as if it was being published",
                    f"REVOKE INSERT ON {self._name.quoted} FROM {role}{'' if role == 'PUBLIC' else again}",
                )
            )
        for (schema,) in self._ask(_CREATORS, (self._name.quoted,)):
            found.append(
                warning(
                    "schema",
                    f"everybody may create functions in {schema}, which others may then run unawares",
                    f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC",
                )
            )
        return found

    def _rows(self, *, without_marks: bool) -> list[Finding]:
        """Check the oldest rows for some that no writer of ours makes."""
        rules = " AND ".join(f"({rule})" for rule in self._checks().values())
        statement = _ODD_ROWS.format(
            table=self._name.quoted,
            rules=rules,
            rows=_HEAD_ROWS,
            first_of_relays=relay_marks.FIRST,
            last_of_relays=relay_marks.LAST,
        )
        ((odd, first, marked, last_id),) = self._ask(statement)
        found = []
        if odd:
            found.append(
                warning(
                    "rows",
                    f"{odd:,} of the oldest {_HEAD_ROWS:,} have ids, times, partitions or headers that no writer of "
                    f"ours makes, the first with id {first}",
                    violations_sql(self._name, self._checks()).rstrip(";\n"),
                )
            )
        if marked and without_marks:  # exactly-once delivery leaves none itself
            found.append(
                warning(
                    "rows",
                    f"{marked:,} of the oldest {_HEAD_ROWS:,} carry a mark, of an at-least-once leader that did not "
                    "stop in good order or of their writer: they are held when exactly-once delivery begins",
                    "`outbox hold list` shows them then; --accept-marked publishes them, perhaps again",
                )
            )
        drawn = next((last for *_, last in self._ask(_SEQUENCE, (self._name.quoted,))), None)
        if last_id is not None and drawn is not None and last_id > drawn:
            found.append(
                warning(
                    "rows",
                    f"there is an id {last_id}, and the sequence has come to {drawn} only: the INSERT that draws it "
                    "fails",
                    "have it published, or delete it, before the sequence comes to it",
                )
            )
        return found

    def _checks(self) -> dict[str, str]:
        has_partition = "kafka_partition" in self._columns()
        return {name: rule for name, rule in CHECKS.items() if has_partition or "kafka_partition" not in rule}

    def _is_binary(self) -> bool:
        return bool(self._columns()["kafka_value"][0] == "bytea")

    def _columns(self) -> dict[str, tuple[str, bool, bool]]:
        """Return by column its type, whether it is NOT NULL, and whether it has a default."""
        return {name: tuple(rest) for name, *rest in self._ask(_COLUMNS, (self._name.quoted,))}

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
            "snapshots",
            f"none of role {self.role} older than {_OLD_SECONDS} s; pg_read_all_stats is needed to see the others",
        )

    def _ask(self, statement: str, parameters: Any = None) -> list[tuple[Any, ...]]:
        try:
            return self._connection.execute(statement, parameters).fetchall()
        except psycopg.Error as error:
            raise StoreUnavailable(f"the database refused to answer: {one_line(error)}") from None


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
