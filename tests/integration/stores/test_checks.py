"""Harvesting a table that got its CHECK constraints after some violating rows."""

import re
from contextlib import closing
from uuid import uuid4

import pytest

from outbox_core.errors import RowsHeld
from outbox_core.record import OutboxRecord
from outbox_core.schema import TableName, add_checks_sql, create_hold_sql, create_table_sql, validate_checks_sql
from outbox_core.stores.interface import RowQuery
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import Scene, wait_until

LEAST, EXACTLY = {"delivery": "at-least-once"}, {"delivery": "exactly-once"}
BAD = "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys) VALUES (%s, 'bad', 'x', '{a}')"


@pytest.fixture
def scene(database, kafka_bootstrap):
    """A fresh outbox without constraints, as older versions made it."""
    scene = Scene(database, kafka_bootstrap, constrained=False)
    yield scene
    scene.close()


@pytest.mark.real_broker
@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_rows_from_before_the_constraints(scene, make_topic, delivery):
    """In an upgraded table rows that violate a constraint are held, and others arrive."""
    topic = make_topic(1)

    scene.stash(OutboxRecord(topic, "a", "1"))
    scene.execute(BAD, [topic])
    scene.stash(OutboxRecord(topic, "bad", "behind"), OutboxRecord(topic, "b", "2"))
    scene.execute(add_checks_sql(scene.table))
    with scene.running(config={"delivery": delivery}):
        wait_until(lambda: scene.count() == 2, "only the bad row and what is behind it are left")
        (held,) = wait_until(scene.held, "the bad row is held")
    assert held.record_id == 2
    assert {message.value for message in scene.read(topic)} == {b"1", b"2"}
    scene.hold("skip", records=[2])
    scene.execute(validate_checks_sql(scene.table))
    scene.drain(config={"delivery": delivery})
    assert [message.value for message in scene.read(topic)].count(b"behind") == 1


@pytest.mark.real_broker
@pytest.mark.parametrize(
    "settings", [LEAST, EXACTLY, EXACTLY | {"accept_marked": True}], ids=["least", "exactly", "accept"]
)
def test_marked_rows_from_before_the_constraints(scene, make_topic, settings):
    """A violating row with a mark, which cannot be cleared, is held with its constraint, and others arrive."""
    topic = make_topic(1)
    scene.stash(OutboxRecord(topic, "a", "1"))
    scene.execute(BAD, [topic])
    scene.stash(OutboxRecord(topic, "bad", "behind"), OutboxRecord(topic, "b", "2"))
    scene.execute("UPDATE outbox SET leader_id = gen_random_uuid() WHERE id <= 2")
    scene.execute(add_checks_sql(scene.table))
    with scene.running(config=settings) as harvester:
        wait_until(lambda: not scene.count("kafka_key = 'b'") or harvester._ended.is_set(), "others arrive")
        held = wait_until(scene.held, "the bad row is held")
    assert {hold.record_id for hold in held} <= {1, 2}
    (bad,) = (hold for hold in held if hold.record_id == 2)
    assert "header" in f"{bad.reason} {bad.error}"
    scene.hold("skip", records=[2])
    scene.hold("release_records")
    scene.execute(validate_checks_sql(scene.table))
    scene.drain(config=settings)
    assert sorted(message.value for message in scene.read(topic)) == [b"1", b"2", b"behind"]


def test_more_violations_than_are_held_at_once(scene):
    """Any number of violating rows is held, some at a time, and then a mark succeeds."""
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_value, kafka_header_keys) SELECT 't', 'x', '{a}'"
        " FROM generate_series(1, 1001)"
    )
    scene.stash(OutboxRecord("t", "a", "v"))
    scene.execute(add_checks_sql(scene.table))
    store, me = PostgresStore(scene.database), uuid4()
    store.check()
    for _ in range(2):
        with pytest.raises(RowsHeld):
            store.mark(me, RowQuery(10, holds=store.holds.read()))
    assert [record[0] for record in store.mark(me, RowQuery(10, holds=store.holds.read())).records] == [1002]
    store.close()


def test_violation_with_a_long_key(scene):
    """The hold of a row that violates a constraint has the row's own key, also a long one: the next mark skips it."""
    key = "k" * 300
    insert = "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys)"
    scene.execute(f"{insert} VALUES ('t', %s, 'x', '{{a}}')", [key])
    scene.stash(OutboxRecord("t", "a", "v"))
    scene.execute(add_checks_sql(scene.table))
    store, me = PostgresStore(scene.database), uuid4()
    with pytest.raises(RowsHeld):
        store.mark(me, RowQuery(10, holds=store.holds.read()))
    (held,) = scene.held()
    assert (held.record_id, held.key) == (1, key)
    assert [record.id for record in store.mark(me, RowQuery(10, holds=store.holds.read())).records] == [2]
    store.close()


def test_marks_that_a_constraint_keeps(scene):
    """Marks are cleared as far as constraints allow; a row whose mark a constraint keeps is held, and no other."""
    store, me = PostgresStore(scene.database), uuid4()
    scene.execute(BAD, ["t"])
    scene.stash(*(OutboxRecord("t", key, "v") for key in "ab"))
    store.check()
    assert store.mark(me, RowQuery(10)).selected == 3
    scene.execute(add_checks_sql(scene.table))
    assert store.reset(me, [1, 2]) == 1
    (held,) = scene.held()
    assert (held.record_id, held.reason) == (1, "violates outbox_headers_in_pairs")
    assert store.marks.clear() == 1
    assert [row.id for row in scene.rows() if row.leader_id is not None] == [1]
    assert store.purge(me, [1], [store.find([1])[0].create_time]) == 1
    store.close()


def test_constraint_of_a_partition(database):
    """A row of a partition that got a constraint of its own is held; an equal one of another partition is not."""
    scene = Scene(database, "", layout=None)
    ddl = create_table_sql(TableName("outbox")).partition("WITH (")[0]
    scene.execute(f"{ddl} PARTITION BY HASH (id)")
    for number in range(2):
        scene.execute(f"CREATE TABLE part{number} PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER {number})")
    scene.execute(create_hold_sql(TableName("outbox")))
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) SELECT 't', 'k' || n FROM generate_series(1, 20) AS n")
    bad = [row.id for row in scene.execute("SELECT id FROM part0 ORDER BY id")]
    scene.execute("ALTER TABLE part0 ADD CONSTRAINT no_k CHECK (kafka_key NOT LIKE 'k%') NOT VALID")
    scene.execute("ALTER TABLE outbox ADD CONSTRAINT no_k7 CHECK (kafka_key <> 'k7') NOT VALID")
    with closing(PostgresStore(database)) as store:
        with pytest.raises(RowsHeld):
            store.mark(uuid4(), RowQuery(50))
        batch = store.mark(uuid4(), RowQuery(50, holds=store.holds.read()))
    assert sorted(hold.record_id for hold in scene.held()) == sorted({*bad, 7})
    assert {hold.reason for hold in scene.held(records=[bad[0]])} == {"violates no_k"}
    assert [row.id for row in batch.records] == [number for number in range(1, 21) if number not in {*bad, 7}]
    scene.close()


NEWLY_REQUIRED = "ALTER TABLE outbox ADD CONSTRAINT has_key NOT NULL kafka_key NOT VALID"
ASKS_A_TABLE = """
CREATE TABLE known (key text); INSERT INTO known VALUES ('a');
INSERT INTO known VALUES ('b');
UPDATE outbox SET kafka_key = 'b' WHERE kafka_key IS NULL;
CREATE FUNCTION is_known(asked text) RETURNS boolean
    LANGUAGE sql AS 'SELECT EXISTS (SELECT FROM public.known WHERE key = asked)';
ALTER TABLE outbox ADD CONSTRAINT is_known CHECK (is_known(kafka_key));
DELETE FROM known WHERE key = 'b'
"""


@pytest.mark.parametrize(("change", "broken"), [(NEWLY_REQUIRED, "has_key"), (ASKS_A_TABLE, "is_known")])
def test_rows_that_other_constraints_refuse(scene, change, broken):
    """So is a row without what came to be required (from PostgreSQL 18 on), or that a function judges anew."""
    if change is NEWLY_REQUIRED and int(scene.execute("SHOW server_version_num")[0][0]) < 180_000:
        pytest.skip("it has no NOT NULL that is NOT VALID")
    scene.stash(OutboxRecord("t", "a", "v"))
    scene.execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")
    scene.execute(change)
    with closing(PostgresStore(scene.database)) as store:
        with pytest.raises(RowsHeld):
            store.mark(uuid4(), RowQuery(10, holds=store.holds.read()))
        assert [hold.reason for hold in scene.held()] == [f"violates {broken}"]
        assert len(store.mark(uuid4(), RowQuery(10, holds=store.holds.read())).records) == 1


def test_rows_from_before_the_constraints_without_holds(scene, make_topic):
    """Without a table of holds the harvester names the constraint and the remedy, and goes on with such a table."""
    topic = make_topic()
    scene.execute("DROP TABLE outbox_hold")
    scene.execute(BAD, [topic])
    scene.execute(add_checks_sql(scene.table))
    harvester = scene.harvester()
    harvester.start()
    wait_until(lambda: harvester._ctx.database.is_ongoing, "it is told")
    told = harvester._ctx.database.describe()
    assert re.search(r"outbox_headers_in_pairs.*outbox_hold", told)
    assert "Failing row" not in told, "a row's value is no business of the log"
    scene.execute(create_hold_sql(scene.table))
    wait_until(scene.held, "they are held")
