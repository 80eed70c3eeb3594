"""The harvester's view of the holds.

- A statement of its own reads the holds *before* the mark or scan that gets them as parameters, and the settled floor
  knows them when that begins. So a release takes effect for a whole statement, which begins at the head of the released
  rows: no record can overtake them.
- The result of a mark or scan is compared with the holds, read again if they are stale: so an idle outbox needs no
  constant reads, and its topics can be paused all the same.
- A hold of the harvester's own is written before its key is read again.
- While holds cannot be read, no record is marked or published. Without a table of holds, none is held.

The cache works on the marker's thread; the harvest thread sees frozen values.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from operator import attrgetter
from types import MappingProxyType

from outbox_core.election.lease import now
from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.metrics import HarvestMetrics
from outbox_core.stores.interface import NO_HOLDS, HoldSet, NewHold, OutboxStore, OversizedValue, RowQuery, StoredRecord

_log = logging.getLogger(__name__)

READ_EVERY_SECONDS = 0.4
_TIDY_EVERY_SECONDS = 10.0
_AT_ONCE = 1_000
_NAMED = 3

_NONE_REFUSED: Mapping[str, Collection[int]] = MappingProxyType({})
_UNKNOWN = float("-inf")
_value_of = attrgetter("value")
_OLD = 0.0


class HoldCache:
    """The holds of one outbox. Used on the thread of the store that is passed in; `current` may be read anywhere."""

    def __init__(self, metrics: HarvestMetrics) -> None:
        self.current: HoldSet = NO_HOLDS
        self.is_writable = True
        self.read_at = _UNKNOWN
        self._answer: HoldSet = NO_HOLDS
        self._tidied_at = _UNKNOWN
        self._is_tidy = True
        self._metrics = metrics

    @property
    def is_known(self) -> bool:
        """True if the last attempt to read them succeeded."""
        return self.read_at > _UNKNOWN

    def due_in(self) -> float:
        """Return the seconds until they are stale: a change since the last reading would not take effect soon."""
        return max(0.0, self.read_at + READ_EVERY_SECONDS - now())

    def current_or_reread(self, store: OutboxStore, records: Sequence[StoredRecord] = ()) -> HoldSet:
        """Return holds that are not stale; of these records hold those that were too large to be read."""
        if OversizedValue in set(map(type, map(_value_of, records))):
            withheld = [record for record in records if isinstance(record.value, OversizedValue)]
            return self.write(store, [_too_large(record) for record in withheld])
        if not self.due_in():
            self.read(store)
        return self.current

    def invalidate(self) -> None:
        """Have the holds read again before the next mark."""
        self.read_at = _UNKNOWN

    def read(self, store: OutboxStore) -> HoldSet:
        """Read the holds, or look for their table."""
        try:
            holds = self._ask(store)
        except StoreUnavailable:
            self.invalidate()  # no row is asked for before they are known again
            raise
        self.is_writable = holds is not None and holds.may_change
        self.read_at = now()
        if holds is None:
            holds = NO_HOLDS
        # A store returns the same object as long as nothing has changed: there may be thousands of holds to compare.
        if holds is not self._answer and holds != self.current:
            self.current = _sharing(self.current, holds)
        self._answer = holds
        self._metrics.activity.refused = holds.refused
        self._metrics.held(len(holds))  # in any case: the gauge may show what another leadership read
        return self.current

    def _ask(self, store: OutboxStore) -> HoldSet | None:
        holds = store.holds.read()
        if holds is None or not holds.may_change or not (holds.ids or holds.lanes):
            return holds
        if now() - self._tidied_at > _TIDY_EVERY_SECONDS and self._tidy(store):
            return store.holds.read()
        return holds

    def _tidy(self, store: OutboxStore) -> bool:
        """Release holds of records that somebody deleted, or that the last leader had published.

        Return True if the holds may be others now. Publishing does not wait until it succeeds.
        """
        try:
            released = store.holds.release_gone()
        except (StoreUnavailable, OutboxTableError) as error:
            if self._is_tidy:
                _log.warning("holds whose records are gone stay until they can be released: %s", error)
            self._is_tidy = False
            return True  # the connection is given up, and the next one may lead to another server
        finally:
            self._tidied_at = now()
        self._is_tidy = True
        return released > 0

    def write(
        self, store: OutboxStore, holds: Sequence[NewHold], refused: Mapping[str, Collection[int]] = _NONE_REFUSED
    ) -> HoldSet:
        """Add holds, and keep dead letters held that were refused; return all holds then.

        Without a writable table it does neither. `refused` are the dead letters' ids, by the reason.
        """
        if self.read_at <= _OLD:
            self.read(store)  # the last attempt may have failed for want of rights
        if self.is_writable:
            try:
                for why, ids in refused.items():
                    store.holds.refuse_dead_letters(sorted(ids), why)
                for first in range(0, len(holds), _AT_ONCE):
                    store.holds.add(holds[first : first + _AT_ONCE])
            except StoreUnavailable:
                self.read_at = min(self.read_at, _OLD)
                raise
            _log_refused(refused)
            _log_holds(holds)
        return self.read(store)


def nothing_waits(store: OutboxStore) -> bool:
    """Return True if the table is empty but for held rows, none of which is requested as a dead letter."""
    holds = store.holds.read()
    if not holds:
        return store.is_empty()
    return not holds.requests and not store.scan(RowQuery(1, holds=holds))


def _too_large(record: StoredRecord) -> NewHold:
    withheld = record.value
    return NewHold(
        record.topic,
        record.key,
        record.id,
        "too large",
        f"kafka_key, kafka_value and headers have {withheld.size:,} bytes, and the producer's message.max.bytes is "  # type: ignore[union-attr]
        f"{withheld.limit:,}: the value was not read. Raise that (producerKafkaConfig, -X) and the topic's "  # type: ignore[union-attr]
        "max.message.bytes, restart the harvester, and release it",
        create_time=record.create_time,
    )


def _sharing(old: HoldSet, new: HoldSet) -> HoldSet:
    """Return the new holds, with the old one's sets where they are equal: stores compare these by identity."""
    return replace(
        new,
        lanes=old.lanes if old.lanes == new.lanes else new.lanes,
        ids=old.ids if old.ids == new.ids else new.ids,
    )


_SEE = "see `outbox hold list`, with Django `manage.py outbox_hold list`"


def _log_refused(refused: Mapping[str, Collection[int]]) -> None:
    for why, ids in refused.items():
        more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
        _log.warning("record %s%s stays held: %s", ", ".join(map(str, sorted(ids)[:_NAMED])), more, why)


def _log_holds(holds: Sequence[NewHold]) -> None:
    for hold in holds[:_NAMED]:
        what = f"topic {hold.topic}" if hold.record_id is None else f"record {hold.record_id} for topic {hold.topic}"
        then = "goes to the dead-letter topic" if hold.dead_letter else f"is held: {_SEE}"
        _log.warning("%s %s: %s", what, then, hold.error)
    if len(holds) > _NAMED:
        _log.warning("and %d more", len(holds) - _NAMED)
