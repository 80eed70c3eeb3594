"""Events for a handler that hangs: the elector's thread goes on, and the events come later."""

import threading
from uuid import uuid4

import pytest

from outbox_core.config import HarvestConfig
from outbox_core.events import LeaderAcquired, LeaderFenced, LeaderRefreshed
from outbox_core.harvest import Harvester, harvester
from outbox_core.harvest.steps import TELL
from outbox_core.metrics import HarvestMetrics
from tests.harvesting import wait_until


class _World:
    """A harvester that leads, with a handler that hangs while `returns` is not set."""

    def __init__(self):
        self.told, self.returns = [], threading.Event()
        self.returns.set()
        self.harvester = Harvester(HarvestConfig(), self._note)
        self.harvester.metrics = HarvestMetrics()
        self.activity = self.harvester.metrics.activity
        self.harvester._on_leadership(LeaderAcquired(uuid4()))

    def _note(self, event):
        self.told.append(type(event))
        self.returns.wait()

    def hangs(self):
        """Have the handler hang in an event of the harvest thread."""
        self.returns.clear()
        thread = threading.Thread(target=self.harvester._tell, args=[LeaderRefreshed(uuid4())], daemon=True)
        thread.start()
        wait_until(lambda: self.told[-1] is LeaderRefreshed, "the handler is called")
        return thread


@pytest.fixture
def world():
    """A harvester that leads."""
    made = _World()
    yield made
    made.returns.set()


def test_a_handler_that_hangs_is_owed(world):
    """What the leader owes begins with the call, and ends with it; the health names the handler."""
    assert TELL not in world.activity.duty.owed(world.activity.now())
    thread = world.hangs()
    assert TELL in world.activity.duty.owed(world.activity.now())
    assert world.activity.longest_step[0] == "the event handler"
    world.returns.set()
    thread.join()
    assert TELL not in world.activity.duty.owed(world.activity.now())


def test_events_while_the_handler_hangs(world, monkeypatch):
    """A leadership ends and begins although the handler hangs; that is told, in order, when it returns."""
    monkeypatch.setattr(harvester, "_DEAF_AFTER_SECONDS", 0.0)
    thread = world.hangs()
    elector = threading.Thread(
        target=lambda: [
            world.harvester._on_leadership(LeaderFenced(uuid4())),
            world.harvester._on_leadership(LeaderAcquired(uuid4())),
        ],
        daemon=True,
    )
    elector.start()
    elector.join(30)
    assert not elector.is_alive()
    assert world.told == [LeaderAcquired, LeaderRefreshed]
    world.returns.set()
    thread.join()
    assert world.told == [LeaderAcquired, LeaderRefreshed, LeaderFenced, LeaderAcquired]


def test_events_while_the_handler_is_at_work(world):
    """A handler that has not hung for long is told at once, by the thread that noticed the event."""
    thread = world.hangs()
    elector = threading.Thread(target=world.harvester._on_leadership, args=[LeaderFenced(uuid4())], daemon=True)
    elector.start()
    wait_until(lambda: LeaderFenced in world.told, "it is told")
    world.returns.set()
    for each in (thread, elector):
        each.join()
