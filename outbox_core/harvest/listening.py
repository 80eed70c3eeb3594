"""Listens for notices of commits on a thread and a connection of its own, while its harvester leads.

What it hears it tells to `News`; as long as notices are known to come, that promises to tell of every commit, and the
harvester rarely looks without being told. When the connection is lost the promise is taken back at once, and looking
goes on as if there were no notices, until they come again. Whoever begins to listen tells news once: what was committed
before is found by the look that follows.
"""

from __future__ import annotations

import logging
import threading
import time
from typing import TYPE_CHECKING

from outbox_core.errors import OutboxError
from outbox_core.harvest.outage import Outage
from outbox_core.harvest.pace import News

if TYPE_CHECKING:
    from outbox_core.stores.notices import CommitNotices  # needs psycopg, which queues do without

_log = logging.getLogger(__name__)

_CHECK_SECONDS = 30.0
_FIRST_RETRY_SECONDS = 0.5
_LONGEST_RETRY_SECONDS = 30.0
_SHORTEST_REST_SECONDS = 0.005
_REST = 9


class Listening:
    """Tells of commits. `lead` may be called from any thread.

    Args:
        notices: the connection; used on this object's thread only.
        news: where to tell.
    """

    def __init__(self, notices: CommitNotices, news: News) -> None:
        self._notices = notices
        self._news = news
        self._leads = False
        self._stopping = False
        self._trouble = Outage("notices of commits", _log)
        self._thread = threading.Thread(target=self._run, name="outbox-listen", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """End, without waiting for it."""
        self._stopping = True
        self._notices.interrupt()

    def lead(self, leads: bool) -> None:
        """Whether this process leads: only then there is a connection."""
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
                self._trouble.began(error)
                retry = min(_LONGEST_RETRY_SECONDS, retry * 2)
                self._notices.wait(retry)
        self._notices.dispose()

    def _listen(self) -> None:
        """Listen until leadership or the connection is lost."""
        self._notices.open()
        self._trouble.ended()
        try:
            self._news.is_promised = True
            self._news.tell()
            while self._leads and not self._stopping:
                began = time.thread_time()
                if self._notices.wait(_CHECK_SECONDS):
                    self._news.tell()
                    # More of them say nothing more, and any role may send any number: they get a tenth of the time.
                    time.sleep(max(_SHORTEST_REST_SECONDS, _REST * (time.thread_time() - began)))
                else:
                    self._notices.check()
        finally:
            self._news.is_promised = False
            self._news.tell()  # pauses as long as with notices are over
            self._notices.close()
