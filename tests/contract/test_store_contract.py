"""What every `OutboxStore` must do; a new store is added to `_STORES`."""

import threading
import time
from uuid import uuid4

import psycopg
import pytest

from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.ports import NO_FLOOR, Floor
from outbox_core.schema import TableName, create_table_sql, drop_checks_sql
from outbox_core.stores.postgres import PostgresStore
from tests.harvesting import GENEROUS_SECONDS, Scene, wait_until

_PARTITIONED = create_table_sql(TableName("outbox")).partition("WITH (")[0] + " PARTITION BY HASH (id)"
_STORES = {
    "postgres binary": [create_table_sql(TableName("outbox"))],
    "postgres text": [create_table_sql(TableName("outbox"), "text")],
    "postgres partitioned": [
        _PARTITIONED,
        *(f"CREATE TABLE outbox_{n} PARTITION OF outbox FOR VALUES WITH (MODULUS 3, REMAINDER {n})" for n in range(3)),
    ],
}
OURS, THEIRS = uuid4(), uuid4()


@pytest.fixture(params=_STORES)
def scene(request, database):
    """An outbox of each kind."""
    scene = Scene(database, "", layout=None)
    for statement in _STORES[request.param]:
        scene.execute(statement)
    scene.text = request.param.endswith("text")
    return scene


@pytest.fixture
def store(scene):
    """A store on it."""
    store = PostgresStore(scene.database)
    store.check()
    yield store
    store.close()


def put(scene, *rows):
    """Write rows of (topic, key) or (topic, key, value)."""
    kind = "text" if scene.text else "bytea"
    for topic, key, *value in rows:
        scene.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
            f" kafka_header_values) VALUES (now(), %s, %s, %s::{kind}, '{{}}', '{{}}')",
            [topic, key, value[0] if value else None],
        )


def ids(batch):
    """The ids of a batch, which must be whole."""
    assert batch.selected == len(batch.records)
    return [record[0] for record in batch.records]


def marks(scene):
    """The rows' marks by id."""
    return {row.id: row.leader_id for row in scene.rows()}


def test_check_names_the_outbox(scene, store):
    """The identity is database, schema and table."""
    name = scene.execute("SELECT current_database() AS name")[0].name
    assert store.check() == f"{name}.public.outbox"


def test_find_reads_rows_by_id(scene, store):
    """In the order of their ids, whoever marked them, as a scan shows them; ids that are not there are left out."""
    scene.fill("t", 5)
    scanned = {record[0]: record for record in store.scan(10, ())}
    store.mark(uuid4(), 2)
    assert [tuple(record) for record in store.find([4, 99, 2])] == [tuple(scanned[2][:8]), tuple(scanned[4][:8])]
    fresh = PostgresStore(scene.database)
    assert [record[0] for record in fresh.find([1])] == [1], "on a connection that has read nothing yet"
    fresh.close()


def test_server_has_an_id(scene, store):
    """The server's ID is a number that every store on the server reads alike."""
    other = PostgresStore(scene.database)
    assert store.server_id().isdecimal()
    assert store.server_id() == other.server_id()
    other.close()


def test_server_id_may_be_withheld(scene):
    """Where the server does not let its ID be read it is ''."""
    function = "FUNCTION pg_catalog.pg_control_system()"
    role = f"reader_{uuid4().hex[:8]}"
    scene.execute(f'REVOKE EXECUTE ON {function} FROM PUBLIC; CREATE ROLE "{role}"')
    withheld = PostgresStore(psycopg.conninfo.make_conninfo(scene.database, options=f"-c role={role}"))
    try:
        assert withheld.server_id() == ""
    finally:
        scene.execute(f'GRANT EXECUTE ON {function} TO PUBLIC; DROP ROLE "{role}"')
        withheld.close()


def test_mark_takes_the_earliest_rows(scene, store):
    """A mark returns the first rows by id, in order, up to the limit, each once, and writes the leader's ID on them."""
    put(scene, *(("t", str(n)) for n in range(10)))
    assert ids(store.mark(OURS, 4)) == [1, 2, 3, 4]
    assert list(marks(scene).values()) == [OURS] * 4 + [None] * 6
    assert ids(store.mark(OURS, 100)) == [5, 6, 7, 8, 9, 10]
    assert ids(store.mark(OURS, 100)) == []


def test_marks_are_counted(scene, store):
    """How many rows carry a harvester's mark, and where; of none there is nothing to tell."""
    put(scene, *(("t", str(n)) for n in range(5)))
    assert store.marked() == (0, 0, 0)
    store.mark(OURS, 3, {("t", "0")})
    assert store.marked() == (3, 2, 4)


def test_batches_are_limited_by_bytes(scene, store):
    """Marks and scans end behind the row that fills the limit, from the first one on; one large row always fits."""
    put(scene, *(("t", str(n), "x" * 9_000) for n in range(5)), *(("t", str(n), "x") for n in range(5)))
    assert [record[0] for record in store.scan(100, (), max_bytes=22_500)] == [1, 2, 3]
    assert [record[0] for record in store.scan(100, {1, 2, 3}, max_bytes=1)] == [4]
    assert ids(store.mark(OURS, 100, max_bytes=1)) == [1]
    assert ids(store.mark(OURS, 100, max_bytes=13_500)) == [2, 3]
    assert ids(store.mark(OURS, 100, {("t", "3")}, max_bytes=13_500)) == [5, 6, 7, 8, 10]
    assert list(marks(scene).values()) == [OURS] * 3 + [None] + [OURS] * 4 + [None] + [OURS]


def test_statement_that_takes_too_long(scene):
    """A statement that waits for a lock is given up after the timeout; the store can be used again."""
    put(scene, ("t", "k"))
    hasty = PostgresStore(scene.database, statement_timeout=0.2)
    with psycopg.connect(scene.database) as other:
        other.execute("SELECT FROM outbox FOR UPDATE")
        with pytest.raises(StoreUnavailable, match="timeout"):
            hasty.mark(OURS, 10)
        other.rollback()
    assert ids(hasty.mark(OURS, 10)) == [1]
    hasty.close()


def test_timeout_spares_what_reads_the_whole_table(scene):
    """Counting and clearing all marks may take their time; the timeout is back afterwards."""
    put(scene, ("t", "k"))
    hasty = PostgresStore(scene.database, statement_timeout=0.2)
    hasty.mark(OURS, 10)
    with psycopg.connect(scene.database) as other:
        other.execute("SELECT FROM outbox FOR UPDATE")
        release = threading.Timer(0.6, other.rollback)
        release.start()
        assert hasty.clear_marks() == 1
        release.join()
        assert hasty.marked().number == 0
        other.execute("SELECT FROM outbox FOR UPDATE")
        with pytest.raises(StoreUnavailable, match="timeout"):
            hasty.mark(OURS, 10)
    hasty.close()


def test_statement_that_needs_more_time_gets_it(scene, caplog):
    """A mark or scan that timed out may take twice as long the next time, until one succeeds; that is said once."""
    put(scene, ("t", "k"))
    hasty = PostgresStore(scene.database, statement_timeout=0.3)
    took = []
    with psycopg.connect(scene.database) as other:
        other.execute("LOCK TABLE outbox")
        for call in (lambda: hasty.mark(OURS, 10), lambda: hasty.scan(10, ()), lambda: hasty.mark(OURS, 10)):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="timeout"):
                call()
            took.append(time.monotonic() - began)
        other.rollback()
    assert all(seconds >= 0.3 * 2**attempt for attempt, seconds in enumerate(took)), took
    assert ids(hasty.mark(OURS, 10)) == [1]
    assert sum("takes longer than statementTimeout" in record.message for record in caplog.records) == 1
    with psycopg.connect(scene.database) as other:
        other.execute("LOCK TABLE outbox")
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="timeout"):
            hasty.scan(10, ())
        assert time.monotonic() - began < 0.6, "it has its old patience back"
        other.rollback()
    hasty.close()


def test_cancelled_statement_is_no_timeout(scene):
    """Who cancels a statement does not want it to take longer."""
    put(scene, ("t", "k"))
    patient = PostgresStore(scene.database, statement_timeout=30.0)
    patient.mark(OURS, 1)
    pid = patient._connection.info.backend_pid
    with psycopg.connect(scene.database) as other:
        other.execute("LOCK TABLE outbox")
        cancel = threading.Timer(0.3, scene.execute, ["SELECT pg_cancel_backend(%s)", [pid]])
        cancel.start()
        with pytest.raises(StoreUnavailable, match="cancel"):
            patient.mark(THEIRS, 10)
        other.rollback()
    assert patient._reading_timeout == 30.0
    patient.close()


def test_mark_returns_whole_records(scene, store):
    """A record comes with id, topic, key, value, headers and partition; -1 is no partition, None is no headers."""
    put(scene, ("t", "k", "value"), ("u", "\u00e9\u4e2d"))
    value = "ARRAY['x', NULL]" if scene.text else "ARRAY['x'::bytea, NULL]"
    scene.execute(f"UPDATE outbox SET kafka_header_keys = ARRAY['a', 'a'], kafka_header_values = {value} WHERE id = 1")
    first, second = (tuple(record[:7]) for record in store.mark(OURS, 10).records)
    text = str if scene.text else str.encode
    assert first == (1, "t", "k", text("value"), ["a", "a"], [text("x"), None], -1)
    assert second == (2, "u", "\u00e9\u4e2d", None, None, None, -1)
    if not scene.text:
        scene.execute("UPDATE outbox SET kafka_partition = id")
        assert [record[6] for record in store.mark(THEIRS, 10).records] == [1, 2]


def test_mark_finds_a_late_commit_below(scene, store):
    """Rows of open transactions are invisible, and found once they are committed, below what was marked before."""
    with psycopg.connect(scene.database) as late:
        late.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
            " VALUES (now(), 't', 'late', '{}', '{}')"
        )
        put(scene, ("t", "a"))
        assert ids(store.mark(OURS, 10)) == [2]
        assert not store.is_empty()
        late.commit()
    assert ids(store.mark(OURS, 10)) == [1]


def test_mark_leaves_lanes_out(scene, store):
    """Excluded lanes are passed over, others of the same topic or the same key are not, nor are records without key."""
    put(scene, ("t", "hot"), ("t", "x"), ("u", "hot"), ("t", "hot"), ("t", "a/b"), ("t", "%s"), ("t", ""))
    if not scene.text:
        put(scene, ("t", None))
    excluding = {("t", "hot"), ("t", "%s"), ("u", "x")}
    assert ids(store.mark(OURS, 10, excluding)) == [2, 3, 5, 7] + ([] if scene.text else [8])
    assert ids(store.mark(OURS, 10, {("t", "%s")})) == [1, 4]


def test_lanes_that_look_alike(scene, store):
    """Topic and key are compared one by one, however they would read together."""
    put(scene, ("a", "b/c"), ("a", "b"), ("a", '"b'), ("a", "{b,c}"), ("a", "NULL"))
    assert ids(store.mark(OURS, 10, {("a", "b"), ("a", '"b'), ("a", "{b,c}"), ("a", "NULL")})) == [1]


def test_another_leader_takes_all(scene, store):
    """A leader finds the rows of another one like any other rows; nothing distinguishes a recovery."""
    put(scene, *(("t", str(n)) for n in range(5)))
    store.mark(THEIRS, 3)
    assert ids(store.mark(OURS, 10)) == [1, 2, 3, 4, 5]
    assert set(marks(scene).values()) == {OURS}


def test_purge_deletes_own_rows_only(scene, store):
    """A purge deletes what carries the leader's ID, says how much that was, and leaves the rest."""
    put(scene, *(("t", str(n)) for n in range(6)))
    store.mark(OURS, 4)
    store.mark(THEIRS, 2)
    assert store.purge(OURS, [1, 2, 3, 5, 99]) == 1
    assert marks(scene) == {1: THEIRS, 2: THEIRS, 4: OURS, 5: None, 6: None}
    assert store.purge(OURS, [3]) == 0
    assert store.purge(OURS, []) == 0


def test_reset_clears_own_marks_only(scene, store):
    """A reset clears marks of the leader's ID, says how many, and its rows are found again."""
    put(scene, *(("t", str(n)) for n in range(5)))
    store.mark(OURS, 4)
    store.mark(THEIRS, 1)
    assert store.reset(OURS, [1, 2, 3, 5, 99]) == 2
    assert marks(scene) == {1: THEIRS, 2: None, 3: None, 4: OURS, 5: None}
    assert ids(store.mark(OURS, 10)) == [1, 2, 3, 5]


def test_row_that_another_leader_is_just_marking(scene, store):
    """A mark that meets another one waits for it, and then either has the row or admits that it is one short."""
    put(scene, *(("t", "k") for _ in range(3)))
    batches = []
    with psycopg.connect(scene.database) as other:
        other.execute("UPDATE outbox SET leader_id = %s WHERE id = 2", [THEIRS])
        marking = threading.Thread(target=lambda: batches.append(store.mark(OURS, 10)))
        marking.start()
        time.sleep(0.3)
        assert not batches, "it did not wait"
        other.commit()
    marking.join()
    (batch,) = batches
    marked = [record[0] for record in batch.records]
    assert batch.selected == 3
    assert marked in ([1, 2, 3], [1, 3])
    assert {identity for identity, leader in marks(scene).items() if leader == OURS} == set(marked)


def test_row_that_is_just_being_deleted(scene, store):
    """A row that another leader purges in the meantime is not returned."""
    put(scene, *(("t", "k") for _ in range(3)))
    batches = []
    with psycopg.connect(scene.database) as other:
        other.execute("DELETE FROM outbox WHERE id = 1")
        marking = threading.Thread(target=lambda: batches.append(store.mark(OURS, 10)))
        marking.start()
        time.sleep(0.3)
        other.commit()
    marking.join()
    assert [record[0] for record in batches[0].records] == [2, 3]
    assert batches[0].selected == 3


def test_emptiness(scene, store):
    """A table is empty once nothing visible is in it, marked or not."""
    assert store.is_empty()
    put(scene, ("t", "k"))
    store.mark(OURS, 1)
    assert not store.is_empty()
    store.purge(OURS, [1])
    assert store.is_empty()


def test_backlog(scene, store):
    """The backlog counts all rows and tells the age of the first; nothing waits in an empty table."""
    assert store.backlog() == (0, 0.0)
    put(scene, *(("t", str(n)) for n in range(4)))
    store.mark(OURS, 2)
    scene.execute("UPDATE outbox SET create_time = now() - interval '1 minute' * (5 - id)")
    pending, age = store.backlog()
    assert pending == 4
    assert 240 <= age < 300
    scene.execute("UPDATE outbox SET create_time = now() + interval '1 minute'")
    assert store.backlog().oldest_age_seconds == 0.0


def _floor(store):
    """A floor at 2, where the store can tell how far ids are drawn."""
    sight = store.sight()
    if sight.unusable:
        pytest.skip(sight.unusable)
    return Floor(2, sight.place)


def _found(store, floor):
    """What a scan and a mark find above the floor."""
    scanned = [record[0] for record in store.scan(10, (), (), floor)]
    assert ids(store.mark(uuid4(), 10, (), (), floor)) == scanned
    return scanned


def test_mark_and_scan_begin_above_the_floor(scene, store):
    """Rows up to the floor are not looked at, with and without lanes that are left out."""
    put(scene, *(("t", str(n)) for n in range(1, 6)))
    floor = _floor(store)
    assert _found(store, floor) == [3, 4, 5]
    assert [record[0] for record in store.scan(10, [3], {("t", "4")}, floor)] == [5]
    assert ids(store.mark(OURS, 10, {("t", "4")}, [5], floor)) == [3]


def test_where_ids_prove_nothing(scene, store):
    """A store that cannot tell how far ids are drawn says why, and looks at every row whatever floor it is given."""
    put(scene, ("t", "1"), ("t", "2"), ("t", "3"))
    sight = store.sight()
    assert sight.unusable == "" or _found(store, Floor(2, sight.place)) == [1, 2, 3]


def test_no_floor_is_the_head(scene, store):
    """Without a floor every row is found, however low its id."""
    scene.execute(drop_checks_sql(TableName("outbox")))
    put(scene, ("t", "k"))
    scene.execute("UPDATE outbox SET id = -5")
    assert _found(store, NO_FLOOR) == [-5]


def test_floor_of_another_connection(scene, store):
    """A floor that was proven on a connection that is gone, or on another store's, is none."""
    put(scene, *(("t", str(n)) for n in range(1, 6)))
    floor = _floor(store)
    other = PostgresStore(scene.database)
    assert _found(other, floor) == [1, 2, 3, 4, 5]
    other.close()
    _end_sessions(scene)
    with pytest.raises(StoreUnavailable):
        store.scan(10, (), (), floor)
    assert _found(store, floor) == [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    "change",
    [
        "TRUNCATE outbox RESTART IDENTITY",
        "DELETE FROM outbox; ALTER SEQUENCE outbox_id_seq RESTART",
        "DELETE FROM outbox; SELECT setval('outbox_id_seq', 1, false)",
        "ALTER TABLE outbox RENAME TO old; CREATE TABLE outbox (LIKE old INCLUDING ALL)",
        "DROP TABLE outbox; {create}",
    ],
)
def test_floor_of_another_incarnation(scene, store, request, change):
    """Where ids begin anew, or the table is another one, the floor is none, in the very next statement."""
    put(scene, *(("t", str(n)) for n in range(1, 6)))
    floor = _floor(store)
    for statement in change.format(create=_STORES[request.node.callspec.params["scene"]][0]).split(";"):
        if statement.strip():
            scene.execute(statement)
    put(scene, ("t", "1"))
    assert len(_found(store, floor)) == 1
    assert store.sight().place != floor.place or store.sight().last_id < 5


def test_sight_of_ids(scene, store):
    """The last id is that of the sequence, committed or not; before the first one it is lower than any."""
    _floor(store)
    assert store.sight().last_id < 1
    put(scene, ("t", "1"), ("t", "2"))
    assert store.sight().last_id == 2
    with psycopg.connect(scene.database) as undone:
        undone.execute("SELECT nextval(pg_get_serial_sequence('outbox', 'id'))")
        undone.rollback()
    assert store.sight().last_id == 3


def test_sight_of_writers(scene, store):
    """A writer has one name, and pid and age, until its end; prepared it has a gid instead of the pid."""
    _floor(store)
    assert store.sight().writers == frozenset()
    gid = f"contract-{uuid4()}"
    with psycopg.connect(scene.database, application_name="shop") as writer:
        writer.execute("DELETE FROM outbox")
        (name,) = store.sight().writers
        (described,) = store.describe([name, "99/99"])
        assert described[:3] == (name, writer.info.backend_pid, None)
        assert described[4:] == ("shop", "idle in transaction")
        assert 0 <= described.age_seconds < GENEROUS_SECONDS
        writer.execute(f"PREPARE TRANSACTION '{gid}'")
    assert store.sight().writers == {name}
    (described,) = store.describe([name])
    assert described[:3] == (name, None, gid)
    scene.execute(f"COMMIT PREPARED '{gid}'")
    assert store.sight().writers == frozenset()
    assert store.describe([name]) == []


def _sessions(scene):
    """States of the stores' sessions."""
    rows = scene.execute(
        "SELECT state FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'kafka-outbox%'"
    )
    return [row.state for row in rows]


def _end_sessions(scene):
    scene.execute(
        "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name LIKE 'kafka-outbox%'"
    )


def test_lost_connection(scene, store):
    """A lost connection is told as such, with the outcome in doubt; the next call goes on over a new one."""
    put(scene, ("t", "k"))
    _end_sessions(scene)
    with pytest.raises(StoreUnavailable) as raised:
        store.mark(OURS, 10)
    assert raised.value.in_doubt
    assert "\n" not in str(raised.value)
    assert ids(store.mark(OURS, 10)) == [1]


def test_connection_lost_in_the_middle(scene, store):
    """A mark whose connection dies while it waits has marked nothing here, but could have: that is in doubt."""
    put(scene, ("t", "k"))
    errors = []

    def mark():
        try:
            store.mark(OURS, 10)
        except StoreUnavailable as error:
            errors.append(error)

    with psycopg.connect(scene.database) as other:
        other.execute("LOCK TABLE outbox")
        marking = threading.Thread(target=mark)
        marking.start()
        waiting = (
            "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        )
        wait_until(lambda: scene.execute(waiting)[0].count == 1, "the mark waits")
        _end_sessions(scene)
    marking.join()
    assert [error.in_doubt for error in errors] == [True]
    assert marks(scene) == {1: None}
    assert ids(store.mark(OURS, 10)) == [1]


def test_no_connection(scene):
    """A database that cannot be reached is told so, and nothing is in doubt then."""
    dsn = psycopg.conninfo.make_conninfo(scene.database, dbname="no_such_database")
    with pytest.raises(StoreUnavailable) as raised:
        PostgresStore(dsn).check()
    assert not raised.value.in_doubt


def test_table_that_goes_away(scene, store):
    """A table that is dropped while in use is an error of the table, not an outage to wait for."""
    scene.execute("DROP TABLE outbox")
    with pytest.raises(OutboxTableError, match="outbox"):
        store.mark(OURS, 10)


def test_close_and_use_again(scene, store):
    """A closed store holds no session, and opens one when it is used again."""
    put(scene, ("t", "k"))
    store.mark(OURS, 10)
    store.close()
    store.close()
    wait_until(lambda: not _sessions(scene), "the session has ended")
    assert store.purge(OURS, [1]) == 1


def test_each_call_is_committed(scene, store):
    """What a call did is visible to others at once, and no transaction stays open that would hold up vacuum."""
    put(scene, ("t", "k"))
    store.mark(OURS, 10)
    assert marks(scene) == {1: OURS}
    assert _sessions(scene) == ["idle"]
