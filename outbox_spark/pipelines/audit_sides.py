"""The two sides of an audit: archives, Parquet folders, topics, and tables of what was stashed, all in one form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox_core.config import redact
from outbox_core.errors import InvalidConfig
from outbox_core.schema import TableName
from outbox_spark.config import AuditSettings, AuditSide, SnapshotTable
from outbox_spark.pipelines.archive import open_archive
from outbox_spark.pipelines.following import read_topics
from outbox_spark.positions import Positions, flat
from outbox_spark.topics import TopicLog

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

_SIDE = "topic STRING, id STRING, key BINARY, partition INT, offset BIGINT, timestamp TIMESTAMP"
_TABLE_ROWS = 50_000


def below(found: DataFrame, reached: Positions) -> DataFrame:
    """What an archive that has reached these positions should have."""
    from pyspark.sql import functions as F  # noqa: N812

    ends = [(topic, int(partition), offset) for topic, partition, offset in flat(reached)]
    if not ends:
        return found.limit(0)
    table = found.sparkSession.createDataFrame(ends, "topic STRING, partition INT, end BIGINT")
    return found.join(F.broadcast(table), ["topic", "partition"]).where("offset < end").drop("end")


class Sides:
    """Reads either side of the comparison."""

    def __init__(self, spark: SparkSession, kafka: Mapping[str, str], settings: AuditSettings) -> None:
        self._spark = spark
        self._kafka = kafka
        self._settings = settings

    def read(self, side: AuditSide) -> tuple[DataFrame, Positions | None]:
        """A side's records, and, of an archive, the positions that it has reached."""
        from pyspark.sql import functions as F  # noqa: N812

        settings, reached = self._settings, None
        if side.archive is not None:
            table = open_archive(self._spark, side.archive)
            if table.is_empty:
                raise InvalidConfig(f"audit: there is no archive in {table.url}")
            rows, reached = self._records(table.read()), table.positions
        elif side.parquet is not None:
            rows = self._records(self._parquet(side.parquet))
        elif side.topics is not None:
            rows = self._records(self._topics(side.topics))
        else:
            rows = self._table(side.table).withColumn("is_replay", F.expr("false"))  # type: ignore[arg-type]  # one of them is given
        if settings.since is not None:
            rows = rows.where(F.col("timestamp") >= F.lit(settings.since))
        if settings.until is not None:
            rows = rows.where(F.col("timestamp") < F.lit(settings.until))
        return rows, reached

    def _records(self, rows: DataFrame) -> DataFrame:
        """Rows of an archive or of `outbox_kafka`."""
        name = self._settings.replay_header.replace("\\", "\\\\").replace("'", "\\'")
        replay = f"exists(headers, header -> header.key = '{name}')" if "headers" in rows.columns else "false"
        return rows.selectExpr(
            "topic", "coalesce(outbox_id, concat_ws('-', topic, partition, offset)) AS id", "key", "partition",
            "offset", "timestamp", f"coalesce({replay}, false) AS is_replay",
        )  # fmt: skip

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
        log = TopicLog(self._kafka, topics)
        try:
            start = log.starting("earliest")
        finally:
            log.close()
        reader = read_topics(self._spark, self._kafka, topics, streaming=False, starting=start)
        tasks = str(2 * self._spark.sparkContext.defaultParallelism)
        rows: DataFrame = reader.option("minPartitions", tasks).load()
        return rows.drop("headers").withColumnRenamed("header_list", "headers")

    def _table(self, table: SnapshotTable) -> DataFrame:
        """What was stashed: ids in ranges, each read by a task."""
        import psycopg

        name = TableName.parse(table.table)
        try:
            with psycopg.connect(table.dsn, connect_timeout=10) as connection:
                found = connection.execute(
                    f"SELECT min(id), max(id), current_database(), "
                    f"(SELECT nspname FROM pg_class c JOIN pg_namespace n ON n.oid = relnamespace "
                    f"WHERE c.oid = %s::regclass) FROM {name.quoted.replace('%', '%%')}",
                    (name.quoted,),
                ).fetchone()
        except psycopg.ProgrammingError as error:
            # The driver's own words about a DSN quote it, perhaps its password; a server's error has a state.
            why = str(error).strip().splitlines()[0] if error.sqlstate else "libpq cannot read the dsn"
            raise InvalidConfig(f"audit: cannot read {name}: {redact(why)}") from None
        except psycopg.Error as error:
            raise InvalidConfig(f"audit: cannot read {name}: {redact(str(error).strip().splitlines()[0])}") from None
        low, high, database, schema = found or (None, None, "", "")
        outbox = table.outbox_name or f"{database}.{schema}.{name.table}"
        ranges = (
            [] if low is None else [(at, min(at + _TABLE_ROWS, high + 1)) for at in range(low, high + 1, _TABLE_ROWS)]
        )
        frame = self._spark.createDataFrame(ranges, "low BIGINT, high BIGINT")
        spread = frame.repartition(max(1, min(len(ranges), 4 * self._spark.sparkContext.defaultParallelism)))
        return spread.mapInArrow(_ReadTable(table.dsn, name, outbox), _SIDE)


@dataclass(frozen=True)
class _ReadTable:
    """What a task does with its ranges of ids; sent to the workers."""

    dsn: str
    table: TableName
    outbox: str

    def __repr__(self) -> str:
        return f"read {self.table}"  # without the DSN: Spark shows it

    def __call__(self, batches: Any) -> Any:
        import psycopg
        import pyarrow as pa

        schema = pa.schema(
            [
                *(("topic", pa.string()), ("id", pa.string()), ("key", pa.binary()), ("partition", pa.int32())),
                *(("offset", pa.int64()), ("timestamp", pa.timestamp("us", tz="UTC"))),
            ]
        )
        statement = (
            f"SELECT kafka_topic, id, kafka_key, to_jsonb(t) ->> 'create_time' "
            f"FROM {self.table.quoted.replace('%', '%%')} AS t "
            "WHERE id >= %s AND id < %s"
        )
        with psycopg.connect(self.dsn, connect_timeout=10) as connection:
            for batch in batches:
                for low, high in zip(*batch.to_pydict().values(), strict=True):
                    yield self._rows(connection.execute(statement, (low, high)).fetchall(), schema)

    def _rows(self, rows: list[Any], schema: Any) -> Any:
        import pyarrow as pa

        topics, ids, keys, times = zip(*rows, strict=True) if rows else ((), (), (), ())
        columns = [
            pa.array(topics, pa.string()),
            pa.array([f"{self.outbox}:{number}" for number in ids], pa.string()),
            pa.array([None if key is None else key.encode() for key in keys], pa.binary()),
            pa.array([0] * len(ids), pa.int32()),
            pa.array(ids, pa.int64()),
            pa.array(times, pa.string()).cast(pa.timestamp("us", tz="UTC")),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=schema)
