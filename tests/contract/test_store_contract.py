"""The contract of every `OutboxStore`: a new store is added to `_KINDS` with its DDL.

A test reaches the database in three ways: `store` and `make_store` for the store, `scene.execute` for statements, and
`session` for a raw connection of its own whose transaction the test ends.
"""

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple
from uuid import uuid4

import psycopg
import pytest

from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.schema import TableName, create_hold_sql, create_table_sql, drop_checks_sql
from outbox_core.stores.interface import NO_FLOOR, Backlog, Floor, HoldSet, OutboxStore, RowId, RowQuery, row_id
from outbox_core.stores.postgres.store import PostgresStore
from tests.contract.accept_contract import wait_for_a_blocked_session
from tests.harvesting import GENEROUS_SECONDS, Scene, wait_until

_PARTITIONED = create_table_sql(TableName("outbox")).partition("WITH (")[0] + " PARTITION BY HASH (id)"
_PARTITIONS = [
    f"CREATE TABLE outbox_{n} PARTITION OF outbox FOR VALUES WITH (MODULUS 3, REMAINDER {n})" for n in range(3)
]


class Kind(NamedTuple):
    """A kind of outbox: its DDL, its store as a function of data source and options, and a raw connection to it."""

    ddl: list[str]
    is_text: bool = False
    store: Callable[..., OutboxStore] = PostgresStore
    connect: Callable[..., Any] = psycopg.connect


_KINDS = {
    "postgres binary": Kind([create_table_sql(TableName("outbox"))]),
    "postgres text": Kind([create_table_sql(TableName("outbox"), "text")], is_text=True),
    "postgres partitioned": Kind([_PARTITIONED, *_PARTITIONS]),
}
OURS, THEIRS = uuid4(), uuid4()


@pytest.fixture(params=_KINDS)
def kind(request):
    """Return each kind of outbox."""
    return _KINDS[request.param]


@pytest.fixture
def scene(kind, database):
    """Return an outbox of this kind."""
    scene = Scene(database, "", layout=None)
    for statement in kind.ddl:
        scene.execute(statement)
    scene.text = kind.is_text
    return scene


@pytest.fixture
def make_store(kind, scene):
    """Yield a function that makes stores on it, with options; all are closed at the end."""
    with ExitStack() as opened:

        def make(data_source=scene.database, **options):
            store = kind.store(data_source, **options)
            opened.callback(store.close)
            return store

        yield make


@pytest.fixture
def store(make_store):
    """Return a store on it that has checked the table."""
    store = make_store()
    store.check()
    return store


@pytest.fixture
def session(kind, scene):
    """Return a function that opens raw connections, as context managers that commit or roll back."""
    return partial(kind.connect, scene.database)


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
    """Return the ids of a batch, which must be whole."""
    assert batch.selected == len(batch.records)
    return [record[0] for record in batch.records]


def rows(store, *numbers):
    """Return the identities of the rows of these ids."""
    return [row_id(record) for record in store.find(numbers)]


def marks(scene):
    """Return the rows' marks by id."""
    return {row.id: row.leader_id for row in scene.rows()}


def test_check_names_the_outbox(scene, store):
    """The identity of an outbox is database, schema and table."""
    name = scene.execute("SELECT current_database() AS name")[0].name
    assert store.check() == f"{name}.public.outbox"


def test_find_reads_rows_by_id(scene, store, make_store):
    """`find` returns rows in the order of their ids, marked or not, as a scan shows them, and omits missing ids."""
    scene.fill("t", 5)
    scanned = {record[0]: record for record in store.scan(RowQuery(10))}
    store.mark(uuid4(), RowQuery(2))
    assert [tuple(record) for record in store.find([4, 99, 2])] == [tuple(scanned[2][:8]), tuple(scanned[4][:8])]
    fresh = make_store()
    assert [record[0] for record in fresh.find([1])] == [1], "on a connection that has read nothing yet"


def test_mark_and_scan_among_given_rows(scene, store):
    """A query of given rows returns those of them that are there, are not held, and are not marked by this leader."""
    scene.fill("t", 6)
    (one, two, four, five), me = rows(store, 1, 2, 4, 5), uuid4()
    store.mark(me, RowQuery(1))
    query = RowQuery(10, only_rows=[five, two, one, four._replace(create_time=4), RowId(99, 0)])
    assert ids(store.mark(me, query)) == [2, 5]
    assert [record.id for record in store.scan(query)] == [1, 2, 5]
    holds = HoldSet(lanes=frozenset({(record.topic, record.key) for record in store.find([2])}))
    assert [record.id for record in store.scan(query._replace(holds=holds))] == [1, 5]
    assert [record.id for record in store.scan(query._replace(limit=1))] == [1]
    assert ids(store.mark(uuid4(), query._replace(only_rows=()))) == []


def test_server_has_an_id(store, make_store):
    """The server's ID is a number that every store on the server reads alike."""
    other = make_store()
    assert store.server_id().isdecimal()
    assert store.server_id() == other.server_id()


def test_server_id_may_be_withheld(scene, make_store):
    """A store returns '' for a server's ID that it may not read."""
    function = "FUNCTION pg_catalog.pg_control_system()"
    role = f"reader_{uuid4().hex[:8]}"
    scene.execute(f'REVOKE EXECUTE ON {function} FROM PUBLIC; CREATE ROLE "{role}"')
    withheld = make_store(psycopg.conninfo.make_conninfo(scene.database, options=f"-c role={role}"))
    try:
        assert withheld.server_id() == ""
    finally:
        scene.execute(f'GRANT EXECUTE ON {function} TO PUBLIC; DROP ROLE "{role}"')
        withheld.close()


def test_mark_takes_the_earliest_rows(scene, store):
    """A mark returns the first rows by id, in order, up to the limit, each once, and writes the leader's ID on them."""
    put(scene, *(("t", str(n)) for n in range(10)))
    assert ids(store.mark(OURS, RowQuery(4))) == [1, 2, 3, 4]
    assert list(marks(scene).values()) == [OURS] * 4 + [None] * 6
    assert ids(store.mark(OURS, RowQuery(100))) == [5, 6, 7, 8, 9, 10]
    assert ids(store.mark(OURS, RowQuery(100))) == []


def test_marks_are_counted(scene, store):
    """A store counts the rows that carry a harvester's mark, with their first and last id."""
    put(scene, *(("t", str(n)) for n in range(5)))
    assert store.marks.count() == (0, 0, 0)
    store.mark(OURS, RowQuery(3, without_keys={("t", "0")}))
    assert store.marks.count() == (3, 2, 4)


def test_batches_are_limited_by_bytes(scene, store):
    """Marks and scans end behind the row that fills the limit, from the first one on; one large row always fits."""
    put(scene, *(("t", str(n), "x" * 9_000) for n in range(5)), *(("t", str(n), "x") for n in range(5)))
    assert [record[0] for record in store.scan(RowQuery(100, max_bytes=22_500))] == [1, 2, 3]
    assert [record[0] for record in store.scan(RowQuery(100, without_rows=rows(store, 1, 2, 3), max_bytes=1))] == [4]
    assert ids(store.mark(OURS, RowQuery(100, max_bytes=1))) == [1]
    assert ids(store.mark(OURS, RowQuery(100, max_bytes=13_500))) == [2, 3]
    assert ids(store.mark(OURS, RowQuery(100, without_keys={("t", "3")}, max_bytes=13_500))) == [5, 6, 7, 8, 10]
    assert list(marks(scene).values()) == [OURS] * 3 + [None] + [OURS] * 4 + [None] + [OURS]


def test_statement_that_takes_too_long(scene, make_store, session):
    """A statement that waits for a lock ends after the timeout; the store can be used again."""
    put(scene, ("t", "k"))
    hasty = make_store(statement_timeout=1.0)
    hasty.scan(RowQuery(1))  # looks at the table first
    with session() as other:
        other.execute("SELECT FROM outbox FOR UPDATE")
        with pytest.raises(StoreUnavailable, match="timeout"):
            hasty.mark(OURS, RowQuery(10))
        other.rollback()
    assert ids(hasty.mark(OURS, RowQuery(10))) == [1]


def test_a_plan_made_for_an_empty_table_serves_a_full_one(scene, make_store):
    """Statements that were planned while the table was empty are quick with a backlog, before anything analyzes it."""
    scene.execute("VACUUM ANALYZE outbox")  # which makes it known to be empty
    store = make_store(statement_timeout=5.0)
    query, number = RowQuery(2_000), 150_000
    store.mark(OURS, query)
    store.scan(query)
    for planned in range(6):
        store.purge(OURS, [planned + 1], [0])
        store.delete_published([planned + 1], [0])
        store.reset(OURS, [planned + 1])
    scene.execute(
        "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values)"
        f" SELECT now(), 't', 'k', 'v', '{{}}', '{{}}' FROM generate_series(1, {number})"
    )
    rows = store.scan(query)
    ids, times = [row.id for row in rows], [row.create_time for row in rows]
    assert store.delete_published(ids, times) == 2_000
    marked = store.mark(OURS, query).records
    ids, times = [row.id for row in marked], [row.create_time for row in marked]
    assert store.reset(OURS, ids[1_000:]) == 1_000
    assert store.purge(OURS, ids[:1_000], times[:1_000]) == 1_000


def test_timeout_spares_what_reads_the_whole_table(scene, make_store, session):
    """The timeout does not apply to counting and clearing all marks, and is back afterwards."""
    put(scene, ("t", "k"))
    hasty = make_store(statement_timeout=1.0)  # also for the first look at the table, on a machine that is busy
    hasty.mark(OURS, RowQuery(10))
    with session() as other:
        other.execute("SELECT FROM outbox FOR UPDATE")
        release = threading.Timer(1.8, other.rollback)
        release.start()
        assert hasty.marks.clear() == 1
        release.join()
        assert hasty.marks.count().number == 0
        other.execute("SELECT FROM outbox FOR UPDATE")
        with pytest.raises(StoreUnavailable, match="timeout"):
            hasty.mark(OURS, RowQuery(10))


def test_statement_that_needs_more_time_gets_it(scene, caplog, make_store, session):
    """A mark or scan that timed out may take twice as long the next time, until one succeeds; the log says so once."""
    put(scene, ("t", "k"))
    hasty = make_store(statement_timeout=0.3)
    took = []
    with session() as other:
        other.execute("LOCK TABLE outbox")
        for call in (
            lambda: hasty.mark(OURS, RowQuery(10)),
            lambda: hasty.scan(RowQuery(10)),
            lambda: hasty.mark(OURS, RowQuery(10)),
        ):
            began = time.monotonic()
            with pytest.raises(StoreUnavailable, match="timeout"):
                call()
            took.append(time.monotonic() - began)
        other.rollback()
    assert all(seconds >= 0.3 * 2**attempt for attempt, seconds in enumerate(took)), took
    assert ids(hasty.mark(OURS, RowQuery(10))) == [1]
    assert sum("takes longer than statementTimeout" in record.message for record in caplog.records) == 1
    with session() as other:
        other.execute("LOCK TABLE outbox")
        began = time.monotonic()
        with pytest.raises(StoreUnavailable, match="timeout"):
            hasty.scan(RowQuery(10))
        assert time.monotonic() - began < 2.0, "it has its old patience back, and not the last one of 2.4 s"
        other.rollback()


def test_cancelled_statement_is_no_timeout(scene, make_store, session):
    """A cancelled statement does not get more time, as a timed-out one does."""
    put(scene, ("t", "k"))
    patient = make_store(statement_timeout=30.0)
    patient.mark(OURS, RowQuery(1))
    pid = patient.table.connection.info.backend_pid
    with session() as other:
        other.execute("LOCK TABLE outbox")
        cancel = threading.Timer(0.3, scene.execute, ["SELECT pg_cancel_backend(%s)", [pid]])
        cancel.start()
        with pytest.raises(StoreUnavailable, match="cancel"):
            patient.mark(THEIRS, RowQuery(10))
        other.rollback()
    assert patient._reading_timeout == 30.0


def test_mark_returns_whole_records(scene, store):
    """A marked record has id, topic, key, value, headers and partition; -1 is no partition, None is no headers."""
    put(scene, ("t", "k", "value"), ("u", "\u00e9\u4e2d"))
    value = "ARRAY['x', NULL]" if scene.text else "ARRAY['x'::bytea, NULL]"
    scene.execute(f"UPDATE outbox SET kafka_header_keys = ARRAY['a', 'a'], kafka_header_values = {value} WHERE id = 1")
    first, second = (tuple(record[:7]) for record in store.mark(OURS, RowQuery(10)).records)
    text = str if scene.text else str.encode
    assert first == (1, "t", "k", text("value"), ["a", "a"], [text("x"), None], -1)
    assert second == (2, "u", "\u00e9\u4e2d", None, None, None, -1)
    if not scene.text:
        scene.execute("UPDATE outbox SET kafka_partition = id")
        assert [record[6] for record in store.mark(THEIRS, RowQuery(10)).records] == [1, 2]


def test_mark_finds_a_late_commit_below(scene, store, session):
    """A row that commits late, below marked ones, is found once it is committed."""
    with session() as late:
        late.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
            " VALUES (now(), 't', 'late', '{}', '{}')"
        )
        put(scene, ("t", "a"))
        assert ids(store.mark(OURS, RowQuery(10))) == [2]
        assert not store.is_empty()
        late.commit()
    assert ids(store.mark(OURS, RowQuery(10))) == [1]


def test_mark_leaves_lanes_out(scene, store):
    """A mark passes over excluded lanes, but not over others of the same topic or key, nor over records without key."""
    put(scene, ("t", "hot"), ("t", "x"), ("u", "hot"), ("t", "hot"), ("t", "a/b"), ("t", "%s"), ("t", ""))
    if not scene.text:
        put(scene, ("t", None))
    excluding = {("t", "hot"), ("t", "%s"), ("u", "x")}
    assert ids(store.mark(OURS, RowQuery(10, without_keys=excluding))) == [2, 3, 5, 7] + ([] if scene.text else [8])
    assert ids(store.mark(OURS, RowQuery(10, without_keys={("t", "%s")}))) == [1, 4]


def test_lanes_that_look_alike(scene, store):
    """Topic and key are compared one by one, even if they look alike when joined."""
    put(scene, ("a", "b/c"), ("a", "b"), ("a", '"b'), ("a", "{b,c}"), ("a", "NULL"))
    assert ids(
        store.mark(OURS, RowQuery(10, without_keys={("a", "b"), ("a", '"b'), ("a", "{b,c}"), ("a", "NULL")}))
    ) == [1]


def test_an_id_that_comes_back_is_another_row(scene, store):
    """After TRUNCATE ... RESTART IDENTITY a new row is neither left out, purged nor held for an old one of its id."""
    put(scene, ("t", "k"), ("t", "k"))
    old = [row_id(record) for record in store.mark(OURS, RowQuery(10)).records]
    assert old == rows(store, 1, 2), "marks tell the create times that scans do"
    query = RowQuery(10, without_rows=old, holds=HoldSet(ids=frozenset({1})))
    assert list(store.scan(query)) == []
    scene.execute("TRUNCATE outbox RESTART IDENTITY")
    put(scene, ("t", "k"), ("t", "k"), ("t", "k"))
    assert [record.id for record in store.scan(query)] == [1, 2, 3]
    assert ids(store.mark(OURS, query)) == [1, 2, 3]
    assert store.purge(OURS, [row.id for row in old], [row.create_time for row in old]) == 0
    assert list(marks(scene)) == [1, 2, 3]


def test_lost_rows_are_found(scene, store):
    """Rows that carry the leader's own mark are counted unless it knows them or leaves them out; others are not."""
    put(scene, *[("t", f"k{n}") for n in range(6)])
    scene.execute("UPDATE outbox SET leader_id = %s WHERE id <= 4", [OURS])
    scene.execute("UPDATE outbox SET leader_id = %s WHERE id = 6", [THEIRS])
    assert ids(store.mark(OURS, RowQuery(10))) == [5, 6]
    assert store.find_lost(OURS, {5, 6}, RowQuery(10)) == (4, 1, 4)
    assert store.find_lost(OURS, {1, 2, 5, 6}, RowQuery(10)) == (2, 3, 4)
    assert store.find_lost(OURS, {1, 2, 5, 6}, RowQuery(10, without_keys={("t", "k2")})) == (1, 4, 4)
    assert store.find_lost(OURS, set(), RowQuery(10, holds=HoldSet(topics=frozenset({"t"})))) == (0, 0, 0)
    assert store.find_lost(OURS, {1}, RowQuery(2)) == (2, 2, 3)
    assert store.find_lost(OURS, set(range(1, 7)), RowQuery(10)) == (0, 0, 0)
    assert store.find_lost(THEIRS, set(), RowQuery(10)) == (0, 0, 0)
    assert marks(scene) == dict.fromkeys(range(1, 7), OURS)


def test_another_leader_takes_all(scene, store):
    """A leader marks rows of another one like any other rows, without a recovery."""
    put(scene, *(("t", str(n)) for n in range(5)))
    store.mark(THEIRS, RowQuery(3))
    assert ids(store.mark(OURS, RowQuery(10))) == [1, 2, 3, 4, 5]
    assert set(marks(scene).values()) == {OURS}


def test_purge_deletes_own_rows_only(scene, store):
    """A purge deletes the rows that carry the leader's ID, returns their number, and leaves the others."""
    put(scene, *(("t", str(n)) for n in range(6)))
    store.mark(OURS, RowQuery(4))
    store.mark(THEIRS, RowQuery(2))
    times = {record.id: record.create_time for record in store.find([1, 2, 3, 5])} | {99: 0}
    assert store.purge(OURS, list(times), list(times.values())) == 1
    assert marks(scene) == {1: THEIRS, 2: THEIRS, 4: OURS, 5: None, 6: None}
    assert store.purge(OURS, [3], [times[3]]) == 0
    assert store.purge(OURS, [], []) == 0


def test_reset_clears_own_marks_only(scene, store):
    """A reset clears marks of the leader's ID and returns their number; a later mark finds the rows again."""
    put(scene, *(("t", str(n)) for n in range(5)))
    store.mark(OURS, RowQuery(4))
    store.mark(THEIRS, RowQuery(1))
    assert store.reset(OURS, [1, 2, 3, 5, 99]) == 2
    assert marks(scene) == {1: THEIRS, 2: None, 3: None, 4: OURS, 5: None}
    assert ids(store.mark(OURS, RowQuery(10))) == [1, 2, 3, 5]


def test_a_statement_that_the_database_is_at_work_on(scene, make_store, session):
    """Another connection of the same program sees it, and that it waits for a lock; not one that has just begun."""
    put(scene, ("t", "k"))
    names = ("ours", "ours", "theirs", "ours - 10.0.0.7:51234")
    marker, other, stranger, behind_a_pooler = (make_store(application_name=name) for name in names)
    marker.mark(OURS, RowQuery(1))
    assert other.at_work(0.0) == ""
    with session() as blocking:
        blocking.execute("LOCK TABLE outbox IN SHARE MODE")
        marking = threading.Thread(target=marker.mark, args=(THEIRS, RowQuery(10)))
        marking.start()
        wait_for_a_blocked_session(scene.database)
        assert other.at_work(60.0) == ""
        assert stranger.at_work(0.0) == ""
        assert other.at_work(0.0) == behind_a_pooler.at_work(0.0) == "has it wait for a lock"
        blocking.rollback()
    marking.join()
    assert other.at_work(0.0) == ""
    with psycopg.connect(scene.database, application_name="ours") as busy:
        answer = threading.Thread(target=busy.execute, args=("SELECT sum(i) FROM generate_series(1, 20000000) AS i",))
        answer.start()
        wait_until(lambda: other.at_work(0.1) == "is at work on it", "it is at work")
        answer.join()


@pytest.mark.parametrize("taken", [[2], [1, 2, 3]], ids=["one", "all"])
def test_rows_that_another_leader_is_just_marking(scene, store, session, taken):
    """A mark that meets another one waits for it, and then either has the rows or returns that it is short of them."""
    put(scene, *(("t", "k") for _ in range(3)))
    batches = []
    with session() as other:
        other.execute("UPDATE outbox SET leader_id = %s WHERE id = ANY (%s)", [THEIRS, taken])
        marking = threading.Thread(target=lambda: batches.append(store.mark(OURS, RowQuery(10))))
        marking.start()
        wait_for_a_blocked_session(scene.database)
        assert not batches, "it did not wait"
        other.commit()
    marking.join()
    (batch,) = batches
    marked = [record[0] for record in batch.records]
    assert batch.selected == 3
    assert marked in ([1, 2, 3], [identity for identity in (1, 2, 3) if identity not in taken])
    assert {identity for identity, leader in marks(scene).items() if leader == OURS} == set(marked)


def test_row_that_is_just_being_deleted(scene, store, session):
    """A row that another leader purges in the meantime is not returned."""
    put(scene, *(("t", "k") for _ in range(3)))
    batches = []
    with session() as other:
        other.execute("DELETE FROM outbox WHERE id = 1")
        marking = threading.Thread(target=lambda: batches.append(store.mark(OURS, RowQuery(10))))
        marking.start()
        wait_for_a_blocked_session(scene.database)
        other.commit()
    marking.join()
    assert [record[0] for record in batches[0].records] == [2, 3]
    assert batches[0].selected == 3


def test_emptiness(scene, store):
    """A table is empty if it has no visible row, marked or not."""
    assert store.is_empty()
    put(scene, ("t", "k"))
    (record,) = store.mark(OURS, RowQuery(1)).records
    assert not store.is_empty()
    store.purge(OURS, [1], [record.create_time])
    assert store.is_empty()


def test_backlog(scene, store):
    """The backlog is the number of all rows and the age of the first; an empty table has none."""
    assert store.backlog() == Backlog()
    put(scene, *(("t", str(n)) for n in range(4)))
    store.mark(OURS, RowQuery(2))
    scene.execute("UPDATE outbox SET create_time = now() - interval '1 minute' * (5 - id)")
    found = store.backlog()
    assert found.pending == found.deliverable.number == 4
    assert 240 <= found.oldest_age_seconds < 300
    scene.execute("UPDATE outbox SET create_time = now() + interval '1 minute'")
    assert store.backlog().oldest_age_seconds == 0.0


def test_backlog_tells_held_rows_from_others(scene, store):
    """Rows behind a hold, of a record with its key, of a key or of a topic, are counted apart, with their own age."""
    scene.execute(create_hold_sql(TableName("outbox")))
    put(scene, ("a", "k"), ("a", "k"), ("a", "l"), ("a", "m"), ("b", "k"), ("c", "x"), ("c", "y"))
    scene.execute("UPDATE outbox SET create_time = now() - interval '1 minute' * (8 - id)")
    scene.hold("add_record", 1)  # with its key, so the second row too
    scene.hold("add_record", 3)
    scene.hold("add", "b")
    scene.hold("add", "c", "y")
    deliverable, held = store.backlog()
    assert deliverable.topics == {"a": 1, "c": 1}
    assert held.topics == {"a": 3, "b": 1, "c": 1}
    assert (deliverable.number, held.number) == (2, 5)
    assert 240 <= deliverable.oldest_age_seconds < 300
    assert 420 <= held.oldest_age_seconds < 480


def _floor(store):
    """Return a floor at 2, if the store can read the last drawn id."""
    sight = store.sequence.snapshot()
    if sight.unusable:
        pytest.skip(sight.unusable)
    return Floor(2, sight.place)


def _found(store, floor):
    """Return the ids that a scan and a mark find above the floor."""
    scanned = [record[0] for record in store.scan(RowQuery(10, after=floor))]
    assert ids(store.mark(uuid4(), RowQuery(10, after=floor))) == scanned
    return scanned


def test_mark_and_scan_begin_above_the_floor(scene, store):
    """Marks and scans skip the rows up to the floor, with and without excluded lanes."""
    put(scene, *(("t", str(n)) for n in range(1, 6)))
    floor = _floor(store)
    assert _found(store, floor) == [3, 4, 5]
    assert [
        record[0]
        for record in store.scan(RowQuery(10, without_rows=rows(store, 3), without_keys={("t", "4")}, after=floor))
    ] == [5]
    query = RowQuery(10, without_keys={("t", "4")}, without_rows=rows(store, 5), after=floor)
    assert ids(store.mark(OURS, query)) == [3]


def test_where_ids_prove_nothing(scene, store):
    """A store whose ids prove nothing gives the reason, and finds every row with any floor."""
    put(scene, ("t", "1"), ("t", "2"), ("t", "3"))
    sight = store.sequence.snapshot()
    assert sight.unusable == "" or _found(store, Floor(2, sight.place)) == [1, 2, 3]


def test_no_floor_is_the_head(scene, store):
    """Without a floor every row is found, however low its id."""
    scene.execute(drop_checks_sql(TableName("outbox")))
    put(scene, ("t", "k"))
    scene.execute("UPDATE outbox SET id = -5")
    assert _found(store, NO_FLOOR) == [-5]


def test_floor_of_another_connection(scene, store, make_store):
    """A floor that was proven on a lost connection, or on another store's, is ignored."""
    put(scene, *(("t", str(n)) for n in range(1, 6)))
    floor = _floor(store)
    other = make_store()
    without = RowQuery(10, after=floor, without_rows=rows(store, 1, 4))
    assert [record.id for record in other.scan(without)] == [2, 3, 5], "also those up to the floor"
    assert _found(other, floor) == [1, 2, 3, 4, 5]
    _end_sessions(scene)
    with pytest.raises(StoreUnavailable):
        store.scan(RowQuery(10, after=floor))
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
def test_floor_of_another_incarnation(scene, store, kind, change):
    """A floor is ignored by the very next statement once ids begin anew or the table is another one."""
    put(scene, *(("t", str(n)) for n in range(1, 6)))
    floor = _floor(store)
    for statement in change.format(create=kind.ddl[0]).split(";"):
        if statement.strip():
            scene.execute(statement)
    put(scene, ("t", "1"))
    assert len(_found(store, floor)) == 1
    assert store.sequence.snapshot().place != floor.place or store.sequence.snapshot().last_id < 5


def test_sight_of_ids(scene, store, session):
    """The last id is that of the sequence, committed or not; before the first one it is lower than any."""
    _floor(store)
    assert store.sequence.snapshot().last_id < 1
    put(scene, ("t", "1"), ("t", "2"))
    assert store.sequence.snapshot().last_id == 2
    with session() as undone:
        undone.execute("SELECT nextval(pg_get_serial_sequence('outbox', 'id'))")
        undone.rollback()
    assert store.sequence.snapshot().last_id == 3


def test_sight_of_writers(scene, store, session):
    """A writer has one name, and pid and age, until its end; prepared it has a gid instead of the pid."""
    _floor(store)
    assert store.sequence.snapshot().writers == frozenset()
    gid = f"contract-{uuid4()}"
    with session(application_name="shop") as writer:
        writer.execute("DELETE FROM outbox")
        (name,) = store.sequence.snapshot().writers
        (described,) = store.sequence.describe([name, "99/99"])
        assert described[:3] == (name, writer.info.backend_pid, None)
        assert described[4:] == ("shop", "idle in transaction")
        assert 0 <= described.age_seconds < GENEROUS_SECONDS
        writer.execute(f"PREPARE TRANSACTION '{gid}'")
    assert store.sequence.snapshot().writers == {name}
    (described,) = store.sequence.describe([name])
    assert described[:3] == (name, None, gid)
    scene.execute(f"COMMIT PREPARED '{gid}'")
    assert store.sequence.snapshot().writers == frozenset()
    assert store.sequence.describe([name]) == []


def _sessions(scene):
    """Return the states of the stores' sessions."""
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
    """A lost connection is reported as one, with the outcome in doubt; the next call uses a new one."""
    put(scene, ("t", "k"))
    _end_sessions(scene)
    with pytest.raises(StoreUnavailable) as raised:
        store.mark(OURS, RowQuery(10))
    assert raised.value.in_doubt
    assert "\n" not in str(raised.value)
    assert ids(store.mark(OURS, RowQuery(10))) == [1]


def test_connection_lost_in_the_middle(scene, store, session):
    """A mark whose connection dies while it waits is in doubt: it may have marked rows."""
    put(scene, ("t", "k"))
    errors = []

    def mark():
        try:
            store.mark(OURS, RowQuery(10))
        except StoreUnavailable as error:
            errors.append(error)

    with session() as other:
        other.execute("LOCK TABLE outbox")
        marking = threading.Thread(target=mark)
        marking.start()
        wait_for_a_blocked_session(scene.database)
        _end_sessions(scene)
    marking.join()
    assert [error.in_doubt for error in errors] == [True]
    assert marks(scene) == {1: None}
    assert ids(store.mark(OURS, RowQuery(10))) == [1]


def test_no_connection(scene, make_store):
    """An unreachable database is reported as unavailable, and the outcome is not in doubt."""
    dsn = psycopg.conninfo.make_conninfo(scene.database, dbname="no_such_database")
    with pytest.raises(StoreUnavailable) as raised:
        make_store(dsn).check()
    assert not raised.value.in_doubt


def test_table_that_goes_away(scene, store):
    """A table that is dropped while in use is an error of the table, not an outage to wait for."""
    scene.execute("DROP TABLE outbox")
    with pytest.raises(OutboxTableError, match="outbox"):
        store.mark(OURS, RowQuery(10))


def test_close_and_use_again(scene, store):
    """A closed store holds no session, and opens one when it is used again."""
    put(scene, ("t", "k"))
    (record,) = store.mark(OURS, RowQuery(10)).records
    store.close()
    store.close()
    wait_until(lambda: not _sessions(scene), "the session has ended")
    assert store.purge(OURS, [1], [record.create_time]) == 1


def test_each_call_is_committed(scene, store):
    """The effect of a call is visible to others at once, and no transaction stays open that would hold up vacuum."""
    put(scene, ("t", "k"))
    store.mark(OURS, RowQuery(10))
    assert marks(scene) == {1: OURS}
    assert _sessions(scene) == ["idle"]
