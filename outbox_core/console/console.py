"""The console: requests in, answers out, as plain data."""

from __future__ import annotations

import logging
from collections.abc import Callable, Collection, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol
from urllib.parse import quote

from outbox_core import __version__
from outbox_core.console import actions, reading
from outbox_core.console.access import Permission, User, checked_origins, csrf_of, why_forged
from outbox_core.console.fields import Fields
from outbox_core.console.files import read_page_file
from outbox_core.console.messages import ApiError, Request, Response, json_response, not_found
from outbox_core.console.outboxes import ConsoleOutbox, make_outboxes
from outbox_core.printable import printable

if TYPE_CHECKING:
    from outbox_core.config import HarvestConfig
    from outbox_core.doctor.findings import Commands

_log = logging.getLogger(__name__)

_CONTENT_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; font-src 'self'; "
    "connect-src 'self'; manifest-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
_ALWAYS = (
    ("Content-Security-Policy", _CONTENT_POLICY),
    ("X-Content-Type-Options", "nosniff"),
    ("X-Frame-Options", "DENY"),
    ("Referrer-Policy", "no-referrer"),
    ("Cross-Origin-Opener-Policy", "same-origin"),
    ("Cross-Origin-Resource-Policy", "same-origin"),
)
LONGEST_LOGIN_BYTES = 8 * 1024
_READ_METHODS = ("GET", "HEAD")


class Login(Protocol):
    """A way to log in at the console itself, with a token."""

    def user_of(self, request: Request) -> User | None:
        """Return the user that a request's cookie names, None for nobody."""

    def log_in(self, request: Request, token: str, name: str) -> tuple[User, tuple[str, str]] | None:
        """Return the user of a token, who may give a name, and the header that sets a cookie; None if it is wrong."""

    def log_out(self, request: Request) -> tuple[str, str]:
        """Return the header that takes the cookie away."""


class Console:
    """One console, for any number of outboxes, and any number of threads.

    Args:
        outboxes: the settings of each outbox, by the name that it has on the page.
        commands: by outbox, the commands that remedies name; those of `outbox` unless given.
        login: the way to log in at the console itself; None where whoever serves it knows its users.
        trusted_origins: further origins from which POSTs are taken, `https://ops.example`: those of proxies that do
            not pass the header Host on.

    Raises:
        InvalidConfig: for a name that cannot be one.
    """

    def __init__(
        self,
        outboxes: Mapping[str, HarvestConfig],
        *,
        commands: Mapping[str, Commands] | None = None,
        login: Login | None = None,
        trusted_origins: Collection[str] = (),
    ) -> None:
        self._outboxes = make_outboxes(outboxes, commands)
        self._login = login
        self._trusted_origins = checked_origins(trusted_origins)

    def handle(self, request: Request) -> Response:
        """Answer a request; never raises. May take some seconds: call it on a thread that may wait."""
        try:
            answer = self._answer(request)
        except ApiError as error:
            answer = error.response() if request.path.startswith("/api/") else error.page()
        except Exception:
            _log.exception("the console failed at %s %s", request.method, printable(request.path)[:200])
            answer = ApiError(500, "internal", "the console failed", remedy="see the log of its process").response()
        if answer.done is not None:  # where there is no history, this is the only trace
            told = (answer.done.outbox, answer.done.action, answer.done.text, answer.done.reason, answer.done.actor)
            _log.info("console of %s: %s: %s (%s), by %s", *map(printable, told))
        body = b"" if request.method == "HEAD" else answer.body
        return Response(answer.status, answer.headers + _ALWAYS, body, answer.done)

    def _answer(self, request: Request) -> Response:
        path = request.path.removeprefix("/")
        if path.startswith("api/"):
            return self._answer_api(request, path.removeprefix("api/"))
        if request.method not in _READ_METHODS:
            raise _wrong_method("GET, HEAD")
        if self._login is None:
            self._user(request, Permission.VIEW)
        if not request.path:
            # Addresses in the page are relative to a folder. So is this one: a proxy may have another prefix.
            return Response(308, (("Location", f"{quote(request.base_path.rpartition('/')[2], safe='')}/"),), b"")
        return _page_file(request, path or "index.html")

    def _answer_api(self, request: Request, path: str) -> Response:
        match path.split("/"):
            case ["session"]:
                self._check_method(request, "GET")
                return self._session(request)
            case ["login" | "logout" as which] if self._login is not None:
                self._check_method(request, "POST")
                return self._log_in(request, self._login) if which == "login" else self._log_out(request, self._login)
            case ["outboxes"]:
                self._check_method(request, "GET")
                self._user(request, Permission.VIEW)
                Fields.of_query(request.query).finish()
                return json_response({"outboxes": [reading.outbox(one) for one in self._outboxes.values()]})
            case ["outboxes", name, "actions", action]:
                return self._act(request, name, action)
            case ["outboxes", name, *route]:
                return self._read(request, name, route)
        raise not_found(f"there is no api/{path[:200]}")

    def _read(self, request: Request, name: str, path: list[str]) -> Response:
        found = find_route(path)
        if found is None:
            raise not_found(f"there is no api/outboxes/{name}/{'/'.join(path)[:200]}")
        self._check_method(request, "GET")
        self._user(request, Permission.VIEW)
        route, arguments = found
        answer = route(self._outbox(name), Fields.of_query(request.query), *arguments)
        return answer if isinstance(answer, Response) else json_response(answer)

    def _act(self, request: Request, name: str, action: str) -> Response:
        needed = actions.permission_of(action)
        if needed is None:
            raise not_found(f"there is no action {action[:100]}; there are {', '.join(actions.NAMES)}")
        self._check_method(request, "POST")
        self._user(request, Permission.VIEW)  # answers tell topics and numbers
        user = self._user(request, needed)
        outbox = self._outbox(name)
        return actions.act(outbox, user, action, Fields.of_body(request))

    def _check_method(self, request: Request, method: str) -> None:
        if method == "GET":
            if request.method not in _READ_METHODS:
                raise _wrong_method("GET, HEAD")
            if request.headers.get("sec-fetch-site") == "cross-site":  # it could read nothing, and make us work
                raise ApiError(403, "forged", "the browser says that the request comes from another site")
            return
        if request.method != "POST":
            raise _wrong_method("POST")
        why = why_forged(request, self._trusted_origins)
        if why:
            raise ApiError(403, "forged", why, remedy="reload the page; behind a proxy, see docs/console.md")

    def _user_of(self, request: Request) -> User | None:
        return request.user if self._login is None else self._login.user_of(request)

    def _user(self, request: Request, permission: Permission) -> User:
        user = self._user_of(request)
        if user is None and self._login is not None:
            raise ApiError(401, "login_needed", "log in with the token of this console")
        if user is None:
            raise ApiError(403, "refused", request.refusal or "this console lets nobody in")
        if permission not in user.permissions:
            raise ApiError(403, "no_permission", f"{user.name} lacks the permission {permission}")
        return user

    def _outbox(self, name: str) -> ConsoleOutbox:
        found = self._outboxes.get(name)
        if found is None:
            raise not_found(f"there is no outbox {name[:100]}; there are {', '.join(self._outboxes)}")
        return found

    def _session(self, request: Request) -> Response:
        user = self._user_of(request)
        csrf, headers = csrf_of(request)
        document = {
            "version": __version__,
            "user": user and _user_as_json(user),
            "login": None if self._login is None else "token",
            "refusal": "" if user or self._login else request.refusal or "this console lets nobody in",
            "csrf": {"header": csrf.header, "token": csrf.token},
            "home": request.home and {"href": request.home[0], "text": request.home[1]},
        }
        return json_response(document, headers=headers)

    def _log_in(self, request: Request, login: Login) -> Response:
        if len(request.body) > LONGEST_LOGIN_BYTES:
            raise ApiError(413, "too_large", f"a login has at most {LONGEST_LOGIN_BYTES} bytes")
        body = Fields.of_body(request)
        token, name = body.required("token", most=1000), body.text("name", most=100) or ""
        body.finish()
        logged_in = login.log_in(request, token, name.strip())
        if logged_in is None:
            _log.warning("somebody tried to log in at the console with a wrong token")
            raise ApiError(401, "login_needed", "this is not the token of this console")
        user, cookie = logged_in
        return json_response({"user": _user_as_json(user)}, headers=(cookie,))

    def _log_out(self, request: Request, login: Login) -> Response:
        Fields.of_body(request).finish()
        return json_response({}, headers=(login.log_out(request),))


class _Route(NamedTuple):
    """A route for reading: its path, with None for an argument, and the function that answers."""

    path: tuple[str | None, ...]
    answer: Callable[..., Any]


_ROUTES = (
    _Route(("status",), reading.status),
    _Route(("statistics",), reading.statistics),
    _Route(("events",), reading.events),
    _Route(("timeline",), reading.timeline),
    _Route(("topics",), reading.topics),
    _Route(("keys",), reading.keys),
    _Route(("records",), reading.records),
    _Route(("records", None), reading.record),
    _Route(("records", None, "value"), reading.record_value),
    _Route(("holds",), reading.holds),
    _Route(("holds", "list"), reading.hold_list),
    _Route(("findings",), reading.findings),
    _Route(("writers",), reading.writers),
    _Route(("dead-letters",), reading.dead_letters),
    _Route(("dead-letters", None, None), reading.dead_letter),
)


def find_route(path: list[str]) -> tuple[Callable[..., Any], list[str]] | None:
    """Return the function that answers a path below an outbox, and the path's arguments."""
    for route in _ROUTES:
        if len(route.path) == len(path) and all(
            wanted in (None, given) for wanted, given in zip(route.path, path, strict=True)
        ):
            return route.answer, [given for wanted, given in zip(route.path, path, strict=True) if wanted is None]
    return None


def _page_file(request: Request, path: str) -> Response:
    found = read_page_file(path)
    if found is None:
        raise not_found(f"there is no {path[:200]}")
    headers = (("Content-Type", found.content_type), ("Cache-Control", "no-cache"), ("ETag", found.etag))
    if found.etag in request.headers.get("if-none-match", ""):
        return Response(304, headers, b"")
    return Response(200, headers, found.content)


def _user_as_json(user: User) -> dict[str, Any]:
    return {"name": user.name, "permissions": [name for name in Permission if name in user.permissions]}


def _wrong_method(allowed: str) -> ApiError:
    return ApiError(405, "wrong_method", f"the method here is {allowed}", headers=(("Allow", allowed),))
