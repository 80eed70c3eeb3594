"""Harvesting on a real Postgres and broker: every record arrives, once, in order, byte for byte."""

import random
import threading

import psycopg
import pytest

from outbox_core.record import OutboxRecord
from outbox_core.schema import TableName, create_table_sql
from tests.harvesting import ID_HEADER, FaultyProducer, Scene, by_key, identity_of, wait_until

EVERY_BYTE = bytes(range(256))
AWKWARD = "\u00e9\u4e2d\U0001f600\u202e{}%s\\n'\""

SEED_001_TABLE = """
CREATE TABLE IF NOT EXISTS outbox (
id BIGSERIAL PRIMARY KEY,
create_time TIMESTAMP WITH TIME ZONE NOT NULL,
kafka_topic VARCHAR(249) NOT NULL,
kafka_key VARCHAR(100) NOT NULL, -- pick your own maximum key size
kafka_value VARCHAR(10000), -- pick your own maximum value size
kafka_header_keys TEXT[] NOT NULL,
kafka_header_values TEXT[] NOT NULL,
leader_id UUID
)
"""
SEED_001_INSERT = """
INSERT INTO outbox (
create_time,
kafka_topic,
kafka_key,
kafka_value,
kafka_header_keys,
kafka_header_values
)
VALUES (NOW(), $1, $2, $3, $4, $5)
"""


class _Undo(Exception):
    """The exception that rolls a transaction or a savepoint back."""


class _Application(threading.Thread):
    """A thread whose transactions count up shared keys under row locks, and roll back now and then."""

    def __init__(self, scene, topic, seed):
        super().__init__()
        self._scene, self._topic, self._random = scene, topic, random.Random(seed)
        self.error = None

    def run(self):
        try:
            with self._scene.connect(autocommit=True) as connection:
                for _ in range(60):
                    self._transact(connection)
        except BaseException as error:
            self.error = error

    def _transact(self, connection):
        keys = sorted(self._random.sample(range(12), self._random.randint(1, 4)))
        try:
            with connection.transaction():
                for key in keys:
                    self._count_up(connection, key)
                self._undo_if(self._random.random() < 0.2)
        except _Undo:
            pass

    def _count_up(self, connection, key):
        undo = self._random.random() < 0.2
        try:
            with connection.transaction():  # a savepoint
                (version,) = connection.execute(
                    "UPDATE business SET version = version + 1 WHERE key = %s RETURNING version", [key]
                ).fetchone()
                self._scene.stasher.stash(connection, OutboxRecord(self._topic, key, str(version)))
                self._undo_if(undo)
        except _Undo:
            pass

    @staticmethod
    def _undo_if(undo):
        if undo:
            raise _Undo


def test_concurrent_transactions_arrive_all_once_in_order(scene, make_topic):
    """Of interleaved transactions, committed, rolled back and half rolled back, exactly the committed part arrives."""
    topic = make_topic()
    scene.execute("CREATE TABLE business AS SELECT key, 0 AS version FROM generate_series(0, 11) AS key")
    with scene.running(elector_factory=None, limits={"mark_query_records": 7, "max_in_flight_records": 20}):
        applications = [_Application(scene, topic, seed) for seed in range(6)]
        for application in applications:
            application.start()
        for application in applications:
            application.join()
            assert application.error is None
        wait_until(lambda: scene.count() == 0, "the outbox is empty")
    versions = scene.execute("SELECT key, version FROM business")
    assert sum(row.version for row in versions) > 300
    expected = {str(row.key).encode(): [b"%d" % n for n in range(1, row.version + 1)] for row in versions}
    assert by_key(scene.read(topic)) == expected


def test_late_commit_of_a_lower_id_is_not_lost(scene, make_topic):
    """A row whose transaction commits after higher ids have been harvested is still found."""
    topic = make_topic()
    with scene.running(elector_factory=None), scene.connect() as late:
        scene.stasher.stash(late, OutboxRecord(topic, "late", b"late"))
        for number in range(10):
            scene.stash(OutboxRecord(topic, f"early-{number % 3}", b"%d" % number))
        assert len(scene.read(topic, count=10)) == 10
        late.commit()
        messages = scene.read(topic, count=11)
    late_one = next(message for message in messages if message.key == b"late")
    assert identity_of(late_one) == 1
    assert sorted(identity_of(message) for message in messages) == list(range(1, 12))


def test_everything_arrives_byte_for_byte(scene, make_topic):
    """Headers, tombstones, empty and binary values, non-ASCII text and keyless records arrive byte for byte."""
    topic = make_topic()
    headers = [("a", b"1"), ("a", "2"), ("none", None), ("bytes", EVERY_BYTE), ("empty", b""), (AWKWARD, AWKWARD)]
    records = [
        OutboxRecord(topic, "headers", b"v", headers),
        OutboxRecord(topic, "tombstone"),
        OutboxRecord(topic, "empty", b""),
        OutboxRecord(topic, "bytes", EVERY_BYTE * 300),
        OutboxRecord(topic, AWKWARD, AWKWARD),
        OutboxRecord(topic, "", "empty key"),
        OutboxRecord(topic, None, "no key"),
        OutboxRecord(topic, None, None),
        OutboxRecord(topic, 7, {"total": 42, "name": "\u00e9"}),
    ]
    scene.stash(*records)
    scene.drain(elector_factory=None, config={"id_header": ""})
    found = {(message.key, message.value, tuple(message.headers)) for message in scene.read(topic)}
    sent_headers = tuple((name, value.encode() if isinstance(value, str) else value) for name, value in headers)
    assert found == {
        (b"headers", b"v", sent_headers),
        (b"tombstone", None, ()),
        (b"empty", b"", ()),
        (b"bytes", EVERY_BYTE * 300, ()),
        (AWKWARD.encode(), AWKWARD.encode(), ()),
        (b"", b"empty key", ()),
        (None, b"no key", ()),
        (None, None, ()),
        (b"7", '{"total":42,"name":"\u00e9"}'.encode(), ()),
    }


def test_explicit_partitions_are_kept(scene, make_topic):
    """A record with a partition goes there, against its key's hash; records without one go by their key."""
    topic = make_topic()
    scene.stash(
        *(OutboxRecord(topic, "key", f"to {partition}", partition=partition) for partition in (3, 0, 2, 1)),
        *(OutboxRecord(topic, "key", f"anywhere {number}") for number in range(8)),
    )
    scene.drain()
    messages = scene.read(topic)
    assert {(m.value, m.partition) for m in messages if m.value.startswith(b"to")} == {
        (b"to %d" % partition, partition) for partition in range(4)
    }
    assert len({m.partition for m in messages if m.value.startswith(b"anywhere")}) == 1
    assert len(messages) == 12


def test_id_header(scene, make_topic):
    """Every record names its outbox and row in a header, after the application's own headers."""
    topic = make_topic()
    scene.stash(OutboxRecord(topic, "k", "v", [("own", "x")]))
    scene.drain()
    (message,) = scene.read(topic)
    name = scene.execute("SELECT current_database() AS name")[0].name
    assert message.headers == [("own", b"x"), (ID_HEADER, f"{name}.public.outbox:1".encode())]


def test_id_header_has_the_names_that_are_configured(scene, make_topic):
    """The settings decide the names of the header and of the outbox."""
    topic = make_topic()
    scene.stash(OutboxRecord(topic, "k", "v"))
    scene.drain(config={"id_header": "row", "outbox_name": "billing"})
    (message,) = scene.read(topic)
    assert message.headers == [("row", b"billing:1")]


def test_table_and_insert_of_seed_001(database, kafka_bootstrap, make_topic):
    """Goharvest's own table, written with the plain INSERT of its documentation, is harvested unchanged."""
    topic = make_topic()
    scene = Scene(database, kafka_bootstrap, layout=None)
    scene.execute(SEED_001_TABLE)
    rows = [
        (topic, "hello", "world", ["applicationId"], ["my-app"]),
        (topic, "hello", AWKWARD, ["a", "a"], ["1", AWKWARD]),
        (topic, "hello", None, [], []),
        (topic, AWKWARD, "", [], []),
    ]
    with psycopg.connect(database, cursor_factory=psycopg.RawCursor) as connection:
        for row in rows:
            connection.execute(SEED_001_INSERT, row)
    scene.drain(elector_factory=None, config={"id_header": ""})
    messages = scene.read(topic)
    assert [(m.value, m.headers) for m in messages if m.key == b"hello"] == [
        (b"world", [("applicationId", b"my-app")]),
        (AWKWARD.encode(), [("a", b"1"), ("a", AWKWARD.encode())]),
        (None, []),
    ]
    assert [(m.value, m.headers) for m in messages if m.key == AWKWARD.encode()] == [(b"", [])]


def test_text_layout(database, kafka_bootstrap, make_topic):
    """A table of `outbox schema --layout text` is harvested like the one of the seed."""
    topic = make_topic()
    scene = Scene(database, kafka_bootstrap, layout="text")
    scene.stash(OutboxRecord(topic, "k", AWKWARD, [("h", AWKWARD)]), OutboxRecord(topic, "k", None))
    scene.drain()
    messages = scene.read(topic)
    assert [m.value for m in messages] == [AWKWARD.encode(), None]
    assert messages[0].headers[0] == ("h", AWKWARD.encode())


def test_two_outboxes_on_one_database(database, kafka_bootstrap, make_topic):
    """Outboxes of other names or in other schemas have leaders of their own, which leave the others' rows alone."""
    with psycopg.connect(database) as connection:
        connection.execute('CREATE SCHEMA "Billing"')
    tables = ["outbox", "other", '"Billing".outbox']
    scenes = [Scene(database, kafka_bootstrap, table=table) for table in tables]
    topics = [make_topic() for _ in scenes]
    try:
        for scene, topic in zip(scenes, topics, strict=True):
            scene.fill(topic, 50)
        for position in (0, 2):
            scenes[position].harvester(elector_factory=None, name=f"of {tables[position]}").start()
        for position in (0, 2):
            wait_until(lambda position=position: scenes[position].count() == 0, f"{tables[position]} is empty")
        assert all(scenes[position].harvesters[0].is_leader for position in (0, 2))
        assert scenes[1].count("leader_id IS NULL") == 50
        scenes[1].drain(elector_factory=None)
    finally:
        for scene in scenes:
            scene.close()
    for topic, outbox in zip(topics, ["public.outbox", "public.other", "Billing.outbox"], strict=True):
        messages = scenes[0].read(topic)
        assert sorted(int(m.value) for m in messages) == list(range(1, 51))
        assert {m.headers[0][1].split(b".", 1)[1].rpartition(b":")[0].decode() for m in messages} == {outbox}


_COLUMNS = create_table_sql(TableName("outbox")).partition("(\n")[2].partition("\n)")[0]
_FAMILIES = {
    "partitioned by id": [
        f"CREATE TABLE outbox ({_COLUMNS}) PARTITION BY HASH (id)",
        "CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 0)",
        "CREATE TABLE outbox_1 PARTITION OF outbox FOR VALUES WITH (MODULUS 2, REMAINDER 1)",
    ],
    "inherited": [
        f"CREATE TABLE outbox ({_COLUMNS})",
        "CREATE TABLE outbox_child (PRIMARY KEY (id)) INHERITS (outbox)",
        """CREATE FUNCTION route() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
             IF NEW.id % 2 = 0 THEN RETURN NEW; END IF;
             INSERT INTO outbox_child VALUES (NEW.*); RETURN NULL; END $$""",
        "CREATE TRIGGER route BEFORE INSERT ON outbox FOR EACH ROW EXECUTE FUNCTION route()",
    ],
    "of integers": [f"CREATE TABLE outbox ({_COLUMNS})".replace("bigint", "integer")],
}


@pytest.mark.parametrize("family", _FAMILIES)
def test_unusual_tables(database, kafka_bootstrap, make_topic, family):
    """A partitioned table, one with children and one with 32-bit ids are harvested completely, once, in order."""
    topic = make_topic()
    scene = Scene(database, kafka_bootstrap, layout=None)
    for statement in _FAMILIES[family]:
        scene.execute(statement)
    scene.fill(topic, 400, keys=5)
    scene.drain(limits={"mark_query_records": 30})
    found = by_key(scene.read(topic))
    assert found == {b"k%d" % key: [b"%d" % n for n in range(1, 401) if n % 5 == key] for key in range(5)}


def test_a_hot_key_does_not_hold_up_the_others(scene, make_topic):
    """Keys behind thousands of records of one key arrive while most of those still wait."""
    topic = make_topic()
    scene.fill(topic, 5000, keys=1, prefix="hot")
    scene.fill(topic, 100, keys=10, prefix="cool")
    limits = {"mark_query_records": 100, "max_in_flight_records": 200, "lane_capacity": 50}
    harvester = scene.harvester(limits=limits)
    harvester.start()
    wait_until(lambda: scene.count("kafka_key LIKE 'cool%'") == 0, "the other keys are through")
    assert scene.count("kafka_key LIKE 'hot%'") > 2000
    harvester.stop()
    harvester.join()
    hot = by_key(scene.read(topic))[b"hot0"]
    assert hot == [b"%d" % n for n in range(1, len(hot) + 1)]


@pytest.mark.parametrize(
    "limits",
    [
        {"max_in_flight_records": 1},
        {"max_in_flight_records": 3, "mark_query_records": 2, "lane_capacity": 1},
        {"max_in_flight_records": 50, "mark_query_records": 1},
    ],
    ids=str,
)
def test_tiny_limits(scene, make_topic, limits):
    """Harvesting works with the smallest limits, and never exceeds the limit in flight."""
    topic = make_topic()
    scene.fill(topic, 60, keys=4)
    producer = FaultyProducer(scene.config(limits=limits).producer_settings())
    harvester = scene.drain(limits=limits, producer_factory=lambda: producer)
    assert harvester.in_flight_records == 0
    assert 0 < producer.longest_queue <= limits["max_in_flight_records"]
    assert by_key(scene.read(topic)) == {
        b"k%d" % key: [b"%d" % n for n in range(1, 61) if n % 4 == key] for key in range(4)
    }
