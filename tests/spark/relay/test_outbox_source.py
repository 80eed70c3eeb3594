"""The format `outbox` in Spark: batch reads, and options."""

import pytest

from outbox_core.errors import InvalidConfig
from outbox_core.record import OutboxRecord
from outbox_spark.relay.source import OutboxReader
from tests.harvesting import Scene


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({}, "option dsn is missing"),
        ({"dsn": "dbname=x", "shard": "2"}, "shard unknown field; did you mean shards"),
        ({"dsn": "dbname=x", "shards": "0"}, "shards must be 1 or more"),
    ],
)
def test_wrong_options_are_named(options, problem):
    """A missing, unknown or impossible option is refused by name, with the reason."""
    with pytest.raises(InvalidConfig, match=problem):
        OutboxReader(options)


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


def test_secrets_are_not_shown(spark, database):
    """Neither a plan nor an error shows a password."""
    frame = spark.read.format("outbox").options(dsn=f"{database}?password=hunter2").load()
    with pytest.raises(Exception, match="outbox") as error:
        frame.collect()
    assert "hunter2" not in frame._jdf.queryExecution().toString()
    assert "hunter2" not in str(error.value)
