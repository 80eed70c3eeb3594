"""The lanes' promise, under any interleaving of marks, sends, acknowledgements, failures and purges."""

from __future__ import annotations

import itertools
from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.stores.interface import RowId, StoredRecord, bytes_of, lane_or_row, row_id

KEYS = [None, "a", "b", "c"]


def record(identity, key, topic="t"):
    """Return a row as a mark does."""
    return StoredRecord(identity, topic, key, b"", None, None, -1, 0)


class HarvestingModel(RuleBasedStateMachine):
    """A table, a broker and a harvester around the lanes; the broker sees the records that really were sent.

    Rows are marked from the head. A sent record is under way until its purge, or until it fails: then its key goes back
    to the table, or everything does, by a remark, which begins only when nothing is under way. A mark, and the clearing
    of marks, each begin, are carried out by the table, and return; the steps of both may come in any order.
    """

    @initialize(capacity=st.integers(1, 5), rows=st.lists(st.sampled_from(KEYS), max_size=30))
    def set_up(self, capacity, rows):
        self.capacity = capacity
        self.lanes = Lanes(capacity)
        self.ids = itertools.count()  # none comes back, even to an empty table: the order is judged by them
        self.table = [record(next(self.ids), key) for key in rows]
        self.marked = set()
        self.sent, self.acknowledged = [], []
        self.starting, self.marking, self.clearing, self.cleared = None, None, [], []
        self.remark = False
        self.published = defaultdict(list)

    @rule(key=st.sampled_from(KEYS))
    def commit_a_row(self, key):
        self.table.append(record(next(self.ids), key))

    @precondition(lambda self: not self.remark and self.starting is None and self.marking is None)
    @rule(limit=st.integers(1, 8))
    def mark(self, limit):
        self.starting = self.lanes.full | self.lanes.returning, limit
        self.lanes.mark_starts()

    @precondition(lambda self: self.starting is not None)
    @rule()
    def mark_is_carried_out(self):
        (out, limit), self.starting = self.starting, None
        rows = [row for row in self.table if row[0] not in self.marked and lane_or_row(row) not in out]
        self.marking = sorted(rows)[:limit]
        self.marked.update(row[0] for row in self.marking)

    @precondition(lambda self: self.marking is not None)
    @rule()
    def mark_returns(self):
        rows, self.marking = self.marking, None
        self.clearing.extend(rows if self.remark else self.lanes.admit(rows))

    @precondition(lambda self: self.clearing and not self.cleared)
    @rule(count=st.integers(1, 10))
    def clear_marks(self, count):
        self.cleared, self.clearing = self.clearing[:count], self.clearing[count:]
        self.marked.difference_update(row[0] for row in self.cleared)

    @precondition(lambda self: self.cleared)
    @rule()
    def clearing_returns(self):
        rows, self.cleared = self.cleared, []
        self.lanes.reset_done(map(row_id, rows))

    @precondition(lambda self: not self.remark)
    @rule(limit=st.integers(1, 8), refused=st.integers(0, 3))
    def send(self, limit, refused):
        taken = self.lanes.take(limit)
        kept = taken[: len(taken) - refused] if refused else taken
        self.lanes.put_back(taken[len(kept) :])
        for row in kept:
            under_way = [other for other in self.sent + self.acknowledged if row[2] is not None and other[2] == row[2]]
            assert not under_way, f"{row} sent while {under_way} is under way"
            self.sent.append(row)
            self.published[row[2]].append(row[0])

    @precondition(lambda self: self.sent)
    @rule(data=st.data())
    def acknowledge(self, data):
        row = data.draw(st.sampled_from(self.sent))
        self.sent.remove(row)
        self.acknowledged.append(row)

    @precondition(lambda self: self.sent)
    @rule(data=st.data(), arrived=st.booleans(), all_of_it=st.booleans())
    def fail(self, data, arrived, all_of_it):
        row = data.draw(st.sampled_from(self.sent))
        self.sent.remove(row)
        if not arrived:  # the last record of its key that was published, since at most one is under way
            self.published[row[2]].remove(row[0])
        if all_of_it or self.remark:
            self.remark = True
            self.clearing.extend([row, *self.lanes.release_all()])
        else:
            self.clearing.extend(self.lanes.release(row))

    @precondition(lambda self: self.acknowledged)
    @rule(count=st.integers(1, 10))
    def purge(self, count):
        rows, self.acknowledged = self.acknowledged[:count], self.acknowledged[count:]
        self.table = [row for row in self.table if row not in rows]
        self.marked.difference_update(row[0] for row in rows)
        self.lanes.purged(rows)

    @precondition(
        lambda self: (
            self.remark
            and not (self.sent or self.acknowledged or self.clearing or self.cleared or self.starting or self.marking)
        )
    )
    @rule()
    def refresh(self):
        self.lanes = Lanes(self.capacity)
        self.marked.clear()
        self.marking = None
        self.remark = False

    @invariant()
    def order_is_kept_per_key(self):
        for key, published in getattr(self, "published", {}).items():
            if key is not None:
                assert published == sorted(published), f"{key}: {published}"

    @invariant()
    def held_is_what_is_not_purged(self):
        if hasattr(self, "lanes") and not self.remark:
            elsewhere = [row[0] for row in (*(self.marking or ()), *self.clearing)]
            held = [row for row in self.table if row[0] in self.marked and row[0] not in elsewhere]
            assert (self.lanes.held, self.lanes.held_bytes) == (len(held), bytes_of(held))

    def teardown(self):
        """Publish the remaining rows in order, and leave the table empty, after any history."""
        if not hasattr(self, "lanes"):
            return
        self.acknowledged.extend(self.sent)
        self.sent = []
        for _ in range(10 * len(self.table) + 10):
            self.end_what_runs()
            if self.acknowledged:
                self.purge(len(self.acknowledged))
            if self.remark:
                self.refresh()
            self.mark(5)
            self.end_what_runs()
            self.send(100, 0)
            self.acknowledged, self.sent = self.sent, []
            self.purge(1000)
        assert not self.table
        self.order_is_kept_per_key()

    def end_what_runs(self):
        """End the mark and the clearing that are under way, and clear all marks that are to be cleared."""
        if self.starting is not None:
            self.mark_is_carried_out()
        if self.marking is not None:
            self.mark_returns()
        for _ in range(2):
            if self.cleared:
                self.clearing_returns()
            if self.clearing:
                self.clear_marks(len(self.clearing))
        if self.cleared:
            self.clearing_returns()


TestHarvestingModel = HarvestingModel.TestCase
TestHarvestingModel.settings = settings(max_examples=75, stateful_step_count=40, deadline=None)


def test_a_key_that_is_released_twice_is_left_out_until_both_its_rows_are_back():
    """A mark that came after its rows were cleared gives them new marks, of which that clearing knows nothing."""
    lanes, rows = Lanes(10), [record(1, "a"), record(2, "a")]
    lanes.mark_starts()
    lanes.admit(rows)
    lanes.take(1)
    lanes.mark_starts()
    assert lanes.release(rows[0]) == rows
    assert lanes.admit(rows) == rows, "marked again after their marks were cleared"
    lanes.reset_done(map(row_id, rows))
    assert lanes.returning == {("t", "a")}
    lanes.reset_done(map(row_id, rows))
    assert lanes.returning == set()


def test_one_record_of_a_key_is_ready_at_a_time():
    """Followers of a key become ready one by one, each after the purge of the one before."""
    lanes = Lanes(10)
    lanes.admit([record(1, "a"), record(2, "a"), record(3, "b"), record(4, None), record(5, None)])
    assert [row[0] for row in lanes.take(10)] == [1, 3, 4, 5]
    assert lanes.take(10) == []
    lanes.purged([record(1, "a")])
    assert [row[0] for row in lanes.take(10)] == [2]


def test_same_key_in_two_topics_is_two_lanes():
    """Order is kept per topic and key, so equal keys of different topics do not wait for each other."""
    lanes = Lanes(10)
    lanes.admit([record(1, "a", "x"), record(2, "a", "y")])
    assert [row[0] for row in lanes.take(10)] == [1, 2]


def test_what_is_purged_while_a_mark_runs_is_known_to_its_end():
    """A record is known while it is in a lane, and until the mark ends during which it was purged."""
    lanes, first, second = Lanes(10), record(1, "a"), record(2, "a")
    lanes.admit([first, second])
    lanes.mark_starts()
    lanes.take(1)
    lanes.purged([first])
    assert lanes.knows_any([record(3, "a"), first])
    assert not lanes.knows_any([record(3, "a")])
    lanes.mark_starts()
    assert not lanes.knows_any([first])
    assert lanes.knows_any([second])


def test_a_lane_is_full_until_half_of_it_has_gone():
    """A full lane is reported as full until it is half empty, so that marks come in batches."""
    lanes = Lanes(4)
    rows = [record(identity, "a") for identity in range(6)]
    lanes.admit(rows)
    assert lanes.full == {("t", "a")}
    for row, still_full in zip(rows, [True, True, False, False, False], strict=False):
        assert lanes.take(1) == [row]
        lanes.purged([row])
        assert bool(lanes.full) is still_full


def test_failed_record_is_released_with_its_followers():
    """A key leaves memory with a failed record, and is left out of marks until its marks are cleared."""
    lanes = Lanes(2)
    rows = [record(identity, "a") for identity in range(4)]
    lanes.mark_starts()
    lanes.admit([*rows, record(9, None)])
    lanes.take(10)
    lanes.mark_starts()
    assert lanes.release(rows[0]) == rows
    assert not lanes.full
    assert lanes.held == 1
    assert lanes.returning == {("t", "a")}
    assert lanes.admit([record(7, "a"), record(8, "b")]) == [record(7, "a")], "a mark was under way"
    assert lanes.take(10) == [record(8, "b")]
    lanes.reset_done(map(row_id, rows))
    assert lanes.returning == {("t", "a")}
    lanes.reset_done([RowId(7, 0)])
    assert lanes.returning == set()
    lanes.mark_starts()
    assert lanes.admit(rows) == []
    assert lanes.take(10) == rows[:1]


def test_slow_mark_does_not_overtake_records_that_went_back_meanwhile():
    """A slow mark's records go back if their key was released meanwhile, although its marks are cleared already."""
    lanes = Lanes(10)
    first, second = record(1, "hot"), record(2, "hot")
    lanes.admit([first, second])
    lanes.take(10)
    lanes.mark_starts()  # a mark is sent; it will see a third record of the key, but not the second, which is ours yet
    lanes.reset_done(map(row_id, lanes.release(first)))
    assert lanes.returning == set()
    assert lanes.admit([record(3, "hot")]) == [record(3, "hot")]
    assert lanes.held == 0


def test_held_key_keeps_its_record_under_way():
    """The records behind one that is under way are released if they are held; its lane stays until the purge."""
    lanes = Lanes(10)
    rows = [record(identity, "a") for identity in range(3)]
    lanes.admit([*rows, record(9, None), record(10, "b")])
    assert lanes.take(1) == rows[:1]
    assert sorted(lanes.release_unsent(lambda each: each.key != "b")) == [*rows[1:], record(9, None)]
    assert lanes.returning == {("t", "a"), RowId(9, 0)}
    lanes.reset_done([row_id(each) for each in (*rows, record(9, None))])
    lanes.mark_starts()
    assert lanes.admit(rows[1:], lambda each: each.id == 2) == rows[2:], "it is held still"
    assert lanes.take(10) == [record(10, "b")]
    lanes.purged([rows[0]])
    assert lanes.take(10) == rows[1:2]


def test_an_id_that_comes_back_is_another_row():
    """Another row with the id of one whose mark is being cleared waits for its own."""
    lanes = Lanes(10)
    old, new = record(1, "a"), record(1, "b")._replace(create_time=5)
    lanes.admit([old])
    lanes.take(10)
    lanes.release(old)
    lanes.mark_starts()
    lanes.admit([new])
    lanes.take(10)
    lanes.release(new)
    lanes.reset_done([row_id(old)])
    assert lanes.returning == {("t", "b")}


@given(st.lists(st.sampled_from(KEYS), max_size=40), st.integers(0, 40))
def test_abandon_returns_all_that_was_not_taken(keys, taken):
    """A remark gives back every record that has not been sent, and no others."""
    lanes = Lanes(3)
    rows = [record(identity, key) for identity, key in enumerate(keys)]
    lanes.admit(rows)
    sent = lanes.take(taken)
    dropped = lanes.release_all()
    assert sorted(sent + dropped) == rows
    assert lanes.held == len(sent)
    assert not lanes.has_ready
    lanes.purged(sent)
    assert lanes.held == 0
    assert not lanes.has_ready
