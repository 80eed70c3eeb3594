"""What a harvester counts and measures, for Prometheus, and whether it is well, for a load balancer or Kubernetes.

`HarvestMetrics` holds plain numbers that are turned into Prometheus' families only when somebody asks. The harvester
reports batches, not records: `publish_latency(seconds, count)` counts thousands of records that were sent together in
one call. Every call takes one short lock, so any thread may call; each costs about a microsecond.

All families have one label, `outbox`, and may share a registry: several harvesters in one process give one family with
several outboxes.
"""

from __future__ import annotations

import json
import threading
import time
from bisect import bisect_left
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

    from outbox_core.ports import Backlog

LATENCY_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)
"""Upper bounds in seconds, the same for all three histograms."""

_LULL_SECONDS = 30.0  # who has sent nothing for so long does not try any more
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Health:
    """Whether a harvester does its work, leading or standing by.

    Attributes:
        ok: whether all is well.
        leader: whether it leads.
        detail: in words; the reason if all is not well.
    """

    ok: bool
    leader: bool
    detail: str = ""


@dataclass(frozen=True, slots=True)
class FloorGauge:
    """How far the settled floor has come (`outbox_core.harvest.floor`).

    Attributes:
        enabled: whether there can be one.
        distance: ids between the floor and the last one drawn; None while marks and scans begin at the head.
        stragglers: open transactions that it waits for.
        oldest_straggler_seconds: for how long it has waited for the first of them.
    """

    enabled: bool
    distance: int | None
    stragglers: int
    oldest_straggler_seconds: float


class Activity:
    """When a harvester last did what: the ground for calling it well. Written by its threads, read by any.

    Health follows what was done, not what was begun: a leader that begins one transaction after the other and can
    commit none is not well.

    Args:
        clock: in seconds; it stands still while the machine sleeps, and so do harvesters.

    Attributes:
        refused: topics that are held for an error, with the error, as they were last read.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._tried_at = _NEVER
        self._finished_at = self._trying_since = clock()
        self.begin()

    def begin(self) -> None:
        """A leadership begins: nothing that was done or not done before counts."""
        self.refused: Mapping[str, str] = {}
        self._looked_at = self._clock()
        self.finished()

    def looked(self) -> None:
        """The table was read."""
        self._looked_at = self._clock()

    def tries(self) -> None:
        """Records are on their way to Kafka."""
        at = self._clock()
        if at - self._tried_at > _LULL_SECONDS:
            self._trying_since = at
        self._tried_at = at

    def finished(self) -> None:
        """Records were dealt with for good: deleted after their publication, or held."""
        self._finished_at = self._trying_since = self._clock()
        self._tried_at = _NEVER

    @property
    def idle_seconds(self) -> float:
        """Time since the table was read, or records were dealt with."""
        return self._clock() - max(self._looked_at, self._finished_at)

    @property
    def remark(self) -> str:
        """The topic that is held for an error although all is well, '' for none; of several the first."""
        refused = self.refused
        if not refused:
            return ""
        topic = min(refused)
        more = f" (and {len(refused) - 1} more)" if len(refused) > 1 else ""
        return f"records for topic {topic}{more} are held: {refused[topic]}"

    def trouble(self, limit_seconds: float, *, look_interval: float = 0.0) -> str | None:
        """Return what a leader has not managed to do for longer than a limit, or None.

        Args:
            limit_seconds: the limit.
            look_interval: longest regular pause between two looks at the table, in seconds.
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
        """Write it into a family, cumulated as Prometheus wants it."""
        names = [*(repr(bound) for bound in self._bounds), "+Inf"]
        family.add_metric([label], list(zip(names, accumulate(self._counts), strict=True)), self._sum)


class HarvestMetrics:
    """The numbers of one harvester.

    Args:
        registry: where they can be read; a new one by default, so that embedding never clashes.
        outbox_name: the label; the harvester sets it to the outbox's identity if it is empty.

    Attributes:
        activity: when it last did what.
    """

    def __init__(self, registry: CollectorRegistry | None = None, outbox_name: str = "") -> None:
        self.registry = registry if registry is not None else CollectorRegistry()
        self.outbox_name = outbox_name
        self.activity = Activity()
        self._lock = threading.Lock()
        self._published = 0
        self._errors = 0
        self._in_flight = 0
        self._holds = 0
        self._dead_letters = 0
        self._waiting = (0, 0)
        self._send_wait = 0.0
        self._leader = False
        self._backlog: Backlog | None = None
        self._floor: FloorGauge | None = None
        self._publish_latency = WeightedHistogram()
        self._mark_duration = WeightedHistogram()
        self._purge_duration = WeightedHistogram()
        _register(self)

    def published(self, count: int) -> None:
        """So many records were acknowledged by Kafka."""
        with self._lock:
            self._published += count

    def publish_error(self, count: int = 1) -> None:
        """So many records were refused by Kafka, or not acknowledged in time."""
        with self._lock:
            self._errors += count

    def in_flight(self, count: int) -> None:
        """So many records were sent and are not yet acknowledged."""
        self._in_flight = count
        if count:
            self.activity.tries()

    def held(self, count: int) -> None:
        """So many records, keys and topics are held."""
        if count > self._holds:
            self.activity.finished()
        self._holds = count

    def waiting(self, destinations: int, keys: int) -> None:
        """So many destinations are waited for, and so many keys, and records without one, wait with them."""
        self._waiting = (destinations, keys)

    def send_wait(self, seconds: float) -> None:
        """Records have waited so long for a lease with enough left to send them; 0.0 if none waits."""
        self._send_wait = seconds

    def dead_letters(self, count: int) -> None:
        """So many records were published to the dead-letter topic."""
        with self._lock:
            self._dead_letters += count
        self.activity.finished()

    def leading(self, leader: bool) -> None:
        """Whether this harvester leads."""
        if leader:
            self.activity.begin()
        self._leader = leader

    def backlog(self, backlog: Backlog | None) -> None:
        """How much waits; None when this harvester does not know (any more), so that no stale number is shown."""
        self._backlog = backlog

    def floor(self, gauge: FloorGauge) -> None:
        """Where the settled floor is; shown while this harvester leads."""
        self._floor = gauge

    def publish_latency(self, seconds: float, count: int = 1) -> None:
        """So many records took this long from `produce()` to their acknowledgement."""
        with self._lock:
            self._publish_latency.observe(seconds, count)

    def mark_took(self, seconds: float) -> None:
        """One mark statement took this long."""
        with self._lock:
            self._mark_duration.observe(seconds)
        self.activity.looked()

    def purge_took(self, seconds: float) -> None:
        """One purge statement took this long."""
        with self._lock:
            self._purge_duration.observe(seconds)
        self.activity.finished()

    def add_to(self, families: _Families) -> None:
        """Write a consistent copy of the numbers into the families."""
        name, backlog, floor = self.outbox_name, self._backlog, self._floor if self._leader else None
        with self._lock:
            families.published.add_metric([name], self._published)
            families.errors.add_metric([name], self._errors)
            families.in_flight.add_metric([name], self._in_flight)
            families.leader.add_metric([name], float(self._leader))
            families.holds.add_metric([name], self._holds)
            families.dead_letters.add_metric([name], self._dead_letters)
            families.waiting_destinations.add_metric([name], self._waiting[0])
            families.waiting_keys.add_metric([name], self._waiting[1])
            families.send_wait.add_metric([name], self._send_wait)
            self._publish_latency.add_to(families.publish_latency, name)
            self._mark_duration.add_to(families.mark_duration, name)
            self._purge_duration.add_to(families.purge_duration, name)
        if backlog is not None:
            families.pending.add_metric([name], backlog.pending)
            families.oldest_age.add_metric([name], backlog.oldest_age_seconds)
        if floor is not None:
            families.floor_enabled.add_metric([name], float(floor.enabled))
            families.stragglers.add_metric([name], floor.stragglers)
            families.straggler_age.add_metric([name], floor.oldest_straggler_seconds)
            if floor.distance is not None:
                families.floor_distance.add_metric([name], floor.distance)


class _Families:
    """What Prometheus sees, made anew for every scrape."""

    def __init__(self) -> None:
        by = ["outbox"]
        self.published = CounterMetricFamily("outbox_records_published", "Records acknowledged by Kafka.", labels=by)
        self.errors = CounterMetricFamily(
            "outbox_publish_errors", "Records that Kafka refused or did not acknowledge in time.", labels=by
        )
        self.holds = GaugeMetricFamily("outbox_holds", "Records, keys and topics that are held.", labels=by)
        self.waiting_destinations = GaugeMetricFamily(
            "outbox_waiting_destinations", "Topics, partitions and keys that are tried again after a rest.", labels=by
        )
        self.waiting_keys = GaugeMetricFamily(
            "outbox_waiting_keys", "Keys, and records without one, that wait for a destination or a trial.", labels=by
        )
        self.send_wait = GaugeMetricFamily(
            "outbox_send_wait_seconds",
            "For how long nothing could be sent, as heartbeats come back too late.",
            labels=by,
        )
        self.dead_letters = CounterMetricFamily(
            "outbox_dead_letters", "Records published to the dead-letter topic.", labels=by
        )
        self.in_flight = GaugeMetricFamily(
            "outbox_in_flight_records", "Records sent and not yet acknowledged.", labels=by
        )
        self.pending = GaugeMetricFamily("outbox_pending_records", "Records in the outbox table.", labels=by)
        self.oldest_age = GaugeMetricFamily(
            "outbox_oldest_pending_age_seconds", "Age of the first record in the outbox table.", labels=by
        )
        self.floor_enabled = GaugeMetricFamily(
            "outbox_floor_enabled", "1 where a settled floor can be proven, else 0 (the log says why).", labels=by
        )
        self.floor_distance = GaugeMetricFamily(
            "outbox_floor_distance_ids", "Ids between the settled floor and the last one drawn.", labels=by
        )
        self.stragglers = GaugeMetricFamily(
            "outbox_floor_stragglers", "Open transactions that the settled floor waits for.", labels=by
        )
        self.straggler_age = GaugeMetricFamily(
            "outbox_floor_oldest_straggler_seconds",
            "For how long the settled floor has waited for the first of them.",
            labels=by,
        )
        self.leader = GaugeMetricFamily("outbox_leader", "1 where this harvester leads, else 0.", labels=by)
        self.publish_latency = HistogramMetricFamily(
            "outbox_publish_latency_seconds", "Time from sending a record to its acknowledgement.", labels=by
        )
        self.mark_duration = HistogramMetricFamily(
            "outbox_mark_duration_seconds", "Duration of the statements that mark records.", labels=by
        )
        self.purge_duration = HistogramMetricFamily(
            "outbox_purge_duration_seconds", "Duration of the statements that delete published records.", labels=by
        )


class _OutboxCollector(Collector):
    """One for each registry, since a family may appear only once in what a registry shows.

    Numbers vanish with the harvester they belong to; of two with the same label the newer one is shown.
    """

    def __init__(self) -> None:
        self._sources: list[ref[HarvestMetrics]] = []

    def add(self, source: HarvestMetrics) -> None:
        self._sources = [*(known for known in self._sources if known() is not None), ref(source)]

    def collect(self) -> Iterator[Metric]:
        families = _Families()
        alive = (source() for source in self._sources)
        for source in {source.outbox_name: source for source in alive if source is not None}.values():
            source.add_to(families)
        yield from vars(families).values()


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
    """Serves `/metrics` and `/healthz` from a thread of its own until closed.

    `/healthz` answers 200 with `{"status": "ok", "leader": ..., "detail": ...}` while `health()` says ok, whether the
    harvester leads or stands by, else 503 with the reason. It answers whatever other clients do, see
    `outbox_core.http_server`.

    Args:
        host: the address to listen on.
        port: the port; 0 for any free one, see `port`.
        registry: what `/metrics` shows.
        health: asked at every `/healthz`.

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
        told: list[Answer] = []

        def start(status: str, headers: list[tuple[str, str]]) -> None:
            number, _, phrase = status.partition(" ")
            told.append(Answer(int(number), phrase, headers, b""))

        asked = {
            "REQUEST_METHOD": "GET",
            "PATH_INFO": request.path,
            "QUERY_STRING": request.query,
            "HTTP_ACCEPT": request.headers.get("accept", ""),
            "HTTP_ACCEPT_ENCODING": request.headers.get("accept-encoding", ""),
        }
        body = b"".join(make_wsgi_app(self._registry)(asked, start))
        return replace(told[0], body=body)

    def _answer_health(self) -> Answer:
        try:
            health = self._health()
        except Exception as error:
            health = Health(ok=False, leader=False, detail=f"cannot tell: {type(error).__name__}")
        shown = {"status": "ok" if health.ok else "failing", "leader": health.leader, "detail": health.detail}
        status, phrase = (200, "OK") if health.ok else (503, "Service Unavailable")
        return text_answer(status, phrase, json.dumps(shown) + "\n", "application/json")
