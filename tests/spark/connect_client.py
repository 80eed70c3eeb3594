"""A client of Spark Connect that uses the formats: `python connect_client.py URL SERVERS TOPIC DSN`; prints counts."""

import json
import sys

import psycopg
from pyspark.sql import SparkSession

from outbox_spark.session import register


def main(url, servers, topic, dsn):
    """Read a topic as a batch and as a stream, and write both into a table."""
    spark = SparkSession.builder.remote(url).getOrCreate()
    register(spark)
    with psycopg.connect(dsn) as connection:
        connection.execute('CREATE TABLE copied (partition int, "offset" bigint, PRIMARY KEY (partition, "offset"))')
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    rows = spark.read.format("outbox_kafka").options(**options).load().select("partition", "offset")
    sink = {"dsn": dsn, "table": "copied", "keys": "partition,offset"}
    rows.write.format("outbox_postgres").options(**sink).mode("append").save()
    stream = spark.readStream.format("outbox_kafka").options(**options).load().select("partition", "offset")
    query = stream.writeStream.format("memory").queryName("streamed").trigger(availableNow=True).start()
    query.awaitTermination()
    counts = {"read": rows.count(), "streamed": spark.table("streamed").count()}
    with psycopg.connect(dsn) as connection:
        (counts["written"],) = connection.execute("SELECT count(*) FROM copied").fetchone()
    sys.stdout.write(json.dumps(counts))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
