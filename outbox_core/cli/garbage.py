"""Fewer runs of the garbage collector while a process does nothing but harvest."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_ALLOCATIONS = 50_000


@contextmanager
def garbage_is_collected_rarely() -> Iterator[None]:
    """Have the collector look at young objects after 50,000 allocations instead of Python's 700.

    Records are many and short-lived, and no cycle holds them: reference counts free them. At the usual threshold the
    collector walks over those under way again and again and finds nothing, for about a fifth of the harvester's time.

    What is scarce never waits for the collector: Kafka clients, connections, threads and descriptors are given back by
    whoever ends them, and by reference counts (`tests/integration/test_leaks.py` repeats what ends without any
    collection). Cycles do exist, around errors with their tracebacks and around what a leadership was made of. They are
    plain objects, and no more than 50,000 of them wait until they are found.
    """
    usual = gc.get_threshold()
    gc.set_threshold(_ALLOCATIONS, *usual[1:])
    try:
        yield
    finally:
        gc.set_threshold(*usual)
