"""Idempotent endpoints of Starlette and FastAPI, in transactions of SQLAlchemy.

    @idempotent("orders-api", Sessions, repeated=order_again)
    async def orders(request, session): ...

See `outbox_core.inbox` for the promise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Signature, iscoroutinefunction, signature
from typing import TYPE_CHECKING, Any, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from outbox_core.errors import InvalidMessageId
from outbox_core.inbox import is_refusal, request_key
from outbox_sqlalchemy.inbox import Inbox

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["idempotent"]

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def idempotent(
    source: str | Callable[[Request], str],
    sessions: Callable[..., Session] | Callable[..., AsyncSession],
    *,
    repeated: Callable[..., Any],
    required: bool = False,
    inbox: Inbox | None = None,
) -> Callable[[Endpoint], Endpoint]:
    """Decorate an endpoint that changes data: a request that comes again with its Idempotency-Key has its effect once.

    The endpoint has the parameters `request` and `session`. The decorator begins the session's transaction, accepts the
    key, calls the endpoint and commits; an answer of 400 or more and an exception, such as FastAPI's HTTPException,
    roll back and free the key. An `async def` gets an asynchronous session, a `def` a synchronous one. In FastAPI put
    it below `@app.post(...)`, which does not see `session`; all other parameters work as ever.

    Args:
        source: the namespace of the keys, or a function of the request that returns it: where clients log in, the API
            and the account, since clients choose the keys.
        sessions: an `async_sessionmaker` or `sessionmaker`, or a function of the request that makes a session. Answers
            that are made of its objects after the commit, as FastAPI's are, need `expire_on_commit=False`.
        repeated: called like the endpoint, in the same transaction, when the key was accepted before: it answers again
            from what the first request has committed, or with 422 if this one asks for something else.
        required: answer 400 to a request without a key, instead of handling it like any other.
        inbox: the inbox table; by default the one named `inbox`.

    Raises:
        TypeError: if the endpoint lacks one of the two parameters, or only one of the two functions is asynchronous.
    """
    table = inbox or Inbox()

    def decorate(endpoint: Endpoint) -> Endpoint:
        shown = _shown_signature(endpoint, repeated)

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, tuple[str, str] | None]:
            request = shown.bind(*args, **kwargs).arguments["request"]
            key = request_key(request, request.headers, source, required=required)
            is_maker = isinstance(sessions, sessionmaker | async_sessionmaker)
            return sessions() if is_maker else sessions(request), key

        shell = _asynchronous if iscoroutinefunction(endpoint) else _synchronous
        handle: Endpoint = shell(begin, table, endpoint, repeated)
        handle.__signature__ = shown  # type: ignore[attr-defined]  # where FastAPI looks for parameters
        return handle

    return decorate


def _asynchronous(begin: Callable[..., Any], inbox: Inbox, endpoint: Any, repeated: Any) -> Any:
    @wraps(endpoint)
    async def handle(*args: Any, **kwargs: Any) -> Any:
        try:
            session, key = begin(args, kwargs)
        except InvalidMessageId as error:
            return _problem(error)
        async with session, session.begin() as transaction:
            is_new = key is None or await inbox.aaccept(session, *key)
            answer = await (endpoint if is_new else repeated)(*args, session=session, **kwargs)
            if is_refusal(answer):
                await transaction.rollback()
        return answer

    return handle


def _synchronous(begin: Callable[..., Any], inbox: Inbox, endpoint: Any, repeated: Any) -> Any:
    @wraps(endpoint)
    def handle(*args: Any, **kwargs: Any) -> Any:
        try:
            session, key = begin(args, kwargs)
        except InvalidMessageId as error:
            return _problem(error)
        with session, session.begin() as transaction:
            is_new = key is None or inbox.accept(session, *key)
            answer = (endpoint if is_new else repeated)(*args, session=session, **kwargs)
            if is_refusal(answer):
                transaction.rollback()
        return answer

    return handle


def _shown_signature(endpoint: Callable[..., Any], repeated: Callable[..., Any]) -> Signature:
    """Return the endpoint's signature without `session`, its annotations evaluated in its own module."""
    if iscoroutinefunction(endpoint) != iscoroutinefunction(repeated):
        raise TypeError(f"{endpoint.__qualname__} and {repeated.__qualname__}: write both with `async def`, or neither")
    full = signature(endpoint, eval_str=True)
    for name in ("request", "session"):
        if name not in full.parameters:
            raise TypeError(f"{endpoint.__qualname__} needs a parameter {name!r}")
    return full.replace(parameters=[found for name, found in full.parameters.items() if name != "session"])


def _problem(error: InvalidMessageId) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": str(error)}, status_code=400)
