"""Outbox and Kafka topics on Apache Spark: data sources, sinks and pipelines, without a jar.

Needs the extra `[spark]` and Java 17 or later. Importing this package imports no PySpark.
"""
