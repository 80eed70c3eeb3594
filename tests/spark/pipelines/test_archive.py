"""The archive: every record once, even if processes die or Spark's checkpoint is lost."""

import shutil
from datetime import UTC, datetime, timedelta, timezone
from types import SimpleNamespace

import pytest
from confluent_kafka import Consumer, KafkaError, KafkaException, TopicPartition

from devstack.frame_proxy import Api, Match
from outbox_core.errors import InvalidConfig, KafkaUnavailable, OutboxError
from outbox_core.kafka import transactions as transaction
from outbox_spark.batches import batches
from outbox_spark.config import ArchiveSettings, AuditSettings, ReplaySettings
from outbox_spark.pipelines import archive, audit, replay
from outbox_spark.pipelines.follower import RecordsMissing
from outbox_spark.tables.table import Table
from tests.kafka_reader import read_topic
from tests.queueing import eventually
from tests.raw_records import NOT_UTF8, produce_raw
from tests.spark.pipelines.lakes import FORMATS, address_of, by_duckdb, by_polars, place_of
from tests.spark.pipelines.runs import forget_last_commit, produce, run_and_die, run_once

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(900)]


_COMPLETE = pytest.mark.complete
each_format = pytest.mark.parametrize("kind", FORMATS)


@pytest.fixture
def kind():
    """Return the format of the archive, where a test has no choice."""
    return "delta"


@pytest.fixture
def place(tmp_path, kind):
    """Return the place of an archive."""
    return place_of(kind, tmp_path)


@pytest.fixture
def settings(tmp_path, make_topic, place):
    """Return settings of an archive of a fresh topic."""
    return ArchiveSettings(
        name="archive", topics=[make_topic(3)], checkpoint=str(tmp_path / "checkpoint"), small_files=3, **place
    )


def _number(outbox_id):
    return int(outbox_id.rpartition(":")[2])


def _archived(spark, settings):
    """Return the ids in the archive, as Spark, DuckDB and Polars read them, which must agree."""
    place = {"path": settings.path} if settings.path else {"iceberg": settings.iceberg.model_dump()}
    rows = archive.open_archive(spark, settings.place).read().select("outbox_id").collect()
    found = sorted(_number(row.outbox_id) for row in rows)
    assert found == sorted(map(_number, by_polars(place)["outbox_id"].to_list()))
    assert found == sorted(_number(outbox_id) for (outbox_id,) in by_duckdb(place, "SELECT outbox_id FROM found"))
    return found


@pytest.mark.parametrize("kind", ["delta", pytest.param("iceberg", marks=_COMPLETE)])
def test_archives_each_record_once(spark, settings, place, kafka_bootstrap):
    """Committed records are archived once with all their parts, aborted ones are not; small files are merged."""
    topic = settings.topics[0]
    for begin in (0, 20, 40):
        produce(kafka_bootstrap, topic, range(begin, begin + 20))
        produce(kafka_bootstrap, topic, range(9000, 9005), abort=True)
        counts = run_once(archive, spark, kafka_bootstrap, settings)
        assert counts["records"] == 20
    assert _archived(spark, settings) == list(range(60))
    table = archive.open_archive(spark, settings.place)
    assert len(table._log.files()) < 6  # each batch wrote two
    found = {(row.partition, row.offset): row for row in table.read().collect()}
    elsewhere = {(row["partition"], row["offset"]): row for row in by_polars(place).to_dicts()}
    for message in read_topic(kafka_bootstrap, topic):
        row = found[message.partition, message.offset]
        assert (row.topic, bytes(row.key), bytes(row.value)) == (topic, message.key, message.value)
        assert [(header.key, bytes(header.value)) for header in row.headers] == message.headers
        assert row.date == row.timestamp.date()
        other = elsewhere[message.partition, message.offset]
        assert (other["key"], other["value"], other["timestamp"].date()) == (message.key, message.value, row.date)
        assert [tuple(header.values()) for header in other["headers"]] == message.headers


@pytest.mark.complete
def test_survives_losses_of_the_checkpoint(spark, settings, kafka_bootstrap):
    """A deleted entry of Spark's commit log and a deleted checkpoint neither lose nor repeat records."""
    topic = settings.topics[0]
    produce(kafka_bootstrap, topic, range(30))
    run_once(archive, spark, kafka_bootstrap, settings)
    forget_last_commit(settings.checkpoint)
    produce(kafka_bootstrap, topic, range(30, 50))
    run_once(archive, spark, kafka_bootstrap, settings)
    assert _archived(spark, settings) == list(range(50))
    shutil.rmtree(settings.checkpoint)
    produce(kafka_bootstrap, topic, range(50, 60))
    assert run_once(archive, spark, kafka_bootstrap, settings)["records"] == 10
    assert _archived(spark, settings) == list(range(60))


@pytest.mark.complete
@each_format
def test_survives_a_killed_driver(spark, settings, place, kafka_bootstrap):
    """A driver killed between the archive's commit and Spark's repeats no record; replay and audit find each once."""
    topic, kafka = settings.topics[0], {"bootstrap.servers": kafka_bootstrap}
    produce(kafka_bootstrap, topic, range(30))
    run_and_die("archive", kafka_bootstrap, settings)
    assert _archived(spark, settings) == list(range(30))
    produce(kafka_bootstrap, topic, range(30, 40))
    run_once(archive, spark, kafka_bootstrap, settings)
    assert _archived(spark, settings) == list(range(40))
    side = {"archive": address_of(place)}
    compared = audit.run(spark, kafka, AuditSettings(expected={"topics": [topic]}, found=side))
    assert compared.is_clean
    assert compared.total("expected") == 40
    wanted = ReplaySettings(archive=address_of(place), name="again", topics=[topic], keys=["k1"])
    assert replay.run(spark, kafka, wanted, publish=False, say=lambda _: None)["selected"] == 8


@pytest.mark.complete
@each_format
def test_survives_a_failure_around_the_commit(spark, settings, kafka_bootstrap, monkeypatch):
    """A failure before the commit and one right behind it are tried again, and each record is there once."""
    produce(kafka_bootstrap, settings.topics[0], range(30))
    commit, failures = Table._commit, []

    def fail_twice(self, *arguments, **options):
        if not failures:
            failures.append("before")
            raise OSError("the disk has gone")
        added = commit(self, *arguments, **options)
        if len(failures) == 1:
            failures.append("behind")
            raise OSError("the disk has gone again")
        return added

    monkeypatch.setattr(Table, "_commit", fail_twice)
    run_once(archive, spark, kafka_bootstrap, settings)
    assert failures == ["before", "behind"]
    assert _archived(spark, settings) == list(range(30))


@pytest.mark.complete
def test_says_when_records_would_be_missing(spark, settings, kafka_bootstrap):
    """An archive that is behind its checkpoint is an error, so that no record is skipped."""
    produce(kafka_bootstrap, settings.topics[0], range(10))
    run_once(archive, spark, kafka_bootstrap, settings)
    shutil.rmtree(settings.path)
    produce(kafka_bootstrap, settings.topics[0], range(10, 20))
    with pytest.raises(RecordsMissing, match="delete "):
        run_once(archive, spark, kafka_bootstrap, settings)
    shutil.rmtree(settings.checkpoint)
    run_once(archive, spark, kafka_bootstrap, settings)
    assert _archived(spark, settings) == list(range(20))


@pytest.mark.complete
def test_replays_in_order_and_once(spark, settings, kafka_bootstrap, make_topic):
    """A dry run publishes no record; a replay publishes the selection in order, marked, and only once."""
    topic, target = settings.topics[0], make_topic(3)
    produce(kafka_bootstrap, topic, range(40))
    run_once(archive, spark, kafka_bootstrap, settings)
    wanted = ReplaySettings(
        archive=settings.path, name=f"again-{target}", keys=["k1", "k3"], to={topic: target}, transaction_records=5
    )
    kafka, said = {"bootstrap.servers": kafka_bootstrap}, []
    assert replay.run(spark, kafka, wanted, publish=False, say=said.append)["selected"] == 16
    assert len(said) == 1
    assert read_topic(kafka_bootstrap, target) == []
    assert replay.run(spark, kafka, wanted, publish=True, say=said.append)["published"] == 16
    again = replay.run(spark, kafka, wanted, publish=True, say=said.append)
    assert (again["published"], again["skipped"]) == (0, 16)
    replayed = read_topic(kafka_bootstrap, target)
    originals = [message for message in read_topic(kafka_bootstrap, topic) if message.key in (b"k1", b"k3")]
    marks = [("outbox-replay", wanted.name.encode())]
    for key in (b"k1", b"k3"):
        assert [(m.partition, m.value, m.headers) for m in replayed if m.key == key] == [
            (m.partition, m.value, m.headers + marks) for m in originals if m.key == key
        ]


@pytest.mark.complete
def test_a_record_that_no_calendar_or_text_holds(spark, settings, kafka_bootstrap, make_topic, topic_name):
    """Neither an unreadable header name nor a time far ahead stops archive, audit or replay."""
    topic = make_topic(3, config={"message.timestamp.after.max.ms": str(2**63 - 1)})
    target, kafka = make_topic(3), {"bootstrap.servers": kafka_bootstrap}
    settings = ArchiveSettings(**settings.model_dump() | {"topics": [topic]})
    produce_raw(kafka_bootstrap, topic, b"{}", key=b"k1", headers=[(NOT_UTF8, b"x")], timestamp_ms=2**62)
    produce(kafka_bootstrap, topic, range(4))
    assert run_once(archive, spark, kafka_bootstrap, settings)["records"] == 5
    compared = AuditSettings(expected={"topics": [topic]}, found={"archive": settings.path})
    assert audit.run(spark, kafka, compared).is_clean
    wanted, said = ReplaySettings(archive=settings.path, name=topic_name(), to={topic: target}), []
    assert replay.run(spark, kafka, wanted, publish=True, say=said.append)["published"] == 5
    assert said[0].endswith("; 1 of them without their headers")
    assert len(read_topic(kafka_bootstrap, target)) == 5


@pytest.mark.complete
def test_a_replay_of_a_time_in_any_zone(spark, settings):
    """A replay's `since` includes records of the day before in UTC, `until` excludes; its times are shown in UTC."""
    began = datetime(2026, 11, 20, 22, tzinfo=UTC)
    rows = [
        (b"k", b"v", [], "orders", 0, number, began + timedelta(hours=number), f"x:{number}") for number in range(5)
    ]
    columns = "key BINARY, value BINARY, header_list ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, "
    columns += "partition INT, offset BIGINT, timestamp TIMESTAMP, outbox_id STRING"
    records = archive.archive(spark.createDataFrame(rows, columns))
    table = archive.open_archive(spark, settings.path)
    table.recover()
    table.append(records, {("orders", 0): 5})
    east = timezone(timedelta(hours=5))
    wanted = ReplaySettings(
        archive=settings.path,
        name="again",
        since=(began + timedelta(hours=1)).astimezone(east),
        until=(began + timedelta(hours=3)).astimezone(east),
    )
    said = []
    counts = replay.run(spark, {}, wanted, publish=False, say=said.append)
    assert counts["selected"] == 2
    assert said[0].endswith("from 2026-11-20 23:00:00+00:00 to 2026-11-21 00:00:00+00:00")


class _Refusing:
    """A producer for which the third record is too large."""

    def __init__(self):
        self.calls = []

    def begin_transaction(self):
        self.calls.append("begin")

    def produce(self, *_, **__):
        self.calls.append("produce")
        if self.calls.count("produce") == 3:
            raise KafkaException(KafkaError(KafkaError.MSG_SIZE_TOO_LARGE))

    def abort_transaction(self, _):
        self.calls.append("abort")

    def purge(self, **_):
        pass

    def flush(self, _):
        return 0

    def poll(self, _):
        return 0

    def __len__(self):
        return 0


def test_a_replay_names_a_record_that_cannot_be_sent(settings, monkeypatch):
    """A record that the client refuses is named by its offset, and its transaction is aborted."""
    wanted = ReplaySettings(archive=settings.path, name="again")
    refusing = _Refusing()
    monkeypatch.setattr(transaction, "make_producer", lambda _: refusing)
    producer = transaction.TransactionalProducer({"transactional.id": "t"}, timeout_seconds=1)
    rows = [{"offset": offset, "key": b"k", "value": b"v", "headers": []} for offset in range(10, 20)]
    shard = replay._Shard({}, wanted, "orders", 0)
    with pytest.raises(replay.ReplayFailed, match=r"at offset 12 cannot be sent to again: .*too large"):
        shard._transaction(producer, None, "again", rows)
    assert refusing.calls == ["begin", "produce", "produce", "produce", "abort"]


def test_replays_have_ids_of_their_own(settings):
    """No two replays share an id, by whatever names and topics; one without a dot in its name keeps the id it had."""
    ids = {
        replay._Shard({}, ReplaySettings(archive=settings.path, name=name), topic, 0)._name
        for name, topic in [("a.b", "c"), ("a", "b.c"), ("a.b.c", "c"), ("a", "c")]
    }
    assert len(ids) == 4
    assert "outbox-replay.a.b.c.0" in ids


def test_a_position_that_kafka_does_not_tell_ends_a_replay(settings):
    """An error in place of the position is no sign that nothing is published."""
    shard = replay._Shard({}, ReplaySettings(archive=settings.path, name="again"), "orders", 0)
    refused = SimpleNamespace(offset=-1001, error=KafkaError(KafkaError.GROUP_AUTHORIZATION_FAILED))
    consumer = SimpleNamespace(committed=lambda *_, **__: [refused])
    with pytest.raises(KafkaException, match="GROUP_AUTHORIZATION_FAILED"):
        shard._begin(SimpleNamespace(init=lambda _: None), consumer, "again")


def test_large_records_are_replayed_in_small_transactions():
    """A transaction has so many records at most, and no record is added to one of 32 MiB."""
    rows = [{"key": b"k", "value": bytes(size), "headers": []} for size in (2**24, 2**24, 2**24, *[1] * 10)]
    assert [len(batch) for batch in batches(iter(rows), 5, replay._MOST_BYTES, replay._parts)] == [2, 5, 5, 1]
    assert [len(batch) for batch in batches(iter(rows[3:]), 5, replay._MOST_BYTES, replay._parts)] == [5, 5]


class _Row(dict):
    """A row of an archive that calls a function when its value is read."""

    def __init__(self, offset, target, meanwhile=lambda: None):
        super().__init__(offset=offset, target=target, key=b"k", value=b"%d" % offset, headers=[])
        self._meanwhile = meanwhile

    def __getitem__(self, name):
        if name == "value":
            self._meanwhile()
        return super().__getitem__(name)


def _publish(shard, rows):
    """Publish until it succeeds, as Spark tries a task again; return the number of attempts."""
    for attempt in range(1, 5):
        try:
            shard.publish(iter(rows))
        except OutboxError:
            continue
        return attempt
    raise AssertionError("it was never published")


def test_a_replay_is_not_torn_by_a_late_commit(kafka, settings, make_topic, topic_name):
    """A late copy of a commit, in the middle of the next transaction, repeats none of that transaction's records."""
    target, arrived = make_topic(1), []
    wanted = ReplaySettings(archive=settings.path, name=topic_name(), transaction_records=2)
    with kafka.frame_proxied(2) as frames:
        trap = frames.hold(Match(Api.END_TXN, where=lambda request: wanted.name in (request.transactional_id or "")))
        looks = Consumer({"bootstrap.servers": kafka.bootstrap, "group.id": "l", "isolation.level": "read_uncommitted"})

        def deliver():
            if arrived:
                return
            place = TopicPartition(target, 0)
            # Two records and the end of their transaction, and one more.
            eventually(lambda: looks.get_watermark_offsets(place, timeout=10)[1] > 3)
            trap.deliver()
            assert trap.wait_until_answered(20)
            arrived.append(trap.error_code)

        rows = [_Row(0, target), _Row(1, target), _Row(2, target), _Row(3, target, deliver), _Row(4, target)]
        shard = replay._Shard({"bootstrap.servers": frames.bootstrap}, wanted, "orders", 0)
        assert _publish(shard, rows) == 1
        looks.close()
    assert arrived not in ([], [0])
    assert [message.value for message in read_topic(kafka.bootstrap, target)] == [b"0", b"1", b"2", b"3", b"4"]


@pytest.mark.complete
def test_a_replay_does_not_come_back_after_its_successor(kafka, settings, make_topic, topic_name):
    """A replaced task whose commit was repeated publishes none of its successor's records again."""
    target = make_topic(1)
    wanted = ReplaySettings(archive=settings.path, name=topic_name(), transaction_records=1)
    rows = [_Row(offset, target) for offset in range(3)]

    def successor():
        yield rows[0]
        replay._Shard({"bootstrap.servers": kafka.bootstrap}, wanted, "orders", 0).publish(iter(rows))
        yield from rows[1:]

    with kafka.frame_proxied(2) as frames:
        trap = frames.hold(Match(Api.END_TXN, where=lambda request: wanted.name in (request.transactional_id or "")))
        try:
            replay._Shard({"bootstrap.servers": frames.bootstrap}, wanted, "orders", 0).publish(successor())
        except KafkaUnavailable:
            assert not trap.wait_until_held(0)  # fenced
    assert [message.value for message in read_topic(kafka.bootstrap, target)] == [b"0", b"1", b"2"]


@pytest.mark.complete
def test_a_replay_needs_its_partitions(spark, settings, kafka_bootstrap, make_topic):
    """A target with fewer partitions than the archive is refused before any record is published."""
    topic, target = settings.topics[0], make_topic(1)
    produce(kafka_bootstrap, topic, range(5))
    run_once(archive, spark, kafka_bootstrap, settings)
    wanted = ReplaySettings(archive=settings.path, name="too-small", to={topic: target})
    with pytest.raises(InvalidConfig, match="keep_partitions"):
        replay.run(spark, {"bootstrap.servers": kafka_bootstrap}, wanted, publish=True, say=lambda _: None)
