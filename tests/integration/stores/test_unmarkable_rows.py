"""Rows that the harvester can read but not mark, because of a trigger."""

import psycopg
import pytest

from tests.harvesting import Scene, wait_until

OBSTACLES = {
    "a trigger that skips all": (
        "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER skips BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION skip()"
    ),
    "a trigger that skips some": (
        "CREATE FUNCTION skip() RETURNS trigger LANGUAGE plpgsql AS "
        "'BEGIN IF OLD.id = 2 THEN RETURN NULL; END IF; RETURN NEW; END';"
        "CREATE TRIGGER skips BEFORE UPDATE ON outbox FOR EACH ROW EXECUTE FUNCTION skip()"
    ),
}
END_OF_OBSTACLES = "DROP FUNCTION skip CASCADE"


@pytest.fixture
def scene(database, kafka_bootstrap, monkeypatch):
    """A fresh outbox whose harvesters are unhealthy after a second instead of thirty."""
    monkeypatch.setattr("outbox_core.harvest.harvester._UNHEALTHY_AFTER_SECONDS", 1.0)
    monkeypatch.setattr("outbox_core.stores.postgres.store._SKIPPED_SECONDS", 0.5)
    scene = Scene(database, kafka_bootstrap)
    yield scene
    scene.close()


@pytest.fixture
def as_role(scene):
    """The name of a role with the harvester's rights, in `role`, and settings of a harvester with that role."""
    rights = "GRANT SELECT, UPDATE, DELETE ON outbox, outbox_hold TO {role}; GRANT INSERT ON outbox_hold TO {role}"
    with scene.role(rights) as name:
        yield {"role": name, "config": {"data_source": psycopg.conninfo.make_conninfo(scene.database, user=name)}}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_rows_that_cannot_be_marked_are_told(scene, as_role, make_topic, obstacle, caplog):
    """An outbox whose rows cannot all be marked does not look empty or idle: log and health name the obstacle."""
    topic = make_topic()
    with scene.running(config=as_role["config"]) as harvester:
        scene.execute(OBSTACLES[obstacle])
        scene.fill(topic, 5)
        wait_until(lambda: "trigger skips" in harvester.health().detail, "health tells of it", timeout=20)
        assert caplog.text.count("cannot be marked") == 1
        assert "back after" not in caplog.text
        scene.execute(END_OF_OBSTACLES)
        wait_until(lambda: scene.count() == 0 and harvester.health().ok, "it goes on by itself", timeout=20)
    assert len(scene.read(topic)) == 5


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_marks_that_cannot_be_cleared_do_not_stop_exactly_once(scene, as_role, make_topic, obstacle):
    """Marked rows are held once, whether their marks can be cleared or not, and all others are published."""
    topic = make_topic()
    scene.fill(topic, 5)
    scene.execute("UPDATE outbox SET leader_id = gen_random_uuid() WHERE id IN (2, 3)")
    scene.execute(OBSTACLES[obstacle])
    with scene.running(config=as_role["config"] | {"delivery": "exactly-once"}):
        wait_until(lambda: scene.count() == 2, "what is not marked is published", timeout=20)
        assert [hold.record_id for hold in scene.held()] == [2, 3]
