"""Leadership as a lease: a value with a deadline, not a flag that must be cleared in time.

The deadline counts from when the heartbeat that proved it was *sent*, as the round trip must not lengthen it. Code that
acts as the leader compares it with `now()` first: so a blocked thread or a suspended machine finds its lease over.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from uuid import UUID

# CLOCK_MONOTONIC stands still while a machine is suspended, and a lease must not.
_CLOCK: int = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)


def now() -> float:
    """Return seconds on the clock of all leases: monotonic, and running while the machine sleeps, where it can."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class Leadership:
    """A lease on leadership."""

    leader_id: UUID  # fresh at every `LeaderAcquired`, never used again
    term: int  # offset of the claim it rests on; a later claim has a higher one
    deadline: float  # its end unless renewed, in seconds on the clock of `now`

    def is_valid(self, now: float) -> bool:
        """Tell whether the lease still runs at the time `now`."""
        return now < self.deadline

    def remaining(self, now: float) -> float:
        """Return the seconds until the lease ends, 0.0 once it is over."""
        return max(0.0, self.deadline - now)

    def renewed(self, sent_at: float, timeout: float) -> Leadership:
        """Return the same leadership, never shorter, after a heartbeat sent at `sent_at` has come back."""
        return replace(self, deadline=max(self.deadline, sent_at + timeout))
