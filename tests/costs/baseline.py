"""The costs of a record that were accepted, in `baseline.toml`, and what has grown since."""

import tomllib
from pathlib import Path
from typing import NamedTuple

BASELINE = Path(__file__).with_name("baseline.toml")
HOW_TO_ACCEPT = (
    "If that is meant to be, accept it with `make costs-accept`, and commit tests/costs/baseline.toml with the reason."
)
TOLERATED = {
    "statements": 0.3,
    "rows read": 0.1,
    "WAL bytes": 0.05,
    "dead tuples": 0.02,
    "produce calls": 0.01,
    "Python calls": 0.05,
}
"""The shares by which costs may grow.

There are two statements for each wave of 500 records: one more is half as many again, and only a stray one, which may
read a wave once more, is tolerated. Exactly once produces two records of its own for each wave, and a few when a slow
broker made it replace its producer. Turns of the loop that wait add a few Python calls.
"""
_HEAD = """\
# What one record costs in a steady drain, by delivery: written by `make costs-accept`, and read by
# tests/costs/test_costs.py. "statements" and "Python calls" have what they consist of: statements by their beginnings,
# calls by function.
"""


class Costs(NamedTuple):
    """The costs of one record.

    Attributes:
        totals: by kind, in the order of `TOLERATED`.
        parts: of the kinds that have some, what they consist of.
    """

    totals: dict[str, float]
    parts: dict[str, dict[str, float]]


def read_baseline(path=BASELINE):
    """Return the accepted costs by delivery; none, if nothing was accepted yet."""
    if not path.exists():
        return {}
    accepted = tomllib.loads(path.read_text())
    return {
        delivery: Costs(costs["costs"], {kind: parts for kind, parts in costs.items() if kind != "costs"})
        for delivery, costs in accepted.items()
    }


def write_baseline(accepted, path=BASELINE):
    """Write the costs of all deliveries."""
    lines = [_HEAD]
    for delivery in sorted(accepted):
        costs = accepted[delivery]
        for section, numbers in {"costs": costs.totals, **costs.parts}.items():
            lines.append(f'[{delivery}."{section}"]')
            lines.extend(f"{_quoted(name)} = {number:.4f}" for name, number in numbers.items())
            lines.append("")
    path.write_text("\n".join(lines))


def _quoted(name):
    escaped = name.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def what_grew(delivery, accepted, now):
    """Return a sentence for each kind of cost that grew by more than is tolerated, with the parts that did."""
    sentences = []
    for kind, tolerated in TOLERATED.items():
        before, after = accepted.totals.get(kind, 0.0), now.totals[kind]
        if after <= before * (1 + tolerated) + _ROUNDED:
            continue
        grown = _grown_parts(accepted.parts.get(kind, {}), now.parts.get(kind, {}))
        share = f"{after / before - 1:+.1%}" if before else "new"
        sentences.append(
            f"{delivery}: {kind} for a record grew from {before:.4f} to {after:.4f} ({share}, where {tolerated:.0%} is "
            "tolerated)" + "".join(f"\n    {part}" for part in grown)
        )
    return sentences


_ROUNDED = 0.00006  # of the numbers in the file


def _grown_parts(before, after):
    grown = {name: count - before.get(name, 0.0) for name, count in after.items()}
    largest = sorted((name for name in grown if grown[name] > _ROUNDED), key=grown.__getitem__, reverse=True)
    return [f"{before.get(name, 0.0):.4f} -> {after[name]:.4f} {name}" for name in largest[:10]]
