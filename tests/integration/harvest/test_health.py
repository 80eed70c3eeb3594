"""A harvester's health: it follows results, not attempts, and names the reason for a failure."""

import threading
from types import SimpleNamespace

import pytest
from confluent_kafka import Producer

from outbox_core.events import LeaderFenced
from outbox_core.harvest import harvester as harvester_module
from outbox_core.kafka.identity import Failpoint
from outbox_core.metrics import Activity, HarvestMetrics
from outbox_core.record import OutboxRecord
from tests.harvesting import AlwaysLeader, Scene, wait_until
from tests.services import as_role

LIMIT_SECONDS = 2.0


@pytest.fixture
def scene(database, kafka_bootstrap, monkeypatch):
    """A fresh outbox whose harvesters are unhealthy after two seconds instead of thirty."""
    monkeypatch.setattr(harvester_module, "_UNHEALTHY_AFTER_SECONDS", LIMIT_SECONDS)
    scene = Scene(database, kafka_bootstrap)
    yield scene
    scene.close()


@pytest.mark.real_broker
def test_terms_that_commit_nothing_are_no_good(scene, make_topic):
    """Exactly once: health fails while no term commits, however many begin well, and is back with the first commit."""
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
        if step is Failpoint.BEFORE_COMMIT and is_fenced.is_set():
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
def test_connection_that_is_missing_is_told(scene, make_topic, topic_name, delivery, caplog):
    """Health and one line tell that a role may have one connection only, so that rows are read and not deleted."""
    role = topic_name("role")
    scene.execute(f'CREATE ROLE "{role}" LOGIN CONNECTION LIMIT 1; GRANT ALL ON outbox, outbox_hold TO "{role}"')
    config = {"data_source": as_role(scene.database, role), "delivery": delivery}
    try:
        with scene.running(config=config) as harvester:
            scene.fill(make_topic(), 10)
            wait_until(lambda: "too many connections" in harvester.health().detail, "it is not well", timeout=30)
            assert caplog.text.count("too many connections") == 1
            scene.execute(f'ALTER ROLE "{role}" CONNECTION LIMIT 9')
            wait_until(lambda: scene.count() == 0 and harvester.health().ok, "it is well again")
    finally:
        scene.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


@pytest.mark.parametrize("delivery", ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)])
def test_locked_table_is_told(scene, make_topic, delivery):
    """A statement that waits for a lock on the table makes the harvester unhealthy, with the reason."""
    topic = make_topic()
    with scene.running(config={"delivery": delivery}) as harvester:
        scene.fill(topic, 1)
        wait_until(lambda: scene.count() == 0 and harvester.health().ok, "it publishes: its leadership has begun")
        with scene.connect() as blocking:
            blocking.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
            wait_until(lambda: not harvester.health().ok, "it is not well", timeout=20)
            wait_until(lambda: "could not read the outbox" in harvester.health().detail, "the reason", timeout=20)
        wait_until(lambda: harvester.health().ok, "it is well again")
        scene.fill(topic, 5)
        wait_until(lambda: scene.count() == 0, "it publishes")


@pytest.mark.parametrize("delivery", ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)])
def test_held_record_is_no_trouble(scene, delivery):
    """A harvester with a held record is healthy."""
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
    """An elector whose group has no leader."""

    trouble = "leader group 'g' has had no leader for 20 s: password=secret"

    def start(self):
        """Stand by."""


def test_nobody_leads(scene):
    """A standby reports that there is no leader, without secrets, and counts the backlog, since no leader does."""
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


class _Fenced(AlwaysLeader):
    """An elector that is cut off from Kafka, and has not been for long enough to know that nobody leads."""

    silent_seconds = 6.0

    def cut_off(self):
        """Lose the lease."""
        leader_id, self.leadership = self.leadership.leader_id, None
        self._on_event(LeaderFenced(leader_id, "no heartbeat"))


def test_backlog_is_counted_on_after_a_fence(scene):
    """A leader that loses its lease in an outage of Kafka goes on counting, and tells that Kafka is away."""
    metrics = HarvestMetrics(outbox_name="o")
    read = lambda name: metrics.registry.get_sample_value(f"outbox_{name}", {"outbox": "o"})  # noqa: E731
    limits = {"min_metrics_interval": "20ms"}
    with scene.running(elector_factory=_Fenced, metrics=metrics, limits=limits) as harvester:
        wait_until(lambda: read("deliverable_records") == 0, "the leader counts")
        harvester.elector.cut_off()
        scene.fill("t", 3)
        wait_until(lambda: read("deliverable_records") == 3, "it counts on")
        assert (read("leader"), read("kafka_up")) == (0, 0)


def test_ended_and_not_yet_started(scene):
    """A harvester that is not started, or is stopped, is unhealthy."""
    harvester = scene.harvester()
    assert (harvester.health().ok, harvester.health().detail) == (False, "not started")
    harvester.start()
    harvester.stop()
    harvester.join()
    assert (harvester.health().ok, harvester.health().detail) == (False, "stopped")


@pytest.fixture
def activity():
    """Return an activity with a clock that a test sets by hand, `activity.clock.time`."""
    clock = SimpleNamespace(time=100.0)
    activity = Activity(lambda: clock.time)
    activity.clock = clock
    return activity


def test_sending_without_an_end_is_trouble(activity):
    """Attempts are trouble once they have gone on for longer than the limit without a result, and no sooner."""
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
    """An attempt that was given up is no trouble while there is no other record to send."""
    activity.tries()
    for _ in range(100):
        activity.clock.time += 1
        activity.looked()
        assert activity.trouble(30) is None


def test_table_that_is_not_read_is_trouble(activity):
    """A table that is not read within the limit and the interval is trouble; a new leadership counts anew."""
    activity.clock.time += 50
    assert activity.trouble(30, look_interval=60) is None
    assert "the table was not read for 50 s" in activity.trouble(30)
    activity.begin()
    assert activity.trouble(30) is None


def test_the_call_that_is_waited_for_is_named(activity):
    """A leader that waits for Kafka says so, and not that the table is not read: the longest of all calls counts."""
    activity.begin()
    activity.tries_to("end a transaction")
    with activity.step("the commit of a transaction"):
        activity.clock.time += 31
        with activity.statement("a scan", "read the outbox table"):
            activity.clock.time += 4
            told = activity.trouble(30)
    assert told == (
        "it leads, and could not end a transaction for 35 s; it waits for the commit of a transaction for 35 s"
    )
    activity.culprit = "broker 3 at kafka3:9092 does not answer"
    assert activity.trouble(30).endswith("for 35 s; broker 3 at kafka3:9092 does not answer")
    activity.duty.succeeded("end a transaction")
    assert "the table was not read for 35 s" in activity.trouble(30)
    activity.looked()
    activity.finished()
    assert activity.trouble(30) is None


def test_two_calls_of_one_name(activity):
    """Threads may be at equal steps: the end of the later one hides the earlier one from nobody."""
    with activity.step("a statement"):
        activity.clock.time += 10
        with activity.step("a statement"):
            activity.clock.time += 1
        assert activity.longest_step == ("a statement", 11.0)
    assert activity.longest_step == ("", 0.0)
