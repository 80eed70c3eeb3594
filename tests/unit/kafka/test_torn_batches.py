"""The rows of a torn batch that are in Kafka: found by id, key and value."""

from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.kafka import reader, torn_batches
from outbox_core.kafka.manifest import Opening
from outbox_core.kafka.torn_batches import Seen, published_rows
from outbox_core.kafka.tracking import ManifestNotRead
from outbox_core.stores.interface import StoredRecord


def row(identity, key="k", value=b"v"):
    """Return a row of the table."""
    return StoredRecord(identity, "t", key, value, None, None, -1, 1_000 + identity)


def found(seen, rows):
    """Return the rows that count as published."""
    table = {one[0]: one for one in rows}
    chunks = published_rows(seen, lambda ids: [table[number] for number in ids if number in table])
    return [one for chunk in chunks for one in chunk]


def test_a_row_is_recognised_by_all_three():
    """A row counts as published only if id, key and value are alike, as a fresh row may have an old id."""
    rows = [row(1), row(2, None, None), row(3, "k", "text"), row(4, "other"), row(5, "k", b"other"), row(6)]
    seen = [Seen(1, b"k", b"v"), Seen(2, None, None), Seen(3, b"k", b"text"), Seen(4, b"k", b"v"), Seen(5, b"k", b"v")]
    assert found(seen, rows) == rows[:3]


def test_an_empty_key_is_not_a_missing_one():
    """Neither is an empty key a missing one, nor an empty value a tombstone."""
    assert found([Seen(1, None, b"v"), Seen(2, b"k", None)], [row(1, ""), row(2, "k", b"")]) == []


def test_ids_that_came_back_may_have_both():
    """If Kafka has an old record and the row's own one under the same id, the row is published."""
    both = [Seen(1, b"k", b"old"), Seen(1, b"k", b"v")]
    assert found(both, [row(1)]) == found(both[::-1], [row(1)]) == [row(1)]


@given(st.sets(st.integers(1, 3_000)), st.sets(st.integers(1, 3_000)))
def test_chunks_lose_nothing(published, table):
    """Any number of rows is found, chunk by chunk."""
    rows = [row(number) for number in sorted(table)]
    result = found([Seen(number, b"k", b"v") for number in sorted(published)], rows)
    assert {one[0] for one in result} == published & table


def test_a_chunk_is_forgotten_once_it_was_asked_for():
    """Each id is asked for once, some at a time, however many there are."""
    asked = []
    seen = [Seen(number, b"k", b"v") for number in range(1_200)]
    assert list(published_rows(seen, lambda ids: asked.append(ids) or [])) == [[], [], []]
    assert [len(ids) for ids in asked] == [500, 500, 200]


class _Message:
    def __init__(self, headers):
        self._headers = headers

    def headers(self):
        if self._headers is SystemError:
            raise SystemError("a name that is not UTF-8")
        return self._headers

    def set_headers(self, headers):
        self._headers = headers


def test_the_id_header_names_outbox_and_row():
    """The last id header names the row, if it is of our outbox and can be read."""

    def id_of(*headers):
        return torn_batches._id_of(_Message(list(headers)), "outbox-id", b"d.s.t:")

    assert id_of(("outbox-id", b"d.s.t:1"), ("outbox-id", b"d.s.t:42")) == 42
    assert id_of(("outbox-id", b"d.s.t:-3")) == -3
    assert id_of(("outbox-id", b"other:42")) is None
    assert id_of(("outbox-id", b"d.s.t:x")) is None
    assert id_of(("outbox-id", None)) is None
    assert id_of() is None
    assert torn_batches._id_of(_Message(SystemError), "outbox-id", b"d.s.t:") is None


class _Record:
    """Return a record of the topic `t`."""

    def __init__(self, offset):
        self.offset = lambda: offset

    def topic(self):
        return "t"

    def partition(self):
        return 0

    def error(self):
        return None


class _SlowConsumer:
    """A client that gets a record every ten seconds of a virtual clock, and none after the last one."""

    def __init__(self, monkeypatch, records):
        self._records = [_Record(offset) for offset in range(records)]
        self._time = 0.0
        monkeypatch.setattr(reader.time, "monotonic", lambda: self._time)

    def assign(self, _):
        pass

    def consume(self, *_):
        self._time += 1
        return [self._records.pop(0)] if self._time % 10 == 0 and self._records else []


def test_topics_are_read_back_however_long_they_are(monkeypatch):
    """Topics are read back for as long as it takes: a term that gave up would find even more in the next one."""
    consumer, place = _SlowConsumer(monkeypatch, 500), TopicPartition("t", 0, 0)
    messages = torn_batches._messages(consumer, [place], {("t", 0): 500}, lambda: False, print)
    assert len(list(messages)) == 500


def test_a_partition_that_is_not_read_to_its_end_is_named(monkeypatch):
    """A partition whose end is hidden by an open transaction is named in the error."""
    consumer, place = _SlowConsumer(monkeypatch, 3), TopicPartition("t", 0, 0)
    messages = torn_batches._messages(consumer, [place], {("t", 0): 4}, lambda: False, print)
    with pytest.raises(ManifestNotRead, match="topic t, partition 0"):
        list(messages)


class _Found(_Record):
    """A record with the id header of a row, or with an error an answer about a topic."""

    def __init__(self, identity, topic, offset, error=None):
        super().__init__(offset)
        self._topic, self._error, self._identity = topic, error, identity

    def topic(self):
        return self._topic

    def error(self):
        return self._error

    def headers(self):
        return [("outbox-id", b"box:%d" % self._identity)]

    def key(self):
        return b"k"

    def value(self):
        return b"v"


class _Brokers:
    """The brokers of the topics t and u, which have four records each; `answers` come from a consumer."""

    def __init__(self, monkeypatch):
        self.answers, self.asked, self.error, self.is_closed = [], [], None, False
        ends = {("t", 0): 4, ("u", 0): 4}
        monkeypatch.setattr(torn_batches, "make_consumer", lambda _: self)
        monkeypatch.setattr(torn_batches, "partition_ends", lambda *_, **__: ends)

    def offsets_for_times(self, places, *, timeout):
        del timeout
        self.asked = [(place.topic, place.offset) for place in places]
        return [SimpleNamespace(topic=each.topic, partition=0, offset=0, error=self.error) for each in places]

    def assign(self, _):
        pass

    def consume(self, *_):
        return [self.answers.pop(0)] if self.answers else []

    def close(self):
        self.is_closed = True

    def read_back(self):
        opening = Opening("box", 10, 20, ("t", "u"), "1", written_at_ms=100_000)
        names = {"id_header": "outbox-id", "outbox_name": "box"}
        seen = torn_batches.read_back({}, "group", opening, **names, give_up=lambda: False)
        return [each.id for each in seen]


@pytest.fixture
def brokers(monkeypatch):
    """Return the brokers."""
    return _Brokers(monkeypatch)


def test_a_torn_batch_is_read_back_from_a_minute_before_its_opening(brokers):
    """Clocks differ; and of what is found only ids of the batch count."""
    ids = (9, 10, 15, 21)
    brokers.answers = [_Found(ids[at], topic, at) for topic in ("t", "u") for at in range(4)]
    assert brokers.read_back() == [10, 15, 10, 15]
    assert brokers.asked == [("t", 40_000), ("u", 40_000)]
    assert brokers.is_closed


def test_a_topic_that_may_not_be_read_is_left_out(brokers):
    """The others are read to their ends."""
    denied = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    brokers.answers = [_Found(0, "u", 0, denied), *(_Found(10 + at, "t", at) for at in range(4))]
    assert brokers.read_back() == [10, 11, 12, 13]


@pytest.mark.parametrize("where", ["time", "record"])
def test_what_cannot_be_read_back_ends_the_term(brokers, where):
    """A partition whose records cannot be found or read may have some of the batch: nothing is published meanwhile."""
    error = KafkaError(KafkaError.INVALID_RECORD, "no")
    if where == "time":
        brokers.error = error
    else:
        brokers.answers = [_Found(0, "u", 0, error)]
    with pytest.raises(ManifestNotRead, match=r"read back: no$"):
        brokers.read_back()
    assert brokers.is_closed
