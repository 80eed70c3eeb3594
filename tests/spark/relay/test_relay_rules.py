"""Batches and shards on real services, without Spark: crashes at every step, changes of leadership."""

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from uuid import uuid4

import pytest
from confluent_kafka import Producer

from outbox_core.config import LeaderNames
from outbox_core.election.observer import highest_claim
from outbox_core.errors import InvalidRecord, MarkedRowsFound, RowsRemain, TrackingTopicError
from outbox_core.kafka.clients import make_consumer
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.record_producer import RecordProducer
from outbox_core.kafka.topics import TopicLimits, ensure_leader_topic, ensure_tracking_topic
from outbox_core.record import OutboxRecord
from outbox_core.schema import add_checks_sql, drop_checks_sql
from outbox_core.stores.interface import NewHold
from outbox_core.stores.relay_marks import RelayMark
from outbox_spark.relay import fencing
from outbox_spark.relay.batch_store import BatchStore, Shard
from outbox_spark.relay.leadership import FixedTerm
from outbox_spark.relay.shard_writer import Deposed, ShardWriter
from outbox_spark.relay.stream import BEGINNING, OutboxStream, StreamSettings
from tests.harvesting import Scene, identity_of
from tests.spark.relay.engine import STEPS, Checkpoint, Engine, Killed
from tests.spark.relay.outcome import assert_each_once_in_order

pytestmark = pytest.mark.real_broker

SHARDS = 2


class RelayScene(Scene):
    """An outbox and the relays that publish it, one term after the other."""

    def __init__(self, database, bootstrap, **options):
        super().__init__(database, bootstrap, **options)
        self.settings = self.config(delivery="exactly-once")
        self.identity = BatchStore(database, self.table.quoted).outbox.check()
        self.transactions = TransactionalIdentity.of(self.settings, self.identity)
        self.leader = self.settings.leader_names(self.identity)
        self.leader_topic = self.leader.topic
        ensure_leader_topic(self.transactions.kafka, self.leader_topic)
        ensure_tracking_topic(self.transactions.kafka, self.transactions.relay_topic, width=SHARDS)
        self.sent = 0

    def claim(self):
        """Claim leadership; return the number of the claim."""
        producer, offsets = Producer({"bootstrap.servers": self.bootstrap}), []
        message = json.dumps({"type": "claim", "id": str(uuid4()), "name": "test"})
        producer.produce(self.leader_topic, message, on_delivery=lambda _, done: offsets.append(done.offset()))
        producer.flush()
        return offsets[0]

    def stream(self, term, limit=40):
        return OutboxStream(
            StreamSettings(shards=SHARDS, limit=limit),
            FixedTerm(term),
            lambda: BatchStore(self.database, self.table.quoted),
            self.settle,
        )

    def settle(self, store, over):
        fencing.fence_and_purge(self.transactions, store, over)
        fencing.refuse_marked_rows(self.transactions, store)

    def read_shard(self, shard):
        store = BatchStore(self.database, self.table.quoted)
        rows = [row for rows in store.read(shard) for row in rows]
        store.close()
        return [row if row.partition is not None else row._replace(partition=-1) for row in rows]

    def writer(self, number, term, **options):
        options.setdefault("patience", 15.0)
        return ShardWriter(self.transactions.of_shard(number), self.leader, term, **options)

    def publish(self, shard, rows):
        self.sent += self.writer(shard.number, shard.batch.mark.term).write(rows).sent

    def engine(self, checkpoint, *, kill_at=None, limit=40):
        return Engine(
            self.stream(self.claim(), limit), self.read_shard, self.publish, checkpoint, kill_at=kill_at, limit=limit
        )

    def relay(self, checkpoint=None, **options):
        """Relay all rows, in a new term."""
        engine = self.engine(checkpoint or Checkpoint(), **options)
        try:
            engine.run()
        finally:
            engine.stream.stop()
        self.settle(BatchStore(self.database, self.table.quoted), lambda: False)


@pytest.fixture
def scene_class():
    """Return the class of outboxes with relays."""
    return RelayScene


@pytest.mark.parametrize(
    "checkpoint_survives",
    [
        pytest.param(True, id="checkpoint-kept", marks=pytest.mark.complete),
        pytest.param(False, id="checkpoint-deleted"),
    ],
)
@pytest.mark.parametrize("step", STEPS)
def test_a_relay_that_dies_at_any_step_repeats_and_loses_nothing(scene, make_topic, step, checkpoint_survives):
    """After a relay is killed at a step of its second batch, the next one publishes the missing rows in order."""
    topic = make_topic()
    scene.fill(topic, 100, keys=7)
    checkpoint = Checkpoint()
    with pytest.raises(Killed):
        scene.engine(checkpoint, kill_at=(1, step)).run()
    scene.relay(checkpoint if checkpoint_survives else None)
    assert_each_once_in_order(scene, topic, 100)


def test_the_last_commit_entry_may_be_lost(scene, make_topic):
    """A finished and purged batch that is replayed is not published again."""
    topic = make_topic()
    scene.fill(topic, 90, keys=7)
    checkpoint = Checkpoint()
    scene.relay(checkpoint)
    checkpoint.lose_last_commit()
    scene.fill(topic, 10, keys=7, prefix="later")
    scene.relay(checkpoint)
    assert sorted(map(identity_of, scene.read(topic))) == list(range(1, 101))
    assert scene.count() == 0


@pytest.mark.parametrize("step", ["read", "one-published", "all-published"])
@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_a_harvester_takes_over_from_a_dead_relay(scene, make_topic, step, delivery):
    """A harvester in either mode publishes the rows that a dead relay has not published, and no others."""
    topic = make_topic()
    scene.fill(topic, 100, keys=7)
    with pytest.raises(Killed):
        scene.engine(Checkpoint(), kill_at=(1, step)).run()
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
    scene.relay(limit=1_500)
    assert_each_once_in_order(scene, topic, 1_500)


def test_rows_from_before_the_constraints_are_left_out(scene, make_topic):
    """Rows that violate a constraint that is newer than they are held; a relay publishes the others."""
    topic = make_topic()
    scene.execute(drop_checks_sql(scene.table))
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_value, kafka_header_keys, leader_id) VALUES ('t', 'x', '{a}', NULL),"
        " ('t', 'x', '{a}', %s)",
        [RelayMark(scene.claim(), 1).leader_id],
    )
    scene.fill(topic, 20, keys=3)
    scene.execute(add_checks_sql(scene.table))
    scene.relay()  # finds them, and holds them
    scene.relay()
    assert [hold.record_id for hold in scene.held()] == [1, 2]
    assert sorted(map(identity_of, scene.read(topic))) == list(range(3, 23))


def test_marks_of_an_at_least_once_harvester_are_refused(scene, make_topic):
    """Rows that an at-least-once harvester may have published are not published without consent."""
    scene.fill(make_topic(), 5)
    scene.execute(f"UPDATE {scene.table.quoted} SET leader_id = gen_random_uuid() WHERE id = 3")
    with pytest.raises(MarkedRowsFound, match=r"1 rows \(ids 3 to 3\)"):
        scene.relay()


def test_marks_of_a_relay_do_not_stop_an_exactly_once_harvester(scene, make_topic):
    """A relay's marks do not count as a sign of at-least-once delivery."""
    topic = make_topic()
    scene.fill(topic, 20, keys=3)
    with pytest.raises(Killed):
        scene.engine(Checkpoint(), kill_at=(0, "logged")).run()
    assert BatchStore(scene.database).outbox.marks.count().number == 0
    scene.drain(config={"delivery": "exactly-once"})
    assert_each_once_in_order(scene, topic, 20)


def test_a_task_of_a_deposed_relay_publishes_nothing(scene, make_topic):
    """A shard's task that starts after another process has claimed leadership stops before it writes."""
    topic = make_topic()
    scene.fill(topic, 20, keys=3)
    checkpoint = Checkpoint()
    with pytest.raises(Killed):
        scene.engine(checkpoint, kill_at=(0, "sharded")).run()
    (batch,) = BatchStore(scene.database).batches(0)
    rows = [scene.read_shard(shard) for shard in scene.stream(0).shards(BEGINNING, checkpoint.offsets[0])]
    rival = scene.claim()
    for number in range(SHARDS):
        if rows[number]:
            with pytest.raises(Deposed, match=f"claim {rival} "):
                scene.writer(number, batch.mark.term).write(rows[number])
    scene.relay()
    assert_each_once_in_order(scene, topic, 20)


def test_a_task_that_was_fenced_in_its_transaction_publishes_nothing(scene, make_topic):
    """A task that stood still in its transaction while another relay took over cannot commit."""
    topic = make_topic()
    scene.fill(topic, 20, keys=3)
    term = scene.claim()
    stream = scene.stream(term)
    end = stream.latest(BEGINNING, 40)
    shards = stream.shards(BEGINNING, end)
    rows = {shard.number: scene.read_shard(shard) for shard in shards}

    def take_over(step):
        if step == "sent" and scene.count():
            scene.relay()

    for shard in shards:
        if rows[shard.number]:
            with pytest.raises(Deposed):
                scene.writer(shard.number, term, failpoint=take_over).write(rows[shard.number])
    assert_each_once_in_order(scene, topic, 20)


def test_slow_ends_of_all_transactions_do_not_stop_a_relay(scene, make_topic, monkeypatch):
    """Each task publishes its transaction, even if every commit and abort takes long enough for a repeat."""
    topic = make_topic()
    scene.fill(topic, 20, keys=7)
    end = RecordProducer._end

    def slow(producer, *arguments):
        try:
            end(producer, *arguments)
        finally:
            producer._must_replace = True

    monkeypatch.setattr(RecordProducer, "_end", slow)
    scene.relay()
    assert_each_once_in_order(scene, topic, 20)


def test_attempts_of_one_task_at_once_publish_once(scene, make_topic):
    """Several attempts of one task, at once and one after the other, publish each record once."""
    topic = make_topic()
    scene.fill(topic, 200, keys=5)
    term = scene.claim()
    stream = scene.stream(term, limit=200)
    end = stream.latest(BEGINNING, 200)
    shards = stream.shards(BEGINNING, end)
    with ThreadPoolExecutor(6) as threads:
        attempts = [
            threads.submit(lambda shard=shard: scene.writer(shard.number, term).write(scene.read_shard(shard)))
            for shard in shards
            for _ in range(3)
        ]
        results = [attempt.result() for attempt in attempts]
    assert sum(result.sent for result in results) == 200
    stream.commit(end)
    stream.stop()
    assert_each_once_in_order(scene, topic, 200)


def test_a_record_that_kafka_refuses_is_named(scene, make_topic):
    """A record that is too large stops the relay with its id; it stays in the table."""
    topic = make_topic()
    scene.stash(OutboxRecord(topic=topic, key="k", value=b"x" * 2_000_000))
    with pytest.raises(InvalidRecord, match=f"record 1 for topic '{topic}'.*harvester"):
        scene.relay()
    assert scene.count() == 1


def test_a_record_that_the_broker_refuses_is_named(scene, make_topic):
    """A record that the client takes and the broker refuses stops the relay, too, well before its patience ends."""
    topic = make_topic(1, config={"max.message.bytes": "20000"})
    scene.stash(
        OutboxRecord(topic=topic, key="a", value=b"x"), OutboxRecord(topic=topic, key="b", value=os.urandom(50_000))
    )
    began = time.monotonic()
    with pytest.raises(InvalidRecord, match=f"records? .*2 for topic '{topic}'.*harvester"):
        scene.relay()
    assert time.monotonic() - began < 60
    assert scene.count() == 2


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


def test_a_mark_takes_nothing_from_a_later_term(scene, make_topic):
    """A relay that does not know that it was deposed cannot mark its successor's rows."""
    scene.fill(make_topic(), 10)
    store = BatchStore(scene.database)
    store.mark_batch(RelayMark(2, 1), 6)
    taken = store.mark_batch(RelayMark(1, 9), 100)
    assert (taken.rows, taken.first, taken.last) == (4, 7, 10)
    taken = store.mark_batch(RelayMark(2, 2), 100)
    assert (taken.rows, taken.first, taken.last) == (4, 7, 10)
    store.close()


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


def test_a_batch_ends_when_it_is_large(scene, make_topic, monkeypatch):
    """Rows of large values make small batches, as a task keeps its shard in memory."""
    monkeypatch.setattr("outbox_spark.relay.batch_store.MOST_BYTES", 2500)
    topic = make_topic()
    scene.stash(*(OutboxRecord(topic=topic, key="k", value=b"x" * 1000) for _ in range(7)))
    store = BatchStore(scene.database)
    assert store.mark_batch(RelayMark(0, 1), 100).rows == 3
    store.close()


def test_a_batch_leaves_out_what_is_held(scene, make_topic):
    """A held key and a paused topic stay in the table, as with a harvester."""
    topic, paused = make_topic(), make_topic()
    scene.stash(*(OutboxRecord(topic=topic, key=key, value=b"x") for key in ("bad", "good", "bad")))
    scene.stash(OutboxRecord(topic=paused, key="good", value=b"x"))
    store = BatchStore(scene.database)
    store.outbox.holds.add(
        [NewHold(topic, "bad", 1, "refused", "too large"), NewHold(paused, None, None, "paused", "")]
    )
    taken = store.mark_batch(RelayMark(0, 1), 100)
    assert (taken.rows, taken.first) == (1, 2)
    store.close()


def test_every_row_of_a_batch_is_in_some_shard(scene):
    """Ids below zero and rows without a topic are in a shard, too: a row in none would be purged, and lost."""
    scene.execute("ALTER TABLE outbox ALTER kafka_topic DROP NOT NULL, DROP CONSTRAINT outbox_id_in_range")
    ids = [-(2**63), -7, -1, 0, 1]
    for identity in ids:
        scene.execute("INSERT INTO outbox (id, kafka_topic) VALUES (%s, 't')", [identity])
    scene.execute("INSERT INTO outbox (id, kafka_topic, kafka_key) VALUES (2, NULL, 'k')")
    store = BatchStore(scene.database)
    batch = store.mark_batch(RelayMark(0, 1), 100)
    read = [row[0] for number in range(3) for rows in store.read(Shard(number, 3, batch)) for row in rows]
    store.close()
    assert sorted(read) == [*ids, 2]


def test_a_purge_that_deletes_nothing_is_noticed(scene):
    """No batch is handed out while a trigger keeps published rows in the table: they would be published again."""
    scene.fill("t", 3)
    scene.execute(
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END';"
        "CREATE TRIGGER keep BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION keep()"
    )
    store = BatchStore(scene.database)
    batch = store.mark_batch(RelayMark(0, 1), 100)
    with pytest.raises(RowsRemain, match=r"3 published rows .* trigger keep"):
        store.purge_batch(batch)
    scene.execute("DROP TRIGGER keep ON outbox")
    assert store.purge_batch(batch) == 3
    assert store.purge_batch(batch) == 0
    store.close()


def test_marks_that_a_writer_made_up_do_not_stop_a_relay(scene, make_topic):
    """Rows with forged marks of the highest batch are published like others, and so are later rows."""
    topic, most = make_topic(), 2**48 - 1
    scene.fill(topic, 6)
    for identity, term in ((2, most), (4, 0)):
        scene.execute("UPDATE outbox SET leader_id = %s WHERE id = %s", [RelayMark(term, most).leader_id, identity])
    scene.relay()
    assert_each_once_in_order(scene, topic, 6)


def test_what_another_server_published_is_not_obeyed(scene, make_topic):
    """A manifest of another server's outbox of the same name is refused, unless one move is accepted, once."""
    topic = make_topic()
    scene.fill(topic, 6)
    term = scene.claim()
    stream = scene.stream(term)
    for shard in stream.shards(BEGINNING, stream.latest(BEGINNING, 40)):
        scene.writer(shard.number, term, server_id="another").write(scene.read_shard(shard))
    stream.stop()
    store = BatchStore(scene.database)
    with pytest.raises(TrackingTopicError, match="database server with the system identifier another"):
        fencing.fence_and_purge(scene.transactions, store, lambda: False)
    assert scene.count() == 6
    assert fencing.fence_and_purge(replace(scene.transactions, accept_moved=True), store, lambda: False) == 6
    assert fencing.fence_and_purge(scene.transactions, store, lambda: False) == 0
    store.close()
