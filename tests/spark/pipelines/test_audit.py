"""The audit: its findings between Parquet folders, and between an archive and topics."""

import json
import time
from datetime import UTC, datetime, timedelta

import pytest
from confluent_kafka import Producer

from outbox_spark.config import AuditSettings
from outbox_spark.pipelines import audit, audit_report

pytestmark = pytest.mark.timeout(600)

_BEGAN = datetime(2026, 11, 21, 8, tzinfo=UTC)
_COLUMNS = "topic STRING, partition INT, offset BIGINT, timestamp TIMESTAMP, key BINARY, outbox_id STRING"


def _records(number=400):
    """Return records of 20 keys in two partitions, as rows."""
    return [
        ("orders", key % 2, offset, _BEGAN + timedelta(minutes=offset), b"key-%d" % key, f"db.public.outbox:{offset}")
        for offset, key in ((offset, offset % 20) for offset in range(number))
    ]


@pytest.fixture
def compare(spark, tmp_path):
    """Return a function that audits two lists of rows and returns the result."""

    def run(expected, found, **settings):
        folders = []
        for name, rows in (("expected", expected), ("found", found)):
            folders.append(str(tmp_path / name))
            spark.createDataFrame(rows, _COLUMNS).coalesce(1).write.mode("overwrite").parquet(folders[-1])
        sides = {"expected": {"parquet": folders[0]}, "found": {"parquet": folders[1]}}
        return audit.run(spark, {}, AuditSettings(**sides, **settings))

    return run


@pytest.mark.complete
def test_equal_sides_are_clean(compare):
    """An audit of equal sides finds no fault."""
    result = compare(_records(), _records())
    assert result.is_clean
    assert result.topics["orders"] == {
        **dict.fromkeys(audit.KINDS, 0),
        "expected": 400,
        "found": 400,
        "replayed": 0,
    }
    assert result.examples == []


def test_finds_lost_repeated_reordered_and_unexpected(compare):
    """Each planted fault is found, with its kind and place, and no other fault is."""
    expected = _records()
    found = _records()
    lost = found.pop(100)
    found.append((*found[50][:2], 1000, *found[50][3:]))
    # 60 and 80 are of one key: their places are exchanged.
    assert found[60][4] == found[80][4]
    found[60], found[80] = (
        (*found[60][:2], found[80][2], *found[60][3:]),
        (*found[80][:2], found[60][2], *found[80][3:]),
    )
    found.append(("orders", 0, 2000, _BEGAN, b"key-2", "db.public.outbox:9999"))
    result = compare(expected, found)
    assert {kind: result.total(kind) for kind in audit.KINDS} == dict.fromkeys(audit.KINDS, 1)
    by_kind = {example["kind"]: example for example in result.examples}
    assert (by_kind["lost"]["id"], by_kind["lost"]["partition"], by_kind["lost"]["offset"]) == (
        lost[5],
        lost[1],
        lost[2],
    )
    assert (by_kind["repeated"]["id"], by_kind["repeated"]["offset"]) == ("db.public.outbox:50", 1000)
    assert by_kind["repeated"]["other_offset"] == 50
    assert (by_kind["reordered"]["id"], by_kind["reordered"]["other_id"]) == (
        "db.public.outbox:60",
        "db.public.outbox:80",
    )
    assert by_kind["reordered"]["key"] == "key-0"
    assert by_kind["unexpected"]["id"] == "db.public.outbox:9999"


@pytest.mark.complete
def test_times_are_utc(spark, compare, monkeypatch):
    """The report's hours and times are UTC, in any time zone of session and driver."""
    before = spark.conf.get("spark.sql.session.timeZone")
    monkeypatch.setenv("TZ", "Asia/Kolkata")
    time.tzset()
    spark.conf.set("spark.sql.session.timeZone", "Asia/Kolkata")
    try:
        result = compare(_records(70), _records(69))
    finally:
        spark.conf.set("spark.sql.session.timeZone", before)
        monkeypatch.delenv("TZ")
        time.tzset()
    assert [(hour["hour"], hour["expected"]) for hour in result.hours] == [
        ("2026-11-21T08:00:00Z", 60),
        ("2026-11-21T09:00:00Z", 10),
    ]
    assert [example["timestamp"] for example in result.examples] == ["2026-11-21T09:09:00Z"]


@pytest.mark.complete
def test_topics_that_were_not_looked_at_are_lost(spark, monkeypatch):
    """Expected records of a topic that the found side does not name are lost, unless `topics` leaves it out."""
    expected = spark.createDataFrame([*_records(4), ("stock", *_records(1)[0][1:])], _COLUMNS)
    expected = expected.withColumnRenamed("outbox_id", "id").selectExpr("*", "false AS is_replay")
    sides = {"expected": {"parquet": "/expected"}, "found": {"topics": ["orders"]}}
    monkeypatch.setattr(
        audit.Sides,
        "read",
        lambda _, side: (expected if side.topics is None else expected.where("topic = 'orders'"), None),
    )
    result = audit.run(spark, {}, AuditSettings(**sides))
    assert {topic: counts["lost"] for topic, counts in result.topics.items()} == {"orders": 0, "stock": 1}
    assert audit.run(spark, {}, AuditSettings(**sides, topics=["orders"])).is_clean


@pytest.mark.complete
def test_records_without_key_have_no_order(compare):
    """Records without a key may come in any order, and are still missed."""
    expected = [(*row[:4], None, row[5]) for row in _records(20)]
    offsets = [row[2] for row in expected]
    found = [(*row[:2], offset, *row[3:]) for row, offset in zip(expected, reversed(offsets), strict=True)]
    assert compare(expected, found).is_clean
    assert compare(expected, found[1:]).total("lost") == 1


def test_reports_are_complete_and_escaped(compare):
    """The JSON has counts and examples; the page shows them, and escapes text from records."""
    expected = [*_records(10), ("orders", 0, 99, _BEGAN, b"<script>", "x:1")]
    result = compare(expected, _records(10), findings=None)
    document = json.loads(audit_report.to_json(result))
    assert document["clean"] is False
    assert document["totals"]["lost"] == 1
    page = audit_report.to_html(result)
    assert "&lt;script&gt;" in page
    assert "<script>" not in page
    assert "<svg" in page


@pytest.mark.real_broker
@pytest.mark.complete
def test_snapshot_of_the_outbox_against_topics(spark, database, kafka_bootstrap, make_topic):
    """A table of stashed records is compared with the topic; replays do not count as repeats."""
    import psycopg

    from outbox_core.schema import TableName, create_table_sql

    topic = make_topic(2)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(create_table_sql(TableName.parse("outbox")))
        connection.execute(
            "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value) SELECT %s, 'k' || i %% 5, 'v' "
            "FROM generate_series(1, 50) AS i",
            (topic,),
        )
        name = connection.execute("SELECT current_database()").fetchone()[0]
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number in [*range(1, 40), *range(41, 51), 7]:
        headers = [("outbox-id", f"{name}.public.outbox:{number}".encode())]
        producer.produce(topic, b"v", f"k{number % 5}", headers=headers)
    producer.produce(
        topic, b"v", "k1", headers=[("outbox-id", f"{name}.public.outbox:1".encode()), ("outbox-replay", b"x")]
    )
    producer.flush()
    sides = {"expected": {"table": {"dsn": database, "table": "outbox"}}, "found": {"topics": [topic]}}
    result = audit.run(spark, {"bootstrap.servers": kafka_bootstrap}, AuditSettings(**sides))
    counts = result.topics[topic]
    assert (counts["lost"], counts["repeated"], counts["reordered"], counts["unexpected"]) == (1, 1, 0, 0)
    assert counts["replayed"] == 1
    assert {example["id"].rpartition(":")[2] for example in result.examples} == {"40", "7"}
