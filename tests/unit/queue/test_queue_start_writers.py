"""Producers of start markers when they fail: their errors, and their disposal."""

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka import clients as kafka
from outbox_core.kafka import transactions as transaction
from outbox_core.kafka.clients import discard
from outbox_queue import QueueConfig
from outbox_queue.consuming import start_writers as starts
from outbox_queue.consuming.marker_writer import MarkerRecord
from outbox_queue.consuming.start_writers import NotStarted, PlainStartWriter, TransactionalStartWriter, deadline

CONFIG = QueueConfig(bootstrap_servers="nowhere:1")
MARKER = MarkerRecord(0, b"0-1", b"start")


class Client:
    """A producer that is fenced with a message in its queue."""

    def __init__(self):
        self.queued = 0
        self.calls = []
        self.is_open = False

    def __len__(self):
        return self.queued

    def init_transactions(self, _seconds):
        self.calls.append("init")

    def begin_transaction(self):
        if self.is_open:
            raise KafkaException(KafkaError(KafkaError._STATE, "a transaction is open"))
        self.is_open = True
        self.calls.append("begin")

    def produce(self, *_, **__):
        self.queued += 1

    def send_offsets_to_transaction(self, *_):
        raise KafkaException(KafkaError(KafkaError._FENCED, "fenced", fatal=True))

    def abort_transaction(self, _seconds):
        raise KafkaException(KafkaError(KafkaError._FENCED, "fenced", fatal=True))

    def purge(self, **_):
        self.calls.append("purge")

    def poll(self, _seconds):
        self.calls.append("poll")
        self.queued = 0
        raise KafkaException(KafkaError(KafkaError._FATAL, "fenced", fatal=True))

    def flush(self, _seconds):
        raise KafkaException(KafkaError(KafkaError._FATAL, "fenced", fatal=True))


class Consumer:
    """A consumer for which offsets are committed."""

    def consumer_group_metadata(self):
        return None


@pytest.fixture
def clients(monkeypatch):
    """Return the producers that were made, in their order."""
    made = []
    monkeypatch.setattr(starts, "make_producer", lambda _: made.append(Client()) or made[-1])
    monkeypatch.setattr(transaction, "make_producer", lambda _: made.append(Client()) or made[-1])
    return made


def test_a_fenced_producer_is_emptied_before_it_is_dropped(clients, monkeypatch):
    """A fenced producer is purged before it is dropped, as the Kafka client would free its messages twice."""
    monkeypatch.setattr(Client, "flush", lambda *_: 0)
    starting = TransactionalStartWriter(CONFIG, "q", Consumer())
    with pytest.raises(NotStarted, match="fenced") as error:
        starting.write([MARKER], {0: 1}, deadline(5))
    assert error.value.cause.code() == KafkaError._FENCED
    assert clients[0].calls == ["init", "begin", "purge", "purge", "poll"]  # before the abort, which fails, too
    with pytest.raises(NotStarted):
        starting.write([MARKER], {0: 1}, deadline(5))
    assert len(clients) == 2


def test_a_broken_producer_without_transactions_is_emptied_too(clients):
    """After a fatal error the producer is purged, and the next messages are started with another."""
    starting = PlainStartWriter(CONFIG, Consumer())
    for number in range(2):
        with pytest.raises(NotStarted, match="fenced"):
            starting.write([MARKER], {0: 1}, deadline(5))
        assert len(clients) == number + 1
        assert clients[number].calls == ["purge", "poll"]
    starting.close()


def test_messages_are_not_started_while_no_producer_can_be_made(clients, monkeypatch):
    """A producer that cannot be made now, as a token endpoint is away, starts no message, and ends nothing."""
    starting = PlainStartWriter(CONFIG, Consumer())
    with pytest.raises(NotStarted, match="fenced"):
        starting.write([MARKER], {0: 1}, deadline(5))

    def make(_):
        raise KafkaUnavailable("no token")

    with monkeypatch.context() as away:
        away.setattr(starts, "make_producer", make)
        with pytest.raises(NotStarted, match="no token"):
            starting.write([MARKER], {0: 1}, deadline(5))
    with pytest.raises(NotStarted, match="fenced"):
        starting.write([MARKER], {0: 1}, deadline(5))
    assert len(clients) == 2


def test_throwing_away_ends(monkeypatch):
    """A producer that does not release its messages is given up in the end."""
    monkeypatch.setattr(kafka, "_DISCARD_SECONDS", 0.05)
    client = Client()
    client.poll = lambda _: 0
    client.queued = 1
    discard(client)
