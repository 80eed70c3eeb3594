"""Surprises for a shard's task: holds, tables, servers, torn transactions; and rows that mean no good."""

import threading
from contextlib import closing
from dataclasses import replace
from types import SimpleNamespace

import psycopg
import pytest

from outbox_core.errors import StoreUnavailable
from outbox_core.kafka.manifest import Opening
from outbox_core.kafka.tracking import opening_key
from outbox_core.kafka.transactions import Committed, never
from outbox_core.record import OutboxRecord
from outbox_core.retention.archive import archive_statements
from outbox_core.stores.interface import NO_FLOOR
from outbox_spark.pipelines.relay import RelayConfig, _Relay
from outbox_spark.relay.duty import RelayDuty
from outbox_spark.relay.plan import Planner, ShardOutcome
from outbox_spark.relay.shard_store import ShardStore
from tests.harvesting import identity_of
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
