"""Three brokers, and members of a queue's groups of which some lose the link to one broker: the others do the work.

Each member reaches the brokers by proxies of its own, and keeps its links to all brokers but one, which is not its
group's coordinator: so Kafka would leave it its partitions for ever.
"""

import json
import re
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections import defaultdict
from collections.abc import Callable
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
from confluent_kafka import Consumer, ConsumerGroupState
from confluent_kafka.admin import AdminClient

from devstack.cluster import KafkaCluster, ProxyGroup
from devstack.ports import free_port
from outbox_queue import QueueConfig, QueueService
from outbox_queue.protocol.clients import TRACKER_GROUP, consumer_settings, group_of
from tests.queueing import PATIENCE, Markers, dead_letters_in, eventually, messages_in

PROMISED_SECONDS = 45
MENDED_SECONDS = 30
_CHECKOUT = Path(__file__).resolve().parents[3]
_BEFORE, _MEANWHILE = range(24), range(24, 48)

pytestmark = [pytest.mark.alone, pytest.mark.real_broker, pytest.mark.timeout(500)]


class World(NamedTuple):
    """Three brokers, two ways to them with a link to each of its own, and a directory for logs."""

    cluster: KafkaCluster
    sides: tuple[ProxyGroup, ProxyGroup]
    make_topic: Callable[..., str]
    directory: Path

    def config(self, **settings):
        """Return settings of queues with new topics on all brokers."""
        on_all = {"bootstrap": self.cluster.bootstrap, "replicas": 3}
        return QueueConfig(
            bootstrap_servers=self.cluster.bootstrap,
            message_topic=self.make_topic(3, **on_all),
            marker_topic=self.make_topic(4, config={"message.timestamp.type": "LogAppendTime"}, **on_all),
            dead_letter_topic=self.make_topic(2, config={"cleanup.policy": "compact"}, **on_all),
            **settings,
        )


@pytest.fixture
def world(cluster, make_topic, tmp_path):
    """Three brokers, all links whole."""
    with cluster.proxied(1) as one, cluster.proxied(2) as other:
        yield World(cluster, (one, other), make_topic, tmp_path)


def other_than_coordinator(cluster, group):
    """Return a broker that does not coordinate a group."""
    admin = AdminClient({"bootstrap.servers": cluster.bootstrap})
    node = eventually(lambda: admin.describe_consumer_groups([group])[group].result(20).coordinator)
    return next(number for number, one in cluster.brokers.items() if one.bootstrap != f"{node.host}:{node.port}")


def place(cluster, config, victim, roles):
    """Have the broker `victim` lead what `roles` names, and the others the rest."""
    others = [number for number in cluster.brokers if number != victim]
    topics = {"messages": (config.message_topic, 3), "markers": (config.marker_topic, 4)}
    topics["dead letters"] = (config.dead_letters, 2)
    for role, (topic, partitions) in topics.items():
        for number in range(partitions):
            cluster.move_leader(topic, number, victim if role in roles else others[number % 2])
    for number in range(4):
        transactional_id = f"{TRACKER_GROUP}-{config.marker_topic}-{number}"
        cluster.move_coordinator(transactional_id, victim if "transactions" in roles else others[number % 2])


@contextmanager
def broken(sides, victim, fault):
    """Break the link of some members to a broker, until the block ends."""
    links = [side.of[victim] for side in sides]
    for link in links:
        link.cut() if fault == "black hole" else link.reset()
    try:
        yield time.monotonic()
    finally:
        for link in links:
            link.restore() if fault == "black hole" else link.resume()


class Tracker:
    """The process of a tracker behind links of its own."""

    def __init__(self, config, side, directory, name):
        self.log = directory / f"{name}.log"
        self._port = free_port()
        settings = {
            "bootstrap-servers": side.bootstrap,
            "message-topic": config.message_topic,
            "marker-topic": config.marker_topic,
            "dead-letter-topic": config.dead_letters,
        }
        path = directory / f"{name}.yaml"
        path.write_text(json.dumps(settings))
        command = [sys.executable, "-m", "outbox_core", "queue", "tracker", "-f", str(path)]
        command += ["--metrics-port", str(self._port)]
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(command, cwd=_CHECKOUT, stdin=subprocess.DEVNULL, stdout=log, stderr=log)

    def health(self):
        """Return the status and text of its health."""
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/healthz", timeout=10) as answer:
                return answer.status, answer.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()
        except OSError as error:
            return 0, str(error)

    def metric(self, name):
        """Return one of its numbers."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self._port}/metrics", timeout=10) as answer:
            lines = answer.read().decode().splitlines()
        return float(next(line for line in lines if line.startswith(f"{name} ")).split()[1])

    def shares(self, partitions):
        """Tell whether it tracks some partitions, up to so many, and is caught up."""
        status, text = self.health()
        found = re.search(r"(\d+) partitions, caught up", text)
        return status == 200 and found is not None and 0 < int(found[1]) <= partitions

    def end(self):
        """Ask it to end, and return its log."""
        self._process.terminate()
        try:
            self._process.wait(60)
        finally:
            self._process.kill()
        return self.log.read_text()


@contextmanager
def trackers(config, sides, directory):
    """Run a tracker on each side, which share the partitions."""
    running = [Tracker(config, side, directory, f"tracker-{number}") for number, side in enumerate(sides)]
    try:
        eventually(lambda: all(tracker.shares(3) for tracker in running), seconds=2 * PATIENCE)
        yield running
    finally:
        for tracker in running:
            tracker.end()


def expire(config, numbers, *, max_attempts=0):
    """Start messages that expire after a second, in all marker partitions."""
    markers = Markers(config.bootstrap_servers, config.marker_topic)
    for number in numbers:
        markers.start(number, 1000, max_attempts=max_attempts)
    markers.flush()
    return {b"payload %d" % number for number in numbers}


def check_redelivered_by_peer(world, config, *, roles, fault):
    """Cut one tracker's link; its peer redelivers within the promised time, and each message once."""
    victim = other_than_coordinator(world.cluster, TRACKER_GROUP)
    place(world.cluster, config, victim, roles)
    found = dead_letters_in if "dead letters" in roles else messages_in
    most = 1 if "dead letters" in roles else 0
    with trackers(config, world.sides, world.directory) as (ill, healthy):
        before = expire(config, _BEFORE, max_attempts=most)  # newcomers that have not worked yet are more patient
        eventually(lambda: found(config).keys() >= before)
        with broken(world.sides[:1], victim, fault) as cut_at:
            expected = before | expire(config, _MEANWHILE, max_attempts=most)
            eventually(lambda: found(config).keys() >= expected, seconds=PROMISED_SECONDS - (time.monotonic() - cut_at))
            status, text = ill.health()
            assert status == 503
            assert f"broker {victim} at " in text
            assert "has left group" in text
            assert ill.metric("outbox_queue_tracker_away") == 1
            assert healthy.shares(4)
        eventually(lambda: ill.shares(3) and healthy.shares(3), seconds=PATIENCE)
        assert ill.metric("outbox_queue_tracker_away") == 0
    log = ill.log.read_text()
    assert log.count("leaves group") == 1, log
    assert log.count("joins group") == 1, log
    assert "leaves group" not in healthy.log.read_text()
    assert found(config).keys() == expected
    if "dead letters" not in roles:
        assert set(map(tuple, messages_in(config).values())) == {(2,)}, "each message was redelivered once"


def test_a_tracker_that_cannot_write_messages_leaves_the_work_to_its_peer(world):
    """A tracker whose link to the message topic's broker is a black hole leaves, and joins again when it is mended."""
    config = world.config(redelivery_timeout="6s")
    check_redelivered_by_peer(world, config, roles={"messages"}, fault="black hole")


@pytest.mark.complete
@pytest.mark.parametrize("fault", ["black hole", "refused"])
@pytest.mark.parametrize("role", ["messages", "markers", "transactions", "dead letters"])
def test_a_tracker_with_a_cut_link_leaves_the_work_to_its_peer(world, role, fault):
    """So does one that cannot read and write markers, end transactions or write dead letters; and one refused."""
    config = world.config(redelivery_timeout="6s")
    check_redelivered_by_peer(world, config, roles={role}, fault=fault)


@pytest.mark.complete
@pytest.mark.parametrize("role", ["messages", "markers", "transactions"])
def test_trackers_that_are_all_cut_off_go_on_when_the_link_is_mended(world, role):
    """With all ill one stays in the group and tries on; what expired flows within half a minute of the mend, once."""
    config = world.config(redelivery_timeout="6s")
    victim = other_than_coordinator(world.cluster, TRACKER_GROUP)
    place(world.cluster, config, victim, {role})
    with trackers(config, world.sides, world.directory) as running:
        before = expire(config, _BEFORE)
        eventually(lambda: messages_in(config).keys() >= before)
        with broken(world.sides, victim, "black hole") as cut_at:
            expected = before | expire(config, _MEANWHILE)
            time.sleep(100 - (time.monotonic() - cut_at))  # longer than the patience of a newcomer
            away = [tracker.metric("outbox_queue_tracker_away") for tracker in running]
            assert sorted(away) == [0, 1]
        eventually(lambda: messages_in(config).keys() == expected, seconds=MENDED_SECONDS)
        eventually(lambda: all(tracker.shares(3) for tracker in running))
    assert set(map(tuple, messages_in(config).values())) == {(2,)}, "each message was redelivered once"
    assert sum(tracker.log.read_text().count("leaves group") for tracker in running) <= 2


class Consumers:
    """Consumers of one queue behind links of their own, on threads, and what they received."""

    def __init__(self, config, sides):
        self.received = defaultdict(list)  # payload -> (when, by which consumer)
        self._stopping = threading.Event()
        values = {name: getattr(config, name) for name in type(config).model_fields}
        configs = [QueueConfig(**{**values, "bootstrap_servers": side.bootstrap}) for side in sides]
        self.consumers = [QueueService(config).queue("q").consumer() for config in configs]
        self._threads = [threading.Thread(target=self._work, args=(each,)) for each in self.consumers]
        for thread in self._threads:
            thread.start()

    def _work(self, consumer):
        while not self._stopping.is_set():
            message = consumer.receive(timeout=0.2)
            if message is not None:
                self.received[message.payload].append((time.monotonic(), consumer))
                message.ack()

    def close(self):
        """End all."""
        self._stopping.set()
        for thread in self._threads:
            thread.join(PATIENCE)
        for consumer in self.consumers:
            consumer.close()


@contextmanager
def sending(config):
    """Send messages steadily; yield when each was sent, by payload."""
    sent, stopping = {}, threading.Event()

    def send():
        with QueueService(config).queue("q").producer() as producer:
            while not stopping.wait(0.05):
                payload = b"%d" % len(sent)
                producer.send_and_wait(payload)
                sent[payload] = time.monotonic()

    thread = threading.Thread(target=send)
    thread.start()
    try:
        yield sent
    finally:
        stopping.set()
        thread.join(PATIENCE)


def check_received_by_peer(world, config, *, roles, fault):
    """Cut one consumer's link; its peer receives what comes, within the promised time, and nothing is lost."""
    victim = other_than_coordinator(world.cluster, group_of("q"))
    place(world.cluster, config, victim, roles)
    group = Consumers(config, world.sides)
    ill, healthy = group.consumers
    try:
        with sending(config) as sent:
            eventually(lambda: {by for whens in dict(group.received).values() for _, by in whens} == {ill, healthy})
            with broken(world.sides[:1], victim, fault) as cut_at:
                eventually(lambda: ill.trouble is not None, seconds=PROMISED_SECONDS)
                assert f"broker {victim} at " in ill.trouble
                time.sleep(max(0.0, PROMISED_SECONDS - (time.monotonic() - cut_at)))
                assert healthy.trouble is None
            eventually(lambda: ill.trouble is None, seconds=MENDED_SECONDS)
            mended_at = time.monotonic()
            eventually(
                lambda: any(at > mended_at and by is ill for whens in list(group.received.values()) for at, by in whens)
            )
        eventually(lambda: sent.keys() <= group.received.keys())
    finally:
        group.close()
    waits = {payload: min(at for at, _ in group.received[payload]) - at for payload, at in sent.items()}
    worst = max(waits, key=waits.get)
    assert waits[worst] <= PROMISED_SECONDS, f"{worst} waited, sent {sent[worst] - cut_at:.0f} s after the cut"
    return sent, group.received


def test_a_consumer_that_cannot_write_start_markers_leaves_its_partitions_to_others(world):
    """Its group's healthy member receives what it could not start."""
    check_received_by_peer(world, world.config(), roles={"markers"}, fault="black hole")


@pytest.mark.complete
@pytest.mark.parametrize("fault", ["black hole", "refused"])
@pytest.mark.parametrize("role", ["markers", "messages"])
@pytest.mark.parametrize("transactional", [False, True])
def test_a_consumer_with_a_cut_link_leaves_its_partitions_to_others(world, transactional, role, fault):
    """So does one that cannot read messages; with transactional starts nothing is handed out twice."""
    config = world.config(transactional=transactional)
    sent, received = check_received_by_peer(world, config, roles={role}, fault=fault)
    if transactional:
        assert all(len(received[payload]) == 1 for payload in sent)


@pytest.mark.complete
@pytest.mark.parametrize("transactional", [False, True])
def test_consumers_that_are_all_cut_off_go_on_when_the_link_is_mended(world, transactional):
    """With all ill what was sent meanwhile is received within half a minute of the mend, and each message once."""
    config = world.config(transactional=transactional)
    victim = other_than_coordinator(world.cluster, group_of("q"))
    place(world.cluster, config, victim, {"markers"})
    group = Consumers(config, world.sides)
    try:
        with sending(config) as sent:
            eventually(lambda: len(group.received) > 20)
            with broken(world.sides, victim, "black hole"):
                time.sleep(100)
                assert [each.trouble is None for each in group.consumers].count(True) == 1
        eventually(lambda: sent.keys() <= group.received.keys(), seconds=MENDED_SECONDS)
        eventually(lambda: all(each.trouble is None for each in group.consumers))
    finally:
        group.close()
    if transactional:
        assert all(len(group.received[payload]) == 1 for payload in sent)


@pytest.mark.complete
def test_a_consumer_whose_answer_to_its_request_to_join_was_lost_asks_again(world):
    """A firewall forgets the connection while the group waits for another member, which then leaves."""
    config, side = world.config(), world.sides[0]
    group = group_of("q")
    slow = {"bootstrap.servers": config.bootstrap_servers, "session.timeout.ms": 60_000, "max.poll.interval.ms": 60_000}
    other = Consumer({**consumer_settings(config, group), **slow})
    other.subscribe([config.message_topic])
    eventually(lambda: other.poll(0.1) is None and other.assignment())
    admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})

    def waits_for_the_other():
        described = admin.describe_consumer_groups([group])[group].result(20)
        return described.state == ConsumerGroupState.PREPARING_REBALANCING

    behind = config.model_copy(update={"bootstrap_servers": side.bootstrap})
    with QueueService(behind).queue("q").consumer() as consumer, QueueService(config).queue("q").producer() as producer:
        producer.send("a job")
        eventually(waits_for_the_other)
        side.lose_connections()
        other.close()
        consumer.receive(60).ack()
