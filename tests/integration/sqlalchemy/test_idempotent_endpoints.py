"""`outbox_sqlalchemy.idempotent` in real applications on a real Postgres: a repeated request has its effect once."""

import asyncio
from functools import wraps

import httpx
import psycopg
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request
from pydantic import BaseModel
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import async_sessionmaker, create_async_engine
from sqlalchemy.orm import sessionmaker
from sqlalchemy.pool import NullPool
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import outbox_sqlalchemy as outbox
from outbox_core.schema import TableName, create_inbox_sql, create_table_sql

SCHEMA = "CREATE TABLE grp (id bigint GENERATED ALWAYS AS IDENTITY, name text)"
FIRST = text("SELECT id, name FROM grp")
MAKE = text("INSERT INTO grp (name) VALUES (:name) RETURNING id")
RECORD = outbox.OutboxRecord(topic="groups", key=1, value=b"v")


class Group(BaseModel):
    """The body of a request; `status` is the answer that it gets, 500 an error of the handler."""

    name: str = "a"
    status: int = 201


def account_of(request):
    """The namespace of keys: the account."""
    return request.headers.get("Account", "groups-api")


def _starlette(url):
    """An application of asynchronous Starlette endpoints."""
    sessions = async_sessionmaker(create_async_engine(url, poolclass=NullPool))

    async def again(request, session):
        number, name = (await session.execute(FIRST)).one()
        asked = Group(**await request.json())
        return JSONResponse({"id": number}, 201 if asked.name == name else 422)

    async def groups(request, session):
        asked = Group(**await request.json())
        number = await session.scalar(MAKE, {"name": asked.name})
        await outbox.astash(session, RECORD)
        if asked.status == 500:
            raise RuntimeError("after the work")
        return JSONResponse({"id": number}, asked.status)

    endpoint = outbox.idempotent(account_of, lambda _: sessions(), repeated=again)(groups)
    strict = outbox.idempotent("groups-api", sessions, repeated=again, required=True)(groups)
    return Starlette(
        routes=[Route(path, found, methods=["POST"]) for path, found in (("/", endpoint), ("/strict", strict))]
    )


def _fastapi(url):
    """An application of synchronous FastAPI endpoints with a body and a dependency, which run in threads."""
    sessions, app = sessionmaker(create_engine(url, poolclass=NullPool)), FastAPI()

    def again(group: Group, request: Request, session, user):
        del request
        number, name = session.execute(FIRST).one()
        return {"id": number} if group.name == name else JSONResponse({"user": user}, 422)

    def groups(group: Group, request: Request, session, user: str = Depends(lambda: "ada")):
        assert (request.method, user) == ("POST", "ada")
        number = session.scalar(MAKE, {"name": group.name})
        outbox.stash(session, RECORD)
        if group.status == 500:
            raise RuntimeError("after the work")
        if group.status != 201:
            raise HTTPException(group.status)
        return {"id": number}

    endpoint = outbox.idempotent(account_of, sessions, repeated=again)(groups)
    strict = outbox.idempotent("groups-api", sessions, repeated=again, required=True)(groups)
    app.post("/", status_code=201)(endpoint)
    app.post("/strict", status_code=201)(strict)
    return app


@pytest.fixture(params=[_starlette, _fastapi], ids=["starlette", "fastapi"])
def post(request, database):
    """A function that posts each of several requests to an application at once, and returns the answers."""
    with psycopg.connect(database) as connection:
        for statement in (SCHEMA, create_table_sql(TableName("outbox")), create_inbox_sql(TableName("inbox"))):
            connection.execute(statement)
    app = request.param(outbox.sqlalchemy_url(database))

    async def send(requests):
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://groups") as client:
            return await asyncio.gather(*(client.post(**one) for one in requests))

    def post(key, *, times=1, path="/", account=None, **group):
        headers = {
            name: value for name, value in {"Idempotency-Key": key, "Account": account}.items() if value is not None
        }
        answers = asyncio.run(send([{"url": path, "headers": headers, "json": group}] * times))
        return answers if times > 1 else answers[0]

    return post


@pytest.fixture
def rows(database):
    """A function that counts the rows of work, outbox and inbox."""

    def count():
        with psycopg.connect(database) as connection:
            tables = ("grp", "outbox", "inbox")
            return [connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0] for table in tables]

    return count


def test_a_repeat_is_answered_from_the_first(post, rows):
    """A repeat changes nothing, and says 422 if it asks for something else; without a key each request is a new one."""
    first, second = post("k"), post("k")
    assert (first.status_code, second.status_code) == (201, 201)
    assert first.json() == second.json() == {"id": 1}
    assert post("k", name="b").status_code == 422
    assert rows() == [1, 1, 1]
    assert post("k", name="b", account="another").status_code == 201
    assert post(None, name="c").status_code == 201
    assert rows() == [3, 3, 2]


def test_a_request_that_fails_frees_its_key(post, rows):
    """An answer of 400 or more, and an exception, roll back the work with its key, which may come again."""
    assert post("k", status=409).status_code == 409
    assert post("k", status=500).status_code == 500
    assert post(None, status=409).status_code == 409
    assert rows() == [0, 0, 0]
    assert post("k").status_code == 201
    assert rows() == [1, 1, 1]


def test_requests_that_overtake_each_other(post, rows):
    """Of the same request at once, one does the work, and all get its answer."""
    answers = post("k", times=6)
    assert {(answer.status_code, answer.text) for answer in answers} == {(201, '{"id":1}')}
    assert rows() == [1, 1, 1]


def test_keys_that_cannot_be(post, rows):
    """A key that is too long, and a missing one that is required, are answered 400."""
    assert post("k" * 1001).json()["error"].startswith("Idempotency-Key: ")
    assert post("k" * 1001).status_code == post("").status_code == 400
    answer = post(None, path="/strict")
    assert (answer.status_code, "the header Idempotency-Key is missing" in answer.text) == (400, True)
    assert rows() == [0, 0, 0]


def test_endpoints_that_cannot_be():
    """An endpoint without request or session, and one of each kind, are refused where they are written."""

    async def later(request, session):
        raise AssertionError(request, session)

    def now(request, session):
        raise AssertionError(request, session)

    def lines(request, session):
        yield request, session

    async def later_lines(request, session):
        yield request, session

    def hidden(function):
        @wraps(function)
        def call(request, session):
            return function(request, session)

        return call

    decorate = outbox.idempotent("groups-api", sessionmaker(), repeated=now)
    for wrong, problem in (
        (lines, r"lines is a generator, whose work would be done after the commit"),
        (hidden(later_lines), r"later_lines is a generator"),
        (hidden(later), r"later and .*now: write both with `async def`, or neither"),
        (later, r"later and .*now: write both with `async def`, or neither"),
        (lambda request: request, "needs a parameter 'session'"),
        (lambda session: session, "needs a parameter 'request'"),
    ):
        with pytest.raises(TypeError, match=problem):
            decorate(wrong)
