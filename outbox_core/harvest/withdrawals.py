"""Keys that were taken out of memory and are on their way back to the table.

A record that failed goes back to the table with the followers of its key: their marks are cleared. Until that is
committed, and for as long as an earlier statement may still bring rows of the key, none of them may be sent: a later
record would overtake the one that is on its way back. So a withdrawn key

- is left out of every mark that is sent before the marks of its rows are cleared (and, if it is to be held, before the
  hold is written);
- is looked for in the answer of a mark that was under way when it was withdrawn. What that brings goes back as well.

A record without a key has no order, and stands for itself alone. The structure is pure and belongs to one thread.
"""

from __future__ import annotations

from collections.abc import Iterable

from outbox_core.harvest.lanes import lane_of
from outbox_core.ports import LaneKey, StoredRecord

Who = LaneKey | int
"""A key with its topic, or the id of a record without one."""


def who_is(record: StoredRecord) -> Who:
    """Whom a record stands for."""
    return lane_of(record) or record[0]


class Withdrawals:
    """Who is on the way back."""

    def __init__(self) -> None:
        self._resets: dict[int, Who] = {}  # rows whose marks are being cleared
        self._reasons: dict[Who, int] = {}  # how many of those there are, and of holds that are being written
        self._since_mark: set[Who] = set()

    def __bool__(self) -> bool:
        # The marks may be cleared before the mark answers that was under way: its answer is judged all the same.
        return bool(self._reasons or self._since_mark)

    @property
    def lanes(self) -> set[LaneKey]:
        """Keys that no mark may bring."""
        return {who for who in self._reasons if not isinstance(who, int)}

    @property
    def ids(self) -> set[int]:
        """Records without a key that no mark may bring."""
        return {who for who in self._reasons if isinstance(who, int)}

    def mark_begins(self) -> None:
        """A mark is sent that leaves out `lanes` and `ids`."""
        self._since_mark.clear()

    def is_caught(self, record: StoredRecord) -> bool:
        """Whether a record that the last mark brought must go back."""
        return bool(self._since_mark) and who_is(record) in self._since_mark

    def reset(self, records: Iterable[StoredRecord]) -> None:
        """The marks of these rows are going to be cleared."""
        for record in records:
            who = who_is(record)
            self._since_mark.add(who)
            if record[0] not in self._resets:
                self._resets[record[0]] = who
                self._reasons[who] = self._reasons.get(who, 0) + 1

    def reset_done(self, ids: Iterable[int]) -> None:
        """The marks of these rows are cleared."""
        for identity in ids:
            who = self._resets.pop(identity, None)
            if who is not None:
                self._one_less(who)

    def hold(self, who: Who) -> None:
        """A hold of this one is going to be written."""
        self._since_mark.add(who)
        self._reasons[who] = self._reasons.get(who, 0) + 1

    def hold_done(self, who: Who) -> None:
        """The hold is written, and known to the next mark."""
        if who in self._reasons:
            self._one_less(who)

    def _one_less(self, who: Who) -> None:
        self._reasons[who] -= 1
        if not self._reasons[who]:
            del self._reasons[who]
