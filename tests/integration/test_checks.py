"""Harvesting a table that got its CHECK constraints when it had rows already, some of which violate them."""

import pytest

from outbox_core.errors import OutboxTableError
from outbox_core.record import OutboxRecord
from outbox_core.schema import add_checks_sql, validate_checks_sql
from tests.harvesting import GENEROUS_SECONDS, Scene, wait_until

BAD = "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys) VALUES (%s, 'bad', 'x', '{a}')"


@pytest.fixture
def scene(database, kafka_bootstrap):
    """A fresh outbox as it was made before there were constraints."""
    scene = Scene(database, kafka_bootstrap, constrained=False)
    yield scene
    scene.close()


@pytest.mark.real_broker
@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_rows_from_before_the_constraints(scene, make_topic, delivery):
    """A table that was upgraded is harvested on: rows that violate are held with their constraint, others arrive."""
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


def test_rows_from_before_the_constraints_without_holds(scene, make_topic):
    """Where nothing can be held, the harvester ends with the constraint's name and the way out."""
    topic = make_topic()
    scene.execute("DROP TABLE outbox_hold")
    scene.execute(BAD, [topic])
    scene.execute(add_checks_sql(scene.table))
    harvester = scene.harvester()
    harvester.start()
    with pytest.raises(OutboxTableError, match=r"outbox_headers_in_pairs.*outbox_hold"):
        harvester.join(GENEROUS_SECONDS)
