"""All that a suite on SQLite needs: an outbox in memory, for each test."""

import pytest


@pytest.fixture(autouse=True)
def _outbox(in_memory_outbox):
    pass
