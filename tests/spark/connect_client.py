"""A client of Spark Connect that reads our formats: `python connect_client.py URL SERVERS TOPIC DSN`; prints counts."""

import json
import sys

from pyspark.sql import SparkSession

from outbox_spark.session import register


def main(url, servers, topic, dsn):
    """Read a topic as a batch and as a stream, and an outbox table."""
    spark = SparkSession.builder.remote(url).getOrCreate()
    register(spark)
    options = {"kafka.bootstrap.servers": servers, "subscribe": topic, "startingOffsets": "earliest"}
    rows = spark.read.format("outbox_kafka").options(**options).load().select("partition", "offset")
    stream = spark.readStream.format("outbox_kafka").options(**options).load().select("partition", "offset")
    query = stream.writeStream.format("memory").queryName("streamed").trigger(availableNow=True).start()
    query.awaitTermination()
    stashed = spark.read.format("outbox").option("dsn", dsn).load()
    counts = {"read": rows.count(), "streamed": spark.table("streamed").count(), "stashed": stashed.count()}
    sys.stdout.write(json.dumps(counts))
    spark.stop()


if __name__ == "__main__":
    main(*sys.argv[1:])
