"""A thread that listens for NOTIFY on a connection of its own while its harvester leads, and sets the `CommitFlag`."""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from outbox_core.commit_signal import CommitFlag
from outbox_core.errors import OutboxError
from outbox_core.outage import Outage

if TYPE_CHECKING:
    from outbox_core.stores.postgres.notify import CommitNotices  # needs psycopg, which queues do without

_log = logging.getLogger(__name__)

_CHECK_SECONDS = 30.0
_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
_SHORTEST_SLEEP_SECONDS = 0.005
_SLEEP_FACTOR = 9


class CommitListener:
    """The listening thread, the only user of `notices`. `set_leading` may be called from any thread."""

    def __init__(self, notices: CommitNotices, commits: CommitFlag) -> None:
        self._notices = notices
        self._commits = commits
        self._leads = False
        self._stopping = False
        self._outage = Outage("notices of commits", _log)
        self._thread = threading.Thread(target=self._run, name="outbox-listen", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end, without waiting for it."""
        self._stopping = True
        self._notices.interrupt()

    def set_leading(self, leads: bool) -> None:
        """Open the connection if this process leads, else close it."""
        if leads != self._leads:
            self._leads = leads
            self._notices.interrupt()

    def _run(self) -> None:
        retry = _FIRST_RETRY_SECONDS
        while not self._stopping:
            try:
                if self._leads:
                    self._listen()
                    retry = _FIRST_RETRY_SECONDS
                self._notices.wait(_LONGEST_RETRY_SECONDS)
            except OutboxError as error:
                self._outage.failed(error)
                retry = min(_LONGEST_RETRY_SECONDS, retry * 2)
                self._pause(retry)
        self._notices.dispose()

    def _pause(self, seconds: float) -> None:
        try:
            self._notices.wait(seconds)
        except OutboxError:  # of a process that has no descriptor left to wait with
            time.sleep(_FIRST_RETRY_SECONDS)

    def _listen(self) -> None:
        self._notices.open()
        self._outage.recovered()
        try:
            self._commits.is_reliable = True
            self._commits.notify()
            while self._leads and not self._stopping:
                began = time.thread_time()
                if self._notices.wait(_CHECK_SECONDS):
                    self._commits.notify()
                    # One notice says as much as many, and any role may send any number: they get a tenth of the time.
                    time.sleep(max(_SHORTEST_SLEEP_SECONDS, _SLEEP_FACTOR * (time.thread_time() - began)))
                else:
                    self._notices.check()
        finally:
            self._commits.is_reliable = False
            self._commits.notify()  # ends a pause that is as long as reliable signals allow
            self._notices.close()
