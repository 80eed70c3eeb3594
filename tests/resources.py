"""The resources of a test's process, threads, descriptors and memory, for tests of leaks."""

import gc
import os
import resource
import time
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

FULL_COUNTS = "OUTBOX_TEST_LEAKS"
"""Environment variable: repeat what may leak as often as the release is measured with, instead of a few times."""


_OTHERS = 4  # descriptors: other clients of this process may just be connecting anew


class Held(NamedTuple):
    """The resources that this process holds now.

    Attributes:
        threads: its threads, librdkafka's included.
        descriptors: its open files and sockets.
        memory_mib: its resident memory.
    """

    threads: int
    descriptors: int
    memory_mib: float


def held() -> Held:
    """Measure the resources that this process holds now."""
    own = Path("/proc/self")
    pages = int((own / "statm").read_text().split()[1])
    threads, descriptors = (sum(1 for _ in (own / kind).iterdir()) for kind in ("task", "fd"))
    return Held(threads, descriptors, pages * resource.getpagesize() / 2**20)


def times(quick: int, full: int) -> int:
    """Return the number of repetitions: `quick` as a rule, `full` if `OUTBOX_TEST_LEAKS` is set."""
    return full if os.environ.get(FULL_COUNTS) else quick


@contextmanager
def reference_counts_only():
    """Turn garbage collection off within the context: objects are freed there by their last reference."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def settles(threads: int, descriptors: int, timeout: float = 10.0) -> Held:
    """Wait until no more than so many threads and descriptors are held; return the resources held at the end."""
    deadline = time.monotonic() + timeout
    while (now := held()).threads > threads or now.descriptors > descriptors:
        if time.monotonic() > deadline:
            break
        time.sleep(0.05)
    return now


def assert_released(before: Held, timeout: float = 10.0) -> Held:
    """Assert that what was taken since `before` is released in time; return what is held at the end.

    A client that is left behind holds two threads and three descriptors at least: repeat what may leave one.
    """
    after = settles(before.threads, before.descriptors + _OTHERS, timeout)
    assert after.threads <= before.threads
    assert after.descriptors <= before.descriptors + _OTHERS
    return after
