"""An outage is logged once when it begins and once when it ends."""

import logging

import pytest

from outbox_core import outage as outage_module
from outbox_core.outage import Outage

_log = logging.getLogger("tests.outage")


@pytest.fixture
def clock(monkeypatch):
    """Return a function that sets the time: `clock(12.0)`."""
    times = [100.0]
    monkeypatch.setattr(outage_module.time, "monotonic", lambda: times[-1])
    return times.append


def test_logged_once_per_change(caplog):
    """Of any number of failures and successes only the changes are logged."""
    outage = Outage("database", _log)
    outage.recovered()
    for number in range(5):
        outage.failed(f"refused {number}")
    outage.recovered()
    outage.recovered()
    outage.failed("refused again")
    told = [record.message for record in caplog.records]
    assert told[0] == "database: refused 0; retrying"
    assert told[1].startswith("database: back after")
    assert told[2] == "database: refused again; retrying"
    assert len(told) == 3


def test_logged_again_while_it_lasts(clock, caplog):
    """With `again_seconds` an outage is logged again with its last error, no more often than that."""
    outage = Outage("dead letters", _log, again_seconds=60.0)
    for second in range(0, 125, 5):
        clock(100.0 + second)
        outage.failed(f"refused {second}")
    clock(225.0)
    outage.recovered()
    assert [record.message for record in caplog.records] == [
        "dead letters: refused 0; retrying",
        "dead letters: refused 60; retrying for 60 s",
        "dead letters: refused 120; retrying for 120 s",
        "dead letters: back after 125.0 s",
    ]


def test_each_new_reason_is_logged_once(clock, caplog):
    """A new reason is logged, once, and some in all; details by which two tries differ make no new reason."""
    outage = Outage("delivery to Kafka", _log)
    for second, reason in enumerate(["no answer from 10.0.0.1:9092 after 31 ms", "topic 't' is gone"] * 3):
        clock(100.0 + second)
        outage.failed(reason, at=f"record {second} for topic t{second}")
    for number in range(20):
        outage.failed("odd " * number)
    told = [record.message for record in caplog.records]
    assert told[:2] == [
        "delivery to Kafka: record 0 for topic t0: no answer from 10.0.0.1:9092 after 31 ms; retrying",
        "delivery to Kafka: record 1 for topic t1: topic 't' is gone; retrying for 1 s",
    ]
    assert len(told) == 5
    outage.recovered()
    outage.failed("topic 't' is gone")
    assert caplog.records[-1].message == "delivery to Kafka: topic 't' is gone; retrying", "it is another outage"


def test_how_long(clock):
    """An outage reports its duration since its first failure, and the cause of the last one."""
    outage = Outage("delivery to Kafka", _log)
    assert outage.lasted_seconds == 0.0
    outage.failed("timed out")
    clock(130.0)
    outage.failed("something else")
    assert outage.lasted_seconds == 30.0
    assert outage.describe() == "delivery to Kafka: away for 30 s (something else)"
    outage.recovered()
    assert outage.lasted_seconds == 0.0


def test_what_is_not_looked_at_is_not_away(clock):
    """An outage that is forgotten, or that has not failed for long, is over."""
    outage = Outage("delivery to Kafka", _log)
    outage.failed("timed out")
    clock(130.0)
    outage.forget()
    assert outage.lasted_seconds == 0.0
    outage.failed("timed out")
    clock(140.0)
    outage.failed("timed out")
    clock(144.0)
    outage.expire_after(5.0)
    assert outage.lasted_seconds == 14.0
    clock(146.0)
    outage.expire_after(5.0)
    assert outage.lasted_seconds == 0.0


def test_asked_while_it_ends(monkeypatch):
    """An outage that ends on its own thread while another one asks how long it has lasted is no error."""
    outage = Outage("database", _log)
    outage.failed("gone")

    def time_passes():
        outage.forget()
        return 1e9

    monkeypatch.setattr(outage_module.time, "monotonic", time_passes)
    assert outage.lasted_seconds > 0.0
    assert outage.lasted_seconds == 0.0


def test_outage_lasts_for_each_of_those_who_suffer(caplog):
    """A thing that works for one of its users and fails for another is away, with one line in the log."""
    outage = Outage("database", logging.getLogger("test"))
    for _ in range(3):
        outage.failed("no connection is left", "purger")
        outage.recovered("marker")
    assert outage.is_ongoing
    assert len(caplog.records) == 1
    outage.recovered("purger")
    assert not outage.is_ongoing
    outage.failed("no connection is left", "purger")
    outage.forget()
    outage.failed("the server stops", "marker")
    outage.recovered("marker")
    assert not outage.is_ongoing, "what was forgotten is over"
