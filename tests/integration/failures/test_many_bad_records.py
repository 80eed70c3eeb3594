"""Ten thousand bad records, an unreachable partition, missing topics; and each rule, broken on purpose."""

import time
from types import SimpleNamespace
from unittest.mock import patch

import pytest
from confluent_kafka import KafkaError, Producer

from outbox_core import OutboxRecord
from outbox_core.harvest import parts
from outbox_core.harvest.failures import failed_deliveries as bad_records
from outbox_core.harvest.failures import failed_transactions
from outbox_core.harvest.failures.holds import HoldCache
from outbox_core.kafka.messages import Failure
from outbox_core.kafka.topics import TopicLimits
from outbox_core.stores.interface import Floor, RowQuery
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import by_key, wait_until

pytestmark = pytest.mark.real_broker

MODES = ["at-least-once", "exactly-once"]
QUICK = {"io_error_backoff": "50ms"}


@pytest.fixture(params=MODES)
def mode(request):
    """A configuration of each delivery mode."""
    return {"delivery": request.param}


def assert_in_order(messages, count):
    """Assert that rows 1 to `count` have arrived, each key in order but for adjacent repeats."""
    for key, values in by_key(messages).items():
        numbers = [int(value) for value in values]
        assert [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n] == sorted(set(numbers)), key
    assert {int(message.value) for message in messages} == set(range(1, count + 1))


class CountingStore(PostgresStore):
    """A store that counts the statements that read rows."""

    reads = 0

    def mark(self, *arguments, **options):
        CountingStore.reads += 1
        return super().mark(*arguments, **options)

    def scan(self, *arguments, **options):
        CountingStore.reads += 1
        return super().scan(*arguments, **options)


def test_ten_thousand_bad_records(scene, make_topic, mode):
    """Ten thousand bad records are held, and later records are read as if these were not in the table."""
    topic = make_topic()
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_partition) "
        "SELECT %s, 'bad' || n, 'x', 999 FROM generate_series(1, 10000) AS n",
        [topic],
    )
    CountingStore.reads = 0
    with scene.running(config=mode, limits=QUICK, store_factory=lambda: CountingStore(scene.database)):
        scene.fill(topic, 2_000)
        wait_until(lambda: scene.count() == 10_000, "everything else is published")
        wait_until(lambda: scene.execute("SELECT count(*) AS n FROM outbox_hold")[0].n == 10_000, "all are held")
        before = CountingStore.reads
        scene.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) "
            "SELECT %s, 'k' || n %% 100, n::text::bytea FROM generate_series(2001, 30000) AS n",
            [topic],
        )
        wait_until(lambda: scene.count() == 10_000, "what comes later, too")
        assert CountingStore.reads - before < 200
    assert_in_order(scene.read(topic), 30_000)


class Unreachable:
    """A producer that cannot reach one topic: records for it time out after a while.

    Attributes:
        away: true while the topic cannot be reached.
    """

    away = True

    def __init__(self, settings, topic):
        self._producer = Producer(settings)
        self._topic = topic
        self._lost = []

    def produce(self, topic, value, key, partition, *, on_delivery, headers):
        if topic != self._topic or not Unreachable.away:
            self._producer.produce(topic, value, key, partition, on_delivery=on_delivery, headers=headers)
        else:
            self._lost.append((time.monotonic() + 1.0, on_delivery))

    def poll(self, timeout):
        while self._lost and (self._lost[0][0] < time.monotonic() or not Unreachable.away):
            self._lost.pop(0)[1](KafkaError(KafkaError._MSG_TIMED_OUT), SimpleNamespace(partition=lambda: 0))
        return self._producer.poll(min(timeout, 0.05) if self._lost else timeout)

    def flush(self, timeout):
        self.poll(0)
        return self._producer.flush(min(timeout, 0.05) if self._lost else timeout)

    def __getattr__(self, name):
        return getattr(self._producer, name)


@pytest.mark.parametrize("size", [4, pytest.param(1_000, marks=pytest.mark.complete)])
def test_unreachable_partition_does_not_slow_the_others(scene, make_topic, size):
    """The harvester backs off from an unreachable partition without a remark, others flow, and at last all arrive."""
    Unreachable.away = True
    stuck, topic = make_topic(partitions=1), make_topic()
    limits = QUICK | {"max_in_flight_records": 4_000, "mark_query_records": 1_000, "max_in_flight_bytes": 1_000_000}
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) "
        "SELECT %s, 'hot', lpad(n::text, %s, '0')::bytea FROM generate_series(1, 3000) AS n",
        [stuck, size],
    )
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) "
        "SELECT %s, 'cold' || n, n::text::bytea FROM generate_series(3001, 6000) AS n",
        [stuck],
    )
    scene.fill(topic, 5_000, keys=500)

    def make_producer(settings):
        return Unreachable(settings, stuck)

    with patch.object(parts, "make_producer", make_producer), scene.running(limits=limits) as harvester:
        wait_until(lambda: scene.count(f"kafka_topic = '{topic}'") == 0, "the others are published")
        for _ in range(3):
            scene.fill(topic, 100, keys=50, prefix="later")
            wait_until(lambda: scene.count(f"kafka_topic = '{topic}'") == 0, "the later ones, too")
        assert scene.count() == 6_000
        assert scene.held() == []
        Unreachable.away = False
        wait_until(lambda: scene.count() == 0, "it is back")
        assert len(harvester.leader_ids) == 1
    assert_in_order(scene.read(stuck), 6_000)


def test_many_missing_topics_do_not_starve_the_others(scene, make_topic):
    """More missing topics than the limits leave room for do not keep the records behind them from arriving."""
    limits = QUICK | {"io_error_backoff": "25ms", "mark_query_records": 10, "max_in_flight_records": 40}
    config = {"producer_kafka_config": {"allow.auto.create.topics": False, "topic.metadata.propagation.max.ms": 1000}}
    topic = make_topic()
    scene.execute("INSERT INTO outbox (kafka_topic) SELECT 'missing-' || n FROM generate_series(1, 150) AS n")
    scene.fill(topic, 5, keys=5)
    with scene.running(config=config, limits=limits):
        wait_until(lambda: scene.count(f"kafka_topic = '{topic}'") == 0, "the others are published")
    assert scene.count() == 150


# -- tests of the tests: each scene fails once its rule is broken


_JOINED = """
AND NOT EXISTS (SELECT FROM public.outbox_hold AS h WHERE h.kafka_topic = outbox.kafka_topic
                AND (h.kafka_key IS NULL OR h.kafka_key = outbox.kafka_key))
"""


@pytest.mark.parametrize("broken", [False, True])
def test_holds_joined_in_sql_let_followers_overtake(scene, monkeypatch, broken):
    """Holds joined in SQL, instead of passed, let a follower overtake a record that is released during a scan.

    The scan here begins above the held record, as with a settled floor. With the holds passed to it, it leaves the key
    out; with the holds joined it returns the follower alone, which so overtakes the record.
    """
    scene.stash(*(OutboxRecord("t", "a", str(n)) for n in (1, 2)))
    scene.hold("add", "t", "a")
    store = PostgresStore(scene.database)
    store.check()
    holds, floor = store.holds.read(), Floor(1, store.sequence.snapshot().place)
    scene.hold("release", topic="t", key="a")
    if broken:
        assert sql.SCAN_EXCLUSION.count(sql.WITHOUT_HELD) == 1
        monkeypatch.setattr(sql, "SCAN_EXCLUSION", sql.SCAN_EXCLUSION.replace(sql.WITHOUT_HELD, _JOINED))
    rows = store.scan(RowQuery(10, after=floor, holds=holds))
    store.close()
    assert [row[0] for row in rows] == ([2] if broken else [])


def without_limits():
    """Hide topics' limits from the harvester, so that it may send a batch that is too large."""
    return patch.object(TopicLimits, "ask", lambda *_: {})


@pytest.mark.parametrize("broken", [False, True])
def test_blaming_a_batch_holds_the_innocent(scene, make_topic, broken):
    """A too-large record fails its batch; no other record is held only if each is tried alone."""
    topic = make_topic(partitions=1, config={"max.message.bytes": "20000"})
    scene.fill(topic, 50, keys=50)
    scene.stash(OutboxRecord(topic, "bad", b"x" * 40_000))
    handle = bad_records.FailedDeliveries.handle

    def blame(self, failures, lanes):
        if broken:
            failures = [Failure(*failure[:2], True, failure[3]) for failure in failures]
        return handle(self, failures, lanes)

    settings = {"producer_kafka_config": {"linger.ms": 200}}
    with (
        without_limits(),
        patch.object(bad_records.FailedDeliveries, "handle", blame),
        scene.running(limits=QUICK, config=settings),
    ):
        wait_until(lambda: scene.held() and scene.count() == len(scene.held()), "everything is published or held")
        assert (len(scene.held()) > 1) is broken


@pytest.mark.parametrize("broken", [False, True])
def test_blaming_a_transaction_holds_the_innocent(scene, make_topic, broken):
    """The same holds for a transaction, with a record without a key that a compacted topic refuses."""
    topic = make_topic(partitions=1, config={"cleanup.policy": "compact"})
    scene.fill(topic, 50, keys=50)
    scene.stash(OutboxRecord(topic, None, b"x"))
    decide_on = failed_transactions.FailedTransactions.aborted

    def blame(self, aborted, records, *more, **options):
        if broken:
            self.refused([Failure(record, aborted.error, True) for record in records])
        else:
            decide_on(self, aborted, records, *more, **options)

    with (
        patch.object(failed_transactions.FailedTransactions, "aborted", blame),
        scene.running(limits=QUICK, config={"delivery": "exactly-once"}),
    ):
        wait_until(lambda: scene.held() and scene.count() == len(scene.held()), "everything is published or held")
        assert (len(scene.held()) > 1) is broken


@pytest.mark.parametrize("broken", [False, True])
def test_holds_that_are_not_looked_at_again_miss_a_pause(scene, make_topic, mode, broken):
    """A topic paused while the outbox was idle is not published, unless the harvester never rereads the holds."""
    topic = make_topic()
    current_or_reread = HoldCache.current_or_reread

    def blind(self, store, records=()):
        return self.current if broken and self.is_known else current_or_reread(self, store, records)

    with patch.object(HoldCache, "current_or_reread", blind), scene.running(config=mode, limits=QUICK):
        scene.fill(topic, 10)
        wait_until(lambda: scene.count() == 0, "it runs")
        scene.execute("SELECT pg_sleep(1)")
        scene.hold("add", topic)
        scene.fill(topic, 10)
        if broken:
            wait_until(lambda: scene.count() == 0, "the pause is not seen")
        else:
            scene.execute("SELECT pg_sleep(2)")
            assert scene.count() == 10
