"""What must hold between two steps: each state that the protocols exclude stops the process, before harm is done."""

import contextlib
import logging
import subprocess
import sys
import threading
from types import SimpleNamespace
from uuid import uuid4

import pytest

from outbox_core.cli.harvest import _wait_for_end
from outbox_core.config import HarvestConfig
from outbox_core.election.messages import Claim, Heartbeat
from outbox_core.election.protocol import Ownership, Predecessor, State
from outbox_core.errors import InvariantBroken, OutboxError, must
from outbox_core.harvest import Harvester
from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.at_least_once.publisher import Publisher
from outbox_core.harvest.exactly_once.term import Term
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.store_calls import StoreCall
from outbox_core.harvest.watermark import Evidence, LowWatermark
from outbox_core.kafka import tracking
from outbox_core.kafka import transactions as transaction
from outbox_core.kafka.clients import KafkaError, KafkaException, TopicPartition
from outbox_core.kafka.manifest import Manifest, Opening
from outbox_core.kafka.transactions import TransactionalProducer
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import Floor, SequenceSnapshot, StoredRecord
from outbox_core.stores.postgres.store import PostgresStore
from outbox_queue import QueueConfig
from outbox_queue.consuming import start_writers
from outbox_queue.consuming.buffer import PrefetchBuffer
from outbox_queue.consuming.marker_writer import MarkerRecord
from outbox_queue.consuming.start_writers import PlainStartWriter
from outbox_queue.metrics import QueueMetrics
from outbox_queue.redelivery import loop as tracker_loop
from outbox_queue.redelivery.loop import TrackerLoop
from outbox_queue.redelivery.partition import MarkerPartition
from outbox_queue.redelivery.tracker import RedeliveryTracker
from tests.queueing import start_marker
from tests.unit.harvest.term_world import World

QUEUES = QueueConfig(bootstrap_servers="nowhere:1")
CREATE_TIME = 1


def row(identity, key="k"):
    """Return a row as a mark does."""
    return StoredRecord(identity, "t", key, b"v", None, None, -1, identity)


@contextlib.contextmanager
def stops(text):
    """Expect an invariant to be found broken."""
    with pytest.raises(InvariantBroken, match=text):
        yield


# -- the tool


def test_a_broken_invariant_is_one_line_and_an_error_of_ours(caplog):
    """It is logged once, where it was found; a good one says nothing, and its message is not even formatted."""
    must(caplog.records == [], "never formatted: %d", "no number")
    assert not caplog.records
    with pytest.raises(OutboxError, match="a purge must name acknowledged records; 17 was not"):
        must(caplog.records, "a purge must name acknowledged records; %d was not", 17)
    (line,) = caplog.records
    assert line.levelno == logging.CRITICAL
    assert line.getMessage() == "an invariant is broken, and this stops: " + line.args[0]


def test_it_stays_on_without_asserts():
    """`python -O`, which removes `assert`, leaves it."""
    code = "from outbox_core.errors import must; assert False; must(False, 'still here')"
    ended = subprocess.run([sys.executable, "-O", "-c", code], capture_output=True, text=True, check=False)
    assert ended.returncode == 1
    assert "InvariantBroken: still here" in ended.stderr


def test_the_command_tells_where_it_was(caplog):
    """`outbox harvest` ends with exit code 1, and logs the traceback, as a report needs it."""
    told = []
    totals = SimpleNamespace(published=1, dead_letters=0, failed=0, holds=0)
    metrics = SimpleNamespace(totals=lambda: totals)
    harvester = SimpleNamespace(join=lambda: must(told, "it must hold"), metrics=metrics)
    assert _wait_for_end(harvester, told.append) == 1
    assert told == ["it must hold"]
    assert any(line.exc_info for line in caplog.records)


# -- at least once


def test_a_record_is_in_one_lane_once():
    """A record that is in a lane is not admitted again: it would be published again behind its followers."""
    lanes = Lanes(10)
    lanes.admit([row(1), row(2)])
    with stops("must be in one lane once; 1 are twice"):
        lanes.admit([row(2), row(3)])


def test_a_purge_moves_the_lanes_of_records_under_way():
    """A purge of a record that is in no lane, or twice in the purge, moves no lane."""
    lanes = Lanes(10)
    lanes.admit([row(1), row(2), row(3)])
    with stops("records under way; 1 of 2 are not"):
        lanes.purged([row(1), row(1)])
    assert len(lanes.take(10)) == 1


def test_bytes_in_lanes_do_not_fall_below_zero():
    """Bytes that were counted for fewer records than they are taken back for are noticed."""
    lanes = Lanes(10)
    lanes.admit([row(1)])
    lanes.held_bytes -= 1
    with stops("must not fall below 0; they are -1"):
        lanes.purged([row(1)])


def test_reports_are_counted_once():
    """A second delivery report of one record, and a new producer while one is in flight, are refused."""
    reports = []
    client = SimpleNamespace(produce=lambda *_, on_delivery, **__: reports.append(on_delivery))
    publisher = Publisher(lambda _: client, id_header="", outbox_name="box")
    publisher.send([row(1)], 0.0)
    with stops("replaced with records in flight; 1 are"):
        publisher.renew({})
    reports[0](None, None)
    publisher.take_delivered()
    reports[0](None, None)
    with stops("each record must be reported once; 0 of -1"):
        publisher.take_delivered()


def test_a_store_has_one_call_under_way():
    """A second call would forget the result of the first."""
    call = StoreCall(SimpleNamespace(submit=lambda _: object()), SimpleNamespace(metrics=HarvestMetrics()))
    call.start(lambda _: None)
    with stops("while another is under way"):
        call.start(lambda _: None)


def test_a_term_begins_after_the_last_one():
    """A harvester never has two terms."""
    harvester = Harvester(
        HarvestConfig(base_kafka_config={"bootstrap.servers": "x"}, data_source="postgresql://x/y", name="n")
    )
    leadership = SimpleNamespace(leader_id=uuid4(), deadline=float("inf"))
    harvester._announced, harvester._term = leadership.leader_id, SimpleNamespace()
    with stops("before the last one has ended"):
        harvester._begin_term(SimpleNamespace(elector=SimpleNamespace(leadership=leadership)))


# -- exactly once


@pytest.fixture
def world(monkeypatch):
    """Return a leadership over an outbox in memory and a cluster that obeys."""
    return World(monkeypatch)


def test_a_scan_returns_no_row_in_flight(world):
    """A scan that returns a row which it was told to leave out is not published."""
    table = world.table
    table.add("t", 25)
    scan, is_over = table.scan, threading.Event()
    table.scan = lambda query: scan(query._replace(without_rows=()))

    def delete_published(ids, _):
        is_over.wait(5.0 if ids else 0.0)  # the rows stay in flight
        return len(ids)

    table.delete_published = delete_published
    with stops("a scan must return no row in flight"):
        world.run()
    is_over.set()
    assert all(len(set(ids)) == len(ids) for ids in world.cluster.published.values())


def test_a_manifest_names_what_was_produced(world, monkeypatch):
    """A batch of which a record was not produced is not committed."""
    world.table.add("t", 3)
    fill = Term._fill

    def fill_less(self, producer, records, *more):
        ended = fill(self, producer, records, *more)
        producer.sent = producer.sent[:-1]
        return ended

    monkeypatch.setattr(Term, "_fill", fill_less)
    with stops("a manifest must name the rows that were produced"):
        world.run()
    assert not world.cluster.published
    assert world.table.left() == [1, 2, 3]


def test_a_commit_comes_after_the_last_purge(world, monkeypatch):
    """No transaction is committed while the rows of the last one are not purged: the last manifest would miss them."""
    world.table.add("t", 25)
    monkeypatch.setattr(Term, "_purge_is_committed", lambda *_: True)
    with stops("after the purge of the last transaction"):
        world.run()
    assert len(world.cluster.published["t"]) < 25


def test_a_manifest_has_a_create_time_for_each_id():
    """A manifest that nobody could read is not written."""
    with stops("it has 1 for 2"):
        Manifest("box", [1, 2], [7]).encode()


class Client:
    """A transactional client whose commits succeed and whose records are reported at once, or never."""

    def __init__(self, *, reports=True):
        self.reports = reports

    def init_transactions(self, _):
        pass

    def begin_transaction(self):
        pass

    def produce(self, *_, on_delivery, **__):
        if self.reports:
            on_delivery(None, SimpleNamespace(offset=lambda: 7))

    def flush(self, _):
        return 0

    def commit_transaction(self, _):
        pass


def transactional(monkeypatch, client):
    """Return a producer over a client."""
    monkeypatch.setattr(transaction, "make_producer", lambda _: client)
    return TransactionalProducer({"transactional.id": "t"}, timeout_seconds=1.0)


def test_no_transaction_begins_in_an_epoch_with_a_late_request(monkeypatch):
    """A replacement that leaves the epoch as it is does not let the next transaction begin."""
    producer = transactional(monkeypatch, Client())
    producer._must_replace = True
    monkeypatch.setattr(producer, "replace", lambda *_: None)
    with stops("an epoch in which a request may be late"):
        producer.begin()


def test_a_commit_succeeds_with_its_manifest_acknowledged(monkeypatch):
    """A commit that says yes before its manifest is acknowledged, or that was torn, is not believed."""
    good = transactional(monkeypatch, Client())
    assert good.begin() is None
    assert good.send_manifest("tracking", b"m") is None
    assert good.commit() == transaction.Committed()
    silent = transactional(monkeypatch, Client(reports=False))
    silent.begin()
    silent.send_manifest("tracking", b"m")
    with stops("a commit must fail unless"):
        silent.commit()
    good.begin()
    good._reports.is_torn = True
    with stops("a commit must fail unless"):
        good.commit()


def test_the_last_manifest_lies_before_the_barrier(monkeypatch):
    """What is behind our own barrier is not our predecessor's manifest."""
    monkeypatch.setattr(tracking, "make_consumer", lambda _: None)
    reader = tracking.LedgerReader({}, "g", "tracking", 0, lambda: False)
    monkeypatch.setattr(reader, "_between", lambda *_: (SimpleNamespace(offset=lambda: 9), None, None))
    with stops("before the barrier at offset 9; it was read at 9"):
        reader.ledger("id", 9)


def test_a_torn_transaction_deletes_its_own_rows():
    """Of a torn transaction, rows outside of its opening's ids are not deleted."""
    deleted = []
    recovery = Recovery(SimpleNamespace(read_torn=lambda *_: [[row(5), row(11)]]), lambda: False, None)
    recovery._delete = lambda ids, _: deleted.append(ids)
    with stops(r"not \[11\]"):
        recovery._settle_torn(recovery._transactions, Opening("box", 1, 9, ("t",)))
    assert not deleted


def test_a_purge_names_ids_and_create_times():
    """A purge whose two lists differ in length, which SQL would fill up with NULL, is not sent."""
    store = PostgresStore.__new__(PostgresStore)
    with stops("names 1 for 2"):
        store.delete_published([1, 2], [7])
    with stops("names 2 for 1"):
        store.purge(uuid4(), [1], [7, 8])


# -- the floor


def scanned(watermark, last_id, *ids, writers=()):
    """Have a scan from the watermark's floor find these ids."""
    sight = SequenceSnapshot(last_id, "here", frozenset(writers), "")
    watermark.scanned(watermark.plan(frozenset()), Evidence(sight), [row(each) for each in ids], 0.0)


def test_the_floor_is_not_above_what_is_settled():
    """A floor above the settled id, which may hide rows, ends the harvest."""
    watermark = LowWatermark(HarvestMetrics(), lambda: 1000.0)
    scanned(watermark, 5, 1, 2)
    watermark.floor = Floor(6, "here")
    with stops("6 is above 5"):
        scanned(watermark, 5, 7)


def test_the_settled_id_does_not_fall():
    """An id that waits to be settled and is lower than the settled one ends the harvest."""
    watermark = LowWatermark(HarvestMetrics(), lambda: 1000.0)
    scanned(watermark, 5, 1)
    watermark._settled = 9
    with stops("5 follows 9"):
        scanned(watermark, 5, 2, writers=["1/1"])


# -- the election


def candidate():
    """Return an ownership that has read its own claim at offset 0, and sent a heartbeat at 10.0, to be read next."""
    ownership = Ownership("me", Predecessor(5.0), timeout=5.0, interval=0.25)
    claim = ownership.next_signal(10.0)
    assert isinstance(claim, Claim)
    ownership.observe(0, claim, 10.0)
    beat = ownership.next_signal(10.0)
    assert isinstance(beat, Heartbeat)
    return ownership, beat


def test_a_lease_rests_on_a_claim_that_was_read():
    """No lease begins for a claim that has not come back."""
    ownership, beat = candidate()
    ownership.state = State.CLAIMING
    with stops("must rest on a claim that was read back"):
        ownership.observe(1, beat, 10.5)
    assert ownership.leadership is None


def test_a_lease_does_not_begin_in_the_future():
    """A heartbeat that is read before it was sent gives no lease."""
    ownership, beat = candidate()
    with stops("must be read after it was sent"):
        ownership.observe(1, beat, 9.0)
    assert ownership.leadership is None


def test_a_lease_is_renewed_by_its_timeout_at_most():
    """A lease that would last for longer than its timeout from now is noticed."""
    ownership, beat = candidate()
    ownership.observe(1, beat, 10.5)
    ownership.leadership = ownership.leadership.renewed(1000.0, 5.0)
    beat = ownership.next_signal(11.0)
    with stops("must not shrink nor pass 16.1"):
        ownership.observe(2, beat, 11.1)


# -- queues


def marker(markers, offset, number, stamp=1000):
    """Have a start marker read."""
    value = start_marker(0, number, 100, b"q", b"p", attempt=1, enqueued_at_ms=1, max_attempts=3)
    markers.read(offset, (CREATE_TIME, stamp), b"key", value, 0.0)


@pytest.fixture
def markers():
    """Return a partition of which a start marker at offset 4 was read."""
    markers = MarkerPartition(0, tick_interval=5000.0)
    marker(markers, 4, 1)
    return markers


def test_markers_are_read_in_their_order(markers):
    """A marker that was read before would revive its message."""
    with stops("3 follows 4"):
        marker(markers, 3, 2)


def test_an_offset_is_committed_up_to_what_was_read(markers):
    """A message in progress whose marker lies behind all that was read is noticed before a commit."""
    assert markers.offset_to_commit() == 4
    next(iter(markers._in_progress)).marker_offset = 5
    with stops("5 is not, up to 5"):
        markers.offset_to_commit()


def test_only_messages_in_progress_are_redelivered(markers):
    """Nothing is redelivered before a tick has been read back, and no message that has ended meanwhile."""
    (entry,) = markers.unfinished()
    with stops("before a tick has been read back"):
        markers.check_unfinished([entry])
    value, _ = markers.send_tick(0.0, may_judge=True)
    with stops("before a tick has been read back"):
        markers.check_unfinished([entry])
    markers.read(5, (CREATE_TIME, 2000), None, value, 1.0)
    markers.check_unfinished([entry])
    markers.finish([entry])
    with stops(r"\(0, 1\)"):
        markers.check_unfinished([entry])


class Member:
    """A consumer that records commits, and has its partitions revoked when it is closed."""

    def __init__(self):
        self.commits = []

    def subscribe(self, _, on_assign, on_revoke, on_lost):
        del on_lost
        self.revoked = lambda: on_revoke(self, [TopicPartition("markers", 0)])
        on_assign(self, [TopicPartition("markers", 0)])

    def memberid(self):
        return "member"

    def consume(self, *_):
        return []

    def close(self):
        self.revoked()

    def commit(self, offsets, **_):
        self.commits += [one.offset for one in offsets]

    def assign(self, _):
        pass

    def unsubscribe(self):
        raise AssertionError("a tracker that works stays")

    pause = resume = assign


def test_a_tracker_that_found_an_invariant_broken_commits_nothing(monkeypatch, caplog):
    """It ends with the error, and does not commit what it is not to be trusted with, not even as it leaves."""
    member = Member()
    ticks = SimpleNamespace(poll=lambda _: 0, produce=lambda *_, **__: None, purge=lambda **_: None, flush=lambda _: 0)
    monkeypatch.setattr(tracker_loop, "make_consumer", lambda _: member)
    monkeypatch.setattr(tracker_loop, "make_producer", lambda _: ticks)
    monkeypatch.setattr(tracker_loop, "discard", lambda _: None)
    tracker = RedeliveryTracker(QUEUES)
    tracker._loop = loop = TrackerLoop(QUEUES, QueueMetrics(), lambda: False)
    begin = loop.begin

    def begin_in_the_wrong_state():
        begin()
        tracked = loop._partitions[0]
        marker(tracked.markers, 4, 1)
        tracked.committed = 9
        tracked.attend = lambda _: True

    monkeypatch.setattr(loop, "begin", begin_in_the_wrong_state)
    tracker._run()
    assert isinstance(tracker._error, InvariantBroken)
    assert "the committed offset must rise; 4 follows 9" in str(tracker._error)
    assert not member.commits
    assert [line.levelname for line in caplog.records if "must rise" in line.getMessage()] == ["CRITICAL"]


def test_offsets_follow_the_acknowledgements_of_markers(monkeypatch):
    """Offsets are not committed for a marker that was given up, and whose report is missing still."""
    left = [1, 1]
    client = SimpleNamespace(
        produce=lambda *_, **__: None, flush=lambda _: left.pop(0) if left else 0, purge=lambda: None
    )
    monkeypatch.setattr(start_writers, "make_producer", lambda _: client)
    monkeypatch.setattr(start_writers, "discard", lambda _: None)
    writer = PlainStartWriter(QUEUES, SimpleNamespace(commit=lambda **_: pytest.fail("it was committed")))
    with pytest.raises(start_writers.NotStarted) as raised:
        writer.write([MarkerRecord(0, b"k", b"v")], {0: 1}, lambda: 0.0)
    assert raised.value.cause.code() == KafkaError._TIMED_OUT
    assert not isinstance(raised.value, KafkaException)


def test_no_more_messages_are_in_progress_than_may_be():
    """Messages beyond `max_in_progress` are handed to nobody."""
    buffer = PrefetchBuffer(concurrency=1, max_in_progress=2, capacity=2, processing_seconds=10.0)
    with stops("no more than max_in_progress, 2, must be in progress; not 3"):
        buffer.put([SimpleNamespace() for _ in range(3)], there_are_more=False)
    assert buffer.in_progress == 0
