"""A harvester whose connections fall silent while new ones work: it gives them up, says so, and goes on by itself."""

import logging
from contextlib import contextmanager

import pytest

from outbox_core.metrics import HarvestMetrics
from outbox_core.record import OutboxRecord
from outbox_core.schema import create_history_sql, notify_sql
from outbox_core.stores.postgres import deadlines, notify
from tests.harvesting import GENEROUS_SECONDS, standing_still, wait_until

MODES = ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)]
_OURS = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name LIKE 'kafka-outbox%%'"


@contextmanager
def frozen(scene):
    """Stop the server's side of all connections that harvesters have now; each is a process."""
    with standing_still([row.pid for row in scene.execute(_OURS)]):
        yield


@pytest.mark.parametrize("delivery", MODES)
def test_leader_goes_on_over_new_connections(scene, make_topic, monkeypatch, caplog, delivery):
    """Each connection that stands still is given up with one line; what is stashed meanwhile is published."""
    monkeypatch.setattr(deadlines, "GRACE_SECONDS", 1.0)
    monkeypatch.setattr(notify, "_STATEMENT_SECONDS", 1.0)
    monkeypatch.setattr("outbox_core.upkeep.wakeup._CHECK_SECONDS", 1.0)
    caplog.set_level(logging.INFO, logger="outbox_core")
    topic = make_topic()
    scene.execute(create_history_sql(scene.table))
    scene.execute(notify_sql(scene.table))
    limits = {"statement_timeout": "1s", "min_metrics_interval": "200ms"}
    settings = {"delivery": delivery, "notify": True}
    with scene.running(limits=limits, config=settings, metrics=HarvestMetrics()) as harvester:
        scene.stash(OutboxRecord(topic, "k", "before"))
        wait_until(lambda: scene.count() == 0, "the first record is published")
        wait_until(lambda: len(scene.execute(_OURS)) >= 4, "marks, purges, counts and notices have a connection each")
        caplog.clear()
        with frozen(scene):
            scene.stash(OutboxRecord(topic, "k", "meanwhile"))
            wait_until(lambda: scene.count() == 0, "what was stashed meanwhile is published")
            for works in (("database",), ("counting the backlog", "writing the history"), ("notices of commits",)):
                wait_until(lambda works=works: _given_up(caplog, *works), f"one of {works} says that it gave up")
            wait_until(lambda: harvester.health().ok, "it is well")
        lines = [record.getMessage() for record in caplog.records if "has not answered" in record.getMessage()]
        assert len(lines) == len(set(lines)), lines
        scene.stash(OutboxRecord(topic, "k", "after"))
        wait_until(lambda: scene.count() == 0, "the last record is published")
    assert [message.value for message in scene.read(topic)] == [b"before", b"meanwhile", b"after"]


@pytest.mark.parametrize("delivery", MODES)
def test_stop_does_not_wait_for_a_silent_database(scene, delivery):
    """A stop ends after the drain timeout, however long the call under way may still take."""
    limits = {"statement_timeout": "1h", "drain_timeout": "1s"}
    harvester = scene.harvester(limits=limits, config={"delivery": delivery}, metrics=HarvestMetrics())
    harvester.start()
    wait_until(lambda: harvester.metrics.activity.idle_seconds < 1 and harvester.is_leader, "it looks at the table")
    with frozen(scene):
        harvester.stop()
        assert harvester.join(GENEROUS_SECONDS)


def _given_up(caplog, *works):
    """Return the lines by which one of these works gives its connection up."""
    lines = [record.getMessage() for record in caplog.records]
    return [line for line in lines if line.partition(": ")[0] in works and "the connection was given up" in line]
