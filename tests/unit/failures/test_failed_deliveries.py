"""At-least-once delivery after failures, step by step, without a database or a broker."""

from concurrent.futures import Future
from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from outbox_core.errors import StoreUnavailable
from outbox_core.harvest import store_calls
from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.context import HarvestLimits
from outbox_core.harvest.failures import backoff_report, failed_deliveries, handler, holds
from outbox_core.harvest.failures.failed_deliveries import FailedDeliveries
from outbox_core.harvest.failures.handler import NO_LETTERS, Letters
from outbox_core.harvest.failures.holds import HoldCache
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.messages import Failure, dead_letter
from outbox_core.metrics import HarvestMetrics
from outbox_core.outage import Outage
from outbox_core.stores.interface import NO_HOLDS, HoldSet, NewHold, StoredRecord, row_id

TIMED_OUT = KafkaError(KafkaError._MSG_TIMED_OUT)
NO_TOPIC = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)
DENIED = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)


class Kafka(Outage):
    """A recorder of the calls about Kafka's outages."""

    def __init__(self):
        self.is_away = False

    def failed(self, error, *, at=""):
        del error, at
        self.is_away = True

    def expire_after(self, seconds):
        del seconds
        self.is_away = False


@pytest.fixture
def clock(monkeypatch):
    """Return a function that moves the clock: `clock(5.0)`."""
    time = [100.0]
    for module in (failed_deliveries, handler, backoff_report, holds, store_calls):
        monkeypatch.setattr(module, "now", lambda: time[-1])
    return lambda seconds: time.append(time[-1] + seconds)


@pytest.fixture
def failures(clock):
    """Return the failures of a harvester that takes 100 records or 40 kB, and tries a quarter of that."""
    del clock
    limits = HarvestLimits(
        mark_query_records=50,
        most_in_transaction=50,
        max_in_flight_records=100,
        max_in_flight_bytes=40_000,
        lane_capacity=1_000,
        mark_backoff=0.01,
        io_error_backoff=0.5,
        delivery_timeout=3.0,
        drain_timeout=10.0,
        max_message_bytes=2**20,
    )
    ctx = SimpleNamespace(
        limits=limits,
        metrics=HarvestMetrics(),
        kafka=Kafka(),
        batches=SimpleNamespace(limit_of=lambda _: None),
        dead_letters=SimpleNamespace(on_poison=False, topic="dead"),
        grant_write="grant WRITE on it",
        marker=Thread(None),
        purger=Thread(Deletions()),
        commits=SimpleNamespace(notify=lambda: None),
        database=SimpleNamespace(recovered=lambda _: None),
        note_outage=lambda *_: 1.0,
    )
    return FailedDeliveries(ctx)


class Thread:
    """A store's thread, whose work is done at once."""

    def __init__(self, store):
        self.store = store

    def submit(self, work):
        done = Future()
        try:
            done.set_result(work(self.store))
        except StoreUnavailable as error:
            done.set_exception(error)
        return done


class Deletions:
    """The purger's store; `error` is raised by it."""

    def __init__(self):
        self.deleted, self.error, self.holds = [], None, self

    def delete_dead_lettered(self, ids, create_times):
        if self.error is not None:
            raise self.error
        assert len(ids) == len(create_times)
        self.deleted += ids


def record(identity, key, topic="t", size=10):
    """Return a stored record."""
    return StoredRecord(identity, topic, key, b"x" * size, None, None, -1, 0)


def failed(record, error=TIMED_OUT, partition=0, *, alone=False):
    """Return its failure."""
    return Failure(record, error, alone=alone, partition=partition)


def ids(records):
    """Return the ids of records."""
    return [record[0] for record in records]


def sent(*records):
    """Return lanes whose records have all been taken."""
    lanes = Lanes(1_000)
    lanes.admit(records)
    lanes.take(1_000)
    return lanes


def hold(failures, lanes, store):
    """Write the holds that wait for it into a store; return the released records."""
    failures._ctx.marker.store = store
    failures.start_holding(lanes)
    return failures.collect_holds(lanes)


def try_again(failures, lanes, *, found=()):
    """Read the rows that are due; return their ids."""
    rows, _ = failures.rows_to_try(lanes)
    if rows:
        lanes.mark_starts()
        failures.take_in_tried(rows, [], found, NO_LETTERS)
        lanes.admit(found)
        lanes.take(1_000)
    return ids(rows)


def test_failed_record_leaves_memory_with_its_key_and_is_tried_later(failures, clock):
    """A key whose record failed is in the table alone, left out of marks, and tried by that record until it arrives."""
    first, second = record(1, "hot"), record(2, "hot")
    lanes = sent(first)
    lanes.admit([second])
    assert failures.handle([failed(first)], lanes) == [first, second]
    assert lanes.held == 0
    assert failures.exclusion(lanes).lanes == {("t", "hot")}
    clock(1.0)
    assert try_again(failures, lanes) == [], "the marks are not cleared yet"
    assert failures.due_in(lanes) == float("inf")
    lanes.reset_done(map(row_id, (first, second)))
    assert failures.due_in(lanes) == 0.0
    assert try_again(failures, lanes, found=[first]) == [1]
    assert try_again(failures, lanes) == [], "it is under way"
    assert list(failures.tried) == [row_id(first)]
    failures.succeeded([first])
    assert not failures.tried
    assert failures.exclusion(lanes) == (set(), set(), frozenset())


def test_record_that_may_be_to_blame_is_tried_alone_at_once(failures):
    """After a refused batch each record is tried alone, at once; the one that fails again is held."""
    records = [record(1, "a"), record(2, None)]
    lanes = sent(*records)
    back = failures.handle([failed(each, TOO_LARGE) for each in records], lanes)
    lanes.reset_done(map(row_id, back))
    assert try_again(failures, lanes, found=records) == [1, 2]
    failures.succeeded(records[:1])
    lanes.reset_done(map(row_id, failures.handle([failed(records[1], TOO_LARGE, alone=True)], lanes)))
    assert len(failures._to_hold) == 1
    assert not failures.backoffs
    store = Store(HoldSet(ids=frozenset({2})), HoldSet(ids=frozenset({2})))
    assert hold(failures, lanes, store) == []
    assert store.written == 1
    assert failures.holds.ids == {2}
    assert not failures._to_hold


def test_what_cannot_be_held_keeps_no_others_waiting(failures, clock):
    """While a hold cannot be written, its key and denied topics are left out of the marks, which go on."""
    records = [record(1, "a"), record(2, None), record(3, "c", "denied"), record(4, "d")]
    lanes = sent(*records)
    refused = [failed(records[n], error, alone=True) for n, error in enumerate((TOO_LARGE, TOO_LARGE, DENIED))]
    lanes.reset_done(map(row_id, failures.handle(refused, lanes)))
    store = Store(*[NO_HOLDS] * 4)
    store.error = StoreUnavailable("no room for holds")
    for _ in range(2):
        with pytest.raises(StoreUnavailable):
            hold(failures, lanes, store)
        assert failures.may_mark
        assert len(failures._to_hold) == 3
        assert failures.exclusion(lanes) == ({("t", "a"), ("denied", "c")}, {row_id(records[1])}, {"denied"})
        assert failures.hold_due_in(lanes) == 1.0
        clock(1.0)
    store.error = None
    hold(failures, lanes, store)
    assert (store.added, failures._to_hold, failures.exclusion(lanes)) == ([3], [], (set(), set(), set()))
    failures.handle([failed(records[3], TOO_LARGE, alone=True)] * 1_000, sent(records[3]))
    assert not failures.may_mark, "values are in memory"


def test_row_that_is_gone_ends_its_backoff(failures, clock):
    """If the row by which a destination is tried was deleted, or is held, the destination's keys flow again."""
    one, two = record(1, "a"), record(2, "b")
    lanes = sent(one, two)
    lanes.reset_done(map(row_id, failures.handle([failed(one), failed(two)], lanes)))
    clock(1.0)
    assert try_again(failures, lanes, found=[]) == [1]
    assert not failures.backoffs
    assert failures.exclusion(lanes).lanes == set()


def test_what_did_not_fit_stays_due(failures):
    """Rows that one statement did not return for their size are tried by the next one."""
    large = [record(number, f"k{number}", size=9_000) for number in (1, 2, 3)]
    lanes = sent(*large)
    lanes.reset_done(map(row_id, failures.handle([failed(each, TOO_LARGE) for each in large], lanes)))
    assert try_again(failures, lanes, found=large[:2]) == [1, 2, 3]
    assert try_again(failures, lanes) == [], "there is no room"
    failures.succeeded(large[:2])
    assert try_again(failures, lanes, found=large[2:]) == [3]


def test_what_did_not_fit_for_its_bytes_stays_due(failures):
    """A text has more bytes than characters: rows behind the last one that was found may not have fit, either."""
    texts = [StoredRecord(number, "t", f"k{number}", "\u20ac" * 100, None, None, -1, 0) for number in (1, 2, 3)]
    lanes = sent(*texts)
    lanes.reset_done(map(row_id, failures.handle([failed(each, TOO_LARGE) for each in texts], lanes)))
    assert try_again(failures, lanes, found=texts[1:2]) == [1, 2, 3]
    assert failures.backoffs.waiting == {("t", "k2"), ("t", "k3")}, "the first one is gone"
    assert try_again(failures, lanes, found=[]) == [3]
    assert failures.backoffs.waiting == {("t", "k2")}


def test_room_of_tried_records_is_bounded(failures, clock):
    """Records that are tried take at most a quarter of the room, and no more than there is."""
    records = [record(number, None, f"t{number}") for number in range(100)]
    lanes = sent(*records)
    lanes.reset_done(map(row_id, failures.handle([failed(each, NO_TOPIC) for each in records], lanes)))
    clock(1.0)
    lanes.admit([record(number, None) for number in range(1_000, 1_090)])
    rows, _ = failures.rows_to_try(lanes)
    assert len(rows) == 10
    lanes = Lanes(10)
    rows, _ = failures.rows_to_try(lanes)
    assert len(rows) == 25
    found = [record(row.id, None, f"t{row.id}") for row in rows]
    failures.take_in_tried(rows, [], found, NO_LETTERS)
    assert failures.rows_to_try(lanes) == ([], [])
    assert failures.due_in(lanes) == float("inf")
    failures.forget_tried(found[:3])
    assert len(failures.rows_to_try(lanes)[0]) == 3


def test_a_tried_record_that_fails_again_is_tried_no_longer(failures, clock):
    """Its place among those that are tried is free, and it is backed off for longer."""
    lanes, one = sent(record(1, "a")), record(1, "a")
    lanes.reset_done(map(row_id, failures.handle([failed(one)], lanes)))
    for _ in range(2):
        clock(1.0)
        assert try_again(failures, lanes, found=[one]) == [1]
        assert list(failures.tried) == [row_id(one)]
        lanes.reset_done(map(row_id, failures.handle([failed(one, alone=True)], lanes)))
        assert not failures.tried


def test_holds_that_come_up_while_others_are_written_wait_for_the_next_time(failures):
    """Each hold is written once, and records that failed meanwhile are left out until theirs is written, too."""
    records = [record(1, "a"), record(2, "b")]
    lanes = sent(*records)
    failures._ctx.marker.store = store = Store(*[NO_HOLDS] * 4)
    assert not failures.may_mark, "the holds are not known"
    lanes.reset_done(map(row_id, failures.handle([failed(records[0], TOO_LARGE, alone=True)], lanes)))
    failures.start_holding(lanes)
    assert not failures.may_mark, "they are being written"
    lanes.reset_done(map(row_id, failures.handle([failed(records[1], TOO_LARGE, alone=True)], lanes)))
    failures.collect_holds(lanes)
    assert failures.exclusion(lanes).lanes == {("t", "b")}
    assert failures.may_mark
    hold(failures, lanes, store)
    assert store.added == [1, 1]
    assert failures.exclusion(lanes).lanes == set()


def test_topic_that_is_missing_is_released_as_a_whole(failures):
    """Records of a missing topic that wait in memory go back with the one that failed."""
    lanes = sent(record(1, "a"))
    waiting = [record(2, "b"), record(3, "c", "u"), record(4, None)]
    lanes.admit(waiting)
    assert ids(failures.handle([failed(record(1, "a"), NO_TOPIC)], lanes)) == [1, 2, 4]
    assert failures.exclusion(lanes).topics == {"t"}
    assert lanes.take(10) == [waiting[1]]


def test_outage_is_what_cannot_be_reached(failures):
    """The outage ends with the last unreachable destination, even if topics are missing or records back off."""
    kafka = failures._ctx.kafka
    records = [record(1, "a"), record(2, "b", "missing"), record(3, "c")]
    lanes = sent(*records)
    failures.hold_cache.is_writable = False
    failures.handle(
        [failed(records[0]), failed(records[1], NO_TOPIC), failed(records[2], TOO_LARGE, alone=True)], lanes
    )
    failures.update()
    assert kafka.is_away
    assert failures.backoffs.is_unreachable
    failures.succeeded([records[0]])
    assert failures.backoffs
    failures.update()
    assert not kafka.is_away


def request(failures, lanes, *numbers):
    """Have dead letters of these records requested."""
    failures.apply_holds(HoldSet(ids=frozenset(numbers), requests=dict.fromkeys(numbers, "boo")), lanes)


def letter(identity):
    """Return a dead letter."""
    return dead_letter(record(identity, None), "dead", "boo")


def test_dead_letters_are_read_once(failures):
    """Requested dead letters go in batches; those that arrived are not read again while their requests are known."""
    lanes = Lanes(10)
    request(failures, lanes, 1, 2)
    assert failures.rows_to_try(lanes) == ([], [1, 2])
    _, letters = failures.take_in_tried([], [1, 2], [], Letters([letter(1), letter(2)]))
    assert ids(letters) == [1, 2]
    lanes.admit(letters)
    request(failures, lanes, 1, 2, 3)
    assert failures.rows_to_try(lanes) == ([], []), "some are under way"
    assert failures.succeeded(letters) == []
    failures._ctx.purger.store.error = StoreUnavailable("away")
    failures.start_deleting()
    assert failures.collect_deleted() == []
    assert failures.rows_to_try(lanes) == ([], []), "others wait until they are deleted"
    failures._ctx.purger.store.error, failures._deletion.retry_at = None, 0.0
    assert failures.is_deleting
    failures.start_deleting()
    assert failures.collect_deleted() == letters
    assert failures._ctx.purger.store.deleted == [1, 2]
    assert not failures.is_deleting
    lanes.purged(letters)
    assert failures.rows_to_try(lanes) == ([], [3])
    failures.apply_holds(NO_HOLDS, lanes)
    request(failures, lanes, 1)
    assert failures.rows_to_try(lanes) == ([], [1]), "it is another one's"


def test_a_dead_letter_that_failed_or_went_back_is_read_again(failures, clock):
    """Only those that arrived, or are under way, are not read again."""
    lanes = Lanes(10)
    request(failures, lanes, 1, 2)
    letters = Letters([letter(1), letter(2)])
    failures.take_in_tried([], [1, 2], [], letters)
    lanes.admit(letters.records)
    lanes.take(10)
    lanes.reset_done(map(row_id, failures.handle([failed(letters.records[0], alone=True)], lanes)))
    failures.forget_tried(lanes.release(letters.records[1]))
    assert not failures.tried
    clock(1.0)
    rows, _ = failures.rows_to_try(lanes)
    assert ids(rows) == [1], "its topic is tried by it"
    failures.take_in_tried(rows, [], [], Letters([letter(1)]))
    failures.succeeded([letter(1)])
    failures.start_deleting()
    failures.collect_deleted()
    lanes = Lanes(10)
    assert failures.rows_to_try(lanes) == ([], [1, 2])


def test_dead_letters_that_arrive_during_a_deletion_are_deleted_by_the_next(failures):
    """Each is deleted once, and none is forgotten."""
    lanes = Lanes(10)
    request(failures, lanes, 1, 2)
    _, letters = failures.take_in_tried([], [1, 2], [], Letters([letter(1), letter(2)]))
    failures.succeeded(letters[:1])
    failures.start_deleting()
    failures.succeeded(letters[1:])
    assert failures.collect_deleted() == letters[:1]
    failures.start_deleting()
    assert failures.collect_deleted() == letters[1:]
    assert failures._ctx.purger.store.deleted == [1, 2]
    assert not failures.tried


def test_a_new_leader_id_knows_nothing_of_what_was_tried(failures):
    """All of it is in the table: rows that were tried, and dead letters, also those that arrived, are read again."""
    lanes = Lanes(10)
    request(failures, lanes, 1, 2)
    _, letters = failures.take_in_tried([], [1, 2], [], Letters([letter(1), letter(2)]))
    failures.succeeded(letters[:1])
    failures.leader_id_renewed()
    assert not failures.is_deleting
    assert not failures.tried
    assert failures.rows_to_try(lanes) == ([], [1, 2])


def test_a_row_that_is_no_dead_letter_any_more_is_left_to_the_other_marks(failures, clock):
    """The row of a dead letter that waits, and is released, is not tried by itself: others of its key may be before."""
    lanes, row = Lanes(10), record(7, "k")
    failures.backoffs.failed(dead_letter(row, "dead", "boo"), ("dead", None))
    clock(1.0)
    rows, _ = failures.rows_to_try(lanes)
    assert failures.take_in_tried(rows, [], [row], NO_LETTERS) == ([], [])
    assert not failures.backoffs
    assert not failures.tried


def test_dead_letter_that_is_refused_stays_held(failures):
    """Dead letters that may not be written stay held, with the reason, also those that were not tried."""
    lanes, why = Lanes(10), []
    request(failures, lanes, 1, 2)
    _, letters = failures.take_in_tried([], [1, 2], [], Letters([letter(1), letter(2)]))
    lanes.admit(letters)
    lanes.take(10)
    failures.handle([failed(letters[0], DENIED, alone=True), failed(letters[1], TIMED_OUT, alone=True)], lanes)
    store = Store(NO_HOLDS, NO_HOLDS)
    store.refuse_dead_letters = lambda ids, reason: why.append((ids, reason))
    hold(failures, lanes, store)
    assert why == [([1, 2], f"the dead-letter topic refused it: {DENIED.str()}; grant WRITE on it")]
    assert failures.backoffs.topics == {"dead"}
    assert failures.rows_to_try(lanes)[1] == [], "the topic is backed off"


def test_dead_letter_topic_that_cannot_be_made_is_backed_off(failures, clock):
    """Letters whose topic cannot be made wait for its backoff, and all of them are read again after it."""
    lanes = Lanes(10)
    request(failures, lanes, 1, 2)
    letters = Letters([letter(1), letter(2)], NO_TOPIC)
    assert failures.take_in_tried([], [1, 2], [], letters) == ([], [])
    assert failures.rows_to_try(lanes) == ([], [])
    clock(1.0)
    (row,), _ = failures.rows_to_try(lanes)
    assert failures.take_in_tried([row], [], [], Letters([letter(1)], NO_TOPIC)) == ([], [])
    assert failures.backoffs, "the row is not gone"
    clock(1.0)
    (row,), _ = failures.rows_to_try(lanes)
    _, (first,) = failures.take_in_tried([row], [], [], Letters([letter(1)]))
    failures.succeeded([first])
    failures.start_deleting()
    failures.collect_deleted()
    assert 2 in failures.rows_to_try(lanes)[1]


class Store:
    """A store of holds that returns given sets, and keeps the written ones."""

    def __init__(self, *reads):
        self.reads = list(reads)
        self.added = []
        self.error = None
        self.holds = self

    @property
    def written(self):
        """The number of holds."""
        return sum(self.added)

    def read(self):
        return self.reads.pop(0)

    def add(self, holds):
        if self.error is not None:
            raise self.error
        self.added.append(len(holds))

    def release_gone(self):
        return 0


def test_gauge_is_set_by_every_read():
    """Each read of the holds sets the gauge, also in a new leadership that finds none."""
    registry = CollectorRegistry()
    metrics = HarvestMetrics(registry, "o")
    HoldCache(metrics).read(Store(HoldSet(frozenset({"t"}))))
    assert registry.get_sample_value("outbox_holds", {"outbox": "o"}) == 1
    HoldCache(metrics).read(Store(NO_HOLDS))
    assert registry.get_sample_value("outbox_holds", {"outbox": "o"}) == 0


def test_holds_are_written_in_short_statements():
    """Any number of holds is written in short statements."""
    store = Store(NO_HOLDS, NO_HOLDS)
    HoldCache(HarvestMetrics()).write(store, [NewHold("t", None, n, "refused", "boo") for n in range(2_500)])
    assert store.added == [1_000, 1_000, 500]


def test_holds_that_may_not_be_written():
    """Holds that may not be written count, and none is added."""
    store = Store(*[HoldSet(frozenset({"t"}), may_change=False)] * 2)
    hold_cache = HoldCache(HarvestMetrics())
    assert hold_cache.read(store).topics == {"t"}
    assert not hold_cache.is_writable
    assert hold_cache.write(store, [NewHold("t", None, 1, "refused", "boo")]).topics == {"t"}
    assert store.added == []
