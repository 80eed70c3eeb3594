"""Wake-ups of an idle harvester: by notices of the database, and by commits in its own process."""

import logging
import os
import threading
import time
from pathlib import Path

import psycopg
import pytest
from psycopg.conninfo import make_conninfo
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import outbox_sqlalchemy
from outbox_core import commit_signal
from outbox_core.errors import StoreUnavailable
from outbox_core.harvest import polling as pace
from outbox_core.metrics import HarvestMetrics
from outbox_core.record import OutboxRecord
from outbox_core.schema import TableName, drop_notify_sql, notify_sql
from outbox_core.stores.postgres import notify as notices
from outbox_core.stores.postgres.notify import CommitNotices, NoNotices
from tests.harvesting import GENEROUS_SECONDS, Scene, wait_until

MODES = ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)]
_LISTENERS = """
SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND query LIKE 'SELECT c.oid::bigint%'
   OR datname = current_database() AND query LIKE 'LISTEN%'
"""


@pytest.fixture
def told_only(monkeypatch):
    """Limits with which, from its second pause on, a harvester waits for an hour, unless a signal wakes it."""
    monkeypatch.setattr(pace, "_SHARE_OF_SILENCE", 1e9)
    return {"mark_backoff": "1h"}


def add_trigger(scene):
    """Add the trigger that sends a notice for inserts."""
    scene.execute(notify_sql(scene.table))


def listening(harvester):
    """Wait until a harvester relies on notices, and has no signal left to serve."""
    wait_until(lambda: harvester._commits.is_reliable and not harvester._commits, "notices come")


@pytest.mark.parametrize("delivery", MODES)
def test_notice_ends_the_wait(scene, make_topic, told_only, delivery):
    """With NOTIFY a record is published although the next query would be an hour away."""
    add_trigger(scene)
    topic = make_topic()
    with scene.running(config={"notify": True, "delivery": delivery}, limits=told_only) as harvester:
        listening(harvester)
        for count in range(3):
            scene.stash(OutboxRecord(topic=topic, key=str(count), value=b"x"))
            wait_until(lambda: scene.count() == 0, "the notice is heard")
    assert len(scene.read(topic)) == 3


def test_lost_connection_is_replaced(scene, make_topic, told_only, monkeypatch):
    """After the end of its session the listener connects again, and records written meanwhile are published."""
    monkeypatch.setattr("outbox_core.upkeep.wakeup._FIRST_RETRY_SECONDS", 0.05)
    add_trigger(scene)
    topic = make_topic()
    with scene.running(config={"notify": True}, limits=told_only) as harvester:
        for count in range(3):
            listening(harvester)
            pid = wait_until(lambda: scene.execute(_LISTENERS), "somebody listens")[0].pid
            scene.execute("SELECT pg_terminate_backend(%s)", [pid])
            scene.stash(OutboxRecord(topic=topic, key=str(count), value=b"x"))
            wait_until(lambda: scene.count() == 0, "the record is found")
            wait_until(lambda pid=pid: [row for row in scene.execute(_LISTENERS) if row.pid != pid], "a new session")
    assert len(scene.read(topic)) == 3


@pytest.mark.real_broker
@pytest.mark.complete
def test_restarted_database(private_stack, private_database, make_topic, monkeypatch):
    """A restart of the database loses no record, and notices arrive again afterwards."""
    monkeypatch.setattr("outbox_core.upkeep.wakeup._FIRST_RETRY_SECONDS", 0.05)
    scene = Scene(private_database, private_stack.kafka.bootstrap)
    add_trigger(scene)
    topic = make_topic(bootstrap=private_stack.kafka.bootstrap)
    try:
        with scene.running(config={"notify": True}, limits={"io_error_backoff": "50ms"}) as harvester:
            listening(harvester)
            private_stack.postgres.restart("immediate")
            scene.stash(OutboxRecord(topic=topic, key="k", value=b"x"))
            wait_until(lambda: scene.count() == 0, "the record is found")
            listening(harvester)
        assert scene.read(topic)
    finally:
        scene.close()


def test_without_the_trigger(scene, make_topic, caplog):
    """A missing trigger is logged with the remedy, and harvesting goes on by polling."""
    topic = make_topic()
    with caplog.at_level(logging.WARNING), scene.running(config={"notify": True}) as harvester:
        remedy = "outbox schema --table public.outbox --notify"
        wait_until(lambda: remedy in caplog.text, "the missing trigger is named")
        scene.stash(OutboxRecord(topic=topic, key="k", value=b"x"))
        wait_until(lambda: scene.count() == 0, "the record is found")
        assert not harvester._commits.is_reliable
    assert scene.read(topic)


def test_trigger_that_is_dropped_later(scene):
    """A check follows a table that was made anew, and raises NoNotices once the trigger is dropped."""
    add_trigger(scene)
    heard = CommitNotices(scene.database, "outbox", application_name="test")
    heard.open()
    scene.execute("DROP TABLE outbox")
    scene.execute("CREATE TABLE outbox (id int)")
    add_trigger(scene)
    heard.check()
    while heard.wait(0):
        pass
    scene.execute("INSERT INTO outbox VALUES (1)")
    assert heard.wait(GENEROUS_SECONDS)
    scene.execute(drop_notify_sql(scene.table))
    with pytest.raises(NoNotices, match="no trigger"):
        heard.check()
    heard.dispose()


def test_notices_that_do_not_come_through(scene, monkeypatch):
    """A LISTEN without notices, as behind a transaction pooler, is detected and refused."""
    add_trigger(scene)
    real, connected = notices.connect_to_primary, []

    def connect(data_source, *arguments, **limits):
        connected.append(data_source)
        elsewhere = make_conninfo(data_source, dbname="postgres")  # where no notice of this database arrives
        return real(data_source if len(connected) == 1 else elsewhere, *arguments, **limits)

    monkeypatch.setattr(notices, "connect_to_primary", connect)
    monkeypatch.setattr(notices, "_PROBE_SECONDS", 0.2)
    heard = CommitNotices(scene.database, "outbox", application_name="test")
    with pytest.raises(NoNotices, match="pooler"):
        heard.open()
    heard.dispose()


def test_database_away(closed_port):
    """A database that cannot be reached is StoreUnavailable, as for any other statement."""
    heard = CommitNotices(f"postgresql://postgres@127.0.0.1:{closed_port}/x", "outbox", application_name="test")
    with pytest.raises(StoreUnavailable):
        heard.open()
    heard.dispose()


@pytest.fixture
def closed_port():
    """A port on which no program listens."""
    from devstack.ports import free_ports

    return free_ports(1)[0]


def test_one_notice_for_each_transaction(scene):
    """A transaction of many inserts sends one notice, at its commit; a rolled-back one sends none."""
    add_trigger(scene)
    oid = scene.execute("SELECT 'outbox'::regclass::oid::bigint AS oid")[0].oid
    with psycopg.connect(scene.database, autocommit=True) as ear, scene.connect() as writer:
        ear.execute(f"LISTEN kafka_outbox_{oid}")
        for _ in range(3):
            scene.stasher.stash_many(writer, [OutboxRecord(topic="t", key="k", value=b"x")] * 5)
        writer.rollback()
        scene.stasher.stash_many(writer, [OutboxRecord(topic="t", key="k", value=b"x")] * 5)
        scene.stasher.stash_many(writer, [OutboxRecord(topic="t", key="k", value=b"x")] * 5)
        writer.commit()
        assert len(list(ear.notifies(timeout=GENEROUS_SECONDS, stop_after=1))) == 1
        assert not list(ear.notifies(timeout=0.2))


def test_trigger_under_awkward_names(scene):
    """The trigger works for tables of any name in any schema, and can be made twice and dropped twice."""
    for name in ("outbox", "other.outbox", '"Odd: Näme"."out""box % {}"', "x" * 63):
        table = TableName.parse(name)
        if table.schema:
            scene.execute(f"CREATE SCHEMA {TableName(table.schema).quoted}")
        if name != "outbox":
            scene.execute(f"CREATE TABLE {table.quoted} (id int)")
        scene.execute(notify_sql(table))
        scene.execute(notify_sql(table))
        if name != "outbox":
            scene.execute(f"INSERT INTO {table.quoted} VALUES (1)")
        scene.execute(drop_notify_sql(table))
        scene.execute(drop_notify_sql(table))
    assert scene.execute("SELECT count(*) AS number FROM pg_trigger")[0].number == 0


def test_commit_of_a_session_in_the_same_process(scene, make_topic, told_only):
    """A session's commit wakes a harvester in its process; the end of a savepoint does not."""
    topic = make_topic()
    engine = create_engine(outbox_sqlalchemy.sqlalchemy_url(scene.database))
    rings = []
    leave = commit_signal.subscribe(lambda: rings.append(1))
    with scene.running(limits=told_only), Session(engine) as session:
        for count in range(3):
            with session.begin_nested():
                outbox_sqlalchemy.stash(session, OutboxRecord(topic=topic, key=str(count), value=b"x"))
            assert len(rings) == count
            session.commit()
            assert len(rings) == count + 1
            wait_until(lambda: scene.count() == 0, "the commit is heard")
        outbox_sqlalchemy.stash(session, OutboxRecord(topic=topic, key="undone", value=b"x"))
        session.rollback()
        assert len(rings) == 3
    leave()
    engine.dispose()
    assert len(scene.read(topic)) == 3


@pytest.mark.parametrize(
    ("delivery", "notify", "most"),
    [
        ("at-least-once", False, 5.0),
        pytest.param("exactly-once", True, 1.0, marks=[pytest.mark.real_broker, pytest.mark.complete]),
        pytest.param("at-least-once", True, 1.0, marks=pytest.mark.complete),
        pytest.param("exactly-once", False, 5.0, marks=[pytest.mark.real_broker, pytest.mark.complete]),
    ],
)
def test_idle_harvester_asks_rarely(scene, delivery, notify, most):
    """An idle leader sends at most five statements a second, its metrics' included, and with NOTIFY one."""
    add_trigger(scene)
    name = scene.execute("SELECT current_database() AS name")[0].name
    with scene.running(config={"notify": notify, "delivery": delivery}, metrics=HarvestMetrics()) as harvester:
        if notify:
            listening(harvester)
        with psycopg.connect(scene.database, dbname="postgres", autocommit=True) as outside:
            wait_until(lambda: statements_per_second(outside, name) <= most, f"at most {most:g} statements a second")


def statements_per_second(outside, name):
    """Return the number of committed transactions of a database per second, seen from another one."""
    counted = []
    for pause in (5.0, 0.0):
        row = outside.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = %s", [name]).fetchone()
        counted.append((time.monotonic(), row[0]))
        time.sleep(pause)
    (began, before), (ended, after) = counted
    return (after - before) / (ended - began)


def _cpu_seconds(names):
    """Return the CPU time so far of this process's threads with these names."""
    ticks = 0
    for thread in threading.enumerate():
        if thread.name in names:
            fields = Path(f"/proc/self/task/{thread.native_id}/stat").read_text().rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize("delivery", MODES)
def test_flood_of_notices(scene, make_topic, delivery):
    """A flood of notices, which any user may send, costs little CPU, and records are published meanwhile."""
    add_trigger(scene)
    topic = make_topic()
    metrics = HarvestMetrics(outbox_name="o")
    over = threading.Event()
    looks = lambda: metrics.registry.get_sample_value("outbox_mark_duration_seconds_count", {"outbox": "o"})  # noqa: E731

    def flood(channel):
        with psycopg.connect(scene.database, autocommit=True) as connection:
            while not over.is_set():
                connection.execute("SELECT pg_notify(%s, n::text) FROM generate_series(1, 200) AS n", [channel])

    with scene.running(config={"notify": True, "delivery": delivery}, metrics=metrics) as harvester:
        listening(harvester)
        channel = scene.execute("SELECT 'kafka_outbox_' || 'outbox'::regclass::oid AS name")[0].name
        assert channel == harvester._commit_listener._notices._channel
        flooding = threading.Thread(target=flood, args=(channel,))
        flooding.start()
        try:
            threads = {"outbox-harvest", "outbox-listen", "outbox-mark"}
            began, cpu, looked = time.monotonic(), _cpu_seconds(threads), looks()
            time.sleep(2)
            took = time.monotonic() - began
            assert (looks() - looked) / took < 100
            assert (_cpu_seconds(threads) - cpu) / took < 0.2
            scene.stash(OutboxRecord(topic=topic, key="k", value=b"x"))
            wait_until(lambda: scene.count() == 0, "the record is published")
        finally:
            over.set()
            flooding.join()
    assert len(scene.read(topic)) == 1
