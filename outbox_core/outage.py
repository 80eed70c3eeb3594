"""Logs of trouble: a line when it begins and one when it ends, however often it is retried in between."""

from __future__ import annotations

import logging
import time


class Outage:
    """The state of one thing that can fail for a while; logged again after `again_seconds` where no metric shows it."""

    def __init__(self, what: str, log: logging.Logger, again_seconds: float | None = None) -> None:
        self._what = what
        self._log = log
        self._again_seconds = again_seconds
        self._logged_at = 0.0
        self._began_at: float | None = None
        self._failed_at = 0.0
        self._succeeded_at = 0.0
        self._reason = ""
        self._sufferers: set[object] = set()

    def failed(self, error: object, sufferer: object = None) -> None:
        """Note a failure; log it if it is the first, or if the last line is old.

        The success of another user of the thing than the `sufferer`, over a connection of its own say, does not end it.
        """
        self._sufferers.add(sufferer)
        self._failed_at = time.monotonic()
        self._reason = str(error)
        if self._began_at is None:
            self._began_at = self._logged_at = self._failed_at
            self._log.warning("%s: %s; retrying", self._what, error)
        elif self._again_seconds is not None and self._failed_at - self._logged_at >= self._again_seconds:
            self._logged_at = self._failed_at
            self._log.warning("%s: %s; retrying for %.0f s", self._what, error, self._failed_at - self._began_at)

    def recovered(self, sufferer: object = None) -> None:
        """End the outage, and log that, if there is one and no one else suffers from it."""
        self._sufferers.discard(sufferer)
        if self._began_at is not None and not self._sufferers:
            self._log.warning("%s: back after %.1f s", self._what, time.monotonic() - self._began_at)
            self._began_at = None

    def forget(self) -> None:
        """Forget the outage: this process cannot see any more if it lasts."""
        self._sufferers.clear()
        if self._began_at is not None:
            self._log.info("%s: not known to fail any more", self._what)
            self._began_at = None

    def expire_after(self, seconds: float) -> None:
        """Forget the outage if the last failure is older than this; for a time without attempts."""
        if self._began_at is not None and time.monotonic() - self._failed_at > seconds:
            self.forget()

    def succeeded(self, *, all_of_it: bool) -> None:
        """Note a success; it ends the outage only if all of it works."""
        self._succeeded_at = time.monotonic()
        if all_of_it:
            self.recovered()

    @property
    def is_ongoing(self) -> bool:
        """True if the last attempt failed."""
        return self._began_at is not None

    @property
    def lasted_seconds(self) -> float:
        """Seconds without any success; 0.0 if there is no outage."""
        began_at = self._began_at  # another thread may end it meanwhile
        return 0.0 if began_at is None else time.monotonic() - max(began_at, self._succeeded_at)

    def describe(self) -> str:
        """Return name, duration and reason in one line."""
        return f"{self._what}: away for {self.lasted_seconds:.0f} s ({self._reason})"
