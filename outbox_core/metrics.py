"""Metrics of a harvester for Prometheus, and its health for a load balancer or Kubernetes.

`HarvestMetrics` holds plain numbers that become Prometheus' families only at a scrape. The harvester reports batches,
not records. Any thread may call: every call takes one short lock and costs about a microsecond, that of a published
batch a tenth of one for each record. All families have the label `outbox`, so that several harvesters in one process
may share a registry.
"""

from __future__ import annotations

import json
import platform
import threading
import time
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, NamedTuple, Self
from weakref import WeakKeyDictionary, ref

from prometheus_client import CollectorRegistry, ProcessCollector, make_wsgi_app
from prometheus_client.registry import Collector

from outbox_core.errors import (
    InvalidConfig,
    OutboxTableError,
    RightsMissing,
    RowsHeld,
    RowsHidden,
    RowsRemain,
    StatementCancelled,
    TableUnusable,
)
from outbox_core.http_server import Answer, HttpServer, Request, text_answer
from outbox_core.kafka.duty import Duty
from outbox_core.monitoring.families import COUNTERS, GAUGES, HISTOGRAMS, Families
from outbox_core.monitoring.histogram import BATCH_BUCKETS, LATENCY_BUCKETS, WeightedHistogram
from outbox_core.monitoring.publication import OTHER_TOPICS, PublicationCounts

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from prometheus_client import Metric

    from outbox_core.stores.interface import Backlog, StoredRecord

__all__ = [
    "HarvestMetrics",
    "MetricsServer",
]


_HEALTH_PAGES = ("/healthz", "/readyz", "/livez")
_TITLE = "<!DOCTYPE html><title>kafka-outbox</title>\n"

_LONG_STEP_SECONDS = 3.0  # it is normal to wait for less
_LULL_SECONDS = 30.0  # who has sent nothing for so long does not try any more
_NEVER = float("-inf")


@dataclass(frozen=True, slots=True)
class Health:
    """The health of a harvester, leading or standing by; `detail` has the reason if it does not work.

    It is `alive` until it has ended: as long as it tries on by itself, a restart would not help.
    """

    ok: bool
    leader: bool
    detail: str = ""
    alive: bool = True


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

    `duty` is what the leader owes, for `outbox_core.harvest.work_watch`; its names of work complete "it could not ...".
    A **step** is a call under way that may hang, by its name for people; its thread tells nothing until it is over.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.now = clock
        self._tried_at = _NEVER
        self._finished_at = self._trying_since = clock()
        self.duty = Duty()
        self.culprit = ""  # who does not answer, for people, as far as the watch knows
        self.unreachable: Mapping[tuple[str, int | None], float] = {}  # partitions or topics that fail -> since when
        self._steps: dict[object, tuple[float, str, str]] = {}  # under way: when each began, its name, its work
        self._begin()

    def begin(self) -> None:
        """Start a leadership: earlier work does not count."""
        self.duty.began(self.now())
        self._begin()

    def _begin(self) -> None:
        self.refused: Mapping[str, str] = {}
        self.culprit, self.unreachable = "", {}
        self._looked_at = self.now()
        self.finished()
        self.has_finished = False

    def end(self, *, is_handed_over: bool = True) -> None:
        """End a leadership: nothing is owed any more, if it is another's now."""
        if is_handed_over:
            self.duty.ended()
        else:
            self.duty.lost(self.now())
        self.culprit = ""

    def cannot_reach(self, places: Mapping[tuple[str, int | None], float]) -> None:
        """Note partitions, or topics, that Kafka could not be reached for, with the seconds since the first failure."""
        at = self.now()
        self.unreachable = {place: at - seconds for place, seconds in places.items()}

    @contextmanager
    def step(self, name: str, work: str = "") -> Iterator[None]:
        """Note a call that may hang, for as long as it is under way; `work` is that of a statement."""
        token = object()  # two threads may be at steps of one name
        self._steps[token] = self.now(), name, work
        try:
            yield
        finally:
            del self._steps[token]

    @contextmanager
    def statement(self, name: str, work: str) -> Iterator[None]:
        """Note a call to the database, and its success.

        A table that is missing fails for others, too, and so does a statement that takes too long. A right may be
        missing for this process alone, which may have a role of its own.
        """
        if work:
            self.duty.tried(work, self.now())
        with self.step(name, work):
            try:
                yield
            except (RightsMissing, RowsHidden):
                raise
            except (RowsHeld, RowsRemain, StatementCancelled, TableUnusable, OutboxTableError):
                self.duty.dropped(work)
                raise
        if work:
            self.duty.succeeded(work)

    def tries_to(self, *works: str) -> None:
        """Note that work begins which ends with `duty.succeeded` or `duty.dropped`."""
        for work in works:
            self.duty.tried(work, self.now())

    def goes_on(self, work: str) -> None:
        """Note that a part of some work is done, which consists of many and has not succeeded yet."""
        self.duty.dropped(work)
        self.tries_to(work)

    @property
    def longest_step(self) -> tuple[str, float]:
        """The call that has been under way for the longest time, and for how many seconds; "" for none."""
        since, name, _ = min(list(self._steps.values()), default=(self.now(), "", ""))  # others change it meanwhile
        return name, self.now() - since

    @property
    def statement_seconds(self) -> float:
        """The seconds for which a statement that belongs to some work has been under way, 0.0 if none is."""
        since = min((since for since, _, work in list(self._steps.values()) if work), default=self.now())
        return self.now() - since

    @property
    def circumstances(self) -> str:
        """The call that is waited for and who does not answer, to follow a complaint; "" if neither is known."""
        name, seconds = self.longest_step
        waits = f"; it waits for {name} for {seconds:.0f} s" if seconds >= _LONG_STEP_SECONDS else ""
        return waits + (f"; {self.culprit}" if self.culprit else "")

    def looked(self) -> None:
        """Note that the table was read."""
        self._looked_at = self.now()

    def tries(self) -> None:
        """Note that records are on their way to Kafka."""
        at = self.now()
        if at - self._tried_at > _LULL_SECONDS:
            self._trying_since = at
        self._tried_at = at

    def finished(self) -> None:
        """Note that records were deleted after their publication, or held."""
        self.has_finished = True
        self._finished_at = self._trying_since = self.now()
        self._tried_at = _NEVER

    @property
    def idle_seconds(self) -> float:
        """Time since the table was read, or records were dealt with."""
        return self.now() - max(self._looked_at, self._finished_at)

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
        at, seen = self.now(), self.circumstances or "; see its log"
        owed = {work: seconds for work, seconds in self.duty.owed(at).items() if seconds > limit_seconds}
        if owed:
            work = max(owed, key=lambda each: owed[each])
            return f"it leads, and could not {work} for {owed[work]:.0f} s{seen}"
        fruitless = at - self._trying_since if at - self._tried_at <= _LULL_SECONDS else 0.0
        if fruitless > limit_seconds:
            return f"it leads, and of the records it sends none could be dealt with for {fruitless:.0f} s{seen}"
        if self.idle_seconds > limit_seconds + look_interval:
            return f"it leads, and the table was not read for {self.idle_seconds:.0f} s{seen}"
        return None


class Totals(NamedTuple):
    """Records published, records failed (each attempt), bytes of values, and counts by `DELIVERY_BUCKETS`.

    `dead_letters` counts records that went to the dead-letter topic; `holds` are those that there are now.
    """

    published: int
    failed: int
    bytes: int
    delivery_latency: tuple[int, ...]
    dead_letters: int
    holds: int


class HarvestMetrics:
    """The numbers of one harvester.

    Args:
        registry: where they can be read; a new one by default, so that embedding never clashes.
        outbox_name: the label; the harvester sets it to the outbox's identity if it is empty.
    """

    def __init__(self, registry: CollectorRegistry | None = None, outbox_name: str = "") -> None:
        self.registry = registry if registry is not None else _new_registry()
        self.outbox_name = outbox_name
        self.activity = Activity()
        self._lock = threading.Lock()

        self._values = dict.fromkeys([*COUNTERS, *GAUGES], 0.0)
        self._histograms = {
            name: WeightedHistogram(BATCH_BUCKETS if name == "purge_records" else LATENCY_BUCKETS)
            for name in HISTOGRAMS
        }
        self._publication = PublicationCounts()
        self._backlog: tuple[Backlog, float | None] | None = None
        self._kafka_up: bool | None = None
        self._term = -1
        self._floor: FloorGauge | None = None
        _register(self)

    def published(self, records: Sequence[StoredRecord]) -> None:
        """Count a batch of records that Kafka acknowledged just now."""
        if records:
            with self._lock:
                self._values["published"] += len(records)
                self._publication.add(records)

    def published_elsewhere(self, counts: PublicationCounts) -> None:
        """Count records that another process has published, as that process counted them."""
        with self._lock:
            self._values["published"] += counts.by_topic.total()
            self._publication.merge(counts)

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

    def leading(self, leader: bool, term: int = -1, *, is_handed_over: bool = True) -> None:
        """Note that leadership begins, and its number, or that it ends, handed over to another or by itself."""
        if leader:
            self.activity.begin()
        else:
            self.activity.end(is_handed_over=is_handed_over)
        self._term = term if leader else -1
        self._values["leader"] = float(leader)

    def backlog(self, backlog: Backlog | None, time_to_empty: float | None = None) -> None:
        """Set the backlog; None when this harvester does not know it, so that no stale number is shown.

        `time_to_empty` is in seconds, None if it cannot be told.
        """
        self._backlog = None if backlog is None else (backlog, time_to_empty)

    def kafka_up(self, up: bool | None) -> None:
        """Note whether Kafka answers; None while that is not known."""
        self._kafka_up = up

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

    def purge_took(self, seconds: float, records: int) -> None:
        """Observe the duration of a purge, and how many records it deleted."""
        with self._lock:
            self._histograms["purge_duration"].observe(seconds)
            self._histograms["purge_records"].observe(records)
        self.activity.finished()

    def totals(self) -> Totals:
        """Return what was counted since the beginning."""
        with self._lock:
            counts = self._publication
            published, failed, letters, holds = (
                int(self._values[name]) for name in ("published", "errors", "dead_letters", "holds")
            )
            return Totals(published, failed, counts.bytes, counts.delivery_latency.counts, letters, holds)

    def add_to(self, families: Families) -> None:
        """Write a consistent copy of the numbers into the families."""
        name = self.outbox_name
        with self._lock:
            for key, value in self._values.items():
                families.add(key, value, name)
            for key, histogram in self._histograms.items():
                histogram.add_to(families.histogram(key), name)
            self._add_publication(families)
        families.add("build", 1.0, name, _version(), platform.python_version())
        if self._kafka_up is not None:
            families.add("kafka_up", float(self._kafka_up), name)
        if self._term >= 0:
            families.add("leader_term", self._term, name)
        if self._backlog is not None:
            self._add_backlog(families, *self._backlog)
        if self._floor is not None and self._values["leader"]:
            self._add_floor(families, self._floor)

    def _add_publication(self, families: Families) -> None:
        name, counts = self.outbox_name, self._publication
        families.add("bytes", counts.bytes, name)
        counts.delivery_latency.add_to(families.histogram("delivery_latency"), name)
        if counts.last_at:
            families.add("last_success", counts.last_at, name)
        for topic, number in counts.by_topic.items():
            families.add("topic_published", number, name, topic)

    def _add_backlog(self, families: Families, backlog: Backlog, time_to_empty: float | None) -> None:
        name = self.outbox_name
        families.add("pending", backlog.pending, name)
        families.add("oldest_age", backlog.oldest_age_seconds, name)
        for key, rows in (("deliverable", backlog.deliverable), ("held", backlog.held)):
            families.add(key, rows.number, name)
            families.add(f"{key}_age", rows.oldest_age_seconds, name)
            by_label: Counter[str] = Counter()
            for topic, number in rows.topics.items():
                by_label[self._publication.labels.label(topic)] += number
            # An estimated number is more than the topics that were counted.
            if rest := rows.number - sum(rows.topics.values()):
                by_label[OTHER_TOPICS] += rest
            for topic, number in by_label.items():
                families.add(f"topic_{key}", number, name, topic)
        if time_to_empty is not None:
            families.add("time_to_empty", time_to_empty, name)

    def _add_floor(self, families: Families, floor: FloorGauge) -> None:
        name = self.outbox_name
        families.add("floor_enabled", float(floor.enabled), name)
        families.add("stragglers", floor.stragglers, name)
        families.add("straggler_age", floor.oldest_straggler_seconds, name)
        if floor.distance is not None:
            families.add("floor_distance", floor.distance, name)


@cache
def _version() -> str:
    try:
        return version("kafka-outbox")
    except PackageNotFoundError:  # a copy of the source that was never installed
        return "unknown"


def _new_registry() -> CollectorRegistry:
    """Return a registry with the numbers of this process, which the default one of `prometheus_client` has anyhow."""
    registry = CollectorRegistry()
    ProcessCollector(registry=registry)
    return registry


class _OutboxCollector(Collector):
    """The collector of one registry, where a family may appear only once; of equal labels the newest is shown."""

    def __init__(self) -> None:
        self._sources: list[ref[HarvestMetrics]] = []

    def add(self, source: HarvestMetrics) -> None:
        self._sources = [*(known for known in self._sources if known() is not None), ref(source)]

    def collect(self) -> Iterator[Metric]:
        families = Families()
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
    """A server of `/metrics` and of health on a thread of its own until closed. Port 0 takes any free one, see `port`.

    `/healthz` and `/readyz` answer 200 with `{"status": "ok", "leader": ..., "detail": ...}` while `health()` says ok,
    whether the harvester leads or stands by, else 503 with the reason. `/livez` answers the same with 200 until the
    harvester has ended.

    Raises:
        InvalidConfig: if it cannot listen there.
    """

    def __init__(self, host: str, port: int, registry: CollectorRegistry, health: Callable[[], Health]) -> None:
        self._registry = registry
        self._health = health
        try:
            self._server = HttpServer(host, port, self._respond, "outbox-metrics")
        except (OSError, OverflowError) as error:  # the latter for a port above 65535
            reason = getattr(error, "strerror", None) or str(error)
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
        if request.path in _HEALTH_PAGES:
            return self._answer_health(alive_suffices=request.path == "/livez")
        if request.path == "/":
            links = "".join(f'<li><a href="{page}">{page}</a>\n' for page in ("/metrics", *_HEALTH_PAGES))
            return text_answer(200, "OK", f"{_TITLE}<ul>\n{links}</ul>\n", "text/html; charset=utf-8")
        return text_answer(404, "Not Found", f"see /metrics, {', '.join(_HEALTH_PAGES)}\n")

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

    def _answer_health(self, *, alive_suffices: bool) -> Answer:
        try:
            health = self._health()
        except Exception as error:
            health = Health(ok=False, leader=False, detail=f"cannot tell: {type(error).__name__}")
        shown = {"status": "ok" if health.ok else "failing", "leader": health.leader, "detail": health.detail}
        is_well = health.alive if alive_suffices else health.ok
        status, phrase = (200, "OK") if is_well else (503, "Service Unavailable")
        return text_answer(status, phrase, json.dumps(shown) + "\n", "application/json")
