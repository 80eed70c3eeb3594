"""The leader IDs that a relay on Spark (`outbox_spark`) marks rows with: the term, and the batch of it.

The mark replaces a column for the number of a row's batch. Its 122 free bits are

    magic (26) | term (48): offset of the relay's claim on the leader topic | batch (48)

so that all marks of relays, and all of one term, are one range each, in PostgreSQL's order of UUIDs too. Harvesters
recognise the range: unlike marks of at-least-once delivery, these do not say that a row may be published already.
"""

from __future__ import annotations

from typing import NamedTuple
from uuid import UUID

_MAGIC = 0x2E1A_7ED  # 26 bits
_BITS = 48
_MOST = (1 << _BITS) - 1
_VERSION = 8 << 76
_VARIANT = 2 << 62


class RelayMark(NamedTuple):
    """The content of a relay's mark: number of the claim under which the row was marked, and of its batch."""

    term: int
    batch: int

    @property
    def leader_id(self) -> UUID:
        """The mark as a leader ID, a UUID of version 8. Raises ValueError for numbers beyond 48 bits."""
        if not (0 <= self.term <= _MOST and 0 <= self.batch <= _MOST):
            raise ValueError(f"term {self.term} and batch {self.batch} must be from 0 to {_MOST}")
        bits = _MAGIC << 2 * _BITS | self.term << _BITS | self.batch
        # Version and variant sit between the bits, at fixed places.
        first, second, third = bits >> 74, bits >> 62 & 0xFFF, bits & (1 << 62) - 1
        return UUID(int=first << 80 | _VERSION | second << 64 | _VARIANT | third)

    @classmethod
    def of(cls, leader_id: UUID) -> RelayMark | None:
        """Return the content of a leader ID, or None if it is no relay's mark."""
        number = leader_id.int
        if number >> 76 & 0xF != 8 or number >> 62 & 3 != 2:
            return None
        bits = number >> 80 << 74 | (number >> 64 & 0xFFF) << 62 | number & (1 << 62) - 1
        if bits >> 2 * _BITS != _MAGIC:
            return None
        return cls(bits >> _BITS & _MOST, bits & _MOST)


FIRST = RelayMark(0, 0).leader_id
"""The lowest mark of any relay."""

LAST = RelayMark(_MOST, _MOST).leader_id
"""The highest mark of any relay."""


def term_bounds(term: int) -> tuple[UUID, UUID]:
    """Return the lowest and the highest mark of a term."""
    return RelayMark(term, 0).leader_id, RelayMark(term, _MOST).leader_id
