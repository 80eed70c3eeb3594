"""The database's address: PAYMENTS_DATABASE_DSN, else OUTBOX_POSTGRES_DSN as `python -m devstack up` prints it."""

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import URL
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine

from outbox_sqlalchemy import sqlalchemy_url

_DEFAULT = "postgresql://postgres@127.0.0.1:5432/payments"

Sessions = async_sessionmaker[AsyncSession]


def database_url() -> URL:
    """Return the database's URL, for synchronous and asynchronous engines."""
    environ = os.environ
    return sqlalchemy_url(environ.get("PAYMENTS_DATABASE_DSN") or environ.get("OUTBOX_POSTGRES_DSN") or _DEFAULT)


@asynccontextmanager
async def open_sessions(connections: int = 10) -> AsyncIterator[Sessions]:
    """Yield a factory of sessions, over a pool of at most `connections` connections."""
    engine = create_async_engine(database_url(), pool_size=connections, max_overflow=0)
    try:
        yield async_sessionmaker(engine, expire_on_commit=False)
    finally:
        await engine.dispose()
