"""What a producer says of messages that were not delivered, with a Kafka client that fails on demand."""

import pytest
from confluent_kafka import KafkaError

from outbox_queue import QueueConfig, SendFailed, producer
from outbox_queue.metrics import QueueCounters
from outbox_queue.producer import Producer
from outbox_queue.service import QueueService

CONFIG = QueueConfig(bootstrap_servers="nowhere:1")


class Client:
    """Reports every message with the next error."""

    def __init__(self):
        self.failing = []
        self.reports = []

    def produce(self, _topic, value, _key, *, on_delivery):
        self.reports.append((on_delivery, value))

    def poll(self, _seconds):
        for report, value in self.reports:
            report(self.failing.pop(0), Message(value))
        self.reports.clear()

    def flush(self, seconds):
        self.poll(seconds)
        return 0


class Message:
    """What a delivery report says of its message."""

    def __init__(self, value):
        self._value = value

    def value(self):
        return self._value

    def latency(self):
        return 0.0


@pytest.fixture
def client(monkeypatch):
    """The client of the next producer."""
    client = Client()
    monkeypatch.setattr(producer, "make_producer", lambda _: client)
    return client


def failed(client, payloads, codes):
    """What `flush` raises when these are sent and fail so."""
    sending = Producer(CONFIG, "q", QueueCounters())
    client.failing = [KafkaError(code) for code in codes]
    for payload in payloads:
        sending.send(payload)
    with pytest.raises(SendFailed) as error:
        sending.flush()
    sending.flush()  # what was told is not told again
    return error.value


@pytest.mark.parametrize("code", [KafkaError._MSG_TIMED_OUT, KafkaError._PURGE_INFLIGHT])
def test_what_may_have_arrived_is_not_said_to_be_missing(client, code):
    """A message that was under way when it was given up may be in Kafka: to send it again may repeat it."""
    error = failed(client, [b"perhaps", b"never"], [code, KafkaError.MSG_SIZE_TOO_LARGE])
    assert error.undelivered == (b"never",)
    assert error.unconfirmed == 1
    assert sum(error.failures.values()) == 2
    assert "1 of these may have arrived" in str(error)


def test_the_first_failure_is_logged(client, caplog):
    """Who never flushes hears of failures all the same, and not of each."""
    failed(client, [b"1", b"2", b"3"], [KafkaError.MSG_SIZE_TOO_LARGE] * 3)
    assert caplog.text.count("was not delivered") == 1


def test_what_is_kept_for_another_try_has_a_bound(client, monkeypatch):
    """A producer that is never flushed does not keep all that ever failed, by number or by size."""
    monkeypatch.setattr(producer, "_MOST_KEPT", 3)
    monkeypatch.setattr(producer, "_MOST_KEPT_BYTES", 100)
    error = failed(client, [b"x"] * 5, [KafkaError.MSG_SIZE_TOO_LARGE] * 5)
    assert (len(error.undelivered), sum(error.failures.values())) == (3, 5)
    error = failed(client, [b"x" * 60] * 5, [KafkaError.MSG_SIZE_TOO_LARGE] * 5)
    assert (len(error.undelivered), sum(error.failures.values())) == (1, 5)


@pytest.mark.usefixtures("client")
def test_a_producer_looks_at_no_other_topic(monkeypatch):
    """Rights on the message topic are enough to send; the number of its partitions is known afterwards."""
    asked = []
    monkeypatch.setattr("outbox_queue.topics.ensure_topic", lambda _settings, _kind, topic: asked.append(topic) or 5)
    monkeypatch.setattr("outbox_queue.topics.topic_settings", lambda _settings, topic: asked.append(topic))
    of_queues = QueueService(CONFIG)
    of_queues.queue("q").producer()
    of_queues.queue("other").producer()
    assert asked == ["messages", "messages"]
    assert of_queues.known_message_partitions == 5
