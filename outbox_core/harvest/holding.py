"""What is held, as a harvester knows it.

The rules:

- Holds are read by a statement of their own, *before* the mark or scan that they are handed to as parameters, and known
  to the settled floor when that begins. A release so takes effect for a whole statement, which begins at the head of
  what it lets go: nothing can overtake that.
- What a mark or scan brings is compared with the holds, read again if they were not read lately: an idle outbox is not
  asked for its holds over and over, and a topic that was paused while it was idle is paused all the same.
- A hold of the harvester's own is written before the key may be asked for again.
- While holds cannot be read, nothing is marked or published. Only where there is no table for them is nothing held.

All of that happens on the marker's thread, one statement after the other; the harvest thread sees frozen values.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from outbox_core.election.leadership import now
from outbox_core.errors import StoreUnavailable
from outbox_core.metrics import HarvestMetrics
from outbox_core.ports import NO_HOLDS, HoldSet, NewHold, OutboxStore, StoredRecord, Withheld

_log = logging.getLogger(__name__)

READ_EVERY_SECONDS = 0.4
_LOOK_FOR_TABLE_EVERY_SECONDS = 30.0
_TIDY_EVERY_SECONDS = 10.0
_AT_ONCE = 1_000
_NAMED = 3

_ID: Final = 0
_TOPIC: Final = 1
_KEY: Final = 2
_VALUE: Final = 3


class HoldBook:
    """The holds of one outbox. Used on the thread of the store that is passed in; `current` may be read anywhere.

    Args:
        metrics: where to show how many there are.

    Attributes:
        current: what is held, as last read.
        is_kept: whether more can be held: there is a table of holds, and we may write to it.
        read_at: when they were read, or looked for; minus infinity while that is not known.
    """

    def __init__(self, metrics: HarvestMetrics) -> None:
        self.current: HoldSet = NO_HOLDS
        self.is_kept = True
        self.read_at = float("-inf")
        self._answer: HoldSet = NO_HOLDS
        self._read_every = READ_EVERY_SECONDS
        self._tidied_at = float("-inf")
        self._metrics = metrics

    @property
    def was_read(self) -> bool:
        """Whether it was read at all, and could be when that was last tried."""
        return self.read_at > float("-inf")

    @property
    def is_old(self) -> bool:
        """Whether it was read so long ago that a change would not take effect soon."""
        return now() - self.read_at > self._read_every

    def due_in(self) -> float:
        """Seconds until it is old."""
        return max(0.0, self.read_at + self._read_every - now())

    def look_after(self, store: OutboxStore, records: Sequence[StoredRecord] = ()) -> HoldSet:
        """What is held, for records that a statement has brought; those that were too large to read are held now."""
        withheld = [record for record in records if isinstance(record[_VALUE], Withheld)]
        if withheld:
            return self.write(store, [_too_large(record) for record in withheld])
        if self.is_old:
            self.read(store)
        return self.current

    def forget(self) -> None:
        """Have it read again before the next mark."""
        self.read_at = float("-inf")

    def read(self, store: OutboxStore) -> HoldSet:
        """Read what is held."""
        try:
            holds = self._ask(store)
        except StoreUnavailable:
            self.read_at = float("-inf")  # nothing is to be asked for before it is known again
            raise
        self.is_kept = holds is not None and holds.may_change
        self._read_every = _LOOK_FOR_TABLE_EVERY_SECONDS if holds is None else READ_EVERY_SECONDS
        self.read_at = now()
        if holds is None:
            holds = NO_HOLDS
        # A store gives the same object as long as nothing has changed: there may be thousands of holds to compare.
        if holds is not self._answer and holds != self.current:
            self.current = _sharing(self.current, holds)
        self._answer = holds
        self._metrics.activity.refused = holds.refused
        self._metrics.held(len(holds))  # in any case: the gauge may show what another leadership read
        return self.current

    def _ask(self, store: OutboxStore) -> HoldSet | None:
        holds = store.holds()
        if holds is None or not holds.may_change or not (holds.ids or holds.lanes):
            return holds
        if now() - self._tidied_at > _TIDY_EVERY_SECONDS:
            self._tidied_at = now()
            if store.release_gone():  # records that somebody deleted, or that the last leader had published
                return store.holds()
        return holds

    def write(self, store: OutboxStore, holds: Sequence[NewHold]) -> HoldSet:
        """Hold something; return what is held then. Without a table, or rights on it, nothing happens."""
        if not self.was_read:
            self.read(store)  # it may be for want of rights that the last try failed
        if self.is_kept:
            self._insert(store, holds)
            _tell(holds)
        return self.read(store)

    def _insert(self, store: OutboxStore, holds: Sequence[NewHold]) -> None:
        try:
            for first in range(0, len(holds), _AT_ONCE):
                store.hold(holds[first : first + _AT_ONCE])
        except StoreUnavailable:
            self.read_at = float("-inf")
            raise


def _too_large(record: StoredRecord) -> NewHold:
    """The hold of a record whose value was not read."""
    withheld = record[_VALUE]
    return NewHold(
        record[_TOPIC],
        record[_KEY],
        record[_ID],
        "too large",
        f"kafka_key, kafka_value and headers have {withheld.size:,} bytes, and the producer's message.max.bytes is "  # type: ignore[union-attr]
        f"{withheld.limit:,}: the value was not read",  # type: ignore[union-attr]
    )


def _sharing(old: HoldSet, new: HoldSet) -> HoldSet:
    """The new holds, with the old one's sets where they are equal: stores see by that what they need not write anew."""
    return replace(
        new,
        lanes=old.lanes if old.lanes == new.lanes else new.lanes,
        ids=old.ids if old.ids == new.ids else new.ids,
    )


def _tell(holds: Sequence[NewHold]) -> None:
    """Say what is held from now on; of many records only the first."""
    for hold in holds[:_NAMED]:
        what = f"topic {hold.topic}" if hold.record_id is None else f"record {hold.record_id} for topic {hold.topic}"
        then = "goes to the dead-letter topic" if hold.dead_letter else "is held: see `outbox hold list`"
        _log.warning("%s %s: %s", what, then, hold.error)
    if len(holds) > _NAMED:
        _log.warning("and %d more", len(holds) - _NAMED)
