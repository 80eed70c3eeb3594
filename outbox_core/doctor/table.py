"""Checks of an outbox table for `outbox doctor`: its columns, ids, constraints, rights and rows."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import Any, NamedTuple

from outbox_core.doctor.findings import Commands, Finding, fine, problem, warning
from outbox_core.doctor.session import DatabaseSession
from outbox_core.printable import plural
from outbox_core.schema import (
    CHECKS,
    COLUMNS,
    HAS_UNIQUE_ID_SQL,
    REQUIRED_COLUMNS,
    STORAGE_PARAMETERS,
    violations_sql,
)
from outbox_core.stores import relay_marks
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.schema_changes import CHECK_CONSTRAINTS
from outbox_core.stores.postgres.table import wrong_types

HEAD_ROWS = 10_000
_NEARLY_FULL_INTEGER = 2_000_000_000
_LARGEST_BIGINT = 2**63 - 1
_NEARLY_FULL = 0.9

_TABLE = f"""
SELECT c.relkind, c.relpersistence,
       coalesce((SELECT jsonb_object_agg(split_part(option, '=', 1), split_part(option, '=', 2))
                 FROM unnest(c.reloptions) AS option), '{{}}'),
       coalesce(s.n_live_tup, 0), coalesce(s.n_dead_tup, 0),
       {HAS_UNIQUE_ID_SQL},
       has_table_privilege(c.oid, 'SELECT'), has_table_privilege(c.oid, 'DELETE'),
       coalesce((SELECT has_column_privilege(c.oid, attnum, 'UPDATE') FROM pg_attribute
                 WHERE attrelid = c.oid AND attname = 'leader_id' AND NOT attisdropped), false)
FROM pg_class AS c LEFT JOIN pg_stat_all_tables AS s ON s.relid = c.oid
WHERE c.oid = to_regclass(%s)
"""

_SEQUENCE = """
SELECT q.seqrelid::regclass::text, q.seqcache, q.seqincrement, q.seqcycle, q.seqmax,
       CASE WHEN has_sequence_privilege(q.seqrelid, 'SELECT, USAGE') THEN pg_sequence_last_value(q.seqrelid) END
FROM pg_depend AS d
JOIN pg_sequence AS q ON q.seqrelid = d.objid
JOIN pg_attribute AS a ON a.attrelid = d.refobjid AND a.attnum = d.refobjsubid AND a.attname = 'id'
WHERE d.classid = 'pg_class'::regclass AND d.refclassid = 'pg_class'::regclass AND d.refobjid = to_regclass(%s)
"""

_COLUMNS = """
SELECT attname, format_type(atttypid, NULL), attnotnull, atthasdef OR attidentity <> '' FROM pg_attribute
WHERE attrelid = to_regclass(%s) AND attnum > 0 AND NOT attisdropped
"""

_REFERENCES = """
SELECT quote_ident(conname), conrelid::regclass::text FROM pg_constraint
WHERE confrelid = to_regclass(%(name)s) AND contype = 'f' AND confdeltype IN ('a', 'r') AND conparentid = 0 ORDER BY 1
"""

# A publication refuses updates and deletes of rows that its subscribers could not find again.
_UNIDENTIFIED = """
WITH family AS (SELECT to_regclass(%(name)s)::oid AS oid
                UNION SELECT relid FROM pg_partition_tree(to_regclass(%(name)s)))
SELECT c.oid::regclass::text, bool_or(EXISTS (SELECT FROM pg_index WHERE indrelid = c.oid AND indisprimary)),
       string_agg(DISTINCT quote_ident(p.pubname), ', ')
FROM family JOIN pg_class AS c USING (oid) JOIN pg_namespace AS n ON n.oid = c.relnamespace
JOIN pg_publication_tables AS t ON t.schemaname = n.nspname AND t.tablename = c.relname
JOIN pg_publication AS p ON p.pubname = t.pubname
WHERE (p.pubupdate OR p.pubdelete) AND c.relreplident <> 'f' AND NOT EXISTS (
    SELECT FROM pg_index WHERE indrelid = c.oid
    AND CASE c.relreplident WHEN 'd' THEN indisprimary WHEN 'i' THEN indisreplident END)
GROUP BY c.oid ORDER BY 1
"""

_SUBSCRIPTIONS = """
SELECT quote_ident(s.subname) FROM pg_subscription_rel AS r JOIN pg_subscription AS s ON s.oid = r.srsubid
WHERE r.srrelid = to_regclass(%(name)s) AND s.subenabled ORDER BY 1
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

_TYPES = {
    "id": "bigint",
    "create_time": "timestamp with time zone",
    "kafka_partition": "integer",
    "kafka_topic": "varchar(249)",
    "kafka_key": "text",
    "kafka_value": "bytea",
    "kafka_header_keys": "text[] NOT NULL DEFAULT '{}'",
    "kafka_header_values": "bytea[] NOT NULL DEFAULT '{}'",
    "leader_id": "uuid",
}


class Column(NamedTuple):
    """A column of the table."""

    type: str
    is_not_null: bool
    has_default: bool


class TableChecks:
    """The checks of an outbox table that exists.

    `from_catalog` is answered while the table is locked; `from_rows` is not.
    """

    def __init__(self, session: DatabaseSession, commands: Commands) -> None:
        self._session = session
        self._commands = commands
        self._name = session.table

    def from_catalog(self) -> Iterator[Finding]:
        """Check the table's definition. After a finding of columns that are missing nothing else could be checked."""
        found = list(self._shape())
        yield from found
        if not self.is_outbox:
            return
        yield from self._table()
        yield from self._sequence()
        yield from self._constraints()
        yield from self._obstacles()
        yield from self._replication()
        yield from self._writers()

    @cached_property
    def is_outbox(self) -> bool:
        """True if the table has the columns of an outbox, in types that a harvester reads."""
        types = {name: column.type for name, column in self.columns.items()}
        return all(name in types for name in REQUIRED_COLUMNS) and not wrong_types(types)

    @cached_property
    def only_reads(self) -> bool:
        """True if the role may read the table and do nothing else, as the role of an operator or a monitor."""
        (*_, may_select, may_delete, may_mark) = self._facts()
        return may_select and not may_delete and not may_mark

    @cached_property
    def columns(self) -> dict[str, Column]:
        """The columns by name."""
        return {name: Column(*rest) for name, *rest in self._session.ask(_COLUMNS, (self._name.quoted,))}

    @property
    def _layout(self) -> str:
        return "binary" if self.columns["kafka_value"].type == "bytea" else "text"

    def _facts(self) -> tuple[Any, ...]:
        return self._session.ask(_TABLE, (self._name.quoted,))[0]

    def _shape(self) -> Iterator[Finding]:
        table, columns = self._name.quoted, self.columns
        missing = [name for name in REQUIRED_COLUMNS if name not in columns]
        if missing:
            actions = ", ".join(f"ADD COLUMN {name} {_TYPES[name]}" for name in missing)
            yield problem(
                "columns",
                f"{self._name} is no outbox: it lacks the column(s) {', '.join(missing)}",
                f"ALTER TABLE {table} {actions}",
            )
            return
        for name, found, expected in wrong_types({name: column.type for name, column in columns.items()}):
            wanted = _TYPES[name].partition(" NOT NULL")[0]
            yield problem(
                "columns",
                f"{name} is {found}, expected {expected}",
                f"ALTER TABLE {table} ALTER COLUMN {name} TYPE {wanted} USING {name}::{wanted}",
            )
        is_bytea = columns["kafka_value"].type == "bytea"
        if is_bytea != (columns["kafka_header_values"].type == "bytea[]"):
            remedy = (
                f"ALTER TABLE {table} ALTER COLUMN kafka_header_values DROP DEFAULT, ALTER COLUMN kafka_header_values "
                "TYPE bytea[] USING '{}'"
                if is_bytea
                else f"ALTER TABLE {table} ALTER COLUMN kafka_value TYPE bytea USING convert_to(kafka_value, 'UTF8')"
            )
            yield warning(
                "columns",
                f"kafka_value is {columns['kafka_value'].type} and kafka_header_values "
                f"{columns['kafka_header_values'].type}: a mixture of the binary and the text layout, to which the "
                "adapters cannot write headers and values alike",
                remedy,
            )

    def _table(self) -> Iterator[Finding]:
        table = self._name.quoted
        kind, persistence, options, live, dead, has_key, may_select, may_delete, may_mark = self._facts()
        if kind not in {"r", "p"}:
            yield problem("table", f"{self._name} is not a table, so it cannot be harvested", "name the table itself")
            return
        yield fine("table", f"{self._name}, about {plural(live, 'row')}, {dead:,} dead, not yet vacuumed")
        yield from self._rights(may_select, may_delete, may_mark)
        if not has_key:
            yield problem(
                "primary key",
                "id has no unique index: each mark reads the whole table, and two rows may share an id",
                f"ALTER TABLE {table} ADD PRIMARY KEY (id)",
            )
        if persistence == "u":
            yield problem("table", "is UNLOGGED: a crash of the server empties it", f"ALTER TABLE {table} SET LOGGED")
        if options.get("autovacuum_enabled") in {"false", "off"}:
            remedy = f"ALTER TABLE {table} RESET (autovacuum_enabled)"
            yield warning("storage", "autovacuum is off for the table", remedy)
        missing = {name: value for name, value in STORAGE_PARAMETERS.items() if options.get(name) != value}
        if missing:
            wanted = ", ".join(f"{name} = {value}" for name, value in missing.items())
            yield warning(
                "storage",
                f"{len(missing)} of the parameters that suit an outbox are not set, so marks and scans cost more",
                f"ALTER TABLE {table} SET ({wanted})",
            )
        if self.columns["id"].type == "integer":
            yield warning(
                "id column",
                "is an integer: it runs out of values after 2,147,483,647 records",
                f"ALTER TABLE {table} ALTER COLUMN id TYPE bigint",
            )

    def _rights(self, may_select: bool, may_delete: bool, may_mark: bool) -> Iterator[Finding]:
        rights = {"SELECT": may_select, "DELETE": may_delete, "UPDATE (leader_id)": may_mark}
        missing = [right for right, is_given in rights.items() if not is_given]
        if not missing:
            return
        role, listed = self._session.role, ", ".join(missing)
        remedy = f"GRANT {listed} ON TABLE {self._name.quoted} TO {role}"
        if self.only_reads:
            yield warning(
                "rights",
                f"role {role} only reads, which suffices to look; a harvester with this role would need {listed}",
                remedy,
            )
        else:
            yield problem("rights", f"role {role} lacks {listed} on {self._name}, which harvesting needs", remedy)

    def _sequence(self) -> Iterator[Finding]:
        rows = self._session.ask(_SEQUENCE, (self._name.quoted,))
        if not rows:
            yield self._no_sequence()
            return
        name, cache, increment, cycles, most, last = rows[0]
        if cache > 1:
            yield problem(
                "sequence",
                f"{name} has CACHE {cache}: ids are not drawn in order, so records are published out of order",
                f"ALTER SEQUENCE {name} CACHE 1",
            )
        elif increment < 1 or cycles:
            remedy = f"ALTER SEQUENCE {name} INCREMENT BY 1 MINVALUE 1 NO CYCLE"
            yield problem("sequence", f"{name} does not only grow", remedy)
        elif most < _LARGEST_BIGINT and self.columns["id"].type == "bigint":
            judge = problem if last is not None and last > _NEARLY_FULL * most else warning
            come = "" if last is None else f", and has come to {last:,}"
            detail = f"{name} ends at {most:,}{come}: no record can be inserted after that"
            yield judge("sequence", detail, f"ALTER SEQUENCE {name} AS bigint NO MAXVALUE")
        else:
            yield fine("sequence", f"{name}, last value {last if last is not None else 'unknown'}")

    def _no_sequence(self) -> Finding:
        detail = "the id column owns none, so nobody can tell whether ids are drawn in order"
        found = self._session.ask(sql.FIND_SEQUENCE, {"name": self._name.quoted})
        if found:
            return warning("sequence", detail, f"ALTER SEQUENCE {found[0][0]} OWNED BY {self._name.quoted}.id")
        remedy = f"ALTER TABLE {self._name.quoted} ALTER COLUMN id ADD GENERATED BY DEFAULT AS IDENTITY"
        return warning("sequence", detail, remedy)

    def _constraints(self) -> Iterator[Finding]:
        table, checks = self._name.quoted, self._checks
        there = dict(self._session.ask(CHECK_CONSTRAINTS, (table,)))
        found = []
        if set(checks) - set(there):
            found.append(
                warning(
                    "constraints",
                    f"the table lacks {_listed(set(checks) - set(there))}, so writers may insert rows that no "
                    "clock and no sequence makes",
                    f"{self._commands.add_checks(self._layout)}; its lock is short",
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
        if not self.columns["create_time"].is_not_null:
            remedy = f"ALTER TABLE {table} ALTER COLUMN create_time SET NOT NULL"
            found.append(warning("create_time", "may be NULL, so that rows cannot be told apart by it", remedy))
        if not self.columns["create_time"].has_default and self._layout == "binary":
            remedy = f"ALTER TABLE {table} ALTER COLUMN create_time SET DEFAULT now()"
            found.append(warning("create_time", "has no DEFAULT, to which the adapters leave it", remedy))
        yield from found or [fine("constraints", "odd ids, times, partitions and headers are kept out")]

    def _obstacles(self) -> Iterator[Finding]:
        """Check for triggers, rules and keys between the harvester and the rows that it deletes and marks."""
        table = self._name.quoted
        for (what,) in self._session.ask(sql.OBSTACLES, {"name": table}):
            kind, _, name = what.partition(" ")
            yield (problem if kind == "rule" else warning)(
                "obstacle",
                f"the table has {what}: if it keeps rows from being marked or deleted, publishing stops",
                f"ALTER TABLE {table} DISABLE {kind.upper()} {name}",
            )

        for constraint, referring in self._session.ask(_REFERENCES, {"name": table}):
            yield warning(
                "obstacle",
                f"foreign key {constraint} of {referring} refers to the table: publishing stops at a row that it keeps "
                "from being deleted",
                f"ALTER TABLE {referring} DROP CONSTRAINT {constraint}",
            )

    def _replication(self) -> Iterator[Finding]:
        """Check for publications that refuse updates and deletes, and for subscriptions that fill the table."""
        for table, has_key, publications in self._session.ask(_UNIDENTIFIED, {"name": self._name.quoted}):
            yield problem(
                "publication",
                f"{publications} publishes updates or deletes of {table}, whose REPLICA IDENTITY does not identify its "
                "rows: no row can be marked or deleted",
                f"ALTER TABLE {table} REPLICA IDENTITY {'DEFAULT' if has_key else 'FULL'}",
            )
        for (subscription,) in self._session.ask(_SUBSCRIPTIONS, {"name": self._name.quoted}):
            yield warning(
                "subscription",
                f"{subscription} copies rows of another server into the table: a harvester there and one here publish "
                "each of them twice",
                f"ALTER SUBSCRIPTION {subscription} DISABLE",
            )

    def _writers(self) -> Iterator[Finding]:
        """Check for roles that may write columns that are not theirs, or create functions beside the table."""
        columns, table = self.columns, self._name.quoted
        kept = ["id", "leader_id", *(["create_time"] if columns["create_time"].has_default else [])]
        granted = ", ".join(column for column in COLUMNS if column in columns and column not in kept)
        for role, has_all, named in self._session.ask(_INSERTERS, {"name": table, "columns": kept}):
            what = "all columns" if has_all else _listed(named)
            again = f"; GRANT INSERT ({granted}) ON {table} TO {role}"
            yield warning(
                "writers",
                f"{role} may insert {what}, {' and '.join(kept)} included, with which a row can be put at the "
                "table's head, or look as if it was being published",
                f"REVOKE INSERT ON {table} FROM {role}{'' if role == 'PUBLIC' else again}",
            )
        for (schema,) in self._session.ask(_CREATORS, (table,)):
            yield warning(
                "schema",
                f"everybody may create functions in {schema}, which others may then run unawares",
                f"REVOKE CREATE ON SCHEMA {schema} FROM PUBLIC",
            )

    def from_rows(self, *, without_marks: bool) -> Iterator[Finding]:
        """Check the oldest rows for some that no writer of ours makes."""
        rules = " AND ".join(f"({rule})" for rule in self._checks.values())
        statement = _ODD_ROWS.format(
            table=self._name.quoted,
            rules=rules,
            rows=HEAD_ROWS,
            first_of_relays=relay_marks.FIRST,
            last_of_relays=relay_marks.LAST,
        )
        ((odd, first, marked, last_id),) = self._session.ask(statement)
        if odd:
            yield warning(
                "rows",
                f"{odd:,} of the oldest {HEAD_ROWS:,} have ids, times, partitions or headers that no writer of "
                f"ours makes, the first with id {first}",
                violations_sql(self._name, self._checks).rstrip(";\n"),
            )
        if marked and without_marks:  # exactly-once delivery leaves none itself
            shown = self._commands.hold("list")
            yield warning(
                "rows",
                f"{marked:,} of the oldest {HEAD_ROWS:,} carry a mark, of an at-least-once leader that did not "
                "stop in good order or of their writer: they are held when exactly-once delivery begins",
                f"{shown} shows them then; --accept-marked publishes them, perhaps again",
            )
        name, drawn = "", None
        for name, *_, drawn in self._session.ask(_SEQUENCE, (self._name.quoted,)):  # noqa: B007  one, or none
            pass
        if last_id is not None and drawn is not None and last_id > drawn:
            yield warning(
                "rows",
                f"there is an id {last_id}, and the sequence has come to {drawn} only: the INSERT that draws it fails",
                f"SELECT setval('{name}', {last_id})",
            )
        last = max(last_id or 0, drawn or 0)
        if self.columns["id"].type == "integer" and last > _NEARLY_FULL_INTEGER:
            yield problem(
                "id column",
                f"is an integer, and the last id is {last}: soon no record can be inserted",
                f"ALTER TABLE {self._name.quoted} ALTER COLUMN id TYPE bigint",
            )

    @cached_property
    def _checks(self) -> dict[str, str]:
        has_partition = "kafka_partition" in self.columns
        return {name: rule for name, rule in CHECKS.items() if has_partition or "kafka_partition" not in rule}


def _listed(names: Iterable[str]) -> str:
    return ", ".join(sorted(names))
