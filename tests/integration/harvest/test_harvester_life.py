"""A harvester's life: start, leadership, hand-over, drain and stop, and its events and metrics."""

import threading
import time
from datetime import timedelta
from functools import partial
from uuid import uuid4

import psycopg
import pytest
from confluent_kafka import KafkaError

from devstack.ports import free_port
from outbox_core.election import Leadership, now
from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxTableError, RightsMissing, StoreUnavailable
from outbox_core.events import LeaderAcquired, LeaderFenced, LeaderRefreshed, LeaderRevoked, MeterRead
from outbox_core.harvest import harvester as harvester_module
from outbox_core.metrics import HarvestMetrics
from outbox_core.record import OutboxRecord
from outbox_core.schema import TableName, create_table_sql
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import (
    GENEROUS_SECONDS,
    AlwaysLeader,
    FaultyProducer,
    Scene,
    by_key,
    harvest_threads,
    wait_until,
)

QUICK = {"io_error_backoff": "20ms"}


class _Lingering(FaultyProducer):
    """A producer that keeps every record in flight for a while, even on flush."""

    def __init__(self, settings, seconds=0.5):
        super().__init__(settings | {"linger.ms": int(seconds * 1000)})

    def flush(self, timeout):
        return self._producer.poll(timeout)


# -- events


def test_events_in_order(scene, make_topic):
    """Acquired begins, Refreshed follows a doubt about more than one key, Revoked ends; every leader ID is new."""
    topic = make_topic()
    scene.fill(topic, 300, keys=10)
    settings = scene.config().producer_settings()
    producer = FaultyProducer(settings, refused=0.02, fatal=100)
    harvester = scene.harvester(limits=QUICK | {"min_metrics_interval": "1ms"}, producer_factory=lambda: producer)
    harvester.start()
    wait_until(lambda: scene.count() == 0, "the outbox is empty")
    assert harvester.is_leader
    assert harvester.leader_id == harvester.leader_ids[-1]
    harvester.elector.revoke()
    assert not harvester.is_leader
    assert harvester.leader_id is None
    harvester.elector.acquire()
    wait_until(lambda: harvester.leader_id == harvester.leader_ids[-1], "it leads again")
    harvester.stop()
    harvester.join()
    first, *refreshed, revoked, second, last = harvester.kinds(without=MeterRead)
    assert (first, revoked, second, last) == ("LeaderAcquired", "LeaderRevoked", "LeaderAcquired", "LeaderRevoked")
    assert refreshed == ["LeaderRefreshed"]
    assert len(set(harvester.leader_ids)) == len(harvester.leader_ids)
    revocations = [event.leader_id for event in harvester.events if isinstance(event, LeaderRevoked)]
    acquisitions = [event.leader_id for event in harvester.events if isinstance(event, LeaderAcquired)]
    assert revocations == acquisitions
    readings = [event.stats.total_count for event in harvester.events if isinstance(event, MeterRead)]
    assert readings == sorted(readings)
    assert readings[-1] <= 300


def test_handler_that_raises_is_harmless(scene, make_topic):
    """An event handler's exceptions neither stop the harvester nor suppress later events."""
    topic = make_topic()
    scene.fill(topic, 50)

    def on_event(event):
        raise RuntimeError(type(event).__name__)

    harvester = scene.drain(on_event=on_event, elector_factory=None, limits={"min_metrics_interval": "1ms"})
    assert harvester.kinds(without=MeterRead) == ["LeaderAcquired", "LeaderRevoked"]
    assert len(scene.read(topic)) == 50


def test_nothing_is_harvested_before_the_handler_of_acquired_returns(scene, make_topic):
    """No record is marked before the handler of LeaderAcquired returns."""
    topic = make_topic()
    scene.fill(topic, 5)
    marked = []

    def on_event(event):
        if isinstance(event, LeaderAcquired):
            time.sleep(0.5)
            marked.append(scene.count("leader_id IS NOT NULL") + 5 - scene.count())

    scene.drain(on_event=on_event, elector_factory=None)
    assert marked == [0]


def test_revoked_waits_for_what_is_in_flight(scene, make_topic):
    """The handler of LeaderRevoked runs once no record is in flight and no row is marked."""
    topic = make_topic()
    scene.fill(topic, 20, keys=10)
    producer = _Lingering(scene.config().producer_settings())
    found = []

    def on_event(event):
        if isinstance(event, LeaderRevoked):
            found.append((len(producer), scene.count("leader_id IS NOT NULL"), scene.count()))

    harvester = scene.harvester(on_event=on_event, producer_factory=lambda: producer)
    harvester.start()
    wait_until(lambda: len(producer) == 10, "the first record of each key is in flight")
    harvester.elector.revoke()
    assert found == [(0, 0, 10)]
    assert len(scene.read(topic)) == 10


def test_hand_over_between_two(scene, make_topic):
    """A standby takes over once the leader has handed over, and goes on from the leader's last record."""
    topic = make_topic()
    scene.fill(topic, 3000, keys=1)
    order = []

    def note(name, event):
        if not isinstance(event, MeterRead):
            order.append((name, type(event).__name__))

    first = scene.harvester(name="first", elector_factory=None, on_event=partial(note, "first"))
    first.start()
    wait_until(lambda: scene.count() < 3000, "the first one publishes")
    second = scene.harvester(name="second", elector_factory=None, on_event=partial(note, "second"))
    second.start()
    first.stop()
    first.join()
    left = scene.count()
    assert left > 0
    wait_until(lambda: scene.count() < left, "the second one publishes")
    second.stop()
    second.join()
    values = by_key(scene.read(topic))[b"k0"]
    assert values == [b"%d" % n for n in range(1, len(values) + 1)]
    assert order == [
        ("first", "LeaderAcquired"),
        ("first", "LeaderRevoked"),
        ("second", "LeaderAcquired"),
        ("second", "LeaderRevoked"),
    ]


class _ShortLease(AlwaysLeader):
    """An elector that leads for a moment, and never reports the end of its lease."""

    seconds = 0.0

    def acquire(self):
        lease = Leadership(uuid4(), 0, now() + self.seconds)
        self.leadership = lease
        self._on_event(LeaderAcquired(lease.leader_id, lease.term))

    def revoke(self):
        if self.leadership is not None:
            self._on_event(LeaderFenced(self.leadership.leader_id, "test"))
            self.leadership = None


def test_nothing_is_sent_near_the_end_of_a_lease(scene, make_topic):
    """No record is sent that could outlast the lease, although no event has ended the lease."""
    topic = make_topic()
    scene.fill(topic, 5000, keys=1)
    sent_at = []

    class Clocked(FaultyProducer):
        def produce(self, *record, **options):
            super().produce(*record, **options)
            sent_at.append(now())

    config = scene.config(limits={"heartbeat_timeout": "2s"})
    patience = config.delivery_timeout.total_seconds()
    elector = type("Elector", (_ShortLease,), {"seconds": patience + 2.0})
    harvester = scene.harvester(
        limits={"heartbeat_timeout": "2s"},
        elector_factory=elector,
        producer_factory=lambda: Clocked(config.producer_settings()),
    )
    harvester.start()
    deadline = harvester.elector.leadership.deadline
    wait_until(lambda: now() > deadline, "the lease is over")
    wait_until(lambda: harvester.leader_id is None, "the term is over")
    assert sent_at
    # The clock is read once more after the send: allow for a thread that did not run in between.
    assert max(sent_at) < deadline - patience + 0.3
    assert scene.count("leader_id IS NOT NULL") == 0
    assert scene.count() > 0


# -- stop and drain


def test_stop_leaves_no_marks(scene, make_topic):
    """A graceful stop resets the marks of thousands of rows that wait behind one key."""
    topic = make_topic()
    scene.fill(topic, 20_000, keys=1)
    harvester = scene.harvester(limits={"lane_capacity": 5000})
    harvester.start()
    wait_until(lambda: scene.count("leader_id IS NOT NULL") >= 5000, "thousands are marked")
    harvester.stop()
    assert harvester.join(GENEROUS_SECONDS)
    left = scene.count()
    assert left > 10_000
    assert scene.count("leader_id IS NOT NULL") == 0
    values = by_key(scene.read(topic)).get(b"k0", [])  # none, if the stop was quicker than the first delivery
    assert len(values) == 20_000 - left


def test_stop_in_the_moment_a_term_begins(scene, monkeypatch):
    """A stop is not lost when leadership begins at the same instant."""
    harvester = scene.harvester()
    stopping = threading.Thread(target=harvester.stop)
    new_term = harvester._new_term

    def stop_meanwhile(*arguments):
        stopping.start()
        stopping.join(0.3)
        return new_term(*arguments)

    monkeypatch.setattr(harvester, "_new_term", stop_meanwhile)
    harvester.start()
    assert harvester.join(GENEROUS_SECONDS)
    stopping.join()


def test_stop_leaves_no_threads(scene, make_topic):
    """After `join` no thread of the harvester or its elector is left."""
    scene.fill(make_topic(), 10)
    scene.drain(elector_factory=None, metrics=HarvestMetrics())
    wait_until(lambda: not harvest_threads(), "all threads have ended")


def test_a_harvester_is_started_once(scene):
    """A harvester cannot be started a second time; its context manager stops and joins."""
    harvester = scene.harvester()
    with harvester:
        assert not harvester.join(0)
    assert harvester.join(0)
    assert not harvester.health().ok
    with pytest.raises(RuntimeError):
        harvester.start()


def test_drain_ends_when_the_table_is_empty(scene, make_topic):
    """Drain mode harvests the whole table, also rows that a mark leaves out at first, and ends by itself."""
    topic = make_topic()
    scene.drain(elector_factory=None)
    scene.fill(topic, 3000, keys=3)
    scene.drain(limits={"lane_capacity": 10, "mark_query_records": 100})
    assert scene.count() == 0
    assert len(scene.read(topic)) == 3000


def test_drain_waits_for_keys_that_rest(scene, make_topic):
    """Drain mode does not end while rows remain whose keys are left out of the marks after a failure."""
    topic = make_topic()
    scene.fill(topic, 40, keys=4)
    failures = []

    class Failing(FaultyProducer):
        def produce(self, topic, value, key, *rest, **options):
            self._refused = 1.0 if key == "k1" and len(failures) < 4 else 0.0
            if self._refused:
                failures.append(value)
            super().produce(topic, value, key, *rest, **options)

    producer = Failing(scene.config().producer_settings())
    scene.drain(limits={"io_error_backoff": "500ms"}, producer_factory=lambda: producer)
    assert len(failures) == 4
    assert by_key(scene.read(topic)) == {
        b"k%d" % key: [b"%d" % n for n in range(1, 41) if n % 4 == key] for key in range(4)
    }


class _Resending:
    """A producer with a lost connection: it sends its records again a while later, unless they are purged."""

    def __init__(self):
        self.sent = self.sent_again = 0
        self._waiting = []
        self._taken_back = []
        self._polls = 0

    def produce(self, *_, on_delivery, **__):
        self.sent += 1
        self._waiting.append(on_delivery)

    def __len__(self):
        return len(self._waiting)

    def poll(self, _):
        self._polls += 1
        if self._polls % 20 == 0:
            self.sent_again += len(self._waiting)
        taken_back, self._taken_back = self._taken_back, []
        for report in taken_back:
            report(KafkaError(KafkaError._PURGE_INFLIGHT), None)
        time.sleep(0.01)
        return len(taken_back)

    flush = poll

    def purge(self, *, in_queue, in_flight, blocking):
        assert in_queue
        assert not blocking
        if in_flight:
            self._taken_back += self._waiting
            self._waiting = []


def test_nothing_is_sent_again_after_the_lease(scene):
    """Records in flight at the end of the lease are purged, so that the client does not send them once more."""
    scene.fill("t", 20)
    producer = _Resending()
    harvester = scene.harvester(producer_factory=lambda: producer)
    harvester.start()
    wait_until(lambda: producer.sent == 20, "all are on the wire")
    harvester.elector.leadership = None
    sent_before = producer.sent_again
    wait_until(lambda: harvester.leader_id is None, "the term is over", timeout=5)
    assert producer.sent_again == sent_before
    harvester.elector.acquire()
    harvester.stop()
    assert harvester.join(10)


def _sending(scene, monkeypatch, producer, **limits):
    """Return a harvester whose 20 records are on the wire."""
    monkeypatch.setattr("outbox_core.harvest.at_least_once.loop._REPORTS_LATE_SECONDS", 0.1)
    scene.fill("t", 20)
    harvester = scene.harvester(producer_factory=lambda: producer, limits={"heartbeat_timeout": "1s", **limits})
    harvester.start()
    wait_until(lambda: producer.sent == 20, "all are on the wire")
    return harvester


def test_stop_is_bounded(scene, monkeypatch):
    """A client that reports no delivery delays a stop no longer than a delivery may take."""
    harvester = _sending(scene, monkeypatch, _Resending(), drain_timeout="1s")
    began = time.monotonic()
    harvester.stop()
    assert harvester.join(10)
    assert time.monotonic() - began < 5
    assert scene.count("leader_id IS NOT NULL") == 0


def test_machine_sleeps_during_a_stop(scene, monkeypatch):
    """A stop during which the machine sleeps waits for what the client gives back as long as any other."""
    slept = [0.0]
    monkeypatch.setattr("outbox_core.harvest.at_least_once.loop.now", lambda: now() + slept[0])

    class SleepsWhileItPurges(_Resending):
        def purge(self, **options):
            slept[0] = 3600.0
            super().purge(**options)

    harvester = _sending(scene, monkeypatch, SleepsWhileItPurges())
    harvester.stop()
    assert harvester.join(10)
    assert scene.count("leader_id IS NOT NULL") == 0


def test_hand_over_waits_for_sends(scene, monkeypatch):
    """A hand-over ends after all sends, however short the user's patience is: the next leader sends at once."""
    producer = _Resending()
    harvester = _sending(scene, monkeypatch, producer, drain_timeout="200ms")
    harvester.elector.revoke()
    assert len(producer) == 0
    harvester.stop()
    assert harvester.join(10)


class NeverLeader(AlwaysLeader):
    """An elector that never leads."""

    def start(self):
        """Stand by."""


def test_standby_drains_what_is_not_held(scene):
    """A draining standby ends once all records in the table are held and no dead letter is requested."""
    scene.stash(OutboxRecord("t", "held", "1"), OutboxRecord("t", "other", "2"), OutboxRecord("u", "other", "3"))
    scene.hold("add", "u")
    scene.hold("add_record", 1)
    scene.hold("dead_letter", records=[1])
    standby = scene.harvester(elector_factory=NeverLeader, drain=True)
    standby.start()
    assert not standby.join(1.5)
    scene.execute("DELETE FROM outbox WHERE id = 2")
    assert not standby.join(1.5)
    scene.hold("release", records=[1])
    scene.hold("add", "t", "held")
    assert standby.join(GENEROUS_SECONDS)


def test_demoted_leader_is_healthy(scene):
    """A harvester that has handed over is healthy, although it was unhealthy as a leader."""
    with scene.running() as harvester:
        wait_until(lambda: harvester._term, "it harvests")
        harvester._ctx.kafka.failed("timed out")
        harvester._ctx.kafka._began_at -= 60
        assert not harvester.health().ok
        harvester.elector.revoke()
        wait_until(lambda: harvester.health().ok, "it stands by")
        assert harvester.health().detail == "standing by"


def test_standby_drains_too(scene, make_topic):
    """A draining standby ends once the leader has emptied the table, without ever leading."""
    topic = make_topic()
    leader = scene.harvester(name="leader", elector_factory=None)
    leader.start()
    wait_until(lambda: leader.is_leader, "it leads")
    with scene.connect() as open_transaction:
        scene.fill(topic, 2000, keys=1)
        standby = scene.harvester(name="standby", elector_factory=None, drain=True)
        standby.start()
        scene.stasher.stash(open_transaction, OutboxRecord(topic, "not visible", b"yet"))
        assert standby.join(GENEROUS_SECONDS)
        assert standby.kinds() == []
        assert scene.count() == 0
    leader.stop()
    leader.join()


# -- start-up errors

_UNFIT = {
    "missing": ([], "does not exist"),
    "no outbox": (["CREATE TABLE outbox (id bigint, kafka_topic text)"], "lacks the column.*leader_id"),
    "other types": (
        [create_table_sql(TableName("outbox")).replace("kafka_value         bytea", "kafka_value json")],
        "kafka_value is json",
    ),
    "a view": ([create_table_sql(TableName("real")), "CREATE VIEW outbox AS SELECT * FROM real"], "is not a table"),
}


@pytest.mark.parametrize("case", _UNFIT)
def test_table_that_is_no_outbox(database, kafka_bootstrap, case):
    """`start` refuses a missing or unfit table with one line that names it, and leaves no thread."""
    statements, told = _UNFIT[case]
    scene = Scene(database, kafka_bootstrap, layout=None)
    for statement in statements:
        scene.execute(statement)
    harvester = scene.harvester(elector_factory=None)
    with pytest.raises(OutboxTableError, match=told) as raised:
        harvester.start()
    assert "outbox" in str(raised.value)
    assert "\n" not in str(raised.value)
    assert not harvest_threads()


def test_missing_rights(scene, topic_name):
    """`start` refuses a role that may not delete rows or read holds, and names the missing rights."""
    role = topic_name("role")
    scene.execute(f'CREATE ROLE "{role}" LOGIN')
    try:
        scene.execute(f'GRANT SELECT, UPDATE, INSERT ON outbox TO "{role}"')
        dsn = psycopg.conninfo.make_conninfo(scene.database, user=role)
        harvester = scene.harvester(config={"data_source": dsn})
        with pytest.raises(RightsMissing, match=f'missing rights on outbox.*DELETE.*TO "{role}"'):
            harvester.start()
        assert not harvest_threads()
        scene.execute(f'GRANT DELETE ON outbox TO "{role}"')
        with pytest.raises(RightsMissing, match=r"missing rights on outbox_hold.*GRANT SELECT"):
            scene.harvester(config={"data_source": dsn}).start()
        assert not harvest_threads()
        scene.execute(f'GRANT SELECT ON outbox_hold TO "{role}"')
        scene.drain(config={"data_source": dsn})
    finally:
        scene.execute(f'DROP OWNED BY "{role}"')
        scene.execute(f'DROP ROLE "{role}"')


def test_services_that_do_not_answer(scene, monkeypatch):
    """`start` raises an error if the database or the cluster cannot be reached, and leaves no thread."""
    quickly = partial(harvester_module.check_connection, timeout_seconds=1.5)
    monkeypatch.setattr(harvester_module, "check_connection", quickly)
    nowhere = f"127.0.0.1:{free_port()}"
    harvester = scene.harvester(config={"base_kafka_config": {"bootstrap.servers": nowhere}})
    with pytest.raises(KafkaUnavailable, match=nowhere):
        harvester.start()
    dsn = psycopg.conninfo.make_conninfo(scene.database, port=free_port(), password="secret word")
    harvester = scene.harvester(config={"data_source": dsn})
    with pytest.raises(StoreUnavailable, match="cannot connect to database") as raised:
        harvester.start()
    assert "secret" not in str(raised.value)
    assert not harvest_threads()


def test_backlog_is_known_while_kafka_does_not_answer_at_the_start(scene, make_topic, monkeypatch):
    """A harvester that cannot reach Kafka exports what waits, and how old it is; no longer once it has given up."""
    scene.fill(make_topic(), 3)
    metrics, seen = HarvestMetrics(), {}

    def kafka_is_away(_):
        wait_until(lambda: "outbox_pending_records" in _samples(harvester), "the backlog is counted")
        seen.update(_samples(harvester))
        raise KafkaUnavailable("away")

    monkeypatch.setattr(harvester_module, "check_connection", kafka_is_away)
    harvester = scene.harvester(metrics=metrics)
    with pytest.raises(KafkaUnavailable):
        harvester.start()
    assert seen["outbox_pending_records"] == 3
    assert seen["outbox_oldest_pending_age_seconds"] > 0
    assert "outbox_kafka_up" not in seen, "it is not known yet"
    assert "outbox_pending_records" not in _samples(harvester)
    assert not harvest_threads()


@pytest.mark.parametrize("where", ["base_kafka_config", "producer_kafka_config"])
def test_wrong_kafka_property(scene, where):
    """`start` refuses a wrong librdkafka property, also of the publishing producer, and names it."""
    wrong = {"partitioner": "squeeze"} if where == "producer_kafka_config" else {"ssl.ca.lokation": "x"}
    settings = {"bootstrap.servers": scene.bootstrap} if where == "base_kafka_config" else {}
    harvester = scene.harvester(config={where: settings | wrong}, elector_factory=None)
    with pytest.raises(InvalidConfig, match=next(iter(wrong))):
        harvester.start()
    assert not harvest_threads()


def test_parts_that_cannot_be_made(scene):
    """`start` raises an error in the making of a store, and leaves no thread."""
    stores = []

    def make_store():
        stores.append(1)
        if len(stores) > 1:
            raise StoreUnavailable("no more connections")
        return PostgresStore(scene.database)

    harvester = scene.harvester(store_factory=make_store, elector_factory=None)
    with pytest.raises(StoreUnavailable, match="no more connections"):
        harvester.start()
    assert not harvest_threads()


# -- metrics


def _samples(harvester):
    """Return the values of the only outbox in the registry, by name."""
    return {
        sample.name: sample.value
        for family in harvester.metrics.registry.collect()
        for sample in family.samples
        if "le" not in sample.labels
    }


def test_metrics_after_a_run(scene, make_topic):
    """Counters and histograms count published records and failures, under the outbox's name."""
    scene.fill(make_topic(), 500, keys=20)
    producer = FaultyProducer(scene.config().producer_settings(), refused=0.02)
    led = []

    def on_event(event):
        if isinstance(event, LeaderAcquired | LeaderRefreshed):
            led.append(_samples(harvester)["outbox_leader"])

    harvester = scene.harvester(
        on_event=on_event, limits=QUICK, metrics=HarvestMetrics(), drain=True, producer_factory=lambda: producer
    )
    harvester.start()
    assert harvester.join(GENEROUS_SECONDS)
    samples = _samples(harvester)
    assert samples["outbox_records_published_total"] == 500
    assert samples["outbox_publish_errors_total"] == producer.faults > 0
    assert samples["outbox_publish_latency_seconds_count"] == 500
    assert samples["outbox_publish_latency_seconds_sum"] > 0
    assert samples["outbox_mark_duration_seconds_count"] > producer.faults // 20
    assert samples["outbox_purge_duration_seconds_count"] > 0
    assert samples["outbox_in_flight_records"] == 0
    assert set(led) == {1.0}
    assert samples["outbox_leader"] == 0
    name = scene.execute("SELECT current_database() AS name")[0].name
    families = [family for family in harvester.metrics.registry.collect() if family.name.startswith("outbox_")]
    labels = {sample.labels["outbox"] for family in families for sample in family.samples}
    assert labels == {f"{name}.public.outbox"}


def test_metrics_of_a_backlog(scene, make_topic):
    """While records cannot be published, the leader alone shows their number and the age of the first."""
    scene.fill(make_topic(), 30, keys=3)
    scene.execute("UPDATE outbox SET create_time = now() - interval '1 hour'")
    producer = FaultyProducer(scene.config().producer_settings(), refused=1.0)
    limits = QUICK | {"min_metrics_interval": timedelta(milliseconds=50)}
    with scene.running(limits=limits, metrics=HarvestMetrics(), producer_factory=lambda: producer) as harvester:
        wait_until(lambda: _samples(harvester).get("outbox_pending_records") == 30, "the backlog is counted")
        samples = _samples(harvester)
        assert 3600 <= samples["outbox_oldest_pending_age_seconds"] < 3600 + GENEROUS_SECONDS
        assert samples["outbox_records_published_total"] == 0
        wait_until(lambda: _samples(harvester)["outbox_publish_errors_total"] > 0, "a failure is counted")
        harvester.elector.revoke()
        wait_until(lambda: "outbox_pending_records" not in _samples(harvester), "a standby shows no backlog")
