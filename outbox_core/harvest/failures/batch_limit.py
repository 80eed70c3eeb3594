"""The search for records that Kafka refuses: after a failed transaction only a limit of the next one is left behind.

A transaction fails as a whole, and a delivery report names a batch. So the harvester forgets the records of a failed
transaction, scans again from the head of the table with half the limit, and doubles it after each success. A record
that fails alone is bad.

While the limit is below the largest one, delivery reports are asked for: they name destinations that do not answer, so
that those need no search. Where a record may be to blame, the transaction is small, and each of its records is a batch
of its own: its report then names the very record, and one failed transaction finds it, in the place of one for each
halving. The structure is pure and belongs to one thread.
"""

from __future__ import annotations

_MOST_UNBATCHED = 100  # so many round trips fit into a transaction, also to a distant broker


class BatchLimit:
    """The largest number of records of the next transaction; `ends` counts producers that ended since a commit."""

    def __init__(self, most: int) -> None:
        self.limit = most
        self.ends = 0
        self._most = most
        self._is_unbatched = False

    @property
    def is_searching(self) -> bool:
        """True if the reports of the next transaction are wanted."""
        return self.limit < self._most

    @property
    def is_unbatched(self) -> bool:
        """True if each record of the next transaction is sent as a batch of its own."""
        return self._is_unbatched and self.is_searching and self.limit <= _MOST_UNBATCHED

    def failed(self, records: int, *, refused: bool) -> None:
        """Note a failed transaction of so many records; `refused` if Kafka refused one, and did not say which."""
        self.limit = max(1, min(self.limit, records) // 2)
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
            self.limit = max(1, min(self.limit, records) // 2)

    def committed(self) -> None:
        """Note a commit."""
        self.ends = 0
        self.limit = min(self._most, 2 * self.limit)
        self._is_unbatched = self._is_unbatched and self.is_searching
