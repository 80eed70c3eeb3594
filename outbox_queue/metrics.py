"""What producers, consumers and trackers count and measure, queue by queue, for Prometheus.

`QueueMetrics.of(queue)` gives the counters of one queue, to be kept by whoever counts: plain numbers under a short
lock, turned into Prometheus' families only when somebody asks. A process has one `QueueMetrics` for all its queues; a
tracker's numbers are about all queues of its partitions, whoever works on them.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping

from prometheus_client import CollectorRegistry, Metric
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from outbox_core.errors import InvalidConfig
from outbox_core.metrics import WeightedHistogram
from outbox_queue.in_progress import QueueLoad

TIME_BUCKETS = (0.001, 0.005, 0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 60.0, 300.0, 1800.0, 3600.0, 21600.0, 86400.0)
"""Upper bounds in seconds: a queue's messages may take milliseconds or hours."""

_COUNTERS = {
    "produced": "Messages that Kafka has acknowledged.",
    "consumed": "Messages that were handed to a handler; each attempt counts.",
    "acknowledged": "Messages whose processing succeeded.",
    "nacked": "Messages that a consumer gave back.",
    "rejected": "Messages that a consumer set aside as dead letters.",
    "parked": "Messages that were not due yet and left to the tracker.",
    "redelivered": "Messages that a tracker sent again.",
    "dead_lettered": "Messages that a tracker set aside since their attempts were used up.",
}
_HISTOGRAMS = {
    "production": "Time from sending a message to its acknowledgement by Kafka.",
    "queueing": "Time from a message's first sending to its being handed to a handler.",
    "processing": "Time from a message's being handed out to its acknowledgement, return or rejection.",
}


class QueueCounters:
    """The numbers of one queue. Any thread may count."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTERS, 0)
        self._histograms = {name: WeightedHistogram(TIME_BUCKETS) for name in _HISTOGRAMS}
        self._processing = 0
        self._lag: int | None = None

    def produced(self, count: int = 1, seconds: float | None = None) -> None:
        """So many messages were acknowledged by Kafka, after so long."""
        with self._lock:
            self._counts["produced"] += count
            if seconds is not None:
                self._histograms["production"].observe(seconds, count)

    def consumed(self, count: int = 1, seconds: float | None = None) -> None:
        """So many messages were handed out, so long after they were sent first."""
        with self._lock:
            self._counts["consumed"] += count
            if seconds is not None:
                self._histograms["queueing"].observe(seconds, count)

    def acknowledged(self, count: int = 1) -> None:
        """So many messages were acknowledged."""
        self._add("acknowledged", count)

    def nacked(self, count: int = 1) -> None:
        """So many messages were given back."""
        self._add("nacked", count)

    def rejected(self, count: int = 1) -> None:
        """So many messages were set aside by their consumer."""
        self._add("rejected", count)

    def parked(self, count: int = 1) -> None:
        """So many messages were not due yet."""
        self._add("parked", count)

    def redelivered(self, count: int = 1) -> None:
        """So many messages were sent again by a tracker."""
        self._add("redelivered", count)

    def dead_lettered(self, count: int = 1) -> None:
        """So many messages were set aside by a tracker."""
        self._add("dead_lettered", count)

    def in_progress(self, change: int) -> None:
        """So many more messages are being worked on here; fewer, if it is negative."""
        with self._lock:
            self._processing += change

    def lag(self, messages: int | None) -> None:
        """How many records of the message topic this process has yet to read; None when it has no partitions."""
        self._lag = messages

    def processing_seconds(self, seconds: float, count: int = 1) -> None:
        """Messages were worked on for this long."""
        with self._lock:
            self._histograms["processing"].observe(seconds, count)

    def add_to(self, families: _Families, queue: str) -> None:
        """Write a consistent copy of the numbers into the families."""
        with self._lock:
            for name, count in self._counts.items():
                families.counters[name].add_metric([queue], count)
            for name, histogram in self._histograms.items():
                histogram.add_to(families.histograms[name], queue)
            families.processing.add_metric([queue], self._processing)
            lag = self._lag
        if lag is not None:
            families.lag.add_metric([queue], lag)

    def _add(self, name: str, count: int) -> None:
        with self._lock:
            self._counts[name] += count


class QueueMetrics(Collector):
    """The numbers of a process.

    Args:
        registry: where they can be read; a new one by default, so that embedding never clashes.

    Raises:
        InvalidConfig: if the registry has the numbers of queues already; share one `QueueMetrics` instead.
    """

    def __init__(self, registry: CollectorRegistry | None = None) -> None:
        self.registry = registry if registry is not None else CollectorRegistry(auto_describe=True)
        self._lock = threading.Lock()
        self._queues: dict[str, QueueCounters] = {}
        self._load: Mapping[str, QueueLoad] = {}
        self._partitions: int | None = None
        self._catching_up = self._unreadable = 0
        try:
            self.registry.register(self)
        except ValueError:
            raise InvalidConfig("this registry has the numbers of queues already: share one QueueMetrics") from None

    def of(self, queue: str) -> QueueCounters:
        """The counters of one queue."""
        counters = self._queues.get(queue)
        if counters is None:
            with self._lock:
                counters = self._queues.setdefault(queue, QueueCounters())
        return counters

    def tracking(
        self, load: Mapping[str, QueueLoad], *, partitions: int, catching_up: int, unreadable: int = 0
    ) -> None:
        """What a tracker sees.

        Args:
            load: what is unfinished of each queue; ages in milliseconds.
            partitions: how many it has.
            catching_up: how many of these it has not yet read to the end.
            unreadable: how many records of the marker topic it has skipped since it began.
        """
        self._load, self._partitions, self._catching_up = load, partitions, catching_up
        self._unreadable = unreadable

    def collect(self) -> Iterator[Metric]:
        """What Prometheus sees."""
        families = _Families()
        with self._lock:
            queues = sorted(self._queues.items())
        for queue, counters in queues:
            counters.add_to(families, queue)
        for queue, (count, age) in self._load.items():
            families.in_progress.add_metric([queue], count)
            families.oldest.add_metric([queue], age / 1000)
        if self._partitions is not None:
            families.partitions.add_metric([], self._partitions)
            families.catching_up.add_metric([], self._catching_up)
            families.unreadable.add_metric([], self._unreadable)
        yield from families.all()


class _Families:
    """Made anew for every scrape."""

    def __init__(self) -> None:
        by = ["queue"]
        self.counters = {
            name: CounterMetricFamily(f"outbox_queue_{name}", text, labels=by) for name, text in _COUNTERS.items()
        }
        self.histograms = {
            name: HistogramMetricFamily(f"outbox_queue_{name}_seconds", text, labels=by)
            for name, text in _HISTOGRAMS.items()
        }
        self.processing = GaugeMetricFamily(
            "outbox_queue_processing", "Messages that this process is working on.", labels=by
        )
        self.lag = GaugeMetricFamily(
            "outbox_queue_lag_records", "Records of the message topic that this process has yet to read.", labels=by
        )
        self.in_progress = GaugeMetricFamily(
            "outbox_queue_in_progress", "Messages between start and end in this tracker's partitions.", labels=by
        )
        self.oldest = GaugeMetricFamily(
            "outbox_queue_oldest_unfinished_age_seconds", "Age of the first of them, since its start.", labels=by
        )
        self.partitions = GaugeMetricFamily(
            "outbox_queue_tracker_partitions", "Marker partitions that this tracker has.", labels=[]
        )
        self.catching_up = GaugeMetricFamily(
            "outbox_queue_tracker_catching_up", "How many of them it has not yet read to the end.", labels=[]
        )
        self.unreadable = CounterMetricFamily(
            "outbox_queue_tracker_unreadable_markers",
            "Records of the marker topic that this tracker has skipped: no markers, or of an unknown version.",
            labels=[],
        )

    def all(self) -> Iterator[Metric]:
        yield from self.counters.values()
        yield from self.histograms.values()
        yield from (self.processing, self.lag, self.in_progress, self.oldest, self.partitions, self.catching_up)
        yield self.unreadable
