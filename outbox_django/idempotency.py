"""Idempotent endpoints: a request that a client repeats with its Idempotency-Key has its effect once.

    @idempotent("orders-api", repeated=order_again)
    def orders(request): ...

The view runs in a transaction that first accepts the key in the inbox. What the view commits is committed with its key,
so the same request is either done as a whole, or may come again:

- an answer of 400 or more, or an exception, rolls back and frees the key;
- a repeat that overtakes the answer of the first waits for the outcome of its transaction;
- no key stays "in progress" after a crash.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

from django.db import transaction
from django.http import HttpRequest, HttpResponseBase, JsonResponse

from outbox_core.errors import InvalidMessageId
from outbox_django.inbox import InboxTable, configured_inbox

_HEADER = "Idempotency-Key"

View = TypeVar("View", bound=Callable[..., HttpResponseBase])


def idempotent(
    source: str | Callable[[HttpRequest], str],
    *,
    repeated: Callable[..., HttpResponseBase],
    required: bool = False,
    using: str | None = None,
    inbox: InboxTable | None = None,
) -> Callable[[View], View]:
    """Decorate a view that changes data. Put it below decorators that look at the request alone.

    Args:
        source: the namespace of the keys, or a function of the request that returns it: where clients log in, the API
            and the account, since clients choose the keys.
        repeated: called like the view, in the same transaction, when the key was accepted before: it answers again from
            what the first request has committed, or with 422 if this one asks for something else.
        required: answer 400 to a request without a key, instead of handling it like any other.
        using: alias of the database; without it as of `accept`.
        inbox: the inbox table; by default the one of the OUTBOX setting.
    """

    def decorate(view: View) -> View:
        if iscoroutinefunction(view):
            raise TypeError(f"{view.__qualname__} is asynchronous, and Django's transactions are not; write `def`")

        @wraps(view)
        def handle(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            key = request.headers.get(_HEADER)
            if key is None:
                if required:
                    return _problem(f"the header {_HEADER} is missing: send one with each new request")
                return view(request, *args, **kwargs)
            table = inbox or configured_inbox()
            alias = table.alias(using)
            namespace = source(request) if callable(source) else source
            with transaction.atomic(using=alias):
                try:
                    is_new = table.accept(namespace, key, using=alias)
                except InvalidMessageId as error:
                    return _problem(f"{_HEADER}: {error}")
                answer = (view if is_new else repeated)(request, *args, **kwargs)
                if answer.status_code >= 400:
                    transaction.set_rollback(True, using=alias)
                return answer

        return cast("View", handle)

    return decorate


def _problem(text: str) -> JsonResponse:
    return JsonResponse({"error": text}, status=400)
