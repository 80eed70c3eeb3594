"""What went wrong in a worker, in one line.

Spark hands over the worker's traceback as text, within a message of its own and before the JVM's stack. What people
need is the line that the last traceback ends with.
"""

from __future__ import annotations

from outbox_core.config import redact

_TRACEBACK = "Traceback (most recent call last):"


def reason_of(error: BaseException) -> str:
    """The worker's own error, if there is one, else the first line of the message; without secrets."""
    text = str(error)
    found = _after_traceback(text) or next((line for line in text.splitlines() if line.strip()), type(error).__name__)
    return redact(found.strip())


def _after_traceback(text: str) -> str | None:
    """The line with which the last traceback ends: the first one that is not indented."""
    behind = text.rpartition(_TRACEBACK)[2] if _TRACEBACK in text else ""
    return next((line for line in behind.splitlines() if line.strip() and not line[0].isspace()), None)
