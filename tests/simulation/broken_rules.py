"""Rules of the product, each broken on purpose: a simulation that does not notice proves nothing.

Each rule has the mode in which it counts, and a double that takes the place of the code that keeps it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple
from unittest.mock import patch

from outbox_core.election import protocol
from outbox_core.harvest.at_least_once import loop
from outbox_core.harvest.at_least_once.lanes import Lanes
from outbox_core.harvest.exactly_once import term
from outbox_core.harvest.recovery import Recovery
from outbox_core.harvest.watermark import LowWatermark
from outbox_core.kafka import identity, transactions
from outbox_core.kafka.tracking import Ledger
from outbox_core.kafka.transactions import Committed, Ended, TransactionalProducer
from outbox_core.stores.interface import MarkedBatch, RowQuery, StoredRecord, bytes_of, row_id, size_of
from tests.simulation.postgres import Store

_original_commit = TransactionalProducer.commit
_original_mark = Store.mark
_original_end = TransactionalProducer._end
_original_select = Store._select
_original_delete = Store._delete


class Rule(NamedTuple):
    """A rule that can be broken: the mode, and what to put in the place of which attribute of which object.

    `also` is a second line of defence, which alone would do as well.
    """

    mode: str
    place: object
    name: str
    double: Any
    also: tuple[object, str, Any] | None = None


def _commit_believed(self: TransactionalProducer, give_up: Callable[[], bool] = transactions.never) -> object:
    outcome = _original_commit(self, give_up)
    return Committed() if isinstance(outcome, Ended) else outcome


def _no_ledger(self: identity.TransactionalIdentity, producer: Any, give_up: Any) -> object:
    ledger = _original_ledger(self, producer, give_up)
    return ledger if isinstance(ledger, Ended) else Ledger(offset=ledger.offset)


_original_ledger = identity.TransactionalIdentity.ledger


def _end_untimed(self: Any, call: Any, give_up: Any) -> object:
    before = self._must_replace
    try:
        return _original_end(self, call, give_up)
    finally:
        self._must_replace = before


def _scan_everything(limit: int, most: int, floor: Any, lanes: Any, _: Any, topics: Any, holds: Any) -> object:
    return RowQuery(limit, most, floor, lanes, (), topics, holds)


class _NoLanes(Lanes):
    """All records are ready at once."""

    def admit(self, records: Sequence[StoredRecord]) -> None:
        self._held.update({record.id: size_of(record) for record in records})
        self._held_bytes += bytes_of(records)
        self._ready.extend(records)

    def purged(self, records: Sequence[StoredRecord]) -> None:
        self._forget(records)

    def release(self, record: StoredRecord) -> list[StoredRecord]:
        self._forget([record])
        return [record]

    def release_all(self) -> list[StoredRecord]:
        dropped = list(self._ready)
        self._ready.clear()
        self._forget(dropped)
        return dropped


def _mark_believed(self: Store, leader_id: Any, query: Any) -> MarkedBatch:
    batch = _original_mark(self, leader_id, query)
    return MarkedBatch(len(batch.records), batch.records)


def _delete_by_id(self: Store, ids: Any, times: Any, is_wanted: Any) -> int:
    del times
    rows = self._database.rows
    return _original_delete(
        self, ids, [rows[each].record.create_time if each in rows else 0 for each in ids], is_wanted
    )


def _select_without_ids(self: Store, query: RowQuery, is_wanted: Any) -> Any:
    rows = self._database.rows
    without = [row_id(rows[row.id].record) for row in query.without_rows if row.id in rows]
    return _original_select(self, query._replace(without_rows=without), is_wanted)


def _settled_at_once(self: Any, evidence: Any) -> None:
    _original_take_in(self, replace(evidence, sight=evidence.sight._replace(writers=frozenset())))


_original_take_in = LowWatermark._take_in


def _never_expires(self: Any, now: float) -> None:
    del now
    if self.leadership is not None:
        self.leadership = self.leadership.renewed(self.leadership.deadline, 3600.0)


RULES = {
    "an unknown outcome is no success": Rule("exactly-once", TransactionalProducer, "commit", _commit_believed),
    "a term reads the last manifest": Rule("exactly-once", identity.TransactionalIdentity, "ledger", _no_ledger),
    "what a predecessor published is deleted": Rule("exactly-once", Recovery, "_delete", lambda *_: True),
    "no transaction in an epoch with a late EndTxn": Rule(
        "exactly-once",
        TransactionalProducer,
        "_end",
        _end_untimed,
        also=(Recovery, "_settle_torn", lambda *_: None),
    ),
    "scans leave out what is in flight": Rule("exactly-once", term, "RowQuery", _scan_everything),
    "a delete matches the create time": Rule("", Store, "_delete", _delete_by_id),
    "scans leave out rows, not ids": Rule("exactly-once", Store, "_select", _select_without_ids),
    "one record of a key is under way": Rule("at-least-once", loop, "Lanes", _NoLanes),
    "selected is compared with updated": Rule("at-least-once", Store, "mark", _mark_believed),
    "the floor waits for open writers": Rule("", LowWatermark, "_take_in", _settled_at_once),
    "no lease begins while an earlier one may run": Rule("", protocol.Predecessor, "gone_at", float("-inf")),
    "a lease ends": Rule("", protocol.Ownership, "expire", _never_expires),
    "a send fits into the lease": Rule("at-least-once", loop.AtLeastOnce, "_closes_at", lambda *_, **__: float("inf")),
}


@contextmanager
def broken(name: str) -> Iterator[None]:
    """Break a rule for as long as the context lasts; '' breaks none."""
    if not name:
        yield
        return
    rule = RULES[name]
    with ExitStack() as patches:
        patches.enter_context(patch.object(rule.place, rule.name, rule.double))
        if rule.also is not None:
            patches.enter_context(patch.object(*rule.also))
        yield
