"""Idempotent requests: the rules that the decorators of all frameworks share.

A request runs in a transaction that first accepts its Idempotency-Key in the inbox. What it commits is committed with
its key, so the same request is either done as a whole, or may come again:

- an answer of 400 or more, or an exception, rolls back and frees the key;
- a repeat that overtakes the answer of the first waits for the outcome of its transaction;
- no key stays "in progress" after a crash.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Final

from outbox_core.errors import InvalidMessageId
from outbox_core.inbox import inbox_key

__all__ = ["KEY_HEADER", "is_refusal", "request_key"]

KEY_HEADER: Final = "Idempotency-Key"


def request_key(
    request: Any, headers: Mapping[str, str], source: str | Callable[[Any], str], *, required: bool
) -> tuple[str, str] | None:
    """Return source and message id of a request; None for one without a key.

    Raises:
        InvalidMessageId: if the key cannot be one, or is missing although it is required: the client's mistake.
    """
    key = headers.get(KEY_HEADER)
    if key is None:
        if required:
            raise InvalidMessageId(f"the header {KEY_HEADER} is missing: send one with each new request")
        return None
    try:
        inbox_key("any", key)
    except InvalidMessageId as error:
        raise InvalidMessageId(f"{KEY_HEADER}: {error}") from None
    return source(request) if callable(source) else source, key


def is_refusal(answer: object) -> bool:
    """Return True if an answer undoes its transaction: a status of 400 or more. A value without a status does not."""
    status = getattr(answer, "status_code", None)
    return status is not None and status >= 400
