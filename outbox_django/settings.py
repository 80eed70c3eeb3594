"""The `OUTBOX` setting: one dict in the Django settings, read as a frozen, typed value.

It is read at each use, so `override_settings` works; reading it takes microseconds. The system checks report all its
mistakes at once; `outbox_settings` raises for the first.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import timedelta
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from django.conf import settings

from outbox_core.errors import InvalidConfig
from outbox_core.schema import (
    BINARY_LAYOUT,
    TEXT_LAYOUT,
    TableLayout,
    TableName,
    events_beside,
    hold_beside,
    statistics_beside,
)

DEFAULT_TABLE = "outbox"
DEFAULT_INBOX_TABLE = "inbox"
_DEFAULT_TABLE_NAME = TableName(DEFAULT_TABLE)
_DEFAULT_INBOX_TABLE_NAME = TableName(DEFAULT_INBOX_TABLE)

KafkaValue = str | int | float | bool | Callable[..., Any]
Limit = timedelta | str | int


@dataclass(frozen=True, slots=True, kw_only=True)
class OutboxSettings:
    """The settings of the `OUTBOX` dict, whose keys are these names in upper case; see `docs/how-to-django.md`.

    None and empty values are left to the harvester's own defaults; the database routers choose a `database` of None.
    """

    database: str | None = None
    direct_database: str | None = None
    table: TableName = _DEFAULT_TABLE_NAME
    inbox_table: TableName = _DEFAULT_INBOX_TABLE_NAME
    layout: Literal["binary", "text"] = "binary"
    kafka: Mapping[str, KafkaValue] = field(default_factory=dict, repr=False)
    producer_kafka: Mapping[str, KafkaValue] = field(default_factory=dict, repr=False)
    leader_topic: str | None = None
    leader_group_id: str | None = None
    delivery: str | None = None
    transactional_id: str | None = None
    tracking_topic: str | None = None
    on_poison: str | None = None
    dead_letter_topic: str | None = None
    retention: str | None = None
    archive_days: int | None = None
    notify: bool | None = None
    name: str | None = None
    outbox_name: str | None = None
    id_header: str | None = None
    limits: Mapping[str, Limit] = field(default_factory=dict)
    metrics_host: str | None = None
    metrics_port: int | None = None

    @property
    def table_layout(self) -> TableLayout:
        """The table's columns: their types and limits."""
        return BINARY_LAYOUT if self.layout == "binary" else TEXT_LAYOUT


class Problem(NamedTuple):
    """A mistake in the setting: its key (None: the setting as a whole), the message, and a remedy."""

    key: str | None
    message: str
    hint: str | None = None


def outbox_settings() -> OutboxSettings:
    """Return the current `OUTBOX` setting; all defaults if there is none. InvalidConfig names every wrong key."""
    raw = getattr(settings, "OUTBOX", {})
    problems = list(find_problems(raw))
    if problems:
        raise InvalidConfig(*(" ".join(filter(None, (problem.message, problem.hint))) for problem in problems))
    return OutboxSettings(**{key.lower(): _READERS[key](value) for key, value in raw.items()})


def readable_settings() -> OutboxSettings:
    """Return the current `OUTBOX` setting without the keys that `find_problems` names."""
    raw = getattr(settings, "OUTBOX", {})
    wrong = {problem.key for problem in find_problems(raw)}
    if None in wrong:
        return OutboxSettings()
    return OutboxSettings(**{key.lower(): _READERS[key](raw[key]) for key in raw if str(key) not in wrong})


def model_table() -> str:
    """Return the table as Django's `db_table`; the default for a wrong setting, which the system checks report."""
    return _model_table("TABLE", DEFAULT_TABLE)


def inbox_model_table() -> str:
    """Return the inbox table, in the same way."""
    return _model_table("INBOX_TABLE", DEFAULT_INBOX_TABLE)


def hold_model_table() -> str:
    """Return the table of the outbox's holds: the outbox's name with `_hold` behind it."""
    return _table_beside(hold_beside)


def statistics_model_table() -> str:
    """Return the table of the outbox's statistics, in the same way."""
    return _table_beside(statistics_beside)


def event_model_table() -> str:
    """Return the table of the outbox's events, in the same way."""
    return _table_beside(events_beside)


def _table_beside(beside: Callable[[TableName], TableName]) -> str:
    raw = getattr(settings, "OUTBOX", {})
    try:
        return as_db_table(beside(_table(raw.get("TABLE", DEFAULT_TABLE))))
    except (AttributeError, InvalidConfig):
        return as_db_table(beside(_DEFAULT_TABLE_NAME))


def _model_table(key: str, default: str) -> str:
    raw = getattr(settings, "OUTBOX", {})
    try:
        return as_db_table(_table(raw.get(key, default)))
    except (AttributeError, InvalidConfig):
        return default


def as_db_table(name: TableName) -> str:
    """Return the name for `Meta.db_table`; in quotes, so that Django lets a schema through."""
    return name.quoted if name.schema else name.table


def find_problems(raw: object) -> Iterator[Problem]:
    """List all mistakes of an `OUTBOX` dict taken by itself."""
    if not isinstance(raw, Mapping):
        yield Problem(None, f"OUTBOX must be a dict, got {type(raw).__name__}")
        return
    for key, value in raw.items():
        if key not in _READERS:
            yield _unknown_key(key)
            continue
        try:
            _READERS[key](value)
        except InvalidConfig as error:
            yield Problem(key, f"OUTBOX[{key!r}]: {error}")


def _unknown_key(key: object) -> Problem:
    nearest = difflib.get_close_matches(str(key).upper(), _READERS, n=1)
    hint = f"Did you mean {nearest[0]!r}?" if nearest else f"The keys are {', '.join(_READERS)}."
    return Problem(str(key), f"OUTBOX[{key!r}] is no setting.", hint)


def _text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise InvalidConfig(f"expected a non-empty str, got {value!r}")
    return value


def _alias(value: object) -> str:
    if isinstance(value, str) and ("://" in value or "=" in value):  # not shown: it may have a password
        raise InvalidConfig("expected an alias of DATABASES, got a connection string")
    return _text(value)


def _text_or_empty(value: object) -> str:
    if not isinstance(value, str):
        raise InvalidConfig(f"expected a str, got {value!r}")
    return value


def _table(value: object) -> TableName:
    return TableName.parse(_text(value))


def _layout(value: object) -> Literal["binary", "text"]:
    if value not in ("binary", "text"):
        raise InvalidConfig(f"expected 'binary' or 'text', got {value!r}")
    return "binary" if value == "binary" else "text"


def _delivery(value: object) -> str | None:
    if value not in (None, "at-least-once", "exactly-once"):
        raise InvalidConfig(f"expected 'at-least-once' or 'exactly-once', got {value!r}")
    return value


def _on_poison(value: object) -> str | None:
    if value not in (None, "hold", "dead-letter"):
        raise InvalidConfig(f"expected 'hold' or 'dead-letter', got {value!r}")
    return value


def _retention(value: object) -> str | None:
    if value not in (None, "delete", "archive"):
        raise InvalidConfig(f"expected 'delete' or 'archive', got {value!r}")
    return value


def _days(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= 36_500:
        raise InvalidConfig(f"expected a number of days from 1 to 36500, got {value!r}")
    return value


def _truth(value: object) -> bool | None:
    if not isinstance(value, bool | None):
        raise InvalidConfig(f"expected True or False, got {value!r}")
    return value


def _port(value: object) -> int | None:
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value <= 65535:
        raise InvalidConfig(f"expected a port number from 0 to 65535 or None, got {value!r}")
    return value


def _kafka(value: object) -> Mapping[str, KafkaValue]:
    entries = _named(value, "librdkafka setting")
    for name, entry in entries.items():
        # The value is not shown: it may be a password. Callables are librdkafka's callbacks, such as `oauth_cb`.
        if not isinstance(entry, str | int | float) and not callable(entry):
            raise InvalidConfig(f"{name!r}: expected a str, number or bool, got {type(entry).__name__}")
    return entries


def _limits(value: object) -> Mapping[str, Limit]:
    entries = _named(value, "limit")
    for name, entry in entries.items():
        if not isinstance(entry, timedelta | str | int) or isinstance(entry, bool):
            raise InvalidConfig(f"{name!r}: expected a timedelta, a duration like '5s' or a count, got {entry!r}")
    return entries


def _named(value: object, what: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidConfig(f"expected a dict, got {type(value).__name__}")
    for name in value:
        if not isinstance(name, str) or not name:
            raise InvalidConfig(f"the name of a {what} must be a str, got {name!r}")
    return MappingProxyType(dict(value))


_READERS: dict[str, Callable[[object], Any]] = {
    "DATABASE": _alias,
    "DIRECT_DATABASE": _alias,
    "TABLE": _table,
    "INBOX_TABLE": _table,
    "LAYOUT": _layout,
    "KAFKA": _kafka,
    "PRODUCER_KAFKA": _kafka,
    "LEADER_TOPIC": _text,
    "LEADER_GROUP_ID": _text,
    "DELIVERY": _delivery,
    "TRANSACTIONAL_ID": _text,
    "TRACKING_TOPIC": _text,
    "ON_POISON": _on_poison,
    "DEAD_LETTER_TOPIC": _text,
    "RETENTION": _retention,
    "ARCHIVE_DAYS": _days,
    "NOTIFY": _truth,
    "NAME": _text,
    "OUTBOX_NAME": _text,
    "ID_HEADER": _text_or_empty,
    "LIMITS": _limits,
    "METRICS_HOST": _text,
    "METRICS_PORT": _port,
}
