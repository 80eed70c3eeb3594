"""Events that a harvester and an elector hand to their event handler.

The four leadership events mean the same as in goharvest (seed 001):

- `LeaderAcquired`: this process leads; the application may set up work that only a leader does.
- `LeaderRefreshed`: still leading, under a new leader ID, because records have to be marked again. Informational.
- `LeaderRevoked`: leadership was handed back in good order. The handler **may block** to finish work in flight: the
  successor is only elected after it returns.
- `LeaderFenced`: another process may lead already. The handler **must not block**; stop at once.

Handlers run on the thread that noticed the event; their exceptions are logged and do not stop the harvester. While one
hangs in `LeaderRefreshed` or `MeterRead`, which hold up publication, leadership is handed over without it: it hears of
that when it returns.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from uuid import UUID

__all__ = [
    "Event",
    "EventHandler",
    "LeaderAcquired",
    "LeaderFenced",
    "LeaderRefreshed",
    "LeaderRevoked",
    "MeterRead",
    "MeterStats",
]


@dataclass(frozen=True, slots=True)
class LeaderAcquired:
    """This process became the leader.

    Attributes:
        leader_id: a fresh random ID, never used before and never used again.
        term: the number of the leadership claim; a later claim of the same role has a higher one.
    """

    leader_id: UUID
    term: int = -1


@dataclass(frozen=True, slots=True)
class LeaderRefreshed:
    """The leader goes on under a new leader ID."""

    leader_id: UUID


@dataclass(frozen=True, slots=True)
class LeaderRevoked:
    """Leadership was handed back; the successor waits for the handler to return.

    Attributes:
        leader_id: that of its LeaderAcquired.
        term: likewise; -1 if the elector does not tell.
    """

    leader_id: UUID
    term: int = -1


@dataclass(frozen=True, slots=True)
class LeaderFenced:
    """Leadership ended without a hand-over: the lease ran out or a higher claim was seen.

    Attributes:
        leader_id: the ID that is no longer valid.
        reason: the cause, in words.
        term: that of its LeaderAcquired; -1 if the elector does not tell.
    """

    leader_id: UUID
    reason: str = ""
    term: int = -1


@dataclass(frozen=True, slots=True)
class MeterStats:
    """Throughput of published (acknowledged) records: in the last interval, and in total since the meter was started.

    Rates are records per second.
    """

    interval_seconds: float
    total_seconds: float
    interval_count: int
    total_count: int
    interval_rate: float
    total_rate: float


@dataclass(frozen=True, slots=True)
class MeterRead:
    """Periodic throughput statistics, sent no more often than `limits.min_metrics_interval`."""

    stats: MeterStats


Event = LeaderAcquired | LeaderRefreshed | LeaderRevoked | LeaderFenced | MeterRead
EventHandler = Callable[[Event], None]
