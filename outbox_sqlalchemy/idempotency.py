"""Idempotent endpoints of Starlette and FastAPI, in transactions of SQLAlchemy.

    @idempotent("orders-api", repeated=order_again)
    async def orders(request: Request, session: SessionDep): ...

See `outbox_core.inbox` for the promise.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import wraps
from inspect import Signature, isasyncgenfunction, iscoroutinefunction, isgeneratorfunction, signature, unwrap
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from sqlalchemy.ext.asyncio import AsyncSession, async_sessionmaker
from sqlalchemy.orm import Session, sessionmaker

from outbox_core.errors import InvalidMessageId
from outbox_core.inbox import is_refusal, refuse_late, request_key
from outbox_sqlalchemy.inbox import Inbox

if TYPE_CHECKING:
    from starlette.requests import Request

__all__ = ["idempotent"]

Endpoint = TypeVar("Endpoint", bound=Callable[..., Any])


def idempotent(
    source: str | Callable[[Request], str],
    sessions: Callable[..., Session] | Callable[..., AsyncSession] | None = None,
    *,
    repeated: Callable[..., Any],
    required: bool = False,
    inbox: Inbox | None = None,
) -> Callable[[Endpoint], Endpoint]:
    """Decorate an endpoint that changes data: a request that comes again with its Idempotency-Key has its effect once.

    The endpoint has the parameters `request` and `session`. The decorator accepts the key in the session's transaction,
    calls the endpoint and commits; an answer of 400 or more (a status that it sets on FastAPI's `response: Response`,
    too) and an exception, such as FastAPI's HTTPException, roll back and free the key, and so they do for a request
    without a key. An `async def` has an asynchronous session, a `def` a synchronous one. In FastAPI put it below
    `@app.post(...)`.

    The session is the one that the framework injects, as `session: Annotated[Session, Depends(get_session)]`: the one
    of the request's other dependencies, whose transaction goes on and is committed too. With `sessions` the decorator
    makes one, which FastAPI does not see; a request then holds a second connection beside that of a dependency.

    Args:
        source: the namespace of the keys, or a function of the request that returns it: where clients log in, the API
            and the account, since clients choose the keys.
        sessions: an `async_sessionmaker` or `sessionmaker`, or a function of the request that makes a session; None if
            the framework injects it. Answers that are made of its objects after the commit, as FastAPI's are, need
            `expire_on_commit=False`.
        repeated: called like the endpoint, in the same transaction, when the key was accepted before: it answers again
            from what the first request has committed, or with 422 if this one asks for something else.
        required: answer 400 to a request without a key, instead of handling it like any other.
        inbox: the inbox table; by default the one named `inbox`.

    Raises:
        TypeError: if the endpoint lacks one of the two parameters, only one of the two functions is asynchronous, or
            one is a generator.
        OutboxError: at a request whose endpoint returns a stream, whose work would be done after the commit: answered
            500, and nothing is kept.
        AcceptanceLost: at a request whose endpoint has caught an error of the database outside a savepoint, or ended
            the transaction: answered 500, as any other error.
    """
    table = inbox or Inbox()

    def decorate(endpoint: Endpoint) -> Endpoint:
        shown = _shown_signature(endpoint, repeated, has_session=sessions is None)

        def begin(args: tuple[Any, ...], kwargs: dict[str, Any]) -> _Request:
            given = shown.bind(*args, **kwargs).arguments
            key = request_key(given["request"], given["request"].headers, source, required=required)
            response = next(filter(_is_response, given.values()), None)
            if sessions is None:
                return _Request(table, key, response, given["session"], nullcontext(), {})
            is_maker = isinstance(sessions, sessionmaker | async_sessionmaker)
            session = sessions() if is_maker else sessions(given["request"])
            return _Request(table, key, response, session, session, {"session": session})

        shell = _asynchronous if _is_asynchronous(endpoint) else _synchronous
        handle: Endpoint = shell(begin, endpoint, repeated)
        handle.__signature__ = shown  # type: ignore[attr-defined]  # where FastAPI looks for parameters
        return handle

    return decorate


class _Request(NamedTuple):
    """A request with its session, the context in which that is open, and the argument by which an endpoint gets it.

    `response` is the one that FastAPI gives an endpoint with such a parameter, to set the status of what it returns.
    """

    inbox: Inbox
    key: tuple[str, str] | None
    response: Any
    session: Any
    opened: Any
    argument: dict[str, Any]

    def accept(self, session: Session) -> bool:
        if self.key is not None:
            return self.inbox.accept(session, *self.key)
        self.inbox.begin(session)
        return True

    def is_refused(self, answer: object) -> bool:
        response: Any = answer if _is_response(answer) else self.response
        return response is not None and is_refusal(response.status_code)

    def confirm(self, session: Session, answer: object) -> None:
        # Not a class: that of sse-starlette, for one, is none of Starlette's own.
        refuse_late(answer, is_finished=not (_is_response(answer) and hasattr(answer, "body_iterator")))
        if self.key is not None:
            self.inbox.confirm(session, *self.key)
        else:
            self.inbox.confirm_begun(session)


def _asynchronous(begin: Callable[..., _Request], endpoint: Any, repeated: Any) -> Any:
    @wraps(endpoint)
    async def handle(*args: Any, **kwargs: Any) -> Any:
        try:
            asked = begin(args, kwargs)
        except InvalidMessageId as error:
            return _problem(error)
        session = asked.session
        async with asked.opened:
            try:
                is_new = await session.run_sync(asked.accept)
                answer = await (endpoint if is_new else repeated)(*args, **asked.argument, **kwargs)
                if asked.is_refused(answer):
                    await session.rollback()
                    return answer
                if is_new:
                    await session.run_sync(asked.confirm, answer)
                await session.commit()
            except BaseException:
                await session.rollback()
                raise
        return answer

    return handle


def _synchronous(begin: Callable[..., _Request], endpoint: Any, repeated: Any) -> Any:
    @wraps(endpoint)
    def handle(*args: Any, **kwargs: Any) -> Any:
        try:
            asked = begin(args, kwargs)
        except InvalidMessageId as error:
            return _problem(error)
        session = asked.session
        with asked.opened:
            try:
                is_new = asked.accept(session)
                answer = (endpoint if is_new else repeated)(*args, **asked.argument, **kwargs)
                if asked.is_refused(answer):
                    session.rollback()
                    return answer
                if is_new:
                    asked.confirm(session, answer)
                session.commit()
            except BaseException:
                session.rollback()
                raise
        return answer

    return handle


def _shown_signature(endpoint: Callable[..., Any], repeated: Callable[..., Any], *, has_session: bool) -> Signature:
    """Return the endpoint's signature, with `session` or without, its annotations evaluated in its own module."""
    for each in (endpoint, repeated):
        inner = unwrap(each)
        if isgeneratorfunction(inner) or isasyncgenfunction(inner):
            raise TypeError(
                f"{inner.__qualname__} is a generator, whose work would be done after the commit; return an answer"
            )
    if _is_asynchronous(endpoint) != _is_asynchronous(repeated):
        raise TypeError(f"{endpoint.__qualname__} and {repeated.__qualname__}: write both with `async def`, or neither")
    full = signature(endpoint, eval_str=True)
    for name in ("request", "session"):
        if name not in full.parameters:
            raise TypeError(f"{endpoint.__qualname__} needs a parameter {name!r}")
    if has_session:
        return full
    return full.replace(parameters=[found for name, found in full.parameters.items() if name != "session"])


def _is_asynchronous(endpoint: Callable[..., Any]) -> bool:
    """Return True for an `async def`, also behind synchronous decorators, as FastAPI sees it."""
    return iscoroutinefunction(endpoint) or iscoroutinefunction(unwrap(endpoint))


def _is_response(value: object) -> bool:
    """Return True for a response; any other object may have a `status_code` of its own, as a model does."""
    from starlette.responses import Response

    return isinstance(value, Response)


def _problem(error: InvalidMessageId) -> Any:
    from starlette.responses import JSONResponse

    return JSONResponse({"error": str(error)}, status_code=400)
