"""Progress of a pipeline in the log: a line for each batch; on a terminal one line, which each batch replaces."""

from __future__ import annotations

import logging
import shutil
import sys
from typing import Any

_log = logging.getLogger("outbox_spark")


def say(what: object) -> None:
    """Log what a pipeline did."""
    _log.info("%s", what)


def say_progress(what: object) -> None:
    """Log what a batch did; on a terminal, in place of the batch before."""
    _log.info("%s", what, extra={"is_progress": True})


class OneLine(logging.StreamHandler[Any]):
    """A handler for a terminal: a line of progress is cut to the width, and the next record is written over it."""

    _is_open = False  # the cursor is behind a line of progress

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            begin, end, line = "\r\x1b[K" if self._is_open else "", "\n", self.format(record)
            self._is_open = getattr(record, "is_progress", False)
            if self._is_open:
                line, end = line[: shutil.get_terminal_size().columns - 1], ""
            self.stream.write(f"{begin}{line}{end}")
            self.flush()
        except Exception:
            self.handleError(record)

    def close(self) -> None:
        """End the line."""
        if self._is_open:
            self._is_open = False
            self.stream.write("\n")
        super().close()


def use_one_line() -> None:
    """Let progress stay on one line if stderr is a terminal."""
    if sys.stderr.isatty():
        root, made = logging.getLogger(), OneLine(sys.stderr)
        for handler in root.handlers[:]:
            made.setFormatter(handler.formatter)
            root.removeHandler(handler)
        root.addHandler(made)
