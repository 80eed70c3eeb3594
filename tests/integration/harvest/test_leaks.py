"""Leaks of harvesters: repeated parts of their lives leave no thread, descriptor or memory behind.

A few repetitions as a rule; with `OUTBOX_TEST_LEAKS=1` two hundred of each.
"""

import gc

import pytest
from confluent_kafka import Producer

from outbox_core.metrics import HarvestMetrics
from outbox_core.schema import notify_sql
from tests.harvesting import wait_until
from tests.resources import held, reference_counts_only, settles, times

_TIMES = times(6, 200)
_SLACK = 3  # a connection may be opening at the moment of the count
_MEMORY_MIB = 32
MODES = ["at-least-once", pytest.param("exactly-once", marks=pytest.mark.real_broker)]
_COMPLETE = [pytest.mark.real_broker, pytest.mark.complete]


def assert_flat(repeat):
    """Repeat an action, and assert that after the first times it takes no more of the process.

    Threads and descriptors must be released without any garbage collection; memory may wait for it.
    """
    for _ in range(2):
        repeat()
    with reference_counts_only():
        before = held()
        for _ in range(_TIMES):
            repeat()
        after = settles(before.threads + _SLACK, before.descriptors + _SLACK)
    assert after.threads <= before.threads + _SLACK
    assert after.descriptors <= before.descriptors + _SLACK
    gc.collect()
    assert held().memory_mib <= before.memory_mib + _MEMORY_MIB


@pytest.mark.real_broker
def test_ended_terms(scene, make_topic, monkeypatch):
    """A rival that takes the transactional.id again and again, and so ends term after term, causes no leak."""
    monkeypatch.setattr("outbox_core.harvest.exactly_once.terms._FIRST_BACKOFF_SECONDS", 0.01)
    topic = make_topic()
    exactly_once = {"delivery": "exactly-once"}
    identity = scene.drain(config=exactly_once).metrics.outbox_name
    names = scene.config(**exactly_once).tracking_names(identity)
    rival_settings = {"bootstrap.servers": scene.bootstrap, "transactional.id": names.transactional_id}
    with scene.running(config=exactly_once):

        def repeat():
            with Producer(rival_settings) as rival:
                rival.init_transactions(30)
            scene.fill(topic, 1)
            wait_until(lambda: scene.count() == 0, "the next term publishes")

        assert_flat(repeat)


@pytest.mark.parametrize("delivery", MODES)
@pytest.mark.parametrize("before", ["at-least-once", pytest.param("exactly-once", marks=_COMPLETE)])
def test_leaderships(scene, make_topic, before, delivery):
    """Leaderships that come and go cause no leak, after each delivery mode."""
    topic = make_topic()
    scene.fill(topic, 1)
    scene.drain(config={"delivery": before})
    with scene.running(config={"delivery": delivery}) as harvester:

        def repeat():
            scene.fill(topic, 1)
            wait_until(lambda: scene.count() == 0, "it publishes")
            harvester.elector.revoke()
            harvester.elector.acquire()

        assert_flat(repeat)


@pytest.mark.real_broker
def test_leaderships_that_are_refused(scene, monkeypatch):
    """A recovery that fails again and again, as without a right, leaves none of its clients behind."""
    from outbox_core.harvest.recovery import Recovery
    from outbox_core.kafka.transactions import Ended

    scene.drain(config={"delivery": "exactly-once"})
    tried = []

    def refuse(*_):
        tried.append(1)
        return Ended("refused for this test")

    monkeypatch.setattr(Recovery, "_settle", refuse)
    with scene.running(limits={"io_error_backoff": "10ms"}):

        def repeat():
            count = len(tried)
            wait_until(lambda: len(tried) > count, "it tries again")

        assert_flat(repeat)


@pytest.mark.parametrize("delivery", MODES)
def test_lost_connections_to_the_database(scene, make_topic, delivery):
    """A harvester whose sessions (marks, purges, counts, notices) are ended again and again leaks none."""
    scene.execute(notify_sql(scene.table))
    topic = make_topic()
    quick = {"io_error_backoff": "10ms", "min_metrics_interval": "10ms"}
    options = {"config": {"delivery": delivery, "notify": True}, "metrics": HarvestMetrics(outbox_name="o")}
    with scene.running(limits=quick, **options):

        def repeat():
            scene.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'kafka-outbox%'"
            )
            scene.fill(topic, 1)
            wait_until(lambda: scene.count() == 0, "it publishes")

        assert_flat(repeat)


@pytest.mark.parametrize("delivery", MODES)
def test_ended_harvesters(scene, make_topic, delivery):
    """A process that starts and stops harvesters, and drops them, leaks none."""
    topic = make_topic()

    def repeat():
        scene.fill(topic, 1)
        scene.drain(config={"delivery": delivery})
        scene.harvesters.clear()

    assert_flat(repeat)
