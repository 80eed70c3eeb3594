"""The driver's part of a batch: which ids each shard reads. Its work does not grow with the number of rows.

A batch lasts for some seconds, however many rows there are; each shard gets as far as it can, and the next batch begins
there. Two kinds of ranges are handed out:

- **settled** ones: up to an id S that was the last one drawn when every transaction that had written then had ended. No
  row appears there any more, so a task reads on from its last row, and ahead of its transactions.
- if all of those are done, **open** ones: from the last settled position on. Rows may still appear anywhere in them, so
  a task reads from the beginning of the range again and again, each time after it has purged what it published. A
  transaction that stays open, or a table whose ids prove nothing, costs speed and keeps no row back.

The position of a shard is void, and it begins at the head again, if holds, connection, table or sequence are others
than before. Now and then the driver looks at the head: a client that writes ids which it did not draw is noticed so.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

from outbox_core.config import HarvestConfig
from outbox_core.monitoring.publication import PublicationCounts
from outbox_core.stores.interface import NO_FLOOR, NO_HOLDS, HoldSet, RowQuery, StoredRecord
from outbox_spark.config.models import MOST_ROWS
from outbox_spark.relay.shard_store import Place, ShardRange, ShardStore, Sight

_log = logging.getLogger(__name__)

SLICE_SECONDS = 10.0
_PATIENCE_SECONDS = 90.0
_FROM_HEAD_SECONDS = 60.0
_FROM_HEAD_REST = 30  # times as long as it took: there may be millions of held rows
_IDLE_SECONDS = 5.0

Transform = Callable[[StoredRecord], StoredRecord | None]


@dataclass(frozen=True, kw_only=True)
class BatchPlan:
    """The facts that all tasks of a batch share; pickled to the workers."""

    harvest: HarvestConfig = field(repr=False)
    outbox: str = ""  # its identity, `<database>.<schema>.<table>`
    server_id: str = ""  # of the database
    term: int = 0  # number of the claim under which the batch is published
    ranges: tuple[ShardRange, ...] = ()  # one for each shard
    holds: HoldSet = field(default=NO_HOLDS, repr=False)  # what is left out
    rows: int = MOST_ROWS  # at most in a transaction, however quick it is
    seconds: float = SLICE_SECONDS  # after which a shard begins no other transaction
    patience: float = _PATIENCE_SECONDS  # for which it endures outages
    transform: Transform | None = None  # row -> record to publish, or None for none
    title: str = ""  # in Spark's UI


@dataclass(frozen=True, slots=True)
class ShardOutcome:
    """What a shard did in a batch.

    No row of the shard up to the id `reached` is left, but for those that the plan's holds keep back.
    """

    number: int
    published: int = 0
    settled: int = 0  # rows that had been published before, and were deleted
    reached: int = NO_FLOOR.id
    rows: int = 0  # at most in a transaction, as proved right; 0 for none
    seconds: float = 0.0  # the task's own time
    error: str = ""  # the name of the error that ended it
    message: str = ""
    counts: PublicationCounts = field(default_factory=PublicationCounts, compare=False, repr=False)


class SettledIds:
    """The highest id that is known to be settled (`outbox_core.harvest.watermark` has the proof)."""

    def __init__(self) -> None:
        self.id = NO_FLOOR.id
        self.place: Place | None = None
        self._connection: object = None
        self._pending = NO_FLOOR.id
        self._writers: frozenset[str] = frozenset()

    def see(self, sight: Sight) -> bool:
        """Take in a sight; tell whether earlier positions still hold (rule 8)."""
        is_same_place = sight.place == self.place and sight.connection is self._connection
        holds = sight.place is not None and is_same_place and sight.last_id >= self.id
        if not holds:
            self.id, self.place, self._writers = NO_FLOOR.id, sight.place, frozenset()
            self._pending, self._connection = NO_FLOOR.id, sight.connection
        self._writers &= sight.writers
        if not self._writers:
            self.id = max(self.id, self._pending)
            self._pending, self._writers = sight.last_id, sight.writers
            if not sight.writers:
                self.id = sight.last_id
        return holds


class Planner:
    """The positions of the shards of one term, and the holds that they were reached with. Used by one thread."""

    def __init__(self, store: ShardStore, shards: int, *, up_to: int | None = None) -> None:
        self._store = store
        self._shards = shards
        self._up_to = up_to  # of a run that publishes what is there
        self._settled = SettledIds()
        self._positions = [NO_FLOOR.id] * shards
        self._rows: list[int | None] = [None] * shards  # of a transaction
        self.holds: HoldSet = NO_HOLDS  # of the last plan
        self._left_out: frozenset[Hashable] = frozenset()
        self._from_head_at = float("-inf")
        self._is_idle = False
        self._off = ""

    def next(self) -> tuple[ShardRange, ...]:
        """Return what each shard reads in the next batch; nothing if no row is there. Raises StoreUnavailable."""
        self._see_holds()
        self._see_sequence()
        lowest = min(self._positions)
        found = self._first_above(lowest)
        self._is_idle = found is None
        settled = self._settled.id if self._up_to is None else min(self._settled.id, self._up_to)
        # One below is found if the database does not recognise the place.
        is_settled = found is not None and lowest < found <= settled
        if not is_settled:  # none is left up to there, but for held ones, which need not be walked through again
            self._positions = [max(position, settled) for position in self._positions]
        if found is None:
            return ()
        place = self._settled.place
        return tuple(
            ShardRange(number, self._shards, position, settled if is_settled else self._up_to, is_settled, place, rows)
            for number, (position, rows) in enumerate(zip(self._positions, self._rows, strict=True))
        )

    def finished(self, outcome: ShardOutcome) -> None:
        """Take in a shard's outcome. A position only rises: what it was proven for is looked at by the next plan."""
        self._positions[outcome.number] = max(self._positions[outcome.number], outcome.reached)
        self._rows[outcome.number] = outcome.rows or None

    def _see_holds(self) -> None:
        holds = self._store.holds.read() or NO_HOLDS
        if holds.items != self._left_out:
            self._begin_at_head()
        # Without what cannot be pickled, and no task needs.
        self.holds, self._left_out = HoldSet(holds.topics, holds.lanes, holds.ids, {}, {}), holds.items

    def _see_sequence(self) -> None:
        sight = self._store.sight()
        if sight.unusable or self._off:
            if not self._off:
                self._turn_off(sight.unusable)
            return
        if not self._settled.see(sight):
            self._begin_at_head()
        elif time.monotonic() - self._from_head_at >= (_IDLE_SECONDS if self._is_idle else _FROM_HEAD_SECONDS):
            lowest, began = min(self._positions), time.monotonic()
            found = self._first_above(NO_FLOOR.id)
            if found is not None and found <= lowest:
                self._turn_off(
                    f"record {found} appeared below {lowest}, when no open transaction could have had its id"
                )
            self._from_head_at = time.monotonic() + _FROM_HEAD_REST * (time.monotonic() - began)

    def _turn_off(self, reason: str) -> None:
        self._off = reason
        self._settled = SettledIds()
        self._begin_at_head()
        _log.warning("ids are not settled until the relay leads anew: %s. Nothing is lost; it is slower", reason)

    def _begin_at_head(self) -> None:
        self._positions = [NO_FLOOR.id] * self._shards
        self._from_head_at = time.monotonic()

    def _first_above(self, position: int) -> int | None:
        """Return the lowest id above a position that may be published; None if there is none."""
        everything = ShardRange(0, 1, position, self._up_to, place=self._settled.place)
        rows = self._store.scan_shard(RowQuery(1, holds=self.holds), everything)
        return rows[0].id if rows else None
