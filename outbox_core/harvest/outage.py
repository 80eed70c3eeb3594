"""Logs trouble once when it begins and once when it ends, however often it is retried in between.

Where nothing else shows that it lasts, it is logged now and then meanwhile, too.
"""

from __future__ import annotations

import logging
import time


class Outage:
    """The state of one thing that can be away: the database, or delivery to Kafka.

    Args:
        what: what is away, as the log shall name it.
        log: where to say so.
        again_seconds: after how many seconds a failure says so again; None for never.
    """

    def __init__(self, what: str, log: logging.Logger, again_seconds: float | None = None) -> None:
        self._what = what
        self._log = log
        self._again_seconds = again_seconds
        self._told_at = 0.0
        self._began_at: float | None = None
        self._failed_at = 0.0
        self._worked_at = 0.0
        self._reason = ""

    def began(self, error: object) -> None:
        """It failed; says so if it worked before, or if that was said long ago."""
        self._failed_at = time.monotonic()
        if self._began_at is None:
            self._began_at = self._told_at = self._failed_at
            self._reason = str(error)
            self._log.warning("%s: %s; retrying", self._what, error)
        elif self._again_seconds is not None and self._failed_at - self._told_at >= self._again_seconds:
            self._told_at = self._failed_at
            self._reason = str(error)
            self._log.warning("%s: %s; retrying for %.0f s", self._what, error, self._failed_at - self._began_at)

    def ended(self) -> None:
        """It worked; says so if it failed before."""
        if self._began_at is not None:
            self._log.warning("%s: back after %.1f s", self._what, time.monotonic() - self._began_at)
            self._began_at = None

    def dismissed(self) -> None:
        """Whether it works is not seen from here any more, so we do not call it away."""
        if self._began_at is not None:
            self._log.info("%s: not known to fail any more", self._what)
            self._began_at = None

    def faded(self, seconds: float) -> None:
        """Nothing waits for it: if it has not failed for so long either, we do not call it away."""
        if self._began_at is not None and time.monotonic() - self._failed_at > seconds:
            self.dismissed()

    def worked(self, *, all_of_it: bool) -> None:
        """It worked; unless all of it does, what failed before still fails, and the log hears of neither."""
        self._worked_at = time.monotonic()
        if all_of_it:
            self.ended()

    @property
    def has_begun(self) -> bool:
        """Whether it failed when it was last tried."""
        return self._began_at is not None

    @property
    def lasted_seconds(self) -> float:
        """For how long nothing of it has worked, 0.0 if it is not away."""
        return 0.0 if self._began_at is None else time.monotonic() - max(self._began_at, self._worked_at)

    def describe(self) -> str:
        """What has been away for how long, and why."""
        return f"{self._what}: away for {self.lasted_seconds:.0f} s ({self._reason})"
