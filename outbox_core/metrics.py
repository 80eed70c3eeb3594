"""Metrics of a harvester for Prometheus, and its health for a load balancer or Kubernetes.

`HarvestMetrics` holds plain numbers that become Prometheus' families only at a scrape. The harvester reports batches,
not records. Any thread may call: every call takes one short lock and costs about a microsecond. All families have one
label, `outbox`, so that several harvesters in one process may share a registry.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING, Self
from weakref import WeakKeyDictionary, ref

from prometheus_client import CollectorRegistry, make_wsgi_app
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from outbox_core.errors import InvalidConfig
from outbox_core.http_server import Answer, HttpServer, Request, text_answer

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping

    from prometheus_client import Metric

    from outbox_core.stores.interface import Backlog

__all__ = [
    "HarvestMetrics",
    "MetricsServer",
]

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds, the same for all three histograms."""

_COUNTERS = {
    "published": ("outbox_records_published", "Records acknowledged by Kafka."),
    "errors": ("outbox_publish_errors", "Records that Kafka refused or did not acknowledge in time."),
    "dead_letters": ("outbox_dead_letters", "Records published to the dead-letter topic."),
}
_GAUGES = {
    "holds": ("outbox_holds", "Records, keys and topics that are held."),
    "waiting_destinations": (
        "outbox_waiting_destinations",
        "Topics, partitions and keys that are tried again after a backoff.",
    ),
    "waiting_keys": ("outbox_waiting_keys", "Keys, and records without one, that wait for a destination or a retry."),
    "send_wait": ("outbox_send_wait_seconds", "Time without a send, as heartbeats come back too late."),
    "in_flight": ("outbox_in_flight_records", "Records sent and not yet acknowledged."),
    "leader": ("outbox_leader", "1 where this harvester leads, else 0."),
}
_SAMPLED_GAUGES = {  # taken over from the last backlog and the last state of the floor
    "pending": ("outbox_pending_records", "Records in the outbox table."),
    "oldest_age": ("outbox_oldest_pending_age_seconds", "Age of the first record in the outbox table."),
    "floor_enabled": ("outbox_floor_enabled", "1 where a settled floor can be proven, else 0 (the log says why)."),
    "floor_distance": ("outbox_floor_distance_ids", "Ids between the settled floor and the last one drawn."),
    "stragglers": ("outbox_floor_stragglers", "Open transactions that the settled floor waits for."),
    "straggler_age": (
        "outbox_floor_oldest_straggler_seconds",
        "Time for which the settled floor has waited for the first of them.",
    ),
}
_HISTOGRAMS = {
    "publish_latency": ("outbox_publish_latency_seconds", "Time from sending a record to its acknowledgement."),
    "mark_duration": ("outbox_mark_duration_seconds", "Duration of the statements that mark records."),
    "purge_duration": ("outbox_purge_duration_seconds", "Duration of the statements that delete published records."),
}

_LULL_SECONDS = 30.0  # who has sent nothing for so long does not try any more
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a harvester, leading or standing by; `detail` has the reason if it does not work."""

    ok: bool
    leader: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FloorGauge:
    """The progress of the settled floor (`outbox_core.harvest.watermark`), and the open transactions that it waits for.

    `distance` counts ids between the floor and the last one drawn; None while marks and scans begin at the head.
    """

    enabled: bool
    distance: int | None
    stragglers: int
    oldest_straggler_seconds: float


class Activity:
    """The recent work of a harvester, on which its health depends. Written by its threads, read by any.

    Only finished work counts: a leader that begins one transaction after the other and can commit none is unhealthy.
    The clock stands still while the machine sleeps, and so do harvesters.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried_at = _NEVER
        self._finished_at = self._trying_since = clock()
        self.begin()

    def begin(self) -> None:
        """Start a leadership: earlier work does not count."""
        self.refused: Mapping[str, str] = {}
        self._looked_at = self._clock()
        self.finished()

    def looked(self) -> None:
        """Note that the table was read."""
        self._looked_at = self._clock()

    def tries(self) -> None:
        """Note that records are on their way to Kafka."""
        at = self._clock()
        if at - self._tried_at > _LULL_SECONDS:
            self._trying_since = at
        self._tried_at = at

    def finished(self) -> None:
        """Note that records were deleted after their publication, or held."""
        self._finished_at = self._trying_since = self._clock()
        self._tried_at = _NEVER

    @property
    def idle_seconds(self) -> float:
        """Time since the table was read, or records were dealt with."""
        return self._clock() - max(self._looked_at, self._finished_at)

    @property
    def remark(self) -> str:
        """The first topic that is held for an error although all is well, '' for none."""
        refused = self.refused
        if not refused:
            return ""
        topic = min(refused)
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        return f"records for topic {topic}{more} are held: {refused[topic]}"

    def trouble(self, limit_seconds: float, *, look_interval: float = 0.0) -> str | None:
        """Return the work that a leader has not managed for longer than a limit, or None.

        `look_interval` is the longest regular pause between two readings of the table, in seconds.
        """
        at = self._clock()
        fruitless = at - self._trying_since if at - self._tried_at <= _LULL_SECONDS else 0.0
        if fruitless > limit_seconds:
            return f"it leads, and of the records it sends none could be dealt with for {fruitless:.0f} s; see its log"
        if self.idle_seconds > limit_seconds + look_interval:
            return f"it leads, and the table could not be read for {self.idle_seconds:.0f} s; see its log"
        return None


class WeightedHistogram:
    """Counts of observations by upper bound; one call observes any number of equal values."""

    def __init__(self, bounds: Iterable[float] = LATENCY_BUCKETS) -> None:
        self._bounds = tuple(bounds)
        self._counts = [0] * (len(self._bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Count `count` observations of `value`: O(log of the number of buckets)."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def add_to(self, family: HistogramMetricFamily, label: str) -> None:
        """Write the counts into a family, cumulated as Prometheus wants them."""
        names = [*(repr(bound) for bound in self._bounds), "+Inf"]
        family.add_metric([label], list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class HarvestMetrics:
    """The numbers of one harvester.

    Args:
        registry: where they can be read; a new one by default, so that embedding never clashes.
        outbox_name: the label; the harvester sets it to the outbox's identity if it is empty.
    """

    def __init__(self, registry: CollectorRegistry | None = None, outbox_name: str = "") -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.outbox_name = outbox_name
        self.activity = Activity()
        self._lock = threading.Lock()

        self._values = dict.fromkeys([*_COUNTERS, *_GAUGES], 0.0)
        self._histograms = {name: WeightedHistogram() for name in _HISTOGRAMS}
        self._backlog: Backlog | None = None
        self._floor: FloorGauge | None = None
        _register(self)

    def published(self, count: int) -> None:
        """Count records that Kafka acknowledged."""
        with self._lock:
            self._values["published"] += count

    def publish_error(self, count: int = 1) -> None:
        """Count records that Kafka refused, or did not acknowledge in time."""
        with self._lock:
            self._values["errors"] += count

    def in_flight(self, count: int) -> None:
        """Set the number of records sent and not yet acknowledged."""
        self._values["in_flight"] = count
        if count:
            self.activity.tries()

    def held(self, count: int) -> None:
        """Set the number of records, keys and topics that are held."""
        if count > self._values["holds"]:
            self.activity.finished()
        self._values["holds"] = count

    def waiting(self, destinations: int, keys: int) -> None:
        """Set the number of destinations that are backed off, and of keys, and records without one, that wait."""
        self._values["waiting_destinations"], self._values["waiting_keys"] = destinations, keys

    def send_wait(self, seconds: float) -> None:
        """Set the time for which records have waited for room in the lease; 0.0 if none waits."""
        self._values["send_wait"] = seconds

    def dead_letters(self, count: int) -> None:
        """Count records published to the dead-letter topic."""
        with self._lock:
            self._values["dead_letters"] += count
        self.activity.finished()

    def leading(self, leader: bool) -> None:
        """Note that leadership begins or ends."""
        if leader:
            self.activity.begin()
        self._values["leader"] = float(leader)

    def backlog(self, backlog: Backlog | None) -> None:
        """Set the backlog; None when this harvester does not know it, so that no stale number is shown."""
        self._backlog = backlog

    def floor(self, gauge: FloorGauge) -> None:
        """Set the progress of the settled floor; shown while this harvester leads."""
        self._floor = gauge

    def publish_latency(self, seconds: float, count: int = 1) -> None:
        """Observe the time from `produce()` to the acknowledgement, of so many records."""
        with self._lock:
            self._histograms["publish_latency"].observe(seconds, count)

    def mark_took(self, seconds: float) -> None:
        """Observe the duration of a mark or scan."""
        with self._lock:
            self._histograms["mark_duration"].observe(seconds)
        self.activity.looked()

    def purge_took(self, seconds: float) -> None:
        """Observe the duration of a purge."""
        with self._lock:
            self._histograms["purge_duration"].observe(seconds)
        self.activity.finished()

    def add_to(self, families: _Families) -> None:
        """Write a consistent copy of the numbers into the families."""
        name, backlog, floor = self.outbox_name, self._backlog, self._floor if self._values["leader"] else None
        with self._lock:
            for key, value in self._values.items():
                families.values[key].add_metric([name], value)
            for key, histogram in self._histograms.items():
                histogram.add_to(families.histograms[key], name)
        gauges = families.values
        if backlog is not None:
            gauges["pending"].add_metric([name], backlog.pending)
            gauges["oldest_age"].add_metric([name], backlog.oldest_age_seconds)
        if floor is not None:
            gauges["floor_enabled"].add_metric([name], float(floor.enabled))
            gauges["stragglers"].add_metric([name], floor.stragglers)
            gauges["straggler_age"].add_metric([name], floor.oldest_straggler_seconds)
            if floor.distance is not None:
                gauges["floor_distance"].add_metric([name], floor.distance)


class _Families:
    """The empty families of a scrape."""

    def __init__(self) -> None:
        by = ["outbox"]
        self.values: dict[str, CounterMetricFamily | GaugeMetricFamily] = {
            key: CounterMetricFamily(name, text, labels=by) for key, (name, text) in _COUNTERS.items()
        }
        for key, (name, text) in (_GAUGES | _SAMPLED_GAUGES).items():
            self.values[key] = GaugeMetricFamily(name, text, labels=by)
        self.histograms = {
            key: HistogramMetricFamily(name, text, labels=by) for key, (name, text) in _HISTOGRAMS.items()
        }

    def all(self) -> Iterator[Metric]:
        yield from self.values.values()
        yield from self.histograms.values()


class _OutboxCollector(Collector):
    """The collector of one registry, where a family may appear only once; of equal labels the newest is shown."""

    def __init__(self) -> None:
        self._sources: list[ref[HarvestMetrics]] = []

    def add(self, source: HarvestMetrics) -> None:
        self._sources = [*(known for known in self._sources if known() is not None), ref(source)]

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        alive = (source() for source in self._sources)
        for source in {source.outbox_name: source for source in alive if source is not None}.values():
            source.add_to(families)
        yield from families.all()


_collectors: WeakKeyDictionary[CollectorRegistry, _OutboxCollector] = WeakKeyDictionary()
_collectors_lock = threading.Lock()


def _register(metrics: HarvestMetrics) -> None:
    with _collectors_lock:
        collector = _collectors.get(metrics.registry)
        if collector is None:
            collector = _collectors[metrics.registry] = _OutboxCollector()
            metrics.registry.register(collector)
        collector.add(metrics)


class MetricsServer:
    """A server of `/metrics` and `/healthz` on a thread of its own until closed. Port 0 takes any free one, see `port`.

    `/healthz` answers 200 with `{"status": "ok", "leader": ..., "detail": ...}` while `health()` says ok, whether the
    harvester leads or stands by, else 503 with the reason.

    Raises:
        InvalidConfig: if it cannot listen there.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Callable[[], Health]) -> None:
        self._registry = registry
        self._health = health
        try:
            self._server = HttpServer(host, port, self._respond, "outbox-metrics")
        except OSError as error:
            reason = error.strerror or str(error)
            raise InvalidConfig(f"metrics_port: cannot listen on port {port} of {host}: {reason}") from None

    @property
    def port(self) -> int:
        """The port it listens on."""
        return self._server.port

    def close(self) -> None:
        """Stop serving and free the port. Idempotent."""
        self._server.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _respond(self, request: Request) -> Answer:
        if request.method not in ("GET", "HEAD"):
            return text_answer(405, "Method Not Allowed", "only GET and HEAD\n")
        if request.path == "/metrics":
            return self._answer_metrics(request)
        if request.path == "/healthz":
            return self._answer_health()
        return text_answer(404, "Not Found", "see /metrics and /healthz\n")

    def _answer_metrics(self, request: Request) -> Answer:
        """Answer as Prometheus' own server does: in the format that is accepted, of the names that are asked for."""
        answers: list[Answer] = []

        def start(status: str, headers: list[tuple[str, str]]) -> None:
            number, _, phrase = status.partition(" ")
            answers.append(Answer(int(number), phrase, headers, b""))

        asked = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query,
            "HTTP_ACCEPT": request.headers.get("accept", ""),
            "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
        }
        body = b"".join(make_wsgi_app(self._registry)(asked, start))
        return replace(answers[0], body=body)

    def _answer_health(self) -> Answer:
        try:
            health = self._health()
        except Exception as error:
            health = Health(ok=False, leader=False, detail=f"cannot tell: {type(error).__name__}")
        shown = {"status": "ok" if health.ok else "failing", "leader": health.leader, "detail": health.detail}
        status, phrase = (200, "OK") if health.ok else (503, "Service Unavailable")
        return text_answer(status, phrase, json.dumps(shown) + "\n", "application/json")
