"""Destinations that are backed off: in the log if it lasts, and in the gauges at any time."""

import logging

import pytest
from prometheus_client import CollectorRegistry

from outbox_core.harvest.failures import backoff_report as report_module
from outbox_core.harvest.failures.backoff_report import BackoffReport
from outbox_core.harvest.failures.backoffs import Backoffs
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import StoredRecord


class Clock:
    """A clock that the test sets."""

    time = 100.0

    def __call__(self):
        return self.time


@pytest.fixture
def clock(monkeypatch):
    """Set the clock of the tested modules."""
    clock = Clock()
    monkeypatch.setattr(report_module, "now", clock)
    return clock


@pytest.fixture
def gauges():
    """Return metrics and a way to read their gauges."""
    metrics = HarvestMetrics(CollectorRegistry(), "box")
    metrics.read = lambda: tuple(
        metrics.registry.get_sample_value(f"outbox_waiting_{what}", {"outbox": "box"})
        for what in ("destinations", "keys")
    )
    return metrics


def record(identity, key, topic="t"):
    """Return a stored record."""
    return StoredRecord(identity, topic, key, b"", None, None, -1, 0)


def test_beginning_and_end_of_a_wait_are_told(clock, gauges, caplog):
    """A destination backed off for some seconds is logged with its error, again now and then, and at its end."""
    caplog.set_level(logging.WARNING)
    backoffs = Backoffs(1.0, 10.0, clock)
    report = BackoffReport(gauges, backoffs)
    report.update()
    assert gauges.read() == (0, 0)
    backoffs.failed(record(1, "a"), ("t", 2), why="Local: Message timed out")
    backoffs.failed(record(2, "b"), ("t", 2), why="Local: Message timed out")
    backoffs.failed(record(3, "c", "u"), ("u", None), unreachable=False, why="no such topic")
    report.update()
    assert gauges.read() == (2, 2 + 1)
    assert not caplog.records
    told = []
    for _ in range(75):
        clock.time += 1
        report.update()
        told.append(len(caplog.records))
    assert told[8] == 0
    assert told[12] == told[60] == 1
    assert told[-1] == 2
    message = caplog.records[0].getMessage()
    assert "3 keys" in message
    assert "t, partition 2 for 10 s (Local: Message timed out); topic u for 10 s (no such topic)" in message
    backoffs.succeeded([record(1, "a"), record(3, "c", "u")])
    report.update()
    assert gauges.read() == (0, 0)
    assert "no destination is waited for any more" in caplog.text
    report.update()
    assert len(caplog.records) == 3


def test_many_destinations_are_one_line(clock, gauges, caplog):
    """A whole cluster that is away is one line of the log."""
    backoffs = Backoffs(1.0, 10.0, clock)
    report = BackoffReport(gauges, backoffs)
    for number in range(500):
        backoffs.failed(record(number, "a", f"t{number}"), (f"t{number}", 0), why="away")
    report.update()
    clock.time += 11
    report.update()
    (line,) = caplog.records
    assert "497 more destinations" in line.getMessage()
    assert gauges.read()[0] == 500
