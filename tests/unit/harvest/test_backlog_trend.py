"""The time to an empty outbox, from the counts of the last minute."""

import pytest

from outbox_core.upkeep.backlog import Trend


def test_falling_backlog_has_an_end():
    """A backlog that falls by ten records a second is empty after a tenth of its number."""
    trend = Trend()
    assert trend.time_to_empty(100.0, 5000) is None
    assert trend.time_to_empty(105.0, 4950) == pytest.approx(495)
    assert trend.time_to_empty(110.0, 4900) == pytest.approx(490)
    assert trend.time_to_empty(115.0, 0) == 0.0


def test_growing_backlog_has_none():
    """A backlog that grows, or stays, is never empty; the last minute counts, not what was before."""
    trend = Trend()
    assert trend.time_to_empty(0.0, 9000) is None
    assert trend.time_to_empty(50.0, 1000) == pytest.approx(6.25)
    assert trend.time_to_empty(100.0, 1000) is None
    assert trend.time_to_empty(105.0, 1200) is None


def test_gap_begins_anew():
    """After a time without counts nothing follows from the first one."""
    trend = Trend()
    trend.time_to_empty(0.0, 9000)
    trend.forget()
    assert trend.time_to_empty(5.0, 100) is None
