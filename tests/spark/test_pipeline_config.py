"""Settings of the pipelines and the command line: refusals and their words."""

import os
import signal
import threading
from datetime import timedelta

import pytest

from outbox_core.errors import InvalidConfig
from outbox_spark import config
from outbox_spark.cli import main, run
from outbox_spark.config import load_pipeline

_PROJECT = """
kafka: {bootstrap.servers: "${SERVERS}", sasl.password: hunter2}
spark: {settings: {spark.driver.memory: 1g, spark.ui.enabled: false}}
project:
  name: lines
  topics: orders
  checkpoint: /tmp/checkpoint
  trigger: 500ms
  schema: n BIGINT
  postgres: {dsn: "postgresql://me:hunter2@db/shop", table: lines}
"""


@pytest.fixture
def load(tmp_path):
    """Return a function that loads a pipeline from text."""

    def run(text, pipeline="project", **environ):
        path = tmp_path / "pipeline.yaml"
        path.write_text(text)
        return load_pipeline(path, pipeline, environ)

    return run


def test_reads_a_file(load):
    """A file may have names, durations, single topics and environment variables."""
    file = load(_PROJECT, SERVERS="kafka:9092")
    assert file.kafka["bootstrap.servers"] == "kafka:9092"
    assert file.settings.topics == ["orders"]
    assert file.settings.trigger == timedelta(milliseconds=500)
    assert file.spark.settings == {"spark.driver.memory": "1g", "spark.ui.enabled": "false"}


def test_shows_no_secrets(load):
    """No repr and no error shows a password."""
    assert "hunter2" not in repr(load(_PROJECT, SERVERS="kafka:9092"))
    with pytest.raises(InvalidConfig) as refused:
        load(_PROJECT.replace("table: lines", "tabel: lines"), SERVERS="x")
    assert "hunter2" not in str(refused.value)
    assert "project.postgres.tabel: unknown field; did you mean table?" in str(refused.value)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("${SERVERS}", "${NOT_SET}", "kafka.bootstrap.servers: the environment variable 'NOT_SET' is not set"),
        ("schema: n BIGINT", "", "project.schema"),
        ("topics: orders", "topics: [orders, 'no topic']", "project.topics.1: is not a topic name"),
        ("topics: orders", "topics: []", "project.topics"),
        ("trigger: 500ms", "trigger: 5", "needs a unit"),
        ("name: lines", "name: ../lines", "project.name"),
        ("table: lines", "table: a.b.c", "project.postgres.table"),
        ("schema: n BIGINT", "schema: n BIGINT\n  format: avro", "project.registry.url: is missing"),
        ("schema: n BIGINT", "schema: n BIGINT\n  registry: {url: http://r}", "project.registry: is for the formats"),
        (
            "schema: n BIGINT",
            "schema: n BIGINT\n  registry: {basic: {auth: x}}",
            "project.registry.basic: must be a single",
        ),
        ("table: lines}", "table: lines}\n  lakehouse: {}", "project.lakehouse: needs exactly one of path, iceberg"),
        ("table: lines}", "table: lines}\n  lakehouse: {iceberg: {table: x}}", "project.lakehouse.iceberg.table"),
        ("project:", "projekt:", "projekt: unknown field; did you mean project?"),
        ("spark: {settings: {", "spark: {settings: {driver.memory: 1g, ", "spark.settings.driver.memory"),
    ],
)
def test_names_what_is_wrong(load, old, new, words):
    """Each wrong setting is named as it stands in the file."""
    assert old in _PROJECT
    with pytest.raises(InvalidConfig, match=words.replace("[", r"\[").replace("?", r"\?")):
        load(_PROJECT.replace(old, new), SERVERS="x")


@pytest.mark.parametrize(
    ("size", "number"),
    [("128 MiB", 2**27), ("1.5GB", 1_500_000_000), (2048, 2048), ("many", "must be a size, such as")],
)
def test_sizes_of_files(load, size, number):
    """A size is a number of bytes, or text with a unit."""
    section = f"{{name: a, topics: t, checkpoint: /c, path: /p, target_file_size: {size}}}"
    text = f"kafka: {{bootstrap.servers: s}}\narchive: {section}"
    if isinstance(number, int):
        assert load(text, "archive").settings.target_file_size == number
    else:
        with pytest.raises(InvalidConfig, match=rf"archive\.target_file_size: {number}"):
            load(text, "archive")


def test_versions_are_kept_for_an_hour_at_least(load):
    """A time that a batch may take is refused: its files are of no version before its commit."""
    text = "kafka: {bootstrap.servers: s}\narchive: {name: a, topics: t, checkpoint: /c, path: /p, keep_versions: "
    assert load(text + "1h}", "archive").settings.keep_versions == timedelta(hours=1)
    with pytest.raises(InvalidConfig, match=r"archive\.keep_versions: must be 1h or more"):
        load(text + "59m}", "archive")


def test_a_period_ends_after_it_begins(load):
    """A replay or an audit of no time is refused."""
    period = "since: 2026-11-21T00:00:00Z, until: 2026-11-21T00:00:00Z"
    for pipeline, section in (
        ("replay", "archive: /a, name: n"),
        ("audit", "expected: {archive: /a}, found: {parquet: /b}"),
    ):
        with pytest.raises(InvalidConfig, match=rf"{pipeline}\.until: must be later than since"):
            load(f"{pipeline}: {{{section}, {period}}}", pipeline)


def test_a_relay_has_limits(load):
    """A transaction of a relay has at most as many records as its manifest has room for."""
    with pytest.raises(InvalidConfig, match=r"relay\.batchRecords: must be 50000 or less"):
        load("harvest: {dataSource: dbname=x}\nrelay: {batchRecords: 50001}", "relay")


def test_a_side_of_an_audit_is_one_thing(load):
    """A side of an audit with two kinds, and a table on the found side, are refused."""
    audit = "kafka: {}\naudit:\n  expected: {archive: /a, parquet: /b}\n  found: {topics: t}\n"
    with pytest.raises(InvalidConfig, match=r"audit\.expected: needs exactly one"):
        load(audit, "audit")
    with pytest.raises(InvalidConfig, match=r"audit\.found\.table"):
        load("audit: {expected: {archive: /a}, found: {table: {dsn: 'dbname=x', table: t}}}", "audit")


@pytest.mark.parametrize(
    ("pipeline", "section"),
    [
        ("project", "{name: a, topics: t, checkpoint: /c, schema: n BIGINT, lakehouse: {path: /p}}"),
        ("archive", "{name: a, topics: t, checkpoint: /c, path: /p}"),
        ("audit", "{expected: {archive: /a}, found: {topics: t}}"),
    ],
)
@pytest.mark.parametrize("kafka", ["", "kafka: {client.id: me}\n"])
def test_kafka_must_be_named(load, pipeline, section, kafka):
    """Pipelines that read topics need Kafka's address."""
    with pytest.raises(InvalidConfig, match=rf"kafka\.bootstrap\.servers: is missing: `{pipeline}` needs it"):
        load(f"{kafka}{pipeline}: {section}\n", pipeline)


def test_a_schema_registry(load):
    """A registry's properties keep their types, and its password is not shown."""
    registry = "{url: 'http://r', timeout: 5, basic.auth.user.info: 'me:hunter3'}"
    text = _PROJECT.replace("schema: n BIGINT", f"schema: n BIGINT\n  format: avro\n  registry: {registry}")
    file = load(text, SERVERS="x")
    assert file.settings.registry == {"url": "http://r", "timeout": 5, "basic.auth.user.info": "me:hunter3"}
    assert "hunter3" not in repr(file)


def test_tables_of_a_lakehouse(load):
    """An archive is a folder or an Iceberg table, whose catalog's secrets are not shown; `parquet` is an old name."""
    table = "{table: shop.orders, catalog: {uri: 'http://c', token: hunter2}}"
    file = load(f"replay: {{archive: {table}, name: again}}", "replay")
    assert file.settings.archive.catalog == {"uri": "http://c", "token": "hunter2"}
    assert "hunter2" not in repr(file)
    with pytest.raises(InvalidConfig, match=r"replay\.archive\.tabel: unknown field; did you mean table\?"):
        load("replay: {archive: {tabel: a.b}, name: again}", "replay")
    earlier = _PROJECT.partition("  postgres:")[0] + "  parquet: {path: /x}"
    with pytest.warns(DeprecationWarning, match="lakehouse"):
        file = load(earlier, SERVERS="x")
    assert file.settings.lakehouse.quarantine_place == "/x_quarantine"


def test_kafka_need_not_be_named(load):
    """An audit of folders needs no Kafka; a replay needs it only to publish."""
    load("audit: {expected: {archive: /a}, found: {parquet: /b}}", "audit")
    file = load("replay: {archive: /a, name: again}", "replay")
    with pytest.raises(InvalidConfig, match=r"kafka\.bootstrap\.servers: is missing"):
        file.require_kafka()


def test_times_need_a_zone(load):
    """A replay's time without a zone is refused as ambiguous."""
    text = "replay: {archive: /a, name: again, since: 2026-11-21 00:00:00}"
    with pytest.raises(InvalidConfig, match=r"replay\.since: needs a time zone"):
        load(text, "replay")


def test_the_command_fails_in_one_line(tmp_path, capsys):
    """A missing file and a missing section end with code 2 and one line, before Spark is started."""
    assert main(["project", "-f", str(tmp_path / "none.yaml")]) == 2
    (tmp_path / "empty.yaml").write_text("kafka: {}\n")
    assert main(["archive", "-f", str(tmp_path / "empty.yaml")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 2
    assert all(line.startswith("outbox-spark: error: ") for line in lines)
    assert "archive: is missing" in lines[1]


class _Session:
    """A session whose one job runs until it is cancelled."""

    def __init__(self):
        self.cancelled, self.stopped = threading.Event(), False

    def interruptAll(self):  # noqa: N802  Spark's name
        self.cancelled.set()

    def stop(self):
        self.stopped = True


@pytest.fixture
def replay_file(tmp_path):
    """Return the path of a file for a replay."""
    path = tmp_path / "replay.yaml"
    path.write_text("replay: {archive: /a, name: again}\n")
    return str(path)


def test_a_session_that_does_not_start_is_one_line(replay_file, monkeypatch, capsys):
    """A Spark that does not start gives no traceback, and the exit code of work not begun."""

    def fail(*_):
        raise RuntimeError("An error occurred while calling None.x.\n: java.lang.OutOfMemoryError: heap\n\tat y")

    monkeypatch.setattr(run, "open_session", fail)
    assert main(["replay", "-f", replay_file]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("outbox-spark: error: Spark did not start: java.lang.OutOfMemoryError: heap; see")


def test_a_replay_that_publishes_needs_kafka(replay_file, capsys):
    """A replay that publishes without Kafka's address is refused before Spark is started."""
    assert main(["replay", "-f", replay_file, "--publish"]) == 2
    assert "kafka.bootstrap.servers: is missing: `replay` needs it" in capsys.readouterr().err


@pytest.mark.parametrize(("pipeline", "code"), [("replay", 1), ("audit", 2)])
def test_a_signal_ends_what_has_no_batches(tmp_path, monkeypatch, capsys, pipeline, code):
    """The first SIGTERM cancels the jobs of an audit or a replay, and the command ends with one line."""
    session = _Session()

    def work(*_):
        os.kill(os.getpid(), signal.SIGTERM)
        assert session.cancelled.wait(30)
        raise RuntimeError("Job 3 cancelled as part of cancellation of all jobs")

    path = tmp_path / "pipeline.yaml"
    path.write_text("replay: {archive: /a, name: again}\naudit: {expected: {archive: /a}, found: {parquet: /b}}\n")
    monkeypatch.setattr(run, "open_session", lambda *_: session)
    monkeypatch.setitem(run._PIPELINES, pipeline, work)
    assert main([pipeline, "-f", str(path)]) == code
    assert session.stopped
    assert f"outbox-spark: error: {pipeline} was stopped by a signal" in capsys.readouterr().err


def test_deprecated_name_of_validate():
    """The old name of `validate` works, with a warning."""
    with pytest.warns(DeprecationWarning, match="validate"):
        assert config.understand is config.validate
