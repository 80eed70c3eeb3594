"""Conversion of the outbox's rows to Arrow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from outbox_core.stores.interface import StoredRecord

SCHEMA = (
    "id bigint, create_time timestamp, topic string, key string, value binary, "
    "header_list array<struct<key: string, value: binary>>, partition int, outbox_id string"
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
    ]
)


def to_arrow(rows: Sequence[StoredRecord], outbox_name: str) -> pa.RecordBatch:
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
