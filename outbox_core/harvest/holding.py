"""What is held, as a harvester knows it.

The rules:

- Holds are read by a statement of their own, *before* the mark or scan that they are handed to as parameters, and known
  to the settled floor when that begins. A release so takes effect for a whole statement, which begins at the head of
  what it lets go: nothing can overtake that.
- What a mark or scan brings is compared with the holds, read again if they were not read lately: an idle outbox is not
  asked for its holds over and over, and a topic that was paused while it was idle is paused all the same.
- A hold of the harvester's own is written before the key may be asked for again.

All of that happens on the marker's thread, one statement after the other; the harvest thread sees frozen values.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from outbox_core.election.leadership import now
from outbox_core.metrics import HarvestMetrics
from outbox_core.ports import NO_HOLDS, HoldSet, NewHold, OutboxStore

_log = logging.getLogger(__name__)

READ_EVERY_SECONDS = 0.4
_LOOK_FOR_TABLE_EVERY_SECONDS = 30.0
_TIDY_EVERY_SECONDS = 10.0
_NAMED = 3


class HoldBook:
    """The holds of one outbox. Used on the thread of the store that is passed in; `current` may be read anywhere.

    Args:
        metrics: where to show how many there are.

    Attributes:
        current: what is held, as last read.
        is_kept: whether there is a table of holds.
        read_at: when they were read, or looked for.
    """

    def __init__(self, metrics: HarvestMetrics) -> None:
        self.current: HoldSet = NO_HOLDS
        self.is_kept = True
        self.read_at = float("-inf")
        self._tidied_at = float("-inf")
        self._metrics = metrics

    @property
    def was_read(self) -> bool:
        """Whether it was read at all."""
        return self.read_at > float("-inf")

    @property
    def is_old(self) -> bool:
        """Whether it was read so long ago that a change would not take effect soon."""
        return now() - self.read_at > (READ_EVERY_SECONDS if self.is_kept else _LOOK_FOR_TABLE_EVERY_SECONDS)

    def due_in(self) -> float:
        """Seconds until it is old."""
        return max(0.0, self.read_at + (READ_EVERY_SECONDS if self.is_kept else _LOOK_FOR_TABLE_EVERY_SECONDS) - now())

    def look_after(self, store: OutboxStore) -> HoldSet:
        """What is held, for records that a statement has brought."""
        if self.is_old:
            self.read(store)
        return self.current

    def read(self, store: OutboxStore) -> HoldSet:
        """Read what is held."""
        holds = store.holds()
        if holds is not None and (holds.ids or holds.lanes) and now() - self._tidied_at > _TIDY_EVERY_SECONDS:
            self._tidied_at = now()
            if store.release_gone():  # records that somebody deleted, or that the last leader had published
                holds = store.holds()
        self.is_kept = holds is not None
        self.read_at = now()
        if holds is None:
            holds = NO_HOLDS
        if holds != self.current:
            self.current = _sharing(self.current, holds)
            self._metrics.held(len(holds))
        return self.current

    def write(self, store: OutboxStore, holds: Sequence[NewHold]) -> HoldSet:
        """Hold something; return what is held then. Without a table nothing happens."""
        if self.is_kept:
            store.hold(holds)
            _tell(holds)
        return self.read(store)


def _sharing(old: HoldSet, new: HoldSet) -> HoldSet:
    """The new holds, with the old one's sets where they are equal: stores see by that what they need not write anew."""
    return HoldSet(
        new.topics,
        old.lanes if old.lanes == new.lanes else new.lanes,
        old.ids if old.ids == new.ids else new.ids,
        new.requests,
    )


def _tell(holds: Sequence[NewHold]) -> None:
    """Say what is held from now on; of many records only the first."""
    for hold in holds[:_NAMED]:
        what = f"topic {hold.topic}" if hold.record_id is None else f"record {hold.record_id} for topic {hold.topic}"
        then = "goes to the dead-letter topic" if hold.dead_letter else "is held: see `outbox hold list`"
        _log.warning("%s %s: %s", what, then, hold.error)
    if len(holds) > _NAMED:
        _log.warning("and %d more", len(holds) - _NAMED)
