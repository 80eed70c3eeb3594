"""The common part of failed deliveries and failed transactions: holds, and backoffs with their log."""

from __future__ import annotations

import logging
from typing import NamedTuple

from outbox_core.harvest.context import HarvestContext, HarvestLimits
from outbox_core.harvest.failures.backoff_report import BackoffReport, name
from outbox_core.harvest.failures.backoffs import LONGEST_BACKOFF_SECONDS, Backoffs
from outbox_core.harvest.failures.delivery_backoffs import DeliveryBackoffs
from outbox_core.harvest.failures.holds import HoldCache
from outbox_core.harvest.failures.policy import destination_of, new_hold, size_limits
from outbox_core.kafka.errors import ErrorKind
from outbox_core.kafka.messages import Failure
from outbox_core.stores.interface import NO_HOLDS, HoldSet, LaneKey, NewHold, RowId, StoredRecord

_log = logging.getLogger(__name__)

_LONGEST_BACKOFF_FACTOR = 20


class Exclusion(NamedTuple):
    """Keys, rows, and topics that a mark or scan leaves out beside those that are held."""

    lanes: set[LaneKey]
    rows: set[RowId]
    topics: frozenset[str]

    def __bool__(self) -> bool:
        return bool(self.lanes or self.rows or self.topics)


def longest_backoff_of(limits: HarvestLimits) -> float:
    """Return a destination's longest backoff, in seconds: `io_error_backoff` itself if that is longer."""
    backoff = limits.io_error_backoff
    return max(backoff, min(backoff * _LONGEST_BACKOFF_FACTOR, LONGEST_BACKOFF_SECONDS))


class FailureHandler:
    """Holds and backoffs of one leadership. The marker's thread uses `hold_cache`; `holds` are frozen."""

    def __init__(self, ctx: HarvestContext, backoffs: Backoffs | DeliveryBackoffs) -> None:
        self.hold_cache = HoldCache(ctx.metrics)
        self.holds: HoldSet = NO_HOLDS
        self.backoffs: Backoffs | DeliveryBackoffs = backoffs
        self._report = BackoffReport(ctx.metrics, backoffs, longest_backoff_of(ctx.limits))
        self._ctx = ctx

    def end(self) -> None:
        """Reset the gauges: later leaderships read the records from the table again."""
        self._report.end()

    def _succeeded(self, records: list[StoredRecord]) -> None:
        for destination in self.backoffs.succeeded(records) if self.backoffs else ():
            _log.info("records for %s arrive again", name(destination))

    def _new_hold(self, failure: Failure) -> NewHold:
        ctx = self._ctx
        limits = size_limits(ctx.batches.limit_of(failure.record.topic), ctx.limits.max_message_bytes)
        return new_hold(failure, ctx.grant_write, dead_letter=ctx.dead_letters.on_poison, limits=limits)

    def _back_off(self, failure: Failure) -> tuple[bool, bool]:
        """Back off a destination; return two flags: the record is the probe, the backoff is new."""
        record, error = failure.record, failure.error.str()
        destination, unreachable = destination_of(failure), failure.kind is ErrorKind.TRANSIENT
        is_new = destination not in self.backoffs
        is_probe = self.backoffs.failed(record, destination, unreachable=unreachable, why=error)
        what = f"record {record.id} for topic {record.topic}"
        if unreachable:
            self._ctx.kafka.failed(f"{what}: {error}")
        elif is_new:
            self._report.warn(f"topic {record.topic}" if destination[1] is None else what, error)
        return is_probe, is_new

    def _back_off_alone(self, failure: Failure) -> None:
        record, error = failure.record, failure.error.str()
        self._report.warn_once(record.id, f"record {record.id} for topic {record.topic}", error)
        self.backoffs.failed_alone(record, error)
