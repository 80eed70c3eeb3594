"""Health follows what a harvester has done: the reason is told when nothing gets done, whatever is begun."""

import threading
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer

from outbox_core.harvest import harvester as harvester_module
from outbox_core.harvest.recovery import Step
from outbox_core.metrics import Activity, HarvestMetrics
from outbox_core.record import OutboxRecord
from tests.harvesting import AlwaysLeader, Scene, wait_until

LIMIT_SECONDS = 2.0


@pytest.fixture
def scene(database, kafka_bootstrap, monkeypatch):
    """A fresh outbox, whose harvesters call themselves unwell after two seconds instead of thirty."""
    monkeypatch.setattr(harvester_module, "_UNHEALTHY_AFTER_SECONDS", LIMIT_SECONDS)
    scene = Scene(database, kafka_bootstrap)
    yield scene
    scene.close()


@pytest.mark.real_broker
def test_terms_that_commit_nothing_are_no_good(scene, make_topic):
    """Exactly once: however many terms begin well, health fails while none commits, and is back with the first."""
    topic = make_topic()
    config = {"delivery": "exactly-once"}
    identity = scene.drain(config=config).metrics.outbox_name
    transactional_id = scene.config(**config).tracking_names(identity).transactional_id
    rival_settings = {"bootstrap.servers": scene.bootstrap, "transactional.id": transactional_id}
    scene.fill(topic, 10)
    is_fenced = threading.Event()
    is_fenced.set()
    fences = []

    def fence(step):
        if step is Step.BEFORE_COMMIT and is_fenced.is_set():
            fences.append(step)
            with Producer(rival_settings) as rival:
                rival.init_transactions(30)

    with scene.running(config=config, reached=fence) as harvester:
        wait_until(lambda: not harvester.health().ok, "it is not well", timeout=30)
        assert harvester.health().leader
        count = len(fences)
        wait_until(lambda: harvester.health().ok or len(fences) > count + 1, "terms begin and end")
        assert not harvester.health().ok
        assert scene.count() == 10
        is_fenced.clear()
        wait_until(lambda: scene.count() == 0 and harvester.health().ok, "it is well again")


@pytest.mark.parametrize("delivery", ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)])
def test_locked_table_is_told(scene, make_topic, delivery):
    """A statement that waits for a lock on the table is no news for the database, and is for health."""
    topic = make_topic()
    with scene.running(config={"delivery": delivery}) as harvester:
        wait_until(lambda: harvester.health().ok and harvester.is_leader, "it leads")
        with scene.connect() as blocking:
            blocking.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
            wait_until(lambda: not harvester.health().ok, "it is not well", timeout=20)
            assert "the table could not be read" in harvester.health().detail
        wait_until(lambda: harvester.health().ok, "it is well again")
        scene.fill(topic, 5)
        wait_until(lambda: scene.count() == 0, "it publishes")


@pytest.mark.parametrize("delivery", ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)])
def test_held_record_is_no_trouble(scene, delivery):
    """A record that can never be published is held, and the harvester is well before and after; so is an idle one."""
    with scene.running(config={"delivery": delivery}) as harvester:
        scene.stash(OutboxRecord("t", "k", b"x"))
        scene.execute("UPDATE outbox SET kafka_topic = 'no topic'")
        wait_until(scene.held, "it is held")
        over = threading.Event()
        timer = threading.Timer(2 * LIMIT_SECONDS, over.set)
        timer.start()
        wait_until(lambda: over.is_set() or not harvester.health().ok, "some time passes")
        assert harvester.health().ok


class _Troubled(AlwaysLeader):
    """Cannot elect anybody."""

    trouble = "leader group 'g' has had no leader for 20 s: password=secret"

    def start(self):
        """Stand by."""


def test_nobody_leads(scene):
    """A standby tells that there is no leader, without secrets, and counts what waits, since nobody else does."""
    scene.fill("t", 3)
    metrics = HarvestMetrics(outbox_name="o")
    limits = {"min_metrics_interval": "20ms"}
    with scene.running(elector_factory=_Troubled, metrics=metrics, limits=limits) as harvester:
        health = harvester.health()
        assert not health.ok
        assert "has had no leader for 20 s" in health.detail
        assert "secret" not in health.detail
        pending = lambda: metrics.registry.get_sample_value("outbox_pending_records", {"outbox": "o"})  # noqa: E731
        wait_until(lambda: pending() == 3, "the backlog is counted")


def test_ended_and_not_yet_started(scene):
    """What does not run is not well."""
    harvester = scene.harvester()
    assert (harvester.health().ok, harvester.health().detail) == (False, "not started")
    harvester.start()
    harvester.stop()
    harvester.join()
    assert (harvester.health().ok, harvester.health().detail) == (False, "stopped")


@pytest.fixture
def activity():
    """An activity with a clock that is set by hand, `activity.clock.time`."""
    clock = SimpleNamespace(time=100.0)
    activity = Activity(lambda: clock.time)
    activity.clock = clock
    return activity


def test_sending_without_an_end_is_trouble(activity):
    """Attempts are trouble once they have gone on for longer than the limit without any result, and no sooner."""
    for _ in range(29):
        activity.clock.time += 1
        activity.looked()
        activity.tries()
    assert activity.trouble(30) is None
    for _ in range(3):
        activity.clock.time += 1
        activity.looked()
        activity.tries()
    assert "none could be dealt with for 31 s" in activity.trouble(30)
    activity.finished()
    assert activity.trouble(30) is None


def test_attempts_long_ago_are_no_trouble(activity):
    """Who has nothing to send any more is not blamed for what was given up."""
    activity.tries()
    for _ in range(100):
        activity.clock.time += 1
        activity.looked()
        assert activity.trouble(30) is None


def test_table_that_is_not_read_is_trouble(activity):
    """Looks are expected at the interval that is set, and a new leadership counts anew."""
    activity.clock.time += 50
    assert activity.trouble(30, look_interval=60) is None
    assert "the table could not be read for 50 s" in activity.trouble(30)
    activity.begin()
    assert activity.trouble(30) is None
