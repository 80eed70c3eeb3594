"""Kafka clients that are made for one inquiry: their leaks, and their answers about topics."""

from concurrent.futures import Future
from functools import partial
from types import SimpleNamespace

import pytest
from confluent_kafka.admin import ClusterMetadata

from devstack.frame_proxy import Api, Match
from devstack.ports import free_port
from devstack.processes import wait_until
from outbox_core import kafka
from outbox_core.errors import KafkaUnavailable
from outbox_core.kafka import topics
from tests.resources import assert_released, held, reference_counts_only


@pytest.fixture
def settings(kafka_bootstrap):
    """Settings of clients of the shared broker."""
    return {"bootstrap.servers": kafka_bootstrap}


@pytest.mark.real_broker
def test_inquiries_leave_nothing_behind(settings, topic_name):
    """No thread and no descriptor of an inquiry outlives the answer, although no garbage is collected."""
    leader, tracking = topic_name("leader"), topic_name("tracking")
    asked = [
        lambda: kafka.check_connection(settings),
        lambda: kafka.ensure_leader_topic(settings, leader),
        lambda: kafka.ensure_tracking_topic(settings, tracking),
        lambda: kafka.ensure_dead_letter_topic(settings, leader),
        lambda: kafka.partition_count(settings, tracking),
        lambda: kafka.partition_count(settings, topic_name()),
        lambda: kafka.topic_settings(settings, tracking),
        lambda: kafka.forbidden_topics(settings, {leader}),
    ]
    for ask in asked:
        ask()  # makes topics, which later calls find
    with reference_counts_only():
        before = held()
        for ask in asked:
            ask()
            assert_released(before, timeout=3.0)


def test_inquiry_that_fails_leaves_nothing_behind():
    """An inquiry that fails leaves no thread or descriptor either."""
    nowhere = {"bootstrap.servers": f"127.0.0.1:{free_port()}"}
    with reference_counts_only():
        before = held()
        for _ in range(3):
            with pytest.raises(KafkaUnavailable, match="Connection refused"):
                kafka.check_connection(nowhere, timeout_seconds=0.5)
        assert_released(before, timeout=3.0)


@pytest.mark.real_broker
def test_topic_that_one_broker_does_not_know_is_asked_for_by_name(settings, make_topic, topic_name, monkeypatch):
    """A topic that one broker's list lacks is found by its name; an absent topic is not made by the inquiry."""
    topic = make_topic(3)
    monkeypatch.setattr(kafka.Inquiry, "metadata", lambda *_: ClusterMetadata())
    assert wait_until(lambda: kafka.partition_count(settings, topic), 10)  # the broker may learn of it a little later
    assert kafka.partition_count(settings, topic) == 3
    monkeypatch.undo()
    missing = topic_name("missing")
    assert not kafka.partition_count(settings, missing)
    assert not kafka.partition_count(settings, missing)


@pytest.mark.real_broker
def test_a_topic_that_is_not_made_in_time_is_an_outage(request, topic_name, monkeypatch):
    """No answer about the creation of a topic is an outage, which is waited for, and no missing right."""
    monkeypatch.setattr(topics, "Inquiry", partial(kafka.Inquiry, timeout_seconds=2.0))
    with request.getfixturevalue("kafka").frame_proxied(1) as frames:
        trap = frames.hold(Match(Api.CREATE_TOPICS), reset=False)
        with pytest.raises(KafkaUnavailable, match="cannot reach Kafka"):
            kafka.ensure_tracking_topic({"bootstrap.servers": frames.bootstrap}, topic_name())
        assert trap.wait_until_held(0)


def test_answers_share_one_deadline():
    """An answer that does not come is an outage; those after it get only what it has left of the time."""
    waits = []
    silent = SimpleNamespace(result=lambda seconds: waits.append(seconds) or Future().result(seconds))
    with kafka.Inquiry({"bootstrap.servers": f"127.0.0.1:{free_port()}"}, 0.1) as inquiry:
        for _ in range(5):
            with pytest.raises(KafkaUnavailable, match="cannot reach Kafka"):
                inquiry.wait_for(silent, "the weather")
    assert waits[0] > 0.5 > sum(waits[1:])
