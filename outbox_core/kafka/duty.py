"""The rule by which a member of a group that cannot do the group's work leaves it to the others.

Kafka lets a member keep its partitions for as long as its heartbeats reach the group's coordinator. The work needs
more: a database, the brokers of the data, a coordinator of transactions. Without this rule a member with one bad link
keeps the work for ever, beside a healthy one that is never asked.

**Leaving.** Each kind of work has a name: "read the outbox", "write to orders[2]". Work that was tried and has not
succeeded since is *outstanding*, from the first such try on; what is only waited for was never tried. It is *overdue*
after `PATIENCE_SECONDS`. A member with overdue work asks Kafka how many are in its group, and leaves unless it is the
only one. Where Kafka does not say, it leaves, too: nobody may be there, but then it comes back, as below.

**An outage for all.** No member can do the work then, and leaving helps nobody. So work that has not succeeded once
since the right to it began is overdue only `NEW_PATIENCE_SECONDS` after that beginning: the newcomer has shown that it
can do no more than its predecessor could. Those who left stay out, so n members hand over n - 1 times, at most once in
`NEW_PATIENCE_SECONDS`. The last one finds itself alone, goes on trying, and works the moment that all is mended.

**Coming back.** A member that is out probes what failed. It comes back once a probe succeeds; or once it has heard
nobody at the work for its silence, as then somebody must try. An ill member that is alone sees the one that came
back when it asks the next time, and leaves.

A member that comes back and fails once more has the patience of a newcomer: a probe that shows less than the work needs
costs a hand-over a minute, and no more.

**A right that flaps.** A leader whose lease ends by itself (its heartbeats come back too late, say) may lead again some
seconds later, and again. Nobody else had the right meanwhile, so what it owes it owes since before.
"""

from __future__ import annotations

from typing import Final

PATIENCE_SECONDS: Final = 20.0
"""Longer than what passes by itself: an election of a partition's leader, a coordinator's move, a restart."""

NEW_PATIENCE_SECONDS: Final = 60.0
"""Bounds how often an outage for all passes the work round. Also longer than a first connection with its time-outs."""

ASK_SECONDS: Final = 3.0
"""Between questions who is there: as long as an ill member that was alone keeps the work from one that came back."""

SILENCE_SECONDS: Final = 10.0
"""Longer than a hand-over and the lease that follows it, during which nobody is heard either, if those take no longer
than by default."""

RESUMED_SECONDS: Final = 10.0
"""A right that ended by itself and begins again within this time was nobody else's for long enough to work."""

SILENCE_JITTER_SECONDS: Final = 5.0
"""So that of several that are out one comes back first, and is heard by the others."""

FIRST_PROBE_SECONDS: Final = 1.0
LAST_PROBE_SECONDS: Final = 10.0
"""Pauses between probes, doubled from the first to the last: a third of the time in which a mended member must work."""


class Duty:
    """The state of one member: what it owes, and since when.

    It has no clock, thread or client: each `now` is a number of seconds of any one monotonic clock. One thread uses it;
    but `tried`, `succeeded` and `dropped` may be called by any, as work that hangs must be watched from beside it.

    In the group call `began`, `tried`, `succeeded`, `excused`, `ended` or `lost`, and every second or so `should_ask`,
    then `should_leave` with the answer. Once it has left call `left`, then `should_probe`, `probed` and `heard`, until
    `may_return`; then `returned`.

    Args:
        spread: From 0 to 1, drawn by chance for each member: its part of `SILENCE_JITTER_SECONDS`.
        silence: Seconds without a word of others after which somebody must try.
    """

    def __init__(self, spread: float = 0.0, silence: float = SILENCE_SECONDS) -> None:
        self._silence = silence + spread * SILENCE_JITTER_SECONDS
        self._began_at: float | None = None
        self._lost: tuple[float, float] | None = None  # when the right that was lost had begun, and when it was lost
        self._outstanding: dict[str, float] = {}  # work -> when it was tried first since it succeeded last
        self._excused: dict[str, float] = {}  # outstanding work -> when it was found last that it fails for others, too
        self._shown: set[str] = set()  # work that succeeded since the right began
        self._asked_at: float | None = None
        self._left_at: float | None = None
        self._heard_at = 0.0
        self._is_able = False
        self._probe_at = 0.0
        self._pause = 0.0

    @property
    def right_since(self) -> float | None:
        """The time at which this member's right to work began; None without it."""
        return self._began_at

    @property
    def has_right(self) -> bool:
        """True while this member has the right to work."""
        return self._began_at is not None

    @property
    def is_out(self) -> bool:
        """True after `left`, until `returned`."""
        return self._left_at is not None

    # -- in the group

    def began(self, now: float) -> None:
        """Take in that the right to work has begun: nothing is owed from before, unless it was `lost` just now."""
        began_at, lost_at = self._lost or (now, float("-inf"))
        if now - lost_at > RESUMED_SECONDS:
            self.ended()
            began_at = now
        self._began_at, self._lost = began_at, None

    def lost(self, now: float) -> None:
        """Take in that the right to work has ended by itself, and may begin again at once."""
        if self._began_at is not None:
            self._lost = self._began_at, now
            self._began_at = None

    def ended(self) -> None:
        """Take in that the right to work has ended. Idempotent."""
        self._began_at = self._lost = None
        self._outstanding.clear()
        self._excused.clear()
        self._shown.clear()

    def tried(self, work: str, now: float) -> None:
        """Take in that work begins, which may hang. Nothing without the right to it."""
        if self.has_right:
            self._outstanding.setdefault(work, now)

    def succeeded(self, work: str) -> None:
        """Take in that work was done."""
        if self.has_right:
            self.dropped(work)
            self._shown.add(work)

    def dropped(self, work: str) -> None:
        """Take in that work is not there to do any more, or that this member does not count as unable to do it."""
        self._outstanding.pop(work, None)
        self._excused.pop(work, None)

    def excused(self, work: str, now: float) -> None:
        """Take in that outstanding work would not be done by another member either: its patience begins anew."""
        if work in self._outstanding:
            self._excused[work] = now

    def owed(self, now: float) -> dict[str, float]:
        """Return the outstanding work, with the seconds since it was tried first."""
        return {work: now - since for work, since in list(self._outstanding.items())}  # others may add to it

    def overdue(self, now: float) -> dict[str, float]:
        """Return the overdue work, with the seconds since it was tried first."""
        began_at = self._began_at
        if began_at is None:
            return {}
        return {
            work: now - since
            for work, since in list(self._outstanding.items())  # others may add to it
            if now - max(since, self._excused.get(work, since)) >= PATIENCE_SECONDS
            and (work in self._shown or now - began_at >= NEW_PATIENCE_SECONDS)
        }

    def should_ask(self, now: float) -> bool:
        """Tell whether to ask Kafka now how many members the group has. True once in `ASK_SECONDS`."""
        if not self.overdue(now) or (self._asked_at is not None and now - self._asked_at < ASK_SECONDS):
            return False
        self._asked_at = now
        return True

    def should_leave(self, members: int | None, now: float) -> bool:
        """Tell whether to leave the group, given the number of its members.

        Args:
            members: This member included; None if Kafka does not say. 0 is as None: Kafka does not know of this one.
            now: The time.
        """
        return members != 1 and bool(self.overdue(now))

    # -- out of the group

    def left(self, now: float) -> None:
        """Take in that this member left the group because it should."""
        self.ended()
        self._left_at = self._heard_at = now
        self._is_able = False
        self._pause = FIRST_PROBE_SECONDS
        self._probe_at = now + self._pause

    def should_probe(self, now: float) -> bool:
        """Tell whether a probe of what failed is due."""
        return self.is_out and not self._is_able and now >= self._probe_at

    def probed(self, now: float, *, is_able: bool) -> None:
        """Take in a probe's result."""
        self._is_able = is_able
        self._pause = min(2 * self._pause, LAST_PROBE_SECONDS)
        self._probe_at = now + self._pause

    def heard(self, now: float) -> None:
        """Take in that another member is at the work, able or not."""
        self._heard_at = now

    def may_return(self, now: float) -> bool:
        """Tell whether to join the group again."""
        return self.is_out and (self._is_able or now - self._heard_at >= self._silence)

    def returned(self) -> None:
        """Take in that this member joins the group again."""
        self._left_at = None
