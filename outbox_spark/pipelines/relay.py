"""The pipeline `relay`: an outbox table into topics by many tasks at once, exactly once, in order per key.

The relay contends in the harvesters' group: while it leads, no harvester publishes, and the other way round.

    standby --- elected ---> settle the last term -> (plan -> shards, in parallel, each its own transactions)* ...
       ^                       |
       +--- lease over --------+   job stopped, then: fence all shards, delete published rows

Its parts are in `outbox_spark.relay`: `plan` (batches), `shard_task` (transactions), `fencing` (new leaders).
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial

from pyspark.sql import SparkSession

from outbox_core.config import HarvestConfig
from outbox_core.election import Leadership
from outbox_core.election.lease import now
from outbox_core.errors import (
    InvalidConfig,
    InvalidRecord,
    KafkaUnavailable,
    MarkedRowsFound,
    OutboxError,
    OutboxTableError,
    RowsRemain,
    StoreUnavailable,
    TableUnusable,
    TrackingTopicError,
)
from outbox_core.kafka.admin import check_connection
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.tracking import ForeignLedger
from outbox_core.outage import Outage
from outbox_spark.config import RelaySettings
from outbox_spark.metrics import serving
from outbox_spark.relay import fencing
from outbox_spark.relay.batch import has_ended, publish, refuse_functions
from outbox_spark.relay.duty import RelayDuty
from outbox_spark.relay.leadership import Contender
from outbox_spark.relay.monitor import OnProgress, RelayMonitor
from outbox_spark.relay.plan import SLICE_SECONDS, BatchPlan, Planner, ShardOutcome, Transform
from outbox_spark.relay.shard_store import ShardRange, ShardStore
from outbox_spark.relay.shard_task import TopicRefused
from outbox_spark.runtime.failures import reason_of
from outbox_spark.runtime.secrets import filled_harvest

__all__ = ["OnProgress", "RelayConfig", "RelayFailed", "run_relay"]

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_IDLE_SECONDS = 0.2
_EMPTY_CHECK_SECONDS = 0.5
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 10.0  # a third of the time in which it must go on once all is mended
_CLEAN_UP_SECONDS = 30.0
_SLOW_START_SECONDS = 300.0  # for executors that a cluster has to start, or a statement that reads the whole table
_ROTATE_SECONDS = 3600.0
# They end a relay that has not begun in order: its settings, tables, topics and rights are wrong. Later they may pass.
_WRONG = (InvalidConfig, MarkedRowsFound, OutboxTableError, TrackingTopicError, TopicRefused)
_WRONG_NAMES = {error.__name__ for error in (*_WRONG, ForeignLedger)}
# They fail in the same way for every process; an ordinary harvester may get over the others.
_ALIKE = (OutboxTableError, TableUnusable, RowsRemain, TrackingTopicError)
_ALIKE_NAMES = {error.__name__ for kind in _ALIKE for error in (kind, *kind.__subclasses__())}


class RelayFailed(OutboxError):
    """A failure of the relay's tasks that another try would not mend."""


class RelayConfig(RelaySettings):
    """Settings of a relay. Raises InvalidConfig, naming the setting.

    Attributes:
        harvest: settings of the outbox, the same as those of its harvesters.
        shards: number of tasks that publish at once, each with a transactional.id; keys are spread over them.
        batch_records: maximum number of records in a transaction.
    """

    harvest: HarvestConfig


def run_relay(
    spark: SparkSession,
    config: RelayConfig,
    *,
    once: bool = False,
    on_progress: OnProgress | None = None,
    stopping: threading.Event | None = None,
    transform: Transform | None = None,
) -> None:
    """Relay while this process leads, until `stopping` is set. Raises OutboxError if that cannot work, or go on.

    Args:
        spark: any session.
        config: settings.
        once: end when the rows in the table at the beginning of the leadership have been published, or when another
            leader has emptied the table.
        on_progress: called with a report (`outbox_spark.metrics.BatchReport`) of each batch that published rows.
        stopping: set it to end.
        transform: stored record -> record to publish, or None to delete it unpublished; called in the tasks. It must
            keep `id` and `create_time`.
    """
    _Relay(spark, config, on_progress, stopping or threading.Event(), transform).run(once=once)


class _Relay:
    def __init__(
        self,
        spark: SparkSession,
        config: RelayConfig,
        on_progress: OnProgress | None,
        stopping: threading.Event,
        transform: Transform | None,
    ) -> None:
        refuse_functions(config.harvest)
        self._spark = spark
        self._config = config
        self._stopping = stopping
        self._harvest = filled_harvest(config.harvest)
        self._store = ShardStore.of(self._harvest)
        timeout = self._harvest.limits.statement_timeout.total_seconds()
        counting = ShardStore.of(self._harvest, statement_timeout=timeout)
        self._monitor = RelayMonitor(self._harvest, counting, on_progress)
        self._pause = _FIRST_PAUSE_SECONDS
        self._outage = Outage("the relay", _log)
        self._has_begun = False
        self._rotate_at = float("-inf")
        self._plan = BatchPlan(harvest=config.harvest, rows=config.batch_records, transform=transform)

    def run(self, *, once: bool) -> None:
        harvest = self._harvest
        self._identity = TransactionalIdentity.of(harvest, self._store.check())
        check_connection(harvest.base_kafka_config)
        server_id = self._store.server_id()
        found = self._store.found_in(self._config.harvest)  # as it is given: tasks look up secrets themselves
        self._plan = replace(self._plan, harvest=found, outbox=self._identity.outbox, server_id=server_id)
        metrics, monitor = self._monitor.metrics, self._monitor
        metrics.outbox_name = metrics.outbox_name or self._identity.outbox
        kafka, timeout = harvest.base_kafka_config, harvest.limits.statement_timeout.total_seconds()
        probe = partial(ShardStore.of, harvest, statement_timeout=timeout)
        self._duty = RelayDuty(kafka, harvest.leader_names(self._identity.outbox).group_id, probe)
        contender = Contender(harvest, self._identity.outbox, server_id, self._duty.leads)
        with closing(self._store), serving(harvest, metrics.registry, lambda: monitor.health(contender.trouble)):
            contender.start()
            self._duty.start(contender.step_down)
            try:
                self._contend(contender, once=once)
            finally:
                self._duty.close()
                contender.stop()

    def _contend(self, contender: Contender, *, once: bool) -> None:
        while not self._stopping.is_set():
            lease = contender.begin()
            if lease is None:
                if once and self._is_empty():
                    return
                self._stopping.wait(_EMPTY_CHECK_SECONDS if once else _POLL_SECONDS)
                continue
            self._monitor.leads(lease.term)
            try:
                finished = self._lead(lease, contender, once=once)
                if self._clean_up(partial(contender.holds, lease)) and finished:
                    return
            finally:
                contender.end()
                self._monitor.leads(None)
                self._outage.forget()  # the next leader finds out if it lasts

    def _is_empty(self) -> bool:
        """Tell whether another process has emptied the table while this one stood by."""
        try:
            is_empty = self._store.is_empty()
        except StoreUnavailable as error:
            self._outage.failed(error)
            return False
        self._outage.recovered()
        return is_empty

    def _lead(self, lease: Leadership, contender: Contender, *, once: bool) -> bool:
        """Publish until the leadership ends; tell whether it ended because all rows are published."""

        def leads() -> bool:
            return contender.leads(lease) and not self._stopping.is_set()

        planner: Planner | None = None
        is_settled = False
        while leads():
            try:
                if planner is None or not is_settled:
                    self._duty.tries(self._most_seconds)
                    self._settle(leads)
                    planner, is_settled = planner or self._begin(once=once), True
                self._duty.tries()
                ranges = planner.next()
                self._duty.tries(self._most_seconds)  # to count the backlog, too
                self._monitor.planned(len(planner.holds), is_idle=not ranges)
                self._monitor.looks()
                self._rotate_archive()
            except OutboxError as error:
                if self._is_wrong(error):  # the table that comes back may be another one
                    planner, is_settled = None, False
                self._wait_after(str(error), leads, for_all=isinstance(error, _ALIKE))
                continue
            self._has_begun = not once  # which is started again by whoever has started it
            if ranges:
                # After a failure the topic of the manifests may be gone, or a torn transaction take long to read back.
                is_settled = self._publish(planner, ranges, lease.term, leads)
            elif once:
                return True
            elif leads():  # or it may have hung until then
                self._works()
                self._stopping.wait(_IDLE_SECONDS)
        return False

    def _is_wrong(self, error: OutboxError) -> bool:
        """Tell whether something is not as it was when the relay began; raise the error if it has not begun yet."""
        # The settings have made clients before: a file that they name may be away.
        is_wrong = isinstance(error, _WRONG) and not isinstance(error, KafkaUnavailable)
        if is_wrong and not self._has_begun:
            raise error
        return is_wrong

    @property
    def _most_seconds(self) -> float:
        """The time that a job, or settling, may take while this process can work: shards may come one by one."""
        return _SLOW_START_SECONDS + self._config.shards * SLICE_SECONDS

    def _settle(self, leads: Callable[[], bool]) -> None:
        """Settle what was left behind. Raises KafkaUnavailable, StoreUnavailable."""
        fencing.ensure_shards(self._identity, self._config.shards)
        fencing.fence_and_purge(self._identity, self._store, lambda: not leads())

    def _begin(self, *, once: bool) -> Planner:
        """Return the positions of a new term. Raises StoreUnavailable, MarkedRowsFound."""
        fencing.refuse_marked_rows(self._identity, self._store)
        up_to = self._store.highest_id() if once else None
        return Planner(self._store, self._config.shards, up_to=up_to)

    def _publish(self, planner: Planner, ranges: tuple[ShardRange, ...], term: int, leads: Callable[[], bool]) -> bool:
        """Publish a batch; tell whether that went well. Raises RelayFailed if another try would not mend it."""
        plan = replace(self._plan, term=term, ranges=ranges, holds=planner.holds)
        plan = replace(plan, title=self._monitor.title(plan))
        began = time.monotonic()
        try:
            outcomes = publish(self._spark, plan, leads)
        except Exception as error:
            _log.debug("%s", error)
            if leads() and has_ended(self._spark):  # nobody else can lead while we do
                raise RelayFailed(f"Spark has ended, start the relay again: {reason_of(error)}") from None
            self._wait_after(reason_of(error), leads)
            return False
        if outcomes is None:
            return False
        for outcome in outcomes:
            planner.finished(outcome)
        failures = self._take_in(outcomes, time.monotonic() - began)
        endures = self._has_begun and self._monitor.has_published
        for failure in failures:
            if failure.error == InvalidRecord.__name__ or (failure.error in _WRONG_NAMES and not endures):
                raise RelayFailed(failure.message)
        if failures and leads():
            for_all = all(failure.error in _ALIKE_NAMES for failure in failures)
            self._wait_after(failures[0].message, leads, for_all=for_all)
        return not failures

    def _take_in(self, outcomes: Sequence[ShardOutcome], seconds: float) -> list[ShardOutcome]:
        """Note what the shards of a batch did, and return those that failed."""
        settled = sum(outcome.settled for outcome in outcomes)
        if settled:
            _log.info("deleted %d rows that an earlier attempt of a task had published", settled)
        failures = [outcome for outcome in outcomes if outcome.error]
        has_published = self._monitor.finished(outcomes, seconds)
        if has_published:
            self._pause = _FIRST_PAUSE_SECONDS
        if not failures:
            self._works()
        elif has_published and not any(failure.error == TopicRefused.__name__ for failure in failures):
            self._duty.succeeded()  # of a refused topic a harvester sets the records aside, and publishes the others
        return failures

    def _works(self) -> None:
        self._duty.succeeded()
        self._outage.recovered()

    def _rotate_archive(self) -> None:
        """Make and drop partitions of the archive, if there is one: among relays alone nobody else does."""
        if time.monotonic() < self._rotate_at:
            return
        self._rotate_at = time.monotonic() + _ROTATE_SECONDS
        try:
            self._store.rotate_archive()
        except OutboxError as error:
            _log.warning("the archive's partitions are made and dropped in an hour: %s", error)

    def _wait_after(self, failure: str, leads: Callable[[], bool], *, for_all: bool = False) -> None:
        failure = failure.strip()[:500]
        self._outage.failed(failure)
        self._duty.failed(failure, for_all=for_all)
        end = time.monotonic() + self._pause
        while time.monotonic() < end and leads():  # a hand-over waits for us
            self._stopping.wait(_POLL_SECONDS)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)

    def _clean_up(self, holds: Callable[[], bool]) -> bool:
        """Leave no open transaction and no published row to a successor; tell whether that succeeded."""
        give_up_at = now() + _CLEAN_UP_SECONDS + self._config.shards
        try:
            fencing.fence_and_purge(self._identity, self._store, lambda: now() > give_up_at or not holds())
        except OutboxError as error:
            _log.warning("the relay's successor will delete the rows that it published: %s", error)
            return False
        return holds()
