"""The application's own suite."""

import asyncio
import os

import httpx
import pytest
from app import Base, Item, User, app, get_session, make_engine
from sqlalchemy import func, select
from sqlalchemy.orm import Session

AT_ONCE = 40
"""Requests at once: more than the pool has connections."""


@pytest.fixture
def engine():
    """The database with all tables, and one user; everything is dropped at the end."""
    engine = app.state.engine = make_engine(os.environ["HOST_DATABASE"])
    Base.metadata.create_all(engine)
    with Session(engine) as session:
        session.add(User(token="ada"))
        session.commit()
    yield engine
    Base.metadata.drop_all(engine)
    engine.dispose()


def post(*requests):
    """Post requests at once, each a path and its headers; return the answers."""

    async def send():
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=60) as client:
            sent = [client.post(path, headers={"token": "ada", **headers}) for path, headers in requests]
            return await asyncio.gather(*sent)

    return asyncio.run(send())


def counts(session):
    """Count items, records and acceptances."""
    tables = (Item, Base.metadata.tables["outbox"], Base.metadata.tables["inbox"])
    return [session.scalar(select(func.count()).select_from(table)) for table in tables]


def test_a_repeat_has_no_effect(engine):
    """The first request works in the injected session and is committed; a repeat is answered from it."""
    key = {"Idempotency-Key": "k"}
    (first,) = post(("/items/pen", key))
    (second,) = post(("/items/pen", key))
    assert (first.status_code, first.json()) == (second.status_code, second.json())
    with Session(engine) as session:
        assert counts(session) == [1, 1, 1]


def test_what_is_refused_is_not_kept(engine):
    """A refusal rolls back, with a key or without."""
    answers = post(("/items/forbidden", {"Idempotency-Key": "k"}), ("/items/forbidden", {}))
    assert [answer.status_code for answer in answers] == [422, 422]
    with Session(engine) as session:
        assert counts(session) == [0, 0, 0]


def test_a_request_holds_one_connection(engine):
    """Far more requests at once than the pool has connections are all answered."""
    answers = post(*(("/items/pen", {"Idempotency-Key": str(number)}) for number in range(AT_ONCE)))
    assert [answer.status_code for answer in answers] == [201] * AT_ONCE
    with Session(engine) as session:
        assert counts(session) == [AT_ONCE] * 3


def test_a_session_that_a_test_injects(engine, outbox_records):
    """`dependency_overrides` reaches the decorator, in a transaction that the test rolls back."""
    with engine.connect() as connection, connection.begin() as transaction:
        session = Session(connection, join_transaction_mode="create_savepoint", expire_on_commit=False)
        app.dependency_overrides[get_session] = lambda: session
        try:
            answers = post(("/items/pen", {"Idempotency-Key": "k"})) + post(("/items/pen", {"Idempotency-Key": "k"}))
        finally:
            app.dependency_overrides.clear()
        assert [answer.status_code for answer in answers] == [201, 201]
        outbox_records.assert_stashed("items", value={"name": "pen"}, count=1)
        assert counts(session) == [1, 1, 1]
        session.close()
        transaction.rollback()
    with Session(engine) as session:
        assert counts(session) == [0, 0, 0]
