"""The rows of a shard: read, ahead where that is safe, purged and held. No Kafka.

All statements of a shard run in one thread on one connection, in their order: a scan that was asked for after a purge
sees the table without its rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from outbox_core.errors import OutboxTableError
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.tracking import Ledger
from outbox_core.kafka.transactions import GiveUp
from outbox_core.stores.interface import (
    NO_FLOOR,
    NO_HOLDS,
    HoldSet,
    NewHold,
    RowQuery,
    StoredRecord,
    ids_and_times,
    may_hold,
)
from outbox_spark.relay.fencing import delete_published
from outbox_spark.relay.plan import BatchPlan
from outbox_spark.relay.shard_store import ShardRange, ShardStore

T = TypeVar("T")

_QUICK = 1 / 4  # records may take two thirds
MOST_BYTES = 64 * 2**20  # no row is added to a transaction of that much: a task has two of them in memory


class ShardRows:
    """The rows of one range, for one task. Used by one thread; its own has the connection."""

    def __init__(self, plan: BatchPlan, wanted: ShardRange) -> None:
        self.settled = 0  # rows that were published before, and are deleted
        self.most = min(wanted.rows or plan.rows, plan.rows)  # in a transaction; it follows the time that they take
        self._plan = plan
        self._range = wanted
        self._holds = plan.holds
        self._holds_more = False  # than the plan does: then no position is told
        self._store = ShardStore.of(plan.harvest)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outbox-shard")
        self._is_exhausted = False  # the last scan found no row
        self._after = wanted.after  # the purge of all rows up to there is committed, in a settled range
        self._scan: Future[Sequence[StoredRecord]] | None = None  # ahead
        self._purge: tuple[Future[int], int] | None = None  # under way, and its last row

    @property
    def reached(self) -> int:
        """The id up to which no row of the shard is left that the plan does not hold."""
        if self._holds_more or not self._range.is_settled:
            return self._range.after
        return self._range.up_to if self._is_exhausted and self._range.up_to is not None else self._after

    def next(self) -> Sequence[StoredRecord]:
        """Return the next rows, none if there are no more. Raises StoreUnavailable, or what became of the purge."""
        if self._range.is_settled:
            rows = (self._scan or self._scan_from(self._last)).result()
            self._scan = self._scan_from(rows[-1].id) if rows else None
        else:
            self.join()  # or its rows would come again
            rows = self._scan_from(self._range.after).result()
        self._is_exhausted = not rows
        return rows

    @property
    def _last(self) -> int:
        return self._after if self._purge is None else self._purge[1]

    def _scan_from(self, after: int) -> Future[Sequence[StoredRecord]]:
        wanted = replace(self._range, after=after)
        query = RowQuery(self.most, MOST_BYTES, holds=self._holds)
        return self._thread.submit(lambda: self._store.scan_shard(query, wanted))

    def failed(self, count: int) -> None:
        """Read fewer rows at once, after a transaction of `count` failed: its records may not have come in time."""
        self.most = max(1, count // 2)

    def succeeded(self, share: float) -> None:
        """Read more rows at once, if a transaction took so small a share of its time-out that twice as many fit."""
        if share < _QUICK:
            self.most = min(2 * self.most, self._plan.rows)

    def purge(self, rows: Sequence[StoredRecord]) -> None:
        """Begin to delete rows that are published."""
        self.join()
        if not rows:
            return
        ids, create_times = ids_and_times(rows)
        purge = self._thread.submit(lambda: self._store.delete_published(ids, create_times))
        self._purge = purge, rows[-1].id

    def join(self) -> None:
        """Wait until the last purge is committed. Raises StoreUnavailable, or RowsRemain."""
        if self._purge is not None:
            (purge, last), self._purge = self._purge, None
            purge.result()
            self._after = last

    def begin_again(self, *, trusts: bool = True) -> None:
        """Forget what was read ahead, and begin at the head if the connection that proved the range is gone."""
        self._scan = None
        if not trusts:
            self._purge = None  # what it was to delete is in the manifest
            self._range = replace(self._range, after=NO_FLOOR.id, is_settled=False, place=None)

    def look_around(self) -> None:
        """See whether this is the driver's server, and what is held by now. Raises OutboxTableError."""
        self._ask(self._refuse_other_server)
        self._ask(self._see_holds)

    def _refuse_other_server(self, store: ShardStore) -> None:
        found, wanted = store.server_id(), self._plan.server_id
        if found and wanted and found != wanted:
            raise OutboxTableError(
                f"a worker's database server has the system identifier {found}, the driver's has {wanted}: dataSource "
                "must lead to the same server everywhere; name its host"
            )

    def _see_holds(self, store: ShardStore) -> None:
        # What was released since the plan stays left out: the position may be behind it already.
        held, known = store.holds.read() or NO_HOLDS, self._holds
        if not held.items <= known.items:
            self._holds = HoldSet(held.topics | known.topics, held.lanes | known.lanes, held.ids | known.ids, {}, {})
            self._holds_more = True

    def delete_published(self, ledger: Ledger, identity: TransactionalIdentity, give_up: GiveUp) -> None:
        """Delete the rows that the last transactions have published."""
        self.settled += self._ask(lambda store: delete_published(identity, ledger, store, give_up))

    def may_hold(self) -> bool:
        """Tell whether there is a table of holds that may be written."""
        return self._ask(lambda store: may_hold(store.holds))

    def hold(self, refused: Sequence[tuple[StoredRecord, str]]) -> None:
        """Hold records that no producer takes, with their keys, from the next scan on."""
        holds = [NewHold(record.topic, record.key, record.id, "refused", error) for record, error in refused]
        self._ask(lambda store: store.holds.add(holds))
        self._ask(self._see_holds)

    def _ask(self, question: Callable[[ShardStore], T]) -> T:
        return self._thread.submit(question, self._store).result()

    def close(self) -> None:
        """Finish what is under way, and close the connection."""
        self._thread.submit(self._store.close)
        self._thread.shutdown(wait=True)
