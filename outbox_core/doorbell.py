"""A doorbell within one process: whoever commits records rings it, and harvesters that run here look at once.

It spares a harvester that is embedded in the application the wait for its next look at the table. It says nothing about
what was committed where, so a ring in vain costs a look, and one that is missed costs a wait: no record depends on it.

All functions may be called from any thread.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

_lock = threading.Lock()
_answering: tuple[Callable[[], None], ...] = ()  # replaced as a whole, so that `ring` needs no lock


def ring() -> None:
    """Records may have been committed: tell everybody who answers."""
    for answer in _answering:
        answer()


def is_heard() -> bool:
    """Whether anybody answers in this process; if not, a ring may be spared."""
    return bool(_answering)


def answer(callback: Callable[[], None]) -> Callable[[], None]:
    """Have a callback called at every ring, on the ringing thread: it must be short and must not raise.

    Returns:
        What ends it. Idempotent.
    """
    global _answering  # noqa: PLW0603  one door, one bell

    def entry() -> None:
        callback()

    def leave() -> None:
        global _answering  # noqa: PLW0603
        with _lock:
            _answering = tuple(other for other in _answering if other is not entry)

    with _lock:
        _answering = (*_answering, entry)
    return leave
