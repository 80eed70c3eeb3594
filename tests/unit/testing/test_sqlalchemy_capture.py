"""Captures on SQLAlchemy: an outbox in memory beside a database on SQLite."""

import asyncio
from contextlib import suppress

import pytest
from sqlalchemy import MetaData, StaticPool, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker
from starlette.requests import Request
from starlette.responses import Response

import outbox_sqlalchemy as outbox
from outbox_core.testing import in_memory_outbox
from outbox_sqlalchemy import OutboxRecord, TransactionRequired, WrongSession
from outbox_sqlalchemy.testing import application_tables


class Base(DeclarativeBase):
    """The tables of an application."""

    metadata = MetaData()


class Order(Base):
    """An order."""

    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)


orders_outbox = outbox.Outbox(outbox.make_outbox_table(Base.metadata, "orders_outbox"))
outbox.make_hold_table(Base.metadata, "orders_outbox")
outbox.make_history_tables(Base.metadata, "orders_outbox")
outbox.make_inbox_table(Base.metadata)


@pytest.fixture
def engine():
    """Return an engine on SQLite, in memory, with the application's own tables."""
    engine = create_engine("sqlite://", poolclass=StaticPool)
    Base.metadata.create_all(engine, tables=application_tables(Base.metadata))
    yield engine
    engine.dispose()


def test_application_tables():
    """The application's own tables are those that an outbox, its holds, its history and its inbox leave."""
    assert application_tables(Base.metadata) == [Order.__table__]


class _Undo(Exception):
    """An error that rolls back."""


def _keys(records):
    return [record.key for record in records]


def test_tables_of_the_outbox_are_left_out(engine):
    """The schema of a test on SQLite has the application's tables alone."""
    with engine.connect() as connection:
        names = connection.scalars(text("SELECT name FROM sqlite_master WHERE type = 'table'")).all()
    assert names == ["orders"]


def test_a_session_on_sqlite(engine, in_memory_outbox):
    """Records of a session are kept while its data are written; a rolled-back session's are not stashed."""
    with Session(engine) as session, session.begin():
        session.add(Order(id=1))
        outbox.stash(session, OutboxRecord("orders", 1))
        orders_outbox.stash_many(session, (OutboxRecord("orders", n) for n in (2, 3)))
        assert in_memory_outbox.committed == []
    assert _keys(in_memory_outbox.committed) == ["1", "2", "3"]
    with suppress(_Undo), Session(engine) as session, session.begin():
        outbox.stash(session, OutboxRecord("orders", 4))
        raise _Undo
    with Session(engine) as session:  # never committed
        session.add(Order(id=5))
        outbox.stash(session, OutboxRecord("orders", 5))
        assert _keys(in_memory_outbox) == ["1", "2", "3", "5"]
    assert _keys(in_memory_outbox) == ["1", "2", "3"]
    assert _keys(in_memory_outbox.rolled_back) == ["4", "5"]
    with Session(engine) as session:
        assert session.query(Order).count() == 1
    with pytest.raises(AssertionError, match="it was stashed, but its transaction or savepoint was rolled back"):
        in_memory_outbox.assert_stashed("orders", key=4)


def test_savepoints(engine, in_memory_outbox):
    """A savepoint's rollback takes its own records along, also those of savepoints in it, and no others."""
    with Session(engine) as session, session.begin():
        outbox.stash(session, OutboxRecord("t", "before"))
        with suppress(_Undo), session.begin_nested():
            outbox.stash(session, OutboxRecord("t", "outer"))
            with session.begin_nested():
                outbox.stash(session, OutboxRecord("t", "inner"))
            raise _Undo
        with session.begin_nested():
            outbox.stash(session, OutboxRecord("t", "released"))
        outbox.stash(session, OutboxRecord("t", "after"))
    assert _keys(in_memory_outbox) == ["before", "released", "after"]
    assert _keys(in_memory_outbox.rolled_back) == ["outer", "inner"]


def test_a_savepoint_that_is_older_than_the_first_stash(engine, in_memory_outbox):
    """A rollback to a savepoint from before the first stash takes all records of its connection, and of no other."""
    other = create_engine("sqlite://")
    with other.connect() as elsewhere, Session(engine) as session, session.begin():
        outbox.stash(elsewhere, OutboxRecord("t", "elsewhere"))
        with suppress(_Undo), session.begin_nested():
            outbox.stash(session, OutboxRecord("t", "gone"))
            raise _Undo
        assert _keys(in_memory_outbox) == ["elsewhere"]
    assert _keys(in_memory_outbox) == []


def test_a_session_within_the_tests_own_transaction(engine, in_memory_outbox):
    """In a test's outer transaction, commits of the code under test keep its records, and rollbacks drop them."""
    with engine.connect() as connection, connection.begin() as outer:
        sessions = sessionmaker(connection, join_transaction_mode="create_savepoint")
        with sessions() as session, session.begin():
            outbox.stash(session, OutboxRecord("t", "committed"))
        with suppress(_Undo), sessions() as session, session.begin():
            outbox.stash(session, OutboxRecord("t", "rolled back"))
            raise _Undo
        assert _keys(in_memory_outbox) == ["committed"]
        outer.rollback()
    assert _keys(in_memory_outbox) == []


def test_stand_ins(in_memory_outbox):
    """Without a database the session may be any object, or one of SQLAlchemy's without a bind."""

    async def stash_on(session):
        await outbox.astash(session, OutboxRecord("t", 4))
        await outbox.astash_many(session, [OutboxRecord("t", 5)])

    outbox.stash(object(), OutboxRecord("t", 1))
    outbox.stash_many(None, [OutboxRecord("t", 2)])
    outbox.stash(Session(), OutboxRecord("t", 3))
    asyncio.run(stash_on(object()))
    asyncio.run(stash_on(AsyncSession()))
    assert _keys(in_memory_outbox) == ["1", "2", "3", "4", "5", "4", "5"]


def test_what_is_wrong_with_a_real_session_is_still_said(engine, in_memory_outbox):
    """An outbox in memory refuses autocommit, and a session of the other kind, as the database's does."""
    with engine.connect() as connection:
        connection.execution_options(isolation_level="AUTOCOMMIT")
        if getattr(connection.connection.dbapi_connection, "autocommit", None) is True:  # not before Python 3.12
            with pytest.raises(TransactionRequired):
                outbox.stash(connection, OutboxRecord("t"))
    with pytest.raises(WrongSession, match="asynchronous"):
        outbox.stash(AsyncSession(), OutboxRecord("t"))
    with pytest.raises(WrongSession, match="synchronous"):
        asyncio.run(outbox.astash(Session(engine), OutboxRecord("t")))
    assert in_memory_outbox == []


def test_nothing_is_left_of_a_capture(engine):
    """After its end a connection has no listeners of ours, and another capture begins anew."""
    with engine.connect() as connection:
        for key in ("1", "2"):
            with in_memory_outbox() as stashed:
                outbox.stash(connection, OutboxRecord("t", key))
                assert connection.dispatch.rollback
            assert not connection.dispatch.rollback
            assert _keys(stashed) == [key]
        connection.rollback()
        assert _keys(stashed) == ["2"]


@pytest.mark.parametrize("status", [201, 409])
def test_idempotent_endpoints_without_a_key(engine, in_memory_outbox, status):
    """On another database a request without a key is handled as ever: nothing of PostgreSQL's is asked of it."""

    def again(request, session):
        raise AssertionError(request, session)

    @outbox.idempotent("orders-api", repeated=again)
    def endpoint(request, session):
        del request
        session.add(Order(id=1))
        outbox.stash(session, OutboxRecord("t", "k"))
        return Response(status_code=status)

    with Session(engine) as session:
        assert endpoint(Request({"type": "http", "headers": []}), session).status_code == status
        session.rollback()
        assert session.query(Order).count() == (status == 201)
    assert _keys(in_memory_outbox) == ["k"] * (status == 201)
