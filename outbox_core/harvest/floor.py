"""The settled floor: an id up to which marks and scans need not look, although transactions commit late.

Deleted rows stay in the index until vacuum removes them, and vacuum may not while any old snapshot is open. A mark that
begins at the head of the table wades through all of them. One that began behind the last id it has seen would not, and
would lose every row that is committed later than a row with a higher id. So the floor is *proven*, from three
statements, each of its own (autocommit, READ COMMITTED), one after the other on one connection to the primary:

1. **S**, the last id that was drawn from the sequence (`Sight.last_id`).
2. **V**, the transactions that hold the lock of a writer on the table (`Sight.writers`), looked at again and again
   until none of V is left. Then S is *settled*.
3. A mark or scan that *begins* after that.

Why S is settled then: every id <= S is visible to statements that begin now, or never will be.

- An INSERT takes its lock on the table *before* it draws its id, and keeps it until its transaction has ended. (A
  savepoint that is rolled back gives the lock up, and the row with it.) Whoever drew an id <= S did so before S was
  read, hence had the lock before V was read. If its transaction was still open, it is in V; if not, it had ended.
- A transaction that commits becomes visible *before* it gives up its locks. One that is prepared keeps them, and its
  name in V, though it has no process any more; hence names (virtualtransaction), not pids.
- Ids are drawn one by one and upwards: no later INSERT gets an id <= S.

Why there is a floor then. A mark or scan returns the lowest ids above the floor it was given, up to a limit, of the
rows that are not in our hands (marked by us; in flight). Let it begin after S was settled, from a floor that holds. It
has returned every visible row up to its last one, m; if it returned none, there is none. All of those are in our hands
now, and by the above no others will appear up to S. So min(S, m), or S, is a floor:

    **no row up to the floor, visible now or ever, is unseen: each is gone, in our hands, or was left out on purpose.**

The floor is void, and everything is looked at from the head again, when its premises are:

- *rows leave our hands other than by their purge*: a new leader ID, a reset, an abort, a new term: `reset`. S stays
  settled, as nothing of that changes which ids appear;
- *what was left out on purpose is let in again* (a full lane, a rest, a hold): rows of it may wait below the floor, but
  none below the floor that there was when it was first left out. Back to that one (`_let_in`);
- *another place*: another connection (perhaps to another server), another table of that name, TRUNCATE ... RESTART
  IDENTITY, a sequence that was set back to below the floor. The store compares that in the very statement that uses
  the floor (`Floor.place`), and here S is forgotten too.

It is off, and the log says why, if the ids of the table prove nothing: the sequence caches (a session draws ids ahead
of its locks), descends or cycles; the table is partitioned or inherited from (an INSERT into a part locks only the
part); ids come from elsewhere. Whether *some* client writes ids that it did not draw in its INSERT cannot be seen from
here. Therefore every 5 s while idle, else every minute, a mark or scan begins at the head all the same. If it finds a
row up to the floor, the premise is refuted: the row is published like any other, late, and the floor stays off.

A writer that stays open keeps S from being settled: the floor stops, nothing is lost, and the log names the writer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Final

from outbox_core.metrics import FloorGauge, HarvestMetrics
from outbox_core.ports import NO_FLOOR, Floor, OpenWriter, OutboxStore, Sight, StoredRecord

_log = logging.getLogger(__name__)

_ID: Final = 0
_id_of = itemgetter(_ID)  # of a floor as of a record
# A look costs two small statements, so one is due after this many new rows, or this long after the last new row.
_LOOK_AFTER_ROWS = 1_000
_LOOK_AFTER_SECONDS = 1.0
_LONGEST_LOOK_PAUSE_SECONDS = 5.0
_FROM_HEAD_IDLE_SECONDS = 5.0
_FROM_HEAD_BUSY_SECONDS = 60.0
# Where the head is full of dead rows, going through them all takes long: at most a thirtieth of the time.
_FROM_HEAD_REST = 30
_WARN_AFTER_SECONDS = 10.0
_WARN_AGAIN_FACTOR = 6


@dataclass(frozen=True, slots=True)
class Look:
    """What a look at the database's writers brought.

    Attributes:
        sight: S and V.
        described: those writers that have been in the way for long.
    """

    sight: Sight
    described: Sequence[OpenWriter] = ()


@dataclass(frozen=True, slots=True)
class Reading:
    """One mark or scan that is to be: made by `SettledFloor.begin`, handed back to `SettledFloor.ended`.

    Attributes:
        floor: what the mark or scan is to be given.
        believed: the floor, even if this reading begins at the head to see whether it is right.
        looks: whether S and V are to be read first.
        describes: the writers to be described.
        resets: how many resets there had been; rows of a reading that a reset has overtaken may not be in our hands.
    """

    floor: Floor
    believed: Floor
    looks: bool
    describes: frozenset[str]
    resets: int

    def look(self, store: OutboxStore) -> Look | None:
        """Read S and V if they are to be read. On the marker's thread, before the mark or scan, on its connection."""
        if not self.looks:
            return None
        sight = store.sight()
        standing = self.describes & sight.writers
        return Look(sight, store.describe(standing) if standing else ())


@dataclass(slots=True)
class _Writer:
    """A writer that S waits for: since when, and after how many seconds the log names it (again)."""

    since: float
    warn_after: float


class SettledFloor:
    """Proves the floor. It outlives leaderships; it belongs to the harvest thread (only `Reading.look` runs elsewhere).

    Args:
        metrics: where to show how far it has come.
        clock: a monotonic clock, in seconds.

    Attributes:
        off: why there is no floor and will be none in this process, or ''.
        floor: the floor now.
    """

    def __init__(self, metrics: HarvestMetrics, clock: Callable[[], float]) -> None:
        self.off = ""
        self.floor = NO_FLOOR
        self._metrics = metrics
        self._clock = clock
        self._resets = 0
        self._left_out: dict[object, Floor] = {}  # with the floor when it was first left out
        self._last: Sight | None = None
        self._looked_at = 0.0
        self._settled = NO_FLOOR.id
        self._pending: int | None = None  # S that is not yet settled, and its V:
        self._writers: dict[str, _Writer] = {}
        self._rows_since_look = 0
        self._idle = False
        self._from_head_at = 0.0
        self._from_head_took = 0.0
        self._refuting: tuple[int, Floor] | None = None  # a row that was found, and the floor it was found below

    # -- for the harvest

    def reset(self, reason: str) -> None:
        """Begin at the head again: rows have left our hands, or what is left out has changed.

        Args:
            reason: for the log.
        """
        if self.floor.place is not None:
            _log.debug("the settled floor %d is void: %s", self.floor.id, reason)
        self._resets += 1
        self.floor = NO_FLOOR
        self._left_out = dict.fromkeys(self._left_out, NO_FLOOR)
        self._show()

    def begin(self, left_out: frozenset[object]) -> Reading:
        """Prepare a mark or scan.

        Args:
            left_out: whatever it will leave out although it is not in our hands, in any terms that can be compared.
        """
        if self._left_out.keys() != left_out:
            self._let_in(self._left_out.keys() - left_out)
            self._left_out.update(dict.fromkeys(left_out - self._left_out.keys(), self.floor))
        time = self._clock()
        floor = NO_FLOOR if self._from_head_is_due(time) else self.floor
        return Reading(floor, self.floor, self._look_is_due(time), self._to_describe(time), self._resets)

    def ended(self, reading: Reading, look: Look | None, records: Sequence[StoredRecord], took: float) -> None:
        """Take in a mark or scan whose rows are in our hands now. Not to be called for one that was thrown away.

        Args:
            reading: what `begin` gave.
            look: what it looked at.
            records: the rows, by ascending id.
            took: how long it took, in seconds.
        """
        if look is not None and not self.off and reading.resets == self._resets:
            self._take_in(look)
        if self.off or reading.resets != self._resets:
            return
        self._idle = not records
        self._rows_since_look += len(records)
        if reading.floor is NO_FLOOR:
            self._from_head_at, self._from_head_took = self._clock(), took
        if records and records[0][_ID] <= reading.believed.id:
            # It may also be that the place has changed since: the next look will tell.
            self._refuting = records[0][_ID], reading.believed
            self.reset("a row was found below it")
        elif reading.floor.id <= self.floor.id:
            # A batch below its limit may have been cut short by its size: only an empty one says there is no more.
            self._rise_to(min(self._settled, records[-1][_ID]) if records else self._settled)
        self._show()

    # -- when to look

    def _from_head_is_due(self, time: float) -> bool:
        pause = _FROM_HEAD_IDLE_SECONDS if self._idle else _FROM_HEAD_BUSY_SECONDS
        return time - self._from_head_at >= max(pause, self._from_head_took * _FROM_HEAD_REST)

    def _look_is_due(self, time: float) -> bool:
        if self.off:
            return False
        if self._last is None or self._refuting is not None:
            return True
        if self._pending is None and not self._rows_since_look:
            return False  # nothing has come in since: scans have nothing new to wade through
        waited = max((time - writer.since for writer in self._writers.values()), default=0.0)
        pause = min(_LONGEST_LOOK_PAUSE_SECONDS, max(_LOOK_AFTER_SECONDS, waited / 5))
        return self._rows_since_look >= _LOOK_AFTER_ROWS or time - self._looked_at >= pause

    def _to_describe(self, time: float) -> frozenset[str]:
        return frozenset(name for name, writer in self._writers.items() if time - writer.since >= writer.warn_after)

    # -- S and V

    def _take_in(self, look: Look) -> None:
        sight, time = look.sight, self._clock()
        self._looked_at, self._rows_since_look = time, 0
        if sight.unusable:
            self._turn_off(sight.unusable)
            return
        self._look_into_refutation(sight)
        if self.off:
            return
        if self._last is not None and (sight.place != self._last.place or sight.last_id < self._last.last_id):
            self._forget()
        self._last = sight
        self._settle(sight, time)
        for writer in look.described:
            if writer.name in self._writers:
                self._warn_of(writer, time)

    def _settle(self, sight: Sight, time: float) -> None:
        """One V at a time: when the last of it is gone, this look's S and V take its place."""
        self._writers = {name: writer for name, writer in self._writers.items() if name in sight.writers}
        if self._pending is not None and not self._writers:
            self._settled, self._pending = self._pending, None
        if self._pending is None and sight.writers:
            self._pending = sight.last_id
            self._writers = {name: _Writer(time, _WARN_AFTER_SECONDS) for name in sight.writers}
        elif self._pending is None:
            self._settled = sight.last_id

    def _rise_to(self, reached: int) -> None:
        if self._last is not None and reached > self.floor.id:
            self.floor = Floor(reached, self._last.place)

    def _let_in(self, again: set[object]) -> None:
        """What was left out is left out no more.

        Every unseen row up to the floor is left out by something that came to be left out at a floor below that row.
        That stays true for what is still left out, since its floors are lowered together with the floor: a row may be
        left out twice over, and have been passed by for the sake of the one that is let in now.
        """
        for item in again:
            self.floor = min(self.floor, self._left_out.pop(item), key=_id_of)
        for item, floor in self._left_out.items():
            self._left_out[item] = min(floor, self.floor, key=_id_of)

    def _forget(self) -> None:
        """Another connection, table or sequence, or one that was set back: nothing that was known is known here."""
        self.reset("connection, table or sequence is another one")
        self._settled, self._pending, self._writers = NO_FLOOR.id, None, {}

    # -- the premise refuted

    def _look_into_refutation(self, sight: Sight) -> None:
        if self._refuting is None:
            return
        (found, floor), self._refuting = self._refuting, None
        if sight.place == floor.place and sight.last_id >= floor.id:
            self._turn_off(
                f"record {found} appeared below {floor.id}, when no open transaction could have had its id: some "
                "client does not let its INSERT draw the id (it draws ids ahead, or writes ids of its own), or the "
                "sequence was set back. Such records are found up to a minute late, and their order is not kept"
            )

    def _turn_off(self, reason: str) -> None:
        _log.warning(
            "the settled floor is off until the harvester is restarted: %s. Nothing is lost; while old snapshots are "
            "open, harvesting gets slower the more is harvested",
            reason,
        )
        self.off = reason
        self.reset("it is off")

    # -- telling

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
        oldest = max((self._clock() - writer.since for writer in self._writers.values()), default=0.0)
        distance = None if drawn is None or self.floor.place is None else max(0, drawn - self.floor.id)
        self._metrics.floor(FloorGauge(not self.off, distance, len(self._writers), oldest))
