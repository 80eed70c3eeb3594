"""Logging in at the console itself, with the token that it was started with.

The browser gets a cookie that is derived from the token and from a time at which it runs out: the server keeps nothing,
and the token itself is sent once.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Iterable

from outbox_core.console.access import User
from outbox_core.console.messages import Request
from outbox_core.errors import InvalidConfig

LEAST_TOKEN_CHARACTERS = 16
_SECONDS = 12 * 3600
_UNNAMED = "console"


class TokenLogin:
    """A login with one token, which gives everyone the same permissions; implements `Login` of `console.py`.

    Args:
        token: at least 16 characters.
        permissions: of everyone who knows it.
        cookie: the cookie's name; consoles at several ports of a host need different ones.

    Raises:
        InvalidConfig: for a token that could be guessed.
    """

    def __init__(self, token: str, permissions: Iterable[str], cookie: str) -> None:
        if len(token) < LEAST_TOKEN_CHARACTERS:
            raise InvalidConfig(
                f"the token of a console has at least {LEAST_TOKEN_CHARACTERS} characters; "
                "`openssl rand -base64 24` makes one"
            )
        self._token = token.encode(errors="surrogateescape")
        self._user = User(_UNNAMED, frozenset(permissions))
        self._cookie = cookie

    def __repr__(self) -> str:
        return "TokenLogin(***)"

    def user_of(self, request: Request) -> User | None:
        """Return the user that a request's cookie names, None for nobody."""
        runs_out, _, rest = request.cookie(self._cookie).partition(".")
        name, _, seal = rest.partition(".")
        if not hmac.compare_digest(self._seal(runs_out, name).encode(), seal.encode(errors="replace")):
            return None
        if int(runs_out) < time.time():
            return None
        try:
            return User(base64.urlsafe_b64decode(name).decode(), self._user.permissions)
        except (ValueError, binascii.Error):
            return None

    def log_in(self, request: Request, token: str, name: str) -> tuple[User, tuple[str, str]] | None:
        """Return the user of a token, and the header that sets a cookie; None for a wrong token."""
        if not hmac.compare_digest(token.encode(errors="surrogateescape"), self._token):
            return None
        user = User(name or _UNNAMED, self._user.permissions)
        runs_out = str(int(time.time()) + _SECONDS)
        encoded = base64.urlsafe_b64encode(user.name.encode()).decode()
        sealed = f"{runs_out}.{encoded}.{self._seal(runs_out, encoded)}"
        return user, self._header(request, sealed, _SECONDS)

    def log_out(self, request: Request) -> tuple[str, str]:
        """Return the header that takes the cookie away."""
        return self._header(request, "", 0)

    def _header(self, request: Request, value: str, seconds: int) -> tuple[str, str]:
        secure = "; Secure" if request.is_secure else ""
        # Without a path the browser takes that of the request's folder, `<base>/api`.
        return "Set-Cookie", f"{self._cookie}={value}; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"

    def _seal(self, runs_out: str, name: str) -> str:
        told = f"kafka-outbox console {self._cookie} {runs_out} {name}".encode()
        return hmac.new(self._token, told, hashlib.sha256).hexdigest()
