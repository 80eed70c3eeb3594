"""Settings of the elector: accepted, refused and derived ones."""

import os
import re
import socket
from datetime import timedelta

import pytest

from outbox_core.config import HarvestConfig
from outbox_core.election import NeliConfig
from outbox_core.election.messages import Contest
from outbox_core.errors import InvalidConfig

KAFKA = {"bootstrap.servers": "localhost:9092"}


def config(kafka=None, **settings):
    """Return a configuration with some settings changed."""
    return NeliConfig(**({"kafka": KAFKA | (kafka or {}), "group_id": "billing"} | settings))


def test_defaults():
    """Five seconds of lease, six of session, and names from the group and the process are the defaults."""
    made = config()
    assert made.topic == "billing.neli"
    assert made.name == f"{socket.gethostname()}-{os.getpid()}"
    assert made.heartbeat_timeout == timedelta(seconds=5)
    assert made.session_timeout == timedelta(seconds=6)
    assert made.consumer_settings()["heartbeat.interval.ms"] == 200


@pytest.mark.parametrize(
    ("poll", "timeout", "interval"),
    [(0.1, 5, 0.25), (1, 5, 1), (3, 5, 1), (0.4, 5, 0.4), (0.1, 1, 0.1), (0.1, 60, 3)],
)
def test_heartbeats_are_often_enough(poll, timeout, interval):
    """At least five heartbeats fit into the lease, also with goharvest's minPollInterval of 1 s."""
    made = config(min_poll_interval=timedelta(seconds=poll), heartbeat_timeout=timedelta(seconds=timeout))
    assert made.heartbeat_interval == timedelta(seconds=interval)


def test_session_outlives_the_lease():
    """A longer lease lengthens the session by itself."""
    made = config(heartbeat_timeout=timedelta(seconds=10))
    assert made.consumer_settings()["session.timeout.ms"] == 10_700
    very_long = config(heartbeat_timeout=timedelta(minutes=6)).consumer_settings()
    assert very_long["max.poll.interval.ms"] >= very_long["session.timeout.ms"]


@pytest.mark.parametrize(
    ("kafka", "settings", "names"),
    [
        ({"session.timeout.ms": 5699}, {}, ["session.timeout.ms", "heartbeat_timeout"]),
        ({"session.timeout.ms": "6000"}, {"heartbeat_timeout": timedelta(seconds=8)}, ["session.timeout.ms"]),
        ({"session.timeout.ms": "soon"}, {}, ["session.timeout.ms"]),
        ({"heartbeat.interval.ms": 501}, {}, ["heartbeat.interval.ms"]),
        ({"heartbeat.interval.ms": 0}, {}, ["heartbeat.interval.ms"]),
        ({"group.instance.id": "a"}, {}, ["group.instance.id"]),
        ({"group.protocol": "consumer"}, {}, ["group.protocol"]),
        ({"partition.assignment.strategy": "range"}, {}, ["partition.assignment.strategy"]),
        ({"partition.assignment.strategy": "cooperative-sticky,range"}, {}, ["partition.assignment.strategy"]),
        ({"group.id": "other"}, {}, ["group.id", "group_id"]),
        ({}, {"group_id": ""}, ["group_id"]),
        ({}, {"topic": "no spaces"}, ["topic"]),
        ({}, {"topic": "x" * 250}, ["topic"]),
        ({}, {"role": -1}, ["role"]),
        ({}, {"heartbeat_timeout": timedelta(milliseconds=499)}, ["heartbeat_timeout"]),
        ({}, {"min_poll_interval": timedelta(0)}, ["min_poll_interval"]),
    ],
)
def test_refused(kafka, settings, names):
    """A setting that would break the election is refused by its name."""
    with pytest.raises(InvalidConfig) as refusal:
        config(kafka, **settings)
    for name in names:
        assert name in str(refusal.value)


@pytest.mark.parametrize(("kafka", "expected"), [({}, "me-election"), ({"client.id": "shop"}, "shop-election")])
def test_heartbeats_have_a_quota_of_their_own(kafka, expected):
    """Heartbeats are sent under another client.id than records, so that these cannot use up their quota."""
    assert config(kafka, name="me").producer_settings()["client.id"] == expected


def test_accepted():
    """The bounds themselves, numbers as text, and settings equal to our own are accepted."""
    made = config(
        {
            "session.timeout.ms": "5700",
            "heartbeat.interval.ms": "200",
            "group.protocol": "CLASSIC",
            "partition.assignment.strategy": "cooperative-sticky",
            "group.id": "billing",
            "group.instance.id": "",
        }
    )
    assert made.consumer_settings()["session.timeout.ms"] == 5700
    slow = config({"heartbeat.interval.ms": 500, "session.timeout.ms": 6000})
    assert slow.group_heartbeat_interval == timedelta(milliseconds=500)


def test_other_settings_reach_both_clients():
    """Other settings are passed through, and our own are not overridden, under any of their names."""
    made = config(
        {
            "security.protocol": "SSL",
            "socket.timeout.ms": 7000,
            "transactional.id": "mine",
            "enable.idempotence": True,
            "delivery.timeout.ms": 120_000,
            "linger.ms": 50,
            "enable.auto.commit": True,
        }
    )
    consumer, producer = made.consumer_settings(), made.producer_settings()
    for settings in (consumer, producer):
        assert settings["security.protocol"] == "SSL"
        assert settings["socket.timeout.ms"] == 7000
        assert not {"transactional.id", "delivery.timeout.ms"} & set(settings)
    assert producer["linger.ms"] == 0
    assert producer["message.timeout.ms"] == 5000
    assert consumer["enable.auto.commit"] is False
    assert not {"group.id", "session.timeout.ms"} & set(producer)


def test_passwords_are_not_shown():
    """The representation leaves the Kafka settings out."""
    assert not re.search("hunter2", repr(config({"sasl.password": "hunter2"})))


def test_settings_cannot_change_afterwards():
    """The configuration keeps its own copy of the mapping."""
    kafka = dict(KAFKA)
    made = NeliConfig(kafka=kafka, group_id="billing")
    kafka["group.instance.id"] = "x"
    assert "group.instance.id" not in made.consumer_settings()


def test_group_that_fits_into_no_message():
    """A group name that does not fit into the leader's messages is refused."""
    assert config(group_id="g" * 1000, topic="t").contest.group == "g" * 1000
    with pytest.raises(InvalidConfig, match=r"group_id.*1000"):
        config(group_id="g" * 1001, topic="t")


def test_contest_of_a_harvester():
    """Harvesters of one outbox contend in the group of their settings, for their outbox on their server."""
    made = NeliConfig.of(HarvestConfig(leader_group_id="g", base_kafka_config=KAFKA), "shop.public.outbox", "73")
    assert (made.group_id, made.topic) == ("g", "g.neli")
    assert made.contest == Contest("g", "shop.public.outbox", "73")
