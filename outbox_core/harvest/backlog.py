"""The count of waiting records for the metrics, on a connection of its own."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.outage import Outage
from outbox_core.stores.interface import Backlog, OutboxStore

if TYPE_CHECKING:
    from outbox_core.harvest.harvester import Harvester

_log = logging.getLogger(__name__)

# Where the head of the table is full of dead rows a count goes through them: at most a tenth of the time.
_PAUSE_FACTOR = 9


class BacklogObserver:
    """A thread that counts at intervals while its harvester leads, or while there is no leader."""

    def __init__(self, store: OutboxStore, harvester: Harvester, interval_seconds: float) -> None:
        self._store = store
        self._harvester = harvester
        self._interval = interval_seconds
        self._stopping = threading.Event()
        self._outage = Outage("counting the backlog", _log)
        self._thread = threading.Thread(target=self._run, name="outbox-backlog", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.is_set():
            began = time.monotonic()
            self._harvester.metrics.backlog(self._ask() if self._harvester.counts_backlog else None)
            self._stopping.wait(max(self._interval, _PAUSE_FACTOR * (time.monotonic() - began)))
        self._store.close()

    def _ask(self) -> Backlog | None:
        """Return the backlog; None if it is not known, as 0 would be good news."""
        try:
            backlog = self._store.backlog()
        except StoreUnavailable:
            return None  # the harvest thread says so
        except OutboxTableError as error:
            self._outage.failed(error)
            return None
        self._outage.recovered()
        return backlog
