"""The embedded harvester's own thread, without a database or a broker."""

from datetime import timedelta
from types import SimpleNamespace

import pytest

from outbox_core.config import HarvestConfig
from outbox_core.harvest import EmbeddedHarvester, embedded
from outbox_core.metrics import Health
from tests.harvesting import wait_until


@pytest.mark.parametrize("error", [RuntimeError, SystemExit])
def test_any_error_is_followed_by_another_harvester(monkeypatch, error):
    """A harvester that was ended by an error is replaced, also if an event handler called `sys.exit`."""
    ends = [error("over"), None]

    def join():
        if (ended := ends.pop(0)) is not None:
            raise ended
        wait_until(made._stopping.is_set, "it is stopped")

    healthy = Health(ok=True, leader=False)
    one = SimpleNamespace(start=lambda: None, stop=lambda: None, join=join, health=lambda: healthy, is_leader=False)
    monkeypatch.setattr(embedded, "Harvester", lambda *_, **__: one)
    made = EmbeddedHarvester(HarvestConfig(), retry_after=timedelta(milliseconds=10))
    with made:
        wait_until(lambda: not ends, "another one runs")
        assert made.health().ok
