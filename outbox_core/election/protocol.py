"""The NELI protocol of the partition's owner as a state machine, without clocks or clients.

An ownership lasts from the assignment of the partition until it is revoked or lost. The owner writes to the partition,
and reads it from the end it had when the ownership began. Kafka puts all messages there in one order, in which all
members read them; so at every offset there is exactly one **highest claim**, and only its writer may lead.

                        partition assigned
                               |
                               v   writes a claim, again if it does not come back
         +--------------- CLAIMING <---------------------------------------------+
         |                                                                       |
         |  own claim read at offset c: c numbers the term                       | nothing of the rival
         v                                                                       | for `timeout`
     CANDIDATE ----------------- higher claim read ------------------------> DEPOSED
         |   ^                                                                   ^
         |   |  lease over: LeaderFenced                                         |
         v   |                                                                   |
      LEADING ------------------ higher claim read: LeaderFenced ----------------+
       own heartbeat, sent since it became
       candidate, read, and no earlier lease
       can run: LeaderAcquired

CANDIDATE and LEADING write heartbeats; CLAIMING and DEPOSED write none. A leader whose ownership ends resigns.

An ownership may end because its owner wants that: it has not led for two sessions, or cannot do a leader's work
(`member`). For all others that is a revocation like any other, so no invariant has an exception for it.

Invariants, and where the code shows them:

1. *Only an own heartbeat gives or renews a lease*, and only one of this term that this object remembers having sent:
   `_sent` alone leads to `_lead`.
2. *The lease counts from the sending*: `_sent` keeps the time read before the heartbeat was handed to the client.
3. *A lease that ran out is never renewed*: `expire` runs before anything is observed, and forgets all sent heartbeats.
   So a fenced leader leads again only by a heartbeat sent after that, under a new leader ID.
4. *A higher claim deposes us*: a claim's number is its offset, so every claim of our group after our own is higher.
   All else (noise, foreign heartbeats, messages before our claim or of other groups) changes nothing. Where offsets
   begin again (the topic was made anew), our claim has no number any more: claim anew.
5. *A rival that lives is left alone*: a deposed owner claims again only after silence, and only when it has read all
   there is (`on_caught_up`), as after a long pause the rival's heartbeats may still wait to be read.
6. *An unread claim cannot be missed*: a candidate (after a pause, say) that finds unread messages gone takes the first
   of them for a higher claim. While a lease runs none can be gone: retention is longer.
7. *No lease begins while an earlier one may run* (`Predecessor`). A deposed leader that is cut off has not read our
   claim yet; but its lease rests on a heartbeat before the claim, and those have been read here. So a lease begins a
   `timeout` after the last of them was heard, unless its writer has resigned since. Heartbeats behind the claim do not
   count: who reads them back has read the claim. A lease of our own that ended early counts like that of another: its
   work was cut short, and may be on the wire. One that is handed over does not, as its work has ended.
8. Each LeaderAcquired is followed by exactly one LeaderFenced, or by the end of the ownership.
"""

from __future__ import annotations

from dataclasses import replace
from enum import Enum, auto
from typing import NamedTuple
from uuid import uuid4

from outbox_core.election.lease import Leadership
from outbox_core.election.messages import NO_CONTEST, Claim, Contest, Heartbeat, Resignation, Signal
from outbox_core.errors import must
from outbox_core.events import LeaderAcquired, LeaderFenced


class State(Enum):
    """The states of the module's diagram."""

    CLAIMING = auto()
    CANDIDATE = auto()
    LEADING = auto()
    DEPOSED = auto()


class _Rival(NamedTuple):
    claim: int
    heard_at: float
    beats: bool = False  # it has written heartbeats since, as who leads does


# Two machines' clocks may run at rates that differ by less than this.
_CLOCK_RATES = 1.01


class Predecessor:
    """The lease that another process may still hold, by the messages of the partition; it outlives ownerships.

    `timeout` is the lease in seconds, here as there.
    """

    def __init__(self, timeout: float) -> None:
        self._timeout = timeout * _CLOCK_RATES
        self._heard_at = float("-inf")
        self._suspected_at = float("-inf")
        self._claim = -1  # the highest of those whose heartbeats were heard
        self._resigned = -1  # no lease of this claim runs, nor of a lower one
        self._end = 0

    @property
    def gone_at(self) -> float:
        """The time at which its lease is over for certain."""
        return max(self._heard_at, self._suspected_at) + self._timeout

    def observe(self, offset: int, signal: Signal | None, now: float) -> None:
        """Process a message of the group, in their order."""
        if offset < self._end:  # the topic was made anew and counts from zero again
            self._claim = self._resigned = -1
        self._end = offset + 1
        match signal:
            case Heartbeat() if self._resigned < signal.claim < offset:
                self._claim = max(self._claim, signal.claim)
                self._heard_at = now
            case Resignation() if signal.claim < offset:
                self.resigned(signal.claim)

    def resigned(self, claim: int) -> None:
        """Note that no lease of this claim runs any more, nor of a lower one."""
        self._resigned = max(self._resigned, claim)
        if self._claim <= self._resigned:
            self._heard_at = float("-inf")

    def suspect(self, now: float) -> None:
        """Note that a leader may have been alive at `now`, whose messages and resignation cannot be read."""
        self._suspected_at = max(self._suspected_at, now)


class Ownership:
    """One ownership of the partition. Changed by one thread; `leadership` may be read by any.

    `timeout` is the lease in seconds, from the sending of a heartbeat; `interval` lies between heartbeats, and is at
    most a fifth of it. `predecessor` knows what was read before.
    """

    def __init__(
        self, name: str, predecessor: Predecessor, *, timeout: float, interval: float, contest: Contest = NO_CONTEST
    ) -> None:
        self.state = State.CLAIMING
        self.leadership: Leadership | None = None
        self._predecessor = predecessor
        self._timeout = timeout
        self._interval = interval
        self._claim = Claim(uuid4(), name, contest)
        self._term = -1
        self._sequence = 0
        self._sent: dict[int, float] = {}
        self._due = float("-inf")
        self._end = 0  # the offset after the last message read
        self._rival = _Rival(-1, 0.0)

    @property
    def hears_rival(self) -> bool:
        """True while it is deposed, and hears the heartbeats of the rival: somebody leads."""
        return self.state is State.DEPOSED and self._rival.beats

    def next_signal(self, now: float) -> Signal | None:
        """Return the signal due at `now`, if any; hand it to the client at once, as it counts as sent."""
        if self.state is State.DEPOSED or now < self._due:
            return None
        if self.state is State.CLAIMING:
            self._claim = replace(self._claim, id=uuid4())
            self._due = now + self._timeout / 2
            return self._claim
        self._due = now + self._interval
        self._forget_sent_before(now - self._timeout)
        self._sequence += 1
        self._sent[self._sequence] = now
        return Heartbeat(self._term, self._claim.id, self._sequence, self._claim.name, self._claim.contest)

    def wait_seconds(self, now: float) -> float:
        """Return the seconds from `now` until a signal is due or a lease ends."""
        wanted = float("inf") if self.state is State.DEPOSED else self._due
        if self.leadership is not None:
            wanted = min(wanted, self.leadership.deadline)
        return max(0.0, wanted - now)

    def expire(self, now: float) -> LeaderFenced | None:
        """End a lease that is over at `now`."""
        if self.leadership is None or self.leadership.is_valid(now):
            return None
        return self._unlead(State.CANDIDATE, f"no own heartbeat came back for {self._timeout:g} s")

    def observe(self, offset: int, signal: Signal | None, now: float) -> LeaderAcquired | LeaderFenced | None:
        """Process a message of the partition; `signal` is None for noise."""
        fenced = self.expire(now)
        if offset < self._end:
            fenced = self._begin_with_new_log(now) or fenced
        self._check_for_gap(offset, now)
        if signal is None or not self._claim.contest.includes(signal.contest):
            return fenced
        if self.state in {State.CLAIMING, State.DEPOSED} and signal.id != self._claim.id:
            self._predecessor.observe(offset, signal, now)
        match signal:
            case Claim():
                return self._observe_claim(offset, signal, now) or fenced
            case Heartbeat():
                return self._observe_heartbeat(offset, signal, now) or fenced
            case Resignation():
                return fenced

    def on_caught_up(self, now: float) -> None:
        """Claim anew after the rival's silence, now that all messages have been read."""
        if self.state is State.DEPOSED and now >= self._rival.heard_at + self._timeout:
            self._claim_anew()

    def end(self, reason: str) -> LeaderFenced | None:
        """End the ownership because the partition may already belong to another member."""
        return self._unlead(State.DEPOSED, reason)

    def resignation(self, now: float) -> Resignation | None:
        """Return the message that spares the next owner its wait; None if an earlier lease may run at `now`.

        For the end of the ownership: nobody may act on its lease any more.
        """
        if self._term < 0 or now < self._predecessor.gone_at:
            return None
        self._predecessor.resigned(self._term)
        return Resignation(self._term, self._claim.id, self._claim.name, self._claim.contest)

    def _observe_claim(self, offset: int, claim: Claim, now: float) -> LeaderFenced | None:
        if self.state is State.CLAIMING:
            if claim.id == self._claim.id:
                self._term = offset
                self._become(State.CANDIDATE)
            return None
        if offset <= self._term or claim.id == self._claim.id:
            return None
        self._rival = _Rival(offset, now)
        stranger = "" if self._claim.contest.agrees(claim.contest) else f" for {claim.contest}"
        return self._unlead(State.DEPOSED, f"{claim.name or 'another process'} made a higher claim{stranger}, {offset}")

    def _observe_heartbeat(self, offset: int, beat: Heartbeat, now: float) -> LeaderAcquired | LeaderFenced | None:
        if self.state is State.DEPOSED and self._rival.claim <= beat.claim < offset:
            self._rival = self._rival._replace(heard_at=now, beats=True)
        if beat.id != self._claim.id or beat.claim != self._term or beat.sequence not in self._sent:
            return None
        sent_at = self._sent.pop(beat.sequence)
        self._forget_sent_before(sent_at)
        return self._lead(sent_at, now)

    def _lead(self, sent_at: float, now: float) -> LeaderAcquired | None:
        latest = now + self._timeout
        if self.leadership is not None:
            before, self.leadership = self.leadership.deadline, self.leadership.renewed(sent_at, self._timeout)
            after = self.leadership.deadline
            must(before <= after <= latest, "a lease must not shrink nor pass %s; %s follows %s", latest, after, before)
            return None
        must(self.state is State.CANDIDATE and self._term >= 0, "a lease must rest on a claim that was read back")
        must(sent_at <= now, "a heartbeat must be read after it was sent")
        lease = Leadership(uuid4(), self._term, sent_at + self._timeout)
        if not lease.is_valid(now) or now < self._predecessor.gone_at:
            return None
        self.state = State.LEADING
        self.leadership = lease
        return LeaderAcquired(lease.leader_id, lease.term)

    def _unlead(self, state: State, reason: str) -> LeaderFenced | None:
        lease, self.leadership = self.leadership, None
        self._become(state)
        if lease is None:
            return None
        # What was sent under it may be on its way until it would have run out; so this process waits for it, too.
        self._predecessor.suspect(lease.deadline - self._timeout)
        return LeaderFenced(lease.leader_id, reason, lease.term)

    def _become(self, state: State) -> None:
        self.state = state
        self._sent.clear()
        self._due = float("-inf")

    def _claim_anew(self) -> None:
        self._claim = replace(self._claim, id=uuid4())  # messages of the last claim may be read once more
        self._term = -1
        self._sequence = 0
        self._become(State.CLAIMING)

    def _begin_with_new_log(self, now: float) -> LeaderFenced | None:
        # Offsets begin again, as on a topic that was made anew: its claims are later than ours, whatever their numbers.
        self._end, self._term, self._rival = 0, -1, _Rival(-1, now)
        if self.state is State.DEPOSED:  # a rival that lives claims anew, and is left alone
            return None
        fenced = self._unlead(State.CLAIMING, "the leader topic was made anew")
        self._claim_anew()
        return fenced

    def _check_for_gap(self, offset: int, now: float) -> None:
        if self.state is State.CANDIDATE and offset > self._end:
            self._rival = _Rival(self._end, now)
            self._become(State.DEPOSED)
        self._end = max(self._end, offset + 1)

    def _forget_sent_before(self, time: float) -> None:
        self._sent = {sequence: sent_at for sequence, sent_at in self._sent.items() if sent_at >= time}
