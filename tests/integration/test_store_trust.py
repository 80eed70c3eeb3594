"""The store among others' objects, rights and settings: what a role with little more than INSERT can do to it."""

from uuid import uuid4

import psycopg
import pytest

from outbox_core.errors import OutboxTableError
from outbox_core.ports import HoldSet, NewHold
from outbox_core.schema import TableName, create_hold_sql, create_table_sql
from outbox_core.stores.notices import CommitNotices, NoNotices
from outbox_core.stores.postgres import PostgresStore
from tests.harvesting import Scene

ME = uuid4()


@pytest.fixture
def scene(database):
    """A fresh outbox of the binary layout, with its holds."""
    return Scene(database, "")


@pytest.fixture
def store(scene):
    """A store on it."""
    store = PostgresStore(scene.database)
    store.check()
    yield store
    store.close()


# -- search paths

_TRAP = """
CREATE FUNCTION {name} RETURNS {result} LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'somebody else''s code ran as the harvester''s role: {name}'; END $$
"""
# Each fits its arguments better than PostgreSQL's own of that name.
_TRAPS = {
    "public.pg_column_size(bytea[])": "integer",
    "public.pg_column_size(text[])": "integer",
    "public.pg_column_compression(bytea[])": "text",
    "public.cardinality(text[])": "integer",
    "public.array_send(bytea[])": "bytea",
    "public.array_send(text[])": "bytea",
    "public.octet_length(varchar)": "integer",
    "public.starts_with(varchar, text)": "boolean",
    "public.unnest(text[])": "SETOF text",
    "public.unnest(bigint[])": "SETOF bigint",
    "public.jsonb_object_agg(name, text)": "jsonb",
    "public.to_regclass(varchar)": "regclass",
    "public.quote_ident(name)": "text",
    "public.is_other(varchar, text)": "boolean",
    "public.is_other(regclass, oid)": "boolean",
    "public.is_other(oid, regclass)": "boolean",
    "public.is_other(name, text)": "boolean",
    "public.join_up(varchar, text)": "text",
}
_OPERATORS = [
    "public.= (LEFTARG = varchar, RIGHTARG = text, FUNCTION = public.is_other)",
    "public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.is_other)",
    "public.|| (LEFTARG = varchar, RIGHTARG = text, FUNCTION = public.join_up)",
]


def _set_traps(scene):
    for name, result in _TRAPS.items():
        scene.execute(_TRAP.format(name=name, result=result))
    for operator in _OPERATORS:
        scene.execute(f"CREATE OPERATOR {operator}")


def test_functions_of_other_schemas_are_never_called(scene):
    """No statement of the store or of the listener takes a function or operator from a schema on the search path."""
    _set_traps(scene)
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
        " VALUES ('t', 'k', '{a}', '{x}'), ('t', 'l', '{a}', '{x}')"
    )
    store = PostgresStore(scene.database)
    store.check()
    floor = store.sight()
    store.describe(["1/1"])
    assert len(store.mark(ME, 10).records) == 2
    held = HoldSet(frozenset({"u"}), frozenset({("t", "l")}), frozenset({7}))
    assert len(store.mark(uuid4(), 10, {("t", "k")}, [9], holds=held).records) == 0
    assert len(store.scan(10, ())) == 2
    (row,) = store.scan(10, [9], {("t", "x")}, holds=held)
    store.hold([NewHold("t", "l", 2, "refused", "", dead_letter=True)])
    assert store.holds().lanes == {("t", "l")}
    (letter,) = store.fetch([2])
    store.keep([2], "no")
    assert store.bury([2], [letter[7]]) == 1
    assert store.release_gone() == 0
    assert store.marked().number == store.backlog().pending == 1
    assert store.clear_marks() == 1
    assert store.reset(ME, [1]) == store.purge(ME, [1]) == 0
    assert store.settle([1], [row[7]]) == 1
    assert not floor.unusable
    assert store.is_empty()
    store.close()
    notices = CommitNotices(scene.database, "outbox", application_name="kafka-outbox test")
    with pytest.raises(NoNotices, match="no trigger"):
        notices.open()
    notices.dispose()


def test_tables_are_found_by_the_sessions_own_path(database):
    """A table without a schema is the one that the session's search path finds, also when that changes later."""
    scene = Scene(database, "", layout=None)
    for schema in ("first", "second"):
        scene.execute(f"CREATE SCHEMA {schema}")
    scene.execute(create_table_sql(TableName("outbox", "second")))
    scene.execute(create_hold_sql(TableName("outbox", "second")))
    scene.execute("INSERT INTO second.outbox (kafka_topic) VALUES ('t')")
    dsn = psycopg.conninfo.make_conninfo(database, options="-c search_path=first,second")
    store = PostgresStore(dsn)
    assert store.check().endswith(".second.outbox")
    scene.execute(create_table_sql(TableName("outbox", "first")))
    store.close()
    assert len(store.mark(ME, 10).records) == 1
    assert store.holds() is not None
    store.close()


def test_table_that_comes_later(database):
    """A table that was not there at first is found once it is."""
    scene = Scene(database, "", layout=None)
    store = PostgresStore(database)
    with pytest.raises(OutboxTableError, match="does not exist"):
        store.check()
    scene.execute(create_table_sql(TableName("outbox")))
    assert store.check().endswith(".public.outbox")
    store.close()
