"""What at-least-once delivery does about failures, step by step, without a database or a broker."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from outbox_core.harvest.bad_records import BadRecords
from outbox_core.harvest.holding import HoldBook
from outbox_core.harvest.lanes import Lanes
from outbox_core.harvest.outage import Outage
from outbox_core.harvest.publisher import Failure
from outbox_core.harvest.surroundings import Timing
from outbox_core.kafka import KafkaError
from outbox_core.metrics import HarvestMetrics
from outbox_core.ports import NO_HOLDS, HoldSet, NewHold, bytes_of

TIMED_OUT = KafkaError(KafkaError._MSG_TIMED_OUT)
NO_TOPIC = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)


class Kafka(Outage):
    """Remembers what it was told."""

    def __init__(self):
        self.is_away = False

    def began(self, error):
        del error
        self.is_away = True

    def faded(self, seconds):
        del seconds
        self.is_away = False


@pytest.fixture
def bad():
    """The bad records of a harvester that takes 100 records or 40 kB, probes of 25 records or 10 kB."""
    timing = Timing(
        mark_query_records=50,
        max_in_flight_records=100,
        max_in_flight_bytes=40_000,
        lane_capacity=1_000,
        mark_backoff=0.01,
        io_error_backoff=0.5,
        delivery_timeout=3.0,
        drain_timeout=10.0,
    )
    surroundings = SimpleNamespace(
        metrics=HarvestMetrics(), kafka=Kafka(), database=Outage("database", None), grant_write="grant WRITE on it"
    )
    return BadRecords(timing, surroundings, dead_letter=False)


def record(identity, key, topic="t", size=10):
    """A stored record."""
    return (identity, topic, key, b"x" * size, None, None, -1, 0)


def failed(record, error=TIMED_OUT, partition=0):
    """Its failure."""
    return Failure(record, error, alone=False, partition=partition)


def ids(records):
    """The ids of records."""
    return [record[0] for record in records]


def test_slow_mark_does_not_overtake_records_that_went_back_meanwhile(bad):
    """A mark answers after its key failed, went back to the table and arrived again: its records go back, too."""
    lanes = Lanes(1_000)
    lanes.admit([record(1, "hot"), record(2, "hot")])
    lanes.take(10)
    bad.exclusion()  # a mark is sent; it will see a third record of the key, but not the second, which is ours yet
    back = bad.judge([failed(record(1, "hot"))], lanes)
    assert ids(back) == [2]
    bad.reset_done(ids(back))
    bad.succeeded([record(1, "hot")])
    assert not bad.parking
    sent, back = bad.sift([record(3, "hot")])
    assert (ids(sent), ids(back)) == ([], [3])


def test_what_waits_behind_a_probe_goes_back(bad):
    """A hot key on an unreachable partition keeps one record in memory, not those behind it; their order stays."""
    lanes = Lanes(1_000)
    hot = [record(n, "hot", size=1_000) for n in range(1, 31)]
    lanes.admit([*hot, record(31, "other")])
    assert ids(lanes.take(10)) == [1, 31]
    bad.exclusion()  # a mark is sent that brings more of the key
    back = bad.judge([failed(hot[0])], lanes)
    assert ids(back) == list(range(2, 31))
    assert (lanes.held, lanes.held_bytes) == (2, bytes_of([hot[0], record(31, "other")]))
    late = [record(40, "hot"), record(41, "other")]
    admitted, returned = bad.sift(late)
    assert (ids(admitted), ids(returned)) == ([41], [40])
    assert bad.exclusion().lanes == {("t", "hot")}

    bad.succeeded([hot[0]])
    assert bad.exclusion().lanes == {("t", "hot")}, "the others are still on their way back"
    bad.reset_done([*ids(back), 40])
    assert bad.exclusion().lanes == set()
    lanes.admit(hot[1:3])
    assert not lanes.has_ready, "the probe's purge is not committed"
    lanes.purged([hot[0]])
    assert ids(lanes.take(10)) == [2]


def test_mark_under_way_does_not_refill_the_lane_of_a_probe(bad):
    """Although nothing waited behind it when it failed."""
    lanes = Lanes(1_000)
    probe = record(1, "hot")
    lanes.admit([probe])
    lanes.take(10)
    bad.exclusion()
    assert bad.judge([failed(probe)], lanes) == []
    assert ids(bad.sift([record(2, "hot"), record(3, None)])[0]) == [3]


def test_probes_are_bounded(bad):
    """Beyond a number of probes, or of their bytes, a place rests without one: the record goes back to the table."""
    lanes = Lanes(1_000)
    large = [record(n, f"k{n}", size=4_000) for n in range(4)]
    lanes.admit(large)
    lanes.take(10)
    assert ids(bad.judge([failed(each, partition=each[0]) for each in large], lanes)) == [2, 3]
    assert lanes.held_bytes == bytes_of(large[:2])
    small = [record(n, f"k{n}", size=1) for n in range(10, 50)]
    lanes.admit(small)
    lanes.take(100)
    assert ids(bad.judge([failed(each, partition=each[0]) for each in small], lanes)) == list(range(33, 50))
    assert lanes.held == 25
    assert len(bad.exclusion().lanes) == 44


def test_outage_is_what_cannot_be_reached(bad):
    """It is over when no place is closed for that reason any more, whatever topics are missing or records rest."""
    lanes = Lanes(1_000)
    kafka = bad._with.kafka
    records = [record(1, "a"), record(2, "b", "missing"), record(3, "c")]
    lanes.admit(records)
    lanes.take(10)
    bad.book.is_kept = False
    bad.judge([failed(records[0]), failed(records[1], NO_TOPIC), Failure(records[2], TOO_LARGE, alone=True)], lanes)
    assert kafka.is_away
    assert bad.parking.is_unreachable
    bad.take()
    assert kafka.is_away
    bad.succeeded([records[0]])
    assert bad.parking
    assert not bad.parking.is_unreachable
    bad.take()
    assert not kafka.is_away


def test_probe_that_fails_of_something_else_is_no_outage(bad):
    """A topic of which nothing was known at first, and that turns out to be missing."""
    lanes = Lanes(1_000)
    unknown = record(1, "a")
    lanes.admit([unknown])
    lanes.take(10)
    bad.judge([failed(unknown, partition=-1)], lanes)
    assert bad.parking.is_unreachable
    bad.judge([failed(unknown, NO_TOPIC)], lanes)
    assert not bad.parking.is_unreachable
    assert bad.parking.topics == {"t"}


class Store:
    """Holds of which each read is given; what is written is kept."""

    def __init__(self, *reads):
        self.reads = list(reads)
        self.written = []

    def holds(self):
        return self.reads.pop(0)

    def hold(self, holds):
        self.written.append(len(holds))

    def release_gone(self):
        return 0


def test_gauge_is_set_by_every_read():
    """A new leadership that finds nothing held shows that, whatever an earlier one has shown."""
    registry = CollectorRegistry()
    metrics = HarvestMetrics(registry, "o")
    HoldBook(metrics).read(Store(HoldSet(frozenset({"t"}))))
    assert registry.get_sample_value("outbox_holds", {"outbox": "o"}) == 1
    HoldBook(metrics).read(Store(NO_HOLDS))
    assert registry.get_sample_value("outbox_holds", {"outbox": "o"}) == 0


def test_holds_are_written_in_short_statements():
    """However many there are."""
    store = Store(NO_HOLDS, NO_HOLDS)
    HoldBook(HarvestMetrics()).write(store, [NewHold("t", None, n, "refused", "boo") for n in range(2_500)])
    assert store.written == [1_000, 1_000, 500]


def test_holds_that_may_not_be_written():
    """They count, and none is added."""
    store = Store(*[HoldSet(frozenset({"t"}), may_change=False)] * 2)
    book = HoldBook(HarvestMetrics())
    assert book.read(store).topics == {"t"}
    assert not book.is_kept
    assert book.write(store, [NewHold("t", None, 1, "refused", "boo")]).topics == {"t"}
    assert store.written == []
