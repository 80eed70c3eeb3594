"""The visible side of a relay: the metrics of a harvester, its health, and a report of each batch."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from outbox_core.config import HarvestConfig, redact
from outbox_core.errors import OutboxError
from outbox_core.metrics import HarvestMetrics, Health
from outbox_core.stores.interface import WaitingRows
from outbox_core.upkeep.backlog import Trend
from outbox_spark.metrics import BatchReport
from outbox_spark.relay.plan import SLICE_SECONDS, BatchPlan, ShardOutcome
from outbox_spark.relay.shard_store import ShardStore

OnProgress = Callable[[BatchReport], None]

_UNHEALTHY_AFTER_SECONDS = 30.0 + SLICE_SECONDS
# The driver counts between two batches: at most 2% of the time, as harvesters do.
_PAUSE_FACTOR = 49


class RelayMonitor:
    """The numbers of one relay. Used by the driver's thread; `health` and `metrics` may be asked by any.

    The store is its own: a count that takes too long costs it the connection, and the planner would lose its positions.
    """

    def __init__(self, config: HarvestConfig, store: ShardStore, on_progress: OnProgress | None) -> None:
        self.metrics = HarvestMetrics(outbox_name=config.outbox_name or "")
        self._interval = config.limits.min_metrics_interval.total_seconds()
        self._store = store
        self._on_progress = on_progress
        self._leads = False
        self._fine_at = 0.0  # rows were published, or none could be
        self._waiting: WaitingRows | None = None  # those that no hold keeps back, as last counted
        self._trend = Trend()
        self._counted_at = float("-inf")
        self._count_seconds = 0.0
        self._last: BatchReport | None = None

    def leads(self, term: int | None) -> None:
        """Note the beginning of a leadership, or its end, after which the backlog is not known here."""
        self._counted_at, self._fine_at = float("-inf"), time.monotonic()  # before `health` asks for it
        self._leads = term is not None
        self.metrics.leading(self._leads, -1 if term is None else term)
        self._forget()
        if term is None:
            self._store.close()

    def looks(self, interval: float | None = None) -> None:
        """Count the backlog, unless that was done within an interval of so many seconds, or takes too long."""
        began, pause = time.monotonic(), self._interval if interval is None else interval
        if began < self._counted_at + max(pause, _PAUSE_FACTOR * self._count_seconds):
            return
        try:
            backlog = self._store.backlog()
        except OutboxError:  # an outage stops the planner, too, which says so
            self._forget()
        else:
            self._waiting = backlog.deliverable
            self.metrics.backlog(backlog, self._trend.time_to_empty(began, self._waiting.number))
        self._counted_at = time.monotonic()
        self._count_seconds = self._counted_at - began

    def _forget(self) -> None:
        self._waiting = None
        self._trend.forget()
        self.metrics.backlog(None)

    def planned(self, holds: int, *, is_idle: bool) -> None:
        """Note that the table was read, the number of holds, and whether there is no row to publish."""
        self.metrics.held(holds)
        if is_idle:
            self._fine_at = time.monotonic()

    def title(self, plan: BatchPlan) -> str:
        """Return what Spark's UI calls a batch: what it is, and how it was before."""
        before = f", after {self._last}" if self._last is not None else ""
        return f"relay {plan.outbox}: batch {self._next}, {len(plan.ranges)} shards, term {plan.term}{before}"

    @property
    def has_published(self) -> bool:
        """True once a batch has published rows."""
        return self._last is not None

    @property
    def _next(self) -> int:
        return 0 if self._last is None else self._last.number + 1

    def finished(self, outcomes: Sequence[ShardOutcome], seconds: float) -> bool:
        """Take in a batch; tell whether it has published anything."""
        for outcome in outcomes:
            self.metrics.published_elsewhere(outcome.counts)
        errors, published = sum(bool(outcome.error) for outcome in outcomes), sum(of.published for of in outcomes)
        self.metrics.publish_error(errors)
        if published or not errors:
            self._fine_at = time.monotonic()
        if not published:
            return False
        self.looks(0.0)  # it was before the batch
        lag, age = (self._waiting.number, self._waiting.oldest_age_seconds) if self._waiting else (None, None)
        self._last = BatchReport(
            number=self._next,
            counts={"records": published},
            seconds=seconds,
            longest_task=max(outcome.seconds for outcome in outcomes),
            lag=lag,
            lag_seconds=age,
        )
        if self._on_progress is not None:
            self._on_progress(self._last)
        return True

    def health(self, trouble: str | None) -> Health:
        """Return the health of recent work; of a relay that stands by, `trouble` is that of its group."""
        leads, seconds = self._leads, time.monotonic() - self._fine_at
        if leads:
            what = f"it leads, and for {seconds:.0f} s has neither published rows nor found none; see its log"
            trouble = what if seconds > _UNHEALTHY_AFTER_SECONDS else None
        if trouble is not None:
            return Health(ok=False, leader=leads, detail=redact(" ".join(trouble.split())))
        return Health(ok=True, leader=leads, detail="leading" if leads else "standing by")
