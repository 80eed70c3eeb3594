"""A cluster of three brokers with replication factor 3: its faults, and their effects on clients."""

import time
from contextlib import ExitStack, contextmanager

import pytest
from confluent_kafka import Consumer, KafkaException, Producer, TopicPartition

from devstack.cluster import GROUP_STATE
from devstack.frame_proxy import Api, Match
from devstack.links import LinkFault, faulty
from devstack.processes import wait_until
from tests.kafka_reader import read_topic

pytestmark = [pytest.mark.alone, pytest.mark.complete, pytest.mark.real_broker, pytest.mark.timeout(300)]

_QUICK = {"reconnect.backoff.max.ms": 500, "log_level": 0}


@pytest.fixture
def sides(cluster):
    """Two groups of proxies."""
    with cluster.proxied(1) as one, cluster.proxied(2) as other:
        yield one, other


@pytest.fixture
def topic(cluster, make_topic):
    """A topic of one partition."""
    name = make_topic(1, bootstrap=cluster.bootstrap, replicas=3)
    cluster.leader_of(name, 0)
    return name


def _producer(bootstrap, **settings):
    return Producer({"bootstrap.servers": bootstrap, **_QUICK, **settings})


def _send(producer, topic, value, seconds=20):
    producer.produce(topic, value)
    assert producer.flush(seconds) == 0


def _values(cluster, topic):
    return [message.value for message in read_topic(cluster.bootstrap, topic)]


@contextmanager
def _healed(cluster):
    """Let a test kill brokers; afterwards bring all replicas in sync again."""
    try:
        yield
    finally:
        cluster.start()


def test_everything_has_three_replicas(cluster, topic):
    """Records, offsets and the state of transactions have three replicas each."""
    admin = Producer({"bootstrap.servers": cluster.bootstrap})
    cluster.coordinator_of("anyone")
    described = admin.list_topics(timeout=10).topics
    for name in (topic, "__transaction_state", "__consumer_offsets"):
        assert {len(partition.replicas) for partition in described[name].partitions.values()} == {3}, name


def test_leader_and_coordinator_move(cluster, topic):
    """Partition leader and coordinator move to the broker that a test names, and no record is lost."""
    producer = _producer(cluster.bootstrap)
    _send(producer, topic, b"before")
    for role in (
        (lambda: cluster.leader_of(topic, 0), lambda to: cluster.move_leader(topic, 0, to)),
        (lambda: cluster.coordinator_of("mine"), lambda to: cluster.move_coordinator("mine", to)),
    ):
        where, move = role
        target = where() % 3 + 1
        move(target)
        assert where() == target
    _send(producer, topic, b"after")
    assert _values(cluster, topic) == [b"before", b"after"]


def test_a_killed_broker_is_replaced_and_comes_back(cluster, topic):
    """After SIGKILL of a leader another broker takes over with all acknowledged records; the old one comes back."""
    producer = _producer(cluster.bootstrap)
    _send(producer, topic, b"before")
    leader = cluster.leader_of(topic, 0)
    with _healed(cluster):
        cluster.brokers[leader].kill()
        assert wait_until(lambda: cluster.leader_of(topic, 0) != leader, timeout=20)
        _send(producer, topic, b"without it")
        assert _values(cluster, topic) == [b"before", b"without it"]
        cluster.brokers[leader].start()
        assert cluster.wait_until_in_sync()


def test_the_leader_alone_is_cut_off_on_one_side(cluster, sides, topic):
    """Clients of one side cannot reach the leader; clients of the other side reach every broker."""
    one, other = sides
    leader = cluster.leader_of(topic, 0)
    behind, beside = (_producer(side.bootstrap) for side in sides)
    _send(behind, topic, b"before")
    one.of[leader].cut()
    behind.produce(topic, b"during")
    assert behind.flush(1) == 1
    _send(beside, topic, b"beside")
    assert other.of[leader].seen(Api.PRODUCE)
    one.of[leader].restore()
    assert behind.flush(20) == 0
    assert _values(cluster, topic) == [b"before", b"beside", b"during"]


def test_the_coordinator_alone_is_cut_off(cluster, sides, topic, topic_name):
    """Records reach their leader while the commit does not reach its coordinator; in the end the commit succeeds."""
    one, name = sides[0], topic_name("coordinated")
    cluster.move_leader(topic, 0, 1)
    cluster.move_coordinator(name, 2)
    producer = _producer(one.bootstrap, **{"transactional.id": name, "transaction.timeout.ms": 30_000})
    producer.init_transactions(30)
    producer.begin_transaction()
    _send(producer, topic, b"kept")
    one.of[2].cut()
    with pytest.raises(KafkaException):
        producer.commit_transaction(1)
    one.of[2].restore()
    producer.commit_transaction(30)
    assert _values(cluster, topic) == [b"kept"]


def test_the_group_coordinator_moves_and_is_cut_off_alone(cluster, topic, topic_name):
    """A group's coordinator moves to the broker that a test names; a process of three cannot reach it, two can."""
    group = topic_name("group")
    with ExitStack() as opening:
        sides = [opening.enter_context(cluster.proxied(number)) for number in (1, 2, 3)]
        target = cluster.coordinator_of(group, GROUP_STATE) % 3 + 1
        cluster.move_coordinator(group, target, GROUP_STATE)
        assert cluster.coordinator_of(group, GROUP_STATE) == target
        cluster.move_leader(topic, 0, target % 3 + 1)
        with faulty([sides[2].of[target]], LinkFault.HOLE):
            assert not _coordinator_answers(sides[2].bootstrap, group, topic, timeout=5)
            assert all(_coordinator_answers(side.bootstrap, group, topic, timeout=30) for side in sides[:2])
        assert _coordinator_answers(sides[2].bootstrap, group, topic, timeout=30)


def _coordinator_answers(bootstrap, group, topic, *, timeout):
    consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, **_QUICK})
    try:
        consumer.committed([TopicPartition(topic, 0)], timeout=timeout)
    except KafkaException:
        return False
    finally:
        consumer.close()
    return True


def test_a_late_request_reaches_the_old_coordinator(cluster, sides, topic, topic_name):
    """An EndTxn that is held until the coordinator has moved is refused, and harms no later transaction."""
    one, name = sides[0], topic_name("moved")
    at = cluster.coordinator_of(name)
    producer = _producer(one.bootstrap, **{"transactional.id": name})
    producer.init_transactions(30)
    trap = one.of[at].hold(Match(Api.END_TXN, transactional_id=name))
    producer.begin_transaction()
    _send(producer, topic, b"1")
    producer.commit_transaction(30)
    cluster.move_coordinator(name, at % 3 + 1)
    producer.begin_transaction()
    _send(producer, topic, b"2")
    trap.deliver()
    assert trap.wait_until_answered(10)
    assert trap.error_code == 16, "not the coordinator"
    producer.commit_transaction(30)
    assert _values(cluster, topic) == [b"1", b"2"]


def test_min_isr_is_lost_and_regained(cluster, topic):
    """With one replica of three no record is acknowledged; a pending one is, once a second replica is back."""
    cluster.move_leader(topic, 0, 1)
    producer = _producer(cluster.bootstrap)
    with _healed(cluster):
        for number in (2, 3):
            cluster.brokers[number].kill()
        producer.produce(topic, b"patient")
        assert producer.flush(8) == 1
        cluster.brokers[3].start()
        assert producer.flush(30) == 0
    assert _values(cluster, topic) == [b"patient"]


def test_an_isolated_broker_answers_with_an_old_end(cluster, sides, topic):
    """Cut off from the controller alone, the old leader still reports an end of the partition that is out of date.

    This is why recovery writes to the tracking topic to learn its end, and does not ask for it.
    """
    producer = _producer(cluster.bootstrap)
    _send(producer, topic, b"1")
    old = cluster.leader_of(topic, 0)
    others = [broker for number, broker in cluster.brokers.items() if number != old]
    for broker in others:
        sides[0].of[broker.number].cut()  # they would tell a client the new leader
    place = TopicPartition(topic, 0)
    stale = Consumer({"bootstrap.servers": sides[0].of[old].bootstrap, "group.id": "stale", **_QUICK})
    assert stale.get_watermark_offsets(place, timeout=20)[1] == 1
    cluster.isolate(old)
    try:
        moved = _leader_according_to(others, topic, other_than=old)
        assert moved != old
        _send(_producer(others[0].bootstrap), topic, b"2")
        assert stale.get_watermark_offsets(place, timeout=20)[1] == 1, "the old leader knows better"
    finally:
        stale.close()
        cluster.rejoin(old)
        assert cluster.wait_until_in_sync()
    assert _values(cluster, topic) == [b"1", b"2"]


def _leader_according_to(brokers, topic, *, other_than):
    """Ask each broker with a new client: one that knew the isolated broker might go on asking that."""
    deadline = time.monotonic() + 20
    while True:
        for broker in brokers:
            client = Producer({"bootstrap.servers": broker.bootstrap, **_QUICK})
            leader = client.list_topics(topic, timeout=5).topics[topic].partitions[0].leader
            if leader not in {-1, other_than} or time.monotonic() > deadline:
                return leader
        time.sleep(0.1)
