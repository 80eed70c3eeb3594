"""Redaction of secrets, and in doubt of more, in logs, errors and the `repr` of settings."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

HIDDEN = "***"

_NAME = r"""
    (?<![\w.-]) [\w.-]*(?: password | passwd | passphrase | secret | token | credential | private[._]key
             | user[._]info | ssl[._]key (?! [._]location | store[._](?:location|type) ) | scram_\w+_key
             | jaas[._]config | oauthbearer[._]config | account[._]?key | authorization )[\w.-]*
"""
_NAME_ALONE = re.compile(_NAME, re.IGNORECASE | re.VERBOSE)
_ASSIGNMENT = re.compile(
    rf"""
    (?P<name> {_NAME} ) (?P<between> ["']? \s* [=:] \s* )
    (?: (?:bearer|basic) \s+ )?
    (?: '(?:[^'\\]|\\.)*' | "(?:[^"\\]|\\.)*" | (?:\\.|[^\s\\])+ )
    """,
    re.IGNORECASE | re.VERBOSE | re.DOTALL,
)
_URL_USER = re.compile(r"(?P<user>(?<![\w+.-])[\w+.-]+://[^:/?\#\s@]*:)\S*@")
_SIGNATURE = re.compile(r"(?P<name>[?&]sig=)[^&\s\"']+")  # of a shared access signature
_PRIVATE_KEY = re.compile(r"-----BEGIN [A-Z ]*PRIVATE KEY-----.*?(?:-----END [A-Z ]*PRIVATE KEY-----|\Z)", re.DOTALL)


def redact(text: str) -> str:
    """Return the text with passwords of URLs and of `name=value` pairs, tokens and private keys as `***`."""
    text = _PRIVATE_KEY.sub(HIDDEN, text)
    text = _SIGNATURE.sub(rf"\g<name>{HIDDEN}", text)
    text = _URL_USER.sub(rf"\g<user>{HIDDEN}@", text)
    return _ASSIGNMENT.sub(rf"\g<name>\g<between>{HIDDEN}", text)


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
    return _NAME_ALONE.fullmatch(name) is not None


def redact_settings(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of librdkafka settings without secrets."""
    return {
        name: HIDDEN if is_secret(name) else redact(value) if isinstance(value, str) else value
        for name, value in settings.items()
    }
