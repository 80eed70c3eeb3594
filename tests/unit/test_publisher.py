"""The publisher turns rows into produce calls and collects what became of them."""

from collections import deque

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_core.harvest.publisher import Failure, Publisher


class _Producer:
    """Keeps what it is given; `report` delivers or fails the oldest at the next poll."""

    def __init__(self):
        self.sent = deque()
        self.calls = []
        self.raises = None
        self.raises_on_poll = None
        self.reports = []

    def produce(self, topic, value, key, partition, *, on_delivery, headers):
        if self.raises is not None:
            raise self.raises
        self.calls.append((topic, key, value, partition, headers))
        self.sent.append(on_delivery)

    def report(self, error=None):
        self.reports.append((self.sent.popleft(), error))

    def poll(self, _timeout):
        if self.raises_on_poll is not None:
            error, self.raises_on_poll = self.raises_on_poll, None
            raise error
        for on_delivery, error in self.reports:
            on_delivery(error, None)
        count, self.reports = len(self.reports), []
        return count

    flush = poll

    def purge(self, *, in_queue, in_flight, blocking):
        assert (in_queue, in_flight, blocking) == (True, False, False)
        while self.sent:
            self.report(KafkaError(KafkaError._PURGE_QUEUE))


def _record(identity=1, key="k", value=b"v", *, header_keys=None, header_values=None, partition=-1):
    return (identity, "t", key, value, header_keys, header_values, partition, 99)


@pytest.fixture
def producers():
    """The producers that were made."""
    return []


@pytest.fixture
def publisher(producers):
    """A publisher of the outbox `box`."""

    def make():
        producers.append(_Producer())
        return producers[-1]

    return Publisher(make, id_header="outbox-id", outbox_name="b\u00f6x")


def test_what_is_sent(publisher, producers):
    """Topic, key, value, partition and headers go out as they are, the id header last."""
    publisher.send(_record(7, None, None, header_keys=["a", "a"], header_values=[b"1", None], partition=3), 0.0)
    publisher.send(_record(2**62, "k", "text"), 0.0)
    assert producers[0].calls == [
        ("t", None, None, 3, [("a", b"1"), ("a", None), ("outbox-id", "b\u00f6x:7".encode())]),
        ("t", "k", "text", -1, [("outbox-id", f"b\u00f6x:{2**62}".encode())]),
    ]


def test_no_id_header():
    """Without a name there is no id header."""
    producer = _Producer()
    publisher = Publisher(lambda: producer, id_header="", outbox_name="box")
    publisher.send(_record(), 0.0)
    assert producer.calls[0][4] == []


def test_reports(publisher, producers):
    """Delivered and failed records are handed out once each, in the order of their reports."""
    records = [_record(identity) for identity in range(4)]
    for position, record in enumerate(records):
        assert publisher.send(record, float(position // 2))
    assert publisher.in_flight == 4
    timed_out = KafkaError(KafkaError._MSG_TIMED_OUT)
    for error in (None, timed_out, None):
        producers[0].report(error)
    publisher.poll(0)
    assert publisher.in_flight == 1
    assert publisher.take_delivered() == [records[0], records[2]]
    assert [failure[:2] for failure in publisher.take_failed()] == [(records[1], timed_out)]
    assert publisher.take_send_times() == {0.0: 1, 1.0: 1}
    assert publisher.take_delivered() == publisher.take_failed() == []
    assert not publisher.take_send_times()


def test_refused_record_is_a_failed_one(publisher, producers):
    """A record that `produce` refuses counts as sent and failed, and is not in flight."""
    error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    producers[0].raises = KafkaException(error)
    assert publisher.send(_record(5), 0.0)
    assert publisher.in_flight == 0
    assert publisher.take_failed() == [Failure(_record(5), error, alone=True)]


@pytest.mark.parametrize(
    "fields", [{"header_keys": ["a", "b"], "header_values": [b"1"]}, {"header_values": [b"1"]}], ids=str
)
def test_row_that_is_no_message(publisher, producers, fields):
    """A row whose headers do not pair up fails like a refused record, and is not sent without them."""
    assert publisher.send(_record(3, **fields), 0.0)
    ((failed, error, alone, _),) = publisher.take_failed()
    assert alone
    assert failed[0] == 3
    assert error.code() == KafkaError._INVALID_ARG
    assert publisher.in_flight == 0
    assert not producers[0].calls


def test_full_queue(publisher, producers):
    """A record that the producer has no room for is not sent and not failed."""
    producers[0].raises = BufferError()
    assert not publisher.send(_record(), 0.0)
    assert (publisher.in_flight, publisher.take_failed()) == (0, [])


@pytest.mark.parametrize("told_by", ["poll", "produce", "report"])
def test_fatal_error_replaces_the_producer(publisher, producers, told_by, caplog):
    """However a fatal error shows, it is not raised, and the producer is replaced once nothing is in flight."""
    publisher.send(_record(1), 0.0)
    if told_by == "poll":
        fatal = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "lost its place", True)
        producers[0].raises_on_poll = KafkaException(fatal)
        publisher.poll(0)
        assert "lost its place" in caplog.text
        producers[0].report(KafkaError(KafkaError._PURGE_QUEUE))
    elif told_by == "produce":
        producers[0].raises = KafkaException(KafkaError(KafkaError._FATAL))
        publisher.send(_record(2), 0.0)
        producers[0].report(KafkaError(KafkaError._PURGE_QUEUE))
    else:
        producers[0].report(KafkaError(KafkaError.INVALID_PRODUCER_EPOCH, "", True))
    publisher.push(0)
    assert publisher.in_flight == 0
    publisher.renew_if_broken()
    assert len(producers) == 2
    assert publisher.send(_record(3), 0.0)
    assert len(producers[1].calls) == 1


def test_producer_stays_after_other_errors(publisher, producers):
    """An error that is not fatal is no reason for another producer."""
    publisher.send(_record(), 0.0)
    producers[0].report(KafkaError(KafkaError._MSG_TIMED_OUT))
    publisher.poll(0)
    publisher.renew_if_broken()
    assert len(producers) == 1


def test_other_errors_of_poll_are_raised(publisher, producers):
    """Only fatal errors are expected from `poll`; anything else is not hidden."""
    producers[0].raises_on_poll = KafkaException(KafkaError(KafkaError._INVALID_ARG))
    with pytest.raises(KafkaException):
        publisher.poll(0)


def test_settle_leaves_nothing_in_flight(publisher, producers):
    """Settling fails what is still queued and waits for the reports of all."""
    for identity in range(3):
        publisher.send(_record(identity), 0.0)
    producers[0].report()
    publisher.settle()
    assert publisher.in_flight == 0
    assert len(publisher.take_delivered()) == 1
    assert len(publisher.take_failed()) == 2
