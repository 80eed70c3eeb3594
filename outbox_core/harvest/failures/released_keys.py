"""Keys whose rows are being released back to the table.

A record that failed is released together with the followers of its key: their marks are cleared. Until that is
committed, and for as long as an earlier mark may still return rows of the key, none of them may be sent: a later record
would overtake a released one. So a released key

- is left out of every mark that starts before the marks of its rows are cleared, or its hold is written;
- is filtered from the result of a mark that was under way at the release. Its rows are released, too.

A record without a key counts by its id. The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from outbox_core.stores.interface import LaneKey, StoredRecord, lane_of

LaneOrId = LaneKey | int
"""A key with its topic, or the id of a record without a key: the unit that fails and waits."""


def lane_or_id(record: StoredRecord) -> LaneOrId:
    """Return the record's lane, or its id if it has no key."""
    return lane_of(record) or record.id


class ReleasedKeys:
    """Keys, and records without one, that marks must leave out for now."""

    def __init__(self) -> None:
        self._rows: dict[int, LaneOrId] = {}  # rows whose marks are being cleared
        self._reasons: dict[LaneOrId, int] = {}  # the number of those rows, and of holds that are being written
        self._since_mark: set[LaneOrId] = set()

    def __bool__(self) -> bool:
        # The marks may be cleared before the mark under way returns: its rows are filtered all the same.
        return bool(self._reasons or self._since_mark)

    @property
    def lanes(self) -> set[LaneKey]:
        """Keys that marks leave out."""
        return {item for item in self._reasons if not isinstance(item, int)}

    @property
    def ids(self) -> set[int]:
        """Records without a key that marks leave out."""
        return {item for item in self._reasons if isinstance(item, int)}

    def mark_starts(self) -> None:
        """Note that a mark starts, which leaves out `lanes` and `ids`."""
        self._since_mark.clear()

    def must_release(self, record: StoredRecord) -> bool:
        """Return True if the last mark's record belongs to a key that was released meanwhile."""
        return bool(self._since_mark) and lane_or_id(record) in self._since_mark

    def release(self, records: Iterable[StoredRecord]) -> None:
        """Note rows whose marks are going to be cleared."""
        for record in records:
            item = lane_or_id(record)
            self._since_mark.add(item)
            if record.id not in self._rows:
                self._rows[record.id] = item
                self._reasons[item] = self._reasons.get(item, 0) + 1

    def reset_done(self, ids: Iterable[int]) -> None:
        """Note rows whose marks are cleared."""
        for identity in ids:
            item = self._rows.pop(identity, None)
            if item is not None:
                self._count_down(item)

    def hold(self, item: LaneOrId) -> None:
        """Note a hold that is going to be written."""
        self._since_mark.add(item)
        self._reasons[item] = self._reasons.get(item, 0) + 1

    def hold_done(self, item: LaneOrId) -> None:
        """Note a hold that is written, and known to the next mark."""
        if item in self._reasons:
            self._count_down(item)

    def _count_down(self, item: LaneOrId) -> None:
        self._reasons[item] -= 1
        if not self._reasons[item]:
            del self._reasons[item]
