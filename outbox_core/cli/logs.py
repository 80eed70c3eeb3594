"""The log of a command: one line for each record on stderr, as text or as JSON, with secrets hidden.

A line of JSON is one object with `time` (RFC 3339, UTC), `level`, `logger`, `message`, and, where an error was logged,
`exception` with its traceback.
"""

from __future__ import annotations

import argparse
import json
import logging
from datetime import UTC, datetime

from outbox_core.printable import printable

LOG_FORMATS = ("text", "json")


def add_log_format_argument(parser: argparse.ArgumentParser, *, variables: bool = False) -> None:
    """Add `--log-format`, with its environment variable where that counts."""
    where = "; environment: OUTBOX_LOG_FORMAT" if variables else ""
    parser.add_argument("--log-format", choices=LOG_FORMATS, help=f"text (default), or json, an object a line{where}")


def configure_logging(level: int, log_format: str = "text") -> None:
    """Log to stderr, one line for each record, with secrets hidden and names escaped."""
    handler = logging.StreamHandler()
    handler.setFormatter(JsonLines() if log_format == "json" else TextLines())
    logging.basicConfig(level=level, handlers=[handler], force=True)


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
