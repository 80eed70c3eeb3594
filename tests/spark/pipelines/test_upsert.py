"""Rows into a PostgreSQL table: each once, even if attempts are repeated, and errors with a clear name."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, wait

import psycopg
import pytest

from outbox_core.errors import InvalidConfig, OutboxTableError, StoreUnavailable
from outbox_spark.postgres.sink import target_of
from outbox_spark.postgres.upsert import Task, Upsert, UpsertTarget

COLUMNS = ("product", "total", "details")


@pytest.fixture
def table(database):
    """Return the URL of a database with a table with a key."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute('CREATE TABLE "Sales" (product text PRIMARY KEY, total int NOT NULL, details jsonb)')
    return database


def rows_in(database):
    """Read the table."""
    with psycopg.connect(database) as connection:
        return connection.execute('SELECT product, total, details FROM "Sales" ORDER BY product').fetchall()


def upsert(database, *, keys=("product",), on_conflict="update", columns=COLUMNS, table='"Sales"'):
    """Return a writer into the table."""
    return Upsert(UpsertTarget(database, table, keys, on_conflict), columns)


def task(batch, *, run="run", partition=0):
    """Return a partition of a batch of the query `sales`."""
    return Task("sales", run, batch, partition)


def test_the_last_row_of_a_key_wins(table):
    """New keys are inserted, known ones replaced, also within one batch; structures become JSON."""
    written = upsert(table).write([("tea", 1, None), ("milk", 2, {"a": [1, b"x"]}), ("tea", 3, [("h", b"v")])], task(0))
    assert (written.rows, written.skipped) == (3, False)
    upsert(table).write([("milk", 5, '{"raw": 1}')], task(1))
    assert rows_in(table) == [("milk", 5, {"raw": 1}), ("tea", 3, [["h", "v"]])]


def test_old_rows_may_be_kept(table):
    """With on_conflict=ignore the first row of a key stays."""
    upsert(table).write([("tea", 1, None)], task(0))
    upsert(table, on_conflict="ignore").write([("tea", 9, None), ("milk", 2, None)], task(1))
    assert rows_in(table) == [("milk", 2, None), ("tea", 1, None)]


def test_an_older_batch_writes_nothing(table):
    """A task that was thought dead finds the note of a later batch, and writes no rows."""
    upsert(table).write([("tea", 2, None)], task(5))
    assert upsert(table).write([("tea", 1, None)], task(4)).skipped
    assert rows_in(table) == [("tea", 2, None)]


def test_partitions_and_runs_have_notes_of_their_own(table):
    """Notes of another partition, or of another checkpoint whose batches begin at 0 again, hold no task back."""
    upsert(table).write([("tea", 1, None)], task(5))
    assert not upsert(table).write([("milk", 1, None)], task(5, partition=1)).skipped
    assert not upsert(table).write([("tea", 7, None)], task(0, run="after the checkpoint was deleted")).skipped
    assert rows_in(table) == [("milk", 1, None), ("tea", 7, None)]


def test_rows_without_a_key_are_added_once(table):
    """A repeated batch adds no rows; the next one does."""
    with psycopg.connect(table, autocommit=True) as connection:
        connection.execute("CREATE TABLE seen (number int)")
    writer = upsert(table, keys=(), columns=("number",), table="seen")
    for batch in (0, 0, 1, 1, 0):
        writer.write([(1,), (2,)], task(batch))
    with psycopg.connect(table) as connection:
        assert connection.execute("SELECT count(*) FROM seen").fetchone() == (4,)


def test_attempts_of_the_first_batch_come_one_after_the_other(table):
    """Even before the first note a second attempt of a task waits for the first, and then adds no rows."""
    with psycopg.connect(table, autocommit=True) as connection:
        connection.execute("CREATE TABLE seen (number int)")
    half_way, go_on = threading.Event(), threading.Event()

    def rows() -> Iterator[tuple]:
        yield (1,)
        half_way.set()
        go_on.wait(30)
        yield (2,)

    with ThreadPoolExecutor(2) as threads:
        first, second = (upsert(table, keys=(), columns=("number",), table="seen") for _ in range(2))
        one = threads.submit(first.write, rows(), task(0))
        assert half_way.wait(30)
        other = threads.submit(second.write, [(1,), (2,)], task(0))
        wait([other], timeout=0.5)
        assert not other.done()
        go_on.set()
        assert (one.result(30).skipped, other.result(30).skipped) == (False, True)
    with psycopg.connect(table) as connection:
        assert connection.execute("SELECT count(*) FROM seen").fetchone() == (2,)


def test_a_failure_leaves_neither_rows_nor_note(table):
    """A task that dies on the way has written no rows, and is not skipped when it is tried again."""

    def rows() -> Iterator[tuple]:
        yield ("tea", 1, None)
        raise RuntimeError("dies")

    with pytest.raises(RuntimeError, match="dies"):
        upsert(table).write(rows(), task(0))
    assert rows_in(table) == []
    assert not upsert(table).write([("tea", 1, None)], task(0)).skipped


@pytest.mark.parametrize(
    ("columns", "keys", "name", "problem"),
    [
        (COLUMNS, ("product",), "nothing", "table nothing does not exist"),
        (("product", "colour"), ("product",), '"Sales"', "has no column.s. colour; it has product, total, details"),
        (("product", "total"), ("total",), '"Sales"', r"no unique index or primary key on \(total\)"),
    ],
)
def test_what_does_not_fit_is_said(table, columns, keys, name, problem):
    """A missing table, column or unique index is named."""
    with pytest.raises(OutboxTableError, match=problem):
        upsert(table, columns=columns, keys=keys, table=name).write([("tea", 1)], task(0))


def test_a_key_must_be_a_column():
    """A key column that the rows lack is refused before any row is written."""
    with pytest.raises(InvalidConfig, match=r"key column\(s\) id are not among"):
        Upsert(UpsertTarget("", "t", ("id",)), ("a",))


def test_a_database_that_is_away_is_no_error_of_the_table():
    """An unreachable database is reported as unavailable, without the password."""
    target = target_of({"dsn": "host=127.0.0.1 port=1 password=hunter2", "table": "t"})
    with pytest.raises(StoreUnavailable) as error:
        Upsert(target, ("a",)).write([(1,)])
    assert "hunter2" not in str(error.value) + repr(target)


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"table": "t"}, "option dsn is missing"),
        ({"dsn": "dbname=x"}, "option table is missing"),
        ({"dsn": "mysql://h/d", "table": "t"}, "option dsn is the URL of another kind of database"),
        ({"dsn": "dbname=x", "table": "t", "onConflict": "merge"}, "onConflict must be one of ignore, update"),
        ({"dsn": "dbname=x", "table": "t", "kafka.acks": "1"}, r"unknown option\(s\) kafka.acks"),
    ],
)
def test_wrong_options_are_named(options, problem):
    """A missing, unknown or impossible option is refused by name."""
    with pytest.raises(InvalidConfig, match=problem):
        target_of(options)


@pytest.mark.complete
def test_spark_writes_a_table(spark, table, tmp_path):
    """A stream is upserted and resumed, and a batch job as well."""
    source = tmp_path / "source"

    def add(number, rows):
        frame = spark.createDataFrame(rows, "product string, total int")
        frame.coalesce(1).write.mode("append").json(str(source / str(number)))

    def run():
        stream = spark.readStream.schema("product string, total int").json(str(source / "*"))
        query = (
            stream.writeStream.format("outbox_postgres")
            .options(dsn=table, table='"Sales"', keys="product", query="sales")
            .option("checkpointLocation", str(tmp_path / "checkpoint"))
            .trigger(availableNow=True)
            .start()
        )
        query.awaitTermination()

    add(1, [("tea", 1), ("milk", 2)])
    run()
    add(2, [("tea", 5)])
    run()
    assert rows_in(table) == [("milk", 2, None), ("tea", 5, None)]
    frame = spark.createDataFrame([("jam", 3)], "product string, total int")
    frame.write.format("outbox_postgres").options(dsn=table, table='"Sales"', keys="product").mode("append").save()
    assert rows_in(table)[0] == ("jam", 3, None)


def test_names_with_percent_signs(table):
    """A % in the name of the table or of the notes is part of the name."""
    with psycopg.connect(table, autocommit=True) as connection:
        connection.execute('ALTER TABLE "Sales" RENAME TO "100% sales"')
    target = UpsertTarget(table, '"100% sales"', ("product",), "update", '"50% %s notes"')
    writer = Upsert(target, COLUMNS)
    writer.write([("tea", 1, None)], task(0))
    writer.write([("tea", 2, None)], task(1))
    with psycopg.connect(table) as connection:
        assert connection.execute('SELECT total FROM "100% sales"').fetchall() == [(2,)]
