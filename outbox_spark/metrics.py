"""The visible side of pipelines that follow topics: a report of each batch, Prometheus metrics, and health.

A relay has the metrics of a harvester (`outbox_spark.relay.monitor`).
"""

from __future__ import annotations

import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, Metric, ProcessCollector
from prometheus_client.registry import Collector

from outbox_core.config import HarvestConfig, redact
from outbox_core.metrics import Health, MetricsServer
from outbox_core.monitoring.families import Families, FamilyDefinition
from outbox_core.monitoring.histogram import DELIVERY_BUCKETS, WeightedHistogram
from outbox_spark.config import StreamSettings

_log = logging.getLogger(__name__)

_UNHEALTHY_AFTER_SECONDS = 30.0
_LABELS = ("pipeline",)
_FAMILIES = {
    "records": FamilyDefinition("counter", "outbox_pipeline_records", "Records that the targets have taken.", _LABELS),
    "quarantined": FamilyDefinition(
        "counter", "outbox_pipeline_quarantined_records", "Those of them that went into a quarantine.", _LABELS
    ),
    "seconds": FamilyDefinition("histogram", "outbox_pipeline_batch_seconds", "Duration of a batch.", _LABELS),
    "finished_at": FamilyDefinition(
        "gauge", "outbox_pipeline_last_batch_timestamp_seconds", "Time of the end of the last batch.", _LABELS
    ),
    "lag": FamilyDefinition("gauge", "outbox_pipeline_lag_records", "Offsets that were left to be read then.", _LABELS),
    "lag_seconds": FamilyDefinition("gauge", "outbox_pipeline_lag_seconds", "Age of the first record there.", _LABELS),
}


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """The outcome of one batch; `counts` are the targets'.

    `lag` is the number of offsets (of a relay: of rows) that are left, and the first of them is `lag_seconds` old. None
    is not known. `longest_task` is the time (in seconds) of a relay's longest task.
    """

    number: int
    counts: Mapping[str, int]
    seconds: float
    lag: int | None = None
    lag_seconds: float | None = None
    longest_task: float | None = None

    def __str__(self) -> str:
        records = self.counts.get("records", 0)
        rate = records / self.seconds if self.seconds else 0.0
        others = "".join(f", {count:,} {name}" for name, count in self.counts.items() if name != "records" and count)
        lag = "" if self.lag is None else f"; lag {self.lag:,}"
        age = "" if self.lag_seconds is None else f" ({self.lag_seconds:.0f} s)"
        return f"batch {self.number}: {records:,} records in {self.seconds:.1f} s ({rate:,.0f}/s){others}{lag}{age}"


class PipelineMetrics(Collector):
    """The numbers of one pipeline. Any thread may call."""

    def __init__(self, pipeline: str) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.registry.register(self)
        self.last: BatchReport | None = None  # that is still true: none after a failure
        self.trouble = ""
        self.counts: Counter[str] = Counter()
        self._pipeline = pipeline
        self._lock = threading.Lock()
        self._seconds = WeightedHistogram(DELIVERY_BUCKETS)
        self._finished_at = 0.0  # since the epoch; 0.0 before the first batch
        self._failing_since = 0.0

    def took(self, counts: Mapping[str, int]) -> None:
        """Add what the targets have committed."""
        with self._lock:
            self.counts.update(counts)

    def finished(self, report: BatchReport) -> None:
        """Note a batch that has ended."""
        with self._lock:
            self._seconds.observe(report.seconds)
            self.last, self._finished_at = report, time.time()
        self.recovered()

    def failed(self, error: Exception) -> None:
        """Note that the query has ended by an error: what is left to be read is not known any more."""
        if not self.trouble:
            self._failing_since = time.monotonic()
        with self._lock:
            self.last = None
        self.trouble = redact(" ".join(str(error).split())) or type(error).__name__

    def recovered(self) -> None:
        """Note that the query works, though there may be nothing to do."""
        self.trouble = ""

    def health(self) -> Health:
        """Return the health: it fails when the pipeline has failed for half a minute."""
        trouble = self.trouble
        fails = bool(trouble) and time.monotonic() - self._failing_since > _UNHEALTHY_AFTER_SECONDS
        return Health(ok=not fails, leader=False, detail=trouble or "following")

    def collect(self) -> Iterator[Metric]:
        """Yield the families of a scrape."""
        families, name = Families(_FAMILIES), self._pipeline
        with self._lock:
            at = self._finished_at
            lag, age = (self.last.lag, self.last.lag_seconds) if self.last is not None else (None, None)
            self._seconds.add_to(families.histogram("seconds"), name)
            for key in ("records", "quarantined"):
                families.add(key, self.counts[key], name)
        for key, value in (("finished_at", at or None), ("lag", lag), ("lag_seconds", age)):
            if value is not None:
                families.add(key, value, name)
        yield from families.all()


@contextmanager
def serving(
    settings: StreamSettings | HarvestConfig, registry: CollectorRegistry, health: Callable[[], Health]
) -> Iterator[None]:
    """Serve metrics and health meanwhile, if the settings name a port. Raises InvalidConfig if it cannot be had."""
    if settings.metrics_port is None:
        yield
        return
    with MetricsServer(settings.metrics_host, settings.metrics_port, registry, health) as server:
        _log.info("serving /metrics and /healthz on %s port %d", settings.metrics_host, server.port)
        yield
