"""Leases with too little left to send anything, on a clock that the test sets."""

import logging

import pytest
from prometheus_client import CollectorRegistry

from outbox_core.harvest.at_least_once import send_window as send_window_module
from outbox_core.harvest.at_least_once.send_window import SendWindow
from outbox_core.metrics import HarvestMetrics

LONGEST = 3.0


class World:
    """A send window under a lease of which little is left."""

    def __init__(self, monkeypatch, shortest=0.1):
        self.time = 100.0
        monkeypatch.setattr(send_window_module, "now", lambda: self.time)
        self.metrics = HarvestMetrics(CollectorRegistry(), "box")
        self.window = SendWindow(LONGEST, self.metrics, shortest=shortest)

    def spend(self, seconds, left, *, records_wait=True):
        """Update once a second, with so much left of the lease each time."""
        for _ in range(seconds):
            self.window.update(left, records_wait=records_wait)
            self.time += 1

    @property
    def gauge(self):
        return self.metrics.registry.get_sample_value("outbox_send_wait_seconds", {"outbox": "box"})


@pytest.fixture
def world(monkeypatch):
    """Return a window whose producer can have any delivery timeout."""
    return World(monkeypatch)


@pytest.mark.parametrize(("left", "timeout"), [(2.9, 1.5), (2.0, 1.5), (1.9, 0.75), (1.0, 0.75), (0.9, 3.0)])
def test_shorter_timeout_has_room_to_spare(world, left, timeout):
    """The delivery timeout becomes the half or quarter that fits into 3/4 of the remaining lease, if any does."""
    world.spend(2, left)
    assert world.window.timeout == LONGEST
    world.spend(2, left)
    assert world.window.timeout == timeout
    assert world.window.has_waiting == (timeout == LONGEST)


@pytest.mark.parametrize("shortest", [None, 2.0])
def test_timeout_that_cannot_be_shorter(monkeypatch, shortest):
    """A producer of the user's own, or one that waits long for its batches, keeps its delivery timeout."""
    world = World(monkeypatch, shortest)
    world.spend(30, 2.5)
    assert world.window.timeout == LONGEST


def test_wait_is_told_now_and_then(world, caplog):
    """A wait is logged after some seconds, again after a minute, and at its end; a gauge and health always show it."""
    caplog.set_level(logging.WARNING)
    world.spend(5, 0.4)
    assert not caplog.records
    assert world.gauge == 4
    world.spend(50, 0.5)
    (told,) = (record.getMessage() for record in caplog.records)
    assert told == (
        "it leads, and records have waited for 5 s: heartbeats come back so late that 0.5 s of the lease are left at "
        "most, and delivery.timeout.ms needs 3 s. Nothing can be sent: give this process and the brokers more CPU, or "
        "raise heartbeatTimeout"
    )
    assert world.window.trouble(60) is None
    assert "have waited for 54 s: heartbeats" in world.window.trouble(30)
    world.spend(20, 0.5)
    assert len(caplog.records) == 2
    world.spend(1, 3.5)
    assert "records are sent after 75 s" in caplog.text
    assert world.gauge == 0
    assert world.window.trouble(0) is None


def test_nothing_to_send_waits_for_nothing(world, caplog):
    """An idle leader is healthy, however late its heartbeats are."""
    world.spend(100, 0.5, records_wait=False)
    assert (world.window.timeout, world.gauge, world.window.trouble(0)) == (LONGEST, 0, None)
    assert not caplog.records


def test_wait_goes_on_in_the_next_leadership(world):
    """Leaderships lost and gained without a send are one wait; one that comes much later is another."""
    world.spend(20, 0.5)
    world.window.leadership_ends()
    assert world.gauge == 0
    world.time += 3
    world.spend(15, 0.5)
    assert world.window.trouble(30) is not None
    world.window.leadership_ends()
    world.time += 60
    world.spend(5, 0.5)
    assert world.gauge == 4


def test_whole_timeout_comes_back(world):
    """The whole timeout comes back once it has fitted for a while, with and without records to send."""
    world.spend(5, 2.0)
    assert world.window.timeout == LONGEST / 2
    world.spend(8, 4.5)
    world.spend(1, 2.9)
    world.spend(10, 4.5, records_wait=False)
    assert world.window.timeout == LONGEST / 2
    world.spend(1, 4.5, records_wait=False)
    assert world.window.timeout == LONGEST
