"""The thread that counts the backlog: how soon it counts again, and what it tells meanwhile."""

import time
from datetime import timedelta
from types import SimpleNamespace

import pytest

from outbox_core.config import HarvestConfig, Limits
from outbox_core.errors import StoreUnavailable
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import Backlog, WaitingRows
from outbox_core.upkeep import backlog as observing
from outbox_core.upkeep.backlog import BacklogObserver
from tests.harvesting import wait_until

INTERVAL_SECONDS = 0.02


class SlowStore:
    """A store whose first count waits for a lock in vain."""

    def __init__(self, waits_seconds):
        self.waits_seconds = waits_seconds
        self.counts = 0
        self.history = SimpleNamespace(add_events=lambda _: None, add_statistics=lambda _: None, prune=lambda: None)

    def backlog(self):
        self.counts += 1
        if self.counts == 1:
            time.sleep(self.waits_seconds)
            raise StoreUnavailable("canceling statement due to statement timeout")
        return Backlog(WaitingRows(3, 1.0), WaitingRows())

    def rotate_archive(self):
        return 0

    def close(self):
        pass


class Harvester:
    """A leader whose Kafka can be taken away."""

    config = HarvestConfig(limits=Limits(min_metrics_interval=timedelta(seconds=1)))
    is_leader = counts_backlog = kafka_answers = True

    def __init__(self):
        self.metrics = HarvestMetrics(outbox_name="shop")

    def shown(self, name):
        """Return a metric's value, None if it is not shown."""
        return self.metrics.registry.get_sample_value(name, {"outbox": "shop"})


@pytest.fixture
def observe():
    """A factory of started observers."""
    made = []

    def start(store, harvester, server_id=""):
        made.append(BacklogObserver(store, harvester, INTERVAL_SECONDS, server_id))
        made[-1].start()

    yield start
    for observer in made:
        observer.stop()


def test_a_count_that_waited_for_a_lock_is_repeated_soon(observe, monkeypatch):
    """The pause after a count that waited is bounded: 2% of the time would leave alerts blind for half an hour."""
    monkeypatch.setattr(observing, "_LONGEST_PAUSE_SECONDS", 0.1)
    store, harvester = SlowStore(waits_seconds=0.3), Harvester()
    observe(store, harvester)
    wait_until(lambda: store.counts > 1, "it counts again")
    wait_until(lambda: harvester.shown("outbox_deliverable_records") == 3, "the count is shown")


def test_kafka_is_told_between_two_counts(observe):
    """The metric of Kafka's answers is set at each interval, also in the long pause after a slow count."""
    store, harvester = SlowStore(waits_seconds=0.3), Harvester()
    observe(store, harvester)
    wait_until(lambda: harvester.shown("outbox_kafka_up") == 1, "Kafka is up")
    time.sleep(0.4)
    harvester.kafka_answers = False
    wait_until(lambda: harvester.shown("outbox_kafka_up") == 0, "Kafka is away")
    assert store.counts == 1


def test_a_database_that_has_moved_is_logged_once(observe, caplog, monkeypatch):
    """After pg_upgrade under a harvester nothing fails until another starts or leads, so its log says so at once."""
    monkeypatch.setattr("outbox_core.upkeep.backlog._SERVER_EVERY_SECONDS", 0.0)
    store = SlowStore(waits_seconds=0.0)
    ids = ["1", "", "2"]
    store.server_id = lambda: ids.pop(0) if ids[1:] else ids[0]
    observe(store, Harvester(), server_id="1")
    wait_until(lambda: "was 1 and is 2" in caplog.text, "it is logged")
    counts = store.counts
    wait_until(lambda: store.counts > counts + 1, "it counts again")
    assert caplog.text.count("--accept-moved") == 1
