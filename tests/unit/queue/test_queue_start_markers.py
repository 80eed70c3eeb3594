"""Messages and start markers from records, and records that cannot be started: with a Kafka client of our own."""

import time
import weakref
from contextlib import suppress
from datetime import timedelta

import pytest
from confluent_kafka import TIMESTAMP_CREATE_TIME, KafkaError, KafkaException

from outbox_queue import MessageTooLarge, QueueConfig, SendFailed
from outbox_queue.consuming.marker_writer import MarkerKeys
from outbox_queue.consuming.start_markers import StartMarkers
from outbox_queue.consuming.start_writers import NotStarted
from outbox_queue.dead_letters import writer as dead_letter_writer
from outbox_queue.dead_letters.writer import DeadLetterWriter
from outbox_queue.metrics import QueueCounters
from outbox_queue.producing.payloads import PayloadCheck
from outbox_queue.protocol import headers
from outbox_queue.protocol import markers as wire
from tests.queueing import received
from tests.resources import reference_counts_only

CONFIG = QueueConfig(bootstrap_servers="nowhere:1", max_message_bytes=1000, max_delay=timedelta(hours=1))


class Record:
    """A record of the message topic."""

    def __init__(self, value=b"", sent_headers=()):
        self._value, self._headers = value, list(sent_headers)

    def headers(self):
        return self._headers

    def timestamp(self):
        return TIMESTAMP_CREATE_TIME, 1000

    def value(self):
        return self._value

    def partition(self):
        return 3

    def offset(self):
        return 42


class Client:
    """A client that refuses records above its size with one error, at once or in a report."""

    def __init__(self, error=KafkaError.MSG_SIZE_TOO_LARGE, *, takes=2000, at_once=False):
        self.error, self.takes, self.at_once = KafkaError(error), takes, at_once
        self.delivered, self.reports = [], []

    def produce(self, _topic, value, key, headers, on_delivery):
        is_refused = len(value) > self.takes
        if is_refused and self.at_once:
            raise KafkaException(self.error)
        if is_refused:
            self.reports.append(on_delivery)
        else:
            self.delivered.append((key, value, headers))

    def flush(self, _seconds):
        for report in self.reports:
            report(self.error, None)
        self.reports.clear()
        return 0


@pytest.fixture
def make(monkeypatch):
    """Return a builder of start markers whose dead letters go to a client."""

    def begin(client, config=CONFIG, queue="q"):
        monkeypatch.setattr(dead_letter_writer, "make_producer", lambda _: client)
        keys = MarkerKeys(config, queue.encode(), 4)
        return StartMarkers(config, queue, keys, DeadLetterWriter(config), QueueCounters())

    return begin


def test_a_message_becomes_a_start_marker(make):
    """A message that is due is handed over with its marker, which has the time for which it may be in progress."""
    batch = make(Client()).build([Record(b"payload")])
    (message,) = [delivery.message for delivery in batch.due]
    marker = wire.Marker.FromString(batch.markers[0].value)
    assert (message.payload, message.id, batch.parked) == (b"payload", "3-42", 0)
    assert (marker.value, marker.attempt, marker.redeliver_after_ms) == (b"payload", 1, 60_000)


@pytest.mark.parametrize(("hours", "expected_hours"), [(0.5, 0.5), (1, 1), (30, 1), (10**9, 1)])
def test_no_message_waits_longer_than_the_longest_delay(make, caplog, hours, expected_hours):
    """A time of delivery beyond the longest delay is brought near, and logged."""
    at_ms = time.time_ns() // 10**6 + int(hours * 3_600_000)
    batch = make(Client()).build([Record(sent_headers=[(headers.DELIVER_AT, b"%d" % at_ms)])])
    marker = wire.Marker.FromString(batch.markers[0].value)
    assert batch.parked == 1
    assert marker.redeliver_after_ms == pytest.approx(expected_hours * 3_600_000, abs=30_000)
    assert ("max_delay" in caplog.text) == (hours > 1)


@pytest.mark.parametrize("marker_key", ["message", "queue"])
def test_the_largest_message_that_is_sent_can_be_started(make, marker_key):
    """A payload is refused by its sender or can be started, whatever the queue's name and the key of its markers."""
    config = CONFIG.for_queue(max_message_bytes=3000, marker_key=marker_key)
    queue = "\N{GREEK SMALL LETTER OMEGA}" * 200
    check, payload = PayloadCheck(config, queue), b"x" * 3000
    while payload:
        with suppress(MessageTooLarge):
            check.encode(payload, (), None)
            break
        payload = payload[:-1]
    assert len(make(Client(), config, queue).build([Record(payload)]).due) == 1


@pytest.mark.parametrize("at_once", [False, True])
def test_what_no_topic_takes_does_not_hold_up_the_rest(make, at_once):
    """A message that is too large even for the dead letter topic leaves a letter with its place; others start."""
    client = Client(at_once=at_once)
    large, fitting = Record(b"x" * 5000, [("h", b"1")]), Record(b"next")
    batch = make(client).build([large, fitting])
    ((key, value, letter_headers),) = client.delivered
    letter = headers.read(letter_headers)
    assert (key, value, letter.headers) == (b"q/3-42", b"", ())
    assert "5000 bytes" in letter.reason
    assert "at 3-42 in messages" in letter.reason
    assert [delivery.message.payload for delivery in batch.due] == [b"next"]


def test_what_the_dead_letter_topic_takes_is_kept_whole(make):
    """A message that is too large only for its start marker is a dead letter with payload and headers."""
    client = Client(takes=10_000)
    assert make(client).build([Record(b"x" * 5000, [("h", b"1")])]).due == []
    ((_, value, letter_headers),) = client.delivered
    assert (value, headers.read(letter_headers).headers) == (b"x" * 5000, (("h", b"1"),))


@pytest.mark.parametrize("at_once", [False, True])
def test_any_other_error_leaves_the_batch_to_be_started_again(make, at_once):
    """A dead letter that Kafka refuses for another reason leaves the batch unstarted; the error has the cause."""
    client = Client(KafkaError.TOPIC_AUTHORIZATION_FAILED, at_once=at_once)
    with pytest.raises(NotStarted, match="not settled") as error:
        make(client).build([Record(b"x" * 5000)])
    assert error.value.cause.code() == KafkaError.TOPIC_AUTHORIZATION_FAILED
    assert client.delivered == []


def test_a_letter_after_closing_leaves_no_client(monkeypatch):
    """A letter written after closing, by another thread, is delivered, and its client released."""
    made = []
    monkeypatch.setattr(dead_letter_writer, "make_producer", lambda _: made.append(Client()) or made[-1])
    message = received(b"x")
    writer = DeadLetterWriter(CONFIG)
    writer.write(message, "no", attempts=1, now_ms=0)
    writer.close()
    writer.write(message, "no", attempts=1, now_ms=0)
    assert [len(client.delivered) for client in made] == [1, 1]
    clients = [weakref.ref(client) for client in made]
    with reference_counts_only():
        made.clear()
        assert [client() for client in clients] == [None, None]


def test_a_rejected_message_keeps_its_payload_or_is_not_set_aside(monkeypatch):
    """A rejected message that is too large is not settled: only an unstarted one may become an empty letter."""
    client = Client()
    monkeypatch.setattr(dead_letter_writer, "make_producer", lambda _: client)
    message = received(b"x" * 5000)
    with pytest.raises(SendFailed, match="is not settled"):
        DeadLetterWriter(CONFIG).write(message, "no", attempts=1, now_ms=0)
    assert client.delivered == []
