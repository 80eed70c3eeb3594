"""A shard's task and Kafka's errors, without services: an outage is endured, a bad record is named."""

from concurrent.futures import Future
from contextlib import nullcontext

import pytest
from confluent_kafka import KafkaError

from outbox_core.config import HarvestConfig
from outbox_core.kafka.messages import Failure
from outbox_core.kafka.record_producer import Sent
from outbox_core.kafka.tracking import Ledger
from outbox_core.kafka.transactions import Aborted, Committed, Ended
from outbox_core.stores.interface import OversizedValue, StoredRecord
from outbox_spark.relay import shard_task
from outbox_spark.relay.plan import BatchPlan
from outbox_spark.relay.shard_store import ShardRange
from outbox_spark.relay.shard_task import ShardTask

_ROWS = [StoredRecord(number, "orders", "k", b"v", None, None, -1, 1000 + number) for number in (7, 8, 9)]


class _Transactions:
    """The names that a writer asks for."""

    kafka, outbox, tracking_topic, tracking_partition, transactional_id, timeout = {}, "d.s.t", "tracking", 0, "t", 15.0

    def __init__(self):
        self.producer = {}
        self.fitted = []

    def of_shard(self, _):
        return self

    def fitting(self, max_batch_bytes):
        self.fitted.append(max_batch_bytes)
        return self


class _Rows:
    """The rows of a shard, until they are purged.

    Attributes:
        purged: the ids of those that are.
    """

    settled, reached, is_exhausted = 0, 0, True

    made = None

    def __init__(self, *_):
        self.purged, self.held = [], {}
        type(self).made = self

    def next(self):
        return [row for row in _ROWS if row.id not in (*self.purged, *self.held)]

    def may_hold(self):
        return True

    def hold(self, refused):
        self.held.update({record.id: error for record, error in refused})

    def purge(self, rows):
        self.purged += [row.id for row in rows]

    def delete_published(self, *_):
        pass

    def join(self):
        pass

    def begin_again(self, *, trusts=True):
        assert trusts

    def close(self):
        pass


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

    def send(self, records, _, failures=None):
        self.with_reports.append(failures is not None)
        if failures is not None:
            failures += self._reports
        refused = [row for row in records if row.id in self.refuses]
        error = KafkaError(KafkaError._INVALID_ARG, "no message")
        sent = [row for row in records if row.id not in self.refuses]
        return Sent(sent, [Failure(row, error, alone=True) for row in refused])

    failure = None
    must_replace = False
    refuses = ()

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
    """Return a function that publishes three records by a producer whose commits have these outcomes."""
    monkeypatch.setattr(shard_task, "highest_claim", lambda *_: 0)
    monkeypatch.setattr(shard_task, "ledger_after_fence", lambda *_, **__: Ledger())
    monkeypatch.setattr(shard_task, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(shard_task, "TopicLimits", _Limits)
    monkeypatch.setattr(shard_task, "ShardRows", _Rows)

    def run(*outcomes, reports=(), patience=30.0):
        producer = _Producer(list(outcomes), reports)
        monkeypatch.setattr(shard_task, "fenced", lambda *_: nullcontext(producer))
        monkeypatch.setattr(shard_task.TransactionalIdentity, "of", lambda *_: run.transactions)
        harvest = HarvestConfig(data_source="dbname=x", base_kafka_config={"bootstrap.servers": "h:1"})
        plan = BatchPlan(harvest=harvest, outbox="d.s.t", term=1, ranges=(ShardRange(0, 1),), patience=patience)
        return ShardTask(plan, 0).run(), producer

    run.transactions = _Transactions()

    return run


@pytest.mark.parametrize("code", [KafkaError._MSG_TIMED_OUT, KafkaError._INCONSISTENT, KafkaError.NOT_ENOUGH_REPLICAS])
def test_an_outage_is_borne(write, code):
    """A transaction that failed for an outage is tried again, now with delivery reports."""
    outcome, producer = write(_aborted(code), Committed())
    assert (outcome.published, outcome.error) == (3, "")
    assert producer.with_reports == [False, True]


def test_a_long_outage_is_no_bad_record(write):
    """After its patience the task reports that Kafka is away: the relay tries again."""
    outcome, _ = write(_aborted(KafkaError._MSG_TIMED_OUT), patience=0.0)
    assert (outcome.published, outcome.error) == (0, "KafkaUnavailable")
    assert "timed out" in outcome.message


def test_an_attempt_that_is_fenced_ends(write):
    """An attempt that another one has fenced does not fence that one in its turn."""
    outcome, producer = write(Ended("fenced", error=KafkaError(KafkaError._FENCED)))
    assert (outcome.published, outcome.error) == (0, "")
    assert producer.with_reports == [False]


def test_a_bad_record_is_named(write):
    """A code about a record ends the task at once; an ambiguous one ends it when delivery reports name the record."""
    outcome, _ = write(_aborted(KafkaError.MSG_SIZE_TOO_LARGE))
    assert outcome.error == "InvalidRecord"
    assert outcome.message.startswith("one of records 7 to 9 for topic 'orders'")
    inconsistent = [_aborted(KafkaError._INCONSISTENT) for _ in range(2)]
    reports = [Failure(_ROWS[1], KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))]
    outcome, _ = write(*inconsistent, reports=reports)
    assert outcome.message.startswith("record 8 for topic 'orders'")


def test_what_no_client_takes_is_held(write, monkeypatch):
    """A record that the client refuses is held once the others are committed, and only then."""
    monkeypatch.setattr(_Producer, "refuses", (8,))
    outcome, _ = write(_aborted(KafkaError._MSG_TIMED_OUT), Committed())
    assert (outcome.published, outcome.error) == (2, "")
    assert _Rows.made.purged == [7, 9]
    assert _Rows.made.held == {8: "no message"}


def test_a_record_too_large_to_be_read_keeps_back_its_key_alone(write, monkeypatch):
    """Later records of the key of an oversized one wait with it, in their order; others go on."""
    rows = [_ROWS[0], _ROWS[1]._replace(value=OversizedValue(99, 10)), _ROWS[2], _ROWS[2]._replace(id=10, key="other")]
    monkeypatch.setattr(f"{__name__}._ROWS", rows)
    monkeypatch.setattr(_Rows, "next", lambda self: [] if self.held else rows)
    outcome, _ = write(Committed())
    assert (outcome.published, outcome.error) == (2, "")
    assert _Rows.made.purged == [7, 10]
    assert list(_Rows.made.held) == [8]


def test_batches_are_as_large_as_the_topic_takes(write, monkeypatch):
    """A small topic limit becomes the producer's, once it is known; one above the client's own changes nothing."""
    write(Committed())
    monkeypatch.setattr(_Limits, "limit", 65_536)
    write(Committed())
    assert write.transactions.fitted == [None, None, 65_536]


def test_a_limit_that_is_not_known_is_found(write, monkeypatch):
    """Refused batches are halved; a record is only to blame when the smallest batch was refused."""
    monkeypatch.setattr(_Limits, "limit", None)
    too_large = _aborted(KafkaError.MSG_SIZE_TOO_LARGE)
    outcome, _ = write(too_large, too_large, Committed())
    assert outcome.published == 3
    assert write.transactions.fitted == [None, 500_000, 250_000]
    outcome, _ = write(*[too_large] * 7)
    assert outcome.message.startswith("one of records 7 to 9")
    assert write.transactions.fitted[-1] == 16_384
