"""What a chaos run found, as JSON and as Markdown."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path

_SHOWN = 40
_FROZEN_KINDS = ("freeze-leader", "stop:")
_LATE_SECONDS = 15.0


@dataclass(frozen=True, kw_only=True)
class Happened:
    """A fault that was done.

    Attributes:
        at: seconds from the beginning of the run.
        began_at: seconds since the epoch.
        ended_at: the same.
        where: the outbox, or "services".
        kind: as in the schedule.
        what: details.
        recovered: seconds from the fault's beginning to the next record produced after it that was read; None if none
            came in time.
    """

    at: float
    began_at: float
    ended_at: float
    where: str
    kind: str
    what: str
    recovered: float | None


@dataclass(kw_only=True)
class Report:
    """A run and its outcome.

    Attributes:
        excused: in at-least-once mode, violations within the reach of a frozen process: bytes that were already on
            their way arrive late, which only exactly once excludes.
    """

    delivery: str
    seed: int
    seconds: float
    outboxes: int
    committed: int
    received: int
    rolled_back: int
    lost: int
    repeated_adjacent: int
    repeated_distant: int
    reordered: int
    strangers: int
    mislabelled: int
    excused: int
    transactions: int
    longest_pause: float
    pauses: dict[str, float]
    faults: list[Happened]
    missed: list[str]
    failures: list[str]
    violations: list[str] = field(default_factory=list)
    unread: list[str] = field(default_factory=list)
    left_in_outbox: int = 0

    @property
    def by_kind(self) -> dict[str, int]:
        """How many faults of each kind were done."""
        return dict(sorted(Counter(fault.kind for fault in self.faults).items()))

    @property
    def problems(self) -> list[str]:
        """Why the run is not clean; empty if it is."""
        found = {
            "lost": self.lost,
            "strangers": self.strangers,
            "mislabelled": self.mislabelled,
            "reordered": self.reordered,
            "repeated (distant)": self.repeated_distant,
            "rows left in the outbox": self.left_in_outbox,
            "harvesters that ended by themselves": len(self.failures),
            "partitions not read to their end": len(self.unread),
        }
        if self.delivery == "exactly-once":
            found["repeated (adjacent)"] = self.repeated_adjacent
        frozen = sum(fault.kind.startswith(_FROZEN_KINDS) for fault in self.faults)
        if self.excused > 20 * max(1, frozen):
            found["violations after a freeze, too many to be what was on its way"] = self.excused
        return [f"{what}: {number}" for what, number in found.items() if number]

    def write(self, directory: Path) -> Path:
        """Write `report.json` and `report.md`; returns the latter."""
        directory.mkdir(parents=True, exist_ok=True)
        data = {**asdict(self), "by_kind": self.by_kind, "problems": self.problems}
        (directory / "report.json").write_text(json.dumps(data, indent=1))
        path = directory / "report.md"
        path.write_text(self.markdown())
        return path

    def summary(self) -> str:
        """On a few lines."""
        return (
            f"{self.delivery}, seed {self.seed}, {self.seconds:.0f} s, {len(self.faults)} faults of "
            f"{len(self.by_kind)} kinds, {self.outboxes} outboxes, {self.transactions} transactions\n"
            f"committed {self.committed}, received {self.received}, rolled back {self.rolled_back}\n"
            f"lost {self.lost}, repeated {self.repeated_adjacent} adjacent + {self.repeated_distant} distant, "
            f"reordered {self.reordered}, strangers {self.strangers}, mislabelled {self.mislabelled}, "
            f"after a freeze {self.excused}\n"
            f"longest pause {self.longest_pause:.1f} s; "
            + ("clean" if not self.problems else "NOT CLEAN: " + "; ".join(self.problems))
        )

    def markdown(self) -> str:
        """The whole report for people."""
        recoveries = defaultdict(list)
        for fault in self.faults:
            recoveries[fault.kind].append(fault.recovered)
        lines = ["# Chaos run", "", *(f"- {line}" for line in self.summary().splitlines()), ""]
        lines += ["| Fault | Times | Next record after, median s | at most s |", "|---|---|---|---|"]
        for kind in sorted(recoveries):
            times = sorted(seconds for seconds in recoveries[kind] if seconds is not None)
            shown = f"{times[len(times) // 2]:.1f} | {times[-1]:.1f}" if times else "- | -"
            lines.append(f"| {kind} | {len(recoveries[kind])} | {shown} |")
        for title, entries in (
            ("Violations", self.violations),
            ("Harvesters that ended by themselves", self.failures),
            ("Not read to the end", self.unread),
            ("Planned and not done", self.missed),
        ):
            if entries:
                lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries[:_SHOWN])]
                lines += [f"- and {len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []
        return "\n".join(lines) + "\n"


def within_freeze(sent_at: float, outbox: str, faults: list[Happened]) -> bool:
    """Whether a record was produced by, or beside, a process that was frozen and woke up."""
    return any(
        fault.where == outbox
        and fault.kind.startswith(_FROZEN_KINDS)
        and fault.began_at - _LATE_SECONDS <= sent_at <= fault.ended_at + _LATE_SECONDS
        for fault in faults
    )
