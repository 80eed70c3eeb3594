"""A leader whose heartbeats come back late: its lease is renewed, but always has little time left."""

import logging

import pytest

from outbox_core.election import Leadership, now
from outbox_core.metrics import HarvestMetrics
from tests.harvesting import AlwaysLeader, wait_until

DELIVERY_SECONDS = 3.0  # by default, of a lease of 5


class LateHeartbeats(AlwaysLeader):
    """An elector that always leads, and whose lease has the same number of seconds left at every reading."""

    left_seconds = float("inf")

    @property
    def leadership(self):
        lease = self._lease
        return None if lease is None else Leadership(lease.leader_id, lease.term, now() + self.left_seconds)

    @leadership.setter
    def leadership(self, lease):
        self._lease = lease


@pytest.fixture
def quick(monkeypatch):
    """Shorten the times after which a wait for a lease is reported."""
    monkeypatch.setattr("outbox_core.harvest.harvester._UNHEALTHY_AFTER_SECONDS", 1.0)
    monkeypatch.setattr("outbox_core.harvest.at_least_once.send_window._LOG_AFTER_SECONDS", 0.2)
    monkeypatch.setattr("outbox_core.harvest.at_least_once.send_window._SHORTEN_AFTER_SECONDS", 0.2)
    monkeypatch.setattr("outbox_core.harvest.at_least_once.send_window._CALM_SECONDS", 0.2)


@pytest.mark.usefixtures("quick")
def test_lease_too_short_to_send_is_told(scene, make_topic, caplog):
    """No record that could outlast the lease is sent; log, health and gauge report the wait, and its end."""
    caplog.set_level(logging.WARNING)
    topic = make_topic()
    metrics = HarvestMetrics(outbox_name="o")
    waited = lambda: metrics.registry.get_sample_value("outbox_send_wait_seconds", {"outbox": "o"})  # noqa: E731
    with scene.running(elector_factory=LateHeartbeats, metrics=metrics) as harvester:
        wait_until(lambda: harvester.is_leader and harvester.health().ok, "it leads")
        harvester.elector.left_seconds = 0.3
        scene.fill(topic, 5)
        told = "heartbeats come back so late that"
        wait_until(lambda: told in harvester.health().detail, "health tells of it", timeout=10)
        assert "delivery.timeout.ms needs 3 s" in caplog.text
        assert waited() > 0
        assert scene.count() == 5
        harvester.elector.left_seconds = float("inf")
        wait_until(lambda: scene.count() == 0 and harvester.health().ok, "it sends again")
        wait_until(lambda: waited() == 0, "the wait is over")
    assert "records are sent after" in caplog.text
    assert len(scene.read(topic)) == 5


@pytest.mark.usefixtures("quick")
def test_shorter_delivery_timeout_fits_a_short_lease(scene, make_topic, caplog):
    """If the lease is always too short for the delivery timeout, half of it is used; later the whole one is back."""
    caplog.set_level(logging.INFO)
    topic = make_topic()
    with scene.running(elector_factory=LateHeartbeats) as harvester:
        wait_until(lambda: harvester.is_leader, "it leads")
        window = harvester._ctx.send_window
        harvester.elector.left_seconds = 0.75 * DELIVERY_SECONDS
        scene.fill(topic, 5)
        wait_until(lambda: scene.count() == 0, "it publishes", timeout=10)
        assert window.timeout == DELIVERY_SECONDS / 2
        harvester.elector.left_seconds = float("inf")
        wait_until(lambda: window.timeout == DELIVERY_SECONDS, "the whole time-out is back", timeout=10)
        scene.fill(topic, 5)
        wait_until(lambda: scene.count() == 0, "it publishes", timeout=10)
    assert len(scene.read(topic)) == 10
