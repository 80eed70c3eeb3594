"""The inbox through SQLAlchemy: the contract on every kind of session, and further rules."""

import asyncio
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import psycopg
import pytest
from sqlalchemy import Column, DateTime, Integer, MetaData, Table, Text, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import outbox_sqlalchemy as outbox
from outbox_core.schema import TableName, create_inbox_sql
from tests.contract.accept_contract import AcceptContract, accepted
from tests.integration.sqlalchemy.sync_sessions import SyncSessions


class _Receiver:
    def __init__(self, session):
        self.session = session

    def accept(self, source, message_id):
        return outbox.accept(self.session, source, message_id)

    def execute(self, sql):
        self.session.execute(text(sql))

    def savepoint(self):
        return self.session.begin_nested()


@pytest.fixture
def engine(inbox_database):
    """An engine for the database of the contract."""
    engine = create_engine(outbox.sqlalchemy_url(inbox_database))
    yield engine
    engine.dispose()


class TestSession(AcceptContract):
    """The contract on a Session."""

    @pytest.fixture
    def adapter(self, engine):
        """Sessions of one engine."""
        return SyncSessions(engine, Session, _Receiver)


class TestScopedSession(AcceptContract):
    """The contract on a scoped_session."""

    @pytest.fixture
    def adapter(self, engine):
        """Registries of sessions."""
        return SyncSessions(engine, lambda bind: scoped_session(sessionmaker(bind)), _Receiver)


class TestConnection(AcceptContract):
    """The contract on a Connection."""

    @pytest.fixture
    def adapter(self, engine):
        """Connections of one engine, which begin by themselves."""
        return SyncSessions(engine, lambda bind: bind.connect(), _Receiver)


class _AsyncReceiver:
    """A synchronous wrapper of an asynchronous session, whose event loop runs in another thread."""

    def __init__(self, run, session):
        self.run = run
        self.session = session

    def accept(self, source, message_id):
        return self.run(outbox.aaccept(self.session, source, message_id))

    def execute(self, sql):
        self.run(self.session.execute(text(sql)))

    @contextmanager
    def savepoint(self):
        async def begin():
            return await self.session.begin_nested()

        savepoint = self.run(begin())
        try:
            yield
        except BaseException:
            self.run(savepoint.rollback())
            raise
        self.run(savepoint.commit())


class _AsyncAdapter:
    def __init__(self, engine, run, make_session):
        self.engine = engine
        self.run = run
        self.make_session = make_session

    @contextmanager
    def _open(self, engine, *, commit):
        async def start():
            session = self.make_session(engine)
            return await session if hasattr(session, "__await__") else session

        session = self.run(start())
        try:
            yield _AsyncReceiver(self.run, session)
            if commit:
                self.run(session.commit())
        finally:
            self.run(session.close())

    def transaction(self):
        return self._open(self.engine, commit=True)

    def autocommit(self):
        return self._open(self.engine.execution_options(isolation_level="AUTOCOMMIT"), commit=False)


@pytest.fixture
def run():
    """Return a function that runs a coroutine, from any thread, in one event loop in the background."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever)
    thread.start()

    async def as_coroutine(awaitable):
        return await awaitable

    yield lambda awaitable: asyncio.run_coroutine_threadsafe(as_coroutine(awaitable), loop).result(60)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


@pytest.fixture
def async_engine(inbox_database, run):
    """An asynchronous engine for the database of the contract."""
    engine = create_async_engine(outbox.sqlalchemy_url(inbox_database))
    yield engine
    run(engine.dispose())


class TestAsyncSession(AcceptContract):
    """The contract on an AsyncSession."""

    @pytest.fixture
    def adapter(self, async_engine, run):
        """Asynchronous sessions of one engine."""
        return _AsyncAdapter(async_engine, run, AsyncSession)


class TestAsyncScopedSession(AcceptContract):
    """The contract on an async_scoped_session."""

    @pytest.fixture
    def adapter(self, async_engine, run):
        """Registries of asynchronous sessions."""

        def registry(bind):
            return async_scoped_session(async_sessionmaker(bind), scopefunc=threading.get_ident)

        return _AsyncAdapter(async_engine, run, registry)


class TestAsyncConnection(AcceptContract):
    """The contract on an AsyncConnection."""

    @pytest.fixture
    def adapter(self, async_engine, run):
        """Asynchronous connections of one engine."""
        return _AsyncAdapter(async_engine, run, lambda bind: bind.connect())


@pytest.fixture
def inbox_database(database):
    """A fresh database with an inbox."""
    with psycopg.connect(database) as connection:
        connection.execute(create_inbox_sql(TableName("inbox")))
    return database


@pytest.mark.complete
def test_fifty_threads(engine, inbox_database):
    """Of fifty threads that accept the same 300 ids, in batches, exactly one accepts each id."""

    def accept_all(first):
        won = 0
        for begin in range(first, first + 300, 25):
            with Session(engine) as session, session.begin():
                won += sum(outbox.accept(session, "api", number % 300) for number in range(begin, begin + 25))
        return won

    with ThreadPoolExecutor(50) as pool:
        assert sum(pool.map(accept_all, range(0, 1250, 25))) == 300
    assert len(accepted(inbox_database)) == 300


def test_inboxes_by_name_table_and_class(engine, inbox_database):
    """An inbox can be named by its name, a Table, a reflected table or a mapped class, in any schema."""

    class Base(DeclarativeBase):
        pass

    class Received(Base):
        __tablename__ = "received"
        origin: Mapped[str] = mapped_column("source", primary_key=True)
        number: Mapped[str] = mapped_column("message_id", primary_key=True)
        at: Mapped[object] = mapped_column("accept_time", DateTime(timezone=True))

    with psycopg.connect(inbox_database) as connection:
        connection.execute("CREATE SCHEMA billing")
        for name in ("billing.inbox", "received"):
            connection.execute(create_inbox_sql(TableName.parse(name)))
    handles = [
        outbox.Inbox("billing.inbox"),
        outbox.Inbox(outbox.make_inbox_table(MetaData(), "inbox", "billing")),
        outbox.Inbox(Table("inbox", MetaData(), schema="billing", autoload_with=engine)),
    ]
    with Session(engine) as session, session.begin():
        assert [handle.accept(session, "api", "a") for handle in handles] == [True, False, False]
        assert outbox.Inbox(Received).accept(session, "api", "b")
    assert accepted(inbox_database, "billing.inbox") == [("api", "a")]
    assert accepted(inbox_database, "received") == [("api", "b")]
    assert accepted(inbox_database) == []


def test_a_session_with_several_databases(engine, inbox_database):
    """The inbox is written in the database to which the session's binds map its table."""
    metadata = MetaData()
    orders = Table("orders", metadata, Column("id", Integer, primary_key=True))
    received = outbox.make_inbox_table(metadata)
    elsewhere = create_engine("postgresql+psycopg://nobody@127.0.0.1:1/x")
    with Session(binds={orders: elsewhere, received: engine}) as session:
        assert outbox.Inbox(received).accept(session, "api", "a")
        with pytest.raises(outbox.WrongSession, match=r"no database for the table 'inbox'.*Inbox\(table\)"):
            outbox.accept(session, "api", "a")
        session.commit()
    assert accepted(inbox_database) == [("api", "a")]


def test_nothing_is_flushed(engine):
    """Accepting does not flush pending changes, so that a repeat is recognised before any of them is sent."""

    class Base(DeclarativeBase):
        pass

    class Order(Base):
        __tablename__ = "orders"
        id: Mapped[int] = mapped_column(primary_key=True)

    with Session(engine) as session:
        session.add(Order(id=1))  # its table does not exist: a flush would raise
        assert outbox.accept(session, "api", "a")


def test_wrong_sessions(engine):
    """A session of the other kind is a TypeError that names the right function; another object is a TypeError too."""
    with pytest.raises(outbox.WrongSession, match=r"AsyncSession is asynchronous: use `await aaccept\(...\)`"):
        outbox.accept(AsyncSession(), "api", "a")
    with pytest.raises(TypeError, match="expected a Session, scoped_session or Connection, got Engine"):
        outbox.accept(engine, "api", "a")
    with Session(engine) as session, pytest.raises(TypeError, match=r"Session is synchronous: use `accept\(...\)`"):
        asyncio.run(outbox.aaccept(session, "api", "a"))


def test_what_is_no_inbox():
    """A table without the columns, an illegal name and an object other than a table are refused by the handle."""
    orders = Table("orders", MetaData(), Column("source", Text, primary_key=True))
    with pytest.raises(outbox.OutboxTableError, match="'orders' is no inbox: it has no column message_id, accept_time"):
        outbox.Inbox(orders)
    with pytest.raises(outbox.InvalidConfig):
        outbox.Inbox("a.b.c")
    with pytest.raises(outbox.WrongSession, match="expected a table's name, a Table or a mapped class"):
        outbox.Inbox(int)
