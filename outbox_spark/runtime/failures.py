"""Errors of workers and of the JVM, in one line.

Spark passes a worker's traceback as text before the JVM's stack; the error itself is the last line of the last
traceback. The JVM names the called method in the first line, and the error in the second.
"""

from __future__ import annotations

from outbox_core.config import redact

_TRACEBACK = "Traceback (most recent call last):"
_CALLED = "An error occurred while calling "


def reason_of(error: BaseException) -> str:
    """Return the worker's own error, if there is one, else the first line of the message; without secrets."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith(_CALLED) and len(lines) > 1:
        lines = [lines[1].removeprefix(":")]
    behind = text.rpartition(_TRACEBACK)[2] if _TRACEBACK in text else ""
    of_worker = (line for line in behind.splitlines() if line.strip() and not line[0].isspace())
    return redact(next(of_worker, lines[0]).strip())
