"""Destinations that cannot be reached: backed off, with one probe each; and keys whose rows go back to the table."""

from outbox_core.harvest.failures.delivery_backoffs import DeliveryBackoffs
from outbox_core.harvest.failures.released_keys import ReleasedKeys
from outbox_core.stores.interface import RowId, StoredRecord, row_id


class Clock:
    """A clock that the test sets."""

    time = 100.0

    def __call__(self):
        return self.time


def record(identity, key, topic="t", create_time=0):
    """Return a stored record."""
    return StoredRecord(identity, topic, key, b"", None, None, -1, create_time)


def test_one_probe_each_place_and_the_others_are_parked():
    """The first record that fails at a destination is its probe; the keys of all are excluded until it arrives."""
    clock = Clock()
    backoffs = DeliveryBackoffs(1.0, 5.0, clock)
    assert backoffs.failed(record(1, "a"), ("t", 0))
    assert not backoffs.failed(record(2, "b"), ("t", 0))
    assert backoffs.failed(record(3, "c"), ("t", 1))
    assert not backoffs.failed(record(4, None), ("t", 1))
    assert backoffs.lanes == {("t", "a"), ("t", "b"), ("t", "c")}
    assert backoffs.rows == {RowId(4, 0)}
    assert list(backoffs.due_probes()) == []
    clock.time += 1.1
    assert [probe[0] for probe in backoffs.due_probes()] == [1, 3]
    assert list(backoffs.due_probes()) == []
    assert backoffs.succeeded([record(1, "a")]) == [("t", 0)]
    assert backoffs.lanes == {("t", "c")}
    assert backoffs.rows == {RowId(4, 0)}


def test_rests_double():
    """A probe that fails again backs off for twice as long, up to the bound."""
    clock = Clock()
    backoffs = DeliveryBackoffs(1.0, 3.0, clock)
    backoffs.failed(record(1, "a"), ("t", 0))
    for rest in (1.0, 2.0, 3.0, 3.0):
        clock.time += rest - 0.01
        assert list(backoffs.due_probes()) == []
        clock.time += 0.02
        assert len(list(backoffs.due_probes())) == 1
        assert backoffs.failed(record(1, "a"), ("t", 0))


def test_place_without_its_probe_opens_after_its_rest():
    """Once its probe is released, a destination opens after its backoff, and the next failure is the probe."""
    clock = Clock()
    backoffs = DeliveryBackoffs(1.0, 3.0, clock)
    backoffs.failed(record(1, "a"), ("t", 0))
    backoffs.failed(record(2, "b"), ("t", 0))
    assert [probe[0] for probe in backoffs.release_probes()] == [1]
    assert backoffs.lanes == {("t", "a"), ("t", "b")}
    clock.time += 1.1
    assert list(backoffs.due_probes()) == []
    assert backoffs.lanes == set()
    assert backoffs.failed(record(2, "b"), ("t", 0))


def test_many_keys_and_nothing_that_arrives_close_the_topic():
    """If no record arrives, many failed keys become their whole topic; if any arrives, they stay keys."""
    clock = Clock()
    backoffs = DeliveryBackoffs(1.0, 3.0, clock)
    for number in range(1_100):
        backoffs.failed(record(number, f"k{number}"), ("t", 0))
    assert backoffs.topics == frozenset()
    clock.time += 6
    for number in range(2_000, 2_100):
        backoffs.failed(record(number, f"k{number}"), ("t", 0))
    assert backoffs.topics == {"t"}
    assert backoffs.lanes == set()
    (probe,) = backoffs.due_probes()
    backoffs.succeeded([probe])
    assert not backoffs
    backoffs.failed(record(1, "a", "u"), ("u", 0))
    clock.time += 6
    backoffs.succeeded([record(2, "z", "u")])
    for number in range(10, 1_200):
        backoffs.failed(record(number, f"k{number}", "u"), ("u", 0))
    assert backoffs.topics == frozenset()


def test_record_that_cannot_be_held_rests_without_a_probe():
    """A record that cannot be held backs off without a probe, so that its row is read anew; its backoffs double."""
    clock = Clock()
    backoffs = DeliveryBackoffs(1.0, 3.0, clock)
    for rest in (1.0, 2.0, 3.0):
        backoffs.failed_alone(record(1, "a"))
        clock.time += rest - 0.01
        assert list(backoffs.due_probes()) == []
        assert backoffs.lanes == {("t", "a")}
        clock.time += 0.02
        assert list(backoffs.due_probes()) == []
        assert backoffs.lanes == set()
    backoffs.succeeded([record(1, "a")])
    assert not backoffs


def test_place_without_room_for_a_probe_rests_ever_longer():
    """A destination without room for a probe backs off ever longer, and its records go back to the table."""
    clock = Clock()
    backoffs = DeliveryBackoffs(1.0, 3.0, clock, most_probe_bytes=5)
    for rest in (1.0, 2.0, 3.0):
        assert not backoffs.failed(StoredRecord(1, "t", "a", b"four", None, None, -1, 0), ("t", 0))
        assert backoffs.lanes == {("t", "a")}
        clock.time += rest - 0.01
        assert list(backoffs.due_probes()) == []
        assert backoffs.lanes == {("t", "a")}
        clock.time += 0.02
        assert list(backoffs.due_probes()) == []
        assert not backoffs
    assert backoffs.failed(StoredRecord(2, "t", "b", b"3.0", None, None, -1, 0), ("t", 1))
    assert backoffs.succeeded([StoredRecord(2, "t", "b", b"3.0", None, None, -1, 0)]) == [("t", 1)]
    assert backoffs.failed(StoredRecord(3, "t", "b", b"3.0", None, None, -1, 0), ("t", 1)), "the room is free again"


def test_places_without_probes_open_as_many_as_may():
    """Only as many destinations without probes open as may; the others are not waited for meanwhile."""
    clock = Clock()
    backoffs = DeliveryBackoffs(1.0, 3.0, clock)
    backoffs.may_expire = 1
    for number in range(3):
        backoffs.failed_alone(record(number, f"k{number}"))
    clock.time += 1.5
    assert list(backoffs.due_probes()) == []
    assert backoffs.lanes == {("t", "k1"), ("t", "k2")}
    assert backoffs.next_due is None
    assert list(backoffs.due_probes()) == []
    assert len(backoffs) == 2
    backoffs.may_expire = 2
    assert backoffs.next_due < clock.time
    assert list(backoffs.due_probes()) == []
    assert not backoffs


def test_few_places_without_probes_open_at_a_time():
    """A destination without a probe opens once an open one failed, succeeded, or saw no record for two backoffs."""
    clock = Clock()
    backoffs = DeliveryBackoffs(1.0, 3.0, clock, most_probes=0)
    for n in range(1, 21):
        backoffs.failed(record(n, None, topic=f"t{n}"), (f"t{n}", None))
    clock.time += 1.5
    assert list(backoffs.due_probes()) == []
    assert len(backoffs) == 12
    assert backoffs.next_due == clock.time + 6.0
    backoffs.failed(record(1, None, topic="t1"), ("t1", 0))
    backoffs.succeeded([record(2, None, topic="t2")])
    assert backoffs.next_due < clock.time
    assert list(backoffs.due_probes()) == []
    assert len(backoffs) == 11
    clock.time += 6.1
    assert list(backoffs.due_probes()) == []
    assert len(backoffs) == 3


def test_rests_are_forgotten():
    """A backoff is forgotten after a few without a failure, and does not count as closed meanwhile."""
    clock = Clock()
    backoffs = DeliveryBackoffs(1.0, 3.0, clock)
    for _ in range(2):
        backoffs.failed_alone(record(1, "a"))
        backoffs.failed_alone(record(2, None))
        clock.time += 1.1
        assert list(backoffs.due_probes()) == []
        assert not backoffs
        clock.time += 20
    backoffs.failed_alone(record(3, "c"))
    assert len(backoffs._past) == 1


def test_an_id_that_comes_back_is_another_record():
    """Another row that gets a probe's id, after TRUNCATE ... RESTART IDENTITY, is not taken for the probe."""
    backoffs, released = DeliveryBackoffs(1.0, 5.0, Clock()), ReleasedKeys()
    old, new = record(1, "a"), record(1, "b", create_time=5)
    assert backoffs.failed(old, ("t", 0))
    assert backoffs.succeeded([new]) == []
    assert backoffs.failed(new, ("t", 1))
    assert len(backoffs) == 2
    assert backoffs.succeeded([old]) == [("t", 0)]
    released.release([old, new])
    released.reset_done([row_id(old)])
    assert released.lanes == {("t", "b")}, "its mark is not cleared"


def test_withdrawn_keys_are_left_out_until_they_are_back():
    """A key is excluded until its marks are cleared and its hold is written; a mark under way is filtered."""
    released = ReleasedKeys()
    released.mark_starts()
    released.release([record(1, "a"), record(2, "a"), record(3, None)])
    released.hold(("t", "a"))
    assert released.must_release(record(9, "a"))
    assert released.must_release(record(3, None))
    assert not released.must_release(record(4, None))
    released.reset_done([RowId(1, 0), RowId(2, 0), RowId(3, 0)])
    assert released.lanes == {("t", "a")}
    assert released.rows == set()
    released.hold_done(("t", "a"))
    assert released, "a mark that was sent before has not answered"
    assert released.must_release(record(9, "a"))
    released.mark_starts()
    assert not released
    assert not released.must_release(record(9, "a"))
