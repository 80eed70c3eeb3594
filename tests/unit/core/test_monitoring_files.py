"""docs/metrics.md, the alert rules and the dashboard against the metrics that a harvester exports."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families

from outbox_core.metrics import FloorGauge, HarvestMetrics
from outbox_core.stores.interface import Backlog, StoredRecord, WaitingRows
from outbox_spark.metrics import PipelineMetrics

DOCS = Path(__file__).parents[3] / "docs"
RULES = yaml.safe_load((DOCS / "monitoring/alerts.yml").read_text())["groups"][0]["rules"]
DASHBOARD = json.loads((DOCS / "monitoring/grafana.json").read_text())
_OF_PROMETHEUS = {"instance", "job", "le"}


def scrape(metrics):
    """Return the families of /metrics."""
    return list(text_string_to_metric_families(generate_latest(metrics.registry).decode()))


@pytest.fixture(scope="module")
def exported():
    """Return every family that a harvester can export."""
    metrics = HarvestMetrics(outbox_name="o")
    metrics.published([StoredRecord(1, "orders", None, b"x", None, None, -1, 1)])
    metrics.leading(True)
    metrics.kafka_up(True)
    metrics.backlog(Backlog(WaitingRows(2, 1.0, {"orders": 2}), WaitingRows(3, 9.0, {"mails": 3})), 5.0)
    metrics.floor(FloorGauge(True, 7, 0, 0.0))
    return scrape(metrics)


@pytest.fixture(scope="module")
def labels(exported):
    """Return the labels of every sample by its name, in histograms with `_bucket`, `_sum` and `_count`."""
    return {sample.name: set(sample.labels) for family in exported for sample in family.samples}


def test_every_family_is_documented(exported):
    """The tables of docs/metrics.md have the names and types of exactly the families that are exported."""
    documented = dict(re.findall(r"^\| `(outbox_\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE))
    exported = [*exported, *scrape(PipelineMetrics("orders"))]
    own = [family for family in exported if family.name.startswith("outbox_")]
    names = {f"{family.name}_total" if family.type == "counter" else family.name: family.type for family in own}
    assert documented == names


def test_every_rule_is_documented():
    """The table of alerts in docs/metrics.md has the names and severities of exactly the rules of alerts.yml."""
    documented = re.findall(r"^\| `(Outbox\w+)` \| (\w+) \|", (DOCS / "metrics.md").read_text(), re.MULTILINE)
    assert documented == [(rule["alert"], rule["labels"]["severity"]) for rule in RULES]


def queries():
    """Return every expression of the rules and the dashboard, and the dashboard's variable."""
    panels = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    variables = [of["query"]["query"] for of in DASHBOARD["templating"]["list"] if of["type"] == "query"]
    return [rule["expr"] for rule in RULES] + panels + variables


@pytest.mark.parametrize("query", queries())
def test_every_metric_of_a_query_exists(query, labels):
    """Alert rules and dashboard use metrics that are exported, with the labels that these have."""
    metrics = set(re.findall(r"\b(?:outbox|process)_[a-z_]+", query))
    assert metrics
    assert metrics <= set(labels), metrics - set(labels)
    matched = {name for inner in re.findall(r"\{(.*?)\}", query) for name in re.findall(r"(\w+)=", inner)}
    grouped = {name for inner in re.findall(r"(?:by|on) \((.*?)\)", query) for name in inner.split(", ")}
    known = set().union(*(labels[name] for name in metrics)) | _OF_PROMETHEUS
    assert matched | grouped <= known


def holds(rule, families):
    """Evaluate a rule of the form `sum|max by (outbox) (metric) <|> number` on scraped families."""
    form = re.fullmatch(r"(sum|max) by \(outbox\) \((\w+)\) ([<>]) (\d+)", rule["expr"])
    assert form, f"{rule['alert']}: keep rules that page so simple that this test can evaluate them"
    aggregate, name, sign, limit = form.groups()
    values = [sample.value for family in families for sample in family.samples if sample.name == name]
    if not values:
        return False
    value = sum(values) if aggregate == "sum" else max(values)
    return value > float(limit) if sign == ">" else value < float(limit)


def paging(families):
    """Return the names of the rules that page and hold for these families; OutboxGone is about missing ones."""
    pages = [rule for rule in RULES if rule["labels"]["severity"] == "page" and rule["alert"] != "OutboxGone"]
    assert len(pages) >= 3
    return {rule["alert"] for rule in pages if holds(rule, families)}


@pytest.mark.parametrize(
    ("backlog", "leads", "kafka_up", "expected"),
    [
        (Backlog(held=WaitingRows(500, 90_000.0)), True, True, set()),
        (Backlog(WaitingRows(20, 3.0), WaitingRows(500, 90_000.0)), True, True, set()),
        (Backlog(WaitingRows(1, 61.0), WaitingRows(500, 90_000.0)), True, True, {"OutboxDelayed"}),
        (Backlog(), False, True, {"OutboxWithoutLeader"}),
        (Backlog(WaitingRows(9, 70.0)), False, False, {"OutboxDelayed", "OutboxWithoutLeader", "OutboxKafkaAway"}),
    ],
)
def test_pause_pages_nobody(backlog, leads, kafka_up, expected):
    """However old paused records are, no alert pages; a late record, no leader and no Kafka do, each by its alert."""
    metrics = HarvestMetrics(outbox_name="o")
    metrics.leading(leads)
    metrics.kafka_up(kafka_up)
    metrics.backlog(backlog)
    assert paging(scrape(metrics)) == expected


@pytest.mark.complete
def test_rules_by_promtool():
    """Prometheus' own tool accepts the rules, and their test passes."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: Debian's package prometheus has it")
    for command in (["check", "rules", "alerts.yml"], ["test", "rules", "alerts_test.yml"]):
        done = subprocess.run(
            [promtool, *command], cwd=DOCS / "monitoring", capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
