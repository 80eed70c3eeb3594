"""Success is what the database says: a handler that swallows an error, or ends its transaction, has not succeeded.

Each way to do so, on each driver, behind each way of accepting. Django's are in `django/test_django_swallowed_errors`.
"""

import asyncio
from contextlib import closing, contextmanager, suppress

import pg8000.dbapi
import psycopg
import psycopg2
import pytest
from sqlalchemy import create_engine, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError, InvalidRequestError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import Session
from sqlalchemy.pool import NullPool

import outbox_sqlalchemy as outbox
from outbox_core import AcceptanceLost, Inbox, InvalidMessageId, Stasher
from outbox_core.consuming import Consumed, consume
from outbox_core.errors import InvalidConfig
from outbox_core.record import OutboxRecord
from outbox_core.testing import in_memory_outbox
from outbox_core.testing.kafka import InProcessKafka
from tests.integration.consuming.swallowing import COMMITS, WORK, WRONG, Handler, found, place

__all__ = ["place"]


@pytest.fixture
def kafka():
    """A topic with one record."""
    with in_memory_outbox(require_transaction=False) as stashed:
        Stasher().stash(None, OutboxRecord("orders", "k", "v"))
        yield InProcessKafka(stashed)


def judge(place, kafka, way, run, *, begins_anew=True):
    """Assert what becomes of the record: nothing is done, told and lost at once.

    A driver that does not see raw statements end its transaction (`begins_anew` False) has the next ones commit alone.
    """
    if way == "savepoint":
        assert run() == Consumed(handled=1, repeats=0)
        assert (found(place), kafka.position("test")) == ((["after", "before"], 1), 1)
        return
    with pytest.raises((AcceptanceLost, InvalidRequestError)) as raised:
        run()
    assert "while handling orders[0] at offset 0, attempt 1" in raised.value.__notes__
    assert "savepoint" in str(raised.value) or way.endswith("more"), "SQLAlchemy refuses further statements by itself"
    assert kafka.position("test") == 0
    # Who commits has committed the acceptance, too, and the record is a repeat; all else is undone.
    effects, accepted = found(place)
    assert accepted == (way in COMMITS)
    alone = ["after"] if way.startswith("raw") and way.endswith("more") and not begins_anew else []
    assert effects == alone + ["before"] * (way in COMMITS)


@contextmanager
def _connected(connect):
    with closing(connect()) as connection:
        try:
            yield connection
        except BaseException:
            with suppress(Exception):
                connection.rollback()
            raise
        connection.commit()


def _on_driver(driver, url):
    address = make_url(url)
    if driver == "pg8000":
        return pg8000.dbapi.connect(address.username, address.host, address.database, address.port)
    return {"psycopg": psycopg, "psycopg2": psycopg2}[driver].connect(url)


@pytest.mark.parametrize("way", [*WRONG, "savepoint"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
def test_bare_connections(place, kafka, driver, way):
    """`consume` on a connection of a driver."""

    def handle(connection, _):
        def run(sql):
            with closing(connection.cursor()) as cursor:
                cursor.execute(sql)

        getattr(Handler(run, connection), way)()

    consumer = kafka.consumer("orders")
    connected = lambda: _connected(lambda: _on_driver(driver, place))  # noqa: E731
    judge(
        place,
        kafka,
        way,
        lambda: consume(consumer, handle, connected, stop=consumer.drained),
        begins_anew=driver != "psycopg2",
    )


@pytest.mark.parametrize("way", [*WRONG, "flush", "savepoint"])
@pytest.mark.parametrize("driver", ["psycopg", "psycopg2", "pg8000"])
@pytest.mark.parametrize("kind", ["session", "connection"])
def test_sessions(place, kafka, kind, driver, way):
    """`consume` on sessions and connections of SQLAlchemy."""
    if (kind, way) == ("connection", "flush"):
        pytest.skip("a connection flushes nothing")
    url = make_url(outbox.sqlalchemy_url(place)).set(drivername=f"postgresql+{driver}")
    engine = create_engine(url, poolclass=NullPool)

    def handle(session, _):
        getattr(Handler(lambda sql: session.execute(text(sql)), session), way)()

    consumer = kafka.consumer("orders")
    sessions = (lambda: Session(engine)) if kind == "session" else engine.connect
    judge(
        place,
        kafka,
        way,
        lambda: outbox.consume(consumer, handle, sessions, stop=consumer.drained),
        begins_anew=driver != "psycopg2",
    )


@pytest.mark.parametrize("way", [*WRONG, "flush", "savepoint"])
@pytest.mark.parametrize("driver", ["psycopg", "asyncpg"])
def test_asynchronous_recipe(place, kafka, driver, way):
    """A loop of the application's own, as the page has it: `aaccept`, the work, `aconfirm`, the commit."""
    url = make_url(outbox.sqlalchemy_url(place)).set(drivername=f"postgresql+{driver}")

    async def once():
        engine = create_async_engine(url, poolclass=NullPool)
        async with AsyncSession(engine) as session, session.begin():
            assert await outbox.aaccept(session, "test", "orders-0-0")
            await session.run_sync(lambda inner: getattr(Handler(lambda sql: inner.execute(text(sql)), inner), way)())
            await outbox.aconfirm(session, "test", "orders-0-0")
        await engine.dispose()

    def run():
        try:
            asyncio.run(once())
        except Exception as error:
            error.add_note("while handling orders[0] at offset 0, attempt 1")
            raise
        kafka.commit("test", 1)
        return Consumed(handled=1, repeats=0)

    judge(place, kafka, way, run, begins_anew=driver != "asyncpg")


SEES = {
    "search path": "CREATE SCHEMA tenant; CREATE TABLE tenant.effect (value text); SET LOCAL search_path TO tenant",
    "search path to another inbox": "CREATE SCHEMA tenant; CREATE TABLE tenant.effect (value text); "
    "CREATE TABLE tenant.inbox (LIKE inbox INCLUDING ALL); SET LOCAL search_path TO tenant",
    "role": "GRANT INSERT ON effect TO pg_monitor; SET LOCAL ROLE pg_monitor",
    "policy": "GRANT INSERT ON effect TO pg_monitor; GRANT SELECT, INSERT ON inbox TO pg_monitor; "
    "ALTER TABLE inbox ENABLE ROW LEVEL SECURITY; SET LOCAL ROLE pg_monitor",
}


@pytest.mark.parametrize("ends", [False, True])
@pytest.mark.parametrize("sees", SEES)
@pytest.mark.parametrize("door", ["bare", "sqlalchemy"])
def test_handlers_that_change_what_they_see(place, kafka, door, sees, ends):
    """The question at the end does not depend on `search_path`, role and policies, which a handler may set."""

    def work(run, transaction):
        run(SEES[sees])
        run(WORK.format("work"))
        if ends:
            transaction.commit()
            run("SET LOCAL search_path TO tenant")

    consumer = kafka.consumer("orders")
    if door == "bare":
        handle = lambda connection, _: work(connection.execute, connection)  # noqa: E731
        once = lambda: consume(  # noqa: E731
            consumer, handle, lambda: _connected(lambda: psycopg.connect(place)), stop=consumer.drained
        )
    else:
        engine = create_engine(outbox.sqlalchemy_url(place), poolclass=NullPool)
        handle = lambda session, _: work(lambda sql: session.execute(text(sql)), session)  # noqa: E731
        once = lambda: outbox.consume(consumer, handle, lambda: Session(engine), stop=consumer.drained)  # noqa: E731
    if ends:
        with pytest.raises((psycopg.Error, DBAPIError, AcceptanceLost, InvalidRequestError)):
            once()
        assert kafka.position("test") == 0
        return
    assert once() == Consumed(handled=1, repeats=0)
    assert (found(place)[1], kafka.position("test")) == (1, 1)


@pytest.mark.parametrize("door", ["bare", "sqlalchemy"])
def test_several_acceptances_in_one_transaction(place, door):
    """Each is confirmed in any order, but not one whose savepoint was rolled back, nor one of another table."""
    with psycopg.connect(place) as connection:
        connection.execute("CREATE TABLE other (LIKE inbox INCLUDING ALL)")
    engine = create_engine(outbox.sqlalchemy_url(place), poolclass=NullPool)
    make, run = (Inbox, str) if door == "bare" else (outbox.Inbox, text)
    with psycopg.connect(place) if door == "bare" else engine.connect() as transaction:
        for number in "123":
            assert make().accept(transaction, "a", number)
        transaction.execute(run("SAVEPOINT inner_one"))
        assert make().accept(transaction, "a", "4")
        make().confirm(transaction, "a", "4")
        for source, number in (("a:4", ""), ("", "a:4"), ("a:", "4")):
            with pytest.raises((AcceptanceLost, InvalidMessageId)):
                make().confirm(transaction, source, number)
        with pytest.raises(AcceptanceLost):
            make("other").confirm(transaction, "a", "4")
        transaction.execute(run("ROLLBACK TO SAVEPOINT inner_one"))
        for number in "213":
            make().confirm(transaction, "a", number)
        with pytest.raises(AcceptanceLost):
            make().confirm(transaction, "a", "4")


@pytest.mark.parametrize("kind", ["closing", "pg8000", "engine.connect", "session"])
def test_transactions_that_do_not_commit(place, kafka, kind):
    """A context manager that only closes its connection is refused at the first record, which comes again."""
    engine = create_engine(outbox.sqlalchemy_url(place), poolclass=NullPool)
    begin, inbox = {
        "closing": (lambda: closing(psycopg.connect(place)), None),
        "pg8000": (lambda: _on_driver("pg8000", place), None),
        "engine.connect": (engine.connect, outbox.Inbox()),
        "session": (lambda: Session(engine), outbox.Inbox()),
    }[kind]
    consumer = kafka.consumer("orders")
    with pytest.raises(InvalidConfig, match="transaction: its context manager has committed nothing"):
        consume(consumer, lambda *_: None, begin, inbox=inbox, stop=consumer.drained)
    assert (found(place), kafka.position("test")) == (([], 0), 0)
