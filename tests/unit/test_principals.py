"""Who lacks a right is named as the client knows itself, and never with a secret."""

import pytest

from outbox_core.election import NeliConfig
from outbox_core.election.connection import refusal
from outbox_core.harvest.transaction import TransactionalProducer
from outbox_core.kafka import KafkaError, TopicLook, explained, grant, principal_of, why_unreadable
from outbox_core.kafka_examination import KafkaExamination
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
    """By user name where there is one, else by how the client authenticates."""
    assert principal_of(settings) == principal
    assert "hunter2" not in principal_of(settings)


def test_advice_names_right_object_and_principal():
    """One line says what to grant, on what and to whom; other errors are left as they are."""
    assert grant("READ and WRITE", RELAY) == "grant READ and WRITE on it to User:relay"
    assert why_unreadable(TOPIC, RELAY, "orders").endswith("; grant READ on topic 'orders' to User:relay")
    assert why_unreadable(GROUP, RELAY, "orders", "mine").endswith("; grant READ on group 'mine' to User:relay")
    assert why_unreadable(GROUP, RELAY, "orders").endswith(", as User:relay")
    timed_out = KafkaError(KafkaError._MSG_TIMED_OUT)
    assert explained(timed_out, RELAY) == why_unreadable(timed_out, RELAY, "orders") == timed_out.str()


def test_election_names_who_lacks_the_right():
    """Topic and group of the election."""
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
    """What is held for an error is told although all is well; a new leadership knows of none."""
    activity = Activity()
    assert activity.remark == ""
    activity.refused = {"orders": "no; grant WRITE on it to User:relay"}
    assert activity.remark == "records for topic orders are held: no; grant WRITE on it to User:relay"
    activity.refused = {"orders": "no", "bills": "nor there"}
    assert activity.remark == "records for topic bills (and 1 more) are held: nor there"
    activity.begin()
    assert activity.remark == ""


def test_doctor_names_who_lacks_the_right():
    """A finding about a topic says who lacks which rights, and the remedy to whom to grant them."""
    examination = KafkaExamination.__new__(KafkaExamination)  # no cluster is asked
    examination._config = RELAY
    (found,) = examination._rights("topic", "orders", TopicLook(1, 1, frozenset({"READ"})), {"READ", "WRITE"})
    assert found.detail == "orders, on which User:relay lacks the right(s) WRITE"
    assert found.remedy == "grant WRITE on orders to User:relay"
