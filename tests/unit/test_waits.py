"""What waits by itself is told of: in the log when it lasts, and in the gauges at any time."""

import logging

import pytest
from prometheus_client import CollectorRegistry

from outbox_core.harvest import waits as waits_module
from outbox_core.harvest.parking import Parking
from outbox_core.harvest.waits import Waits
from outbox_core.metrics import HarvestMetrics


class Clock:
    """A clock to turn."""

    time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def clock(monkeypatch):
    """The clock of what is tested."""
    clock = Clock()
    monkeypatch.setattr(waits_module, "now", clock)
    return clock


@pytest.fixture
def gauges():
    """Where it counts, and how to read it."""
    metrics = HarvestMetrics(CollectorRegistry(), "box")
    metrics.read = lambda: tuple(
        metrics.registry.get_sample_value(f"outbox_waiting_{what}", {"outbox": "box"})
        for what in ("destinations", "keys")
    )
    return metrics


def record(identity, key, topic="t"):
    """A stored record."""
    return (identity, topic, key, b"", None, None, -1, 0)


def test_beginning_and_end_of_a_wait_are_told(clock, gauges, caplog):
    """A destination that is tried for longer than some seconds is named with its error, now and then; so is the end."""
    caplog.set_level(logging.WARNING)
    parking = Parking(1.0, 10.0, clock)
    waits = Waits(gauges, parking)
    waits.look()
    assert gauges.read() == (0, 0)
    parking.failed(record(1, "a"), ("t", 2), why="Local: Message timed out")
    parking.failed(record(2, "b"), ("t", 2), why="Local: Message timed out")
    parking.failed(record(3, "c", "u"), ("u", None), unreachable=False, why="no such topic")
    waits.look()
    assert gauges.read() == (2, 2 + 1)
    assert not caplog.records
    told = []
    for _ in range(75):
        clock.time += 1
        waits.look()
        told.append(len(caplog.records))
    assert told[8] == 0
    assert told[12] == told[60] == 1
    assert told[-1] == 2
    message = caplog.records[0].getMessage()
    assert "3 keys" in message
    assert "t, partition 2 for 10 s (Local: Message timed out); topic u for 10 s (no such topic)" in message
    parking.succeeded([record(1, "a"), record(3, "c", "u")])
    waits.look()
    assert gauges.read() == (0, 0)
    assert "no destination is waited for any more" in caplog.text
    waits.look()
    assert len(caplog.records) == 3


def test_many_destinations_are_one_line(clock, gauges, caplog):
    """A whole cluster that is away does not fill the log."""
    parking = Parking(1.0, 10.0, clock)
    waits = Waits(gauges, parking)
    for number in range(500):
        parking.failed(record(number, "a", f"t{number}"), (f"t{number}", 0), why="away")
    waits.look()
    clock.time += 11
    waits.look()
    (line,) = caplog.records
    assert "497 more destinations" in line.getMessage()
    assert gauges.read()[0] == 500


def test_records_that_await_a_trial_are_told_of(clock, gauges, caplog):
    """What is in memory since its transaction failed waits, too."""
    waits = Waits(gauges, Parking(1.0, 10.0, clock))
    waits.look(20)
    clock.time += 11
    waits.look(15)
    assert gauges.read() == (0, 15)
    assert "15 records of failed transactions" in caplog.text
    waits.over()
    assert gauges.read() == (0, 0)


def test_place_that_opens_by_itself_counts_from_the_first_time(clock):
    """A destination without a probe is closed again and again: it waits all the time."""
    parking = Parking(1.0, 10.0, clock, most_probes=0)
    began = clock.time
    for _ in range(4):
        parking.failed(record(1, "a"), ("t", 0), why="away")
        clock.time += 12
        list(parking.due())
    parking.failed(record(1, "a"), ("t", 0), why="away")
    assert [wait.since for wait in parking.waits] == [began]


def test_success_in_a_closed_topic_calls_its_probe_at_once(clock):
    """Whatever arrives in a topic that is closed as a whole shows that it is there: its rest ends at once."""
    parking = Parking(5.0, 10.0, clock)
    parking.failed(record(1, "a"), ("t", None))
    parking.failed(record(2, "b", "u"), ("u", None))
    parking.succeeded([record(3, "c")])
    assert [probe[0] for probe in parking.due()] == [1]
