"""Leadership is a lease: a value with a deadline, not a flag that somebody has to clear in time.

The deadline is counted from when the heartbeat that proved it was *sent*, as the round trip must not lengthen it.
Whoever wants to act as the leader compares it with `now()` first; a thread that was blocked or a machine that was
suspended finds the lease over, without anybody having told it.
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
    """Seconds on the clock of all leases: it never goes back and goes on while the machine sleeps, where it can."""
    return time.clock_gettime(_CLOCK)


@dataclass(frozen=True, slots=True)
class Leadership:
    """A lease on leadership.

    Attributes:
        leader_id: fresh at every `LeaderAcquired`, never used again.
        term: offset of the claim it rests on; a later claim has a higher one.
        deadline: when it ends unless renewed, in seconds on the clock of `now`.
    """

    leader_id: UUID
    term: int
    deadline: float

    def is_valid(self, now: float) -> bool:
        """Whether the lease still runs at the time `now`."""
        return now < self.deadline

    def remaining(self, now: float) -> float:
        """Seconds until the lease ends, 0.0 once it is over."""
        return max(0.0, self.deadline - now)

    def renewed(self, sent_at: float, timeout: float) -> Leadership:
        """The same leadership after a heartbeat sent at `sent_at` has come back; never a shorter one."""
        return replace(self, deadline=max(self.deadline, sent_at + timeout))
