"""What `outbox doctor` found out about one thing, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """How a thing looks: fine, worth a look, or in the way of harvesting."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One examined thing.

    Attributes:
        subject: what was looked at, in a word or two: `sequence`, `leader topic`.
        verdict: how it looks.
        detail: what was seen.
        remedy: what to do about it; empty if it is fine.
    """

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def fine(subject: str, detail: str) -> Finding:
    """Nothing to do."""
    return Finding(subject, Verdict.OK, detail)


def warning(subject: str, detail: str, remedy: str) -> Finding:
    """Harvesting works, but not as well as it could, or not for long."""
    return Finding(subject, Verdict.WARNING, detail, remedy)


def problem(subject: str, detail: str, remedy: str) -> Finding:
    """Harvesting cannot work like this, or would lose or reorder records."""
    return Finding(subject, Verdict.PROBLEM, detail, remedy)
