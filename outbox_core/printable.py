r"""Safe output of foreign text: a topic's name may clear a terminal or forge a line of a log.

Topics, keys, header names and names of Kafka clients come from writers of the outbox or of Kafka. Characters that are
not printable (control characters, line breaks, marks that turn the direction of writing) are escaped, as in Python:
`\x1b`, `\n`, `\u202e`.
"""

from __future__ import annotations

import base64
import codecs
import json
import logging
import sys
from typing import Any


def printable(text: str) -> str:
    """Return the text in one line, with escapes for characters that are not printable."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def plural(number: int, noun: str) -> str:
    """Return `1 record` or `2,000 records`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def printable_json(document: Any) -> str:
    """Return the value as JSON in one line for stdout, readable in any script; raise ValueError for NaN and infinities.

    JSON is UTF-8: where stdout is not, it is ASCII with escapes.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    text = json.dumps(document, ensure_ascii=codecs.lookup(encoding).name != "utf-8", allow_nan=False)
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def text_or_base64(content: bytes) -> str | dict[str, str]:
    """Return bytes as JSON can have them: text if they are UTF-8, else `{"base64": ...}`."""
    try:
        return content.decode()
    except UnicodeDecodeError:
        return {"base64": base64.b64encode(content).decode()}


def preview(content: bytes, width: int = 60) -> str:
    """Return the beginning of bytes as one line of text, with `.` for what is not printable."""
    text = content[: 4 * width].decode(errors="replace")
    shown = "".join(character if character.isprintable() else "." for character in text)
    return shown if len(shown) <= width else shown[: width - 1] + "…"


def escape_log_lines(package: str) -> None:
    """Escape unprintable text in all log lines of a package, for any handlers of the application.

    Loggers do not inherit filters, so each gets one: call it after the modules that log are imported. Idempotent.
    """
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (name == package or name.startswith(f"{package}.")):
            logger.addFilter(_escape)


def _escape(record: logging.LogRecord) -> bool:
    """Escape a log record's message and arguments; a traceback behind it keeps its lines."""
    if isinstance(record.msg, str):
        record.msg = printable(record.msg)
    if isinstance(record.args, tuple):
        record.args = tuple(map(_shown, record.args))
    return True


def _shown(argument: object) -> object:
    if isinstance(argument, int | float | None):
        return argument
    text = str(argument)
    return argument if text.isprintable() else printable(text)
