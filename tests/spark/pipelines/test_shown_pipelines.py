"""The visible side of pipelines that run: Prometheus, lag, and the descriptions of jobs in Spark's UI."""

import time
import urllib.request
from contextlib import closing

import pytest
from confluent_kafka import Producer

from devstack.ports import free_port
from devstack.processes import wait_until
from outbox_spark.config import ArchiveSettings
from outbox_spark.pipelines import archive
from outbox_spark.pipelines.relay import RelayConfig, run_relay
from outbox_spark.topics.ranges import TopicLog
from tests.harvesting import Scene
from tests.spark.pipelines.runs import produce, run_once

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(900)]


def test_the_lag_is_that_of_records_to_be_read(kafka_bootstrap, make_topic):
    """It counts offsets behind a position, and is as old as the oldest record there, of all partitions."""
    topic = make_topic(2)
    log = TopicLog({"bootstrap.servers": kafka_bootstrap}, [topic])
    assert log.behind({}) == (0, 0.0)
    producer, now = Producer({"bootstrap.servers": kafka_bootstrap}), time.time()
    for partition, age in ((0, 900), (0, 60), (1, 300), (1, 5)):
        producer.produce(topic, b"x" * 2000, partition=partition, timestamp=round((now - age) * 1000))
        producer.flush()

    def behind(*offsets):
        lag, seconds = log.behind({(topic, partition): offset for partition, offset in enumerate(offsets)})
        return lag, seconds and seconds - (time.time() - now)

    assert behind() == (4, pytest.approx(900, abs=1))
    assert behind(0, 0) == (4, pytest.approx(900, abs=1))
    assert behind(1, 0) == (3, pytest.approx(300, abs=1))
    assert behind(1, 1) == (2, pytest.approx(60, abs=1))
    assert behind(2, 2) == (0, 0.0)
    produce(kafka_bootstrap, topic, range(5), keys=1, abort=True)
    assert wait_until(lambda: behind(2, 2) == (6, None), 60)  # the mark of the abort comes after the answer to it
    log.close()


def titles(spark):
    """Return what Spark's UI calls the jobs that have run so far; the store knows them without a UI, too."""
    jobs = spark.sparkContext._jsc.sc().statusStore().jobsList(None)
    shown = {str(jobs.apply(number).description()) for number in range(jobs.size())}  # "Some(...)" or "None"
    return {text.removeprefix("Some(").removesuffix(")") for text in shown}


def test_people_see_each_batch_of_an_archive(spark, tmp_path, make_topic, kafka_bootstrap):
    """Lag and counts are in Prometheus while the pipeline runs, and in the descriptions of Spark's jobs."""
    topic = make_topic(3)
    produce(kafka_bootstrap, topic, range(60))
    port, reports, scrapes = free_port(), [], []

    def look(report):
        reports.append(report)
        scrapes.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode())

    folders = {"checkpoint": str(tmp_path / "checkpoint"), "path": str(tmp_path / "archive")}
    settings = ArchiveSettings(name="archive", topics=[topic], max_records=30, metrics_port=port, **folders)
    run_once(archive, spark, kafka_bootstrap, settings, report=look)
    assert len(reports) > 1
    assert sum(report.counts["records"] for report in reports) == 60
    assert reports[0].lag > 0
    assert reports[0].lag_seconds is not None
    assert (reports[-1].lag, reports[-1].lag_seconds) == (0, 0.0)
    for report, scrape in zip(reports, scrapes, strict=True):
        assert f'outbox_pipeline_lag_records{{pipeline="archive"}} {float(report.lag)}' in scrape
    assert 'outbox_pipeline_records_total{pipeline="archive"} 60.0' in scrapes[-1]
    assert f"archive: batch 1, after {reports[0]}" in titles(spark)


def test_people_see_each_batch_of_a_relay(spark, database, kafka_bootstrap, make_topic):
    """It has the metrics of a harvester while it leads, and reports how many rows wait."""
    topic, port, told, scrapes = make_topic(), free_port(), [], []

    def look(report):
        told.append(report)
        scrapes.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30).read().decode())
        scrapes.append(urllib.request.urlopen(f"http://127.0.0.1:{port}/healthz", timeout=30).read().decode())

    with closing(Scene(database, kafka_bootstrap)) as scene:
        scene.fill(topic, 350, keys=9)
        harvest = scene.config(delivery="exactly-once", metrics_port=port)
        config = RelayConfig(harvest=harvest, batch_records=100)
        run_relay(spark, config, once=True, on_progress=look)
        assert sum(report.counts["records"] for report in told) == 350
        assert all(report.lag is not None for report in told)
        page, health = scrapes[-2:]
        identity = f"{scene.database.rpartition('/')[2]}.public.outbox"
        of = f'outbox="{identity}"'
        assert f"outbox_records_published_total{{{of}}} 350.0" in page
        assert f'outbox_topic_records_published_total{{{of},topic="{topic}"}} 350.0' in page
        assert f"outbox_leader{{{of}}} 1.0" in page
        assert '"leading"' in health
        begin = f"relay {identity}: batch 0, 2 shards, term "
        assert any(title.startswith(begin) for title in titles(spark))
