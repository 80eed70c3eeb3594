"""Logs of trouble: a line when it begins, one for each new reason, and one when it ends, however often it is tried."""

from __future__ import annotations

import logging
import re
import time

_MOST_REASONS = 5
_DETAILS = re.compile(r"[0-9]+")  # durations, addresses, ids: they differ at each attempt


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
        self._logged_reasons: set[str] = set()
        self._sufferers: set[object] = set()

    def failed(self, error: object, sufferer: object = None, *, at: str = "") -> None:
        """Note a failure; log it if it is the first, if it has another reason than before, or if the last line is old.

        The success of another user of the thing than the `sufferer`, over a connection of its own say, does not end it.
        `at` is the place of the failure, which makes no other reason.
        """
        self._sufferers.add(sufferer)
        self._failed_at = time.monotonic()
        self._reason = f"{at}: {error}" if at else str(error)
        if self._began_at is None:
            self._began_at = self._failed_at
            self._logged_reasons.clear()
        elif not self._is_news(error):
            return
        self._logged_at = self._failed_at
        self._logged_reasons.add(_kind(error))
        lasts = self._failed_at - self._began_at
        self._log.warning("%s: %s; retrying%s", self._what, self._reason, f" for {lasts:.0f} s" if lasts else "")

    def _is_news(self, error: object) -> bool:
        if self._again_seconds is not None and self._failed_at - self._logged_at >= self._again_seconds:
            return True
        return len(self._logged_reasons) < _MOST_REASONS and _kind(error) not in self._logged_reasons

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


def _kind(error: object) -> str:
    return _DETAILS.sub("", str(error))
