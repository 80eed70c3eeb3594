"""The findings of `outbox doctor`, each with its remedy."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Verdict(Enum):
    """The judgement of a finding: fine, worth a look, or in the way of harvesting."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """One examined thing, named in a word or two."""

    subject: str
    verdict: Verdict
    detail: str
    remedy: str = ""  # empty if it is fine


def fine(subject: str, detail: str) -> Finding:
    """Return a finding without anything to do."""
    return Finding(subject, Verdict.OK, detail)


def warning(subject: str, detail: str, remedy: str) -> Finding:
    """Return a finding with which harvesting works, but not as well as it could, or not for long."""
    return Finding(subject, Verdict.WARNING, detail, remedy)


def problem(subject: str, detail: str, remedy: str) -> Finding:
    """Return a finding with which harvesting cannot work, or would lose or reorder records."""
    return Finding(subject, Verdict.PROBLEM, detail, remedy)
