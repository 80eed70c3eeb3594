"""`outbox_sqlalchemy.idempotent` on a session that FastAPI injects, or on its own; endpoints that swallow errors."""

import asyncio
from functools import wraps
from typing import Annotated

import httpx
import pytest
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from sqlalchemy import create_engine, text
from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker, create_async_engine
from sqlalchemy.orm import Session, sessionmaker

import outbox_sqlalchemy as outbox
from tests.integration.consuming.swallowing import COMMITS, WORK, WRONG, Handler, found, place

__all__ = ["place"]

ONE_CONNECTION = {"pool_size": 1, "max_overflow": 0, "pool_timeout": 2.0}
WORKS = text(WORK.format("before"))


class Check(BaseModel):
    """A model of the application with a status of its own, that of a site."""

    status_code: int


def answer(way, response, status):
    """Return an answer, or raise it."""
    if way == "raise":
        raise HTTPException(status)
    if way == "set":
        response.status_code = status
        return {}
    if way == "stream":
        return StreamingResponse(iter(["work"]))
    if way == "generator":
        return (number for number in range(3))
    if way == "model":
        return Check(status_code=status)
    return JSONResponse({}, status)


def synchronous(url, *, injects):
    """An application whose login reads the database in the session of the request, as most do."""
    sessions, app = sessionmaker(create_engine(url, **ONE_CONNECTION)), FastAPI()

    def get_session():
        with sessions() as session:
            yield session

    def login(session: Annotated[Session, Depends(get_session)]):
        session.execute(text("SELECT 1"))

    def again(request: Request, response: Response, session, way, status):
        del request, response, way, status
        return JSONResponse({"repeats": session.scalar(text("SELECT count(*) FROM effect"))})

    def work(session, response, way, status):
        if way in dir(Handler):
            getattr(Handler(lambda sql: session.execute(text(sql)), session), way)()
        else:
            session.execute(WORKS)
        return answer(way, response, status)

    if injects:

        @app.post("/", dependencies=[Depends(login)])
        @outbox.idempotent("api", repeated=again)
        def endpoint(
            request: Request,
            response: Response,
            session: Annotated[Session, Depends(get_session)],
            way: str = "",
            status: int = 201,
        ):
            del request
            return work(session, response, way, status)

    else:

        @app.post("/")
        @outbox.idempotent("api", sessions, repeated=again)
        def endpoint(request: Request, response: Response, session, way: str = "", status: int = 201):
            del request
            return work(session, response, way, status)

    app.state.get_session = get_session
    return app


def asynchronous(url, *, injects):
    """The same with asynchronous endpoints."""
    sessions, app = async_sessionmaker(create_async_engine(url, **ONE_CONNECTION)), FastAPI()

    async def get_session():
        async with sessions() as session:
            yield session

    async def login(session: Annotated[AsyncSession, Depends(get_session)]):
        await session.execute(text("SELECT 1"))

    async def again(request: Request, response: Response, session, way, status):
        del request, response, way, status
        return JSONResponse({"repeats": await session.scalar(text("SELECT count(*) FROM effect"))})

    async def work(session, response, way, status):
        if way in dir(Handler):
            await session.run_sync(lambda inner: getattr(Handler(lambda sql: inner.execute(text(sql)), inner), way)())
        else:
            await session.execute(WORKS)
        return answer(way, response, status)

    if injects:

        @app.post("/", dependencies=[Depends(login)])
        @outbox.idempotent("api", repeated=again)
        async def endpoint(
            request: Request,
            response: Response,
            session: Annotated[AsyncSession, Depends(get_session)],
            way: str = "",
            status: int = 201,
        ):
            del request
            return await work(session, response, way, status)

    else:

        @app.post("/")
        @outbox.idempotent("api", sessions, repeated=again)
        async def endpoint(request: Request, response: Response, session, way: str = "", status: int = 201):
            del request
            return await work(session, response, way, status)

    return app


async def _post(app, requests):
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    async with httpx.AsyncClient(transport=transport, base_url="http://app", timeout=30) as client:
        return await asyncio.gather(*(client.post("/", **one) for one in requests))


def statuses(app, *requests):
    """Return the answers' statuses of requests that are made at once, each a pair of a key or None and parameters."""
    asked = [{"headers": {} if key is None else {"Idempotency-Key": key}, "params": params} for key, params in requests]
    return [answer.status_code for answer in asyncio.run(_post(app, asked))]


KINDS = [(make, injects) for make in (synchronous, asynchronous) for injects in (True, False)]
NAMES = [f"{make.__name__}-{'injected' if injects else 'own'}" for make, injects in KINDS]


@pytest.fixture(params=KINDS, ids=NAMES)
def app(request, place):
    """An application of each kind."""
    make, injects = request.param
    return make(outbox.sqlalchemy_url(place), injects=injects)


@pytest.mark.parametrize("key", ["k", None])
def test_one_table_of_answers(app, place, key):
    """A refused request keeps nothing, with a key or without; another is kept, and a repeat adds nothing."""
    for params in ({"status": 422}, {"way": "raise", "status": 409}, {"way": "set", "status": 409}):
        assert statuses(app, (key, params)) == [params["status"]]
        assert found(place) == ([], 0)
    assert statuses(app, (key, {})) == [201]
    assert found(place) == (["before"], int(key is not None))
    assert statuses(app, (key, {})) == [200 if key else 201]
    assert found(place)[0] == ["before"] * (1 if key else 2)


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize(("way", "answered"), [("set", 503), ("model", 200)])
def test_the_status_is_that_of_the_answer(app, place, key, way, answered):
    """A status set on FastAPI's response counts, and a field of a returned object, of the same name, does not."""
    assert statuses(app, (key, {"way": way, "status": 503})) == [answered]
    kept = answered == 200
    assert found(place) == (["before"] * kept, int(kept and key is not None))


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("way", ["stream", "generator"])
def test_answers_that_are_made_after_the_commit(app, place, way, key):
    """An answer whose body does the work, outside the transaction, is refused, and nothing is kept."""
    assert statuses(app, (key, {"way": way})) == [500]
    assert found(place) == ([], 0)


@pytest.mark.parametrize("key", ["k", None])
@pytest.mark.parametrize("way", [*WRONG, "flush", "savepoint"])
def test_endpoints_that_swallow_errors(app, place, way, key):
    """An endpoint that swallows an error of the database answers 500, and nothing of its work is kept."""
    if way == "savepoint":
        assert statuses(app, (key, {"way": way})) == [201]
        assert found(place) == (["after", "before"], int(key is not None))
        return
    assert statuses(app, (key, {"way": way})) == [500]
    commits = way in COMMITS
    assert found(place) == (["before"] * commits, int(commits and key is not None))


def test_an_asynchronous_endpoint_behind_a_synchronous_decorator(place):
    """The endpoint's coroutine runs in the transaction: FastAPI, too, looks behind decorators."""
    sessions, app = async_sessionmaker(create_async_engine(outbox.sqlalchemy_url(place))), FastAPI()

    def plain(inner):
        @wraps(inner)
        def call(*args, **kwargs):
            return inner(*args, **kwargs)

        return call

    async def again(request: Request, session):
        del request
        return JSONResponse({"repeats": await session.scalar(text("SELECT count(*) FROM effect"))})

    @app.post("/")
    @outbox.idempotent("api", sessions, repeated=plain(again))
    @plain
    async def endpoint(request: Request, session):
        del request
        await session.execute(WORKS)
        return JSONResponse({}, 201)

    assert statuses(app, ("k", {})) == [201]
    assert found(place) == (["before"], 1)
    assert statuses(app, ("k", {})) == [200]


def test_a_request_holds_one_connection(place):
    """On the injected session a request needs no second connection: a pool of one serves forty requests at once."""
    app = asynchronous(outbox.sqlalchemy_url(place), injects=True)
    assert statuses(app, *((f"k{number}", {}) for number in range(40))) == [201] * 40
    assert found(place) == (["before"] * 40, 40)


def test_a_test_that_rolls_back(place):
    """A test overrides the dependency by a session that joins its own transaction, and rolls all of it back."""
    app = synchronous(outbox.sqlalchemy_url(place), injects=True)
    engine = create_engine(outbox.sqlalchemy_url(place))
    with engine.connect() as connection, connection.begin() as transaction:
        with Session(connection, join_transaction_mode="create_savepoint") as session:
            app.dependency_overrides[app.state.get_session] = lambda: session
            assert statuses(app, ("k", {})) == [201]
            assert statuses(app, ("k", {})) == [200]
            assert statuses(app, ("l", {"status": 422})) == [422]
            assert session.scalar(text("SELECT count(*) FROM effect")) == 1
        transaction.rollback()
    assert found(place) == ([], 0)
    engine.dispose()
