"""The store on a table that is altered under it: partitions, heirs, times of another precision."""

from contextlib import closing
from uuid import uuid4

import pytest

from outbox_core.schema import TableName, create_table_sql
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
