"""Queues on a network that delivers late: a repeated EndTxn arrives in the client's next transaction."""

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from devstack.frame_proxy import Api, Match
from outbox_queue import QueueConfig
from outbox_queue.consuming.marker_writer import MarkerRecord
from outbox_queue.consuming.start_writers import NotStarted, TransactionalStartWriter, deadline
from outbox_queue.dead_letters.store import DeadLetters
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol.headers import dead_letter_record
from outbox_queue.redelivery import redeliverer as redelivery
from outbox_queue.redelivery.in_progress import Unfinished
from outbox_queue.redelivery.redeliverer import Redeliverer
from tests.kafka_reader import read_topic
from tests.queueing import Markers, dead_letters_in, ended_ids, eventually, messages_in, start_marker, tracking

pytestmark = pytest.mark.real_broker

_PATIENCE = 30.0
_ONE_TRANSACTION = 2
"""Offsets that a transaction takes in a partition: a record and its end."""


@pytest.fixture
def frames(kafka):
    """A proxy before the shared broker that picks out requests."""
    with kafka.frame_proxied(2) as proxy:
        yield proxy


@pytest.fixture
def config(frames, make_topic):
    """Queues behind the proxy, with topics of one partition and a message topic with a small limit."""
    return QueueConfig(
        bootstrap_servers=frames.bootstrap,
        message_topic=make_topic(1, config={"max.message.bytes": "2000"}),
        marker_topic=make_topic(1, config={"message.timestamp.type": "LogAppendTime"}),
        dead_letter_topic=make_topic(1, config={"cleanup.policy": "compact"}),
        redelivery_timeout="2s",
        max_message_bytes=2000,
    )


class Network:
    """A network that holds the first end of a transaction, and delivers it when a test says so."""

    def __init__(self, frames, kafka_bootstrap, *, commits, of):
        self.trap = frames.hold(Match(Api.END_TXN, commits=commits, where=lambda request: _is_of(request, of)))
        settings = {"group.id": "looks", "isolation.level": "read_uncommitted"}
        self._looks = Consumer({"bootstrap.servers": kafka_bootstrap, **settings})

    def end(self, topic):
        """Return the end of a topic's partition, open transactions included."""
        return self._looks.get_watermark_offsets(TopicPartition(topic, 0), timeout=_PATIENCE)[1]

    def wait_for_records(self, topic, behind):
        """Wait until a record is behind an offset."""
        eventually(lambda: self.end(topic) > behind)

    def deliver(self):
        """Let the end arrive; return whether it took effect."""
        assert self.trap.wait_until_held(_PATIENCE)
        self.trap.deliver()
        assert self.trap.wait_until_answered(_PATIENCE)
        return self.trap.error_code == 0


def _is_of(request, prefix):
    return (request.transactional_id or "").startswith(prefix)


class _Group:
    """A consumer that calls a test's hook between the markers and the offsets of a transaction."""

    def __init__(self, consumer):
        self._consumer = consumer
        self.meanwhile = lambda: None

    def consumer_group_metadata(self):
        self.meanwhile()
        return self._consumer.consumer_group_metadata()


@pytest.fixture
def group(kafka_bootstrap):
    """The consumer of a queue, connected without the proxy."""
    consumer = Consumer({"bootstrap.servers": kafka_bootstrap, "group.id": "kafka-mq-q"})
    yield _Group(consumer)
    consumer.close()


def _markers_in(bootstrap, config):
    return [
        wire.Marker.FromString(record.value).message_id.offset for record in read_topic(bootstrap, config.marker_topic)
    ]


def _start(number):
    value = start_marker(0, number, 60_000, b"q", b"p", attempt=1, enqueued_at_ms=1, max_attempts=0)
    return MarkerRecord(0, b"q", value)


@pytest.mark.parametrize("commits", [True, False], ids=["commit", "abort"])
def test_starts_and_offsets_are_not_torn(frames, kafka_bootstrap, config, group, commits):
    """A late end does not separate markers from offsets: only the committed transaction's marker can be read."""
    starts = TransactionalStartWriter(config, "q", group)
    network = Network(frames, kafka_bootstrap, commits=commits, of="kafka-mq-q-")
    topic, took_effect = config.marker_topic, []

    def meanwhile(number, *, late, fails):
        def do():
            network.wait_for_records(topic, behind)
            if late:
                took_effect.append(network.deliver())
            if fails:
                raise KafkaException(KafkaError(KafkaError.ILLEGAL_GENERATION))

        behind = (number - 1) * _ONE_TRANSACTION
        group.meanwhile = do
        try:
            starts.write([_start(number)], {0: number + 1}, deadline(_PATIENCE))
        except NotStarted:
            return fails
        return not fails

    # The transaction whose end is late is committed or aborted; the next one is ended the other way.
    assert meanwhile(1, late=False, fails=not commits)
    assert meanwhile(2, late=True, fails=commits)
    starts.close()
    assert _markers_in(kafka_bootstrap, config) == ([1] if commits else [2])
    assert took_effect == [False]


def _expired(number, payload=b"payload"):
    value = start_marker(0, number, 1, b"q", payload, attempt=1, enqueued_at_ms=1, max_attempts=0)
    return Unfinished((0, number), b"q", number, 0.0, 0.0, (b"q", value))


@pytest.fixture
def redeliverer(config):
    """A prepared redeliverer of the only marker partition."""
    redeliverer = Redeliverer(config, 0)
    assert redeliverer.prepare(lambda: False) is None
    yield redeliverer
    redeliverer.close()


def _between_copy_and_end(monkeypatch, network, topic, behind, do):
    """Call `do` once a copy is in Kafka behind an offset, and before its message's end marker is produced."""
    original = wire.end_marker

    def end_marker(*arguments, **more):
        if network.trap.request is not None:
            network.wait_for_records(topic, behind)
            do()
        return original(*arguments, **more)

    monkeypatch.setattr(redelivery.wire, "end_marker", end_marker)


def test_a_redelivery_is_not_torn_by_a_late_abort(frames, kafka_bootstrap, config, redeliverer, monkeypatch):
    """Despite a late abort, a message that Kafka refuses becomes one dead letter with one end marker."""
    network = Network(frames, kafka_bootstrap, commits=False, of="kafka-mq-redelivery-")
    _between_copy_and_end(monkeypatch, network, config.dead_letters, 0, network.deliver)
    large = _expired(7, b"x" * 5000)
    done = redeliverer.redeliver([large])
    for _ in range(3):
        if done.done:
            break
        assert done.left == [large]
        assert redeliverer.prepare(lambda: False) is None
        done = redeliverer.redeliver(done.left)
    assert done.done == [large]
    assert len(read_topic(kafka_bootstrap, config.dead_letters)) == 1
    assert len(read_topic(kafka_bootstrap, config.marker_topic)) == 1


def test_a_redelivery_is_not_torn_by_a_late_commit(frames, kafka_bootstrap, config, redeliverer, monkeypatch):
    """Despite a late commit, a copy of an aborted transaction cannot be read, so each message is redelivered once."""
    network = Network(frames, kafka_bootstrap, commits=True, of="kafka-mq-redelivery-")

    def fail():
        if not failed:
            failed.append(network.deliver())
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))

    failed = []
    _between_copy_and_end(monkeypatch, network, config.message_topic, _ONE_TRANSACTION, fail)
    first, second = _expired(1), _expired(2)
    assert redeliverer.redeliver([first]).done == [first]
    for _ in range(5):
        if not redeliverer.is_prepared:
            assert redeliverer.prepare(lambda: False) is None
        if redeliverer.redeliver([second]).done:
            break
    assert failed == [False]
    assert len(read_topic(kafka_bootstrap, config.message_topic)) == 2


def test_a_tracker_that_lost_its_partition_does_not_come_back(frames, kafka_bootstrap, config, redeliverer):
    """A fenced redeliverer makes no new producer, which would fence its successor and redeliver again."""
    network = Network(frames, kafka_bootstrap, commits=True, of="kafka-mq-redelivery-")
    first, second = _expired(1), _expired(2)
    assert redeliverer.redeliver([first]).done == [first]
    assert network.trap.wait_until_held(_PATIENCE)
    successor = Redeliverer(config, 0)
    assert successor.prepare(lambda: False) is None
    assert successor.redeliver([second]).done == [second]
    assert not redeliverer.is_prepared
    assert redeliverer.redeliver([second]).left == [second]
    successor.close()
    assert len(read_topic(kafka_bootstrap, config.message_topic)) == 2


def test_a_tracker_goes_on_after_late_ends(frames, kafka_bootstrap, config):
    """With each transaction's end repeated in the next one, all messages are redelivered and ended once."""
    markers = Markers(kafka_bootstrap, config.marker_topic, partitions=1)
    direct = config.for_queue(bootstrap_servers=kafka_bootstrap)
    mine = f"kafka-mq-redelivery-{config.marker_topic}"
    last = None
    with tracking(config):
        for number in range(5):
            trap = frames.hold(Match(Api.END_TXN, where=lambda request: _is_of(request, mine)))
            markers.start(number, 100, payload=b"x" * 5000 if number == 2 else None)
            markers.flush()
            assert trap.wait_until_held(_PATIENCE)
            if last is not None:
                last.deliver()
                assert last.wait_until_answered(_PATIENCE)
                assert last.error_code != 0
            last = trap
            eventually(lambda number=number: len(ended_ids(direct)) > number)
    assert messages_in(direct) == {b"payload %d" % number: [2] for number in (0, 1, 3, 4)}
    assert list(dead_letters_in(direct)) == [b"x" * 5000]
    assert set(ended_ids(direct).values()) == {1}


def test_requeued_letters_come_once(frames, kafka_bootstrap, config, monkeypatch):
    """A requeue whose commit was repeated goes on with a new producer, and sends each dead letter once."""
    monkeypatch.setattr("outbox_queue.dead_letters.store._BATCH", 1)
    letters = DeadLetters(config)
    producer = Markers(kafka_bootstrap, config.dead_letters)._producer
    for number in range(3):
        key, value, headers = dead_letter_record(
            b"q", b"%d" % number, headers=(), attempts=1, enqueued_at_ms=1, origin=(0, number), reason="", dead_at_ms=1
        )
        producer.produce(config.dead_letters, value, key, headers=headers)
    assert producer.flush(_PATIENCE) == 0
    network = Network(frames, kafka_bootstrap, commits=True, of=config.dead_letters)
    sent, seen = letters._send_again, []

    def send(*arguments, **more):
        sent(*arguments, **more)
        if network.trap.request is not None and not seen:
            network.wait_for_records(config.message_topic, _ONE_TRANSACTION)
            seen.append(network.deliver())

    monkeypatch.setattr(letters, "_send_again", send)
    assert len(letters.requeue(lambda _: True)) == 3
    assert seen == [False]
    assert sorted(message.value for message in read_topic(kafka_bootstrap, config.message_topic)) == [b"0", b"1", b"2"]
    assert letters.all() == []
