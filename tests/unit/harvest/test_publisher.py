"""The publisher: it turns rows into produce calls and collects their outcomes."""

from collections import deque
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_core.harvest.at_least_once.publisher import Publisher
from outbox_core.harvest.failures.policy import new_hold
from outbox_core.kafka.errors import ErrorKind
from outbox_core.kafka.messages import ERROR_HEADER, ORIGIN_HEADER, Failure, dead_letter, partition_of
from outbox_core.kafka.row_topics import RowTopics
from outbox_core.stores.interface import StoredRecord


class _Producer:
    """A producer that keeps its records; `report` delivers or fails the oldest at the next poll."""

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
        assert (in_queue, in_flight, blocking) == (True, True, False)
        while self.sent:
            self.report(KafkaError(KafkaError._PURGE_QUEUE))


def _record(identity=1, key="k", value=b"v", *, topic="t", header_keys=None, header_values=None, partition=-1):
    return StoredRecord(identity, topic, key, value, header_keys, header_values, partition, 99)


@pytest.fixture
def producers():
    """Return the list of the producers that were made."""
    return []


@pytest.fixture
def publisher(producers):
    """Return a publisher of the outbox `box`."""

    def make(_):
        producers.append(_Producer())
        return producers[-1]

    return Publisher(make, id_header="outbox-id", outbox_name="b\u00f6x")


def test_what_is_sent(publisher, producers):
    """Topic, key, value, partition and headers go out as they are, the id header last."""
    publisher.send([_record(7, None, None, header_keys=["a", "a"], header_values=[b"1", None], partition=3)], 0.0)
    publisher.send([_record(2**62, "k", "text")], 0.0)
    assert producers[0].calls == [
        ("t", None, None, 3, [("a", b"1"), ("a", None), ("outbox-id", "b\u00f6x:7".encode())]),
        ("t", "k", "text", -1, [("outbox-id", f"b\u00f6x:{2**62}".encode())]),
    ]


def test_no_id_header():
    """Without a name there is no id header."""
    producer = _Producer()
    publisher = Publisher(lambda _: producer, id_header="", outbox_name="box")
    publisher.send([_record()], 0.0)
    assert producer.calls[0][4] == []


def test_reports(publisher, producers):
    """Each delivered or failed record is handed out once, in the order of the reports."""
    records = [_record(identity) for identity in range(4)]
    for position, record in enumerate(records):
        assert publisher.send([record], float(position // 2))
    assert publisher.in_flight == 4
    timed_out = KafkaError(KafkaError._MSG_TIMED_OUT)
    for error in (None, timed_out, None):
        producers[0].report(error)
    publisher.poll(0)
    assert publisher.in_flight == 1
    assert publisher.take_delivered() == [records[0], records[2]]
    assert [failure[:2] for failure in publisher.take_failed()] == [(records[1], timed_out)]
    assert publisher.take_send_times() == [(0.0, 1), (1.0, 1)]
    assert publisher.take_delivered() == publisher.take_failed() == []
    assert not publisher.take_send_times()


def test_what_waits_for_room(publisher, producers):
    """Records that later ones overtook do not count, but a record that goes alone overtakes nothing."""
    for identity in range(3):
        publisher.send([_record(identity), _record(identity)], float(identity))
    producers[0].sent.rotate(-4)
    publisher.send([_record(4)], 3.0, alone=True)
    producers[1].report()
    publisher.poll(0)
    assert (publisher.take_send_times(), publisher.queued) == ([(3.0, 1)], 6)
    for sent_at, in_flight, queued in ((2.0, 5, 3), (2.0, 4, 3), (0.0, 3, 3), (0.0, 2, 2)):
        producers[0].report()
        publisher.poll(0)
        publisher.take_delivered()
        assert publisher.take_send_times() == [(sent_at, 1)]
        assert (publisher.in_flight, publisher.queued) == (in_flight, queued)


def test_refused_record_is_a_failed_one(publisher, producers):
    """A record that `produce` refuses counts as sent and failed, and is not in flight."""
    error = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
    producers[0].raises = KafkaException(error)
    assert publisher.send([_record(5)], 0.0)
    assert publisher.in_flight == 0
    assert publisher.take_failed() == [Failure(_record(5), error, alone=True)]


@pytest.mark.parametrize(
    ("column", "fields"),
    [
        ("kafka_header_keys", {"header_keys": ["a", "b"], "header_values": [b"1"]}),
        ("kafka_header_keys", {"header_values": [b"1"]}),
        ("kafka_header_keys", {"header_keys": [None], "header_values": [b"1"]}),
        ("kafka_header_keys", {"header_keys": [["a"]], "header_values": [b"1"]}),
        ("kafka_partition", {"partition": -2}),
        ("kafka_partition", {"partition": -(2**31)}),
        ("kafka_topic", {"topic": "no topic"}),
        ("kafka_topic", {"topic": ""}),
        ("kafka_topic", {"topic": "__consumer_offsets"}),
        ("kafka_topic", {"topic": "other.neli"}),
        ("kafka_topic", {"topic": "other.manifests"}),
        ("kafka_topic", {"topic": "other.relay-manifests"}),
    ],
    ids=str,
)
def test_row_that_is_no_message(publisher, producers, column, fields):
    """A row that is no message fails like a refused record, with its column named, and is not sent."""
    assert publisher.send([_record(3, **fields)], 0.0)
    (failure,) = publisher.take_failed()
    assert failure.alone
    assert failure.record[0] == 3
    assert failure.kind is ErrorKind.POISON
    assert new_hold(failure, "", dead_letter=False).error.startswith(column)
    assert publisher.in_flight == 0
    assert not producers[0].calls


@pytest.mark.parametrize(
    ("fields", "code", "column"),
    [
        ({"key": "k" * 500}, KafkaError.MSG_SIZE_TOO_LARGE, "kafka_key"),
        ({"value": "\u00fc" * 300, "key": "k" * 500}, KafkaError.MSG_SIZE_TOO_LARGE, "kafka_value"),
        ({"header_keys": ["a" * 500], "header_values": [b"1"]}, KafkaError.MSG_SIZE_TOO_LARGE, "kafka_header_keys"),
        ({"header_keys": ["a"], "header_values": ["1" * 500]}, KafkaError.INVALID_MSG_SIZE, "kafka_header_values"),
        ({"partition": 7}, KafkaError._UNKNOWN_PARTITION, "kafka_partition"),
        ({"key": None}, KafkaError.INVALID_RECORD, "kafka_key"),
        ({}, KafkaError.TOPIC_EXCEPTION, "kafka_topic"),
        ({"partition": 2**31}, KafkaError._INVALID_ARG, "kafka_partition"),
        ({"value": 5}, KafkaError._INVALID_ARG, "kafka_value"),
        ({"key": 5}, KafkaError._INVALID_ARG, "kafka_key"),
        ({"topic": 5}, KafkaError._INVALID_ARG, "kafka_topic"),
        ({"header_keys": ["a"], "header_values": [[]]}, KafkaError._INVALID_ARG, "kafka_header_values"),
    ],
    ids=str,
)
def test_hold_names_the_column(fields, code, column):
    """The error of a hold begins with the column that is at fault."""
    failure = Failure(_record(**fields), KafkaError(code, "what Kafka said"), alone=True)
    told = new_hold(failure, "", dead_letter=False).error
    assert told.startswith(column)
    assert "what Kafka said" in told


def test_own_topics_are_for_the_outbox_alone():
    """A row cannot name a topic that its outbox is run through; a dead letter goes to the dead-letter topic."""
    producer = _Producer()
    topics = RowTopics(("elections", "manifests"), dead_letters="letters")
    publisher = Publisher(lambda _: producer, id_header="", outbox_name="box", topics=topics)
    letter = dead_letter(_record(1), "letters", "boo")
    for record in (letter, _record(2, topic="letters"), _record(3, topic="elections"), _record(4, topic="manifests")):
        publisher.send([record], 0.0)
    publisher.send([letter], 0.0)
    assert [call[0] for call in producer.calls] == ["letters", "letters"]
    assert [failure.record[0] for failure in publisher.take_failed()] == [2, 3, 4]


def test_topics_that_are_remembered_are_bounded(monkeypatch):
    """The memory of topics is bounded, even if each row names another one."""
    monkeypatch.setattr("outbox_core.kafka.row_topics._REMEMBERED_TOPICS", 10)
    topics = RowTopics()
    for number in range(95):
        topics.check(_record(topic=f"t{number}"))
    assert len(topics.known) <= 10


def test_partition_of_a_row():
    """A partition of NULL is chosen by the key, an empty key has one partition, and a named partition counts."""
    assert partition_of(_record()) == -1
    assert partition_of(_record(key=None)) == -1
    assert partition_of(_record(key="")) == 0
    assert partition_of(_record(key="", partition=3)) == 3
    assert partition_of(_record(partition=2**31 - 1)) == 2**31 - 1


def test_partition_that_is_not_there():
    """A missing partition is the record's fault if the row names it, and the topic's if not."""
    error = KafkaError(KafkaError._UNKNOWN_PARTITION)
    assert Failure(_record(partition=9), error).kind is ErrorKind.POISON
    assert Failure(_record(partition=-5), error).kind is ErrorKind.POISON
    assert Failure(_record(), error).kind is ErrorKind.UNKNOWN_TOPIC


@pytest.mark.parametrize(
    ("answer", "kind", "alone"), [(3, "poison", True), (8, "poison", False), (None, "transient", True)]
)
def test_partition_is_asked_for_before_its_row_is_blamed(publisher, producers, answer, kind, alone):
    """A refused row is tried again if the cluster has its partition, and never held without an answer."""
    asked = []

    def list_topics(topic, timeout):
        del timeout
        asked.append(topic)
        if answer is None:
            raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions=range(answer))})

    producers[0].list_topics = list_topics
    producers[0].raises = KafkaException(KafkaError(KafkaError._UNKNOWN_PARTITION))
    publisher.send([_record(n, partition=7) for n in range(50)], 0.0)
    failed = publisher.take_failed()
    assert [(failure.kind.value, failure.alone) for failure in failed] == [(kind, alone)] * 50
    assert asked == ["t"]


def test_forged_ids_are_left_out(publisher, producers):
    """The harvester's id header replaces those of the row, under the default name and under the configured one."""
    headers = {"header_keys": ["outbox-id", "a", "outbox-id"], "header_values": [b"box:1", b"1", None]}
    publisher.send([_record(7, **headers)], 0.0)
    assert producers[0].calls[0][4] == [("a", b"1"), ("outbox-id", "b\u00f6x:7".encode())]
    producer = _Producer()
    renamed = Publisher(lambda _: producer, id_header="x-id", outbox_name="box")
    renamed.send([_record(7, header_keys=["outbox-id", "x-id"], header_values=[b"box:1", b"box:2"])], 0.0)
    assert producer.calls[0][4] == [("x-id", b"box:7")]
    without = Publisher(lambda _: producer, id_header="", outbox_name="box")
    without.send([_record(7, header_keys=["outbox-id", ""], header_values=[b"box:1", b"1"])], 0.0)
    assert producer.calls[1][4] == [("", b"1")]


def test_dead_letter_tells_itself_where_it_comes_from():
    """A dead letter leaves out headers of the row that are named like its own."""
    row = _record(header_keys=[ORIGIN_HEADER, "a", ERROR_HEADER], header_values=[b"elsewhere", b"1", b"fine"])
    letter = dead_letter(row, "letters", "boo")
    assert list(zip(letter.header_keys, letter.header_values, strict=True)) == [
        ("a", b"1"),
        (ORIGIN_HEADER, "t"),
        (ERROR_HEADER, "boo"),
    ]


def test_dead_letter_of_nested_headers_is_refused():
    """A dead letter whose header names are an array of two dimensions is made, and refused like its record."""
    producer = _Producer()
    publisher = Publisher(lambda _: producer, id_header="", outbox_name="box")
    row = _record(header_keys=[["a", "b"]], header_values=[[b"1", b"2"]])
    publisher.send([dead_letter(row, "letters", "boo")], 0.0)
    (failure,) = publisher.take_failed()
    assert not producer.calls
    assert failure.error.str() == "kafka_header_keys: not every name is a text"


@pytest.mark.parametrize("number", [99_999, 100_000])
def test_headers_that_no_consumer_could_read_are_refused(number):
    """A record has no more headers than librdkafka's consumers read, the id header among them."""
    producer = _Producer()
    publisher = Publisher(lambda _: producer, id_header="outbox-id", outbox_name="box")
    publisher.send([_record(header_keys=["a"] * number, header_values=[b""] * number)], 0.0)
    errors = [failure.error.str() for failure in publisher.take_failed()]
    assert errors == (
        []
        if number < 100_000
        else ["kafka_header_keys: 100,000 names; of so many headers librdkafka's consumers read none"]
    )
    assert len(producer.calls) == (number < 100_000)


def test_full_queue(publisher, producers):
    """A record for which the producer has no room is neither sent nor failed."""
    producers[0].raises = BufferError()
    assert not publisher.send([_record()], 0.0)
    assert (publisher.in_flight, publisher.take_failed()) == (0, [])


@pytest.mark.parametrize("told_by", ["poll", "produce", "report"])
def test_fatal_error_replaces_the_producer(publisher, producers, told_by, caplog):
    """A fatal error is not raised, from whichever call, and the producer is replaced once none is in flight."""
    publisher.send([_record(1)], 0.0)
    if told_by == "poll":
        fatal = KafkaError(KafkaError.OUT_OF_ORDER_SEQUENCE_NUMBER, "lost its place", True)
        producers[0].raises_on_poll = KafkaException(fatal)
        publisher.poll(0)
        assert "lost its place" in caplog.text
        producers[0].report(KafkaError(KafkaError._PURGE_QUEUE))
    elif told_by == "produce":
        producers[0].raises = KafkaException(KafkaError(KafkaError._FATAL))
        publisher.send([_record(2)], 0.0)
        producers[0].report(KafkaError(KafkaError._PURGE_QUEUE))
    else:
        producers[0].report(KafkaError(KafkaError.INVALID_PRODUCER_EPOCH, "", True))
    publisher.push(0)
    assert publisher.in_flight == 0
    publisher.renew_if_broken()
    assert len(producers) == 2
    assert publisher.send([_record(3)], 0.0)
    assert len(producers[1].calls) == 1


def test_producer_stays_after_other_errors(publisher, producers):
    """An error that is not fatal keeps the producer."""
    publisher.send([_record()], 0.0)
    producers[0].report(KafkaError(KafkaError._MSG_TIMED_OUT))
    publisher.poll(0)
    publisher.renew_if_broken()
    assert len(producers) == 1


def test_other_errors_of_poll_are_raised(publisher, producers):
    """An error of `poll` that is not fatal is raised."""
    producers[0].raises_on_poll = KafkaException(KafkaError(KafkaError._INVALID_ARG))
    with pytest.raises(KafkaException):
        publisher.poll(0)


def test_settle_leaves_nothing_in_flight(publisher, producers):
    """Cancelling all fails the queued records and waits for the reports of all."""
    for identity in range(3):
        publisher.send([_record(identity)], 0.0)
    producers[0].report()
    publisher.cancel_all()
    assert publisher.in_flight == 0
    assert len(publisher.take_delivered()) == 1
    assert len(publisher.take_failed()) == 2


def test_other_limits_need_another_producer():
    """New limits take effect with a new producer, made when none is in flight; with the next unbatched one, too."""
    made, alone = [], []

    def maker(told):
        def make(limits):
            told.append(limits)
            return _Producer()

        return make

    publisher = Publisher(maker(made), maker(alone), id_header="", outbox_name="box")
    for limits in ({}, {"batch.size": 65_536}, {"batch.size": 65_536}, {"delivery.timeout.ms": 750}, {}):
        assert publisher.fit(limits)
        publisher.send([_record()], 0.0, alone=True)
        assert not publisher.fit({"batch.size": 1})
        publisher.cancel_all()
    assert made == [{}, {"batch.size": 65_536}, {"delivery.timeout.ms": 750}, {}]
    assert alone == made
