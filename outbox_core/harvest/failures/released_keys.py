"""Keys whose rows are being released back to the table.

A record that failed is released together with the followers of its key: their marks are cleared. Until that is
committed, and for as long as an earlier mark may still return rows of the key, none of them may be sent: a later record
would overtake a released one. So a released key

- is left out of every mark that starts before the marks of its rows are cleared, or its hold is written;
- is filtered from the result of a mark that was under way at the release. Its rows are released, too.

A record without a key counts by its row. The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from outbox_core.stores.interface import LaneKey, RowId, StoredRecord, lane_of, row_id

LaneOrRow = LaneKey | RowId
"""A key with its topic, or the row of a record without a key: the unit that fails and waits."""


def lane_or_row(record: StoredRecord) -> LaneOrRow:
    """Return the record's lane, or its row if it has no key."""
    return lane_of(record) or row_id(record)


def lanes_among(items: Iterable[LaneOrRow]) -> set[LaneKey]:
    """Return the keys among keys and rows."""
    return {item for item in items if not isinstance(item, RowId)}


def rows_among(items: Iterable[LaneOrRow]) -> set[RowId]:
    """Return the rows of records without a key among keys and rows."""
    return {item for item in items if isinstance(item, RowId)}


class ReleasedKeys:
    """Keys, and records without one, that marks must leave out for now."""

    def __init__(self) -> None:
        self._rows: dict[RowId, LaneOrRow] = {}  # rows whose marks are being cleared
        self._reasons: dict[LaneOrRow, int] = {}  # the number of those rows, and of holds that are being written
        self._since_mark: set[LaneOrRow] = set()

    def __bool__(self) -> bool:
        # The marks may be cleared before the mark under way returns: its rows are filtered all the same.
        return bool(self._reasons or self._since_mark)

    @property
    def lanes(self) -> set[LaneKey]:
        """Keys that marks leave out."""
        return lanes_among(self._reasons)

    @property
    def rows(self) -> set[RowId]:
        """Records without a key that marks leave out."""
        return rows_among(self._reasons)

    def mark_starts(self) -> None:
        """Note that a mark starts, which leaves out `lanes` and `rows`."""
        self._since_mark.clear()

    def must_release(self, record: StoredRecord) -> bool:
        """Return True if the last mark's record belongs to a key that was released meanwhile."""
        return bool(self._since_mark) and lane_or_row(record) in self._since_mark

    def release(self, records: Iterable[StoredRecord]) -> None:
        """Note rows whose marks are going to be cleared."""
        for record in records:
            item, row = lane_or_row(record), row_id(record)
            self._since_mark.add(item)
            if row not in self._rows:
                self._rows[row] = item
                self._reasons[item] = self._reasons.get(item, 0) + 1

    def reset_done(self, rows: Iterable[RowId]) -> None:
        """Note rows whose marks are cleared."""
        for row in rows:
            item = self._rows.pop(row, None)
            if item is not None:
                self._count_down(item)

    def hold(self, item: LaneOrRow) -> None:
        """Note a hold that is going to be written."""
        self._since_mark.add(item)
        self._reasons[item] = self._reasons.get(item, 0) + 1

    def hold_done(self, item: LaneOrRow) -> None:
        """Note a hold that is written, and known to the next mark."""
        if item in self._reasons:
            self._count_down(item)

    def _count_down(self, item: LaneOrRow) -> None:
        self._reasons[item] -= 1
        if not self._reasons[item]:
            del self._reasons[item]
