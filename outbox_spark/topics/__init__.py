"""Kafka topics as rows: ranges of offsets, and the format `outbox_kafka`."""
