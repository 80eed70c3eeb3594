"""Failed deliveries and holds of at-least-once delivery, on the harvest thread.

Failures stay in the table: a record that failed is released with those behind it in its lane, and only the holds and
the `backoffs` tell the next mark of it. So a failed record is followed through `policy`, which decides; this module
and its base, which carry that out; and the backoffs.

Records that are **tried** are marked by their rows, dead letters are read without a mark, as their holds keep all
others away; and each of these is sent in a batch of its own. They take at most a quarter of the room among the records
in flight, so that the others flow.

Keys that are to be held are left out of the marks until that is written. So no mark returns a row of them, but the one
that was under way, from which `lanes` filters it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from outbox_core.election.lease import now
from outbox_core.errors import RowsRemain, StoreUnavailable
from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.failures.handler import Exclusion, FailureHandler, Letters, split_letters
from outbox_core.harvest.failures.policy import Decision, decide, destination_of
from outbox_core.harvest.steps import DEAD_LETTERS, DELETE, HOLDS
from outbox_core.harvest.store_calls import StoreCall
from outbox_core.kafka.errors import ErrorKind
from outbox_core.kafka.messages import DeadLetter, Failure
from outbox_core.stores.interface import (
    HoldSet,
    OutboxStore,
    RowId,
    StoredRecord,
    bytes_of,
    ids_and_times,
    lane_or_row,
    row_id,
)

_NEVER = float("inf")
_MOST_TO_HOLD = 1_000  # their values are in memory
_ROOM = 4  # records that are tried take one part in so many


class FailedDeliveries(FailureHandler):
    """Failed deliveries of one leadership; `tried` are the records under way that go alone."""

    def __init__(self, ctx: HarvestContext) -> None:
        super().__init__(ctx)
        self.tried: dict[RowId, StoredRecord] = {}
        self._letters: set[int] = set()  # read, and still among the requests that were read before
        self._to_hold: list[Failure] = []
        self._written = 0  # of these, by the call under way
        self._hold_call: StoreCall[HoldSet] = StoreCall(ctx.marker, ctx, HOLDS)
        self._arrived: list[StoredRecord] = []  # dead letters, whose rows and holds are to be deleted
        self._deletion: StoreCall[list[StoredRecord]] = StoreCall(ctx.purger, ctx, DEAD_LETTERS)

    # -- failures

    def handle(self, failures: Iterable[Failure], lanes: Lanes) -> list[StoredRecord]:
        """Decide on failed deliveries; return the records that are released to the table."""
        released: list[StoredRecord] = []
        for failure in failures:
            record = failure.record
            self.tried.pop(row_id(record), None)
            released += lanes.release(record)
            match decide(failure, alone=failure.alone, can_hold=self.hold_cache.is_writable):
                case Decision.RETRY:
                    self.backoffs.try_alone(record, failure.error.str())
                case Decision.HOLD:
                    self.backoffs.end(row_id(record))
                    self._to_hold.append(failure)
                case _:
                    released += self._back_off_destination(failure, lanes)
        return released

    def _back_off_destination(self, failure: Failure, lanes: Lanes) -> list[StoredRecord]:
        if isinstance(failure.record, DeadLetter):
            self._letters.discard(failure.record.id)
        is_new, (topic, part) = self._back_off(failure), destination_of(failure)
        return lanes.release_unsent(lambda other: other.topic == topic) if part is None and is_new else []

    def succeeded(self, delivered: list[StoredRecord]) -> Sequence[StoredRecord]:
        """Note delivered records; return those that are to be purged, which dead letters are not."""
        self._succeeded(delivered)
        if not self.tried:
            return delivered
        ordinary, letters = split_letters(delivered)
        self._arrived.extend(letters)
        self._ctx.metrics.dead_letters(len(letters))
        for record in ordinary:
            self.tried.pop(row_id(record), None)
        return ordinary

    # -- dead letters that have arrived

    def start_deleting(self) -> None:
        """Delete their rows and holds: by themselves, as what keeps the holds there must not have others repeated."""
        if self._arrived and self._deletion.can_start:
            letters = self._arrived.copy()
            self._deletion.start(lambda store: _delete_dead_lettered(store, letters))

    def collect_deleted(self) -> list[StoredRecord]:
        """Return dead letters that are deleted."""
        if not self._deletion.is_done:
            return []
        try:
            letters = self._deletion.result()
        except StoreUnavailable:
            return []
        del self._arrived[: len(letters)]
        for letter in letters:
            self.tried.pop(row_id(letter), None)
        return letters

    @property
    def is_deleting(self) -> bool:
        """True while that is under way or can begin; False for a while after it failed."""
        return self._deletion.is_running or (bool(self._arrived) and self._deletion.can_start)

    # -- trying again

    def update(self) -> None:
        """Set the gauges, log what has waited for long, and end an outage of which nothing is waited for."""
        self._report.update()
        if not self.backoffs.is_unreachable:  # what failed is held, or fails for another reason
            self._ctx.kafka.expire_after(self._ctx.limits.delivery_timeout + self.backoffs.longest)

    def due_in(self, lanes: Lanes) -> float:
        """Return the seconds until a record can be tried again."""
        if not (self.backoffs or self.holds.requests) or self._room(lanes) <= 0:
            return _NEVER
        return 0.0 if self._letters_due(lanes) else max(0.0, self.backoffs.next_due(lanes.is_busy) - now())

    def rows_to_try(self, lanes: Lanes) -> tuple[list[RowId], list[int]]:
        """Return rows to try now, and ids of dead letters."""
        if not (self.backoffs or self.holds.requests):
            return [], []
        room = max(0, self._room(lanes))
        rows = self.backoffs.due(room, lanes.is_busy)
        return rows, self._letters_due(lanes)[: room - len(rows)]

    def _room(self, lanes: Lanes) -> int:
        limits, most = self._ctx.limits, max(1, self._ctx.limits.max_in_flight_records // _ROOM)
        if bytes_of(self.tried.values()) >= limits.max_in_flight_bytes // _ROOM:
            return 0
        return min(limits.mark_query_records, most - len(self.tried), limits.max_in_flight_records - lanes.held)

    def _letters_due(self, lanes: Lanes) -> list[int]:
        if not self.holds.requests or any(isinstance(record, DeadLetter) for record in self.tried.values()):
            return []
        return [each for each in self._letters_to_read(self._letters) if not lanes.holds_id(each)]

    def take_in_tried(
        self, rows: Iterable[RowId], ids: Iterable[int], found: Sequence[StoredRecord], letters: Letters
    ) -> tuple[list[StoredRecord], list[DeadLetter]]:
        """Take in what was found of rows and dead letters to try; return the rows, and the letters, that may be sent.

        A row that was released as a dead letter, or has another topic or key by now, is left to the other marks:
        earlier rows of its key may wait for these.
        """
        waiting = [record for record in found if self.backoffs.covers(record)]
        self._end_gone(rows, found, [*waiting, *letters.records])
        sendable = self.sendable(letters)
        if letters.problem is None:
            self._letters.update(ids)
        self.tried.update((row_id(record), record) for record in (*waiting, *sendable))
        return waiting, sendable

    def forget_tried(self, records: Iterable[StoredRecord]) -> None:
        """Forget records that are released to the table, and not known to have failed: they are tried again."""
        for record in records if self.tried else ():
            if self.tried.pop(row_id(record), None) is not None:
                self._letters.discard(record.id)

    # -- marks and holds

    def leader_id_renewed(self) -> None:
        """Forget what was under way: all of it is in the table, without a mark of ours.

        So are dead letters that could not be deleted: they are sent again, and until then nothing is to be deleted.
        """
        self._arrived.clear()
        self._ctx.metrics.activity.duty.dropped(DELETE)
        self.tried.clear()
        self._letters.clear()

    def exclusion(self, lanes: Lanes) -> Exclusion:
        """Return the exclusion of a mark that starts now."""
        to_hold, backoffs = self._to_hold, self.backoffs
        leaving = lanes.returning.union(backoffs.waiting, (lane_or_row(failure.record) for failure in to_hold))
        denied = {failure.record.topic for failure in to_hold if failure.kind is ErrorKind.UNAUTHORIZED}
        return Exclusion.of(lanes.full | leaving, backoffs.topics | denied)

    def apply_holds(self, holds: HoldSet, lanes: Lanes) -> list[StoredRecord]:
        """Take in the current holds; return the records that are released to the table."""
        if holds is self.holds:
            return []
        self._ctx.commits.notify()  # something may have been released
        self.holds = holds
        self._letters.intersection_update(holds.requests)
        if not holds:
            return []
        return lanes.release_unsent(lambda each: holds.covers(each) and not isinstance(each, DeadLetter))

    def start_holding(self, lanes: Lanes) -> None:
        """Write the holds that wait for it, or read them if they are stale: by themselves, as it may fail for long."""
        if self.hold_due_in(lanes) > 0.0:
            return
        self._written = len(self._to_hold)
        self._hold_call.start(self._holding(self._to_hold) if self._written else self.hold_cache.current_or_reread)

    def collect_holds(self, lanes: Lanes) -> list[StoredRecord]:
        """Take in the result of that, or raise StoreUnavailable; return the records that are released to the table."""
        if not self._hold_call.is_done:
            return []
        holds = self._hold_call.result()
        del self._to_hold[: self._written]
        return self.apply_holds(holds, lanes)

    @property
    def is_holding(self) -> bool:
        """True while `start_holding` is under way."""
        return self._hold_call.is_running

    @property
    def may_mark(self) -> bool:
        """False while the holds are not known, or too many of them cannot be written."""
        return not self.is_holding and self.hold_cache.is_known and len(self._to_hold) < _MOST_TO_HOLD

    def hold_due_in(self, lanes: Lanes) -> float:
        """Return the seconds until holds must be written or read."""
        if self._to_hold or not self.hold_cache.is_known:
            due = 0.0
        else:
            due = self.hold_cache.due_in() if self.holds or lanes.held else _NEVER
        return max(due, self._hold_call.retry_at - now())


def _delete_dead_lettered(store: OutboxStore, letters: list[StoredRecord]) -> list[StoredRecord]:
    try:
        store.holds.delete_dead_lettered(*ids_and_times(letters))
    except RowsRemain as error:  # marks go on all the same: only dead letters wait
        raise StoreUnavailable(str(error)) from error
    return letters
