"""Idempotent endpoints: a request that a client repeats with its Idempotency-Key has its effect once.

    @idempotent("orders-api", repeated=order_again)
    def orders(request): ...

See `outbox_core.inbox` for the promise.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial, wraps
from inspect import iscoroutinefunction
from typing import Any, TypeVar, cast

from django.db import transaction
from django.http import FileResponse, HttpRequest, HttpResponseBase, JsonResponse

from outbox_core.errors import InvalidMessageId
from outbox_core.inbox import is_refusal, refuse_late, request_key
from outbox_django.databases import whole_atomic
from outbox_django.inbox import InboxTable, configured_inbox

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
        required: answer 400 to a request without a key, instead of handling it like any other: in a transaction that an
            answer of 400 or more rolls back.
        using: alias of the database; without it as of `accept`.
        inbox: the inbox table; by default the one of the OUTBOX setting.

    Raises:
        TypeError: if the view is asynchronous.
        OutboxError: at a request whose view returns no response, or one that is made later, as a
            `StreamingHttpResponse` is: what it does then belongs to no transaction. A `FileResponse` may be.
    """

    def decorate(view: View) -> View:
        if iscoroutinefunction(view):
            raise TypeError(f"{view.__qualname__} is asynchronous, and Django's transactions are not; write `def`")

        @wraps(view)
        def handle(request: HttpRequest, *args: Any, **kwargs: Any) -> HttpResponseBase:
            try:
                key = request_key(request, request.headers, source, required=required)
            except InvalidMessageId as error:
                return JsonResponse({"error": str(error)}, status=400)
            table = inbox or configured_inbox()
            alias = table.alias(using)
            with whole_atomic(alias):
                if key is None:
                    is_new, confirm = True, table.confirm_begun
                    table.begin(using=alias)
                else:
                    is_new, confirm = table.accept(*key, using=alias), partial(table.confirm, *key)
                answer = (view if is_new else repeated)(request, *args, **kwargs)
                if isinstance(answer, HttpResponseBase) and is_refusal(answer.status_code):
                    transaction.set_rollback(True, using=alias)
                elif is_new:
                    refuse_late(answer, is_finished=_is_finished(answer))
                    confirm(using=alias)
                return answer

        return cast("View", handle)

    return decorate


def _is_finished(answer: object) -> bool:
    is_stream = getattr(answer, "streaming", False) and not isinstance(answer, FileResponse)
    return isinstance(answer, HttpResponseBase) and not is_stream
