"""Reports, metrics and health of pipelines, without Spark."""

import json
import urllib.request

import pytest
from prometheus_client import generate_latest

from devstack.ports import free_port
from outbox_core.config import HarvestConfig
from outbox_core.errors import InvalidConfig, StoreUnavailable
from outbox_core.stores.interface import Backlog, StoredRecord, WaitingRows
from outbox_spark import metrics as pipeline_metrics
from outbox_spark.config import ArchiveSettings, validate
from outbox_spark.metrics import BatchReport, PipelineMetrics, serving
from outbox_spark.relay.monitor import RelayMonitor
from outbox_spark.relay.plan import BatchPlan, ShardOutcome
from outbox_spark.relay.shard_store import ShardRange

REPORT = BatchReport(number=12, counts={"records": 2000, "quarantined": 3}, seconds=0.5, lag=1204, lag_seconds=7.0)
HARVEST = HarvestConfig(data_source="dbname=x")


def test_a_report_is_one_line():
    """A report leaves out numbers that are not known, or 0."""
    line = "batch 12: 2,000 records in 0.5 s (4,000/s), 3 quarantined; lag 1,204 (7 s)"
    assert str(REPORT) == line
    assert str(BatchReport(number=0, counts={"records": 1}, seconds=0.0, lag=2)).endswith("(0/s); lag 2")
    assert str(BatchReport(number=0, counts={}, seconds=1.0)) == "batch 0: 0 records in 1.0 s (0/s)"


def value_of(metrics, name, **labels):
    """Return a sample; None if it is not shown."""
    return metrics.registry.get_sample_value(f"outbox_{name}", labels)


def test_batches_add_up_and_the_lag_is_that_of_the_last():
    """Counts are those of all batches; after a failure no stale lag is shown."""
    metrics = PipelineMetrics("orders")
    of = {"pipeline": "orders"}
    assert value_of(metrics, "pipeline_records_total", **of) == 0
    assert value_of(metrics, "pipeline_lag_records", **of) is None
    assert value_of(metrics, "pipeline_last_batch_timestamp_seconds", **of) is None
    for report in (REPORT, BatchReport(number=13, counts={"records": 5}, seconds=4.0, lag=0, lag_seconds=0.0)):
        metrics.took(report.counts)
        metrics.finished(report)
    assert value_of(metrics, "pipeline_records_total", **of) == 2005
    assert value_of(metrics, "pipeline_quarantined_records_total", **of) == 3
    assert value_of(metrics, "pipeline_batch_seconds_count", **of) == 2
    assert value_of(metrics, "pipeline_batch_seconds_sum", **of) == 4.5
    assert value_of(metrics, "pipeline_lag_records", **of) == value_of(metrics, "pipeline_lag_seconds", **of) == 0
    metrics.failed(StoreUnavailable("away"))
    assert value_of(metrics, "pipeline_lag_records", **of) is None
    assert value_of(metrics, "pipeline_records_total", **of) == 2005


def test_health_fails_while_the_query_does(monkeypatch):
    """A failure that lasts for half a minute is unhealthy, until the query works again; passwords are not shown."""
    clock = [100.0]
    monkeypatch.setattr(pipeline_metrics.time, "monotonic", lambda: clock[0])
    metrics = PipelineMetrics("orders")
    for _ in range(3):
        assert metrics.health().ok
        metrics.failed(StoreUnavailable("no answer\nfrom postgresql://u:secret@h/d"))
        clock[0] += 15.0
    health = metrics.health()
    assert not health.ok
    assert health.detail.startswith("no answer from ")
    assert "secret" not in health.detail
    metrics.recovered()
    assert metrics.health().ok


@pytest.mark.parametrize(("name", "value"), [("metrics_port", 70_000), ("metrics_port", "9100"), ("metrics_host", "")])
def test_wrong_settings_are_named(name, value):
    """The port is a number that a port can be."""
    archive = {"name": "a", "topics": ["t"], "checkpoint": "c", "path": "p", name: value}
    with pytest.raises(InvalidConfig, match=f"archive.{name}"):
        validate({"archive": archive, "kafka": {"bootstrap.servers": "h:1"}}, "archive")


def test_metrics_are_served_if_there_is_a_port():
    """The settings of a pipeline and of a relay's harvest name it alike."""
    metrics, port = PipelineMetrics("orders"), free_port()
    settings = ArchiveSettings(name="a", topics=["t"], checkpoint="c", path="p", metrics_port=port)
    for given in (settings, HARVEST.model_copy(update={"metrics_port": port})):
        with serving(given, metrics.registry, metrics.health):
            shown = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read()
            health = json.load(urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30))
        assert b'outbox_pipeline_records_total{pipeline="orders"} 0.0' in shown
        assert (health["status"], health["detail"]) == ("ok", "following")
    with serving(HARVEST, metrics.registry, metrics.health), pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30)


class _Store:
    """A store that counts its counts."""

    counted = 0
    is_open = True
    backlog_now = Backlog(WaitingRows(1204, 7.0, {"t": 1204}), WaitingRows(3, 99.0, {"t": 3}))

    def backlog(self):
        self.counted += 1
        if self.backlog_now is None:
            raise StoreUnavailable("away")
        return self.backlog_now

    def close(self):
        self.is_open = False


def outcome(records, **what):
    """Return the outcome of a task that has published so many records of five bytes."""
    done = ShardOutcome(0, published=records, seconds=2.0, **what)
    if records:
        done.counts.add([StoredRecord(number, "t", None, b"12345", None, None, -1, 1) for number in range(records)])
    return done


def test_a_relay_shows_what_a_harvester_does(monkeypatch):
    """Its rows, bytes and backlog have the names by which alerts and dashboards know a harvester's."""
    clock, told, store = [100.0], [], _Store()
    monkeypatch.setattr("outbox_spark.relay.monitor.time.monotonic", lambda: clock[0])
    monitor = RelayMonitor(HARVEST, store, told.append)
    monitor.metrics.outbox_name = "d.s.t"
    of = {"outbox": "d.s.t"}
    plan = BatchPlan(harvest=HARVEST, outbox="d.s.t", term=3, ranges=(ShardRange(0, 1),))
    assert (monitor.health(None).detail, monitor.health("no leader").ok) == ("standing by", False)
    monitor.leads(3)
    monitor.planned(2, is_idle=False)
    monitor.looks()
    monitor.looks()
    assert store.counted == 1
    assert monitor.title(plan) == "relay d.s.t: batch 0, 1 shards, term 3"
    clock[0] += 10.0
    assert not monitor.finished([outcome(0, error="StoreUnavailable")], 1.0)
    assert (told, store.counted) == ([], 1)
    assert monitor.finished([outcome(40), outcome(0)], 4.0)
    assert store.counted == 2
    assert (told[0].counts, told[0].longest_task) == ({"records": 40}, 2.0)
    last = "batch 0: 40 records in 4.0 s (10/s); lag 1,204 (7 s)"
    assert str(told[0]) == last
    assert monitor.title(plan) == f"relay d.s.t: batch 1, 1 shards, term 3, after {last}"
    shown = {"records_published_total": 40, "published_bytes_total": 200, "publish_errors_total": 1, "holds": 2}
    shown |= {"deliverable_records": 1204, "oldest_deliverable_age_seconds": 7, "held_records": 3, "leader_term": 3}
    assert {name: value_of(monitor.metrics, name, **of) for name in shown} == shown
    assert monitor.health(None).leader
    monitor.leads(None)
    assert not store.is_open
    assert value_of(monitor.metrics, "leader", **of) == 0
    assert value_of(monitor.metrics, "deliverable_records", **of) is None


def test_a_backlog_that_cannot_be_counted_is_not_shown():
    """Neither an old number nor 0 stands for one that is not known, and the relay goes on."""
    monitor = RelayMonitor(HARVEST, _Store(), None)
    monitor.leads(1)
    monitor.looks()
    monitor._store.backlog_now, monitor._count_seconds = None, 0.0
    monitor.looks(0.0)
    assert monitor._store.counted == 2
    assert b"outbox_deliverable_records{" not in generate_latest(monitor.metrics.registry)
    assert monitor.finished([outcome(1)], 1.0)
    assert monitor._last.lag is None


def test_a_relay_that_publishes_nothing_is_unhealthy(monkeypatch):
    """It is not enough that it reads the table; what it has to publish must get to Kafka, or there must be nothing."""
    clock = [100.0]
    monkeypatch.setattr("outbox_spark.relay.monitor.time.monotonic", lambda: clock[0])
    monitor = RelayMonitor(HARVEST, _Store(), None)
    monitor.leads(1)

    def after(outcomes, *, is_idle=False):
        clock[0] += 30.0
        monitor.planned(0, is_idle=is_idle)
        if outcomes:
            monitor.finished(outcomes, 30.0)
        return monitor.health(None).ok

    failed = outcome(0, error="KafkaUnavailable")
    assert [after([failed]), after([failed]), after([failed])] == [True, False, False]
    assert not after([])  # the job itself failed
    assert after([failed, outcome(1)])
    assert [after([failed]), after([failed])] == [True, False]
    assert after([outcome(0)])  # what is left is held
    assert [after([failed]), after([failed])] == [True, False]
    assert after([], is_idle=True)


def test_a_backlog_that_falls_will_be_empty(monkeypatch):
    """As with a harvester, so that an alert knows a backlog that grows from one that is large and falls."""
    clock, store = [100.0], _Store()
    monkeypatch.setattr("outbox_spark.relay.monitor.time.monotonic", lambda: clock[0])
    monitor = RelayMonitor(HARVEST.model_copy(update={"outbox_name": "o"}), store, None)
    monitor.leads(1)
    left = []
    for number in (12_000, 11_000, 12_000, None, 9_000):
        store.backlog_now = number and Backlog(WaitingRows(number, 7.0, {}), WaitingRows())
        monitor.looks()
        left.append(value_of(monitor.metrics, "time_to_empty_seconds", outbox="o"))
        clock[0] += 10.0
    assert left == [None, 110.0, None, None, None]


def test_the_backlog_is_counted_for_a_fiftieth_of_the_time(monkeypatch):
    """A count that takes long is followed by a pause that is longer in proportion."""
    clock, store = [100.0], _Store()
    monkeypatch.setattr("outbox_spark.relay.monitor.time.monotonic", lambda: clock[0])
    count = store.backlog

    def slow():
        clock[0] += 2.0
        return count()

    store.backlog = slow
    monitor = RelayMonitor(HARVEST, store, None)
    for _ in range(1000):
        monitor.looks()
        clock[0] += 1.0
    assert 9 <= store.counted <= 11
