"""Exactly-once delivery: one Kafka transaction for each batch, with a manifest of its rows."""
