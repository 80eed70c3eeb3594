"""What is particular about the PostgreSQL store: plans, sessions, and tables and roles that do not fit."""

import json
import logging
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import psycopg
import pytest

from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.ports import NO_LIMIT, Floor, HoldSet
from outbox_core.schema import TableName, create_table_sql
from outbox_core.stores import postgres as store_module
from outbox_core.stores import sessions as sessions_module
from outbox_core.stores.postgres import PostgresStore
from tests.harvesting import Scene, wait_until


@pytest.fixture
def scene(database):
    """A fresh outbox of the binary layout."""
    return Scene(database, "")


@pytest.fixture
def store(scene):
    """A store on it."""
    store = PostgresStore(scene.database)
    store.check()
    yield store
    store.close()


def _nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def _plan(store, statement, parameters):
    """The nodes of the plan that a store's own session would use."""
    store.is_empty()  # connects
    (found,) = store._connection.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters).fetchone()
    plans = found if isinstance(found, list) else json.loads(found)
    return list(_nodes(plans[0]["Plan"]))


@pytest.mark.parametrize("statistics", ["empty", "full", "never"])
@pytest.mark.parametrize("by_address", [True, False])
def test_statements_walk_the_primary_key(scene, store, statistics, by_address):
    """However wrong the planner's statistics are, rows are found by index or address, never by scan or sort."""
    scene.execute("ALTER TABLE outbox SET (autovacuum_enabled = off)")
    if statistics == "empty":
        scene.execute("ANALYZE outbox")
    scene.fill("t", 20_000, keys=50)
    if statistics == "full":
        scene.execute("ANALYZE outbox")
        scene.execute("DELETE FROM outbox WHERE id > 10")
    if not by_address:
        scene.execute("CREATE TABLE child () INHERITS (outbox)")
        scene.execute("ALTER TABLE child ADD PRIMARY KEY (id)")
        store.check()
    me = uuid4()
    above = store._above(Floor(10, store.sight().place))
    bounds = {"limit": 100, "max_bytes": NO_LIMIT, "max_message": NO_LIMIT, **above}
    excluded = {**bounds, **store_module._excluded([("t", f"k{n}") for n in range(5)]), "ids": "{[1,3],[7,7]}"}
    holds = HoldSet(frozenset({"other"}), frozenset({("t", "k6")}), frozenset({9}))
    excluded |= store._held_parameters.of(holds)
    statements = {
        "mark": (store._mark, {"leader_id": me, **bounds}),
        "mark_excluding": (store._mark_excluding, {"leader_id": me, **excluded}),
        "scan": (store._scan, {**bounds, "ids": "{[1,3],[7,7]}"}),
        "scan_excluding": (store._scan_excluding, excluded),
        "settle": (
            store._format(store_module._SETTLE, microseconds=store_module.MICROSECONDS),
            {"ids": "{1,2,3}", "create_times": "{1,2,3}"},
        ),
        "purge": (store._format(store_module._PURGE), {"leader_id": me, "ids": "{1,2,3}"}),
        "reset": (store._format(store_module._RESET), {"leader_id": me, "ids": "{1,2,3}"}),
    }
    for name, (statement, parameters) in statements.items():
        nodes = _plan(store, statement, parameters)
        assert not {"Seq Scan", "Sort", "Bitmap Heap Scan"} & {node["Node Type"] for node in nodes}, name
        assert "outbox_pkey" in {node.get("Index Name") for node in nodes}, name
        if name.startswith(("mark", "scan")):
            assert "(id >= " in "".join(node.get("Index Cond", "") for node in nodes), f"{name}: the floor is a filter"
        if name.startswith("mark") and by_address:
            assert "Tid Scan" in {node["Node Type"] for node in nodes}


def test_plans_stay_when_the_table_grows_under_a_prepared_statement(scene, store):
    """Statements that were prepared on an empty table keep to the index when the table has filled up."""
    me = uuid4()
    for _ in range(10):
        store.mark(me, 100)
    scene.fill("t", 20_000)
    assert [record[0] for record in store.mark(me, 100).records] == list(range(1, 101))
    store._connection.execute("SELECT pg_stat_force_next_flush()")
    store._connection.execute("SELECT 1")
    (read,) = scene.execute("SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'outbox'")
    assert read.seq_tup_read == 0
    assert 0 < read.idx_tup_fetch < 5000


def test_sessions_of_the_store(scene, store):
    """Sessions wait for their commits to be durable whatever the database's default is, and can be told apart."""
    scene.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$"
    )
    store.close()
    store = PostgresStore(scene.database, application_name="kafka-outbox test")
    store.is_empty()
    (setting,) = store._connection.execute("SHOW synchronous_commit").fetchone()
    assert setting == "on"
    assert scene.execute("SELECT 1 FROM pg_stat_activity WHERE application_name = 'kafka-outbox test'")
    store.close()


def test_own_names_are_quoted(database):
    """A table name with capitals, spaces, quotes and percent signs works in every statement."""
    for name in ('"My ""Out%box"', '"Sche%ma"."out box"'):
        table = TableName.parse(name)
        with psycopg.connect(database) as connection:
            if table.schema:
                connection.execute('CREATE SCHEMA "Sche%ma"'.replace("%", "%%"), [])
            connection.execute(create_table_sql(table).replace("%", "%%"), [])
        scene = Scene(database, "", table=name, layout=None)
        scene.execute(f"INSERT INTO {table.quoted} (kafka_topic) VALUES ('t')")
        store = PostgresStore(database, name)
        store.check()
        me = uuid4()
        assert len(store.mark(me, 10, {("x", "y")}).records) == 1
        assert store.reset(me, [1]) == 1
        assert len(store.mark(me, 10).records) == 1
        assert store.backlog().pending == 1
        assert store.purge(me, [1]) == 1
        assert store.is_empty()
        store.close()


def test_without_check_the_first_mark_looks_at_the_table(scene):
    """A store that was never asked to check its table does so by itself."""
    scene.fill("t", 3)
    store = PostgresStore(scene.database)
    assert len(store.mark(uuid4(), 10).records) == 3
    store.close()


def test_warns_of_a_sequence_that_caches(scene, store, caplog):
    """Ids that sessions draw ahead are out of order, so a caching sequence is told at the start."""
    assert not caplog.records
    scene.execute("ALTER TABLE outbox ALTER id SET CACHE 20")
    with caplog.at_level(logging.WARNING):
        store.check()
    assert "CACHE 20" in caplog.text


def test_large_backlog_is_estimated(scene, store, monkeypatch):
    """Beyond the bound of the count the backlog is what the planner's statistics say, never less than the bound."""
    monkeypatch.setattr(store_module, "_BACKLOG_COUNT_BOUND", 100)
    store = PostgresStore(scene.database)
    scene.fill("t", 500)
    assert store.backlog().pending == 100
    scene.execute("ANALYZE outbox")
    assert store.backlog().pending == 500
    store.close()


def test_missing_right_on_the_schema(scene, topic_name):
    """A role that may not even look into the schema is told so, in one line."""
    role = topic_name("role")
    scene.execute(f'CREATE ROLE "{role}" LOGIN')
    scene.execute("CREATE SCHEMA hidden")
    scene.execute(create_table_sql(TableName("outbox", "hidden")))
    store = PostgresStore(psycopg.conninfo.make_conninfo(scene.database, user=role), "hidden.outbox")
    try:
        with pytest.raises(OutboxTableError, match=r"rights on hidden\.outbox"):
            store.check()
    finally:
        store.close()
        scene.execute(f'DROP ROLE "{role}"')


def test_deadlock_is_an_outage(scene, store):
    """What the database ends for reasons of its own (a deadlock, a cancelled statement) can be tried again."""
    scene.fill("t", 3)
    store.is_empty()
    pid = store._connection.info.backend_pid
    with psycopg.connect(scene.database) as other:
        other.execute("SET deadlock_timeout = '60s'")
        other.execute("LOCK TABLE outbox")
        store._connection.execute("SET lock_timeout = '100ms'")
        with pytest.raises(StoreUnavailable, match="lock"):
            store.mark(uuid4(), 10)
    assert len(store.mark(uuid4(), 10).records) == 3
    assert store._connection.info.backend_pid != pid


def test_errors_hide_the_password(database):
    """A database that cannot be reached is named by its setting, without what the setting says."""
    dsn = psycopg.conninfo.make_conninfo(database, password="hunter2", port=1)
    with pytest.raises(StoreUnavailable) as raised:
        PostgresStore(dsn).check()
    assert "hunter2" not in f"{raised.value!r} {raised.value.__cause__!r}"
    assert "data_source" in str(raised.value)


def test_client_that_reads_nothing_does_not_keep_rows_locked(scene, store, monkeypatch):
    """A leader that is frozen while its mark's rows come in loses its session; its successor's mark need not wait."""
    monkeypatch.setattr(sessions_module, "_UNREAD_SECONDS", 1.0)
    scene.execute(
        "INSERT INTO outbox (create_time, kafka_topic, kafka_value, kafka_header_keys, kafka_header_values) "
        "SELECT now(), 't', repeat('x', 1000000)::bytea, '{}', '{}' FROM generate_series(1, 40)"
    )
    frozen = PostgresStore(scene.database)
    frozen.check()
    connection = frozen._connection.pgconn
    connection.send_query_params(b"UPDATE public.outbox SET leader_id = gen_random_uuid() RETURNING kafka_value", [])
    connection.flush()
    locked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'ClientWrite'"
    wait_until(lambda: scene.execute(locked)[0].count, "its mark fills the socket", timeout=20)
    with ThreadPoolExecutor() as pool:
        mark = pool.submit(store.mark, uuid4(), 10)
        try:
            assert mark.result(15).selected == 10
        finally:
            frozen.close()
