"""The devstack with its real services."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer

from devstack.embedded import EmbeddedBroker
from devstack.postgres import Postgres
from devstack.processes import command_line
from devstack.proxy import TcpProxy
from devstack.stack import DevStack
from tests.kafka_reader import read_topic

_CHECKOUT = Path(__file__).resolve().parents[2]


def _devstack(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "devstack", *arguments],
        capture_output=True,
        text=True,
        check=False,
        cwd=_CHECKOUT,
        env={**os.environ, **environment},
        timeout=120,
    )


def _produce(bootstrap, topic, *values):
    producer = Producer({"bootstrap.servers": bootstrap})
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(15) == 0


def _marked_processes(directory):
    pids = [int(path.name) for path in Path("/proc").iterdir() if path.name.isdigit()]
    return [line for line in map(command_line, pids) if str(directory) in line]


@pytest.fixture
def directory():
    """A directory for a stack, stopped at the end whatever the test did; Postgres's account can reach it."""
    directory = Path(tempfile.mkdtemp(prefix="kafka-outbox-test-"))
    directory.chmod(0o711)
    yield directory
    DevStack(directory).stop()
    shutil.rmtree(directory)


def test_up_prints_two_lines_and_down_leaves_nothing_running(directory):
    """Up leaves both services running for a shell to use, a second up reuses them, down ends them; down repeats."""
    first = _devstack("up", "--dir", directory, "--embedded")
    assert first.returncode == 0, first.stderr
    found = re.fullmatch(r"OUTBOX_POSTGRES_DSN=(\S+)\nOUTBOX_KAFKA_BOOTSTRAP=(\S+)\n", first.stdout)
    assert found, first.stdout
    with psycopg.connect(found[1]) as connection:
        assert connection.execute("SHOW fsync").fetchone() == ("on",)
    _produce(found[2], "t", b"x")
    pids = {DevStack(directory).postgres.pid, DevStack(directory).kafka.pid}

    assert _devstack("up", "--dir", directory).stdout == first.stdout
    assert _devstack("status", "--dir", directory).returncode == 0
    for _ in range(2):
        assert _devstack("down", "--dir", directory).returncode == 0
    assert not any(command_line(pid) for pid in pids)
    assert not _marked_processes(directory)
    assert _devstack("status", "--dir", directory).returncode == 3


def test_up_after_a_crash_starts_again_with_the_data(directory):
    """What a killed machine leaves behind (pid files, recycled pids) does not stand in the way, and rows survive."""
    stack = DevStack(directory, embedded=True)
    stack.start()
    with psycopg.connect(stack.postgres.dsn) as connection:
        connection.execute("CREATE TABLE kept AS SELECT 1 AS n")
    pid_file = Path(command_line(stack.postgres.pid).split(" -D ")[1].split()[0]) / "postmaster.pid"
    left = pid_file.read_text()
    stack.postgres.kill_immediate()
    stack.kafka.kill()
    pid_file.write_text(left.replace(left.split()[0], str(os.getpid()), 1))

    assert _devstack("up", "--dir", directory, "--embedded").returncode == 0
    with psycopg.connect(DevStack(directory).postgres.dsn) as connection:
        assert connection.execute("SELECT n FROM kept").fetchone() == (1,)


def test_without_network_the_embedded_broker_stands_in_and_says_why(directory, tmp_path):
    """Jars that cannot be downloaded cost no demo: up says in one line which broker it took, and why."""
    refused = "-Dhttps.proxyHost=127.0.0.1 -Dhttps.proxyPort=9 -Dhttp.proxyHost=127.0.0.1 -Dhttp.proxyPort=9"
    began = time.monotonic()
    up = _devstack(
        *("up", "--dir", directory),
        OUTBOX_DEVSTACK_CACHE=str(tmp_path / "cache"),
        OUTBOX_DEVSTACK_EMBEDDED="",
        PATH="/usr/bin:/bin",
        HOME=str(tmp_path),
        MAVEN_OPTS=f"{refused} -Dmaven.repo.local={tmp_path}/repository",
        JAVA_TOOL_OPTIONS=refused,
        https_proxy="http://127.0.0.1:9",
        http_proxy="http://127.0.0.1:9",
    )
    assert up.returncode == 0, up.stderr
    assert DevStack(directory).kafka.is_embedded
    assert re.search(r"^Kafka: embedded broker .*because: cannot download Kafka's jars: .*$", up.stderr, re.MULTILINE)
    assert time.monotonic() - began < 60


def test_a_service_that_cannot_start_shows_its_log(directory):
    """Up with an unusable Postgres ends with code 2 and the reason from the log."""
    (directory / "postgres" / "data").mkdir(parents=True)
    (directory / "postgres" / "data" / "PG_VERSION").write_text("9\n")
    up = _devstack("up", "--dir", directory, "--embedded")
    assert (up.returncode, up.stdout) == (2, "")
    assert "pg_ctl failed" in up.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another account")
def test_root_starts_postgres_where_its_account_cannot_reach(directory):
    """In a directory closed to others, root's Postgres starts all the same, and the directory stays closed."""
    directory.chmod(0o700)
    postgres = Postgres(directory / "postgres")
    try:
        postgres.start()
        assert postgres.version
        assert directory.stat().st_mode & 0o777 == 0o700
    finally:
        postgres.stop()
        postgres.remove()


def test_postgres_keeps_committed_rows_through_an_immediate_restart(private_stack, private_database):
    """An immediate stop is a crash: committed rows are there afterwards, open transactions are not."""
    with psycopg.connect(private_database) as connection:
        connection.execute("CREATE TABLE t (n int)")
        connection.execute("INSERT INTO t VALUES (1)")
        connection.commit()
        connection.execute("INSERT INTO t VALUES (2)")
        private_stack.postgres.restart("immediate")
        with pytest.raises(psycopg.OperationalError):
            connection.execute("SELECT 1")
    with psycopg.connect(private_database) as connection:
        assert connection.execute("SELECT n FROM t").fetchall() == [(1,)]


def test_postgres_can_be_cut_off(postgres, database):
    """Through a proxy, a cut makes Postgres unreachable without closing the connection."""
    with TcpProxy("127.0.0.1", postgres.port) as proxy:
        url = database.replace(f":{postgres.port}/", f":{proxy.port}/")
        with psycopg.connect(url, connect_timeout=2, autocommit=True) as connection:
            proxy.cut()
            with pytest.raises(psycopg.OperationalError):
                psycopg.connect(url, connect_timeout=2)
            proxy.restore()
            assert connection.execute("SELECT 1").fetchone() == (1,)


@pytest.mark.real_broker
def test_broker_keeps_records_through_kill_and_restart(private_stack, topic_name):
    """After SIGKILL the broker comes back on its port with the records it had acknowledged."""
    kafka, topic = private_stack.kafka, topic_name()
    bootstrap, pid = kafka.bootstrap, kafka.pid
    _produce(bootstrap, topic, b"1", b"2")
    kafka.kill()
    assert not kafka.is_running
    kafka.start()
    assert kafka.bootstrap == bootstrap
    assert kafka.pid != pid
    assert sorted(message.value for message in read_topic(bootstrap, topic)) == [b"1", b"2"]


@pytest.mark.real_broker
def test_clients_stay_behind_the_proxy(kafka, make_topic):
    """A client that bootstraps through the proxy cannot get round a cut, while others can; restore lets it go on."""
    topic = make_topic(1)
    with kafka.proxied(1) as proxy:
        behind = Producer({"bootstrap.servers": proxy.bootstrap})
        behind.produce(topic, b"before")
        assert behind.flush(10) == 0
        proxy.cut()
        behind.produce(topic, b"during")
        assert behind.flush(1) == 1
        _produce(kafka.bootstrap, topic, b"around")
        proxy.restore()
        assert behind.flush(10) == 0
    assert [m.value for m in read_topic(kafka.bootstrap, topic)] == [b"before", b"around", b"during"]


@pytest.mark.real_broker
def test_reader_sees_only_what_its_isolation_shows(kafka_bootstrap, make_topic, topic_name):
    """read_topic hides aborted records unless asked, and ends although transaction markers follow the last record."""
    topic = make_topic(1)
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": topic_name()})
    producer.init_transactions(15)
    for value in (b"aborted", b"committed"):
        producer.begin_transaction()
        producer.produce(topic, value)
        producer.flush(10)
        if value == b"aborted":
            producer.abort_transaction(10)
        else:
            producer.commit_transaction(10)
    assert [m.value for m in read_topic(kafka_bootstrap, topic)] == [b"committed"]
    uncommitted = read_topic(kafka_bootstrap, topic, isolation="read_uncommitted")
    assert [m.value for m in uncommitted] == [b"aborted", b"committed"]


def test_embedded_broker_produces_and_forms_a_group(tmp_path):
    """The embedded broker takes idempotent records with headers and hands them to a consumer group."""
    broker = EmbeddedBroker(tmp_path)
    broker.start()
    try:
        producer = Producer({"bootstrap.servers": broker.bootstrap, "enable.idempotence": True})
        assert len(producer.list_topics("t", timeout=10).topics["t"].partitions) == 4
        producer.produce("t", b"value", b"key", headers=[("a", b"b")])
        assert producer.flush(10) == 0
        consumer = Consumer({"bootstrap.servers": broker.bootstrap, "group.id": "g", "auto.offset.reset": "earliest"})
        consumer.subscribe(["t"])
        message = consumer.poll(20)
        consumer.close()
        assert (message.key(), message.value(), message.headers()) == (b"key", b"value", [("a", b"b")])
    finally:
        broker.stop()
    with pytest.raises(KafkaException):
        producer.list_topics(timeout=1)
