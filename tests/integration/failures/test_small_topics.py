"""Topics with a small limit, and records with an empty key, in both modes."""

import pytest

from outbox_core import OutboxRecord
from outbox_core.kafka.identity import Failpoint
from outbox_core.kafka.topics import TopicLimits
from tests.harvesting import by_key, wait_until

pytestmark = pytest.mark.real_broker

ROWS = 4_000


@pytest.fixture(params=["at-least-once", "exactly-once"])
def mode(request):
    """A configuration of each delivery mode."""
    return {"delivery": request.param}


def errors(harvester):
    """Return the number of failed deliveries."""
    name = harvester.metrics.outbox_name
    return harvester.metrics.registry.get_sample_value("outbox_publish_errors_total", {"outbox": name})


def fill(scene, topic, rows=ROWS):
    """Write rows of 200 bytes, about as many as one batch of the default size takes."""
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value)"
        " SELECT %s, 'k' || n %% 5000, repeat(n::text || ' ', 200 / (length(n::text) + 1))::bytea"
        " FROM generate_series(1, %s) AS n",
        [topic, rows],
    )


@pytest.mark.parametrize("limit", [65_536, 20_000])
def test_batches_fit_a_small_topic(scene, make_topic, mode, limit):
    """The broker refuses no batch for a topic with a small max.message.bytes."""
    topic = make_topic(partitions=1, config={"max.message.bytes": str(limit)})
    fill(scene, topic)
    harvester = scene.drain(config=mode)
    assert errors(harvester) == 0
    assert sum(map(len, by_key(scene.read(topic)).values())) == ROWS


def test_limit_is_learned_without_the_right_to_ask(scene, make_topic, mode, monkeypatch):
    """Without the right to describe limits the harvester learns them from refused batches, and holds no record."""
    monkeypatch.setattr(TopicLimits, "ask", lambda *_: {})
    topic = make_topic(partitions=1, config={"max.message.bytes": "65536"})
    fill(scene, topic)
    harvester = scene.drain(config=mode)
    assert errors(harvester) > 0, "the test tests nothing"
    assert not scene.held()
    for key, values in by_key(scene.read(topic)).items():
        numbers = [int(value.split()[0]) for value in values]
        assert numbers == sorted(numbers), key


def test_small_topic_beside_a_large_one(scene, make_topic, mode):
    """A small topic beside a large one gets only batches that it takes, and both flow."""
    large, small = make_topic(), make_topic(config={"max.message.bytes": "30000"})
    fill(scene, large, 2_000)
    with scene.running(config=mode) as harvester:
        wait_until(lambda: not scene.count(), "the first are published")
        fill(scene, small, 2_000)
        fill(scene, large, 2_000)
        wait_until(lambda: not scene.count(), "both are published")
        assert errors(harvester) == 0


def test_dead_letters_fit_a_small_dead_letter_topic(scene, make_topic):
    """Exactly once: dead letters go into one transaction, in batches that their topic takes."""
    topic, letters = make_topic(), make_topic(partitions=1, config={"max.message.bytes": "65536"})
    ids = range(1, 41)
    scene.stash(*(OutboxRecord(topic, f"k{number}", b"x" * 4_000) for number in ids))
    for number in ids:
        scene.hold("add_record", number)
    scene.hold("dead_letter", records=ids)
    steps = []
    scene.drain(config={"delivery": "exactly-once", "dead_letter_topic": letters}, reached=steps.append)
    assert steps.count(Failpoint.COMMITTED) == 1
    assert len(scene.read(letters)) == len(ids)
    assert not scene.held()


def test_records_with_an_empty_key_keep_their_order(scene, make_topic, mode):
    """Records with an empty key are records of one key: they stay in one partition, in order."""
    topic = make_topic(partitions=4)
    for number in range(12):
        scene.stash(OutboxRecord(topic, "", str(number)), OutboxRecord(topic, f"k{number}", "x"))
    scene.stash(OutboxRecord(topic, "", "elsewhere", partition=3))
    scattered = {"sticky.partitioning.linger.ms": 0}  # librdkafka then draws a partition for each record without a key
    scene.drain(config=mode | {"producer_kafka_config": scattered})
    messages = [message for message in scene.read(topic) if not message.key]
    assert {message.partition for message in messages if message.value != b"elsewhere"} == {0}
    assert [message.value for message in messages if message.partition == 0] == [b"%d" % n for n in range(12)]
    assert [message.partition for message in messages if message.value == b"elsewhere"] == [3]
