"""What the owner of the partition knows and does: the NELI protocol as a state machine, without clocks or clients.

A tenure is one ownership of the partition, from its assignment until it is revoked or lost. Whoever holds one writes
to that partition and reads it from the end it had when the tenure began. Kafka puts all that is written there in one
order, and everybody reads it in that order; so at every offset there is exactly one **highest claim**, and only who
wrote it may lead.

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
       candidate, read: LeaderAcquired

CANDIDATE and LEADING write heartbeats; CLAIMING and DEPOSED write none.

What holds, and where in the code it is seen:

1. *Only an own heartbeat gives or renews a lease*, and only one of this term that this object remembers having sent:
   `_sent` is the one thing that leads to `_lead`. The claim itself gives none: the first heartbeat is written after
   the claim was read, so a deposed leader that reads the same partition had a round trip's time to read it too.
2. *The lease counts from the sending*: `_sent` keeps the time read before the heartbeat was handed to the client.
3. *A lease that ran out is never renewed*: `expire` runs before anything is observed, and forgets all that was sent.
   So whoever was fenced leads again only by a heartbeat sent after that, under a new leader ID.
4. *A higher claim deposes whoever wrote it*: a claim's number is its offset, so every claim of our group that is read
   after our own is higher. All else (noise, foreign heartbeats, anything from before our claim, and whatever other
   groups write to a topic that we share with them) changes nothing.
5. *A rival that lives is left alone*: a deposed owner claims again only after silence, and only when it has read all
   there is (`quiet`), as after a long pause the rival's heartbeats may be waiting to be read.
6. *A claim that was never read cannot be missed*: a candidate (after a pause, say) that finds messages gone which it
   has not read takes the first of them for a higher claim. While a lease runs none can be gone: retention is longer.
7. Each LeaderAcquired is followed by exactly one LeaderFenced, or by the end of the tenure.
"""

from __future__ import annotations

from enum import Enum, auto
from uuid import uuid4

from outbox_core.election.claims import NO_CONTEST, Claim, Contest, Heartbeat, Signal
from outbox_core.election.leadership import Leadership
from outbox_core.events import LeaderAcquired, LeaderFenced


class State(Enum):
    """See the module's diagram."""

    CLAIMING = auto()
    CANDIDATE = auto()
    LEADING = auto()
    DEPOSED = auto()


class Tenure:
    """One ownership of the partition. Changed by one thread; `leadership` may be read by any.

    Args:
        name: of the process, for people.
        timeout: seconds a lease lasts from the sending of the heartbeat that renews it.
        interval: seconds between heartbeats; at most a fifth of `timeout`.
        contest: what it leads; written into every message.
    """

    def __init__(self, name: str, *, timeout: float, interval: float, contest: Contest = NO_CONTEST) -> None:
        self.state = State.CLAIMING
        self.leadership: Leadership | None = None
        self._name = name
        self._timeout = timeout
        self._interval = interval
        self._contest = contest
        self._id = uuid4()
        self._term = -1
        self._sequence = 0
        self._sent: dict[int, float] = {}
        self._due = float("-inf")
        self._end = 0  # the offset after the last message read
        self._rival = -1
        self._rival_heard = 0.0

    def next_signal(self, now: float) -> Signal | None:
        """What to write at `now`, if anything; must then be handed to the client at once, as it counts as sent."""
        if self.state is State.DEPOSED or now < self._due:
            return None
        if self.state is State.CLAIMING:
            self._id = uuid4()
            self._due = now + self._timeout / 2
            return Claim(self._id, self._name, self._contest)
        self._due = now + self._interval
        self._forget_sent_before(now - self._timeout)
        self._sequence += 1
        self._sent[self._sequence] = now
        return Heartbeat(self._term, self._id, self._sequence, self._name, self._contest)

    def attention_in(self, now: float) -> float:
        """Seconds after `now` at which there is something to write or a lease to end, whatever is read until then."""
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
        """Take note of a message of the partition; `signal` is None for noise."""
        fenced = self.expire(now)
        self._look_for_gap(offset, now)
        if signal is None or not self._contest.includes(signal.contest):
            return fenced
        match signal:
            case Claim():
                return self._observe_claim(offset, signal, now) or fenced
            case Heartbeat():
                return self._observe_heartbeat(offset, signal, now) or fenced

    def quiet(self, now: float) -> None:
        """Take note that everything there is has been read."""
        if self.state is State.DEPOSED and now >= self._rival_heard + self._timeout:
            self._claim_anew()

    def lose(self, reason: str) -> LeaderFenced | None:
        """End the tenure because the partition may already belong to somebody else."""
        return self._unlead(State.DEPOSED, reason)

    def _observe_claim(self, offset: int, claim: Claim, now: float) -> LeaderFenced | None:
        if self.state is State.CLAIMING:
            if claim.id == self._id:
                self._term = offset
                self._become(State.CANDIDATE)
            return None
        if offset <= self._term or claim.id == self._id:
            return None
        self._rival, self._rival_heard = offset, now
        rival = claim.name or "another process"
        stranger = "" if self._contest.agrees(claim.contest) else f" for {claim.contest}"
        return self._unlead(State.DEPOSED, f"{rival} made a higher claim{stranger}, {offset}")

    def _observe_heartbeat(self, offset: int, beat: Heartbeat, now: float) -> LeaderAcquired | LeaderFenced | None:
        if self.state is State.DEPOSED and self._rival <= beat.claim < offset:
            self._rival_heard = now
        if beat.id != self._id or beat.claim != self._term or beat.sequence not in self._sent:
            return None
        sent_at = self._sent[beat.sequence]
        self._forget_sent_before(sent_at)
        del self._sent[beat.sequence]
        if offset < self._term:
            return self._begin_with_new_log()
        return self._lead(sent_at, now)

    def _lead(self, sent_at: float, now: float) -> LeaderAcquired | None:
        """Renew the lease, or begin one."""
        if self.leadership is not None:
            self.leadership = self.leadership.renewed(sent_at, self._timeout)
            return None
        lease = Leadership(uuid4(), self._term, sent_at + self._timeout)
        if not lease.is_valid(now):
            return None
        self.state = State.LEADING
        self.leadership = lease
        return LeaderAcquired(lease.leader_id, lease.term)

    def _unlead(self, state: State, reason: str) -> LeaderFenced | None:
        """Go on in another state, without a lease."""
        lease, self.leadership = self.leadership, None
        self._become(state)
        return LeaderFenced(lease.leader_id, reason) if lease is not None else None

    def _become(self, state: State) -> None:
        self.state = state
        self._sent.clear()
        self._due = float("-inf")

    def _claim_anew(self) -> None:
        self._term = -1
        self._sequence = 0
        self._become(State.CLAIMING)

    def _begin_with_new_log(self) -> LeaderFenced | None:
        """An own heartbeat at an offset below its claim: the topic was made anew and counts from zero again."""
        fenced = self._unlead(State.CLAIMING, "the leader topic was made anew")
        self._end = 0
        self._claim_anew()
        return fenced

    def _look_for_gap(self, offset: int, now: float) -> None:
        if self.state is State.CANDIDATE and offset > self._end:
            self._rival, self._rival_heard = self._end, now
            self._become(State.DEPOSED)
        self._end = max(self._end, offset + 1)

    def _forget_sent_before(self, time: float) -> None:
        for sequence in [number for number, sent_at in self._sent.items() if sent_at < time]:
            del self._sent[sequence]
