"""Bad records on the real broker, in both delivery modes: they are held or dead-lettered, and other keys flow."""

import logging
import time

import pytest
from confluent_kafka.admin import AclBinding, AclOperation, AclPermissionType, ResourcePatternType, ResourceType
from psycopg.conninfo import make_conninfo

from outbox_core import OutboxRecord
from outbox_core.errors import TrackingTopicError
from outbox_core.kafka import clients
from outbox_core.kafka.clients import NewPartitions, make_admin
from outbox_core.kafka.messages import ERROR_HEADER, ORIGIN_HEADER
from tests.harvesting import GENEROUS_SECONDS, Scene, by_key, identity_of, wait_until
from tests.topic_settings import alter_topic

pytestmark = pytest.mark.real_broker

MODES = ["at-least-once", "exactly-once"]
QUICK = {"mark_query_records": 500, "io_error_backoff": "50ms"}
SMALL = {"max.message.bytes": "20000"}
LARGE = b"x" * 40_000


@pytest.fixture(params=MODES)
def mode(request):
    """A configuration of each delivery mode."""
    return {"delivery": request.param}


def texts(messages, key):
    """Return the values of one key, in order, without adjacent repeats."""
    values = by_key(messages).get(key.encode(), [])
    return [value.decode() for n, value in enumerate(values) if n == 0 or values[n - 1] != value]


def add_illegal(scene, *rows, topic="no topic!"):
    """Insert rows with an illegal topic, as a program in another language may."""
    for key, value in rows:
        scene.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) VALUES (%s, %s, %s)", [topic, key, value]
        )


def acl(scene, topic, *, remove=False):
    """Deny every user writing to a topic, or remove that rule."""
    admin = make_admin({"bootstrap.servers": scene.bootstrap})
    place = (ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, "User:ANONYMOUS", "*")
    allow = AclBinding(*place, AclOperation.ALL, AclPermissionType.ALLOW)
    deny = AclBinding(*place, AclOperation.WRITE, AclPermissionType.DENY)
    if remove:
        from confluent_kafka.admin import AclBindingFilter

        every = AclBindingFilter(
            ResourceType.TOPIC, topic, ResourcePatternType.LITERAL, None, None, AclOperation.ANY, AclPermissionType.ANY
        )
        futures = admin.delete_acls([every])
    else:
        futures = admin.create_acls([allow, deny])
    for future in futures.values():
        future.result(20)


def poison(scene, topic, key="bad"):
    """Write a record that the broker refuses, between two of its key, and many others around them."""
    scene.fill(topic, 1_000, keys=50)
    scene.stash(OutboxRecord(topic, key, "before"), OutboxRecord(topic, key, LARGE))
    scene.stash(*(OutboxRecord(topic, key, f"after {n}") for n in range(3)))
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) "
        "SELECT %s, 'k' || n %% 50, n::text::bytea FROM generate_series(1001, 2000) AS n",
        [topic],
    )


def assert_others_arrived(messages):
    """Assert that rows 1 to 2000 of the other keys have arrived, in order."""
    others = {key: values for key, values in by_key(messages).items() if key.startswith(b"k")}
    for key, values in others.items():
        numbers = [int(value) for value in values]
        assert [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n] == sorted(set(numbers)), key
    assert {int(value) for values in others.values() for value in values} == set(range(1, 2001))


@pytest.mark.parametrize("end", ["release", "skip", "dead_letter"])
def test_too_large_record_is_held_and_its_followers_wait(scene, make_topic, mode, end):
    """Only the record that the broker refuses is held, with the error; its key waits, and later goes on in order."""
    topic = make_topic(config=SMALL)
    poison(scene, topic)
    with scene.running(config=mode, limits=QUICK):
        (hold,) = wait_until(lambda: scene.count() == 4 and scene.held(), "all but the bad key is published")
        assert (hold.topic, hold.key, hold.reason) == (topic, "bad", "refused")
        assert "too large" in hold.error.lower()
        messages = scene.read(topic)
        assert_others_arrived(messages)
        assert texts(messages, "bad") == ["before"]
        if end == "release":
            alter_topic(scene.bootstrap, topic, {"max.message.bytes": "1000000"})
        assert scene.hold(end, records=[hold.record_id]) == 1
        wait_until(lambda: scene.count() == 0, "the key goes on")
        wait_until(lambda: not scene.held(), "nothing is held any more")
    expected = ["before", *([LARGE.decode()] if end == "release" else []), "after 0", "after 1", "after 2"]
    assert texts(scene.read(topic), "bad") == expected
    if end == "dead_letter":
        (letter,) = scene.read(f"{_identity(scene)}.dead-letter")
        assert (letter.key, letter.value) == (b"bad", LARGE)
        headers = dict(letter.headers)
        assert headers[ORIGIN_HEADER] == topic.encode()
        assert b"too large" in headers[ERROR_HEADER].lower()
        assert headers["outbox-id"].endswith(f":{hold.record_id}".encode())


def _identity(scene):
    return f"{scene.execute('SELECT current_database() AS name')[0].name}.public.outbox"


def test_on_poison_dead_letter_lets_the_key_go_on(scene, make_topic, topic_name, mode):
    """With on_poison: dead-letter the key goes on without an operator: the record's followers are published."""
    topic, letters = make_topic(config=SMALL), topic_name("letters")
    poison(scene, topic)
    scene.drain(config=mode | {"on_poison": "dead-letter", "dead_letter_topic": letters}, limits=QUICK)
    messages = scene.read(topic)
    assert_others_arrived(messages)
    assert texts(messages, "bad") == ["before", "after 0", "after 1", "after 2"]
    assert [message.value for message in scene.read(letters)] == [LARGE]
    assert scene.held() == []


def test_a_record_without_a_key_is_held_alone(scene, make_topic, mode):
    """Records without a key have no order: those after a refused one are published."""
    topic = make_topic(config=SMALL)
    scene.stash(*(OutboxRecord(topic, None, value) for value in ("before", LARGE, "after")))
    with scene.running(config=mode, limits=QUICK):
        (hold,) = wait_until(lambda: scene.count() == 1 and scene.held(), "all but the refused one are published")
        assert (hold.key, hold.reason) == (None, "refused")
        assert scene.hold("skip", records=[hold.record_id]) == 1
        wait_until(lambda: scene.count() == 0, "the refused one is skipped")
    assert {message.value for message in scene.read(topic)} == {b"before", b"after"}


def test_illegal_topic(scene, make_topic, mode):
    """A row with an illegal topic is held by itself, and the other topics flow."""
    topic = make_topic()
    add_illegal(scene, ("a", b"1"), ("a", b"2"), (None, b"3"))
    scene.fill(topic, 500)
    with scene.running(config=mode, limits=QUICK):
        wait_until(lambda: scene.count() == 3 and len(scene.held()) == 2, "the others are published")
        assert {(hold.topic, hold.key) for hold in scene.held()} == {("no topic!", "a"), ("no topic!", None)}
        assert all("not a legal topic name" in hold.error for hold in scene.held())
        assert scene.hold("skip", records=[hold.record_id for hold in scene.held()]) == 2
        wait_until(lambda: scene.held(topic="no topic!", key="a") and scene.count() == 1, "the next of the key is held")


def test_topic_without_authorisation_is_held_until_released(scene, make_topic, mode):
    """A missing right holds the topic, not its records; after the release all of them arrive in order."""
    topic, forbidden = make_topic(), make_topic()
    acl(scene, forbidden)
    scene.fill(forbidden, 300, keys=10)
    scene.fill(topic, 300)
    try:
        with scene.running(config=mode, limits=QUICK) as harvester:
            wait_until(lambda: scene.count() == 300 and scene.held(), "the other topic is published")
            (hold,) = scene.held()
            assert (hold.topic, hold.key, hold.record_id, hold.reason) == (forbidden, None, None, "not authorized")
            assert hold.error.endswith("; grant WRITE on it to User:ANONYMOUS")
            wait_until(lambda: hold.error in harvester.health().detail, "/healthz names right, topic and principal")
            assert f"records for topic {forbidden} are held" in harvester.health().detail
            assert harvester.health().ok
            acl(scene, forbidden, remove=True)
            assert scene.hold("release", topic=forbidden) == 1
            wait_until(lambda: scene.count() == 0, "the topic goes on")
            wait_until(lambda: harvester.health().detail == "leading", "/healthz has nothing to add")
    finally:
        acl(scene, forbidden, remove=True)
    for key, values in by_key(scene.read(forbidden)).items():
        numbers = [int(value) for value in values]
        assert [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n] == sorted(set(numbers)), key


def test_dead_letter_topic_without_authorisation(scene, make_topic, mode):
    """Bad records stay held with Kafka's refusal by the dead-letter topic; every other record is published."""
    topic, letters = make_topic(config=SMALL), make_topic()
    acl(scene, letters)
    poison(scene, topic)
    try:
        scene.drain(config=mode | {"on_poison": "dead-letter", "dead_letter_topic": letters}, limits=QUICK)
    finally:
        acl(scene, letters, remove=True)
    (hold,) = scene.held()
    assert (hold.key, hold.dead_letter) == ("bad", False)
    assert "the dead-letter topic refused it" in hold.error
    assert hold.error.endswith("grant WRITE on it to User:ANONYMOUS")
    assert_others_arrived(scene.read(topic))
    assert scene.count() == 4


def test_tracking_topic_without_authorisation_is_named(scene, make_topic, topic_name):
    """A missing right on the tracking topic ends the harvester and is named; the records' own topic is not held."""
    topic, tracking = make_topic(), topic_name("tracking")
    acl(scene, tracking)
    scene.fill(topic, 100)
    harvester = scene.harvester(config={"delivery": "exactly-once", "tracking_topic": tracking}, limits=QUICK)
    try:
        harvester.start()
        with pytest.raises(TrackingTopicError, match=f"{tracking}.*grant WRITE on it to User:ANONYMOUS"):
            harvester.join(GENEROUS_SECONDS)
    finally:
        acl(scene, tracking, remove=True)
    assert scene.held() == []
    assert scene.count() == 100


def test_dead_letter_topic_that_is_deleted_is_made_anew(scene, make_topic, topic_name):
    """The harvester makes a deleted dead-letter topic again for the next dead letter.

    Exactly-once delivery does the same, with longer backoffs: see tests/unit/harvest/test_term.py.
    """
    topic, letters = make_topic(config=SMALL), topic_name("letters")
    admin = make_admin({"bootstrap.servers": scene.bootstrap})
    kafka = {"allow.auto.create.topics": False, "topic.metadata.propagation.max.ms": 1000}
    settings = {"on_poison": "dead-letter", "dead_letter_topic": letters, "producer_kafka_config": kafka}
    with scene.running(config=settings, limits=QUICK):
        scene.stash(OutboxRecord(topic, "bad", LARGE))
        wait_until(lambda: scene.count() == 0, "it is buried")
        admin.delete_topics([letters])[letters].result(20)
        scene.stash(OutboxRecord(topic, "bad", LARGE))
        wait_until(lambda: scene.count() == 0, "the next one, too")
    assert len(scene.read(letters)) == 1


def test_deleted_topic_rests_and_the_others_flow(scene, make_topic, mode, caplog):
    """The harvester backs off from a deleted topic without holding a record, the other flows, and both go on later."""
    topic, deleted = make_topic(), make_topic()
    admin = make_admin({"bootstrap.servers": scene.bootstrap})
    settings = mode | {"producer_kafka_config": {"allow.auto.create.topics": False}}
    with caplog.at_level(logging.WARNING), scene.running(config=settings, limits=QUICK):
        scene.fill(deleted, 100, keys=5)
        wait_until(lambda: scene.count() == 0, "it works at first")
        admin.delete_topics([deleted])[deleted].result(20)
        for _ in range(3):
            scene.fill(deleted, 100, keys=5)
            scene.fill(topic, 300)
            wait_until(lambda: scene.count(f"kafka_topic = '{topic}'") == 0, "the other topic flows")
        assert scene.held() == []
        make_topic(name=deleted)
        wait_until(lambda: scene.count() == 0, "the topic goes on")
    assert len(scene.read(topic)) >= 900


def test_client_refuses_a_record(scene, make_topic, mode):
    """A record beyond the client's own limit is held, and every other record is published."""
    topic = make_topic()
    mode = {**mode, "producer_kafka_config": {"message.max.bytes": 1_000_000}}
    scene.stash(OutboxRecord(topic, "bad", b"x" * 2_000_000), OutboxRecord(topic, "bad", "1"))
    scene.fill(topic, 500, keys=10)
    with scene.running(config=mode, limits=QUICK):
        wait_until(lambda: scene.count() == 2 and scene.held(), "only the bad key is left")
        assert scene.hold("dead_letter", records=[1]) == 1
        wait_until(lambda: scene.held() and "refused it" in scene.held()[0].error, "too large for any topic")
        assert scene.count() == 2
        assert scene.hold("skip") == 1
        wait_until(lambda: scene.count() == 0, "its follower is published")
    assert texts(scene.read(topic), "bad") == ["1"]


@pytest.mark.real_broker
def test_a_raised_limit_of_the_topic_suffices(scene, kafka_bootstrap, make_topic, mode):
    """A record that is too large for its topic names both limits; raise the topic's and release it, and it arrives."""
    topic = make_topic(1)
    scene.stash(OutboxRecord(topic, "large", b"x" * 2_000_000), OutboxRecord(topic, "large", "1"))
    scene.stash(OutboxRecord(topic, "other", b"y" * 2_000_000))
    with scene.running(config=mode, limits=QUICK):
        wait_until(lambda: len(scene.held()) == 2, "both are held")
        for hold in scene.held():
            assert "max.message.bytes=1048588 and this client's message.max.bytes=16777216" in hold.error
        assert scene.hold("dead_letter", records=[3]) == 1
        wait_until(lambda: scene.count() == 2, "the dead-letter topic takes the other")
        alter_topic(kafka_bootstrap, topic, {"max.message.bytes": "5000000"})
        assert scene.hold("release", records=[1]) == 1
        wait_until(lambda: scene.count() == 0, "the released record and its follower are published")
    assert [len(message.value) for message in scene.read(topic)] == [2_000_000, 1]


def test_pause_and_resume_a_topic_and_a_key(scene, make_topic, mode):
    """A paused topic or key waits, however long its backlog, and goes on in order; the others flow."""
    topic, paused = make_topic(), make_topic()
    assert scene.hold("add", paused, reason="maintenance")
    assert not scene.hold("add", paused)
    assert scene.hold("add", topic, b"k1")
    scene.fill(paused, 3_000, keys=10)
    scene.fill(topic, 1_000, keys=10)
    with scene.running(config=mode, limits=QUICK):
        wait_until(lambda: scene.count() == 3_100, "what is not paused is published")
        scene.fill(topic, 1_000, keys=10)
        wait_until(lambda: scene.count() == 3_200, "and what comes later, too")
        assert scene.read(paused) == []
        assert scene.hold("release", topic=paused) == 1
        wait_until(lambda: scene.count() == 200, "the topic goes on")
        assert scene.hold("release", topic=topic, key="k1") == 1
        wait_until(lambda: scene.count() == 0, "the key goes on")
    for key, values in by_key(scene.read(paused)).items():
        numbers = [int(value) for value in values]
        assert numbers == sorted(numbers), key


@pytest.mark.complete
def test_pause_while_records_flow(scene, make_topic, mode):
    """A topic that is paused under load stops soon, and goes on in order after its release."""
    topic = make_topic()
    scene.fill(topic, 3_000, keys=3)
    with scene.running(config=mode, limits=QUICK | {"mark_query_records": 50}):
        wait_until(lambda: scene.count() < 2_800, "it runs")
        scene.hold("add", topic)
        seen = []

        def is_still():
            seen.append(scene.count())
            return len(seen) > 100 and seen[-1] == seen[-100]

        wait_until(is_still, "nothing moves any more")
        scene.hold("release", topic=topic)
        wait_until(lambda: scene.count() == 0, "it goes on")
    for key, values in by_key(scene.read(topic)).items():
        numbers = [int(value) for value in values]
        assert [n for i, n in enumerate(numbers) if i == 0 or numbers[i - 1] != n] == sorted(set(numbers)), key


def test_without_a_table_of_holds(database, kafka_bootstrap, make_topic, mode, caplog):
    """Without a table of holds the harvester backs off from a bad record and its key, and logs the lack once."""
    scene = Scene(database, kafka_bootstrap, holds=False)
    topic = make_topic(config=SMALL)
    with caplog.at_level(logging.WARNING):
        poison(scene, topic)
        with scene.running(config=mode, limits=QUICK):
            wait_until(lambda: scene.count() == 4, "only the bad key is left")
            assert_others_arrived(scene.read(topic))
            scene.execute("DELETE FROM outbox WHERE octet_length(kafka_value) > 20000")
            wait_until(lambda: scene.count() == 0, "the key goes on")
    assert texts(scene.read(topic), "bad")[-3:] == ["after 0", "after 1", "after 2"]
    assert len([record for record in caplog.records if "nothing can be held" in record.message]) == 1


@pytest.fixture
def role(scene):
    """A role that may harvest, and may only read the holds."""
    with scene.role("GRANT SELECT, UPDATE, DELETE ON outbox TO {role}; GRANT SELECT ON outbox_hold TO {role}") as name:
        yield name


def test_holds_that_may_not_be_read_any_more(scene, make_topic, role, mode):
    """While the holds cannot be read no record is published; the harvester does not end, and goes on with the right."""
    topic, paused = make_topic(), make_topic()
    settings = mode | {"data_source": make_conninfo(scene.database, user=role)}
    with scene.running(config=settings, limits=QUICK) as harvester:
        scene.fill(topic, 10)
        wait_until(lambda: scene.count() == 0, "it runs")
        scene.execute(f'REVOKE SELECT ON outbox_hold FROM "{role}"')
        scene.hold("add", paused)
        scene.execute("SELECT pg_sleep(1)")
        scene.fill(paused, 10)
        scene.fill(topic, 10)
        assert not harvester.join(2)
        assert scene.count() == 20
        scene.execute(f'GRANT SELECT ON outbox_hold TO "{role}"')
        wait_until(lambda: scene.count() == 10, "what is not paused goes on")
        assert len(harvester.leader_ids) <= 2, "it waits for the right, and does not mark in vain"
    assert scene.read(paused) == []


def test_holds_that_may_only_be_read(scene, make_topic, role, mode, caplog):
    """With holds that it may only read, the harvester respects them, and backs off from a bad record and its key."""
    topic, paused = make_topic(config=SMALL), make_topic()
    scene.hold("add", paused)
    scene.fill(paused, 10)
    poison(scene, topic)
    settings = mode | {"data_source": make_conninfo(scene.database, user=role)}
    with caplog.at_level(logging.WARNING), scene.running(config=settings, limits=QUICK):
        wait_until(lambda: scene.count() == 14, "all but the bad key and the paused topic is published")
        scene.execute("DELETE FROM outbox WHERE octet_length(kafka_value) > 20000")
        wait_until(lambda: scene.count() == 10, "the key goes on")
    assert len(scene.held()) == 1
    assert texts(scene.read(topic), "bad")[-3:] == ["after 0", "after 1", "after 2"]
    assert sum("missing rights on outbox_hold" in record.message for record in caplog.records) == 1


def test_partition_that_the_client_does_not_know_yet(scene, make_topic, mode):
    """A topic gets more partitions in mid-run: rows for them arrive at once, and rows for missing ones are held."""
    topic, admin = make_topic(partitions=2), make_admin({"bootstrap.servers": scene.bootstrap})

    def stash(partitions):
        scene.stash(*(OutboxRecord(topic, f"k{n}", f"{n}", partition=n) for n in partitions))

    with scene.running(config=mode, limits=QUICK):
        stash([0, 1, 2])
        wait_until(lambda: len(scene.held()) == 1 and scene.count() == 1, "a row for a missing partition is held")
        admin.create_partitions([NewPartitions(topic, 9)])[topic].result(20)
        stash(range(3, 12))
        wait_until(lambda: len(scene.held()) == 4 and scene.count() == 4, "rows for new partitions arrive")
        scene.hold("release_records", topic=topic)
        wait_until(lambda: len(scene.held()) == 3 and scene.count() == 3, "it arrives once it is released")
    assert {hold.key for hold in scene.held()} == {"k9", "k10", "k11"}
    assert all(hold.error.startswith("kafka_partition: ") for hold in scene.held())
    assert sorted(message.partition for message in scene.read(topic)) == list(range(9))


def test_wrong_clock_holds_no_record(scene, make_topic, mode, monkeypatch):
    """A topic that refuses the time of every record, as the clock is wrong, waits, and others flow: none is held."""
    topic, strict = make_topic(), make_topic(config={"message.timestamp.after.max.ms": "60000"})
    ahead = [0.0]

    class Ahead(clients.Producer):
        """A producer on a machine whose clock is ahead, as one topic sees it."""

        def produce(self, topic, *args, **options):
            if topic != strict or not ahead[0]:
                return super().produce(topic, *args, **options)
            names = ("value", "key", "partition", "on_delivery", "callback", "timestamp", "headers")
            timestamp = int((time.time() + ahead[0]) * 1000)
            return super().produce(topic, **dict(zip(names, args, strict=False)) | options | {"timestamp": timestamp})

    monkeypatch.setattr(clients, "Producer", Ahead)
    with scene.running(config=mode, limits=QUICK):
        scene.fill(strict, 100, keys=5)
        wait_until(lambda: scene.count() == 0, "it works at first")
        ahead[0] = 3_600.0
        scene.fill(strict, 100, keys=5)
        for _ in range(3):
            scene.fill(topic, 100)
            wait_until(lambda: scene.count(f"kafka_topic = '{topic}'") == 0, "the other topic flows")
        time.sleep(1.0)  # so that some are tried alone
        assert scene.held() == []
        ahead[0] = 0.0
        wait_until(lambda: scene.count() == 0, "the topic goes on")
    assert scene.held() == []
    assert len({identity_of(message) for message in scene.read(strict)}) == 200
