"""Metrics as Prometheus reads them, and the health endpoint."""

import gc
import http.client
import json
import math
import platform
import socket
import threading
import time
import urllib.error
import urllib.request

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.parser import text_string_to_metric_families

from outbox_core import __version__
from outbox_core.errors import InvalidConfig
from outbox_core.metrics import HarvestMetrics, Health, MetricsServer
from outbox_core.monitoring.histogram import LATENCY_BUCKETS, WeightedHistogram, quantile
from outbox_core.monitoring.publication import MOST_TOPICS, OTHER_TOPICS, PublicationCounts
from outbox_core.stores.interface import Backlog, StoredRecord, WaitingRows

WELL = Health(ok=True, leader=True, detail="leading")


def batch(count, topic="orders", value=b"", *, stashed_seconds_ago=0.0):
    """Return records that were stashed so long ago."""
    stashed_at = int((time.time() - stashed_seconds_ago) * 1_000_000)
    return [StoredRecord(number, topic, None, value, None, None, -1, stashed_at) for number in range(count)]


def get(port, path, host="127.0.0.1", method="GET"):
    """Fetch; return status and text."""
    request = urllib.request.Request(f"http://{host}:{port}{path}", method=method)
    try:
        with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=5) as response:
            return response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def samples(port):
    """Return all samples of /metrics: {(name, labels): value}."""
    status, text = get(port, "/metrics")
    assert status == 200
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_every_family_is_exposed():
    """Families have the names of the documentation, as Prometheus' own parser reads them over HTTP."""
    metrics = HarvestMetrics(outbox_name="db.public.outbox")
    metrics.published(batch(7))
    metrics.published(batch(5))
    metrics.publish_error()
    metrics.in_flight(3)
    metrics.leading(True)
    metrics.backlog(Backlog(WaitingRows(40, 1.5), WaitingRows(2, 7.0)))
    metrics.mark_took(0.003)
    metrics.purge_took(0.004, 12)
    metrics.publish_latency(0.02, 1000)
    with MetricsServer("127.0.0.1", 0, metrics.registry, lambda: WELL) as server:
        found = samples(server.port)
    label = (("outbox", "db.public.outbox"),)
    assert found["outbox_records_published_total", label] == 12
    assert found["outbox_publish_errors_total", label] == 1
    assert found["outbox_in_flight_records", label] == 3
    assert found["outbox_pending_records", label] == 42
    assert found["outbox_deliverable_records", label] == 40
    assert found["outbox_oldest_deliverable_age_seconds", label] == 1.5
    assert found["outbox_held_records", label] == 2
    assert found["outbox_oldest_pending_age_seconds", label] == 7
    assert found["outbox_leader", label] == 1
    assert found["outbox_publish_latency_seconds_count", label] == 1000
    assert found["outbox_publish_latency_seconds_sum", label] == pytest.approx(20)
    assert found["outbox_mark_duration_seconds_count", label] == 1
    assert found["outbox_purge_duration_seconds_count", label] == 1
    assert found["outbox_purge_records_sum", label] == 12
    version = (("outbox", "db.public.outbox"), ("python", platform.python_version()), ("version", __version__))
    assert found["outbox_build_info", version] == 1
    assert found["process_resident_memory_bytes", ()] > 0


def test_one_call_counts_many_equal_latencies():
    """A weighted observation lands in every bucket at or above its value."""
    metrics = HarvestMetrics(outbox_name="o")
    metrics.publish_latency(0.005, 100)
    metrics.publish_latency(0.3, 10)
    metrics.publish_latency(99, 1)
    read = {
        bound: metrics.registry.get_sample_value("outbox_publish_latency_seconds_bucket", {"outbox": "o", "le": bound})
        for bound in ("0.0025", "0.005", "0.25", "0.5", "30.0", "+Inf")
    }
    assert read == {"0.0025": 0, "0.005": 100, "0.25": 100, "0.5": 110, "30.0": 110, "+Inf": 111}


@given(st.lists(st.tuples(st.floats(0, 100), st.integers(1, 1000))))
def test_weighted_histogram_counts_as_a_plain_one(observations):
    """For any observations, each bucket holds the number of values up to its bound."""
    histogram = WeightedHistogram()
    for value, count in observations:
        histogram.observe(value, count)
    family = _Family()
    histogram.add_to(family, "o")
    for bound, cumulated in family.buckets:
        limit = math.inf if bound == "+Inf" else float(bound)
        assert cumulated == sum(count for value, count in observations if value <= limit)
    assert len(family.buckets) == len(LATENCY_BUCKETS) + 1
    assert family.total == pytest.approx(sum(value * count for value, count in observations))


class _Family:
    def add_metric(self, _labels, buckets, total):
        self.buckets, self.total = buckets, total


def value_of(metrics, name, **labels):
    """Return a sample of the outbox `o`, None if it is not shown."""
    return metrics.registry.get_sample_value(name, {"outbox": "o", **labels})


def test_batches_are_counted_by_topic_in_bytes_and_by_age():
    """A published batch counts for its topics, with the bytes of its values and the age of every record."""
    metrics = HarvestMetrics(outbox_name="o")
    began = time.time()
    metrics.published([*batch(1000, "orders", b"12345", stashed_seconds_ago=7), *batch(3, "mails", None)])
    metrics.published(batch(2, "mails", "\u00fc", stashed_seconds_ago=50))
    assert value_of(metrics, "outbox_topic_records_published_total", topic="orders") == 1000
    assert value_of(metrics, "outbox_topic_records_published_total", topic="mails") == 5
    assert value_of(metrics, "outbox_published_bytes_total") == 5004
    assert value_of(metrics, "outbox_delivery_latency_seconds_count") == 1005
    assert value_of(metrics, "outbox_delivery_latency_seconds_bucket", le="10.0") == 1003
    assert value_of(metrics, "outbox_delivery_latency_seconds_bucket", le="60.0") == 1005
    assert value_of(metrics, "outbox_last_success_timestamp_seconds") >= began


def test_what_other_processes_published_is_added():
    """Counts that came from elsewhere add up with one's own, and the label of all other topics stays one."""
    metrics, elsewhere = HarvestMetrics(outbox_name="o"), PublicationCounts()
    metrics.published(batch(2, "orders", b"12345", stashed_seconds_ago=7))
    elsewhere.add(batch(8, "orders", b"1", stashed_seconds_ago=50))
    elsewhere.add([record for number in range(MOST_TOPICS + 5) for record in batch(1, f"t{number}")])
    metrics.published_elsewhere(elsewhere)
    assert value_of(metrics, "outbox_records_published_total") == metrics.totals().published == 10 + MOST_TOPICS + 5
    assert value_of(metrics, "outbox_topic_records_published_total", topic="orders") == 10
    assert value_of(metrics, "outbox_topic_records_published_total", topic=OTHER_TOPICS) == 6
    assert value_of(metrics, "outbox_published_bytes_total") == 18
    assert value_of(metrics, "outbox_delivery_latency_seconds_bucket", le="60.0") == 10 + MOST_TOPICS + 5
    assert value_of(metrics, "outbox_delivery_latency_seconds_sum") >= 2 * 7 + 8 * 50


def test_values_may_be_of_both_types():
    """A transform of a relay may make bytes of some texts, and what is published is counted all the same."""
    counts = PublicationCounts()
    counts.add([*batch(1, "orders", "ä"), *batch(1, "orders", b"12345"), *batch(1, "orders", None)])
    counts.add([*batch(1, "orders", b"12345"), *batch(1, "orders", "1")])
    assert (counts.bytes, counts.by_topic) == (2 + 5 + 5 + 1, {"orders": 5})


def test_records_from_the_future_or_without_time():
    """A clock that goes ahead makes no negative latency, and a time that is not known none at all."""
    metrics = HarvestMetrics(outbox_name="o")
    metrics.published(batch(2, stashed_seconds_ago=-60))
    metrics.published([record._replace(create_time=0) for record in batch(3)])
    assert value_of(metrics, "outbox_delivery_latency_seconds_count") == 2
    assert value_of(metrics, "outbox_delivery_latency_seconds_sum") == 0
    assert value_of(metrics, "outbox_records_published_total") == 5


def test_topics_are_a_bounded_label():
    """However many topics there are, fifty are labels, and all others together are one; the sum is that of all."""
    metrics = HarvestMetrics(outbox_name="o")
    metrics.published([record for number in range(MOST_TOPICS + 20) for record in batch(2, f"t{number}")])
    metrics.backlog(Backlog(WaitingRows(30, 1.0, {f"t{number}": 1 for number in range(40, 60)})))
    assert value_of(metrics, "outbox_topic_records_published_total", topic="t49") == 2
    assert value_of(metrics, "outbox_topic_records_published_total", topic="t50") is None
    assert value_of(metrics, "outbox_topic_records_published_total", topic=OTHER_TOPICS) == 40
    assert value_of(metrics, "outbox_topic_deliverable_records", topic="t40") == 1
    assert value_of(metrics, "outbox_topic_deliverable_records", topic=OTHER_TOPICS) == 20


@given(st.lists(st.integers(0, 50), min_size=4, max_size=4), st.floats(0.01, 1.0))
def test_quantile_lies_in_its_bucket(counts, share):
    """A quantile lies between the bounds of the bucket that holds it; there is none without observations."""
    bounds = (1.0, 2.0, 4.0)
    found = quantile(share, bounds, counts)
    if not sum(counts):
        assert found is None
        return
    values = [value for value, count in zip((0.5, 1.5, 3.0, 4.0), counts, strict=True) for _ in range(count)]
    middle = values[math.ceil(share * len(values) - 1e-9) - 1]
    lower, upper = {0.5: (0, 1), 1.5: (1, 2), 3.0: (2, 4), 4.0: (4, 4)}[middle]
    assert lower <= found <= upper + 1e-9


def test_unknown_backlog_is_not_shown():
    """A backlog that is not known is not shown, rather than a stale or invented number."""
    metrics = HarvestMetrics(outbox_name="o")
    read = lambda: metrics.registry.get_sample_value("outbox_pending_records", {"outbox": "o"})  # noqa: E731
    assert read() is None
    metrics.backlog(Backlog())
    assert read() == 0
    metrics.backlog(None)
    assert read() is None


def test_harvesters_in_one_process_do_not_clash():
    """Each harvester has a registry of its own by default; in a shared one, each family appears once for both."""
    assert HarvestMetrics().registry is not HarvestMetrics().registry
    registry = CollectorRegistry()
    first, second = HarvestMetrics(registry, "a"), HarvestMetrics(registry, "b")
    first.published(batch(1))
    second.published(batch(2))
    assert len([family for family in registry.collect() if family.name == "outbox_records_published"]) == 1
    assert registry.get_sample_value("outbox_records_published_total", {"outbox": "a"}) == 1
    assert registry.get_sample_value("outbox_records_published_total", {"outbox": "b"}) == 2


def test_numbers_vanish_with_their_harvester():
    """In a shared registry a harvester that is gone has no samples; of two for one outbox the newer one counts."""
    registry = CollectorRegistry()
    kept, old = HarvestMetrics(registry, "kept"), HarvestMetrics(registry, "o")
    old.published(batch(9))
    new = HarvestMetrics(registry, "o")
    new.published(batch(1))
    assert registry.get_sample_value("outbox_records_published_total", {"outbox": "o"}) == 1
    del old, new
    gc.collect()
    assert registry.get_sample_value("outbox_records_published_total", {"outbox": "o"}) is None
    assert registry.get_sample_value("outbox_leader", {"outbox": kept.outbox_name}) == 0


def test_label_may_be_set_later():
    """The label may be set later, as the outbox's identity is known only after its table was checked."""
    metrics = HarvestMetrics()
    metrics.published(batch(1))
    metrics.outbox_name = "db.public.outbox"
    assert metrics.registry.get_sample_value("outbox_records_published_total", {"outbox": "db.public.outbox"}) == 1


def test_counts_from_several_threads_add_up():
    """Counts from several threads add up."""
    metrics = HarvestMetrics(outbox_name="o")

    def count():
        for _ in range(10_000):
            metrics.published(batch(1))

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert metrics.registry.get_sample_value("outbox_records_published_total", {"outbox": "o"}) == 40_000


@pytest.mark.parametrize(
    ("health", "status", "shown"),
    [
        (WELL, 200, {"status": "ok", "leader": True, "detail": "leading"}),
        (Health(ok=True, leader=False), 200, {"status": "ok", "leader": False, "detail": ""}),
        (Health(ok=False, leader=False, detail="gone"), 503, {"status": "failing", "leader": False, "detail": "gone"}),
    ],
)
def test_healthz_tells_how_the_harvester_is(health, status, shown):
    """`/healthz` answers 200 for a leader and a standby, and 503 with the reason otherwise."""
    with MetricsServer("127.0.0.1", 0, CollectorRegistry(), lambda: health) as server:
        answer, text = get(server.port, "/healthz")
    assert answer == status
    assert json.loads(text) == shown


def test_healthz_is_503_when_health_cannot_be_told():
    """If health cannot be determined, `/healthz` answers 503, without the error's text, which may hold a secret."""

    def broken():
        raise RuntimeError("s3cr3t")

    with MetricsServer("127.0.0.1", 0, CollectorRegistry(), broken) as server:
        answer, text = get(server.port, "/healthz")
    assert answer == 503
    assert json.loads(text)["detail"] == "cannot tell: RuntimeError"


def test_other_paths_and_methods_are_refused():
    """Another path is answered with 404 and a hint, another method with 405."""
    with MetricsServer("127.0.0.1", 0, CollectorRegistry(), lambda: WELL) as server:
        assert get(server.port, "/x") == (404, "see /metrics, /healthz, /readyz, /livez\n")
        assert '<a href="/metrics">' in get(server.port, "/")[1]
        assert get(server.port, "/healthz", method="POST")[0] == 405
        assert get(server.port, "/healthz", method="HEAD") == (200, "")


@pytest.mark.parametrize(
    ("health", "statuses"),
    [
        (Health(ok=True, leader=False), (200, 200, 200)),
        (Health(ok=False, leader=False, detail="database: away"), (503, 503, 200)),
        (Health(ok=False, leader=False, detail="ended", alive=False), (503, 503, 503)),
    ],
    ids=["well", "away", "ended"],
)
def test_only_an_end_calls_for_a_restart(health, statuses):
    """A harvester that waits for a service is alive, but not ready; one that has ended is neither. HEAD says so too."""
    with MetricsServer("127.0.0.1", 0, CollectorRegistry(), lambda: health) as server:
        for path, status in zip(("/healthz", "/readyz", "/livez"), statuses, strict=True):
            assert get(server.port, path)[0] == status
            assert get(server.port, path, method="HEAD") == (status, "")


def test_client_that_hangs_does_not_block_the_others():
    """A client that hangs blocks neither other requests nor the closing of the server."""
    with (
        MetricsServer("127.0.0.1", 0, CollectorRegistry(), lambda: WELL) as server,
        socket.create_connection(("127.0.0.1", server.port)),
    ):
        assert get(server.port, "/healthz")[0] == 200


def test_port_in_use_is_a_clear_error():
    """A port in use is an error that names setting, port and host."""
    with MetricsServer("127.0.0.1", 0, CollectorRegistry(), lambda: WELL) as server:
        complaint = rf"metrics_port: cannot listen on port {server.port} of 127\.0\.0\.1: Address already in use"
        with pytest.raises(InvalidConfig, match=complaint):
            MetricsServer("127.0.0.1", server.port, CollectorRegistry(), lambda: WELL)


def test_unknown_host_is_a_clear_error():
    """An unknown host is an error that names it, as it is as likely the reason as the port."""
    with pytest.raises(InvalidConfig, match=r"metrics_port: cannot listen on port 0 of nowhere\.invalid"):
        MetricsServer("nowhere.invalid", 0, CollectorRegistry(), lambda: WELL)


def test_impossible_port_is_a_clear_error():
    """A number that no port has is an error, also where no settings were validated before: `outbox queue tracker`."""
    with pytest.raises(InvalidConfig, match=r"metrics_port: cannot listen on port 99999 of ::1: .*must be 0-65535"):
        MetricsServer("::1", 99999, CollectorRegistry(), lambda: WELL)


def test_close_frees_the_port_and_may_be_repeated():
    """After `close`, which may be repeated, the port is free at once."""
    server = MetricsServer("127.0.0.1", 0, CollectorRegistry(), lambda: WELL)
    server.close()
    server.close()
    with pytest.raises(ConnectionRefusedError):
        http.client.HTTPConnection("127.0.0.1", server.port, timeout=2).connect()
    MetricsServer("127.0.0.1", server.port, CollectorRegistry(), lambda: WELL).close()


def test_ipv6_address_works():
    """`::1` is a host like any other."""
    if not socket.has_ipv6:
        pytest.skip("no IPv6 here")
    try:
        server = MetricsServer("::1", 0, CollectorRegistry(), lambda: WELL)
    except InvalidConfig as error:
        pytest.skip(str(error))
    with server:
        assert get(server.port, "/healthz", host="[::1]")[0] == 200
