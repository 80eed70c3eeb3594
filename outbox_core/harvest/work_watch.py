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
- **A table that is missing, a tracking topic or the right to it** are dropped from the duty where they are met, and so
  is a statement that the database cancelled. A right on the table counts: each process may have a role of its own.
- **A statement that runs, or waits for a lock**, would do so for another leader. So a statement under way counts only
  if the database, asked over a new connection, does not answer or knows nothing of it: then it is the connection that
  hangs. A server process that was stopped in the middle of a statement looks like one at work; there the connection's
  own deadline (`statementTimeout` and 10 s) ends the wait.

What is excused is looked at again after another patience. A call that Kafka never answers needs no such proof: the
probe may pass where the work does not, behind a link that loses large packets say. Then this process is a standby soon,
and the work elsewhere.

Before the patience is over the watch asks who does not answer, so that health and log can name it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection
from typing import NamedTuple, Protocol

from outbox_core.config import redact
from outbox_core.errors import KafkaUnavailable, OutboxError
from outbox_core.harvest.context import HarvestContext
from outbox_core.harvest.steps import BEGIN, KEEP_TIME, MAKE, OF_DATABASE, OF_KAFKA, PUBLISH, REACH, WRITE
from outbox_core.kafka import duty
from outbox_core.kafka.transactions import ACKNOWLEDGEMENTS

_log = logging.getLogger(__name__)

_INTERVAL_SECONDS = 1.0
_SUSPECT_AFTER_SECONDS = 8.0  # of failure: then the watch asks who does not answer
_SUSPECT_AGAIN_SECONDS = 15.0
_HANGS_SECONDS = 5.0
_TELLING_SECONDS = 2.0  # an outage that is shorter is another's, or its beginning

Place = tuple[str, int | None]


class _Database(NamedTuple):
    """An answer of the database about a statement of ours."""

    asked_at: float
    state: str  # for people
    is_at_work: bool


_NOT_ASKED = _Database(float("-inf"), "", is_at_work=False)


class Questions(Protocol):
    """The questions of the watch to others; an answer takes a few seconds at most, but for the database's."""

    database: str
    """The place of the database, for people."""

    def members(self) -> int | None:
        """Return the number of members of the leader group, None if Kafka does not say."""

    def silent_brokers(self, max_age_seconds: float = 0.0) -> list[str]:
        """Return brokers that do not answer us, by an answer so old at most; raise KafkaUnavailable if none answers."""

    def silent_leaders(self, places: Collection[Place], max_age_seconds: float = 0.0) -> list[str]:
        """Return leaders of partitions, or of topics', that do not answer us; raise KafkaUnavailable if none does."""

    def read_table(self) -> None:
        """Read the head of the outbox table over a new connection, or raise OutboxError."""

    def at_work(self) -> str:
        """Return what the database says, over a new connection, of a long statement of ours; or raise OutboxError."""


class WorkWatch:
    """A thread that looks at the work of its harvester while that leads.

    Args:
        ctx: of the harvester: its activity, outages and elector. An elector without `step_down` keeps its leadership.
        questions: to Kafka and the database.
        unmade: returns the reason why no producer can be made, '' if the last one was.
    """

    def __init__(self, ctx: HarvestContext, questions: Questions, unmade: Callable[[], str] = lambda: "") -> None:
        self._activity = ctx.metrics.activity
        self._ctx = ctx
        self._questions = questions
        self._unmade = unmade
        self._stopping = threading.Event()
        self._right_since: float | None = None  # of the leadership that the next ones are about
        self._is_alone = False
        self._suspect_at = 0.0
        self._excused: dict[Place, float] = {}  # that fail for others, too -> when that was found
        self._database = _NOT_ASKED
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
        ours, now = self._activity.duty, self._activity.now
        if ours.right_since != self._right_since:  # a leadership may end and the next begin between two looks
            self._right_since = ours.right_since
            self._is_alone = False
            self._excused.clear()
            self._database = _NOT_ASKED
        if not ours.has_right:
            return
        self._note_places()
        self._note_window()
        self._note_producer()
        self._suspect(ours.owed(now()))
        step_down = getattr(self._ctx.elector, "step_down", None)  # an elector of the user's own may not have it
        if step_down is None or not ours.should_ask(now()):
            return
        members = self._questions.members()
        if members == 1:
            self._stay()
        elif ours.should_leave(members, now()):
            self._leave(step_down)

    # -- what is owed, beside what the working threads tell

    def _note_places(self) -> None:
        since = self._failing_since()
        self._excused = {place: at for place, at in self._excused.items() if place in since}
        if not since:
            self._is_done(REACH)
        else:
            self._activity.duty.dropped(REACH)  # the place that it counted for may be reached again
            self._activity.duty.tried(REACH, min(since.values()))

    def _failing_since(self) -> dict[Place, float]:
        """Return since when each place fails for us; one that fails for others, too, since that was found last."""
        # The record that failed first had been sent so long before.
        timeout, excused = self._ctx.limits.delivery_timeout, self._excused
        return {place: excused.get(place, at - timeout) for place, at in self._activity.unreachable.items()}

    def _note_window(self) -> None:
        seconds = self._ctx.send_window.waited_seconds
        if seconds:
            self._activity.duty.tried(KEEP_TIME, self._activity.now() - seconds)
        else:
            self._is_done(KEEP_TIME)

    def _note_producer(self) -> None:
        if self._unmade():
            self._activity.tries_to(MAKE)
        else:
            self._is_done(MAKE)

    def _is_done(self, work: str) -> None:
        """Note that nothing of some work fails; who has not published anything yet has shown nothing by that."""
        ours = self._activity.duty
        (ours.succeeded if self._activity.has_finished else ours.dropped)(work)

    def _suspect(self, owed: dict[str, float]) -> None:
        """Find out who does not answer, once something has failed for a while, and forget that when it works again."""
        at = self._activity.now()
        failing = {work for work, seconds in owed.items() if seconds >= _SUSPECT_AFTER_SECONDS}
        if not failing:
            self._activity.culprit, self._suspect_at = "", 0.0
        elif at >= self._suspect_at:
            found = []
            if not OF_DATABASE.isdisjoint(failing) and self._statement_lasts:  # else the outage tells more
                self._database = self._ask_database()
                found.append(self._database.state)
            if not OF_KAFKA.isdisjoint(failing):
                found += self._silence(self._activity.unreachable if failing == {REACH} else None)
            self._activity.culprit = ", ".join(found)
            self._suspect_at = at + _SUSPECT_AGAIN_SECONDS

    @property
    def _statement_lasts(self) -> bool:
        """True if a statement runs or hangs, rather than that one after the other fails."""
        return self._activity.statement_seconds >= _HANGS_SECONDS

    def _ask_database(self) -> _Database:
        where = self._questions.database
        try:
            does = self._questions.at_work()
        except OutboxError:
            return _Database(self._activity.now(), f"{where} does not answer", is_at_work=False)
        state = f"{where} {does or 'answers, but not on this connection'}"
        return _Database(self._activity.now(), state, is_at_work=bool(does))

    def _silence(self, places: Collection[Place] | None) -> list[str]:
        """Return in words which brokers do not answer us, of all or of those that lead at some places."""
        ask, max_age = self._questions, _SUSPECT_AGAIN_SECONDS
        try:
            silent = ask.silent_brokers(max_age) if places is None else ask.silent_leaders(places, max_age)
        except KafkaUnavailable as error:
            return [f"no broker of Kafka answers ({error})"]
        return [f"{who} does not answer" for who in silent]

    # -- to stay or to leave

    def _stay(self) -> None:
        if not self._is_alone:
            _log.warning("%s; no other process is in the leader group, so this one tries on", self._complaint())
        self._is_alone = True

    def _leave(self, step_down: Callable[[str, Callable[[], bool]], None]) -> None:
        overdue = {work for work in self._activity.duty.overdue(self._activity.now()) if self._is_ours(work)}
        if overdue and not self._stopping.is_set():
            reason = self._complaint()
            self._activity.duty.ended()  # also if the lease ends by itself before the hand-over
            step_down(reason, self._probe_of(overdue))

    def _is_ours(self, work: str) -> bool:
        """Return False, and begin the patience with this work anew, if others would fare the same."""
        if work == REACH:
            return self._are_places_ours()
        if work in OF_DATABASE or (work == BEGIN and self._statement_lasts):
            fails_for_all = self._statement_lasts and self._is_at_work()
        else:
            waits_for_all = work == PUBLISH and self._activity.longest_step[0] == ACKNOWLEDGEMENTS
            fails_for_all = (work == WRITE or waits_for_all) and not self._are_silent(None)
        if fails_for_all:
            self._activity.duty.excused(work, self._activity.now())
        return not fails_for_all

    def _is_at_work(self) -> bool:
        """Return True if the database is at work on our statement, as asked lately or now."""
        if self._activity.now() - self._database.asked_at > _SUSPECT_AGAIN_SECONDS:
            self._database = self._ask_database()
            self._activity.culprit = self._database.state
        return self._database.is_at_work

    def _are_silent(self, places: Collection[Place] | None) -> bool:
        """Return True if brokers that this leader needs do not answer it, which are those to complain of."""
        found = self._silence(places)
        if found:
            self._activity.culprit = ", ".join(found)
        return bool(found)

    def _are_places_ours(self) -> bool:
        """Return False, and begin the patience with what fails for long anew, if it fails for others, too."""
        at = self._activity.now()
        places = [place for place, since in self._failing_since().items() if at - since >= duty.PATIENCE_SECONDS]
        if not places or self._are_silent(places):
            return bool(places)
        self._excused.update(dict.fromkeys(places, self._activity.now()))
        return False

    def _complaint(self) -> str:
        """Return what this leader could not do, for how long, what it waits for, and who does not answer."""
        overdue = self._activity.duty.overdue(self._activity.now())
        work = max(overdue, key=lambda each: overdue[each], default="do its work")
        seconds = overdue.get(work, duty.PATIENCE_SECONDS)
        lines = [f"it could not {work} for {seconds:.0f} s{self._activity.circumstances}"]
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
