"""Exactly-once delivery on a real Postgres and broker: crashes at every step, bad records, rivals, mode changes."""

import time
from types import SimpleNamespace

import pytest

from devstack.frame_proxy import Api, Match
from outbox_core import OutboxRecord
from outbox_core.errors import MarkedRowsFound, TrackingTopicError
from outbox_core.kafka import identity
from outbox_core.kafka.clients import NewPartitions, NewTopic, make_admin, make_producer
from outbox_core.kafka.identity import Failpoint, TransactionalIdentity
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.tracking import Ledger, opening_key
from outbox_core.kafka.transactions import Committed, Ended
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import Scene, by_key, identity_of, wait_until

pytestmark = pytest.mark.real_broker

EXACTLY_ONCE = {"delivery": "exactly-once"}
QUICK = {"transaction_timeout": "2s", "mark_query_records": 500}


class Crash(BaseException):
    """The exception that ends the harvest thread at a step, as far as an exception can."""


def crash_at(step, *, after=1):
    """Return a hook that crashes the harvester the `after`-th time it reaches the step."""
    times = {step: after}

    def reached(at):
        if at in times:
            times[at] -= 1
            if times[at] == 0:
                raise Crash(at.value)

    return reached


def numbers(messages):
    """Return the values of the messages, as numbers, by key."""
    return {key: [int(value) for value in values] for key, values in by_key(messages).items()}


def assert_once_and_in_order(messages, count):
    """Assert that rows 1 to `count` have each arrived once, those of a key in order."""
    arrived = sorted(int(message.value) for message in messages)
    assert arrived == list(range(1, count + 1))
    for key, values in numbers(messages).items():
        assert values == sorted(values), f"{key} out of order"


def test_every_record_arrives_once_and_in_order(scene, make_topic):
    """Thousands of rows arrive over several transactions, with their id headers, and leave an empty table."""
    topic = make_topic()
    scene.fill(topic, 5_000, keys=7)
    scene.drain(config=EXACTLY_ONCE, limits=QUICK)
    messages = scene.read(topic)
    assert_once_and_in_order(messages, 5_000)
    assert sorted(map(identity_of, messages)) == list(range(1, 5_001))
    assert scene.count() == 0


@pytest.mark.parametrize("step", list(Failpoint), ids=lambda step: step.value)
def test_crash_between_any_two_steps_neither_loses_nor_repeats(scene, make_topic, step):
    """After a crash at any step the next term learns from Kafka which rows are committed, and goes on from there."""
    topic = make_topic()
    scene.fill(topic, 3_000, keys=11)
    crashed = scene.harvester(
        config=EXACTLY_ONCE, limits=QUICK, reached=crash_at(step, after=2 if step != Failpoint.AFTER_INIT else 1)
    )
    crashed.start()
    with pytest.raises(Crash):
        crashed.join(60)
    scene.drain(config=EXACTLY_ONCE, limits=QUICK)
    assert_once_and_in_order(scene.read(topic), 3_000)
    assert scene.count() == 0


def test_rows_that_come_back_under_old_ids_are_published(scene, make_topic):
    """Ids restart after the crash: recovery identifies rows by id and create time, so new rows stay."""
    topic = make_topic()
    scene.fill(topic, 100)
    crashed = scene.harvester(config=EXACTLY_ONCE, limits=QUICK, reached=crash_at(Failpoint.BEFORE_PURGE))
    crashed.start()
    with pytest.raises(Crash):
        crashed.join(60)
    scene.execute("TRUNCATE outbox RESTART IDENTITY")
    scene.stash(*(OutboxRecord(topic, "new", f"{number + 1000}") for number in range(100)))
    assert scene.rows()[0].id == 1
    scene.drain(config=EXACTLY_ONCE, limits=QUICK)
    assert numbers(scene.read(topic))[b"new"] == list(range(1000, 1100))


def test_at_least_once_after_a_crashed_exactly_once_repeats_nothing(scene, make_topic):
    """At-least-once delivery also settles the last transaction before it publishes."""
    topic = make_topic()
    scene.fill(topic, 2_000, keys=5)
    crashed = scene.harvester(config=EXACTLY_ONCE, limits=QUICK, reached=crash_at(Failpoint.BEFORE_PURGE, after=2))
    crashed.start()
    with pytest.raises(Crash):
        crashed.join(60)
    scene.drain(limits=QUICK)
    assert_once_and_in_order(scene.read(topic), 2_000)


def test_a_tracking_topic_that_got_partitions(scene, make_topic, topic_name):
    """The harvester's own topic is used on if it gets partitions; a drain and another topic repeat and lose nothing."""
    topic, old, new = make_topic(), topic_name("tracking"), topic_name("tracking")
    scene.fill(topic, 2_000, keys=5)
    before = EXACTLY_ONCE | {"tracking_topic": old}
    crashed = scene.harvester(config=before, limits=QUICK, reached=crash_at(Failpoint.BEFORE_PURGE, after=2))
    crashed.start()
    with pytest.raises(Crash):
        crashed.join(60)
    admin = make_admin({"bootstrap.servers": scene.bootstrap})
    admin.create_partitions([NewPartitions(old, 2)])[old].result(20)
    scene.drain(config=before, limits=QUICK)
    scene.drain(config={"tracking_topic": old}, limits=QUICK)
    scene.fill(topic, 100, keys=5)
    scene.drain(config=EXACTLY_ONCE | {"tracking_topic": new}, limits=QUICK)
    arrived = sorted(int(message.value) for message in scene.read(topic))
    assert arrived == sorted([*range(1, 2_001), *range(1, 101)])


def test_marked_rows_want_to_be_accepted(scene, make_topic):
    """Rows that an at-least-once leader left marked may be in Kafka: they and their keys are held, others go on."""
    topic = make_topic()
    scene.fill(topic, 20, keys=10)
    scene.execute("UPDATE outbox SET leader_id = gen_random_uuid() WHERE id BETWEEN 3 AND 6")
    with scene.running(config=EXACTLY_ONCE):
        wait_until(lambda: scene.count() == 8, "all but the marked rows and those behind them are published")
        held = scene.held()
    assert [(hold.record_id, hold.reason) for hold in held] == [(n, "marked") for n in range(3, 7)]
    assert all("leader_id" in hold.error and "--accept-marked" in hold.error for hold in held)
    scene.hold("release", records=[3])
    with scene.running(config=EXACTLY_ONCE):  # a released record is not held again
        wait_until(lambda: scene.count() == 6, "what was released is published, with what was behind it")
    scene.drain(config=EXACTLY_ONCE | {"accept_marked": True})
    assert scene.held() == []
    assert_once_and_in_order(scene.read(topic), 20)


def test_marked_rows_stop_a_harvester_that_cannot_hold_them(scene, make_topic):
    """Without a table of holds marked rows cannot be held: exactly once ends, and names --accept-marked."""
    scene.execute("DROP TABLE outbox_hold")
    scene.fill(make_topic(), 10)
    scene.execute("UPDATE outbox SET leader_id = gen_random_uuid() WHERE id BETWEEN 3 AND 6")
    refused = scene.harvester(config=EXACTLY_ONCE)
    refused.start()
    with pytest.raises(MarkedRowsFound, match=r"4 rows .*\(ids 3 to 6\).*--accept-marked"):
        refused.join(60)
    assert scene.count() == 10


@pytest.mark.parametrize("key", ["bad", None])
def test_record_that_kafka_refuses_does_not_stop_the_others(scene, make_topic, key):
    """The broker's refusal aborts the transaction; in the end only the refused record and its followers are left."""
    topic = make_topic(config={"max.message.bytes": "20000"})
    scene.fill(topic, 1_000, keys=10)
    scene.stash(OutboxRecord(topic, key, b"x" * 100_000), OutboxRecord(topic, "bad", "2000"))
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) "
        "SELECT %s, 'k' || n %% 10, n::text::bytea FROM generate_series(1001, 2000) AS n",
        [topic],
    )
    with scene.running(config=EXACTLY_ONCE, limits=QUICK):
        waiting = 1 if key is None else 2
        wait_until(lambda: scene.count() == waiting, "only the bad record, and what waits behind it, is left")
        left = scene.rows()
    assert [len(row.kafka_value) > 50_000 for row in left] == [True, False][:waiting]
    messages = [message for message in scene.read(topic) if message.key != b"bad"]
    assert_once_and_in_order(messages, 2_000)


def test_record_that_the_client_refuses_does_not_stop_the_others(scene, make_topic):
    """A value beyond message.max.bytes is refused before it is sent; its followers wait, the others go on."""
    topic = make_topic()
    scene.stash(OutboxRecord(topic, "bad", b"x" * 2_000_000), OutboxRecord(topic, "bad", "1"))
    scene.fill(topic, 500, keys=10)
    small = {**EXACTLY_ONCE, "producer_kafka_config": {"message.max.bytes": 1_000_000}}
    with scene.running(config=small, limits=QUICK):
        wait_until(lambda: scene.count() == 2, "only the bad key is left")
    assert_once_and_in_order(scene.read(topic), 500)


def test_late_commit_with_a_lower_id_is_not_lost(scene, make_topic):
    """A row whose transaction commits late is published, although higher ids already are."""
    topic = make_topic()
    with scene.connect() as late:
        scene.stasher.stash(late, OutboxRecord(topic, "late", "1"))
        scene.stash(*(OutboxRecord(topic, f"k{number}", str(number)) for number in range(2, 200)))
        with scene.running(config=EXACTLY_ONCE, limits=QUICK):
            wait_until(lambda: scene.count() == 0, "the committed rows are published")
            late.commit()
            wait_until(lambda: len(scene.read(topic)) == 199, "the late one follows")
    assert_once_and_in_order(scene.read(topic), 199)


def test_two_that_always_lead_still_publish_once(scene, make_topic):
    """Kafka fences, the election only decides who tries: two concurrent leaders repeat no record."""
    topic = make_topic()
    written, count = 0, 0
    with (
        scene.running(config=EXACTLY_ONCE, limits=QUICK),
        scene.running(config=EXACTLY_ONCE, limits=QUICK, name="rival"),
    ):
        until = time.monotonic() + 8
        while time.monotonic() < until:
            scene.stash(
                *(OutboxRecord(topic, f"k{number % 7}", str(number)) for number in range(count + 1, count + 51))
            )
            count += 50
            time.sleep(0.01)
        written = count
        wait_until(lambda: scene.count() == 0, "both together finish the work")
    assert_once_and_in_order(scene.read(topic), written)


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [((2, "compact"), "2 partitions"), ((1, "delete"), "cleanup.policy=delete")],
    ids=["partitions", "policy"],
)
def test_tracking_topic_with_wrong_settings_is_refused(scene, topic_name, settings, complaint):
    """A tracking topic that could lose the manifest or be shared is refused, and the error names the setting."""
    name, (partitions, policy) = topic_name("tracking"), settings
    admin = make_admin({"bootstrap.servers": scene.bootstrap})
    admin.create_topics([NewTopic(name, partitions, config={"cleanup.policy": policy})])[name].result(20)
    harvester = scene.harvester(config=EXACTLY_ONCE | {"tracking_topic": name})
    with pytest.raises(TrackingTopicError, match=complaint):
        harvester.start()


def test_manifest_of_another_outbox_is_refused(scene, make_topic, topic_name):
    """A harvester that finds another outbox's manifest ends, and deletes no row."""
    topic, tracking = make_topic(), topic_name("tracking")
    scene.fill(topic, 10)
    names = EXACTLY_ONCE | {"tracking_topic": tracking, "transactional_id": tracking}
    scene.drain(config=names)
    scene.execute("ALTER TABLE outbox RENAME TO other")
    other = Scene(scene.database, scene.bootstrap, table="other", layout=None)
    other.fill(topic, 10)
    harvester = other.harvester(config=names)
    harvester.start()
    with pytest.raises(TrackingTopicError, match=r"belongs to the outbox .*\.public\.outbox"):
        harvester.join(60)
    assert other.count() == 10


def test_foreign_record_in_the_tracking_topic_is_refused(scene, topic_name, kafka_bootstrap):
    """A record of another transactional.id in the tracking topic, which could hide manifests, is an error."""
    tracking = topic_name("tracking")
    scene.drain(config=EXACTLY_ONCE | {"tracking_topic": tracking})
    producer = make_producer({"bootstrap.servers": kafka_bootstrap})
    producer.produce(tracking, Manifest("elsewhere", [1], [1]).encode(), "somebody else")
    producer.flush(10)
    harvester = scene.harvester(config=EXACTLY_ONCE | {"tracking_topic": tracking})
    harvester.start()
    with pytest.raises(TrackingTopicError, match=r"another transactional\.id"):
        harvester.join(60)


# -- manifests of other outboxes and servers


class OnServer(PostgresStore):
    """A store on a server with an ID of the test's choice."""

    server = "1"

    def server_id(self):
        return self.server


def test_manifest_of_another_server_is_refused(scene, make_topic):
    """A clone of the database deletes no row by the other's manifest; a moved database does with --accept-moved."""
    topic = make_topic()
    scene.fill(topic, 100)

    class Moved(OnServer):
        server = "2"

    def on(store):
        return {"store_factory": lambda: store(scene.database, "outbox")}

    crashed = scene.harvester(
        config=EXACTLY_ONCE, limits=QUICK, reached=crash_at(Failpoint.BEFORE_PURGE), **on(OnServer)
    )
    crashed.start()
    with pytest.raises(Crash):
        crashed.join(60)
    refused = scene.harvester(config=EXACTLY_ONCE, limits=QUICK, **on(Moved))
    refused.start()
    with pytest.raises(TrackingTopicError, match=r"identifier 1; this server has 2.*leader_group_id.*--accept-moved"):
        refused.join(60)
    assert scene.count() == 100
    scene.drain(config=EXACTLY_ONCE | {"accept_moved": True}, limits=QUICK, **on(Moved))
    assert_once_and_in_order(scene.read(topic), 100)
    scene.fill(topic, 1)
    scene.drain(config=EXACTLY_ONCE, limits=QUICK, **on(Moved))  # accepted once, for good


def test_strangers_record_stops_exactly_once_alone(scene, make_topic, caplog):
    """A stranger's record in the tracking topic stops exactly-once delivery; at least once only warns of it."""
    topic, tracking = make_topic(), make_topic(1, config={"cleanup.policy": "compact"})
    producer = make_producer({"bootstrap.servers": scene.bootstrap})
    producer.produce(tracking, b"garbage", "stranger", 0)
    producer.flush(10)
    names = {"tracking_topic": tracking}
    scene.fill(topic, 10)
    refused = scene.harvester(config=EXACTLY_ONCE | names)
    refused.start()
    with pytest.raises(TrackingTopicError, match="every outbox needs its own"):
        refused.join(60)
    scene.drain(config=names)
    assert_once_and_in_order(scene.read(topic), 10)
    assert "b'stranger' at offset 0 is ignored" in caplog.text


# -- stopping


def test_stop_does_not_wait_for_kafka_for_long(scene, kafka, make_topic):
    """A stop waits for a commit's answer for the drain timeout, or 5 s; the next term settles the outcome."""
    topic = make_topic(1)
    scene.fill(topic, 10)
    limits = {"transaction_timeout": "20s", "drain_timeout": "1s"}
    with kafka.frame_proxied(2) as frames:
        config = EXACTLY_ONCE | {"base_kafka_config": {"bootstrap.servers": frames.bootstrap}}
        trap = frames.hold(Match(Api.END_TXN, commits=True), reset=False)
        harvester = scene.harvester(config=config, limits=limits)
        harvester.start()
        assert trap.wait_until_held(20)
        began = time.monotonic()
        harvester.stop()
        assert harvester.join(60)
        assert time.monotonic() - began < 15, "not 20"
        trap.deliver()
        assert trap.wait_until_answered(10) or trap.is_lost or trap.wait_until_delivered(1)
    scene.drain(config=EXACTLY_ONCE, limits=QUICK)
    assert_once_and_in_order(scene.read(topic), 10)


def test_new_producer_of_a_term_sees_who_published_meanwhile(scene, make_topic, monkeypatch):
    """A new producer, made after a slow commit, does not hide a rival that published in between."""
    topic = make_topic(1)
    scene.fill(topic, 20, keys=3)
    commit, rivals = identity.RecordProducer.commit, []

    def paused_after_commit(producer, *arguments):
        """Commit slowly once, and let a rival publish the other rows before the harvester goes on."""
        outcome = commit(producer, *arguments)
        if not rivals:
            rivals.append("now")
            producer._must_replace = True
            scene.drain(config=EXACTLY_ONCE, limits=QUICK, name="rival")
        return outcome

    monkeypatch.setattr(identity.RecordProducer, "commit", paused_after_commit)
    scene.drain(config=EXACTLY_ONCE, limits=QUICK | {"mark_query_records": 10})
    assert rivals
    assert_once_and_in_order(scene.read(topic), 20)


def test_producer_is_replaced_within_a_term(scene, make_topic, monkeypatch):
    """After a slow commit without a rival the term goes on with another producer."""
    topic = make_topic(1)
    scene.fill(topic, 50, keys=3)
    commit, terms = identity.RecordProducer.commit, []

    def slow(producer, *arguments):
        outcome = commit(producer, *arguments)
        producer._must_replace = True
        return outcome

    monkeypatch.setattr(identity.RecordProducer, "commit", slow)
    scene.drain(
        config=EXACTLY_ONCE,
        limits=QUICK | {"mark_query_records": 10},
        reached=lambda step: terms.append(step) if step is Failpoint.AFTER_INIT else None,
    )
    assert len(terms) == 1
    assert_once_and_in_order(scene.read(topic), 50)


# -- slow clusters, and leaders that do not know that they are deposed


def test_slow_ends_of_all_transactions_do_not_stop_an_outbox(scene, make_topic, monkeypatch):
    """Although every commit and abort is slow enough for a repeat, each producer publishes its transaction."""
    topic = make_topic(1)
    scene.fill(topic, 30, keys=3)
    end = identity.RecordProducer._end

    def slow(producer, *arguments):
        try:
            end(producer, *arguments)
        finally:
            producer._must_replace = True

    monkeypatch.setattr(identity.RecordProducer, "_end", slow)
    scene.drain(config=EXACTLY_ONCE, limits=QUICK | {"mark_query_records": 10})
    assert_once_and_in_order(scene.read(topic), 30)


@pytest.fixture
def transactions(scene):
    """The outbox's transactional identity, with its tracking topic made."""
    scene.drain(config=EXACTLY_ONCE, limits=QUICK)
    config = scene.config(**EXACTLY_ONCE)
    made, factory = [], TransactionalIdentity.new_producer

    def begin(transactions):
        made.append(factory(transactions))
        assert made[-1].init() is None
        ledger = transactions.ledger(made[-1], lambda: False)
        assert isinstance(ledger, Ledger), ledger
        return made[-1], ledger

    yield SimpleNamespace(own=TransactionalIdentity.of(config, scene.harvesters[0]._parts.identify()[0]), begin=begin)
    for producer in made:
        producer.discard()


def test_an_empty_manifest_hides_nobodys(transactions):
    """A leader that pauses in its recovery, after a slow end, does not hide its successor's manifest."""
    own = transactions.own
    paused, known = transactions.begin(own)
    paused._must_replace = True
    successor, _ = transactions.begin(own)
    assert successor.begin() is None
    assert successor.send_manifest(own.tracking_topic, Manifest(own.outbox, [7], [7]).encode()) is None
    assert isinstance(successor.commit(), Committed)
    assert isinstance(own.adopt(paused, "", known, lambda: False), Ended)
    assert list(transactions.begin(own)[1].manifest.ids) == [7]


@pytest.mark.parametrize("others", [(), ("", "no topic!", "x" * 1000)], ids=["", "illegal names"])
def test_a_torn_batch_is_read_back_once(scene, transactions, make_topic, others):
    """Recovery settles a torn transaction with a manifest, so that the next term finds no opening.

    Its batch may have had rows for topics that cannot exist.
    """
    own = transactions.own
    producer, _ = transactions.begin(own)
    assert producer.begin() is None
    opening = Opening(own.outbox, 1, 9, (make_topic(1), *others))
    assert producer.send_manifest(own.tracking_topic, opening.encode(), key=opening_key(own.transactional_id)) is None
    assert isinstance(producer.commit(), Committed)
    assert transactions.begin(own)[1].opening is not None
    scene.drain(config=EXACTLY_ONCE, limits=QUICK)
    assert transactions.begin(own)[1].opening is None
