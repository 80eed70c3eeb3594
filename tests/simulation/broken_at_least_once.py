"""Doubles of at-least-once delivery's code, each of which breaks a rule of it on purpose."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from outbox_core.errors import StoreUnavailable
from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.at_least_once.loop import AtLeastOnce
from outbox_core.harvest.at_least_once.publisher import Publisher
from outbox_core.harvest.store_calls import StoreCall
from outbox_core.stores.interface import MarkedBatch, MarkedRows, StoredRecord, bytes_of, sizes_of
from tests.simulation.postgres import Row, Store

_original_succeed = AtLeastOnce._succeed
_original_mark = Store.mark
_original_purge = Store.purge
_original_select = Store._select
_original_result = StoreCall.result


class NoLanes(Lanes):
    """Lanes in which all records are ready at once."""

    def _admit(self, records: Sequence[StoredRecord]) -> None:
        self._held.update(zip((record.id for record in records), sizes_of(records), strict=True))
        self.held_bytes += bytes_of(records)
        self._ready.extend(records)

    def purged(self, records: Sequence[StoredRecord]) -> None:
        self._forget(records)


class EarlyLanes(Lanes):
    """Lanes whose records may be told to be purged twice..."""

    def purged(self, records: Sequence[StoredRecord]) -> None:
        super().purged([record for record in records if record.id in self._held])


def succeed_and_move_on(self: AtLeastOnce, delivered: list[StoredRecord]) -> None:
    """...so that they move on with the acknowledgement, before the purge."""
    _original_succeed(self, delivered)
    self._lanes.purged(delivered)


def mark_believed(self: Store, leader_id: Any, query: Any) -> MarkedBatch:
    """Mark, and do not tell how many rows were selected and not updated."""
    batch = _original_mark(self, leader_id, query)
    return MarkedBatch(len(batch.records), batch.records)


def mark_unmarked_alone(self: Store, query: Any, is_wanted: Any) -> list[Row]:
    """Leave the rows of a dead leader to it."""
    return _original_select(self, query, lambda row: is_wanted(row) and row.leader is None)


def purge_believed(self: Store, leader_id: Any, ids: Any, create_times: Any) -> int:
    """Take a purge that deleted fewer rows than asked for a whole one."""
    _original_purge(self, leader_id, ids, create_times)
    return len(ids)


def purge_of_anybody(self: Store, leader_id: Any, ids: Any, create_times: Any) -> int:
    """Purge rows whoever has marked them."""
    del leader_id
    return self.delete_published(ids, create_times)


def never_in_doubt(self: StoreCall[Any]) -> Any:
    """Take a statement whose connection broke for one that had no effect."""
    try:
        return _original_result(self)
    except StoreUnavailable as error:
        raise StoreUnavailable(str(error), in_doubt=False) from error


def find_nothing_lost(self: Store, *_: Any) -> MarkedRows:
    """Look for no rows that carry our mark."""
    del self
    return MarkedRows(0, 0, 0)


def finish_at_once(self: AtLeastOnce) -> None:
    """End a leadership without waiting for the records in flight."""
    del self


def knows_what_is_held(lanes: Any, records: Any) -> bool:
    """Know what is in the lanes, and not what has left them since the mark began."""
    return any(record.id in lanes._held for record in records)


def renew_always(self: Publisher) -> None:
    """Begin each leadership with a new producer, whose epochs keep no earlier record out."""
    self._fatal = False
    self.renew(self._limits)
