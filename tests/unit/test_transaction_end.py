"""The transactional producer and its recovery over a client that is slow, or does not answer, without services."""

import time
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_core.harvest import recovery, transaction
from outbox_core.harvest.recovery import Recovery, Transactions
from outbox_core.harvest.tracking import ForeignLedger
from outbox_core.harvest.transaction import Aborted, Committed, TransactionalProducer

_SETTINGS = {"transactional.id": "t", "transaction.timeout.ms": 1_000}


class _Timeout(KafkaError):
    """An error that says that the call may be made again."""

    def retriable(self):
        return True


def _timed_out():
    return KafkaException(_Timeout(KafkaError._TIMED_OUT, "the coordinator is away"))


class _Client:
    """A client of a virtual clock.

    Attributes:
        attempts: how often `init_transactions` was called.
        outstanding: what `len` tells, one after the other; then nothing is.
        calls: how often `commit_transaction` is called before there is an answer.
    """

    def __init__(self, monkeypatch):
        self.time, self.attempts, self.outstanding, self.calls = 100.0, 0, [], 1
        monkeypatch.setattr(transaction, "make_producer", lambda _: self)
        monkeypatch.setattr(transaction, "monotonic", lambda: self.time)

    def __len__(self):
        return self.outstanding.pop(0) if self.outstanding else 0

    def poll(self, _):
        return 0

    def produce(self, *_, on_delivery, **__):
        on_delivery(None, SimpleNamespace(offset=lambda: None))

    def init_transactions(self, _):
        self.attempts += 1
        assert self.attempts < 1_000, "it is waited for without end"
        time.sleep(0.001)
        raise _timed_out()

    def commit_transaction(self, seconds):
        self.time += seconds
        self.calls -= 1
        if self.calls:
            raise _timed_out()


@pytest.fixture
def client(monkeypatch):
    """A client that a producer is made of."""
    return _Client(monkeypatch)


@pytest.mark.usefixtures("client")
def test_a_coordinator_that_does_not_answer_ends_the_term():
    """With what Kafka said last: nobody hears of a call that is made again and again."""
    transactions = SimpleNamespace(timeout=0.05, relay_shards=list)
    recovery = Recovery(transactions, lambda: False, None, None)
    ended = recovery.settle(TransactionalProducer(_SETTINGS, timeout_seconds=1.0))
    assert "the coordinator is away" in ended.reason


@pytest.mark.parametrize("later", [0, 1], ids=["nothing", "an error event"])
def test_what_comes_in_later_does_not_make_an_end_quicker(client, later):
    """Once all records have arrived EndTxn may be sent: what is outstanding then is news, and no record."""
    producer = TransactionalProducer(_SETTINGS, timeout_seconds=20.0)
    client.calls = 6
    client.outstanding = [1, 0, 0, 0, later]  # librdkafka counts events that it has not told yet
    assert isinstance(producer.commit(), Committed)
    assert producer.must_replace


@pytest.mark.usefixtures("client")
def test_an_offset_that_is_not_told_is_not_the_first():
    """A broker may say of a record that it has it already, and not where: a barrier there would hide every manifest."""
    producer = TransactionalProducer(_SETTINGS, timeout_seconds=1.0)
    assert producer.send_manifest("tracking", b"barrier") is None
    assert producer.manifest_offset == -1


def test_a_ledger_that_cannot_be_read_leaves_no_transaction_open(monkeypatch):
    """At least once goes on without it; whoever shares the topic by mistake would wait for the barrier's time-out."""

    def refuse(*_, **__):
        raise ForeignLedger("that is no manifest")

    monkeypatch.setattr(recovery, "write_barrier", lambda *_: 5)
    monkeypatch.setattr(recovery, "read_ledger", refuse)
    names = dict.fromkeys(("transactional_id", "tracking_topic", "outbox", "outbox_name", "id_header", "group"), "t")
    transactions = Transactions(kafka={}, producer={}, timeout=1.0, heartbeat_timeout=1.0, accept_marked=False, **names)
    ends = []
    producer = SimpleNamespace(abort=lambda **_: ends.append("aborted") or Aborted(None, record_at_fault=False))
    for read in (transactions.ledger, transactions.open):
        with pytest.raises(ForeignLedger):
            read(producer, lambda: False)
    assert ends == ["aborted"] * 2
