"""The beginning of a term without services: the rows that it deletes or holds, and what it writes down."""

from concurrent.futures import Future
from threading import Event
from types import SimpleNamespace

import pytest

from outbox_core.errors import MarkedRowsFound, StoreUnavailable
from outbox_core.harvest import recovery as recovery_module
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.steps import ASK
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.tracking import ForeignLedger, Ledger
from outbox_core.kafka.transactions import Ended
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import HoldSet, MarkedRows, StoredRecord

OURS, ELSEWHERE = "1", "2"


class Thread:
    """A store's thread, whose work is done at once, or never if it `hangs`."""

    def __init__(self, store):
        self.store, self.hangs = store, False

    def submit(self, work):
        done = Future()
        if not self.hangs:
            try:
                done.set_result(work(self.store))
            except StoreUnavailable as error:
                done.set_exception(error)
        return done


class Store:
    """A store that knows ids alone: those of its rows, of the marked ones, and of the held ones."""

    def __init__(self):
        self.rows, self.marked, self.held, self.released = [], [], [], 0
        self.may_hold = True
        self.holds = self.marks = self

    def server_id(self):
        return OURS

    def find(self, ids):
        return [StoredRecord(each, "t", "k", b"v", None, None, -1, 0) for each in ids if each in self.rows]

    def delete_published(self, ids, create_times):
        assert len(ids) == len(create_times)
        before = len(self.rows)
        self.rows = [each for each in self.rows if each not in ids]
        return before - len(self.rows)

    def read(self):
        return HoldSet(may_change=self.may_hold)

    def count(self):
        return MarkedRows(len(self.marked), min(self.marked, default=0), max(self.marked, default=0))

    def hold(self, limit):
        held, self.marked = self.marked[: min(limit, 2)], self.marked[min(limit, 2) :]
        self.held += held
        return len(held)

    def clear(self):
        self.marked = []
        return 0

    def release_held(self):
        self.released += 1
        return 0


class Transactions:
    """A transactional.id with what its tracking topic says.

    Attributes:
        adopted: the states that were written into the tracking topic.
        refused: those that were looked at for a stranger's records.
        torn: the ids that a torn transaction left in Kafka.
    """

    kafka, tracking_topic, timeout, accept_marked = {}, "tracking", 10.0, False

    def __init__(self, ledger, shards=()):
        self.is_foreign = False
        self.adopted, self.refused, self.torn = [], [], []
        self._ledger, self._shards = ledger, shards
        self._producers = 0

    def ensure_topic(self):
        pass

    def relay_shards(self):
        return self._shards

    def new_producer(self):
        self._producers += 1
        return SimpleNamespace(init=lambda _: None, discard=self._discard)

    def _discard(self):
        self._producers -= 1

    @property
    def open_producers(self):
        return self._producers

    def reached(self, _):
        pass

    def ledger(self, *_):
        if self.is_foreign:
            raise ForeignLedger("that is another outbox's")
        return self._ledger

    def refuse_foreign(self, ledger):
        self.refused.append(ledger)

    def is_of_other_server(self, ledger, server):
        return ledger.manifest is not None and ledger.manifest.server != server

    def adopt(self, _, server, settled, __):
        assert server == OURS
        self.adopted.append(settled)
        return Ledger(offset=100)

    def read_torn(self, opening, over, find):
        del opening, over
        yield find(self.torn)


def published(*ids, server=OURS):
    """Return what the tracking topic says after a transaction of these rows."""
    return Ledger(Manifest("box", list(ids), [0] * len(ids), server), offset=7)


@pytest.fixture
def store(monkeypatch):
    """Return a store with ten rows; the tracking topic is there."""
    monkeypatch.setattr(recovery_module, "partition_count", lambda *_: 1)
    made = Store()
    made.rows = list(range(1, 11))
    return made


@pytest.fixture
def make(store):
    """Return a function that makes the recovery of a transactional.id, whose `store_hangs` and `is_over` may be set."""

    def make(transactions):
        marker, purger = Thread(store), Thread(store)
        ctx = SimpleNamespace(
            marker=marker,
            purger=purger,
            limits=SimpleNamespace(drain_timeout=0.0, io_error_backoff=0.0),
            database=SimpleNamespace(recovered=lambda _: None),
            removal=SimpleNamespace(recovered=lambda: None),
            kafka=SimpleNamespace(failed=lambda _: None),
            metrics=HarvestMetrics(),
            wake=Event(),
            has_begun=Event(),
            is_starting=True,
            note_outage=lambda *_: 0.0,
        )
        recovery = Recovery(transactions, lambda: purger.hangs, ctx)
        recovery.purger, recovery.duty = purger, ctx.metrics.activity.duty
        return recovery

    return make


def settle(recovery, transactions):
    """Settle with a producer."""
    producer = transactions.new_producer()
    try:
        return recovery.settle(producer)
    finally:
        producer.discard()


def test_published_rows_of_a_relay_are_deleted_too(make, store):
    """Rows that the last term and each shard of a relay published are deleted; a term goes on with its own ledger."""
    shards = Transactions(published(2)), Transactions(published(3))
    transactions = Transactions(published(1), shards)
    recovery = make(transactions)
    assert settle(recovery, transactions) is None
    assert store.rows == [4, 5, 6, 7, 8, 9, 10]
    assert recovery.ledger == published(1)
    assert [each.open_producers for each in (transactions, *shards)] == [0, 0, 0]
    store.rows = list(range(1, 11))
    make(transactions).settle_if_tracked()
    assert store.rows == [4, 5, 6, 7, 8, 9, 10]


def test_a_relay_is_settled_without_a_tracking_topic_of_ours(make, store, monkeypatch):
    """At-least-once delivery asks for the shards of a relay although there was never a term of exactly once."""
    monkeypatch.setattr(recovery_module, "partition_count", lambda *_: 0)
    make(Transactions(published(1), [Transactions(published(2))])).settle_if_tracked()
    assert store.rows == [1, 3, 4, 5, 6, 7, 8, 9, 10]


def test_what_is_settled_for_good_is_written_down_again_where_nothing_follows(make):
    """A ledger is written anew after a move to another server, a torn batch, or by the other delivery: not else."""
    opening = Ledger(published(1).manifest, Opening("box", 2, 3, ("t",), OURS))
    for ledger, is_written in ((published(1), False), (published(1, server=ELSEWHERE), True), (opening, True)):
        transactions = Transactions(ledger)
        recovery = make(transactions)
        assert settle(recovery, transactions) is None
        assert transactions.adopted == ([ledger] if is_written else [])
        assert recovery.ledger.offset == (100 if is_written else ledger.offset)
    shard = Transactions(published(2))
    transactions = Transactions(published(1), [shard])
    make(transactions).settle_if_tracked()
    assert (transactions.adopted, shard.adopted) == ([published(1)], []), "a relay's next manifest follows"


@pytest.mark.parametrize("is_torn", [False, True])
def test_a_leadership_that_ends_before_the_rows_are_deleted_ends_the_term(make, store, is_torn):
    """Without an answer about the deletion nothing is written down, and nothing is scanned: the next term does it."""
    opening = Opening("box", 2, 3, ("t",), OURS)
    transactions = Transactions(Ledger(None, opening) if is_torn else published(1, server=ELSEWHERE))
    transactions.torn = [2, 3]
    recovery = make(transactions)
    recovery.purger.hangs = True
    recovery._server = OURS
    ended = settle(recovery, transactions)
    assert isinstance(ended, Ended)
    assert "the leadership ended" in ended.reason
    assert store.rows == list(range(1, 11))
    assert transactions.adopted == []


def test_rows_of_a_torn_batch_are_deleted(make, store):
    """Rows that a torn transaction left in Kafka are deleted, and the rest of its batch is not."""
    transactions = Transactions(Ledger(None, Opening("box", 2, 5, ("t",), OURS)))
    transactions.torn = [2, 4]
    assert settle(make(transactions), transactions) is None
    assert store.rows == [1, 3, 5, 6, 7, 8, 9, 10]


def test_a_foreign_ledger_is_obeyed_by_neither_and_refused_by_one(make, store):
    """Another outbox's records end exactly-once delivery; the other one goes on without them."""
    transactions = Transactions(published(1))
    settle(make(transactions), transactions)
    assert transactions.refused == [published(1)]
    transactions.is_foreign = True
    with pytest.raises(ForeignLedger):
        settle(make(transactions), transactions)
    relay = Transactions(published(2))
    relay.is_foreign = True
    with pytest.raises(ForeignLedger):
        settle(make(Transactions(published(1), [relay])), Transactions(published(1)))
    store.rows = [1, 2]
    make(transactions).settle_if_tracked()
    assert store.rows == [1, 2]
    assert relay.open_producers == 0


def test_marked_rows_are_held_all_of_them(make, store):
    """Rows that an at-least-once leader left marked are held, in as many statements as it takes; no mark is cleared."""
    store.marked = [1, 2, 3, 4, 5]
    make(Transactions(Ledger())).refuse_marks()
    assert store.held == [1, 2, 3, 4, 5]
    assert store.released == 0


def test_marked_rows_that_cannot_be_held_are_refused(make, store):
    """Without the right to change holds a term does not begin: what was sent under the marks would be repeated."""
    store.marked, store.may_hold = [1], False
    with pytest.raises(MarkedRowsFound):
        make(Transactions(Ledger())).refuse_marks()
    store.marked = []
    make(Transactions(Ledger())).refuse_marks()


def test_accepted_marks_are_cleared_and_released(make, store):
    """With --accept-marked marks are cleared, and what an earlier term held for its mark is released in any case."""
    transactions = Transactions(Ledger())
    transactions.accept_marked = True
    store.marked = [1]
    make(transactions).refuse_marks()
    assert (store.marked, store.held, store.released) == ([], [], 1)
    make(transactions).refuse_marks()
    assert store.released == 2


def test_a_database_that_goes_away_while_the_whole_table_is_read_is_owed(make, store):
    """A statement over the whole table is owed by nobody, as it may take long; something short before each try is."""
    recovery = make(Transactions(Ledger()))
    recovery.duty.began(0.0)
    counts, reads = [], []

    def goes_away():
        counts.append(dict(recovery.duty.owed(0.0)))
        recovery.purger.hangs = len(counts) > 1  # that should not come
        raise StoreUnavailable("has not answered")

    def is_away():
        reads.append(len(counts))
        if counts:
            recovery.purger.hangs = True  # the leadership is over
            raise StoreUnavailable("cannot connect")

    store.count, store.read = goes_away, is_away
    recovery.refuse_marks()
    assert counts == [{}]
    assert reads == [0, 1]
    assert ASK in recovery.duty.owed(0.0)
