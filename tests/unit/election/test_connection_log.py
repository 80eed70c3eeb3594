"""The log of the cluster as a group member sees it: one line for each change of state."""

import logging

import pytest

from outbox_core.election.config import NeliConfig
from outbox_core.election.connection_log import ConnectionLog

FORBIDDEN = "Topic authorization failed"
MISSING = "Unknown topic or partition"


@pytest.fixture
def connection(caplog):
    """Return the log of a member."""
    caplog.set_level(logging.INFO, logger="outbox_core.election")
    return ConnectionLog(NeliConfig(kafka={}, group_id="billing", name="one"))


def test_hindrances_that_take_turns(connection, caplog):
    """Two errors that come again and again, one after the other, are told once each; the newest is remembered."""
    for reason in (FORBIDDEN, MISSING, FORBIDDEN, MISSING):
        connection.on_hindrance(reason)
        assert connection.last_error == reason
    assert caplog.messages == [
        f"one: leader election is hindered: {FORBIDDEN}; trying on",
        f"one: leader election is hindered: {MISSING}; trying on",
    ]


def test_a_hindrance_that_comes_back(connection, caplog):
    """Once the cluster did what it was asked the next error is a change of state."""
    connection.on_hindrance(FORBIDDEN)
    connection.on_ok()
    assert connection.last_error == ""
    connection.on_hindrance(FORBIDDEN)
    assert len(caplog.messages) == 2


def test_endless_hindrances(connection):
    """Reasons that are all different do not fill the memory."""
    for number in range(1000):
        connection.on_hindrance(f"broker {number} is away")
    assert len(connection._told) <= 100
