"""Tables of both formats: two writers, lost answers, merged and expired files, new columns, folders of old versions."""

import zipfile
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pyarrow as pa
import pyiceberg.catalog
import pytest
from deltalake import DeltaTable, write_deltalake

from outbox_core.errors import InvalidConfig, OutboxTableError, StoreUnavailable
from outbox_spark.config import AuditSettings, FileSettings, IcebergTable
from outbox_spark.pipelines import archive, audit
from outbox_spark.tables import Layout, open_table
from outbox_spark.tables.folder import Folder
from outbox_spark.tables.log import CommitConflict, TableTaken
from tests.docs.blocks import BLOCKS
from tests.spark.pipelines.lakes import FORMATS, by_duckdb, by_polars, iceberg, place_of

pytestmark = pytest.mark.timeout(900)

_SCHEMA = "n INT, topic STRING, partition INT, offset BIGINT, time TIMESTAMP"
_COMPLETE = pytest.mark.complete
each_format = pytest.mark.parametrize("kind", FORMATS)


@pytest.fixture
def place(tmp_path, kind):
    """Return the place of a table."""
    return place_of(kind, tmp_path)


@pytest.fixture
def opened(spark, place):
    """Return a function that opens the table as another process would, ready to write."""

    def run(schema=_SCHEMA, **sizes):
        files = FileSettings(**sizes).model_copy(update={"keep_versions": timedelta(seconds=-1)})
        layout = Layout(schema, "time", "date", files)
        table = open_table(spark, place.get("path") or IcebergTable(**place["iceberg"]), layout)
        table.recover()
        return table

    return run


def _rows(spark, begin, end, columns="cast(id AS INT) AS n"):
    """Return rows of two days."""
    time = "timestamp_seconds(1790000000 + id % 2 * 86400) AS time"
    frame = spark.range(begin, end, 1, 1).selectExpr(columns, "'t' AS topic", "0 AS partition", "id AS offset", time)
    return frame.selectExpr("*", "to_date(time) AS date")


def _reach(offset):
    return {("t", 0): offset}


def _numbers(place):
    """Return the numbers in a table as Polars and DuckDB read them, which must agree."""
    found = by_polars(place)["n"].sort().to_list()
    assert found == [n for (n,) in by_duckdb(place, "SELECT n FROM found ORDER BY n")]
    return found


@each_format
def test_of_two_writers_one_commits(spark, opened, place):
    """A writer whose batch another one has committed stops; one that sees only other changes commits, once."""
    first, second = opened(small_files=2), opened()
    first.append(_rows(spark, 0, 4), _reach(4))
    with pytest.raises(TableTaken, match="another process"):
        second.append(_rows(spark, 0, 4), _reach(4))
    second.recover()
    assert second.positions == _reach(4)
    first.append(_rows(spark, 4, 6), _reach(6))
    second.recover()
    assert first.compact() == 4
    assert second.append(_rows(spark, 6, 8), _reach(8)) == 2  # its files come behind the merged ones
    first.recover()
    assert first.positions == _reach(8)
    assert _numbers(place) == list(range(8))


@each_format
def test_files_on_the_disk_of_another_machine(spark, opened, place, monkeypatch):
    """Rows that executors wrote where the driver does not see them stop the writer; the position stays."""
    table = opened()
    table.append(_rows(spark, 0, 2), _reach(2))
    files = Folder.files
    monkeypatch.setattr(Folder, "files", lambda folder, path: files(folder, path)[1:])
    with pytest.raises(OutboxTableError, match="wrote 2 rows, and the driver finds 1 of them"):
        table.append(_rows(spark, 2, 4), _reach(4))
    monkeypatch.undo()
    assert opened().positions == _reach(2)
    assert _numbers(place) == [0, 1]


def _restore(place, version):
    """Restore a table to an earlier version: for Iceberg one of its snapshots, for Delta one of its commits."""
    if "path" in place:
        DeltaTable(place["path"]).restore(version)
        return
    table = iceberg(place)
    table.manage_snapshots().rollback_to_snapshot(table.snapshots()[version].snapshot_id).commit()


@each_format
def test_a_restored_table_has_the_positions_of_that_time(spark, opened, place, kind):
    """A table that is taken back to an earlier version reads its topics again from there, and then goes on."""
    table, first = opened(small_files=3), 2 if kind == "delta" else 0
    table.append(_rows(spark, 0, 2), _reach(2))
    table.append(_rows(spark, 2, 4), {**_reach(4), ("u", 1): 7})
    _restore(place, first)
    with pytest.raises(TableTaken):
        table.append(_rows(spark, 4, 6), _reach(6))
    table = opened(small_files=2)
    assert table.positions == _reach(2)
    table.append(_rows(spark, 2, 4), _reach(4))
    assert table.compact() == 4
    assert opened().positions == _reach(4)
    assert _numbers(place) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", ["delta"])
def test_a_table_of_another_program_is_refused(opened, place):
    """A Delta table that is not partitioned by day is not written to."""
    write_deltalake(place["path"], pa.table({"n": pa.array([1], pa.int32())}))
    with pytest.raises(OutboxTableError, match="must be partitioned by date, and is by no column"):
        opened()


@pytest.mark.parametrize("kind", ["delta", pytest.param("iceberg", marks=_COMPLETE)])
def test_a_lost_answer_to_a_commit(spark, opened, place, monkeypatch):
    """A commit that succeeded, but seemed to have lost a race, is not repeated."""
    table = opened()
    commit, answers = type(table._log).commit, []

    def lose_answer(self, *arguments):
        answers.append(commit(self, *arguments))
        raise CommitConflict("the answer was lost")

    monkeypatch.setattr(type(table._log), "commit", lose_answer)
    assert table.append(_rows(spark, 0, 4), _reach(4)) == 4
    assert len(answers) == 1
    assert table.positions == _reach(4)
    assert _numbers(place) == list(range(4))


@each_format
@pytest.mark.parametrize("batches", [5, pytest.param(1000, marks=[_COMPLETE, pytest.mark.timeout(3600)])])
def test_small_batches_are_merged(spark, opened, place, batches):
    """Many small batches become one file for each day; the old files go, and those of dead writers."""
    table = opened(small_files=10_000)
    for number in range(batches):
        table.append(_rows(spark, 2 * number, 2 * number + 2), _reach(2 * number + 2))
    table._write(_rows(spark, 0, 2))  # a writer that died before its commit
    merged, deleted = table.maintain()
    assert merged == 2 * batches
    assert deleted >= 2 * batches + 2
    folder = Path(place["path"] if "path" in place else table.url.removeprefix("file:"))
    assert len(list(folder.rglob("*.parquet"))) == 2 + len(list(folder.rglob("*.checkpoint.parquet")))
    assert opened().positions == _reach(2 * batches)
    assert _numbers(place) == list(range(2 * batches))
    days = {str(row["date"]): row["count"] for row in table.read().groupBy("date").count().collect()}
    assert days == {"2026-09-21": batches, "2026-09-22": batches}


@each_format
def test_a_table_that_is_not_there_is_not_maintained(spark, place, tmp_path):
    """Maintenance of a mistyped place makes no table there."""
    layout = Layout(_SCHEMA, "time", "date", FileSettings())
    table = open_table(spark, place.get("path") or IcebergTable(**place["iceberg"]), layout)
    before = set(tmp_path.rglob("*"))
    with pytest.raises(InvalidConfig, match="there is no table"):
        table.maintain()
    assert set(tmp_path.rglob("*")) == before


@_COMPLETE
@each_format
def test_rows_are_replaced_while_others_merge(spark, opened, place):
    """Rows take the place of files in one commit; of files that another process has merged, in the next attempt."""
    table, other = opened(), opened()
    for first in (0, 4):
        table.append(_rows(spark, first, first + 4), _reach(first + 4))
    files, rows = table.with_keys(spark.range(1, 2).selectExpr("cast(id AS INT) AS n"))
    assert len(files) == 1
    assert sum(file.rows for file in files) == rows.count() == 2
    other.recover()
    assert other.compact(2) == 4
    with pytest.raises(StoreUnavailable, match="another process"):
        table.replace(files, rows.where("n != 1"), _reach(9))
    table.recover()
    files, rows = table.with_keys(spark.range(1, 2).selectExpr("cast(id AS INT) AS n"))
    assert table.replace(files, rows.where("n != 1"), _reach(9)) == 3
    assert _numbers(place) == [0, *range(2, 8)]
    assert opened().positions == _reach(9)


@each_format
def test_columns_are_added_and_widened(spark, opened, place):
    """New columns are NULL in old rows, wider types hold old values, and a type that holds less is refused."""
    opened().append(_rows(spark, 0, 2), _reach(2))
    wider = _SCHEMA.replace("n INT", "n BIGINT, note STRING", 1)
    table = opened(wider)
    assert table.positions == _reach(2)
    table.append(_rows(spark, 2, 4, "id + 10000000000 AS n").selectExpr("*", "'new' AS note"), _reach(4))
    found = [0, 1, 10_000_000_002, 10_000_000_003]
    assert sorted((row.n, row.note) for row in table.read().collect()) == list(
        zip(found, [None, None, "new", "new"], strict=True)
    )
    assert _numbers(place) == found
    assert by_polars(place).sort("n")["note"].to_list() == [None, None, "new", "new"]
    with pytest.raises(OutboxTableError, match="n"):
        opened(wider.replace("n BIGINT", "n STRING", 1))


@each_format
def test_columns_that_are_no_longer_named_keep_their_values(spark, opened, place):
    """Files that are merged, replaced or rewritten have the values of a column that the writer does not name."""
    named = _SCHEMA.replace("n INT", "n INT, note STRING", 1)
    table = opened(named)
    for first in (0, 2, 4):
        table.append(_rows(spark, first, first + 2).selectExpr("*", "'old' AS note"), _reach(first + 2))
    table = opened(_SCHEMA, small_files=2)
    table.append(_rows(spark, 6, 8), _reach(8))
    assert table.compact() == 8
    opened(_SCHEMA.replace("n INT", "n BIGINT", 1))  # for which a Delta table is rewritten
    assert by_polars(place).sort("n")["note"].to_list() == ["old"] * 6 + [None] * 2


@each_format
def test_times_without_a_zone_stay_so(spark, opened, place):
    """A time without a zone is one in the files, too, where a time with a zone would be another column."""
    opened(_SCHEMA.replace("n INT", "n INT, at TIMESTAMP_NTZ", 1)).append(
        _rows(spark, 0, 2).selectExpr("*", "timestamp_ntz'2026-11-21 08:00:00' AS at"), _reach(2)
    )
    assert by_polars(place)["at"].to_list() == [datetime(2026, 11, 21, 8)] * 2  # noqa: DTZ001


@pytest.mark.parametrize("kind", ["iceberg"])
def test_a_column_that_is_wider_already_stays_so(spark, opened, place):
    """A writer that wants a narrower type than the table has merges old and new files all the same."""
    opened(_SCHEMA.replace("n INT", "n BIGINT", 1)).append(_rows(spark, 0, 4, "id + 10000000000 AS n"), _reach(4))
    table = opened(small_files=2)
    table.append(_rows(spark, 4, 8), _reach(8))
    assert table.compact() == 4
    assert _numbers(place) == [*range(4, 8), *range(10_000_000_000, 10_000_000_004)]


@each_format
def test_reads_as_documented(spark, place, tmp_path, monkeypatch):
    """The examples of docs/spark-archive.md read an archive."""
    table = archive.open_archive(spark, place.get("path") or IcebergTable(**place["iceberg"]))
    table.recover()
    columns = "key BINARY, value BINARY, header_list ARRAY<STRUCT<key: STRING, value: BINARY>>, topic STRING, "
    columns += "partition INT, offset BIGINT, timestamp TIMESTAMP, outbox_id STRING"
    rows = [(b"k", b"v", [], "orders", 0, n, datetime(2026, 11, 20 + n, 12, tzinfo=UTC), f"x:{n}") for n in range(3)]
    table.append(archive.archive(spark.createDataFrame(rows, columns)).coalesce(1), {("orders", 0): 3})
    if "iceberg" in place:
        for name, value in place["iceberg"]["catalog"].items():
            monkeypatch.setenv(f"PYICEBERG_CATALOG__DEFAULT__{name.upper()}", value)
        monkeypatch.setattr(pyiceberg.catalog, "_ENV_CONFIG", pyiceberg.catalog.Config())
    shown = [block.text for block in BLOCKS if block.page == "docs/spark-archive.md" and block.language == "python"]
    (example,) = (text for text in shown if ("pyiceberg" in text) == ("iceberg" in place))
    names = {}
    exec(example.replace("s3://bucket/orders", str(tmp_path / "archive")).replace("shop.orders", "shop.archive"), names)  # noqa: S102
    assert names["a_day"]["outbox_id"].to_list() == ["x:1"]
    assert names["by_topic"] == [("orders", 3)]


@pytest.mark.parametrize("kind", ["delta"])
def test_a_folder_of_an_earlier_version(spark, place):
    """An old folder is moved by its next writer, with its positions and once, and closed to older versions."""
    with zipfile.ZipFile(Path(__file__).with_name("ledger_archive.zip")) as packed:
        packed.extractall(place["path"])
    table = archive.open_archive(spark, place["path"])
    with pytest.raises(InvalidConfig, match="--maintain"):
        audit.run(spark, {}, AuditSettings(expected={"archive": place["path"]}, found={"parquet": "/none"}))
    table.recover()
    assert table.positions == {("orders", 0): 23, ("orders", 1): 0, ("stock", 0): 23}
    table = archive.open_archive(spark, place["path"])
    table.recover()
    found = sorted((row.topic, row.outbox_id, row.offset) for row in table.read().collect())
    wanted = [("orders", f"x:{n}", n) for n in range(23)] + [("stock", f"x:{n}", n) for n in range(1, 23, 2)]
    assert found == sorted(wanted)
    assert by_polars(place).height == len(wanted)
    closing = max((Path(place["path"]) / "_ledger").glob("*.json"))
    assert closing.read_text() == '{"format": 2}'
