"""`consume` with a real broker and a real database, through each adapter."""

import json
import signal
import subprocess
import sys
import threading
from collections import Counter

import psycopg
import pytest
from confluent_kafka import Producer, TopicPartition
from django.db import connections
from sqlalchemy import create_engine, text
from sqlalchemy.orm import sessionmaker

import outbox_django
import outbox_sqlalchemy
from outbox_core.consuming import Consumed, backoff, consume
from outbox_core.errors import UnsafeConsumer
from tests.contract.accept_contract import accepted, wait_for_a_blocked_session
from tests.harvesting import Scene, wait_until
from tests.integration.consuming.consuming_fixtures import place
from tests.integration.django.django_fixtures import alias, django_db_modify_db_settings

__all__ = ["alias", "django_db_modify_db_settings", "place"]

_EFFECT = "INSERT INTO effect (value) VALUES (%s)"


def _by_psycopg(place):
    def handle(connection, message):
        connection.execute(_EFFECT, [message.value().decode()])

    return lambda consumer, **options: consume(consumer, handle, place.transaction, **options)


def _by_sqlalchemy(place):
    session_factory = sessionmaker(create_engine(outbox_sqlalchemy.sqlalchemy_url(place.database)))

    def handle(session, message):
        session.execute(text("INSERT INTO effect (value) VALUES (:value)"), {"value": message.value().decode()})

    return lambda consumer, **options: outbox_sqlalchemy.consume(consumer, handle, session_factory, **options)


def _by_engine(place):
    engine = create_engine(outbox_sqlalchemy.sqlalchemy_url(place.database))

    def handle(connection, message):
        connection.execute(text("INSERT INTO effect (value) VALUES (:value)"), {"value": message.value().decode()})

    return lambda consumer, **options: outbox_sqlalchemy.consume(consumer, handle, engine.connect, **options)


def _by_django(_place):
    def handle(message):
        with connections["contract"].cursor() as cursor:
            cursor.execute(_EFFECT, [message.value().decode()])

    return lambda consumer, **options: outbox_django.consume(consumer, handle, using="contract", **options)


@pytest.mark.usefixtures("alias")
@pytest.mark.parametrize("adapter", [_by_psycopg, _by_sqlalchemy, _by_engine, _by_django])
def test_every_record_once(adapter, place):
    """A repeat of an outbox-id is dropped, a record without one is identified by its place, and offsets follow."""
    place.send(("a", "o:1"), ("a", "o:1"), ("b", "o:2"), ("-", None), ("-", None), ("a", "o:1"), ("c", "p:1"))
    consumer = place.consumer()
    assert adapter(place)(consumer, max_records=7) == Consumed(handled=5, repeats=2)
    assert place.effects() == ["a", "b", "-", "-", "c"]
    assert place.committed(consumer) == 7
    ids = ["o:1", "o:2", "p:1", f"{place.topic}-0-3", f"{place.topic}-0-4"]
    assert sorted(accepted(place.database)) == sorted((place.group, identity) for identity in ids)


@pytest.mark.usefixtures("alias")
@pytest.mark.parametrize("adapter", [_by_psycopg, _by_sqlalchemy, _by_django])
def test_read_again_from_the_beginning(adapter, place):
    """A group set back to old offsets handles no record again; another group handles each record for itself."""
    place.send(("a", "o:1"), ("b", None))
    run = adapter(place)
    assert run(place.consumer(), max_records=2) == Consumed(2, 0)
    again = place.consumer()
    again.assign([TopicPartition(place.topic, 0, 0)])
    assert run(again, max_records=2) == Consumed(0, 2)
    assert run(place.consumer(group_id=f"{place.group}-other"), max_records=2) == Consumed(2, 0)
    assert place.effects() == ["a", "b", "a", "b"]


@pytest.mark.usefixtures("alias")
@pytest.mark.parametrize("adapter", [_by_psycopg, _by_sqlalchemy, _by_django])
def test_a_handler_that_raises(adapter, place):
    """Effect and acceptance are rolled back, the offset stays, and the same consumer sees the record again."""
    place.send(("a", "o:1"), ("bad", "o:2"), ("c", "o:3"))
    place.execute("ALTER TABLE effect ADD CONSTRAINT taste CHECK (value <> 'bad')")
    consumer = place.consumer()
    run = adapter(place)
    with pytest.raises(Exception, match="taste") as raised:
        run(consumer, max_records=3)
    assert raised.value.__notes__ == [f"while handling {place.topic}[0] at offset 1, attempt 1"]
    assert (place.effects(), place.committed(consumer)) == (["a"], 1)
    place.execute("ALTER TABLE effect DROP CONSTRAINT taste")
    assert run(consumer, max_records=2) == Consumed(2, 0)
    assert (place.effects(), place.committed(consumer)) == (["a", "bad", "c"], 3)


def test_a_retry_after_a_lost_connection(alias, place):
    """With a policy, a session that the database ended is replaced, and the record is handled once."""
    place.send(("a", "o:1"), ("b", "o:2"))
    killed = []

    def handle(message):
        with connections[alias].cursor() as cursor:
            cursor.execute(_EFFECT, [message.value().decode()])
        if message.value() == b"b" and not killed:
            killed.append(connections[alias].connection.info.backend_pid)
            with place.transaction() as other:
                other.execute("SELECT pg_terminate_backend(%s)", killed)

    done = outbox_django.consume(place.consumer(), handle, using=alias, max_records=2, retry=backoff(3))
    assert (done, place.effects()) == (Consumed(2, 0), ["a", "b"])
    assert killed


@pytest.mark.parametrize(
    ("settings", "kill", "sessions"),
    [
        ({}, False, 1),
        ({"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}, False, 1),
        ({"CONN_MAX_AGE": None, "CONN_HEALTH_CHECKS": True}, True, 2),
    ],
)
def test_djangos_connection(alias, place, settings, kill, sessions):
    """Records share a connection, whatever its maximum age; with health checks a lost one is replaced."""
    connections[alias].settings_dict.update(settings)
    place.send(("a", "o:1"), ("b", "o:2"))
    used = []

    def handle(message):
        with connections[alias].cursor() as cursor:
            cursor.execute(_EFFECT, [message.value().decode()])
            used.append(connections[alias].connection.info.backend_pid)

    consumer = place.consumer()
    assert outbox_django.consume(consumer, handle, using=alias, max_records=1) == Consumed(1, 0)
    if kill:
        place.execute(f"SELECT pg_terminate_backend({used[0]}, 10000)")
    assert outbox_django.consume(consumer, handle, using=alias, max_records=1) == Consumed(1, 0)
    assert place.effects() == ["a", "b"]
    assert len(set(used)) == sessions


@pytest.mark.parametrize("commits", [True, False])
def test_a_client_that_stores_offsets_is_refused(place, commits):
    """A consumer with the client's defaults is refused before the handler runs."""
    place.send(("a", "o:1"))
    consumer = place.consumer(enable_auto_offset_store=True, enable_auto_commit=commits, auto_commit_interval_ms=100)
    with pytest.raises(UnsafeConsumer):
        _by_psycopg(place)(consumer, max_records=1)
    assert place.effects() == []


def test_stored_offsets(place):
    """With commit="stored" the client commits the handled records, and not the failed one."""
    place.send(("a", "o:1"), ("b", "o:2"), ("bad", "o:3"))
    place.execute("ALTER TABLE effect ADD CONSTRAINT taste CHECK (value <> 'bad')")
    consumer = place.consumer(enable_auto_commit=True)
    with pytest.raises(psycopg.errors.CheckViolation):
        _by_psycopg(place)(consumer, commit="stored")
    assert (place.effects(), place.committed(consumer)) == (["a", "b"], 2)


def test_two_owners_of_a_partition(place):
    """While one member still handles a record, a second owner of its partition waits, and then drops the record."""
    place.send(("a", "o:1"))
    in_hand, go_on = threading.Event(), threading.Event()

    def handle_slowly(connection, message):
        connection.execute(_EFFECT, [message.value().decode()])
        in_hand.set()
        assert go_on.wait(60)

    answers = {}

    def member(name):
        answers[name] = consume(place.consumer(), handle_slowly, place.transaction, max_records=1)

    slow, next_owner = (threading.Thread(target=member, args=(name,)) for name in ("slow", "next"))
    slow.start()
    assert in_hand.wait(60)
    next_owner.start()
    wait_for_a_blocked_session(place.database)
    go_on.set()
    slow.join(60)
    next_owner.join(60)
    assert answers == {"slow": Consumed(1, 0), "next": Consumed(0, 1)}
    assert place.effects() == ["a"]


def test_rebalances(place):
    """Members that come and go while records flow handle each record once between them."""
    enough = threading.Event()
    sent = []
    handled = Counter()
    members = {name: threading.Event() for name in ("first", "second", "third")}

    def produce():
        producer = Producer({"bootstrap.servers": place.bootstrap, "linger.ms": 0})
        while not enough.wait(0.01):
            producer.produce(place.topic, str(len(sent)), headers=[("outbox-id", f"o:{len(sent)}")])
            sent.append(len(sent))
        assert producer.flush(30) == 0

    def member(name):
        def handle(connection, message):
            connection.execute(_EFFECT, [message.value().decode()])
            handled[name] += 1

        consumer = place.consumer(subscribe=True, session_timeout_ms=6000, heartbeat_interval_ms=100)
        consume(consumer, handle, place.transaction, stop=members[name])
        consumer.close()

    threads = [threading.Thread(target=produce)]
    threads[0].start()
    for name in members:
        threads.append(threading.Thread(target=member, args=(name,)))
        threads[-1].start()
        wait_until(lambda name=name: handled[name] > 5, f"the {name} member got records")
    members["first"].set()
    threads[1].join(60)
    before = handled["third"]
    wait_until(lambda: handled["third"] > before + 5, "the third member went on")
    enough.set()
    threads[0].join(60)
    wait_until(lambda: len(place.effects()) >= len(sent), "all records were handled")
    for stop in members.values():
        stop.set()
    for thread in threads:
        thread.join(60)
    assert sorted(map(int, place.effects())) == sent
    assert handled.total() == len(sent)


def test_two_outboxes_of_one_topic(place):
    """Rows of equal ids from two outboxes, harvested into one topic, are different records: none is dropped."""
    scenes = [Scene(place.database, place.bootstrap, table=table) for table in ("orders_outbox", "billing_outbox")]
    try:
        for scene in scenes:
            scene.fill(place.topic, 50)
            scene.drain()
    finally:
        for scene in scenes:
            scene.close()
    assert _by_psycopg(place)(place.consumer(subscribe=True), max_records=100) == Consumed(100, 0)
    assert sorted(place.effects()) == sorted(str(number) for number in range(1, 51) for _ in scenes)


_MEMBER = """
import json, os, signal, sys
from contextlib import contextmanager
import psycopg
from confluent_kafka import Consumer, TopicPartition
from outbox_core.consuming import consume

database, bootstrap, group, topic, crash = sys.argv[1:]
consumer = Consumer({"bootstrap.servers": bootstrap, "group.id": group, "enable.auto.commit": False,
                     "enable.auto.offset.store": False, "auto.offset.reset": "earliest", "fetch.wait.max.ms": 50})
consumer.assign([TopicPartition(topic, 0)])

def die():
    os.kill(os.getpid(), signal.SIGKILL)

class DiesBeforeItsCommit:
    def commit(self, **arguments):
        die()

    def __getattr__(self, name):
        return getattr(consumer, name)

@contextmanager
def transaction():
    with psycopg.connect(database) as connection:
        yield connection

def handle(connection, message):
    connection.execute("INSERT INTO effect (value) VALUES (%s)", [message.value().decode()])
    if crash == "in-the-handler":
        die()

member = DiesBeforeItsCommit() if crash == "before-the-offset" else consumer
done = consume(member, handle, transaction, max_records=2)
print(json.dumps([done.handled, done.repeats]))
"""


@pytest.mark.parametrize(
    ("crash", "left_behind", "afterwards"),
    [("in-the-handler", [], [2, 0]), ("before-the-offset", ["a"], [1, 1])],
)
def test_a_member_that_is_killed(place, crash, left_behind, afterwards):
    """After a kill in the handler, or between the two commits, the next member leaves each record with one effect."""
    place.send(("a", "o:1"), ("b", None))

    def member(crash):
        command = [sys.executable, "-c", _MEMBER, place.database, place.bootstrap, place.group, place.topic, crash]
        return subprocess.run(command, capture_output=True, text=True, timeout=90, check=False)

    assert member(crash).returncode == -signal.SIGKILL
    assert place.effects() == left_behind
    done = member("never")
    assert (done.returncode, json.loads(done.stdout or "null")) == (0, afterwards), done.stderr
    assert place.effects() == ["a", "b"]


def test_importing_the_adapters_needs_no_kafka_client():
    """Both adapters can be imported without confluent-kafka; calling `consume` then says what to install."""
    program = """
import sys
sys.modules["confluent_kafka"] = None
import outbox_sqlalchemy, outbox_django
try:
    outbox_sqlalchemy.consume(None, None, None)
except outbox_sqlalchemy.OutboxError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert "pip install confluent-kafka" in done.stdout, done.stderr
