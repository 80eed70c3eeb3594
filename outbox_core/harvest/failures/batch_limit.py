"""The size of the next transaction: what it grows by under load, and all that a failed transaction leaves behind.

With much to do each full transaction that was quick doubles the limit, up to a largest one: a transaction waits three
times for the broker, whatever its size. One that is slow, or not full, takes that back.

A transaction fails as a whole, and a delivery report names a batch. So the harvester forgets the records of a failed
transaction, scans again from the head of the table with half the limit, and doubles it after each full one. A record
that fails alone is bad.

While the limit is below the largest one, delivery reports are asked for: they name destinations that do not answer, so
that those need no search. Where a record may be to blame, the transaction is small, and each of its records is a batch
of its own: its report then names the very record, and one failed transaction finds it, in the place of one for each
halving. `limit` is below the usual one then. The structure is pure and belongs to one thread.
"""

from __future__ import annotations

_MOST_UNBATCHED = 100  # so many round trips fit into a transaction, also to a distant broker
_QUICK_SECONDS = 0.25  # readers see a record when its transaction is committed


class BatchLimit:
    """The largest number of records of the next transaction; `ends` counts producers that ended since a commit."""

    def __init__(self, usual: int, most: int) -> None:
        self.limit = usual
        self.ends = 0
        self._usual = usual
        self._most = most
        self._is_unbatched = False

    @property
    def is_searching(self) -> bool:
        """True if the reports of the next transaction are wanted."""
        return self.limit < self._usual

    @property
    def is_unbatched(self) -> bool:
        """True if each record of the next transaction is sent as a batch of its own."""
        return self._is_unbatched and self.is_searching and self.limit <= _MOST_UNBATCHED

    def failed(self, records: int, *, refused: bool) -> None:
        """Note a failed transaction of so many records; `refused` if Kafka refused one, and did not say which."""
        self._halve(records)
        if refused:
            self._is_unbatched = True
            self.limit = min(self.limit, _MOST_UNBATCHED)

    def cut(self, records: int) -> None:
        """Have the next transaction end before a record that is known to be refused."""
        self.limit = max(1, min(self.limit, records))

    def ended(self, records: int) -> None:
        """Note a transaction that ended its producer."""
        self.ends += 1
        if records > 1:  # else it is known which one it was
            self._halve(records)

    def _halve(self, records: int) -> None:
        self.limit = max(1, min(self.limit, self._usual, records) // 2)

    def left_out(self, records: int) -> None:
        """Note records that the client refused: unlike a commit of so many they prove nothing, but cost no time."""
        if not self._is_unbatched:
            self.limit = max(self.limit, min(self._usual, 2 * records))

    def committed(self, records: int, took: float) -> None:
        """Note a commit of so many records, and its seconds."""
        self.ends = 0
        is_full = records >= self.limit  # if not, no record is left to be searched for
        if self.is_searching:
            self.limit = min(self._usual, max(self.limit, 2 * records))
        elif took > _QUICK_SECONDS or 2 * records < self.limit:
            self.limit = max(self._usual, self.limit // 2)
        elif is_full:
            self.limit = min(self._most, 2 * self.limit)
        self._is_unbatched = self._is_unbatched and is_full and self.is_searching
