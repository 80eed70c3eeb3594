"""The leadership of an outbox for the driver of a relay."""

from __future__ import annotations

import threading
from collections.abc import Callable

from outbox_core.config import HarvestConfig
from outbox_core.election import Leadership, Neli, NeliConfig
from outbox_core.election.lease import now
from outbox_core.events import Event, LeaderAcquired, LeaderFenced, LeaderRevoked

_UNABLE_SECONDS = 5.0


class Contender:
    """A member of the harvesters' group whose leadership is at work between `begin` and `end`.

    The elector's thread calls `_on_event`, and a watch `step_down`; all other calls come from one thread. All use
    `_announced` and `_busy`, under `_changed` if they change them.

    Args:
        config: Settings of the outbox.
        identity: The outbox's.
        server_id: That of its database.
        leads: Told on the elector's thread that leadership begins (before `begin` returns it) or ends, and if it was
            handed over rather than lost.
    """

    def __init__(
        self, config: HarvestConfig, identity: str, server_id: str, leads: Callable[[bool, bool], None]
    ) -> None:
        self._elector = Neli(NeliConfig.of(config, identity, server_id), self._on_event)
        self._on_leading = leads
        self._steps_down = False  # because it cannot work
        self._drain_seconds = config.limits.drain_timeout.total_seconds()
        self._changed = threading.Condition()
        self._announced: Leadership | None = None
        self._busy = False

    def start(self) -> None:
        """Begin to contend."""
        self._elector.start()

    def stop(self) -> None:
        """Hand over, and stop contending."""
        self._elector.stop()

    def step_down(self, reason: str, is_able: Callable[[], bool]) -> None:
        """Hand over, and contend again once this process is able to work; see `Neli.step_down`.

        It is not while the leadership that it has begun is still at work: its thread could begin no other.
        """
        self._steps_down = True
        self._elector.step_down(reason, lambda: not self._busy and is_able())

    def _on_event(self, event: Event) -> None:
        self._on_leading(isinstance(event, LeaderAcquired), not isinstance(event, LeaderFenced))
        with self._changed:
            self._announced = self._elector.leadership if isinstance(event, LeaderAcquired) else None
            if isinstance(event, LeaderRevoked):
                # The group elects no other leader before this returns: wait until the query has stopped.
                # One that cannot work may hang, and must not hold up its successor, which fences it anyway.
                most = min(_UNABLE_SECONDS, self._drain_seconds) if self._steps_down else self._drain_seconds
                self._changed.wait_for(lambda: not self._busy, most)
            if isinstance(event, LeaderAcquired):
                self._steps_down = False

    @property
    def trouble(self) -> str | None:
        """The reason why the group has no leader; None while there is one."""
        return self._elector.trouble

    def begin(self) -> Leadership | None:
        """Return our leadership, if any, which is handed over only after `end`. Raises the election's error."""
        if self._elector.failure is not None:
            raise self._elector.failure
        with self._changed:
            lease = self._elector.leadership
            if lease is None or not self.leads(lease):
                return None
            self._busy = True
            return lease

    def end(self) -> None:
        """Let the leadership be handed over."""
        with self._changed:
            self._busy = False
            self._changed.notify_all()

    def leads(self, lease: Leadership) -> bool:
        """Tell whether to work on under this lease."""
        announced = self._announced
        return announced is not None and announced.leader_id == lease.leader_id and self.holds(lease)

    def holds(self, lease: Leadership) -> bool:
        """Tell whether this lease is valid, also while it is being handed over."""
        present = self._elector.leadership
        return present is not None and present.leader_id == lease.leader_id and present.is_valid(now())
