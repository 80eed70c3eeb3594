"""Users of the console and their permissions, and the protection of actions against forged requests.

A page of another origin can make a browser send requests with its user's cookies. So a POST is carried out only if

- the browser says that it comes from a page of the console's own origin (`Origin`, or `Sec-Fetch-Site`);
- a header of the console's own repeats the value of a cookie: other origins can neither read the value nor set
  the header.

Nothing is kept in memory: any number of processes may serve one console.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING, Final, NamedTuple
from urllib.parse import SplitResult, urlsplit

from outbox_core.errors import InvalidConfig

if TYPE_CHECKING:
    from outbox_core.console.messages import Request

CSRF_COOKIE: Final = "outbox_console_csrf"
CSRF_HEADER: Final = "X-Outbox-Console"
_TOKEN_BYTES = 24
_TOKEN_CHARACTERS = frozenset("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789-_")
_ORIGIN = re.compile(r"https?://[a-z0-9.\[\]:_-]+")
_PORTS = {"http": 80, "https": 443}


class Permission(StrEnum):
    """A permission of a user of the console."""

    VIEW = "view"
    OPERATE = "operate"
    RESTASH = "restash"


EVERYTHING = frozenset(Permission)
"""All permissions."""


@dataclass(frozen=True, slots=True)
class User:
    """A user of the console.

    Args:
        name: for the outbox's history: who has acted.
        permissions: of `Permission`, or their texts: `view` shows everything, values of records too; `operate`
            releases, skips, dead-letters, pauses and resumes; `restash` stashes dead letters anew.

    Raises:
        InvalidConfig: for a name that is no text, or another permission.
    """

    name: str
    permissions: AbstractSet[str] = frozenset({Permission.VIEW})

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name or "\0" in self.name:
            raise InvalidConfig(f"a user of the console needs a name, got {self.name!r:.100}")
        given: Iterable[str] = self.permissions
        if isinstance(given, str):
            raise InvalidConfig("permissions of a user of the console: expected a set, got a text")
        try:
            object.__setattr__(self, "permissions", frozenset(Permission(name) for name in given))
        except ValueError as error:
            known = ", ".join(Permission)
            raise InvalidConfig(f"permissions of a user of the console: {error}; there are {known}") from None


class Csrf(NamedTuple):
    """The means by which a page proves that a POST is its own: a header, and its value."""

    header: str
    token: str


def csrf_of(request: Request) -> tuple[Csrf, tuple[tuple[str, str], ...]]:
    """Return the means for a page, and the header that sets the cookie. A cookie that is there is kept."""
    if request.csrf is not None:
        return request.csrf, ()
    token = request.cookie(CSRF_COOKIE)
    if not _is_token(token):
        token = secrets.token_urlsafe(_TOKEN_BYTES)
    # Without a path the browser takes that of the request's folder, `<base>/api`, whatever proxies have done to it.
    cookie = f"{CSRF_COOKIE}={token}; HttpOnly; SameSite=Strict{'; Secure' if request.is_secure else ''}"
    return Csrf(CSRF_HEADER, token), (("Set-Cookie", cookie),)


def why_forged(request: Request, trusted_origins: Iterable[str] = ()) -> str:
    """Return why a POST may not be of the console's own page, '' if it is."""
    if request.csrf is not None:  # the framework has checked it
        return ""
    foreign = _why_foreign(request, trusted_origins)
    if foreign:
        return foreign
    token = request.cookie(CSRF_COOKIE)
    given = request.headers.get(CSRF_HEADER.lower(), "")
    if not _is_token(token) or not secrets.compare_digest(token.encode(), given.encode(errors="replace")):
        return f"the header {CSRF_HEADER} does not repeat the cookie of this console"
    return ""


def _why_foreign(request: Request, trusted_origins: Iterable[str]) -> str:
    site = request.headers.get("sec-fetch-site", "")
    origin = request.headers.get("origin", "")
    if origin and origin in trusted_origins:
        return ""
    if site not in ("", "same-origin"):
        return f"the browser says that the request comes from another origin (Sec-Fetch-Site: {site[:20]})"
    if not origin:
        return "" if site else "the request says neither by Origin nor by Sec-Fetch-Site where it comes from"
    host = request.headers.get("host", "")
    if not _is_origin_of(origin, host):
        return f"the request comes from {origin[:200]}, and this console is at {host[:200]}"
    return ""


def checked_origins(origins: Iterable[str]) -> frozenset[str]:
    """Return trusted origins; InvalidConfig for what no browser sends as one, as `https://ops.example/`."""
    if isinstance(origins, str):
        raise InvalidConfig("trusted_origins: expected a list of origins, got a text")
    for origin in origins:
        if not isinstance(origin, str) or not _ORIGIN.fullmatch(origin):
            raise InvalidConfig(
                f"trusted_origins: expected scheme, host and perhaps a port, https://ops.example, got {origin!r:.100}"
            )
    return frozenset(origins)


def _is_origin_of(origin: str, host: str) -> bool:
    """Compare host and port; the scheme may be that of a proxy in front."""
    try:
        given = urlsplit(origin)
        wanted = urlsplit(f"{given.scheme}://{host}")
        return bool(given.hostname) and _place(given) == _place(wanted)
    except ValueError:
        return False


def _place(url: SplitResult) -> tuple[str | None, int | None]:
    return url.hostname, url.port or _PORTS.get(url.scheme)


def _is_token(text: str) -> bool:
    return len(text) >= _TOKEN_BYTES and _TOKEN_CHARACTERS.issuperset(text)


NOT_AUTHORIZED = (
    "this console lets nobody in: whoever mounted it has not said who its users are; pass authorize=, a function of "
    "the request that returns outbox_core.console.User(name, permissions), or None to refuse"
)
"""The refusal of a console that was mounted without `authorize`."""


def checked_user(user: object) -> User | None:
    """Return what an `authorize` has returned; InvalidConfig if it is neither a user nor None."""
    if user is not None and not isinstance(user, User):
        raise InvalidConfig(f"authorize: expected an outbox_core.console.User or None, got {type(user).__name__}")
    return user
