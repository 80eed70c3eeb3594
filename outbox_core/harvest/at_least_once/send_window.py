"""Room in a lease for a send: a record must be delivered or given up before the lease it was sent under ends.

The producer gives up a record after its delivery timeout, so no record is sent once less than that is left of the
lease. A lease counts from the *sending* of the heartbeat that renewed it. With late heartbeats (a starved machine,
a slow broker) little of it is left at any time: leadership lasts, and no record can be sent. So the next producer, made
while no record is in flight, may get a half or a quarter of the configured timeout, until every check has found room
for the whole one for a while. Meanwhile records wait; the log, `/healthz` and a gauge say so.

The harvest thread changes a window; any thread may ask for `trouble`. It outlives leaderships: one that is lost and
regained every few seconds without a send is no better than one that lasts.
"""

from __future__ import annotations

import logging

from outbox_core.election.lease import now
from outbox_core.metrics import HarvestMetrics

_log = logging.getLogger(__name__)

CHECK_EVERY_SECONDS = 0.05
"""Interval of checks while records wait: heartbeats come a few times a second, and each may bring room."""

_SHORTEN_AFTER_SECONDS = 2.0
_LOG_AFTER_SECONDS = 5.0
_LOG_AGAIN_SECONDS = 60.0
_LATELY_SECONDS = 2.0
_CALM_SECONDS = 10.0
_FORGOTTEN_AFTER_SECONDS = 30.0  # without waiting records
_SHARES = (1 / 2, 1 / 4)
_SPARE = 3 / 4  # of the most that was left: what is left falls, and rises with each heartbeat


class SendWindow:
    """The delivery timeout that present leases have room for, in seconds, and the wait of records for more room."""

    def __init__(self, longest: float, metrics: HarvestMetrics, *, shortest: float | None = None) -> None:
        self.timeout = longest
        self._longest = longest
        self._shorter = [longest * share for share in _SHARES if shortest is not None and longest * share >= shortest]
        self._metrics = metrics
        self._waits_since: float | None = None
        self._waited_at = 0.0
        self._most_left = 0.0
        self._logged_at: float | None = None
        self._calm_since: float | None = None

    @property
    def has_waiting(self) -> bool:
        """True while records wait for a lease with more left."""
        return self._waits_since is not None

    @property
    def waited_seconds(self) -> float:
        """Seconds for which records have waited; 0.0 if none has waited in the last moments."""
        since = self._waits_since
        return 0.0 if since is None or now() - self._waited_at > _LATELY_SECONDS else self._waited_at - since

    def trouble(self, limit_seconds: float) -> str | None:
        """Return why no record can be sent, if that has lasted for longer than a limit."""
        since = self._waits_since
        if since is None or self._waited_at - since <= limit_seconds:
            return None
        return f"it leads, and records have waited for {self._waited_at - since:.0f} s: {self._why}"

    def update(self, left: float, *, records_wait: bool) -> None:
        """Take in the seconds that are left of a lease."""
        time = now()
        self._restore_when_calm(left, time)
        if records_wait and left <= self.timeout:
            self._wait(left, time)
        elif self._waits_since is not None:
            self._end(time)

    def leadership_ends(self) -> None:
        """Reset the gauge; a leadership that follows soon goes on where this one ended."""
        self._metrics.send_wait(0.0)

    @property
    def _why(self) -> str:
        return (
            f"heartbeats come back so late that {self._most_left:.1f} s of the lease are left at most, and "
            f"delivery.timeout.ms needs {self.timeout:g} s. Nothing can be sent: give this process and the brokers "
            "more CPU, or raise heartbeatTimeout"
        )

    def _wait(self, left: float, time: float) -> None:
        if self._waits_since is None or time - self._waited_at > _FORGOTTEN_AFTER_SECONDS:
            self._most_left, self._logged_at = 0.0, None
            self._waits_since = time
        self._waited_at = time
        self._most_left = max(self._most_left, left)
        waited = time - self._waits_since
        self._metrics.send_wait(waited)
        if waited >= _LOG_AFTER_SECONDS and (self._logged_at is None or time - self._logged_at >= _LOG_AGAIN_SECONDS):
            self._logged_at = time
            _log.warning("it leads, and records have waited for %.0f s: %s", waited, self._why)
        fitting = [shorter for shorter in self._shorter if shorter <= self._most_left * _SPARE]
        if waited >= _SHORTEN_AFTER_SECONDS and fitting and fitting[0] < self.timeout:
            _log.info("heartbeats come back late: delivery.timeout.ms is %g s for now", fitting[0])
            self.timeout = fitting[0]

    def _end(self, time: float) -> None:
        waited = time - (self._waits_since or time)
        self._waits_since = None
        self._metrics.send_wait(0.0)
        if self._logged_at is not None:
            self._logged_at = None
            _log.warning("the lease has room again: records are sent after %.0f s", waited)

    def _restore_when_calm(self, left: float, time: float) -> None:
        if self.timeout == self._longest:
            return
        if left <= self._longest:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = time
        elif time - self._calm_since >= _CALM_SECONDS:
            self._calm_since = None
            self.timeout = self._longest
