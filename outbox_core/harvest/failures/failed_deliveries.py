"""Failed deliveries and holds of at-least-once delivery, on the harvest thread.

`policy` decides if a record is tried alone, held with its key, or its destination backed off. All others flow on
unmarked. `released_keys` keeps the order while some keys are released to the table. A record that is tried alone is
still under way in its lane, so no other of its key overtakes it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence

from outbox_core.election.lease import now
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.delivery_backoffs import DeliveryBackoffs
from outbox_core.harvest.failures.handler import Exclusion, FailureHandler, longest_backoff_of
from outbox_core.harvest.failures.policy import Backoff, Hold, Retry, decide, destination_of
from outbox_core.harvest.failures.released_keys import LaneOrRow, ReleasedKeys, lane_or_row
from outbox_core.harvest.store_calls import StoreCall
from outbox_core.kafka.messages import Failure
from outbox_core.stores.interface import HoldSet, NewHold, RowId, StoredRecord, row_id


class FailedDeliveries(FailureHandler):
    """Failed deliveries of one leadership."""

    backoffs: DeliveryBackoffs

    def __init__(self, ctx: HarvestContext) -> None:
        limits = ctx.limits
        backoffs = DeliveryBackoffs(
            limits.io_error_backoff / 10,
            longest_backoff_of(limits),
            now,
            # Probes stay in their lanes, and take room from the others.
            most_probes=max(1, limits.max_in_flight_records // 4),
            most_probe_bytes=limits.max_in_flight_bytes // 4,
        )
        super().__init__(ctx, backoffs)
        self._released = ReleasedKeys()
        self._suspects: deque[StoredRecord] = deque()
        self._new_holds: list[tuple[NewHold, LaneOrRow | None]] = []
        self._being_written: list[tuple[NewHold, LaneOrRow | None]] = []
        self._writing: StoreCall[HoldSet] = StoreCall(ctx.marker, ctx)

    # -- failures

    def handle(self, failures: Iterable[Failure], lanes: Lanes) -> list[StoredRecord]:
        """Decide on failed deliveries; return the records that are released to the table."""
        released: list[StoredRecord] = []
        for failure in failures:
            record = failure.record
            match decide(failure, alone=failure.alone, can_hold=self.hold_cache.is_writable):
                case Retry():
                    self._suspects.append(record)
                case Hold():
                    self._hold(failure)
                    released += self._release(record, lanes)
                case Backoff(None):
                    self._back_off_alone(failure)
                    released += self._release(record, lanes)
                case _:
                    released += self._back_off_and_release(failure, lanes)
        return released

    def _hold(self, failure: Failure) -> None:
        hold = self._new_hold(failure)
        item = None if hold.record_id is None else lane_or_row(failure.record)
        if item is not None:
            self._released.hold(item)
        elif any(hold.topic == other.topic and other.record_id is None for other, _ in self._new_holds):
            return
        self._new_holds.append((hold, item))

    def _release(self, record: StoredRecord, lanes: Lanes) -> list[StoredRecord]:
        self.backoffs.end_probe(record)
        return self._note_released(lanes.release(record))

    def _note_released(self, records: list[StoredRecord]) -> list[StoredRecord]:
        self._released.release(records)
        return records

    def _back_off_and_release(self, failure: Failure, lanes: Lanes) -> list[StoredRecord]:
        record = failure.record
        is_probe, is_new = self._back_off(failure)
        # A probe keeps its lane, without followers: those wait in the table.
        released = self._note_released(lanes.release_followers(record)) if is_probe else self._release(record, lanes)
        topic, part = destination_of(failure)
        if part is None and is_new:
            released += self._note_released(lanes.release_unsent(lambda other: other.topic == topic))
        return released

    def succeeded(self, delivered: list[StoredRecord]) -> None:
        """Note delivered records."""
        self._succeeded(delivered)

    # -- sending again

    def due_in(self) -> float:
        """Return the seconds until a record must be sent again, or a hold written."""
        due = float("inf") if self.backoffs.next_due is None else self.backoffs.next_due - now()
        if self._new_holds and not self._writing.is_running:
            due = min(due, self._writing.retry_at - now())
        return 0.0 if self._suspects else max(0.0, due)

    @property
    def has_due(self) -> bool:
        """True if a record must be sent again now."""
        return bool(self._suspects) or self.backoffs.has_due_probe

    def take_due(self) -> list[StoredRecord]:
        """Return records to send again now, each alone."""
        self._report.update()
        if not self.backoffs.is_unreachable:  # what failed is held, or fails for another reason
            limits = self._ctx.limits
            self._ctx.kafka.expire_after(limits.delivery_timeout + longest_backoff_of(limits))
        if not self._suspects and not self.backoffs:
            return []
        suspects = list(self._suspects)
        self._suspects.clear()
        return [*suspects, *self.backoffs.due_probes()]

    def put_back(self, records: Iterable[StoredRecord]) -> None:
        """Take back due records that could not be sent."""
        self._suspects.extend(record for record in records if not self.backoffs.not_sent(record))

    def release_waiting(self) -> list[StoredRecord]:
        """Forget and return the records that are under way in their lanes and not in flight; for a remark."""
        waiting = [*self._suspects, *self.backoffs.release_probes()]
        self._suspects.clear()
        return waiting

    def leader_id_renewed(self) -> None:
        """Forget released keys: no row carries the old leader ID any more."""
        self._released = ReleasedKeys()

    # -- marks

    def exclusion(self) -> Exclusion:
        """Return the exclusion of a mark that starts now."""
        self._released.mark_starts()
        released, backoffs = self._released, self.backoffs
        return Exclusion(released.lanes | backoffs.lanes, released.rows | backoffs.rows, backoffs.topics)

    def apply_holds(self, holds: HoldSet, lanes: Lanes) -> list[StoredRecord]:
        """Take in the current holds; return the records that are released to the table."""
        if holds is self.holds:
            return []
        self.holds = holds
        if not holds:
            return []
        released = self._note_released(lanes.release_unsent(holds.covers))
        for record in [*self._suspects, *self.backoffs.waiting_probes]:
            if holds.covers(record):
                released += self._release(record, lanes)
        self._suspects = deque(record for record in self._suspects if not holds.covers(record))
        return released

    def admissible(self, records: Sequence[StoredRecord]) -> tuple[Sequence[StoredRecord], list[StoredRecord]]:
        """Divide marked records into those that may be sent, and those that are released to the table."""
        if not self.holds and not self._released and not self.backoffs:
            return records, []
        covers, must_release, backoffs = self.holds.covers, self._released.must_release, self.backoffs
        back = [each for each in records if covers(each) or must_release(each) or lane_or_row(each) in backoffs]
        if not back:
            return records, []
        self._released.release(back)
        rows = set(map(row_id, back))
        return [record for record in records if row_id(record) not in rows], back

    def reset_done(self, rows: Iterable[RowId]) -> None:
        """Note rows whose marks are cleared."""
        if self._released:
            self._released.reset_done(rows)

    # -- writing holds

    @property
    def is_writing(self) -> bool:
        """True while holds wait to be written, or are being written."""
        return bool(self._new_holds or self._writing.is_running)

    def start_writing(self) -> None:
        """Start to write new holds."""
        if self._new_holds and self._writing.can_start:
            self._being_written, self._new_holds = self._new_holds, []
            holds, hold_cache = [hold for hold, _ in self._being_written], self.hold_cache
            self._writing.start(lambda store: hold_cache.write(store, holds))

    def collect_written(self, lanes: Lanes) -> list[StoredRecord]:
        """Take in holds that have been written; return the records that are released to the table."""
        if not self._writing.is_done:
            return []
        written, self._being_written = self._being_written, []
        try:
            holds = self._writing.result()
        except StoreUnavailable:
            self._new_holds = written + self._new_holds
            return []
        for _, item in written:
            if item is not None:
                self._released.hold_done(item)
        return self.apply_holds(holds, lanes)
