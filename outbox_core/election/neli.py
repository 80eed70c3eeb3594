"""NELI: leader election by means of Kafka alone ("Fast NELI", exclusive mode; seed 000, "Contention and availability").

Processes that contend are members of one consumer group, subscribed to one leader topic. Kafka gives each of its
partitions to at most one member; the owner of partition 0 may lead:

    join the group --> standby --- partition assigned ---> owner --- own heartbeat came back ---> leader
                          ^                                  ^                                      |
                          |                                  +--- lease over or higher claim -------+  LeaderFenced
                          +--- partition revoked: LeaderRevoked; lost: LeaderFenced ----------------+

Being assigned a partition says only what the group's coordinator thought when it said so. So the owner proves that it
still owns the partition *and* can reach Kafka: it writes to the partition and leads while it reads its own writing.
`election/tenure.py` is that protocol as a state machine, with what it guarantees and why; `election/pulse.py` runs it
on Kafka clients; this module holds the threads. Why no two lead at once:

1. While Kafka works, the partition has one owner, and an owner hands over (`LeaderRevoked`, which may block) before the
   coordinator elects another.
2. An owner that is cut off stops by itself when its lease ends, `heartbeat_timeout` after it *sent* the last heartbeat
   that came back. The coordinator waits for `session.timeout.ms` after the last group heartbeat, which is longer by
   more than a group heartbeat's interval (`election/config.py` insists), so nobody is elected before that.
3. If both fail (an owner cut off from the coordinator alone, say) the successor's claim is in the partition before its
   first heartbeat, and deposes the old owner when it reads that far.

What no lease can do: a thread that compares the lease and is then paused, before it acts. Whoever needs to exclude that
must fence where the action takes effect, as the harvester's modes do.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING, Self

from outbox_core.election.leadership import Leadership, now
from outbox_core.election.pulse import Pulse
from outbox_core.election.worker import Worker
from outbox_core.errors import OutboxError
from outbox_core.events import Event, EventHandler, LeaderAcquired, LeaderFenced, LeaderRevoked
from outbox_core.kafka import ensure_leader_topic

if TYPE_CHECKING:
    from collections.abc import Callable
    from types import TracebackType

    from outbox_core.election.config import NeliConfig

logger = logging.getLogger("outbox_core.election")

_LEAVE_SECONDS = 10.0


class Neli:
    """Contends for leadership of a group, on a thread of its own.

        def on_event(event): print(event)

        with Neli(NeliConfig(kafka={"bootstrap.servers": "localhost:9092"}, group_id="billing-api"), on_event) as neli:
            neli.background(do_a_little_work).join()

    All methods may be called from any thread, also from a handler and from a background task.

    Args:
        config: The settings.
        on_event: Told LeaderAcquired, LeaderRevoked and LeaderFenced, on the elector's thread. While it blocks nothing
            renews the lease, so it ends on time; only LeaderRevoked may block for long. What it raises is logged.
    """

    def __init__(self, config: NeliConfig, on_event: EventHandler | None = None) -> None:
        self._config = config
        self._on_event = on_event
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"neli-{config.group_id}", daemon=True)
        self._starting = threading.Lock()
        self._pulse: Pulse | None = None
        self._worker: Worker | None = None
        self._handling = False
        self._failure: BaseException | None = None

    @property
    def leadership(self) -> Leadership | None:
        """The present lease, or None. It may be over: ask it with `is_valid(now())`, at each use."""
        pulse = self._pulse
        return pulse.leadership if pulse is not None else None

    @property
    def is_leader(self) -> bool:
        """Whether this process leads, looked up in the lease at every call; not while LeaderRevoked is handled."""
        pulse = self._pulse
        if pulse is None or pulse.is_handing_over:
            return False
        lease = pulse.leadership
        return lease is not None and lease.is_valid(now())

    @property
    def failure(self) -> BaseException | None:
        """What ended the elector against its will, or None."""
        return self._failure

    @property
    def trouble(self) -> str | None:
        """What keeps the group from having a leader, for people; None while it works, whoever leads.

        A group that has had no leader for three sessions, one that leads for another outbox, a leader topic that has
        refused our messages for as long as a lease lasts, Kafka that does not answer; or what ended this elector.
        """
        if self._failure is not None:
            return str(self._failure)
        pulse = self._pulse
        return pulse.trouble if pulse is not None else None

    def start(self) -> None:
        """Join the group, having made the leader topic if it is missing. Does nothing if that was done before.

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
            width = ensure_leader_topic(self._config.kafka, self._config.topic)
            if width > 1:
                logger.warning(
                    "leader topic %r has %d partitions: every process that joins or leaves may move leadership; "
                    "give it one partition",
                    self._config.topic,
                    width,
                )
            pulse = Pulse(self._config, width, self._notify, self._await_worker)
            try:
                pulse.join()
            except BaseException:
                pulse.close()
                raise
            self._pulse = pulse
            self._thread.start()

    def stop(self) -> None:
        """Hand leadership over, if held, and leave the group, so that a successor is elected at once.

        Waits for that, and as long as an event handler blocks; otherwise no longer than it takes to find out that Kafka
        does not answer. Idempotent. Called from a handler or a background task it only asks for the stop.
        """
        self._stopping.set()
        if not self._thread.is_alive() or self._is_called_from_within():
            return
        given_up = time.monotonic() + _LEAVE_SECONDS + self._config.heartbeat_timeout.total_seconds()
        while self._thread.is_alive() and (self._handling or time.monotonic() < given_up):
            self._thread.join(timeout=0.1)
        if self._thread.is_alive():
            logger.warning("%s: Kafka does not answer; gave up waiting to leave the group", self._config.name)

    def background(self, task: Callable[[], object]) -> Self:
        """Start if that was not done, and call `task` again and again while leading, on another thread.

        The task is a small unit of work: leadership is looked at between two calls, and a hand-over waits for the
        present call to return, as long as the lease lasts. What it raises ends the elector: leadership is handed over,
        and `join` raises it. There is one task at most.

        Returns:
            This elector.
        """
        if self._worker is not None:
            raise OutboxError("this elector has a background task already")
        self.start()
        self._worker = Worker(
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
            BaseException: what ended it, if it was not `stop`.
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
        """The elector's thread."""
        pulse = self._pulse
        if pulse is None:
            return
        try:
            while not self._stopping.is_set():
                pulse.turn()
        except Exception as error:
            if not isinstance(error, OutboxError):
                logger.exception("%s: leader election failed", self._config.name)
            self._fail(error)
            pulse.lose(f"leader election failed: {error}")
        finally:
            pulse.close()
            self._pulse = None

    def _fail(self, error: BaseException) -> None:
        self._failure = self._failure or error
        self._stopping.set()

    def _await_worker(self, lease: Leadership) -> None:
        if self._worker is not None:
            self._worker.pause(timeout=lease.remaining(now()))

    def _notify(self, event: Event) -> None:
        self._log(event)
        if isinstance(event, LeaderAcquired) and self._worker is not None:
            self._worker.resume()
        if self._on_event is None:
            return
        self._handling = True
        try:
            self._on_event(event)
        except Exception:
            logger.exception("%s: the handler of %s failed", self._config.name, type(event).__name__)
        finally:
            self._handling = False

    def _log(self, event: Event) -> None:
        name, group = self._config.name, self._config.group_id
        match event:
            case LeaderAcquired():
                logger.info("%s leads %s, term %d, leader ID %s", name, group, event.term, event.leader_id)
            case LeaderRevoked():
                logger.info("%s hands over %s", name, group)
            case LeaderFenced():
                logger.warning("%s no longer leads %s: %s", name, group, event.reason)

    def _is_called_from_within(self) -> bool:
        worker = self._worker.thread if self._worker is not None else None
        return threading.current_thread() in {self._thread, worker}
