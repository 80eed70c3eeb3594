"""Following topics into targets that know how far they are.

Exactly once rests on the target, not on Spark's checkpoint: a target keeps the next offset of each partition in the
same commit as the rows. So it does not matter what becomes of the checkpoint:

- Spark repeats a batch (a task or the driver died, the last commit-log entry is lost): what the target has already, by
  its own offsets, is left out.
- The checkpoint is gone: the query begins where the target is, the earliest one if there are several.
- The checkpoint is ahead of the target (a restored backup), or Kafka has removed what comes next: records would be
  missing, so it stops and says so, unless `accept_gap` is set.

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
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxError, OutboxTableError, StoreUnavailable
from outbox_spark.config import StreamSettings
from outbox_spark.failures import reason_of
from outbox_spark.folder import FileTaken, Folder, HadoopFolder
from outbox_spark.ledger import LedgerError
from outbox_spark.positions import Positions, advanced, earliest_of, flat
from outbox_spark.topics import Position, TopicLog

if TYPE_CHECKING:
    from pyspark.sql import Column, DataFrame, SparkSession
    from pyspark.sql.streaming.query import StreamingQuery

_log = logging.getLogger(__name__)

_LOOK_SECONDS = 0.2
_STOP_SECONDS = 60.0
_LONGEST_PAUSE_SECONDS = 30.0
_DOUBLINGS = 5  # of a second, to the longest pause; more would be no float after some hours
_ATTEMPTS = 6
"""How often it fails in a row with nothing done between; without `once`, of the same cause, which is no outage."""
_OUTAGE = re.compile(r"Unavailable|OperationalError|InterfaceError")
_CHANGING = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}|\d+")


class RecordsMissing(OutboxError):
    """Records between what the target has and what would be read next cannot be read any more."""


class PipelineFailed(OutboxError):
    """Spark ended the query."""


_HOPELESS = (InvalidConfig, OutboxTableError, RecordsMissing, FileTaken, LedgerError)
"""What starting again does not mend."""


class Target(Protocol):
    """What takes the records of topics, exactly once."""

    @property
    def name(self) -> str:
        """For messages."""

    def recover(self) -> None:
        """Finish what was begun by whoever died, and find out what is there. Called before each query."""

    def positions(self) -> Positions:
        """The next offset of each partition that it has records of, as committed."""

    def write(self, records: DataFrame, positions: Positions) -> Mapping[str, int]:
        """Take records and the positions after them in atomic steps; return counts, `records` among them.

        Args:
            records: rows of `outbox_kafka` that it does not have.
            positions: of all partitions, after these records.
        """

    def tidy(self) -> None:
        """What may be done between batches."""


@dataclass(frozen=True, kw_only=True)
class BatchReport:
    """What one batch did.

    Attributes:
        number: Spark's.
        counts: what the targets counted; `records` is what the first of them took.
        seconds: from its start to the last commit.
        lag: how many offsets are still to be read.
    """

    number: int
    counts: Mapping[str, int]
    seconds: float
    lag: int

    def __str__(self) -> str:
        records = self.counts.get("records", 0)
        rate = records / self.seconds if self.seconds else 0.0
        others = "".join(f", {count:,} {name}" for name, count in self.counts.items() if name != "records" and count)
        return (
            f"batch {self.number}: {records:,} records in {self.seconds:.1f} s ({rate:,.0f}/s){others}; "
            f"lag {self.lag:,}"
        )


@dataclass
class Follower:
    """One streaming query into one or more targets. Batches come on Spark's thread, one at a time.

    Attributes:
        spark: the session.
        kafka: librdkafka's properties.
        settings: what to follow.
        targets: who takes the records.
        report: told about each batch.
    """

    spark: SparkSession
    kafka: Mapping[str, str] = field(repr=False)
    settings: StreamSettings
    targets: Sequence[Target]
    report: Callable[[BatchReport], None]
    totals: Counter[str] = field(default_factory=Counter)
    _error: BaseException | None = None
    _failures: int = 0
    _causes: list[str] = field(default_factory=list)

    def run(self, *, once: bool, stop: threading.Event) -> Counter[str]:
        """Follow until told to stop, or, with `once`, until what is there now is taken; return all counts.

        A query that fails is started again, after a pause that grows while nothing gets done: as long as services are
        away, but with `once`, or if it is always the same that is wrong, some times only.

        Raises:
            RecordsMissing: see there.
            OutboxError: what starting again does not mend, or did not.
        """
        try:
            while not stop.is_set():
                try:
                    self._run_query(once=once, stop=stop)
                    break
                except _HOPELESS:
                    raise
                except OutboxError as error:
                    self._failures += 1
                    if (once and self._failures == _ATTEMPTS) or self._repeats(error):
                        raise
                    pause = min(_LONGEST_PAUSE_SECONDS, 2.0 ** min(self._failures - 1, _DOUBLINGS))
                    _log.warning("%s; trying again in %.0f s", error, pause)
                    stop.wait(pause)
        finally:
            self._log.close()
        return self.totals

    def _repeats(self, error: OutboxError) -> bool:
        """Whether the same has been wrong for so often that it will not pass by itself."""
        if isinstance(error, StoreUnavailable | KafkaUnavailable) or _OUTAGE.search(str(error)):
            self._causes.clear()
            return False
        self._causes.append(_CHANGING.sub("", str(error)))
        return len(self._causes) >= _ATTEMPTS and len(set(self._causes[-_ATTEMPTS:])) == 1

    def _run_query(self, *, once: bool, stop: threading.Event) -> None:
        """One query, from wherever the targets are."""
        self._error = None
        for target in self.targets:
            target.recover()
        query = self._start(once=once)
        asked_at = 0.0
        try:
            while not query.awaitTermination(_LOOK_SECONDS):  # type: ignore[arg-type]  # fractions are fine
                asked_at = asked_at or (time.monotonic() if stop.is_set() else 0.0)
                if asked_at and (not query.status["isTriggerActive"] or time.monotonic() > asked_at + _STOP_SECONDS):
                    break
        except Exception as error:
            raise self._reason(error) from None
        finally:
            query.stop()

    @functools.cached_property
    def _log(self) -> TopicLog:
        return TopicLog(self.kafka, self.settings.topics)

    @functools.cached_property
    def _checkpoint(self) -> Folder:
        return HadoopFolder(self.spark, self.settings.checkpoint)

    def _start(self, *, once: bool) -> StreamingQuery:
        settings = self.settings
        start = self._log.starting(settings.starting_offsets)
        known = earliest_of([target.positions() for target in self.targets])
        self._check(known)
        for topic, partition, offset in flat(known):
            if topic in start:
                start[topic][partition] = offset
        trigger: dict[str, Any] = {"availableNow": True} if once else {"processingTime": _interval(settings)}
        query: StreamingQuery = (
            read_topics(self.spark, self.kafka, settings.topics, streaming=True, starting=start)
            .option("maxOffsetsPerTrigger", str(settings.max_records))
            .option("failOnDataLoss", str(not settings.accept_gap).lower())
            .load()
            .writeStream.foreachBatch(self._batch)
            .queryName(settings.name)
            .option("checkpointLocation", settings.checkpoint)
            .trigger(**trigger)
            .start()
        )
        return query

    def _check(self, known: Positions) -> None:
        """See that Kafka still has what comes next."""
        firsts, ends = self._log.bounds()
        for topic, partition, offset in flat(known):
            first, end = (bounds.get(topic, {}).get(partition) for bounds in (firsts, ends))
            if first is not None and first > offset and not self.settings.accept_gap:
                raise RecordsMissing(
                    f"{topic}[{partition}]: the target has all below offset {offset}, but Kafka begins at {first}; "
                    "restore the topic, or set accept_gap to go on without the records between"
                )
            if end is not None and end < offset:
                raise RecordsMissing(
                    f"{topic}[{partition}]: the target has all below offset {offset}, but Kafka ends at {end}: is this "
                    "another topic of that name? Take another name for the pipeline and another target"
                )

    def _batch(self, batch: DataFrame, number: int) -> None:
        began = time.monotonic()
        try:
            counts = self._write(batch, number)
        except BaseException as error:
            self._error = error
            raise
        self.totals.update(counts)
        self._failures = 0
        self._causes.clear()
        self.report(BatchReport(number=number, counts=counts, seconds=time.monotonic() - began, lag=self._lag(number)))
        for target in self.targets:
            target.tidy()

    def _write(self, batch: DataFrame, number: int) -> dict[str, int]:
        """Give each target what it does not have."""
        end = self._logged(number) or {}
        begin = self._logged(number - 1)
        counts: dict[str, int] = {}
        several = len(self.targets) > 1
        records = batch.persist() if several else batch
        try:
            for target in self.targets:
                known = target.positions()
                self._refuse_gap(target, known, begin)
                if advanced(known, end) != known:
                    written = target.write(_without(records, known, begin), advanced(known, end))
                    counts.update((name, count) for name, count in written.items() if name not in counts)
        finally:
            if several:
                records.unpersist()
        return counts or {"records": 0}

    def _logged(self, number: int) -> Position | None:
        """Where a batch ends, by Spark's checkpoint; None if there is none of that number."""
        path = f"offsets/{number}"
        if number < 0 or not self._checkpoint.exists(path):
            return None
        return parse_offset_log(self._checkpoint.read(path))

    def _refuse_gap(self, target: Target, known: Positions, begin: Position | None) -> None:
        if begin is None or self.settings.accept_gap:
            return
        for topic, partition, offset in flat(begin):
            has = known.get(topic, {}).get(partition, 0)
            if has < offset:
                raise RecordsMissing(
                    f"{target.name} has {topic}[{partition}] up to offset {has}, but the checkpoint is at {offset}: "
                    f"delete {self.settings.checkpoint} to go on where the target is"
                )

    def _lag(self, number: int) -> int:
        reached = self._logged(number) or {}
        ends = self._log.bounds()[1]
        return sum(end - min(end, reached.get(topic, {}).get(partition, 0)) for topic, partition, end in flat(ends))

    def _reason(self, error: Exception) -> OutboxError:
        if isinstance(self._error, OutboxError):
            return self._error
        return PipelineFailed(reason_of(self._error or error))


def read_topics(
    spark: SparkSession, kafka: Mapping[str, str], topics: Sequence[str], *, streaming: bool, starting: Position
) -> Any:
    """A reader of the format `outbox_kafka`, ready for more options and `load`."""
    reader: Any = spark.readStream if streaming else spark.read
    reader = reader.format("outbox_kafka").option("subscribe", ",".join(topics))
    for name, value in kafka.items():
        reader = reader.option(f"kafka.{name}", value)
    return reader.option("startingOffsets", json.dumps(starting))


def parse_offset_log(text: str) -> Position:
    """The position in a file of Spark's offset log: a version, a line about the batch, a line for each source.

    Raises:
        PipelineFailed: it has not this form.
    """
    lines = text.strip().splitlines()
    try:
        found = json.loads(lines[-1])
        if len(lines) != 3 or not all(isinstance(of, dict) for of in found.values()):
            raise ValueError  # noqa: TRY301
    except (ValueError, IndexError, AttributeError):
        raise PipelineFailed("the checkpoint's offset log is not of this pipeline; take another checkpoint") from None
    position: Position = found
    return position


def _without(records: DataFrame, known: Positions, begin: Position | None) -> DataFrame:
    """Without the records that the target has: where it is ahead of the batch's beginning."""
    from pyspark.sql import functions as F  # noqa: N812  its usual name

    ahead = [
        (topic, partition, offset)
        for topic, partition, offset in flat(known)
        if offset > ((begin or {}).get(topic, {}).get(partition, 0))
    ]
    if not ahead:
        return records
    has: list[Column] = [
        (F.col("topic") == topic) & (F.col("partition") == int(partition)) & (F.col("offset") < offset)
        for topic, partition, offset in ahead
    ]
    return records.where(~functools.reduce(operator.or_, has))


def _interval(settings: StreamSettings) -> str:
    return f"{max(1, round(settings.trigger.total_seconds() * 1000))} milliseconds"
