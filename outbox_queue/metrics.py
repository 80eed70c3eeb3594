"""Prometheus metrics of producers, consumers and trackers, queue by queue; one `QueueMetrics` for a process."""

from __future__ import annotations

import threading
from collections.abc import Hashable, Iterator, Mapping
from typing import NamedTuple

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from outbox_core.errors import InvalidConfig
from outbox_core.monitoring.histogram import WeightedHistogram
from outbox_queue.redelivery.in_progress import QueueLoad

# Seconds: a message may take milliseconds or hours.
TIME_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)

_COUNTERS = {
    "produced": "Messages that Kafka has acknowledged.",
    "consumed": "Messages that were handed to a handler; each attempt counts.",
    "acknowledged": "Messages whose processing succeeded.",
    "nacked": "Messages that a consumer gave back.",
    "rejected": "Messages that a consumer made dead letters.",
    "parked": "Messages that were not due yet and left to the tracker.",
    "redelivered": "Messages that a tracker sent again.",
    "dead_lettered": "Messages that a tracker made dead letters, as their attempts were used up.",
}
_HISTOGRAMS = {
    "production": "Time from sending a message to its acknowledgement by Kafka.",
    "queueing": "Time from a message's first sending to its being handed to a handler.",
    "processing": "Time from a message's being handed out to its acknowledgement, return or rejection.",
}
_GAUGES = {
    "processing": "Messages that this process is working on.",
    "lag_records": "Records of the message topic that this process has yet to read.",
    "in_progress": "Messages between start and end in this tracker's partitions.",
    "oldest_unfinished_age_seconds": "Age of the oldest of them, since its start.",
    "consumers_away": "Consumers of this process that have left their group, as a broker does not answer them.",
}
_TIMED = {"produced": "production", "consumed": "queueing"}


class QueueCounters:
    """The numbers of one queue. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._histograms = {name: WeightedHistogram(TIME_BUCKETS) for name in _HISTOGRAMS}
        self._processing = 0
        self._away = 0
        self._lags: dict[Hashable, int] = {}  # by consumer

    def count(self, name: str, messages: int = 1, seconds: float | None = None) -> None:
        """Count messages, with the time that each took if the counter has a histogram."""
        with self._lock:
            self._counts[name] += messages
            if seconds is not None:
                self._histograms[_TIMED[name]].observe(seconds, messages)

    def in_progress(self, change: int) -> None:
        """Add to the number of messages that this process works on."""
        with self._lock:
            self._processing += change

    def consumer_left(self, is_away: bool) -> None:
        """Count a consumer that leaves its group because it cannot work, or (False) joins it again."""
        with self._lock:
            self._away += 1 if is_away else -1

    def lag(self, consumer: Hashable, messages: int | None) -> None:
        """Set the number of records that one of this process's consumers has yet to read; None if that is unknown."""
        with self._lock:
            if messages is None:
                self._lags.pop(consumer, None)
            else:
                self._lags[consumer] = messages

    def settled(self, outcome: str | None, seconds: float, *, was_in_progress: bool) -> None:
        """Count a message that is settled after so many seconds of work, None: without a marker."""
        with self._lock:
            if outcome is not None:
                self._counts[outcome] += 1
            self._processing -= was_in_progress
            self._histograms["processing"].observe(seconds)

    def add_to(self, families: _Families, queue: str) -> None:
        """Write a consistent copy of the numbers into the families."""
        with self._lock:
            for name, count in self._counts.items():
                families.counters[name].add_metric([queue], count)
            for name, histogram in self._histograms.items():
                histogram.add_to(families.histograms[name], queue)
            families.gauges["processing"].add_metric([queue], self._processing)
            families.gauges["consumers_away"].add_metric([queue], self._away)
            lags = list(self._lags.values())
        if lags:
            families.gauges["lag_records"].add_metric([queue], sum(lags))


class _TrackerView(NamedTuple):
    load: Mapping[str, QueueLoad]  # ages in milliseconds
    partitions: int
    catching_up: int
    unreadable: int


class QueueMetrics(Collector):
    """The metrics of a process.

    Args:
        registry: a new one by default, so that embedding never clashes.

    Raises:
        InvalidConfig: if the registry has a `QueueMetrics` already; share that one instead.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry(auto_describe=True)
        self._lock = threading.Lock()
        self._queues: dict[str, QueueCounters] = {}
        self._tracker: _TrackerView | None = None
        self._is_tracker_away = False
        try:
            self.registry.register(self)
        except ValueError:
            raise InvalidConfig("this registry has the numbers of queues already: share one QueueMetrics") from None

    def of(self, queue: str) -> QueueCounters:
        """Return the counters of one queue."""
        counters = self._queues.get(queue)
        if counters is None:
            with self._lock:
                counters = self._queues.setdefault(queue, QueueCounters())
        return counters

    def tracking(
        self, load: Mapping[str, QueueLoad], *, partitions: int, catching_up: int, unreadable: int = 0
    ) -> None:
        """Set a tracker's numbers; the ages of the load are in milliseconds."""
        self._tracker = _TrackerView(load, partitions, catching_up, unreadable)

    def tracker_left(self, is_away: bool) -> None:
        """Note that the tracker leaves its group because it cannot work, or (False) joins it again."""
        self._is_tracker_away = is_away

    def collect(self) -> Iterator[Metric]:
        """Yield the families of a scrape."""
        families = _Families()
        with self._lock:
            queues = sorted(self._queues.items())
        for queue, counters in queues:
            counters.add_to(families, queue)
        if self._tracker is not None:
            families.add_tracker(self._tracker, is_away=self._is_tracker_away)
        yield from families.all()


class _Families:
    def __init__(self) -> None:
        by, prefix = ["queue"], "outbox_queue_"
        self.counters = {name: CounterMetricFamily(prefix + name, text, labels=by) for name, text in _COUNTERS.items()}
        self.histograms = {
            name: HistogramMetricFamily(f"{prefix}{name}_seconds", text, labels=by)
            for name, text in _HISTOGRAMS.items()
        }
        self.gauges = {name: GaugeMetricFamily(prefix + name, text, labels=by) for name, text in _GAUGES.items()}
        tracker = "outbox_queue_tracker_"
        self.partitions = GaugeMetricFamily(
            tracker + "partitions", "Marker partitions that this tracker has.", labels=[]
        )
        self.catching_up = GaugeMetricFamily(
            tracker + "catching_up", "How many of them it has not yet read to the end.", labels=[]
        )
        self.unreadable = CounterMetricFamily(
            tracker + "unreadable_markers",
            "Records of the marker topic that this tracker has skipped: no markers, or of an unknown version.",
            labels=[],
        )

        self.away = GaugeMetricFamily(
            tracker + "away", "1 while it has left its group, as a broker does not answer it.", labels=[]
        )

    def add_tracker(self, view: _TrackerView, *, is_away: bool) -> None:
        for queue, (count, age) in view.load.items():
            self.gauges["in_progress"].add_metric([queue], count)
            self.gauges["oldest_unfinished_age_seconds"].add_metric([queue], age / 1000)
        self.partitions.add_metric([], view.partitions)
        self.catching_up.add_metric([], view.catching_up)
        self.unreadable.add_metric([], view.unreadable)
        self.away.add_metric([], float(is_away))

    def all(self) -> Iterator[Metric]:
        yield from self.counters.values()
        yield from self.histograms.values()
        yield from self.gauges.values()
        yield from (self.partitions, self.catching_up, self.unreadable, self.away)
