"""The clock of one marker partition's deadlines: the timestamps of its markers, and a monotonic clock between them.

Brokers stamp markers as they append them, so consumers' and trackers' wall clocks do not matter. Brokers' clocks are
set, drift and differ: a new partition leader may be an hour off. So the clock turns stamps into a time of its own,
which never goes back, and which a stamp can move no further than the stamp can be true:

- **History**, until `read_up_to` is called: a marker has its own timestamp, or the last one where that was later.
  Forward gaps are believed: the queue may have been idle for an hour.
- **Live**: a marker read now was appended before now, and after the moment up to which everything has been read
  (`read_up_to`). A stamp outside of these two means that the brokers' clock was set. Then the marker counts as
  appended at the nearer end, and later stamps are shifted by the same amount.

A clock that was set back shows itself only once the stamps are outside: until then markers seem to be older than they
are, and another leader's clock may be right before that. So the deadlines of what is read live count from the `latest`
moment at which its marker can have been appended: when it was read.

So a clock that is set can make a message wait for its deadline again, and never makes one expire that is kept alive.
A stamp less than a second in the future is just followed: two clocks are never quite alike. In history a clock that was
set forward looks like an idle hour: what was in progress then seems to be expired.

All times are milliseconds; `now` is on a monotonic clock.
"""

from __future__ import annotations

TOLERANCE_MS = 1000.0


class DeadlineClock:
    """The clock of one partition, for one thread."""

    def __init__(self) -> None:
        self._time: float | None = None
        self._set_at = 0.0
        self._shift = 0.0
        self._last_stamp = 0.0
        self._known_since: float | None = None  # live: the time, on this clock, up to which everything is read

    def time(self, now: float) -> float | None:
        """Return the time; None before the first marker."""
        return None if self._time is None else self._time + max(0.0, now - self._set_at)

    def read(self, stamp: float, now: float) -> float:
        """Read a marker's timestamp; return the time at which it was appended, on this clock."""
        if self._known_since is not None:
            return self._read_live(stamp, now)
        self._last_stamp = stamp
        if self._time is None or stamp > self._time:
            self._time = stamp
        self._set_at = now
        return self._time

    def latest(self, appended: float, now: float) -> float:
        """Return the latest time at which a marker that was read just now can have been appended."""
        time = self.time(now)
        return appended if time is None or self._known_since is None else max(time, appended)

    def read_up_to(self, asked_at: float, now: float) -> None:
        """Become live: everything appended before the moment `asked_at` has been read."""
        time = self.time(now)
        if time is None:
            return
        known_since = time - max(0.0, now - asked_at)
        if self._known_since is None:
            self._shift = (self._time or 0.0) - self._last_stamp
            self._known_since = known_since
        self._known_since = max(self._known_since, known_since)

    def _read_live(self, stamp: float, now: float) -> float:
        time, earliest = self.time(now), self._known_since
        assert time is not None and earliest is not None  # noqa: S101, PT018  live
        appended = stamp + self._shift
        if appended < earliest:
            appended = earliest
            self._shift = appended - stamp
        elif appended > time + TOLERANCE_MS:
            appended = time
            self._shift = appended - stamp
        if appended > time:
            self._time, self._set_at = appended, now
        return appended
