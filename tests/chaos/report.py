"""The findings of a chaos run, as JSON and as Markdown."""

import json
from collections import Counter, defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.late import LateArrival

_SHOWN = 40
_FROZEN_KINDS = ("freeze-leader", "stop:", "process:freeze")
_LATE_SECONDS = 15.0
_BROKER_FORGOT = "ends of transactions forgotten by the broker (KAFKA-20734), which explain what follows or hide it"
DRAIN_SECONDS = 30.0
"""Within which nothing waits any more once the last fault is over."""


@dataclass(frozen=True, kw_only=True)
class Happened:
    """A fault that was done.

    Attributes:
        at: seconds from the beginning of the run.
        began_at: seconds since the epoch.
        ended_at: the same.
        where: the outbox, or "services".
        kind: as in the schedule.
        what: its details.
        recovered: seconds from the fault's beginning to the next record produced after it that was read; None if none
            came in time.
        late: the fate of a late request.
        waited: the longest wait of a row from the fault's beginning until nothing waited, in seconds; None where nobody
            looked.
    """

    at: float
    began_at: float
    ended_at: float
    where: str
    kind: str
    what: str
    recovered: float | None
    late: LateArrival | None = None
    waited: float | None = None


@dataclass(kw_only=True)
class Report:
    """A run and its outcome.

    Attributes:
        excused: in at-least-once mode, violations within the reach of a frozen process: bytes that were already on
            their way arrive late, which only exactly once excludes.
        drained: seconds from the end of the last fault and of the load until the outboxes were empty; None if they
            never were.
        odd: records of hostile rows that were published.
        forgotten_ends: times that a broker did not tell the partitions of a transaction how it ended (KAFKA-20734).
        hostile: counts of hostile rows, by the database's answer to them.
        long_waits: rows that waited too long while only one harvester was ill.
        setting: of the run, for readers of the report.
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
    drained: float | None = None
    odd: int = 0
    forgotten_ends: int = 0
    hostile: dict[str, int] = field(default_factory=dict)
    long_waits: list[str] = field(default_factory=list)
    setting: dict[str, Any] = field(default_factory=dict)

    @property
    def late(self) -> list[LateArrival]:
        """Return the late requests that were delivered."""
        return [fault.late for fault in self.faults if fault.late is not None and fault.late.end != "lost"]

    @property
    def by_kind(self) -> dict[str, int]:
        """Count the faults of each kind."""
        return dict(sorted(Counter(fault.kind for fault in self.faults).items()))

    @property
    def problems(self) -> list[str]:
        """Return the reasons for which the run is not clean; empty if it is."""
        found = {
            "lost": self.lost,
            "strangers": self.strangers,
            "mislabelled": self.mislabelled,
            "reordered": self.reordered,
            "repeated (distant)": self.repeated_distant,
            "rows left in the outbox": self.left_in_outbox,
            "harvesters that ended by themselves": len(self.failures),
            "partitions not read to their end": len(self.unread),
            "times that a row waited too long": len(self.long_waits),
        }
        if self.drained is not None and self.drained > DRAIN_SECONDS:
            found[f"seconds until nothing waited, more than {DRAIN_SECONDS:.0f}"] = round(self.drained)
        if self.delivery == "exactly-once":
            found["repeated (adjacent)"] = self.repeated_adjacent
        frozen = sum(fault.kind.startswith(_FROZEN_KINDS) for fault in self.faults)
        if self.excused > 20 * max(1, frozen):
            found["violations after a freeze, too many to be what was on its way"] = self.excused
        problems = [f"{what}: {number}" for what, number in found.items() if number]
        if problems and self.forgotten_ends and self.delivery == "exactly-once":
            problems.insert(0, f"{_BROKER_FORGOT}: {self.forgotten_ends}")
        return problems

    def write(self, directory: Path) -> Path:
        """Write `report.json` and `report.md`; return the path of the latter."""
        directory.mkdir(parents=True, exist_ok=True)
        data = {
            **asdict(self),
            "by_kind": self.by_kind,
            "late": [asdict(one) for one in self.late],
            "problems": self.problems,
        }
        (directory / "report.json").write_text(json.dumps(data, indent=1))
        path = directory / "report.md"
        path.write_text(self.markdown())
        return path

    def summary(self) -> str:
        """Summarise the run on a few lines."""
        return (
            f"{self.delivery}, seed {self.seed}, {self.seconds:.0f} s, {len(self.faults)} faults of "
            f"{len(self.by_kind)} kinds, {self.outboxes} outboxes, {self.transactions} transactions\n"
            f"committed {self.committed}, received {self.received}, rolled back {self.rolled_back}\n"
            f"lost {self.lost}, repeated {self.repeated_adjacent} adjacent + {self.repeated_distant} distant, "
            f"reordered {self.reordered}, strangers {self.strangers}, mislabelled {self.mislabelled}, "
            f"after a freeze {self.excused}\n"
            f"late requests {len(self.late)}, of them ends of transactions {self._ends_of_transactions()}\n"
            f"longest pause {self.longest_pause:.1f} s{self._longest_wait()}; nothing waiting {self._drained()}; "
            + ("clean" if not self.problems else "NOT CLEAN: " + "; ".join(self.problems))
        )

    def _ends_of_transactions(self) -> str:
        ends = [arrival for arrival in self.late if arrival.request.startswith("END_TXN")]
        return f"{len(ends)} ({sum(arrival.code == 0 for arrival in ends)} took effect)"

    def _longest_wait(self) -> str:
        waits = [fault.waited for fault in self.faults if fault.waited is not None]
        return f", longest wait of a row {max(waits):.0f} s" if waits else ""

    def _drained(self) -> str:
        return "?" if self.drained is None else f"{self.drained:.1f} s after the last fault"

    def late_table(self) -> list[str]:
        """Tabulate the late requests by their kind and the brokers' answers."""
        codes = Counter((arrival.request, arrival.end, arrival.code) for arrival in self.late)
        lines = ["", "| Late request | End | Code | Times |", "|---|---|---|---|"]
        lines += [
            f"| {request} | {end} | {'-' if code is None else code} | {times} |"
            for (request, end, code), times in sorted(codes.items(), key=str)
        ]
        return lines if codes else []

    def fault_table(self) -> list[str]:
        """Tabulate the faults by their kind and their effect on the flow of records."""
        by_kind = defaultdict(list)
        for fault in self.faults:
            by_kind[fault.kind].append(fault)
        lines = ["| Fault | Times | Next record after, median s | at most s | Longest wait of a row, s |"]
        lines += ["|---|---|---|---|---|"]
        for kind, faults in sorted(by_kind.items()):
            times = sorted(fault.recovered for fault in faults if fault.recovered is not None)
            shown = f"{times[len(times) // 2]:.1f} | {times[-1]:.1f}" if times else "- | -"
            waits = [fault.waited for fault in faults if fault.waited is not None]
            lines.append(f"| {kind} | {len(faults)} | {shown} | {f'{max(waits):.0f}' if waits else '-'} |")
        return lines

    def markdown(self) -> str:
        """Return the whole report as Markdown."""
        lines = ["# Chaos run", "", *(f"- {line}" for line in self.summary().splitlines()), ""]
        lines += self.fault_table()
        lines += self.late_table()
        if self.hostile:
            lines += ["", f"Hostile rows: {self.hostile}; {self.odd} were published.", ""]
        lines += ["", f"Setting: {self.setting}"]
        for title, entries in (
            ("Violations", self.violations),
            ("Rows that waited too long", self.long_waits),
            ("Harvesters that ended by themselves", self.failures),
            ("Not read to the end", self.unread),
            ("Planned and not done", self.missed),
        ):
            if entries:
                lines += ["", f"## {title}", "", *(f"- {entry}" for entry in entries[:_SHOWN])]
                lines += [f"- and {len(entries) - _SHOWN} more"] if len(entries) > _SHOWN else []
        return "\n".join(lines) + "\n"


def within_freeze(sent_at: float, outbox: str, faults: list[Happened]) -> bool:
    """Tell whether a record was produced by, or beside, a process that was frozen and woke up."""
    return any(
        fault.where == outbox
        and fault.kind.startswith(_FROZEN_KINDS)
        and fault.began_at - _LATE_SECONDS <= sent_at <= fault.ended_at + _LATE_SECONDS
        for fault in faults
    )
