"""A producer's errors about undelivered messages, with a Kafka client that fails on demand."""

import os

import pytest
from confluent_kafka import KafkaError

from outbox_queue import QueueConfig, QueueError, SendFailed
from outbox_queue.metrics import QueueCounters
from outbox_queue.producing import producer
from outbox_queue.producing.producer import Producer
from outbox_queue.service import QueueService

CONFIG = QueueConfig(bootstrap_servers="nowhere:1")


class Client:
    """A client that reports every message with the next error."""

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
    """A delivery report's view of its message."""

    def __init__(self, value):
        self._value = value

    def value(self):
        return self._value

    def latency(self):
        return 0.0


@pytest.fixture
def client(monkeypatch):
    """Return the client of the next producer."""
    client = Client()
    monkeypatch.setattr(producer, "make_producer", lambda _: client)
    return client


def failed(client, payloads, codes):
    """Return the error of `flush` when these are sent and fail so."""
    sending = Producer(CONFIG, "q", QueueCounters())
    client.failing = [KafkaError(code) for code in codes]
    for payload in payloads:
        sending.send(payload)
    with pytest.raises(SendFailed) as error:
        sending.flush()
    sending.flush()  # a reported failure is not reported again
    return error.value


@pytest.mark.parametrize("code", [KafkaError._MSG_TIMED_OUT, KafkaError._PURGE_INFLIGHT])
def test_what_may_have_arrived_is_not_said_to_be_missing(client, code):
    """A message that was under way when it was given up counts as unconfirmed: to send it again may repeat it."""
    error = failed(client, [b"perhaps", b"never"], [code, KafkaError.MSG_SIZE_TOO_LARGE])
    assert error.undelivered == (b"never",)
    assert error.unconfirmed == 1
    assert sum(error.failures.values()) == 2
    assert "1 of these may have arrived" in str(error)


def test_the_first_failure_is_logged(client, caplog):
    """Without a flush, too, the first failure is logged, and not each of them."""
    failed(client, [b"1", b"2", b"3"], [KafkaError.MSG_SIZE_TOO_LARGE] * 3)
    assert caplog.text.count("was not delivered") == 1


def test_what_is_kept_for_another_try_has_a_bound(client, monkeypatch):
    """A producer that is never flushed keeps a bounded number and size of failed messages."""
    monkeypatch.setattr(producer, "_MOST_KEPT", 3)
    monkeypatch.setattr(producer, "_MOST_KEPT_BYTES", 100)
    error = failed(client, [b"x"] * 5, [KafkaError.MSG_SIZE_TOO_LARGE] * 5)
    assert (len(error.undelivered), sum(error.failures.values())) == (3, 5)
    error = failed(client, [b"x" * 60] * 5, [KafkaError.MSG_SIZE_TOO_LARGE] * 5)
    assert (len(error.undelivered), sum(error.failures.values())) == (1, 5)


@pytest.mark.usefixtures("client")
def test_a_producer_looks_at_no_other_topic(monkeypatch):
    """A producer needs no rights but on the message topic, whose partitions it knows after the start."""
    asked = []
    monkeypatch.setattr(
        "outbox_queue.protocol.topics.ensure_topic", lambda _settings, _kind, topic: asked.append(topic) or 5
    )
    monkeypatch.setattr("outbox_queue.protocol.topics.topic_settings", lambda _settings, topic: asked.append(topic))
    of_queues = QueueService(CONFIG)
    of_queues.queue("q").producer()
    of_queues.queue("other").producer()
    assert asked == ["messages", "messages"]
    assert of_queues.known_message_partitions == 5


def test_a_forked_producer_refuses_to_send(client, monkeypatch):
    """The client's threads do not survive a fork: its messages would never leave the process, without any error."""
    sending = Producer(CONFIG, "q", QueueCounters())
    monkeypatch.setattr(os, "getpid", lambda: -1)
    with pytest.raises(QueueError, match="forked; make one in each process"):
        sending.send(b"x")
    assert client.reports == []
