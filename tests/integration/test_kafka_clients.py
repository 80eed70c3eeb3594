"""Kafka clients that are made to ask something: what they leave behind, and what they believe."""

import pytest
from confluent_kafka.admin import ClusterMetadata

from devstack.ports import free_port
from outbox_core import kafka
from outbox_core.errors import KafkaUnavailable
from tests.resources import held, reference_counts_only, settles


@pytest.fixture
def settings(kafka_bootstrap):
    """Settings of clients of the shared broker."""
    return {"bootstrap.servers": kafka_bootstrap}


@pytest.mark.real_broker
def test_inquiries_leave_nothing_behind(settings, topic_name):
    """Whatever is asked, no thread and no descriptor outlives the answer, although nothing is garbage-collected."""
    leader, tracking = topic_name("leader"), topic_name("tracking")
    asked = [
        lambda: kafka.check_connection(settings),
        lambda: kafka.ensure_leader_topic(settings, leader),
        lambda: kafka.ensure_tracking_topic(settings, tracking),
        lambda: kafka.ensure_dead_letter_topic(settings, leader),
        lambda: kafka.topic_exists(settings, tracking),
        lambda: kafka.partition_count(settings, topic_name()),
        lambda: kafka.topic_settings(settings, tracking),
        lambda: kafka.forbidden_topics(settings, {leader}),
    ]
    for ask in asked:
        ask()  # what is made once, such as topics, is made now
    with reference_counts_only():
        before = held()
        for ask in asked:
            ask()
            after = settles(before.threads, before.descriptors, timeout=3.0)
            assert after.threads <= before.threads
            assert after.descriptors <= before.descriptors


def test_inquiry_that_fails_leaves_nothing_behind():
    """Nor does one that got no answer."""
    nowhere = {"bootstrap.servers": f"127.0.0.1:{free_port()}"}
    with reference_counts_only():
        before = held()
        for _ in range(3):
            with pytest.raises(KafkaUnavailable, match="Connection refused"):
                kafka.check_connection(nowhere, timeout_seconds=0.5)
        after = settles(before.threads, before.descriptors, timeout=3.0)
    assert after.threads <= before.threads
    assert after.descriptors <= before.descriptors


@pytest.mark.real_broker
def test_topic_that_one_broker_does_not_know_is_asked_for_by_name(settings, make_topic, topic_name, monkeypatch):
    """A broker whose list of topics lags behind does not make a topic absent; one that is absent does not appear."""
    topic = make_topic(3)
    monkeypatch.setattr(kafka.Inquiry, "metadata", lambda *_: ClusterMetadata())
    assert kafka.topic_exists(settings, topic)
    assert kafka.partition_count(settings, topic) == 3
    monkeypatch.undo()
    missing = topic_name("missing")
    assert not kafka.topic_exists(settings, missing)
    assert not kafka.topic_exists(settings, missing)
