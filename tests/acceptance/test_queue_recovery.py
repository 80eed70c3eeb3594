"""Trackers that die, stall or meet an outage with messages in progress."""

import json
import signal
import subprocess
import sys
import time

import pytest
from confluent_kafka import Consumer, TopicPartition

from devstack.processes import wait_until
from outbox_queue.operations.topic_reader import read_to_end
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol.clients import TRACKER_GROUP
from outbox_queue.redelivery.tracker import RedeliveryTracker
from tests.queueing import PATIENCE, Markers, ended_ids, eventually, messages_in, queue_config, tracking

pytestmark = [pytest.mark.alone, pytest.mark.real_broker]
IN_PROGRESS = 10_000
AFTER_MS = 8_000
IN_TIME_MS = 2_000
ALLOWANCE_MS = 8_000  # for a machine that runs other tests, too


@pytest.fixture
def config(kafka_bootstrap, make_topic):
    """Return the settings of queues with topics of their own."""
    return queue_config(kafka_bootstrap, make_topic)


@pytest.fixture
def markers(config):
    """Return a writer to the marker topic."""
    return Markers(config.bootstrap_servers, config.marker_topic)


@pytest.fixture
def begin_tracker(config, tmp_path):
    """Yield a factory for `outbox queue tracker` processes, which returns the process and its log."""
    begun = []

    def begin(*, waits=True):
        file, log = tmp_path / "queue.yaml", tmp_path / f"tracker-{len(begun)}.log"
        topics = {name: getattr(config, name) for name in ("message_topic", "marker_topic", "dead_letter_topic")}
        file.write_text(json.dumps({"bootstrap-servers": config.bootstrap_servers, **topics}))
        command = [sys.executable, "-m", "outbox_core", "queue", "tracker", "-f", str(file)]
        with log.open("wb") as output:
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=output, stderr=output)
        begun.append(process)
        if waits:
            assert wait_until(lambda: caught_up(log) or process.poll() is not None, PATIENCE)
            assert process.poll() is None, log.read_text()
        return process, log

    yield begin
    for process in begun:
        process.kill()
        process.wait()


def caught_up(log):
    """Tell whether the tracker has logged that it has caught up."""
    return "caught up" in log.read_text()


def committed(config):
    """Return the offsets that the trackers' group has committed: partition -> offset."""
    consumer = Consumer({"bootstrap.servers": config.bootstrap_servers, "group.id": TRACKER_GROUP})
    asked = [TopicPartition(config.marker_topic, number) for number in range(4)]
    found = {one.partition: one.offset for one in consumer.committed(asked, timeout=30)}
    consumer.close()
    return found


def last_expiry_ms(config):
    """Return the time at which the last message with the shorter timeout expired, by the broker's clock."""
    records = ((record, wire.Marker.FromString(record.value)) for record in read_to_end(config, config.marker_topic))
    return AFTER_MS + max(
        record.timestamp[1]
        for record, marker in records
        if marker.type == wire.START and marker.redeliver_after_ms == AFTER_MS
    )


def last_copy_ms(config):
    """Return the time at which the last message was sent again."""
    return max(record.timestamp[1] for record in read_to_end(config, config.message_topic))


def test_a_killed_trackers_successor_redelivers_what_expires(config, markers, begin_tracker, say):
    """Of 10,000 messages in progress at a SIGKILL, exactly those that expire are redelivered, once and in time."""
    tracker, _ = begin_tracker()
    for number in range(IN_PROGRESS):
        markers.start(number, 60_000 if number % 4 == 0 else AFTER_MS)
    for number in range(1, IN_PROGRESS, 4):
        markers.end(number)
    markers.flush()
    eventually(lambda: min(committed(config).values()) >= 0)
    tracker.kill()
    for number in range(2, IN_PROGRESS, 4):  # while no tracker reads
        markers.end(number)
    for number in range(0, IN_PROGRESS, 4):
        markers.keep_alive(number, 600_000)
    markers.flush()
    begin_tracker()
    ready_at_ms = time.time() * 1000
    expected = {b"payload %d" % number: [2] for number in range(3, IN_PROGRESS, 4)}
    eventually(lambda: len(messages_in(config)) >= len(expected), seconds=2 * PATIENCE)
    late_ms = last_copy_ms(config) - max(ready_at_ms, last_expiry_ms(config))
    say(f"the last one was redelivered {late_ms / 1000:.1f} s after it had expired and the successor was ready")
    assert late_ms < IN_TIME_MS + ALLOWANCE_MS
    time.sleep(2)
    assert messages_in(config) == expected
    ended = ended_ids(config)
    assert {place for place, count in ended.items() if count > 1} == set()
    assert len(ended) == IN_PROGRESS * 3 // 4


def test_a_stalled_tracker_redelivers_nothing_that_was_finished_meanwhile(config, markers, begin_tracker):
    """A tracker that was stopped until all messages seem expired reads the missed markers before it redelivers."""
    tracker, _ = begin_tracker()
    for number in range(200):
        markers.start(number, 3000)
    markers.flush()
    time.sleep(0.5)
    tracker.send_signal(signal.SIGSTOP)
    for number in range(150):
        markers.end(number)
    for number in range(150, 190):
        markers.keep_alive(number, 600_000)
    markers.flush()
    time.sleep(4)  # less than its session: no other takes over
    tracker.send_signal(signal.SIGCONT)
    expected = {b"payload %d" % number: [2] for number in range(190, 200)}
    eventually(lambda: len(messages_in(config)) >= len(expected))
    time.sleep(1)
    assert messages_in(config) == expected


def test_a_tracker_that_was_replaced_does_not_redeliver_again(config, markers, begin_tracker):
    """Two trackers that both believe to own a partition redeliver each message once."""
    tracker, _ = begin_tracker()
    for number in range(300):
        markers.start(number, 9_000)
    markers.flush()
    time.sleep(1)
    tracker.send_signal(signal.SIGSTOP)
    expected = {b"payload %d" % number: [2] for number in range(300)}
    with tracking(config):  # takes over when the other's session is over
        tracker.send_signal(signal.SIGCONT)
        eventually(lambda: len(messages_in(config)) >= len(expected))
        time.sleep(2)
    assert messages_in(config) == expected
    assert set(ended_ids(config).values()) == {1}


def test_a_stopped_tracker_commits_and_hands_over_at_once(config, markers, begin_tracker):
    """A tracker that gets SIGTERM commits and ends with exit code 0; its successor need not read the same markers."""
    tracker, _ = begin_tracker()
    for number in range(100):
        markers.start(number)
    for number in range(99):
        markers.end(number)
    markers.flush()
    eventually(lambda: min(committed(config).values()) > 0)
    tracker.send_signal(signal.SIGTERM)
    assert tracker.wait(PATIENCE) == 0
    kept = committed(config)
    assert [kept[partition] >= 50 for partition in range(4)] == [True, True, True, False]
    with tracking(config) as successor:
        eventually(lambda: successor.in_progress == 1)


def test_trackers_share_the_partitions(config, markers):
    """Several trackers divide the partitions; when one leaves, the others take over its part."""
    with tracking(config) as first:
        with tracking(config) as second:
            eventually(lambda: first.health().detail.startswith("2 ") and second.health().leader)
            for number in range(40):
                markers.start(number, 500)
            markers.flush()
            eventually(lambda: len(messages_in(config)) == 40)
        eventually(lambda: first.health().detail.startswith("4 ") and first.is_caught_up)
        for number in range(40, 60):
            markers.start(number, 500)
        markers.flush()
        eventually(lambda: len(messages_in(config)) == 60)
    assert messages_in(config) == {b"payload %d" % number: [2] for number in range(60)}


@pytest.mark.complete
def test_a_brokers_outage(own_stack, make_topic):
    """Messages that expire during a broker's outage are redelivered once; a tracker can stop without a broker."""
    stack = own_stack(embedded=False)
    bootstrap = stack.kafka.bootstrap
    config = queue_config(
        bootstrap,
        lambda *arguments, **more: make_topic(*arguments, bootstrap=bootstrap, **more),
        close_timeout="3s",
        kafka={"socket.timeout.ms": 5000},
    )
    with RedeliveryTracker(config) as tracker:  # left behind, if Kafka does not answer within the close timeout
        markers = Markers(bootstrap, config.marker_topic)
        for number in range(50):
            markers.start(number, 1500)
        markers.flush()
        eventually(lambda: tracker.in_progress == 50)
        stack.kafka.kill()
        time.sleep(4)
        stack.start_kafka()
        expected = {b"payload %d" % number: [2] for number in range(50)}
        eventually(lambda: messages_in(config) == expected, seconds=2 * PATIENCE)
        stack.kafka.kill()
