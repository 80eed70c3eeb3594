"""The command `outbox-spark` as users run it: a process with a file."""

import json
import os
import subprocess
import sys

import pytest

from tests.spark.pipelines.runs import ROOT, produce

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(900)]


@pytest.fixture
def command(tmp_path, kafka_bootstrap, make_topic, database):
    """Return a function that runs `outbox-spark NAME -f FILE ...`; its `topic` and `folder` are those of the file."""
    topic = make_topic(2)
    document = {
        "kafka": {"bootstrap.servers": "${SERVERS}"},
        "spark": {"master": "local[2]", "settings": {"spark.driver.memory": "512m", "spark.sql.shuffle.partitions": 2}},
        "archive": {
            "name": "archive",
            "topics": topic,
            "checkpoint": str(tmp_path / "checkpoint"),
            "path": str(tmp_path / "archive"),
        },
        "audit": {
            "expected": {"archive": str(tmp_path / "archive")},
            "found": {"topics": [topic]},
            "report": str(tmp_path / "audit.json"),
            "html": str(tmp_path / "audit.html"),
        },
        "project": {
            "name": "lines",
            "topics": topic,
            "checkpoint": str(tmp_path / "other"),
            "schema": "n BIGINT",
            "postgres": {"dsn": database, "table": "lines"},
        },
    }
    path = tmp_path / "pipelines.yaml"
    path.write_text(json.dumps(document))  # JSON is YAML

    def run(name, *options):
        return subprocess.run(
            [sys.executable, "-m", "outbox_spark", name, "-f", str(path), *options],
            env={**os.environ, "SERVERS": kafka_bootstrap},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=400,
            check=False,
        )

    run.topic, run.folder = topic, tmp_path
    return run


@pytest.mark.complete
def test_archives_and_audits(command, kafka_bootstrap):
    """`archive --once` ends with 0 and logs its batches; `audit` finds the topic clean, and writes both reports."""
    produce(kafka_bootstrap, command.topic, range(30))
    archived = command("archive", "--once")
    assert archived.returncode == 0, archived.stderr
    assert "batch 0: 30 records" in archived.stderr
    audited = command("audit")
    assert audited.returncode == 0, audited.stderr
    report = json.loads((command.folder / "audit.json").read_text())
    assert report["clean"] is True
    assert report["totals"]["expected"] == report["totals"]["found"] == 30
    assert "Clean" in (command.folder / "audit.html").read_text()


@pytest.mark.complete
def test_the_doctor_looks_at_everything(command):
    """With a file, `doctor` checks Java, packages, topics and databases, runs a job, and ends with 0."""
    examined = command("doctor")
    assert examined.returncode == 0, examined.stdout
    for what in ("Java", "pyspark", "workers' Python", "archive: topics", "project: PostgreSQL", "Spark"):
        assert f"ok    {what}: " in examined.stdout
