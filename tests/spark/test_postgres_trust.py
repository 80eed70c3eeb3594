"""Spark's connections to PostgreSQL among functions and tables of others, with names and passwords of any kind."""

from contextlib import closing
from dataclasses import replace
from uuid import uuid4

import psycopg
import pyarrow as pa
import pytest

from outbox_core.errors import InvalidConfig, RowsHidden
from outbox_core.schema import TableName, create_hold_sql, create_table_sql
from outbox_core.stores.interface import RowQuery
from outbox_spark.cli.doctor import _postgres as look_at_projection
from outbox_spark.cli.doctor import _readable as look_at_table
from outbox_spark.config import ProjectSettings, SnapshotTable, TotalsSettings
from outbox_spark.pipelines.audit_sides import extent_of, read_table
from outbox_spark.postgres.projection import Misfit, ProjectedRecord, Projection
from outbox_spark.postgres.projection_store import ProjectionStore
from outbox_spark.relay.plan import Planner
from outbox_spark.relay.shard_store import ShardStore

_TRAP = """
CREATE FUNCTION {name} RETURNS {result} LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'somebody else''s code ran as the role of Spark: {name}'; END $$
"""
# Each fits its arguments better than PostgreSQL's own of that name.
_TRAPS = {
    "public.format_type(oid, text)": "text",
    "public.to_regclass(varchar)": "regclass",
    "public.unnest(text[])": "SETOF text",
    "public.to_jsonb(outbox)": "jsonb",
    "public.has_table_privilege(oid, varchar)": "boolean",
    "public.hashtextextended(text, integer)": "bigint",
    "public.substring(text, varchar)": "text",
    "public.times(numeric, integer)": "numeric",
    "public.modulo(bigint, smallint)": "bigint",
    "public.is_other(name, text)": "boolean",
    "public.is_other(oid, regclass)": "boolean",
}
_OPERATORS = [
    "public.* (LEFTARG = numeric, RIGHTARG = integer, FUNCTION = public.times)",
    "public.% (LEFTARG = bigint, RIGHTARG = smallint, FUNCTION = public.modulo)",
    "public.= (LEFTARG = name, RIGHTARG = text, FUNCTION = public.is_other)",
    "public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.is_other)",
]


@pytest.fixture
def among_others(database):
    """Return a database with an outbox of two rows, in which others may create functions in the schema `public`."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(create_table_sql(TableName("outbox")))
        connection.execute(create_hold_sql(TableName("outbox_hold")))
        connection.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'k'), ('t', NULL)")
        for name, result in _TRAPS.items():
            connection.execute(_TRAP.format(name=name, result=result))
        for operator in _OPERATORS:
            connection.execute(f"CREATE OPERATOR {operator}")
    return database


def _projection(keep="latest", table="lines", quarantine="odd"):
    totals = TotalsSettings(table="totals", by=["sku"], sums={"amount": "amount"}, count="lines")
    columns = {"sku": "text", "amount": "numeric(10,2)"}
    return Projection("p", TableName.parse(table), TableName.parse(quarantine), columns, keep, totals)


def _record(offset, *, is_replay=False, misfit=None):
    place = ("t", 0, offset, None, f"o:{offset}", "k")
    rows = () if misfit else [("a", "1.50")]
    return ProjectedRecord(*place, is_tombstone=False, rows=rows, misfit=misfit, is_replay=is_replay)


@pytest.mark.parametrize("keep", ["latest", "every"])
def test_a_projection_calls_no_functions_of_others(among_others, keep):
    """A projection calls no functions of others when it makes tables, reads positions or writes rows and totals."""
    with ProjectionStore(among_others, _projection(keep)) as store:
        store.prepare()
        store.advance({("t", 0): 0})
        assert store.positions() == {("t", 0): 0}
        odd = Misfit("odd", b"k", b"v", [("a", None)])
        records = [_record(0), _record(1, misfit=odd), _record(2), _record(3, is_replay=True)]
        assert store.write(iter(records), {("t", 0): 4})["quarantined"] == 1
    with psycopg.connect(among_others) as connection:
        (amount,) = connection.execute("SELECT amount FROM totals").fetchone()
    assert amount == (3 if keep == "latest" else 9) / 2


def test_an_audit_and_the_doctor_call_no_functions_of_others(among_others):
    """Neither an audit of an outbox nor the doctor's check of tables calls functions of others."""
    database = psycopg.conninfo.conninfo_to_dict(among_others)["dbname"]
    (first_and_last,), name, outbox = extent_of(SnapshotTable(dsn=among_others, table="outbox"))
    assert (first_and_last, name.schema, outbox) == ((1, 2), "public", f"{database}.public.outbox")
    task = read_table(among_others, TableName("outbox"), outbox)
    (rows,) = task([pa.RecordBatch.from_pydict({"first": [1], "last": [2]})])
    assert rows.num_rows == 2
    assert look_at_table(SnapshotTable(dsn=among_others, table="outbox")) == "outbox may be read"
    settings = ProjectSettings(
        name="p", topics="t", checkpoint="/c", schema="n BIGINT", postgres={"dsn": among_others, "table": "lines"}
    )
    assert "lines will be made" in look_at_projection(settings, settings.postgres)


def test_an_audit_reads_odd_rows(database):
    """An audit reads extreme ids and times as they are, or as the calendar's ends; no range is endless."""
    odd = {
        -(2**63): "-infinity",
        5: "infinity",
        6: "294276-12-31 23:59:59+00",
        7: None,
        2**63 - 1: "2026-01-01 00:00:00+00",
    }
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE outbox (id bigint, create_time timestamptz, kafka_topic text, kafka_key text)")
        for number, time in odd.items():
            connection.execute("INSERT INTO outbox VALUES (%s, %s, 't', 'k')", (number, time))
    ranges, name, outbox = extent_of(SnapshotTable(dsn=database, table="outbox"))
    assert ranges == [(-(2**63), 2**63 - 1)]
    first, last = zip(*ranges, strict=True)
    (rows,) = read_table(database, name, outbox)([pa.RecordBatch.from_pydict({"first": first, "last": last})])
    read = {row["offset"]: row["timestamp"] for row in rows.to_pylist()}
    assert sorted(read) == sorted(odd)
    assert {number: time and time.year for number, time in read.items()} == dict(
        zip(odd, (1, 9999, 9999, None, 2026), strict=True)
    )


def test_a_relay_calls_no_functions_of_others(among_others):
    """A relay calls no functions of others when it plans a batch, reads a shard and deletes its rows."""
    with closing(ShardStore(among_others, "outbox")) as store:
        store.check()
        assert store.highest_id() == 2
        rows = []
        for wanted in Planner(store, 2).next():
            rows += store.scan_shard(RowQuery(10), wanted)
            rows += store.scan_shard(RowQuery(10), replace(wanted, is_settled=False, after=2))
            assert sum(map(len, store.read_shard(wanted.number, 2))) <= 2
        assert store.delete_published([row.id for row in rows], [row.create_time for row in rows]) == 2


def test_a_policy_that_hides_rows_is_found_before_the_commit(among_others):
    """Under deliberate policies neither a projection nor an audit concludes anything once a policy hides rows."""
    role, database = f"projects {uuid4()}", psycopg.conninfo.conninfo_to_dict(among_others)["dbname"]
    source = psycopg.conninfo.make_conninfo(among_others, user=role)
    with psycopg.connect(among_others, autocommit=True) as owner:
        with ProjectionStore(among_others, _projection()) as store:
            store.prepare()
        owner.execute(f'CREATE ROLE "{role}" LOGIN; GRANT ALL ON ALL TABLES IN SCHEMA public TO "{role}"')
        owner.execute(f'GRANT TEMPORARY ON DATABASE "{database}" TO "{role}"')
        for table in ("outbox", "outbox_spark_positions"):
            owner.execute(f"CREATE POLICY everything ON {table} USING (true)")
            owner.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")
        with ProjectionStore(source, _projection()) as store:
            store.advance({("t", 0): 5})
            assert store.positions() == {("t", 0): 5}
            owner.execute("ALTER POLICY everything ON outbox_spark_positions USING (false) WITH CHECK (true)")
            with pytest.raises(RowsHidden, match="outbox_spark_positions"):
                store.positions()

        def ranges():
            owner.execute("ALTER POLICY everything ON outbox USING (false)")  # the reader is connected
            yield pa.RecordBatch.from_pydict({"first": [1], "last": [2]})

        with pytest.raises(RowsHidden, match=r"public\.outbox"):
            list(read_table(source, TableName("outbox"), "o")(ranges()))
        owner.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


def test_tables_are_found_and_made_by_the_sessions_own_path(database):
    """A table without a schema is looked up along the session's path, and made in the first schema of it."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA mine")
    dsn = psycopg.conninfo.make_conninfo(database, options="-csearch_path=mine,public")
    with ProjectionStore(dsn, _projection()) as store:
        store.prepare()
        store.advance({("t", 0): 5})
    with psycopg.connect(database) as connection:
        statement = "SELECT relname, nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace"
        where = " WHERE relkind = 'r' AND nspname IN ('mine', 'public')"
        found = dict(connection.execute(statement + where).fetchall())
    assert found == dict.fromkeys(("lines", "odd", "totals", "outbox_spark_positions"), "mine")


def test_names_with_percent_signs(database):
    """A % in the name of a projected table, its quarantine or its schema is part of the name."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute('CREATE SCHEMA "100%s"')
    with ProjectionStore(database, _projection("every", '"100%s"."50%(a)s"', '"100%s"."%"')) as store:
        store.prepare()
        odd = Misfit("odd", b"k", b"v", [])
        store.write(iter([_record(0), _record(1, misfit=odd)]), {("t", 0): 2})
        assert store.positions() == {("t", 0): 2}
    with psycopg.connect(database) as connection:
        assert connection.execute('SELECT count(*) FROM "100%s"."%"').fetchone() == (1,)


@pytest.mark.parametrize("dsn", ["postgresql://me:S3cr3t P4ss@127.0.0.1:1/x", "host=127.0.0.1 password=S3cr3t P4ss"])
def test_no_connection_shows_a_password(dsn):
    """A DSN that libpq cannot read is not quoted in errors, as any part of it may be the password."""
    table = SnapshotTable.model_construct(dsn=dsn, table=TableName("outbox"), outbox_name=None)
    tries = [
        lambda: ProjectionStore(dsn, _projection()),
        lambda: extent_of(table),
        lambda: look_at_table(table),
        lambda: list(read_table(dsn, TableName("t"), "o")([])),
    ]
    for attempt in tries:
        with pytest.raises(InvalidConfig, match="libpq cannot read") as error:
            attempt()
        shown = f"{error.value!r} {error.value} {error.value.__cause__}"
        assert "S3cr3t" not in shown
        assert "P4ss" not in shown
