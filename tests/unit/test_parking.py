"""What cannot be delivered is parked by place, with one probe each; and keys on their way back are left alone."""

from outbox_core.harvest.parking import Parking
from outbox_core.harvest.withdrawals import Withdrawals


class Clock:
    """A clock to turn."""

    time = 100.0

    def __call__(self):
        return self.time


def record(identity, key, topic="t"):
    """A stored record."""
    return (identity, topic, key, b"", None, None, -1, 0)


def test_one_probe_each_place_and_the_others_are_parked():
    """The first record that fails at a place stays as its probe; the keys of all are left out until it arrives."""
    clock = Clock()
    parking = Parking(1.0, 5.0, clock)
    assert parking.failed(record(1, "a"), ("t", 0))
    assert not parking.failed(record(2, "b"), ("t", 0))
    assert parking.failed(record(3, "c"), ("t", 1))
    assert not parking.failed(record(4, None), ("t", 1))
    assert parking.lanes == {("t", "a"), ("t", "b"), ("t", "c")}
    assert parking.ids == {4}
    assert list(parking.due()) == []
    clock.time += 1.1
    assert [probe[0] for probe in parking.due()] == [1, 3]
    assert list(parking.due()) == []
    assert parking.succeeded([record(1, "a")]) == [("t", 0)]
    assert parking.lanes == {("t", "c")}
    assert parking.ids == {4}


def test_rests_double():
    """A probe that fails again rests twice as long, up to the bound."""
    clock = Clock()
    parking = Parking(1.0, 3.0, clock)
    parking.failed(record(1, "a"), ("t", 0))
    for rest in (1.0, 2.0, 3.0, 3.0):
        clock.time += rest - 0.01
        assert list(parking.due()) == []
        clock.time += 0.02
        assert len(list(parking.due())) == 1
        assert parking.failed(record(1, "a"), ("t", 0))


def test_place_without_its_probe_opens_after_its_rest():
    """After a remark nothing is left in memory; whoever fails next is the probe."""
    clock = Clock()
    parking = Parking(1.0, 3.0, clock)
    parking.failed(record(1, "a"), ("t", 0))
    parking.failed(record(2, "b"), ("t", 0))
    assert [probe[0] for probe in parking.take_probes()] == [1]
    assert parking.lanes == {("t", "a"), ("t", "b")}
    clock.time += 1.1
    assert list(parking.due()) == []
    assert parking.lanes == set()
    assert parking.failed(record(2, "b"), ("t", 0))


def test_many_keys_and_nothing_that_arrives_close_the_topic():
    """With the whole cluster away the list of keys stays short; where anything arrives, keys stay what is parked."""
    clock = Clock()
    parking = Parking(1.0, 3.0, clock)
    for number in range(1_100):
        parking.failed(record(number, f"k{number}"), ("t", 0))
    assert parking.topics == frozenset()
    clock.time += 6
    for number in range(2_000, 2_100):
        parking.failed(record(number, f"k{number}"), ("t", 0))
    assert parking.topics == {"t"}
    assert parking.lanes == set()
    (probe,) = parking.due()
    parking.succeeded([probe])
    assert not parking
    parking.failed(record(1, "a", "u"), ("u", 0))
    clock.time += 6
    parking.succeeded([record(2, "z", "u")])
    for number in range(10, 1_200):
        parking.failed(record(number, f"k{number}", "u"), ("u", 0))
    assert parking.topics == frozenset()


def test_record_that_cannot_be_held_rests_without_a_probe():
    """So a row that is corrected or deleted meanwhile is read anew; its rests double all the same."""
    clock = Clock()
    parking = Parking(1.0, 3.0, clock)
    for rest in (1.0, 2.0, 3.0):
        parking.rest(record(1, "a"))
        clock.time += rest - 0.01
        assert list(parking.due()) == []
        assert parking.lanes == {("t", "a")}
        clock.time += 0.02
        assert list(parking.due()) == []
        assert parking.lanes == set()
    parking.succeeded([record(1, "a")])
    assert not parking


def test_place_without_room_for_a_probe_rests_ever_longer():
    """The record goes back to the table; whoever fails there next is no probe while there is no room."""
    clock = Clock()
    parking = Parking(1.0, 3.0, clock, most_probe_bytes=5)
    for rest in (1.0, 2.0, 3.0):
        assert not parking.failed((1, "t", "a", b"four", None, None, -1, 0), ("t", 0))
        assert parking.lanes == {("t", "a")}
        clock.time += rest - 0.01
        assert list(parking.due()) == []
        assert parking.lanes == {("t", "a")}
        clock.time += 0.02
        assert list(parking.due()) == []
        assert not parking
    assert parking.failed((2, "t", "b", b"3.0", None, None, -1, 0), ("t", 1))
    assert parking.succeeded([(2, "t", "b", b"3.0", None, None, -1, 0)]) == [("t", 1)]
    assert parking.failed((3, "t", "b", b"3.0", None, None, -1, 0), ("t", 1)), "the room is free again"


def test_places_without_probes_open_as_many_as_may():
    """One after the other, and those that may not open yet are not waited for."""
    clock = Clock()
    parking = Parking(1.0, 3.0, clock)
    parking.may_open = 1
    for number in range(3):
        parking.rest(record(number, f"k{number}"))
    clock.time += 1.5
    assert list(parking.due()) == []
    assert parking.lanes == {("t", "k1"), ("t", "k2")}
    assert parking.next_due is None
    assert list(parking.due()) == []
    assert len(parking) == 2
    parking.may_open = 2
    assert parking.next_due < clock.time
    assert list(parking.due()) == []
    assert not parking


def test_few_places_without_probes_open_at_a_time():
    """The next one opens once a record failed or arrived where one is open, or none came by for two rests."""
    clock = Clock()
    parking = Parking(1.0, 3.0, clock, most_probes=0)
    for n in range(1, 21):
        parking.failed(record(n, None, topic=f"t{n}"), (f"t{n}", None))
    clock.time += 1.5
    assert list(parking.due()) == []
    assert len(parking) == 12
    assert parking.next_due == clock.time + 6.0
    parking.failed(record(1, None, topic="t1"), ("t1", 0))
    parking.succeeded([record(2, None, topic="t2")])
    assert parking.next_due < clock.time
    assert list(parking.due()) == []
    assert len(parking) == 11
    clock.time += 6.1
    assert list(parking.due()) == []
    assert len(parking) == 3


def test_rests_are_forgotten():
    """What does not fail again for a few rests begins anew, and does not count as closed meanwhile."""
    clock = Clock()
    parking = Parking(1.0, 3.0, clock)
    for _ in range(2):
        parking.rest(record(1, "a"))
        parking.rest(record(2, None))
        clock.time += 1.1
        assert list(parking.due()) == []
        assert not parking
        clock.time += 20
    parking.rest(record(3, "c"))
    assert len(parking._rested) == 1


def test_withdrawn_keys_are_left_out_until_they_are_back():
    """A key is left out until all its marks are cleared and its hold is written; a mark under way is sifted."""
    withdrawals = Withdrawals()
    withdrawals.mark_begins()
    withdrawals.reset([record(1, "a"), record(2, "a"), record(3, None)])
    withdrawals.hold(("t", "a"))
    assert withdrawals.is_caught(record(9, "a"))
    assert withdrawals.is_caught(record(3, None))
    assert not withdrawals.is_caught(record(4, None))
    withdrawals.reset_done([1, 2, 3])
    assert withdrawals.lanes == {("t", "a")}
    assert withdrawals.ids == set()
    withdrawals.hold_done(("t", "a"))
    assert withdrawals, "a mark that was sent before has not answered"
    assert withdrawals.is_caught(record(9, "a"))
    withdrawals.mark_begins()
    assert not withdrawals
    assert not withdrawals.is_caught(record(9, "a"))
