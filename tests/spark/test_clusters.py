"""Pipelines where driver and executors share neither memory nor packages: standalone, and Spark Connect."""

import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import psycopg
import pytest

from devstack.spark import ConnectServer, SparkCluster, python_of_workers
from outbox_core.record import OutboxRecord
from outbox_spark.runtime.java import find_java
from tests.docs.blocks import BLOCKS
from tests.harvesting import Scene, identity_of
from tests.spark.relay.outcome import assert_each_once_in_order

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(2400)]

PAGE = "docs/spark-cluster.md"
COMMANDS = [
    line
    for block in BLOCKS
    if block.page == PAGE and block.language == "bash" and block.mark.startswith("run by")
    for line in block.text.splitlines()
]
_SECRET_OF_KAFKA = "secret-of-kafka-7f3a"
_SECONDS = 1200
_RECORDS = 300


class Folder:
    """A folder with `pipelines.yaml`, in which commands run as their users run them."""

    def __init__(self, path, text, **environ):
        self.path = path
        (path / "pipelines.yaml").write_text(text)
        self.environ = {**os.environ, "SPARK_LOCAL_IP": "127.0.0.1", "SPARK_CONF_DIR": str(path), **environ}
        (path / "events").mkdir()
        defaults = {
            "eventLog.enabled": "true",
            "eventLog.compress": "false",
            "eventLog.dir": f"file://{path}/events",
            "driver.memory": "512m",
        }
        (path / "spark-defaults.conf").write_text("".join(f"spark.{name} {defaults[name]}\n" for name in defaults))
        self.outputs = []

    def run(self, command):
        program, *arguments = shlex.split(command)
        assert program == "outbox-spark"
        ran = subprocess.run(
            [sys.executable, "-m", "outbox_spark", *arguments],
            cwd=self.path,
            env=self.environ,
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        self.outputs.append(ran.stdout + ran.stderr)
        return ran


@pytest.fixture
def scene(database, kafka_bootstrap):
    """Yield an outbox with records that are JSON objects."""
    made = Scene(database, kafka_bootstrap)
    yield made
    made.close()


@pytest.fixture(scope="module")
def standalone(tmp_path_factory):
    """Return a master and two workers."""
    with SparkCluster(tmp_path_factory.mktemp("standalone"), find_java().home_for_spark()) as made:
        yield made.start(workers=2)


def relay_file(scene, master, **settings):
    """Return a file for a relay of a scene's outbox."""
    harvest = {"baseKafkaConfig": {"bootstrap.servers": scene.bootstrap}, "dataSource": scene.database}
    spark = {"master": master, "settings": {"spark.executor.memory": "512m", **settings}}
    return json.dumps({"spark": spark, "harvest": harvest, "relay": {"shards": 2}})  # JSON is YAML


def test_a_relay_on_another_machine(scene, make_topic, tmp_path):
    """A relay whose tasks run in a worker's executor publishes all, once, in order."""
    topic = make_topic()
    scene.fill(topic, 200, keys=9)
    (tmp_path / "cluster").mkdir()
    with SparkCluster(tmp_path / "cluster", find_java().home_for_spark(), cores=2) as cluster:
        cluster.start(workers=1)
        ran = Folder(tmp_path, relay_file(scene, cluster.url)).run("outbox-spark relay -f pipelines.yaml --once")
    assert ran.returncode == 0, ran.stderr
    assert_each_once_in_order(scene, topic, 200)


@pytest.fixture
def page(standalone, scene, make_topic, tmp_path):
    """Return the page's file in a folder, with this test's addresses; the topic is `page.topic`."""
    topic = make_topic(2)
    make_topic(2, name=f"{topic}.repaired")
    (text,) = (block.text for block in BLOCKS if block.page == PAGE and block.language == "yaml")
    parameters = psycopg.conninfo.conninfo_to_dict(scene.database)
    secrets = {"kafka": _SECRET_OF_KAFKA, "postgres": parameters.pop("password")}
    dsn = psycopg.conninfo.make_conninfo(**parameters)
    replaced = {
        "kafka.internal:9092": scene.bootstrap,
        "spark://spark-master:7077": standalone.url,
        "/usr/bin/python3.11": python_of_workers(),
        "s3a://lake": f"file://{tmp_path}/shared",
        "host=db.internal dbname=shop user=app": dsn,
        "shop.orders": topic,
        "/run/secrets": str(tmp_path / "secrets"),
    }
    for shown, ours in replaced.items():
        assert shown in text
        text = text.replace(shown, ours)
    (tmp_path / "secrets").mkdir()
    for name, secret in secrets.items():
        (tmp_path / "secrets" / name).write_text(f"{secret}\n")
    made = Folder(tmp_path, text)
    made.topic = topic
    made.secrets = tuple(secrets.values())
    return made


@pytest.mark.complete
def test_the_page_literally(page, standalone, scene):
    """Every pipeline of docs/spark-cluster.md runs by the page's commands, and no file of Spark's has a secret."""
    scene.stash(*(OutboxRecord(topic=page.topic, key=f"k{n % 7}", value={"n": n}) for n in range(_RECORDS)))
    said = {}
    for command in COMMANDS:
        ran = page.run(command)
        said[command.split()[1]] = ran.stdout + ran.stderr
        assert ran.returncode == 0, f"{command}: {said[command.split()[1]]}"
        for unpacked in standalone.directory.glob("*/work/*/*/packages"):  # 280 MB for each executor of each command
            shutil.rmtree(unpacked, ignore_errors=True)  # an executor may still be ending
            unpacked.with_name("packages.tar.gz").unlink(missing_ok=True)
    assert (page.path / "packages.tar.gz").stat().st_size < 150e6
    assert "ok    executors: " in said["doctor"]
    assert "(2 executors on " in said["doctor"]
    assert sorted(map(identity_of, scene.read(page.topic))) == list(range(1, _RECORDS + 1))
    assert f"batch 0: {_RECORDS} records" in said["archive"]
    assert scene.execute("SELECT count(*) AS records, count(DISTINCT n) AS once, sum(n) AS total FROM orders") == [
        (_RECORDS, _RECORDS, sum(range(_RECORDS)))
    ]
    assert f"published {_RECORDS} records" in said["replay"]
    assert len(scene.read(f"{page.topic}.repaired")) == _RECORDS
    assert f"clean: {_RECORDS} expected; 0 lost, 0 repeated, 0 reordered, 0 unexpected" in said["audit"]
    events = [file.read_text() for file in (page.path / "events").rglob("*") if file.is_file()]
    assert any("/shared/orders" in text for text in events), "the plans are not where they are looked for"
    logs = [file.read_text(errors="replace") for file in standalone.directory.rglob("*") if file.is_file()]
    for secret in page.secrets:
        assert not any(secret in text for text in (*events, *logs, *page.outputs))


@pytest.mark.complete
def test_workers_without_the_packages(page):
    """The doctor says that executors have no packages, and how to mend it."""
    file = page.path / "pipelines.yaml"
    file.write_text("".join(line for line in file.read_text().splitlines(True) if "packages" not in line))
    ran = page.run("outbox-spark doctor -f pipelines.yaml")
    assert ran.returncode == 1
    assert "FAIL  executors: their Python does not start with this package: install or pack it" in ran.stdout


@pytest.fixture(scope="module")
def connect(tmp_path_factory):
    """Return a server of Spark Connect."""
    environ = {"PYSPARK_PYTHON": sys.executable}
    made = ConnectServer(tmp_path_factory.mktemp("server"), find_java().home_for_spark(), "local[2]", environ)
    with made:
        yield made.start()


@pytest.mark.complete
def test_spark_connect(connect, scene, make_topic, tmp_path):
    """A relay, an audit and the formats work by Spark Connect; what does not says so, and why."""
    topic = make_topic(2)
    scene.fill(topic, 100, keys=9)
    scene.execute("CREATE TABLE stashed AS SELECT * FROM outbox")
    document = json.loads(relay_file(scene, connect.url)) | {
        "kafka": {"bootstrap.servers": scene.bootstrap},
        "audit": {
            "expected": {"table": {"dsn": scene.database, "table": "stashed", "outbox_name": _identity_of(scene)}},
            "found": {"topics": [topic]},
        },
        "archive": {"name": "a", "topics": topic, "checkpoint": f"{tmp_path}/c", "path": f"{tmp_path}/archive"},
    }
    folder = Folder(tmp_path, json.dumps(document))
    relayed = folder.run("outbox-spark relay -f pipelines.yaml --once")
    assert relayed.returncode == 0, relayed.stderr
    assert_each_once_in_order(scene, topic, 100)
    audited = folder.run("outbox-spark audit -f pipelines.yaml")
    assert audited.returncode == 0, audited.stderr
    refused = folder.run("outbox-spark archive -f pipelines.yaml --once")
    assert refused.returncode == 2
    assert "clients of Spark Connect do not reach Spark's file systems" in refused.stderr
    scene.fill(topic, 10)
    script = Path(__file__).with_name("connect_client.py")
    ran = subprocess.run(
        [sys.executable, script, connect.url, scene.bootstrap, topic, scene.database],
        capture_output=True, text=True, timeout=_SECONDS, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert json.loads(ran.stdout) == {"read": 100, "streamed": 100, "stashed": 10}


def _identity_of(scene):
    ((database, schema),) = scene.execute("SELECT current_database(), current_schema()")
    return f"{database}.{schema}.outbox"
