"""The leadership of an outbox for the driver of a relay."""

from __future__ import annotations

import threading

from outbox_core.config import HarvestConfig
from outbox_core.election import Leadership, Neli, NeliConfig
from outbox_core.election.lease import now
from outbox_core.events import Event, LeaderAcquired, LeaderRevoked


class Contender:
    """A member of the harvesters' group whose leadership is at work between `begin` and `end`.

    The elector's thread calls `_on_event`; all other calls come from one thread. Both use `_announced` and `_busy`,
    under `_changed`.
    """

    def __init__(self, config: HarvestConfig, identity: str, server_id: str) -> None:
        self._elector = Neli(NeliConfig.of(config, identity, server_id), self._on_event)
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

    def _on_event(self, event: Event) -> None:
        with self._changed:
            self._announced = self._elector.leadership if isinstance(event, LeaderAcquired) else None
            if isinstance(event, LeaderRevoked):
                # The group elects no other leader before this returns: wait until the query has stopped.
                self._changed.wait_for(lambda: not self._busy, self._drain_seconds)

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
