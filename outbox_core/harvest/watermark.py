"""The settled floor: an id at which marks and scans can begin, although transactions commit late.

Deleted rows stay in the index until vacuum removes them, and vacuum waits for the oldest snapshot. A mark from the head
wades through all of them; one from the last id seen would lose every row that is committed after a higher id. So the
floor is *proven*, from three statements (autocommit, READ COMMITTED), in this order on one connection to the primary:

1. **S**, the last id drawn from the sequence (`SequenceSnapshot.last_id`).
2. **V**, the transactions that hold a writer's lock on the table (`SequenceSnapshot.writers`), read again until none of
   V is left. Then S is *settled*: every id <= S is visible to statements that begin now, or never will be.
3. A mark or scan that *begins* after that.

S is settled because

- an INSERT locks the table *before* it draws its id, until its transaction ends. (A savepoint rolled back gives up the
  lock, and the row.) A transaction that drew an id <= S had its lock before V was read: it is in V, or had ended;
- a commit becomes visible *before* its locks are released. A prepared transaction keeps them, and its name in V,
  without a process; hence names (virtualtransaction), not pids;
- ids ascend: no later INSERT draws an id <= S.

The floor follows. A mark or scan returns the lowest ids above its floor, up to a limit, of rows that are not in our
hands (marked by us; in flight). One that begins after S was settled, from a floor that holds, has returned every
visible row up to its last one, m; if it returned none, there is none. All of those are in our hands now, and no others
will appear up to S. So min(S, m), or S, is a floor:

    **no row up to the floor, visible now or ever, is unseen: each is gone, in our hands, or was left out on purpose.**

The floor is void when one of its premises is:

- *all rows leave our hands* (a new leader ID, a new term): `reset`. The next statement begins at the head; S stays
  settled.
- *an exclusion ends* (a full lane, a backoff, a hold): its rows may wait below the floor, but none below the floor at
  which it began. Back to that one (`_readmit`).
- *some rows leave our hands other than by their purge* (a failed delivery, an abort): `went_back`, as if their keys had
  been left out from there on, or from the floor if that is lower, as others of them may still appear above it. What
  waits for a destination is tried again and again, and must not cost a look at the head each time. Where marks must
  be cleared first, marks leave these keys out until they are (`at_least_once.lanes`).
- *another place*: another connection, another table of that name, TRUNCATE ... RESTART IDENTITY, a sequence that was
  set back to below the floor. The statement that uses the floor compares `Floor.place`; here S is forgotten too.

It is off, and the log says why, if the ids of the table prove nothing: the sequence caches (a session draws ids ahead
of its locks), descends or cycles; the table is partitioned or inherited from (an INSERT into a part locks only the
part); ids come from elsewhere. A client that writes ids which it did not draw in its INSERT cannot be seen from here.
So every 5 s while idle, else every minute, or less often, a statement begins at the head. A row that it finds up to
the floor refutes the premise: it is published late, and the floor stays off. An open writer only stops it; a log tells.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from operator import attrgetter

from outbox_core.errors import must
from outbox_core.kafka.messages import DeadLetter
from outbox_core.metrics import FloorGauge, HarvestMetrics
from outbox_core.stores.interface import (
    NO_FLOOR,
    Floor,
    OpenWriter,
    OutboxStore,
    SequenceSnapshot,
    StoredRecord,
    lane_or_row,
)

_log = logging.getLogger(__name__)

_id_of = attrgetter("id")  # of a floor as of a record
# Evidence costs two small statements, so it is due after this many new rows, or this long after the last new row.
_GATHER_AFTER_ROWS = 1_000
_GATHER_AFTER_SECONDS = 1.0
_LONGEST_GATHER_PAUSE_SECONDS = 5.0
_FROM_HEAD_IDLE_SECONDS = 5.0
_FROM_HEAD_BUSY_SECONDS = 60.0
# Where the head is full of dead rows, going through them all takes seconds in which nothing is published. But what took
# long may have waited for a lock, of a migration perhaps: so rests grow step by step, and shrink at once.
_FROM_HEAD_REST, _LONGEST_REST_SECONDS, _REST_GROWTH = 200, 3600.0, 2
_WARN_AFTER_SECONDS = 10.0
_WARN_AGAIN_FACTOR = 6
_IDS_COME_BACK = (  # by a failover that lost commits, a restored backup, or TRUNCATE ... RESTART IDENTITY
    "the sequence of the ids was set back from %d to %d: consumers that know records by their outbox-id take new ones "
    "for repeats. Set the sequence to a higher id than any before (setval)"
)


@dataclass(frozen=True, slots=True)
class Evidence:
    """S and V, read before a mark or scan, with details of writers that have been open for long."""

    sight: SequenceSnapshot
    described: Sequence[OpenWriter] = ()


@dataclass(frozen=True, slots=True)
class ScanPlan:
    """The plan of one mark or scan: made by `LowWatermark.plan`, handed back to `LowWatermark.scanned`."""

    floor: Floor
    known_floor: Floor
    gathers: bool
    describes: frozenset[str]
    resets: int

    def gather(self, store: OutboxStore) -> Evidence | None:
        """Read S and V if that is due: on the marker's thread, before the mark or scan, on its connection."""
        if not self.gathers:
            return None
        sight = store.sequence.snapshot()
        standing = self.describes & sight.writers
        return Evidence(sight, store.sequence.describe(standing) if standing else ())


@dataclass(slots=True)
class _Writer:
    """A writer that S waits for, since when, and the wait after which the log names it (again), in seconds."""

    since: float
    warn_after: float


@dataclass(slots=True)
class _Pace:
    gathered_at: float = 0.0
    rows_since: int = 0  # rows since then
    is_idle: bool = False
    from_head_at: float = 0.0
    from_head_rest: float = 0.0

    def evidence_is_due(self, time: float, oldest_wait: float) -> bool:
        pause = min(_LONGEST_GATHER_PAUSE_SECONDS, max(_GATHER_AFTER_SECONDS, oldest_wait / 5))
        return self.rows_since >= _GATHER_AFTER_ROWS or time - self.gathered_at >= pause

    def from_head_is_due(self, time: float) -> bool:
        pause = _FROM_HEAD_IDLE_SECONDS if self.is_idle else _FROM_HEAD_BUSY_SECONDS
        return time - self.from_head_at >= max(pause, self.from_head_rest)

    def looked_from_head(self, time: float, took: float) -> None:
        rest = min(_LONGEST_REST_SECONDS, took * _FROM_HEAD_REST)
        self.from_head_at = time
        self.from_head_rest = min(rest, _REST_GROWTH * max(self.from_head_rest, _FROM_HEAD_IDLE_SECONDS))


class LowWatermark:
    """The settled floor and its proof. It outlives leaderships, and belongs to the harvest thread."""

    def __init__(self, metrics: HarvestMetrics, clock: Callable[[], float]) -> None:
        self.off = ""
        self.floor = NO_FLOOR
        self._metrics = metrics
        self._clock = clock
        self._resets = 0
        self._left_out: dict[object, Floor] = {}  # with the floor above which its rows may wait
        self._last: SequenceSnapshot | None = None
        self._settled = NO_FLOOR.id
        self._pending: int | None = None  # S that is not yet settled, and its V:
        self._writers: dict[str, _Writer] = {}
        self._pace = _Pace()
        self._refuting: tuple[int, Floor] | None = None  # a row that was found, and the floor it was found below

    # -- for the harvest

    def reset(self, reason: str) -> None:
        """Begin at the head again: rows have left our hands."""
        if self.floor.place is not None:
            _log.debug("the settled floor %d is void: %s", self.floor.id, reason)
        self._resets += 1
        self.floor = NO_FLOOR
        self._left_out = dict.fromkeys(self._left_out, NO_FLOOR)
        self._show()

    def went_back(self, records: Iterable[StoredRecord]) -> None:
        """Note rows that wait in the table again, until the next plan says whether their keys are left out."""
        floor = self.floor  # above which others of these keys may appear, although these are higher
        for record in records:
            if isinstance(record, DeadLetter):
                continue  # its row is held
            item = lane_or_row(record)
            if all(self._left_out.get(each, record).id >= record.id for each in (item, record.topic)):
                below = Floor(record.id - 1, floor.place)
                self._left_out[item] = min(floor, below, key=_id_of) if below.id > NO_FLOOR.id else NO_FLOOR

    def plan(self, left_out: frozenset[object]) -> ScanPlan:
        """Plan a mark or scan that leaves out the given keys, ids, topics and holds."""
        if self._left_out.keys() != left_out:
            self._readmit(self._left_out.keys() - left_out)
            self._left_out.update(dict.fromkeys(left_out - self._left_out.keys(), self.floor))
        time = self._clock()
        floor = NO_FLOOR if self._pace.from_head_is_due(time) else self.floor
        old = frozenset(name for name, writer in self._writers.items() if time - writer.since >= writer.warn_after)
        return ScanPlan(floor, self.floor, self._evidence_is_due(time), old, self._resets)

    def scanned(self, plan: ScanPlan, evidence: Evidence | None, records: Sequence[StoredRecord], took: float) -> None:
        """Take in a mark or scan whose rows, by ascending id, are in our hands now; `took` counts seconds."""
        if evidence is not None and not self.off and plan.resets == self._resets:
            self._take_in(evidence)
        if self.off or plan.resets != self._resets:
            return
        self._pace.is_idle = not records
        self._pace.rows_since += len(records)
        if plan.floor is NO_FLOOR:
            self._pace.looked_from_head(self._clock(), took)
        if records and records[0].id <= plan.known_floor.id and lane_or_row(records[0]) not in self._left_out:
            # Or the place has changed since: the next evidence will tell.
            self._refuting = records[0].id, plan.known_floor
            self.reset("a row was found below it")
        elif plan.floor.id <= self.floor.id:
            # A batch below its limit may have been cut short by its size: only an empty one says there is no more.
            self._rise_to(min(self._settled, records[-1].id) if records else self._settled)
        floor, settled = self.floor.id, self._settled
        must(floor <= settled, "the floor must not be above the settled id; %d is above %d", floor, settled)
        self._show()

    # -- when to gather evidence

    def _evidence_is_due(self, time: float) -> bool:
        if self.off:
            return False
        if self._last is None or self._refuting is not None:
            return True
        if self._pending is None and not self._pace.rows_since:
            return False  # no row has come since: scans have nothing new to wade through
        return self._pace.evidence_is_due(time, self._oldest_wait(time))

    def _oldest_wait(self, time: float) -> float:
        return max((time - writer.since for writer in self._writers.values()), default=0.0)

    # -- S and V

    def _take_in(self, evidence: Evidence) -> None:
        sight, time = evidence.sight, self._clock()
        self._pace.gathered_at, self._pace.rows_since = time, 0
        if sight.unusable:
            self._turn_off(sight.unusable)
            return
        self._look_into_refutation(sight)
        if self.off:
            return
        if self._last is not None and (sight.place != self._last.place or sight.last_id < self._last.last_id):
            if sight.last_id < self._last.last_id:
                _log.warning(_IDS_COME_BACK, self._last.last_id, sight.last_id)
            self.reset("connection, table or sequence is another one")
            self._settled, self._pending, self._writers = NO_FLOOR.id, None, {}
        self._last = sight
        self._settle(sight, time)
        for writer in evidence.described:
            if writer.name in self._writers:
                self._warn_of(writer, time)

    def _settle(self, sight: SequenceSnapshot, time: float) -> None:
        """Settle S once the last writer of its V is gone; then these S and V take its place."""
        self._writers = {name: writer for name, writer in self._writers.items() if name in sight.writers}
        if self._pending is not None and not self._writers:
            self._settled, self._pending = self._pending, None
        if self._pending is None and sight.writers:
            self._pending = sight.last_id
            self._writers = {name: _Writer(time, _WARN_AFTER_SECONDS) for name in sight.writers}
        elif self._pending is None:
            self._settled = sight.last_id
        pending, settled = self._pending, self._settled
        must(pending is None or pending >= settled, "the settled id must not fall; %s follows %d", pending, settled)

    def _rise_to(self, reached: int) -> None:
        if self._last is not None and reached > self.floor.id:
            self.floor = Floor(reached, self._last.place)

    def _readmit(self, again: set[object]) -> None:
        before = self.floor  # no item's is higher
        for item in again:
            self.floor = min(self.floor, self._left_out.pop(item), key=_id_of)
        if self.floor is before:
            return
        # A row may be left out twice over, and have been passed by for the sake of the item that is let in now.
        for item, floor in self._left_out.items():
            self._left_out[item] = min(floor, self.floor, key=_id_of)

    # -- the premise refuted

    def _look_into_refutation(self, sight: SequenceSnapshot) -> None:
        if self._refuting is None:
            return
        (found, floor), self._refuting = self._refuting, None
        if sight.place == floor.place and sight.last_id >= floor.id:
            self._turn_off(
                f"record {found} appeared below {floor.id}, when no open transaction could have had its id: some "
                "client does not let its INSERT draw the id (it draws ids ahead, or writes ids of its own), the "
                "sequence was set back, or somebody changed the key or topic of a held record. Such records are found "
                "a minute late, or more, and their order is not kept"
            )

    def _turn_off(self, reason: str) -> None:
        _log.warning(
            "the settled floor is off until the harvester is restarted: %s. Nothing is lost; while old snapshots are "
            "open, harvesting gets slower the more is harvested",
            reason,
        )
        self.off = reason
        self.reset("it is off")

    # -- log and gauges

    def _warn_of(self, writer: OpenWriter, time: float) -> None:
        known = self._writers[writer.name]
        waited = time - known.since
        known.warn_after = waited * _WARN_AGAIN_FACTOR
        age = max(waited, writer.age_seconds)
        if writer.gid is not None:
            who = f"prepared transaction {writer.gid!r} (prepared {age:.0f} s ago)"
            cure = f"COMMIT PREPARED or ROLLBACK PREPARED '{writer.gid}'"
        elif writer.pid is not None:
            about = ", ".join(part for part in (writer.application, writer.state) if part)
            who = f"the transaction of pid {writer.pid} (open for {age:.0f} s{', ' if about else ''}{about})"
            cure = f"pg_terminate_backend({writer.pid})"
        else:
            return
        _log.warning(
            "%s has written to the outbox and keeps the settled floor from rising. Nothing is lost; harvesting gets "
            "slower the more is harvested meanwhile. If it was forgotten, end it: %s",
            who,
            cure,
        )

    def _show(self) -> None:
        drawn = self._last.last_id if self._last is not None else None
        oldest = self._oldest_wait(self._clock())
        distance = None if drawn is None or self.floor.place is None else max(0, drawn - self.floor.id)
        self._metrics.floor(FloorGauge(not self.off, distance, len(self._writers), oldest))
