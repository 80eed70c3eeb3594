"""Fewer runs of the garbage collector while a process does nothing but harvest."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS = 50_000


@contextmanager
def tune_gc() -> Iterator[None]:
    """Have the collector look at young objects after 50,000 allocations instead of Python's 700.

    Records are many and in no cycle: at the usual threshold the collector walks over those under way again and again,
    for about a fifth of the harvester's time. Clients, connections, threads and descriptors never wait for the
    collector (`tests/integration/harvest/test_leaks.py` checks that); of plain objects in cycles at most 50,000 do.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
