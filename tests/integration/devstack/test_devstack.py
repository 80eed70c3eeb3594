"""The devstack with its real services."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, KafkaException, Producer

from devstack.embedded import EmbeddedBroker
from devstack.frame_proxy import Api, Event, Match
from devstack.links import LinkFault, faulty
from devstack.postgres import Postgres
from devstack.processes import command_line, wait_until
from devstack.proxy import TcpProxy
from devstack.stack import DevStack
from tests.kafka_reader import read_topic
from tests.services import as_role

_CHECKOUT = Path(__file__).resolve().parents[3]


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
    """Up leaves both services running for a shell, a second up reuses them, and down ends them and can be repeated."""
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


@pytest.mark.real_broker
@pytest.mark.timeout(200)
@pytest.mark.complete
def test_three_brokers_from_a_shell(directory):
    """Up starts a cluster, status names its processes, and down ends them; up with another size is refused."""
    up = _devstack("up", "--dir", directory, "--brokers", "3")
    assert up.returncode == 0, up.stderr
    bootstrap = up.stdout.split("OUTBOX_KAFKA_BOOTSTRAP=")[1].strip()
    assert bootstrap.count(",") == 2
    pids = DevStack(directory).kafka.pids
    assert len(pids) == 4
    status = _devstack("status", "--dir", directory)
    assert status.returncode == 0
    assert all(str(pid) in status.stdout for pid in pids)
    assert _devstack("up", "--dir", directory, "--brokers", "1").returncode == 2
    assert _devstack("down", "--dir", directory).returncode == 0
    assert not any(command_line(pid) for pid in pids)


@pytest.mark.complete
def test_up_after_a_crash_starts_again_with_the_data(directory):
    """Traces of a crash (pid files, recycled pids) do not keep up from starting, and rows survive."""
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


@pytest.mark.complete
def test_without_network_the_embedded_broker_stands_in_and_says_why(directory, tmp_path):
    """Without the jars up starts the embedded broker, and says in one line which broker it took, and why."""
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
    """In a directory closed to others root's Postgres still starts, and the directory stays closed."""
    directory.chmod(0o700)
    postgres = Postgres(directory / "postgres")
    try:
        postgres.start()
        assert postgres.version
        assert directory.stat().st_mode & 0o777 == 0o700
    finally:
        postgres.stop()
        postgres.remove()


_OTHERS = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))


@pytest.mark.skipif(not _OTHERS, reason="there is no other PostgreSQL in /usr/lib/postgresql")
def test_another_postgres(directory, monkeypatch):
    """The programs that the environment names are started, and serve the tests."""
    monkeypatch.setenv("OUTBOX_DEVSTACK_POSTGRES", str(_OTHERS[0].parent))
    postgres = Postgres(directory / "postgres", small=True)
    try:
        postgres.start()
        assert postgres.version.startswith(_OTHERS[0].parent.parent.name)
        with psycopg.connect(postgres.create_database("shop")) as connection:
            connection.execute("CREATE TABLE t (n int)")
        postgres.drop_database("shop")
    finally:
        postgres.stop()
        postgres.remove()


@pytest.mark.complete
def test_the_superuser_needs_a_password(private_stack):
    """A user of this machine cannot connect as the superuser, who could run programs, without the password."""
    url = private_stack.postgres.dsn
    with psycopg.connect(url) as connection:
        connection.execute("CREATE ROLE guest LOGIN")
    for wrong in (as_role(url, "postgres"), url.replace("postgres:", "postgres:x")):
        with pytest.raises(psycopg.OperationalError, match="password"):
            psycopg.connect(wrong)
    with psycopg.connect(as_role(url, "guest")) as connection:
        assert connection.execute("SELECT current_user").fetchone() == ("guest",)
    kept = private_stack.directory / "postgres" / "password"
    if kept.exists():  # else it is where Postgres's account can reach
        assert kept.stat().st_mode & 0o777 == 0o600


@pytest.mark.skipif(os.geteuid() != 0, reason="only root drops to another account")
def test_root_is_not_led_by_links(directory):
    """Postgres's account cannot make root write to a file of its choice, nor give that file away."""
    postgres = Postgres(directory / "postgres")
    (directory / "postgres").mkdir()
    target = directory / "of-root"
    target.touch(mode=0o600)
    (directory / "postgres" / "postgres.log").symlink_to(target)
    with pytest.raises(OSError, match="symbolic links"):
        postgres.start()
    assert target.stat().st_uid == 0
    assert target.read_bytes() == b""


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


@pytest.mark.parametrize("drop", [False, True], ids=["held", "lost"])
def test_requests_pass_while_answers_do_not(postgres, database, drop):
    """A statement takes effect whose answer does not come; it comes late, or its connection breaks."""
    with TcpProxy("127.0.0.1", postgres.port) as proxy, ThreadPoolExecutor() as pool:
        url = database.replace(f":{postgres.port}/", f":{proxy.port}/")
        with psycopg.connect(url, autocommit=True) as connection, psycopg.connect(database, autocommit=True) as beside:
            with faulty([proxy], LinkFault.ANSWERS_LOST, drop=drop):
                made = pool.submit(connection.execute, "CREATE TABLE made ()")
                assert wait_until(lambda: _exists(beside, "made"), timeout=20)
                assert not made.done()
            if drop:
                with pytest.raises(psycopg.OperationalError):
                    made.result(20)
            else:
                assert made.result(20)


def test_answers_pass_while_requests_do_not(postgres, database):
    """What a server says by itself arrives, while a statement does not reach it before the end of the fault."""
    with TcpProxy("127.0.0.1", postgres.port) as proxy, ThreadPoolExecutor() as pool:
        url = database.replace(f":{postgres.port}/", f":{proxy.port}/")
        with (
            psycopg.connect(url, autocommit=True) as listener,
            psycopg.connect(url, autocommit=True) as connection,
            psycopg.connect(database, autocommit=True) as beside,
        ):
            listener.execute("LISTEN news")
            with faulty([proxy], LinkFault.REQUESTS_LOST):
                made = pool.submit(connection.execute, "CREATE TABLE made ()")
                beside.execute("NOTIFY news")
                assert len(list(listener.notifies(timeout=20, stop_after=1))) == 1
                assert not _exists(beside, "made")
            assert made.result(20)
            assert _exists(beside, "made")


def test_a_slow_link_delays_what_passes(postgres, database):
    """Each statement and its answer wait for as long as the link is slow, and arrive."""
    with TcpProxy("127.0.0.1", postgres.port) as proxy:
        url = database.replace(f":{postgres.port}/", f":{proxy.port}/")
        with psycopg.connect(url, autocommit=True) as connection:
            began = time.monotonic()
            with faulty([proxy], LinkFault.SLOW, delay=0.4):
                assert connection.execute("SELECT 1").fetchone() == (1,)
            assert time.monotonic() - began >= 0.8
            connection.execute("SELECT 1")


def _exists(connection, table):
    return connection.execute("SELECT to_regclass(%s) IS NOT NULL", [table]).fetchone()[0]


@pytest.mark.real_broker
@pytest.mark.complete
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
    """A client that bootstraps through the proxy cannot bypass a cut, others can; after restore it goes on."""
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


@pytest.fixture
def frames(kafka):
    """A proxy before the shared broker that picks out requests."""
    with kafka.frame_proxied(2) as proxy:
        yield proxy


@pytest.fixture
def transactional(frames, topic_name):
    """A producer behind that proxy, and its transactional.id."""
    name = topic_name("late")
    producer = Producer({"bootstrap.servers": frames.bootstrap, "transactional.id": name})
    producer.init_transactions(20)
    return producer, name


def _in_transaction(producer, topic, *values):
    producer.begin_transaction()
    for value in values:
        producer.produce(topic, value)
    assert producer.flush(10) == 0


@pytest.mark.real_broker
@pytest.mark.parametrize("commits", [True, False], ids=["commit", "abort"])
def test_a_late_end_of_a_transaction_ends_a_later_one(kafka, frames, transactional, make_topic, commits):
    """The client silently repeats an EndTxn whose connection was reset; the first copy ends a later transaction.

    This is the fault against which exactly-once delivery has to defend itself: it shows that the proxy can do it.
    """
    topic, (producer, name) = make_topic(1), transactional
    trap = frames.hold(Match(Api.END_TXN, commits=commits, transactional_id=name))
    _in_transaction(producer, topic, b"1")
    producer.commit_transaction(20) if commits else producer.abort_transaction(20)
    assert trap.wait_until_held(0), "it was the first EndTxn that was held"
    assert frames.seen(Api.END_TXN) == 2
    assert trap.request.commits is commits

    _in_transaction(producer, topic, b"2")
    trap.deliver()
    assert trap.wait_until_answered(10)
    assert trap.error_code == 0
    assert [entry.event for entry in frames.log] == [Event.HELD, Event.DELIVERED, Event.ANSWERED]
    with pytest.raises(KafkaException):  # the client wanted the opposite
        producer.abort_transaction(20) if commits else producer.commit_transaction(20)
    committed = [message.value for message in read_topic(kafka.bootstrap, topic)]
    assert committed == ([b"1", b"2"] if commits else [])


@pytest.mark.real_broker
@pytest.mark.parametrize(
    "api", [Api.PRODUCE, Api.ADD_PARTITIONS_TO_TXN, Api.INIT_PRODUCER_ID], ids=lambda api: api.name.lower()
)
def test_each_request_of_a_transaction_can_be_late(kafka, frames, topic_name, make_topic, api):
    """A held request is repeated by its client; its first copy, delivered in the end, does no harm here."""
    topic, name = make_topic(1), topic_name("late")
    trap = frames.hold(Match(api, transactional_id=name))
    producer = Producer({"bootstrap.servers": frames.bootstrap, "transactional.id": name})
    producer.init_transactions(20)
    _in_transaction(producer, topic, b"1")
    producer.commit_transaction(20)
    assert trap.wait_until_held(0)
    assert trap.request.transactional_id == name
    trap.deliver()
    assert trap.wait_until_answered(10)
    assert [message.value for message in read_topic(kafka.bootstrap, topic)] == [b"1"]


@pytest.mark.real_broker
def test_requests_can_be_delayed_held_in_place_and_doubled(kafka, frames, make_topic):
    """Requests can be delayed, held without a reset, and delivered twice."""
    topic = make_topic(1)
    frames.delay(Match(Api.PRODUCE), 0.5, times=1)
    producer = Producer({"bootstrap.servers": frames.bootstrap, "linger.ms": 0})
    began = time.monotonic()
    producer.produce(topic, b"delayed")
    assert producer.flush(10) == 0
    assert time.monotonic() - began > 0.5

    held = frames.hold(Match(Api.PRODUCE), reset=False)
    producer.produce(topic, b"held")
    assert producer.flush(0.5) == 1
    held.deliver()
    assert producer.flush(10) == 0

    copied = frames.duplicate(Match(Api.PRODUCE))
    producer.produce(topic, b"copied")
    assert producer.flush(10) == 0
    copied.deliver()
    assert copied.wait_until_answered(10)
    assert [m.value for m in read_topic(kafka.bootstrap, topic)] == [b"delayed", b"held", b"copied", b"copied"]


@pytest.mark.real_broker
def test_requests_can_be_watched_and_dropped(kafka, frames, make_topic):
    """A watched request arrives; a dropped one does not, but the client's repeat of it does."""
    topic = make_topic(1)
    producer = Producer({"bootstrap.servers": frames.bootstrap, "linger.ms": 0})
    watched = frames.watch(Match(Api.PRODUCE))
    producer.produce(topic, b"watched")
    assert producer.flush(10) == 0
    assert watched.wait_until_delivered(1)

    dropped = frames.hold(Match(Api.PRODUCE))
    producer.produce(topic, b"dropped once")
    assert producer.flush(10) == 0
    dropped.drop()
    assert not dropped.wait_until_delivered(5)
    assert dropped.is_lost
    assert [m.value for m in read_topic(kafka.bootstrap, topic)] == [b"watched", b"dropped once"]


@pytest.mark.real_broker
def test_a_held_request_is_lost_with_its_broker_or_its_proxy(kafka, make_topic):
    """Stopping the proxy drops held requests and leaves no thread; a rule that caught no request can be removed."""
    with kafka.frame_proxied(2) as proxy:
        trap = proxy.hold(Match(Api.PRODUCE, nth=2))
        spare = proxy.hold(Match(Api.PRODUCE, where=lambda request: request.client_id == "nobody"))
        producer = Producer({"bootstrap.servers": proxy.bootstrap, "linger.ms": 0})
        topic = make_topic(1)
        for value in (b"1", b"2"):
            producer.produce(topic, value)
            assert producer.flush(10) == 0
        assert trap.wait_until_held(1)
        assert proxy.forget(spare)
        assert not proxy.forget(trap)
    trap.deliver()
    assert trap.is_lost
    assert not [thread.name for thread in threading.enumerate() if thread.name == f"proxy-{proxy.port}"]


@pytest.mark.real_broker
def test_reader_sees_only_what_its_isolation_shows(kafka_bootstrap, make_topic, topic_name):
    """read_topic hides aborted records by default, and ends although transaction markers follow the last record."""
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
