"""`replay`: archive -> topics, in order per key, each record once.

Records of an archived partition are one *shard*, which one task publishes by offset, in transactions. Each transaction
also holds the position behind its last record, as the offset of a consumer group without members,
`outbox-replay.<name>.<topic>.<partition>`. A task that begins, or begins again, first fences its predecessor
(`init_transactions` settles the open transaction of the shard's transactional.id), then goes on at that position. So a
replay of a name happens once, after any interruption.

The group's offset is on partition 0 of the target topic, which exists; its number is the archived partition's offset.
Values, keys and headers are unchanged, so that a consumer that has seen a record drops it; one more header names the
replay.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxError
from outbox_core.kafka.clients import Consumer, KafkaError, KafkaException, TopicPartition, make_consumer
from outbox_core.kafka.errors import ErrorKind, kind_of
from outbox_core.kafka.transactions import Aborted, Ended, Outcome, TransactionalProducer
from outbox_spark.batches import batches
from outbox_spark.config import ReplaySettings
from outbox_spark.pipelines.archive import must_be_archive, open_archive, within
from outbox_spark.runtime import utc
from outbox_spark.runtime.secrets import filled
from outbox_spark.session import tasks_at_once
from outbox_spark.topics.positions import Positions
from outbox_spark.topics.ranges import TopicLog

_SECONDS = 30.0
_MOST_BYTES = 32 * 2**20  # no row is added to a transaction of that much
_ANY_PARTITION = -1
_COUNTS = "published BIGINT, skipped BIGINT"


class ReplayFailed(OutboxError):
    """A record that Kafka refused; after the remedy, start the replay again to go on."""


@dataclass(frozen=True)
class Planned:
    """The part of a replay from one topic; records `without_headers` had unreadable ones, and get only the replay's."""

    topic: str
    target: str
    records: int
    keys: int
    first: datetime | None
    last: datetime | None
    without_headers: int = 0


def replay(archived: DataFrame, settings: ReplaySettings) -> DataFrame:
    """Select the rows of an archive to publish, with their `target` topic and the replay's header.

    `without_headers` tells whether their own headers are unreadable (NULL in the archive).
    """
    rows = archived
    if settings.topics is not None:
        rows = rows.where(F.col("topic").isin(settings.topics))
    if settings.keys is not None:
        rows = rows.where(F.col("key").isin([bytearray(key.encode()) for key in settings.keys]))
    rows = within(rows, settings)
    target = F.col("topic")
    for name, other in settings.to.items():
        target = F.when(F.col("topic") == name, other).otherwise(target)
    mark = F.array(
        F.struct(F.lit(settings.header).alias("key"), F.encode(F.lit(settings.name), "UTF-8").alias("value"))
    )
    marked = F.concat(F.coalesce("headers", F.array().cast(archived.schema["headers"].dataType)), mark)
    without = F.col("headers").isNull()
    return rows.withColumn("target", target).withColumn("without_headers", without).withColumn("headers", marked)


def plan(rows: DataFrame) -> list[Planned]:
    """Plan the replay of these rows, topic by topic."""
    found = (
        rows.groupBy("topic", "target")
        .agg(
            F.count(F.lit(1)).alias("records"),
            F.approx_count_distinct("key").alias("keys"),
            F.expr(utc.micros("min(timestamp)")).alias("first"),
            F.expr(utc.micros("max(timestamp)")).alias("last"),
            F.count_if("without_headers").alias("without_headers"),
        )
        .orderBy("topic")
        .collect()
    )
    times = ("first", "last")
    return [Planned(**row.asDict() | {name: utc.from_micros(row[name]) for name in times}) for row in found]


def run(
    spark: SparkSession,
    kafka: Mapping[str, str],
    settings: ReplaySettings,
    *,
    publish: bool,
    say: Callable[[str], None],
) -> Mapping[str, int]:
    """Report the plan of a replay; with `publish`, carry it out. Return counts.

    Raises:
        InvalidConfig: there is no archive, or a target topic is missing or has too few partitions.
        ReplayFailed: Kafka refused a record.
    """
    table = must_be_archive(open_archive(spark, settings.archive), "replay.archive")
    since = settings.since.astimezone(UTC).date().isoformat() if settings.since is not None else None
    rows = replay(table.read(since=since), settings)
    planned = plan(rows)
    for part in planned:
        say(
            f"{part.topic} -> {part.target}: {part.records:,} records of about {part.keys:,} keys, "
            f"from {part.first} to {part.last}"
            + (f"; {part.without_headers:,} of them without their headers" if part.without_headers else "")
        )
    counts = {"selected": sum(part.records for part in planned), "published": 0, "skipped": 0}
    if not planned or not publish:
        return counts
    _check_targets(kafka, table.positions, settings, planned)
    shards = rows.repartition(tasks_at_once(spark), "topic", "partition").sortWithinPartitions(
        "topic", "partition", "offset"
    )
    columns = shards.select("topic", "partition", "offset", "target", "key", "value", "headers")

    def publish_shards(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        rows = (row for batch in batches for row in batch.to_pylist())
        for (topic, partition), of_shard in itertools.groupby(rows, key=lambda row: (row["topic"], row["partition"])):
            published, skipped = _Shard(kafka, settings, topic, partition).publish(of_shard)
            yield pa.RecordBatch.from_pydict({"published": [published], "skipped": [skipped]})

    for row in columns.mapInArrow(publish_shards, _COUNTS).collect():
        counts["published"] += row.published
        counts["skipped"] += row.skipped
    return counts


def _check_targets(
    kafka: Mapping[str, str], archived: Positions, settings: ReplaySettings, planned: list[Planned]
) -> None:
    with closing(TopicLog(kafka, [part.target for part in planned])) as log:
        ends = log.bounds()[1]
    for part in planned:
        wanted = 1 + max((partition for topic, partition in archived if topic == part.topic), default=0)
        found = sum(topic == part.target for topic, _ in ends)
        if settings.keep_partitions and found < wanted:
            raise InvalidConfig(
                f"replay.keep_partitions: {part.topic} has {wanted} partitions in the archive, {part.target} has "
                f"{found}; add partitions, or set keep_partitions: false to let the key decide"
            )


class _Shard:
    def __init__(self, kafka: Mapping[str, str], settings: ReplaySettings, topic: str, partition: int) -> None:
        self._kafka = filled(kafka)
        self._settings = settings
        self._partition = partition
        # Topics have no colon: a replay `a` of `b.c` must not go on where a replay `a.b` of `c` is.
        name = settings.name.replace(".", ":")
        self._name = f"outbox-replay.{name}.{topic}.{partition}"

    def publish(self, rows: Iterator[Mapping[str, Any]]) -> tuple[int, int]:
        """Publish the rows behind the shard's position; return the numbers of rows published and skipped."""
        first = next(rows)
        target: str = first["target"]
        reader = {"group.id": self._name, "enable.auto.commit": False, "isolation.level": "read_committed"}
        consumer = make_consumer({**self._kafka, **reader})
        producer = self._new_producer()
        published = skipped = 0
        try:
            reached = self._begin(producer, consumer, target)
            most = self._settings.transaction_records
            for batch in batches(itertools.chain([first], rows), most, _MOST_BYTES, _parts):
                if producer.must_replace:
                    # Its successor fences a rival that has fenced it: the position tells what that one has published.
                    producer.discard()
                    producer = self._new_producer()
                    reached = self._begin(producer, consumer, target)
                fresh = [row for row in batch if row["offset"] >= reached]
                skipped += len(batch) - len(fresh)
                if fresh:
                    self._transaction(producer, consumer.consumer_group_metadata(), target, fresh)
                published += len(fresh)
        except KafkaException as error:
            raise self._unavailable(error.args[0].str()) from None
        finally:
            producer.discard()
            consumer.close()
        return published, skipped

    def _new_producer(self) -> TransactionalProducer:
        ours = {"transactional.id": self._name, "enable.idempotence": True, "acks": "all"}
        return TransactionalProducer({"linger.ms": 5, **self._kafka, **ours}, timeout_seconds=_SECONDS)

    def _begin(self, producer: TransactionalProducer, consumer: Consumer, target: str) -> int:
        """Fence our predecessor, which settles its transaction; then return the offset to go on from."""
        give_up_at = time.monotonic() + _SECONDS
        self._must_go_on(producer.init(lambda: time.monotonic() > give_up_at))
        (place,) = consumer.committed([TopicPartition(target, 0)], timeout=_SECONDS)
        if place.error is not None:  # its offset looks like that of a replay which has not begun
            raise KafkaException(place.error)
        return place.offset

    def _transaction(
        self, producer: TransactionalProducer, group: Any, target: str, rows: list[Mapping[str, Any]]
    ) -> None:
        self._must_go_on(producer.begin())
        partition = self._partition if self._settings.keep_partitions else _ANY_PARTITION
        for row in rows:
            headers = [(header["key"], header["value"]) for header in row["headers"]]
            try:
                producer.produce(target, row["value"], row["key"], partition, headers)
            except KafkaException as error:
                cause: KafkaError = error.args[0]
                if cause.code() == KafkaError._STATE:  # noqa: SLF001  it has failed before: the commit tells the cause
                    break
                if kind_of(cause) is not ErrorKind.POISON:
                    raise
                producer.abort(cause)
                raise ReplayFailed(
                    f"the record of {self._name} at offset {row['offset']} cannot be sent to {target}: "
                    f"{cause.str()}; those before its transaction are published"
                ) from None
        position = TopicPartition(target, 0, rows[-1]["offset"] + 1)
        try:
            producer.send_offsets([position], group, _SECONDS)
        except KafkaException as error:
            outcome: Outcome = producer.abort(producer.failure or error.args[0])
        else:
            outcome = producer.commit()
        if isinstance(outcome, Aborted):
            reason = outcome.error.str() if outcome.error is not None else "the transaction was aborted"
            raise ReplayFailed(
                f"a record of {self._name} from offset {rows[0]['offset']} to {rows[-1]['offset']} was not taken: "
                f"{reason}"
            )
        if isinstance(outcome, Ended):
            raise self._unavailable(outcome.reason)

    def _must_go_on(self, ended: Ended | None) -> None:
        if ended is not None:
            raise self._unavailable(ended.reason)

    def _unavailable(self, reason: str) -> KafkaUnavailable:
        return KafkaUnavailable(f"replay of {self._name}: {reason}; start it again to go on")


def _parts(row: Mapping[str, Any]) -> Iterable[bytes | None]:
    return (row.get("key"), row.get("value"), *(header["value"] for header in row["headers"]))
