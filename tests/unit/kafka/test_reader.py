"""The reader of partitions: its ends, and offsets that do not count as ends."""

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka import reader
from outbox_core.kafka.reader import PartitionReader


class Answer:
    """A record, or with a code an error of the client."""

    def __init__(self, partition, offset, code=None, topic="t"):
        self._topic, self._partition, self._offset = topic, partition, offset
        self._error = None if code is None else KafkaError(code)

    def topic(self):
        return self._topic

    def partition(self):
        return self._partition

    def offset(self):
        return self._offset

    def error(self):
        return self._error


def eof(partition, offset):
    """Return the end of a partition, as a broker reports it."""
    return Answer(partition, offset, KafkaError._PARTITION_EOF)


class Client:
    """A consumer that gives these answers, and then none; a call takes a second."""

    def __init__(self, monkeypatch, answers):
        self._answers, self._time = answers, 0.0
        self.assigned = []
        monkeypatch.setattr(reader.time, "monotonic", lambda: self._time)

    def assign(self, places):
        self.assigned = [place.partition for place in places]

    def consume(self, most, _):
        self._time += 1
        answers, self._answers = self._answers[:most], self._answers[most:]
        return answers


def _raise(error, _):
    raise KafkaException(error)


def _unfinished(left):
    raise TimeoutError(sorted(left))


@pytest.fixture
def read(monkeypatch):
    """Read answers up to ends, by partition; return partition and offset of each record."""

    def read(answers, ends, starts=None, on_error=_raise, **more):
        client = Client(monkeypatch, answers)
        places = [TopicPartition("t", number, (starts or {}).get(number, 0)) for number in ends]
        found = PartitionReader(
            *(client, places, {("t", number): end for number, end in ends.items()}),
            on_error=on_error,
            on_silence=_unfinished,
            silence_seconds=5,
            **more,
        )
        read.assigned = client.assigned
        result = [(message.partition(), message.offset()) for messages in found for message in messages]
        read.assigned = client.assigned
        return result

    return read


@pytest.mark.parametrize("at_once", [1, 10])
def test_a_partition_ends_with_its_last_record_or_behind_it(read, at_once):
    """Reading ends with the last record or behind it: it does not wait for holes, and drops later records."""
    answers = [Answer(0, 0), Answer(1, 3), Answer(0, 1), eof(1, 9), Answer(1, 12)]
    assert read(answers, {0: 2, 1: 9}, at_once=at_once) == [(0, 0), (1, 3), (0, 1)]
    assert read([Answer(0, 0), Answer(0, 7)], {0: 5}, at_once=at_once) == [(0, 0)]


def test_an_early_end_is_no_end(read):
    """An end reported too early, by a broker that was cut off or for an open transaction, does not count."""
    assert read([Answer(0, 0), eof(0, 1), Answer(0, 1)], {0: 2}) == [(0, 0), (0, 1)]
    with pytest.raises(TimeoutError, match="'t', 0"):
        read([Answer(0, 0), eof(0, 1)], {0: 2})


def test_nothing_is_read_where_nothing_is_wanted(read):
    """A partition whose end is not behind its start is not even assigned."""
    assert read([Answer(1, 5)], {0: 0, 1: 6, 2: 4}, starts={1: 5, 2: 4}) == [(1, 5)]
    assert read.assigned == [1]
    assert read([], {}) == []


@pytest.mark.parametrize("offset", [None, -1001])
def test_an_unknown_offset_is_an_error(read, offset):
    """A record without an offset is an error: an offset of 0 would mean that all records are still to come."""
    with pytest.raises(KafkaUnavailable, match="offset"):
        read([Answer(0, offset)], {0: 2})


def test_errors_are_the_callers_to_judge(read):
    """An error is raised, unless `on_error` lets the reader go on."""
    answers = [Answer(0, None, KafkaError._TRANSPORT), Answer(0, 0)]
    with pytest.raises(KafkaException):
        read(answers, {0: 1})
    assert read(answers, {0: 1}, on_error=lambda *_: None) == [(0, 0)]


def test_a_topic_can_be_left_out_while_it_is_read(monkeypatch):
    """A topic that may not be read can be skipped, and does not hold up the others."""
    answers = [Answer(0, None, KafkaError.TOPIC_AUTHORIZATION_FAILED, topic="u"), Answer(0, 0, topic="u"), Answer(0, 0)]
    starts = [TopicPartition("t", 0, 0), TopicPartition("u", 0, 0)]
    found = PartitionReader(
        *(Client(monkeypatch, answers), starts, {("t", 0): 1, ("u", 0): 1}),
        on_error=lambda _, topic: found.skip(topic),
    )
    assert [message.topic() for messages in found for message in messages] == ["t"]


def test_reading_can_be_given_up(read):
    """The reader calls `give_up` before each call of the client."""

    def give_up():
        raise InterruptedError

    with pytest.raises(InterruptedError):
        read([Answer(0, 0)], {0: 1}, give_up=give_up)


class Changing:
    """A consumer whose partition changes its leader: it returns the end at the third request."""

    def __init__(self, code):
        self._code, self.asked = code, 0

    def list_topics(self, topic, **_):
        return SimpleNamespace(topics={topic: SimpleNamespace(error=None, partitions={0: None})})

    def get_watermark_offsets(self, *_, **__):
        self.asked += 1
        if self.asked < 3:
            raise KafkaException(KafkaError(self._code))
        return 0, 7

    def close(self):
        pass


def test_ends_are_asked_for_again_while_a_leader_changes(monkeypatch):
    """Ends are requested again while a partition has no leader; a missing right is an error at once."""
    changing, denied = Changing(KafkaError.NOT_LEADER_FOR_PARTITION), Changing(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    clients = [changing, denied]
    monkeypatch.setattr(reader, "make_consumer", lambda _: clients.pop(0))
    assert reader.partition_ends({}, ["t"], timeout_seconds=5) == {("t", 0): 7}
    with pytest.raises(KafkaException):
        reader.partition_ends({}, ["t"], timeout_seconds=5)
    assert denied.asked == 1


def test_topics_that_we_may_not_see_are_left_out(monkeypatch):
    """A topic that we may not see is an error, or told to the caller and left out; no other error is."""
    code, denied = [KafkaError.TOPIC_AUTHORIZATION_FAILED], []
    no_client = SimpleNamespace(
        list_topics=lambda topic, **_: SimpleNamespace(
            topics={topic: SimpleNamespace(error=KafkaError(code[-1]), partitions={})}
        ),
        close=lambda: None,
    )
    monkeypatch.setattr(reader, "make_consumer", lambda _: no_client)
    with pytest.raises(KafkaException):
        reader.partition_ends({}, ["t"], timeout_seconds=5)
    assert reader.partition_ends({}, ["t"], timeout_seconds=5, on_denied=lambda *told: denied.append(told)) == {}
    assert [topic for _, topic in denied] == ["t"]
    code.append(KafkaError.LEADER_NOT_AVAILABLE)
    with pytest.raises(KafkaException):
        reader.partition_ends({}, ["t"], timeout_seconds=5, on_denied=lambda *_: None)
