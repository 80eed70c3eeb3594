"""Claim checks through table, Kafka, `consume` and queues; crashes between upload and commit; orphans."""

import asyncio
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psycopg
import pytest
from confluent_kafka import Consumer, TopicPartition
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

from outbox_core import OutboxRecord, Stasher
from outbox_core.claims import ClaimMissing, FolderStore, TableStore
from outbox_core.claims.orphans import find_orphans
from outbox_core.cli import main
from outbox_core.consuming import Consumed, consume
from outbox_core.errors import KafkaUnavailable
from outbox_core.retention.archive import archive_statements
from outbox_core.schema import TableName, create_inbox_sql
from outbox_queue import QueueService
from outbox_sqlalchemy import Outbox, sqlalchemy_url
from tests.queueing import queue_config
from tests.services import as_role

WRITER = Path(__file__).with_name("claim_writer.py")
LARGE = b"large " * 1000


@pytest.fixture
def store(tmp_path):
    """Return an empty store in a folder."""
    return FolderStore(tmp_path / "claims")


def _stash(scene, store, *records):
    with scene.connect() as connection:
        Stasher(scene.table, claim_store=store, claim_check_above=100).stash_many(connection, records)


def _consume(scene, topic, count, **options):
    """Handle the records of partition 0, and return their values."""
    settings = {"enable.auto.commit": False, "enable.auto.offset.store": False, "auto.offset.reset": "earliest"}
    consumer = Consumer({"bootstrap.servers": scene.bootstrap, "group.id": f"g-{topic}", **settings})
    values = []
    try:
        consumer.assign([TopicPartition(topic, 0, 0)])
        done = consume(
            consumer,
            lambda _, message: values.append(message.value()),
            lambda: psycopg.connect(scene.database),
            max_records=count,
            **options,
        )
    finally:
        consumer.close()
    return values, done


def _orphans(scene, store, **options):
    """Return the orphans of any age."""
    with scene.connect(autocommit=True) as connection:
        return find_orphans(
            store,
            connection,
            [scene.table],
            {"bootstrap.servers": scene.bootstrap},
            group="claims",
            before=datetime.now(UTC) + timedelta(days=1),
            **options,
        )


def test_consume_brings_payloads_back(scene, make_topic, store):
    """A handler sees large and small values alike; without the store, a claimed record stops the loop by its name."""
    topic = make_topic(1)
    scene.execute(create_inbox_sql(TableName("inbox")))
    _stash(scene, store, OutboxRecord(topic, "k", LARGE), OutboxRecord(topic, "k", b"small"), OutboxRecord(topic, "k"))
    assert [len(row.kafka_value or b"") for row in scene.rows()] == [0, 5, 0]
    scene.drain()
    with pytest.raises(ClaimMissing, match="pass the store"):
        _consume(scene, topic, 1)
    values, _ = _consume(scene, topic, 3, claim_store=store)
    assert values == [LARGE, b"small", None]
    for name in list(store.names()):
        store.delete(name)
    assert _consume(scene, topic, 3, claim_store=store) == ([], Consumed(0, 3)), "repeats need no payload"


@pytest.mark.real_broker
def test_queues_bring_payloads_back(scene, make_topic, store):
    """A large job, sent or stashed, goes through the store, past any limit of Kafka's messages."""
    config = queue_config(scene.bootstrap, make_topic)
    service = QueueService(config, claim_store=store, claim_check_above=1000)
    queue = service.queue(f"large-{config.message_topic}")
    payload = b"x" * 3_000_000
    with scene.connect() as connection:
        queue.stash(connection, payload)
    with queue.producer() as producer:
        producer.send(b"small")
    scene.drain()
    received = []
    with queue.consumer() as consumer:
        while len(received) < 2:
            message = consumer.receive(timedelta(seconds=60))
            received.append(message.payload)
            message.ack()
    assert sorted(received, key=len) == [b"small", payload]
    assert len(list(store.names())) == 1


@pytest.mark.parametrize(
    "moment",
    [
        "after-upload",
        "after-commit",
        *(
            pytest.param(moment, marks=pytest.mark.complete)
            for moment in ("before-upload", "during-upload", "before-commit")
        ),
    ],
)
def test_crashes(scene, make_topic, store, moment):
    """Whenever a writer dies: a committed record has its payload, and a payload without a record is an orphan."""
    topic = make_topic(1)
    command = [sys.executable, WRITER, scene.database, store._folder, topic, moment]
    subprocess.run(command, cwd=Path.cwd(), check=False, timeout=60)
    names, rows = list(store.names()), scene.rows()
    assert len(rows) == (moment == "after-commit")
    assert len(names) == (moment != "before-upload")
    for row in rows:
        assert [bytes(value).decode() for value in row.kafka_header_values] == names
        assert store.get(names[0]) == b"x" * 1000
    assert _orphans(scene, store) == ([] if rows else names)
    scene.drain()
    assert _orphans(scene, store) == ([] if rows else names), "a published record keeps its payload"


def test_rolled_back_payloads_are_found_by_the_command(scene, make_topic, tmp_path, monkeypatch, capsys):
    """`outbox claims` lists and deletes what was rolled back, of a certain age, and leaves the rest."""
    topic, store = make_topic(1), FolderStore(tmp_path)
    _stash(scene, store, OutboxRecord(topic, "k", LARGE))
    scene.drain()
    _stash(scene, store, OutboxRecord(topic, "k", LARGE))
    kept = set(store.names())
    old = f"{topic}/20200101T000000Z-{'0' * 32}"
    store.put(old, LARGE)
    store.put(f"{topic}/{datetime.now(UTC).strftime('%Y%m%dT%H%M%SZ')}-{'1' * 32}", LARGE)
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", scene.database)
    monkeypatch.setenv("OUTBOX_KAFKA_BOOTSTRAP", scene.bootstrap)
    options = ["--store", str(tmp_path), "--older-than", "1h"]
    assert main(["claims", "list", *options]) == 0
    assert capsys.readouterr().out == f"{old}\n"
    assert old in set(store.names())
    assert main(["claims", "delete", *options]) == 0
    assert set(store.names()) - {old} == set(store.names()) > kept
    assert _orphans(scene, store) == sorted(set(store.names()) - kept)


def test_right_that_the_command_lacks(scene, topic_name, tmp_path, capsys):
    """`outbox claims` by a role that may not read the outbox is one line with the right."""
    role = topic_name("reads_nothing")
    FolderStore(tmp_path).put(f"orders/20200101T000000Z-{'0' * 32}", LARGE)
    options = ["--store", str(tmp_path), "--older-than", "1h", "--bootstrap-servers", scene.bootstrap]
    scene.execute(f'CREATE ROLE "{role}" LOGIN')
    try:
        assert main(["claims", "list", *options, "--dsn", as_role(scene.database, role)]) == 2
    finally:
        scene.execute(f'DROP ROLE "{role}"')
    told = f"permission denied for table outbox; role {role} needs SELECT on outbox and archive\n"
    assert capsys.readouterr().err.endswith(told)


def test_rows_with_nested_headers_hide_no_payload(scene, make_topic, store):
    """A row that is held for its headers, arrays of arrays, does not keep the orphans from being found."""
    topic = make_topic(1)
    _stash(scene, store, OutboxRecord(topic, "k", LARGE))
    columns = "kafka_topic, kafka_header_keys, kafka_header_values"
    scene.execute(f"INSERT INTO outbox ({columns}) VALUES ('x', '{{{{outbox-claim,x}}}}', '{{{{a,b}}}}')")
    assert _orphans(scene, store) == []


def test_archived_records_keep_their_payloads(scene, make_topic, store):
    """A record that has gone into the archive may be stashed anew, also when its topic no longer has it."""
    topic = make_topic(1)
    for statement in archive_statements(scene.table):
        scene.execute(statement)
    _stash(scene, store, OutboxRecord(topic, "k", LARGE))
    columns = "id, create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values"
    scene.execute(f"INSERT INTO outbox_archive ({columns}) SELECT {columns} FROM outbox")
    assert _orphans(scene, store) == []
    scene.execute("DELETE FROM outbox")
    assert _orphans(scene, store) == []
    scene.execute("DELETE FROM outbox_archive")
    assert _orphans(scene, store) == list(store.names())


def test_nothing_is_an_orphan_of_an_unknown_topic(scene, topic_name, store):
    """A topic that is not there tells nothing: its payloads are not taken for orphans."""
    store.put(f"{topic_name()}/20200101T000000Z-{'0' * 32}", b"x")
    with pytest.raises(KafkaUnavailable, match="does not exist"):
        _orphans(scene, store)


def test_a_table_of_payloads(scene, make_topic, database):
    """Payloads may be in a table; they are committed before their record, whatever becomes of that."""
    store = TableStore(lambda: psycopg.connect(database), 'public."claims %s"')
    scene.execute(store.create_sql)
    topic = make_topic(1)
    with scene.connect() as connection:
        Stasher(claim_store=store, claim_check_above=1).stash(connection, OutboxRecord(topic, value=LARGE))
        connection.rollback()
    (name,) = store.names()
    assert store.get(name) == LARGE
    assert _orphans(scene, store) == [name]
    store.delete(name)
    assert list(store.names()) == []
    with pytest.raises(ClaimMissing, match=name):
        store.get(name)


@pytest.mark.parametrize("moment", ["before-commit", pytest.param("after-commit", marks=pytest.mark.complete)])
def test_crashes_with_payloads_in_the_same_transaction(scene, make_topic, database, moment):
    """Whenever a writer dies, there are payload and record, or neither: there is no orphan to delete."""
    store = TableStore(lambda: psycopg.connect(database), with_record=True)
    scene.execute(store.create_sql)
    command = [sys.executable, WRITER, scene.database, "in-database", make_topic(1), moment]
    subprocess.run(command, cwd=Path.cwd(), check=False, timeout=60)
    committed = moment == "after-commit"
    assert (len(scene.rows()), len(list(store.names()))) == (committed, committed)
    assert _orphans(scene, store) == []


def _on_psycopg(database, options, finish):
    with psycopg.connect(database) as connection:
        Stasher(**options).stash_many(connection, [OutboxRecord("t", value=LARGE), OutboxRecord("t", value=b"x")])
        getattr(connection, finish)()


def _on_sqlalchemy(database, options, finish):
    engine = create_engine(sqlalchemy_url(database))
    with Session(engine) as session:
        Outbox(**options).stash(session, OutboxRecord("t", value=LARGE))
        getattr(session, finish)()
    engine.dispose()


def _on_asyncpg(database, options, finish):
    async def run():
        engine = create_async_engine(sqlalchemy_url(database).set(drivername="postgresql+asyncpg"))
        async with AsyncSession(engine) as session:
            await Outbox(**options).astash(session, OutboxRecord("t", value=LARGE))
            await getattr(session, finish)()
        await engine.dispose()

    asyncio.run(run())


@pytest.mark.parametrize("stash", [_on_psycopg, _on_sqlalchemy, _on_asyncpg])
def test_payloads_in_the_same_transaction(scene, database, stash):
    """A rollback takes the payload along, a commit brings both; the record names it."""
    store = TableStore(lambda: psycopg.connect(database), 'public."claims %s:x"', with_record=True)
    scene.execute(store.create_sql)
    options = {"claim_store": store, "claim_check_above": 100}
    stash(database, options, "rollback")
    assert (scene.rows(), list(store.names())) == ([], [])
    stash(database, options, "commit")
    (name,) = store.names()
    assert bytes(scene.rows()[0].kafka_header_values[0]).decode() == name
    assert store.get(name) == LARGE
