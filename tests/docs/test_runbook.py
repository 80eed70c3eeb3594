"""The runbook has an entry for every alert, every finding of the doctors and every system check."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs/runbook.md").read_text()
_ANYTHING = "\0"
_JUDGEMENTS = {"warning", "problem", "judge", "unanswered"}


class CodedFinding(NamedTuple):
    """A finding as the source makes it, with NUL for what is filled in."""

    subject: str
    detail: str
    place: str


def section(heading: str) -> str | None:
    """Return the text below a heading of the runbook, up to the next one of any level."""
    found = re.search(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#|\Z)", RUNBOOK, re.MULTILINE | re.DOTALL)
    return found[1] if found else None


def sources() -> list[Path]:
    """Return the modules that make findings."""
    packages = ("outbox_core", "outbox_django", "outbox_queue")
    return [path for name in packages for path in (ROOT / name).rglob("*.py") if "doctor.findings" in path.read_text()]


def coded_findings(path: Path) -> Iterator[CodedFinding]:
    """Yield the warnings and problems that a module makes."""
    tree = ast.parse(path.read_text())
    names = _constants(tree)
    for function in (node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)):
        local = {**names, **_constants(function)}
        for node in ast.walk(function):
            if isinstance(node, ast.Call) and _is_judgement(node.func) and len(node.args) >= 2:
                is_unanswered = (
                    isinstance(node.func, ast.Name) and node.func.id == "unanswered"
                )  # has a service between
                words = [node.args[0], node.args[2 if is_unanswered else 1]]
                subject, detail = (_text(argument, local) for argument in words)
                yield CodedFinding(subject, detail, f"{path.relative_to(ROOT)}:{node.lineno}")


def _is_judgement(called: ast.expr) -> bool:
    if isinstance(called, ast.IfExp):  # (problem if is_certain else warning)(...)
        called = called.body
    return isinstance(called, ast.Name) and called.id in _JUDGEMENTS


def _constants(tree: ast.AST) -> dict[str, str]:
    found: dict[str, str] = {}
    for node in ast.iter_child_nodes(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Name):
                found[target.id] = _text(node.value, found)
            elif isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = zip(target.elts, node.value.elts, strict=True)
                found |= {name.id: _text(value, found) for name, value in pairs if isinstance(name, ast.Name)}
    return found


def _text(value: ast.expr, names: dict[str, str]) -> str:
    if isinstance(value, ast.Constant):
        return str(value.value)
    if isinstance(value, ast.Name):
        return names.get(value.id, _ANYTHING)
    if isinstance(value, ast.JoinedStr):
        return "".join(_text(part, names) for part in value.values)
    if isinstance(value, ast.IfExp):
        return _text(value.body, names)
    return _ANYTHING


def quotes(entry: str, detail: str) -> bool:
    """Return whether an entry quotes a finding: in backticks, with `...` where something is filled in."""
    for quoted in re.findall(r"`([^`\n]+)`", entry):
        parts = [part.strip() for part in quoted.split("...") if part.strip(" :")]
        if parts and re.search(".*".join(map(re.escape, parts)), detail, re.DOTALL):
            return True
    return False


# A finding that only passes an error on has no words of its own to look for.
FINDINGS = [finding for path in sources() for finding in coded_findings(path) if finding[:2] != (_ANYTHING, _ANYTHING)]


@pytest.mark.parametrize("finding", FINDINGS, ids=[f"{finding.place}" for finding in FINDINGS])
def test_every_finding_of_the_doctor_has_an_entry(finding: CodedFinding) -> None:
    """The subject is a heading of the runbook, and the text below it quotes the finding."""
    if finding.subject == _ANYTHING:  # checks that several subjects share, each with its own entry
        entries = {other.subject: section(other.subject) or "" for other in FINDINGS if other.subject != _ANYTHING}
        assert any(quotes(entry, finding.detail) for entry in entries.values()), f"no entry quotes {finding}"
        return
    entry = section(finding.subject)
    assert entry is not None, f"docs/runbook.md lacks the entry '### {finding.subject}' ({finding.place})"
    if finding.detail.strip(_ANYTHING + " "):
        shown = finding.detail.replace(_ANYTHING, "...")
        assert quotes(entry, finding.detail), f"docs/runbook.md, '### {finding.subject}', lacks a line for `{shown}`"


def test_findings_are_found() -> None:
    """The search sees the findings that are made in each of its ways."""
    seen = {(finding.subject, finding.detail.replace(_ANYTHING, "...")) for finding in FINDINGS}
    assert any(subject == "autovacuum" and detail.startswith("is off") for subject, detail in seen)
    assert ("sequence", "... does not only grow") in seen
    assert any(subject == "leader topic" for subject, _ in seen)  # by a variable
    assert any(subject == "obstacle" for subject, _ in seen)  # by a choice of two judgements
    assert any(subject == "Kafka" for subject, _ in seen)  # by a constant of the module


def test_every_check_of_spark_has_an_entry() -> None:
    """Each subject of `outbox-spark doctor` is in the table."""
    text = section("Findings of outbox-spark doctor") or ""
    source = (ROOT / "outbox_spark/cli/doctor.py").read_text()
    subjects = {subject for subject in re.findall(r'check\("([^"]+)"', source) if ":" not in subject}
    assert len(subjects) > 3
    assert [subject for subject in subjects if f"`{subject}`" not in text] == []


def alerts() -> set[str]:
    """Return the names of all alerts that the docs recommend."""
    files = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/monitoring/**/*.y*ml")]
    return {name for path in files for name in re.findall(r"^\s*- alert: (\w+)", path.read_text(), re.MULTILINE)}


def test_every_alert_has_an_entry() -> None:
    """A heading for each alert, and what to do first."""
    assert "OutboxDelayed" in alerts()
    assert [f"### {name}" for name in sorted(alerts()) if not section(name)] == []


def test_every_system_check_has_an_entry() -> None:
    """E and W numbers of outbox_django are in the table, and no others."""
    text = "".join(path.read_text() for path in (ROOT / "outbox_django").glob("*.py"))
    numbers = set(re.findall(r"outbox_django\.[EW]\d{3}", text)) | set(re.findall(r'number = "([EW]\d{3})"', text))
    coded = {f"outbox_django.{number.removeprefix('outbox_django.')}" for number in numbers}
    told = set(re.findall(r"^\| `(outbox_django\.[EW]\d{3})`", RUNBOOK, re.MULTILINE))
    assert len(coded) > 10
    assert told == coded
