"""A shard's writer and Kafka's errors, without services: an outage is endured, a bad record is named."""

from concurrent.futures import Future
from contextlib import nullcontext

import pytest
from confluent_kafka import KafkaError

from outbox_core.errors import InvalidRecord, KafkaUnavailable
from outbox_core.kafka.messages import Failure
from outbox_core.kafka.record_producer import Sent
from outbox_core.kafka.tracking import Ledger
from outbox_core.kafka.transactions import Aborted, Committed
from outbox_core.stores.interface import StoredRecord
from outbox_spark.relay import shard_writer
from outbox_spark.relay.shard_writer import ShardWriter

_ROWS = [StoredRecord(number, "orders", "k", b"v", None, None, -1, 1000 + number) for number in (7, 8, 9)]


class _Transactions:
    """The names that a writer asks for."""

    kafka, outbox, tracking_topic, tracking_partition, transactional_id, timeout = {}, "d.s.t", "tracking", 0, "t", 15.0

    def __init__(self):
        self.producer = {}
        self.fitted = []

    def fitting(self, max_batch_bytes):
        self.fitted.append(max_batch_bytes)
        return self


class _Limits:
    """The sizes that batches may have.

    Attributes:
        limit: of every topic; None if it may not be described.
    """

    limit = 1_048_588

    def __init__(self, _):
        pass

    def ask(self, topics):
        answer = Future()
        answer.set_result(self.limit)
        return dict.fromkeys(topics, answer)

    def close(self):
        pass


class _Producer:
    """A producer whose commits have the given outcomes, one after the other."""

    def __init__(self, outcomes, reports):
        self._outcomes, self._reports = outcomes, reports
        self.with_reports = []

    def begin(self):
        pass

    def send(self, records, _, reports=None):
        self.with_reports.append(reports is not None)
        if reports is not None:
            reports.failures += self._reports
        return Sent(list(records), [])

    failure = None
    must_replace = False

    def send_manifest(self, *_, key=None):
        pass

    def all_arrive(self, *_):
        return True

    def commit(self):
        return self._outcomes.pop(0)

    def abort(self, *_):
        pass

    def discard(self):
        pass


def _aborted(code):
    return Aborted(KafkaError(code), record_at_fault=True)


@pytest.fixture
def write(monkeypatch):
    """Return a function that writes three records by a producer whose commits have these outcomes."""
    monkeypatch.setattr(shard_writer, "highest_claim", lambda *_: 0)
    monkeypatch.setattr(shard_writer, "ledger_after_fence", lambda *_, **__: Ledger())
    monkeypatch.setattr(shard_writer, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(shard_writer, "TopicLimits", _Limits)

    def run(*outcomes, reports=(), patience=30.0):
        producer = _Producer(list(outcomes), reports)
        monkeypatch.setattr(shard_writer, "fenced", lambda *_: nullcontext(producer))
        writer = ShardWriter(run.transactions, "leader", 1, patience=patience)
        return writer.write(_ROWS).sent, producer

    run.transactions = _Transactions()

    return run


@pytest.mark.parametrize("code", [KafkaError._MSG_TIMED_OUT, KafkaError._INCONSISTENT, KafkaError.NOT_ENOUGH_REPLICAS])
def test_an_outage_is_borne(write, code):
    """A transaction that failed for an outage is tried again, now with delivery reports."""
    sent, producer = write(_aborted(code), Committed())
    assert sent == 3
    assert producer.with_reports == [False, True]


def test_a_long_outage_is_no_bad_record(write):
    """After its patience the writer reports that Kafka is away: the relay tries again."""
    with pytest.raises(KafkaUnavailable, match="timed out"):
        write(_aborted(KafkaError._MSG_TIMED_OUT), patience=0.0)


def test_a_bad_record_is_named(write):
    """A code about a record ends the task at once; an ambiguous one ends it when delivery reports name the record."""
    with pytest.raises(InvalidRecord, match="one of records 7 to 9 for topic 'orders'"):
        write(_aborted(KafkaError.MSG_SIZE_TOO_LARGE))
    inconsistent = [_aborted(KafkaError._INCONSISTENT) for _ in range(2)]
    reports = [Failure(_ROWS[1], KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))]
    with pytest.raises(InvalidRecord, match="record 8 for topic 'orders'"):
        write(*inconsistent, reports=reports)


def test_batches_are_as_large_as_the_topic_takes(write, monkeypatch):
    """A small topic limit becomes the producer's; one above the client's own changes nothing."""
    write(Committed())
    monkeypatch.setattr(_Limits, "limit", 65_536)
    write(Committed())
    assert write.transactions.fitted == [None, 65_536]


def test_a_limit_that_is_not_known_is_found(write, monkeypatch):
    """Refused batches are halved; a record is only to blame when the smallest batch was refused."""
    monkeypatch.setattr(_Limits, "limit", None)
    too_large = _aborted(KafkaError.MSG_SIZE_TOO_LARGE)
    sent, _ = write(too_large, too_large, Committed())
    assert sent == 3
    assert write.transactions.fitted == [None, 500_000, 250_000]
    with pytest.raises(InvalidRecord, match="one of records 7 to 9"):
        write(*[too_large] * 7)
    assert write.transactions.fitted[-1] == 16_384
