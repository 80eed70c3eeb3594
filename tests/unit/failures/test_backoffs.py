"""The map of destinations that are backed off: keys that wait, the rows that are tried again, suspects."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outbox_core.harvest.failures.backoffs import Backoffs, destination_of_its_own
from outbox_core.stores.interface import RowId, StoredRecord

NEVER = float("inf")


class Clock:
    """A clock that stands still."""

    time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def clock():
    """Return a clock."""
    return Clock()


def record(identity, key, topic="t"):
    """Return a stored record."""
    return StoredRecord(identity, topic, key, b"", None, None, -1, 0)


def test_destination_is_tried_by_one_row_after_growing_backoffs(clock):
    """Keys that fail wait; one row is tried, ever more rarely; its arrival lets all keys flow."""
    backoffs = Backoffs(1.0, 3.0, clock)
    backoffs.failed(record(1, "a"), ("t", 0))
    backoffs.failed(record(2, "b"), ("t", 0))
    assert backoffs.waiting == {("t", "a"), ("t", "b")}
    waits = []
    for _ in range(4):
        assert not backoffs.due_together(10)
        waits.append(backoffs.next_due() - clock.time)
        clock.time = backoffs.next_due()
        assert backoffs.due_together(10) == [RowId(1, 0)]
        backoffs.failed(record(1, "a"), ("t", 0))
    assert waits == [1.0, 2.0, 3.0, 3.0]
    assert backoffs.succeeded([record(1, "a")]) == [("t", 0)]
    assert not backoffs
    assert not backoffs.waiting
    assert backoffs.next_due() == NEVER


def test_row_that_is_gone_ends_its_backoff(clock):
    """A backoff whose row was deleted or held ends, as nothing would ever end it."""
    backoffs = Backoffs(1.0, 3.0, clock)
    backoffs.failed(record(1, None), ("t", 0))
    assert backoffs.waiting == {RowId(1, 0)}
    for _ in range(2):
        backoffs.end(RowId(1, 0))
    assert not backoffs
    assert not backoffs.waiting


def test_rows_that_are_tried_together_are_of_different_topics(clock):
    """Of each topic one row is tried at a time, so that no report is about two of them, and at most so many."""
    backoffs = Backoffs(1.0, 3.0, clock)
    for number in range(4):
        backoffs.failed(record(number, f"k{number}", f"t{number % 2}"), (f"t{number % 2}", number))
    backoffs.failed(record(9, "k", "u"), ("u", None))
    clock.time += 1
    assert backoffs.due_together(10) == [RowId(0, 0), RowId(1, 0), RowId(9, 0)]
    assert backoffs.due_together(1) == [RowId(0, 0)]


def test_success_in_a_topic_that_is_backed_off_has_it_tried_at_once(clock):
    """A record that arrives in a topic that is backed off as a whole has the topic tried again at once."""
    backoffs = Backoffs(5.0, 10.0, clock)
    backoffs.failed(record(1, "a"), ("t", None))
    assert backoffs.topics == {"t"}
    backoffs.succeeded([record(2, "b", "u")])
    assert not backoffs.due_together(10)
    backoffs.succeeded([record(3, "c")])
    assert backoffs.due_together(10) == [RowId(1, 0)]


def test_many_keys_become_the_topic_unless_something_arrives(clock):
    """With more than a thousand keys and no arrival in the topic, the topic is backed off in their stead."""
    backoffs = Backoffs(1.0, 3.0, clock)
    for number in range(1_500):
        backoffs.failed(record(number, f"k{number}"), ("t", 0))
    assert not backoffs.topics
    clock.time += 4
    backoffs.succeeded([record(5_000, "z")])
    clock.time += 4
    backoffs.failed(record(1_501, "a"), ("t", 0))
    assert len(backoffs.waiting) == 1_501
    clock.time += 2
    backoffs.failed(record(1_502, "b"), ("t", 0))
    assert backoffs.topics == {"t"}
    assert not backoffs.waiting
    assert backoffs.succeeded([record(0, "k0")]) == [("t", None)]
    assert not backoffs


def test_keys_of_a_partition_are_bounded(clock):
    """A partition that is away collects no more than 50,000 keys, though records of other partitions arrive."""
    backoffs = Backoffs(1.0, 3.0, clock)
    for number in range(50_001):
        backoffs.failed(record(number, f"k{number}"), ("t", 0))
        backoffs.succeeded([record(-1, "z")])
    assert (backoffs.topics, len(backoffs.waiting)) == ({"t"}, 0)
    clock.time += 61.0
    backoffs.failed(record(0, "k0"), ("t", 0))
    assert (backoffs.topics, backoffs.waiting) == (set(), {("t", "k0")}), "the others are tried again"


def test_keys_that_are_refused_are_bounded(clock):
    """Records that cannot be held are 50,000 of a topic at most; then it waits as a whole, and only for a moment."""
    backoffs = Backoffs(1.0, 3.0, clock)
    refused = [record(number, f"k{number}") for number in range(50_001)]
    for row in refused:
        backoffs.failed(row, destination_of_its_own(row), unreachable=False)
    assert (backoffs.topics, len(backoffs), len(backoffs.waiting)) == ({"t"}, 1, 0)
    clock.time = backoffs.next_due()
    backoffs.failed(refused[-1], destination_of_its_own(refused[-1]), unreachable=False)
    assert (backoffs.topics, backoffs.waiting) == (set(), {("t", "k50000")})


def test_only_the_next_of_many_that_wait_are_looked_at(clock):
    """The next time, and the rows that are due, come from the front of an order that failures and arrivals keep."""
    backoffs, looked_at = Backoffs(1.0, 8.0, clock), []
    rows = [record(number, f"k{number}") for number in range(1_000)]
    for row in rows:
        backoffs.failed(row, destination_of_its_own(row), unreachable=False)
        clock.time += 0.0005
    clock.time = backoffs.next_due()
    backoffs.failed(rows[0], destination_of_its_own(rows[0]), unreachable=False)
    backoffs.succeeded([rows[1]])
    assert backoffs.next_due(looked_at.append) == pytest.approx(101.001)
    assert looked_at == [RowId(2, 0)]
    clock.time += 1
    assert backoffs.due(3, lambda row: row.id % 2 == 0) == [RowId(3, 0), RowId(5, 0), RowId(7, 0)]


def test_topic_does_not_wait_for_one_of_its_partitions(clock):
    """A topic that was missing, or backed off for the keys of one partition, is tried by other rows a minute later."""
    backoffs = Backoffs(1.0, 3.0, clock)
    backoffs.failed(record(1, "a"), ("t", None))
    backoffs.failed(record(1, "a"), ("t", 4))
    assert (backoffs.topics, backoffs.waiting) == (set(), {("t", "a")}), "the topic was made, and partition 4 is away"
    for number in range(1_002):
        clock.time += 0.01
        backoffs.failed(record(number, f"k{number}", "u"), ("u", 0))
    assert backoffs.topics == {"u"}
    for _ in range(7):
        backoffs.failed(record(0, "k0", "u"), ("u", 0))
        assert backoffs.topics == {"u"}
        clock.time += 10.0
    backoffs.failed(record(0, "k0", "u"), ("u", 0))
    assert (backoffs.topics, ("u", "k0") in backoffs.waiting) == (set(), True)


def test_record_that_cannot_be_held_waits_with_its_key(clock):
    """A record that failed alone and cannot be held is backed off with its key, and ends what was tried by it."""
    backoffs = Backoffs(1.0, 3.0, clock)
    backoffs.failed(record(1, "a"), ("t", 0))
    backoffs.failed(record(2, "b"), ("t", 0))
    for _ in range(2):
        backoffs.failed(record(1, "a"), destination_of_its_own(record(1, "a")), unreachable=False)
        assert backoffs.waiting == {("t", "a")}
        assert not backoffs.is_unreachable
    assert backoffs.next_due() == clock.time + 2


def test_record_that_may_be_to_blame_is_tried_at_once(clock):
    """A record that may be to blame is tried at once; if its destination is at fault, that is backed off."""
    backoffs = Backoffs(1.0, 3.0, clock)
    backoffs.try_alone(record(1, "a"), "refused")
    backoffs.try_alone(record(2, None), "refused")
    busy = set()
    assert backoffs.due(10, busy.__contains__) == [RowId(1, 0), RowId(2, 0)]
    assert backoffs.due(1, busy.__contains__) == [RowId(1, 0)]
    assert backoffs.waiting == {("t", "a"), RowId(2, 0)}
    busy.add(RowId(1, 0))
    assert backoffs.due(10, busy.__contains__) == [RowId(2, 0)]
    assert backoffs.next_due({RowId(1, 0), RowId(2, 0)}.__contains__) == NEVER
    backoffs.failed(record(1, "a"), ("t", 0))
    backoffs.failed(record(2, None), ("t", 0))
    assert len(backoffs) == 1
    assert backoffs.next_due() == clock.time + 1
    assert backoffs.succeeded([record(1, "a")]) == [("t", 0)]
    assert not backoffs


def test_record_that_may_be_to_blame_waits_for_its_topic(clock):
    """While its topic is backed off as a whole, a record that may be to blame waits like all others of it."""
    backoffs = Backoffs(1.0, 3.0, clock)
    backoffs.failed(record(9, "z"), ("t", None))
    backoffs.try_alone(record(1, "a"), "refused")
    assert backoffs.next_due() == clock.time + 1
    backoffs.end(RowId(9, 0))
    assert not backoffs


def test_an_id_that_comes_back_is_another_record(clock):
    """Another row that gets the id of one that is tried, after TRUNCATE ... RESTART IDENTITY, is not taken for it."""
    backoffs = Backoffs(1.0, 5.0, clock)
    old, new = record(1, "a"), record(1, "b")._replace(create_time=5)
    backoffs.failed(old, ("t", 0))
    assert backoffs.succeeded([new]) == []
    backoffs.failed(new, ("t", 1))
    assert len(backoffs) == 2
    assert backoffs.succeeded([old]) == [("t", 0)]


def test_suspect_counts_only_with_commits_of_others_between(clock):
    """A topic that ends the producer counts once for each commit of others, which has it tried again, alone."""
    backoffs = Backoffs(5.0, 10.0, clock)
    backoffs.failed(record(7, "x", "u"), ("u", 0))
    backoffs.failed(record(1, "a"), ("t", 3))
    assert [backoffs.suspect(record(1, "a"), "broken") for _ in range(5)] == [1] * 5
    assert (backoffs.is_suspect("t"), backoffs.is_suspect("u"), backoffs.is_unreachable) == (True, False, True)
    assert not backoffs.due_together(10)
    backoffs.committed()
    assert backoffs.due_together(10) == [RowId(1, 0)]
    assert backoffs.suspect(record(1, "a"), "broken") == 2
    clock.time += 10
    assert backoffs.due_together(10) == [RowId(7, 0)], "a suspect would end the try of all others"
    backoffs.committed()
    assert backoffs.suspect(record(1, "a"), "broken") == 3


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from("abc"), st.integers(0, 3)), max_size=60))
def test_every_key_that_waits_has_a_row_that_is_tried(steps):
    """However records fail, arrive and go, a key is left out only while some row ends that, and all of them do."""
    clock = Clock()
    backoffs = Backoffs(1.0, 3.0, clock)
    for kind, key, part in steps:
        clock.time += 0.5
        row = record(part, key)
        if kind == 0:
            backoffs.failed(row, ("t", part))
        elif kind == 1:
            backoffs.failed(row, ("t", None))
        elif kind == 2:
            backoffs.failed(row, destination_of_its_own(row), unreachable=False)
        elif kind == 3:
            backoffs.succeeded([row])
        elif kind == 5:
            backoffs.try_alone(row)
        else:
            backoffs.suspect(row, "why")
        assert (backoffs.next_due() == NEVER) is not bool(backoffs)
    while backoffs:
        clock.time = max(clock.time, backoffs.next_due())
        for row in backoffs.due_together(10):
            before = len(backoffs)
            backoffs.end(row)
            assert len(backoffs) == before - 1
    assert not backoffs.waiting
    assert not backoffs.topics
