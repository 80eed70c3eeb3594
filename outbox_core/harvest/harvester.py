"""The harvester's life: check the surroundings, contend for leadership, harvest while leading, stop in good order.

Threads: the elector's (calls `_on_leadership`), the harvest thread (`_run`: owns the producer and the terms), one
thread for each of the two database connections, and one that counts the backlog for the metrics. What they share is
in `_announced`, `_stopping` and `_term`; every change of those is followed by `_wake.set()`. One more, `outbox-watch`,
gives leadership up when the process can do nothing with it. All are daemon threads: a process whose main thread ends
without `stop` stops its harvesters in good order while the interpreter exits (`_stop_with_process`).

                 LeaderAcquired                         lease over, LeaderFenced
    standing by ----------------> harvesting (a term) ---------------------------> finishing --> standing by
                                          |   LeaderRevoked: the elector waits until the term has finished
                                          '---------------------------------------> finishing --> standing by
"""

from __future__ import annotations

import atexit
import logging
import threading
from collections.abc import Callable
from contextlib import ExitStack
from types import TracebackType
from typing import Self
from uuid import UUID

from outbox_core import doorbell
from outbox_core.config import HarvestConfig, redact
from outbox_core.election import Neli, NeliConfig
from outbox_core.election.leadership import now
from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.events import Event, EventHandler, LeaderAcquired, LeaderRevoked
from outbox_core.harvest.at_least_once import AtLeastOnce
from outbox_core.harvest.backlog import BacklogObserver
from outbox_core.harvest.batch_sizes import BatchSizes
from outbox_core.harvest.exactly_once import ExactlyOnce
from outbox_core.harvest.floor import SettledFloor
from outbox_core.harvest.listening import Listening
from outbox_core.harvest.meter import Meter
from outbox_core.harvest.outage import Outage
from outbox_core.harvest.pace import News
from outbox_core.harvest.publisher import Publisher
from outbox_core.harvest.recovery import Step, Transactions
from outbox_core.harvest.send_window import SendWindow
from outbox_core.harvest.store_thread import StoreThread
from outbox_core.harvest.surroundings import DeadLetters, Surroundings, Timing
from outbox_core.harvest.watch import Watch
from outbox_core.kafka import (
    Producer,
    TopicLimits,
    check_connection,
    ensure_dead_letter_topic,
    ensure_tracking_topic,
    forbidden_topics,
    grant,
    make_producer,
)
from outbox_core.metrics import HarvestMetrics, Health
from outbox_core.ports import ElectorFactory, LeaderElector, OutboxStore, StoreFactory
from outbox_core.printable import escape_log_lines

_log = logging.getLogger(__name__)

_STANDBY_TICK_SECONDS = 0.2
_STANDBY_DRAIN_CHECK_SECONDS = 0.5
_UNHEALTHY_AFTER_SECONDS = 30.0
_STALLED_AFTER_SECONDS = 5.0
_LEAVE_SECONDS = 10.0

ProducerFactory = Callable[[], Producer]


class Harvester:
    """Publishes the records of one outbox table to Kafka, whenever it leads.

    Args:
        config: settings.
        on_event: called with every `outbox_core.events.Event`; see there what it may do.
        metrics: where to count. Without it nobody will look, and the backlog is not counted.
        drain: end by itself once the table is empty, whoever emptied it.
        store_factory: makes the stores, one for each thread that needs one; by default PostgreSQL.
        elector_factory: makes the elector from an event handler; by default NELI through Kafka.
        producer_factory: makes the Kafka producer of at-least-once delivery.
        reached: called at every step of exactly-once delivery, on the harvest thread; for tests that stop the process.

    It may be used as a context manager: starts on entry, stops and joins on exit.
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
        reached: Callable[[Step], None] = lambda _: None,
    ) -> None:
        self.config = config
        self._user_handler = on_event
        self._metrics = metrics
        self._drain = drain
        self._make_store = store_factory or self._postgres_store
        self._make_elector = elector_factory
        self._make_producer = producer_factory
        self._reached = reached
        self._wake = threading.Event()
        self._news = News(self._wake)
        self._listening: Listening | None = None
        self._stopping = threading.Event()
        self._ended = threading.Event()
        self._term_changed = threading.Condition()
        self._term: AtLeastOnce | ExactlyOnce | None = None
        self._announced: UUID | None = None  # the leadership whose LeaderAcquired the event handler has seen
        self._leads_as: UUID | None = None  # the leadership, as event handlers see it: from Acquired, until Revoked
        self._failure: BaseException | None = None
        self._elector: LeaderElector | None = None
        self._thread: threading.Thread | None = None
        self._database = Outage("database", _log)
        self._kafka = Outage("delivery to Kafka", _log)
        self._topic_limits = TopicLimits(config.base_kafka_config)
        self._removal = Outage("removal of published records", _log)

    # -- life

    def start(self) -> None:
        """Check database, table, Kafka and leader topic, and begin to contend for leadership.

        Raises:
            OutboxError: of the kind that fits what is wrong. Nothing keeps running then.
        """
        if self._thread is not None:
            raise RuntimeError("a harvester is started once")
        escape_log_lines("outbox_core")
        identity, server_id = self._identify()
        check_connection(self.config.base_kafka_config)
        self.metrics = self._metrics or HarvestMetrics()
        self.metrics.outbox_name = self.metrics.outbox_name or identity
        self._elector = (
            self._make_elector(self._on_leadership) if self._make_elector else self._neli(identity, server_id)
        )
        self._transactions_of_outbox = Transactions.of(self.config, identity, self._reached)
        if self.config.delivery == "exactly-once":
            ensure_tracking_topic(self.config.base_kafka_config, self._transactions_of_outbox.tracking_topic)
            self._transactions_of_outbox.new_producer()  # a wrong setting of it is to be known now
        self._dead_letters_of_outbox = self._dead_letters(identity)
        if self._dead_letters_of_outbox.on_poison:
            self._check_dead_letters()
        self._publisher_of_outbox = self._publisher(identity)
        self._send_window = self._make_send_window()
        self._listening = self._make_listening() if self.config.notify else None
        with ExitStack() as undo:
            surroundings = self._surroundings(self._elector, undo)
            self._elector.start()
            undo.callback(self._elector.stop)
            self._thread = threading.Thread(
                target=self._run, args=(surroundings, self._backlog_observer()), name="outbox-harvest", daemon=True
            )
            self._thread.start()
            undo.pop_all()
        atexit.register(self._stop_with_process)

    def stop(self) -> None:
        """Ask for a graceful end: finish what is in flight, clear marks, hand leadership over. See `join`."""
        with self._term_changed:
            self._stopping.set()
            if self._term is not None:
                self._term.stop()
        self._wake.set()

    def join(self, timeout: float | None = None) -> bool:
        """Wait for the end, at most `timeout` seconds; return whether it has come.

        Raises:
            BaseException: what ended the harvester, if it was not `stop` or an empty table.
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
        """Whether it leads and the lease is valid now; not any more while leadership is handed over."""
        leadership = self._elector.leadership if self._elector else None
        return leadership is not None and leadership.leader_id == self._leads_as and now() < leadership.deadline

    @property
    def leader_id(self) -> UUID | None:
        """The ID that marks carry now, in the handler of LeaderAcquired that of the event; None while not leading."""
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
        """Tell whether it works, by what it has done lately; what an orchestrator's probe asks."""
        leader = self.is_leader
        if self._failure is not None:
            trouble: str | None = str(self._failure) or type(self._failure).__name__
        elif self._ended.is_set():
            trouble = "stopped"
        else:
            trouble = self._trouble(leads=leader)
        if trouble is not None:
            return Health(ok=False, leader=leader, detail=_one_line(trouble))
        remark = self.metrics.activity.remark if leader else ""
        detail = f"leading; {remark}" if remark else "leading" if leader else "standing by"
        return Health(ok=True, leader=leader, detail=_one_line(detail))

    def _trouble(self, *, leads: bool) -> str | None:
        """Return what is wrong while it runs, or None."""
        if self._elector is None or self._thread is None:
            return "not started"
        for outage in (self._database, self._kafka, self._removal):
            if outage.lasted_seconds > _UNHEALTHY_AFTER_SECONDS:
                return outage.describe()
        if leads:
            return self._send_window.trouble(_UNHEALTHY_AFTER_SECONDS) or self.metrics.activity.trouble(
                _UNHEALTHY_AFTER_SECONDS, look_interval=self.config.limits.mark_backoff.total_seconds()
            )
        return self._elector.trouble

    @property
    def counts_backlog(self) -> bool:
        """Whether to count what waits: it leads, or there is nobody who does."""
        return self.is_leader or (self._elector is not None and self._elector.trouble is not None)

    @property
    def is_stalled(self) -> bool:
        """Whether it leads, and something that it needs fails, or nothing was done for some seconds."""
        if not self.is_leader:
            return False
        fails = any(outage.lasted_seconds for outage in (self._database, self._kafka, self._removal))
        return fails or self.metrics.activity.idle_seconds > _STALLED_AFTER_SECONDS

    def give_up(self, error: BaseException) -> None:
        """End because of an error, and hand leadership back whatever the harvest thread does. From any thread."""
        self._failure = self._failure or error
        _log.error("leadership is given up: %s", error)
        self.stop()
        if self._elector is not None:
            self._elector.stop()

    # -- making the parts

    def _postgres_store(self) -> OutboxStore:
        # Here, so that a store of another kind, and the parts that queues share, need no psycopg.
        from outbox_core.stores.postgres import PostgresStore

        config = self.config
        return PostgresStore(
            config.data_source,
            config.outbox_table,
            application_name=self._application_name,
            statement_timeout=config.limits.statement_timeout.total_seconds(),
            max_message_bytes=config.max_message_bytes,
        )

    @property
    def _application_name(self) -> str:
        return f"kafka-outbox {self.config.name}"[:63]

    def _make_listening(self) -> Listening:
        from outbox_core.stores.notices import CommitNotices

        config = self.config
        notices = CommitNotices(config.data_source, config.outbox_table, application_name=self._application_name)
        return Listening(notices, self._news)

    def _identify(self) -> tuple[str, str]:
        """The outbox's identity, and the ID of its server."""
        store = self._make_store()
        try:
            return store.check(), store.server_id()
        finally:
            store.close()

    def _neli(self, identity: str, server_id: str) -> Neli:
        return Neli(NeliConfig.of(self.config, identity, server_id), self._on_leadership)

    def _publisher(self, identity: str) -> Publisher | None:
        """The producer of at-least-once delivery; exactly-once delivery makes one for each term."""
        if self.config.delivery == "exactly-once":
            return None
        config, make = self.config, self._make_producer
        return Publisher(
            lambda limits: make() if make else make_producer({**config.producer_settings(), **limits}),
            lambda limits: make_producer({**config.lone_producer_settings(), **limits}),
            id_header=self.config.id_header,
            outbox_name=self.config.outbox_name or identity,
            topics=self._transactions_of_outbox.topics,
        )

    def _make_send_window(self) -> SendWindow:
        config = self.config
        # A producer of the user's own making has the delivery timeout that it has.
        shortest = None if self._make_producer else config.shortest_delivery_timeout.total_seconds()
        return SendWindow(config.delivery_timeout.total_seconds(), self.metrics, shortest=shortest)

    def _dead_letters(self, identity: str) -> DeadLetters:
        topic, kafka = self.config.dead_letter_name(identity), self.config.base_kafka_config
        return DeadLetters(
            topic=topic,
            on_poison=self.config.on_poison == "dead-letter",
            ensure=lambda: ensure_dead_letter_topic(kafka, topic),
            forbidden=lambda topics: forbidden_topics(kafka, topics),
        )

    def _check_dead_letters(self) -> None:
        """See that a bad record can go to the dead-letter topic: a hold is what takes it there."""
        store = self._make_store()
        try:
            holds = store.holds()
            if holds is None or not holds.may_change:
                raise OutboxTableError(
                    f"on_poison: dead-letter needs the holds of {self.config.outbox_table}, which cannot be used (the "
                    "log says why); make their table with `outbox schema --only hold`, with Alembic or with "
                    "`manage.py migrate`"
                )
        finally:
            store.close()
        self._dead_letters_of_outbox.ensure()

    def _surroundings(self, elector: LeaderElector, undo: ExitStack) -> Surroundings:
        config = self.config
        marker = StoreThread(self._make_store(), "outbox-mark", self._wake.set)
        undo.callback(marker.close)
        purger = StoreThread(self._make_store(), "outbox-purge", self._wake.set)
        undo.callback(purger.close)
        return Surroundings(
            elector=elector,
            marker=marker,
            purger=purger,
            floor=SettledFloor(self.metrics, now),
            metrics=self.metrics,
            meter=Meter(config.limits.min_metrics_interval.total_seconds(), now),
            emit=self._emit,
            wake=self._wake,
            news=self._news,
            database=self._database,
            kafka=self._kafka,
            grant_write=grant("WRITE", config.producer_settings()),
            send_window=self._send_window,
            batches=self._batch_sizes(),
            removal=self._removal,
        )

    def _batch_sizes(self) -> BatchSizes:
        config = self.config
        largest, is_compressed = config.batch_settings
        return BatchSizes(self._topic_limits.ask, self._wake.set, largest=largest, is_compressed=is_compressed)

    def _backlog_observer(self) -> BacklogObserver:
        return BacklogObserver(self._make_store(), self, self.config.limits.min_metrics_interval.total_seconds())

    def _timing(self) -> Timing:
        limits = self.config.limits
        return Timing(
            mark_query_records=limits.mark_query_records,
            max_in_flight_records=limits.max_in_flight_records,
            max_in_flight_bytes=limits.max_in_flight_bytes,
            lane_capacity=limits.lane_capacity,
            mark_backoff=limits.mark_backoff.total_seconds(),
            io_error_backoff=limits.io_error_backoff.total_seconds(),
            delivery_timeout=self.config.delivery_timeout.total_seconds(),
            drain_timeout=limits.drain_timeout.total_seconds(),
        )

    # -- the elector's thread

    def _on_leadership(self, event: Event) -> None:
        """Hand the event on; on a hand-over first let the term finish, since the successor waits for our return."""
        self._leads_as = event.leader_id if isinstance(event, LeaderAcquired) else None
        if isinstance(event, LeaderRevoked):
            self._hand_over()
        self.metrics.leading(isinstance(event, LeaderAcquired))
        self._emit(event)
        self._announced = event.leader_id if isinstance(event, LeaderAcquired) else None
        if self._listening is not None:
            self._listening.lead(self._announced is not None)
        self._wake.set()

    def _hand_over(self) -> None:
        limit = self.config.limits.drain_timeout.total_seconds()
        with self._term_changed:
            self._announced = None
            if self._term is not None:
                self._term.stop()
            if not self._term_changed.wait_for(lambda: self._term is None, limit):
                _log.warning("records were still in flight %.0f s after leadership was asked back", limit)

    def _emit(self, event: Event) -> None:
        if self._user_handler is None:
            return
        try:
            self._user_handler(event)
        except Exception:
            _log.exception("the event handler failed on %s", type(event).__name__)

    # -- the harvest thread

    def _run(self, surroundings: Surroundings, observer: BacklogObserver) -> None:
        """Harvest until the end, then end the parts, each whatever becomes of the others."""
        try:
            with ExitStack() as parts:
                # Whoever keeps this object keeps no Kafka client by that.
                parts.callback(self._topic_limits.close)
                if self._publisher_of_outbox is not None:
                    parts.callback(self._publisher_of_outbox.close)
                parts.callback(surroundings.purger.close)
                parts.callback(surroundings.marker.close)
                parts.callback(surroundings.elector.stop)
                self._start_helpers(parts, observer)
                try:
                    self._harvest_whenever_leading(surroundings)
                except BaseException as error:
                    self._failure = self._failure or error
        except BaseException as error:  # a part that cannot end, an elector of the user's, for example
            self._failure = self._failure or error
        finally:
            self._stopping.set()
            self._ended.set()
            atexit.unregister(self._stop_with_process)

    def _start_helpers(self, parts: ExitStack, observer: BacklogObserver) -> None:
        helpers: list[BacklogObserver | Listening | Watch] = [Watch(self)]
        if self._metrics is not None:
            helpers.append(observer)
        if self._listening is not None:
            helpers.append(self._listening)
        for helper in helpers:
            helper.start()
            parts.callback(helper.stop)
        parts.callback(doorbell.answer(self._news.tell))

    def _stop_with_process(self) -> None:
        """Stop in good order when the interpreter exits: no row stays marked, and the successor need not wait.

        Called on the main thread once all threads that are no daemons have ended. It waits no longer than a stop may
        take, so that the process ends.
        """
        self.stop()
        limits = self.config.limits
        patience = limits.drain_timeout.total_seconds() + limits.heartbeat_timeout.total_seconds() + _LEAVE_SECONDS
        if self._thread is not None:
            self._thread.join(patience)
            if self._thread.is_alive():
                _log.warning("the process ends before its harvester: rows may stay marked; call stop() and join()")

    def _harvest_whenever_leading(self, surroundings: Surroundings) -> None:
        elector = surroundings.elector
        standby = _StandbyDrain(surroundings) if self._drain else None
        while not self._stopping.is_set():
            if elector.failure is not None:
                raise elector.failure
            term = self._begin_term(surroundings)
            if term is None:
                if standby is not None and standby.is_drained():
                    return
                self._wake.wait(_STANDBY_TICK_SECONDS)
                self._wake.clear()
                continue
            try:
                term.run()
            finally:
                with self._term_changed:
                    self._term = None
                    self._term_changed.notify_all()
                for outage in (self._database, self._kafka, self._removal):
                    outage.dismissed()  # whoever leads now finds out whether it still is so
            if term.drained:
                return

    def _begin_term(self, surroundings: Surroundings) -> AtLeastOnce | ExactlyOnce | None:
        leadership = surroundings.elector.leadership
        if leadership is None or now() >= leadership.deadline:
            return None
        with self._term_changed:
            if self._announced != leadership.leader_id or self._stopping.is_set():
                return None
            self._term = self._new_term(leadership.leader_id, surroundings)
            return self._term

    def _new_term(self, leader_id: UUID, surroundings: Surroundings) -> AtLeastOnce | ExactlyOnce:
        timing, transactions, publisher = self._timing(), self._transactions_of_outbox, self._publisher_of_outbox
        if publisher is None:
            return ExactlyOnce(
                leader_id,
                timing,
                surroundings,
                transactions,
                dead_letters=self._dead_letters_of_outbox,
                drain=self._drain,
            )
        return AtLeastOnce(
            leader_id,
            timing,
            surroundings,
            publisher,
            transactions,
            dead_letters=self._dead_letters_of_outbox,
            drain=self._drain,
        )


class _StandbyDrain:
    """While another process leads, sees now and then whether it has emptied the table but for what is held."""

    def __init__(self, surroundings: Surroundings) -> None:
        self._with = surroundings
        self._next_at = now() + _STANDBY_DRAIN_CHECK_SECONDS

    def is_drained(self) -> bool:
        if now() < self._next_at:
            return False
        began = now()
        try:
            drained = self._with.marker.submit(_nothing_waits).result()
        except StoreUnavailable as error:
            self._with.database.began(error)
            return False
        finally:
            # Behind a large backlog that is held the look takes its time: a fifth of the database's, at most.
            self._next_at = now() + max(_STANDBY_DRAIN_CHECK_SECONDS, 4 * (now() - began))
        self._with.database.ended()
        return drained


def _nothing_waits(store: OutboxStore) -> bool:
    """Whether every row is held, and none of them to go to the dead-letter topic."""
    holds = store.holds()
    if not holds:
        return store.is_empty()
    return not holds.requests and not store.scan(1, (), holds=holds)


def _one_line(text: str) -> str:
    return redact(" ".join(text.split()))
