r"""Text that others chose, made fit to be shown: a topic's name may clear a terminal or forge a line of a log.

Topics, keys, header names and names of Kafka clients come from whoever may write to the outbox or to Kafka. What is no
printable character (control characters, line breaks, marks that turn the direction of writing) is shown escaped, as in
Python: `\\x1b`, `\\n`, `\\u202e`.
"""

from __future__ import annotations

import json
import logging
from typing import Any


def printable(text: str) -> str:
    """Return the text in one line, with escapes for what is not printable."""
    if text.isprintable():
        return text
    return "".join(character if character.isprintable() else ascii(character)[1:-1] for character in text)


def printable_json(document: Any) -> str:
    """Return the value as JSON in one line, in which text of any script can be read.

    Raises:
        ValueError: if it holds a number that JSON cannot write: infinite, or none.
    """
    text = json.dumps(document, ensure_ascii=False, allow_nan=False)
    return "".join(character if character.isprintable() else json.dumps(character)[1:-1] for character in text)


def escape_log_lines(package: str) -> None:
    """Let the loggers of a package show nothing unprintable, whatever handlers the application has.

    Filters are not inherited by the loggers below, so each of them gets one: call it when the modules that log have
    been imported, as often as may be.
    """
    for name, logger in list(logging.root.manager.loggerDict.items()):
        if isinstance(logger, logging.Logger) and (name == package or name.startswith(f"{package}.")):
            logger.addFilter(_escape)


def _escape(record: logging.LogRecord) -> bool:
    """Escape what a line of a log is made of; a traceback behind it keeps its lines."""
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
