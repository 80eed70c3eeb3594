"""Rights that are taken away from members at work, and given back: nothing ends, and all is handled."""

import logging

import pytest

from outbox_queue import QueueConfig, QueueService
from outbox_queue.protocol.clients import TRACKER_GROUP, group_of
from tests.acl_world import GROUP, TOPIC, TRANSACTIONAL_ID, Broker
from tests.harvesting import wait_until
from tests.queueing import eventually

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(300), pytest.mark.complete]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """A broker that denies by default."""
    with Broker(tmp_path_factory.mktemp("denying"), ["worker"]) as broker:
        yield broker


@pytest.fixture
def config(broker, topic_name):
    """Settings of queues that the user `worker` may use."""
    names = {role: topic_name(role) for role in ("messages", "markers", "dead")}
    broker.make_topic(names["messages"], 2)
    broker.make_topic(names["markers"], 2, **{"message.timestamp.type": "LogAppendTime", "retention.ms": "604800000"})
    broker.make_topic(names["dead"], 1, **{"cleanup.policy": "compact"})
    settings = broker.settings("worker")
    return QueueConfig(
        bootstrap_servers=settings.pop("bootstrap.servers"),
        message_topic=names["messages"],
        marker_topic=names["markers"],
        dead_letter_topic=names["dead"],
        kafka=settings,
        redelivery_timeout="5s",
    )


def grant_all(broker, config):
    """Grant all that consumers, trackers and producers need."""
    for topic in (config.message_topic, config.marker_topic, config.dead_letters):
        broker.grant("worker", TOPIC, topic, "READ WRITE DESCRIBE DESCRIBE_CONFIGS")
    for group in (TRACKER_GROUP, group_of("q")):
        broker.grant("worker", GROUP, group, "READ DESCRIBE")
    broker.grant("worker", TRANSACTIONAL_ID, "kafka-mq", "WRITE DESCRIBE", prefixed=True)


def send(queue, payload):
    """Send a message by a client that knows of no refusal."""
    with queue.producer() as producer:
        producer.send(payload)


@pytest.mark.parametrize("transactional", [False, True])
def test_members_outlive_rights_that_are_away(broker, config, caplog, transactional):
    """A consumer and a tracker that have worked say what is missing, and go on when it is back."""
    caplog.set_level(logging.INFO)
    grant_all(broker, config)
    config = config.for_queue(transactional=transactional)
    service = QueueService(config)
    queue = service.queue("q")
    with service.tracker() as tracker, queue.consumer() as consumer:
        send(queue, b"first")
        eventually(lambda: consumer.receive(1)).ack()
        broker.revoke_everything("worker")
        wait_until(lambda: not tracker.health().ok, "the tracker cannot read")
        assert "reading markers: away for" in tracker.health().detail
        assert "grant READ on" in tracker.health().detail
        grant_all(broker, config)
        send(queue, b"second")
        eventually(lambda: consumer.receive(1)).nack()
        eventually(lambda: consumer.receive(1)).ack()
        wait_until(lambda: tracker.health().ok, "the tracker reads")
    lines = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert sum("reading markers: back after" in line for line in lines) == 1
    assert all(lines.count(line) == 1 for line in lines)
    assert any("queue 'q': reading: " in line and "grant READ on" in line for line in lines)
