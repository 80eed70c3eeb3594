"""NELI: leader election by means of Kafka alone ("Fast NELI", exclusive mode; seed 000, "Contention and availability").

Contending processes are members of one consumer group, subscribed to one leader topic. Kafka gives each of its
partitions to at most one member; the owner of partition 0 may lead:

    join the group --> standby --- partition assigned ---> owner --- own heartbeat came back ---> leader
                          ^                                  ^                                      |
                          |                                  +--- lease over or higher claim -------+  LeaderFenced
                          +--- partition revoked: LeaderRevoked; lost: LeaderFenced ----------------+
                          |
                          +--- it has not led for two sessions, or `step_down`: out of the group for a time

An assignment says only what the group's coordinator thought at the time. So the owner writes to the partition, and
leads while it reads its own writing. `election/protocol.py` is that protocol as a state machine; `election/member.py`
runs it on Kafka clients; this module holds the threads. Why no two lead at once:

1. While Kafka works, the partition has one owner, and an owner hands over (`LeaderRevoked`, which may block) before the
   coordinator elects another.
2. An owner that is cut off stops when its lease ends, before the coordinator elects a successor (`election/config.py`).
3. If both fail (an owner cut off from the coordinator alone, say) the successor's claim deposes the old owner when it
   reads that far; and no lease begins until every one is over that rests on a heartbeat before the claim.

A member that leaves because it cannot lead or work (`member`) ends its ownership by the same hand-over as one that
stops, and is a new member when it comes back; so 1 to 3 hold for it as for any other.

A lease cannot stop a thread that is paused between comparing it and acting. To exclude that too, fence where the action
takes effect, as the harvester's modes do.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from typing import TYPE_CHECKING, Self

from outbox_core.callbacks import log_once
from outbox_core.election.leading import BackgroundTask
from outbox_core.election.lease import Leadership, now
from outbox_core.election.member import ClientBroken, Member
from outbox_core.errors import InvariantBroken, OutboxError
from outbox_core.events import Event, EventHandler, LeaderAcquired, LeaderFenced, LeaderRevoked
from outbox_core.kafka.topics import ensure_leader_topic

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from outbox_core.election.config import NeliConfig

logger = logging.getLogger("outbox_core.election")

_LEAVE_SECONDS = 10.0
_NEW_CLIENT_SECONDS = 5.0  # before another client takes the place of one that has failed


class Neli:
    """An elector: contends for leadership of a group, on a thread of its own.

        def on_event(event): print(event)

        with Neli(NeliConfig(kafka={"bootstrap.servers": "localhost:9092"}, group_id="billing-api"), on_event) as neli:
            neli.background(do_a_little_work).join()

    All methods may be called from any thread, also from a handler and from a background task.

    Args:
        config: The settings.
        on_event: Called with LeaderAcquired, LeaderRevoked and LeaderFenced, on the elector's thread. While it blocks
            the lease is not renewed, so it ends on time; only LeaderRevoked may block for long. Its errors are logged.
    """

    def __init__(self, config: NeliConfig, on_event: EventHandler | None = None) -> None:
        self._config = config
        self._on_event = on_event
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"neli-{config.group_id}", daemon=True)
        self._starting = threading.Lock()
        self._member: Member | None = None
        self._task: BackgroundTask | None = None
        self._wishes: deque[tuple[str, Callable[[], bool]]] = deque()  # to step down
        self._handling = False
        self._failure: BaseException | None = None

    @property
    def leadership(self) -> Leadership | None:
        """The present lease, or None. It may be over: ask it with `is_valid(now())`, at each use."""
        member = self._member
        return member.leadership if member is not None else None

    @property
    def is_leader(self) -> bool:
        """True while this process leads, by the lease at every call; not while LeaderRevoked is handled."""
        member = self._member
        if member is None or member.is_handing_over:
            return False
        lease = member.leadership
        return lease is not None and lease.is_valid(now())

    @property
    def failure(self) -> BaseException | None:
        """The error that ended the elector, or None."""
        return self._failure

    @property
    def trouble(self) -> str | None:
        """The reason why the group has no leader, for people; None while it works, even if another process leads.

        There is none for three sessions, or it leads for another outbox; the leader topic has refused our messages for
        as long as a lease lasts; Kafka does not answer; or this elector was ended by an error. Also while this process
        is out of the group (`is_out`): then it would not take over.
        """
        if self._failure is not None:
            return str(self._failure)
        member = self._member
        return member.trouble if member is not None else None

    @property
    def silent_seconds(self) -> float:
        """Seconds since Kafka answered this elector last; 0.0 unless it is at work."""
        member = self._member
        return member.silent_seconds if member is not None else 0.0

    @property
    def is_out(self) -> bool:
        """True while this process stays out of the group: it could not lead, or has stepped down; see `trouble`."""
        member = self._member
        return member is not None and member.is_out

    @property
    def hears_leader(self) -> bool:
        """True if a leader's heartbeat, this process' own perhaps, was read within the time of a lease."""
        member = self._member
        return member is not None and member.hears_leader

    def step_down(self, reason: str, is_able: Callable[[], bool]) -> None:
        """Hand leadership over, if held, because this process cannot do a leader's work, and let others lead.

            neli.step_down("the ledger's database does not answer", is_able=ledger.answers)

        Returns at once. The elector's thread hands over in order (`LeaderRevoked`, which may block) and leaves the
        group. It joins again, after a session (6 s) at least, once `is_able` returns True, or once it has heard no
        leader for 10 to 15 s: then somebody must try. So a group of one has no leader for that long.

        Args:
            reason: For people, in the log and in `trouble`.
            is_able: Asked on a thread of its own, after pauses of 1 s growing to 10 s, so it may take its time; what it
                raises counts as False, and is logged once.
        """
        self._wishes.append((reason, is_able))

    def start(self) -> None:
        """Join the group, and make the leader topic if it is missing. Idempotent.

        Raises:
            KafkaUnavailable: Kafka does not answer.
            LeaderTopicError: the leader topic is missing and cannot be made, or refuses a message of ours.
            InvalidConfig: librdkafka refuses a setting.
            OutboxError: it was stopped before; make a new one.
        """
        with self._starting:
            if self._stopping.is_set():
                raise OutboxError("this elector was stopped and cannot be started again; make a new one")
            if self._thread.ident is not None:
                return
            self._member = self._joined()
            self._thread.start()

    def stop(self) -> None:
        """Hand leadership over, if held, and leave the group, so that a successor is elected at once. Idempotent.

        Waits for that, and as long as an event handler blocks; otherwise no longer than it takes to find out that Kafka
        does not answer. From a handler or a background task it only asks for the stop.
        """
        self._stopping.set()
        worker = self._task.thread if self._task is not None else None
        if not self._thread.is_alive() or threading.current_thread() in {self._thread, worker}:
            return
        given_up = time.monotonic() + _LEAVE_SECONDS + self._config.heartbeat_timeout.total_seconds()
        while self._thread.is_alive() and (self._handling or time.monotonic() < given_up):
            self._thread.join(timeout=0.1)
        if self._thread.is_alive():
            logger.warning("%s: Kafka does not answer; gave up waiting to leave the group", self._config.name)

    def background(self, task: Callable[[], object]) -> Self:
        """Start unless that was done, and call `task` again and again while leading, on another thread.

        The task is a small unit of work: the elector checks leadership between two calls, and a hand-over waits for the
        present call to return, as long as the lease lasts. An error of the task ends the elector: it hands leadership
        over, and `join` raises the error. There is one task at most. Returns this elector.
        """
        if self._task is not None:
            raise OutboxError("this elector has a background task already")
        self.start()
        self._task = BackgroundTask(
            f"neli-{self._config.group_id}-task",
            task,
            may_work=lambda: self.is_leader,
            is_over=self._stopping,
            on_failure=self._fail,
        )
        return self

    def join(self, timeout: float | None = None) -> None:
        """Wait until the elector has ended.

        Raises:
            TimeoutError: it has not within `timeout` seconds.
            BaseException: the error that ended it.
        """
        if self._thread.ident is not None:
            self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"the elector still runs after {timeout:g} s")
        if self._failure is not None:
            raise self._failure

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        member = self._member
        try:
            while member is not None and not self._stopping.is_set():
                try:
                    if self._wishes:
                        member.step_down(*self._wishes.popleft())
                    member.run_once()
                except ClientBroken as error:
                    logger.warning("%s: %s; another one is made", self._config.name, error)
                    broken, member = member, None
                    broken.lose(str(error))
                    broken.close()
                    member = self._another_member()
        except BaseException as error:  # of a handler that calls `sys.exit`, too: a thread would end without a word
            if not isinstance(error, OutboxError):
                logger.exception("%s: leader election failed", self._config.name)
            self._fail(error)
            if member is not None:
                member.lose(f"leader election failed: {error}")
        finally:
            if member is not None:
                member.close()
            self._member = None

    def _another_member(self) -> Member | None:
        """Make a member in place of one whose client has failed, as soon as that is possible; None after a stop."""
        told = ""
        while not self._stopping.wait(_NEW_CLIENT_SECONDS):
            try:
                self._member = self._joined(is_successor=True)
            except InvariantBroken:
                raise
            except OutboxError as error:  # it was in order at the start
                if str(error) != told:
                    told = str(error)
                    name, group = self._config.name, self._config.group_id
                    logger.warning("%s: no client for leader group %s can be made: %s; trying on", name, group, told)
            else:
                return self._member
        return None

    def _joined(self, *, is_successor: bool = False) -> Member:
        """Return a new member that has asked to be let into the group; `is_successor` if an earlier one was in it."""
        width = ensure_leader_topic(self._config.kafka, self._config.topic)
        member = Member(self._config, width, self._notify, self._await_task)
        if is_successor:
            member.succeeds()
        try:
            member.join()
        except BaseException:
            member.close()
            raise
        return member

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    def _await_task(self, lease: Leadership) -> None:
        if self._task is not None:
            self._task.pause(timeout=lease.remaining(now()))

    def _notify(self, event: Event) -> None:
        if not isinstance(event, LeaderRevoked):
            self._log(event)
        if isinstance(event, LeaderAcquired) and self._task is not None:
            self._task.resume()
        if self._on_event is not None:
            self._handle(self._on_event, event)
        if isinstance(event, LeaderRevoked):
            self._log(event)  # now that the handler has finished its work

    def _handle(self, on_event: EventHandler, event: Event) -> None:
        self._handling = True
        try:
            on_event(event)
        except Exception as error:
            log_once(logger, f"the handler of {type(event).__name__} failed", error)
        finally:
            self._handling = False

    def _log(self, event: Event) -> None:
        name, group = self._config.name, self._config.group_id
        match event:
            case LeaderAcquired():
                logger.info("%s leads %s, term %d, leader ID %s", name, group, event.term, event.leader_id)
            case LeaderRevoked():
                logger.info("%s has handed over %s, term %d", name, group, event.term)
            case LeaderFenced():
                logger.warning("%s no longer leads %s, term %d: %s", name, group, event.term, event.reason)
