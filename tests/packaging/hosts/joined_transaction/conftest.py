"""SQLAlchemy's recipe for test suites: the code commits as ever, within a transaction that each test rolls back."""

import os

import pytest
from orders import Base
from sqlalchemy import create_engine
from sqlalchemy.orm import Session

import outbox_sqlalchemy as outbox


@pytest.fixture(scope="session")
def engine():
    """The database with all tables."""
    engine = create_engine(outbox.sqlalchemy_url(os.environ["HOST_DATABASE"]))
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def connection(engine):
    """A connection whose transaction is rolled back at the end."""
    with engine.connect() as connection, connection.begin() as transaction:
        yield connection
        transaction.rollback()


@pytest.fixture
def session(connection):
    """A session that joins the transaction."""
    with Session(connection, join_transaction_mode="create_savepoint") as session:
        yield session
