"""A statement of the leader that waits for a lock would wait for its peer, too: nobody hands over."""

import pytest

from outbox_core.events import LeaderAcquired, LeaderRevoked
from outbox_core.record import OutboxRecord
from tests.harvesting import wait_until

MODES = ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)]


@pytest.fixture
def little_patience(monkeypatch):
    """Have leaders judge their work after seconds."""
    monkeypatch.setattr("outbox_core.kafka.duty.PATIENCE_SECONDS", 4.0)
    monkeypatch.setattr("outbox_core.harvest.work_watch._SUSPECT_AFTER_SECONDS", 2.0)
    monkeypatch.setattr("outbox_core.harvest.work_watch._HANGS_SECONDS", 1.0)
    monkeypatch.setattr("outbox_core.harvest.questions._AT_WORK_SECONDS", 0.5)


_GATE = """
CREATE FUNCTION gate() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN PERFORM pg_catalog.pg_advisory_xact_lock(1); RETURN coalesce(NEW, OLD); END $$
"""
_GUARD = "CREATE TRIGGER guard BEFORE UPDATE OR DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION gate()"


@pytest.mark.parametrize("delivery", MODES)
@pytest.mark.usefixtures("little_patience")
def test_a_lock_passes_no_leadership_round(scene, make_topic, delivery):
    """A mark waits for it, or exactly once a purge: the leader says so, waits on, and publishes when it is free."""
    topic = make_topic()
    scene.execute(_GATE)
    scene.execute(_GUARD)
    with (
        scene.running(elector_factory=None, name="first", config={"delivery": delivery}) as first,
        scene.running(elector_factory=None, name="second", config={"delivery": delivery}) as second,
    ):
        scene.stash(OutboxRecord(topic, "k", "before"))
        wait_until(lambda: scene.count() == 0, "the first record is published")
        leader, peer = (first, second) if first.is_leader else (second, first)
        terms, activity = len(peer.kinds()), leader.metrics.activity
        with scene.connect() as session:
            session.execute("SELECT pg_advisory_xact_lock(1)")
            scene.stash(OutboxRecord(topic, "k", "meanwhile"))
            wait_until(lambda: activity.duty._excused or LeaderRevoked.__name__ in leader.kinds(), "it has judged")
            assert "has it wait for a lock" in activity.circumstances
            assert leader.is_leader
        wait_until(lambda: scene.count() == 0, "all is published")
        assert LeaderRevoked.__name__ not in leader.kinds()
        assert LeaderAcquired.__name__ not in peer.kinds()[terms:]
    assert [message.value for message in scene.read(topic)] == [b"before", b"meanwhile"]
