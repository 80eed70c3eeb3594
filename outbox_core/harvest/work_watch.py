"""The watch over a leader's work: who cannot do it, and another perhaps can, hands leadership over.

The election gives leadership to who reaches the leader topic. The work needs more: the database, the brokers of the
data, a coordinator of transactions. `Activity.duty` knows what is owed and since when, told by the threads that work;
they may hang, so a thread of its own looks at it every second and decides by the rule of `outbox_core.kafka.duty`:

    work overdue -> who else is in the group? -> somebody, or not known: `step_down`; nobody: try on
                                                  |
                      LeaderRevoked, out of the group until a probe of what failed succeeds, or nobody leads

Only work that was tried counts; what waits for something else was not. And not all that fails is ours:

- **A partition without a leader, a topic that is missing** fail for others, too. So partitions that cannot be written
  count only if Kafka lists a leader that does not answer us.
- **Aborted transactions** count only if some broker does not answer us: Kafka has answered for each of them. So does
  one that still waits for acknowledgements: a partition without a leader holds it up for as long as it may take.
- **A missing right** is dropped from the duty where it is met.

A call that Kafka or the database never answers needs no such proof: the probe may pass where the work does not, behind
a link that loses large packets say. Then this process is a standby soon, and the work elsewhere.

Before the patience is over the watch asks for the brokers that do not answer, so that health and log can name them.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import Protocol

from outbox_core.config import redact
from outbox_core.errors import KafkaUnavailable, OutboxError
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.steps import KEEP_TIME, OF_DATABASE, OF_KAFKA, PUBLISH, REACH, WRITE
from outbox_core.kafka.duty import PATIENCE_SECONDS
from outbox_core.kafka.transactions import ACKNOWLEDGEMENTS

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0
_SUSPECT_AFTER_SECONDS = 8.0  # of failure: then the watch asks who does not answer
_SUSPECT_AGAIN_SECONDS = 15.0
_HANGS_SECONDS = 5.0
_TELLING_SECONDS = 2.0  # an outage that is shorter is another's, or its beginning

Place = tuple[str, int | None]


class Questions(Protocol):
    """The questions of the watch to others; an answer takes a few seconds at most, but for the database's."""

    database: str
    """The place of the database, for people."""

    def members(self) -> int | None:
        """Return the number of members of the leader group, None if Kafka does not say."""

    def silent_brokers(self) -> list[str]:
        """Return brokers that do not answer us, or raise KafkaUnavailable if none answers."""

    def silent_leaders(self, places: Collection[Place]) -> list[str]:
        """Return leaders of partitions, or of topics', that do not answer us, or raise KafkaUnavailable."""

    def read_table(self) -> None:
        """Read the head of the outbox table over a new connection, or raise OutboxError."""


class WorkWatch:
    """A thread that looks at the work of its harvester while that leads.

    Args:
        ctx: of the harvester: its activity, outages and elector. An elector without `step_down` keeps its leadership.
        questions: to Kafka and the database.
    """

    def __init__(self, ctx: HarvestContext, questions: Questions) -> None:
        self._activity = ctx.metrics.activity
        self._ctx = ctx
        self._questions = questions
        self._stopping = threading.Event()
        self._right_since: float | None = None  # of the leadership that the next ones are about
        self._is_stepping_down = False
        self._is_alone = False
        self._suspect_at = 0.0
        self._found: dict[str, tuple[float, list[str]]] = {}  # work -> when it was asked, and who was silent
        self._excused_until = 0.0  # of partitions that fail for others, too
        self._thread = threading.Thread(target=self._run, name="outbox-duty", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stopping.set()

    def _run(self) -> None:
        while not self._stopping.wait(_INTERVAL_SECONDS):
            try:
                self.look()
            except Exception:  # nobody else watches
                _log.exception("the watch over the work failed; it goes on")

    def look(self) -> None:
        """Look at what is owed, and step down if another member may do it."""
        duty, now = self._activity.duty, self._activity.now
        if duty.right_since != self._right_since:  # a leadership may end and the next begin between two looks
            self._right_since = duty.right_since
            self._is_stepping_down = self._is_alone = False
            self._found.clear()
        if not duty.has_right:
            return
        self._note_places()
        self._note_window()
        self._suspect(duty.owed(now()))
        step_down = getattr(self._ctx.elector, "step_down", None)  # an elector of the user's own may not have it
        if step_down is None or self._is_stepping_down or not duty.should_ask(now()):
            return
        members = self._questions.members()
        if members == 1:
            self._stay()
        elif duty.should_leave(members, now()):
            self._leave(step_down)

    # -- what is owed, beside what the working threads tell

    def _note_places(self) -> None:
        places, at = self._activity.unreachable, self._activity.now()
        if not places:
            self._is_done(REACH)
        elif at < self._excused_until:
            self._activity.duty.dropped(REACH)
        else:  # the record that failed first had been sent so long before
            sent_at = min(places.values()) - self._ctx.limits.delivery_timeout
            self._activity.duty.tried(REACH, sent_at)

    def _note_window(self) -> None:
        seconds = self._ctx.send_window.waited_seconds
        if seconds:
            self._activity.duty.tried(KEEP_TIME, self._activity.now() - seconds)
        else:
            self._is_done(KEEP_TIME)

    def _is_done(self, work: str) -> None:
        """Note that nothing of some work fails; who has not published anything yet has shown nothing by that."""
        duty = self._activity.duty
        (duty.succeeded if self._activity.has_finished else duty.dropped)(work)

    def _suspect(self, owed: dict[str, float]) -> None:
        """Find out who does not answer, once something has failed for a while, and forget that when it works again."""
        at = self._activity.now()
        failing = {work for work, seconds in owed.items() if seconds >= _SUSPECT_AFTER_SECONDS}
        if not failing:
            self._activity.culprit, self._suspect_at = "", 0.0
        elif at >= self._suspect_at:
            found = [] if OF_KAFKA.isdisjoint(failing) else self._silence(REACH if failing == {REACH} else WRITE)
            if not OF_DATABASE.isdisjoint(failing) and not self._ctx.database.is_ongoing:  # else that tells more
                found = [f"{self._questions.database} does not answer", *found]
            self._activity.culprit = ", ".join(found)
            self._suspect_at = at + _SUSPECT_AGAIN_SECONDS

    def _silence(self, work: str) -> list[str]:
        """Return in words who does not answer us that this work needs, as asked lately or now."""
        asked_at, found = self._found.get(work, (float("-inf"), []))
        if self._activity.now() - asked_at > _SUSPECT_AGAIN_SECONDS:
            try:
                places = set(self._activity.unreachable)
                silent = self._questions.silent_leaders(places) if work == REACH else self._questions.silent_brokers()
                found = [f"{who} does not answer" for who in silent]
            except KafkaUnavailable:
                found = ["no broker of Kafka answers"]
            self._found[work] = self._activity.now(), found
        return found

    # -- to stay or to leave

    def _stay(self) -> None:
        if not self._is_alone:
            _log.warning("%s; no other process is in the leader group, so this one tries on", self._complaint())
        self._is_alone = True

    def _leave(self, step_down: Callable[[str, Callable[[], bool]], None]) -> None:
        overdue = {work for work in self._activity.duty.overdue(self._activity.now()) if self._is_ours(work)}
        if overdue and not self._stopping.is_set():
            self._is_stepping_down = True
            step_down(self._complaint(), self._probe_of(overdue))

    def _is_ours(self, work: str) -> bool:
        """Return False, and drop the work for a while, if others would fare the same."""
        waits_for_all = work == PUBLISH and self._activity.longest_step[0] == ACKNOWLEDGEMENTS
        if not (work in (REACH, WRITE) or waits_for_all) or self._silence(work):
            return True
        self._activity.duty.dropped(work)
        if work == REACH:
            self._excused_until = self._activity.now() + PATIENCE_SECONDS
        return False

    def _complaint(self) -> str:
        """Return what this leader could not do, for how long, what it waits for, and who does not answer."""
        overdue = self._activity.duty.overdue(self._activity.now())
        work = max(overdue, key=lambda each: overdue[each], default="do its work")
        lines = [f"it could not {work} for {overdue.get(work, PATIENCE_SECONDS):.0f} s{self._activity.circumstances}"]
        lines += [outage.describe() for outage in self._ctx.outages if outage.lasted_seconds >= _TELLING_SECONDS]
        return redact(" ".join("; ".join(lines).split()))

    def _probe_of(self, overdue: Collection[str]) -> Callable[[], bool]:
        questions = self._questions
        asks_database, asks_kafka = not OF_DATABASE.isdisjoint(overdue), not OF_KAFKA.isdisjoint(overdue)

        def is_able() -> bool:
            # A call that still hangs occupies the thread that makes it.
            if self._activity.longest_step[1] >= _HANGS_SECONDS:
                return False
            try:
                if asks_database:
                    questions.read_table()
                return not (asks_kafka and questions.silent_brokers())
            except OutboxError:
                return False

        return is_able
