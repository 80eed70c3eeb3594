"""The harvester's view of the holds, on a clock that stands still."""

from unittest.mock import patch

from outbox_core.harvest.failures import holds
from outbox_core.harvest.failures.holds import READ_EVERY_SECONDS, HoldCache
from outbox_core.metrics import HarvestMetrics


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
