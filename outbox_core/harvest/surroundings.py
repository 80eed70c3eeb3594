"""What a leadership works with: limits, threads, metrics, the event handler. It all outlives the leadership."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from threading import Event as ThreadEvent

from outbox_core.errors import RowsRemain, StoreUnavailable
from outbox_core.events import Event
from outbox_core.harvest.batch_sizes import BatchSizes
from outbox_core.harvest.floor import SettledFloor
from outbox_core.harvest.meter import Meter
from outbox_core.harvest.outage import Outage
from outbox_core.harvest.pace import News
from outbox_core.harvest.send_window import SendWindow
from outbox_core.harvest.store_thread import StoreThread
from outbox_core.metrics import HarvestMetrics
from outbox_core.ports import LeaderElector

_log = logging.getLogger(__name__)

_LONGEST_REMOVAL_REST_SECONDS = 10.0


@dataclass(frozen=True, kw_only=True)
class Timing:
    """Limits, in records, bytes and seconds (see `outbox_core.config.Limits`)."""

    mark_query_records: int
    max_in_flight_records: int
    max_in_flight_bytes: int
    lane_capacity: int
    mark_backoff: float
    io_error_backoff: float
    delivery_timeout: float
    drain_timeout: float

    @property
    def mark_query_bytes(self) -> int:
        """How many bytes one statement fetches at most, but for its last row: four such batches may be in memory."""
        return max(1, self.max_in_flight_bytes // 4)


@dataclass(frozen=True, kw_only=True)
class DeadLetters:
    """Where records go that Kafka refuses, and that somebody gives up.

    Attributes:
        topic: the dead-letter topic.
        on_poison: whether bad records go there by themselves; else only those that somebody asks for.
        ensure: makes the topic if it is missing; called before the first of them, on the marker's thread.
        forbidden: tells to which of some topics we may not write.
    """

    topic: str
    on_poison: bool
    ensure: Callable[[], None]
    forbidden: Callable[[set[str]], set[str]]


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """What a leadership works with.

    Attributes:
        elector: says whether we still lead.
        marker: thread that runs the marks or scans.
        purger: thread that runs purges and resets.
        floor: where marks and scans begin.
        metrics: where to count.
        meter: throughput.
        emit: tells the event handler.
        wake: set whenever there may be something to do.
        news: told when records may have been committed.
        database: says once when the database goes and comes.
        kafka: says once when deliveries fail and succeed again.
        batches: how large the producer's batches may be.
        removal: says once when published rows cannot be removed, and when they can again.
        grant_write: advises to grant us WRITE on a topic, naming us as Kafka knows us.
        send_window: says when leases are too short to send anything.
    """

    elector: LeaderElector
    marker: StoreThread
    purger: StoreThread
    floor: SettledFloor
    metrics: HarvestMetrics
    meter: Meter
    emit: Callable[[Event], None]
    wake: ThreadEvent
    news: News
    database: Outage
    kafka: Outage
    grant_write: str
    send_window: SendWindow
    batches: BatchSizes = field(default_factory=BatchSizes)
    removal: Outage = field(default_factory=lambda: Outage("removal of published records", _log))

    def note_outage(self, error: StoreUnavailable, backoff: float) -> float:
        """A statement failed; returns how many seconds to wait before it is repeated.

        As long as published rows cannot be removed, a right is missing rather than the database: there is no hurry.
        """
        if not isinstance(error, RowsRemain):
            self.database.began(error)
            return backoff
        self.removal.began(error)
        return max(backoff, min(_LONGEST_REMOVAL_REST_SECONDS, self.removal.lasted_seconds / 4))
