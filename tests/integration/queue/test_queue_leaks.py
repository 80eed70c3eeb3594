"""Leaks of queues: their clients leave no thread and no descriptor, although no garbage is collected."""

from datetime import timedelta

import pytest

from outbox_core.kafka.clients import make_producer
from outbox_queue import QueueService
from outbox_queue.dead_letters.store import DeadLetters
from outbox_queue.operations.stats import queue_stats
from outbox_queue.protocol.clients import producer_settings
from outbox_queue.protocol.headers import dead_letter_record
from outbox_queue.redelivery.redeliverer import Redeliverer
from tests.queueing import PATIENCE, queue_config, tracking
from tests.resources import assert_released, held, reference_counts_only, times

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(1200)]

_FEW = 3  # a leak is two threads and three descriptors at least, each time


@pytest.fixture
def config(kafka_bootstrap, make_topic):
    """A configuration with new topics."""
    return queue_config(kafka_bootstrap, make_topic, close_timeout=timedelta(seconds=20))


def _produce(config):
    with QueueService(config).queue("jobs").producer() as producer:
        producer.send("a job")


def _prepare(config):
    redeliverer = Redeliverer(config, 0)
    assert redeliverer.prepare(lambda: False) is None
    redeliverer.close()


def _requeue(config):
    producer = make_producer(producer_settings(config))
    key, value, headers = dead_letter_record(
        b"done", b"p", headers=(), attempts=1, enqueued_at_ms=1, origin=(0, 1), reason="", dead_at_ms=1
    )
    producer.produce(config.dead_letters, value, key, headers=headers)
    assert producer.flush(30) == 0
    assert len(DeadLetters(config).requeue(lambda letter: letter.queue == "done")) == 1


def _look(config):
    queue_stats(config, "jobs")


def _consume(config, **settings):
    _produce(config)
    with QueueService(config).queue("jobs", **settings).consumer() as consumer:
        consumer.receive(PATIENCE).ack()


def _consume_in_transactions(config):
    _consume(config, transactional=True)


def _reject(config):
    _produce(config)
    with QueueService(config).queue("jobs").consumer() as consumer:
        consumer.receive(PATIENCE).reject("no")


def _track(config):
    with tracking(config):
        pass


@pytest.mark.parametrize(
    "use",
    [
        _consume,
        *(
            pytest.param(use, marks=pytest.mark.complete)
            for use in (_produce, _consume_in_transactions, _reject, _track, _prepare, _requeue, _look)
        ),
    ],
)
def test_nothing_outlives_its_use(config, use):
    """Threads and descriptors stay as before, however often a client of a queue, or a command, comes and goes."""
    use(config)
    with reference_counts_only():
        before = held()
        for _ in range(times(_FEW, 100)):
            use(config)
        assert_released(before)
