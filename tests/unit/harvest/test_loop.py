"""Mark-purge/reset turn by turn: a table in memory, a Kafka client that is told what to report, and a virtual clock."""

from concurrent.futures import Future
from itertools import pairwise
from threading import Event
from types import SimpleNamespace
from uuid import uuid4

import pytest

from outbox_core.commit_signal import CommitFlag
from outbox_core.election import Leadership
from outbox_core.errors import RowsHeld, RowsRemain, StoreUnavailable
from outbox_core.events import LeaderRefreshed
from outbox_core.harvest import store_calls
from outbox_core.harvest.at_least_once import loop as loop_module
from outbox_core.harvest.at_least_once import send_window
from outbox_core.harvest.at_least_once.loop import AtLeastOnce
from outbox_core.harvest.at_least_once.publisher import Publisher
from outbox_core.harvest.at_least_once.send_window import SendWindow
from outbox_core.harvest.context import DeadLetterTopic, HarvestContext, HarvestLimits
from outbox_core.harvest.failures import backoff_report, failed_deliveries, handler, holds
from outbox_core.harvest.steps import DELETE
from outbox_core.harvest.watermark import ScanPlan
from outbox_core.kafka.batch_sizes import BatchSizes
from outbox_core.kafka.clients import KafkaError, KafkaException
from outbox_core.metrics import HarvestMetrics
from outbox_core.monitoring.meter import Meter
from outbox_core.outage import Outage
from outbox_core.stores.interface import NO_FLOOR, HoldSet, MarkedBatch, MarkedRows, StoredRecord, lane_of, row_id

TURN_SECONDS = 0.1
DELIVERY_SECONDS = 3.0
THEIRS = uuid4()


class Thread:
    """A store's thread. Its work is done at once, and known one turn later; while it `hangs`, only after that."""

    def __init__(self, store):
        self.hangs = False
        self._store, self._hanging = store, []

    def submit(self, work):
        done = Future()
        try:
            result, error = work(self._store), None
        except Exception as raised:
            result, error = None, raised
        self._hanging.append((done, result, error))
        self.answer()
        return done

    def answer(self):
        if not self.hangs:
            for done, result, error in self._hanging:
                done.set_result(result) if error is None else done.set_exception(error)
            self._hanging.clear()


class Table:
    """An outbox with marks.

    Attributes:
        rows: by id.
        marks: leader IDs by row.
        held: its holds.
        log: what was done: marks with the ids that they returned, purges, resets.
        errors: by statement, raised by the next one; a mark in doubt takes effect all the same.
    """

    def __init__(self):
        self.rows, self.marks, self.log, self.errors = {}, {}, [], {}
        self.held = HoldSet()
        self.holds = self
        self.during_mark = self.during_purge = lambda: None

    def add(self, *keys, topic="t"):
        """Stash a record for each key; its value is its id."""
        for key in keys:
            identity = max(self.rows, default=0) + 1
            self.rows[identity] = StoredRecord(identity, topic, key, b"%d" % identity, None, None, -1, identity)

    def mark(self, leader_id, query):
        selected = [
            row
            for row in self.rows.values()
            if self.marks.get(row.id) != leader_id
            and lane_of(row) not in query.without_keys
            and row_id(row) not in query.without_rows
            and row.topic not in query.without_topics
            and not query.holds.covers(row)
            and (query.only_rows is None or row_id(row) in query.only_rows)
        ][: query.limit]
        self.marks.update((row.id, leader_id) for row in selected)
        self.during_mark()
        self.log.append(("mark", [row.id for row in selected]))
        self._raise("mark")
        return MarkedBatch(len(selected), [row for row in selected if self.marks[row.id] == leader_id])

    def find_lost(self, leader_id, known, _):
        self.log.append(("look", []))
        self._raise("look")
        lost = [each for each in self.rows if self.marks.get(each) == leader_id and each not in known]
        return MarkedRows(len(lost), min(lost, default=0), max(lost, default=0))

    def purge(self, leader_id, ids, create_times):
        assert len(ids) == len(create_times)
        self.during_purge()
        self._raise("purge")
        ours = [each for each in ids if self.marks.get(each) == leader_id]
        self.log.append(("purge", ours))
        for each in ours:
            del self.rows[each], self.marks[each]
        return len(ours)

    def reset(self, leader_id, ids):
        self.log.append(("reset", list(ids)))
        ours = [each for each in ids if self.marks.get(each) == leader_id]
        for each in ours:
            del self.marks[each]
        return len(ours)

    def read(self):
        self._raise("read")
        return self.held

    def fetch(self, ids):
        return [self.rows[each] for each in ids if each in self.rows]

    def delete_dead_lettered(self, ids, create_times):
        assert len(ids) == len(create_times)
        self._raise("letters")
        self.held = HoldSet()
        for each in ids:
            del self.rows[each]

    def release_gone(self):
        return 0

    def is_empty(self):
        return not self.rows

    def _raise(self, statement):
        error = self.errors.pop(statement, None)
        if error is not None:
            raise error


class Client:
    """A Kafka client: `sent` are the ids that it took, `waiting` those that it has not reported."""

    def __init__(self, all_sent):
        self.sent, self.waiting = [], {}
        self._all_sent, self._is_purged = all_sent, False
        self.on_produce = lambda: None
        self.raises = None
        self.lot = 10_000

    def produce(self, topic, value, key, partition, *, on_delivery, headers):
        del topic, key, partition, headers
        if len(self.waiting) >= self.lot:
            raise BufferError("queue full")
        self.sent.append(int(value))
        self._all_sent.append(int(value))
        self.waiting[int(value)] = on_delivery
        self.on_produce()

    def deliver(self, *ids, error=None):
        """Report records, all if none is named."""
        for each in ids or list(self.waiting):
            self.waiting.pop(each)(error, SimpleNamespace(partition=lambda: 0))

    def poll(self, _):
        if self.raises is not None:
            error, self.raises = self.raises, None
            raise KafkaException(error)
        if self._is_purged:
            self._is_purged = False
            self.deliver(error=KafkaError(KafkaError._PURGE_QUEUE))
        return 0

    flush = poll

    def purge(self, **_):
        self._is_purged = True


class Watermark:
    """A settled floor that is always at the head; what makes it fall is logged."""

    def __init__(self, log):
        self._log = log

    def reset(self, reason):
        self._log.append(("floor is void", reason))

    def went_back(self, records):
        self._log.append(("went back", [record.id for record in records]))

    def plan(self, left_out):
        del left_out
        return ScanPlan(NO_FLOOR, NO_FLOOR, gathers=False, describes=frozenset(), resets=0)

    def scanned(self, *_):
        pass


class World:
    """One leadership over a table and a client.

    Attributes:
        clients: all that were made.
        sent: ids in the order in which they were sent, by any client.
        events: those that the leadership told.
    """

    def __init__(self, monkeypatch):
        self.table, self.clients, self.events, self.sent = Table(), [], [], []
        self.time = 1_000.0
        for module in (loop_module, send_window, failed_deliveries, handler, backoff_report, holds, store_calls):
            monkeypatch.setattr(module, "now", lambda: self.time)
        monkeypatch.setattr(loop_module, "Recovery", lambda *_: SimpleNamespace(settle_if_tracked=lambda: None))
        self.marker, self.purger = Thread(self.table), Thread(self.table)
        wake, metrics, leader_id = Event(), HarvestMetrics(), uuid4()
        self.elector = SimpleNamespace(leadership=Leadership(leader_id, 0, float("inf")))
        self.ctx = HarvestContext(
            elector=self.elector,
            limits=HarvestLimits(
                mark_query_records=10,
                most_in_transaction=10,
                max_in_flight_records=100,
                max_in_flight_bytes=2**20,
                lane_capacity=100,
                mark_backoff=0.01,
                io_error_backoff=0.05,
                delivery_timeout=DELIVERY_SECONDS,
                drain_timeout=1.0,
                max_message_bytes=2**20,
            ),
            marker=self.marker,
            purger=self.purger,
            watermark=Watermark(self.table.log),
            metrics=metrics,
            meter=Meter(60.0, lambda: self.time),
            emit=self.events.append,
            wake=wake,
            commits=CommitFlag(wake),
            database=Outage("database", loop_module._log),
            kafka=Outage("kafka", loop_module._log),
            dead_letters=DeadLetterTopic(topic="letters", on_poison=False, ensure=lambda: None, forbidden=set),
            grant_write="grant WRITE",
            send_window=SendWindow(DELIVERY_SECONDS, metrics),
            batches=BatchSizes(),
            removal=Outage("removal", loop_module._log),
        )
        publisher = Publisher(self._make_client, id_header="id", outbox_name="box")
        self.loop = AtLeastOnce(leader_id, self.ctx, publisher, None)

    def _make_client(self, _):
        self.clients.append(Client(self.sent))
        return self.clients[-1]

    @property
    def client(self):
        """The client that records are sent through, and not those that are tried alone."""
        return self.clients[0]

    @property
    def log(self):
        """The calls that changed the table."""
        return self.table.log

    def run(self, *script):
        """Harvest; after each turn comes a step of the script, None for nothing, and then the end is asked for."""
        steps = iter(script)

        def wait(_):
            self.time += TURN_SECONDS
            self.loop._publisher.poll(0)
            for thread in (self.marker, self.purger):
                thread.answer()
            step = next(steps, self.loop.stop)
            if step is not None:
                step()

        self.loop._wait = wait
        self.loop.run()

    def deliver(self):
        """Report all records as delivered, also those that go alone."""
        for client in self.clients:
            client.deliver()


@pytest.fixture
def world(monkeypatch):
    """Return a world."""
    return World(monkeypatch)


def marks(world):
    """Return the ids that each mark returned, but for empty ones."""
    return [ids for what, ids in world.log if what == "mark" and ids]


def test_records_of_a_key_follow_each_others_purge(world):
    """A record is sent once the purge of the one before it is committed; other keys do not wait."""
    world.table.add("a", "a", "b")
    world.purger.hangs = True

    def is_purged():
        assert world.client.sent == [1, 3]
        world.purger.hangs = False

    world.run(None, None, world.deliver, None, is_purged, None, None, world.deliver, None)
    assert world.client.sent == [1, 3, 2]
    assert not world.table.rows


def test_a_leadership_begins_at_the_head(world):
    """The floor of an earlier leadership counts no more: rows that it had in its hands may lie below."""
    world.table.add("a")
    world.run(None, world.deliver, None)
    assert world.log[0] == ("floor is void", "a new leader ID")


def test_a_leadership_that_ends_clears_its_marks_of_what_it_has_not_sent(world):
    """Records that were sent are awaited and purged; the marks of all others are cleared, once."""
    world.table.add("a", "a", "a")
    world.run(None, None, world.loop.stop, None, world.deliver, None)
    assert world.client.sent == [1]
    assert sorted(world.table.rows) == [2, 3]
    assert world.table.marks == {}
    assert [ids for what, ids in world.log if what == "reset"] == [[2, 3]]


def test_no_row_is_marked_once_the_lease_is_over(world):
    """A lease that ends while records are handed over starts no other mark: its rows may be the successor's."""
    world.table.add(*"abcdefghij")
    taken = len(marks(world))

    def end():
        world.elector.leadership = None
        world.table.add("k")

    world.client.on_produce = end
    world.run(None, None, None)
    assert len(marks(world)) == taken + 1
    assert 11 not in [each for ids in marks(world) for each in ids]


@pytest.mark.parametrize("left", [DELIVERY_SECONDS - 1, None])
def test_nothing_is_sent_without_room_in_a_lease_of_ones_own(world, left):
    """Records wait while the lease is too short for their delivery, and never use the lease of another leadership."""
    world.table.add("a")
    ours = world.elector.leadership

    def change():
        other = Leadership(uuid4(), 1, float("inf"))
        world.elector.leadership = other if left is None else Leadership(ours.leader_id, 0, world.time + left)

    change()
    if left is None:
        world.loop._leads = lambda: True
    world.run(None, None, world.loop.stop)
    assert world.client.sent == []
    assert world.table.marks == {}


def test_records_in_flight_are_cancelled_once_the_lease_is_over(world):
    """A successor must not meet them: they are cancelled, and their marks are cleared."""
    world.table.add("a", "b")

    def end():
        world.elector.leadership = None

    world.run(None, None, end, None)
    assert world.client.sent == [1, 2]
    assert not world.client.waiting
    assert world.table.marks == {}
    assert sorted(world.table.rows) == [1, 2]


def test_an_error_cancels_what_is_in_flight(world):
    """A harvester that fails leaves nothing in the client that could be sent after its successor's records."""
    world.table.add("a")

    def fail():
        raise RuntimeError("boo")

    with pytest.raises(RuntimeError, match="boo"):
        world.run(None, None, fail)
    assert world.client.sent == [1]
    assert not world.client.waiting


def test_a_batch_that_is_not_ours_alone_is_not_sent(world):
    """If another leader has marked one of its rows, none of a batch is sent before everything is marked anew."""
    world.table.add("a", "b")
    first = world.loop.leader_id

    def rival():
        world.table.marks[1] = THEIRS
        world.table.during_mark = lambda: None

    world.table.during_mark = rival
    world.run(None, lambda: world.client.sent == [] or pytest.fail("it is sent"), *[None] * 8, world.deliver, None)
    assert ("reset", [2]) in world.log
    assert world.loop.leader_id != first
    assert [event.leader_id for event in world.events if isinstance(event, LeaderRefreshed)] == [world.loop.leader_id]
    assert world.client.sent == [1, 2]


def test_a_row_that_comes_back_while_it_is_in_flight_is_marked_anew(world):
    """Another leader has marked it in between: it is not sent again before it has arrived, nor is what follows it."""
    world.table.add("a", "a")

    def steal():
        world.table.marks[1] = THEIRS
        world.table.add("b")
        world.ctx.commits.notify()

    def is_not_repeated():
        assert world.client.sent == [1]

    world.run(
        None,
        None,
        steal,
        *[None] * 8,
        is_not_repeated,
        world.deliver,
        *[None] * 10,
        world.deliver,
        None,
        None,
        world.deliver,
        None,
    )
    assert world.client.sent[:2] == [1, 1]
    assert sorted(world.client.sent) == [1, 1, 2, 3]
    assert ("floor is void", "a new leader ID") in world.log[1:]
    assert not world.table.rows


@pytest.mark.parametrize("statement", ["mark", "read"])
def test_rows_that_may_be_marked_unknown_to_us_are_marked_anew(world, statement):
    """A mark in doubt, or one after which the holds could not be read, has marked rows that nobody would ask for."""
    world.table.add("a")
    world.table.errors["mark"] = StoreUnavailable("connection lost", in_doubt=True) if statement == "mark" else None
    if statement == "read":
        world.table.during_mark = lambda: (
            world.table.errors.setdefault("read", StoreUnavailable("no answer")),
            stale(),
        )

    def stale():
        world.loop._failures.hold_cache.invalidate()
        world.table.during_mark = lambda: None

    world.run(*[None] * 10, world.deliver, None, None)
    assert world.client.sent == [1]
    assert not world.table.rows


def test_rows_with_our_own_mark_that_come_back_are_marked_anew(world, caplog):
    """Rows that carry the leader's mark, and that it does not know, are found after a minute; known ones are not."""
    world.table.add("a", "b")

    def put_back():
        world.table.add("c", "d")
        world.table.marks.update({3: world.loop.leader_id, 4: world.loop.leader_id})

    def wait_a_minute():
        assert world.sent == [1, 2], "no mark returns them"
        world.time += 61.0

    world.run(
        None, None, put_back, None, None, wait_a_minute, None, None, world.deliver, *[None] * 6, world.deliver, None
    )
    assert world.sent == [1, 2, 3, 4]
    assert caplog.text.count("2 rows of the outbox (ids 3 to 4) carry the mark of this leadership") == 1
    assert caplog.text.count("carry the mark") == 1


def test_a_mark_that_the_holds_refuse_reads_them_again(world):
    """A hold that was added since they were read makes the mark fail; the next one knows it."""
    world.table.add("a")
    reads = []
    world.table.read = lambda: reads.append(world.time) or world.table.held

    def change():
        world.table.errors["mark"] = RowsHeld("a row is held")
        world.table.held = HoldSet(topics=frozenset({"t"}))

    world.table.during_mark = change
    world.run(*[None] * 3)
    assert len(reads) > 1
    assert reads[1] - reads[0] < holds.READ_EVERY_SECONDS
    assert world.client.sent == []


def test_a_purge_without_an_answer_is_repeated(world):
    """Acknowledged rows are deleted all the same, and the marks that were to be cleared with them are."""
    world.table.add("a", "a")
    world.table.errors["purge"] = StoreUnavailable("connection lost")
    world.run(None, None, world.deliver, *[None] * 4, world.deliver, None)
    assert world.client.sent == [1, 2]
    assert not world.table.rows


def test_rows_that_another_leader_has_taken_move_no_lane(world):
    """If fewer rows are deleted than asked for, the followers are not sent as if it were done: all is marked anew."""
    world.table.add("a", "a", "b")

    def steal():
        world.table.marks[1] = THEIRS
        world.table.during_purge = lambda: None

    world.table.during_purge = steal
    world.run(None, None, world.deliver, *[None] * 12, world.deliver, None, None, world.deliver, None)
    assert world.client.sent == [1, 3, 1, 2]
    assert not world.table.rows


def test_a_failed_record_comes_before_its_followers(world):
    """It goes back with them, without our marks, is tried by its row alone, and they follow once it has arrived."""
    world.table.add("a", "a", "b")

    def fail():
        world.client.deliver(3)
        world.client.deliver(1, error=KafkaError(KafkaError.INVALID_RECORD))

    world.run(
        None, None, fail, *[None] * 6, world.deliver, *[None] * 4, world.deliver, *[None] * 4, world.deliver, None
    )
    assert ("reset", [1, 2]) in world.log
    assert any(entry[0] == "went back" for entry in world.log)
    assert [client.sent for client in world.clients] == [[1, 3, 2], [1]]
    assert [1] in marks(world), "it is marked by its row alone"
    assert not world.table.rows


def test_keys_whose_marks_are_being_cleared_are_left_out(world):
    """Until the marks of released rows are cleared their key is not marked: a later record would overtake."""
    world.table.add("a", "a")

    def fail():
        world.purger.hangs = True
        world.client.deliver(error=KafkaError(KafkaError._MSG_TIMED_OUT))
        world.table.add("a")

    def go_on():
        assert [3] not in marks(world)
        world.purger.hangs = False

    world.run(
        None,
        None,
        fail,
        *[None] * 4,
        go_on,
        *[None] * 6,
        world.deliver,
        *[None] * 4,
        world.deliver,
        *[None] * 4,
        world.deliver,
        None,
    )
    assert world.sent == [1, 1, 2, 3]
    assert not world.table.rows


def test_a_broken_producer_is_replaced_and_all_is_marked_anew(world):
    """After a fatal error what failed is sent through another producer, in its order."""
    world.table.add("a", "a")

    def fail():
        world.client.deliver(error=KafkaError(KafkaError._FATAL, "broken", fatal=True))

    world.run(None, None, fail, *[None] * 6, world.deliver, None, None, world.deliver, None)
    assert [client.sent for client in world.clients] == [[1], [1, 2]]
    assert not world.table.rows


def test_what_is_held_meanwhile_goes_back(world):
    """Records of a topic that is held while they wait are not sent, and their marks are cleared."""
    world.table.add("a", "a")
    world.table.add("b", topic="u")
    world.client.lot = 1

    def pause():
        world.table.held = HoldSet(topics=frozenset({"t", "u"}))

    def go_on():
        assert world.sent == [1]
        assert world.table.marks.keys() == {1}
        world.client.lot = 10
        world.table.held = HoldSet()

    world.run(None, None, pause, *[None] * 6, go_on, *[None] * 10, world.deliver, *[None] * 4, world.deliver, None)
    assert sorted(world.sent) == [1, 2, 3]
    assert not world.table.rows


def test_records_that_the_client_does_not_take_wait_in_their_order(world):
    """A full queue of the client loses and reorders nothing."""
    world.table.add(*"abcde")
    world.client.lot = 2
    world.run(None, None, world.deliver, None, world.deliver, None, world.deliver, None)
    assert world.client.sent == [1, 2, 3, 4, 5]
    assert not world.table.rows


def test_nothing_more_is_published_while_it_cannot_be_deleted(world):
    """Without the right to delete rows marks would only have more of them published again."""
    world.table.add("a")

    def refuse():
        world.purger._store = SimpleNamespace(purge=lambda *_: (_ for _ in ()).throw(RowsRemain("no right")))
        world.deliver()

    world.run(None, None, refuse, None, None, lambda: world.table.add("b"), *[None] * 8)
    assert world.sent == [1]


def test_a_table_is_drained_when_nothing_is_in_flight_or_waits(world):
    """An empty mark is not the end while a record is in flight, or is to be tried again."""
    world.table.add("a")
    world.loop._drain = True
    world.table.is_empty = lambda: True

    def fail():
        assert not world.loop.drained
        world.client.deliver(error=KafkaError(KafkaError._MSG_TIMED_OUT))

    world.run(*[None] * 4, fail, *[None] * 6, world.deliver, *[None] * 4, lambda: pytest.fail("it is not drained"))
    assert world.loop.drained
    assert world.sent == [1, 1]


@pytest.mark.parametrize("first", ["a", ""])
def test_a_hold_that_a_mark_learns_of_counts_for_what_it_returned(world, first):
    """Holds that are read after a mark keep its rows back, and those that waited: their marks are cleared."""
    world.table.add(*first)
    world.client.lot = 0

    def mark_slowly():
        world.time += holds.READ_EVERY_SECONDS
        world.table.held = HoldSet(topics=frozenset({"t"}))

    def go_on():
        world.table.add("b")
        world.table.during_mark = mark_slowly
        world.ctx.commits.notify()

    def is_held():
        world.client.lot = 10

    world.run(None, None, go_on, *[is_held] * 6)
    assert world.sent == []
    assert world.table.marks == {}


def test_a_leadership_that_was_lost_is_over_although_another_one_is_ours(world):
    """Under the lease of a later leadership of the same process nothing is marked for the earlier one."""
    world.table.add("a")

    def regain():
        world.elector.leadership = Leadership(uuid4(), 1, float("inf"))
        world.table.add("b")
        world.ctx.commits.notify()

    world.run(None, None, regain, *[None] * 3)
    assert marks(world) == [[1]]
    assert world.table.marks == {}


def test_a_producer_that_broke_is_replaced_whatever_its_reports_say(world):
    """A client tells that it is broken once, and fails its records for another reason."""
    world.table.add("a", "b")

    def break_():
        world.client.raises = KafkaError(KafkaError._FATAL, "broken", fatal=True)

    def fail():
        world.client.deliver(error=KafkaError(KafkaError._PURGE_QUEUE))

    world.run(None, None, break_, None, fail, *[None] * 8, world.deliver, None)
    assert [client.sent for client in world.clients] == [[1, 2], [1, 2]]
    assert not world.table.rows


def test_what_arrives_before_the_next_leader_id_is_purged_under_the_last_one(world):
    """Records that were in flight when everything is marked anew are not sent again once they have arrived."""
    world.table.add("a", "b")

    def rival():
        world.table.marks[3] = THEIRS
        world.table.during_mark = lambda: None

    def go_on():
        world.table.add("c")
        world.table.during_mark = rival
        world.ctx.commits.notify()

    world.run(None, None, go_on, None, None, world.deliver, *[None] * 8, world.deliver, None)
    assert world.sent == [1, 2, 3]
    assert not world.table.rows


def test_a_mark_under_way_is_awaited_before_the_next_leader_id(world):
    """Rows that are returned to the last leader ID are not taken in under the next one, which could not purge them."""
    world.table.add("a")

    def rival():
        world.table.marks[1] = THEIRS
        world.table.during_purge = lambda: None

    def go_on():
        world.marker.hangs = True
        world.table.add("b")
        world.ctx.commits.notify()

    def answer():
        assert marks(world)[:2] == [[1], [2]]
        world.marker.hangs = False

    world.table.during_purge = rival
    world.run(None, None, go_on, None, world.deliver, *[None] * 6, answer, *[None] * 10, world.deliver, *[None] * 3)
    assert world.sent in ([1, 1, 2], [1, 2, 1])
    assert len({event.leader_id for event in world.events if isinstance(event, LeaderRefreshed)}) == 1
    assert not world.table.rows


def test_a_row_that_is_no_longer_what_was_to_be_tried_goes_back(world):
    """A row that has another key by now is marked with the others: its mark by its row alone is cleared."""
    world.table.add("a")

    def fail():
        world.client.deliver(error=KafkaError(KafkaError._MSG_TIMED_OUT))
        world.table.rows[1] = world.table.rows[1]._replace(key="z")

    world.run(None, None, fail, *[None] * 10, world.deliver, None)
    assert world.sent == [1, 1]
    assert not world.table.rows


def test_a_key_is_left_out_while_what_was_tried_in_vain_goes_back(world):
    """Until the mark of a row that has another key by now is cleared, no mark is to find that key without it."""
    world.table.add("a")

    def correct():
        world.table.rows[1] = world.table.rows[1]._replace(key="z")

    def fail():
        world.client.deliver(error=KafkaError(KafkaError._MSG_TIMED_OUT))

    world.run(
        None, None, fail, correct, lambda: world.table.add("z"), *[None] * 9, world.deliver, *[None] * 4, world.deliver
    )
    assert marks(world) == [[1], [1], [1, 2]]
    assert world.sent == [1, 1, 2]


def test_a_look_for_lost_rows_that_fails_keeps_no_mark_waiting(world, monkeypatch):
    """However often the look at rows with our own mark fails, a mark from the head comes before the next one."""
    monkeypatch.setattr(loop_module, "_LOOK_FOR_LOST_EVERY_SECONDS", 0.05)

    def fails():
        world.table.errors["look"] = StoreUnavailable("too long")

    fails()
    world.table.add("a")
    world.run(*[fails] * 10, world.deliver, *[fails] * 10)
    reads = [what for what, _ in world.log if what in ("mark", "look")]
    assert reads[0] == "mark", "the first look waits for a mark, too"
    assert reads.count("look") > 3
    assert ("look", "look") not in list(pairwise(reads))
    assert not world.table.rows


def test_a_requested_dead_letter_is_sent_and_its_key_goes_on(world):
    """Its row and hold are deleted once it has arrived, and only then the records behind it are sent."""
    world.table.add("a", "a")
    world.table.held = HoldSet(lanes=frozenset({("t", "a")}), requests={1: "boo"})

    def is_first():
        assert world.sent == [1]
        world.deliver()

    world.run(*[None] * 6, is_first, *[None] * 10, world.deliver, None)
    assert world.sent == [1, 2]
    assert not world.table.rows
    assert world.loop._lanes.held == 0


def test_a_deletion_of_dead_letters_that_was_given_up_is_owed_no_more(world):
    """After a remark dead letters are sent again: until they have arrived there is nothing to delete."""
    duty = world.ctx.metrics.activity.duty
    duty.began(0.0)
    world.table.add("a")
    world.table.held = HoldSet(lanes=frozenset({("t", "a")}), requests={1: "boo"})

    def arrives():
        world.table.errors["letters"] = StoreUnavailable("connection lost")
        world.table.errors["mark"] = StoreUnavailable("connection lost", in_doubt=True)
        world.deliver()

    def is_sent_again():
        assert len(world.events) == 1
        assert world.sent == [1, 1]
        assert DELETE not in duty.owed(world.time)
        world.deliver()

    world.run(*[None] * 6, arrives, *[None] * 12, is_sent_again, *[None] * 6)
    assert not world.table.rows
