"""A consumer without Kafka: what it hands out of what was started, what it gives back, and which markers that takes."""

import time
from datetime import timedelta

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME

from outbox_queue import InvalidMessage, QueueConfig, consumer, wire
from outbox_queue.consumer import Consumer
from outbox_queue.metrics import QueueMetrics
from outbox_queue.topics import Topics

PATIENCE = 30.0
CONFIG = QueueConfig(bootstrap_servers="nowhere:1", redelivery_timeout="10s")


class Record:
    """A record of the message topic."""

    def __init__(self, offset):
        self._offset = offset

    def headers(self):
        return []

    def timestamp(self):
        return TIMESTAMP_CREATE_TIME, 1000

    def value(self):
        return b"payload"

    def partition(self):
        return 0

    def offset(self):
        return self._offset


class Fetcher:
    """Starts what it is told to, on the thread that tells it."""

    def __init__(self, *_, start, **__):
        self.start_messages = start
        self.ends = True

    def start(self):
        pass

    def ask_to_stop(self, _seconds):
        pass

    def join(self, _seconds):
        return self.ends


class Markers:
    """Notes what is written."""

    def __init__(self, _config):
        self.written = []
        self.is_closed = False

    def write(self, record, wanted=None):
        self.written.append((wire.Marker.FromString(record.value), wanted))

    def tend(self):
        pass

    def flush(self, _seconds):
        return 0

    def close(self, _seconds):
        self.is_closed = True
        return 0


@pytest.fixture
def begin(monkeypatch):
    """A factory for consumers, closed at the end."""
    monkeypatch.setattr(consumer, "Fetcher", Fetcher)
    monkeypatch.setattr(consumer, "MarkerWriter", Markers)
    begun = []

    def make(**settings):
        metrics = QueueMetrics()
        config = CONFIG.for_queue(**settings)
        made = Consumer(config, "q", Topics(1, 1, ()), metrics.of("q"), concurrency=None)
        made.value = lambda name: metrics.registry.get_sample_value(f"outbox_queue_{name}", {"queue": "q"})
        begun.append(made)
        return made

    yield make
    for one in begun:
        one.close()


def start(consumer, *offsets, takes=0.0):
    """Start messages; to write their markers takes so many seconds."""
    consumer._fetcher.start_messages([Record(offset) for offset in offsets], lambda _: time.sleep(takes), False)


def markers(consumer):
    """What was written after the start markers: (offset, redeliver after, attempt) of keep-alives."""
    return [
        (marker.message_id.offset, marker.redeliver_after_ms, marker.attempt if marker.HasField("attempt") else None)
        for marker, _ in consumer._markers.written
        if marker.type == wire.KEEPALIVE
    ]


def until(condition):
    """Wait for it."""
    end = time.monotonic() + PATIENCE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_messages_are_counted_when_they_are_handed_out(begin):
    """What was only started, and is given back at the end, was handed to nobody."""
    one = begin()
    start(one, 0, 1, 2)
    assert (one.value("consumed_total"), one.value("queueing_seconds_count")) == (0, 0)
    assert one.receive(0).payload == b"payload"
    assert len(one.receive_many(1, 0)) == 1
    assert (one.value("consumed_total"), one.value("queueing_seconds_count")) == (2, 2)
    one.close()
    assert one.value("consumed_total") == 2
    assert one.value("processing") == 0
    assert markers(one) == [(2, 0, 0)]


def test_what_took_too_long_to_start_is_given_back(begin):
    """A message whose start markers took longer than its timeout may be with others: it is not handed out."""
    one = begin(redelivery_timeout="100ms")
    start(one, 0, 1, takes=0.2)
    assert one.receive(0) is None
    assert markers(one) == [(0, 0, 0), (1, 0, 0)]
    assert one.in_progress == one.value("processing") == 0


def test_what_waits_for_too_long_is_given_back(begin):
    """After max_processing_time a message that nobody takes is for others, without an attempt being counted."""
    one = begin(max_processing_time="1s", redelivery_timeout="1s")
    start(one, 0, 1)
    taken = one.receive(0)
    until(lambda: one.in_progress == one.value("processing") == 0)
    assert (1, 0, 0) in markers(one)
    assert not any(after_ms == 0 for offset, after_ms, _ in markers(one) if offset == 0)
    assert not taken.is_settled


def test_a_keep_alive_is_wanted_until_something_else_was_said(begin):
    """One that could not be delivered is tried again neither after a later one, nor after the message is settled."""
    one = begin()
    start(one, 0)
    message = one.receive(0)
    message.extend(timedelta(minutes=1))
    message.extend(timedelta(minutes=2))
    (_, first), (_, second) = one._markers.written
    assert not first()
    assert second()
    message.ack()
    assert not second()


@pytest.mark.parametrize("reading_ends", [True, False])
def test_closing_lets_go_of_what_nobody_uses(begin, reading_ends):
    """The client of markers is let go of, unless a thread that is left behind may still give back what it starts."""
    one = begin()
    one._fetcher.ends = reading_ends
    one.close()
    one.close()
    assert one._markers.is_closed == reading_ends


def test_a_bad_reason_leaves_the_message_in_progress(begin):
    """Its slot is not lost: the message can still be given back."""
    one = begin()
    start(one, 0)
    message = one.receive(0)
    for verb in (message.nack, message.reject):
        with pytest.raises(InvalidMessage, match="reason"):
            verb(reason=ValueError("x"))
    assert one.in_progress == 1
    message.nack(reason="\ud800")
    assert one.in_progress == 0
    assert one._markers.written[-1][0].reason == "?"
