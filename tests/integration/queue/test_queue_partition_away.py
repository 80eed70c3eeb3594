"""A queue while one partition of its marker topic has no leader."""

import threading
import time
from collections import Counter

import pytest
from confluent_kafka.admin import AdminClient, NewTopic

from outbox_queue import QueueConfig, QueueService
from tests.queueing import PATIENCE, eventually, messages_in, tracking

_MESSAGES = 60
_AWAY_SECONDS = 20  # several times a redelivery timeout


@pytest.fixture
def config(cluster, make_topic, topic_name):
    """Queues on a cluster, with a marker topic of which each broker has one partition alone."""
    markers, admin = topic_name("markers"), AdminClient({"bootstrap.servers": cluster.bootstrap})
    settings = {"message.timestamp.type": "LogAppendTime", "min.insync.replicas": "1"}
    topic = NewTopic(markers, 3, replica_assignment=[[1], [2], [3]], config=settings)
    admin.create_topics([topic])[markers].result(30)
    on_all = {"bootstrap": cluster.bootstrap, "replicas": 3}
    return QueueConfig(
        bootstrap_servers=cluster.bootstrap,
        message_topic=make_topic(3, **on_all),
        marker_topic=markers,
        dead_letter_topic=make_topic(1, config={"cleanup.policy": "compact"}, **on_all),
        redelivery_timeout="6s",
    )


@pytest.mark.alone
@pytest.mark.real_broker
@pytest.mark.timeout(400)
def test_messages_that_can_be_started_only_in_part_get_no_copies(cluster, config):
    """Of messages started together, those with a start marker do not expire while the others wait for theirs."""
    queue, received, stopping = QueueService(config).queue("q"), Counter(), threading.Event()

    def work():
        with queue.consumer() as consumer:
            while not stopping.is_set():
                message = consumer.receive(timeout=0.2)
                if message is not None:
                    received[message.payload] += 1
                    message.ack()

    worker = threading.Thread(target=work)
    with tracking(config), queue.producer() as producer:
        worker.start()
        producer.send_and_wait(b"first")
        eventually(lambda: received)
        cluster.brokers[3].kill()
        for number in range(_MESSAGES):
            producer.send(b"%d" % number)
        producer.flush()
        time.sleep(_AWAY_SECONDS)
        cluster.start()
        eventually(lambda: len(received) == _MESSAGES + 1, seconds=2 * PATIENCE)
        stopping.set()
        worker.join(PATIENCE)
    assert {len(copies) for copies in messages_in(config).values()} == {1}
    assert set(received.values()) == {1}
