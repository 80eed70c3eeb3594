"""An outage is logged once when it begins and once when it ends."""

import logging

import pytest

from outbox_core.harvest import outage as outage_module
from outbox_core.harvest.outage import Outage

_log = logging.getLogger("tests.outage")


@pytest.fixture
def clock(monkeypatch):
    """Sets the time: `clock(12.0)`."""
    times = [100.0]
    monkeypatch.setattr(outage_module.time, "monotonic", lambda: times[-1])
    return times.append


def test_logged_once_per_change(caplog):
    """However often something fails or works, only the changes are logged."""
    outage = Outage("database", _log)
    outage.ended()
    for number in range(5):
        outage.began(f"refused {number}")
    outage.ended()
    outage.ended()
    outage.began("refused again")
    told = [record.message for record in caplog.records]
    assert told[0] == "database: refused 0; retrying"
    assert told[1].startswith("database: back after")
    assert told[2] == "database: refused again; retrying"
    assert len(told) == 3


def test_logged_again_while_it_lasts(clock, caplog):
    """What nothing else shows is told of again, with the last error, no more often than it was asked to be."""
    outage = Outage("dead letters", _log, again_seconds=60.0)
    for second in range(0, 125, 5):
        clock(100.0 + second)
        outage.began(f"refused {second}")
    clock(225.0)
    outage.ended()
    assert [record.message for record in caplog.records] == [
        "dead letters: refused 0; retrying",
        "dead letters: refused 60; retrying for 60 s",
        "dead letters: refused 120; retrying for 120 s",
        "dead letters: back after 125.0 s",
    ]


def test_how_long(clock):
    """It tells how long something has been away, and why, since it failed first."""
    outage = Outage("delivery to Kafka", _log)
    assert outage.lasted_seconds == 0.0
    outage.began("timed out")
    clock(130.0)
    outage.began("something else")
    assert outage.lasted_seconds == 30.0
    assert outage.describe() == "delivery to Kafka: away for 30 s (timed out)"
    outage.ended()
    assert outage.lasted_seconds == 0.0


def test_what_is_not_looked_at_is_not_away(clock):
    """Whoever has nothing to do with it any more, or saw nothing fail for long, does not call it away."""
    outage = Outage("delivery to Kafka", _log)
    outage.began("timed out")
    clock(130.0)
    outage.dismissed()
    assert outage.lasted_seconds == 0.0
    outage.began("timed out")
    clock(140.0)
    outage.began("timed out")
    clock(144.0)
    outage.faded(5.0)
    assert outage.lasted_seconds == 14.0
    clock(146.0)
    outage.faded(5.0)
    assert outage.lasted_seconds == 0.0
