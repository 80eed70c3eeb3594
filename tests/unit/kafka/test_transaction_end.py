"""The transactional producer and its recovery over a client that is slow, or does not answer, without services."""

import time
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_core.harvest import recovery
from outbox_core.kafka import identity
from outbox_core.kafka import transactions as transaction
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.tracking import ForeignLedger
from outbox_core.kafka.transactions import Aborted, Committed, Ended, TransactionalProducer

_SETTINGS = {"transactional.id": "t", "transaction.timeout.ms": 1_000}


class _Retriable(KafkaError):
    """An error after which the call may be repeated."""

    def retriable(self):
        return True


_TIMED_OUT = _Retriable(KafkaError._TIMED_OUT, "the coordinator is away")


class _Client:
    """A client of a virtual clock.

    Attributes:
        attempts: number of calls of `init_transactions`.
        outstanding: the results of `flush`, one after the other; then 0.
        refusals: the errors of `commit_transaction`, one after the other; then it succeeds.
        commits: the seconds that each call of `commit_transaction` was given.
        commit_takes: seconds for each of them.
    """

    def __init__(self, monkeypatch):
        self.time, self.attempts, self.outstanding, self.refusals = 100.0, 0, [], []
        self.commits, self.commit_takes = [], 0.0
        monkeypatch.setattr(transaction, "make_producer", lambda _: self)
        monkeypatch.setattr(transaction, "monotonic", lambda: self.time)

    def __len__(self):
        return 0

    def flush(self, seconds):
        left = self.outstanding.pop(0) if self.outstanding else 0
        self.time += seconds if left else 0
        return left

    def begin_transaction(self):
        raise KafkaException(KafkaError(KafkaError._STATE, "one is open"))

    def poll(self, seconds):
        self.time += seconds
        return 0

    def purge(self):
        self.outstanding = []

    def produce(self, *_, on_delivery, **__):
        on_delivery(None, SimpleNamespace(offset=lambda: None))

    def init_transactions(self, _):
        self.attempts += 1
        assert self.attempts < 1_000, "it is waited for without end"
        time.sleep(0.001)
        raise KafkaException(_TIMED_OUT)

    def abort_transaction(self, seconds):
        assert seconds > 0

    def commit_transaction(self, seconds):
        self.commits.append(seconds)
        self.time += min(self.commit_takes, seconds)
        if self.refusals:
            raise KafkaException(self.refusals.pop(0))


@pytest.fixture
def client(monkeypatch):
    """Return a client that a producer is made of."""
    return _Client(monkeypatch)


@pytest.mark.usefixtures("client")
def test_a_coordinator_that_does_not_answer_ends_the_term(monkeypatch):
    """A coordinator that does not answer ends the term with Kafka's last error, though each call may be repeated."""
    monkeypatch.setattr(recovery, "ensure_tracking_topic", lambda *_: None)
    transactions = SimpleNamespace(timeout=0.05, relay_shards=list, kafka={}, tracking_topic="t")
    ended = recovery.Recovery(transactions, lambda: False, None).settle(
        TransactionalProducer(_SETTINGS, timeout_seconds=1.0)
    )
    assert "the coordinator is away" in ended.reason


def test_a_commit_is_timed_from_the_last_acknowledgement(client):
    """Time in which records are outstanding makes no repeat of EndTxn possible; time of the commit itself does."""
    producer = TransactionalProducer(_SETTINGS, timeout_seconds=20.0)
    client.outstanding = [1] * 20
    assert isinstance(producer.commit(), Committed)
    assert client.time == pytest.approx(102)
    assert not producer.must_replace
    client.commit_takes = 0.4
    assert isinstance(producer.commit(), Committed)
    assert producer.must_replace


def test_a_commit_that_timed_out_is_not_called_again(client):
    """A second call, as librdkafka allows it, could report a success that was none: the next producer settles it."""
    producer = TransactionalProducer(_SETTINGS, timeout_seconds=5.0)
    client.refusals, client.commit_takes = [_TIMED_OUT], 5.0
    ended = producer.commit()
    assert isinstance(ended, Ended)
    assert "outcome is unknown" in ended.reason
    assert client.commits == [5.0]
    assert producer.must_replace


@pytest.mark.parametrize(
    ("settings", "seconds"),
    [
        ({}, 60.0),
        ({"transaction.timeout.ms": 15_000}, 15.0),
        ({"transaction.timeout.ms": 15_000, "delivery.timeout.ms": 10_000}, 10.0),
        ({"transaction.timeout.ms": 15_000, "message.timeout.ms": "0"}, 15.0),
    ],
)
def test_an_abort_after_the_time_of_a_record_replaces_the_producer(client, settings, seconds):
    """A record may have timed out, unreported, whose first copy is still under way: none may follow it in its epoch."""
    producer = TransactionalProducer({"transactional.id": "t", **settings}, timeout_seconds=5.0)
    for age, replaces in ((seconds - 0.1, False), (seconds, True)):
        producer.begin()
        client.time += age
        assert isinstance(producer.abort(), Aborted)
        assert producer.must_replace is replaces


@pytest.mark.parametrize("name", ["retries", "message.send.max.retries"])
def test_repeats_are_not_limited(monkeypatch, name):
    """The client does not get a limit of repeats, after which it would give up a record unreported, at any age."""
    made = []
    monkeypatch.setattr(transaction, "make_producer", made.append)
    TransactionalProducer({**_SETTINGS, name: 1}, timeout_seconds=1.0)
    assert made[0]["transactional.id"] == "t"
    assert name not in made[0]


def test_a_commit_that_is_refused_at_once_is_called_again(client):
    """Without a connection to the coordinator the commit waits for one, until its time is over."""
    refusal = _Retriable(KafkaError._UNSUPPORTED_FEATURE, "not connected")
    producer = TransactionalProducer(_SETTINGS, timeout_seconds=20.0)
    client.refusals = [refusal] * 3
    assert isinstance(producer.commit(), Committed)
    assert len(client.commits) == 4
    client.refusals = [refusal] * 10_000
    assert isinstance(producer.commit(), Ended)
    assert client.time < 121


def test_a_commit_is_not_sent_before_its_records_have_arrived(client):
    """Records that are not acknowledged in time end the term, and no EndTxn was sent."""
    producer = TransactionalProducer(_SETTINGS, timeout_seconds=20.0)
    client.outstanding = [1] * 1_000
    ended = producer.commit()
    assert isinstance(ended, Ended)
    assert "the commit was not sent" in ended.reason
    assert client.commits == []


@pytest.mark.usefixtures("client")
def test_an_offset_that_is_not_told_is_not_the_first():
    """A missing offset is not taken for 0, as a barrier there would hide every manifest."""
    producer = TransactionalProducer(_SETTINGS, timeout_seconds=1.0)
    assert producer.send_manifest("tracking", b"barrier") is None
    assert producer.manifest_offset == -1


def test_a_ledger_that_cannot_be_read_leaves_no_transaction_open(monkeypatch):
    """An unreadable ledger aborts the transaction, so that no other user of the topic waits for its time-out."""

    def refuse(*_, **__):
        raise ForeignLedger("that is no manifest")

    monkeypatch.setattr(identity, "write_barrier", lambda *_: 5)
    monkeypatch.setattr(identity, "read_ledger", refuse)
    names = dict.fromkeys(("transactional_id", "tracking_topic", "outbox", "outbox_name", "id_header", "group"), "t")
    transactions = TransactionalIdentity(
        kafka={}, producer={}, timeout=1.0, end_timeout=1.0, heartbeat_timeout=1.0, accept_marked=False, **names
    )
    ends = []
    producer = SimpleNamespace(abort=lambda **_: ends.append("aborted") or Aborted(None, record_at_fault=False))
    for read in (transactions.ledger, transactions.open):
        with pytest.raises(ForeignLedger):
            read(producer, lambda: False)
    assert ends == ["aborted"] * 2
