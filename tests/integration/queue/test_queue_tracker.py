"""The redelivery tracker on a real broker, with markers written by hand."""

import time

import pytest
from confluent_kafka.admin import AdminClient, NewPartitions

from outbox_core.kafka.clients import make_producer
from outbox_queue.config import QueueConfig
from outbox_queue.protocol import headers
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol.clients import producer_settings, transactional_settings
from outbox_queue.redelivery import tracked_partition
from outbox_queue.redelivery import tracker as tracker_module
from outbox_queue.redelivery.tracker import RedeliveryTracker
from tests.kafka_reader import read_topic
from tests.queueing import Markers, dead_letters_in, ended_ids, eventually, messages_in, queue_config, tracking

pytestmark = pytest.mark.real_broker


@pytest.fixture
def config(kafka_bootstrap, make_topic):
    """Queues with new topics. All trackers of the cluster have one group; their partitions differ."""
    return queue_config(kafka_bootstrap, make_topic)


@pytest.fixture
def markers(config):
    """A writer of markers to the marker topic."""
    return Markers(config.bootstrap_servers, config.marker_topic)


def dead_consumer(config):
    """Return the producer of a consumer that has left a transaction open in partition 1 of the marker topic."""
    producer = make_producer(transactional_settings(config, f"dead-{config.marker_topic}"))
    producer.init_transactions(30)
    producer.begin_transaction()
    producer.produce(config.marker_topic, wire.keep_alive_marker(0, 99, 0), b"99", 1)
    producer.flush(30)
    return producer


def test_what_expires_is_redelivered_once_and_ended(config, markers):
    """An expired message gets a copy with the next attempt and an end marker; a finished or kept-alive one does not."""
    with tracking(config) as tracker:
        for number in range(40):
            markers.start(number, 300, headers=[("h", b"1"), ("n", None)])
        for number in range(10):
            markers.end(number)
        for number in range(10, 20):
            markers.keep_alive(number, 60_000)
        markers.flush()
        expected = {b"payload %d" % number: [2] for number in range(20, 40)}
        eventually(lambda: messages_in(config) == expected)
        eventually(lambda: tracker.in_progress == 10)
    assert messages_in(config) == expected
    assert ended_ids(config) == {(0, number): 1 for number in (*range(10), *range(20, 40))}
    copy = read_topic(config.bootstrap_servers, config.message_topic)[0]
    travelled = headers.read(copy.headers)
    assert copy.key == b"q"
    assert travelled.headers == (("h", b"1"), ("n", None))
    assert travelled.enqueued_at_ms == 1000
    assert travelled.origin == (0, int(copy.value.split()[1]))


def test_a_message_given_back_comes_at_once(config, markers):
    """A keep-alive of 0 ms redelivers at once, and may take the attempt back."""
    with tracking(config):
        markers.start(1, 3_600_000)
        markers.start(2, 3_600_000)
        markers.keep_alive(1, 0, reason="not now")
        markers.keep_alive(2, 0, attempt=0)
        markers.flush()
        eventually(lambda: messages_in(config) == {b"payload 1": [2], b"payload 2": [1]})


def test_used_up_messages_are_set_aside(config, markers):
    """After its last attempt a message becomes a dead letter with the reason; one without a limit never does."""
    with tracking(config) as tracker:
        markers.start(1, 100, attempt=3, max_attempts=3)
        markers.start(2, 100, attempt=2, max_attempts=3)
        markers.start(3, 3_600_000, attempt=3, max_attempts=3)
        markers.keep_alive(3, 0, reason="no such customer")
        markers.start(4, 100, attempt=99)
        markers.flush()
        eventually(lambda: len(dead_letters_in(config)) == 2 and len(messages_in(config)) == 2)
        eventually(lambda: tracker.in_progress == 0)
    assert messages_in(config) == {b"payload 2": [3], b"payload 4": [100]}
    dead = dead_letters_in(config)
    assert dead[b"payload 1"].reason == "was not finished in 3 attempts"
    assert dead[b"payload 3"].reason == "no such customer"
    assert dead[b"payload 3"].attempt == 3


def test_a_restarted_tracker_repeats_nothing_finished(config, markers):
    """Messages whose end markers were written while no tracker ran are not redelivered by the next one."""
    for number in range(500):
        markers.start(number, 1)
    for number in range(495):
        markers.end(number)
    markers.flush()
    with tracking(config):
        eventually(lambda: len(messages_in(config)) == 5)
    with tracking(config) as tracker:
        assert tracker.in_progress == 0
    assert messages_in(config) == {b"payload %d" % number: [2] for number in range(495, 500)}


def test_what_is_no_marker_is_skipped(config, markers):
    """Records that cannot be read as markers do not stop the tracker."""
    with tracking(config):
        for number, value in enumerate([b"\xff\xff", b"", None, b"\x10\x09", b"not a marker"] * 4):
            markers.write(number, value)
        markers.start(1, 100)
        markers.flush()
        eventually(lambda: messages_in(config) == {b"payload 1": [2]})


def test_what_go_started_is_redelivered_too(config):
    """A Go process's start marker is attempt 1; its end marker goes to the same partition, with the same key."""
    place = wire.MessageID(partition=2, offset=7)
    go = wire.Marker(message_id=place, redeliver_after_ms=100, key=b"emails", value=b"from Go")
    producer = make_producer(producer_settings(config))
    producer.produce(config.marker_topic, go.SerializeToString(), b"emails", 3)
    assert producer.flush(30) == 0
    with tracking(config):
        eventually(lambda: messages_in(config) == {b"from Go": [2]})
    records = read_topic(config.bootstrap_servers, config.marker_topic)
    found = [(one.partition, one.key, wire.Marker.FromString(one.value)) for one in records]
    ends = [(partition, key, marker.message_id) for partition, key, marker in found if marker.type == wire.END]
    assert ends == [(3, b"emails", place)]


def test_a_topic_with_timestamps_of_its_producers_works(kafka_bootstrap, make_topic, caplog):
    """On a CreateTime marker topic redelivery works, and the log reports the topic."""
    config = queue_config(kafka_bootstrap, make_topic, marker_topic=make_topic(4))
    markers = Markers(kafka_bootstrap, config.marker_topic)
    with tracking(config) as tracker:
        markers.start(1, 500)
        markers.start(2, 60_000)
        markers.start(3, 500)
        markers.end(3)
        markers.flush()
        eventually(lambda: messages_in(config) == {b"payload 1": [2]})
        eventually(lambda: tracker.in_progress == 1)
    assert "CreateTime" in caplog.text


def test_a_message_that_kafka_refuses_stops_no_other(kafka_bootstrap, make_topic):
    """A message too large to be sent again becomes a dead letter without headers; the others of its batch are sent."""
    small = make_topic(4, config={"max.message.bytes": "1500"})
    config = queue_config(kafka_bootstrap, make_topic, message_topic=small, max_message_bytes=1000)
    markers = Markers(kafka_bootstrap, config.marker_topic, partitions=1)
    too_large = b"x" * 1400
    for number in range(20):
        markers.start(number, 100, payload=too_large if number == 7 else None, headers=[("h", b"y" * 200)])
    markers.flush()
    with tracking(config) as tracker:
        eventually(lambda: len(messages_in(config)) == 19 and too_large in dead_letters_in(config))
        eventually(lambda: tracker.in_progress == 0)
    assert messages_in(config) == {b"payload %d" % number: [2] for number in range(20) if number != 7}
    letter = dead_letters_in(config)[too_large]
    assert "too large" in letter.reason
    assert letter.headers == ()


def test_an_open_transaction_holds_redelivery_up(config, markers):
    """A dead consumer's open transaction delays redelivery; after its abort only the expired message comes again."""
    producer = dead_consumer(config)
    with RedeliveryTracker(config) as tracker:
        markers.start(1, 500)  # partition 1, behind the transaction
        markers.start(5, 500)
        markers.end(1)
        markers.flush()
        time.sleep(2)
        assert messages_in(config) == {}
        producer.abort_transaction(30)
        eventually(lambda: messages_in(config) == {b"payload 5": [2]})
        eventually(lambda: tracker.in_progress == 0)


def test_partitions_that_the_marker_topic_gets_later(config):
    """A tracker that is assigned new partitions redelivers from them at once."""
    admin, topic = AdminClient({"bootstrap.servers": config.bootstrap_servers}), config.marker_topic
    with tracking(config) as tracker:
        admin.create_partitions([NewPartitions(topic, 8)])[topic].result(30)
        with tracking(config):  # the group is assigned anew when it joins, and when it leaves
            pass
        markers = Markers(config.bootstrap_servers, topic, partitions=8)
        for number in range(8):
            markers.start(number, 300)
        markers.flush()
        eventually(lambda: messages_in(config) == {b"payload %d" % number: [2] for number in range(8)}, seconds=20)
        assert tracker.is_caught_up


def test_markers_that_cannot_be_read(config, monkeypatch, caplog):
    """A tracker that does not read what is written to a partition says so, and is not healthy until it does."""
    monkeypatch.setattr(tracked_partition, "_TICK_LOST_MS", 500.0)
    monkeypatch.setattr(tracker_module, "_AWAY_SECONDS", 1.0)
    producer = dead_consumer(config)
    with RedeliveryTracker(config) as tracker:
        eventually(lambda: not tracker.health().ok)
        assert "partition 1 of the marker topic: what was written" in tracker.health().detail
        assert not tracker.is_caught_up
        producer.abort_transaction(30)
        eventually(lambda: tracker.health().ok and tracker.is_caught_up)
    assert "asking for the time: back after" in caplog.text


def test_a_tracker_outside_its_group(own_stack, monkeypatch):
    """A tracker whom Kafka does not let into the group is not healthy, even if nothing is in progress."""
    monkeypatch.setattr(tracker_module, "_AWAY_SECONDS", 5.0)
    stack = own_stack(embedded=True)
    with tracking(QueueConfig(bootstrap_servers=stack.kafka.bootstrap, close_timeout="1s")) as tracker:
        assert tracker.health().ok
        stack.kafka.stop()
        eventually(lambda: not tracker.health().ok)
        assert "Kafka has not let it into group kafka-mq-redelivery for" in tracker.health().detail
