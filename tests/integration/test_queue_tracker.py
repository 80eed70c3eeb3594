"""The redelivery tracker on a real broker, with markers written by hand."""

import pytest

from outbox_queue import headers
from tests.kafka_reader import read_topic
from tests.queueing import Markers, dead_letters_in, ended_ids, eventually, messages_in, queue_config, tracking

pytestmark = pytest.mark.real_broker


@pytest.fixture
def config(kafka_bootstrap, make_topic):
    """Queues with topics of their own. The trackers' group is one for the cluster; partitions tell them apart."""
    return queue_config(kafka_bootstrap, make_topic)


@pytest.fixture
def markers(config):
    """Writes to the marker topic."""
    return Markers(config.bootstrap_servers, config.marker_topic)


def test_what_expires_is_redelivered_once_and_ended(config, markers):
    """Expired messages get a copy with the next attempt and an end marker; finished and kept-alive ones nothing."""
    with tracking(config) as tracker:
        for number in range(40):
            markers.start(number, 300, headers=[("h", b"1"), ("n", None)])
        for number in range(10):
            markers.end(number)
        for number in range(10, 20):
            markers.keep_alive(number, 60_000)
        markers.flush()
        expected = {b"payload %d" % number: [2] for number in range(20, 40)}
        assert eventually(lambda: messages_in(config) == expected), messages_in(config)
        assert eventually(lambda: tracker.in_progress == 10)
    assert messages_in(config) == expected
    assert ended_ids(config) == {(0, number): 1 for number in (*range(10), *range(20, 40))}
    copy = read_topic(config.bootstrap_servers, config.message_topic)[0]
    travelled = headers.read(copy.headers)
    assert copy.key == b"q"
    assert travelled.headers == (("h", b"1"), ("n", None))
    assert travelled.enqueued_at_ms == 1000
    assert travelled.origin == (0, int(copy.value.split()[1]))


def test_a_message_given_back_comes_at_once(config, markers):
    """A keep-alive of nought milliseconds redelivers long before the deadline; it may take the attempt back."""
    with tracking(config):
        markers.start(1, 3_600_000)
        markers.start(2, 3_600_000)
        markers.keep_alive(1, 0, reason="not now")
        markers.keep_alive(2, 0, attempt=0)
        markers.flush()
        assert eventually(lambda: messages_in(config) == {b"payload 1": [2], b"payload 2": [1]}), messages_in(config)


def test_used_up_messages_are_set_aside(config, markers):
    """After its last attempt a message becomes a dead letter that says why; one without a limit never does."""
    with tracking(config) as tracker:
        markers.start(1, 100, attempt=3, max_attempts=3)
        markers.start(2, 100, attempt=2, max_attempts=3)
        markers.start(3, 3_600_000, attempt=3, max_attempts=3)
        markers.keep_alive(3, 0, reason="no such customer")
        markers.start(4, 100, attempt=99)
        markers.flush()
        assert eventually(lambda: len(dead_letters_in(config)) == 2 and len(messages_in(config)) == 2)
        assert eventually(lambda: tracker.in_progress == 0)
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
        assert eventually(lambda: len(messages_in(config)) == 5)
    with tracking(config) as tracker:
        assert tracker.in_progress == 0
    assert messages_in(config) == {b"payload %d" % number: [2] for number in range(495, 500)}


def test_what_is_no_marker_is_skipped(config, markers):
    """Records that cannot be read as markers stop nothing."""
    with tracking(config):
        for number, value in enumerate([b"\xff\xff", b"", None, b"\x10\x09", b"not a marker"] * 4):
            markers.write(number, value)
        markers.start(1, 100)
        markers.flush()
        assert eventually(lambda: messages_in(config) == {b"payload 1": [2]})
