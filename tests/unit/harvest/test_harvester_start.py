"""A harvester that cannot start leaves nothing behind."""

import threading
from pathlib import Path
from types import SimpleNamespace
from uuid import uuid4

import pytest

from outbox_core.config import HarvestConfig
from outbox_core.election import Leadership, now
from outbox_core.errors import LeaderTopicError
from outbox_core.events import LeaderAcquired
from outbox_core.harvest import Harvester
from outbox_core.kafka import identity
from tests.harvesting import wait_until


class _Store(SimpleNamespace):
    """A store that only says what it is."""

    def check(self):
        return "d.s.t"

    def server_id(self):
        return ""

    def close(self):
        pass


class _Elector(SimpleNamespace):
    """An elector that may not write to its topic."""

    def start(self):
        raise LeaderTopicError("no right to write")


class _LeadsAtOnce(SimpleNamespace):
    """An elector that is elected while it starts, and fails then."""

    leadership = None

    def start(self):
        self.leadership = Leadership(uuid4(), 1, now() + 60.0)
        self.on_event(LeaderAcquired(self.leadership.leader_id))
        raise LeaderTopicError("no more")


def _config(delivery):
    return HarvestConfig(
        base_kafka_config={"bootstrap.servers": "mock", "test.mock.num.brokers": 1},
        data_source="postgresql://nowhere/d",
        delivery=delivery,
    )


def _threads():
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_failed_start_ends_all_threads(delivery, monkeypatch):
    """No thread, of Kafka clients or our own, outlives a start that failed."""
    monkeypatch.setattr(identity, "ensure_tracking_topic", lambda *_: None)  # the mock has no transactions
    config = _config(delivery)
    before, ours = _threads(), threading.active_count()
    harvester = Harvester(config, store_factory=_Store, elector_factory=lambda _: _Elector())
    with pytest.raises(LeaderTopicError):
        harvester.start()
    wait_until(lambda: threading.active_count() <= ours, "the stores' threads have ended")
    wait_until(lambda: _threads() <= before, "the clients' threads have ended")


def test_leader_knows_it_while_it_starts():
    """An event handler that is told of the leadership while the harvester still starts can ask it about that."""
    told = []

    def on_event(event):
        told.append((harvester.is_leader, harvester.leader_id == event.leader_id))

    harvester = Harvester(
        _config("at-least-once"),
        on_event,
        store_factory=_Store,
        elector_factory=lambda on_event: _LeadsAtOnce(on_event=on_event),
    )
    with pytest.raises(LeaderTopicError):
        harvester.start()
    assert told == [(True, True)]
