"""Rows in lists that fit into memory and into a transaction."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

Row = TypeVar("Row")


def batches(
    rows: Iterable[Row], most: int, most_bytes: int, parts: Callable[[Row], Iterable[bytes | str | None]]
) -> Iterator[list[Row]]:
    """Yield lists of at most so many rows, none of which is added to so many bytes in the `parts` of those before."""
    batch: list[Row] = []
    size = 0
    for row in rows:
        batch.append(row)
        size += sum([len(part) for part in parts(row) if part])
        if len(batch) == most or size >= most_bytes:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
