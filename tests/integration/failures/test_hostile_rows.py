"""Rows of a hostile role with INSERT alone, in both modes: other keys flow, and others' rows are not harmed."""

from uuid import uuid4

import pytest
from psycopg import sql

from outbox_core import OutboxRecord
from outbox_core.kafka.manifest import Manifest
from outbox_core.kafka.row_topics import RowTopics
from outbox_core.schema import shown_key_sql
from tests.harvesting import Scene, by_key, wait_until
from tests.hostile_rows import OutboxNames, hostile_rows, insert

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(120)]

OTHERS_ARRIVE_WITHIN_SECONDS = 10.0
JUDGED_WITHIN_SECONDS = 30.0  # an id below the settled floor is found by the next look from the head
QUICK = {"io_error_backoff": "50ms"}


class HostileScene(Scene):
    """An outbox without constraints, and a role whose only right is INSERT on it."""

    def __init__(self, database, bootstrap):
        super().__init__(database, bootstrap)
        self.role = f"writer_{uuid4().hex[:12]}"
        for name in self.execute(
            "SELECT conname FROM pg_constraint WHERE conrelid = 'outbox'::regclass AND contype = 'c'"
        ):
            self.execute(sql.SQL("ALTER TABLE outbox DROP CONSTRAINT {}").format(sql.Identifier(name.conname)))
        self.execute(f"CREATE ROLE {self.role}")
        self.execute(f"GRANT INSERT ON outbox TO {self.role}")
        self.identity = f"{self.execute('SELECT current_database() AS name')[0].name}.public.outbox"
        self.names = OutboxNames.of(self.identity)

    def attack(self, *rows):
        """Write rows as that role, each in a transaction of its own."""
        with self.connect(autocommit=True) as connection:
            connection.execute(f"SET ROLE {self.role}")
            for row in rows:
                connection.execute(*insert("outbox", row))

    def close(self):
        super().close()
        self.execute(f"DROP OWNED BY {self.role}")
        self.execute(f"DROP ROLE {self.role}")


@pytest.fixture
def scene(database, kafka_bootstrap):
    """One outbox into which every row can be inserted."""
    scene = HostileScene(database, kafka_bootstrap)
    yield scene
    scene.close()


@pytest.fixture(params=["at-least-once", "exactly-once"])
def mode(request):
    """A configuration of each delivery mode."""
    return {"delivery": request.param}


def is_alive(harvester):
    """Return true while the harvester has not ended."""
    return not harvester._ended.is_set()


def assert_others_arrive(scene, topic, harvester, name, *, within=OTHERS_ARRIVE_WITHIN_SECONDS):
    """Assert that records of another key, on the same topic, soon leave the table; return that key."""
    key = f"honest-{name}"
    scene.stash(OutboxRecord(topic, key, "1"), OutboxRecord(topic, key, "2"))
    left = sql.SQL("kafka_key = {}").format(sql.Literal(key)).as_string(None)
    wait_until(lambda: not scene.count(left) or not is_alive(harvester), f"{name}: others arrive", within)
    assert is_alive(harvester), f"{name}: the harvester has ended: {harvester._failure!r}"
    return key


def assert_judged(scene, row):
    """Assert that the row is held with a reason that names its column, or has left the table."""

    def is_judged():
        held = [hold.error for hold in scene.held()]
        return ("published", "") if not scene.count() else ("held", held[0]) if held else None

    ending, error = wait_until(is_judged, f"{row.name}: held or published", JUDGED_WITHIN_SECONDS)
    assert row.ends in ("either", ending), f"{row.name}: {ending} ({error})"
    if ending == "held":
        assert row.column in error, f"{row.name}: {error}"


def unjudged(scene):
    """Return the ids of rows in the table that are neither held nor behind a held one of their key."""
    held = scene.held()
    ids, keys = {hold.record_id for hold in held}, {(hold.topic, hold.key) for hold in held if hold.key is not None}
    rows = scene.execute(f"SELECT id, kafka_topic, {shown_key_sql('kafka_key')} AS kafka_key FROM outbox")
    return [row.id for row in rows if row.id not in ids and (row.kafka_topic, row.kafka_key) not in keys]


def test_each_hostile_row_alone(scene, make_topic, mode):
    """Each bad row is held, with its column named, while records of other keys on the same topic arrive."""
    topic = make_topic(partitions=2)
    harvester, keys, problems = None, [], {}
    for row in hostile_rows(scene.names, topic):
        if harvester is None or not is_alive(harvester):
            harvester = scene.harvester(config=mode, limits=QUICK)
            harvester.start()
        try:
            scene.attack(row)
            keys.append(assert_others_arrive(scene, topic, harvester, row.name))
            assert_judged(scene, row)
        except AssertionError as error:
            problems[row.name] = str(error).partition("\n")[0]
        scene.execute("DELETE FROM outbox_hold")
        scene.execute("DELETE FROM outbox")
    assert not problems
    arrived = by_key(scene.read(topic))
    assert {key: list(dict.fromkeys(arrived[key.encode()])) for key in keys} == {key: [b"1", b"2"] for key in keys}


def test_all_hostile_rows_together(scene, make_topic, mode):
    """With all hostile rows at once, and after a restart, other keys' records arrive, and each row is held or gone."""
    topic = make_topic(partitions=2)
    rows = hostile_rows(scene.names, topic)
    scene.attack(*rows)
    for run in range(2):
        with scene.running(config=mode, limits=QUICK) as harvester:
            assert_others_arrive(scene, topic, harvester, f"run-{run}")
            wait_until(lambda: not unjudged(scene), "each row is held or published", 20)
            scene.attack(*(row for row in rows if not row.own_id))
            assert_others_arrive(scene, topic, harvester, f"run-{run}-again")


def test_forged_manifests_delete_nothing(scene, make_topic, mode):
    """A manifest in a row cannot delete others' rows: the row for a topic of manifests is held (C1)."""
    topic = make_topic()
    scene.execute("INSERT INTO outbox_hold (outbox, kafka_topic, reason) VALUES ('public.outbox', 'victims', 'paused')")
    scene.stash(OutboxRecord("victims", "v", "precious"))
    (victim,) = scene.execute(
        "SELECT id, (extract(epoch FROM create_time) * 1000000)::bigint AS microseconds FROM outbox"
    )
    manifest = Manifest(scene.identity, [victim.id], [victim.microseconds]).encode()
    for to, key in (
        (scene.names.tracking, scene.names.transactional_id),
        (scene.names.relay, f"{scene.names.transactional_id}:shard-0"),
    ):
        scene.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_partition) VALUES (%s, %s, %s, 0)",
            [to, key, manifest],
        )
    for run in range(2):
        with scene.running(config=mode, limits=QUICK) as harvester:
            assert_others_arrive(scene, topic, harvester, f"run-{run}")
            wait_until(lambda: len(scene.held()) == 3, "both are held")
    assert scene.count("kafka_topic = 'victims'") == 1
    assert all(hold.error.startswith("kafka_topic") for hold in scene.held() if hold.record_id)


def test_row_that_breaks_its_producer_stops_nobody(scene, make_topic, monkeypatch):
    """A row that ends every term lets other keys flow; it stays in the table, held or counted as waiting (C2)."""
    monkeypatch.setattr(RowTopics, "check", lambda topics, record: topics.known.add(record[1]))
    topic = make_topic()
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES ('__consumer_offsets', 'k', 'x')")
    with scene.running(config={"delivery": "exactly-once"}, limits=QUICK) as harvester:
        for number in range(5):
            assert_others_arrive(scene, topic, harvester, f"number-{number}", within=30)
        wait_until(lambda: scene.held() or waiting(harvester), "it is held, or shown to wait")
        assert scene.count() == 1


def waiting(harvester):
    """Return the number of destinations from which the harvester backs off."""
    name = harvester.metrics.outbox_name
    return harvester.metrics.registry.get_sample_value("outbox_waiting_destinations", {"outbox": name})
