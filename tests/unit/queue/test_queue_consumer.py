"""A consumer without Kafka: the messages that it hands out and gives back, and their markers."""

import os
import time
from datetime import timedelta

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME

from outbox_queue import InvalidMessage, QueueConfig, QueueError
from outbox_queue.consuming import acks, consumer, group_member, reader
from outbox_queue.consuming.consumer import Consumer
from outbox_queue.consuming.reader import QueueReader
from outbox_queue.metrics import QueueMetrics
from outbox_queue.protocol import markers as wire
from outbox_queue.protocol.topics import Topics
from tests.queueing import eventually

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

    def key(self):
        return b"q"

    def error(self):
        return None


class Client:
    """A Kafka consumer that has some records."""

    def poll(self, _seconds):
        return None


class Writer:
    """A writer that starts messages, and takes so many seconds for it."""

    takes = 0.0
    is_in_doubt = False

    def __init__(self, _config, client):
        self.client = client

    def write(self, _markers, _offsets, _seconds_left):
        time.sleep(self.takes)


class Reader(QueueReader):
    """A reader that starts messages on the thread of the test."""

    ends = True

    def start(self):
        pass

    def join(self, _seconds):
        return self.ends

    def start_messages(self, records, takes):
        self._writer.takes = takes
        self._member._keep(records)
        self._start(len(records))


class Markers:
    """A recorder of the written markers."""

    def __init__(self, _config):
        self.written = []
        self.is_closed = False

    def write(self, record, is_wanted=None):
        self.written.append((wire.Marker.FromString(record.value), is_wanted))

    def retry_failed(self):
        pass

    def flush(self, _seconds):
        return 0

    def close(self, _seconds):
        self.is_closed = True
        return 0


@pytest.fixture
def begin(monkeypatch):
    """Yield a factory for consumers, closed at the end."""
    monkeypatch.setattr(consumer, "QueueReader", Reader)
    monkeypatch.setattr(reader, "PlainStartWriter", Writer)
    monkeypatch.setattr(group_member, "make_consumer", lambda _: Client())
    monkeypatch.setattr(acks, "MarkerWriter", Markers)
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
    """Start messages, with so many seconds for their markers."""
    consumer._reader.start_messages([Record(offset) for offset in offsets], takes)


def markers(consumer):
    """Return the keep-alives written after the start markers: (offset, redeliver after, attempt)."""
    return [
        (marker.message_id.offset, marker.redeliver_after_ms, marker.attempt if marker.HasField("attempt") else None)
        for marker, _ in consumer._acks._markers.written
        if marker.type == wire.KEEPALIVE
    ]


def test_messages_are_counted_when_they_are_handed_out(begin):
    """Messages are counted when they are handed out, and not if they were only started and given back."""
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
    """A message whose start markers took longer than its timeout is given back: others may have it already."""
    one = begin(redelivery_timeout="100ms")
    start(one, 0, 1, takes=0.2)
    assert one.receive(0) is None
    assert markers(one) == [(0, 0, 0), (1, 0, 0)]
    assert one.in_progress == one.value("processing") == 0


def test_what_waits_for_too_long_is_given_back(begin):
    """A message that waits longer than max_processing_time is given back, without counting an attempt."""
    one = begin(max_processing_time="1s", redelivery_timeout="1s")
    start(one, 0, 1)
    taken = one.receive(0)
    eventually(lambda: one.in_progress == one.value("processing") == 0)
    assert (1, 0, 0) in markers(one)
    assert not any(after_ms == 0 for offset, after_ms, _ in markers(one) if offset == 0)
    assert not taken.is_settled


def test_a_keep_alive_is_wanted_until_something_else_was_said(begin):
    """An undelivered keep-alive is repeated neither after a later one, nor after the message is settled."""
    one = begin()
    start(one, 0)
    message = one.receive(0)
    message.extend(timedelta(minutes=1))
    message.extend(timedelta(minutes=2))
    (_, first), (_, second) = one._acks._markers.written
    assert not first()
    assert second()
    message.ack()
    assert not second()


def test_a_nack_of_the_last_attempt_has_no_delay(begin):
    """A message that becomes a dead letter does so at once; one that comes again waits for as long as it was told."""
    for attempts, delay_ms in ((1, 0), (2, 60_000)):
        one = begin(max_attempts=attempts)
        start(one, 0)
        one.receive(0).nack(delay=timedelta(minutes=1))
        assert [after_ms for _, after_ms, _ in markers(one)] == [delay_ms]


def test_an_attempt_that_does_not_count_comes_again_with_its_number(begin):
    """A message that is given back uncounted waits, also in its last attempt; without a delay it is refused."""
    one = begin(max_attempts=1)
    start(one, 0)
    message = one.receive(0)
    with pytest.raises(InvalidMessage, match="nack: an attempt that does not count needs a delay"):
        message.nack(counts=False)
    message.nack(delay=timedelta(minutes=1), counts=False)
    assert markers(one) == [(0, 60_000, 0)]


def test_extending_never_moves_a_deadline_to_an_earlier_moment(begin):
    """A shorter extension after a longer one leaves the deadline where it is."""
    one = begin()
    start(one, 0)
    message = one.receive(0)
    message.extend(timedelta(minutes=2))
    message.extend(timedelta(minutes=1))
    (_, first, _), (_, second, _) = markers(one)
    assert first - 10_000 < second <= first


def test_a_message_whose_dead_letter_cannot_be_written_is_still_in_progress(begin, monkeypatch):
    """It can be settled otherwise."""
    one = begin()
    start(one, 0)
    message = one.receive(0)

    def refuse(*_, **__):
        raise QueueError("no dead letters")

    monkeypatch.setattr(one._acks._dead_letters, "write", refuse)
    with pytest.raises(QueueError, match="no dead letters"):
        message.reject("bad")
    message.ack()
    assert one.in_progress == 0


@pytest.mark.parametrize("reading_ends", [True, False])
def test_closing_lets_go_of_what_nobody_uses(begin, reading_ends):
    """Closing drops the client of markers, unless a thread is left that may still give messages back."""
    one = begin()
    one._reader.ends = reading_ends
    one.close()
    one.close()
    assert one._acks._markers.is_closed == reading_ends


def test_a_bad_reason_leaves_the_message_in_progress(begin):
    """A message settled with a bad reason stays in progress, and can still be given back."""
    one = begin()
    start(one, 0)
    message = one.receive(0)
    for verb in (message.nack, message.reject):
        with pytest.raises(InvalidMessage, match="reason"):
            verb(reason=ValueError("x"))
    assert one.in_progress == 1
    message.nack(reason="\ud800")
    assert one.in_progress == 0
    assert one._acks._markers.written[-1][0].reason == "?"


def test_a_forked_consumer_refuses_to_receive(begin, monkeypatch):
    """The threads of a consumer do not survive a fork: its messages would be waited for for ever."""
    one = begin()
    with monkeypatch.context() as child:
        child.setattr(os, "getpid", lambda: -1)
        with pytest.raises(QueueError, match="forked; make one in each process"):
            one.receive(0)
