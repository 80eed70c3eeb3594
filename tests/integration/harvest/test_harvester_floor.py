"""Harvesters and their settled floor, in both modes: it rises, stops, is reset and is off, without any loss."""

import re
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest

from outbox_core import OutboxRecord
from outbox_core.harvest import watermark as floor_module
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.postgres.store import PostgresStore
from tests.contract.accept_contract import wait_for_a_blocked_session
from tests.harvesting import Scene, assert_only_adjacent_repeats, by_key, identity_of, wait_until

_MODES = [pytest.param("at-least-once"), pytest.param("exactly-once", marks=pytest.mark.real_broker)]
_LIMITS = {"mark_query_records": 500, "transaction_timeout": "5s"}


class Observed(Scene):
    """A scene with one harvester whose metrics a test can read."""

    metrics = None

    def harvesting(self, delivery, **options):
        """Run a harvester with metrics within the context."""
        self.metrics = HarvestMetrics()
        return self.running(config={"delivery": delivery}, limits=_LIMITS, metrics=self.metrics, **options)

    def gauge(self, name):
        """Return a gauge of the floor, or None if it is not shown."""
        return self.metrics.registry.get_sample_value(f"outbox_floor_{name}", {"outbox": self.metrics.outbox_name})

    def published(self):
        """Wait until the table is empty."""
        wait_until(lambda: self.count() == 0, "everything is published")

    def risen(self):
        """Wait until the floor is at the last id drawn."""
        wait_until(lambda: self.gauge("distance_ids") == 0, "the floor has risen to the last id")


@pytest.fixture(params=["binary", "text"])
def scene(request, database, kafka_bootstrap, monkeypatch):
    """An outbox whose floor soon warns and soon scans from the head."""
    monkeypatch.setattr(floor_module, "_WARN_AFTER_SECONDS", 0.5)
    monkeypatch.setattr(floor_module, "_FROM_HEAD_IDLE_SECONDS", 0.5)
    scene = Observed(database, kafka_bootstrap, layout=request.param)
    yield scene
    scene.close()


@pytest.mark.parametrize("delivery", _MODES)
def test_rises_with_the_harvest(scene, make_topic, delivery):
    """A backlog and records written meanwhile are published in order; then the floor is at the last id drawn."""
    topic = make_topic()
    scene.fill(topic, 3_000, keys=7)
    with scene.harvesting(delivery):
        for number in range(3_001, 3_101):
            scene.stash(OutboxRecord(topic, f"k{number % 7}", str(number)))
        scene.published()
        scene.risen()
        assert scene.gauge("enabled") == 1
    messages = scene.read(topic)
    assert_only_adjacent_repeats(messages, 3_100)
    for values in by_key(messages).values():
        assert [int(value) for value in values] == sorted(int(value) for value in values)


@pytest.mark.parametrize("prepared", [False, True], ids=["open", "prepared"])
@pytest.mark.parametrize("delivery", _MODES)
def test_long_running_writer(scene, make_topic, caplog, delivery, prepared):
    """An open writer stops only the floor, is named with its pid (or gid) and age, and is published at its commit."""
    topic = make_topic()
    gid = f"gid-{topic}"
    with scene.connect() as writer, scene.harvesting(delivery):
        scene.stasher.stash(writer, OutboxRecord(topic, "late", "1"))
        pid = writer.info.backend_pid
        if prepared:
            writer.execute(psycopg.sql.SQL("PREPARE TRANSACTION {}").format(gid))
        scene.fill(topic, 1_000)
        scene.published()
        named = f"prepared transaction '{gid}'" if prepared else f"the transaction of pid {pid}"
        wait_until(lambda: named in caplog.text, "the log names the writer")
        assert re.search(r"\((prepared|open for) \d+ s", caplog.text)
        assert scene.gauge("stragglers") == 1
        assert scene.gauge("oldest_straggler_seconds") > 0
        if prepared:
            scene.execute(psycopg.sql.SQL("COMMIT PREPARED {}").format(gid))
        else:
            writer.commit()
        wait_until(lambda: len(scene.read(topic)) == 1_001, "the late record is published")
        scene.published()
        scene.risen()
        assert scene.gauge("stragglers") == 0
    assert sorted(map(identity_of, scene.read(topic))) == list(range(1, 1_002))


@pytest.mark.parametrize("delivery", _MODES)
def test_ids_that_begin_anew(scene, make_topic, delivery):
    """After TRUNCATE ... RESTART IDENTITY rows with low ids are published, and the floor stays on."""
    topic = make_topic()
    with scene.harvesting(delivery):
        for value in ("1", "2", "3"):
            scene.stash(*(OutboxRecord(topic, f"k{number}", value) for number in range(50)))
            scene.published()
            scene.risen()
            scene.execute("TRUNCATE outbox RESTART IDENTITY")
        scene.stash(OutboxRecord(topic, "last", "4"))
        scene.published()
        assert scene.gauge("enabled") == 1
    assert len(scene.read(topic)) == 151


@pytest.mark.parametrize("delivery", _MODES)
def test_client_that_draws_ids_ahead(scene, make_topic, caplog, delivery):
    """A record with an id drawn ahead, below the floor, is published; the log names it, and the floor is off."""
    topic = make_topic()
    with scene.harvesting(delivery):
        (drawn,) = scene.execute("SELECT nextval(pg_get_serial_sequence('outbox', 'id')) AS id")
        scene.fill(topic, 100)
        scene.published()
        scene.risen()
        empty = "'{}', '{}'"
        scene.execute(
            "INSERT INTO outbox (id, create_time, kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
            f" VALUES (%s, now(), %s, 'ahead', {empty})",
            [drawn.id, topic],
        )
        scene.published()
        scene.fill(topic, 1)
        scene.published()
        wait_until(lambda: scene.gauge("enabled") == 0, "the floor is off")
        assert f"record {drawn.id} appeared below" in caplog.text
        assert "draws ids ahead" in caplog.text
    assert sorted(map(identity_of, scene.read(topic))) == list(range(1, 103))


@pytest.mark.parametrize("delivery", _MODES)
def test_sequence_that_caches(scene, make_topic, caplog, delivery):
    """If sessions cache blocks of ids the floor is off, the log names the reason, and no record is lost."""
    topic = make_topic()
    scene.execute("ALTER SEQUENCE outbox_id_seq CACHE 50")
    with scene.connect() as one, scene.connect() as other, scene.harvesting(delivery):
        for connection, value in ((one, "1"), (other, "2"), (one, "3")):
            scene.stasher.stash(connection, OutboxRecord(topic, "k", value))
            connection.commit()
            scene.published()
        assert scene.gauge("enabled") == 0
        assert scene.gauge("distance_ids") is None
        assert "the settled floor is off" in caplog.text
        assert "CACHE 50" in caplog.text
    assert len(scene.read(topic)) == 3


@pytest.mark.parametrize("delivery", _MODES)
def test_lost_connections(scene, make_topic, delivery):
    """After all sessions have been ended the floor is proven again, and a late commit is not lost."""
    topic = make_topic()
    with scene.connect() as late, scene.harvesting(delivery):
        scene.stasher.stash(late, OutboxRecord(topic, "late", "0"))
        for _ in range(3):
            scene.fill(topic, 200)
            scene.published()
            scene.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'kafka-outbox%'"
            )
        late.commit()
        scene.published()
        scene.risen()
    assert {identity_of(message) for message in scene.read(topic)} == set(range(1, 602))


class _Overtaken(PostgresStore):
    """A store with a rival who takes all rows of the first mark, between its evidence for the floor and its update.

    Then come ten records more of the same keys.
    """

    def __init__(self, scene, topic):
        super().__init__(scene.database)
        self._scene = scene
        self._topic = topic

    def mark(self, leader_id, query):
        topic, self._topic = self._topic, None
        if topic is None:
            return super().mark(leader_id, query)
        with ThreadPoolExecutor() as pool, self._scene.connect() as rival:
            rival.execute("UPDATE outbox SET leader_id = gen_random_uuid()")
            marking = pool.submit(super().mark, leader_id, query)
            wait_for_a_blocked_session(self._scene.database)
            rival.commit()
            self._scene.fill(topic, 10, keys=2)
            return marking.result()


def test_mark_that_a_rival_leaves_nothing_of(scene, make_topic):
    """A mark all of whose rows another leader has just marked is no empty table: the floor stays below them."""
    topic = make_topic()
    scene.fill(topic, 10, keys=2)
    with scene.harvesting("at-least-once", store_factory=lambda: _Overtaken(scene, topic)):
        scene.published()
        enabled = scene.gauge("enabled")
    assert_only_adjacent_repeats(scene.read(topic), 20)
    assert enabled == 1, "a row was found below it"


@pytest.mark.parametrize("delivery", _MODES)
def test_full_lanes_are_found_again(scene, make_topic, delivery):
    """The floor rises past rows of a hot key that marks leave out, and all of them still arrive, in order."""
    topic = make_topic()
    scene.fill(topic, 400, keys=1)
    scene.fill(topic, 2_000, keys=None if scene.stasher.layout.has_partition else 2_000)
    limits = _LIMITS | {"lane_capacity": 10, "mark_query_records": 100}
    with scene.running(config={"delivery": delivery}, limits=limits):
        scene.published()
    hot = [identity_of(message) for message in scene.read(topic) if message.key == b"k0"]
    assert [identity for identity in hot if identity <= 400] == list(range(1, 401))
    assert len(scene.read(topic)) == 2_400
