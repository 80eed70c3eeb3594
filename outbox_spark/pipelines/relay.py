"""The pipeline `relay`: an outbox table into topics by many tasks at once, exactly once, in order per key.

The relay contends in the harvesters' group: while it leads, no harvester publishes, and the other way round. A
leadership is one run of a Spark query:

    standby --- elected ---> query: mark a batch -> shards, in parallel, each one transaction -> purge -> ...
       ^                       |
       +--- lease over --------+   query stopped, then: fence all shards, delete published rows, clear the marks

Its parts are in `outbox_spark.relay`: `stream` (batches), `shard_writer` (transactions), `fencing` (new leaders).
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
from outbox_core.election.lease import now
from outbox_core.errors import InvalidConfig, OutboxError, StoreUnavailable
from outbox_core.kafka.admin import check_connection
from outbox_core.kafka.identity import TransactionalIdentity
from outbox_core.kafka.topics import ensure_tracking_topic
from outbox_spark.relay import fencing
from outbox_spark.relay.batch_store import BatchStore
from outbox_spark.relay.leadership import Contender
from outbox_spark.relay.options import options_of
from outbox_spark.relay.shard_writer import MOST_ROWS

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

__all__ = [
    "OnProgress",
    "RelayConfig",
    "RelayFailed",
    "relay",
    "run_relay",
]

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.1
_EMPTY_CHECK_SECONDS = 0.5
_TRIGGER = "100 milliseconds"
_FIRST_PAUSE_SECONDS = 1.0
_LONGEST_PAUSE_SECONDS = 30.0
_CLEAN_UP_SECONDS = 30.0
# A restart does not fix these.
_PERMANENT = (
    "InvalidConfig",
    "InvalidRecord",
    "InvalidSettings",
    "MarkedRowsFound",
    "OutboxTableError",
    "TrackingTopicError",
)

OnProgress = Callable[[dict[str, Any]], None]


class RelayFailed(OutboxError):
    """A failure of the relay's query that a restart would not fix."""


@dataclass(frozen=True, kw_only=True)
class RelayConfig:
    """Settings of a relay. Raises InvalidConfig, naming the setting.

    Attributes:
        harvest: settings of the outbox, the same as those of its harvesters.
        checkpoint: directory of Spark's checkpoint.
        shards: number of tasks that publish at once, each with a transactional.id; keys are spread over them.
        batch_records: maximum number of records in a batch.
    """

    harvest: HarvestConfig
    checkpoint: str
    shards: int = 2
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
    """Return the rows to publish: all of the outbox's, unchanged."""
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
    """Relay while this process leads, until `stopping` is set. Raises OutboxError if that cannot work, or go on.

    Args:
        spark: a session with our formats registered.
        config: settings.
        once: end when the rows in the table at the beginning of the leadership have been published, or when another
            leader has emptied the table.
        on_progress: called with Spark's progress of each batch that had rows.
        stopping: set it to end.
        transform: rows of the format `outbox` -> rows to publish; must not move rows between partitions.
    """
    _Relay(spark, config, on_progress, stopping or threading.Event(), transform).run(once=once)


class _Relay:
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
        self._pause = _FIRST_PAUSE_SECONDS
        self._reported = -1  # the last batch whose progress was reported

    def run(self, *, once: bool) -> None:
        harvest = self._config.harvest
        self._identity = TransactionalIdentity.of(harvest, self._store.outbox.check())
        check_connection(harvest.base_kafka_config)
        ensure_tracking_topic(self._identity.kafka, self._identity.relay_topic, width=self._config.shards)
        self._server_id = self._store.outbox.server_id()
        self._contender = Contender(harvest, self._identity.outbox, self._server_id)
        self._contender.start()
        try:
            while not self._stopping.is_set():
                lease = self._contender.begin()
                if lease is None:
                    if once and self._is_empty():
                        return
                    self._stopping.wait(_EMPTY_CHECK_SECONDS if once else _POLL_SECONDS)
                    continue
                try:
                    finished = self._run_query(lease, once=once)
                    if self._clean_up(lease) and finished:
                        return
                finally:
                    self._contender.end()
        finally:
            self._contender.stop()
            self._store.close()

    def _is_empty(self) -> bool:
        """Tell whether another process has emptied the table while this one stood by."""
        try:
            return self._store.outbox.is_empty()
        except StoreUnavailable as error:
            _log.warning("the database is away: %s", error)
            return False

    def _run_query(self, lease: Leadership, *, once: bool) -> bool:
        """Run the query until it ends; tell whether it ended because all rows are published."""
        query = self._start(lease.term, once=once)
        try:
            while query.isActive and self._contender.leads(lease) and not self._stopping.is_set():
                self._report(query)
                time.sleep(_POLL_SECONDS)
        finally:
            was_active = query.isActive
            query.stop()
        self._report(query)
        failure = query.exception()
        if failure is None:
            return once and not was_active
        self._pause_after(str(failure))
        return False

    def _start(self, term: int, *, once: bool) -> StreamingQuery:
        options = options_of(self._config.harvest, self._identity.outbox, term, self._server_id)
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
        self._reported = -1
        return (writer.trigger(availableNow=True) if once else writer.trigger(processingTime=_TRIGGER)).start()

    def _report(self, query: StreamingQuery) -> None:
        for progress in query.recentProgress:
            number = int(progress["batchId"])
            if number > self._reported and progress["numInputRows"]:
                self._reported = number
                self._pause = _FIRST_PAUSE_SECONDS
                if self._on_progress is not None:
                    self._on_progress(dict(progress))

    def _pause_after(self, failure: str) -> None:
        """Wait before the next try. Raises RelayFailed if a restart would not fix the failure."""
        for name in _PERMANENT:
            found = re.search(rf"\b{name}: (.+)", failure)
            if found is not None:
                raise RelayFailed(found[1].strip())
        reason = next((line for line in reversed(failure.splitlines()) if "Error" in line or ":" in line), failure)
        _log.warning("the relay's query failed and is started again in %.0f s: %s", self._pause, reason.strip()[:500])
        _log.debug("%s", failure)
        self._stopping.wait(self._pause)
        self._pause = min(self._pause * 2, _LONGEST_PAUSE_SECONDS)

    def _clean_up(self, lease: Leadership) -> bool:
        """Leave no open transaction and no marked row to a successor; tell whether that succeeded."""
        give_up_at = now() + _CLEAN_UP_SECONDS
        try:
            fencing.fence_and_purge(
                self._identity, self._store, lambda: now() > give_up_at or not self._contender.holds(lease)
            )
            if self._contender.holds(lease):
                self._store.release()
                return True
        except OutboxError as error:
            _log.warning("the relay's successor will purge the rows that it published: %s", error)
        return False
