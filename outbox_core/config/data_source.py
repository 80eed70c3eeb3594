"""The outbox's database in any of the usual notations, made into one that libpq reads as it was meant.

Accepts libpq's `key=value` pairs, `postgresql://` and `postgres://` URLs, and SQLAlchemy's `postgresql+psycopg://` (any
driver's name), and puts two things right:

- goharvest's documentation writes `password= dbname=postgres`, in which libpq (and Go's driver) reads the *password*
  `dbname=postgres`. An empty value before another of libpq's keywords counts as empty.
- It drops options that only Go's driver knows.

Errors never contain a part of the data source: it may be a part of the password.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable
from functools import cache
from urllib.parse import urlsplit

DEFAULT_DATA_SOURCE = "host=localhost port=5432 user=postgres password= dbname=postgres sslmode=disable"
"""goharvest's default, as it writes it."""

_KEYWORDS = frozenset(
    """
    application_name channel_binding client_encoding connect_timeout dbname fallback_application_name gssdelegation
    gssencmode gsslib host hostaddr keepalives keepalives_count keepalives_idle keepalives_interval krbsrvname
    load_balance_hosts max_protocol_version min_protocol_version options passfile password port replication
    require_auth requirepeer service servicefile ssl_max_protocol_version ssl_min_protocol_version sslcert
    sslcertmode sslcompression sslcrl sslcrldir sslkey sslkeylogfile sslmode sslnegotiation sslpassword sslrootcert
    sslsni target_session_attrs tcp_user_timeout user
    """.split()  # noqa: SIM905  46 words are read more easily than 46 quoted words
)
_LIKENESS = 0.8  # less would take a word of a password for a slip
_SECRETS = frozenset({"password", "sslpassword"})
_ONLY_GO = frozenset({"binary_parameters", "disable_prepared_binary_result", "sslinline", "krbspn"})

_EXAMPLES = "write for example `postgresql://user:password@host/dbname` or `host=localhost dbname=shop user=shop`"
_PAIR_START = re.compile(r"\s*([A-Za-z_][A-Za-z0-9_]*)\s*=")
_QUOTED = re.compile(r"\s*'((?:[^'\\]|\\.)*)'(?=\s|\Z)", re.DOTALL)
_PLAIN = re.compile(r"\s*((?:\\.|[^\s\\'])(?:\\.|[^\s\\])*)", re.DOTALL)
_URL = re.compile(r"postgres(?:ql)?(?:\+\w+)?://", re.IGNORECASE)
_BROKEN_ESCAPE = re.compile(r"%(?![0-9A-Fa-f]{2})|%00")


def normalise_data_source(text: str) -> str:
    """Return the data source as libpq reads it, or raise ValueError if it is no notation of PostgreSQL."""
    text = text.strip()
    if not text:
        raise ValueError("is empty; write for example `host=localhost dbname=postgres user=postgres`")
    if _URL.match(text):
        return _normalise_url(text)
    if re.match(r"[A-Za-z][\w+.-]*://", text):
        raise ValueError("is the URL of another kind of database; write `postgresql://user:password@host/dbname`")
    pairs = [(key, value) for key, value in _pairs(text) if key not in _ONLY_GO]
    _must_be_known(key for key, _ in pairs)
    return " ".join(f"{key}={_quote(value)}" for key, value in pairs)


def _normalise_url(text: str) -> str:
    url = _URL.sub("postgresql://", text, count=1)
    # What libpq cannot read it quotes in its errors, passwords included: it must not get to see it.
    if re.search(r"\s", url):
        raise ValueError("contains white space; write `%20` for a space in user and password")
    if _BROKEN_ESCAPE.search(url):
        raise ValueError("contains a `%` that begins no escape; write `%25` for one in user and password")
    try:
        urlsplit(url)
    except ValueError:
        raise ValueError("is not a URL; write `postgresql://user:password@host:port/dbname`") from None
    base, question_mark, query = url.partition("?")
    if base.count("@") > 1 or "@" in base.removeprefix("postgresql://").partition("/")[2]:
        # libpq would take what stands before the first of them for the whole password, and show the rest in errors.
        raise ValueError("has more than one `@`, or one behind a `/`; write `%40` and `%2F` in user and password")
    options = [option for option in query.split("&") if option.partition("=")[0] not in _ONLY_GO]
    if any(option.count("=") != 1 for option in options if option):
        raise ValueError("has options behind the `?` that are no `key=value`; write `%3D` and `%26` in values")
    _must_be_known(option.partition("=")[0] for option in options if option)
    return base + question_mark + "&".join(options) if any(options) else base


def _must_be_known(names: Iterable[str]) -> None:
    """Raise ValueError for an option that libpq does not know; one that resembles none may be part of a password."""
    before = ""
    for name in names:
        if name not in _known_options():
            if before in _SECRETS:
                raise ValueError(f"has an unknown option behind `{before}`; put values with spaces in single quotes")
            close = difflib.get_close_matches(name, sorted(_KEYWORDS), 1, _LIKENESS)
            if not close:
                raise ValueError("has an unknown option; write for example `host=localhost dbname=shop user=shop`")
            raise ValueError(f"has the unknown option `{name}`; did you mean `{close[0]}`?")
        before = name


@cache
def _known_options() -> frozenset[str]:
    """Return the options of PostgreSQL's URLs and strings, those of the installed libpq among them."""
    try:
        from psycopg import pq
    except ImportError:
        return _KEYWORDS
    return _KEYWORDS | {"ssl"} | {option.keyword.decode() for option in pq.Conninfo.get_defaults()}


def _pairs(text: str) -> list[tuple[str, str]]:
    pairs: list[tuple[str, str]] = []
    position = 0
    while text[position:].strip():
        start = _PAIR_START.match(text, position)
        if start is None:
            if not pairs:
                raise ValueError(f"is not a list of `key=value` pairs; {_EXAMPLES}")
            where = f"after `{pairs[-1][0]}`"
            raise ValueError(f"is not a list of `key=value` pairs {where}; put values with spaces in single quotes")
        key, position = start.group(1), start.end()
        value, position = _value(text, key, position)
        pairs.append((key, value))
    return pairs


def _value(text: str, key: str, position: int) -> tuple[str, int]:
    if text[position : position + 1].isspace():
        following = _PAIR_START.match(text, position)
        if following is not None and following.group(1) in _KEYWORDS | _ONLY_GO:
            return "", position
    if not text[position:].strip():
        return "", len(text)
    found = _QUOTED.match(text, position) or _PLAIN.match(text, position)
    if found is None:
        raise ValueError(f"has an unterminated quote in the value of `{key}`")
    return re.sub(r"\\(.)", r"\1", found.group(1), flags=re.DOTALL), found.end()


def _quote(value: str) -> str:
    if value and not re.search(r"[\s'\\]", value):
        return value
    return "'" + value.replace("\\", "\\\\").replace("'", "\\'") + "'"
