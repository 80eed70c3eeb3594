"""A batch as a job, without Spark: it is ended whenever that is asked for."""

import threading
from types import SimpleNamespace

import pytest

from outbox_core.config import HarvestConfig
from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka.tracking import ForeignLedger
from outbox_core.stores.interface import NO_HOLDS
from outbox_spark.pipelines.relay import RelayConfig, RelayFailed, _Relay
from outbox_spark.relay import fencing
from outbox_spark.relay.batch import has_ended, publish
from outbox_spark.relay.duty import RelayDuty
from outbox_spark.relay.plan import BatchPlan
from tests.harvesting import wait_until


class _Spark:
    """A session whose job begins when it was told for the first time to end it."""

    def __init__(self):
        self.interrupts = 0
        self.sparkContext = SimpleNamespace(setJobDescription=lambda _: None)
        self._ended = threading.Event()

    def addTag(self, tag):  # noqa: N802  Spark\'s name
        self.tag = tag

    def range(self, *_):
        return self

    def mapInArrow(self, *_):  # noqa: N802  Spark\'s name
        return self

    def collect(self):
        assert self._ended.wait(60), "nobody ended the job"
        return []

    def interruptTag(self, tag):  # noqa: N802  Spark\'s name
        assert tag == self.tag
        self.interrupts += 1
        if self.interrupts > 1:
            self._ended.set()


def test_a_job_that_begins_late_is_ended_too():
    """A job that had not begun when it was to be ended does not run on for the whole batch."""
    spark = _Spark()
    plan = BatchPlan(harvest=HarvestConfig(data_source="dbname=x"))
    assert publish(spark, plan, lambda: False) is None
    assert spark.interrupts > 1


def test_the_first_shard_that_cannot_be_fenced_is_told(monkeypatch):
    """One failure ends the attempts to fence all others, and theirs do not hide it."""

    def fence(shard, give_up):
        if shard == 1:
            raise ForeignLedger("of another outbox")
        wait_until(give_up, "told to give up")
        raise KafkaUnavailable("given up")

    monkeypatch.setattr(fencing, "_fence", fence)
    with pytest.raises(ForeignLedger, match="of another outbox"):
        fencing._fence_all([0, 1, 2], lambda: False)


class _Context:
    def __init__(self, *, is_stopped):
        self._is_stopped = is_stopped
        self._jsc = self

    def sc(self):
        return self

    def isStopped(self):  # noqa: N802  Spark's name
        return self._is_stopped


class _Session:
    def __init__(self, context=None):
        self.version = "4"
        if context is not None:
            self._sc = context


def test_a_session_that_has_ended_is_recognised():
    """A context that was stopped, and a JVM that does not answer, run no more jobs; Connect has no context."""
    assert has_ended(object())
    assert has_ended(_Session(_Context(is_stopped=True)))
    assert not has_ended(_Session(_Context(is_stopped=False)))
    assert not has_ended(_Session())


def test_a_relay_ends_with_its_session_unless_it_is_being_stopped(monkeypatch):
    """A signal to all processes of a group stops Spark, too: the relay then hands over in good order."""

    def fail(*_):
        raise RuntimeError("no answer")

    monkeypatch.setattr("outbox_spark.pipelines.relay.publish", fail)
    config = RelayConfig(harvest=HarvestConfig(data_source="dbname=x"))
    relay, planner = _Relay(None, config, None, threading.Event(), None), SimpleNamespace(holds=NO_HOLDS)
    relay._pause, relay._duty = 0.0, RelayDuty({}, "g", None)
    with pytest.raises(RelayFailed, match="Spark has ended, start the relay again: no answer"):
        relay._publish(planner, (), 1, lambda: True)
    assert not relay._publish(planner, (), 1, lambda: False)
