"""The report of a run, as JSON and as Markdown."""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

_SHOWN = 20


@dataclass(kw_only=True)
class Report:
    """A run and its outcome.

    Attributes:
        seconds: its duration.
        tasks: number of committed tasks.
        records: number of records that were sent, without those that were sent twice.
        runs: number of runs of tasks.
        retried: number of tasks with more than one run.
        calls: number of calls of `consume` that returned.
        handled: number of records that these handled.
        repeats: number of repeats that these saw.
        errors: errors that left `consume`, by form and class.
        given_back: number of messages that workers gave back without counting an attempt.
        misfortunes: what happened to tries, by kind.
        faults: what happened to processes and connections, by kind.
        problems: what is wrong, by kind, with examples.
    """

    seed: int
    seconds: float
    tasks: int
    records: int
    runs: int
    retried: int
    calls: int
    handled: int
    repeats: int
    errors: Mapping[str, int]
    given_back: int
    misfortunes: Mapping[str, int]
    faults: Mapping[str, int]
    problems: Mapping[str, list[str]]

    def summary(self) -> str:
        """Summarise the run on a few lines."""
        outcome = "; ".join(f"{what}: {len(found)}, as {found[0]}" for what, found in self.problems.items())
        return (
            f"seed {self.seed}, {self.seconds:.0f} s, {sum(self.faults.values())} faults {_listed(self.faults)}\n"
            f"{self.tasks} tasks in {self.runs} runs, {self.retried} of them more than once, "
            f"{self.given_back} given back\n"
            f"{self.records} records; {self.calls} calls of consume returned, with {self.handled} handled and "
            f"{self.repeats} repeats; errors that left it {_listed(self.errors)}\n"
            f"misfortunes {_listed(self.misfortunes)}\n" + (f"NOT CLEAN: {outcome}" if self.problems else "clean")
        )

    def write(self, directory: Path) -> Path:
        """Write `report.json` and `report.md`; return the path of the latter."""
        (directory / "report.json").write_text(json.dumps(asdict(self), indent=1))
        lines = ["# Effects under faults", "", *(f"- {line}" for line in self.summary().splitlines())]
        for what, found in self.problems.items():
            lines += ["", f"## {what}", "", *(f"- {example}" for example in found[:_SHOWN])]
            lines += [f"- and {len(found) - _SHOWN} more"] if len(found) > _SHOWN else []
        path = directory / "report.md"
        path.write_text("\n".join(lines) + "\n")
        return path


def _listed(counts: Mapping[str, int]) -> str:
    return "(" + ", ".join(f"{what} {number}" for what, number in sorted(Counter(counts).items())) + ")"
