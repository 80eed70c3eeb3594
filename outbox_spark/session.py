"""A Spark session for the data sources: with Java, a Python for the workers, and the formats registered.

With a session of your own (a notebook, a cluster) call `register(spark)`. It needs Java 17 or later, and this package
in the workers' Python (`PYSPARK_PYTHON`, `spark.pyspark.python`). Spark runs that Python on the driver, too, to plan
reads of our formats; where it is not the driver's own, it gets the driver's packages by `PYTHONPATH`.
"""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Mapping
from typing import TYPE_CHECKING

from outbox_core.errors import InvalidConfig, MissingExtra
from outbox_spark.runtime.java import find_java

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

__all__ = ["check_pyspark", "register", "start_session"]

_CONNECT = "sc://"
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
        master: Spark's master URL, or that of a Spark Connect server (`sc://...`); None for the one of spark-submit or
            `settings`, else this machine.

    Raises:
        MissingExtra: PySpark is not installed.
        InvalidConfig: PySpark is too old.
        JavaNotFound: there is no suitable Java.
    """
    check_pyspark()
    from pyspark.sql import SparkSession

    builder, wanted = SparkSession.builder.appName(name), _DEFAULTS | dict(settings or {})
    master = master or wanted.pop("spark.master", None)
    if master is not None and master.startswith(_CONNECT):
        builder = builder.remote(master)
        wanted = {
            key: value for key, value in wanted.items() if key.startswith("spark.sql.")
        }  # others are the server's
    else:
        submitted = "PYSPARK_GATEWAY_PORT" in os.environ
        if SparkSession.getActiveSession() is None and not submitted:
            os.environ["JAVA_HOME"] = str(find_java().home_for_spark())
            _choose_python(wanted.get("spark.pyspark.python"))
        if master is not None or not submitted:
            wanted["spark.master"] = master or "local[*]"
    for key, value in wanted.items():
        builder = builder.config(key, value)
    spark = builder.getOrCreate()
    register(spark)
    return spark


def _choose_python(wanted: str | None) -> None:
    """Set the workers' Python: PySpark reads it from the environment alone."""
    python = wanted or os.environ.get("PYSPARK_PYTHON") or sys.executable
    os.environ["PYSPARK_PYTHON"] = python
    if python != sys.executable:
        library = sysconfig.get_path("stdlib")
        zipped = next((path for path in sys.path if path.endswith(".zip")), "")
        standard = ("", library, f"{library}/lib-dynload", zipped)
        os.environ["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path not in standard)


def is_connect(spark: SparkSession) -> bool:
    """Tell whether a session is a client of Spark Connect, without a JVM of its own."""
    return type(spark).__module__.startswith("pyspark.sql.connect.")


def tasks_at_once(spark: SparkSession) -> int:
    """Return how many tasks the session's executors run at once, as far as they have come: ask for each batch anew."""
    if is_connect(spark):
        return int(str(spark.conf.get("spark.sql.shuffle.partitions")))
    return max(2, spark.sparkContext.defaultParallelism)


def register(spark: SparkSession) -> None:
    """Register the formats `outbox` and `outbox_kafka` with a session."""
    from outbox_spark.relay.source import OutboxSource
    from outbox_spark.topics.source import KafkaSource

    for source in (OutboxSource, KafkaSource):
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
