"""Topics read by ranges of offsets, without Spark: planning with Hypothesis, reading from a real broker."""

import json
from datetime import UTC, datetime

import pytest
from confluent_kafka import Producer, TopicPartition
from confluent_kafka.admin import AdminClient
from hypothesis import given
from hypothesis import strategies as st

from devstack.processes import wait_until
from outbox_core.errors import InvalidConfig, KafkaUnavailable
from outbox_spark.topics.ranges import (
    LATEST,
    OffsetRange,
    RecordsExpired,
    TopicLog,
    parse_offsets,
    plan_batch,
    ranges_between,
    read_range,
)
from outbox_spark.topics.source import KafkaSourceOptions, _StreamReader, to_arrow
from tests.raw_records import NOT_UTF8, produce_raw

PARTITIONS = st.dictionaries(
    st.integers(0, 5).map(lambda number: ("t", number)), st.tuples(st.integers(0, 50), st.integers(0, 60)), min_size=1
)


@given(PARTITIONS, st.one_of(st.none(), st.integers(1, 100)))
def test_batches_cover_everything_once(partitions, limit):
    """Successive batches, from any start, read every offset once, none beyond the end, at most the limit or so."""
    firsts = {place: first for place, (first, _) in partitions.items()}
    ends = {place: first + length for place, (first, length) in partitions.items()}
    start, seen = {}, []
    for _ in range(1000):
        end = plan_batch(start, ends, firsts, limit)
        ranges = ranges_between(start, end, firsts)
        if end == start or (not ranges and start):
            break
        if limit is not None:
            assert sum(map(len, ranges)) <= max(limit, limit + len(partitions))
        seen += [(found.partition, offset) for found in ranges for offset in range(found.first, found.end)]
        start = end
    wanted = [(p, offset) for (_, p), (first, length) in partitions.items() for offset in range(first, first + length)]
    assert sorted(seen) == sorted(wanted)


@given(PARTITIONS, st.integers(1, 20))
def test_ranges_are_split_without_gaps(partitions, pieces):
    """More tasks than partitions read the same offsets, each once."""
    firsts = {place: first for place, (first, _) in partitions.items()}
    ends = {place: first + length for place, (first, length) in partitions.items()}
    whole = ranges_between(firsts, ends, firsts)
    split = ranges_between(firsts, ends, firsts, pieces)

    def offsets(ranges):
        return sorted((found.partition, offset) for found in ranges for offset in range(found.first, found.end))

    assert offsets(split) == offsets(whole)
    assert all(len(found) for found in split)


def test_a_batch_never_goes_back():
    """A partition whose end is below the start (a topic made anew) yields an empty range, not a negative one."""
    assert plan_batch({("t", 0): 9}, {("t", 0): 4}, {("t", 0): 0}, None) == {("t", 0): 9}


def test_a_batch_of_a_topic_that_is_no_longer_followed():
    """A batch that Spark repeats is read as it was planned, though one of its topics is not followed any more."""
    start, end = {("t", 0): 3, ("gone", 0): 5}, {("t", 0): 4, ("gone", 0): 7}
    assert ranges_between(start, end, {("t", 0): 0}) == [OffsetRange("t", 0, 3, 4), OffsetRange("gone", 0, 5, 7)]


class _Log:
    """A log of one partition that ends at 4."""

    topic_id = "first"

    def bounds(self):
        return {("t", 0): 0}, {("t", 0): 4}

    def ids(self):
        return {"t": self.topic_id}


@pytest.mark.parametrize("available_now", [True, False])
def test_a_topic_made_anew_is_noticed(available_now):
    """A topic that ends before the position already read has lost data, which is an error unless it is allowed."""
    options = {"kafka.bootstrap.servers": "h:1", "subscribe": "t"}
    reader = _StreamReader(KafkaSourceOptions.of(options, streaming=True))
    lenient = _StreamReader(KafkaSourceOptions.of({**options, "failOnDataLoss": "false"}, streaming=True))
    for each in (reader, lenient):
        each.__dict__["_log"] = _Log()
        if available_now:
            each.prepareForTriggerAvailableNow()
    limit = reader.getDefaultReadLimit()
    assert reader.latestOffset({"t": {"0": 3}}, limit) == {"t": {"0": 4, "id": "first"}}
    with pytest.raises(RecordsExpired, match=r"t\[0\] was read up to offset 9, and now ends at 4"):
        reader.latestOffset({"t": {"0": 9}}, limit)
    assert lenient.latestOffset({"t": {"0": 9}}, limit) == {"t": {"0": 9, "id": "first"}}
    before = {"t": {"0": 3, "id": "another"}}
    with pytest.raises(RecordsExpired, match="topic t was deleted and made anew"):
        reader.latestOffset(before, limit)
    end = lenient.latestOffset(before, limit)
    assert [part.value for part in lenient.partitions(before, end)] == [OffsetRange("t", 0, 0, 4)]
    reader._log.topic_id = "later"
    with pytest.raises(RecordsExpired, match="topic t was deleted and made anew"):
        reader.partitions({"t": {"0": 3, "id": "first"}}, {"t": {"0": 4, "id": "first"}})


@pytest.mark.parametrize("text", ["", "first", "{}", '{"t": 3}', '{"t": {"0": "x"}}', '{"t": {"0": -3}}', "[1]"])
def test_offsets_that_are_none_are_refused(text):
    """Text that is no position is refused by the name of its option."""
    with pytest.raises(InvalidConfig, match="must be earliest, latest, or JSON"):
        parse_offsets(text)


def test_offsets_as_spark_writes_them():
    """Offsets are words, in upper or lower case, or JSON."""
    assert parse_offsets(" Earliest ") == "earliest"
    assert parse_offsets('{"t": {"0": 17, "1": -2}}') == {("t", 0): 17, ("t", 1): -2}


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"subscribe": "t"}, "kafka.bootstrap.servers is missing"),
        ({"kafka.bootstrap.servers": "h:1"}, "subscribe is missing"),
        ({"kafka.bootstrap.servers": "h:1", "subscribe": " , "}, "subscribe must not be empty"),
        (
            {"kafka.bootstrap.servers": "h:1", "subscribe": "t", "maxOffsetsPerTrigger": "0"},
            "maxOffsetsPerTrigger must be 1 or more",
        ),
        (
            {"kafka.bootstrap.servers": "h:1", "subscribe": "t", "failOnDataLoss": "perhaps"},
            "failOnDataLoss must be true or false",
        ),
        (
            {"kafka.bootstrap.servers": "h:1", "subscribe": "t", "startingOffset": "1"},
            "startingoffset unknown field; did you mean startingOffsets",
        ),
        ({"kafka.bootstrap.servers": "h:1", "subscribe": "t", "path": "/x"}, "takes no path"),
    ],
)
def test_wrong_options_are_named(options, problem):
    """A missing, unknown or impossible option is refused by name, with the reason."""
    with pytest.raises(InvalidConfig, match=f"outbox_kafka: .*{problem}"):
        KafkaSourceOptions.of(options, streaming=True)


def test_kafka_settings_are_passed_on():
    """The prefix `kafka.` is removed from settings, and `bootstrap.servers` may stand without it."""
    options = KafkaSourceOptions.of(
        {"bootstrap.servers": "h:1", "subscribe": "a, b", "kafka.client.rack": "r"}, streaming=True
    )
    assert options.kafka == {"bootstrap.servers": "h:1", "client.rack": "r"}
    assert options.topics == ("a", "b")
    assert options.starting == "latest"
    assert KafkaSourceOptions.of({"bootstrap.servers": "h:1", "subscribe": "a"}, streaming=False).starting == "earliest"


def produce(bootstrap, topic, values, *, transactional_id="", commit=True, headers=None):
    """Write to partition 0, in a transaction if there is an id for it."""
    settings = {"bootstrap.servers": bootstrap}
    producer = Producer(settings | {"transactional.id": transactional_id} if transactional_id else settings)
    if transactional_id:
        producer.init_transactions()
        producer.begin_transaction()
    for value in values:
        producer.produce(topic, str(value), partition=0, headers=headers)
    producer.flush()
    if transactional_id:
        (producer.commit_transaction if commit else producer.abort_transaction)()
    return producer


def values_of(settings, wanted, **options):
    """Return the numbers in a range."""
    return [int(message.value()) for batch in read_range(settings, wanted, **options) for message in batch]


@pytest.mark.real_broker
def test_ranges_end_at_markers_and_aborted_records(kafka_bootstrap, make_topic):
    """A range with aborted records and markers, even if only those, ends, and yields the committed records."""
    topic = make_topic(1)
    kafka = {"bootstrap.servers": kafka_bootstrap}
    produce(kafka_bootstrap, topic, range(3), transactional_id=f"{topic}-a")  # 0..2, marker 3
    produce(kafka_bootstrap, topic, range(90, 95), transactional_id=f"{topic}-b", commit=False)  # 4..8, marker 9
    log = TopicLog(kafka, [topic])
    assert log.bounds()[1] == {(topic, 0): 10}
    assert values_of(kafka, OffsetRange(topic, 0, 0, 10)) == [0, 1, 2]
    assert values_of(kafka, OffsetRange(topic, 0, 3, 10)) == []
    assert values_of(kafka, OffsetRange(topic, 0, 1, 3)) == [1, 2]
    produce(kafka_bootstrap, topic, [7])
    assert values_of(kafka, OffsetRange(topic, 0, 3, 10)) == []
    assert values_of(kafka, OffsetRange(topic, 0, 0, 11)) == [0, 1, 2, 7]
    log.close()


@pytest.mark.real_broker
def test_the_end_is_what_is_stable(kafka_bootstrap, make_topic):
    """Records behind an open transaction are not there yet, and appear when it has ended."""
    topic = make_topic(1)
    kafka = {"bootstrap.servers": kafka_bootstrap}
    produce(kafka_bootstrap, topic, [1])
    producer = Producer({"bootstrap.servers": kafka_bootstrap, "transactional.id": f"{topic}-open"})
    producer.init_transactions()
    producer.begin_transaction()
    producer.produce(topic, b"2", partition=0)
    producer.flush()
    produce(kafka_bootstrap, topic, [3])
    log = TopicLog(kafka, [topic])
    assert log.bounds()[1] == {(topic, 0): 1}
    producer.commit_transaction()
    while (end := log.bounds()[1][topic, 0]) < 4:
        pass
    assert values_of(kafka, OffsetRange(topic, 0, 0, end)) == [1, 2, 3]
    log.close()


@pytest.mark.real_broker
def test_lost_records_are_an_error_unless_allowed(kafka_bootstrap, make_topic):
    """A range whose beginning retention has removed fails with the offsets, or begins later if that is allowed."""
    topic = make_topic(1)
    kafka = {"bootstrap.servers": kafka_bootstrap}
    produce(kafka_bootstrap, topic, range(10))
    admin = AdminClient(kafka)
    for future in admin.delete_records([TopicPartition(topic, 0, 6)]).values():
        future.result(30)
    with pytest.raises(RecordsExpired, match="offsets 2 to 5 were removed"):
        values_of(kafka, OffsetRange(topic, 0, 2, 10))
    assert values_of(kafka, OffsetRange(topic, 0, 2, 10), fail_on_loss=False) == [6, 7, 8, 9]
    assert values_of(kafka, OffsetRange(topic, 0, 2, 5), fail_on_loss=False) == []
    assert values_of(kafka, OffsetRange(topic, 0, 0, 0)) == []  # of nothing, nothing is lost


@pytest.mark.real_broker
def test_spark_notices_a_topic_made_anew(spark, kafka_bootstrap, make_topic, tmp_path):
    """A stream fails at its next batch, however long the new topic is; with failOnDataLoss=false it reads all of it."""
    topic = make_topic(1)
    produce(kafka_bootstrap, topic, range(5))

    def read_on(**options):
        reader = spark.readStream.format("outbox_kafka").option("kafka.bootstrap.servers", kafka_bootstrap)
        reader = reader.options(subscribe=topic, startingOffsets="earliest", **options).load()
        query = reader.writeStream.option("checkpointLocation", str(tmp_path / "checkpoint"))
        rows = []
        query.foreachBatch(lambda batch, _: rows.extend(row.value.decode() for row in batch.collect())).trigger(
            availableNow=True
        ).start().awaitTermination(120)
        return rows

    assert len(read_on()) == 5
    admin = AdminClient({"bootstrap.servers": kafka_bootstrap})
    admin.delete_topics([topic])[topic].result(30)
    assert wait_until(lambda: topic not in admin.list_topics(timeout=10).topics, 30)
    make_topic(1, name=topic)
    produce(kafka_bootstrap, topic, range(100, 120))
    with pytest.raises(Exception, match=f"topic {topic} was deleted and made anew"):
        read_on()
    assert len(read_on(failOnDataLoss="false")) == 20
    assert len(read_on()) == 0


@pytest.mark.real_broker
def test_positions_by_words_and_numbers(kafka_bootstrap, make_topic, topic_name):
    """-2 and -1 stand for the ends, unnamed partitions for the earliest or latest; unknown partitions are refused."""
    topic = make_topic(2)
    kafka = {"bootstrap.servers": kafka_bootstrap}
    produce(kafka_bootstrap, topic, range(5))
    log = TopicLog(kafka, [topic])
    assert log.starting({(topic, 0): -1}) == {(topic, 0): 5, (topic, 1): 0}
    assert log.starting({(topic, 1): 0}, others=LATEST) == {(topic, 0): 5, (topic, 1): 0}
    assert log.starting({(topic, 0): 3, (topic, 1): -2}) == {(topic, 0): 3, (topic, 1): 0}
    with pytest.raises(InvalidConfig, match=r"\[7\], which is not there"):
        log.starting({(topic, 7): 0})
    log.close()
    with pytest.raises((InvalidConfig, KafkaUnavailable), match="cannot be read"):
        TopicLog(kafka, [topic_name("missing")]).bounds()


@pytest.mark.real_broker
def test_headers_that_cannot_be_read_are_null(kafka_bootstrap, make_topic):
    """A record with a header name that is not UTF-8 is a row whose headers are NULL; its neighbours keep theirs."""
    topic = make_topic(1)
    for name in (b"h", NOT_UTF8, b"h"):
        produce_raw(kafka_bootstrap, topic, b"v", headers=[(b"outbox-id", b"o:1"), (name, b"1")])
    produce(kafka_bootstrap, topic, ["v"])
    (batch,) = read_range({"bootstrap.servers": kafka_bootstrap}, OffsetRange(topic, 0, 0, 4))
    rows = to_arrow(batch, "outbox-id").to_pylist()
    assert [row["outbox_id"] for row in rows] == ["o:1", None, "o:1", None]
    assert [None if row["headers"] is None else len(row["headers"]) for row in rows] == [2, None, 2, 0]
    assert [None if row["header_list"] is None else len(row["header_list"]) for row in rows] == [2, None, 2, 0]


@pytest.mark.real_broker
def test_times_beyond_the_calendar_are_its_end(kafka_bootstrap, make_topic):
    """A timestamp beyond Python's calendar, which brokers may take, becomes the calendar's last one."""
    topic = make_topic(1, config={"message.timestamp.after.max.ms": str(2**63 - 1)})
    for milliseconds in (2**62, 9_300_000_000_000_000, 253_402_300_800_000, 253_402_300_799_999, 1_000):
        produce_raw(kafka_bootstrap, topic, b"v", timestamp_ms=milliseconds)
    (batch,) = read_range({"bootstrap.servers": kafka_bootstrap}, OffsetRange(topic, 0, 0, 5))
    times = [row["timestamp"] for row in to_arrow(batch, "outbox-id").to_pylist()]
    last = datetime(9999, 12, 31, 23, 59, 59, 999_000, tzinfo=UTC)
    assert times == [last, last, last, last, datetime(1970, 1, 1, 0, 0, 1, tzinfo=UTC)]


@pytest.mark.real_broker
def test_times_before_the_calendar_are_its_beginning(kafka_bootstrap, make_topic):
    """A timestamp before Python's calendar, which any producer may choose, becomes the calendar's first one."""
    topic = make_topic(1)
    for milliseconds in (-(2**62), -62_135_596_800_001, -2):
        produce_raw(kafka_bootstrap, topic, b"v", timestamp_ms=milliseconds)
    (batch,) = read_range({"bootstrap.servers": kafka_bootstrap}, OffsetRange(topic, 0, 0, 3))
    times = [row["timestamp"] for row in to_arrow(batch, "outbox-id").to_pylist()]
    first = datetime(1, 1, 1, tzinfo=UTC)
    assert times == [first, first, datetime(1969, 12, 31, 23, 59, 59, 998_000, tzinfo=UTC)]


@pytest.mark.real_broker
def test_a_row_shows_all_of_a_message(kafka_bootstrap, make_topic):
    """Headers come as a map with the last of each name and as a list with all; the id header is a column, too."""
    topic = make_topic(1)
    headers = [("a", b"1"), ("a", None), ("outbox-id", b"db.public.outbox:42")]
    produce(kafka_bootstrap, topic, ["v"], headers=headers)
    (batch,) = read_range({"bootstrap.servers": kafka_bootstrap}, OffsetRange(topic, 0, 0, 1))
    (row,) = to_arrow(batch, "outbox-id").to_pylist()
    assert row["header_list"] == [{"key": name, "value": value} for name, value in headers]
    assert dict(row["headers"]) == dict(headers)
    assert (row["outbox_id"], row["key"], row["value"], row["offset"]) == ("db.public.outbox:42", None, b"v", 0)
    assert row["timestamp"].year >= 2020


@pytest.mark.real_broker
def test_spark_reads_topics(spark, kafka_bootstrap, make_topic, tmp_path):
    """A stream in small batches, resumed from its checkpoint, reads all records once; so does a batch read."""
    topic = make_topic(3)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in range(300):
        producer.produce(topic, str(number), key=f"k{number % 20}")
    producer.flush()
    options = {"kafka.bootstrap.servers": kafka_bootstrap, "subscribe": topic, "startingOffsets": "earliest"}
    table = f"read_{topic.replace('-', '_')}"

    def run():
        stream = spark.readStream.format("outbox_kafka").options(**options, maxOffsetsPerTrigger=120).load()
        query = (
            stream.selectExpr("CAST(value AS STRING) AS value", "partition", "offset")
            .writeStream.format("parquet")
            .option("path", str(tmp_path / table))
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()
        return [progress["numInputRows"] for progress in query.recentProgress if progress["numInputRows"]]

    sizes = run()
    assert sum(sizes) == 300
    assert max(sizes) <= 123
    logged = (tmp_path / "checkpoint" / "offsets" / "0").read_text().splitlines()[-1]
    assert set(json.loads(logged)[topic]) == {"0", "1", "2", "id"}
    producer.produce(topic, "300")
    producer.flush()
    assert sum(run()) == 1
    rows = spark.read.parquet(str(tmp_path / table)).collect()
    assert sorted(int(row.value) for row in rows) == list(range(301))
    batch = spark.read.format("outbox_kafka").options(**options, minPartitions=6).load()
    assert batch.count() == 301
    assert batch.rdd.getNumPartitions() >= 6
    others = batch.where("partition != 0").count()
    ending = json.dumps({topic: {"0": 0}})
    assert spark.read.format("outbox_kafka").options(**options, endingOffsets=ending).load().count() == others
