"""The format `outbox` in Spark: batch reads, and options."""

from contextlib import closing

import pytest

from outbox_core.errors import InvalidConfig
from outbox_core.record import OutboxRecord
from outbox_spark.relay.shard_store import ShardStore
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


def test_large_rows_are_read_few_at_a_time(database, kafka_bootstrap):
    """A task has some rows of a megabyte in memory, not ten thousand of them."""
    scene = Scene(database, kafka_bootstrap)
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) "
        "SELECT 't', 'k', convert_to(repeat('x', 1000000), 'UTF8'), '{}', '{}' FROM generate_series(1, 40)"
    )
    with closing(ShardStore(database, "outbox")) as store:
        sizes = [len(rows) for rows in store.read_shard(0, 1)]
    assert sizes == [17, 17, 6]


def test_rows_with_headers_that_are_none_are_read(spark, database, kafka_bootstrap):
    """Arrays that are no headers, as any writer may leave them, hide neither their row nor others."""
    scene = Scene(database, kafka_bootstrap, constrained=False)
    headers = ["'{a}', '{}'", "'{{a},{b}}', '{{a},{b}}'", "'{NULL}', '{x}'", "'{a}', '{NULL}'"]
    for arrays in headers:
        scene.execute(
            "INSERT INTO outbox (kafka_topic, kafka_value, kafka_header_keys, kafka_header_values) "
            f"VALUES ('t', 'v', {arrays})"
        )
    rows = spark.read.format("outbox").options(dsn=database, shards=1).load().orderBy("id").collect()
    assert [row.header_list for row in rows] == [None, None, None, [("a", None)]]
