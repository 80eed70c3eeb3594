"""A watch over a leader whose process gets no descriptors or threads any more: it gives leadership up.

Such a process may keep its lease, since heartbeats go over open connections, and publish no record. So an existing
thread ends a stalled leader whose process can open no file or start no thread at two checks in a row.
"""

from __future__ import annotations

import os
import resource
import threading
from typing import Protocol

from outbox_core.errors import ProcessExhausted

_INTERVAL_SECONDS = 2.0


class WatchedHarvester(Protocol):
    """A harvester that gives leadership up when it is told to."""

    @property
    def is_stalled(self) -> bool:
        """True if it leads and gets nothing done."""

    def give_up(self, error: BaseException) -> None:
        """End it with an error."""


class ExhaustionMonitor:
    """A thread that checks its harvester at intervals."""

    def __init__(self, harvester: WatchedHarvester) -> None:
        self._harvester = harvester
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outbox-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stopping.set()

    def _run(self) -> None:
        lacks_before = ""
        while not self._stopping.wait(_INTERVAL_SECONDS):
            lacks = what_the_process_lacks() if self._harvester.is_stalled else ""
            if lacks and lacks_before:
                self._harvester.give_up(ProcessExhausted(lacks))
                return
            lacks_before = lacks


def what_the_process_lacks() -> str:
    """Return why this process can open no file or start no thread, in one line; '' if it can."""
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return (
            f"this process can open no more files and connections ({error.strerror}; its limit is {limit}); raise it "
            "(ulimit -n, LimitNOFILE=), and see what holds them"
        )
    try:
        thread = threading.Thread(target=lambda: None, name="outbox-probe", daemon=True)
        thread.start()
        thread.join()
    except RuntimeError as error:
        return f"this process can start no more threads ({error}); raise its limit (ulimit -u, TasksMax=, pids.max)"
    return ""
