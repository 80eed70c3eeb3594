"""The numbers of queues as Prometheus sees them."""

import threading

import pytest
from prometheus_client import CollectorRegistry

from outbox_core.errors import InvalidConfig
from outbox_queue.metrics import QueueMetrics
from outbox_queue.redelivery.in_progress import QueueLoad

COUNTERS = ["acknowledged", "consumed", "dead_lettered", "nacked", "parked", "produced", "redelivered", "rejected"]


def value(metrics, name, **labels):
    """Return a sample's value."""
    return metrics.registry.get_sample_value(f"outbox_queue_{name}", labels)


@pytest.mark.parametrize("name", COUNTERS)
def test_counters_count_by_queue(name):
    """Each counter counts the queue it is of, and no other."""
    metrics = QueueMetrics()
    metrics.of("a").count(name)
    metrics.of("a").count(name, 4)
    metrics.of("b").count(name)
    assert value(metrics, f"{name}_total", queue="a") == 5
    assert value(metrics, f"{name}_total", queue="b") == 1


def test_histograms_observe_seconds():
    """Production, queueing and processing times go into their own histograms."""
    metrics = QueueMetrics()
    counters = metrics.of("a")
    counters.count("produced", 3, 0.02)
    counters.count("consumed", 1, 2.0)
    for _ in range(2):
        counters.settled("acknowledged", 7200.0, was_in_progress=True)
    assert value(metrics, "production_seconds_count", queue="a") == 3
    assert value(metrics, "production_seconds_bucket", queue="a", le="0.05") == 3
    assert value(metrics, "production_seconds_bucket", queue="a", le="0.01") == 0
    assert value(metrics, "queueing_seconds_sum", queue="a") == 2.0
    assert value(metrics, "processing_seconds_bucket", queue="a", le="3600.0") == 0
    assert value(metrics, "processing_seconds_bucket", queue="a", le="21600.0") == 2


def test_gauges_show_what_is():
    """The number of messages in progress goes up and down; an unknown lag is not shown."""
    metrics = QueueMetrics()
    counters = metrics.of("a")
    counters.in_progress(4)
    counters.in_progress(-1)
    counters.settled("nacked", 1.0, was_in_progress=True)
    counters.settled(None, 1.0, was_in_progress=False)
    counters.lag("consumer", 7)
    assert value(metrics, "processing", queue="a") == 2
    assert value(metrics, "lag_records", queue="a") == 7
    counters.lag("consumer", None)
    assert value(metrics, "lag_records", queue="a") is None


def test_the_lag_of_a_process_is_that_of_all_its_consumers():
    """Consumers of one queue in one process have partitions of their own to read, which add up."""
    metrics = QueueMetrics()
    counters = metrics.of("a")
    counters.lag("one", 7)
    counters.lag("another", 2)
    assert value(metrics, "lag_records", queue="a") == 9
    counters.lag("one", None)
    assert value(metrics, "lag_records", queue="a") == 2


def test_a_trackers_view():
    """A tracker's partitions, messages in progress and their oldest age are shown, and without one, none of these."""
    metrics = QueueMetrics()
    assert value(metrics, "tracker_partitions") is None
    metrics.tracking({"a": QueueLoad(2, 1500.0)}, partitions=4, catching_up=1, unreadable=3)
    assert value(metrics, "in_progress", queue="a") == 2
    assert value(metrics, "oldest_unfinished_age_seconds", queue="a") == 1.5
    assert value(metrics, "tracker_partitions") == 4
    assert value(metrics, "tracker_catching_up") == 1
    assert value(metrics, "tracker_unreadable_markers_total") == 3


def test_one_registry_has_the_numbers_once():
    """A second set of numbers in one registry is refused, as scrapers refuse families that appear twice."""
    registry = CollectorRegistry(auto_describe=True)
    QueueMetrics(registry)
    with pytest.raises(InvalidConfig, match="share one"):
        QueueMetrics(registry)


def test_threads_count_together():
    """Counts from several threads add up, in the same counters of a queue."""
    metrics = QueueMetrics()

    def count():
        for _ in range(2000):
            metrics.of("a").count("acknowledged")

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert value(metrics, "acknowledged_total", queue="a") == 8000
