"""Records through a transactional producer: what is left out after a refusal, and what the delivery reports tell."""

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_core.kafka import transactions
from outbox_core.kafka.record_producer import RecordProducer, Reports
from outbox_core.kafka.transactions import Ended
from outbox_core.stores.interface import StoredRecord


class _Client:
    """A client of librdkafka.

    Attributes:
        sent: ids of the values that it took.
        raises: errors by value.
        asked: topics whose partitions it was asked for.
        partitions: by topic those that it knows; None for all.
        cluster: by topic those that there are, or an error.
    """

    def __init__(self):
        self.sent, self.raises, self.asked, self._reports = [], {}, [], []
        self.partitions, self.cluster = {}, {}

    def produce(self, topic, value, key=None, partition=-1, on_delivery=None, *_, **__):
        del key
        if value in self.raises:
            raise self.raises[value]
        if partition >= self.partitions.get(topic, partition + 1):
            raise KafkaException(error("_UNKNOWN_PARTITION"))
        self.sent.append(int(value))
        self._reports.append(on_delivery)

    def list_topics(self, topic, *, timeout):
        del timeout
        self.asked.append(topic)
        count = self.cluster.get(topic, 9)
        if isinstance(count, KafkaException):
            raise count
        if isinstance(count, KafkaError):
            return SimpleNamespace(topics={topic: SimpleNamespace(error=count, partitions={})})
        self.partitions[topic] = count
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=dict.fromkeys(range(count)))})

    def report(self, *errors):
        """Deliver, or fail, the oldest records."""
        for error in errors:
            self._reports.pop(0)(error, SimpleNamespace(partition=lambda: 2))

    def poll(self, _):
        return 0


@pytest.fixture
def client(monkeypatch):
    """Return the client that producers are made of."""
    made = _Client()
    monkeypatch.setattr(transactions, "make_producer", lambda _: made)
    return made


@pytest.fixture
def producer(client):
    """Return a producer of records."""
    del client
    return RecordProducer({"transactional.id": "t"}, id_header="id", outbox_name="box", timeout_seconds=1.0)


def record(identity, key="k", topic="t", partition=-1):
    """Return a record whose value is its id."""
    return StoredRecord(identity, topic, key, b"%d" % identity, None, None, partition, 0)


def error(name):
    """Return an error of Kafka."""
    return KafkaError(getattr(KafkaError, name))


def test_later_records_of_a_refused_ones_key_are_left_out(producer, client):
    """Behind a record that the client refuses no other of its key is sent; other keys and records without one are."""
    client.raises = {b"2": KafkaException(error("MSG_SIZE_TOO_LARGE")), b"4": KafkaException(error("_INVALID_ARG"))}
    rows = [record(1), record(2), record(3), record(4, None), record(5, None), record(6, "l"), record(7, topic="u")]
    sent = producer.send(rows, lambda: False)
    assert client.sent == [1, 5, 6, 7]
    assert [each.id for each in sent.records] == [1, 5, 6, 7]
    assert [(each.record.id, each.alone) for each in sent.refused] == [(2, True), (4, True)]
    assert producer.sent == sent.records


def test_a_broken_producer_ends_the_sending(producer, client):
    """After a fatal error nothing more is handed over, and the producer's end is told."""
    client.raises = {b"2": KafkaException(error("_FENCED"))}
    assert isinstance(producer.send([record(1), record(2), record(3, "l")], lambda: False), Ended)
    assert client.sent == [1]


def test_a_transaction_that_has_failed_blames_no_record(producer, client):
    """Once the transaction has failed the client refuses every record: none of them is bad."""
    client.raises = {b"2": KafkaException(error("_STATE"))}
    sent = producer.send([record(1), record(2), record(3, "l")], lambda: False)
    assert ([each.id for each in sent.records], sent.refused) == ([1], [])


def test_reports_tell_the_failures_that_are_no_consequences(producer, client):
    """Arrivals and failures are told; records that were purged with their transaction are not blamed."""
    reports = Reports()
    producer.send([record(1), record(2), record(3)], lambda: False, reports)
    client.report(None, error("INVALID_RECORD"), error("_PURGE_QUEUE"))
    assert [each.id for each in reports.arrived] == [1]
    assert [(each.record.id, each.alone, each.partition) for each in reports.failures] == [(2, False, 2)]


def test_named_partitions_are_learned_before_they_are_searched_for(producer, client):
    """A search for bad records has the client learn the topics that records name partitions of, so that it refuses."""
    rows = [record(1, topic="a", partition=3), record(2, topic="b")]
    producer.send(rows, lambda: False)
    assert client.asked == []
    producer.send(rows, lambda: False, Reports())
    assert client.asked == ["a"]


def test_partition_that_the_client_does_not_know_is_asked_for(producer, client):
    """A record is refused only for a partition that the cluster does not have; each topic is asked for once."""
    client.partitions, client.cluster = {"t": 1, "u": 1}, {"t": 3}
    rows = [record(n, f"k{n}", "t", partition=n) for n in range(6)]
    sent = producer.send(rows, lambda: False)
    assert (client.sent, client.asked) == ([0, 1, 2], ["t"])
    assert [(each.record.id, each.error.name()) for each in sent.refused] == [
        (n, "_UNKNOWN_PARTITION") for n in (3, 4, 5)
    ]
    client.partitions, client.cluster = {"t": 3}, {"t": 6}
    assert producer.send(rows[3:], lambda: False).refused == []


@pytest.mark.parametrize("name", ["_TIMED_OUT", "UNKNOWN_TOPIC_OR_PART"])
def test_partition_that_cannot_be_asked_for_is_not_the_records_fault(producer, client, name):
    """Without an answer about a topic its error is the record's; after a silence no other topic is asked for."""
    told = error(name)
    client.partitions = {"t": 1, "u": 1}
    client.cluster = {"t": KafkaException(told) if name == "_TIMED_OUT" else told}
    sent = producer.send([record(1, partition=2), record(2, "l", "u", partition=2)], lambda: False)
    refused = {1, 2} if name == "_TIMED_OUT" else {1}
    assert {each.record.id for each in sent.refused if each.error.name() == name} == refused
    assert client.asked == (["t"] if name == "_TIMED_OUT" else ["t", "u"])


def test_a_full_queue_is_waited_for_until_it_is_given_up(producer, client):
    """While the client's queue is full the record is tried again, until the leadership is over."""
    client.raises = {b"2": BufferError("queue full")}
    answers = [False, False, True]
    assert producer.send([record(1), record(2)], lambda: answers.pop(0)) is None
    assert answers == []
