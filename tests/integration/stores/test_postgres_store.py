"""Rules of the PostgreSQL store beyond the contract: plans, sessions, and unfit tables and roles."""

import json
import logging
import random
import string
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from uuid import uuid4

import psycopg
import pytest

from outbox_core.errors import OutboxTableError, RightsMissing, StoreUnavailable
from outbox_core.schema import TableName, create_table_sql
from outbox_core.stores.interface import Floor, HoldSet, RowId, RowQuery
from outbox_core.stores.postgres import connection as sessions_module
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres import store as store_module
from outbox_core.stores.postgres.store import PostgresStore, mark_parts, scan_parts
from tests.harvesting import Scene, wait_until


@pytest.fixture
def scene(database):
    """A fresh outbox of the binary layout."""
    return Scene(database, "")


@pytest.fixture
def store(scene):
    """A store on that outbox."""
    store = PostgresStore(scene.database)
    store.check()
    yield store
    store.close()


def _nodes(plan):
    yield plan
    for child in plan.get("Plans", ()):
        yield from _nodes(child)


def _plan(store, statement, parameters):
    """Return the nodes of the plan that a store's own session would use."""
    store.is_empty()  # connects
    (found,) = store.table.connection.execute(f"EXPLAIN (FORMAT JSON) {statement}", parameters).fetchone()
    plans = found if isinstance(found, list) else json.loads(found)
    return list(_nodes(plans[0]["Plan"]))


@pytest.mark.parametrize("statistics", ["empty", "full", "never"])
@pytest.mark.parametrize("by_address", [True, False])
def test_statements_walk_the_primary_key(scene, store, statistics, by_address):
    """Whatever the planner's statistics are, rows are found by index or address, never by sequential scan or sort."""
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
    table, layout = store.table, store.table.layout()
    plain = RowQuery(100, after=Floor(10, store.sequence.snapshot().place))
    excluding = plain._replace(
        without_keys=[("t", f"k{n}") for n in range(5)],
        without_rows=[RowId(number, 0) for number in (1, 2, 3, 7)],
        holds=HoldSet(frozenset({"other"}), frozenset({("t", "k6")}), frozenset({9})),
    )
    statements = {
        "delete_published": (table.format(sql.DELETE_PUBLISHED), {"ids": "{1,2,3}", "create_times": "{1,2,3}"}),
        "purge": (table.format(sql.PURGE), {"leader_id": me, "ids": "{1,2,3}", "create_times": "{1,2,3}"}),
        "reset": (table.format(sql.RESET), {"leader_id": me, "ids": "{1,2,3}"}),
    }
    for name, query in {"": plain, "_excluding": excluding}.items():
        parameters = {"leader_id": me, **store._parameters(query)}
        statements[f"mark{name}"] = table.format(sql.MARK, **mark_parts(layout, table.quoted, query)), parameters
        statements[f"scan{name}"] = table.format(sql.SCAN, **scan_parts(layout, query)), parameters
    for name, (statement, parameters) in statements.items():
        nodes = _plan(store, statement, parameters)
        assert not {"Seq Scan", "Sort", "Bitmap Heap Scan"} & {node["Node Type"] for node in nodes}, name
        assert "outbox_pkey" in {node.get("Index Name") for node in nodes}, name
        if name.startswith(("mark", "scan")):
            assert "(id >= " in "".join(node.get("Index Cond", "") for node in nodes), f"{name}: the floor is a filter"
        if name.startswith("mark") and by_address:
            assert "Tid Scan" in {node["Node Type"] for node in nodes}


def test_headers_are_read_however_small_they_are_compressed(scene, store):
    """Header arrays in a row that the server compresses take fewer bytes than any others, and are read all the same."""
    key = "".join(random.Random(3).choices(string.ascii_letters, k=1985))
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
        f"SELECT 't', '{key}', 'v', array_agg('h' || n), array_fill(''::bytea, ARRAY[17])"
        " FROM generate_series(1, 17) AS n"
    )
    (row,) = scene.execute("SELECT pg_column_size(kafka_header_values) AS size FROM outbox")
    assert row.size < 24, "the case is not met"
    for (record,) in (store.scan(RowQuery(10)), store.mark(uuid4(), RowQuery(10)).records):
        assert record.header_keys == [f"h{n}" for n in range(1, 18)]
        assert record.header_values == [b""] * 17


def test_headers_that_take_more_memory_than_a_message_may_have_bytes_are_read(scene):
    """A row whose size in memory is beyond the limit of messages, and whose message is not, is read as it is."""
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_value, kafka_header_keys, kafka_header_values) "
        "SELECT 't', 'v', array_agg('h' || n), array_agg('v'::bytea) FROM generate_series(1, 20) AS n"
    )
    with closing(PostgresStore(scene.database, max_message_bytes=1000)) as store:
        for (record,) in (store.scan(RowQuery(10)), store.mark(uuid4(), RowQuery(10)).records):
            assert (record.value, len(record.header_keys), len(record.header_values)) == (b"v", 20, 20)


def test_large_messages_are_measured_once():
    """No column of a mark or scan measures a message again, which would decompress its headers each time."""
    for statement in (sql.MARK, sql.SCAN):
        assert "array_send" not in statement.partition("RETURNING")[2]
        assert statement.count(sql.CONTENT) == 1


def test_lasting_errors_of_marks_are_told_after_an_idle_time(scene, store):
    """A mark that fails for good says so at its second failure, although the table could be read in between."""
    assert store.mark(uuid4(), RowQuery(10)).records == []
    scene.execute(
        "CREATE FUNCTION breaks() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN PERFORM missing(); RETURN NEW; END'"
    )
    scene.execute("CREATE TRIGGER breaks BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION breaks()")
    scene.fill("t", 1)
    with pytest.raises(StoreUnavailable, match="missing"):
        store.mark(uuid4(), RowQuery(10))
    with pytest.raises(OutboxTableError, match="missing"):
        store.mark(uuid4(), RowQuery(10))


def test_plans_stay_when_the_table_grows_under_a_prepared_statement(scene, store):
    """Statements that were prepared on an empty table still use the index once the table has filled up."""
    me = uuid4()
    for _ in range(10):
        store.mark(me, RowQuery(100))
    scene.fill("t", 20_000)
    assert [record[0] for record in store.mark(me, RowQuery(100)).records] == list(range(1, 101))
    store.table.connection.execute("SELECT pg_stat_force_next_flush()")
    store.table.connection.execute("SELECT 1")
    (read,) = scene.execute("SELECT seq_tup_read, idx_tup_fetch FROM pg_stat_user_tables WHERE relname = 'outbox'")
    assert read.seq_tup_read == 0
    assert 0 < read.idx_tup_fetch < 5000


def test_sessions_of_the_store(scene, store):
    """Sessions commit durably whatever the database's default is, and have the given application name."""
    scene.execute(
        "DO $$ BEGIN EXECUTE format('ALTER DATABASE %I SET synchronous_commit = off', current_database()); END $$"
    )
    store.close()
    store = PostgresStore(scene.database, application_name="kafka-outbox test")
    store.is_empty()
    (setting,) = store.table.connection.execute("SHOW synchronous_commit").fetchone()
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
        assert len(store.mark(me, RowQuery(10, without_keys={("x", "y")})).records) == 1
        assert store.reset(me, [1]) == 1
        (record,) = store.mark(me, RowQuery(10)).records
        assert store.backlog().pending == 1
        assert store.purge(me, [1], [record.create_time]) == 1
        assert store.is_empty()
        store.close()


def test_without_check_the_first_mark_looks_at_the_table(scene):
    """A store whose table was not checked works."""
    scene.fill("t", 3)
    store = PostgresStore(scene.database)
    assert len(store.mark(uuid4(), RowQuery(10)).records) == 3
    store.close()


def test_warns_of_a_sequence_that_caches(scene, store, caplog):
    """The check warns of a sequence that caches ids, because sessions then draw them out of order."""
    assert not caplog.records
    scene.execute("ALTER TABLE outbox ALTER id SET CACHE 20")
    with caplog.at_level(logging.WARNING):
        store.check()
    assert "CACHE 20" in caplog.text


def test_large_backlog_is_estimated(scene, store, monkeypatch):
    """Beyond the bound of the count the backlog follows from the ids, if statistics allow that many rows."""
    monkeypatch.setattr(store_module, "_BACKLOG_COUNT_BOUND", 100)
    store = PostgresStore(scene.database)
    scene.fill("t", 500)
    assert store.backlog().pending == 100
    scene.execute("ANALYZE outbox")
    assert store.backlog().pending == 500
    scene.execute("DELETE FROM outbox WHERE id <= 200")
    assert store.backlog().pending == 300, "the statistics are old, and the ids are not"
    scene.execute("ANALYZE outbox; UPDATE outbox SET id = 1 WHERE id = 201")
    assert store.backlog().pending == 300, "one old row does not stand for all ids since"
    scene.hold("add", "t")
    found = store.backlog()
    assert (found.deliverable.number, found.held.number) == (0, 300)
    scene.fill("u", 50)
    assert store.backlog().deliverable.number == 50
    store.close()


def test_missing_right_on_the_schema(scene, topic_name):
    """A role without rights on the schema gets an error that names the missing rights."""
    role = topic_name("role")
    scene.execute(f'CREATE ROLE "{role}" LOGIN')
    scene.execute("CREATE SCHEMA hidden")
    scene.execute(create_table_sql(TableName("outbox", "hidden")))
    store = PostgresStore(psycopg.conninfo.make_conninfo(scene.database, user=role), "hidden.outbox")
    try:
        with pytest.raises(RightsMissing, match=r"rights on hidden\.outbox"):
            store.check()
    finally:
        store.close()
        scene.execute(f'DROP ROLE "{role}"')


def test_right_that_is_revoked_leaves_in_doubt_what_was_concluded(scene):
    """A statement that is refused for want of a right gives the connection up: the next may lead to another server."""
    with scene.role("GRANT ALL ON outbox, outbox_hold TO {role}") as role:
        store = PostgresStore(psycopg.conninfo.make_conninfo(scene.database, user=role))
        store.check()
        for table, refused in (("outbox_hold", store.holds.release_gone), ("outbox", store.is_empty)):
            scene.execute(f'REVOKE ALL ON {table} FROM "{role}"')
            with pytest.raises(RightsMissing, match=table) as raised:
                refused()
            assert raised.value.in_doubt
        store.close()


def test_deadlock_is_an_outage(scene, store):
    """An error of the database's own (a deadlock, a cancelled statement) is an outage, and the next call works."""
    scene.fill("t", 3)
    store.is_empty()
    pid = store.table.connection.info.backend_pid
    with psycopg.connect(scene.database) as other:
        other.execute("SET deadlock_timeout = '60s'")
        other.execute("LOCK TABLE outbox")
        store.table.connection.execute("SET lock_timeout = '100ms'")
        with pytest.raises(StoreUnavailable, match="lock"):
            store.mark(uuid4(), RowQuery(10))
    assert len(store.mark(uuid4(), RowQuery(10)).records) == 3
    assert store.table.connection.info.backend_pid != pid


def test_errors_hide_the_password(database):
    """The error for an unreachable database names the address, without the password."""
    dsn = psycopg.conninfo.make_conninfo(database, password="hunter2", port=1)
    with pytest.raises(StoreUnavailable) as raised:
        PostgresStore(dsn).check()
    assert "hunter2" not in f"{raised.value!r} {raised.value.__cause__!r}"
    assert "port 1 failed" in str(raised.value)


def test_client_that_reads_nothing_does_not_keep_rows_locked(scene, store, monkeypatch):
    """A leader that stops reading its mark's rows loses its session, so that its successor's mark can go on."""
    monkeypatch.setattr(sessions_module, "_UNREAD_SECONDS", 1.0)
    scene.execute(
        "INSERT INTO outbox (create_time, kafka_topic, kafka_value, kafka_header_keys, kafka_header_values) "
        "SELECT now(), 't', repeat('x', 1000000)::bytea, '{}', '{}' FROM generate_series(1, 40)"
    )
    frozen = PostgresStore(scene.database)
    frozen.check()
    connection = frozen.table.connection.pgconn
    connection.send_query_params(b"UPDATE public.outbox SET leader_id = gen_random_uuid() RETURNING kafka_value", [])
    connection.flush()
    locked = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event = 'ClientWrite'"
    wait_until(lambda: scene.execute(locked)[0].count, "its mark fills the socket", timeout=20)
    with ThreadPoolExecutor() as pool:
        mark = pool.submit(store.mark, uuid4(), RowQuery(10))
        try:
            assert mark.result(15).selected == 10
        finally:
            frozen.close()


def test_table_in_a_schema_that_the_role_may_not_use(scene):
    """PostgreSQL skips such a schema on the search path: the error names it and the right, instead of a new table."""
    for table in ("outbox", "outbox_hold"):
        scene.execute(f"CREATE SCHEMA IF NOT EXISTS billing; ALTER TABLE {table} SET SCHEMA billing")
    with scene.role("GRANT ALL ON ALL TABLES IN SCHEMA billing TO {role}") as role:
        scene.execute(f'ALTER ROLE "{role}" SET search_path = billing, public')
        with closing(PostgresStore(psycopg.conninfo.make_conninfo(scene.database, user=role))) as store:
            grant = f'GRANT USAGE ON SCHEMA "billing" TO "{role}"'
            with pytest.raises(OutboxTableError, match='schema "billing" has such a table') as raised:
                store.check()
            assert grant in str(raised.value)
            scene.execute(grant)
            assert store.check().endswith(".billing.outbox")


def test_what_belongs_to_a_table_that_is_not_seen_is_not_known(scene):
    """A store that first connects while its role may not use the schema takes the table's holds and ids for unknown.

    Or what is held would be published once the right is back.
    """
    scene.hold("add", "t")
    everything = "; ".join(f"GRANT ALL ON ALL {each} IN SCHEMA public TO {{role}}" for each in ("TABLES", "SEQUENCES"))
    with scene.role(everything) as role:
        scene.execute("REVOKE USAGE ON SCHEMA public FROM PUBLIC")
        with closing(PostgresStore(psycopg.conninfo.make_conninfo(scene.database, user=role))) as store:
            for question in (store.holds.read, store.sequence.snapshot):
                with pytest.raises(OutboxTableError, match=r"outbox.*is not found"):
                    question()
            scene.execute("GRANT USAGE ON SCHEMA public TO PUBLIC")
            assert list(store.holds.read().topics) == ["t"]
            assert not store.sequence.snapshot().unusable
