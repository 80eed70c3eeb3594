"""A consumer or tracker that cannot work leaves its group to others, by the rule of `outbox_core.kafka.duty`.

A member's own thread reads and writes, and may hang in it. So another thread looks every second, and asks: how many are
in the group, and which brokers do not answer us. The member's thread leaves and joins, when it calls `act`.

It leaves only if a broker does not answer it. What fails although every broker answers fails for the others, too: for
want of a right, in a partition without a leader, or behind the open transaction of a member that died. If no broker
answers, it could not even leave.

All members of a group are at work, each on its own partitions, and an outage for all meets all of them at once. So that
not all leave at once, the first in the order of their IDs waits until the others have left: it finds itself alone, and
stays. Should all have left all the same, the first that comes back is seen by the others, which stay out.

Leaving is a plain unsubscription, as at the end: members of kafka-mq-go see nothing else.
"""

from __future__ import annotations

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final

from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.admin import Inquiry, group_members
from outbox_core.kafka.duty import ASK_SECONDS, Duty
from outbox_core.kafka.reach import SilentBrokers, unreachable_brokers
from outbox_core.outage import Outage
from outbox_queue.config import QueueConfig
from outbox_queue.protocol.clients import common_settings

LEAVE_SECONDS: Final = 2.0
"""For what is still to be committed by a member that cannot work: others wait for its partitions."""

_LOOK_SECONDS = 1.0
_HELD_UP_SECONDS = 5.0  # between two looks: this process had no CPU, and nothing is known of its links
_QUIET_SECONDS = 10.0  # without a record of a partition: then its leader is asked
_ANSWERS_LAST_SECONDS = 8.0
_SUSPECT_SECONDS = 12.0  # of failure: then the brokers that do not answer are looked for
_SEARCH_SECONDS = 10.0  # between two such searches
_FIRST_STAYS_SECONDS = 6.0  # longer than the others need to look, to ask and to leave
_ASK_SECONDS = 3.0
_REACH_SECONDS = 6.0  # half of it for the list of brokers; less than what is left of the patience by then

READ: Final = "read"

_log = logging.getLogger(__name__)


_silent = SilentBrokers(_REACH_SECONDS)  # for all members of this process


def silent_brokers(settings: Mapping[str, Any]) -> list[str]:
    """Return the brokers that do not answer, as asked seconds ago at most. Raises KafkaUnavailable if none does."""
    return _silent.lately(settings, _ANSWERS_LAST_SECONDS)


class GroupDuty:
    """The watch over one member of a consumer group. Its member's thread calls all methods, but `tried` and kin any.

    Args:
        name: The member, as the subject of log lines.
        group: Its consumer group.
        topic: The topic that the group reads.
        config: Settings of the queues.
        on_change: Called with True when the member leaves because it cannot work, with False when it joins again.
    """

    def __init__(
        self, name: str, group: str, topic: str, config: QueueConfig, on_change: Callable[[bool], None]
    ) -> None:
        self._name = name
        self._group = group
        self._topic = topic
        self._settings = common_settings(config)
        self._on_change = on_change
        self._duty = Duty(random.random())  # noqa: S311  not for secrets
        self._lock = threading.Lock()  # held for moments
        self._partitions: frozenset[int] = frozenset()
        self._work_of: dict[str, int] = {}  # work -> its partition
        self._done: set[str] = set()  # kinds of work that succeeded once
        self._well_at: dict[int, float] = {}  # partition -> when it was read, or its leader answered
        self._searched_at = self._asked_at = 0.0
        self._silent: list[str] = []  # the brokers that do not answer, as found last
        self._member_id: str | None = None
        self._overdue_at: float | None = None  # since Kafka was asked first who is there
        self._leaving = ""  # why it should leave; '' if it should not
        self._reason = ""  # why it has left
        self._left_at = 0.0
        self._is_deserted = False  # while it is out: nobody else is in the group
        self._outage = Outage(f"watching over {name} in group {group}", _log)
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"outbox-duty-{group}", daemon=True)

    def start(self) -> None:
        """Begin to look."""
        self._thread.start()

    def close(self) -> None:
        """Look no more. A question under way ends by itself."""
        self._closing.set()
        if self._duty.is_out:
            self._on_change(False)

    # -- the member's work

    def tried(self, what: str, partition: int | None = None) -> None:
        """Take in that work begins.

        Args:
            what: A verb with its object, such as "start messages".
            partition: The partition of the group's topic that the work is for, if it is for one.
        """
        self._tried(what, partition, time.monotonic())

    def _tried(self, what: str, partition: int | None, since: float) -> None:
        with self._lock:
            work = self._name_of(what, partition)
            if partition is not None:
                self._work_of[work] = partition
            self._duty.tried(work, since)

    def succeeded(self, what: str, partition: int | None = None) -> None:
        """Take in that work was done."""
        with self._lock:
            self._done.add(what)
            self._duty.succeeded(self._name_of(what, partition))

    def has_done(self, what: str) -> bool:
        """Tell whether work has succeeded once: settings, topics and rights were in order, and what fails may pass."""
        return what in self._done

    def dropped(self, what: str, partition: int | None = None) -> None:
        """Take in that work is not there to do any more."""
        with self._lock:
            self._duty.dropped(self._name_of(what, partition))

    def _name_of(self, what: str, partition: int | None) -> str:
        return what if partition is None else f"{what} {self._topic}[{partition}]"

    def has_read(self, partition: int) -> None:
        """Take in that records, or the end, of a partition of the group's topic were read."""
        self._well_at[partition] = time.monotonic()
        self.succeeded(READ, partition)

    def assigned(self, partitions: Iterable[int], member_id: str | None = None) -> None:
        """Take in which partitions the group has given to this member; none if it has lost its place."""
        with self._lock:
            self._member_id = member_id
            self._partitions = frozenset(partitions)
            now = time.monotonic()
            self._well_at = {one: self._well_at.get(one, now) for one in self._partitions}
            for work in [work for work, partition in self._work_of.items() if partition not in self._partitions]:
                self._duty.dropped(work)
                del self._work_of[work]
            if not self._partitions:
                self._duty.ended()
            elif not self._duty.has_right:
                self._duty.began(time.monotonic())

    # -- coming and going

    @property
    def is_unable(self) -> bool:
        """True from the moment at which the member should leave, until it joins again."""
        return bool(self._leaving) or self._duty.is_out

    @property
    def trouble(self) -> str | None:
        """The reason why the member has left its group, None if it has not."""
        if not self._duty.is_out:
            return None
        return f"has left group {self._group} for {time.monotonic() - self._left_at:.0f} s: {self._reason}"

    def act(self, leave: Callable[[], None], join: Callable[[], None]) -> None:
        """Leave or join the group, if it is time to, by the given calls."""
        if self._leaving:
            self._leave(leave)
        elif self._duty.is_out and self._may_return():
            self._return(join)

    def _leave(self, leave: Callable[[], None]) -> None:
        with self._lock:
            self._reason, self._leaving = self._leaving, ""
            self._left_at = time.monotonic()
            self._is_deserted = False
            self._overdue_at, self._silent = None, []
            self._duty.left(self._left_at)
        text = "%s leaves group %s to its other members: %s; it joins again when every broker answers it"
        _log.warning(text, self._name, self._group, self._reason)
        self._on_change(True)
        leave()

    def _may_return(self) -> bool:
        with self._lock:
            now = time.monotonic()
            if not self._is_deserted:
                self._duty.heard(now)
            return self._duty.may_return(now)

    def _return(self, join: Callable[[], None]) -> None:
        why = "nobody else is there" if self._is_deserted else "every broker answers it"
        with self._lock:
            self._duty.returned()
        _log.warning("%s joins group %s again after %.0f s: %s", self._name, self._group, self.seconds_out, why)
        self._on_change(False)
        join()

    @property
    def seconds_out(self) -> float:
        """Seconds since it left last."""
        return time.monotonic() - self._left_at

    # -- questions, on a thread of its own

    def _run(self) -> None:
        looked_at = time.monotonic()
        while not self._closing.wait(_LOOK_SECONDS):
            if time.monotonic() - looked_at < _HELD_UP_SECONDS:
                try:
                    self._look()
                except Exception as error:  # a client cannot be made, say: asked again
                    self._outage.failed(error)
                else:
                    self._outage.recovered()
            looked_at = time.monotonic()

    def _look(self) -> None:
        if self._duty.is_out:
            self._look_from_outside()
            return
        self._check_readers()
        self._find_silent()
        with self._lock:
            now = time.monotonic()
            is_time = not self._leaving and bool(self._silent) and self._duty.should_ask(now)
            if not self._duty.overdue(now):
                self._overdue_at = None
        if is_time:
            self._consider_leaving()

    def _find_silent(self) -> None:
        """Find the brokers that do not answer, once some work fails for a while; before the patience is over."""
        with self._lock:
            now = time.monotonic()
            longest = max(self._duty.owed(now).values(), default=0.0)
        if longest < _SUSPECT_SECONDS:
            self._silent = []
        elif now - self._searched_at >= _SEARCH_SECONDS:
            try:
                self._silent = silent_brokers(self._settings)
            except KafkaUnavailable as error:
                _log.debug("%s: %s", self._name, error)
                self._silent = []
            self._searched_at = time.monotonic()

    def _consider_leaving(self) -> None:
        members = self._members()
        with self._lock:
            now = time.monotonic()
            self._overdue_at = self._overdue_at or now
            if not self._duty.should_leave(None if members is None else len(members), now):
                return
            is_first = bool(members) and min(members or ()) == self._member_id
            if is_first and now - self._overdue_at < _FIRST_STAYS_SECONDS:
                return
            work, seconds = max(self._duty.overdue(now).items(), key=lambda one: one[1])
            answers = "does" if len(self._silent) == 1 else "do"
            brokers = " and ".join(self._silent)
            self._leaving = f"for {seconds:.0f} s it could not {work}, and {brokers} {answers} not answer it"

    def _look_from_outside(self) -> None:
        with self._lock:
            is_time = self._duty.should_probe(time.monotonic())
        if is_time:
            try:
                is_able = not unreachable_brokers(self._settings, _REACH_SECONDS)
            except KafkaUnavailable:
                is_able = False
            with self._lock:
                self._duty.probed(time.monotonic(), is_able=is_able)
        if time.monotonic() - self._asked_at >= ASK_SECONDS:
            members = self._members()
            self._asked_at = time.monotonic()
            self._is_deserted = members is not None and not members

    def _check_readers(self) -> None:
        """Ask the leaders of partitions that nothing was read from lately: perhaps there is nothing to read."""
        now, well_at = time.monotonic(), self._well_at
        quiet = [one for one, at in list(well_at.items()) if now - at >= _QUIET_SECONDS]
        if not quiet:
            return
        try:
            silent = silent_brokers(self._settings)
            leaders = self._leaders() if silent else {}
        except KafkaUnavailable as error:
            _log.debug("%s: %s", self._name, error)
            return
        for one in quiet:
            if leaders.get(one) in silent:
                self._tried(READ, one, max(well_at[one], now - _QUIET_SECONDS))
            else:
                well_at[one] = now
                with self._lock:  # it was not read
                    self._duty.succeeded(self._name_of(READ, one))

    def _leaders(self) -> dict[int, str]:
        """Return the leaders of the topic's partitions. Raises KafkaUnavailable."""
        with Inquiry(self._settings, _ASK_SECONDS) as inquiry:
            return {partition: str(leader) for (_, partition), leader in inquiry.leaders([self._topic]).items()}

    def _members(self) -> frozenset[str] | None:
        """Return the members of the group, None if Kafka does not say."""
        return group_members(self._settings, self._group, timeout_seconds=_ASK_SECONDS)
