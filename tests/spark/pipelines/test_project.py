"""Projection: typed rows once each, misfits in quarantine, totals that follow, even if processes die."""

import secrets
import shutil
import threading
import time
from datetime import UTC, datetime
from decimal import Decimal
from types import SimpleNamespace

import psycopg
import pytest
from confluent_kafka import Producer
from pyspark.sql import functions as F  # noqa: N812
from pyspark.sql.types import ArrayType, StringType

from outbox_core.errors import InvalidConfig, OutboxTableError
from outbox_spark.config import ProjectSettings, RowSettings
from outbox_spark.pipelines import project, project_postgres
from outbox_spark.pipelines.follower import Follower
from outbox_spark.pipelines.typed_rows import parse
from outbox_spark.topics.source import SCHEMA as RECORDS
from tests.raw_records import NOT_UTF8, produce_raw
from tests.spark.pipelines.lakes import FORMATS, by_duckdb, by_polars, place_of
from tests.spark.pipelines.runs import SCHEMA, forget_last_commit, produce, run_and_die, run_once

pytestmark = [pytest.mark.real_broker, pytest.mark.timeout(900)]

_COLUMNS = {"n": "n", "sku": "item.sku", "cents": "item.cents", "amount": "amount"}


@pytest.fixture
def settings(tmp_path, make_topic, database):
    """Return a function that makes settings of a projection of a fresh topic."""
    topic = make_topic(3)

    def make(**others):
        values = {
            "name": "lines",
            "topics": [topic],
            "checkpoint": str(tmp_path / "checkpoint"),
            "schema": SCHEMA,
            "explode": "items",
            "columns": _COLUMNS,
            "postgres": {
                "dsn": database,
                "table": "lines",
                "totals": {"table": "totals", "by": ["sku"], "sums": {"cents": "cents"}, "count": "lines"},
            },
        }
        return ProjectSettings(**{**values, **others})

    return make


def _numbers(database, table="lines"):
    with psycopg.connect(database) as connection:
        return [row[0] for row in connection.execute(f"SELECT n FROM {table} ORDER BY n, _row")]


def _check_totals(database):
    """Assert that the totals equal the sums over the table."""
    with psycopg.connect(database) as connection:
        kept = connection.execute("SELECT sku, cents, lines FROM totals ORDER BY sku").fetchall()
        summed = connection.execute("SELECT sku, sum(cents), count(*) FROM lines GROUP BY 1 ORDER BY 1").fetchall()
    assert kept == summed


def _send(bootstrap, topic, *records):
    producer = Producer({"bootstrap.servers": bootstrap})
    for key, value in records:
        producer.produce(topic, value, key)
    producer.flush()


def test_projects_each_record_once(spark, settings, database, kafka_bootstrap):
    """Repeats, aborted records and losses of the checkpoint change neither rows nor totals."""
    chosen = settings()
    topic = chosen.topics[0]
    produce(kafka_bootstrap, topic, range(40))
    produce(kafka_bootstrap, topic, range(30, 40))  # as an at-least-once harvester repeats them
    produce(kafka_bootstrap, topic, range(9000, 9005), abort=True)
    counts = run_once(project, spark, kafka_bootstrap, chosen)
    assert (counts["records"], counts["rows"], counts["repeated"]) == (50, 40, 10)
    assert _numbers(database) == list(range(40))
    forget_last_commit(chosen.checkpoint)
    produce(kafka_bootstrap, topic, range(40, 50))
    run_once(project, spark, kafka_bootstrap, chosen)
    shutil.rmtree(chosen.checkpoint)
    produce(kafka_bootstrap, topic, range(50, 60))
    assert run_once(project, spark, kafka_bootstrap, chosen)["records"] == 10
    assert _numbers(database) == list(range(60))
    _check_totals(database)
    with psycopg.connect(database) as connection:
        row = connection.execute("SELECT amount, _topic, _outbox_id FROM lines WHERE n = 7").fetchone()
    assert row == (Decimal("1.75"), topic, "db.public.outbox:7")


@pytest.mark.complete
def test_survives_a_killed_driver(spark, settings, database, kafka_bootstrap):
    """A driver killed between the target's commit and Spark's repeats no record."""
    chosen = settings()
    produce(kafka_bootstrap, chosen.topics[0], range(30))
    run_and_die("project", kafka_bootstrap, chosen)
    assert _numbers(database) == list(range(30))
    produce(kafka_bootstrap, chosen.topics[0], range(30, 40))
    run_once(project, spark, kafka_bootstrap, chosen)
    assert _numbers(database) == list(range(40))
    _check_totals(database)


@pytest.mark.complete
def test_a_task_that_fails_before_its_commit_is_tried_again(spark, settings, database, kafka_bootstrap):
    """Rows of a failed transaction are not there, and come with the next attempt."""
    chosen = settings()
    produce(kafka_bootstrap, chosen.topics[0], range(10))
    run_once(project, spark, kafka_bootstrap, chosen)
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE SEQUENCE attempts")
        connection.execute(
            "CREATE FUNCTION fail_twice() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
            "IF nextval('public.attempts') <= 2 THEN RAISE 'not yet'; END IF; RETURN NEW; END $$"
        )
        connection.execute("CREATE TRIGGER fail BEFORE INSERT ON lines FOR EACH ROW EXECUTE FUNCTION fail_twice()")
    produce(kafka_bootstrap, chosen.topics[0], range(10, 30))
    run_once(project, spark, kafka_bootstrap, chosen)
    assert _numbers(database) == list(range(30))
    _check_totals(database)


@pytest.mark.complete
def test_what_does_not_fit_is_in_quarantine(spark, settings, database, kafka_bootstrap):
    """Each record that cannot be projected is kept in quarantine with its place and the reason, and counted."""
    chosen = settings(schema=SCHEMA + ", at TIMESTAMP", columns={**_COLUMNS, "at": "at"})
    bad = {
        b"\xff": "UTF-8",
        b"": "JSON",
        b"nope": "JSON",
        b"[]": "JSON object",
        b'{"n":1} {"n":2}': "schema",
        b'{"n":1},{"n":2}': "one JSON object",
        b'{"n":1}]}and more': "one JSON object",
        b'{"n":1}],"x":[{"n":2}': "one JSON object",
        b'{"n":1}],"single":[{"n":2}': "one JSON object",
        b'{"n":"x"}': "n is no BIGINT",
        b'{"n":1.5}': "n is no BIGINT",
        b"{}": "missing: n",
        b'{"n":1,"items":[{"cents":1}]}': "missing: items[].sku",
        b'{"n":1,"items":[{"sku":"\\u0000"}]}': "U+0000",
        b'{"n":1,"at":"12000-01-01T00:00:00Z","items":[{"sku":"a"}]}': "years",
        b'{"n":1,"items":[{"sku":"%b"}]}' % secrets.token_hex(4000).encode(): "sku: more than 2400 bytes",
    }
    _send(
        kafka_bootstrap, chosen.topics[0], *((b"k", value) for value in bad), (b"k", b'{"n":5,"items":[{"sku":"a"}]}')
    )
    bad[b'{"n":7,"items":[{"sku":"h"}]}'] = "header name is not UTF-8"
    produce_raw(kafka_bootstrap, chosen.topics[0], [*bad][-1], key=b"k", headers=[(NOT_UTF8, b"x")])
    counts = run_once(project, spark, kafka_bootstrap, chosen)
    assert (counts["records"], counts["quarantined"], counts["rows"]) == (len(bad) + 1, len(bad), 1)
    with psycopg.connect(database) as connection:
        found = connection.execute('SELECT value, reason, partition, "offset" FROM lines_quarantine').fetchall()
    assert len({(partition, offset) for _, _, partition, offset in found}) == len(bad)
    for value, reason, _, _ in found:
        assert bad[bytes(value)] in reason


@pytest.mark.complete
def test_the_latest_record_of_a_key_stays(spark, settings, database, kafka_bootstrap):
    """A record replaces the rows of its key, a tombstone removes them, and the totals follow."""
    chosen = settings(keep="latest")
    one, two = (
        b'{"n":%d,"items":[{"sku":"a","cents":%d},{"sku":"b","cents":5}]}' % pair for pair in ((1, 10), (2, 20))
    )
    _send(kafka_bootstrap, chosen.topics[0], (b"x", one), (b"y", two), (b"z", two), (None, one))
    counts = run_once(project, spark, kafka_bootstrap, chosen)
    assert (counts["rows"], counts["quarantined"]) == (6, 1)
    _send(kafka_bootstrap, chosen.topics[0], (b"x", two), (b"y", None), (b"z", one), (b"z", None), (b"z", two))
    counts = run_once(project, spark, kafka_bootstrap, chosen)
    assert (counts["replaced"], counts["tombstones"]) == (6, 2)
    with psycopg.connect(database) as connection:
        rows = connection.execute("SELECT _key, sku, cents FROM lines ORDER BY 1, 2").fetchall()
        totals = connection.execute("SELECT sku, cents, lines FROM totals ORDER BY 1").fetchall()
    assert rows == [("x", "a", 20), ("x", "b", 5), ("z", "a", 20), ("z", "b", 5)]
    assert totals == [("a", 40, 2), ("b", 10, 2)]
    _send(kafka_bootstrap, chosen.topics[0], (b"x", None), (b"z", None))
    run_once(project, spark, kafka_bootstrap, chosen)
    with psycopg.connect(database) as connection:
        assert connection.execute("SELECT count(*) FROM totals").fetchone() == (0,)


@pytest.mark.complete
@pytest.mark.parametrize("kind", FORMATS)
def test_projects_to_a_lakehouse_without_repeats(spark, settings, tmp_path, kafka_bootstrap, kind):
    """The table has each record once, even if a later batch repeats it and the checkpoint is gone."""
    place = place_of(kind, tmp_path)
    chosen = settings(postgres=None, lakehouse=place)
    topic = chosen.topics[0]
    produce(kafka_bootstrap, topic, range(20))
    _send(kafka_bootstrap, topic, (b"k", b"nope"))
    assert run_once(project, spark, kafka_bootstrap, chosen)["quarantined"] == 1
    shutil.rmtree(chosen.checkpoint)
    produce(kafka_bootstrap, topic, range(10, 30))
    assert run_once(project, spark, kafka_bootstrap, chosen)["repeated"] == 10
    assert by_polars(place)["n"].sort().to_list() == list(range(30))
    quarantine = f"{place['path']}_quarantine" if kind == "delta" else "shop.archive_quarantine"
    assert by_polars(place, quarantine)["reason"].to_list() == ["the value is not JSON"]


def _kept(place, *columns):
    """Return the rows of a table as Polars and DuckDB read them, which must agree."""
    found = sorted(by_polars(place).select(columns).rows())
    assert found == sorted(by_duckdb(place, f"SELECT {', '.join(columns)} FROM found"))
    return found


@pytest.mark.complete
@pytest.mark.parametrize("kind", FORMATS)
def test_the_latest_record_of_a_key_stays_in_a_lakehouse(spark, settings, tmp_path, kafka_bootstrap, kind):
    """A record replaces the rows of its key, a tombstone removes them, in batches that Spark repeats, too."""
    place = place_of(kind, tmp_path)
    columns = {"n": "cast(n AS INT)", "sku": "item.sku", "cents": "item.cents"}
    chosen = settings(keep="latest", postgres=None, lakehouse=place, columns=columns)
    topic = chosen.topics[0]
    one, two = (
        b'{"n":%d,"items":[{"sku":"a","cents":%d},{"sku":"b","cents":5}]}' % pair for pair in ((1, 10), (2, 20))
    )
    _send(kafka_bootstrap, topic, (b"x", one), (b"y", two), (b"z", one), (b"z", two), (None, one))
    counts = run_once(project, spark, kafka_bootstrap, chosen)
    assert (counts["rows"], counts["quarantined"]) == (6, 1)
    _send(kafka_bootstrap, topic, (b"x", two), (b"y", None), (b"z", one), (b"z", None), (b"z", two))
    counts = run_once(project, spark, kafka_bootstrap, chosen)
    assert (counts["rows"], counts["replaced"], counts["tombstones"]) == (4, 6, 2)
    rows = [("x", 2, "a", 20), ("x", 2, "b", 5), ("z", 2, "a", 20), ("z", 2, "b", 5)]
    assert _kept(place, "_key", "n", "sku", "cents") == rows
    forget_last_commit(chosen.checkpoint)
    _send(kafka_bootstrap, topic, (b"x", one))
    run_once(project, spark, kafka_bootstrap, chosen)
    shutil.rmtree(chosen.checkpoint)
    big = b'{"n":10000000000,"items":[{"sku":"c","cents":1}]}'
    _send(kafka_bootstrap, topic, (b"y", big))
    wider = settings(keep="latest", postgres=None, lakehouse=place, columns={**columns, "n": "n", "amount": "amount"})
    run_once(project, spark, kafka_bootstrap, wider)
    rows = [("x", 1, "a", 10), ("x", 1, "b", 5), ("y", 10_000_000_000, "c", 1), *rows[2:]]
    assert _kept(place, "_key", "n", "sku", "cents") == rows
    assert by_polars(place)["amount"].null_count() == len(rows)


@pytest.mark.complete
@pytest.mark.parametrize("kind", FORMATS)
def test_a_replay_replaces_no_later_record_in_a_lakehouse(spark, settings, tmp_path, kafka_bootstrap, kind):
    """A replay counts as the latest only for a key that has nothing newer, in its batch and in the table."""
    place = place_of(kind, tmp_path)
    chosen = settings(keep="latest", postgres=None, lakehouse=place, explode=None, columns={"n": "n"})

    def send(key, number, *headers):
        pairs = [("outbox-id", f"db.public.outbox:{number}".encode()), *((name, b"again") for name in headers)]
        producer.produce(chosen.topics[0], b'{"n":%d}' % number, key, headers=pairs)

    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for key, number in (("x", 1), ("x", 3), ("y", 2)):
        send(key, number)
    producer.flush()
    run_once(project, spark, kafka_bootstrap, chosen)
    for key, number in (("x", 1), ("x", 3), ("y", 5), ("z", 4)):  # repeats, a later one, a key without rows
        send(key, number, "outbox-replay")
    send("w", 7)
    send("w", 6, "outbox-replay")
    producer.flush()
    run_once(project, spark, kafka_bootstrap, chosen)
    assert _kept(place, "_key", "n") == [("w", 7), ("x", 3), ("y", 5), ("z", 4)]


@pytest.mark.complete
@pytest.mark.parametrize("kind", FORMATS)
def test_a_lakehouse_of_latest_records_survives_a_killed_driver(settings, tmp_path, spark, kafka_bootstrap, kind):
    """A driver killed between the table's commit and Spark's neither loses nor repeats a change."""
    place = place_of(kind, tmp_path)
    chosen = settings(keep="latest", postgres=None, lakehouse=place, explode=None, columns={"n": "n"})
    produce(kafka_bootstrap, chosen.topics[0], range(30))
    run_and_die("project", kafka_bootstrap, chosen)
    assert _kept(place, "n") == [(n,) for n in range(25, 30)]
    produce(kafka_bootstrap, chosen.topics[0], range(30, 32))
    assert run_once(project, spark, kafka_bootstrap, chosen)["replaced"] == 2
    assert _kept(place, "n") == [(n,) for n in range(27, 32)]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"schema": "n NUMBERISH"}, "schema"),
        ({"schema": "BIGINT"}, "schema: is bigint without a name"),
        ({"columns": {"n": "nothing_there"}}, "nothing_there"),
        ({"columns": {"n": "n +"}}, "columns"),
        ({"columns": {"sku": "item.sku"}}, "totals.sums"),
    ],
)
def test_wrong_settings_are_refused(spark, settings, kafka_bootstrap, change, words):
    """Contradictory settings are refused by name before any record is read."""
    with pytest.raises(InvalidConfig, match=words):
        run_once(project, spark, kafka_bootstrap, settings(**change))


def test_a_foreign_table_is_refused(spark, settings, database, kafka_bootstrap):
    """A table of the same name with other columns is not written to."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE lines (a int)")
    with pytest.raises(OutboxTableError, match="lines"):
        run_once(project, spark, kafka_bootstrap, settings())


@pytest.mark.complete
def test_services_may_restart(spark, settings, private_stack, private_database, make_topic):
    """Restarts of PostgreSQL and the broker during a projection neither lose nor repeat records."""
    bootstrap = private_stack.kafka.bootstrap
    topic = make_topic(2, bootstrap=bootstrap)
    chosen = settings(topics=[topic], trigger="200ms", postgres={"dsn": private_database, "table": "lines"})
    stop, batches = threading.Event(), threading.Semaphore(0)
    errors = []

    def follow():
        try:
            targets = project.targets(spark, chosen)
            kafka = {"bootstrap.servers": bootstrap}
            Follower(spark, kafka, chosen, targets, lambda _: batches.release()).run(once=False, stop=stop)
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=follow)
    produce(bootstrap, topic, range(10))
    thread.start()
    try:
        assert batches.acquire(timeout=120)
        private_stack.postgres.stop()
        produce(bootstrap, topic, range(10, 20))
        private_stack.start_postgres()
        _wait_for(private_database, 20, thread)
        private_stack.kafka.stop()
        private_stack.start_kafka()
        produce(bootstrap, topic, range(20, 30))
        _wait_for(private_database, 30, thread)
    finally:
        stop.set()
        thread.join(120)
    assert errors == []
    assert _numbers(private_database) == list(range(30))


def _wait_for(database, count, thread):
    deadline = time.monotonic() + 240
    while len(_numbers(database)) < count:
        assert thread.is_alive()
        assert time.monotonic() < deadline, f"{len(_numbers(database))} of {count} rows"
        time.sleep(0.5)


@pytest.mark.parametrize("keep", ["latest", "every"])
def test_an_identity_too_long_for_an_index_is_in_quarantine(spark, settings, database, kafka_bootstrap, keep):
    """A key, or an id, that no index of PostgreSQL holds keeps no other record back."""
    chosen, long = settings(keep=keep), secrets.token_hex(4000)
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number, (key, outbox_id) in enumerate([(long, "x:1"), ("k", f"{long}:2"), ("k", "x:3")]):
        value = b'{"n":%d,"items":[{"sku":"a","cents":1}]}' % number
        producer.produce(chosen.topics[0], value, key, headers=[("outbox-id", outbox_id.encode())])
    producer.flush()
    counts = run_once(project, spark, kafka_bootstrap, chosen)
    assert (counts["records"], counts["quarantined"]) == (3, 1)
    assert _numbers(database) == ([2] if keep == "latest" else [0, 2])


@pytest.mark.parametrize(
    ("text", "problem"),
    [("\\u0000", None), ("\\\\u0000", None), ("\0", "U+0000"), ("\\\0", "U+0000"), ("x" * 2500, "no index")],
)
def test_nested_values_that_postgres_cannot_hold(spark, text, problem):
    """U+0000 within a nested value is a misfit, and text that looks like its escape is none."""
    chosen = SimpleNamespace(keep="every", postgres=SimpleNamespace(totals=SimpleNamespace(by=["doc"])))
    columns = "problem STRING, key_text STRING, outbox_id STRING, rows ARRAY<STRUCT<doc: ARRAY<STRING>>>"
    records = spark.createDataFrame([(None, "k", "x:1", [([text],)])], columns)
    as_text = records.withColumn("rows", F.expr("transform(rows, row -> struct(to_json(row.doc) AS doc))"))
    found = as_text.select(F.expr(project_postgres._misfit(chosen, {"doc": ArrayType(StringType())}))).first()[0]
    assert found is None if problem is None else problem in found


def test_the_id_header_may_have_another_name(spark, settings, database, kafka_bootstrap):
    """Records of a harvester with an `idHeader` of its own are known by that header."""
    chosen = settings(id_header="my-id")
    producer = Producer({"bootstrap.servers": kafka_bootstrap})
    for number, outbox_id in enumerate([b"x:1", b"x:1", b"x:2"]):
        value = b'{"n":%d,"items":[{"sku":"a","cents":1}]}' % number
        producer.produce(chosen.topics[0], value, "k", headers=[("my-id", outbox_id), ("outbox-id", b"y:3")])
    producer.flush()
    assert run_once(project, spark, kafka_bootstrap, chosen)["repeated"] == 1
    assert _numbers(database) == [0, 2]


def test_numbers_are_not_written_out(spark):
    """A number of some bytes and a million digits, or of a million bytes, costs no time, at any depth, also quoted."""
    chosen = RowSettings(
        schema="a DECIMAL(10,2), text STRING, o STRUCT<d: ARRAY<STRUCT<n: DECIMAL(38,10)>>>, m MAP<STRING, DECIMAL(5)>"
        ", must STRUCT<n: DECIMAL(5) NOT NULL, of: MAP<STRING, STRUCT<n: DECIMAL(5) NOT NULL>>>"
    )
    wild = {
        b'{"a":1e900000000}': "a is no DECIMAL(10,2)",
        b'{"a":1e64000000}': "a is no DECIMAL(10,2)",
        b'{"a":"1e900000000"}': "a is no DECIMAL(10,2)",
        b'{"a":"1e64000000"}': "a is no DECIMAL(10,2)",
        b'{"a":"1\\u006564000000"}': "a is no DECIMAL(10,2)",
        b'{"a":"1e64000000","a":"many"}': "a is no DECIMAL(10,2)",
        b'{"a":"%b"}' % (b"1" * 1_000_000): "a is no DECIMAL(10,2)",
        b'{"a":1e999}': "a is no DECIMAL(10,2)",
        b'{"a":[1]}': "a is no DECIMAL(10,2)",
        b'{"a":true}': "a is no DECIMAL(10,2)",
        b'{"a":""}': "a is no DECIMAL(10,2)",
        b'{"o":{"d":[{"n":1},{"n":"1e64000000"}]},"m":{"x":"1e64000000"}}': "o.d[].n is no DECIMAL(38,10), m[] is no",
        # A double would have lost its last digits.
        b'{"o":{"d":[{"n":1.2345678901234567891e1}]}}': "o.d[].n is no DECIMAL(38,10)",
        b'{"o":{"d":[{"n":9007199254740993e0}]}}': "o.d[].n is no DECIMAL(38,10)",
        b'{"must":{"n":null}}': "missing: must.n",
        b'{"must":{}}': "missing: must.n",
        b'{"must":{"n":1,"of":{"x":{"n":null}}}}': "missing: must.of[].n",
    }
    tame = {
        b'{"a":1e3,"text":"a UUID 9e12345, 1e900000000"}': Decimal("1000.00"),
        b'{"a":1234567.89012345e1,"must":{"n":1,"of":{"x":{"n":1}}}}': Decimal("12345678.90"),
        b'{"a":10.005}': Decimal("10.01"),
        b'{"a":-1.5E-900000000}': Decimal("0.00"),
        b'{"a":"1e64000000","a":1.5E+2}': Decimal("150.00"),
        b'{"a":"-1.5","text":"12345678901234567890e1"}': Decimal("-1.50"),
        b'{"a":null}': None,
        b"{}": None,
    }
    long = b'{"o":{"d":[{"n":1234567890123456789012345678.0123456789},{}, {"n":null}]},"m":{"x":7,"y":null}}'
    place = ({}, [], "t", 0, 0, datetime.now(UTC), None)
    records = spark.createDataFrame([(b"k", value, *place) for value in (*wild, *tame, long)], RECORDS)
    rows = {bytes(row.value): row for row in parse(records, chosen).collect()}
    for value, reason in wild.items():
        assert reason in (rows[value].problem or ""), value[:100]
    assert {value: rows[value].problem for value in (*tame, long)} == dict.fromkeys((*tame, long))
    assert {value: rows[value].rows[0].a for value in tame} == tame
    found = rows[long].rows[0]
    numbers = [item.n for item in found.o.d]
    assert numbers == [Decimal("1234567890123456789012345678.0123456789"), None, None]
    assert found.m == {"x": Decimal(7), "y": None}
