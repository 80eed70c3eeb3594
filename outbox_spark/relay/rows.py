"""Conversion of the outbox's rows to Arrow, and back."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from uuid import UUID

import pyarrow as pa

from outbox_core.errors import InvalidConfig
from outbox_core.stores.interface import StoredRecord
from outbox_core.stores.relay_marks import RelayMark

SCHEMA = (
    "id bigint, create_time timestamp, topic string, key string, value binary, "
    "header_list array<struct<key: string, value: binary>>, partition int, outbox_id string, outbox_mark string"
)

_HEADER = pa.struct([pa.field("key", pa.string()), pa.field("value", pa.binary())])
ARROW = pa.schema(
    [
        pa.field("id", pa.int64()),
        pa.field("create_time", pa.timestamp("us", tz="UTC")),
        pa.field("topic", pa.string()),
        pa.field("key", pa.string()),
        pa.field("value", pa.binary()),
        pa.field("header_list", pa.list_(pa.field("element", _HEADER))),
        pa.field("partition", pa.int32()),
        pa.field("outbox_id", pa.string()),
        pa.field("outbox_mark", pa.string()),
    ]
)


def to_arrow(rows: Sequence[StoredRecord], outbox_name: str, mark: RelayMark | None) -> pa.RecordBatch:
    """Turn rows of the table into rows of the format `outbox`."""
    ids, topics, keys, values, header_keys, header_values, partitions, create_times = zip(*rows, strict=True)
    return pa.RecordBatch.from_arrays(
        [
            pa.array(ids, pa.int64()),
            pa.array(create_times, pa.timestamp("us", tz="UTC")),
            pa.array(topics, pa.string()),
            pa.array(keys, pa.string()),
            pa.array(values, pa.binary()),
            _headers(header_keys, header_values),
            pa.array(partitions, pa.int32()),
            pa.array([f"{outbox_name}:{number}" for number in ids], pa.string()),
            pa.array([str(mark.leader_id) if mark is not None else None] * len(rows), pa.string()),
        ],
        schema=ARROW,
    )


def _headers(header_keys: Sequence[Any], header_values: Sequence[Any]) -> pa.Array:
    kind = ARROW.field("header_list").type
    if not any(header_keys):
        return pa.nulls(len(header_keys), kind)
    return pa.array(
        [
            [
                {"key": name, "value": value.encode() if isinstance(value, str) else value}
                for name, value in zip(names, values or (), strict=True)
            ]
            if names
            else None
            for names, values in zip(header_keys, header_values, strict=True)
        ],
        kind,
    )


def from_arrow(batches: Iterator[pa.RecordBatch]) -> tuple[RelayMark | None, list[StoredRecord]]:
    """Turn rows of a stream's batch into records, by id, with their mark (None without rows). Raises InvalidConfig."""
    records: list[StoredRecord] = []
    marks: set[str | None] = set()
    for batch in batches:
        missing = [name for name in ("id", "create_time", "topic", "outbox_mark") if name not in batch.schema.names]
        if missing:
            raise InvalidConfig(
                f"outbox_kafka_txn: column(s) {', '.join(missing)} are missing; it writes what a stream of format "
                "outbox reads, with all of its columns"
            )
        marks.update(batch.column("outbox_mark").unique().to_pylist())
        records.extend(_records(batch))
    if not records:
        return None, []
    mark = RelayMark.of(UUID(first)) if (first := next(iter(marks))) is not None else None
    if len(marks) != 1 or mark is None:
        raise InvalidConfig("outbox_kafka_txn: rows of several batches, or of a batch read; it writes streams only")
    records.sort(key=lambda record: record.id)
    return mark, records


def _records(batch: pa.RecordBatch) -> Iterator[StoredRecord]:
    def column(name: str) -> list[Any]:
        return batch.column(name).to_pylist() if name in batch.schema.names else [None] * batch.num_rows

    headers = column("header_list")
    times = batch.column("create_time").cast(pa.int64()).to_pylist()
    rows = zip(
        column("id"), column("topic"), column("key"), column("value"), headers, column("partition"), times, strict=True
    )
    for number, topic, key, value, pairs, partition, created in rows:
        names = [pair["key"] for pair in pairs] if pairs else None
        values = [pair["value"] for pair in pairs] if pairs else None
        yield StoredRecord(number, topic, key, value, names, values, -1 if partition is None else partition, created)
