"""The contract of stashing, on every kind of SQLAlchemy session and connection."""

import asyncio
from contextlib import contextmanager

import pytest
from sqlalchemy import MetaData, Table, create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_scoped_session, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, scoped_session, sessionmaker

import outbox_sqlalchemy as outbox
from tests.contract.stash_contract import CaptureContract, StashContract, TextStashContract
from tests.integration.sqlalchemy.sync_sessions import SyncSessions


class _SyncWriter:
    """A writer on a session or connection with a transaction."""

    def __init__(self, session, outbox_=outbox):
        self.session = session
        self.outbox = outbox_

    def stash(self, record):
        self.outbox.stash(self.session, record)

    def stash_many(self, records):
        self.outbox.stash_many(self.session, records)

    def execute(self, sql):
        self.session.execute(text(sql))

    def savepoint(self):
        return self.session.begin_nested()


@pytest.fixture
def engine(outbox_database):
    """An engine for the database of the contract."""
    engine = create_engine(outbox.sqlalchemy_url(outbox_database))
    yield engine
    engine.dispose()


class TestSession(StashContract, CaptureContract):
    """The contract on a Session."""

    @pytest.fixture
    def adapter(self, engine):
        """Sessions of one engine."""
        return SyncSessions(engine, Session, _SyncWriter)


class TestScopedSession(StashContract):
    """The contract on a scoped_session."""

    @pytest.fixture
    def adapter(self, engine):
        """Registries of sessions."""
        return SyncSessions(engine, lambda bind: scoped_session(sessionmaker(bind)), _SyncWriter)


class TestConnection(StashContract, CaptureContract):
    """The contract on a Connection."""

    @pytest.fixture
    def adapter(self, engine):
        """Connections of one engine, which begin by themselves."""
        return SyncSessions(engine, lambda bind: bind.connect(), _SyncWriter)


class TestReflectedText(TextStashContract):
    """The contract of the text layout, on a reflected table."""

    @pytest.fixture
    def adapter(self, engine):
        """Sessions that stash into the reflected table."""
        reflected = Table("outbox", MetaData(), autoload_with=engine)
        return SyncSessions(engine, Session, lambda session: _SyncWriter(session, outbox.Outbox(reflected)))


class _AsyncWriter:
    """A synchronous wrapper of an asynchronous session, whose event loop runs during each method."""

    def __init__(self, runner, session):
        self.runner = runner
        self.session = session

    def stash(self, record):
        self.runner.run(outbox.astash(self.session, record))

    def stash_many(self, records):
        self.runner.run(outbox.astash_many(self.session, records))

    def execute(self, sql):
        async def run():
            await self.session.execute(text(sql))

        self.runner.run(run())

    @contextmanager
    def savepoint(self):
        async def begin():
            return await self.session.begin_nested()

        async def end(action):
            await action()

        savepoint = self.runner.run(begin())
        try:
            yield
        except BaseException:
            self.runner.run(end(savepoint.rollback))
            raise
        self.runner.run(end(savepoint.commit))


class _AsyncAdapter:
    def __init__(self, engine, runner, make_session):
        self.engine = engine
        self.runner = runner
        self.make_session = make_session

    @contextmanager
    def _open(self, engine, *, commit):
        async def start():
            session = self.make_session(engine)
            return await session if hasattr(session, "__await__") else session

        async def commit_it():
            await session.commit()

        async def close():
            await session.close()

        session = self.runner.run(start())
        try:
            yield _AsyncWriter(self.runner, session)
            if commit:
                self.runner.run(commit_it())
        finally:
            self.runner.run(close())

    def transaction(self):
        return self._open(self.engine, commit=True)

    def autocommit(self):
        return self._open(self.engine.execution_options(isolation_level="AUTOCOMMIT"), commit=False)


@pytest.fixture
def runner():
    """One event loop for the length of a test."""
    with asyncio.Runner() as runner:
        yield runner


@pytest.fixture
def async_engine(outbox_database, runner):
    """An asynchronous engine for the database of the contract."""
    engine = create_async_engine(outbox.sqlalchemy_url(outbox_database))
    yield engine

    async def dispose():
        await engine.dispose()

    runner.run(dispose())


class TestAsyncSession(StashContract, CaptureContract):
    """The contract on an AsyncSession."""

    @pytest.fixture
    def adapter(self, async_engine, runner):
        """Asynchronous sessions of one engine."""
        return _AsyncAdapter(async_engine, runner, AsyncSession)


class TestAsyncScopedSession(StashContract):
    """The contract on an async_scoped_session."""

    @pytest.fixture
    def adapter(self, async_engine, runner):
        """Registries of asynchronous sessions."""
        return _AsyncAdapter(
            async_engine, runner, lambda bind: async_scoped_session(async_sessionmaker(bind), scopefunc=lambda: 1)
        )


class TestAsyncConnection(StashContract):
    """The contract on an AsyncConnection."""

    @pytest.fixture
    def adapter(self, async_engine, runner):
        """Asynchronous connections of one engine."""
        return _AsyncAdapter(async_engine, runner, lambda bind: bind.connect())
