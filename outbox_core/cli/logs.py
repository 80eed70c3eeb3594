"""The log of a command: one line for each record on stderr, as text or as JSON, with secrets hidden.

A line of JSON is one object with `time` (RFC 3339, UTC), `level`, `logger`, `message`, and, where an error was logged,
`exception` with its traceback.

**Nobody waits for who reads it.** A pipe that is not emptied, by a log driver that blocks say, takes 64 KiB, and then
whoever writes to it waits for ever: threads that log would stop, and what they lead. So a line waits for a moment, the
next ones not at all, and the first one that gets through tells how many were dropped.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import select
import sys
import time
from datetime import UTC, datetime
from typing import TextIO

from outbox_core.printable import plural, printable

LOG_FORMATS = ("text", "json")

_PATIENCE_SECONDS = 1.0  # a fifth of the default lease: the elector logs, too


def add_log_format_argument(parser: argparse.ArgumentParser, *, variables: bool = False) -> None:
    """Add `--log-format`, with its environment variable where that counts."""
    where = "; environment: OUTBOX_LOG_FORMAT" if variables else ""
    parser.add_argument("--log-format", choices=LOG_FORMATS, help=f"text (default), or json, an object a line{where}")


def configure_logging(level: int, log_format: str = "text") -> None:
    """Log to stderr, one line for each record, with secrets hidden and names escaped."""
    handler = _handler_for(sys.stderr)
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


def _handler_for(stream: TextIO) -> logging.Handler:
    try:
        return _PatientHandler(stream.fileno(), stream.encoding)
    except (OSError, AttributeError):  # no file, or a system without poll
        return logging.StreamHandler(stream)


class _PatientHandler(logging.Handler):
    """A handler that writes to a descriptor, and drops lines that nobody takes."""

    def __init__(self, descriptor: int, encoding: str) -> None:
        super().__init__()
        self._descriptor = descriptor
        self._encoding = encoding
        self._poll = select.poll()
        self._poll.register(descriptor, select.POLLOUT)
        self._dropped = 0
        self._begun = b""  # the rest of a line that was written in part

    def emit(self, record: logging.LogRecord) -> None:
        """Write a line, or drop it."""
        try:
            self._begun = self._written(self._begun)
            text = self._encoded(record)
            if self._dropped:
                text = self._encoded(_told(self._dropped)) + text
            rest = text if self._begun else self._written(text)
            if rest == text:
                self._dropped += 1
            else:
                self._dropped, self._begun = 0, rest
        except Exception:
            self.handleError(record)

    def _encoded(self, record: logging.LogRecord) -> bytes:
        return (self.format(record) + "\n").encode(self._encoding, "backslashreplace")

    def _written(self, text: bytes) -> bytes:
        """Write as much of a text as is taken, and return the rest."""
        give_up_at = time.monotonic() + (0.0 if self._dropped else _PATIENCE_SECONDS)
        # So much fits in, whenever it says that it takes any.
        while text and self._poll.poll(max(0.0, give_up_at - time.monotonic()) * 1000):
            text = text[os.write(self._descriptor, text[: select.PIPE_BUF]) :]
        return text


def _told(dropped: int) -> logging.LogRecord:
    text = f"the log lacks {plural(dropped, 'line')} here: nobody read stderr, which was full"
    return logging.LogRecord(__name__, logging.WARNING, __file__, 0, text, None, None)


class TextLines(logging.Formatter):
    """Lines for people; a traceback has lines of its own."""

    def __init__(self) -> None:
        super().__init__("%(asctime)s %(levelname)s %(name)s: %(message)s")

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        return _redacted(super().format(record))

    def formatMessage(self, record: logging.LogRecord) -> str:  # noqa: N802  logging's own name
        """Return the line without its traceback."""
        record.message = printable(record.message)
        return super().formatMessage(record)


class JsonLines(logging.Formatter):
    """Lines for programs; a traceback is within the object."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        shown = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": _redacted(record.getMessage()),
        }
        if record.exc_info:
            shown["exception"] = _redacted(self.formatException(record.exc_info))
        return json.dumps(shown)


def _redacted(text: str) -> str:
    from outbox_core.config import redact

    return redact(text)
