"""Reports of an audit: JSON for programs, and one HTML page with charts, without scripts, for people."""

from __future__ import annotations

import html
import json
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from importlib import resources
from pathlib import Path
from string import Template
from typing import Any

from outbox_core.errors import OutboxError
from outbox_spark.pipelines.audit import KINDS, AuditResult

_COLOURS = {
    "lost": "#b3261e",
    "repeated": "#b26a00",
    "reordered": "#6750a4",
    "unexpected": "#00639b",
    "found": "#9aa0a6",
}
_WORDS = {
    "lost": "expected and not found",
    "repeated": "found more than once",
    "reordered": "found behind a record of its key that should come later",
    "unexpected": "found and not expected",
}
_PAGE = Template(resources.files(__package__).joinpath("audit_report.html").read_text(encoding="utf-8"))


def to_json(result: AuditResult) -> str:
    """Format the report for programs."""
    document = {
        "clean": result.is_clean,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "totals": {name: result.total(name) for name in ("expected", "found", "replayed", *KINDS)},
        "topics": result.topics,
        "hours": result.hours,
        "keys": result.keys,
        "examples": result.examples,
    }
    return json.dumps(document, indent=2) + "\n"


def write(path: str, text: str) -> None:
    """Write a report on the driver's disk. Raises OutboxError if that fails."""
    try:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_text(text, encoding="utf-8")
    except OSError as error:
        raise OutboxError(f"{path}: cannot be written: {error.strerror}") from None


def to_html(result: AuditResult) -> str:
    """Format the page: a verdict, counts and a chart by topic, a chart by hour, the worst keys, examples."""
    names = ("expected", "found", "replayed", *KINDS)
    topics = [[topic, *(counts[name] for name in names)] for topic, counts in sorted(result.topics.items())]
    return _PAGE.substitute(
        verdict=_verdict(result),
        made_at=datetime.now(UTC).isoformat(sep=" ", timespec="seconds"),
        legend="; ".join(f"<span style='color:{_COLOURS[kind]}'>{kind}</span>: {_WORDS[kind]}" for kind in KINDS),
        topics=_table(("topic", *names), topics) + _bars(result),
        hours=_timeline(result.hours),
        findings="" if result.is_clean else _findings(result),
    )


def _verdict(result: AuditResult) -> str:
    if result.is_clean:
        return '<p class="clean">Clean: every expected record was found, once and in order.</p>'
    counts = ", ".join(f"{result.total(kind):,} {kind}" for kind in KINDS if result.total(kind))
    return f'<p class="bad">Not clean: {counts}.</p>'


def _findings(result: AuditResult) -> str:
    keys = [[key["topic"], _key(key["key"]), *(key[kind] for kind in KINDS)] for key in result.keys]
    examples = [
        [
            *(example["topic"], example["kind"], _key(example["key"]), example["id"]),
            *(_place(example, ""), example["timestamp"] or "", _see(example)),
        ]
        for example in result.examples
    ]
    return (
        f"<h2>Keys with most findings</h2>{_table(('topic', 'key', *KINDS), keys, texts=2)}"
        f"<h2>Examples</h2>{_table(('topic', 'kind', 'key', 'id', 'where', 'when', 'see'), examples, texts=7)}"
    )


def _see(example: Mapping[str, Any]) -> str:
    if example["kind"] == "repeated":
        return f"first at {_place(example, 'other_')}; {example['times']} too many"
    if example["kind"] == "reordered":
        return f"behind {example['other_id']} at {_place(example, 'other_')}"
    return "where it was expected" if example["kind"] == "lost" else ""


def _place(example: Mapping[str, Any], prefix: str) -> str:
    return f"partition {example[prefix + 'partition']}, offset {example[prefix + 'offset']}"


def _key(key: str | None) -> str:
    return "(none)" if key is None else key


def _table(names: Sequence[str], rows: Iterable[Sequence[Any]], *, texts: int = 1) -> str:
    """Return a table; a narrow screen shows each row as a list of names and values."""

    def cell(tag: str, value: Any, number: int) -> str:
        shown = f"{value:,}" if isinstance(value, int) else html.escape(str(value))
        side = ' class="t"' if number < texts else ""
        return f'<{tag}{side} data-name="{names[number]}">{shown}</{tag}>'

    head = "".join(cell("th", name, number) for number, name in enumerate(names))
    body = "".join(f"<tr>{''.join(cell('td', v, n) for n, v in enumerate(row))}</tr>" for row in rows)
    return f"<table><tr>{head}</tr>{body}</table>"


def _bars(result: AuditResult) -> str:
    """Draw the findings of each topic that has some."""
    topics = {topic: counts for topic, counts in sorted(result.topics.items()) if any(counts[kind] for kind in KINDS)}
    widest = max((sum(counts[kind] for kind in KINDS) for counts in topics.values()), default=0)
    lines = []
    for topic, counts in topics.items():
        boxes = (
            f'<i style="width: {100 * counts[kind] / widest:.1f}%; background: {_COLOURS[kind]}" '
            f'title="{counts[kind]:,} {kind}"></i>'
            for kind in KINDS
            if counts[kind]
        )
        lines.append(f'<div class="t">{html.escape(topic)}</div><div class="bar">{"".join(boxes)}</div>')
    return "".join(lines)


def _timeline(hours: Sequence[Mapping[str, Any]]) -> str:
    """Draw found records by hour in grey, and findings above them in colour, on a scale of their own."""
    if not hours:
        return "<p>No record has a time.</p>"
    most = max(hour["found"] for hour in hours) or 1
    most_bad = max(sum(hour[kind] for kind in KINDS) for hour in hours) or 1
    lines = []
    for number, hour in enumerate(hours):
        bottom, height = 100.0, 100 * hour["found"] / most
        counts = ", ".join(f"{hour[name]:,} {name}" for name in ("found", *KINDS) if hour[name])
        title = f"<title>{hour['hour']}: {counts or 'nothing'}</title>"
        lines.append(_box(number, 210 - height, height, "found", title))
        for kind in KINDS:
            height = 96 * hour[kind] / most_bad
            bottom -= height
            lines.append(_box(number, bottom, height, kind, title))
    span = f"{hours[0]['hour']} to {hours[-1]['hour']}"
    label = f"{span}; findings above, at most {most_bad:,}; records below, at most {most:,} an hour"
    # At least two days wide, so that one hour is no wall.
    size = f'viewBox="0 0 {max(48, len(hours))} 212" preserveAspectRatio="none"'
    return f'<svg {size} role="img">{"".join(lines)}</svg><p><small>{label}</small></p>'


def _box(left: int, top: float, height: float, kind: str, title: str) -> str:
    if height <= 0:
        return ""
    return f'<rect x="{left}" y="{top:.1f}" width=".9" height="{height:.1f}" fill="{_COLOURS[kind]}">{title}</rect>'
