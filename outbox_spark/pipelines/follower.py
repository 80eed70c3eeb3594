"""Topics followed into targets that keep their own positions.

Exactly once rests on the target, not on Spark's checkpoint: a target commits the next offset of each partition with the
rows. So the loss of a checkpoint does no harm:

- Spark repeats a batch: the follower leaves out the records that the target has, by its own offsets.
- The checkpoint is gone: the query begins at the target's position, the earliest one if there are several.
- The checkpoint is ahead of the target (a restored backup), or Kafka has removed the next records: the pipeline stops
  with an error, unless `accept_gap` is set.
- A topic was deleted and made anew: the pipeline stops with an error. The checkpoint tells, or else a position behind
  the end.

A batch ends where Spark's checkpoint says (`offsets/N`), which is more than the offset of its last record: transaction
markers and aborted records have offsets too.
"""

from __future__ import annotations

import functools
import json
import logging
import operator
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import Any, Protocol

from pyspark.sql import Column, DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.streaming.query import StreamingQuery

from outbox_core.errors import (
    ClientRefused,
    InvalidConfig,
    KafkaUnavailable,
    MissingExtra,
    OutboxError,
    OutboxTableError,
    StoreUnavailable,
)
from outbox_spark.config import StreamSettings
from outbox_spark.metrics import BatchReport, PipelineMetrics, serving
from outbox_spark.runtime.failures import reason_of
from outbox_spark.tables.folder import Folder
from outbox_spark.tables.log import TableTaken
from outbox_spark.topics.positions import Positions, TopicIds, advanced, from_json, ids_in, made_anew, to_json
from outbox_spark.topics.ranges import TopicLog

_log = logging.getLogger(__name__)

_POLL_SECONDS = 0.2
_STOP_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 30.0
_DOUBLINGS = 5  # of a second, to the longest pause; more would be no float after some hours
_ATTEMPTS = 6  # failures without progress that end a run: any with `once`, else those of one cause, no outages
_OUTAGE = re.compile(r"Unavailable|OperationalError|InterfaceError")
_CHANGING = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+")


class RecordsMissing(OutboxError):
    """Records behind the target's position that cannot be read any more."""


class PipelineFailed(OutboxError):
    """A query that Spark ended."""


# A restart does not fix these.
_PERMANENT = (InvalidConfig, OutboxTableError, RecordsMissing, TableTaken, MissingExtra)


class TargetTable(Protocol):
    """A table that keeps its own positions in the topics."""

    @property
    def name(self) -> str:
        """Return the table's name in messages."""

    def recover(self) -> None:
        """Finish the commit of a dead writer, and read the table's state. Called before each query."""

    @property
    def positions(self) -> Positions:
        """Return the committed next offset of each partition in the table."""

    def compact(self) -> object:
        """Compact the table between batches, where it needs that."""


@dataclass(frozen=True)
class Target:
    """A table that takes the records of topics, exactly once.

    `write` takes rows of `outbox_kafka`, all new, and all positions after them, in atomic steps; it returns counts.
    """

    table: TargetTable
    write: Callable[[DataFrame, Positions], Mapping[str, int]]


@dataclass
class Follower:
    """One streaming query into one or more targets. Spark's thread runs the batches, one at a time."""

    spark: SparkSession
    kafka: Mapping[str, str] = field(repr=False)
    settings: StreamSettings
    targets: Sequence[Target]
    report: Callable[[BatchReport], None]
    _error: BaseException | None = None
    _failures: int = 0
    _causes: list[str] = field(default_factory=list)

    def run(self, *, once: bool, stop: threading.Event) -> Counter[str]:
        """Follow until `stop` is set, or, with `once`, up to the present end of the topics; return all counts.

        A failed query is started again, after a pause that grows while there is no progress. Outages are endured for
        ever; with `once`, or for the same cause each time, the follower gives up after some attempts. Errors that a
        restart does not fix, RecordsMissing among them, are raised at once.
        """
        with serving(self.settings, self._metrics.registry, self._metrics.health), closing(self._log):
            while not stop.is_set():
                try:
                    self._run_query(once=once, stop=stop)
                    break
                except OutboxError as error:
                    if isinstance(error, _PERMANENT) and not self._may_pass(error):
                        raise
                    self._metrics.failed(error)
                    self._failures += 1
                    if (once and self._failures == _ATTEMPTS) or self._repeats(error):
                        raise
                    pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(self._failures - 1, _DOUBLINGS))
                    _log.warning("%s; trying again in %.0f s", error, pause)
                    stop.wait(pause)
        return self._metrics.counts

    def _may_pass(self, error: OutboxError) -> bool:
        """Tell whether settings that have made clients before make none now: a file that they name may be away."""
        return isinstance(error, ClientRefused) and bool(self._metrics.counts)

    def _repeats(self, error: OutboxError) -> bool:
        """Tell whether the same cause, other than an outage, has come too often to pass by itself."""
        if isinstance(error, StoreUnavailable | KafkaUnavailable) or _OUTAGE.search(str(error)):
            self._causes.clear()
            return False
        self._causes.append(_CHANGING.sub("", str(error)))
        return len(self._causes) >= _ATTEMPTS and len(set(self._causes[-_ATTEMPTS:])) == 1

    def _run_query(self, *, once: bool, stop: threading.Event) -> None:
        self._error = None
        for target in self.targets:
            target.table.recover()
        query = self._start(once=once)
        asked_at = 0.0
        try:
            while not query.awaitTermination(_POLL_SECONDS):  # type: ignore[arg-type]  # fractions are fine
                # For the next trigger, or for data: the last trigger went well.
                if self._metrics.trouble and query.status["message"].startswith("Waiting for"):
                    self._metrics.recovered()
                asked_at = asked_at or (time.monotonic() if stop.is_set() else 0.0)
                if asked_at and (not query.status["isTriggerActive"] or time.monotonic() > asked_at + _STOP_SECONDS):
                    break
        except Exception as error:
            if isinstance(self._error, OutboxError):
                raise self._error from None
            raise PipelineFailed(reason_of(self._error or error)) from None
        finally:
            query.stop()

    @functools.cached_property
    def _metrics(self) -> PipelineMetrics:
        return PipelineMetrics(self.settings.name)

    @functools.cached_property
    def _log(self) -> TopicLog:
        return TopicLog(self.kafka, self.settings.topics)

    @functools.cached_property
    def _checkpoint(self) -> Folder:
        return Folder(self.spark, self.settings.checkpoint)

    def _start(self, *, once: bool) -> StreamingQuery:
        settings = self.settings
        interval = f"{max(1, round(settings.trigger.total_seconds() * 1000))} milliseconds"
        trigger: dict[str, Any] = {"availableNow": True} if once else {"processingTime": interval}
        query: StreamingQuery = (
            read_topics(self.spark, self.kafka, settings.topics, streaming=True, starting=self._starting())
            .option("idHeader", settings.id_header)
            .option("maxOffsetsPerTrigger", str(settings.max_records))
            .option("failOnDataLoss", str(not settings.accept_gap).lower())
            .load()
            .writeStream.foreachBatch(self._batch)
            .queryName(settings.name)
            .option("checkpointLocation", self._checkpoint.url)
            .trigger(**trigger)
            .start()
        )
        return query

    def _starting(self) -> Positions:
        """Return the beginning without a checkpoint: for each partition the earliest one of all targets.

        A target begins at its position. One without any begins as the settings say, but at the first record of
        partitions that a topic has got since: none of them was there when the pipeline began.
        """
        _, before = self._logged(self._last_batch()) or ({}, {})
        self._refuse_made_anew(before, self._log.ids())
        firsts, ends = self._log.bounds()
        new = firsts if self.settings.starting_offsets == "earliest" else ends
        starts = []
        for known in [target.table.positions for target in self.targets]:
            self._check_available(known, firsts, ends)
            topics = {topic for topic, _ in known}
            starts.append({**new, **{place: firsts[place] for place in firsts if place[0] in topics}, **known})
        return {place: min(start[place] for start in starts) for place in new}

    def _check_available(self, known: Positions, firsts: Positions, ends: Positions) -> None:
        for (topic, partition), offset in known.items():
            if topic not in self.settings.topics:
                continue
            first, end = firsts.get((topic, partition), 0), ends.get((topic, partition), 0)
            if first > offset and not self.settings.accept_gap:
                raise RecordsMissing(
                    f"{topic}[{partition}]: the target has all below offset {offset}, but Kafka begins at {first}; "
                    "restore the topic, or set accept_gap to go on without the records between"
                )
            if end < offset:
                raise RecordsMissing(
                    f"{topic}[{partition}]: the target has all below offset {offset}, but Kafka ends at {end}: is this "
                    "another topic of that name? Take another name for the pipeline and another target"
                )

    def _refuse_made_anew(self, before: TopicIds, now: TopicIds) -> None:
        for topic in made_anew(before, now):
            raise RecordsMissing(
                f"topic {topic} was deleted and made anew since the last batch: the target has records of another "
                "topic of that name. Take another name for the pipeline and another target"
            )

    def _batch(self, batch: DataFrame, number: int) -> None:
        began = time.monotonic()
        # Of this batch's jobs in Spark's UI, until Spark sets its own for the next one.
        before = f", after {self._metrics.last}" if self._metrics.last is not None else ""
        self.spark.sparkContext.setJobDescription(f"{self.settings.name}: batch {number}{before}")
        try:
            counts = self._write(batch, number)
        except BaseException as error:
            self._error = error
            raise
        self._metrics.took(counts)
        self._failures = 0
        self._causes.clear()
        seconds = time.monotonic() - began
        reached, _ = self._logged(number) or ({}, {})
        lag, lag_seconds = self._log.behind(reached)
        report = BatchReport(number=number, counts=counts, seconds=seconds, lag=lag, lag_seconds=lag_seconds)
        self._metrics.finished(report)
        self.report(report)
        for target in self.targets:
            target.table.compact()

    def _write(self, batch: DataFrame, number: int) -> dict[str, int]:
        logged = self._logged(number)
        if logged is None:  # without its end, its records would be left out
            raise PipelineFailed(f"{self._checkpoint.url} has no offsets/{number}: was the checkpoint deleted?")
        (end, ids), (begin, before) = logged, self._logged(number - 1) or (None, {})
        self._refuse_made_anew(before, ids)
        counts: dict[str, int] = {}
        several = len(self.targets) > 1
        records = batch.persist() if several else batch
        try:
            for target in self.targets:
                known = target.table.positions
                self._refuse_gap(target.table.name, known, begin)
                if advanced(known, end) != known:
                    written = target.write(_without(records, known, begin), advanced(known, end))
                    counts.update((name, count) for name, count in written.items() if name not in counts)
        finally:
            if several:
                records.unpersist()
        return counts or {"records": 0}

    def _logged(self, number: int) -> tuple[Positions, TopicIds] | None:
        """Read a batch's end, and the topics' IDs, from Spark's checkpoint; None if it has none of that number."""
        path = f"offsets/{number}"
        if number < 0 or not self._checkpoint.exists(path):
            return None
        return parse_offset_log(self._checkpoint.read(path))

    def _last_batch(self) -> int:
        names = [found.path.rpartition("/")[2] for found in self._checkpoint.files("offsets")]
        return max((int(name) for name in names if name.isdecimal()), default=-1)

    def _refuse_gap(self, name: str, known: Positions, begin: Positions | None) -> None:
        if begin is None or self.settings.accept_gap:
            return
        for (topic, partition), offset in begin.items():
            has = known.get((topic, partition), 0)
            if has < offset:
                raise RecordsMissing(
                    f"{name} has {topic}[{partition}] up to offset {has}, but the checkpoint is at {offset}: "
                    f"delete {self.settings.checkpoint} to go on where the target is"
                )


def read_topics(
    spark: SparkSession, kafka: Mapping[str, str], topics: Sequence[str], *, streaming: bool, starting: Positions
) -> Any:
    """Return a reader of the format `outbox_kafka`, ready for more options and `load`."""
    reader: Any = spark.readStream if streaming else spark.read
    reader = reader.format("outbox_kafka").option("subscribe", ",".join(topics))
    for name, value in kafka.items():
        reader = reader.option(f"kafka.{name}", value)
    return reader.option("startingOffsets", json.dumps(to_json(starting)))


def parse_offset_log(text: str) -> tuple[Positions, TopicIds]:
    """Read position and IDs in a file of Spark's offset log, its third line. Raises PipelineFailed for another form."""
    try:
        _, _, line = text.strip().splitlines()
        content = json.loads(line)
        return from_json(content), ids_in(content)
    except (ValueError, AttributeError, TypeError):
        raise PipelineFailed("the checkpoint's offset log is not of this pipeline; take another checkpoint") from None


def _without(records: DataFrame, known: Positions, begin: Positions | None) -> DataFrame:
    """Leave out the records that the target has, where it is ahead of the batch's beginning."""
    has: list[Column] = [
        (F.col("topic") == topic) & (F.col("partition") == partition) & (F.col("offset") < offset)
        for (topic, partition), offset in known.items()
        if offset > (begin or {}).get((topic, partition), 0)
    ]
    return records.where(~functools.reduce(operator.or_, has)) if has else records
