"""The harvester's life: check everything, contend for leadership, harvest while leading, stop in good order.

Threads, all daemons: the elector's (calls `_on_leadership`), the harvest thread (`_run`: owns the producer and the
terms), one for each of the two database connections, one that counts the backlog, one that listens with `notify`,
`outbox-watch`, and `outbox-duty` (`work_watch`), which has a leader step down that cannot do its work. They share
`_announced`, `_stopping` and `_term`; every change of those is followed by `_wake.set()`.

                 LeaderAcquired                         lease over, LeaderFenced
    standing by ----------------> harvesting (a term) ---------------------------> finishing --> standing by
                                          |   LeaderRevoked: the elector waits until the term has finished
                                          '---------------------------------------> finishing --> standing by
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections import deque
from collections.abc import Callable
from contextlib import ExitStack, suppress
from types import TracebackType
from typing import Self
from uuid import UUID

from outbox_core import commit_signal
from outbox_core.callbacks import log_once
from outbox_core.commit_signal import CommitFlag
from outbox_core.config import HarvestConfig, redact
from outbox_core.election.interface import ElectorFactory
from outbox_core.election.lease import now
from outbox_core.errors import StoreUnavailable, must
from outbox_core.events import Event, EventHandler, LeaderAcquired, LeaderFenced, LeaderRevoked
from outbox_core.harvest.at_least_once.loop import AtLeastOnce
from outbox_core.harvest.context import HarvestContext, HarvestLimits
from outbox_core.harvest.exactly_once.terms import ExactlyOnce
from outbox_core.harvest.failures.holds import nothing_waits
from outbox_core.harvest.parts import Identity, Parts, ProducerFactory
from outbox_core.harvest.steps import BEGIN, TELL
from outbox_core.harvest.store_calls import StoreCall, StoreThread
from outbox_core.harvest.watermark import LowWatermark
from outbox_core.harvest.work_watch import WorkWatch
from outbox_core.kafka.admin import check_connection
from outbox_core.kafka.batch_sizes import BatchSizes
from outbox_core.kafka.errors import grant
from outbox_core.kafka.identity import Failpoint, TransactionalIdentity
from outbox_core.kafka.topics import TopicLimits
from outbox_core.metrics import HarvestMetrics, Health
from outbox_core.monitoring.meter import Meter
from outbox_core.outage import Outage
from outbox_core.printable import escape_log_lines
from outbox_core.stores.interface import StoreFactory
from outbox_core.upkeep.backlog import BacklogObserver
from outbox_core.upkeep.exhaustion import ExhaustionMonitor
from outbox_core.upkeep.wakeup import CommitListener

_log = logging.getLogger(__name__)

_STANDBY_TICK_SECONDS = 0.2
_STANDBY_DRAIN_CHECK_SECONDS = 0.5
_UNHEALTHY_AFTER_SECONDS = 30.0
_STALLED_AFTER_SECONDS = 5.0
_LEAVE_SECONDS = 10.0
_COUNTS_AFTER_FENCE_SECONDS = 30.0
_DEAF_AFTER_SECONDS = 5.0


class Harvester:
    """The publisher of one outbox table's records to Kafka while it leads; a context manager.

    Args:
        config: settings.
        on_event: called with every `outbox_core.events.Event`; see there what it may do.
        metrics: counters and gauges; without them the backlog is not counted, and no history written.
        drain: end once the table is empty, whichever process emptied it.
        store_factory: makes a store for each thread that needs one; by default PostgreSQL.
        elector_factory: makes the elector from an event handler; by default NELI through Kafka.
        producer_factory: makes the Kafka producer of at-least-once delivery.
        reached: called at every step of exactly-once delivery, on the harvest thread; for tests that stop the process.
    """

    def __init__(
        self,
        config: HarvestConfig,
        on_event: EventHandler | None = None,
        *,
        metrics: HarvestMetrics | None = None,
        drain: bool = False,
        store_factory: StoreFactory | None = None,
        elector_factory: ElectorFactory | None = None,
        producer_factory: ProducerFactory | None = None,
        reached: Callable[[Failpoint], None] = lambda _: None,
    ) -> None:
        self.config = config
        self._on_event = on_event or (lambda _: None)
        self._metrics = metrics
        self._drain = drain
        self._parts = Parts(config, store_factory, elector_factory, producer_factory)
        self._reached = reached
        self._wake = threading.Event()
        self._commits = CommitFlag(self._wake)
        self._commit_listener: CommitListener | None = None
        self._observer: BacklogObserver | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._term_changed = threading.Condition()
        self._term: AtLeastOnce | ExactlyOnce | None = None
        self._announced: UUID | None = None  # the leadership whose LeaderAcquired the event handler has seen
        self._untold: deque[Event] = deque()
        self._telling_since: float | None = None  # on the harvest thread
        self._fenced_at = float("-inf")
        self._leads_as: UUID | None = None  # the leadership, as event handlers see it: from Acquired, until Revoked
        self._failure: BaseException | None = None
        self._ctx: HarvestContext | None = None
        self._thread: threading.Thread | None = None
        self._topic_limits = TopicLimits(config.base_kafka_config)

    # -- life

    def start(self) -> None:
        """Check database, table, Kafka and leader topic, and begin to contend for leadership.

        Raises:
            OutboxError: of the kind that fits the problem. No thread keeps running then.
        """
        if self._thread is not None:
            raise RuntimeError("a harvester is started once")
        escape_log_lines("outbox_core")
        identity = self._parts.identify()
        self.metrics = self._metrics or HarvestMetrics()
        self.metrics.outbox_name = self.metrics.outbox_name or identity.outbox
        with ExitStack() as undo:
            parts = undo.enter_context(ExitStack())
            self._start_observer(identity, parts)  # first: if Kafka does not answer, metrics have the backlog
            ctx = self._start_parts(identity, parts)
            watch = WorkWatch(ctx, self._parts.questions(identity), self._why_unmade)
            self._thread = threading.Thread(
                target=self._run, args=(ctx, watch, parts), name="outbox-harvest", daemon=True
            )
            self._thread.start()
            undo.pop_all()  # the harvest thread ends the parts
        atexit.register(self._stop_with_process)

    def _start_observer(self, identity: Identity, parts: ExitStack) -> None:
        counts = self._metrics is not None
        if counts or self.config.retention == "archive":
            interval = self.config.limits.min_metrics_interval.total_seconds()
            self._observer = BacklogObserver(self._parts.store(), self, interval, identity.server_id, counts=counts)
            parts.callback(self._observer.stop)  # after the elector, whose last event it writes
            self._observer.start()

    def _start_parts(self, identity: Identity, parts: ExitStack) -> HarvestContext:
        check_connection(self.config.base_kafka_config)
        self._transactions = TransactionalIdentity.of(self.config, identity.outbox, self._reached)
        if self.config.delivery == "exactly-once":
            self._transactions.ensure_topic(at_start=True)
            self._transactions.new_producer().discard()  # finds wrong settings now
        self._commit_listener = self._parts.commit_listener(self._commits)
        parts.callback(self._topic_limits.close)  # a reference to this object keeps no Kafka client
        self._publisher = self._parts.publisher(identity, self._transactions.topics)
        if self._publisher is not None:
            parts.callback(self._publisher.close)
        ctx = self._ctx = self._context(identity, parts)  # before the elector calls event handlers, which may ask us
        ctx.elector.start()
        parts.callback(ctx.elector.stop)
        return ctx

    def _why_unmade(self) -> str:
        """Return the reason why no producer can be made, '' if the last one was."""
        return self._publisher.unmade if self._publisher is not None else ""

    def stop(self) -> None:
        """Ask for a graceful end: finish the records in flight, clear marks, hand leadership over. See `join`."""
        with self._term_changed:
            self._stopping.set()
            if self._term is not None:
                self._term.stop()
        self._wake.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; return False if it has not come.

        Raises:
            BaseException: the error that ended the harvester, if any.
        """
        if not self._ended.wait(timeout):
            return False
        if self._failure is not None:
            raise self._failure
        return True

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()
        self.join()

    # -- what it is doing

    @property
    def is_leader(self) -> bool:
        """True if it leads and the lease is valid now; False while it hands leadership over."""
        leadership = self._ctx.elector.leadership if self._ctx else None
        return leadership is not None and leadership.leader_id == self._leads_as and now() < leadership.deadline

    @property
    def leader_id(self) -> UUID | None:
        """The ID that marks carry now; in the handler of LeaderAcquired that of the event. None while not leading."""
        term = self._term
        is_new = self._leads_as is not None and self._announced is None  # then the last term may not have ended yet
        if term is not None and not is_new:
            return term.leader_id
        return self._leads_as if self.is_leader else None

    @property
    def in_flight_records(self) -> int:
        """Records sent whose acknowledgement has not arrived."""
        term = self._term
        return term.in_flight_records if term is not None else 0

    def health(self) -> Health:
        """Return the health of recent work, for an orchestrator's probe."""
        leader = self.is_leader
        if self._failure is not None:
            trouble: str | None = str(self._failure) or type(self._failure).__name__
        elif self._ended.is_set():
            trouble = "stopped"
        else:
            trouble = self._trouble(leads=leader)
        if trouble is not None:
            is_alive = self._failure is None and not self._ended.is_set()
            return Health(ok=False, leader=leader, detail=_one_line(trouble), alive=is_alive)
        remark = self.metrics.activity.remark if leader else ""
        detail = f"leading; {remark}" if remark else "leading" if leader else "standing by"
        return Health(ok=True, leader=leader, detail=_one_line(detail))

    def _trouble(self, *, leads: bool) -> str | None:
        ctx = self._ctx
        if ctx is None or self._thread is None:
            return "not started"
        for outage in ctx.outages:
            if outage.lasted_seconds > _UNHEALTHY_AFTER_SECONDS:
                return outage.describe() + self.metrics.activity.circumstances
        if leads:
            return ctx.send_window.trouble(_UNHEALTHY_AFTER_SECONDS) or self.metrics.activity.trouble(
                _UNHEALTHY_AFTER_SECONDS, look_interval=self.config.limits.mark_backoff.total_seconds()
            )
        return ctx.elector.trouble

    @property
    def counts_backlog(self) -> bool:
        """True if it counts the waiting records: it leads, there is no leader, or it was fenced a moment ago.

        Also while it starts: whether there is a leader is not known then, and Kafka may not answer.
        """
        # A standby waits for three sessions before it takes a leader for lost: the last one counts on until then.
        if self.is_leader or now() < self._fenced_at + _COUNTS_AFTER_FENCE_SECONDS:
            return True
        if self._thread is None or self._ctx is None:
            return self._thread is None
        elector = self._ctx.elector
        is_led = getattr(elector, "is_out", False) and getattr(elector, "hears_leader", False)
        return elector.trouble is not None and not is_led  # out of the group it has trouble, and another counts

    @property
    def kafka_answers(self) -> bool | None:
        """True if Kafka has answered within the time of a lease; None while the harvester starts."""
        if self._ctx is None:
            return None
        # An elector of the user's own may not tell.
        silence: float = getattr(self._ctx.elector, "silent_seconds", 0.0)
        return silence <= self.config.limits.heartbeat_timeout.total_seconds()

    @property
    def is_stalled(self) -> bool:
        """True if it leads, and a service that it needs fails, or it has been idle for some seconds."""
        if self._ctx is None or not self.is_leader:
            return False
        fails = any(outage.lasted_seconds for outage in self._ctx.outages)
        return fails or self.metrics.activity.idle_seconds > _STALLED_AFTER_SECONDS

    def give_up(self, error: BaseException) -> None:
        """End because of an error, and hand leadership back even if the harvest thread is stuck. From any thread."""
        self._failure = self._failure or error
        _log.error("leadership is given up: %s", error)
        self.stop()
        if self._ctx is not None:
            self._ctx.elector.stop()

    # -- making the context

    def _context(self, identity: Identity, parts: ExitStack) -> HarvestContext:
        config = self.config
        largest, is_compressed = config.batch_settings
        dead_letters = self._parts.dead_letter_topic(identity)
        marker = StoreThread(self._parts.store(), "outbox-mark", self._wake.set)
        parts.callback(marker.close)
        purger = StoreThread(self._parts.store(), "outbox-purge", self._wake.set)
        parts.callback(purger.close)
        return HarvestContext(
            elector=self._parts.elector(identity, self._on_leadership),
            limits=HarvestLimits.of(config),
            marker=marker,
            purger=purger,
            watermark=LowWatermark(self.metrics, now),
            metrics=self.metrics,
            meter=Meter(config.limits.min_metrics_interval.total_seconds(), now),
            emit=self._tell,
            wake=self._wake,
            commits=self._commits,
            database=Outage("database", _log),
            kafka=Outage("delivery to Kafka", _log),
            dead_letters=dead_letters,
            grant_write=grant("WRITE", config.producer_settings()),
            send_window=self._parts.send_window(self.metrics),
            batches=BatchSizes(self._topic_limits.ask, self._wake.set, largest=largest, is_compressed=is_compressed),
            removal=Outage("removal of published records", _log),
        )

    # -- the elector's thread

    def _on_leadership(self, event: Event) -> None:
        """Hand the event on; on a hand-over first let the term finish, since the successor waits for our return."""
        self._leads_as = event.leader_id if isinstance(event, LeaderAcquired) else None
        if isinstance(event, LeaderFenced):
            self._fenced_at = now()
        if isinstance(event, LeaderRevoked):
            self._hand_over()
        is_handed_over = not isinstance(event, LeaderFenced)
        self.metrics.leading(
            isinstance(event, LeaderAcquired), getattr(event, "term", -1), is_handed_over=is_handed_over
        )
        if isinstance(event, LeaderAcquired):
            # From now: the harvest thread may hang in a call of an earlier leadership, and would never try anything.
            self.metrics.activity.tries_to(BEGIN)
        if self._observer is not None:
            self._observer.note(event)
        self._untold.append(event)
        self._tell_untold()
        self._announced = event.leader_id if isinstance(event, LeaderAcquired) else None
        if self._commit_listener is not None:
            self._commit_listener.set_leading(self._announced is not None)
        self._wake.set()

    def _hand_over(self) -> None:
        # The elector tells the successor that nothing is under way; a send may be for as long as a lease lasts.
        limit = max(self.config.limits.drain_timeout, self.config.limits.heartbeat_timeout).total_seconds()
        with self._term_changed:
            self._announced = None
            if self._term is not None:
                self._term.stop()
            if not self._term_changed.wait_for(lambda: self._term is None, limit):
                _log.warning("records were still in flight %.0f s after leadership was asked back", limit)

    def _tell_untold(self) -> None:
        """Hand on what was not told yet, unless the handler hangs on the harvest thread: that does it once it can.

        A handler that hangs would hang here, too, and the elector could not hand over to another process.
        """
        while self._untold:
            since = self._telling_since
            if since is not None and now() - since >= _DEAF_AFTER_SECONDS:
                return
            with suppress(IndexError):  # both threads may be here
                self._call_handler(self._untold.popleft())

    def _call_handler(self, event: Event) -> None:
        activity = self.metrics.activity
        with activity.step("the event handler"):
            try:
                self._on_event(event)
            except Exception as error:
                log_once(_log, f"the event handler failed on {type(event).__name__}", error)
        activity.duty.succeeded(TELL)

    # -- the harvest thread

    def _tell(self, event: Event) -> None:
        self.metrics.activity.tries_to(TELL)
        self._telling_since = now()
        try:
            self._call_handler(event)
        finally:
            self._telling_since = None
        self._tell_untold()

    def _run(self, ctx: HarvestContext, watch: WorkWatch, parts: ExitStack) -> None:
        try:
            with parts:
                self._start_helpers(watch, parts)
                try:
                    self._harvest_whenever_leading(ctx)
                except BaseException as error:
                    self._failure = self._failure or error
        except BaseException as error:  # a part that cannot end, an elector of the user's, for example
            self._failure = self._failure or error
        finally:
            self._stopping.set()
            self._ended.set()
            atexit.unregister(self._stop_with_process)

    def _start_helpers(self, watch: WorkWatch, parts: ExitStack) -> None:
        helpers: list[CommitListener | ExhaustionMonitor | WorkWatch] = [ExhaustionMonitor(self), watch]
        if self._commit_listener is not None:
            helpers.append(self._commit_listener)
        for helper in helpers:
            helper.start()
            parts.callback(helper.stop)
        parts.callback(commit_signal.subscribe(self._commits.notify))

    def _stop_with_process(self) -> None:
        """Stop in good order when the interpreter exits, on the main thread; wait no longer than a stop may take."""
        if self._thread is not None and not self._thread.is_alive():
            return  # a fork of the process: its locks may be held for ever
        self.stop()
        limits = self.config.limits
        patience = limits.drain_timeout.total_seconds() + limits.heartbeat_timeout.total_seconds() + _LEAVE_SECONDS
        if self._thread is not None:
            self._thread.join(patience)
            if self._thread.is_alive():
                _log.warning("the process ends before its harvester: rows may stay marked; call stop() and join()")

    def _harvest_whenever_leading(self, ctx: HarvestContext) -> None:
        elector = ctx.elector
        standby = _StandbyDrain(ctx, self._stopping.is_set) if self._drain else None
        while not self._stopping.is_set():
            if elector.failure is not None:
                raise elector.failure
            term = self._begin_term(ctx)
            if term is None:
                if standby is not None and standby.is_drained():
                    return
                ctx.count_published(0)
                self._wake.wait(_STANDBY_TICK_SECONDS)
                self._wake.clear()
                continue
            try:
                term.run()
            finally:
                with self._term_changed:
                    self._term = None
                    self._term_changed.notify_all()
                for outage in ctx.outages:
                    outage.forget()  # the next leader finds out if it lasts
            if term.drained:
                return

    def _begin_term(self, ctx: HarvestContext) -> AtLeastOnce | ExactlyOnce | None:
        leadership = ctx.elector.leadership
        if leadership is None or now() >= leadership.deadline:
            return None
        with self._term_changed:
            if self._announced != leadership.leader_id or self._stopping.is_set():
                return None
            must(self._term is None, "a term must not begin before the last one has ended")
            self._term = self._new_term(leadership.leader_id, ctx)
            return self._term

    def _new_term(self, leader_id: UUID, ctx: HarvestContext) -> AtLeastOnce | ExactlyOnce:
        if self._publisher is None:
            return ExactlyOnce(leader_id, ctx, self._transactions, drain=self._drain)
        return AtLeastOnce(leader_id, ctx, self._publisher, self._transactions, drain=self._drain)


class _StandbyDrain:
    """A check, while another process leads, if the table is empty but for held rows."""

    def __init__(self, ctx: HarvestContext, is_stopping: Callable[[], bool]) -> None:
        self._ctx = ctx
        self._is_stopping = is_stopping
        self._next_at = now() + _STANDBY_DRAIN_CHECK_SECONDS

    def is_drained(self) -> bool:
        if now() < self._next_at:
            return False
        began = now()
        look: StoreCall[bool] = StoreCall(self._ctx.marker, self._ctx)
        look.start(nothing_waits)
        while not look.is_done:
            if self._is_stopping() or self._ctx.elector.leadership is not None:
                return False
            look.wait(_STANDBY_TICK_SECONDS)
        # Behind a large backlog that is held the look takes its time: a fifth of the database's, at most.
        self._next_at = now() + max(_STANDBY_DRAIN_CHECK_SECONDS, 4 * (now() - began))
        try:
            return look.result()
        except StoreUnavailable:
            return False


def _one_line(text: str) -> str:
    return redact(" ".join(text.split()))
