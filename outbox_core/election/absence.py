"""The time that a member spends out of its group, because it cannot lead or cannot do a leader's work.

A group's coordinator gives the partition by group heartbeats alone. To lead, a member must also write to the leader
topic and read it; to work, an application needs more, such as a database. Who cannot makes room for one who perhaps
can, and comes back

- after it could not **lead**: once a look of its own was acknowledged by Kafka and read back, so that both directions
  of the link work; the link may not be the trouble, but what its clients know, so some looks go by new ones;
- after the application **stepped down**: by the rule of `outbox_core.kafka.duty`, once it is able again, or once no
  leader was heard for some time, as then somebody must try;

in both cases no sooner than a session after it left. Whoever leaves and joins in one go may get the partition back, as
the client's assignor leaves partitions where they were.
"""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable
from typing import Protocol

from outbox_core.kafka.duty import FIRST_PROBE_SECONDS, LAST_PROBE_SECONDS, SILENCE_SECONDS, Duty

_log = logging.getLogger("outbox_core.election")

_SUCCESSION_SECONDS = 4.0  # from the end of a session to the successor's first heartbeat, at most


class Absence(Protocol):
    """One time out of the group, for the thread of the member; `begins` is the first call."""

    reason: str
    condition: str  # for the return, for people: "comes back when ..."

    def begins(self, now: float) -> None:
        """Note that the group was left at this time, after a hand-over that may have taken long."""

    def news(self, now: float, heard_at: float) -> str:
        """Return the reason to come back, '' for none yet; `heard_at` is the time of a leader's last heartbeat."""

    def read(self, offset: int) -> None:
        """Note that a message of the leader topic was read."""

    def end(self) -> None:
        """Stop what was done to find out."""


class Look:
    """A message of our own on its way to the leader topic and back."""

    def __init__(self) -> None:
        self._offset: int | None = None
        self._read = -1

    def acknowledged(self, offset: int | None) -> None:
        """Note that Kafka has it, at an offset."""
        self._offset = offset

    def read(self, offset: int) -> None:
        """Note that some message was read since the look was sent."""
        self._read = max(self._read, offset)

    @property
    def is_back(self) -> bool:
        """True once it was acknowledged, and the topic was read as far as that."""
        return self._offset is not None and 0 <= self._offset <= self._read


class SendLook(Protocol):
    """A call that sends a look."""

    def __call__(self, look: Look, *, anew: bool) -> None:
        """Send it, by new clients perhaps."""


class UnableToLead:
    """The absence of an owner that could not lead: until a look comes back.

    Args:
        reason: for people.
        shortest: seconds of an absence at least.
        lease: seconds that a look may take to come back: a leader's heartbeat may take as long.
        send: sends a look to the leader topic, `anew` by new clients, and must not wait for it.
    """

    condition = "a message of its own comes back from the leader topic"

    def __init__(self, reason: str, shortest: float, lease: float, send: SendLook) -> None:
        self.reason = reason
        self._due = self._earliest = 0.0
        self._shortest = shortest
        self._lease = lease
        self._send = send
        self._look = Look()
        self._looks = 0

    def begins(self, now: float) -> None:
        """Note that the group was left."""
        self._due, self._earliest = now, now + self._shortest

    def news(self, now: float, _heard_at: float) -> str:
        """Return the reason to come back, '' for none yet; send a look now and then."""
        if self._look.is_back:
            return "the leader topic can be written and read" if now >= self._earliest else ""
        if now >= self._due:
            self._due = now + self._lease
            self._look = Look()
            self._looks += 1
            # Ever fewer: clients that take long to connect need their time.
            self._send(self._look, anew=self._looks.bit_count() == 1)
        return ""

    def read(self, offset: int) -> None:
        """Note that a message of the leader topic was read."""
        self._look.read(offset)

    def end(self) -> None:
        """Do nothing: nothing goes on."""


class SteppedDown:
    """The absence of an application that cannot do a leader's work: until it says that it can, or nobody leads.

    Args:
        reason: for people.
        shortest: seconds of an absence at least: a session, after which a leader that died has a successor.
        question: the application's own answer.
    """

    def __init__(self, reason: str, shortest: float, question: AbilityQuestion) -> None:
        silence = max(SILENCE_SECONDS, shortest + _SUCCESSION_SECONDS)
        self.reason = reason
        self.condition = f"it is able again, or no process leads for {silence:g} s"
        self._heard_at = self._earliest = 0.0
        self._shortest = shortest
        self._question = question
        self._duty = Duty(random.random(), silence)  # noqa: S311  no secret

    def begins(self, now: float) -> None:
        """Note that the group was left."""
        self._heard_at, self._earliest = now, now + self._shortest
        self._duty.left(now)

    def news(self, now: float, heard_at: float) -> str:
        """Return the reason to come back, '' for none yet."""
        if heard_at > self._heard_at:
            self._heard_at = heard_at
            self._duty.heard(heard_at)
        if self._question.is_able:
            self._duty.probed(now, is_able=True)
        if now < self._earliest or not self._duty.may_return(now):
            return ""
        return "it is able again" if self._question.is_able else f"no leader was heard for {now - self._heard_at:.0f} s"

    def read(self, offset: int) -> None:
        """Do nothing: the leader topic is not in question."""

    def end(self) -> None:
        """Ask no more."""
        self._question.end()


class AbilityQuestion:
    """A question to the application, asked on a daemon thread with growing pauses until the answer is yes.

    Args:
        name: of the thread.
        ask: may take long, and may raise: that is a no, logged once.
    """

    def __init__(self, name: str, ask: Callable[[], bool]) -> None:
        self.is_able = False
        self._ask = ask
        self._ended = threading.Event()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def end(self) -> None:
        """Ask no more; does not wait for an answer under way."""
        self._ended.set()

    def _run(self) -> None:
        pause, has_failed = FIRST_PROBE_SECONDS, False
        while not self._ended.wait(pause):
            try:
                able = self._ask()
            except Exception:
                able = False
                if not has_failed:
                    _log.exception("the question whether this process can work again failed; that counts as a no")
                has_failed = True
            if able:
                self.is_able = True
                return
            pause = min(2 * pause, LAST_PROBE_SECONDS)
