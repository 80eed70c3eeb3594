"""Help for the tests of code that stashes: captures, assertions, an outbox in memory.

    with capture_stashed() as stashed:
        place_order(...)
    stashed.assert_stashed("orders", key=7, value={"total": 42})

pytest has the same as fixtures: `outbox_records`, and `in_memory_outbox` for tests without PostgreSQL. Needs nothing
but the base install.
"""

from outbox_core.testing.records import StashedRecords, capture_stashed, in_memory_outbox

__all__ = ["StashedRecords", "capture_stashed", "in_memory_outbox"]
