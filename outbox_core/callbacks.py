"""Errors of what users hand in: callbacks, event handlers, loggers. They end nothing; each kind is logged once."""

from __future__ import annotations

import logging
import threading
from contextlib import suppress

_logged: set[tuple[str, type[BaseException]]] = set()
"""Kinds that this process has logged. Clients and leaderships, which come and go, would log them again."""
_lock = threading.Lock()


def log_once(log: logging.Logger, what: str, error: BaseException) -> None:
    """Log an error of a user's callback with its traceback, the first one of its type in this process.

    `what` says what failed, as the beginning of the log line; it is part of the kind, so it must have no details.
    """
    kind = what, type(error)
    with _lock:
        is_new = kind not in _logged
        _logged.add(kind)
    with suppress(Exception):  # it may be the application's logging that fails
        if is_new:
            log.error("%s: %r; further errors of this type are not logged", what, error, exc_info=error)
