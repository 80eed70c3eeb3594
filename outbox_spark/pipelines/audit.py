"""`audit`: expected records against those in topics: lost, repeated, reordered and unexpected ones.

A record is identified by its topic, key and `outbox_id`; one without an id by topic, partition and offset.

- *lost*: expected and not found;
- *repeated*: found more than once; counted once for each surplus;
- *reordered*: first found, within its key and partition, behind a record that was expected after it;
- *unexpected*: found and not expected. Against an archive, only below the archive's positions.

Replays (records with the replay's header) repeat by intention; they are counted and left out.

Both sides are shuffled once and keep a small row for each record on the executors' disks; the driver gets counts by
topic and hour, and some examples.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession, Window
from pyspark.sql import functions as F  # noqa: N812

from outbox_spark.config import AuditSettings
from outbox_spark.pipelines.audit_sides import Sides, below
from outbox_spark.runtime import utc

KINDS = ("lost", "repeated", "reordered", "unexpected")


@dataclass
class AuditResult:
    """The result of an audit: counts by topic and by hour, examples by topic and kind, the keys with most findings.

    Counts are `expected`, `found` and `replayed` records, and findings of each kind.
    """

    topics: dict[str, dict[str, int]] = field(default_factory=dict)
    examples: list[dict[str, Any]] = field(default_factory=list)
    hours: list[dict[str, Any]] = field(default_factory=list)
    keys: list[dict[str, Any]] = field(default_factory=list)

    def total(self, kind: str) -> int:
        """Sum up a count over all topics."""
        return sum(counts[kind] for counts in self.topics.values())

    @property
    def is_clean(self) -> bool:
        """Tell whether there is no finding."""
        return not any(self.total(kind) for kind in KINDS)


def audit(expected: DataFrame, found: DataFrame) -> DataFrame:
    """Compare two sides; return a row for each finding.

    Args:
        expected: columns `topic`, `id`, `key`, `partition`, `offset`, `timestamp`; offsets, of any growing number, give
            the order within a partition.
        found: the same columns, and `is_replay`.

    Returns:
        `kind`, `topic`, `key`, `id`, `times` (1, or the surplus of a repeat); `partition`, `offset`, `timestamp` of the
        found record (the last one of a repeat; the expected one if lost); `other_id`, `other_partition`, `other_offset`
        of a repeat's first occurrence, or of the record that wrongly came before a reordered one.
    """
    return findings_of(compare(expected, found))


def compare(expected: DataFrame, found: DataFrame) -> DataFrame:
    """Return a row for each record: `topic`, `hour` (in microseconds), `expected`, `found`, `replayed`, `findings`."""
    columns = (
        "topic",
        "id",
        # Records without a key have no order; their ids spread them.
        "coalesce(key, cast(id AS BINARY)) AS lane",
        "key IS NOT NULL AS keyed",
        "partition",
        "offset",
        "timestamp",
    )
    both = expected.selectExpr(*columns, "0 AS side").unionByName(
        found.selectExpr(*columns, "IF(is_replay, 2, 1) AS side")
    )
    # One shuffle brings together everything about a key.
    records = (
        both.repartition("topic", "lane")
        .groupBy("topic", "lane", "keyed", "id")
        .agg(
            *(F.expr(f"count_if(side = {side})").alias(name) for side, name in enumerate(_TIMES)),
            F.expr(f"min(IF(side = 0, {_PLACE}, NULL))").alias("rank"),
            F.expr("min(IF(side = 0, partition, NULL))").alias("of"),
            F.expr("min(IF(side = 0, timestamp, NULL))").alias("expected_at"),
            F.expr(f"min(IF(side = 1, {_PLACE}, NULL))").alias("first"),
            F.expr("min(IF(side = 1, partition, NULL))").alias("partition"),
            F.expr(f"max(IF(side = 1, {_PLACE}, NULL))").alias("last"),
            F.expr("max(IF(side = 1, partition, NULL))").alias("last_partition"),
            F.expr("min(IF(side = 1, timestamp, NULL))").alias("found_at"),
        )
    )
    before = (
        Window.partitionBy("topic", "lane", "keyed", "partition", "of")
        .orderBy("first")
        .rowsBetween(Window.unboundedPreceding, -1)
    )
    ahead = F.max(F.struct("rank", "id", "first")).over(before)
    hour = F.expr(utc.hour("coalesce(found_at, expected_at)")).alias("hour")
    return records.withColumn("ahead", ahead).select("topic", hour, *_TIMES, F.expr(_FINDINGS).alias("findings"))


def findings_of(compared: DataFrame) -> DataFrame:
    """Return the findings of `compare`, a row for each."""
    found = compared.where("size(findings) > 0").selectExpr("topic", "explode(findings) AS finding")
    return found.selectExpr("finding.kind", "topic", *(f"finding.{name}" for name in _FINDING))


_TIMES = ("expected", "found", "replayed")
_PLACE_BITS = 44
# As one number, partition and offset aggregate by hash; a pair would have to be sorted.
_PLACE = f"shiftleft(cast(partition AS BIGINT), {_PLACE_BITS}) + offset"


def _finding(kind: str, condition: str, *, times: str, place: str, partition: str, at: str, other: str) -> str:
    return f"""IF({condition}, named_struct('kind', '{kind}', 'key', IF(keyed, lane, NULL), 'id', id, 'times', {times},
        'partition', {partition}, 'offset', {_offset(place, partition)}, 'timestamp', {at}, {other}), NULL)"""


def _offset(place: str, partition: str) -> str:
    return f"{place} - shiftleft(cast({partition} AS BIGINT), {_PLACE_BITS})"


def _other(id_: str, partition: str, offset: str) -> str:
    return f"'other_id', {id_}, 'other_partition', cast({partition} AS INT), 'other_offset', cast({offset} AS BIGINT)"


_FINDING = ("key", "id", "times", "partition", "offset", "timestamp", "other_id", "other_partition", "other_offset")
_NONE = _other("cast(NULL AS STRING)", "NULL", "NULL")
_FIRST = _other("id", "partition", _offset("first", "partition"))
_AHEAD = _other("ahead.id", "partition", _offset("ahead.first", "partition"))
_IS_BEHIND = "keyed AND found > 0 AND expected > 0 AND ahead.rank > rank"
_OF_FOUND = {"place": "first", "partition": "partition", "at": "found_at"}
_OF_LAST = {"place": "last", "partition": "last_partition", "at": "found_at"}
_OF_EXPECTED = {"place": "rank", "partition": "of", "at": "expected_at"}
_FINDINGS = f"""array_compact(array(
    {_finding("lost", "found = 0 AND expected > 0", times="1L", other=_NONE, **_OF_EXPECTED)},
    {_finding("repeated", "found > 1", times="found - 1", other=_FIRST, **_OF_LAST)},
    {_finding("reordered", _IS_BEHIND, times="1L", other=_AHEAD, **_OF_FOUND)},
    {_finding("unexpected", "expected = 0 AND found > 0", times="1L", other=_NONE, **_OF_FOUND)}))"""


def run(spark: SparkSession, kafka: Mapping[str, str], settings: AuditSettings) -> AuditResult:
    """Compare both sides. Raises InvalidConfig if one cannot be read."""
    sides = Sides(spark, kafka, settings)
    expected, reached = sides.read(settings.expected)
    found, _ = sides.read(settings.found)
    topics = settings.topics or settings.expected.topics
    if topics is not None:
        expected, found = (side.where(F.col("topic").isin(topics)) for side in (expected, found))
    if reached is not None:
        found = below(found, reached)
    compared = compare(expected, found).persist(StorageLevel.DISK_ONLY)
    try:
        return _summarised(compared, settings, topics or settings.found.topics or [])
    finally:
        compared.unpersist()


def _summarised(compared: DataFrame, settings: AuditSettings, topics: list[str]) -> AuditResult:
    zeros = dict.fromkeys((*_TIMES, *KINDS), 0)
    result, hours = AuditResult({topic: dict(zeros) for topic in topics}), dict[Any, dict[str, int]]()
    sums = [F.sum(name).alias(name) for name in _TIMES]
    kinds = [
        F.sum(F.expr(f"aggregate(findings, 0L, (sum, f) -> sum + IF(f.kind = '{kind}', f.times, 0))")).alias(kind)
        for kind in KINDS
    ]
    for row in compared.groupBy("topic", "hour").agg(*sums, *kinds).collect():
        of_topic = result.topics.setdefault(row.topic, dict(zeros))
        of_hour = hours.setdefault(row.hour, dict(zeros))
        for name in zeros:
            of_topic[name] += row[name]
            of_hour[name] += row[name]
    known = sorted(hour for hour in hours if hour is not None)
    result.hours = [{"hour": _iso(hour), **hours[hour]} for hour in known]
    findings = findings_of(compared)
    if settings.findings is not None:
        findings.write.mode("overwrite").partitionBy("topic", "kind").parquet(settings.findings)
    if not result.is_clean:
        _add_examples(result, findings, settings.examples)
    return result


def _add_examples(result: AuditResult, findings: DataFrame, number: int) -> None:
    place = F.row_number().over(Window.partitionBy("topic", "kind").orderBy("partition", "offset"))
    examples = findings.withColumn("place", place).where(F.col("place") <= number).orderBy("topic", "kind", "place")
    examples = examples.drop("place").withColumn("timestamp", F.expr(utc.micros("timestamp")))
    result.examples = [_shown(row.asDict()) for row in examples.collect()]
    counts = [F.sum(F.when(F.col("kind") == kind, F.col("times")).otherwise(0)).alias(kind) for kind in KINDS]
    keys = findings.groupBy("topic", "key").agg(*counts, F.sum("times").alias("all"))
    worst = keys.orderBy(F.desc("all"), "topic", "key").limit(number).drop("all")
    result.keys = [_shown(row.asDict()) for row in worst.collect()]


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    key = row["key"]
    if key is not None:
        row["key"] = bytes(key).decode("utf-8", "backslashreplace")
    if row.get("timestamp") is not None:
        row["timestamp"] = _iso(row["timestamp"])
    return row


def _iso(micros: int) -> str:
    """Format a collected time as `2026-11-21T08:00:00Z`."""
    return f"{utc.from_micros(micros):%Y-%m-%dT%H:%M:%S.%f}".removesuffix(".000000") + "Z"
