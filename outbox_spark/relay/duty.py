"""A relay that leads and cannot publish hands leadership over, by the rule of `outbox_core.kafka.duty`.

Its work is one: to publish rows, or to find none. It is tried from the moment at which leadership is won, told by the
elector's thread: the driver's may hang in a call of an earlier leadership, and would never begin. A thread of its own
looks, asks who else is in the group of harvesters and relays, and has the elector step down if there is anybody, or
Kafka does not say.

**What may take long is no failure.** A job may wait for its executors, or run its tasks one after the other; settling
may read the whole table, or fence a thousand transactional.ids. Nothing is known of them before their end. So while one
is under way that no failure preceded, the watch does what a probe does: it reads the table over a new connection, and
asks each broker itself. If that succeeds, the relay is slow, as its successor would be, and is given another
`PATIENCE_SECONDS`; until its own time is over. The planner's few statements are given no such time.

Tasks on other machines may fare worse than the driver. Their job fails after their own patience, and a job that failed
is no slow one, nor is the next; so the relay is a standby soon, and the work elsewhere. What fails in the same way for
every process, such as a table that is missing, counts for nothing.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from contextlib import closing
from typing import Final

from outbox_core.config import redact
from outbox_core.errors import OutboxError
from outbox_core.kafka.admin import group_members
from outbox_core.kafka.clients import KafkaConfig
from outbox_core.kafka.duty import Duty
from outbox_core.kafka.reach import unreachable_brokers
from outbox_spark.relay.shard_store import ShardStore

_log = logging.getLogger(__name__)

_PUBLISH: Final = "publish rows"
_LOOK_SECONDS = 1.0
_MEMBERS_SECONDS = 8.0
_BROKERS_SECONDS = 5.0

StepDown = Callable[[str, Callable[[], bool]], None]


class RelayDuty:
    """The watch over a relay's work. The elector's thread and the driver's tell it of theirs; one of its own looks.

    Args:
        kafka: Settings of any client.
        group: The group of the outbox's harvesters and relays.
        store: Makes a store, to see whether the table can be read.
    """

    def __init__(self, kafka: KafkaConfig, group: str, store: Callable[[], ShardStore]) -> None:
        self._kafka = kafka
        self._group = group
        self._store = store
        self._duty = Duty()
        self._lock = threading.Lock()  # held for moments
        self._slow_until = 0.0  # the time of what is under way; in the past for what may not take long
        self._failure = ""
        self._has_asked_to_leave = False
        self._is_alone = False
        self._closing = threading.Event()

    def start(self, step_down: StepDown) -> None:
        """Begin to look; `step_down` has the elector hand over, see `outbox_core.election.Neli`."""
        threading.Thread(target=self._run, args=(step_down,), name="outbox-relay-duty", daemon=True).start()

    def close(self) -> None:
        """Look no more. A question under way ends by itself."""
        self._closing.set()

    # -- the elector's thread

    def leads(self, is_leader: bool, is_handed_over: bool = True) -> None:
        """Take in that leadership begins, or that it ends, handed over to another or by itself."""
        with self._lock:
            self._slow_until, self._failure = 0.0, ""
            self._has_asked_to_leave = self._is_alone = False
            if is_leader:
                now = time.monotonic()
                self._duty.began(now)
                self._duty.tried(_PUBLISH, now)
            elif is_handed_over:
                self._duty.ended()
            else:
                self._duty.lost(time.monotonic())

    # -- the driver's thread

    def tries(self, seconds: float = 0.0) -> None:
        """Take in that the next step begins of a try to publish, or to find that there is nothing to publish.

        Args:
            seconds: For which the step may be at work if this process is able to; 0.0 if it takes moments.
        """
        with self._lock:
            now = time.monotonic()
            self._slow_until = now + seconds if seconds else 0.0
            self._goes_on(now)

    def _goes_on(self, now: float) -> None:
        """Let what is owed count from now; but from the first failure's try on, if there was a failure."""
        if not self._failure:
            self._duty.dropped(_PUBLISH)
        self._duty.tried(_PUBLISH, now)

    def succeeded(self) -> None:
        """Take in that rows were published, or that none could be."""
        with self._lock:
            self._duty.succeeded(_PUBLISH)
            self._slow_until, self._failure, self._is_alone = 0.0, "", False

    def failed(self, failure: str, *, for_all: bool) -> None:
        """Take in that the try has failed, with the reason; `for_all` if it would have for any other process."""
        with self._lock:
            self._slow_until = 0.0
            self._failure = "" if for_all else failure
            if for_all:
                self._duty.dropped(_PUBLISH)

    # -- a thread of its own

    def _run(self, step_down: StepDown) -> None:
        while not self._closing.wait(_LOOK_SECONDS):
            try:
                self.look(step_down)
            except Exception:  # nobody else watches
                _log.exception("the watch over the relay's work failed; it goes on")

    def look(self, step_down: StepDown) -> None:
        """Look at what is owed, and have the elector step down if another process may do it."""
        with self._lock:
            now = time.monotonic()
            if self._has_asked_to_leave or not self._duty.should_ask(now):
                return
            may_be_slow = self._may_be_slow(now)
        if may_be_slow and self.is_able():
            with self._lock:
                now = time.monotonic()
                if self._may_be_slow(now):  # it has not ended meanwhile
                    self._goes_on(now)
            return
        members = group_members(self._kafka, self._group, timeout_seconds=_MEMBERS_SECONDS)
        with self._lock:
            overdue = self._duty.overdue(time.monotonic())
            if not overdue:
                return
            why = self._failure or "its tasks or the database do not answer"
            reason = redact(" ".join(f"it could not {_PUBLISH} for {overdue[_PUBLISH]:.0f} s: {why}".split()))
            if not self._duty.should_leave(None if members is None else len(members), time.monotonic()):
                if not self._is_alone:
                    _log.warning("%s; no other process is in group %s, so this one tries on", reason, self._group)
                self._is_alone = True
                return
            self._has_asked_to_leave = True
            self._duty.ended()  # also if the lease ends by itself before the hand-over
        step_down(reason, self.is_able)

    def _may_be_slow(self, now: float) -> bool:
        return not self._failure and now < self._slow_until

    def is_able(self) -> bool:
        """Tell whether the table can be read over a new connection, and every broker answers."""
        try:
            with closing(self._store()) as store:
                store.is_empty()
            return not unreachable_brokers(self._kafka, _BROKERS_SECONDS)
        except OutboxError:
            return False
