"""Errors of rights: they name the principal as the client knows itself, and never show a secret."""

import pytest

from outbox_core.doctor.kafka import KafkaChecks
from outbox_core.election import NeliConfig
from outbox_core.election.connection_log import refusal
from outbox_core.kafka.admin import TopicDescription
from outbox_core.kafka.clients import KafkaError
from outbox_core.kafka.errors import explained, grant, principal_of, why_unreadable
from outbox_core.kafka.transactions import TransactionalProducer
from outbox_core.metrics import Activity

TOPIC = KafkaError(KafkaError.TOPIC_AUTHORIZATION_FAILED)
GROUP = KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED)
RELAY = {
    "bootstrap.servers": "localhost:1",
    "security.protocol": "SASL_SSL",
    "sasl.mechanism": "PLAIN",
    "sasl.username": "relay",
    "sasl.password": "hunter2",
    "ssl.key.password": "hunter2",
}


@pytest.mark.parametrize(
    ("settings", "principal"),
    [
        (RELAY, "User:relay"),
        ({**RELAY, "security.protocol": "sasl_plaintext", "sasl.mechanisms": "SCRAM-SHA-512"}, "User:relay"),
        (
            {**RELAY, "sasl.mechanism": "GSSAPI", "sasl.kerberos.principal": "relay/a@B"},
            "the Kerberos principal relay/a@B",
        ),
        ({**RELAY, "sasl.mechanism": "OAUTHBEARER"}, "the subject of its OAUTHBEARER token"),
        (
            {**RELAY, "sasl.mechanism": "OAUTHBEARER", "sasl.oauthbearer.client.id": "shop"},
            "the subject of its OAUTHBEARER token (client shop)",
        ),
        (
            {**RELAY, "security.protocol": "SSL", "ssl.certificate.location": "/etc/relay.pem"},
            "the subject of the certificate in /etc/relay.pem (ssl.certificate.location)",
        ),
        (
            {"security.protocol": "ssl", "ssl.keystore.location": "/etc/relay.p12", "ssl.keystore.password": "hunter2"},
            "the subject of the certificate in /etc/relay.p12 (ssl.keystore.location)",
        ),
        (
            {"security.protocol": "ssl", "ssl.certificate.pem": "-----BEGIN", "ssl.key.pem": "hunter2"},
            "the subject of the certificate in ssl.certificate.pem",
        ),
        ({"security.protocol": "ssl"}, "User:ANONYMOUS"),
        ({"sasl.username": "relay"}, "User:ANONYMOUS"),  # without SASL it is not sent
        ({}, "User:ANONYMOUS"),
    ],
)
def test_principal(settings, principal):
    """A principal is named by its user name, or else by the way in which the client authenticates."""
    assert principal_of(settings) == principal
    assert "hunter2" not in principal_of(settings)


def test_advice_names_right_object_and_principal():
    """One line has the right to grant, its object and its principal; other errors stay as they are."""
    assert grant("READ and WRITE", RELAY) == "grant READ and WRITE on it to User:relay"
    assert why_unreadable(TOPIC, RELAY, "orders").endswith("; grant READ on topic 'orders' to User:relay")
    assert why_unreadable(GROUP, RELAY, "orders", "mine").endswith("; grant READ on group 'mine' to User:relay")
    assert why_unreadable(GROUP, RELAY, "orders").endswith(", as User:relay")
    timed_out = KafkaError(KafkaError._MSG_TIMED_OUT)
    assert explained(timed_out, RELAY) == why_unreadable(timed_out, RELAY, "orders") == timed_out.str()


def test_election_names_who_lacks_the_right():
    """A refusal in the election names its topic or group, and the principal."""
    config = NeliConfig(kafka=RELAY, group_id="shop")
    topic, group = str(refusal(TOPIC, config)), str(refusal(GROUP, config))
    assert topic.startswith("leader topic 'shop.neli' cannot be used")
    assert topic.endswith("; grant READ and WRITE on it to User:relay")
    assert group.startswith("leader group 'shop' cannot be joined")
    assert group.endswith("; grant READ on it to User:relay")


def test_transactional_id_names_who_lacks_the_right():
    """A refused transactional.id is named, with the rights that it needs."""
    producer = TransactionalProducer(RELAY | {"transactional.id": "kafka-outbox:shop"}, timeout_seconds=5.0)
    try:
        said = producer._why_refused(KafkaError(KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED))
    finally:
        producer.discard()
    assert said.startswith("transactional.id 'kafka-outbox:shop' may not be used: ")
    assert said.endswith("; grant WRITE and DESCRIBE on it to User:relay")


def test_health_remarks_on_refused_topics():
    """Health names topics held for an error although all else is well; a new leadership has none."""
    activity = Activity()
    assert activity.remark == ""
    activity.refused = {"orders": "no; grant WRITE on it to User:relay"}
    assert activity.remark == "records for topic orders are held: no; grant WRITE on it to User:relay"
    activity.refused = {"orders": "no", "bills": "nor there"}
    assert activity.remark == "records for topic bills (and 1 more) are held: nor there"
    activity.begin()
    assert activity.remark == ""


def test_doctor_names_who_lacks_the_right():
    """A finding about a topic names the principal and its missing rights, and the remedy grants them."""
    examination = KafkaChecks.__new__(KafkaChecks)  # no cluster is asked
    examination._config = RELAY
    (found,) = examination._rights("topic", "orders", TopicDescription(1, 1, frozenset({"READ"})), {"READ", "WRITE"})
    assert found.detail == "orders, on which User:relay lacks the right(s) WRITE"
    assert found.remedy == "grant WRITE on orders to User:relay"
