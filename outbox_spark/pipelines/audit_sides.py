"""The two sides of an audit: archives, Parquet folders, topics, and tables of stashed records, in one form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import closing

import psycopg
import pyarrow as pa
from pyspark.sql import DataFrame, SparkSession
from pyspark.sql import functions as F  # noqa: N812

from outbox_core.errors import InvalidConfig, StoreUnavailable
from outbox_core.row_security import seeing_all
from outbox_core.schema import TableName
from outbox_spark.config import AuditSettings, AuditSide, SnapshotTable
from outbox_spark.pipelines.archive import must_be_archive, open_archive, within
from outbox_spark.pipelines.follower import read_topics
from outbox_spark.pipelines.typed_rows import is_replay
from outbox_spark.postgres.connection import connect, one_line, with_parameters
from outbox_spark.session import tasks_at_once
from outbox_spark.topics.positions import Positions
from outbox_spark.topics.ranges import TopicLog

_SIDE = "topic STRING, id STRING, key BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP"
_TABLE_ROWS = 50_000
# Counts ids, and does not subtract them: a row may have any.
_FIRSTS = f"""
SELECT id FROM (SELECT id, row_number() OVER (ORDER BY id) AS number FROM {{table}}) AS numbered
WHERE number % {_TABLE_ROWS} = 1 ORDER BY id
"""
# A create_time may be missing, infinite, or of a year that neither Python nor Spark has.
_ROWS = """
SELECT kafka_topic, id, kafka_key, CASE WHEN at IS NOT NULL THEN
       to_jsonb(least(greatest(at, '0001-01-01 00:00+00'), '9999-12-31 23:59:59.999999+00')) #>> '{{}}' END
FROM {table} AS t, LATERAL (SELECT (to_jsonb(t) ->> 'create_time')::timestamptz AS at) AS created
WHERE id BETWEEN %s AND %s
"""


def below(found: DataFrame, reached: Positions) -> DataFrame:
    """Select the records that an archive with these positions should have."""
    ends = [(*place, offset) for place, offset in reached.items()]
    if not ends:
        return found.limit(0)
    table = found.sparkSession.createDataFrame(ends, "topic STRING, partition INT, end BIGINT")
    return found.join(F.broadcast(table), ["topic", "partition"]).where("offset < end").drop("end")


class Sides:
    """A reader of either side of the comparison."""

    def __init__(self, spark: SparkSession, kafka: Mapping[str, str], settings: AuditSettings) -> None:
        self._spark = spark
        self._kafka = kafka
        self._settings = settings

    def read(self, side: AuditSide) -> tuple[DataFrame, Positions | None]:
        """Return a side's records, and the positions of an archive."""
        settings, reached = self._settings, None
        if side.archive is not None:
            table = must_be_archive(open_archive(self._spark, side.archive), "audit")
            rows, reached = self._records(table.read()), table.positions
        elif side.parquet is not None:
            rows = self._records(self._parquet(side.parquet))
        elif side.topics is not None:
            rows = self._records(self._topics(side.topics))
        else:
            rows = self._table(side.table).withColumn("is_replay", F.lit(False))  # type: ignore[arg-type]  # one of them is given
        return within(rows, settings), reached

    def _records(self, rows: DataFrame) -> DataFrame:
        id_ = F.expr("coalesce(outbox_id, concat_ws('-', topic, partition, offset))").alias("id")
        replay = is_replay(self._settings.replay_header) if "headers" in rows.columns else F.lit(False)
        return rows.select("topic", id_, "key", "partition", "offset", "timestamp", replay.alias("is_replay"))

    def _parquet(self, path: str) -> DataFrame:
        rows = self._spark.read.parquet(path)
        wanted = {"topic", "key", "outbox_id", "partition", "offset", "timestamp"}
        if missing := sorted(wanted - set(rows.columns)):
            raise InvalidConfig(f"audit: {path} lacks the column {', '.join(missing)} of an archive")
        kinds = {"topic": "string", "key": "binary", "outbox_id": "string"}
        return rows.selectExpr(
            *(
                f"cast({name} AS {kinds.get(name, rows.schema[name].dataType.simpleString())}) AS {name}"
                for name in wanted
            ),
            *(["headers"] if "headers" in rows.columns else []),
        )

    def _topics(self, topics: list[str]) -> DataFrame:
        with closing(TopicLog(self._kafka, topics)) as log:
            start = log.starting("earliest")
        reader = read_topics(self._spark, self._kafka, topics, streaming=False, starting=start)
        tasks = str(2 * tasks_at_once(self._spark))
        reader = reader.option("minPartitions", tasks).option("idHeader", self._settings.id_header)
        rows: DataFrame = reader.load()
        return rows.drop("headers").withColumnRenamed("header_list", "headers")

    def _table(self, table: SnapshotTable) -> DataFrame:
        ranges, name, outbox = extent_of(table)
        frame = self._spark.createDataFrame(ranges, "first BIGINT, last BIGINT")
        spread = frame.repartition(max(1, min(len(ranges), 4 * tasks_at_once(self._spark))))
        return spread.mapInArrow(read_table(table.dsn, name, outbox), _SIDE)


def extent_of(table: SnapshotTable) -> tuple[list[tuple[int, int]], TableName, str]:
    """Return ranges of ids (first, last) of about as many rows, the table's full name, and the outbox's name."""
    named = table.table
    try:
        connection, (name,) = connect(table.dsn, named, what=f"audit of {named}")
        with connection, seeing_all(connection):
            (database,) = connection.execute("SELECT current_database()").fetchone() or ("",)
            firsts = [first for (first,) in connection.execute(_FIRSTS.format(table=name.quoted))]
            (last,) = connection.execute(f"SELECT max(id) FROM {name.quoted}").fetchone() or (None,)
    except (psycopg.Error, StoreUnavailable) as error:
        raise InvalidConfig(f"audit: cannot read {named}: {one_line(error)}") from None
    ends = [first - 1 for first in firsts[1:]] + [last]
    outbox = table.outbox_name or f"{database}.{name.schema}.{name.table}"
    return list(zip(firsts, ends, strict=True)) if firsts else [], name, outbox


def read_table(
    dsn: str, table: TableName, outbox: str
) -> Callable[[Iterable[pa.RecordBatch]], Iterator[pa.RecordBatch]]:
    """Return a task that reads ranges of ids from a table, as `extent_of` gives them."""

    def read(batches: Iterable[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        connection, (name,) = connect(dsn, table, what=f"audit of {table}")
        statement = _ROWS.format(table=with_parameters(name))
        with connection, seeing_all(connection):
            connection.execute("SET TIME ZONE 'UTC'")
            for batch in batches:
                for place in zip(*batch.to_pydict().values(), strict=True):
                    rows = connection.execute(statement, place).fetchall()
                    topics, ids, keys, times = zip(*rows, strict=True) if rows else ((), (), (), ())
                    yield pa.RecordBatch.from_pydict(
                        {
                            "topic": pa.array(topics, pa.string()),
                            "id": pa.array([f"{outbox}:{number}" for number in ids], pa.string()),
                            "key": pa.array([None if key is None else key.encode() for key in keys], pa.binary()),
                            "partition": pa.array([0] * len(ids), pa.int32()),
                            "offset": pa.array(ids, pa.int64()),
                            "timestamp": pa.array(times, pa.string()).cast(pa.timestamp("us", tz="UTC")),
                        }
                    )

    return read
