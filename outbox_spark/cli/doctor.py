"""`outbox-spark doctor`: what pipelines need, looked at one by one, with the remedy for what is missing.

Without a file: Java, the packages, the workers' Python, and a Spark job through it. With one: also the file itself, the
Kafka cluster and topics, the databases with our rights on their tables, and the archives that it reads.
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
from outbox_core.printable import printable
from outbox_spark.config import (
    PIPELINES,
    PipelineFile,
    PostgresTarget,
    ProjectSettings,
    ReplaySettings,
    read_document,
    understand,
)

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
        sys.stdout.write(f"{printable(redact(str(finding)))}\n")
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
    yield from _on_spark(files)


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
            yield look(f"{file.pipeline}: PostgreSQL", _postgres, settings, postgres)
        if file.pipeline == "replay":
            yield look("replay: Kafka", _targets, file)
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


def _targets(file: PipelineFile) -> str:
    """Where a replay publishes to, as far as the file says it."""
    file.require_kafka()
    replay: ReplaySettings = file.settings
    named = [replay.to.get(topic, topic) for topic in replay.topics or replay.to]
    return _topics(file.kafka, list(dict.fromkeys(named))) if named else _kafka(file.kafka)


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


def _postgres(settings: ProjectSettings, target: PostgresTarget) -> str:
    """Whether all tables can be made, and those that are there be written."""
    from outbox_spark.pipelines.project import rights_on
    from outbox_spark.postgres import connect

    wanted = rights_on(settings, target)
    remedies, found = [], []
    names = list(wanted)
    connection, tables = connect(target.dsn, *names, what=target.table, autocommit=True)
    with connection:
        user, database, may_stage = connection.execute(_ABOUT_US).fetchone() or ("", "", False)
        if not may_stage:
            remedies.append(f'GRANT TEMPORARY ON DATABASE "{database}" TO "{user}"')
        for schema in sorted({table.schema or "" for table in tables}):
            may_make = connection.execute(_MAY_MAKE, (schema,)).fetchone()
            if may_make is None:
                raise NotWell(f"there is no schema {schema}; CREATE SCHEMA {schema}")
            if not may_make[0]:
                remedies.append(f'GRANT CREATE, USAGE ON SCHEMA "{schema}" TO "{user}"')
        for name, table, rights in zip(names, tables, wanted.values(), strict=True):
            parameters = (table.quoted, table.quoted, list(rights))
            exists, missing = connection.execute(_MISSING, parameters).fetchone() or (False, [])
            found.append(f"{name} {'is there' if exists else 'will be made'}")
            if missing:
                remedies.append(f'GRANT {", ".join(missing)} ON {name.quoted} TO "{user}"')
    if remedies:
        raise NotWell(f"{user} lacks rights; {'; '.join(remedies)}")
    return ", ".join(found)


_ABOUT_US = """
SELECT current_user, current_database(), has_database_privilege(current_database(), 'TEMPORARY')
"""

# CREATE TABLE IF NOT EXISTS wants this also for a table that exists.
_MAY_MAKE = """
SELECT has_schema_privilege(oid, 'CREATE') AND has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %s
"""

# Of several privileges in one text, PostgreSQL says whether there is any.
_MISSING = """
SELECT to_regclass(%s) IS NOT NULL,
       array_agg(wanted) FILTER (WHERE NOT has_table_privilege(to_regclass(%s)::oid, wanted))
FROM unnest(%s::text[]) AS wanted
"""


def _readable(dsn: str, table: str) -> str:
    from outbox_core.schema import TableName
    from outbox_spark.postgres import connect

    name = TableName.parse(table)
    connection, (table_found,) = connect(dsn, name, what=str(name), autocommit=True)
    with connection:
        connection.execute(f"SELECT id, kafka_topic, kafka_key FROM {table_found.quoted} LIMIT 0")
    return f"{name} may be read"


def _on_spark(files: list[PipelineFile]) -> Iterator[Finding]:
    """Spark itself, and what is looked at through it: the archives that are read."""
    sessions: list[SparkSession] = []
    try:
        yield look("Spark", _spark, files, sessions)
        made = [file.settings.path for file in files if file.pipeline == "archive"]
        for file in files if sessions else ():
            read = [getattr(file.settings, name, None) for name in ("expected", "found")]
            archives = [side.archive for side in read if side is not None and side.archive is not None]
            if file.pipeline == "replay":
                archives.append(file.settings.archive)
            for path in archives:
                yield look(f"{file.pipeline}: archive", _archive, sessions[0], path, path in made)
    finally:
        for session in sessions:
            session.stop()


def _spark(files: list[PipelineFile], sessions: list[SparkSession]) -> str:
    """A job through the workers' Python."""
    from outbox_spark.cli.run import open_session
    from outbox_spark.config import SparkSettings

    file = files[0] if files else PipelineFile(
        pipeline="doctor", settings=None, kafka={}, spark=SparkSettings(), level=0
    )  # fmt: skip
    spark: SparkSession = open_session(file)
    sessions.append(spark)
    row = spark.range(1).mapInArrow(_tell, "version STRING, outbox STRING").first()
    if row is None or row.version != _version():
        found = "nothing" if row is None else f"Python {row.version}"
        raise NotWell(f"the workers run {found}, the driver {_version()}; set PYSPARK_PYTHON to the driver's Python")
    return f"{spark.version} ran a job on {spark.sparkContext.master}; workers have Python {row.version}"


def _archive(spark: SparkSession, path: str, will_be_made: bool) -> str:
    from outbox_spark.pipelines.archive import open_archive

    table = open_archive(spark, path)
    if table.is_empty and will_be_made:
        return f"{table.url} will be made"
    if table.is_empty:
        raise NotWell(f"there is no archive in {table.url}; let `outbox-spark archive` make it, or name another folder")
    return f"{table.url} has {', '.join(table.positions)}"


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
