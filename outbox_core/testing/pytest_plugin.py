"""The pytest plugin: the fixtures `outbox_records` and `in_memory_outbox`.

pytest loads it by its entry point in every project that has this package, so it imports neither a framework nor a
driver, and does nothing until a test asks for a fixture.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from outbox_core.testing import records

__all__ = ["in_memory_outbox", "outbox_records"]


@pytest.fixture
def outbox_records() -> Iterator[records.StashedRecords]:
    """The records that the test's code stashes: a sequence with `assert_stashed`. They are written as usual."""
    with records.capture_stashed() as captured:
        yield captured


@pytest.fixture
def in_memory_outbox() -> Iterator[records.StashedRecords]:
    """The records that the test's code stashes, kept in memory: no outbox table, and no PostgreSQL, is needed."""
    with records.in_memory_outbox() as captured:
        yield captured
