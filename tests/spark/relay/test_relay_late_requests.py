"""The end of a transaction of a shard arrives late, while the next one is open: no record is lost or repeated."""

import pytest

from devstack.frame_proxy import Api, Match
from outbox_core.kafka import identity
from outbox_core.kafka.record_producer import RecordProducer
from tests.chaos.breaches import TrustsItsEpoch
from tests.spark.relay.outcome import assert_each_once_in_order
from tests.spark.relay.relay_scene import RelayScene

pytestmark = [pytest.mark.real_broker, pytest.mark.complete]

_BATCH = 10
_WAIT_SECONDS = 60


@pytest.fixture
def scene_class():
    """Return the class of outboxes with relays."""
    return RelayScene


@pytest.mark.parametrize("producer", [RecordProducer, TrustsItsEpoch])
def test_late_commit_in_the_middle_of_the_next_transaction(scene, kafka, make_topic, monkeypatch, producer):
    """A late commit is refused, as the task has fenced itself anew; without that, what it tears is read back."""
    monkeypatch.setattr(identity, "RecordProducer", producer)
    topic = make_topic(1)
    scene.fill(topic, 2 * _BATCH, keys=3)
    traps, sent = [], []
    with kafka.frame_proxied(2) as frames:
        behind = {"bootstrap.servers": frames.bootstrap}
        scene.settings = scene.config(delivery="exactly-once", base_kafka_config=behind)

        def reached(step):
            if step == "scanned" and not traps:
                name = f"{scene.transactions.transactional_id}:shard-0"
                traps.append(frames.hold(Match(Api.END_TXN, commits=True, transactional_id=name)))
            elif step == "sent":
                sent.append(step)
                if len(sent) == 2:
                    scene.read(topic, count=2 * _BATCH, isolation="read_uncommitted", timeout=_WAIT_SECONDS)
                    assert traps[0].wait_until_held(_WAIT_SECONDS), "no EndTxn was held"
                    traps[0].deliver()
                    assert traps[0].wait_until_answered(_WAIT_SECONDS)

        assert scene.relay(shards=1, rows=_BATCH, reached=reached) == []
    assert (traps[0].error_code != 0) is (producer is RecordProducer), "an old epoch is refused, and ours is not"
    assert_each_once_in_order(scene, topic, 2 * _BATCH)
