"""Markers that cannot be delivered are tried again, with a Kafka client that fails on demand."""

import time
import weakref

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_queue import QueueClosed, QueueConfig
from outbox_queue.consuming import marker_writer as markers
from outbox_queue.consuming.marker_writer import MarkerKeys, MarkerRecord, MarkerWriter
from tests.resources import reference_counts_only

END = MarkerRecord(3, b"0-1", b"end")
CONFIG = QueueConfig(bootstrap_servers="nowhere:1")


class Report:
    """A delivery report's view of its record."""

    def __init__(self, record):
        self.record = record

    def partition(self):
        return self.record.partition

    def key(self):
        return self.record.key

    def value(self):
        return self.record.value


class Client:
    """A client that takes records, and raises or reports the given errors."""

    def __init__(self):
        self.raising = []
        self.failing = []
        self.delivered = []
        self.reports = []
        self.is_purged = False
        self.is_stuck = False

    def produce(self, _topic, value, key, partition, on_delivery):
        if self.raising:
            raise self.raising.pop(0)
        record = MarkerRecord(partition, key, value)
        if self.is_stuck:
            self.reports.append((on_delivery, KafkaError(KafkaError._PURGE_INFLIGHT), record))
        elif self.failing:
            self.reports.append((on_delivery, self.failing.pop(0), record))
        else:
            self.delivered.append(record)

    def poll(self, _seconds):
        if self.is_stuck:
            return
        for on_delivery, error, record in self.reports:
            on_delivery(error, Report(record))
        self.reports.clear()

    def flush(self, seconds):
        self.poll(seconds)
        return len(self.reports) if self.is_stuck else 0

    def purge(self):
        self.is_purged, self.is_stuck = True, False


@pytest.fixture
def clients(monkeypatch):
    """Return the clients that a writer makes, in their order."""
    made = []

    def make(_settings):
        made.append(Client())
        return made[-1]

    monkeypatch.setattr(markers, "make_producer", make)
    return made


def test_a_full_queue_is_waited_for(clients):
    """A marker that finds the client's queue full is produced later."""
    writer = MarkerWriter(CONFIG)
    clients[0].raising = [BufferError(), BufferError()]
    writer.write(END)
    writer.retry_failed()
    assert clients[0].delivered == []
    writer.retry_failed()
    assert clients[0].delivered == [END]


def test_an_undelivered_marker_is_produced_again(clients):
    """A marker whose delivery has failed is produced to the same partition, until it is delivered."""
    writer = MarkerWriter(CONFIG)
    clients[0].failing = [KafkaError(KafkaError._MSG_TIMED_OUT)] * 2
    writer.write(END)
    assert writer.flush(30) == 0
    assert clients[0].delivered == [END]


@pytest.mark.parametrize("is_reported", [False, True])
def test_a_marker_that_is_too_large_is_given_up(clients, caplog, is_reported):
    """A marker that Kafka, or its client, will never take is given up."""
    writer = MarkerWriter(CONFIG)
    error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    if is_reported:
        clients[0].failing = [error]
    else:
        clients[0].raising = [KafkaException(error)]
    writer.write(END)
    assert writer.flush(30) == 0
    assert clients[0].delivered == []
    assert "given up" in caplog.text


def test_an_undelivered_marker_is_given_up_once_it_is_not_wanted(clients):
    """An undelivered keep-alive is given up once its message is settled, as it would undo that."""
    writer = MarkerWriter(CONFIG)
    wanted = [False, True]
    clients[0].failing = [KafkaError(KafkaError._MSG_TIMED_OUT)] * 2
    writer.write(END, lambda: wanted[-1])
    writer.retry_failed()
    assert len(clients[0].reports) == 1  # it is under way again
    wanted.pop()
    writer.retry_failed()
    assert writer.flush(30) == 0
    assert clients[0].delivered == []


def test_a_client_that_cannot_go_on_is_replaced(clients):
    """After a fatal error a new client delivers the old one's markers, and the later ones."""
    writer = MarkerWriter(CONFIG)
    clients[0].failing = [KafkaError(KafkaError._MSG_TIMED_OUT)]
    writer.write(END)
    clients[0].raising = [KafkaException(KafkaError(KafkaError._FATAL, "fenced", fatal=True))]
    writer.write(END._replace(value=b"other"))
    writer.retry_failed()
    assert clients[0].is_purged
    assert {record.value for record in clients[1].delivered} == {b"end", b"other"}


def test_flushing_ends_in_time(clients):
    """A flush ends in time, and returns the number of undelivered markers."""
    writer = MarkerWriter(CONFIG)
    clients[0].failing = [KafkaError(KafkaError._MSG_TIMED_OUT)] * 1_000_000
    writer.write(END)
    began = time.monotonic()
    assert writer.flush(0.1) == 1
    assert time.monotonic() - began < 30


def test_markers_that_fail_at_once_are_tried_with_pauses(clients, caplog):
    """A topic that is gone refuses each try at once: the log has one line of it, and a flush does not spin."""
    writer = MarkerWriter(CONFIG)
    tries = 1_000_000
    clients[0].raising = [KafkaException(KafkaError(KafkaError._UNKNOWN_TOPIC))] * tries
    writer.write(END)
    for _ in range(3):
        writer.retry_failed()
    assert writer.flush(0.3) == 1
    assert tries - len(clients[0].raising) < 20
    assert len(caplog.records) == 1


@pytest.mark.parametrize("is_delivered", [True, False])
def test_closing_lets_go_of_the_client(clients, is_delivered):
    """A closed writer keeps no client even while it is referred to; undelivered markers are counted."""
    writer = MarkerWriter(CONFIG)
    clients[0].failing = [] if is_delivered else [KafkaError(KafkaError._MSG_TIMED_OUT)] * 1_000_000
    client = weakref.ref(clients[0])
    writer.write(END)
    clients.clear()
    with reference_counts_only():
        assert writer.close(0.1) == (0 if is_delivered else 1)
        assert client() is None
    with pytest.raises(QueueClosed, match="is redelivered"):
        writer.write(END)


def test_closing_takes_back_what_is_under_way(clients, caplog):
    """Closing purges markers under way, whose reports might never come, and does not log another try."""
    writer = MarkerWriter(CONFIG)
    client = clients[0]
    client.is_stuck = True
    writer.write(END)
    assert writer.close(0.01) == 1
    assert client.is_purged
    assert "retrying" not in caplog.text


def test_keys_of_markers():
    """A key by message is its place, and has one partition; one by queue has the partition of Go's partitioner."""
    by_message = MarkerKeys(CONFIG, b"emails", 4)
    assert by_message.key((3, 42)) == b"3-42"
    assert {by_message.partition(b"3-%d" % n) for n in range(100)} == {0, 1, 2, 3}
    by_queue = MarkerKeys(CONFIG.for_queue(marker_key="queue"), b"emails", 4)
    assert by_queue.key((3, 42)) == b"emails"
    assert by_queue.partition(b"emails") == -1
