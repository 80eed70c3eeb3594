"""When to look at the table again: at once while there is more, ever more rarely while there is nothing.

An idle outbox must cost next to nothing, and yet a record must not wait long for the next look:

- a look that brought a full batch is followed by the next one at once;
- one that brought something, by the next one after a millisecond: at a thousand records a second that already is a
  batch, and looking without a pause would only take the database's time from those who write;
- after one that brought nothing, every pause is a third longer than the last, up to a ceiling. So a record waits for
  about a third of the time for which none had come, at most;
- a look that took long without bringing anything (there are dead rows to wade through) is not repeated before four
  times its duration: idle looks take at most a fifth of one core of the database. If it only took long because the
  database did not answer, that must not keep records waiting for long;
- `News` that something was committed ends every such pause, unless news has just been false: whoever may connect to
  the database may send notices, so each look that was told of a commit and found none makes the next one that is told
  of something wait twice as long after it, up to a fiftieth of a second.

**News only ever shortens a wait.** It is taken when a look begins, so news that comes while a look is under way, and
may be of a commit that this look began too early to see, counts for the next one. Whatever nobody told us of is found
when the pause is over: by a ceiling of `longest` seconds, or, while somebody promises to tell of every commit,
of two.
"""

from __future__ import annotations

from collections.abc import Callable
from threading import Event

_FIRST_PAUSE_SECONDS = 0.001
_GROWTH = 4 / 3
_EMPTY_LOOK_REST = 4
_LONGEST_REST_SECONDS = 2.0
_LONGEST_PAUSE_WHEN_TOLD_SECONDS = 2.0
_LONGEST_PAUSE_AFTER_FALSE_NEWS_SECONDS = 0.02


class News:
    """Whether something was committed since it was last asked. Told from any thread, taken by the harvest thread.

    Args:
        wake: set with all news.

    Attributes:
        is_promised: whether somebody tells of every commit, so that looking without news can be rare.
    """

    def __init__(self, wake: Event) -> None:
        self._wake = wake
        self._told = False
        self.is_promised = False

    def tell(self) -> None:
        """Something may have been committed."""
        self._told = True
        self._wake.set()

    def take(self) -> None:
        """A look begins now; it will see everything that was told of until now."""
        self._told = False

    def __bool__(self) -> bool:
        """Whether there is news that no look has seen."""
        return self._told


class Pace:
    """Says when to look next. Used by the harvest thread.

    Args:
        longest: ceiling of the pauses, in seconds.
        news: what ends them early.
        clock: a monotonic clock, in seconds.
    """

    def __init__(self, longest: float, news: News, clock: Callable[[], float]) -> None:
        self._longest = longest
        self._news = news
        self._clock = clock
        self._pause = _FIRST_PAUSE_SECONDS
        self._is_told = False
        self._pause_with_news = _FIRST_PAUSE_SECONDS
        self._soonest = 0.0  # with news
        self._due = 0.0

    def begin(self) -> None:
        """A look begins."""
        self._is_told = bool(self._news)
        self._news.take()

    def found(self, *, more: bool) -> None:
        """The look brought something; `more` if it stopped at its limit."""
        self._pause = self._pause_with_news = _FIRST_PAUSE_SECONDS
        self._soonest = self._due = 0.0 if more else self._clock() + _FIRST_PAUSE_SECONDS

    def found_nothing(self, took: float) -> None:
        """The look brought nothing, and took so many seconds."""
        ceiling = max(self._longest, _LONGEST_PAUSE_WHEN_TOLD_SECONDS) if self._news.is_promised else self._longest
        self._pause = min(ceiling, self._pause * _GROWTH)
        time = self._clock()
        if self._is_told:
            self._pause_with_news = min(_LONGEST_PAUSE_AFTER_FALSE_NEWS_SECONDS, self._pause_with_news * 2)
        self._soonest = time + min(self._pause_with_news, self._longest)
        self._due = time + max(self._pause, min(_LONGEST_REST_SECONDS, took * _EMPTY_LOOK_REST))

    def failed(self, rest: float) -> None:
        """The look failed; news or not, nothing is to be asked for so many seconds."""
        self._soonest = self._due = self._clock() + rest

    def due_in(self) -> float:
        """Seconds until the next look is due, 0.0 if it is."""
        due = min(self._due, self._soonest) if self._news else self._due
        return max(0.0, due - self._clock())
