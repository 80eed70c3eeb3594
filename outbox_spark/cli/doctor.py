"""`outbox-spark doctor`: what pipelines need, looked at one by one, with the remedy for what is missing.

Without a file: Java, the packages, the workers' Python, and a Spark job through it. With one: also the file itself, the
Kafka cluster and topics, and the databases that it names.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outbox_core.config import redact
from outbox_core.errors import OutboxError
from outbox_spark.config import PIPELINES, PipelineFile, read_document, understand

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_PACKAGES = {"pyspark": "4.2", "pyarrow": "18", "pandas": "2.2", "confluent-kafka": "2.6", "psycopg": "3.2"}


@dataclass(frozen=True)
class Finding:
    """The result of one look.

    Attributes:
        what: was looked at.
        is_well: whether it is as it should be.
        words: what was found; of what is not well, also the remedy.
    """

    what: str
    is_well: bool
    words: str

    def __str__(self) -> str:
        return f"{'ok  ' if self.is_well else 'FAIL'}  {self.what}: {self.words}"


def main(path: str | None) -> int:
    """Look at everything, say what was found; return 0 if all is well, else 1."""
    well = True
    for finding in examine(path):
        sys.stdout.write(f"{redact(str(finding))}\n")
        sys.stdout.flush()
        well = well and finding.is_well
    return 0 if well else 1


def examine(path: str | None) -> Iterator[Finding]:
    """Everything there is to look at, the cheap things first."""
    yield look("Java", _java)
    for package, oldest in _PACKAGES.items():
        yield look(package, _package, package, oldest)
    yield look("workers' Python", _python)
    files: list[PipelineFile] = []
    if path is not None:
        yield look("file", _read, path, files)
        yield from _services(files)
    yield look("Spark", _spark, files)


def look(what: str, find: Callable[..., str], *arguments: Any) -> Finding:
    """What `find` says of its arguments, or why it fails."""
    try:
        return Finding(what, is_well=True, words=find(*arguments))
    except OutboxError as error:
        return Finding(what, is_well=False, words=str(error))
    except Exception as error:
        lines = str(error).strip().splitlines()
        return Finding(what, is_well=False, words=f"{type(error).__name__}: {lines[0] if lines else ''}")


class NotWell(OutboxError):
    """Something is missing; the message has the remedy."""


def _java() -> str:
    from outbox_spark.java import find_java

    java = find_java()
    return f"version {java.version} from {java.source} ({java.java})"


def _package(package: str, oldest: str) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise NotWell("is not installed; pip install 'kafka-outbox[spark]'") from None
    if _numbers(version) < _numbers(oldest):
        raise NotWell(f"{version} is too old; pip install --upgrade '{package}>={oldest}'")
    return version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _python() -> str:
    """Workers run what PYSPARK_PYTHON says, or, where we start Spark, this interpreter."""
    configured = os.environ.get("PYSPARK_PYTHON")
    if configured is None and "PYSPARK_GATEWAY_PORT" in os.environ:
        raise NotWell("spark-submit decides, and takes `python3`; set PYSPARK_PYTHON to a Python with this package")
    return configured or sys.executable


def _read(path: str, files: list[PipelineFile]) -> str:
    document = read_document(path, os.environ)
    names = [name for name in PIPELINES if name in document]
    if not names:
        raise NotWell(f"{path} has no section for a pipeline: {', '.join(PIPELINES)}")
    files += [understand(document, name, where=path) for name in names]
    return f"{path}: {', '.join(names)}"


def _services(files: Iterable[PipelineFile]) -> Iterator[Finding]:
    for file in files:
        settings = file.settings
        sides = [getattr(settings, name, None) for name in ("expected", "found")]
        topics = list(getattr(settings, "topics", None) or []) if file.pipeline in ("project", "archive") else []
        topics += [topic for side in sides if side is not None for topic in side.topics or []]
        if topics:
            yield look(f"{file.pipeline}: topics", _topics, file.kafka, topics)
        if file.harvest is not None:
            yield look("relay: Kafka", _kafka, file.harvest.base_kafka_config)
            yield look("relay: outbox", _outbox, file.harvest)
        postgres = getattr(settings, "postgres", None)
        if postgres is not None:
            yield look(f"{file.pipeline}: PostgreSQL", _postgres, postgres.dsn, postgres.table)
        for side in sides:
            if side is not None and side.table is not None:
                yield look("audit: table", _readable, side.table.dsn, side.table.table)


def _topics(kafka: Mapping[str, str], topics: list[str]) -> str:
    from outbox_core.kafka import check_connection
    from outbox_spark.topics import TopicLog

    check_connection(kafka)
    log = TopicLog(kafka, topics)
    try:
        firsts, ends = log.bounds()
    finally:
        log.close()
    return ", ".join(
        f"{topic} has {len(of)} partitions and {sum(of.values()) - sum(firsts[topic].values()):,} offsets"
        for topic, of in ends.items()
    )


def _kafka(kafka: Mapping[str, Any]) -> str:
    from outbox_core.kafka import check_connection

    check_connection(kafka)
    return f"answers at {kafka.get('bootstrap.servers')}"


def _outbox(harvest: Any) -> str:
    from outbox_core.stores.postgres import PostgresStore

    store = PostgresStore(harvest.data_source, harvest.outbox_table)
    try:
        store.check()
    finally:
        store.close()
    return f"{harvest.outbox_table} is an outbox, and may be read and purged"


def _postgres(dsn: str, table: str) -> str:
    """Whether the table can be written, or made."""
    from outbox_core.schema import TableName

    name = TableName.parse(table)
    with _connection(dsn) as connection:
        exists, may_write = connection.execute(
            "SELECT to_regclass(%s) IS NOT NULL, coalesce(has_table_privilege(to_regclass(%s)::oid, "
            "'SELECT, INSERT, DELETE'), false)",
            (name.quoted, name.quoted),
        ).fetchone()
        schema = name.schema or connection.execute("SELECT current_schema()").fetchone()[0]
        may_make = connection.execute("SELECT has_schema_privilege(%s, 'CREATE, USAGE')", (schema,)).fetchone()[0]
        user = connection.execute("SELECT current_user").fetchone()[0]
    if exists and not may_write:
        raise NotWell(f"{user} may not write {name}; GRANT SELECT, INSERT, UPDATE, DELETE ON {name.quoted} TO {user}")
    if not exists and not may_make:
        raise NotWell(f"{user} may not make {name}; GRANT CREATE, USAGE ON SCHEMA {schema} TO {user}")
    return f"{name} {'is there' if exists else 'will be made'}"


def _readable(dsn: str, table: str) -> str:
    from outbox_core.schema import TableName

    name = TableName.parse(table)
    with _connection(dsn) as connection:
        connection.execute(f"SELECT id, kafka_topic, kafka_key FROM {name.quoted} LIMIT 0")
    return f"{name} may be read"


def _connection(dsn: str) -> Any:
    import psycopg

    return psycopg.connect(dsn, connect_timeout=10, autocommit=True)


def _spark(files: list[PipelineFile]) -> str:
    """A job through the workers' Python."""
    from outbox_spark.cli.run import open_session
    from outbox_spark.config import SparkSettings

    file = files[0] if files else PipelineFile(
        pipeline="doctor", settings=None, kafka={}, spark=SparkSettings(), level=0
    )  # fmt: skip
    spark: SparkSession = open_session(file)
    try:
        row = spark.range(1).mapInArrow(_tell, "version STRING, outbox STRING").first()
        if row is None or row.version != _version():
            found = "nothing" if row is None else f"Python {row.version}"
            raise NotWell(
                f"the workers run {found}, the driver {_version()}; set PYSPARK_PYTHON to the driver's Python"
            )
        return f"{spark.version} ran a job on {spark.sparkContext.master}; workers have Python {row.version}"
    finally:
        spark.stop()


def _version() -> str:
    return ".".join(map(str, sys.version_info[:3]))


def _tell(batches: Any) -> Any:
    """In a worker: its version, and that it can import what tasks need."""
    import pyarrow as pa

    import outbox_core

    importlib.import_module("outbox_spark.topics")
    for _ in batches:
        names = pa.schema([("version", pa.string()), ("outbox", pa.string())])
        version = ".".join(map(str, sys.version_info[:3]))
        yield pa.RecordBatch.from_pydict({"version": [version], "outbox": [outbox_core.__version__]}, schema=names)
