"""The outbox as a stream, published exactly once by Spark: the formats `outbox` and `outbox_kafka_txn`."""
