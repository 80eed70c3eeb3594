"""Adaptive polling: immediately after a full batch, with exponential backoff while the table is empty.

- After a batch below its limit the next poll waits a millisecond, which leaves the database's time to the writers.
- After an empty poll the pause is a sixteenth of the time since the last row, up to a ceiling. So a record that comes a
  tenth of a second after another waits 3 ms on average, and an idle table is polled as rarely as the ceiling says.
- An empty poll that took long (it wades through dead rows) is not repeated before four times its duration: idle polls
  take at most a fifth of one core of the database. A ceiling limits that, as the database may only have been slow.
- A signalled commit ends such a pause. Any role of the database may send false signals, so each poll that follows one
  and finds no row doubles the pause before the next, up to a fiftieth of a second.

**A signal only ever shortens a wait.** The flag is cleared when a poll starts, so a signal during a poll counts for the
next one. Unsignalled commits are found after `longest` seconds, or two seconds while signals are reliable.
"""

from __future__ import annotations

from collections.abc import Callable

from outbox_core.commit_signal import CommitFlag

_FIRST_PAUSE_SECONDS = 0.001
_SHARE_OF_SILENCE = 1 / 16
_SLOW_POLL_FACTOR = 4
_LONGEST_PAUSE_AFTER_SLOW_POLL_SECONDS = 2.0
_LONGEST_PAUSE_WITH_SIGNALS_SECONDS = 2.0
_LONGEST_PAUSE_AFTER_FALSE_SIGNAL_SECONDS = 0.02


class PollSchedule:
    """The time of the next poll, on the harvest thread: pauses up to `longest` seconds, which commits end early."""

    def __init__(self, longest: float, commits: CommitFlag, clock: Callable[[], float]) -> None:
        self._longest = longest
        self._commits = commits
        self._clock = clock
        self._found_at = clock()
        self._pause_after_signal = _FIRST_PAUSE_SECONDS
        self._was_signalled = False
        self._due = self._due_if_signalled = 0.0

    def poll_starts(self) -> None:
        """Note that a poll starts, and if a signal asked for it."""
        self._was_signalled = bool(self._commits)
        self._commits.clear()

    def found_rows(self, *, more: bool) -> None:
        """Schedule the next poll after one that found rows; `more` if it stopped at its limit."""
        self._found_at = self._clock()
        self._pause_after_signal = _FIRST_PAUSE_SECONDS
        self._due = self._due_if_signalled = 0.0 if more else self._found_at + _FIRST_PAUSE_SECONDS

    def found_none(self, took: float) -> None:
        """Schedule the next poll after one that found no row, and took so many seconds."""
        ceiling = (
            max(self._longest, _LONGEST_PAUSE_WITH_SIGNALS_SECONDS) if self._commits.is_reliable else self._longest
        )
        time = self._clock()
        pause = min(ceiling, max(_FIRST_PAUSE_SECONDS, (time - self._found_at) * _SHARE_OF_SILENCE))
        if self._was_signalled:
            self._pause_after_signal = min(_LONGEST_PAUSE_AFTER_FALSE_SIGNAL_SECONDS, self._pause_after_signal * 2)
        after_slow = min(_LONGEST_PAUSE_AFTER_SLOW_POLL_SECONDS, took * _SLOW_POLL_FACTOR)
        self._due = time + max(pause, after_slow)
        self._due_if_signalled = time + min(self._pause_after_signal, self._longest)

    def retry_in(self, seconds: float) -> None:
        """Schedule the next poll after a failure; signals do not shorten this."""
        self._due = self._due_if_signalled = self._clock() + seconds

    def due_in(self) -> float:
        """Return the seconds until the next poll is due, 0.0 if it is."""
        due = min(self._due, self._due_if_signalled) if self._commits else self._due
        return max(0.0, due - self._clock())
