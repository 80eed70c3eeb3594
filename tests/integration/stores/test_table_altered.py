"""The store on a table that is altered under it: partitions, heirs, times of another precision."""

from contextlib import closing
from uuid import uuid4

import pytest

from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.retention.archive import archive_statements
from outbox_core.schema import TableName
from outbox_core.stores.interface import RowQuery, ids_and_times
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import Scene

_PARTITIONED = """
ALTER TABLE outbox RENAME TO first;
ALTER TABLE first ALTER id DROP IDENTITY;
CREATE TABLE outbox (LIKE first INCLUDING DEFAULTS, PRIMARY KEY (id)) PARTITION BY RANGE (id);
ALTER TABLE outbox ATTACH PARTITION first FOR VALUES FROM (0) TO (51);
CREATE TABLE second PARTITION OF outbox FOR VALUES FROM (51) TO (1000)
"""
_ALTERED = {
    "partitioned": (_PARTITIONED, "outbox"),
    "inherited": ("CREATE TABLE heir (PRIMARY KEY (id)) INHERITS (outbox)", "heir"),
}
_INSERT = "INSERT INTO {} (id, kafka_topic, kafka_key) SELECT n, 't', 'k' || n FROM generate_series({}, {}) AS n"


@pytest.fixture
def scene(database):
    """A fresh outbox of the binary layout, with its holds."""
    return Scene(database, "", constrained=False)


@pytest.fixture
def store(scene):
    """A store on that outbox."""
    with closing(PostgresStore(scene.database)) as store:
        store.check()
        yield store


@pytest.mark.parametrize("how", _ALTERED)
@pytest.mark.parametrize("limit", [30, 100])
def test_marks_of_a_table_that_gets_parts(scene, store, how, limit):
    """A mark by addresses marks no row of a part that came meanwhile; the next one looks at the table again."""
    alter, second = _ALTERED[how]
    scene.execute(_INSERT.format("outbox", 1, 50))
    scene.execute("DELETE FROM outbox WHERE id <= 30")
    leader = uuid4()
    assert len(store.mark(leader, RowQuery(5)).records) == 5
    scene.execute(alter)
    scene.execute(_INSERT.format(second, 51, 300))
    marked = []
    for _ in range(3):
        batch = store.mark(leader, RowQuery(limit))
        ids = [row.id for row in batch.records]
        if batch.selected == len(ids):
            marked.extend(ids)
        else:
            assert not set(ids) - set(range(36, 36 + limit)), "only rows that were selected are marked"
            store.reset(leader, ids)
    assert len(marked) >= 2 * limit
    assert marked == list(range(36, 36 + len(marked)))


def test_marks_that_lack_rows_are_told_of_once(scene, store, monkeypatch, caplog):
    """Marks that go on to lack rows that they selected are one line in the log, until a mark lacks none."""
    monkeypatch.setattr("outbox_core.stores.postgres.store._SKIPPED_SECONDS", 0.0)
    scene.execute(_INSERT.format("outbox", 1, 3))
    for _ in range(3):
        with monkeypatch.context() as patch:
            patch.setattr(store, "_selected", lambda *_: 5)
            assert store.mark(uuid4(), RowQuery(10)).selected == 5
        scene.execute("UPDATE outbox SET leader_id = NULL")
    assert caplog.text.count("other rows than they selected") == 1
    assert len(store.mark(uuid4(), RowQuery(10)).records) == 3
    assert caplog.text.count("other rows than they selected") == 1


_TIMES = [
    *(
        "2026-01-02 03:04:05.678901+00",
        "2026-01-02 03:04:05.5+00",
        "2026-01-02 03:04:06.5+00",
        "2026-01-02 03:04:05+00",
    ),
    *("1999-12-31 23:59:58.5+00", "1999-12-31 23:59:59.499999+00", "1969-12-31 23:59:59.999999+00", "infinity"),
]


@pytest.mark.parametrize("digits", [0, 3, 5])
@pytest.mark.parametrize("mode", ["purge", "delete published"])
def test_published_rows_whose_times_are_rounded(scene, store, digits, mode):
    """Rows in flight are neither read again nor kept if the type of `create_time` gets fewer digits of a second."""
    for time in _TIMES:
        scene.execute("INSERT INTO outbox (kafka_topic, kafka_key, create_time) VALUES ('t', 'k', %s)", [time])
    leader = uuid4()
    rows = store.mark(leader, RowQuery(100)).records if mode == "purge" else store.scan(RowQuery(100))
    scene.execute(f"ALTER TABLE outbox ALTER create_time TYPE timestamptz({digits})")
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'new')")
    new = len(_TIMES) + 1
    assert [row.id for row in store.scan(RowQuery(1, without_rows=rows))] == [new]
    ids, times = ids_and_times(rows)
    deleted = store.purge(leader, ids, times) if mode == "purge" else store.delete_published(ids, times)
    assert deleted == len(rows)
    assert [row.id for row in store.scan(RowQuery(100))] == [new]


def test_other_rows_with_the_ids_of_published_ones(scene, store):
    """A row that got the id of a published one is kept, where times are rounded, too, and where they always were."""
    scene.execute(_INSERT.format("outbox", 1, 3))
    rows = store.scan(RowQuery(100))
    scene.execute("TRUNCATE outbox RESTART IDENTITY")
    scene.execute("ALTER TABLE outbox ALTER create_time TYPE timestamptz(0)")
    for seconds in (1, -1):
        scene.execute(
            "INSERT INTO outbox (kafka_topic, create_time) VALUES ('t', now() + %s * interval '5 s')", [seconds]
        )
    assert store.delete_published(*ids_and_times(rows)) == 0
    others = store.scan(RowQuery(100, without_rows=rows))
    assert [row.id for row in others] == [1, 2]
    shifted = [row.create_time + 1_000_000 for row in others]
    assert store.delete_published([1, 2], shifted) == 0
    assert store.delete_published(*ids_and_times(others)) == 2


def test_second_alteration_is_as_passing_as_the_first(scene):
    """A deletion that succeeds ends an alteration: the next one is no refusal of deletions, either."""
    for statement in archive_statements(TableName("outbox")):
        scene.execute(statement)
    with closing(PostgresStore(scene.database, archive_days=30)) as store:
        store.check()
        for identity in (1, 2):
            scene.execute(_INSERT.format("outbox", identity, identity))
            (row,) = store.find([identity])
            scene.execute("ALTER TABLE outbox DROP COLUMN kafka_partition")
            with pytest.raises(StoreUnavailable, match="was altered"):
                store.delete_published([row.id], [row.create_time])
            assert store.delete_published([row.id], [row.create_time]) == 1
            scene.execute("ALTER TABLE outbox ADD COLUMN kafka_partition integer")
            store.check()


def test_doubts_of_a_table_are_told_once(scene, store, caplog):
    """A table that is checked again after each error is warned of once, until what the warning is about has changed."""
    told = "table outbox has trigger no: "
    scene.execute("ALTER TABLE outbox ALTER id SET CACHE 20")
    scene.execute(_INSERT.format("outbox", 1, 3))
    scene.execute("CREATE FUNCTION no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE EXCEPTION 'frozen'; END $$")
    trigger = "CREATE TRIGGER no BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION no()"
    for times in (1, 2):
        scene.execute(trigger)
        for _ in range(3):
            with pytest.raises(OutboxTableError, match="frozen"):
                store.mark(uuid4(), RowQuery(10))
        store.check()
        assert caplog.text.count(told) == times
        scene.execute("DROP TRIGGER no ON outbox")
        store.check()
    assert caplog.text.count("CACHE 20") == 1
