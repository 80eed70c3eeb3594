"""Tests of topics that are made: what the cluster may refuse for a moment."""

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException

from outbox_core.errors import LeaderTopicError
from outbox_core.kafka import admin, topics


class Cluster:
    """An admin client of a cluster in which a topic is missing, and refuses to make it `refusals` times."""

    def __init__(self, refusals):
        self._refusals = refusals
        self.is_made = False

    def list_topics(self, topic, **_):
        partitions = {0: SimpleNamespace()} if self.is_made else {}
        return SimpleNamespace(
            controller_id=1, brokers={1: None}, topics={topic: SimpleNamespace(error=None, partitions=partitions)}
        )

    def describe_topics(self, *_, **__):
        return {"leaders": _failed(KafkaError.UNKNOWN_TOPIC_OR_PART)}

    def create_topics(self, *_, **__):
        if self._refusals:
            self._refusals -= 1
            return {"leaders": _failed(KafkaError.INVALID_REPLICATION_FACTOR)}
        self.is_made = True
        made = Future()
        made.set_result(None)
        return {"leaders": made}

    def describe_configs(self, resources, **_):
        return dict.fromkeys(resources, _failed(KafkaError.TOPIC_AUTHORIZATION_FAILED))

    def poll(self, _):
        pass

    def __exit__(self, *_):
        pass


def _failed(code):
    failed = Future()
    failed.set_exception(KafkaException(KafkaError(code, "what Kafka said")))
    return failed


@pytest.fixture
def make_cluster(monkeypatch):
    """Return a factory for clusters, of which the last is asked."""
    monkeypatch.setattr(topics, "_FENCED_INTERVAL_SECONDS", 0.01)

    def make(refusals):
        cluster = Cluster(refusals)
        monkeypatch.setattr(admin, "make_admin", lambda _: cluster)
        return cluster

    return make


def test_brokers_that_are_fenced_for_a_moment(make_cluster):
    """A topic is made once enough brokers are there: one that has just started does not count for a moment."""
    cluster = make_cluster(refusals=3)
    assert topics.ensure_leader_topic({}, "leaders") == 1
    assert cluster.is_made


def test_brokers_that_are_too_few(make_cluster, monkeypatch):
    """A cluster that has too few brokers until the deadline is named as the reason."""
    make_cluster(refusals=10_000)
    monkeypatch.setattr(topics, "Inquiry", partial(admin.Inquiry, timeout_seconds=0.1))
    with pytest.raises(LeaderTopicError, match="does not exist and cannot be made: what Kafka said"):
        topics.ensure_leader_topic({}, "leaders")
