"""The pipeline `relay`: an outbox table into topics by many tasks at once, exactly once, in order per key.

For backlogs that outgrow one harvester. The relay contends in the harvesters' group: while it leads, no harvester
publishes, and the other way round. A leadership is one run of a Spark query:

    standby --- elected ---> query: mark a batch -> shards, in parallel, each one transaction -> purge -> ...
       ^                       |
       +--- lease over --------+   query stopped, then: fence all shards, delete what they published, clear the marks

What makes it exactly once is told in `outbox_spark.outbox_stream` (batches), `shard_writer` (transactions) and
`takeover` (changes of leadership). The checkpoint is not needed for it: it may be deleted.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox_core.config import HarvestConfig
from outbox_core.election import Leadership
from outbox_core.election.leadership import now
from outbox_core.errors import InvalidConfig, OutboxError, StoreUnavailable
from outbox_core.events import Event, LeaderAcquired, LeaderRevoked
from outbox_core.harvest.recovery import Transactions
from outbox_core.kafka import check_connection, ensure_tracking_topic
from outbox_spark import takeover
from outbox_spark.batch_store import BatchStore
from outbox_spark.leadership import make_elector
from outbox_spark.outbox_options import options_of
from outbox_spark.shard_writer import MOST_ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)

_TICK_SECONDS = 0.1
_EMPTY_CHECK_SECONDS = 0.5
_TRIGGER = "100 milliseconds"
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_CLEAN_UP_SECONDS = 30.0
_SHARDS = 2
# Trying again does not help with these.
_HOPELESS = (
    "InvalidConfig",
    "InvalidRecord",
    "InvalidSettings",
    "MarkedRowsFound",
    "OutboxTableError",
    "TrackingTopicError",
)

OnProgress = Callable[[dict[str, Any]], None]


class RelayFailed(OutboxError):
    """The relay's query failed, and trying again would not help."""


@dataclass(frozen=True, kw_only=True)
class RelayConfig:
    """Settings of a relay.

    Attributes:
        harvest: settings of the outbox, the same as those of its harvesters.
        checkpoint: directory where Spark keeps how far it is.
        shards: how many tasks publish at once, each with a transactional.id of its own; keys are spread over them.
        batch_records: how many records a batch has at most.

    Raises:
        InvalidConfig: naming the setting.
    """

    harvest: HarvestConfig
    checkpoint: str
    shards: int = _SHARDS
    batch_records: int = MOST_ROWS

    def __post_init__(self) -> None:
        if not self.checkpoint:
            raise InvalidConfig("relay.checkpoint: is missing")
        if not 1 <= self.shards <= 1000:
            raise InvalidConfig(f"relay.shards: must be from 1 to 1000, is {self.shards}")
        if not 1 <= self.batch_records <= MOST_ROWS:
            raise InvalidConfig(
                f"relay.batchRecords: must be from 1 to {MOST_ROWS}, is {self.batch_records}: all keys of a batch may "
                "be in one shard, and its manifest is one record"
            )


def relay(outbox: DataFrame) -> DataFrame:
    """What is published of the outbox's rows: all of them, as they are."""
    return outbox


def run_relay(
    spark: SparkSession,
    config: RelayConfig,
    *,
    once: bool = False,
    on_progress: OnProgress | None = None,
    stopping: threading.Event | None = None,
    transform: Callable[[DataFrame], DataFrame] = relay,
) -> None:
    """Relay, whenever this process leads, until it is told to stop.

    Args:
        spark: a session with our formats registered.
        config: settings.
        once: end when what was in the table at the beginning of the leadership has been published, or when another
            leader has emptied the table.
        on_progress: called with Spark's progress of each batch that had rows.
        stopping: set it to end.
        transform: rows of the format `outbox` -> what is published; must not move rows between partitions.

    Raises:
        OutboxError: if it cannot work, or cannot go on.
    """
    Relay(spark, config, on_progress, stopping or threading.Event(), transform).run(once=once)


class Relay:
    """A process that contends for leadership and relays while it leads; see `run_relay`.

    The elector's thread calls `_on_leadership`; everything else happens on the caller's thread. They share `_announced`
    and `_busy`, under `_changed`.
    """

    def __init__(
        self,
        spark: SparkSession,
        config: RelayConfig,
        on_progress: OnProgress | None,
        stopping: threading.Event,
        transform: Callable[[DataFrame], DataFrame],
    ) -> None:
        self._spark = spark
        self._config = config
        self._on_progress = on_progress
        self._stopping = stopping
        self._transform = transform
        self._store = BatchStore(config.harvest.data_source, config.harvest.outbox_table)
        self._changed = threading.Condition()
        self._announced: Leadership | None = None
        self._busy = False
        self._pause = _FIRST_PAUSE_SECONDS
        self._told_batch = -1

    def run(self, *, once: bool) -> None:
        """See `run_relay`."""
        self._identity = self._store.check()
        self._transactions = Transactions.of(self._config.harvest, self._identity)
        check_connection(self._config.harvest.base_kafka_config)
        ensure_tracking_topic(self._transactions.kafka, self._transactions.relay_topic, width=self._config.shards)
        self._server_id = self._store.server_id()
        self._elector = make_elector(self._config.harvest, self._identity, self._server_id, self._on_leadership)
        self._elector.start()
        try:
            while not self._stopping.is_set():
                if self._elector.failure is not None:
                    raise self._elector.failure
                lease = self._begin()
                if lease is None:
                    if once and self._is_empty():
                        return
                    self._stopping.wait(_TICK_SECONDS if not once else _EMPTY_CHECK_SECONDS)
                elif self._lead(lease, once=once):
                    return
        finally:
            self._elector.stop()
            self._store.close()

    def _is_empty(self) -> bool:
        """Whether another process has emptied the table while this one stood by."""
        try:
            return self._store.is_empty()
        except StoreUnavailable as error:
            _log.warning("the database is away: %s", error)
            return False

    # -- leadership

    def _on_leadership(self, event: Event) -> None:
        """On the elector's thread. A hand-over waits until the query has stopped: nobody is elected before."""
        with self._changed:
            self._announced = self._elector.leadership if isinstance(event, LeaderAcquired) else None
            if isinstance(event, LeaderRevoked):
                self._changed.wait_for(
                    lambda: not self._busy, self._config.harvest.limits.drain_timeout.total_seconds()
                )

    def _begin(self) -> Leadership | None:
        with self._changed:
            lease = self._elector.leadership
            if lease is None or self._announced is None or lease.leader_id != self._announced.leader_id:
                return None
            if not lease.is_valid(now()):
                return None
            self._busy = True
            return lease

    def _leads(self, lease: Leadership) -> bool:
        present = self._elector.leadership
        return (
            self._announced is not None
            and present is not None
            and present.leader_id == lease.leader_id
            and present.is_valid(now())
        )

    def _lead(self, lease: Leadership, *, once: bool) -> bool:
        """One leadership, or one try of it; whether all is done."""
        try:
            finished = self._serve(lease, once=once)
            return self._clean_up(lease) and finished
        finally:
            with self._changed:
                self._busy = False
                self._changed.notify_all()

    # -- the query

    def _serve(self, lease: Leadership, *, once: bool) -> bool:
        """Run the query until it ends; whether it ended because everything is done."""
        query = self._start(lease.term, once=once)
        try:
            while query.isActive and self._leads(lease) and not self._stopping.is_set():
                self._tell(query)
                time.sleep(_TICK_SECONDS)
        finally:
            was_active = query.isActive
            query.stop()
        self._tell(query)
        failure = query.exception()
        if failure is None:
            return once and not was_active
        self._bear(str(failure))
        return False

    def _start(self, term: int, *, once: bool) -> StreamingQuery:
        options = options_of(self._config.harvest, self._identity, term, self._server_id)
        rows = (
            self._spark.readStream.format("outbox")
            .options(**options, shards=self._config.shards, maxRecordsPerBatch=self._config.batch_records)
            .load()
        )
        writer = (
            self._transform(rows)
            .writeStream.format("outbox_kafka_txn")
            .options(**options)
            .option("checkpointLocation", self._config.checkpoint)
        )
        self._told_batch = -1
        return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime=_TRIGGER)).start()

    def _tell(self, query: StreamingQuery) -> None:
        """Report the batches that have ended since the last time."""
        for progress in query.recentProgress:
            number = int(progress["batchId"])
            if number > self._told_batch and progress["numInputRows"]:
                self._told_batch = number
                self._pause = _FIRST_PAUSE_SECONDS
                if self._on_progress is not None:
                    self._on_progress(dict(progress))

    def _bear(self, failure: str) -> None:
        """Wait before the next try, or raise if there must be none."""
        for name in _HOPELESS:
            found = re.search(rf"\b{name}: (.+)", failure)
            if found is not None:
                raise RelayFailed(found[1].strip())
        reason = next((line for line in reversed(failure.splitlines()) if "Error" in line or ":" in line), failure)
        _log.warning("the relay's query failed and is started again in %.0f s: %s", self._pause, reason.strip()[:500])
        _log.debug("%s", failure)
        self._stopping.wait(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)

    def _clean_up(self, lease: Leadership) -> bool:
        """Settle our own transactions, so that nothing waits for a successor: no open transaction, no marked row.

        Returns:
            whether that was done.
        """
        give_up_at = now() + _CLEAN_UP_SECONDS
        try:
            takeover.settle(
                self._transactions, self._store, lambda: now() > give_up_at or not self._may_clean_up(lease)
            )
            if self._may_clean_up(lease):
                self._store.release()
                return True
        except OutboxError as error:
            _log.warning("what the relay published is left to be settled by its successor: %s", error)
        return False

    def _may_clean_up(self, lease: Leadership) -> bool:
        """Until the lease is over, also while it is being handed over."""
        present = self._elector.leadership
        return present is not None and present.leader_id == lease.leader_id and present.is_valid(now())
