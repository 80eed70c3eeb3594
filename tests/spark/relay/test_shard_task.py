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
from outbox_spark.relay.shard_rows import ShardRows
from outbox_spark.relay.shard_store import ShardRange
from outbox_spark.relay.shard_task import ShardTask

_ROWS = [StoredRecord(number, "orders", "k", b"v", None, None, -1, 1000 + number) for number in (7, 8, 9)]


class _Transactions:
    """The names that a writer asks for."""

    kafka, outbox, tracking_topic, tracking_partition, transactional_id, timeout = {}, "d.s.t", "tracking", 0, "t", 15.0

    def __init__(self):
        self.producer = {}
        self.fitted = []
        self.begun = []

    def of_shard(self, _):
        return self

    def begin(self, _, known, __):
        self.begun.append(known)

    def fitting(self, max_batch_bytes, *, unbatched=False):
        self.fitted.append("unbatched" if unbatched else max_batch_bytes)
        return self


class _Rows:
    """The rows of a shard, until they are purged.

    Attributes:
        purged: the ids of those that are.
    """

    settled, reached, most = 0, 0, 20

    made = None

    def __init__(self, *_):
        self.purged, self.held, self.adapted = [], {}, []
        self.asked = 0
        type(self).made = self

    def look_around(self):
        pass

    def failed(self, count):
        self.adapted.append(count)

    def succeeded(self, share):
        self.adapted.append(share)

    def next(self):
        return [row for row in _ROWS if row.id not in (*self.purged, *self.held)]

    def may_hold(self):
        self.asked += 1
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

    def send(self, records, _, reports=None):
        self.with_reports.append(reports is not None)
        if reports is not None:
            reports.failures.extend(self._reports)
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
        outcome = self._outcomes.pop(0) if self._outcomes else Committed()
        if isinstance(outcome, Committed):
            self._reports = []
        return outcome

    def abort(self, *_):
        pass

    def discard(self):
        pass


def _aborted(code):
    return Aborted(KafkaError(code), record_at_fault=True)


@pytest.fixture
def write(monkeypatch):
    """Return a function that publishes three records by a producer whose commits have these outcomes."""
    monkeypatch.setattr(shard_task, "highest_claim", lambda *_: 1)
    monkeypatch.setattr(shard_task, "ledger_after_fence", lambda *_, **__: Ledger())
    monkeypatch.setattr(shard_task, "_PAUSE_SECONDS", 0.0)
    monkeypatch.setattr(shard_task, "TopicLimits", _Limits)
    monkeypatch.setattr(shard_task, "ShardRows", _Rows)

    def run(*outcomes, reports=(), patience=30.0, transform=None):
        producer = _Producer(list(outcomes), reports)
        monkeypatch.setattr(shard_task, "fenced", lambda *_: nullcontext(producer))
        monkeypatch.setattr(shard_task.TransactionalIdentity, "of", lambda *_: run.transactions)
        harvest = HarvestConfig(data_source="dbname=x", base_kafka_config={"bootstrap.servers": "h:1"})
        ranges = (ShardRange(0, 1),)
        plan = BatchPlan(harvest=harvest, outbox="d.s.t", term=1, ranges=ranges, patience=patience, transform=transform)
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
    """An attempt that another one has fenced does not fence that one in its turn, and says what may have happened."""
    outcome, producer = write(Ended("fenced", error=KafkaError(KafkaError._FENCED)))
    assert (outcome.published, outcome.error) == (0, "Fenced")
    assert "or as a transaction was open for longer than its time-out" in outcome.message
    assert producer.with_reports == [False]


def test_a_bad_record_is_named(write, monkeypatch):
    """One that cannot be held ends the task by its code; an ambiguous code does once delivery reports name it."""
    monkeypatch.setattr(_Rows, "may_hold", lambda _: False)
    outcome, _ = write(_aborted(KafkaError.MSG_SIZE_TOO_LARGE))
    assert outcome.error == "InvalidRecord"
    assert outcome.message.startswith("one of records 7 to 9 for topic 'orders'")
    inconsistent = [_aborted(KafkaError._INCONSISTENT) for _ in range(2)]
    reports = [Failure(_ROWS[1], KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))]
    outcome, _ = write(*inconsistent, reports=reports)
    assert outcome.message.startswith("record 8 for topic 'orders'")


def test_a_record_for_a_partition_that_is_missing_is_held(write, monkeypatch):
    """Delivery reports name such a record for certain: it is held, the others go on."""
    missing = KafkaError._UNKNOWN_PARTITION
    row = _ROWS[1]._replace(partition=99, key="other")
    monkeypatch.setattr(f"{__name__}._ROWS", [_ROWS[0], row, _ROWS[2]])
    outcome, producer = write(_aborted(missing), _aborted(missing), reports=[Failure(row, KafkaError(missing))])
    assert producer.with_reports[:2] == [False, True]
    assert list(_Rows.made.held) == [8]
    assert outcome.error == ""


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
    """Refused batches are halved; a record is only searched for when the smallest batch was refused."""
    monkeypatch.setattr(_Limits, "limit", None)
    too_large = _aborted(KafkaError.MSG_SIZE_TOO_LARGE)
    outcome, _ = write(too_large, too_large, Committed())
    assert outcome.published == 3
    assert write.transactions.fitted == [None, 500_000, 250_000]
    outcome, _ = write(*[too_large] * 7)
    assert outcome.published == 3
    assert write.transactions.fitted[-2:] == [16_384, "unbatched"]


def test_rows_before_a_refused_one_of_their_key_are_published_first(write, monkeypatch):
    """A hold would keep them back: so the next transaction ends before the refused record."""
    too_large = KafkaError.MSG_SIZE_TOO_LARGE
    reports = [Failure(_ROWS[2], KafkaError(too_large), alone=True)]
    monkeypatch.setattr(_Rows, "next", lambda self: [] if self.purged else _ROWS[: self.most])
    outcome, _ = write(_aborted(too_large), _aborted(too_large), Committed(), reports=reports)
    assert (outcome.published, outcome.error, _Rows.made.most) == (2, "", 2)
    assert (_Rows.made.purged, _Rows.made.held) == ([7, 8], {})


@pytest.mark.parametrize(("factor", "most"), [(2, 4), (1000, 500)])
def test_transactions_of_a_search_grow_again(write, monkeypatch, factor, most):
    """One row before a refused one does not have all others of the search go one by one."""
    too_large = KafkaError.MSG_SIZE_TOO_LARGE
    reports = [Failure(_ROWS[2], KafkaError(too_large), alone=True)]
    monkeypatch.setattr(_Rows, "next", lambda self: [] if self.purged else _ROWS[: self.most])
    monkeypatch.setattr(_Rows, "succeeded", lambda self, _: setattr(self, "most", factor * self.most))
    write(_aborted(too_large), _aborted(too_large), Committed(), reports=reports)
    assert _Rows.made.most == most


class _ReadOn(_Rows):
    """Rows of a settled range: each is read once, unless the task begins again."""

    passed = 0

    def next(self):
        rows, self.passed = _ROWS[self.passed :], len(_ROWS)
        return rows

    def begin_again(self, **_):
        self.passed = len(self.purged)


class _Unsent(_Producer):
    """A producer whose first transaction fails before its first record."""

    def send(self, records, give_up, failures=None):
        sent = super().send(records, give_up, failures)
        return Sent([], []) if len(self.with_reports) == 1 else sent


def test_what_was_not_sent_is_read_again(write, monkeypatch):
    """Rows of a transaction that failed before its first record are neither purged nor passed over."""
    monkeypatch.setattr(shard_task, "ShardRows", _ReadOn)
    monkeypatch.setattr(f"{__name__}._Producer", _Unsent)
    outcome, producer = write(Committed())
    assert (outcome.published, len(producer.with_reports)) == (3, 2)
    assert _ReadOn.made.purged == [7, 8, 9]


def test_it_is_asked_once_whether_many_records_may_be_held(write, monkeypatch):
    """A thousand bad records in an open transaction do not cost a thousand questions."""
    monkeypatch.setattr(_Producer, "refuses", (7, 8, 9))
    outcome, _ = write()
    assert (outcome.published, _Rows.made.asked) == (0, 1)
    assert list(_Rows.made.held) == [7, 8, 9]


def test_slow_reads_and_slow_ends_do_not_stop_a_task(write, monkeypatch):
    """Rows that took long to read go into a new transaction, if nobody has published since; they are not read again."""
    ledger = Ledger(offset=5)
    monkeypatch.setattr(shard_task, "ledger_after_fence", lambda *_, **__: ledger)
    monkeypatch.setattr(_Transactions, "timeout", 1e-9)
    monkeypatch.setattr(_Producer, "must_replace", True)
    reads = []
    read = _Rows.next
    monkeypatch.setattr(_Rows, "next", lambda self: reads.append(1) or read(self))
    outcome, _ = write(Committed())
    assert (outcome.published, outcome.error, len(reads)) == (3, "", 2)
    assert write.transactions.begun == [ledger]


def test_transactions_get_smaller_until_they_arrive_in_time(write):
    """A transaction that failed for no clear reason is followed by one of half as many rows."""
    outcome, _ = write(_aborted(KafkaError._MSG_TIMED_OUT), Committed())
    assert outcome.published == 3
    failed, share = _Rows.made.adapted
    assert failed == 3
    assert 0 <= share < 1


def test_the_rows_of_a_transaction_follow_its_success():
    """Half as many are read after a failure, twice as many after a quick success, and never more than planned."""
    harvest = HarvestConfig(data_source="dbname=x", base_kafka_config={"bootstrap.servers": "h:1"})
    rows = ShardRows(BatchPlan(harvest=harvest, rows=100), ShardRange(0, 1, rows=40))
    sizes = [rows.most]
    for step, value in [("failed", 40), ("succeeded", 0.3), ("succeeded", 0.1), ("failed", 1)]:
        getattr(rows, step)(value)
        sizes.append(rows.most)
    rows.close()
    assert sizes == [40, 20, 20, 40, 1]
    rows.most = 80
    rows.succeeded(0.1)
    assert rows.most == 100


@pytest.mark.parametrize("claim", [0, 2])
def test_a_task_needs_the_claim_that_it_was_planned_under(write, monkeypatch, claim):
    """A higher claim is another leader's; if ours is not there, the topic was deleted, and one may be hidden."""
    monkeypatch.setattr(shard_task, "highest_claim", lambda *_: claim)
    outcome, producer = write()
    assert (outcome.published, outcome.error) == (0, "Deposed")
    assert producer.with_reports == []


def test_a_transform_keeps_what_tells_rows_apart(write):
    """A transform that changes an id would have its row published again, so it ends the task, with the id."""
    outcome, _ = write(transform=lambda row: row._replace(id=row.id + 100))
    assert (outcome.published, outcome.error) == (0, "InvalidRecord")
    assert outcome.message.startswith("record 7: a transform must keep id and create_time")
    assert _Rows.made.purged == []
