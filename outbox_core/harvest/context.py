"""The context of a harvester's leaderships: limits, threads, metrics, event handler."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event as ThreadEvent
from typing import Self

from outbox_core.commit_signal import CommitFlag
from outbox_core.config import HarvestConfig
from outbox_core.election.interface import LeaderElector
from outbox_core.election.lease import now
from outbox_core.errors import RowsRemain, StatementCancelled, StoreUnavailable, TableUnusable
from outbox_core.events import Event, MeterRead
from outbox_core.harvest.at_least_once.send_window import SendWindow
from outbox_core.harvest.steps import BEGIN
from outbox_core.harvest.store_calls import StoreThread
from outbox_core.harvest.watermark import LowWatermark
from outbox_core.kafka.batch_sizes import BatchSizes
from outbox_core.metrics import HarvestMetrics
from outbox_core.monitoring.meter import Meter
from outbox_core.outage import Outage

_LONGEST_TABLE_BACKOFF_SECONDS = 10.0
_STARTING_SECONDS = 60.0


@dataclass(frozen=True, kw_only=True)
class HarvestLimits:
    """The limits of `outbox_core.config.Limits` that harvesting needs, with durations in seconds."""

    mark_query_records: int
    most_in_transaction: int
    max_in_flight_records: int
    max_in_flight_bytes: int
    lane_capacity: int
    mark_backoff: float
    io_error_backoff: float
    delivery_timeout: float
    drain_timeout: float
    max_message_bytes: int

    @classmethod
    def of(cls, config: HarvestConfig) -> Self:
        """Return the limits of a configuration."""
        limits = config.limits
        return cls(
            mark_query_records=limits.mark_query_records,
            most_in_transaction=limits.most_in_transaction,
            max_in_flight_records=limits.max_in_flight_records,
            max_in_flight_bytes=limits.max_in_flight_bytes,
            lane_capacity=limits.lane_capacity,
            mark_backoff=limits.mark_backoff.total_seconds(),
            io_error_backoff=limits.io_error_backoff.total_seconds(),
            delivery_timeout=config.delivery_timeout.total_seconds(),
            drain_timeout=limits.drain_timeout.total_seconds(),
            max_message_bytes=config.max_message_bytes,
        )

    @property
    def mark_query_bytes(self) -> int:
        """The most bytes that one statement fetches, but for its last row: four such batches may be in memory."""
        return max(1, self.max_in_flight_bytes // 4)


@dataclass(frozen=True, kw_only=True)
class DeadLetterTopic:
    """The topic for records that an operator gives up, and with `on_poison` for all that Kafka refuses."""

    topic: str
    on_poison: bool
    ensure: Callable[[], None]
    forbidden: Callable[[set[str]], set[str]]


@dataclass(frozen=True, kw_only=True)
class HarvestContext:
    """The things that all leaderships of one harvester share."""

    elector: LeaderElector
    limits: HarvestLimits
    marker: StoreThread
    purger: StoreThread
    watermark: LowWatermark
    metrics: HarvestMetrics
    meter: Meter
    emit: Callable[[Event], None]
    wake: ThreadEvent
    commits: CommitFlag
    database: Outage
    kafka: Outage
    dead_letters: DeadLetterTopic
    grant_write: str
    send_window: SendWindow
    batches: BatchSizes
    removal: Outage
    has_begun: ThreadEvent = field(default_factory=ThreadEvent)
    """Set once a leadership of this process has found settings, rights and topics in order."""
    made_at: float = field(default_factory=now)

    @property
    def outages(self) -> tuple[Outage, Outage, Outage]:
        """The services and rights that can fail for a while."""
        return self.database, self.kafka, self.removal

    @property
    def is_starting(self) -> bool:
        """True while wrong settings and missing rights end the harvester: what fails later may pass, and ends nothing.

        That is until a leadership has begun, and for a minute at most: a process may stand by for weeks before that.
        """
        return not self.has_begun.is_set() and now() < self.made_at + _STARTING_SECONDS

    def count_published(self, records: int) -> None:
        """Count published records in the meter, and tell what it reads; 0 where there were none, so that it tells."""
        stats = self.meter.add(records)
        if stats is not None:
            self.emit(MeterRead(stats))

    def note_outage(self, error: StoreUnavailable, thread: StoreThread) -> float:
        """Note that a statement failed; return the seconds until it may be repeated."""
        backoff = self.limits.io_error_backoff
        if isinstance(error, StatementCancelled):  # as it would be for others
            self.metrics.activity.duty.excused(BEGIN, self.metrics.activity.now())
        if isinstance(error, RowsRemain):
            outage = self.removal
            outage.failed(error)
        else:
            outage = self.database
            outage.failed(error, thread)
        if not isinstance(error, RowsRemain | TableUnusable):
            return backoff
        # A right or a table is missing rather than the database: repeats need not be fast.
        return max(backoff, min(_LONGEST_TABLE_BACKOFF_SECONDS, outage.lasted_seconds / 4))
