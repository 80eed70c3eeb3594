"""Surprises for a shard's task: holds, tables, servers, torn transactions; and rows that mean no good."""

import threading
import time
from contextlib import closing
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import psycopg
import pytest

from outbox_core.errors import OutboxError, OutboxTableError, StoreUnavailable
from outbox_core.kafka.manifest import Opening
from outbox_core.kafka.tracking import opening_key
from outbox_core.kafka.transactions import Committed, never
from outbox_core.record import OutboxRecord
from outbox_core.retention.archive import archive_statements
from outbox_core.stores.interface import NO_FLOOR
from outbox_spark.pipelines import relay
from outbox_spark.pipelines.relay import RelayConfig, RelayFailed, _Relay
from outbox_spark.relay import fencing
from outbox_spark.relay.duty import RelayDuty
from outbox_spark.relay.monitor import RelayMonitor
from outbox_spark.relay.plan import Planner, ShardOutcome
from outbox_spark.relay.shard_store import ShardStore
from tests.harvesting import GENEROUS_SECONDS, identity_of, wait_until
from tests.spark.relay.outcome import assert_each_once_in_order
from tests.spark.relay.relay_scene import RelayScene, slow_ends

pytestmark = pytest.mark.real_broker


@pytest.fixture
def scene_class():
    """Return the class of outboxes with relays."""
    return RelayScene


def tear(scene, number, ids):
    """Commit a transaction of these rows that has an opening and no manifest, as a late EndTxn would."""
    identity, rows = scene.transactions.of_shard(number), scene.store.find(ids)
    producer = identity.new_producer()
    assert producer.init() is None
    assert producer.begin() is None
    opening = Opening.of(identity.outbox, scene.store.server_id(), rows).encode()
    key = opening_key(identity.transactional_id)
    assert producer.send_manifest(identity.tracking_topic, opening, number, key=key) is None
    assert len(producer.send(rows, never).records) == len(ids)
    assert isinstance(producer.commit(), Committed)
    producer.discard()


def run_all(scene, term, planner, **options):
    """Run batches until no row is left; return the errors."""
    errors = []
    while not errors and (plan := scene.plan(term, planner, **options)):
        for outcome in scene.run(plan):
            planner.finished(outcome)
            errors += [f"{outcome.error}: {outcome.message}"] * bool(outcome.error)
    return errors


def test_a_torn_transaction_is_read_back_once(scene, make_topic):
    """Its rows are deleted by the next term, and never again: the ids, keys and values of other rows may be equal."""
    topic = make_topic()
    scene.fill(topic, 3, keys=1)
    tear(scene, 1, [1, 2])
    scene.settle()
    assert [row.id for row in scene.rows()] == [3]
    scene.execute("TRUNCATE outbox RESTART IDENTITY")
    scene.fill(topic, 3, keys=1)
    scene.settle()
    assert [row.id for row in scene.rows()] == [1, 2, 3]


@pytest.mark.timeout(120)
def test_slow_ends_and_a_torn_transaction_do_not_stop_a_task(scene, make_topic, monkeypatch):
    """A task that finds a torn transaction goes on, even if every commit and abort may have been sent twice."""
    topic = make_topic()
    scene.fill(topic, 20, keys=3)
    plan = scene.first_plan()
    tear(scene, 0, [1, 2, 3])
    slow_ends(monkeypatch)
    assert not any(outcome.error for outcome in scene.run(plan))
    assert_each_once_in_order(scene, topic, 20)


def test_a_hold_that_is_released_during_a_batch_stays_until_its_end(scene, make_topic):
    """A task that sets a hold of its own does not forget those of its plan, whose rows its position may have passed."""
    topic = make_topic()
    scene.settings = scene.config(producer_kafka_config={"message.max.bytes": 1_000_000})
    scene.hold("add", topic, key="k")
    scene.stash(*(OutboxRecord(topic=topic, key=key, value=b"x") for key in ("k", "a", "k", "b")))
    term = scene.claim()
    scene.settle()
    planner = Planner(scene.store, 1)
    assert run_all(scene, term, planner, shards=1) == []
    scene.stash(OutboxRecord(topic=topic, key="large", value=b"x" * 2_000_000))
    scene.stash(*(OutboxRecord(topic=topic, key=key, value=b"x") for key in ("c", "k", "d")))
    plan = scene.plan(term, planner, shards=1, rows=1)
    scene.hold("release", topic=topic, key="k")
    for outcome in scene.run(plan):
        planner.finished(outcome)
    assert run_all(scene, term, planner, shards=1) == []
    assert [identity_of(message) for message in scene.read(topic) if message.key == b"k"] == [1, 3, 7]
    assert [hold.key for hold in scene.held()] == ["large"]


def test_a_task_that_begins_late_sees_new_holds(scene, make_topic):
    """A record that is held after the plan was made is not published by a task that begins (again) after that."""
    topic = make_topic()
    scene.fill(topic, 20, keys=2)
    plan = scene.first_plan()
    scene.hold("add", topic, key="k1")
    outcomes = scene.run(plan)
    assert {message.key for message in scene.read(topic)} == {b"k0"}
    assert all(outcome.reached == plan.ranges[0].after for outcome in outcomes if not outcome.published)
    scene.hold("release", topic=topic, key="k1")
    assert scene.relay() == []
    assert_each_once_in_order(scene, topic, 20)


def test_topics_that_are_no_topics_do_not_stop_others(scene, make_topic):
    """Names of any length are held with their rows: the opening of the transaction leaves them out."""
    topic = make_topic()
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_value)"
        " SELECT n || repeat(chr(128512), 240), 'x' FROM generate_series(1, 600) AS n"
    )
    scene.stash(OutboxRecord(topic=topic, key="k", value=b"x"))
    assert scene.relay(shards=1, rows=1_000, patience=10.0) == []
    assert len(scene.read(topic)) == 1
    assert len(scene.held()) == scene.count() == 600


def test_the_table_is_found_once(scene):
    """A table of that name which comes to lie before it on the search path is not taken for it."""
    settings = scene.config(outbox_table="outbox")
    found = scene.store.found_in(settings)
    scene.execute("CREATE SCHEMA AUTHORIZATION CURRENT_USER; CREATE TABLE outbox_of_another ()")
    scene.execute(f'CREATE TABLE "{psycopg.connect(scene.database).info.user}".outbox (LIKE public.outbox)')
    store = ShardStore.of(found)
    assert store.check() == scene.identity
    store.close()


def test_workers_of_another_server_publish_nothing(scene, make_topic, monkeypatch):
    """A data source that leads workers to another server than the driver is an error that says so."""
    topic = make_topic()
    scene.fill(topic, 5)
    plan = scene.first_plan()
    monkeypatch.setattr(ShardStore, "server_id", lambda _: "another")
    outcomes = scene.run(plan)
    assert {outcome.error for outcome in outcomes} == {"OutboxTableError"}
    assert "the system identifier another" in outcomes[0].message
    assert scene.read(topic) == []


def test_a_relay_makes_partitions_of_the_archive(scene):
    """The archive gets the partitions of the next days also where only relays run."""
    for statement in archive_statements(scene.table):
        scene.execute(statement)
    parts = "SELECT inhrelid::regclass::text AS name FROM pg_inherits WHERE inhparent = 'outbox_archive'::regclass"
    last = max(part.name for part in scene.execute(f"{parts} AND inhrelid::regclass::text ~ '[0-9]{{8}}$'"))
    scene.execute(f"DROP TABLE {last}")
    relay = _Relay(None, RelayConfig(harvest=scene.config(retention="archive")), None, threading.Event(), None)
    with closing(relay._store):
        relay._rotate_archive()
    assert last in {part.name for part in scene.execute(parts)}


def test_a_count_that_takes_too_long_is_given_up(scene):
    """The driver counts the backlog between two batches, so the time for that is limited; then no number is shown."""
    harvest = scene.config(limits={"statement_timeout": "100ms"})
    monitor = _Relay(None, RelayConfig(harvest=harvest), None, threading.Event(), None)._monitor
    monitor.leads(1)
    with scene.connect() as other:
        other.execute(f"LOCK TABLE {scene.table.quoted}")
        other.execute("SET idle_in_transaction_session_timeout = '10s'")  # a count without a limit ends then, too
        monitor.looks()
    assert monitor._waiting is None
    monitor.looks(0.0)  # not yet: for what the count took it rests for long
    assert monitor._waiting is None
    monitor.leads(1)
    monitor.looks()
    assert monitor._waiting.number == 0
    monitor.leads(None)


def test_all_is_settled_again_after_a_failure(scene, make_topic, monkeypatch):
    """A batch that failed is followed by what a new term begins with: what stopped a task may need the driver."""
    topic, rows_left = make_topic(), []
    scene.fill(topic, 5, keys=2)
    relay = _Relay(None, RelayConfig(harvest=scene.settings), None, threading.Event(), None)
    relay._identity, relay._pause, relay._duty = scene.transactions, 0.0, RelayDuty({}, "g", None)
    relay._plan = replace(relay._plan, outbox=scene.identity, server_id=scene.store.server_id())

    def publish(_, plan, __):
        rows_left.append(scene.count())
        if len(rows_left) > 1:
            return scene.run(plan)
        tear(scene, 0, [1, 2])
        return [ShardOutcome(wanted.number, error="KafkaUnavailable", message="away") for wanted in plan.ranges]

    monkeypatch.setattr("outbox_spark.pipelines.relay.publish", publish)
    lease, contender = SimpleNamespace(term=scene.claim()), SimpleNamespace(leads=lambda _: True)
    with closing(relay._store):
        assert relay._lead(lease, contender, once=True)
        relay._monitor.leads(None)
    assert rows_left[:2] == [5, 3]
    assert_each_once_in_order(scene, topic, 5)


class Driver:
    """A relay's driver on a thread of its own, whose tasks run here; it leads from the beginning."""

    def __init__(self, scene, monkeypatch, *, once=False):
        self.stopping, self.duty, self.failure = threading.Event(), RelayDuty({}, "g", None), None
        self.relay = _Relay(None, RelayConfig(harvest=scene.settings), None, self.stopping, None)
        self.relay._identity, self.relay._duty = scene.transactions, self.duty
        self.relay._plan = replace(self.relay._plan, outbox=scene.identity, server_id=scene.store.server_id())
        self.publish = scene.run
        monkeypatch.setattr(relay, "publish", lambda _, plan, __: self.publish(plan))
        self.leads = True  # else one leadership ends, and the next begins
        self._lead = partial(self.relay._lead, contender=SimpleNamespace(leads=lambda _: self.leads), once=once)
        self._claim = scene.claim
        self._thread = threading.Thread(target=self._run)

    def _run(self):
        with closing(self.relay._store):
            try:
                while not self.stopping.is_set():
                    self.leads = True
                    self._lead(SimpleNamespace(term=self._claim()))
            except OutboxError as error:
                self.failure = error
            self.relay._monitor.leads(None)

    @property
    def is_alive(self):
        return self._thread.is_alive()

    def __enter__(self):
        self.duty.leads(True)
        self._thread.start()
        return self

    def __exit__(self, *_):
        self.stopping.set()
        self._thread.join(GENEROUS_SECONDS)
        assert not self.is_alive


@pytest.fixture
def driver(scene, monkeypatch):
    """Yield a driver at work, which is stopped when the test ends."""
    with Driver(scene, monkeypatch) as made:
        yield made


def lines_of(caplog, text):
    """Return how many log lines have a text."""
    return sum(text in line for line in caplog.messages)


@pytest.mark.parametrize("is_new", [False, True])
def test_a_table_that_is_away_for_a_while_ends_no_relay_at_work(scene, driver, make_topic, caplog, is_new):
    """A table that is renamed away and back, or dropped and made anew, is an outage, told once; then all flows."""
    topic = make_topic()
    scene.fill(topic, 5)
    wait_until(lambda: scene.count() == 0, "the first rows are published")
    scene.execute(f"ALTER TABLE {scene.table.quoted} RENAME TO away")
    wait_until(lambda: lines_of(caplog, "does not exist"), "the relay misses its table")
    time.sleep(4.0)
    assert driver.is_alive
    assert lines_of(caplog, "does not exist") == 1
    assert driver.duty._failure == ""  # others miss it, too
    if is_new:
        scene.execute(f"CREATE TABLE {scene.table.quoted} (LIKE away INCLUDING ALL)")
    else:
        scene.execute(f"ALTER TABLE away RENAME TO {scene.table.quoted.rpartition('.')[2]}")
    scene.fill(topic, 5)
    wait_until(lambda: scene.count() == 0, "the relay goes on")
    wait_until(lambda: lines_of(caplog, "the relay: back after"), "the outage is over")
    assert len(scene.read(topic)) == 10


def test_what_may_take_long_is_told(scene, driver, make_topic, monkeypatch):
    """Settling, marks, a count of the backlog and the job may take long, and the watch knows; planning may not."""
    slow = {}

    def noting(owner, name):
        real = getattr(owner, name)

        def noted(*arguments, **options):
            slow[name] = driver.duty._slow_until > time.monotonic()
            return real(*arguments, **options)

        monkeypatch.setattr(owner, name, noted)

    for name in ("ensure_shards", "fence_and_purge", "refuse_marked_rows"):
        noting(fencing, name)
    noting(Planner, "next")
    noting(RelayMonitor, "looks")
    noting(relay, "publish")
    driver.leads = False  # the next one does all of it
    scene.fill(make_topic(), 5)
    wait_until(lambda: scene.count() == 0 and len(slow) == 6, "the rows are published")
    assert slow.pop("next") is False
    assert all(slow.values())


@pytest.mark.parametrize("once", [False, True])
def test_a_table_that_is_missing_ends_a_relay_that_starts(scene, monkeypatch, once):
    """A relay ends, with the reason, for what is wrong before it has begun in order; with `once`, at any time."""
    scene.execute(f"ALTER TABLE {scene.table.quoted} RENAME TO away")
    with Driver(scene, monkeypatch, once=once) as driver:
        wait_until(lambda: not driver.is_alive, "the relay ends")
    assert isinstance(driver.failure, OutboxTableError)


def test_marks_in_a_later_leadership_are_left_to_others(scene, driver, make_topic, caplog):
    """Rows with a mark end no relay that has worked: it counts as unable, so that others drain them."""
    topic = make_topic()
    scene.fill(topic, 5)
    wait_until(lambda: scene.count() == 0, "the first rows are published")
    driver.publish = lambda _: None
    scene.fill(topic, 1)
    scene.execute(f"UPDATE {scene.table.quoted} SET leader_id = gen_random_uuid()")
    driver.leads = False
    wait_until(lambda: lines_of(caplog, "carry the mark"), "the relay sees the mark")
    wait_until(lambda: "carry the mark" in driver.duty._failure, "the relay counts as unable")
    driver.publish = scene.run
    scene.execute(f"UPDATE {scene.table.quoted} SET leader_id = NULL")
    wait_until(lambda: scene.count() == 0, "the relay goes on")


def test_a_topic_that_is_refused_for_a_while_ends_no_relay_at_work(scene, driver, make_topic, caplog):
    """A right that was revoked is an outage for a relay that has published, and counts as work that it cannot do."""
    topic = make_topic()
    scene.fill(topic, 5)
    wait_until(lambda: scene.count() == 0, "the first rows are published")
    refused = ShardOutcome(0, 1, error="TopicRefused", message="record 6: not authorized, as User:shop")
    driver.publish = lambda _: [refused]
    scene.fill(topic, 5)
    wait_until(lambda: lines_of(caplog, "the relay: record 6: not authorized, as User:shop"), "the relay is refused")
    time.sleep(3.0)
    assert driver.duty._failure == refused.message
    assert lines_of(caplog, "retrying") == 1
    driver.publish = scene.run
    wait_until(lambda: scene.count() == 0, "the relay goes on")
    assert driver.is_alive


@pytest.mark.parametrize(("error", "has_worked"), [("TopicRefused", False), ("InvalidRecord", True)])
def test_what_a_task_finds_wrong_ends_a_relay(scene, driver, make_topic, error, has_worked):
    """A relay whose first batch is refused ends, with the reason; a record that cannot be published always ends it."""
    topic = make_topic()
    if has_worked:
        scene.fill(topic, 5)
        wait_until(lambda: scene.count() == 0, "the first rows are published")
    driver.publish = lambda _: [ShardOutcome(0, error=error, message="6")]
    scene.fill(topic, 5)
    wait_until(lambda: not driver.is_alive, "the relay ends")
    assert isinstance(driver.failure, RelayFailed)


def test_a_lost_connection_takes_positions_away(scene, make_topic):
    """A server may have lost the last ids of its sequence with it: the next plan begins at the head."""
    scene.fill(make_topic(), 20, keys=3)
    term = scene.claim()
    scene.settle()
    planner = Planner(scene.store, 1)
    assert run_all(scene, term, planner, shards=1) == []
    scene.fill("t", 1)
    assert planner.next()[0].after == 20
    pid = scene.store.table.connected().info.backend_pid
    scene.execute("SELECT pg_terminate_backend(%s, 10000)", [pid])
    with pytest.raises(StoreUnavailable):
        planner.next()
    assert planner.next()[0].after == NO_FLOOR.id
