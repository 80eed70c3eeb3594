"""The documented rights, of Kafka and of PostgreSQL: they suffice, also after many restarts."""

import re
from urllib.parse import urlsplit

import pytest

from outbox_core.election import Neli, NeliConfig
from outbox_core.events import LeaderAcquired
from outbox_core.kafka.admin import TopicHidden
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.topics import ensure_tracking_topic, partition_count
from outbox_core.record import OutboxRecord
from outbox_queue import QueueService
from outbox_queue.config import QueueConfig
from outbox_queue.dead_letters.store import DeadLetters
from outbox_queue.errors import QueueError
from outbox_queue.operations.stats import queue_stats, waiting_messages
from outbox_queue.redelivery.tracker import RedeliveryTracker
from outbox_spark.config import ReplaySettings
from outbox_spark.pipelines.replay import _Shard
from outbox_spark.relay import fencing
from outbox_spark.relay.plan import BatchPlan, Planner
from outbox_spark.relay.shard_store import ShardStore
from outbox_spark.relay.shard_task import ShardTask
from outbox_spark.topics.ranges import OffsetRange, read_range
from tests.acl_world import DOCS, GROUP, TOPIC, TRANSACTIONAL_ID, Broker, table_of
from tests.harvesting import Scene, wait_until
from tests.resources import times

pytestmark = pytest.mark.real_broker

_RESTARTS = times(3, 10)
_SHARDS = 2
_USERS = ["least", "exactly", "blind", "relay", "replay", "producer", "consumer", "tracker", "looker", "undertaker"]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A broker that denies by default."""
    with Broker(tmp_path_factory.mktemp("denying"), _USERS) as broker:
        yield broker


@pytest.fixture
def scene(database, broker):
    """A fresh outbox and its roles, with exactly the documented grants."""
    scene = Scene(database, broker.bootstrap)
    names = {"outbox_harvester": f"harvester_{scene.database[-12:]}", "shop_app": f"app_{scene.database[-12:]}"}
    sql = _documented_grants()
    for documented, own in names.items():
        sql = sql.replace(documented, own)
    scene.execute(sql)
    scene.roles = names
    yield scene
    scene.close()
    for role in names.values():
        scene.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def _documented_grants():
    """Return the statements of the page on deploying."""
    text = (DOCS / "deploying.md").read_text().partition("\n### Roles\n")[2]
    return re.search(r"```sql\n(.*?)```", text, re.DOTALL)[1]


def _as(scene, role):
    """Return the database's URL for one of the documented roles."""
    url = urlsplit(scene.database)
    return url._replace(netloc=url.netloc.replace(url.username or "postgres", scene.roles[role], 1)).geturl()


def _grant_harvester(broker, user, identity, topic, *, exactly_once, relay=False):
    """Grant the rights in the tables for one outbox, with CREATE, as its topics do not exist."""
    named = {
        "topics it publishes to": [(TOPIC, topic)],
        "leader topic, `<group>.neli`": [(TOPIC, f"{identity}.neli")],
        "leader group, `<group>`": [(GROUP, identity)],
        "cluster": [],  # only for brokers before 2.8
        # These are granted below, by the table of exactly-once delivery.
        "the tracking topic, if it exists or delivery is exactly once": [],
        "transactional.id, `kafka-outbox:<database>.<schema>.<table>`, in the same cases": [],
        "a relay's topic, if there ever was a [relay on Spark](spark-relay.md#what-it-needs-in-kafka)": [
            (TOPIC, f"{identity}.relay-manifests")
        ]
        * relay,
        "its transactional.ids, `kafka-outbox:<database>.<schema>.<table>:shard-<n>` (a prefix rule is enough)": [
            (TRANSACTIONAL_ID, f"kafka-outbox:{identity}:shard-{shard}") for shard in range(_SHARDS * relay)
        ],
        "dead-letter topic, `<database>.<schema>.<table>.dead-letter`": [(TOPIC, f"{identity}.dead-letter")],
        "tracking topic and a relay's, `<database>.<schema>.<table>.manifests`, `....relay-manifests`": [
            (TOPIC, f"{identity}.manifests"),
            (TOPIC, f"{identity}.relay-manifests"),
        ],
    }
    for resource, (operations, *_) in table_of("deploying.md", "## Kafka").items():
        for kind, name in named[resource]:
            broker.grant(user, kind, name, operations)
    broker.grant(user, TOPIC, f"{identity}.neli", "CREATE")
    broker.grant(user, TOPIC, f"{identity}.dead-letter", "CREATE")
    if not exactly_once:
        return
    named = {
        "transactional.id, `kafka-outbox:<database>.<schema>.<table>`": (TRANSACTIONAL_ID, f"kafka-outbox:{identity}"),
        "tracking topic, `<database>.<schema>.<table>.manifests`": (TOPIC, f"{identity}.manifests"),
        "topics it publishes to": (TOPIC, topic),
    }
    for resource, (operations, *_) in table_of("choosing-delivery.md", "### Rights").items():
        broker.grant(user, *named[resource], operations)
    broker.grant(user, TOPIC, f"{identity}.manifests", "CREATE")


def _publish(scene, broker, user, topic, delivery):
    """Run one harvester that publishes an application's records with the documented rights."""
    application = Scene(_as(scene, "shop_app"), broker.bootstrap, layout=None)
    application.stash(*(OutboxRecord(topic, str(number), b"x") for number in range(3)))
    application.stash(OutboxRecord(topic, "bad", b"x", partition=1000))
    config = {
        "data_source": _as(scene, "outbox_harvester"),
        "base_kafka_config": broker.settings(user),
        "delivery": delivery,
        "on_poison": "dead-letter",
    }
    scene.drain(config=config, elector_factory=None, limits={"heartbeat_timeout": "2s"})


@pytest.mark.parametrize(("user", "delivery"), [("least", "at-least-once"), ("exactly", "exactly-once")])
def test_harvesters(scene, broker, topic_name, user, delivery):
    """With the rights in the tables a harvester publishes all records, dead letters included, at every restart."""
    topic = broker.make_topic(topic_name())
    identity, _ = scene.harvester()._parts.identify()
    _grant_harvester(broker, user, identity, topic, exactly_once=delivery == "exactly-once")
    for _ in range(_RESTARTS):
        _publish(scene, broker, user, topic, delivery)
    assert len(scene.read(topic)) == 3 * _RESTARTS
    assert len(scene.read(f"{identity}.dead-letter")) == _RESTARTS
    if delivery == "exactly-once":
        _publish(scene, broker, user, topic, "at-least-once")  # which needs the same rights
        assert len(scene.read(topic)) == 3 * _RESTARTS + 3


@pytest.mark.complete
@pytest.mark.parametrize(("user", "delivery"), [("least", "at-least-once"), ("exactly", "exactly-once")])
def test_harvesters_after_a_relay(scene, broker, topic_name, user, delivery):
    """With a relay's topic left behind, the rights in the tables suffice as well."""
    topic = broker.make_topic(topic_name())
    identity, _ = scene.harvester()._parts.identify()
    broker.make_topic(f"{identity}.relay-manifests", partitions=_SHARDS, **{"cleanup.policy": "compact"})
    _grant_harvester(broker, user, identity, topic, exactly_once=delivery == "exactly-once", relay=True)
    for _ in range(2):
        _publish(scene, broker, user, topic, delivery)
    assert len(scene.read(topic)) == 6


@pytest.mark.parametrize(("user", "delivery"), [("least", "at-least-once"), ("exactly", "exactly-once")])
def test_topic_without_any_right_is_held(scene, broker, topic_name, user, delivery):
    """A topic without the right to describe it, which the client itself refuses, is held, and the other flows."""
    topic, hidden = broker.make_topic(topic_name()), broker.make_topic(topic_name())
    identity, _ = scene.harvester()._parts.identify()
    _grant_harvester(broker, user, identity, topic, exactly_once=delivery == "exactly-once")
    # How soon the client asks again whether it may see a topic: librdkafka's default is five minutes.
    kafka = {**broker.settings(user), "topic.metadata.refresh.interval.ms": 1000}

    def released():
        scene.hold("release", topic=hidden)
        return not scene.count()

    with scene.running(config={"base_kafka_config": kafka, "delivery": delivery}):
        for to in (hidden, topic):
            scene.stash(*(OutboxRecord(to, f"k{number % 2}", b"x") for number in range(4)))
        wait_until(lambda: scene.count() == 4, "the other topic is published")
        (hold,) = wait_until(scene.held, "the topic is held")
        assert (hold.topic, hold.key, hold.record_id, hold.reason) == (hidden, None, None, "not authorized")
        broker.grant(user, TOPIC, hidden, "WRITE")
        wait_until(released, "the topic goes on")
    assert len(scene.read(hidden)) == 4


def test_relay(scene, broker, topic_name):
    """A relay's driver and tasks need no more than the rights in its table, also after a harvester."""
    topic = broker.make_topic(topic_name())
    config = scene.config(base_kafka_config=broker.settings("relay"), delivery="exactly-once")
    as_role = scene.config(
        base_kafka_config=broker.settings("relay"), delivery="exactly-once", data_source=_as(scene, "outbox_harvester")
    )
    store = ShardStore.of(as_role)
    identity = store.check()
    named = {
        "transactional.ids": [(TRANSACTIONAL_ID, f"kafka-outbox:{identity}:shard-{shard}") for shard in range(_SHARDS)],
        "topic of the manifests, compacted, one partition for each shard, two at least": [
            (TOPIC, f"{identity}.relay-manifests")
        ],
        "topics it publishes to": [(TOPIC, topic)],
        "leader topic": [(TOPIC, f"{identity}.neli")],
        "leader group": [(GROUP, identity)],
        "tracking topic of harvesters": [(TOPIC, f"{identity}.manifests")],
        "transactional.id of harvesters": [(TRANSACTIONAL_ID, f"kafka-outbox:{identity}")],
    }
    for resource, (_, operations) in table_of("spark-relay.md", "## What it needs in Kafka").items():
        for kind, name in named[resource]:
            broker.grant("relay", kind, name, operations)
    transactions = TransactionalIdentity.of(config, identity)
    for restart in range(2):
        scene.fill(topic, 10)
        ensure_tracking_topic(transactions.kafka, transactions.relay_topic, width=_SHARDS)
        with Neli(NeliConfig.of(config, identity, store.server_id())) as elector:
            wait_until(lambda elector=elector: elector.is_leader, "it leads")
            fencing.fence_and_purge(transactions, store, lambda: False)
            ranges = Planner(store, _SHARDS).next()
            plan = BatchPlan(harvest=as_role, outbox=identity, term=elector.leadership.term, ranges=ranges)
            for number in range(_SHARDS):
                assert not ShardTask(plan, number).run().error
            fencing.fence_and_purge(transactions, store, lambda: False)
        assert len(scene.read(topic)) == 10 * (1 + restart)
        if not restart:  # the second time there was a harvester
            broker.make_topic(f"{identity}.manifests", 1, **{"cleanup.policy": "compact"})
    store.close()


def test_topic_that_may_not_be_seen_is_not_absent(scene, broker, topic_name):
    """At least once: without DESCRIBE on the tracking topic no record is published, and the right is named."""
    topic = broker.make_topic(topic_name())
    identity, _ = scene.harvester()._parts.identify()
    _grant_harvester(broker, "blind", identity, topic, exactly_once=False)
    broker.revoke_everything("blind")
    for kind, name, operations in [
        (TOPIC, topic, "WRITE"),
        (TOPIC, f"{identity}.neli", "READ, WRITE, CREATE"),
        (GROUP, identity, "READ"),
    ]:
        broker.grant("blind", kind, name, operations)
    with pytest.raises(TopicHidden, match="grant DESCRIBE on it to User:blind"):
        partition_count(broker.settings("blind"), f"{identity}.manifests")
    scene.fill(topic, 3)
    config = {"base_kafka_config": broker.settings("blind")}
    with scene.running(config=config) as harvester:
        wait_until(
            lambda: "grant DESCRIBE on it to User:blind" in harvester._ctx.kafka.describe(), "it says what it lacks"
        )
        assert harvester.kinds()[0] == LeaderAcquired.__name__
        assert scene.count() == 3
        broker.grant("blind", TOPIC, f"{identity}.", "DESCRIBE", prefixed=True)
        wait_until(lambda: scene.count() == 0, "it goes on by itself")


def test_pipelines_read_topics(scene, broker, topic_name):
    """READ on a topic suffices for reading ranges of it: no group is joined, so no right on one is needed."""
    topic = broker.make_topic(topic_name(), partitions=1)
    scene.fill(topic, 500)
    scene.drain()
    broker.grant("looker", TOPIC, topic, "READ")
    reader = read_range(broker.settings("looker"), OffsetRange(topic, 0, 0, 500))
    assert sum(len(messages) for messages in reader) == 500


def test_replays(broker, topic_name, tmp_path):
    """With the rights on its page a replay publishes, and goes on from its last offset."""
    target, name = broker.make_topic(topic_name(), partitions=1), topic_name("replay")
    text = " ".join((DOCS / "spark-archive.md").read_text().split())
    rights = re.search(r"Rights: (.*?) on the target topics, (.*?) on these groups, (.*?) on transactional.ids", text)
    own = f"outbox-replay.{name}.orders.0"
    for (kind, where), operations in zip(
        [(TOPIC, target), (GROUP, own), (TRANSACTIONAL_ID, own)], rights.groups(), strict=True
    ):
        broker.grant("replay", kind, where, operations)
    settings = ReplaySettings(archive=str(tmp_path), name=name, transaction_records=2)
    rows = [{"offset": n, "target": target, "key": b"k", "value": b"v", "headers": []} for n in range(6)]
    for number, published in ((3, 3), (6, 3), (6, 0)):
        shard = _Shard(broker.settings("replay"), settings, "orders", 0)
        assert shard.publish(iter(rows[:number]))[0] == published


_QUEUE = "jobs"


def _queue_config(broker, user, topics, **settings):
    return QueueConfig(
        bootstrap_servers=broker.settings(user)["bootstrap.servers"],
        kafka={name: value for name, value in broker.settings(user).items() if name != "bootstrap.servers"},
        redelivery_timeout="2s",
        **topics,
        **settings,
    )


@pytest.fixture
def queues(broker, topic_name):
    """A function that configures queues for one user with the documented rights; an operator has made the topics."""
    topics = {
        "message_topic": broker.make_topic(topic_name("messages")),
        "marker_topic": broker.make_topic(topic_name("markers"), **{"message.timestamp.type": "LogAppendTime"}),
        "dead_letter_topic": broker.make_topic(topic_name("dead"), **{"cleanup.policy": "compact"}),
    }
    rights = table_of("queues-operations.md", "### Rights")
    users = {
        "producer": "producer",
        "consumer": "consumer",
        "tracker": "tracker",
        "looker": "`stats`, `peek`",
        "undertaker": "`dead-letters`",
    }
    assert set(rights) == set(users.values())
    for user, row in users.items():
        _grant_queue(broker, user, rights[row][0], topics)
    yield lambda user, **settings: _queue_config(broker, user, topics, **settings)
    for user in users:
        broker.revoke_everything(user)


def _grant_queue(broker, user, text, topics):
    """Grant the rights in one line of the table: clauses of operations and resources."""
    on_topic = {
        "the message topic": ["message_topic"],
        "the marker topic": ["marker_topic"],
        "the dead letter topic": ["dead_letter_topic"],
        "the marker and the dead letter topic": ["marker_topic", "dead_letter_topic"],
        "the message and the dead letter topic": ["message_topic", "dead_letter_topic"],
        "all three topics": list(topics),
    }
    for clause in re.split(r"[;,] (?=[A-Z]|`trans)", text):
        operations, on, what = clause.removeprefix("`transactional: true`: ").partition(" on ")
        assert on, clause
        for part in re.split(r" and (?=its group|on )", what):
            _grant_part(broker, user, operations, part, topics, on_topic)


def _grant_part(broker, user, operations, part, topics, on_topic):  # noqa: PLR0917
    name = re.search(r"`([^`]*)`", part)
    if part in on_topic:
        for topic in on_topic[part]:
            broker.grant(user, TOPIC, topics[topic], operations)
    elif part == "the groups":
        broker.grant(user, GROUP, "kafka-mq-", operations, prefixed=True)
    elif "group" in part:
        broker.grant(user, GROUP, name[1].replace("<queue>", _QUEUE), operations)
    elif "transactional id" in part:
        own = name[1].replace("<queue>", _QUEUE).replace("<dead letter topic>", topics["dead_letter_topic"])
        broker.grant(user, TRANSACTIONAL_ID, own, operations, prefixed="begin with" in part)
    else:
        raise AssertionError(f"the test does not know {part!r}")


@pytest.mark.parametrize("transactional", [pytest.param(False, marks=pytest.mark.complete), True])
def test_queues(queues, transactional):
    """With the rights of its line a user can send, receive, redeliver, peek, requeue or discard."""
    with RedeliveryTracker(queues("tracker")) as tracker:
        with QueueService(queues("producer")).queue(_QUEUE).producer() as producer:
            for number in range(3):
                producer.send(b"%d" % number)
        assert len(list(waiting_messages(queues("looker"), _QUEUE))) == 3
        config = queues("consumer", transactional=transactional, max_attempts=1)
        with QueueService(config).queue(_QUEUE).consumer() as consumer:
            first, second, third = (consumer.receive() for _ in range(3))
            first.ack()
            second.reject("no such customer")
            third.nack()
            letters = DeadLetters(queues("undertaker"))
            wait_until(lambda: len(letters.all()) == 2, "both are dead letters")
            (row,) = queue_stats(queues("looker"), _QUEUE)
            assert row.dead_letters == 2
            assert len(letters.requeue(lambda letter: letter.payload == second.payload)) == 1
            assert len(letters.discard(lambda _: True)) == 1
            again = consumer.receive()
            assert again.payload == second.payload
            again.ack()
        assert tracker.health().ok


@pytest.mark.complete
def test_groups_that_may_not_be_seen_are_not_taken_for_none(broker, queues):
    """Statistics of all queues name the group that is hidden, instead of counting all of its messages as waiting."""
    with QueueService(queues("producer")).queue(_QUEUE).producer() as producer:
        producer.send(b"1")
    assert [(row.queue, row.waiting) for row in queue_stats(queues("looker"))] == [(_QUEUE, 1)]
    broker.revoke_everything("looker")
    topics = queues("looker")
    for topic in (topics.message_topic, topics.marker_topic, topics.dead_letters):
        broker.grant("looker", TOPIC, topic, "READ")
    broker.grant("looker", GROUP, "kafka-mq-redelivery", "DESCRIBE")
    with pytest.raises(QueueError, match=f"offsets of group 'kafka-mq-{_QUEUE}'.*DESCRIBE"):
        queue_stats(topics)
