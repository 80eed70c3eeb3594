"""Odd rows, and tables that keep deleted rows: other keys flow, no record is repeated, and the reason is reported.

A role with INSERT on every column can write such rows. Both modes; the tests of the store are in test_store_trust.
"""

import time

import psycopg
import pytest

from outbox_core.harvest import harvester as harvester_module
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import Scene, identity_of, wait_until

pytestmark = pytest.mark.real_broker

MODES = ["at-least-once", "exactly-once"]
QUICK = {"io_error_backoff": "50ms"}
FIRST, LAST = -(2**63), 2**63 - 1


@pytest.fixture(params=MODES)
def mode(request):
    """A configuration of each delivery mode."""
    return {"delivery": request.param}


@pytest.fixture
def scene(database, kafka_bootstrap):
    """One outbox with its holds, without constraints against odd rows."""
    scene = Scene(database, kafka_bootstrap, constrained=False)
    yield scene
    scene.close()


def test_rows_with_odd_ids_times_and_sizes(scene, make_topic, mode):
    """Odd rows never end a harvester: good ones arrive, bad ones are held, and the drain ends."""
    topic = make_topic()
    scene.execute(
        "INSERT INTO outbox (id, create_time, kafka_topic, kafka_key, kafka_value) VALUES"
        " (%(first)s, now(), %(topic)s, 'lowest', 'a'), (%(last)s, now(), 'no topic!', NULL, 'b'),"
        " (%(last)s - 1, '294276-12-31', %(topic)s, 'late', 'c'), (7, 'infinity', %(topic)s, 'never', 'd'),"
        " (8, '-infinity', 'neither!', 'x', 'e'), (9, '4713-01-01 BC', %(topic)s, 'early', 'f'),"
        " (10, now(), %(topic)s, repeat('k', 1200000), 'g'), (11, now(), %(topic)s, repeat('k', 1200000), 'h'),"
        " (12, now(), %(topic)s, 'large', repeat('v', 1200000)::bytea), (13, now(), %(topic)s, 'large', 'i')",
        {"topic": topic, "first": FIRST, "last": LAST},
    )
    scene.execute("SELECT setval('outbox_id_seq', 100)")
    for _ in range(2):  # the second harvester reads the holds of the first
        scene.fill(topic, 20, keys=5)
        scene.drain(config={**mode, "producer_kafka_config": {"message.max.bytes": 1_000_000}}, limits=QUICK)
    held = {hold.record_id: hold for hold in scene.held()}
    assert set(held) - {11} == {LAST, 8, 10, 12}
    assert {row.id for row in scene.execute("SELECT id FROM outbox")} == {LAST, 8, 10, 11, 12, 13}
    assert held[12].reason == "too large"
    assert "kafka_value" in held[12].error
    assert "message.max.bytes" in held[12].error
    arrived = {identity_of(message) for message in scene.read(topic)}
    assert arrived == {FIRST, LAST - 1, 7, 9, *range(101, 141)}
    scene.execute("UPDATE outbox SET kafka_value = 'v' WHERE id = 12")
    scene.hold("release", records=[12])
    scene.drain(config=mode, limits=QUICK)
    assert [message.value for message in scene.read(topic) if message.key == b"large"] == [b"v", b"i"]


def test_large_records_without_holds(scene, make_topic, mode):
    """Without a table of holds the harvester backs off from records that are too large, and others flow."""
    topic = make_topic()
    scene.execute("DROP TABLE outbox_hold")
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, 'large', repeat('v', 1200000)::bytea),"
        " (%s, repeat('k', 1200000), 'x')",
        [topic, topic],
    )
    scene.fill(topic, 20, keys=5)
    with scene.running(config=mode) as harvester:
        wait_until(lambda: scene.count() == 2, "the others are published")
        time.sleep(1.0)
        assert len(harvester.leader_ids) == 1
    assert len(scene.read(topic)) == 20


def test_marks_that_a_writer_set_stop_no_other_key(scene, make_topic):
    """In exactly-once mode marked rows are held, with the column's name, and the next start holds no further rows."""
    topic = make_topic()
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, leader_id) VALUES"
        " (%(topic)s, 'mine', '1', gen_random_uuid()), (%(topic)s, NULL, '2', gen_random_uuid()),"
        " (%(topic)s, repeat('k', 500000), '3', gen_random_uuid()), (%(topic)s, 'mine', '4', NULL),"
        " (%(topic)s, NULL, '5', NULL)",
        {"topic": topic},
    )
    for _ in range(2):
        scene.fill(topic, 10, keys=5)
        scene.drain(config={"delivery": "exactly-once"}, limits=QUICK)
    assert sorted(hold.record_id for hold in scene.held()) == [1, 2, 3]
    assert all("leader_id" in hold.error for hold in scene.held())
    assert [row.id for row in scene.rows()] == [1, 2, 3, 4]
    scene.hold("release_records")
    scene.drain(config={"delivery": "exactly-once"}, limits=QUICK)
    assert len(scene.read(topic)) == 25


_KEPT = "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'"
_KEEP = "CREATE TRIGGER soft_delete BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION keep()"


def test_rows_that_cannot_be_removed_are_not_repeated(scene, make_topic, mode, monkeypatch):
    """Publishing stops without repeats and /healthz shows the reason; without the obstacle it goes on."""
    monkeypatch.setattr(harvester_module, "_UNHEALTHY_AFTER_SECONDS", 0.5)
    topic = make_topic()
    scene.execute(_KEPT)
    with scene.running(config=mode, limits=QUICK | {"mark_query_records": 50}) as harvester:
        scene.fill(topic, 10, keys=5)
        wait_until(lambda: scene.count() == 0, "it works")
        scene.execute(_KEEP)
        scene.fill(topic, 500, keys=50)
        wait_until(lambda: "trigger soft_delete" in harvester.health().detail, "that is noticed")
        assert not harvester.health().ok
        time.sleep(1.0)
        assert scene.count() == 500
        scene.execute("DROP TRIGGER soft_delete ON outbox")
        wait_until(lambda: scene.count() == 0, "it goes on")
        wait_until(lambda: harvester.health().ok, "it is well")
        assert len(harvester.leader_ids) == 1
    arrived = [identity_of(message) for message in scene.read(topic)]
    assert sorted(arrived) == list(range(1, 511)), f"{len(arrived)} arrived"


_REFER = "CREATE TABLE audits (record bigint REFERENCES outbox (id)); INSERT INTO audits SELECT max(id) FROM outbox"
# A DROP locks the table first and then the one that it refers to, a DELETE the other way round: a deadlock.
_REFER_NO_MORE = "BEGIN; LOCK TABLE outbox, audits; DROP TABLE audits; COMMIT"
_PUBLISH = "CREATE PUBLICATION deletes FOR TABLE outbox WITH (publish = 'delete')"
_DELETE_FAILS = {
    "foreign key": (_REFER, "audits_record_fkey", _REFER_NO_MORE),
    "publication": (
        f"ALTER TABLE outbox REPLICA IDENTITY NOTHING; {_PUBLISH}",
        "does not have a replica identity",
        "DROP PUBLICATION deletes",
    ),
}


@pytest.mark.parametrize("why", _DELETE_FAILS)
def test_deletions_that_fail_repeat_nothing(scene, make_topic, mode, why, monkeypatch):
    """Publishing stops where a DELETE fails, without an end, and without repeats; without the obstacle it goes on."""
    monkeypatch.setattr(harvester_module, "_UNHEALTHY_AFTER_SECONDS", 0.5)
    topic, (plant, told, mend) = make_topic(), _DELETE_FAILS[why]
    scene.fill(topic, 20, keys=5)
    scene.execute(plant)
    with scene.running(config=mode, limits=QUICK) as harvester:
        wait_until(lambda: told in harvester.health().detail, "that is noticed")
        time.sleep(1.0)
        assert scene.count() > 0
        assert "removal of published records" in harvester.health().detail
        scene.execute(mend)
        wait_until(lambda: scene.count() == 0, "it goes on")
    assert sorted(identity_of(message) for message in scene.read(topic)) == list(range(1, 21))


class Robbed(PostgresStore):
    """A store whose rows another leader marks before each purge.

    Attributes:
        rival: true while there is such a leader.
    """

    rival = True

    def __init__(self, data_source):
        super().__init__(data_source)
        self._url = data_source

    def purge(self, *arguments):
        if Robbed.rival:
            with psycopg.connect(self._url, autocommit=True) as connection:
                connection.execute("UPDATE outbox SET leader_id = gen_random_uuid()")
        return super().purge(*arguments)


def test_leaders_give_each_other_room(scene, make_topic):
    """While another leader takes all of its rows, a leader remarks ever more rarely; then it goes on."""
    Robbed.rival = True
    topic = make_topic()
    scene.fill(topic, 100, keys=10)
    with scene.running(limits=QUICK, store_factory=lambda: Robbed(scene.database)) as harvester:
        wait_until(lambda: len(harvester.leader_ids) > 2, "it remarks, and does so again")
        time.sleep(3.0)
        remarks = len(harvester.leader_ids) - 1
        Robbed.rival = False
        wait_until(lambda: scene.count() == 0, "it goes on")
    assert remarks <= 8
    assert {identity_of(message) for message in scene.read(topic)} == set(range(1, 101))
