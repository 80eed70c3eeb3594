"""Tests of topics that are made: what the cluster may refuse for a moment."""

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
from confluent_kafka import KafkaError, KafkaException
from confluent_kafka.admin import ConfigSource

from outbox_core.errors import KafkaUnavailable, LeaderTopicError, TrackingTopicError
from outbox_core.kafka import admin, topics


class Cluster:
    """An admin client of a cluster in which a topic is missing, and refuses to make it `refusals` times.

    Asked for its settings, a broker has not heard of it `unheard` times.
    """

    def __init__(self, refusals, unheard=0):
        self._refusals = refusals
        self._unheard = unheard
        self.is_made = False

    def list_topics(self, topic, **_):
        partitions = {0: SimpleNamespace()} if self.is_made else {}
        return SimpleNamespace(
            controller_id=1, brokers={1: None}, topics={topic: SimpleNamespace(error=None, partitions=partitions)}
        )

    def describe_topics(self, topics, **_):
        return dict.fromkeys(topics.topic_names, _failed(KafkaError.UNKNOWN_TOPIC_OR_PART))

    def create_topics(self, made, **_):
        [topic] = made
        if self._refusals:
            self._refusals -= 1
            return {topic.topic: _failed(KafkaError.INVALID_REPLICATION_FACTOR)}
        self.is_made = True
        self._settings = topic.config
        return {topic.topic: _answer(None)}

    def describe_configs(self, resources, **_):
        if self._unheard:
            self._unheard -= 1
            return dict.fromkeys(resources, _failed(KafkaError.UNKNOWN_TOPIC_OR_PART))
        source = ConfigSource.DYNAMIC_TOPIC_CONFIG.value
        settings = {name: SimpleNamespace(value=value, source=source) for name, value in self._settings.items()}
        return dict.fromkeys(resources, _answer(settings))

    def poll(self, _):
        pass

    def __exit__(self, *_):
        pass


def _answer(value):
    answer = Future()
    answer.set_result(value)
    return answer


def _failed(code):
    failed = Future()
    failed.set_exception(KafkaException(KafkaError(code, "what Kafka said")))
    return failed


@pytest.fixture
def make_cluster(monkeypatch):
    """Return a factory for clusters, of which the last is asked."""
    monkeypatch.setattr(topics, "_FENCED_INTERVAL_SECONDS", 0.01)

    monkeypatch.setattr(topics, "APPEAR_INTERVAL_SECONDS", 0.01)

    def make(refusals=0, unheard=0):
        cluster = Cluster(refusals, unheard)
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


def test_a_broker_that_has_not_heard_of_a_new_topic(make_cluster):
    """The settings of a topic that was just made are asked for again while a broker has not heard of it."""
    cluster = make_cluster(unheard=3)
    topics.ensure_tracking_topic({}, "tracking")
    assert cluster.is_made
    make_cluster(unheard=3).create_topics([SimpleNamespace(topic="orders", config={"cleanup.policy": "delete"})])
    assert topics.topic_settings({}, "orders") == {"cleanup.policy": "delete"}


def test_a_broker_that_does_not_hear_of_a_new_topic(make_cluster, monkeypatch):
    """A broker that hears nothing of a topic until the deadline asks for no right: the cluster does not answer."""
    make_cluster(unheard=10_000)
    monkeypatch.setattr(topics, "Inquiry", partial(admin.Inquiry, timeout_seconds=0.1))
    with pytest.raises(KafkaUnavailable, match="topic 'tracking' cannot be read yet: what Kafka said"):
        topics.ensure_tracking_topic({}, "tracking")


def test_a_right_that_is_missing(make_cluster, monkeypatch):
    """A right that is missing is asked for at once."""
    cluster = make_cluster()
    refused = _failed(KafkaError.TOPIC_AUTHORIZATION_FAILED)
    monkeypatch.setattr(cluster, "describe_configs", lambda resources, **_: dict.fromkeys(resources, refused))
    with pytest.raises(TrackingTopicError, match="grant DESCRIBE_CONFIGS"):
        topics.ensure_tracking_topic({}, "tracking")
