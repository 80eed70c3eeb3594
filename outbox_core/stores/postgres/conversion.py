"""Python values as parameters, and rows as records. Arrays are text: psycopg would adapt a list element by element."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from operator import attrgetter
from typing import Any

from outbox_core.stores.interface import (
    HeldKey,
    HoldSet,
    LaneKey,
    OversizedValue,
    RowId,
    StoredRecord,
    held_key,
    ids_and_times,
)
from outbox_core.stores.postgres.statements import OVERSIZED

_LARGEST_ID = 2**63 - 1
_EPOCH_MICROSECONDS = 946_684_800_000_000  # of PostgreSQL, 2000-01-01
_partition_of = attrgetter("partition")


def array(numbers: Sequence[int]) -> str:
    """Return an array of numbers."""
    return f"{{{str(list(numbers))[1:-1]}}}"  # twice as fast as to join them


def text_array(texts: Iterable[str]) -> str:
    """Return an array of texts."""
    quoted = ('"' + text.replace("\\", "\\\\").replace('"', '\\"') + '"' for text in texts)
    return f"{{{','.join(quoted)}}}"


def multirange(ids: Collection[int]) -> str:
    """Return exactly these ids, as a multirange of their runs."""
    runs: list[list[int]] = []
    for identity in sorted(ids):
        if runs and identity == runs[-1][1] + 1:
            runs[-1][1] = identity
        elif not runs or identity != runs[-1][1]:
            runs.append([identity, identity])
    # Behind the last of all ids no range can end.
    texts = (f"[{first},)" if last == _LARGEST_ID else f"[{first},{last}]" for first, last in runs)
    return f"{{{','.join(texts)}}}"


def without_keys(lanes: Collection[LaneKey]) -> dict[str, Any]:
    """Return the parameters of `WITHOUT_KEYS`."""
    return {
        "excluded_topics": text_array(topic for topic, _ in lanes),
        "excluded_keys": text_array(held_key(key) for _, key in lanes),
    }


def without_rows(rows: Collection[RowId | StoredRecord]) -> dict[str, str]:
    """Return the parameters of `WITHOUT_ROWS`."""
    ids, create_times = ids_and_times(rows)
    return {"ids": multirange(ids), "row_ids": array(ids), "row_times": array(create_times)}


def rounded(rows: Iterable[RowId | StoredRecord], digits: int) -> list[RowId]:
    """Return rows whose create times have more digits of a second than so many, with their times as rounded to those.

    PostgreSQL rounds the same way where the type of a column is changed to `timestamptz(digits)`: half away from 2000.
    """
    unit = 10 ** (6 - digits)
    found = []
    for row in rows:
        if row.create_time % unit:
            since = row.create_time - _EPOCH_MICROSECONDS
            units = (abs(since) + unit // 2) // unit
            found.append(RowId(row.id, _EPOCH_MICROSECONDS + (units if since > 0 else -units) * unit))
    return found


def only_rows(rows: Collection[RowId] | None) -> dict[str, str]:
    """Return the parameters of `ONLY_ROWS`."""
    if rows is None:
        return {}
    ids, create_times = ids_and_times(rows)
    return {"only_ids": array(ids), "only_times": array(create_times)}


class HeldParameters:
    """The parameters of `WITHOUT_HELD`, written anew only when the holds change: there may be ten thousand keys."""

    def __init__(self) -> None:
        self._lanes: frozenset[LaneKey] = frozenset()
        self._ids: frozenset[int] = frozenset()
        self._written = {"held_lane_topics": "{}", "held_lane_keys": "{}", "held_ids": "{}"}

    def of(self, holds: HoldSet, topics: Iterable[str] = ()) -> dict[str, Any]:
        """Return the parameters for these holds, and for some topics more."""
        if holds.lanes is not self._lanes or holds.ids is not self._ids:
            self._lanes, self._ids = holds.lanes, holds.ids
            lanes = list(holds.lanes)
            self._written = {
                "held_lane_topics": text_array(topic for topic, _ in lanes),
                "held_lane_keys": text_array(key for _, key in lanes),
                "held_ids": multirange(holds.ids),
            }
        return {**self._written, "held_topics": text_array(holds.topics.union(topics))}


def key_as_held(key: str | None) -> HeldKey | None:
    """Return a key that a statement read in the form of `held_key`."""
    return None if key is None else HeldKey(key)


def with_oversized(records: list[StoredRecord], max_message_bytes: int) -> list[StoredRecord]:
    """Return records as they were read; those that were too large have their size in the place of a partition."""
    if max(map(_partition_of, records), default=0) > OVERSIZED:
        return [_oversized(record, max_message_bytes) for record in records]
    return records


def _oversized(record: StoredRecord, max_message_bytes: int) -> StoredRecord:
    if record.partition <= OVERSIZED:
        return record
    value: Any = OversizedValue(record.partition - OVERSIZED, max_message_bytes)
    return record._replace(key=key_as_held(record.key), value=value, partition=-1)
