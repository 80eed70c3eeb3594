"""What went wrong in a worker, in one line.

Spark hands over the worker's traceback as text, within a message of its own and before the JVM's stack. What people
need is the line that the last traceback ends with. An error of the JVM says in its first line who was called, and in
the second what happened.
"""

from __future__ import annotations

from outbox_core.config import redact

_TRACEBACK = "Traceback (most recent call last):"
_CALLED = "An error occurred while calling "


def reason_of(error: BaseException) -> str:
    """The worker's own error, if there is one, else the first line of the message; without secrets."""
    text = str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()] or [type(error).__name__]
    if lines[0].startswith(_CALLED) and len(lines) > 1:
        lines = [lines[1].removeprefix(":")]
    return redact((_after_traceback(text) or lines[0]).strip())


def _after_traceback(text: str) -> str | None:
    """The line with which the last traceback ends: the first one that is not indented."""
    behind = text.rpartition(_TRACEBACK)[2] if _TRACEBACK in text else ""
    return next((line for line in behind.splitlines() if line.strip() and not line[0].isspace()), None)
