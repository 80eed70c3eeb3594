"""Doubles of what both deliveries share: the settled floor, holds, and the election."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from outbox_core.election.config import NeliConfig
from outbox_core.election.protocol import Ownership, State
from outbox_core.events import LeaderAcquired
from outbox_core.harvest.failures.holds import HoldCache
from outbox_core.harvest.watermark import LowWatermark, ScanPlan
from outbox_core.stores.interface import HoldSet, OpenWriter, RowQuery, SequenceSnapshot, StoredRecord
from tests.simulation.postgres import Store, _Place, holds_of

_original_take_in = LowWatermark._take_in
_original_select = Store._select
_original_mark = Store.mark
_original_scan = Store.scan
_original_snapshot = Store.snapshot
_original_lead = Ownership._lead


# -- the settled floor


def settled_at_once(self: LowWatermark, evidence: Any) -> None:
    """Believe S although writers are open."""
    _original_take_in(self, replace(evidence, sight=evidence.sight._replace(writers=frozenset())))


def writers_read_first(self: Store) -> SequenceSnapshot:
    """Read the open writers, and then S."""
    writers = self._statement(lambda: frozenset(self._database.writers))
    return _original_snapshot(self)._replace(writers=writers)


class _LateEvidence:
    described: Sequence[OpenWriter] = ()
    sight: SequenceSnapshot


def gather_later(self: ScanPlan, store: Any) -> _LateEvidence | None:
    """Have the evidence read after the mark or scan, not before it."""
    if not self.gathers:
        return None
    store.late_evidence = _LateEvidence()
    return store.late_evidence


def mark_then_gather(self: Store, leader_id: Any, query: RowQuery) -> Any:
    """Mark, and read the evidence."""
    batch = _original_mark(self, leader_id, query)
    _gather(self)
    return batch


def scan_then_gather(self: Store, query: RowQuery) -> Sequence[StoredRecord]:
    """Scan, and read the evidence."""
    records = _original_scan(self, query)
    _gather(self)
    return records


def _gather(store: Any) -> None:
    late = getattr(store, "late_evidence", None)
    if late is not None:
        late.sight = store.snapshot()
        store.late_evidence = None


def readmit_nothing(self: LowWatermark, again: set[object]) -> None:
    """Leave the floor where it is when an exclusion ends."""
    for item in again:
        del self._left_out[item]


def keep_the_floor(self: LowWatermark, reason: str) -> None:
    """Leave the floor where it is when all rows leave our hands."""
    del reason
    self._resets += 1


def note_nothing(self: LowWatermark, records: Any) -> None:
    """Leave the floor where it is when some rows leave our hands."""
    del self, records


def believe_the_place(self: Store, query: RowQuery, is_wanted: Any) -> Any:
    """Use a floor that was found on another connection, or before a TRUNCATE."""
    floor = query.after
    if floor.place is not None:
        here = _Place(self._connection, self._database.incarnation)
        self._database.last_id, last_id = max(self._database.last_id, floor.id), self._database.last_id
        try:
            return _original_select(self, query._replace(after=floor._replace(place=here)), is_wanted)
        finally:
            self._database.last_id = last_id
    return _original_select(self, query, is_wanted)


def believe_all_evidence(self: LowWatermark, evidence: Any) -> None:
    """Go on with S and the floor on another connection, or after a TRUNCATE."""
    self._last = evidence.sight if self._last is None else self._last
    _original_take_in(self, replace(evidence, sight=evidence.sight._replace(place=self._last.place)))


# -- holds


def covers_nothing(self: HoldSet, record: StoredRecord) -> bool:
    """Take no record for held."""
    del self, record
    return False


def current_holds(self: HoldCache, store: Any, records: Sequence[StoredRecord] = ()) -> HoldSet:
    """Return the holds as they were read once."""
    del records
    if not self.is_known:
        self.read(store)
    return self.current


def select_by_present_holds(self: Store, query: RowQuery, is_wanted: Any) -> Any:
    """Leave out what is held now, and not what an earlier statement has read."""
    return _original_select(self, query._replace(holds=holds_of(self._database.holds)), is_wanted)


# -- the election


def never_expires(self: Ownership, now: float) -> None:
    """Prolong a lease that has run out."""
    del now
    if self.leadership is not None:
        self.leadership = self.leadership.renewed(self.leadership.deadline, 3600.0)


def lead_from_now(self: Ownership, sent_at: float, now: float) -> LeaderAcquired | None:
    """Count the lease from the heartbeat's return."""
    del sent_at
    return _original_lead(self, now, now)


def obey_no_claim(self: Ownership, offset: int, claim: Any, now: float) -> None:
    """Look at no claim but the own first one."""
    del now
    if self.state is State.CLAIMING and claim.id == self._claim.id:
        self._term = offset
        self._become(State.CANDIDATE)


def short_session(self: NeliConfig) -> Any:
    """Have the coordinator elect a successor while the lease of one that was cut off still runs."""
    return self.heartbeat_timeout / 2


def hand_over_at_once(self: Any) -> None:
    """Let the successor lead while the term has not finished."""
    with self._term_changed:
        self._announced = None
        if self._term is not None:
            self._term.stop()
