"""Requests, answers and errors of the console, as plain data: whoever serves it translates them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any

from outbox_core.console.access import Csrf, User

LONGEST_BODY_BYTES = 5 * 2**20
"""A longer body is refused; whoever serves the console need not read more."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A request, with paths relative to the console's own.

    Attributes:
        method: `GET`, `HEAD` or `POST`.
        path: decoded, behind the base path: `` or `/` for the page, `/api/session`.
        base_path: the path before `path`, as far as whoever serves the console knows it.
        query: the text behind `?`.
        headers: by names in lower case.
        body: up to `LONGEST_BODY_BYTES` and one.
        is_secure: True if it came by TLS: then cookies are for TLS alone.
        user: the user that the door has let in, None for nobody.
        refusal: why there is no user, for people.
        csrf: the framework's own protection of POSTs, which it has checked already; None for that of the console.
        home: the address of a page to go back to, and its title.
    """

    method: str
    path: str
    base_path: str = ""
    query: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""
    is_secure: bool = False
    user: User | None = None
    refusal: str = ""
    csrf: Csrf | None = None
    home: tuple[str, str] | None = None

    def cookie(self, name: str) -> str:
        """Return the value of a cookie, '' if there is none."""
        for part in self.headers.get("cookie", "").split(";"):
            found, _, value = part.strip().partition("=")
            if found == name:
                return value
        return ""


@dataclass(frozen=True, slots=True)
class Done:
    """An action that was carried out, for logs: on which outbox, what, on how many, why, and by whom."""

    outbox: str
    action: str
    text: str
    reason: str
    actor: str


@dataclass(frozen=True, slots=True)
class Response:
    """An answer, without the length of its body. `done` is the action that it tells of."""

    status: int
    headers: tuple[tuple[str, str], ...]
    body: bytes
    done: Done | None = None

    @property
    def phrase(self) -> str:
        """The words behind the status."""
        return HTTPStatus(self.status).phrase


class ApiError(Exception):
    """An error of the API: it becomes an answer.

    Args:
        status: of HTTP.
        code: for programs, `bad_parameter`.
        message: what was wrong.
        where: the parameter that was wrong, `query.limit`.
        remedy: what to do.
        headers: of the answer.
        more: further members of the error.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        where: str = "",
        remedy: str = "",
        headers: tuple[tuple[str, str], ...] = (),
        more: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.headers = headers
        self.document = {"code": code, "where": where, "message": message, "remedy": remedy, **(more or {})}

    def response(self) -> Response:
        """Return the answer for programs."""
        return json_response({"error": self.document}, status=self.status, headers=self.headers)

    def page(self) -> Response:
        """Return the answer for people."""
        text = "\n".join(filter(None, (self.document["message"], self.document["remedy"])))
        always = (("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store"))
        return Response(self.status, always + self.headers, f"{text}\n".encode(errors="backslashreplace"))


def json_response(
    document: Any, *, status: int = 200, headers: tuple[tuple[str, str], ...] = (), done: Done | None = None
) -> Response:
    """Return an answer of JSON, which nothing keeps."""
    body = json.dumps(document, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    # Rows may have had lone surrogates forced into them; UTF-8 has no room for those.
    content = body.encode(errors="backslashreplace")
    always = (("Content-Type", "application/json; charset=utf-8"), ("Cache-Control", "no-store"))
    return Response(status, always + headers, content, done)


def bad_parameter(where: str, message: str, remedy: str = "") -> ApiError:
    """Return the error for a parameter that cannot be used; `where` is `query.limit` or `body.reason`."""
    name = where.partition(".")[2] or where
    return ApiError(400, "bad_parameter", f"{name}: {message}", where=where, remedy=remedy)


def not_found(message: str) -> ApiError:
    """Return the error for what is not there."""
    return ApiError(404, "not_found", message)
