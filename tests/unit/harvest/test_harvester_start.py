"""A harvester that cannot start leaves nothing behind."""

import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from outbox_core.config import HarvestConfig
from outbox_core.errors import LeaderTopicError
from outbox_core.harvest import Harvester
from outbox_core.harvest import harvester as harvester_module
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


def _threads():
    return len(list(Path("/proc/self/task").iterdir()))


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_failed_start_ends_all_threads(delivery, monkeypatch):
    """No thread, of Kafka clients or our own, outlives a start that failed."""
    monkeypatch.setattr(harvester_module, "ensure_tracking_topic", lambda *_: None)  # the mock has no transactions
    config = HarvestConfig(
        base_kafka_config={"bootstrap.servers": "mock", "test.mock.num.brokers": 1},
        data_source="postgresql://nowhere/d",
        delivery=delivery,
    )
    before, ours = _threads(), threading.active_count()
    harvester = Harvester(config, store_factory=_Store, elector_factory=lambda _: _Elector())
    with pytest.raises(LeaderTopicError):
        harvester.start()
    wait_until(lambda: threading.active_count() == ours, "the stores' threads have ended")
    wait_until(lambda: _threads() <= before, "the clients' threads have ended")
