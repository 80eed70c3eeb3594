"""The demo's output: live progress on a terminal, a line now and then elsewhere, and the table at the end."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Self

from rich import box
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from example_project.demo.check import Verdict

_WIDTH_OF_A_FILE = 120
_SECONDS_BETWEEN_LINES = 3.0
_COLUMNS = (
    "stashed",
    "rolled\nback",
    "received",
    "lost",
    "reordered",
    "repeated",
    "seconds\nwithout\na leader",
    "records/s\n(best second)",
)


@dataclass(frozen=True, kw_only=True)
class Result:
    """The result of one outbox.

    Attributes:
        name: of the application.
        verdicts: one for each topic.
        rolled_back: records stashed in transactions that rolled back, by topic.
        seconds: from the first transaction to the last record received.
        seconds_without_leader: the part of that without a leader.
        best_second: the most records received within one second.
    """

    name: str
    verdicts: Sequence[Verdict]
    rolled_back: dict[str, int]
    seconds: float
    seconds_without_leader: float
    best_second: int


class Screen:
    """A console that also suits a file or a pipe."""

    def __init__(self) -> None:
        is_terminal = Console().is_terminal
        width = None if is_terminal or os.environ.get("COLUMNS") else _WIDTH_OF_A_FILE
        self._console = Console(highlight=False, width=width)

    def say(self, text: str, style: str | None = None) -> None:
        """Write one line."""
        self._console.print(text, markup=False, style=style, soft_wrap=True)

    def progress(self, total: int) -> Live:
        """Return a context manager that shows the progress of so many records."""
        return Live(self, self._console, total)

    def show(self, results: Sequence[Result]) -> None:
        """Print the final table: a row for each topic, and one for each outbox as a whole."""
        table = Table(box=box.SIMPLE_HEAD)
        table.add_column("topic", no_wrap=True)
        for column in _COLUMNS:
            table.add_column(column, justify="right")
        for result in results:
            for verdict in result.verdicts:
                table.add_row(verdict.topic, *_counts(verdict, result.rolled_back.get(verdict.topic, 0)), "", "")
            total = _total(result.verdicts)
            rate = total.received / result.seconds if result.seconds else 0.0
            table.add_row(
                f"{result.name}, both",
                *_counts(total, sum(result.rolled_back.values())),
                f"{result.seconds_without_leader:.1f}",
                f"{rate:,.0f} ({result.best_second:,})",
                style="bold",
                end_section=True,
            )
        self._console.print(table)


class Live:
    """Two bars and a line about the leaders; simple lines for output that cannot be redrawn."""

    def __init__(self, screen: Screen, console: Console, total: int) -> None:
        self._screen = screen
        self._total = total
        self._next_line_at = 0.0
        self._bars: Progress | None = None
        self._tasks: list[TaskID] = []
        if console.is_terminal:
            self._bars = Progress(
                TextColumn("{task.description:<9}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TextColumn("{task.fields[note]}"),
                console=console,
            )
            self._tasks = [self._bars.add_task(name, total=total, note="") for name in ("stashed", "received")]

    def update(self, stashed: int, received: int, note: str) -> None:
        """Show the present counts and leaders."""
        if self._bars is not None:
            self._bars.update(self._tasks[0], completed=stashed)
            self._bars.update(self._tasks[1], completed=received, note=note)
        elif time.monotonic() >= self._next_line_at:
            self._next_line_at = time.monotonic() + _SECONDS_BETWEEN_LINES
            self._screen.say(f"  stashed {stashed:,} of {self._total:,}, received {received:,}; {note}")

    def __enter__(self) -> Self:
        if self._bars is not None:
            self._bars.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bars is not None:
            self._bars.stop()


def _total(verdicts: Sequence[Verdict]) -> Verdict:
    total = Verdict(topic="")
    for verdict in verdicts:
        total.stashed += verdict.stashed
        total.received += verdict.received
        total.lost += verdict.lost
        total.reordered += verdict.reordered
        total.repeated += verdict.repeated
        total.invented += verdict.invented
    return total


def _counts(verdict: Verdict, rolled_back: int) -> list[str]:
    numbers = (
        verdict.stashed,
        rolled_back,
        verdict.received,
        verdict.lost,
        verdict.reordered,
        verdict.repeated,
    )
    return [f"{number:,}" for number in numbers]
