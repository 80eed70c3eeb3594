"""The format `outbox` in Spark: batch reads, streams that elect by themselves, options."""

import os

import pytest

from outbox_core.errors import InvalidConfig
from outbox_core.record import OutboxRecord
from outbox_spark.relay.batch_store import BatchStore, Shard
from outbox_spark.relay.options import COMMON_OPTIONS, config_of, options_of
from outbox_spark.relay.rows import from_arrow, to_arrow
from outbox_spark.relay.sink import ShardsWriter
from outbox_spark.relay.source import SourceOptions
from outbox_spark.runtime.options import Options
from tests.harvesting import Scene

OUTBOX = {"dsn": "postgresql://u:hunter2@h/d", "kafka.bootstrap.servers": "h:1", "kafka.sasl.password": "hunter2"}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "option dsn is missing"),
        ({"dsn": "dbname=x", "shard": "2"}, r"unknown option\(s\) shard; there are .*shards"),
        ({"dsn": "dbname=x", "shards": "0"}, "shards must be from 1 to 1000"),
        ({"dsn": "dbname=x", "heartbeatTimeout": "soon"}, "heartbeatTimeout"),
        ({"dsn": "dbname=x", "producerKafkaConfig": "[]"}, "producerKafkaConfig must be a JSON object"),
        ({"dsn": "dbname=x", "acceptMarked": "maybe"}, "acceptMarked must be true or false"),
        ({"dsn": "dbname=x", "kafka.bootstrap.servers": "h:1", "kafka.acks": "1"}, "acks"),
    ],
)
def test_wrong_options_are_named(options, problem):
    """A missing, unknown or impossible option is refused by name, with the reason."""
    with pytest.raises(InvalidConfig, match=problem):
        SourceOptions(options)


def test_settings_survive_as_options():
    """Spark's workers read a relay's options as the same settings."""
    options = Options(
        "outbox", OUTBOX | {"idHeader": "-", "leaderGroupId": "g", "heartbeatTimeout": "3s"}, COMMON_OPTIONS
    )
    config = config_of(options)
    handed_over = Options("outbox", options_of(config, "d.s.t", 7), COMMON_OPTIONS)
    assert config_of(handed_over) == config
    assert handed_over.text("outbox") == "d.s.t"


def test_functions_are_not_handed_to_workers(scene):
    """A setting that is a function is refused by its name, as workers could not call it."""
    config = scene.config(base_kafka_config={"bootstrap.servers": "h:1", "oauth_cb": print})
    with pytest.raises(InvalidConfig, match="oauth_cb: a function cannot be handed"):
        options_of(config, "d.s.t", 0)


def test_the_sink_wants_the_columns_of_an_outbox(scene):
    """Rows that are no outbox's, or come from a batch read, are refused."""
    scene.fill("t", 3)
    store = BatchStore(scene.database)
    (rows,) = store.read(Shard(0, 1))
    store.close()
    batch = to_arrow(rows, "name", None)
    with pytest.raises(InvalidConfig, match="it writes streams only"):
        from_arrow(iter([batch]))
    with pytest.raises(InvalidConfig, match="outbox_mark are missing"):
        from_arrow(iter([batch.select(["id", "create_time", "topic"])]))
    with pytest.raises(InvalidConfig, match=r"kafka\.bootstrap\.servers is missing"):
        ShardsWriter({"dsn": "dbname=x"})


@pytest.mark.parametrize("layout", ["binary", "text"])
def test_a_batch_read_shows_the_table(spark, database, kafka_bootstrap, layout):
    """A batch read has all columns of both layouts, with the rows of a key in one partition, and changes no row."""
    scene = Scene(database, kafka_bootstrap, layout=layout)
    headers = [("a", "1"), ("a", "2")]
    scene.stash(
        OutboxRecord(topic="t", key="k", value="text", headers=headers),
        OutboxRecord(topic="t", key="k", value=None if layout == "binary" else ""),
    )
    scene.fill("t", 100, keys=10)
    frame = spark.read.format("outbox").options(dsn=database, shards=3).load()
    rows = {row.id: row for row in frame.collect()}
    assert len(rows) == 102
    assert (rows[1].topic, rows[1].key, bytes(rows[1].value)) == ("t", "k", b"text")
    assert [(header.key, bytes(header.value)) for header in rows[1].header_list] == [("a", b"1"), ("a", b"2")]
    assert rows[1].outbox_id.endswith(".public.outbox:1")
    assert rows[2].value is None if layout == "binary" else rows[2].value == b""
    assert rows[3].header_list is None
    parts = frame.selectExpr("spark_partition_id() AS part", "key").distinct().groupBy("key").count().collect()
    assert all(row["count"] == 1 for row in parts)
    assert scene.count("leader_id IS NOT NULL") == 0


@pytest.mark.real_broker
@pytest.mark.complete
def test_a_stream_into_another_sink(spark, scene, tmp_path):
    """A stream that elects by itself takes all rows out once, empties the table and hands leadership over."""
    options = {"dsn": scene.database, "kafka.bootstrap.servers": scene.bootstrap, "maxRecordsPerBatch": 40}

    def run():
        rows = spark.readStream.format("outbox").options(**options).load()
        query = (
            rows.select("id", "key")
            .writeStream.format("parquet")
            .option("path", os.fspath(tmp_path / "rows"))
            .option("checkpointLocation", os.fspath(tmp_path / "checkpoint"))
            .trigger(processingTime="100 milliseconds")
            .start()
        )
        deadline = 600
        while scene.count() and query.isActive and deadline:
            query.awaitTermination(0.2)
            deadline -= 1
        query.stop()
        assert query.exception() is None
        assert scene.count() == 0

    scene.fill("t", 150)
    run()
    scene.fill("t", 50)
    run()
    found = [row.id for row in spark.read.parquet(os.fspath(tmp_path / "rows")).collect()]
    assert sorted(found) == list(range(1, 201))


@pytest.mark.real_broker
@pytest.mark.complete
def test_a_stream_of_what_is_there(spark, scene, tmp_path):
    """An available-now run takes all present rows once, and has emptied the table when it ends."""
    scene.fill("t", 100)
    options = {"dsn": scene.database, "kafka.bootstrap.servers": scene.bootstrap, "maxRecordsPerBatch": 40}
    query = (
        spark.readStream.format("outbox")
        .options(**options)
        .load()
        .select("id")
        .writeStream.format("parquet")
        .option("path", os.fspath(tmp_path / "rows"))
        .option("checkpointLocation", os.fspath(tmp_path / "checkpoint"))
        .trigger(availableNow=True)
        .start()
    )
    assert query.awaitTermination(120)
    assert query.exception() is None
    assert scene.count() == 0
    assert sorted(row.id for row in spark.read.parquet(os.fspath(tmp_path / "rows")).collect()) == list(range(1, 101))


@pytest.mark.real_broker
def test_secrets_are_not_shown(spark, database, kafka_bootstrap):
    """Neither a plan nor an error shows a password."""
    secret = {"dsn": database + "?password=hunter2", "kafka.sasl.password": "hunter2"}
    frame = spark.read.format("outbox").options(**secret, **{"kafka.bootstrap.servers": kafka_bootstrap}).load()
    with pytest.raises(Exception, match="outbox") as error:
        frame.collect()
    assert "hunter2" not in frame._jdf.queryExecution().toString()
    assert "hunter2" not in str(error.value)
