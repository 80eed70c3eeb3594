"""`outbox-spark doctor`: the requirements of pipelines, checked one by one, with the remedy for each failure."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from typing import TYPE_CHECKING, Any

from outbox_core import __version__
from outbox_core.config import redact
from outbox_core.doctor.findings import Finding, Verdict, fine, problem
from outbox_core.errors import OutboxError
from outbox_core.printable import plural, printable
from outbox_spark.config import (
    PIPELINES,
    IcebergTable,
    PipelineFile,
    PostgresTarget,
    ProjectSettings,
    ReplaySettings,
    SnapshotTable,
    SparkSettings,
    read_document,
    validate,
)
from outbox_spark.runtime.secrets import filled, filled_harvest
from outbox_spark.session import tasks_at_once

if TYPE_CHECKING:
    import pyarrow as pa
    from pyspark.sql import SparkSession

_PACKAGES = {"pyspark": "4.2", "pyarrow": "18", "pandas": "2.2", "confluent-kafka": "2.13", "psycopg": "3.2"}
_TASKS_FOR_EACH_CORE = 2
_SPREAD_SECONDS = 0.5
_NO_DAEMON = "reading the port number from"  # Spark's words for a Python that ended at once
_PYTHON = "spark.pyspark.python"
_REMEDY = "install or pack it for them, docs/spark-cluster.md says how"
_SIGNS = {Verdict.OK: "ok  ", Verdict.PROBLEM: "FAIL"}


def main(path: str | None) -> int:
    """Check everything and print the findings; return 0 if all is well, else 1."""
    code = 0
    for finding in examine(path):
        line = f"{_SIGNS[finding.verdict]}  {finding.subject}: {finding.detail}"
        sys.stdout.write(f"{printable(redact(line))}\n")
        sys.stdout.flush()
        code = code if finding.verdict is Verdict.OK else 1
    return code


def examine(path: str | None) -> Iterator[Finding]:
    """Yield all findings, of the cheap checks first."""
    yield check("Java", _java)
    for package, oldest in _PACKAGES.items():
        yield check(package, _package, package, oldest)
    files: list[PipelineFile] = []
    if path is not None:
        yield check("file", _read, path, files)
    yield check("workers' Python", _python, files)
    if path is not None:
        yield from _services(files)
    yield from _on_spark(files)


def check(subject: str, find: Callable[..., str], *arguments: Any) -> Finding:
    """Call `find`; return its text, or its error, as a finding."""
    try:
        return fine(subject, find(*arguments))
    except OutboxError as error:
        return problem(subject, str(error), "")
    except Exception as error:
        lines = str(error).strip().splitlines()
        return problem(subject, f"{type(error).__name__}: {lines[0] if lines else ''}", "")


class CheckFailed(OutboxError):
    """A missing requirement; the message has the remedy."""


def _java() -> str:
    from outbox_spark.runtime.java import find_java

    java = find_java()
    return f"version {java.version} from {java.source} ({java.java})"


def _package(package: str, oldest: str) -> str:
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        raise CheckFailed("is not installed; pip install 'kafka-outbox[spark]'") from None
    if _numbers(version) < _numbers(oldest):
        raise CheckFailed(f"{version} is too old; pip install --upgrade '{package}>={oldest}'")
    return version


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2] if part.isdecimal())


def _python(files: Sequence[PipelineFile]) -> str:
    """Return the workers' Python: the file's, PYSPARK_PYTHON, or, where we start Spark, this interpreter."""
    configured = next((file.spark.settings.get(_PYTHON) for file in files), None) or os.environ.get("PYSPARK_PYTHON")
    if configured is None and "PYSPARK_GATEWAY_PORT" in os.environ:
        raise CheckFailed("spark-submit decides, and takes `python3`; set PYSPARK_PYTHON to a Python with this package")
    return configured or sys.executable


def _read(path: str, files: list[PipelineFile]) -> str:
    document = read_document(path, os.environ)
    names = [name for name in PIPELINES if name in document]
    if not names:
        raise CheckFailed(f"{path} has no section for a pipeline: {', '.join(PIPELINES)}")
    files += [validate(document, name, where=path) for name in names]
    return f"{path}: {', '.join(names)}"


def _services(files: Iterable[PipelineFile]) -> Iterator[Finding]:
    for file in files:
        settings, sides = file.settings, _sides(file)
        topics = list(settings.topics) if file.pipeline in ("project", "archive") else []
        topics += [topic for side in sides for topic in side.topics or []]
        if topics:
            yield check(f"{file.pipeline}: topics", _kafka, file.kafka, topics)
        if file.harvest is not None:
            yield check("relay: Kafka", _kafka, file.harvest.base_kafka_config)
            yield check("relay: outbox", lambda harvest: _outbox(filled_harvest(harvest)), file.harvest)
        if file.pipeline == "project" and settings.postgres is not None:
            yield check("project: PostgreSQL", _postgres, settings, settings.postgres)
        if file.pipeline == "replay":
            yield check("replay: Kafka", _targets, file)
        for side in sides:
            if side.table is not None:
                yield check("audit: table", _readable, side.table)


def _sides(file: PipelineFile) -> list[Any]:
    return [file.settings.expected, file.settings.found] if file.pipeline == "audit" else []


def _kafka(kafka: Mapping[str, Any], topics: Sequence[str] = ()) -> str:
    from outbox_core.kafka.admin import check_connection
    from outbox_spark.topics.ranges import TopicLog

    check_connection(filled(kafka))
    if not topics:
        return f"answers at {kafka.get('bootstrap.servers')}"
    with closing(TopicLog(kafka, topics)) as log:
        firsts, ends = log.bounds()
    sizes = {place: end - firsts[place] for place, end in ends.items()}
    parts = {topic: [size for (name, _), size in sizes.items() if name == topic] for topic in topics}
    return ", ".join(f"{topic} has {len(of)} partitions and {sum(of):,} offsets" for topic, of in parts.items())


def _targets(file: PipelineFile) -> str:
    """Check the topics that a replay publishes to, as far as the file names them."""
    file.require_kafka()
    replay: ReplaySettings = file.settings
    named = [replay.to.get(topic, topic) for topic in replay.topics or replay.to]
    return _kafka(file.kafka, list(dict.fromkeys(named)))


def _outbox(harvest: Any) -> str:
    from outbox_core.stores.postgres.store import PostgresStore

    with closing(PostgresStore(harvest.data_source, harvest.outbox_table)) as store:
        store.check()
    return f"{harvest.outbox_table} is an outbox, and may be read and purged"


def _postgres(settings: ProjectSettings, target: PostgresTarget) -> str:
    """Check the privileges to create missing tables, and to write to those that exist."""
    from outbox_spark.postgres.connection import connect
    from outbox_spark.postgres.projection import Projection

    wanted = Projection.of(settings, target, {}).rights()
    remedies, found = [], []
    connection, tables = connect(target.dsn, *wanted, what=str(target.table), autocommit=True)
    with connection:
        user, database, may_stage = connection.execute(_ABOUT_US).fetchone() or ("", "", False)
        if not may_stage:
            remedies.append(f'GRANT TEMPORARY ON DATABASE "{database}" TO "{user}"')
        for schema in sorted({table.schema or "" for table in tables}):
            may_make = connection.execute(_MAY_CREATE, (schema,)).fetchone()
            if may_make is None:
                raise CheckFailed(f"there is no schema {schema}; CREATE SCHEMA {schema}")
            if not may_make[0]:
                remedies.append(f'GRANT CREATE, USAGE ON SCHEMA "{schema}" TO "{user}"')
        for (name, rights), table in zip(wanted.items(), tables, strict=True):
            parameters = (table.quoted, table.quoted, list(rights))
            exists, missing = connection.execute(_MISSING, parameters).fetchone() or (False, [])
            found.append(f"{name} {'is there' if exists else 'will be made'}")
            if missing:
                remedies.append(f'GRANT {", ".join(missing)} ON {name.quoted} TO "{user}"')
    if remedies:
        raise CheckFailed(f"{user} lacks rights; {'; '.join(remedies)}")
    return ", ".join(found)


_ABOUT_US = """
SELECT current_user, current_database(), has_database_privilege(current_database(), 'TEMPORARY')
"""

# CREATE TABLE IF NOT EXISTS needs this also for a table that exists.
_MAY_CREATE = """
SELECT has_schema_privilege(oid, 'CREATE') AND has_schema_privilege(oid, 'USAGE') FROM pg_namespace WHERE nspname = %s
"""

# Given several privileges in one text, PostgreSQL tells whether there is any.
_MISSING = """
SELECT to_regclass(%s) IS NOT NULL,
       array_agg(wanted) FILTER (WHERE NOT has_table_privilege(to_regclass(%s)::oid, wanted))
FROM unnest(%s::text[]) AS wanted
"""


def _readable(table: SnapshotTable) -> str:
    from outbox_spark.postgres.connection import connect

    connection, (name,) = connect(table.dsn, table.table, what=str(table.table), autocommit=True)
    with connection:
        connection.execute(f"SELECT id, kafka_topic, kafka_key FROM {name.quoted} LIMIT 0")
    return f"{table.table} may be read"


def _on_spark(files: list[PipelineFile]) -> Iterator[Finding]:
    sessions: list[SparkSession] = []
    try:
        yield check("Spark", _spark, files, sessions)
        for session in sessions:
            yield check("executors", _executors, session)
            for subject, find, argument in _reached_by_tasks(files):
                yield check(subject, _on_executors, session, find, argument)
        written = [file.settings.place for file in files if file.pipeline == "archive"]
        for file in files if sessions else ():
            archives = [file.settings.archive] if file.pipeline == "replay" else []
            for place in archives + [side.archive for side in _sides(file) if side.archive is not None]:
                yield check(f"{file.pipeline}: archive", _archive, sessions[0], place, place in written)
    finally:
        for session in sessions:
            session.stop()


def _spark(files: list[PipelineFile], sessions: list[SparkSession]) -> str:
    from outbox_spark.cli.run import open_session

    spark: SparkSession = open_session("doctor", files[0].spark if files else SparkSettings())
    spark.range(1).count()
    sessions.append(spark)
    return f"{spark.version} ran a job on {spark.conf.get('spark.master', 'Spark Connect')}"


def _executors(spark: SparkSession) -> str:
    found = _on_executors(spark, versions)
    if found.partition(" (")[0] != versions():
        raise CheckFailed(f"they have {found}, the driver has {versions()}; install, or pack, the same on all machines")
    return found


def _reached_by_tasks(files: list[PipelineFile]) -> Iterator[tuple[str, Callable[[Any], str], Any]]:
    """Yield what tasks of the pipelines connect to: a subject, a check, and its argument, each service once."""
    kafka = [file.kafka for file in files if file.kafka]
    dsns = [side.table.dsn for file in files for side in _sides(file) if side.table is not None]
    dsns += [file.settings.postgres.dsn for file in files if file.pipeline == "project" and file.settings.postgres]
    for harvest in (file.harvest for file in files if file.harvest is not None):
        kafka.append({name: str(value) for name, value in harvest.base_kafka_config.items()})
        dsns.append(harvest.data_source)
    for index, settings in enumerate(kafka):
        if settings not in kafka[:index]:
            yield "executors: Kafka", _kafka, settings
    for dsn in dict.fromkeys(dsns):
        yield "executors: PostgreSQL", _database, dsn


def _on_executors(spark: SparkSession, find: Callable[..., str], *arguments: Any) -> str:
    """Call `find` in tasks on all executors; return what all of them say, and where. Raises CheckFailed."""
    tasks = _TASKS_FOR_EACH_CORE * tasks_at_once(spark)
    columns = "host STRING, executor BIGINT, said STRING, failed BOOLEAN"
    called = spark.range(0, tasks, 1, tasks).mapInArrow(partial(_in_task, find, arguments), columns)
    try:
        rows = called.collect()
    except Exception as error:
        if _NO_DAEMON not in str(error):
            raise
        raise CheckFailed(f"their Python does not start with this package: {_REMEDY}") from None
    failures = {f"{row.host}: {row.said}" for row in rows if row.failed}
    if failures:
        raise CheckFailed("; ".join(sorted(failures)))
    said, hosts = sorted({row.said for row in rows}), sorted({row.host for row in rows})
    count = len({(row.host, row.executor) for row in rows})
    return f"{', '.join(said)} ({plural(count, 'executor')} on {', '.join(hosts)})"


def _in_task(find: Callable[..., str], arguments: Sequence[Any], batches: Iterator[pa.RecordBatch]) -> Any:
    """Call `find` in a task, which lasts long enough for other executors to get the other tasks."""
    import pyarrow as pa

    for _ in batches:
        try:
            said, failed = find(*arguments), False
        except Exception as error:
            said, failed = redact(" ".join(str(error).split())) or type(error).__name__, True
        time.sleep(_SPREAD_SECONDS)
        row = {"host": socket.gethostname(), "executor": os.getppid(), "said": said, "failed": failed}
        yield pa.RecordBatch.from_pylist([row])


def versions() -> str:
    """Return the versions of Python and of this package, having imported the modules of tasks."""
    for module in (
        "outbox_spark.topics.ranges",
        "outbox_spark.relay.shard_task",
        "outbox_spark.postgres.projection_store",
    ):
        importlib.import_module(module)
    return f"Python {sys.version_info.major}.{sys.version_info.minor}, kafka-outbox {__version__}"


def _database(dsn: str) -> str:
    from outbox_spark.postgres.connection import connect

    connection, _ = connect(dsn, what="the file")
    with connection:
        (host,) = connection.execute("SELECT coalesce(host(inet_server_addr()), 'its socket')").fetchone() or ("",)
    return f"reachable at {host}"


def _archive(spark: SparkSession, place: str | IcebergTable, will_be_made: bool) -> str:
    from outbox_spark.pipelines.archive import must_be_archive, open_archive

    table = open_archive(spark, place)
    if table.is_empty and will_be_made:
        return f"{table.url} will be made"
    must_be_archive(table, "the file")
    return f"{table.url} has {', '.join(sorted({topic for topic, _ in table.positions}))}"
