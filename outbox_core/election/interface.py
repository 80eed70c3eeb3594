"""The seam between the harvester and its elector."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from outbox_core.election.lease import Leadership
from outbox_core.events import EventHandler


class LeaderElector(Protocol):
    """Says who may publish. Runs on a thread of its own."""

    @property
    def leadership(self) -> Leadership | None:
        """The current lease, or None. May already have expired: compare its deadline with now."""

    def start(self) -> None:
        """Begin to contend. Raises if that can never work (topic, rights, settings)."""

    def stop(self) -> None:
        """Hand leadership back (`LeaderRevoked`, if held) and leave the group. Idempotent."""

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the elector, or None."""

    @property
    def trouble(self) -> str | None:
        """The reason why the group has no leader, for people; None while it works."""

    @property
    def silent_seconds(self) -> float:
        """Seconds since Kafka answered last; 0.0 where that is not known."""

    def step_down(self, reason: str, is_able: Callable[[], bool]) -> None:
        """Hand leadership over (`LeaderRevoked`, if held), and contend for none for a time; returns at once.

        For who cannot do a leader's work: another process may. `reason` is for people. Contends again once `is_able`,
        asked on a thread of its own, returns True, or once no process leads. An elector without this method keeps the
        leadership.
        """


ElectorFactory = Callable[[EventHandler], LeaderElector]
