"""Who leads an outbox, as a stream's reader sees it: told by the relay that started it, or elected here."""

from __future__ import annotations

import threading

from outbox_core.config import HarvestConfig
from outbox_core.election import Neli, NeliConfig
from outbox_core.election.leadership import now
from outbox_core.events import EventHandler


class GivenTerm:
    """The relay leads, and ends the query when it no longer does.

    Args:
        term: number of its claim.
    """

    def __init__(self, term: int) -> None:
        self._term = term

    def term(self) -> int | None:
        """The number of the claim."""
        return self._term

    def stop(self) -> None:
        """Nothing: the relay stops contending."""


class OwnElection:
    """The reader contends itself, in the harvesters' group, from the first question on.

    Args:
        config: the harvester's settings.
        identity: the outbox's.
        server_id: its database server's.
    """

    def __init__(self, config: HarvestConfig, identity: str, server_id: str) -> None:
        self._neli = make_elector(config, identity, server_id)
        self._starting = threading.Lock()
        self._started = False

    def term(self) -> int | None:
        """The number of our claim while its lease is valid.

        Raises:
            OutboxError: what keeps us from ever leading.
        """
        with self._starting:
            if not self._started:
                self._neli.start()
                self._started = True
        if self._neli.failure is not None:
            raise self._neli.failure
        lease = self._neli.leadership
        return lease.term if lease is not None and lease.is_valid(now()) else None

    def stop(self) -> None:
        """Hand over."""
        self._neli.stop()


def make_elector(config: HarvestConfig, identity: str, server_id: str, on_event: EventHandler | None = None) -> Neli:
    """A member of the group in which the harvesters of this outbox contend."""
    return Neli(NeliConfig.of(config, identity, server_id), on_event)
