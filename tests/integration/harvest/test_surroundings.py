"""Passing failures of the surroundings: token endpoints, files of certificates, tables, topics and users' callbacks.

None of them ends a harvester that has started. Most tests here have a peer: what one cannot do the other one must.
"""

import base64
import datetime as dt
import ipaddress
import json
import logging
import shutil
import threading
import time
import uuid

import psycopg
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID

from devstack.kafka import KafkaBroker
from outbox_core import OutboxRecord
from outbox_core.errors import InvalidConfig, KafkaUnavailable, TrackingTopicError
from outbox_core.kafka.clients import NewTopic, make_admin, make_producer
from outbox_core.kafka.topics import topic_settings
from outbox_core.kafka.tracking import holds_only_ours
from outbox_core.schema import create_hold_sql, create_table_sql
from tests.harvesting import Scene, by_key, wait_until

pytestmark = pytest.mark.real_broker

DELIVERIES = ("at-least-once", "exactly-once")
_TAKE_OVER_SECONDS = 45
_EXPIRY_SECONDS = 4


def _write_certificate(folder):
    """Write `ca.pem`, and `server.pem` with a key and a certificate for 127.0.0.1 that signs itself."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "localhost")])
    now = dt.datetime.now(dt.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number())
        .not_valid_before(now - dt.timedelta(days=1))
        .not_valid_after(now + dt.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    private = key.private_bytes(
        serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    )
    (folder / "ca.pem").write_bytes(certificate)
    (folder / "server.pem").write_bytes(private + certificate)


@pytest.fixture(scope="module")
def guarded(tmp_path_factory):
    """A broker whose listeners ask for tokens (1) and for TLS (2), and that forgets idle producers soon."""
    folder = tmp_path_factory.mktemp("guarded")
    _write_certificate(folder)
    login = "org.apache.kafka.common.security.oauthbearer.OAuthBearerLoginModule required"
    broker = KafkaBroker(
        folder / "broker",
        small=True,
        extra_properties={
            "listener.security.protocol.map": (
                "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,PROXIED1:SASL_PLAINTEXT,PROXIED2:SSL"
            ),
            "listener.name.proxied1.sasl.enabled.mechanisms": "OAUTHBEARER",
            "listener.name.proxied1.oauthbearer.sasl.jaas.config": f'{login} unsecuredLoginStringClaim_sub="admin";',
            "listener.name.proxied2.ssl.keystore.type": "PEM",
            "listener.name.proxied2.ssl.keystore.location": str(folder / "server.pem"),
            "transactional.id.expiration.ms": str(_EXPIRY_SECONDS * 1000),
            "transaction.remove.expired.transaction.cleanup.interval.ms": "1000",
        },
    )
    broker.start()
    yield broker
    broker.stop()


@pytest.fixture
def through(guarded):
    """A function that returns the bootstrap address of a listener of `guarded`."""
    proxies = []

    def start(listener):
        proxies.append(guarded.proxied(listener).start())
        return proxies[-1].bootstrap

    yield start
    for proxy in proxies:
        proxy.stop()


@pytest.fixture
def guarded_scene(database, guarded):
    """An outbox and the broker `guarded`; `certificates` is the folder of its certificates."""
    scene = Scene(database, guarded.bootstrap)
    scene.certificates = guarded.directory.parent
    yield scene
    scene.close()


class TokenEndpoint:
    """An endpoint of tokens that may be away."""

    def __init__(self):
        self.is_away = False

    def __call__(self, _):
        if self.is_away:
            raise RuntimeError("the token endpoint is away")
        issued, expires = time.time() - 1, time.time() + 120
        parts = ({"alg": "none"}, {"sub": "me", "iat": issued, "exp": expires})
        texts = [base64.urlsafe_b64encode(json.dumps(part).encode()).rstrip(b"=").decode() for part in parts]
        return f"{'.'.join(texts)}.", expires


def _assert_peer_takes_over(scene, topic, config, *, leave, come_back, told):
    """The leader stops while something is away; its peer says so, and publishes once that is back."""
    leader = scene.harvester(name="leader", config=config, elector_factory=None)
    peer = scene.harvester(name="peer", config=config, elector_factory=None)
    leader.start()
    wait_until(lambda: leader.is_leader, "it leads")
    scene.stash(OutboxRecord(topic, "k", "0"))
    wait_until(lambda: scene.count() == 0, "it publishes")
    peer.start()
    wait_until(lambda: peer.health().detail == "standing by", "its peer stands by")
    leave()
    scene.stash(OutboxRecord(topic, "k", "1"), OutboxRecord(topic, "k", "2"))
    leader.stop()
    assert leader.join(60)
    wait_until(lambda: peer._ctx.kafka.is_ongoing, "its peer cannot go on")
    assert told in peer._ctx.kafka.describe()
    assert peer.health().alive
    come_back()
    wait_until(lambda: scene.count() == 0, "its peer publishes", timeout=_TAKE_OVER_SECONDS)
    peer.stop()
    assert peer.join(60)
    assert by_key(scene.read(topic)) == {b"k": [b"0", b"1", b"2"]}


@pytest.mark.parametrize("delivery", [pytest.param("at-least-once", marks=pytest.mark.complete), "exactly-once"])
def test_token_endpoint_that_is_away_during_a_hand_over(guarded_scene, through, make_topic, delivery):
    """A harvester that takes over while no token can be had names the callback's error, and publishes with the next."""
    endpoint = TokenEndpoint()
    settings = {
        "bootstrap.servers": through(1),
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": endpoint,
    }
    _assert_peer_takes_over(
        guarded_scene,
        make_topic(bootstrap=guarded_scene.bootstrap),
        {"base_kafka_config": settings, "delivery": delivery},
        leave=lambda: setattr(endpoint, "is_away", True),
        come_back=lambda: setattr(endpoint, "is_away", False),
        told="oauth_cb raised RuntimeError: the token endpoint is away",
    )


@pytest.mark.complete
def test_kafka_is_away_and_no_token_to_be_had(guarded, guarded_scene, make_topic):
    """Harvesters that hear of no leader, and can make no client either, go on trying, and publish after the repair."""
    endpoint, topic = TokenEndpoint(), make_topic(bootstrap=guarded_scene.bootstrap)
    with guarded.proxied(1) as way:
        settings = {
            "bootstrap.servers": way.bootstrap,
            "security.protocol": "sasl_plaintext",
            "sasl.mechanism": "OAUTHBEARER",
            "oauth_cb": endpoint,
        }
        config = {"base_kafka_config": settings}
        both = [guarded_scene.harvester(name=name, config=config, elector_factory=None) for name in ("one", "two")]
        for each in both:
            each.start()
        wait_until(lambda: any(each.is_leader for each in both), "one leads")
        way.reset()
        endpoint.is_away = True
        time.sleep(30.0)  # three sessions and more
        assert all(each.health().alive for each in both)
        way.resume()
        endpoint.is_away = False
        guarded_scene.stash(OutboxRecord(topic, "k", "v"))
        wait_until(lambda: guarded_scene.count() == 0, "it is published", timeout=60)
        guarded_scene.close()


def test_first_start_without_a_token(guarded_scene, through):
    """A first start while no token can be had is that without Kafka: it ends, and the error is not about settings."""
    endpoint = TokenEndpoint()
    endpoint.is_away = True
    settings = {
        "bootstrap.servers": through(1),
        "security.protocol": "sasl_plaintext",
        "sasl.mechanism": "OAUTHBEARER",
        "oauth_cb": endpoint,
    }
    with pytest.raises(KafkaUnavailable, match="the token endpoint is away") as raised:
        guarded_scene.harvester(config={"base_kafka_config": settings}, elector_factory=None).start()
    assert not isinstance(raised.value, InvalidConfig)


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_ca_file_that_is_away_during_a_hand_over(guarded_scene, through, make_topic, tmp_path, delivery):
    """A harvester that takes over while secrets rotate waits until the file of authorities is there; a start ends."""
    ca = tmp_path / "ca.pem"
    settings = {"bootstrap.servers": through(2), "security.protocol": "ssl", "ssl.ca.location": str(ca)}
    with pytest.raises(InvalidConfig, match=r"ssl\.ca\.location"):
        guarded_scene.harvester(config={"base_kafka_config": settings}).start()
    issued = guarded_scene.certificates / "ca.pem"
    shutil.copy(issued, ca)
    _assert_peer_takes_over(
        guarded_scene,
        make_topic(bootstrap=guarded_scene.bootstrap),
        {"base_kafka_config": settings, "delivery": delivery},
        leave=ca.unlink,
        come_back=lambda: shutil.copy(issued, ca),
        told="ssl.ca.location",
    )


def test_leader_topic_that_is_deleted(scene, make_topic):
    """A leader topic that is deleted is made anew by the harvester as at its start, not by a broker with 4 parts."""
    topic = make_topic()
    names = {"leader_topic": f"leaders-{uuid.uuid4().hex[:6]}", "leader_group_id": f"group-{uuid.uuid4().hex[:6]}"}
    harvester = scene.harvester(config=names, elector_factory=None)
    harvester.start()
    wait_until(lambda: harvester.is_leader, "it leads")
    kafka = {"bootstrap.servers": scene.bootstrap}
    admin = make_admin(kafka)
    admin.delete_topics([names["leader_topic"]])[names["leader_topic"]].result(20)
    wait_until(lambda: topic_settings(kafka, names["leader_topic"]), "the topic is there again")
    wait_until(lambda: harvester.is_leader, "it leads, or does so again")
    scene.stash(OutboxRecord(topic, "k", "v"))
    wait_until(lambda: scene.count() == 0, "it publishes")
    assert topic_settings(kafka, names["leader_topic"])["retention.ms"] == "3600000"
    assert len(admin.list_topics(names["leader_topic"], timeout=10).topics[names["leader_topic"]].partitions) == 1
    harvester.stop()
    assert harvester.join(60)


def test_idle_transactional_id_that_expires_alarms_nobody(guarded_scene, make_topic, caplog):
    """After the brokers have forgotten an idle transactional.id records go on, once each, and nothing is warned of."""
    topic = make_topic(bootstrap=guarded_scene.bootstrap)
    caplog.set_level(logging.INFO)
    with guarded_scene.running(config={"delivery": "exactly-once"}):
        for burst in range(3):
            guarded_scene.stash(*(OutboxRecord(topic, f"k{number}", str(burst)) for number in range(20)))
            wait_until(lambda: guarded_scene.count() == 0, "the burst is published")
            time.sleep(_EXPIRY_SECONDS + 3)  # what is waited for is that nothing happens
    assert by_key(guarded_scene.read(topic)) == {f"k{number}".encode(): [b"0", b"1", b"2"] for number in range(20)}
    told = [record for record in caplog.records if "they have forgotten it" in record.message]
    assert told, "no transactional.id has expired, so this tests nothing"
    assert {record.levelno for record in told} == {logging.INFO}
    assert [record.message for record in caplog.records if record.levelno > logging.INFO] == []


# -- the table


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_table_that_is_dropped_and_made_anew_under_load(scene, make_topic, caplog, delivery):
    """A table that is away ends nothing, is told once, and of the new one every row is published."""
    topic, written, stopping = make_topic(), [], threading.Event()

    def write():
        while not stopping.wait(0.01):
            numbers = range(len(written), len(written) + 10)
            try:
                other.stash(*(OutboxRecord(topic, f"k{number % 7}", str(number)) for number in numbers))
            except psycopg.Error:  # while there is no table
                continue
            written.extend(numbers)

    other = Scene(scene.database, scene.bootstrap, layout=None)
    writer = threading.Thread(target=write, daemon=True)
    with scene.running(config={"delivery": delivery}, limits={"mark_query_records": 20}) as harvester:
        writer.start()
        for _ in range(2):
            already = len(written)
            wait_until(lambda: len(written) > already + 300, "there is load")  # noqa: B023
            scene.execute("DROP TABLE outbox, outbox_hold")
            at_drop = len(written)
            wait_until(lambda: harvester._ctx.database.is_ongoing, "it sees that")
            assert "outbox schema --table outbox --apply" in harvester._ctx.database.describe()
            scene.execute(create_table_sql(scene.table))
            scene.execute(create_hold_sql(scene.table))
            wait_until(lambda: len(written) > at_drop + 100, "there is a new table")  # noqa: B023
            wait_until(lambda: not harvester._ctx.database.is_ongoing, "it sees that, too")
        stopping.set()
        writer.join()
        wait_until(lambda: scene.count() == 0, "what is in the new table is published")
        assert not harvester._ctx.database.is_ongoing
    arrived = {int(message.value) for message in scene.read(topic)}
    assert set(range(at_drop + 10, len(written))) <= arrived, "no row of the new table is deleted for an old one"
    told = [record.message for record in caplog.records if "retrying" in record.message]
    # Each time the missing table, and what a statement that ran into it at the moment of its return says.
    assert sum("outbox schema --table outbox --apply" in message for message in told) >= 2, told
    assert len(told) <= 8, told


def test_table_of_holds_that_is_away_for_a_moment(scene, make_topic):
    """While the table is away that holds a topic, nothing is published, and afterwards all but the topic."""
    held, other = make_topic(), make_topic()
    scene.hold("add", held)
    with scene.running() as harvester:
        scene.stash(OutboxRecord(held, "k", "held"), OutboxRecord(other, "k", "1"))
        wait_until(lambda: scene.count() == 1, "the other one is published")
        scene.execute("ALTER TABLE outbox_hold RENAME TO elsewhere")
        wait_until(lambda: "outbox_hold is gone" in harvester._ctx.database.describe(), "it sees that")
        scene.stash(OutboxRecord(other, "k", "2"))
        time.sleep(2.0)
        assert scene.count() == 2
        scene.execute("ALTER TABLE elsewhere RENAME TO outbox_hold")
        wait_until(lambda: scene.count() == 1, "it goes on")
    assert by_key(scene.read(other)) == {b"k": [b"1", b"2"]}
    assert scene.read(held) == []


def test_a_standby_that_takes_over_while_the_table_of_holds_is_away(scene, make_topic):
    """It has read no holds yet, and has seen their table: it publishes nothing until that is back."""
    held, other = make_topic(), make_topic()
    leader = scene.harvester()
    leader.start()
    wait_until(lambda: leader.is_leader, "it leads")
    with scene.running() as standby:
        scene.hold("add", held)
        scene.execute("ALTER TABLE outbox_hold RENAME TO elsewhere")
        leader.stop()
        scene.stash(OutboxRecord(held, "k", "held"), OutboxRecord(other, "k", "1"))
        wait_until(lambda: "outbox_hold is gone" in standby._ctx.database.describe(), "it sees that")
        assert scene.count() == 2
        scene.execute("ALTER TABLE elsewhere RENAME TO outbox_hold")
        wait_until(lambda: scene.count() == 1, "it goes on")
    assert scene.read(held) == []


# -- topics


def test_tracking_topic_that_a_broker_made_gets_its_settings(scene, make_topic, topic_name, caplog):
    """A tracking topic that came back with the brokers' defaults gets its own settings, and nothing stands still."""
    topic, tracking = make_topic(), topic_name("tracking")
    kafka = {"bootstrap.servers": scene.bootstrap}
    admin = make_admin(kafka)
    with scene.running(config={"delivery": "exactly-once", "tracking_topic": tracking}):
        for number in range(3):
            scene.stash(OutboxRecord(topic, "k", str(number)))
            wait_until(lambda: scene.count() == 0, "it is published")
            admin.delete_topics([tracking])[tracking].result(20)
            if number:  # else by the harvester's own producer, or by the harvester
                made = NewTopic(tracking, num_partitions=4)
                wait_until(lambda: _is_made(admin, made), "a broker makes it")  # noqa: B023
        scene.stash(OutboxRecord(topic, "k", "3"))
        wait_until(lambda: scene.count() == 0, "it is published")
        wait_until(lambda: topic_settings(kafka, tracking)["cleanup.policy"] == "compact", "it has its settings")
        scene.stash(OutboxRecord(topic, "k", "4"))
        wait_until(lambda: scene.count() == 0, "it is published")
    assert by_key(scene.read(topic)) == {b"k": [b"0", b"1", b"2", b"3", b"4"]}
    assert "was made by a broker, with 4 partition(s)" in caplog.text
    scene.drain(config={"delivery": "exactly-once", "tracking_topic": tracking})  # it starts


def _is_made(admin, topic):
    """Make a topic; a deleted one may still be there for a moment."""
    try:
        admin.create_topics([topic])[topic.topic].result(20)
    except Exception as error:
        return "already exists" in str(error) and len(admin.list_topics(topic.topic, timeout=5).topics) == 1
    return True


def test_topic_of_somebody_else_gets_no_settings(scene, make_topic):
    """A topic without settings of its own that holds other records is refused as a tracking topic, and left alone."""
    topic = make_topic(2)
    scene.stash(OutboxRecord(topic, "k", "v"))
    scene.drain()
    with pytest.raises(Exception, match=r"2 partitions"):
        scene.harvester(config={"delivery": "exactly-once", "tracking_topic": topic}).start()
    assert topic_settings({"bootstrap.servers": scene.bootstrap}, topic)["cleanup.policy"] == "delete"


def test_empty_topic_that_was_named_by_mistake_gets_no_settings(scene, make_topic):
    """The first start alters no topic, not even an empty one: its name may be a typing error."""
    topic, kafka = make_topic(4), {"bootstrap.servers": scene.bootstrap}
    before = topic_settings(kafka, topic)
    with pytest.raises(TrackingTopicError, match=r"4 partitions"):
        scene.harvester(config={"delivery": "exactly-once", "tracking_topic": topic}).start()
    assert topic_settings(kafka, topic) == before


@pytest.mark.parametrize(
    ("suffix", "is_ours"), [("", True), (":begin", True), (":shard-3", True), ("2", False), ("_old:begin", False)]
)
def test_topic_of_a_like_named_transactional_id_is_anothers(make_topic, kafka_bootstrap, suffix, is_ours):
    """A topic is ours by the whole transactional.id of its records, which another outbox's may begin with."""
    kafka, topic = {"bootstrap.servers": kafka_bootstrap}, make_topic()
    producer = make_producer(kafka)
    producer.produce(topic, b"{}", f"kafka-outbox:shop.public.outbox{suffix}")
    producer.flush(20)
    assert holds_only_ours(kafka, "group", topic, "kafka-outbox:shop.public.outbox") == is_ours


# -- what users hand in


@pytest.mark.parametrize("delivery", DELIVERIES)
def test_callbacks_that_raise(scene, make_topic, caplog, delivery):
    """Callbacks, a logger and an event handler that raise end nothing, and each kind is logged once."""
    topic, calls = make_topic(), []

    class HandedIn(Exception):
        """A kind of error of this run alone."""

    def fail(*arguments):
        calls.append(arguments)
        raise HandedIn

    class Logger:
        log = staticmethod(fail)

    servers = f"127.0.0.1:1,{scene.bootstrap}"
    kafka = {"bootstrap.servers": servers, "statistics.interval.ms": 100, "stats_cb": fail, "error_cb": fail}
    config = {"base_kafka_config": kafka | {"throttle_cb": fail, "logger": Logger()}, "delivery": delivery}
    with scene.running(config=config, elector_factory=None, on_event=fail):
        for number in range(5):
            scene.stash(OutboxRecord(topic, "k", str(number)))
            wait_until(lambda: scene.count() == 0, "it is published")
            seen = len(calls)
            wait_until(lambda: len(calls) > seen + 5, "they are called")  # noqa: B023
    assert by_key(scene.read(topic)) == {b"k": [b"0", b"1", b"2", b"3", b"4"]}
    told = [record.message.partition(":")[0] for record in caplog.records if record.exc_info]
    assert len(told) == len(set(told)), "each kind once"
    assert {"the Kafka client's stats_cb failed", "the event handler failed on LeaderAcquired"} <= set(told)
