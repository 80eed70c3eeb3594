"""The rows of a torn batch that are in Kafka: found by id, key and value."""

import pytest
from confluent_kafka import TopicPartition
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.kafka import reader, torn_batches
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
    assert found([Seen(1, b"k", b"old"), Seen(1, b"k", b"v")], [row(1)]) == [row(1)]


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
