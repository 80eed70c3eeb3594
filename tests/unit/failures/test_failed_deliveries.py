"""At-least-once delivery after failures, step by step, without a database or a broker."""

from types import SimpleNamespace

import pytest
from prometheus_client import CollectorRegistry

from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.context import HarvestLimits
from outbox_core.harvest.failures.failed_deliveries import FailedDeliveries
from outbox_core.harvest.failures.holds import HoldCache
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.messages import Failure
from outbox_core.metrics import HarvestMetrics
from outbox_core.outage import Outage
from outbox_core.stores.interface import NO_HOLDS, HoldSet, NewHold, StoredRecord, bytes_of, row_id

TIMED_OUT = KafkaError(KafkaError._MSG_TIMED_OUT)
NO_TOPIC = KafkaError(KafkaError.UNKNOWN_TOPIC_OR_PART)
TOO_LARGE = KafkaError(KafkaError.MSG_SIZE_TOO_LARGE)


class Kafka(Outage):
    """A recorder of the calls about Kafka's outages."""

    def __init__(self):
        self.is_away = False

    def failed(self, error):
        del error
        self.is_away = True

    def expire_after(self, seconds):
        del seconds
        self.is_away = False


@pytest.fixture
def failures():
    """Return the failures of a harvester that takes 100 records or 40 kB, and probes of 25 records or 10 kB."""
    limits = HarvestLimits(
        mark_query_records=50,
        max_in_flight_records=100,
        max_in_flight_bytes=40_000,
        lane_capacity=1_000,
        mark_backoff=0.01,
        io_error_backoff=0.5,
        delivery_timeout=3.0,
        drain_timeout=10.0,
    )
    ctx = SimpleNamespace(
        limits=limits,
        metrics=HarvestMetrics(),
        marker=None,
        kafka=Kafka(),
        database=Outage("database", None),
        dead_letters=SimpleNamespace(on_poison=False),
        grant_write="grant WRITE on it",
    )
    return FailedDeliveries(ctx)


def record(identity, key, topic="t", size=10):
    """Return a stored record."""
    return StoredRecord(identity, topic, key, b"x" * size, None, None, -1, 0)


def failed(record, error=TIMED_OUT, partition=0):
    """Return its failure."""
    return Failure(record, error, alone=False, partition=partition)


def ids(records):
    """Return the ids of records."""
    return [record[0] for record in records]


def test_slow_mark_does_not_overtake_records_that_went_back_meanwhile(failures):
    """A slow mark's records of a key go back if the key failed, went back and arrived again in the meantime."""
    lanes = Lanes(1_000)
    lanes.admit([record(1, "hot"), record(2, "hot")])
    lanes.take(10)
    failures.exclusion()  # a mark is sent; it will see a third record of the key, but not the second, which is ours yet
    back = failures.handle([failed(record(1, "hot"))], lanes)
    assert ids(back) == [2]
    failures.reset_done(map(row_id, back))
    failures.succeeded([record(1, "hot")])
    assert not failures.backoffs
    sent, back = failures.admissible([record(3, "hot")])
    assert (ids(sent), ids(back)) == ([], [3])


def test_what_waits_behind_a_probe_goes_back(failures):
    """An unreachable key keeps only its probe in memory; the records behind it go back, and keep their order."""
    lanes = Lanes(1_000)
    hot = [record(n, "hot", size=1_000) for n in range(1, 31)]
    lanes.admit([*hot, record(31, "other")])
    assert ids(lanes.take(10)) == [1, 31]
    failures.exclusion()  # a mark is sent that brings more of the key
    back = failures.handle([failed(hot[0])], lanes)
    assert ids(back) == list(range(2, 31))
    assert (lanes.held, lanes.held_bytes) == (2, bytes_of([hot[0], record(31, "other")]))
    late = [record(40, "hot"), record(41, "other")]
    admitted, returned = failures.admissible(late)
    assert (ids(admitted), ids(returned)) == ([41], [40])
    assert failures.exclusion().lanes == {("t", "hot")}

    failures.succeeded([hot[0]])
    assert failures.exclusion().lanes == {("t", "hot")}, "the others are still on their way back"
    failures.reset_done(map(row_id, [*back, late[0]]))
    assert failures.exclusion().lanes == set()
    lanes.admit(hot[1:3])
    assert not lanes.has_ready, "the probe's purge is not committed"
    lanes.purged([hot[0]])
    assert ids(lanes.take(10)) == [2]


def test_mark_under_way_does_not_refill_the_lane_of_a_probe(failures):
    """A mark under way brings no records into a probe's lane, even if none waited behind the probe."""
    lanes = Lanes(1_000)
    probe = record(1, "hot")
    lanes.admit([probe])
    lanes.take(10)
    failures.exclusion()
    assert failures.handle([failed(probe)], lanes) == []
    assert ids(failures.admissible([record(2, "hot"), record(3, None)])[0]) == [3]


def test_probes_are_bounded(failures):
    """Beyond a number of probes, or of their bytes, a destination has none: its record goes back to the table."""
    lanes = Lanes(1_000)
    large = [record(n, f"k{n}", size=4_000) for n in range(4)]
    lanes.admit(large)
    lanes.take(10)
    assert ids(failures.handle([failed(each, partition=each[0]) for each in large], lanes)) == [2, 3]
    assert lanes.held_bytes == bytes_of(large[:2])
    small = [record(n, f"k{n}", size=1) for n in range(10, 50)]
    lanes.admit(small)
    lanes.take(100)
    assert ids(failures.handle([failed(each, partition=each[0]) for each in small], lanes)) == list(range(33, 50))
    assert lanes.held == 25
    assert len(failures.exclusion().lanes) == 44


def test_outage_is_what_cannot_be_reached(failures):
    """The outage ends with the last unreachable destination, even if topics are missing or records back off."""
    lanes = Lanes(1_000)
    kafka = failures._ctx.kafka
    records = [record(1, "a"), record(2, "b", "missing"), record(3, "c")]
    lanes.admit(records)
    lanes.take(10)
    failures.hold_cache.is_writable = False
    failures.handle(
        [failed(records[0]), failed(records[1], NO_TOPIC), Failure(records[2], TOO_LARGE, alone=True)], lanes
    )
    assert kafka.is_away
    assert failures.backoffs.is_unreachable
    failures.take_due()
    assert kafka.is_away
    failures.succeeded([records[0]])
    assert failures.backoffs
    assert not failures.backoffs.is_unreachable
    failures.take_due()
    assert not kafka.is_away


def test_probe_that_fails_of_something_else_is_no_outage(failures):
    """A probe that fails again because its topic is missing does not count as an outage any more."""
    lanes = Lanes(1_000)
    unknown = record(1, "a")
    lanes.admit([unknown])
    lanes.take(10)
    failures.handle([failed(unknown, partition=-1)], lanes)
    assert failures.backoffs.is_unreachable
    failures.handle([failed(unknown, NO_TOPIC)], lanes)
    assert not failures.backoffs.is_unreachable
    assert failures.backoffs.topics == {"t"}


class Store:
    """A store of holds that returns given sets, and keeps the written ones."""

    def __init__(self, *reads):
        self.reads = list(reads)
        self.written = []
        self.holds = self

    def read(self):
        return self.reads.pop(0)

    def add(self, holds):
        self.written.append(len(holds))

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
    assert store.written == [1_000, 1_000, 500]


def test_holds_that_may_not_be_written():
    """Holds that may not be written count, and none is added."""
    store = Store(*[HoldSet(frozenset({"t"}), may_change=False)] * 2)
    hold_cache = HoldCache(HarvestMetrics())
    assert hold_cache.read(store).topics == {"t"}
    assert not hold_cache.is_writable
    assert hold_cache.write(store, [NewHold("t", None, 1, "refused", "boo")]).topics == {"t"}
    assert store.written == []
