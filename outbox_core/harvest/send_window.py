"""Room in a lease for a send: a record must be delivered or given up before the lease it was sent under ends.

The producer gives up a record after its delivery timeout, so nothing is sent once less than that is left of the lease.
A lease counts from the *sending* of the heartbeat that renewed it. With heartbeats that come back late (a starved
machine, a slow broker) little of it is left at any time: leadership lasts, and nothing can be sent. Then

- a producer with a shorter delivery timeout, a half or a quarter of the configured one, has room where the other has
  none. It is made while nothing is in flight, as every other is, and the rule above stays what it is;
- until then, and if even that is too long, records wait. The log says so after some seconds and again every minute;
  `/healthz` and a gauge say it too. Another process may be in a better place: whoever restarts what is unwell sees to
  that.

Once every look has found room for the whole delivery timeout for a while, that is taken up again.

Changed by the harvest thread; `trouble` may be asked by any. It outlives leaderships: one that is lost and gained every
few seconds without sending anything is no better than one that lasts.
"""

from __future__ import annotations

import logging

from outbox_core.election.leadership import now
from outbox_core.metrics import HarvestMetrics

_log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 0.05
"""Pause between looks while records wait: heartbeats come a few times a second, and each may bring room."""

_SHORTEN_AFTER_SECONDS = 2.0
_TELL_AFTER_SECONDS = 5.0
_TELL_AGAIN_SECONDS = 60.0
_CALM_SECONDS = 10.0
_FORGOTTEN_AFTER_SECONDS = 30.0  # without a look that found records waiting
_SHARES = (1 / 2, 1 / 4)
_SPARE = 3 / 4  # of the most that was left: what is left falls, and rises with each heartbeat


class SendWindow:
    """The delivery timeout that the present leases have room for, and since when nothing could be sent.

    Args:
        longest: the configured delivery timeout, in seconds.
        shortest: the shortest that a producer can have, in seconds; by default it cannot be changed.
        metrics: where to show how long records have waited.

    Attributes:
        timeout: the delivery timeout that the producer should have now, in seconds.
    """

    def __init__(self, longest: float, metrics: HarvestMetrics, *, shortest: float | None = None) -> None:
        self.timeout = longest
        self._longest = longest
        self._shorter = [longest * share for share in _SHARES if shortest is not None and longest * share >= shortest]
        self._metrics = metrics
        self._waits_since: float | None = None
        self._waited_at = 0.0
        self._most_left = 0.0
        self._told_at: float | None = None
        self._calm_since: float | None = None

    @property
    def is_waited_for(self) -> bool:
        """True while records wait for a lease with more left."""
        return self._waits_since is not None

    def trouble(self, limit_seconds: float) -> str | None:
        """Return what keeps records from being sent, if it has for longer than a limit."""
        since = self._waits_since
        if since is None or self._waited_at - since <= limit_seconds:
            return None
        return f"it leads, and records have waited for {self._waited_at - since:.0f} s: {self._why}"

    def look(self, left: float, *, records_wait: bool) -> None:
        """Take note of what is left of a lease.

        Args:
            left: seconds that are left of the lease.
            records_wait: whether there is anything to send.
        """
        time = now()
        self._see_calm(left, time)
        if records_wait and left <= self.timeout:
            self._wait(left, time)
        elif self._waits_since is not None:
            self._over(time)

    def leadership_ends(self) -> None:
        """Nobody waits here any more; a leadership that follows soon goes on where this one ended."""
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
            self._most_left, self._told_at = 0.0, None
            self._waits_since = time
        self._waited_at = time
        self._most_left = max(self._most_left, left)
        waited = time - self._waits_since
        self._metrics.send_wait(waited)
        if waited >= _TELL_AFTER_SECONDS and (self._told_at is None or time - self._told_at >= _TELL_AGAIN_SECONDS):
            self._told_at = time
            _log.warning("it leads, and records have waited for %.0f s: %s", waited, self._why)
        if waited >= _SHORTEN_AFTER_SECONDS:
            self._shorten()

    def _shorten(self) -> None:
        fitting = [shorter for shorter in self._shorter if shorter <= self._most_left * _SPARE]
        if fitting and fitting[0] < self.timeout:
            _log.info("heartbeats come back late: delivery.timeout.ms is %g s for now", fitting[0])
            self.timeout = fitting[0]

    def _over(self, time: float) -> None:
        waited = time - (self._waits_since or time)
        self._waits_since = None
        self._metrics.send_wait(0.0)
        if self._told_at is not None:
            self._told_at = None
            _log.warning("the lease has room again: records are sent after %.0f s", waited)

    def _see_calm(self, left: float, time: float) -> None:
        """Take up the whole delivery timeout again once there has been room for it for a while."""
        if self.timeout == self._longest:
            return
        if left <= self._longest:
            self._calm_since = None
        elif self._calm_since is None:
            self._calm_since = time
        elif time - self._calm_since >= _CALM_SECONDS:
            self._calm_since = None
            self.timeout = self._longest
