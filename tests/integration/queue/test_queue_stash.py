"""Jobs that exist only if a transaction commits, through every adapter, and from the outbox to a consumer."""

import asyncio

import psycopg
import pytest
from django.db import connections, transaction
from sqlalchemy import create_engine
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session

import outbox_sqlalchemy
from outbox_core.errors import InvalidRecord, TransactionRequired
from outbox_core.schema import TableName, create_table_sql
from outbox_queue import MessageTooLarge, QueueConfig, QueueService
from tests.contract.stash_contract import stashed
from tests.harvesting import Scene
from tests.integration.django.django_fixtures import django_db_modify_db_settings
from tests.queueing import queue_config

__all__ = ["django_db_modify_db_settings"]

PATIENCE = 60.0


@pytest.fixture
def queue():
    """A queue of a service that never connects to Kafka."""
    return QueueService(QueueConfig(bootstrap_servers="nowhere:1", message_topic="jobs")).queue("emails")


@pytest.fixture
def outbox_database(database):
    """URL of a database with an empty outbox."""
    with psycopg.connect(database) as connection:
        connection.execute(create_table_sql(TableName("outbox")))
    return database


class _Undo(Exception):
    """The exception that rolls a transaction back."""


def _psycopg(database, work):
    with psycopg.connect(database) as connection:
        work(connection)


def _sqlalchemy_session(database, work):
    with Session(create_engine(outbox_sqlalchemy.sqlalchemy_url(database))) as session, session.begin():
        work(session)


def _sqlalchemy_connection(database, work):
    with create_engine(outbox_sqlalchemy.sqlalchemy_url(database)).begin() as connection:
        work(connection)


@pytest.mark.parametrize("transact", [_psycopg, _sqlalchemy_session, _sqlalchemy_connection])
def test_a_job_exists_if_the_transaction_commits(queue, outbox_database, transact):
    """`stash` writes one record with the queue's key in the caller's transaction; a rollback removes it."""

    def roll_back(session):
        queue.stash(session, b"never")
        raise _Undo

    with pytest.raises(_Undo):
        transact(outbox_database, roll_back)
    transact(outbox_database, lambda session: queue.stash(session, {"to": "ada"}, headers={"h": "1"}))
    (row,) = stashed(outbox_database)
    assert (row.kafka_topic, row.kafka_key, row.kafka_value) == ("jobs", "emails", b'{"to":"ada"}')
    assert (row.kafka_header_keys, row.kafka_header_values) == (["h"], [b"1"])


def test_an_asynchronous_session(queue, outbox_database):
    """`astash` writes in the transaction of an AsyncSession."""

    async def run():
        engine = create_async_engine(outbox_sqlalchemy.sqlalchemy_url(outbox_database))
        async with AsyncSession(engine) as session, session.begin():
            await queue.astash(session, b"job")
        with pytest.raises(InvalidRecord, match="asynchronous session"):
            await queue.astash(object(), b"job")
        await engine.dispose()

    asyncio.run(run())
    assert [row.kafka_key for row in stashed(outbox_database)] == ["emails"]


@pytest.mark.django_db(transaction=True, databases=["default"])
def test_django(queue):
    """With Django's connection `stash` writes to its database; outside `atomic` it is refused."""
    connection = connections["default"]
    with pytest.raises(TransactionRequired):
        queue.stash(connection, b"never")
    with transaction.atomic():
        queue.stash(connection, b"never")
        transaction.set_rollback(True)
    with transaction.atomic():
        queue.stash(connection, b"job", delay=None)
    with connection.cursor() as cursor:
        cursor.execute("SELECT kafka_topic, kafka_key, kafka_value FROM outbox")
        assert [(topic, key, bytes(value)) for topic, key, value in cursor.fetchall()] == [("jobs", "emails", b"job")]


def test_what_cannot_be_stashed_is_refused(queue, outbox_database):
    """A stash in autocommit mode, on a wrong object or of a too large message raises, and writes no row."""
    with psycopg.connect(outbox_database, autocommit=True) as connection, pytest.raises(TransactionRequired):
        queue.stash(connection, b"job")
    with pytest.raises(InvalidRecord, match="expected a session or connection"):
        queue.stash(object(), b"job")
    with psycopg.connect(outbox_database) as connection, pytest.raises(MessageTooLarge):
        queue.stash(connection, b"x" * 1_000_000)
    assert stashed(outbox_database) == []


def test_stashed_jobs_are_spread_over_known_partitions():
    """With `message_partitions` set, records get random partitions; with `spread=False` none."""
    config = QueueConfig(bootstrap_servers="nowhere:1", message_partitions=4)
    queue = QueueService(config).queue("emails")
    assert {queue.record(b"").partition for _ in range(200)} == {0, 1, 2, 3}
    assert queue.record(b"", spread=False).partition is None


@pytest.mark.real_broker
def test_from_the_outbox_to_a_consumer(database, kafka_bootstrap, make_topic):
    """A harvester publishes a stashed job, and a consumer gets it with the header that identifies repeats."""
    queue = QueueService(queue_config(kafka_bootstrap, make_topic)).queue("emails")
    scene = Scene(database, kafka_bootstrap)
    with scene.connect() as connection:
        queue.stash(connection, {"to": "ada"}, headers={"h": "1"})
    scene.drain()
    with queue.consumer() as consumer:
        message = consumer.receive(PATIENCE)
        message.ack()
    assert message.payload == b'{"to":"ada"}'
    assert message.header("h") == b"1"
    assert message.header("outbox-id") is not None
    scene.close()
