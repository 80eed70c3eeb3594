"""Queues end to end on a real broker: producers, consumers and a tracker."""

import json
import logging
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Consumer as KafkaConsumer
from confluent_kafka import ConsumerGroupTopicPartitions, Producer, TopicPartition
from confluent_kafka.admin import AdminClient

from outbox_core.kafka.topics import topic_settings
from outbox_queue import (
    InvalidMessage,
    MessageSettled,
    MessageTooLarge,
    QueueClosed,
    QueueConfig,
    QueueService,
    QueueTopicError,
    SendFailed,
)
from outbox_queue.dead_letters.store import DeadLetters
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol.headers import DELIVER_AT, dead_letter_record
from outbox_queue.protocol.topics import ensure_message_topic, ensure_topics
from tests.kafka_reader import read_topic
from tests.queueing import eventually, queue_config, tracking
from tests.topic_settings import alter_topic

pytestmark = pytest.mark.real_broker

PATIENCE = 60.0
QUIET = 1.0  # long enough for a message that should not come


@pytest.fixture
def config(kafka_bootstrap, make_topic):
    """A configuration with new topics, whose messages are redelivered after 2 seconds."""
    return queue_config(kafka_bootstrap, make_topic)


@pytest.fixture
def service(config):
    """A service on that configuration."""
    return QueueService(config)


def send(queue, *payloads, **options):
    """Send messages, and wait until they are in Kafka."""
    with queue.producer() as producer:
        for payload in payloads:
            producer.send(payload, **options)


def receive(consumer):
    """Return the next message, which must come."""
    message = consumer.receive(PATIENCE)
    assert message is not None
    return message


def dead_letters_in(config):
    """Return all dead letters."""
    return DeadLetters(config).all()


def markers_in(config):
    """Return the markers of each message in their order, as (partition, type)."""
    found = {}
    for record in read_topic(config.bootstrap_servers, config.marker_topic):
        marker = wire.Marker.FromString(record.value)
        if marker.message_id.partition >= 0:
            place = (marker.message_id.partition, marker.message_id.offset)
            found.setdefault(place, []).append((record.partition, marker.type))
    return found


def committed_lag(config, queue):
    """Return the number of records of the message topic that the queue's group has not committed."""
    group = ConsumerGroupTopicPartitions(f"kafka-mq-{queue}")
    admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})
    offsets = admin.list_consumer_group_offsets([group])[group.group_id].result(30).topic_partitions
    consumer = KafkaConsumer({"bootstrap.servers": config.bootstrap_servers, "group.id": "looks"})
    committed = {
        partition.partition: partition.offset for partition in offsets if partition.topic == config.message_topic
    }
    lag = 0
    for partition in range(4):
        low, high = consumer.get_watermark_offsets(TopicPartition(config.message_topic, partition), timeout=10)
        lag += high - max(low, committed.get(partition, 0))
    consumer.close()
    return lag


def test_a_message_arrives_with_what_was_sent(service):
    """A message arrives with the payload, headers, attempt, id and time of its sending."""
    queue = service.queue("emails")
    before = datetime.now(UTC) - timedelta(seconds=5)
    send(queue, b"\x00\xff", "text \u00e9", {"to": "ada"}, headers=[("h", "1"), ("h", b"\xff"), ("none", None)])
    with queue.consumer() as consumer:
        messages = [receive(consumer) for _ in range(3)]
        for message in messages:
            message.ack()
    assert {m.payload for m in messages} == {b"\x00\xff", "text \u00e9".encode(), b'{"to":"ada"}'}
    assert all(m.headers == (("h", b"1"), ("h", b"\xff"), ("none", None)) for m in messages)
    assert all(m.attempt == 1 and m.queue == "emails" for m in messages)
    assert all(before < m.enqueued_at < datetime.now(UTC) + timedelta(seconds=5) for m in messages)
    assert len({m.id for m in messages}) == 3
    assert messages[0].header("h") == b"\xff"


def test_records_and_markers_are_those_of_the_go_version(service, config):
    """Records and markers have the keys, fields and partitions of the Go version's."""
    queue = service.queue("emails")
    send(queue, b"payload")
    (record,) = read_topic(config.bootstrap_servers, config.message_topic)
    assert (record.key, record.value, record.headers) == (b"emails", b"payload", [])
    with queue.consumer() as consumer:
        message = receive(consumer)
        message.ack()
    start, end = read_topic(config.bootstrap_servers, config.marker_topic)
    begun, ended = wire.Marker.FromString(start.value), wire.Marker.FromString(end.value)
    place = (record.partition, record.offset)
    assert (begun.version, begun.type, begun.key, begun.value) == (0, wire.START, b"emails", b"payload")
    assert (begun.message_id.partition, begun.message_id.offset) == place
    assert begun.redeliver_after_ms == 2000
    assert (ended.type, ended.message_id, ended.redeliver_after_ms, ended.key) == (wire.END, begun.message_id, 0, b"")
    assert (start.partition, start.key) == (end.partition, end.key)
    assert committed_lag(config, "emails") == 0


@pytest.mark.parametrize("transactional", [False, True])
def test_acknowledged_messages_never_come_again(service, config, transactional):
    """An acknowledged message is not redelivered."""
    queue = service.queue("q", transactional=transactional)
    with tracking(config) as tracker:
        send(queue, *(b"%d" % n for n in range(100)))
        with queue.consumer() as consumer:
            payloads = Counter()
            for _ in range(100):
                message = receive(consumer)
                payloads[message.payload] += 1
                message.ack()
            eventually(lambda: tracker.in_progress == 0)
            time.sleep(2 * config.redelivery_timeout.total_seconds())
            assert consumer.receive(0) is None
    assert payloads == Counter(b"%d" % n for n in range(100))
    assert committed_lag(config, "q") == 0


def test_a_receive_that_is_cancelled_loses_nothing(service):
    """`receive` returns None after its timeout, and the next call gets the message."""
    queue = service.queue("q")
    with queue.consumer() as consumer:
        assert consumer.receive(0) is None
        assert consumer.receive(timedelta(milliseconds=50)) is None
        send(queue, b"late")
        assert receive(consumer).payload == b"late"


def test_a_message_that_is_given_back_comes_again_once(service, config):
    """`nack` brings the message back at once with its next attempt, and only once."""
    queue = service.queue("q")
    with tracking(config) as tracker, queue.consumer() as consumer:
        send(queue, b"again", headers={"h": "1"})
        first = receive(consumer)
        first.nack(reason="not now")
        second = receive(consumer)
        assert (second.payload, second.headers, second.attempt) == (b"again", (("h", b"1"),), 2)
        assert (second.id, second.enqueued_at) == (first.id, first.enqueued_at)
        second.ack()
        eventually(lambda: tracker.in_progress == 0)
        time.sleep(2 * config.redelivery_timeout.total_seconds())
        assert consumer.receive(0) is None


def test_a_nack_can_wait(service, config):
    """A nacked message with a delay does not come before the delay is over."""
    queue = service.queue("q")
    with tracking(config), queue.consumer() as consumer:
        send(queue, b"later")
        given_back_at = time.monotonic()
        receive(consumer).nack(delay=timedelta(seconds=3))
        assert receive(consumer).attempt == 2
        assert time.monotonic() - given_back_at >= 2.9


def test_a_nack_need_not_count(service, config):
    """A message whose attempt does not count comes again with the same number, and is no dead letter."""
    queue = service.queue("q", max_attempts=1)
    with tracking(config), queue.consumer() as consumer:
        send(queue, b"outage")
        for _ in range(3):
            message = receive(consumer)
            assert (message.payload, message.attempt) == (b"outage", 1)
            message.nack(delay=timedelta(milliseconds=10), counts=False)
        receive(consumer).ack()


def test_an_interrupted_message_comes_again_after_its_timeout(service, config):
    """`interrupt` leaves the message to the tracker, which redelivers it within twice the redelivery timeout."""
    timeout = 5.0
    queue = service.queue("q", redelivery_timeout=timedelta(seconds=timeout))
    with tracking(config), queue.consumer() as consumer:
        send(queue, b"interrupted")
        message = receive(consumer)
        message.interrupt()
        interrupted_at = time.monotonic()
        again = receive(consumer)
        assert time.monotonic() - interrupted_at < 2 * timeout
        assert again.attempt == 2
        again.ack()


def test_a_consumer_that_works_on_keeps_its_message(service, config):
    """Keep-alives and `extend` keep a message beyond its redelivery timeout and max_processing_time."""
    queue = service.queue("q", max_processing_time=timedelta(seconds=2))
    with tracking(config) as tracker, queue.consumer() as consumer:
        send(queue, b"slow", b"slower")
        messages = [receive(consumer), receive(consumer)]
        for message in messages:
            message.extend(timedelta(seconds=9))
        time.sleep(6)
        assert consumer.receive(0) is None
        for message in messages:
            message.ack()
        eventually(lambda: tracker.in_progress == 0)
        assert consumer.receive(QUIET) is None


def test_keep_alives_go_on_by_themselves(service, config):
    """While a handler works on a message, even for three redelivery timeouts, no consumer gets it again."""
    queue = service.queue("q")
    with tracking(config), queue.consumer() as consumer:
        send(queue, b"slow")
        message = receive(consumer)
        time.sleep(3 * config.redelivery_timeout.total_seconds())
        message.ack()
        assert consumer.receive(QUIET) is None


def test_a_hung_handler_loses_its_message(service, config):
    """After max_processing_time a hung message comes again, and so do the messages fetched behind it."""
    queue = service.queue("q", max_processing_time=timedelta(seconds=2))
    with tracking(config), queue.consumer(concurrency=1) as consumer:
        send(queue, *(b"%d" % n for n in range(4)))
        hung = receive(consumer)
        eventually(lambda: consumer.in_progress == 4)
        eventually(lambda: consumer.in_progress == 0)
        attempts = {}
        for _ in range(4):
            message = receive(consumer)
            attempts[message.id] = message.attempt
            message.ack()
    assert attempts.pop(hung.id) == 2
    assert list(attempts.values()) == [1, 1, 1]


def test_a_receive_that_waits_gets_what_hung(service, config):
    """A hung message frees its place, and the waiting `receive` of the same consumer gets the message again."""
    queue = service.queue("q", max_processing_time=timedelta(seconds=2), max_in_progress=1)
    with tracking(config), queue.consumer(concurrency=1) as consumer:
        send(queue, b"hangs")
        hung = receive(consumer)
        again = receive(consumer)
        assert again.id == hung.id
        assert again.attempt > hung.attempt
        again.ack()


def test_a_poisonous_message_ends_as_a_dead_letter(service, config):
    """After exactly max_attempts attempts a message is in the dead letter topic, with the last reason."""
    queue = service.queue("q", max_attempts=3)
    with tracking(config), queue.consumer() as consumer:
        send(queue, b"poison", headers={"h": "1"})
        for attempt in (1, 2, 3):
            message = receive(consumer)
            assert message.attempt == attempt
            message.nack(reason=f"failed {attempt}", delay=timedelta(milliseconds=10))
        (letter,) = eventually(lambda: dead_letters_in(config))
        assert consumer.receive(QUIET) is None
    assert (letter.queue, letter.payload, letter.attempts, letter.id) == ("q", b"poison", 3, message.id)
    assert letter.reason == "failed 3"
    assert tuple(letter.headers) == (("h", b"1"),)


def test_a_rejected_message_is_a_dead_letter_at_once(service, config):
    """`reject` writes the dead letter before it returns, and the message never comes again."""
    queue = service.queue("q")
    with tracking(config) as tracker, queue.consumer() as consumer:
        send(queue, b"nonsense")
        message = receive(consumer)
        message.reject("no such customer")
        (letter,) = dead_letters_in(config)
        assert (letter.payload, letter.reason, letter.attempts) == (b"nonsense", "no such customer", 1)
        eventually(lambda: tracker.in_progress == 0)
        assert consumer.receive(QUIET) is None


def test_a_message_is_settled_once(service):
    """A message can be settled in only one way; acknowledging it again is allowed; after closing it is refused."""
    queue = service.queue("q")
    send(queue, b"1", b"2", b"3")
    with queue.consumer() as consumer:
        acknowledged, given_back, left = receive(consumer), receive(consumer), receive(consumer)
        acknowledged.ack()
        acknowledged.ack()
        with pytest.raises(MessageSettled, match="acknowledged"):
            acknowledged.nack()
        given_back.nack()
        for verb in (given_back.ack, given_back.nack, given_back.interrupt, lambda: given_back.reject("x")):
            with pytest.raises(MessageSettled, match="given back"):
                verb()
    with pytest.raises(QueueClosed):
        left.ack()
    with pytest.raises(QueueClosed):
        consumer.receive(0)
    assert list(consumer) == []


def test_a_settled_message_is_forgotten_only_after_its_marker(service, monkeypatch):
    """The buffer forgets a message only after its marker is written, so that a drain does not overtake the marker."""
    queue = service.queue("q")
    send(queue, b"1", b"2", b"3")
    with queue.consumer() as consumer:
        messages = [receive(consumer) for _ in range(3)]
        steps, here = [], threading.get_ident()

        def noted(step, call):
            """Note calls of this thread, not of the one that writes keep-alives."""

            def noting(*arguments):
                if threading.get_ident() == here:
                    steps.append(step)
                return call(*arguments)

            return noting

        markers, buffer = consumer._acks._markers, consumer._buffer
        monkeypatch.setattr(markers, "write", noted("marker", markers.write))
        monkeypatch.setattr(buffer, "settle", noted("forgotten", buffer.settle))
        for settling in (messages[0].ack, messages[1].nack, lambda: messages[2].reject("no")):
            settling()
            assert steps == ["marker", "forgotten"]
            steps.clear()


def test_a_delayed_message_waits(service, config):
    """A message with a delay is handed out after it, as its first attempt; others overtake it."""
    queue = service.queue("q")
    with tracking(config), queue.consumer() as consumer:
        sent_at = time.monotonic()
        send(queue, b"later", delay=timedelta(seconds=6))
        send(queue, b"now")
        assert receive(consumer).payload == b"now"
        later = receive(consumer)
        assert time.monotonic() - sent_at >= 5.9
        assert (later.payload, later.attempt, later.header(DELIVER_AT)) == (b"later", 1, None)
        later.ack()


def test_two_consumers_share_a_queue(service, config):
    """500 messages go to two consumers of one queue, each message to one of them, and both get some."""
    _share(config, [service.queue("q")])


def test_two_queues_are_shared_at_once(service, config):
    """Two queues at a time are shared as well: 500 messages of each go to two consumers of its own."""
    _share(config, [service.queue("one"), service.queue("other")])


def test_a_rebalance_while_handlers_are_slow_stops_no_consumer(service):
    """A consumer whose partitions were paused for want of capacity goes on after they were assigned anew."""
    queue = service.queue("q")
    send(queue, *(b"%d" % number for number in range(200)))
    with queue.consumer(concurrency=1) as slow:
        held, member = receive(slow), slow._reader._member
        eventually(lambda: member._is_paused)
        with queue.consumer():
            eventually(lambda: not member._is_paused)  # there is capacity again before the next pause
            held.ack()
            for _ in range(10):
                receive(slow).ack()
        for _ in range(30):
            receive(slow).ack()


def _share(config, queues):
    """Take 500 messages of each queue with two consumers; assert that each message comes once, and both get some."""
    with ExitStack() as stack:
        got = {queue: {stack.enter_context(queue.consumer()): [] for _ in range(2)} for queue in queues}
        for queue in queues:
            eventually(lambda name=queue.name: _partitions_are_shared(config, name, 2))
        pool = stack.enter_context(ThreadPoolExecutor(2 * len(queues)))
        for queue in queues:
            send(queue, *(b"%s %d" % (queue.name.encode(), n) for n in range(500)))
        for taken in got.values():
            for consumer, payloads in taken.items():
                pool.submit(_take_until, consumer, payloads, taken, 500)
    for queue, taken in got.items():
        one, other = taken.values()
        assert Counter(one + other) == Counter(b"%s %d" % (queue.name.encode(), n) for n in range(500))
        assert one
        assert other


def _take_until(consumer, payloads, everyone, total):
    end = time.monotonic() + PATIENCE
    while sum(map(len, everyone.values())) < total and time.monotonic() < end:
        message = consumer.receive(0.2)
        if message is not None:
            payloads.append(message.payload)
            message.ack()


def _partitions_are_shared(config, queue, members):
    admin = AdminClient({"bootstrap.servers": config.bootstrap_servers})
    group = f"kafka-mq-{queue}"
    found = admin.describe_consumer_groups([group])[group].result(30).members
    return len(found) == members and all(member.assignment.topic_partitions for member in found)


def test_queues_do_not_see_each_other(service, config):
    """Each consumer gets its own queue's messages of the shared topics, and an ack ends its own message."""
    with tracking(config) as tracker:
        queues = [service.queue("B"), service.queue("C")]
        for queue in queues:
            send(queue, *(b"%s%d" % (queue.name.encode(), n) for n in range(500)))
        for queue in queues:
            with queue.consumer() as consumer:
                messages = [receive(consumer) for _ in range(500)]
                if queue.name == "B":
                    messages.pop().interrupt()
                for message in messages:
                    message.ack()
                if queue.name == "B":
                    again = receive(consumer)
                    assert again.attempt == 2
                    again.ack()
                assert consumer.receive(QUIET) is None
                eventually(lambda name=queue.name: committed_lag(config, name) == 0)
            assert all(message.payload.startswith(queue.name.encode()) for message in messages)
        eventually(lambda: tracker.in_progress == 0)


def test_offsets_of_skipped_messages_are_committed_on_time(service, config):
    """A consumer whose queue is empty commits past the messages of others, without being closed."""
    send(service.queue("busy"), *(b"%d" % n for n in range(50)))
    with service.queue("idle").consumer() as consumer:
        eventually(lambda: committed_lag(config, "idle") == 0)
        assert consumer.receive(0) is None


def test_offsets_of_skipped_messages_are_committed_on_revoke_and_stop(config):
    """Without a commit on time, skipped offsets are committed when partitions are revoked, and at the end."""
    seldom = config.for_queue(commit_interval="1h", max_messages_per_commit=1_000_000)
    service = QueueService(seldom)
    send(service.queue("busy"), *(b"%d" % n for n in range(50)))
    idle = service.queue("idle")
    with idle.consumer():
        eventually(
            lambda: service.metrics.registry.get_sample_value("outbox_queue_lag_records", {"queue": "idle"}) == 0
        )
        assert committed_lag(seldom, "idle") == 50
        with idle.consumer():
            eventually(lambda: committed_lag(seldom, "idle") == 0)
            send(service.queue("busy"), b"more")

    def is_committed_at_the_end():
        with idle.consumer() as consumer:
            assert consumer.receive(QUIET) is None  # on a busy machine it may not have been skipped by then
        return committed_lag(seldom, "idle") == 0

    eventually(is_committed_at_the_end)


def test_markers_of_one_queue_use_every_partition(service, config):
    """Markers are spread by message, and all markers of a message are in one partition, in their order."""
    queue = service.queue("busy")
    send(queue, *(b"%d" % n for n in range(200)))
    with queue.consumer() as consumer:
        for _ in range(200):
            receive(consumer).ack()
    found = markers_in(config)
    assert len(found) == 200
    assert {partition for markers in found.values() for partition, _ in markers} == {0, 1, 2, 3}
    assert all([kind for _, kind in markers] == [wire.START, wire.END] for markers in found.values())
    assert all(len({partition for partition, _ in markers}) == 1 for markers in found.values())


def test_markers_can_be_keyed_as_the_go_version_keys_them(config):
    """With `marker_key: queue` all markers have the queue as their key, and its partition by Java's partitioner."""
    service = QueueService(config.for_queue(marker_key="queue"))
    queue = service.queue("emails")
    send(queue, *(b"%d" % n for n in range(20)))
    with queue.consumer() as consumer:
        for _ in range(20):
            receive(consumer).ack()
    records = read_topic(config.bootstrap_servers, config.marker_topic)
    assert {record.key for record in records} == {b"emails"}
    reference = Producer({"bootstrap.servers": config.bootstrap_servers, "partitioner": "murmur2_random"})
    where = []
    reference.produce(config.dead_letters, b"x", b"emails", on_delivery=lambda _, m: where.append(m.partition()))
    reference.flush(30)
    assert {record.partition % 2 for record in records} == {where[0]}
    assert len({record.partition for record in records}) == 1


def test_messages_of_a_go_process_are_handed_out(service, config):
    """Messages of a Go process, empty and null payloads included, are first attempts."""
    producer = Producer({"bootstrap.servers": config.bootstrap_servers})
    for payload in (b"go", b"", None):
        producer.produce(config.message_topic, payload, b"q")
    producer.produce(config.message_topic, b"attempt of a stranger", b"q", headers={"kmq-attempt": b"many"})
    producer.flush(30)
    with service.queue("q").consumer() as consumer:
        messages = [receive(consumer) for _ in range(4)]
        for message in messages:
            message.ack()
    assert sorted(message.payload for message in messages) == [b"", b"", b"attempt of a stranger", b"go"]
    assert {message.attempt for message in messages} == {1}


def test_back_pressure_bounds_start_markers(service, config):
    """No more than max_in_progress messages are started, although 100 wait and a `receive` asks."""
    queue = service.queue("q", max_in_progress=10, receive_buffer_capacity=1000)
    send(queue, *(b"%d" % n for n in range(100)))
    with queue.consumer() as consumer:
        held = [receive(consumer) for _ in range(10)]
        assert consumer.receive(QUIET) is None
        assert consumer.in_progress == 10
        assert len(markers_in(config)) == 10
        for message in held:
            message.ack()
        assert receive(consumer) is not None


def test_concurrency_bounds_what_is_handed_out(service):
    """With `concurrency=2` a third message is handed out only when one of the two is settled."""
    queue = service.queue("q")
    send(queue, *(b"%d" % n for n in range(5)))
    with queue.consumer(concurrency=2) as consumer:
        first, _second = receive(consumer), receive(consumer)
        assert consumer.receive(QUIET) is None
        first.ack()
        assert receive(consumer) is not None


def test_closing_gives_back_what_was_not_handed_out(config):
    """Messages that a closed consumer had not handed out come again at once, without a counted attempt."""
    patient = config.for_queue(redelivery_timeout=timedelta(minutes=10))
    queue = QueueService(patient).queue("q")
    with tracking(patient):
        send(queue, *(b"%d" % n for n in range(5)))
        with queue.consumer() as consumer:
            receive(consumer).ack()
            eventually(lambda: consumer.in_progress == 4)
        with queue.consumer() as consumer:
            messages = [receive(consumer) for _ in range(4)]
            for message in messages:
                message.ack()
    assert {message.attempt for message in messages} == {1}


def test_a_message_too_large_for_its_start_marker_is_refused(service, config):
    """`send` refuses a message too large for its markers, naming the limit; the largest other one is redelivered."""
    queue = service.queue("q")
    with queue.producer() as producer, pytest.raises(MessageTooLarge, match=r"max_message_bytes \(1000000\)"):
        producer.send(b"x" * 999_990)
    with queue.producer() as producer, pytest.raises(MessageTooLarge, match="with 1 headers"):
        producer.send(b"", headers={"h": b"x" * 999_990})
    largest = b"x" * (1_000_000 - 500 - len("q"))
    with tracking(config), queue.consumer() as consumer:
        send(queue, largest)
        receive(consumer).nack()
        again = receive(consumer)
        assert again.payload == largest
        again.reject("enough")
    assert dead_letters_in(config)[0].payload == largest


def test_a_message_that_cannot_be_started_is_set_aside(service, config):
    """Another producer's message that is too large for a start marker becomes a dead letter; the queue goes on."""
    producer = Producer({"bootstrap.servers": config.bootstrap_servers, "message.max.bytes": 1_040_000})
    producer.produce(config.message_topic, b"x" * 999_950, b"q")
    producer.flush(30)
    queue = service.queue("q")
    with queue.consumer() as consumer:
        (letter,) = eventually(lambda: dead_letters_in(config))
        assert "max_message_bytes" in letter.reason
        send(queue, b"next")
        assert receive(consumer).payload == b"next"


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"payload": None}, "tombstone"),
        ({"payload": {1, 2}}, "payload: cannot be written as JSON"),
        ({"payload": b"", "headers": {"kmq-id": "1"}}, "begin with 'kmq-'"),
        ({"payload": b"", "headers": {"h": 1}}, "must be bytes, str or None"),
        ({"payload": b"", "headers": [("h",)]}, "expected a .name, value. pair"),
        ({"payload": b"", "delay": timedelta(seconds=-1)}, "none or more"),
        ({"payload": b"", "delay": 5}, "expected a timedelta"),
        ({"payload": b"", "delay": timedelta(days=2)}, "more than max_delay"),
    ],
)
def test_bad_messages_are_refused_where_they_are_sent(service, arguments, problem):
    """`send` and `record` raise InvalidMessage for a bad message, naming the problem."""
    queue = service.queue("q")
    with queue.producer() as producer, pytest.raises(InvalidMessage, match=problem):
        producer.send(**arguments)
    with pytest.raises(InvalidMessage, match=problem):
        queue.record(**arguments)


def test_sending_says_what_was_not_delivered(service, config):
    """`flush` and `close` raise SendFailed for payloads that Kafka has refused; the others are in the topic."""
    producer = service.queue("q").producer()
    producer.send_and_wait(b"fits")
    alter_topic(config.bootstrap_servers, config.message_topic, {"max.message.bytes": "2000"})
    producer.send(b"x" * 5000)
    with pytest.raises(SendFailed, match="1 not delivered") as failed:
        producer.flush()
    assert failed.value.undelivered == (b"x" * 5000,)
    producer.send_and_wait(b"fits too")
    producer.send(b"y" * 5000)
    with pytest.raises(SendFailed, match="queue 'q'"):
        producer.close()
    with pytest.raises(QueueClosed):
        producer.send(b"late")
    found = {record.value for record in read_topic(config.bootstrap_servers, config.message_topic)}
    assert found == {b"fits", b"fits too"}


def test_closing_does_not_hang_without_a_broker(own_stack):
    """Without a broker producer and consumer still close, and the producer raises SendFailed."""
    stack = own_stack(embedded=True)
    queue = QueueService(QueueConfig(bootstrap_servers=stack.kafka.bootstrap, close_timeout="2s")).queue("q")
    producer, consumer = queue.producer(), queue.consumer()
    producer.send_and_wait(b"1")
    message = receive(consumer)
    stack.kafka.stop()
    producer.send(b"2")
    message.ack()
    with pytest.raises(SendFailed, match="not acknowledged in time"):
        producer.close()
    closing = threading.Thread(target=consumer.close)
    closing.start()
    closing.join(PATIENCE)
    assert not closing.is_alive()


def test_a_failed_start_is_tried_again(service, config, monkeypatch):
    """If start markers cannot be committed, the messages are started again, and each comes once."""
    from outbox_queue.consuming import start_writers as starts

    queue = service.queue("q")
    send(queue, *(b"%d" % n for n in range(20)))
    genuine, failures = starts.commit, iter(range(2))

    def commit(*arguments):
        if next(failures, None) is not None:
            raise starts.KafkaException(starts.KafkaError(starts.KafkaError.REQUEST_TIMED_OUT))
        genuine(*arguments)

    monkeypatch.setattr(starts, "commit", commit)
    with queue.consumer() as consumer:
        payloads = []
        for _ in range(20):
            message = receive(consumer)
            payloads.append(message.payload)
            message.ack()
        assert consumer.receive(QUIET) is None
    assert Counter(payloads) == Counter(b"%d" % n for n in range(20))
    assert len(markers_in(config)) == 20


def test_transactional_starts_are_seen_with_their_offsets_or_not_at_all(service, config, monkeypatch):
    """An aborted start leaves no marker that a tracker would read, and the message is started again."""
    from outbox_queue.consuming import start_writers as starts

    queue = service.queue("q", transactional=True)
    send(queue, *(b"%d" % n for n in range(20)))
    genuine, failures = starts.TransactionalProducer.send_offsets, iter(range(2))

    def send_offsets(*arguments):
        genuine(*arguments)
        if next(failures, None) is not None:
            raise starts.KafkaException(starts.KafkaError(starts.KafkaError.REQUEST_TIMED_OUT))

    monkeypatch.setattr(starts.TransactionalProducer, "send_offsets", send_offsets)
    with queue.consumer() as consumer:
        payloads = []
        for _ in range(20):
            message = receive(consumer)
            payloads.append(message.payload)
            message.ack()
    assert next(failures, None) is None
    assert Counter(payloads) == Counter(b"%d" % n for n in range(20))
    kinds = Counter(kind for markers in markers_in(config).values() for _, kind in markers)
    assert kinds == {wire.START: 20, wire.END: 20}


def test_batches_fit_into_topics_of_small_messages(kafka_bootstrap, topic_name):
    """Start markers, and requeued dead letters, go in batches no larger than topics of small messages take."""
    config = QueueConfig(
        bootstrap_servers=kafka_bootstrap,
        message_topic=topic_name("m"),
        marker_topic=topic_name("k"),
        message_partitions=1,
        marker_partitions=1,
        max_message_bytes=2000,
        transactional=True,
    )
    queue = QueueService(config).queue("q")
    send(queue, *(b"x" * 200 for _ in range(100)))
    with queue.consumer() as consumer:
        for _ in range(100):
            receive(consumer).ack()
    letters = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(100):
        key, value, headers = dead_letter_record(
            b"q", b"x" * 200, headers=(), attempts=1, enqueued_at_ms=1, origin=(0, number), reason="no", dead_at_ms=1
        )
        letters.produce(config.dead_letters, value, key, headers=headers)
    assert letters.flush(30) == 0
    assert len(DeadLetters(config).requeue(lambda _: True)) == 100


def test_missing_topics_are_made_for_their_purpose(kafka_bootstrap, topic_name):
    """Missing topics are made: dead letters compacted, and the others with the configured partitions."""
    config = QueueConfig(
        bootstrap_servers=kafka_bootstrap,
        message_topic=topic_name("m"),
        marker_topic=topic_name("k"),
        message_partitions=3,
        marker_partitions=5,
    )
    topics = ensure_topics(config)
    assert (topics.message_partitions, topics.marker_partitions, topics.problems) == (3, 5, ())
    assert ensure_topics(config) == topics
    letters = topic_settings({"bootstrap.servers": kafka_bootstrap}, config.dead_letters)
    assert letters["cleanup.policy"] == "compact"
    assert int(letters["max.message.bytes"]) == 16 * 2**20  # more than the limit of the message topic


def test_wrong_topics_are_reported(kafka_bootstrap, make_topic, caplog):
    """A CreateTime marker topic is reported; a compacted or too small one, or a wrong partition count, is refused."""
    config = QueueConfig(bootstrap_servers=kafka_bootstrap, message_topic=make_topic(4), marker_topic=make_topic(4))
    with caplog.at_level(logging.WARNING):
        (problem,) = ensure_topics(config).problems
    assert "message.timestamp.type=CreateTime" in problem
    assert problem in caplog.text
    compacted = make_topic(4, config={"cleanup.policy": "compact"})
    for kind in ("message_topic", "marker_topic"):
        with pytest.raises(QueueTopicError, match="compaction would remove"):
            ensure_topics(config.for_queue(**{kind: compacted}))
    with pytest.raises(QueueTopicError, match="compaction would remove"):
        ensure_message_topic(config.for_queue(message_topic=compacted))
    with pytest.raises(QueueTopicError, match=r"max\.message\.bytes"):
        ensure_topics(config.for_queue(max_message_bytes=5_000_000))
    with pytest.raises(QueueTopicError, match="message_partitions is 9"):
        ensure_topics(config.for_queue(message_partitions=9))


def test_topics_that_forget_too_early_are_reported(kafka_bootstrap, make_topic):
    """Dead letters that expire are reported, and a marker topic that is limited by its size."""
    marker_settings = {"message.timestamp.type": "LogAppendTime", "retention.bytes": "1000000"}
    config = queue_config(
        kafka_bootstrap, make_topic, marker_topic=make_topic(4, config=marker_settings), dead_letter_topic=make_topic(4)
    )
    markers, letters = ensure_topics(config).problems
    assert "retention.bytes" in markers
    assert "dead letters expire" in letters
    lasting = make_topic(4, config={"retention.ms": "-1"})
    assert ensure_topics(config.for_queue(dead_letter_topic=lasting)).problems == (markers,)


def test_numbers_are_counted(service, config):
    """Metrics count the sent, handed-out and settled messages of a queue, and their times."""
    queue = service.queue("q")
    with tracking(config), queue.consumer() as consumer:
        send(queue, b"1", b"2", b"3")
        receive(consumer).ack()
        receive(consumer).nack(delay=timedelta(minutes=1))
        receive(consumer).reject("x")
        value = service.metrics.registry.get_sample_value
        counted = {
            name: value(f"outbox_queue_{name}_total", {"queue": "q"})
            for name in ("produced", "consumed", "acknowledged", "nacked", "rejected")
        }
        assert counted == {"produced": 3, "consumed": 3, "acknowledged": 1, "nacked": 1, "rejected": 1}
        assert value("outbox_queue_processing", {"queue": "q"}) == 0
        for name in ("queueing", "processing", "production"):
            assert value(f"outbox_queue_{name}_seconds_count", {"queue": "q"}) > 0
        eventually(lambda: value("outbox_queue_lag_records", {"queue": "q"}) == 0)


def test_receive_many_takes_what_is_there(service):
    """`receive_many` returns at most the given number of messages, without waiting for all of them."""
    queue = service.queue("q")
    send(queue, *(b"%d" % n for n in range(20)))
    with queue.consumer() as consumer:
        messages = []
        while len(messages) < 20:
            batch = consumer.receive_many(7, PATIENCE)
            assert 1 <= len(batch) <= 7
            messages += batch
            consumer.acknowledge_all(batch)
        assert consumer.receive_many(7, 0) == []
    assert len({message.payload for message in messages}) == 20


def test_a_stopped_consumer_ends_its_iteration(service):
    """`stop` from another thread ends `for message in consumer`; a message handed out can still be settled."""
    queue = service.queue("q")
    send(queue, b"1")
    with queue.consumer() as consumer:
        taken = []
        thread = threading.Thread(target=lambda: taken.extend(consumer))
        thread.start()
        eventually(lambda: taken)
        assert not consumer.drain(0)
        thread.join(PATIENCE)
        assert not thread.is_alive()
        taken[0].ack()
        assert consumer.drain(PATIENCE)


def test_json_payloads_are_those_of_the_outbox(service):
    """`record` and `send` write the same bytes for the same payload."""
    queue = service.queue("q")
    payload = {"at": datetime(2026, 1, 1, tzinfo=UTC), "text": "\u00e9"}
    send(queue, payload)
    with queue.consumer() as consumer:
        received = receive(consumer)
        received.ack()
    assert received.payload == queue.record(payload).value.encode()
    assert json.loads(received.payload)["text"] == "\u00e9"
