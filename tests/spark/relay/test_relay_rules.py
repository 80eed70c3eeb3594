"""Shards on real services, without Spark: crashes at every step, changes of leadership, writers that take long."""

import json
import os
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import Producer

from outbox_core.config import LeaderNames
from outbox_core.election.observer import highest_claim
from outbox_core.errors import MarkedRowsFound, TrackingTopicError
from outbox_core.kafka.clients import make_consumer
from outbox_core.kafka.topics import TopicLimits, ensure_leader_topic
from outbox_core.record import OutboxRecord
from outbox_core.retention.archive import archive_statements
from outbox_core.schema import add_checks_sql, drop_checks_sql
from outbox_core.stores.interface import RowQuery
from outbox_core.stores.relay_marks import FIRST, LAST
from outbox_spark.relay import fencing
from outbox_spark.relay.plan import Planner
from outbox_spark.relay.shard_store import ShardRange, ShardStore
from outbox_spark.relay.shard_task import ShardTask
from tests.harvesting import identity_of
from tests.spark.relay.outcome import assert_each_once_in_order
from tests.spark.relay.relay_scene import SHARDS, Killed, RelayScene, slow_ends

pytestmark = pytest.mark.real_broker

STEPS = ("fenced", "scanned", "sent", "committed", "purged")


@pytest.fixture
def scene_class():
    """Return the class of outboxes with relays."""
    return RelayScene


@pytest.mark.parametrize("shards", [pytest.param(3, marks=pytest.mark.complete), 2])
@pytest.mark.parametrize("step", STEPS)
def test_a_relay_that_dies_at_any_step_repeats_and_loses_nothing(scene, make_topic, step, shards):
    """After a relay died at a step, the next one, also with more shards, publishes the missing rows in order."""
    topic = make_topic()
    scene.fill(topic, 100, keys=7)
    with pytest.raises(Killed):
        scene.relay(kill_at=(2, step))
    assert scene.relay(shards=shards) == []
    assert_each_once_in_order(scene, topic, 100)


@pytest.mark.parametrize("step", ["scanned", "sent", "committed"])
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_harvester_takes_over_from_a_dead_relay(scene, make_topic, step, delivery):
    """A harvester in either mode publishes the rows that a dead relay has not published, and no others."""
    topic = make_topic()
    scene.fill(topic, 100, keys=7)
    with pytest.raises(Killed):
        scene.relay(kill_at=(2, step))
    scene.drain(config={"delivery": delivery})
    assert_each_once_in_order(scene, topic, 100)


def test_a_relay_takes_over_from_a_dead_harvester(scene, make_topic):
    """Rows that a harvester's last transaction published and did not purge are not published again."""
    topic = make_topic()
    scene.fill(topic, 100, keys=7)

    class Stopped(Exception):
        pass

    def reached(step):
        if step.value == "before-purge":
            raise Stopped

    harvester = scene.harvester(config={"delivery": "exactly-once"}, limits={"mark_query_records": 30}, reached=reached)
    harvester.start()
    with pytest.raises(Stopped):
        harvester.join(60)
    assert scene.count() == 100
    scene.relay()
    assert scene.sent == 70
    assert_each_once_in_order(scene, topic, 100)


@pytest.mark.parametrize("may_ask", [True, False])
def test_batches_of_a_shard_fit_a_small_topic(scene, make_topic, monkeypatch, may_ask):
    """A topic that takes 64 KiB a batch takes a larger shard, whether or not its limit may be described."""
    if not may_ask:
        monkeypatch.setattr(TopicLimits, "ask", lambda *_: {})
    topic = make_topic(partitions=1, config={"max.message.bytes": "65536"})
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value)"
        " SELECT %s, 'k' || n %% 9, lpad(n::text, 200, '0')::bytea FROM generate_series(1, 1500) AS n",
        [topic],
    )
    assert scene.relay(rows=1_500) == []
    assert_each_once_in_order(scene, topic, 1_500)


def test_rows_that_are_no_messages_are_held(scene, make_topic):
    """Rows that violate a constraint that is newer than they are held; a relay publishes the others."""
    topic = make_topic()
    scene.execute(drop_checks_sql(scene.table))
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_value, kafka_header_keys, leader_id) VALUES ('t', 'x', '{a}', NULL),"
        " ('t', 'x', '{a}', %s)",
        [FIRST],
    )
    scene.fill(topic, 20, keys=3)
    scene.execute(add_checks_sql(scene.table))
    assert scene.relay() == []
    assert [hold.record_id for hold in scene.held()] == [1, 2]
    assert sorted(map(identity_of, scene.read(topic))) == list(range(3, 23))


def test_marks_of_an_at_least_once_harvester_are_refused(scene, make_topic):
    """Rows that an at-least-once harvester may have published are not published without consent."""
    scene.fill(make_topic(), 5)
    scene.execute(f"UPDATE {scene.table.quoted} SET leader_id = gen_random_uuid() WHERE id = 3")
    with pytest.raises(MarkedRowsFound, match=r"1 rows \(ids 3 to 3\)"):
        scene.relay()


def test_marks_of_an_earlier_release_count_for_nothing(scene, make_topic):
    """What a relay of an earlier release has marked is published like other rows, by a relay and by a harvester."""
    topic = make_topic()
    scene.fill(topic, 20, keys=3)
    scene.execute("UPDATE outbox SET leader_id = %s WHERE id <= 5", [LAST])
    scene.execute("UPDATE outbox SET leader_id = %s WHERE id = 9", [FIRST])
    assert scene.store.marks.count().number == 0
    with pytest.raises(Killed):
        scene.relay(rows=5, kill_at=(2, "sent"))
    scene.drain(config={"delivery": "exactly-once"})
    assert_each_once_in_order(scene, topic, 20)


def test_a_task_of_a_deposed_relay_publishes_nothing(scene, make_topic):
    """A task that starts after another process has claimed leadership stops before it writes."""
    topic = make_topic()
    scene.fill(topic, 20, keys=3)
    plan = scene.first_plan()
    rival = scene.claim()
    outcomes = scene.run(plan)
    assert {(outcome.error, outcome.published) for outcome in outcomes} == {("Deposed", 0)}
    assert all(f"claim {rival} " in outcome.message for outcome in outcomes)
    assert scene.relay() == []
    assert_each_once_in_order(scene, topic, 20)


@pytest.mark.parametrize("step", [pytest.param("scanned", marks=pytest.mark.complete), "sent"])
def test_a_task_that_was_fenced_in_its_transaction_publishes_nothing(scene, make_topic, step):
    """A task that stood still in its transaction while another relay took over cannot commit."""
    topic = make_topic()
    scene.fill(topic, 20, keys=3)
    plan = scene.first_plan()

    def take_over(reached):
        if reached == step and scene.count():
            scene.relay()

    outcomes = [ShardTask(plan, wanted.number, failpoint=take_over).run() for wanted in plan.ranges]
    assert sum(outcome.published for outcome in outcomes) == 0
    assert_each_once_in_order(scene, topic, 20)


def test_slow_ends_of_all_transactions_do_not_stop_a_relay(scene, make_topic, monkeypatch):
    """Each task publishes its transaction, even if every commit and abort takes long enough for a repeat."""
    topic = make_topic()
    scene.fill(topic, 20, keys=7)
    slow_ends(monkeypatch)
    scene.relay()
    assert_each_once_in_order(scene, topic, 20)


def test_attempts_of_one_task_at_once_publish_once(scene, make_topic):
    """Several attempts of one task, at once and one after the other, publish each record once."""
    topic = make_topic()
    scene.fill(topic, 200, keys=5)
    plan = scene.first_plan()
    with ThreadPoolExecutor(6) as threads:
        attempts = [
            threads.submit(ShardTask(plan, wanted.number).run) for wanted in plan.ranges for _ in range(SHARDS + 1)
        ]
        assert {attempt.result().error for attempt in attempts} <= {"", "Fenced"}
    assert scene.relay() == []
    assert_each_once_in_order(scene, topic, 200)


def test_a_record_that_no_client_takes_is_held(scene, make_topic):
    """A record that is too large for the producer is held with its key; all others are published."""
    topic = make_topic()
    scene.settings = scene.config(producer_kafka_config={"message.max.bytes": 1_000_000})
    scene.stash(*(OutboxRecord(topic=topic, key="k", value=b"x" * size) for size in (1, 2_000_000, 2)))
    scene.stash(OutboxRecord(topic=topic, key="other", value=b"x"))
    assert scene.relay() == []
    (hold,) = scene.held()
    assert (hold.key, hold.record_id) == ("k", 2)
    assert sorted(map(identity_of, scene.read(topic))) == [1, 4]


def test_a_released_record_comes_before_later_ones(scene, make_topic):
    """A hold of a key that is released while the relay works keeps the order of the key."""
    topic = make_topic()
    scene.fill(topic, 10, keys=2)
    scene.hold("add", topic, key="k1")
    term = scene.claim()
    scene.settle()
    planner = Planner(scene.store, SHARDS)
    for outcome in scene.run(scene.plan(term, planner)):
        planner.finished(outcome)
    assert scene.plan(term, planner) is None
    scene.hold("release", topic=topic, key="k1")
    scene.fill(topic, 10, keys=2)
    while plan := scene.plan(term, planner, rows=3):
        for outcome in scene.run(plan):
            planner.finished(outcome)
    numbers = [identity_of(message) for message in scene.read(topic) if message.key == b"k1"]
    assert numbers == sorted(numbers)
    assert len(numbers) == 10


def test_records_that_only_kafka_refuses_are_held(scene, make_topic):
    """Records that are too large for their topic are held with their keys, and all before and beside them arrive."""
    topic = make_topic(1, config={"max.message.bytes": "20000"})
    small, large = b"x", os.urandom(50_000)
    values = [(f"k{number % 7}", large if number in {20, 23, 41} else small) for number in range(60)]
    scene.stash(*(OutboxRecord(topic=topic, key=key, value=value) for key, value in values))
    scene.stash(OutboxRecord(topic=topic, key="later", value=small), OutboxRecord(topic=topic, key=None, value=large))
    assert scene.relay() == []
    assert sorted(hold.record_id for hold in scene.held()) == [21, 24, 62]  # and 42 behind 21
    kept = {"k6": 20, "k2": 23}
    found = [identity_of(message) for message in scene.read(topic)]
    expected = [n + 1 for n, (key, _) in enumerate(values) if n < kept.get(key, 99)] + [61]
    assert sorted(found) == expected


@pytest.mark.parametrize("is_kafka", [True, False])
def test_a_refused_record_that_cannot_be_held_is_named(scene, make_topic, is_kafka):
    """Without a table of holds a record that the broker or the client refuses ends the relay with its id; it stays."""
    topic = make_topic(1, config={"max.message.bytes": "20000"} if is_kafka else {})
    scene.settings = scene.config(producer_kafka_config={"message.max.bytes": 1_000_000})
    scene.execute("DROP TABLE outbox_hold")
    scene.store.close()
    scene.store = ShardStore.of(scene.settings)  # another, as that one has seen the table
    scene.stash(
        OutboxRecord(topic=topic, key="a", value=b"x"),
        OutboxRecord(topic=topic, key="b", value=os.urandom(50_000 if is_kafka else 2_000_000)),
    )
    (error,) = scene.relay()
    assert error.startswith("InvalidRecord: ")
    assert f"2 for topic '{topic}'" in error
    assert "harvester" in error
    assert scene.count("id = 2") == 1


def test_headers_tombstones_and_partitions_arrive(scene, make_topic):
    """A consumer gets all parts of a record, id header included."""
    topic = make_topic(3)
    scene.stash(
        OutboxRecord(topic=topic, key="k", value=None, headers=[("a", b"1"), ("a", None)], partition=2),
        OutboxRecord(topic=topic, key=None, value="text"),
    )
    scene.relay()
    found = {identity_of(message): message for message in scene.read(topic)}
    assert (found[1].partition, found[1].key, found[1].value) == (2, b"k", None)
    assert found[1].headers == [("a", b"1"), ("a", None), ("outbox-id", f"{scene.identity}:1".encode())]
    assert (found[2].key, found[2].value) == (None, b"text")


def test_a_transaction_that_stays_open_keeps_nothing_back(scene, make_topic):
    """Rows above those of an open transaction are published, and its own in their order once it is committed."""
    topic = make_topic()
    with psycopg.connect(scene.database) as writer:
        insert = "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, 'slow', 'x')"
        writer.execute(insert, [topic])
        scene.fill(topic, 50, keys=3)
        term = scene.claim()
        scene.settle()
        planner = Planner(scene.store, SHARDS)
        while plan := scene.plan(term, planner):
            assert not any(wanted.is_settled for wanted in plan.ranges)
            for outcome in scene.run(plan):
                planner.finished(outcome)
        assert sorted(map(identity_of, scene.read(topic))) == list(range(2, 52))
        writer.execute(insert, [topic])
    while plan := scene.plan(term, planner):
        for outcome in scene.run(plan):
            planner.finished(outcome)
    assert [identity_of(message) for message in scene.read(topic) if message.key == b"slow"] == [1, 52]
    assert scene.count() == 0


def test_ids_that_were_not_drawn_are_noticed(scene, make_topic, monkeypatch, caplog):
    """A row that appears below the position of its shard is published, and the relay begins at the head after that."""
    monkeypatch.setattr("outbox_spark.relay.plan._IDLE_SECONDS", 0.0)
    topic = make_topic()
    scene.execute("ALTER TABLE outbox DROP CONSTRAINT outbox_id_in_range")
    scene.fill(topic, 20, keys=3)
    term = scene.claim()
    scene.settle()
    planner = Planner(scene.store, SHARDS)
    for identity in (None, -5):
        if identity is not None:
            scene.execute("INSERT INTO outbox (id, kafka_topic, kafka_value) VALUES (%s, %s, 'x')", [identity, topic])
        while plan := scene.plan(term, planner):
            for outcome in scene.run(plan):
                planner.finished(outcome)
    assert "record -5 appeared below 20" in caplog.text
    assert scene.count() == 0


def test_records_are_changed_and_left_out_on_the_way(scene, make_topic):
    """A transform changes records, and rows for which it returns None are deleted unpublished."""
    topic, other = make_topic(), make_topic()
    scene.fill(topic, 30, keys=3)
    changed = scene.relay(transform=lambda row: row._replace(topic=other) if row.id % 2 else None)
    assert changed == []
    assert sorted(map(identity_of, scene.read(other))) == list(range(1, 31, 2))
    assert scene.read(topic) == []
    assert scene.count() == 0


class Signals:
    """A leader topic and the messages in it.

    Attributes:
        names: the group and the topic.
    """

    def __init__(self, scene, name):
        self.names = LeaderNames("group", f"{scene.leader_topic}-{name}")
        self.kafka = scene.transactions.kafka
        ensure_leader_topic(self.kafka, self.names.topic)
        self._producer = Producer({"bootstrap.servers": scene.bootstrap})

    def write(self, *messages, group=None):
        contest = {} if group is None else {"group": group}
        for message in messages:
            value = message
            if not isinstance(message, bytes):
                value = json.dumps({"id": str(uuid4()), "name": "a"} | message | contest)
            self._producer.produce(self.names.topic, value, partition=0)
        self._producer.flush()

    def highest(self, since=0):
        return highest_claim(self.kafka, self.names, since)


CLAIM = {"type": "claim"}


def beat(claim):
    """Return a heartbeat of this claim."""
    return {"type": "heartbeat", "claim": claim, "sequence": 1}


def test_the_highest_claim_is_read_from_heartbeats_too(scene):
    """A heartbeat at the end of the leader topic reveals a claim that lies before it."""
    signals = Signals(scene, "beats")
    assert signals.highest() == -1
    signals.write(*[b"noise"] * 7, CLAIM, *[beat(8)] * 200, b"noise")  # offset 0 is of the first `highest`
    assert signals.highest() == 8


def test_claims_of_other_groups_do_not_count(scene):
    """On a shared leader topic the group's own highest claim is found behind any number of other groups' messages."""
    signals = Signals(scene, "shared")
    signals.write(CLAIM, group="group")
    signals.write(*[CLAIM, *[beat(1)] * 2000], group="other")
    assert signals.highest() == 0
    signals.write(CLAIM, group="group")
    assert signals.highest() == 2003
    assert signals.highest(since=2003) == 2003


def test_a_broker_that_was_cut_off_hides_no_claim(scene, monkeypatch):
    """A claim is seen although the queried broker reports an old end of the topic."""
    signals = Signals(scene, "stale")
    signals.write(CLAIM, beat(0))

    class Stale:
        def __init__(self, config):
            self._consumer = make_consumer(config)

        def get_watermark_offsets(self, *_, **__):
            return 0, 2

        def __getattr__(self, name):
            return getattr(self._consumer, name)

    monkeypatch.setattr("outbox_core.election.observer.make_consumer", Stale)
    signals.write(CLAIM)
    assert signals.highest() == 2


def test_every_row_is_in_some_shard(scene):
    """Ids below zero and rows without a topic are in a shard, too: a row in none would never be published."""
    scene.execute("ALTER TABLE outbox ALTER kafka_topic DROP NOT NULL, DROP CONSTRAINT outbox_id_in_range")
    ids = [-(2**63), -7, -1, 0, 1]
    for identity in ids:
        scene.execute("INSERT INTO outbox (id, kafka_topic) VALUES (%s, 't')", [identity])
    scene.execute("INSERT INTO outbox (id, kafka_topic, kafka_key) VALUES (2, NULL, 'k')")
    whole = [row[0] for number in range(3) for rows in scene.store.read_shard(number, 3) for row in rows]
    found = [row.id for number in range(3) for row in scene.store.scan_shard(RowQuery(9), ShardRange(number, 3))]
    assert sorted(whole) == sorted(found) == [*ids, 2]


def test_a_settled_range_is_of_one_table(scene):
    """Nothing is read of a settled range once the table was truncated and its ids come again."""
    scene.fill("t", 5)
    wanted = Planner(scene.store, 1).next()[0]
    assert wanted.is_settled
    assert len(scene.store.scan_shard(RowQuery(9), wanted)) == 5
    scene.execute("TRUNCATE outbox RESTART IDENTITY")
    scene.fill("t", 5)
    assert scene.store.scan_shard(RowQuery(9), wanted) == []
    assert len(scene.store.scan_shard(RowQuery(9), replace(wanted, is_settled=False, after=3))) == 5


def test_a_purge_that_deletes_nothing_is_noticed(scene, make_topic):
    """No further transaction is committed while a trigger keeps published rows in the table."""
    topic = make_topic()
    scene.fill(topic, 30, keys=1)
    scene.execute(
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER keep BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION keep()"
    )
    (error,) = scene.relay(rows=10)
    assert error.startswith("RowsRemain: ")
    assert "trigger keep" in error
    assert len(scene.read(topic)) == 10
    scene.execute("DROP TRIGGER keep ON outbox")
    assert scene.relay() == []
    assert_each_once_in_order(scene, topic, 30)


def test_a_relay_archives_what_it_publishes(scene, make_topic):
    """With `retention: archive` published rows go into the archive, as a harvester's do."""
    topic = make_topic()
    with closing(psycopg.connect(scene.database, autocommit=True)) as connection:
        for statement in archive_statements(scene.table):
            connection.execute(statement)
    scene.settings = scene.config(delivery="exactly-once", retention="archive")
    scene.fill(topic, 10, keys=3)
    assert scene.relay() == []
    assert scene.execute("SELECT count(*) FROM outbox_archive")[0].count == 10
    assert_each_once_in_order(scene, topic, 10)


def test_what_another_server_published_is_not_obeyed(scene, make_topic, monkeypatch):
    """A manifest of another server's outbox of the same name is refused, unless one move is accepted, once."""
    topic = make_topic()
    scene.fill(topic, 6)
    plan = scene.first_plan(server_id="another")

    def die(step):
        if step == "committed":
            raise Killed

    with monkeypatch.context() as patched:
        patched.setattr(ShardStore, "server_id", lambda _: "another")
        for wanted in plan.ranges:
            with pytest.raises(Killed):
                ShardTask(plan, wanted.number, failpoint=die).run()
    with pytest.raises(TrackingTopicError, match="database server with the system identifier another"):
        fencing.fence_and_purge(scene.transactions, scene.store, lambda: False)
    assert scene.count() == 6
    moved = replace(scene.transactions, accept_moved=True)
    assert fencing.fence_and_purge(moved, scene.store, lambda: False) == 6
    assert fencing.fence_and_purge(scene.transactions, scene.store, lambda: False) == 0
