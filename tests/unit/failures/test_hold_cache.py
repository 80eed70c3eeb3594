"""The harvester's view of the holds, on a clock that stands still."""

from unittest.mock import patch

import pytest

from outbox_core.errors import StoreUnavailable
from outbox_core.harvest.failures import holds
from outbox_core.harvest.failures.holds import READ_EVERY_SECONDS, HoldCache
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import HoldSet, NewHold


class Store:
    """A store of holds: `held` by id. With `fails` every statement fails, with `refuses` every change."""

    def __init__(self):
        self.held, self.gone, self.reads = [], [], 0
        self.fails = self.refuses = False
        self.may_change = True
        self.holds = self

    def read(self):
        self.reads += 1
        self._answer()
        return HoldSet(ids=frozenset(self.held), may_change=self.may_change)

    def add(self, holds):
        self._answer(is_change=True)
        self.held += [hold.record_id for hold in holds]

    def release_gone(self):
        released = [each for each in self.held if each in self.gone]
        self.held = [each for each in self.held if each not in self.gone]
        return len(released)

    def _answer(self, *, is_change=False):
        if self.fails or (is_change and self.refuses):
            raise StoreUnavailable("no answer")


def hold(identity):
    """Return the hold of a record without a key."""
    return NewHold("t", None, identity, "refused", "boo")


def test_holds_are_stale_when_they_are_due():
    """A harvest thread that waits until the holds are due finds them stale then, and does not wait for no time."""
    cache = HoldCache(HarvestMetrics())
    cache.read_at = 0.0
    with patch.object(holds, "now", lambda: READ_EVERY_SECONDS / 2):
        assert cache.due_in()
        assert cache.due_in() > 0.0
    with patch.object(holds, "now", lambda: READ_EVERY_SECONDS):
        assert cache.due_in() == 0.0
        assert not cache.due_in()


def test_holds_that_could_not_be_read_are_not_known():
    """After a failed reading the holds are unknown until one succeeds: nothing is marked or published meanwhile."""
    cache, store = HoldCache(HarvestMetrics()), Store()
    cache.read(store)
    assert cache.is_known
    store.fails = True
    with pytest.raises(StoreUnavailable):
        cache.read(store)
    assert not cache.is_known
    store.fails = False
    cache.read(store)
    assert cache.is_known


def test_without_the_right_to_change_holds_none_is_written():
    """Holds that may be read and not changed hold what others wrote, and get none of the harvester's own."""
    cache, store = HoldCache(HarvestMetrics()), Store()
    store.held, store.may_change = [1], False
    assert cache.write(store, [hold(2)]).ids == {1}
    assert not cache.is_writable
    store.may_change = True
    cache.read(store)
    assert cache.write(store, [hold(2)]).ids == {1, 2}


def test_a_hold_that_was_not_written_is_tried_by_what_may_be_changed_now():
    """A write that failed, perhaps for want of rights, has those read again before the next one, and only then."""
    cache, store = HoldCache(HarvestMetrics()), Store()
    cache.read(store)
    store.refuses = True
    with pytest.raises(StoreUnavailable):
        cache.write(store, [hold(1)])
    assert cache.is_known, "what was read before still counts"
    store.may_change = False
    cache.write(store, [hold(1)])
    assert store.held == []


def test_holds_of_records_that_are_gone_are_not_kept():
    """A hold that is released because its record is gone is not among those that are returned."""
    cache, store = HoldCache(HarvestMetrics()), Store()
    store.held, store.gone = [1, 2], [1]
    assert cache.read(store).ids == {2}


def test_holds_that_cannot_be_tidied_are_read_all_the_same():
    """Holds of records that are gone stay where they cannot be released, and are tried again ten seconds after that."""
    cache, store, clock = HoldCache(HarvestMetrics()), Store(), [100.0]
    store.held, tidied = [1], []

    def release_gone():
        tidied.append(clock[0])
        clock[0] += 30.0
        raise StoreUnavailable("canceling statement due to lock timeout")

    store.release_gone = release_gone
    with patch.object(holds, "now", lambda: clock[0]):
        assert cache.read(store).ids == {1}
        assert cache.is_known
        assert store.reads == 2, "the next connection may lead to another server"
        for seconds in (9.0, 2.0):
            clock[0] += seconds
            assert cache.read(store).ids == {1}
    assert tidied == [100.0, 141.0]
