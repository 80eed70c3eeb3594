"""Pending records, as `outbox peek` shows them: a page of the oldest, with the hold that keeps each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from outbox_core.doctor.session import DatabaseSession
from outbox_core.errors import InvalidConfig, OutboxTableError
from outbox_core.holds import HoldKind, kind_sql
from outbox_core.printable import text_or_base64
from outbox_core.schema import (
    HEADERS_TOO_LARGE,
    HOLD_COLUMNS,
    REQUIRED_COLUMNS,
    shown_key_sql,
    small_headers_sql,
)
from outbox_core.stores.postgres.schema_changes import COLUMN_TYPES

SEARCHED_ROWS = 100_000
MOST_RECORDS = 1_000
_HEADER_BYTES = 64 * 2**10

# The head is walked by its primary key, and no further than so many rows: it never reads a table of millions.
_PAGE = """
SELECT r.id, coalesce(r.kafka_topic, ''), {key}, {partition}, coalesce(r.create_time::text, ''),
       CASE WHEN isfinite(r.create_time) THEN extract(epoch FROM clock_timestamp() - r.create_time)::float8 END,
       r.leader_id IS NOT NULL, coalesce(octet_length(r.kafka_value), 0),
       CASE WHEN r.kafka_value IS NULL THEN NULL ELSE {value} END,
       -- Arrays of any dimensions: those of a row that is held for them.
       CASE WHEN shown.is_small THEN ARRAY(SELECT unnest(r.kafka_header_keys) LIMIT %(headers)s)
            ELSE ARRAY['{too_large}'] END,
       CASE WHEN shown.is_small THEN ARRAY(SELECT unnest(r.kafka_header_values) LIMIT %(headers)s) END,
       cardinality(r.kafka_header_keys), {hold}
FROM (
    SELECT * FROM (SELECT * FROM {table} WHERE {begin} ORDER BY id LIMIT {searched}) AS head
    WHERE (%(topic)s::text IS NULL OR kafka_topic = %(topic)s::text)
      AND (%(key)s::text IS NULL OR kafka_key = %(key)s::text)
      AND (%(header)s::text IS NULL OR %(header)s::text = ANY (kafka_header_keys)) {header_value}
    ORDER BY id LIMIT %(limit)s
) AS r CROSS JOIN LATERAL (SELECT {is_small} AS is_small OFFSET 0) AS shown {holds}
ORDER BY r.id
"""

# First whether the value is there at all, which is cheap to see.
_HEADER_VALUE = """
      AND {value} = ANY (kafka_header_values)
      AND EXISTS (SELECT FROM unnest(kafka_header_keys, kafka_header_values) AS header (name, value)
                  WHERE header.name = %(header)s::text AND header.value = {value})
"""

_SEARCH_END = "SELECT id FROM {table} WHERE {begin} ORDER BY id OFFSET {searched} - 1 LIMIT 1"
_BEHIND = "id > %(after)s"

_HOLDS = """
LEFT JOIN LATERAL (
    SELECT held.id, held.reason, held.error, held.record_id, held.kafka_key FROM {holds} AS held
    WHERE held.outbox = %(outbox)s AND held.kafka_topic = coalesce(r.kafka_topic, '') AND (
        held.record_id = r.id OR held.kafka_key = r.kafka_key OR held.kafka_key IS NULL AND held.record_id IS NULL)
    ORDER BY held.record_id IS DISTINCT FROM r.id, held.kafka_key IS NULL, held.id LIMIT 1
) AS h ON true
"""


_HOLD = f"h.id, coalesce(nullif(h.error, ''), h.reason, ''), CASE WHEN h.id IS NOT NULL THEN {kind_sql('h')} END"


@dataclass(frozen=True, slots=True, kw_only=True)
class PeekQuery:
    """A selection of pending records. The search ends after the oldest 100,000 behind `after`.

    Args:
        topic: only of this topic.
        key: only with this key.
        record_id: only this record.
        header: only with a header of this name.
        header_value: only with a header of that name and this value, as UTF-8.
        after: only with larger ids, for the next page; None for the first.
        limit: at most so many, up to 1,000.
        value_bytes: at most so much of each value. Headers are left out if they have more than that and 64 KiB.
        headers: at most so many headers of each record, the first.
    """

    topic: str | None = None
    key: str | None = None
    record_id: int | None = None
    header: str | None = None
    header_value: str | None = None
    after: int | None = None
    limit: int = 20
    value_bytes: int = 20_000
    headers: int = 1_000


class PendingRecord(NamedTuple):
    """A record in the outbox table."""

    id: int
    topic: str
    key: str | None
    partition: int | None
    create_time: str
    age_seconds: float | None
    """None for an infinite time."""
    is_marked: bool
    """True while an at-least-once harvester is publishing it."""
    size_bytes: int
    """Of the value."""
    value: bytes | None
    """Its beginning, None for a tombstone."""
    headers: tuple[tuple[str, bytes | None], ...]
    """The first of them."""
    header_count: int
    """The number of all of them."""
    hold_id: int | None
    """The hold that keeps it."""
    hold_reason: str
    hold_kind: HoldKind | None

    def as_json(self) -> dict[str, Any]:
        """Return the record as JSON can have it."""
        return {
            "id": self.id,
            "topic": self.topic,
            "key": self.key,
            "partition": self.partition,
            "create_time": self.create_time,
            "age_seconds": None if self.age_seconds is None else round(self.age_seconds, 3),
            "is_marked": self.is_marked,
            "size_bytes": self.size_bytes,
            "value": None if self.value is None else text_or_base64(self.value),
            "value_is_cut": self.value is not None and len(self.value) < self.size_bytes,
            "headers": [[name, None if value is None else text_or_base64(value)] for name, value in self.headers],
            "header_count": self.header_count,
            "hold_id": self.hold_id,
            "hold_reason": self.hold_reason,
        }


def peek(session: DatabaseSession, query: PeekQuery) -> list[PendingRecord]:
    """Return pending records, the oldest first; raises as `DatabaseSession.ask`, and InvalidConfig for a bad query."""
    if not 1 <= query.limit <= MOST_RECORDS:
        raise InvalidConfig(f"limit: must be a number from 1 to {MOST_RECORDS}")
    if query.header is None and query.header_value is not None:
        raise InvalidConfig("header_value: is that of a header: name the header, too")
    columns = dict(session.ask(COLUMN_TYPES, (session.table.quoted,)))
    if not set(REQUIRED_COLUMNS) <= set(columns):
        lacking = ", ".join(name for name in REQUIRED_COLUMNS if name not in columns)
        raise OutboxTableError(f"there is no outbox table {session.table} in {session.place} (it lacks {lacking})")
    has_holds = set(HOLD_COLUMNS) <= set(dict(session.ask(COLUMN_TYPES, (session.holds.quoted,))))
    statement = _PAGE.format(
        table=session.table.quoted.replace("%", "%%"),
        searched=SEARCHED_ROWS,
        # A record is found by its id wherever it stands.
        begin="id = %(id)s" if query.record_id is not None else "true" if query.after is None else _BEHIND,
        key=shown_key_sql("r.kafka_key"),
        is_small=small_headers_sql("%(header_bytes)s", "r."),
        too_large=HEADERS_TOO_LARGE,
        partition="r.kafka_partition" if "kafka_partition" in columns else "NULL",
        value="substring(r.kafka_value, 1, %(bytes)s)"
        if columns["kafka_value"] == "bytea"
        else "substring(convert_to(r.kafka_value, 'UTF8'), 1, %(bytes)s)",
        hold=_HOLD if has_holds else "NULL, '', NULL",
        header_value="" if query.header_value is None else _HEADER_VALUE.format(value=_header_bytes(columns)),
        holds=_HOLDS.format(holds=session.holds.quoted.replace("%", "%%")) if has_holds else "",
    )
    rows = session.ask(statement, _parameters(session, query))
    return [_record(row) for row in rows]


def search_end(session: DatabaseSession, after: int | None) -> int | None:
    """Return the last id that a search behind `after` looks at, None if it reaches the table's end."""
    table, begin = session.table.quoted.replace("%", "%%"), "true" if after is None else _BEHIND
    rows = session.ask(_SEARCH_END.format(table=table, begin=begin, searched=SEARCHED_ROWS), {"after": after})
    return rows[0][0] if rows else None


def _header_bytes(columns: Mapping[str, str]) -> str:
    given = "%(header_value)s::text"
    return f"convert_to({given}, 'UTF8')" if columns["kafka_header_values"] == "bytea[]" else given


def _parameters(session: DatabaseSession, query: PeekQuery) -> dict[str, Any]:
    return {
        "outbox": f"{session.table.schema}.{session.table.table}",
        "topic": query.topic,
        "key": query.key,
        "id": query.record_id,
        "header": query.header,
        "header_value": query.header_value,
        "after": query.after,
        "limit": query.limit,
        "bytes": query.value_bytes,
        "header_bytes": query.value_bytes + _HEADER_BYTES,
        "headers": query.headers,
    }


def _record(row: tuple[Any, ...]) -> PendingRecord:
    *first, value, names, values, count, hold_id, hold_reason, hold_kind = row
    headers = tuple(
        (name or "", content.encode() if isinstance(content, str) else content)
        for name, content in zip(names, [None] if values is None else values, strict=False)
    )
    shown = None if value is None else bytes(value)
    return PendingRecord._make([*first, shown, headers, count or 0, hold_id, hold_reason, hold_kind])
