"""The time until delivery goes on after a fence or a stalled database, with the default limits."""

import time
from contextlib import closing

import pytest
from confluent_kafka import Consumer, TopicPartition

from devstack.ports import LOCALHOST
from devstack.proxy import TcpProxy
from outbox_core import OutboxRecord
from outbox_core.kafka.identity import Failpoint
from tests.chaos.outbox import fence
from tests.harvesting import Scene, wait_until

pytestmark = pytest.mark.real_broker

_AT_MOST_SECONDS = 15.0
_STALLED_SECONDS = 2.5


@pytest.fixture
def scene(services):
    """Yield an outbox on services that abort an overdue transaction soon, with a harvester that NELI elects."""
    scene = Scene(services.postgres.create_database(f"recovery_{time.time_ns()}"), services.kafka.bootstrap)
    yield scene
    scene.close()


def _seconds_until_delivered(scene, topic, number):
    began = time.monotonic()
    scene.stash(OutboxRecord(topic, "k", str(number)))
    wait_until(lambda: [message.value for message in scene.read(topic)][-1:] == [b"%d" % number], "it is delivered")
    return time.monotonic() - began


@pytest.mark.complete
def test_rival_that_fences_and_dies(scene, services, topic_name, say):
    """A harvester fences in turn a rival of the same transactional.id, which fenced it and left a transaction open."""
    topic = topic_name("rival")
    services.make_topics([topic], 1)
    with scene.running(config={"delivery": "exactly-once"}, elector_factory=None) as harvester:
        _seconds_until_delivered(scene, topic, 1)
        names = harvester.config.tracking_names(harvester._parts.identify().outbox)
        rival = fence(scene.bootstrap, names, [topic], timeout_seconds=60)
        del rival
        seconds = _seconds_until_delivered(scene, topic, 2)
    say(f"rival fenced -> next delivery: {seconds:.1f} s")
    assert seconds < _AT_MOST_SECONDS
    assert [message.value for message in scene.read(topic)] == [b"1", b"2"]


def test_transaction_open_past_its_timeout(scene, services, topic_name, say):
    """A harvester goes on after Kafka aborted its overdue transaction and fenced its producer, without any rival."""
    topic = topic_name("open")
    services.make_topics([topic], 1)
    looks = Consumer({"bootstrap.servers": scene.bootstrap, "group.id": "looks"})
    steps, woke_at = [], []

    def is_aborted():
        return looks.get_watermark_offsets(TopicPartition(topic, 0), timeout=10)[1] > 0  # no open transaction's

    def sleep_once(step):
        steps.append(step)
        if step is Failpoint.AFTER_PRODUCE and not woke_at:
            wait_until(is_aborted, "Kafka has aborted the transaction")
            woke_at.append(time.monotonic())

    options = {"config": {"delivery": "exactly-once"}, "limits": {"transaction_timeout": "2s"}}
    with closing(looks), scene.running(elector_factory=None, reached=sleep_once, **options) as harvester:
        _seconds_until_delivered(scene, topic, 1)
        seconds = time.monotonic() - woke_at[0]
        assert harvester.kinds().count("LeaderAcquired") == 1, "leadership was lost on the way"
    assert steps.count(Failpoint.AFTER_INIT) == 2, "its producer was not fenced"
    say(f"awake after its transaction was given up -> next delivery: {seconds:.1f} s")
    assert seconds < _AT_MOST_SECONDS
    assert [message.value for message in scene.read(topic)] == [b"1"]


@pytest.mark.parametrize("delivery", ["exactly-once", "at-least-once"])
def test_database_that_does_not_answer_for_a_while(scene, services, topic_name, say, delivery):
    """A query of an empty table that took seconds, as its answer was held up, does not delay the next one for long."""
    topic = topic_name("stalled")
    services.make_topics([topic], 1)
    with TcpProxy(LOCALHOST, services.postgres.port) as proxy:
        via = scene.database.replace(f":{services.postgres.port}/", f":{proxy.port}/")
        with scene.running(config={"delivery": delivery, "data_source": via}):
            _seconds_until_delivered(scene, topic, 1)
            proxy.cut()
            time.sleep(_STALLED_SECONDS)
            proxy.restore()
            seconds = _seconds_until_delivered(scene, topic, 2)
    say(f"{delivery}: the database answers again -> next delivery: {seconds:.1f} s")
    assert seconds < 2 * _STALLED_SECONDS
