"""Redaction of secrets, and in doubt of more, in logs, errors and the `repr` of settings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN = "***"

_NAME = re.compile(r"[\w.-]+")
_SECRET_NAME = re.compile(
    r"""
    password | passwd | passphrase | secret | token | credential | private[._]key | user[._]info
    | ssl[._]key (?! [._]location | store[._](?:location|type) ) | scram_\w{1,40}_key
    | jaas[._]config | oauthbearer[._]config | (?:account|access|api)[._-]?key (?! [._-]?(?:name|id) ) | authorization
    | signature | (?:^|[._-])(?:pwd|sig)$
    """,
    re.IGNORECASE | re.VERBOSE,
)
_ASSIGNED = re.compile(r"""(?<![\w.-])(?P<name>[\w.-]++)["']?\s*+[=:]\s*+""")
# A quote that is not closed was cut off: all behind it may be of the secret.
_VALUE = re.compile(
    r"""
    (?: (?:bearer|basic) \s++ )?+
    (?: b?+'(?:[^'\\]|\\.)*+(?:'|\Z) | b?+"(?:[^"\\]|\\.)*+(?:"|\Z) | (?:\\.|[^\s\\])++ )
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_HEADER = re.compile(r"""[^\r\n"']++""")  # a scheme, and what belongs to it
_RUN = re.compile(r"\S++")
_URL_USER = re.compile(r"(?<![\w+.-])[\w+.-]++://(?!\[)[^:/?\#\s@]*+:")
_PORT = re.compile(r"[0-9]{1,5}(?![0-9\w])")
_SIGNATURE = re.compile(r"(?P<name>[?&]sig=)[^&\s\"']++")  # of a shared access signature
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


def redact(text: str) -> str:
    """Return the text with passwords of URLs and of `name=value` pairs, tokens and private keys as `***`.

    It takes time in proportion to the text, whatever is in it: much of it is foreign. What is to be cut is cut
    afterwards: half of a secret may not look like one.
    """
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _SIGNATURE.sub(rf"\g<name>{HIDDEN}", text)
    if "://" in text:
        text = _RUN.sub(_without_user, text)
    return _without_assigned(text)


def _without_user(run: re.Match[str]) -> str:
    """Return a run without the password in its URL: all up to its last @, or to its end if that was cut off."""
    text = run[0]
    end = text.rfind("@")
    user = _URL_USER.search(text, 0, len(text) if end < 0 else end)
    if user is None or (end < 0 and _PORT.match(text, user.end())):
        return text
    return f"{text[: user.end()]}{HIDDEN}{text[end:] if end >= 0 else ''}"


def _without_assigned(text: str) -> str:
    parts, done, place = [], 0, 0
    while (found := _ASSIGNED.search(text, place)) is not None:
        place = found.end()
        value = _VALUE.match(text, place) if _SECRET_NAME.search(found["name"]) else None
        if value is not None and found["name"].lower().endswith("authorization"):
            value = _HEADER.match(text, place) or value
        if value is not None:
            parts += [text[done:place], HIDDEN]
            done = place = value.end()
    return "".join([*parts, text[done:]])


def without_values(error: str, settings: Mapping[str, Any]) -> str:
    """Return librdkafka's error about a setting without its value, which may be a password in the wrong place."""
    for value in sorted(map(str, settings.values()), key=len, reverse=True):
        for shown, hidden in (
            (f'value "{value}" for', "value for"),
            (f'": {value}', '"'),
            (f"mechanism: {value}", "mechanism"),
        ):
            error = error.replace(shown, hidden)
    return error


def is_secret(name: str) -> bool:
    """Tell whether a setting of this name holds a secret."""
    return _NAME.fullmatch(name) is not None and _SECRET_NAME.search(name) is not None


def redact_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of librdkafka settings without secrets."""
    return {
        name: HIDDEN if is_secret(name) else redact(value) if isinstance(value, str) else value
        for name, value in settings.items()
    }
