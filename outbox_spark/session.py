"""A Spark session for the data sources: with Java, a Python for the workers, and the formats registered.

With a session of your own (a notebook, a cluster) call `register(spark)`. It needs Java 17 or later, and this package
in the workers' Python (`PYSPARK_PYTHON`, `spark.pyspark.python`).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING

from outbox_core.errors import InvalidConfig, MissingExtra
from outbox_spark.runtime.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = [
    "check_pyspark",
    "register",
    "start_session",
]

_DEFAULTS = {
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.sql.session.timeZone": "UTC",
    "spark.sql.shuffle.partitions": "4",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.sql.execution.arrow.maxRecordsPerBatch": "10000",
    # The plan and the state of a stream that is polled ten times a second are of no interest when nothing came.
    "spark.sql.streaming.noDataProgressEventInterval": "60000",
    "spark.sql.streaming.minBatchesToRetain": "20",
    "spark.python.daemon.module": "outbox_spark.runtime.daemon",
    # Options may hold passwords and data source names, which must not show in a plan.
    "spark.sql.redaction.options.regex": r"(?i)url|dsn|password|secret|token|ssl\.key|credential|sasl",
}


def start_session(
    name: str = "kafka-outbox", settings: Mapping[str, str] | None = None, *, master: str | None = None
) -> SparkSession:
    """Start Spark, or get the running session, with this package's formats registered.

    Args:
        name: the application's name.
        settings: Spark settings on top of ours.
        master: Spark's master URL; None for the one of spark-submit or `settings`, else this machine.

    Raises:
        MissingExtra: PySpark is not installed.
        InvalidConfig: PySpark is too old.
        JavaNotFound: there is no suitable Java.
    """
    check_pyspark()
    from pyspark.sql import SparkSession

    if SparkSession.getActiveSession() is None and "PYSPARK_GATEWAY_PORT" not in os.environ:
        os.environ["JAVA_HOME"] = str(find_java().home_for_spark())
    os.environ.setdefault("PYSPARK_PYTHON", sys.executable)
    builder = SparkSession.builder.appName(name)
    wanted = _DEFAULTS | dict(settings or {})
    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    if master is not None or not (submitted or "spark.master" in wanted):
        wanted["spark.master"] = master or "local[*]"
    for key, value in wanted.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def register(spark: SparkSession) -> None:
    """Register the formats `outbox`, `outbox_kafka` and `outbox_postgres` with a session."""
    from outbox_spark.postgres.sink import PostgresSink
    from outbox_spark.relay.source import OutboxSource
    from outbox_spark.topics.source import KafkaSource

    for source in (OutboxSource, KafkaSource, PostgresSink):
        spark.dataSource.register(source)


def check_pyspark() -> str:
    """Return PySpark's version. Raises MissingExtra if it is not installed, InvalidConfig if it is too old."""
    try:
        import pyspark
    except ImportError:
        raise MissingExtra("PySpark is not installed: pip install 'kafka-outbox[spark]'") from None
    version = str(pyspark.__version__)
    if tuple(int(part) for part in version.split(".")[:2]) < (4, 2):
        raise InvalidConfig(f"PySpark {version} is too old: data sources with a rate limit need 4.2 or later")
    return version
