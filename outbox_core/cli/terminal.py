"""Output for people and for programs: aligned tables with titles and colour on a terminal, elsewhere tabs.

Colour is left out where `NO_COLOR` is set (https://no-color.org) or the terminal is `dumb`.
"""

from __future__ import annotations

import errno
import os
import re
import sys
from collections.abc import Sequence
from typing import Protocol, Self

from outbox_core.printable import printable

RED, GREEN, YELLOW, BOLD = "31", "32", "33", "1"
EXIT_INTERRUPTED = 130
EXIT_BROKEN_PIPE = 141
FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Errors of output to a file whose disk is full, or that may not grow."""
_GAP = "  "
_WIDEST = 80


class Output(Protocol):
    """The output: `sys.stdout`, or the one of a Django command."""

    def write(self, text: str, /) -> object:
        """Print text that ends in a newline."""


def is_terminal(out: Output) -> bool:
    """Tell whether a person reads the output."""
    ask = getattr(out, "isatty", None)
    return bool(ask is not None and ask())


def paint(text: str, colour: str, out: Output) -> str:
    """Return the text in a colour, as it is where no colour is wanted."""
    if not is_terminal(out) or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return text
    return f"\x1b[{colour}m{text}\x1b[0m"


class Progress:
    """A line on a terminal that says how far something has come; silent elsewhere. A context manager."""

    def __init__(self, out: Output, text: str) -> None:
        self._out = out
        self._text = text
        self._is_shown = is_terminal(out)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_shown:
            self._out.write("\r\x1b[K")
            flush(self._out)

    def __call__(self, number: int) -> None:
        """Show a number in place of the last one."""
        if self._is_shown:
            self._out.write(f"\r{self._text} {number:,}")
            flush(self._out)


def flush(out: Output) -> None:
    """Show at once what was written."""
    act = getattr(out, "flush", None)
    if act is not None:
        act()


def hide_values(message: str) -> str:
    """Hide what may be a password in a parser's message about arguments: what a shell cuts off a DSN without quotes."""
    return re.sub(r"(?<==)\S+|\S+(?=@)", "***", message) if message.startswith("unrecognized arguments") else message


def drop_output() -> None:
    """Discard what is not yet written to standard output, which Python would try once more at the end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def write_table(out: Output, titles: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Write rows with aligned columns under their titles on a terminal; elsewhere one line each, tabs in between.

    Cells may come from any writer: unprintable characters are escaped, tabs included.
    """
    shown = [[printable(cell) for cell in row] for row in rows]
    if not is_terminal(out):
        for row in shown:
            out.write("\t".join(row) + "\n")
        return
    for number, line in enumerate(aligned([list(titles), *shown])):
        out.write((paint(line, BOLD, out) if number == 0 else line) + "\n")


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Return rows as lines with aligned columns; a cell that is longer than most makes only its own line longer."""
    widths = [min(_WIDEST, max(map(len, column))) for column in zip(*rows, strict=True)]
    return [_GAP.join(map(str.ljust, row, widths)).rstrip() for row in rows]
