"""Doubles of the rules by which whoever can work, works: each breaks one of them on purpose."""

from __future__ import annotations

from typing import Any

from outbox_core.kafka.duty import PATIENCE_SECONDS, SILENCE_SECONDS


def stay_as_owner(self: Any) -> None:
    """Keep the partition, whether it can be led by or not."""
    del self


def never_overdue(self: Any, now: float) -> dict[str, float]:
    """Take no work for overdue."""
    del self, now
    return {}


def no_patience_with_newcomers(self: Any, now: float) -> dict[str, float]:
    """Take work for overdue as soon as if it had succeeded before."""
    return {work: seconds for work, seconds in self.owed(now).items() if seconds >= PATIENCE_SECONDS}


def no_word_of_others(self: Any) -> int:
    """Take oneself for the only member."""
    del self
    return 1


def come_back_unproved(self: Any, now: float) -> bool:
    """Come back as soon as the group lets one in, without a probe and beside a leader."""
    del now
    return bool(self.is_out)


def stay_out_while_silent(self: Any, now: float) -> bool:
    """Come back once nobody leads, and never for a probe's sake."""
    return bool(self.is_out and now - self._heard_at >= SILENCE_SECONDS)


def unbounded(seconds: float) -> None:
    """Give a statement no deadline of the client's own."""
    del seconds
