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


class _Abortable(KafkaError):
    """An error that the transaction must be aborted for."""

    def txn_requires_abort(self):
        return True


_LATER = object()
_REFUSED = KafkaError(KafkaError.INVALID_RECORD, "no")
_TORN = KafkaError(KafkaError.INVALID_TXN_STATE, "it is not open")


class _Client:
    """A client of a virtual clock.

    Attributes:
        attempts: number of calls of `init_transactions`.
        outstanding: the results of `flush`, one after the other; then 0.
        refusals: the errors of `commit_transaction`, one after the other; then it succeeds.
        commits: the seconds that each call of `commit_transaction` was given.
        commit_takes: seconds for each of them.
        aborts: number of calls of `abort_transaction`.
        waiting: number of records that are not acknowledged.
        state: the error of `begin_transaction` in a transaction.
        report: the error that each record of the protocol is reported with, None for success, or `_LATER`.
    """

    def __init__(self, monkeypatch):
        self.time, self.attempts, self.outstanding, self.refusals = 100.0, 0, [], []
        self.commits, self.commit_takes, self.aborts, self.waiting = [], 0.0, 0, 0
        self.state, self.report = KafkaError(KafkaError._STATE, "one is open"), None
        monkeypatch.setattr(transaction, "make_producer", lambda _: self)
        monkeypatch.setattr(transaction, "monotonic", lambda: self.time)

    def __len__(self):
        return self.waiting

    def flush(self, seconds):
        left = self.outstanding.pop(0) if self.outstanding else 0
        self.time += seconds if left else 0
        return left

    def begin_transaction(self):
        raise KafkaException(self.state)

    def poll(self, seconds):
        self.time += seconds
        return 0

    def purge(self, **_):
        self.outstanding = []

    def produce(self, *_, on_delivery, **__):
        if self.report is not _LATER:
            on_delivery(self.report, SimpleNamespace(topic=lambda: "tracking", offset=lambda: None))

    def init_transactions(self, _):
        self.attempts += 1
        assert self.attempts < 1_000, "it is waited for without end"
        time.sleep(0.001)
        raise KafkaException(_TIMED_OUT)

    def abort_transaction(self, seconds):
        assert seconds > 0
        self.aborts += 1

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
def test_a_coordinator_that_does_not_answer_ends_the_term():
    """A coordinator that does not answer ends the term with Kafka's last error, though each call may be repeated."""
    transactions = SimpleNamespace(timeout=0.05, ensure_topic=lambda: None)
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


def _in_a_transaction():
    """Return a producer that has just begun a transaction, which its client takes for open in any case."""
    producer = TransactionalProducer(_SETTINGS, timeout_seconds=5.0)
    producer.begin()
    return producer


def test_an_abort_of_what_has_arrived_keeps_the_producer(client):
    """An abort of our choice, with every record acknowledged, leaves nothing behind that could come late."""
    producer = _in_a_transaction()
    assert producer.abort() == Aborted(None, record_at_fault=False)
    assert not producer.must_replace
    assert client.aborts == 1


@pytest.mark.parametrize("left", ["a failure", "a record under way", "a failed transaction", "a manifest"])
def test_an_abort_that_may_purge_a_record_replaces_the_producer(client, left):
    """A record that is not known to have arrived may come late: no transaction follows it in its epoch."""
    producer = _in_a_transaction()
    cause = None
    if left == "a failure":
        cause = _REFUSED
    elif left == "a record under way":
        client.waiting = 1
    elif left == "a failed transaction":
        client.state = _REFUSED
    else:
        client.report = _LATER
        producer.send_manifest("tracking", b"manifest")
    assert isinstance(producer.abort(cause), Aborted)
    assert producer.must_replace


def test_a_failed_record_is_no_acknowledged_one(client):
    """A record of the protocol that failed has not arrived; an abort then replaces the producer, and ends the term."""
    producer = _in_a_transaction()
    client.report = _REFUSED
    producer.send_manifest("tracking", b"manifest")
    assert not producer.all_arrive(1.0)
    ended = producer.abort()
    assert isinstance(ended, Ended)
    assert ended.reason == "tracking topic 'tracking' takes no manifest: no"
    assert producer.must_replace


def test_a_time_out_that_brokers_do_not_allow_names_both_settings(client, monkeypatch):
    """A transaction's time-out above the brokers' limit ends the term with the setting to lower, or theirs to raise."""

    def init(_):
        raise KafkaException(KafkaError(KafkaError.INVALID_TRANSACTION_TIMEOUT, "too long"))

    monkeypatch.setattr(client, "init_transactions", init)
    ended = TransactionalProducer(_SETTINGS, timeout_seconds=1.0).init()
    assert ended.reason.startswith("too long; lower transactionTimeout")
    assert "transaction.max.timeout.ms" in ended.reason


def test_a_manifest_that_is_too_large_names_the_setting(client):
    """A tracking topic that takes no batch of a manifest's size is named with the setting to raise."""
    producer = _in_a_transaction()
    client.report = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE, "too large")
    producer.send_manifest("tracking", b"manifest")
    client.report = None
    reason = producer.abort().reason
    assert reason.startswith("tracking topic 'tracking' takes no manifest: too large; raise its max.message.bytes")


def test_a_transaction_that_is_not_open_at_the_broker_is_neither_committed_nor_aborted(client):
    """The outcome of a torn transaction is unknown: the term ends, and no EndTxn is sent that could end another one."""
    producer = _in_a_transaction()
    client.refusals = [_TORN]
    assert isinstance(producer.commit(), Ended)
    client.state = _TORN
    assert not producer.all_arrive(1.0)
    ended = producer.abort()
    assert isinstance(ended, Ended)
    assert "is unknown" in ended.reason
    assert isinstance(producer.abort(_TORN), Ended)
    assert client.aborts == 0


def test_a_commit_that_finds_its_transaction_torn_aborts_none(client):
    """Even where a record has failed before, and Kafka asks for an abort: it could end a later transaction."""
    producer = _in_a_transaction()
    client.report = _REFUSED
    producer.send_manifest("tracking", b"manifest")
    client.refusals = [_Abortable(KafkaError.INVALID_TXN_STATE, "it is not open")]
    assert isinstance(producer.commit(), Ended)
    assert client.aborts == 0


def test_a_commit_that_failed_is_aborted_and_another_producer_follows(client):
    """A commit after which Kafka asks for an abort may be on its way all the same."""
    producer = _in_a_transaction()
    refusal = _Abortable(KafkaError.NOT_COORDINATOR, "it has moved")
    client.refusals = [refusal]
    assert producer.commit() == Aborted(refusal, record_at_fault=False)
    assert producer.must_replace
    assert client.aborts == 1


def test_a_commit_that_was_never_sent_is_aborted(client):
    """With failed deliveries the client sends no EndTxn, so the outcome is known: an abort."""
    producer = _in_a_transaction()
    producer._reports.note(_REFUSED)
    client.refusals = [KafkaError(KafkaError._INCONSISTENT, "a delivery failed")]
    assert producer.commit() == Aborted(_REFUSED, record_at_fault=True), "the record's error tells why"
    assert client.aborts == 1


def test_a_commit_that_broke_the_producer_has_an_unknown_outcome(client):
    """After a fatal error nothing is aborted, whatever else the error says: its transaction may be committed."""
    producer = _in_a_transaction()
    client.refusals = [_Abortable(KafkaError._FENCED, "another one is there", fatal=True)]
    assert isinstance(producer.commit(), Ended)
    assert client.aborts == 0


def test_a_producer_that_could_not_be_replaced_begins_nothing(client):
    """Each `begin` tries to replace the producer again, until that has fenced the old epoch."""
    producer = _in_a_transaction()
    client.waiting = 1
    producer.abort()
    turns = iter([False, True] * 2)
    producer._give_up = lambda: next(turns)
    assert isinstance(producer.replace(lambda: True), Ended)
    assert producer.must_replace
    assert isinstance(producer.begin(), Ended)
    assert producer.must_replace


def test_a_late_report_is_that_of_its_own_transaction(client):
    """Missing reports, and an error, of one transaction do not count in the next."""
    producer = _in_a_transaction()
    client.state, client.report = _REFUSED, _LATER
    producer.send_manifest("tracking", b"manifest")
    assert not producer.all_arrive(1.0)
    assert producer.failure is not None
    producer._must_replace = False
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(client, "begin_transaction", lambda: None)
        producer.begin()
    assert producer.failure is None
    assert producer._reports.are_good


def test_offsets_that_took_long_replace_the_producer(client):
    """A late copy of TxnOffsetCommit would replace later offsets: it is timed as EndTxn is."""
    producer = _in_a_transaction()
    taken = [0.1, 0.5]

    def send(*_):
        client.time += taken.pop(0)

    client.send_offsets_to_transaction = send
    producer.send_offsets([], None, 1.0)
    assert not producer.must_replace
    producer.send_offsets([], None, 1.0)
    assert producer.must_replace


def test_offsets_wait_for_the_records_before_them(client):
    """Offsets are not sent while records are under way, or once one has failed."""
    producer = _in_a_transaction()
    client.send_offsets_to_transaction = lambda *_: pytest.fail("they are sent")
    client.outstanding = [1] * 100
    with pytest.raises(KafkaException):
        producer.send_offsets([], None, 1.0)
    client.outstanding, client.state = [], _REFUSED
    with pytest.raises(KafkaException):
        producer.send_offsets([], None, 1.0)


@pytest.mark.usefixtures("client")
def test_batches_that_stay_as_they_are_replace_no_producer():
    """Only other limits of batches need a new producer."""
    producer = _in_a_transaction()
    producer.limit_batches(None)
    assert not producer.must_replace
    producer.limit_batches(None, unbatched=True)
    assert producer.must_replace
    assert producer.is_unbatched


def test_a_torn_transaction_stays_torn(client):
    """Another failure, reported later, does not hide that the transaction is not open."""
    producer = _in_a_transaction()
    for client.report in (_TORN, _REFUSED):
        producer.send_manifest("tracking", b"manifest")
    assert isinstance(producer.abort(), Ended)
    assert client.aborts == 0


def test_a_broken_producer_is_no_open_transaction(client):
    """The answer that a transaction is open counts for nothing if it is fatal."""
    producer = _in_a_transaction()
    assert producer.all_arrive(1.0)
    client.state = KafkaError(KafkaError._STATE, "broken", fatal=True)
    assert not producer.all_arrive(1.0)


def test_the_failure_of_a_transaction_is_its_cause(client):
    """Records that failed only with their transaction do not stand for the one that it failed for."""
    producer = _in_a_transaction()
    for client.report in (KafkaError(KafkaError._PURGE_QUEUE), _REFUSED):
        producer.send_manifest("tracking", b"manifest")
    assert producer.failure == _REFUSED


def test_a_purged_manifest_is_no_refused_one(client):
    """A manifest that was dropped with its transaction does not end the producer: the next transaction may be good."""
    producer = _in_a_transaction()
    client.report = KafkaError(KafkaError._PURGE_QUEUE)
    producer.send_manifest("tracking", b"manifest")
    assert isinstance(producer.abort(_REFUSED), Aborted)


def test_a_coordinator_that_comes_back_is_waited_for(client, monkeypatch):
    """Fencing is repeated as long as Kafka says that it may be, and succeeds in the end."""
    answers = [_TIMED_OUT, _TIMED_OUT]

    def init(_):
        if answers:
            raise KafkaException(answers.pop(0))

    monkeypatch.setattr(client, "init_transactions", init)
    assert TransactionalProducer(_SETTINGS, timeout_seconds=1.0).init() is None
    assert answers == []


def test_a_client_that_breaks_while_records_are_awaited(client, monkeypatch):
    """The error that a broken client raises there is not raised to the caller: the records have not arrived."""

    def flush(_):
        raise KafkaException(KafkaError(KafkaError._FATAL, "broken", fatal=True))

    producer = _in_a_transaction()
    monkeypatch.setattr(client, "flush", flush)
    client.state = KafkaError(KafkaError._FATAL, "broken", fatal=True)
    assert not producer.all_arrive(1.0)
