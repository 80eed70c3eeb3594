"""A projected table without Spark: batches that overlap, come again or fail half-way give each record once."""

import threading
import tracemalloc
from contextlib import suppress

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from outbox_core.errors import OutboxTableError, StoreUnavailable
from outbox_core.schema import TableName
from outbox_spark.config import TotalsSettings
from outbox_spark.postgres.projection import Misfit, ProjectedRecord, Projection
from outbox_spark.postgres.projection_store import ProjectionStore

_TOPIC = "orders"


class _Killed(Exception):
    """An error that stands for the death of the task."""


def _projection(query="p", keep="latest"):
    totals = TotalsSettings(table="totals", by=["sku"], sums={"cents": "cents"}, count="lines")
    columns = {"sku": "text", "cents": "bigint"}
    return Projection(query, TableName.parse("lines"), TableName.parse("odd"), columns, keep, totals)


def _record(offset, partition=0):
    """Return the record at an offset: of one of three keys; now and then a tombstone, or one that does not fit."""
    key = f"k{partition}-{offset % 3}"
    place = (_TOPIC, partition, offset, None, f"x:{partition}-{offset}", key)
    if offset % 7 == 6:
        return ProjectedRecord(*place, is_tombstone=True, rows=())
    misfit = Misfit("odd", key.encode(), b"?", [("a", None)]) if offset % 11 == 10 else None
    rows = () if misfit else [("a", offset), ("b", 1)]
    return ProjectedRecord(*place, is_tombstone=False, rows=rows, misfit=misfit)


def _expected(keep, ends):
    """Return rows, totals and quarantine after all records below the ends."""
    rows, odd = {}, 0
    for partition, end in ends.items():
        for offset in range(end):
            record = _record(offset, partition)
            odd += record.misfit is not None
            if record.misfit is None:
                rows[record.key if keep == "latest" else record.outbox_id] = record.rows
    flat = [row for of in rows.values() for row in of]
    totals = {
        sku: (sum(c for s, c in flat if s == sku), sum(s == sku for s, _ in flat)) for sku in {s for s, _ in flat}
    }
    return sorted(flat), totals, odd


def _found(database):
    with psycopg.connect(database) as connection:
        rows = connection.execute("SELECT sku, cents FROM lines").fetchall()
        totals = connection.execute("SELECT sku, cents, lines FROM totals").fetchall()
        odd = connection.execute("SELECT count(*) FROM odd").fetchone()[0]
    return sorted(rows), {sku: (cents, lines) for sku, cents, lines in totals}, odd


def _start_anew(database):
    with psycopg.connect(database, autocommit=True) as connection:
        for table in ("lines", "totals", "odd", "outbox_spark_positions"):
            connection.execute(f"DROP TABLE IF EXISTS {table}")


_BATCHES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(0, 40), st.integers(1, 20), st.none() | st.integers(0, 15)), max_size=8
)


@pytest.mark.parametrize("keep", ["latest", "every"])
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(batches=_BATCHES)
def test_each_record_counts_once(database, keep, batches):
    """Batches that begin before the position, come twice or die on the way add up to the records once each."""
    _start_anew(database)
    ends = {0: 0, 1: 0}
    with ProjectionStore(database, _projection(keep=keep)) as store:
        store.prepare()
        for partition, back, count, dies_after in batches:
            begin, end = max(0, ends[partition] - back), ends[partition] + count

            def records(begin=begin, end=end, partition=partition, dies_after=dies_after):
                for offset in range(begin, end):
                    if dies_after is not None and offset - begin == dies_after:
                        raise _Killed
                    yield _record(offset, partition)

            with suppress(_Killed):
                store.write(records(), {(_TOPIC, partition): end})
                ends[partition] = end
        positions = store.positions()
    assert positions == {(_TOPIC, partition): end for partition, end in ends.items() if end}
    assert _found(database) == _expected(keep, ends)


def test_a_task_and_its_successor_come_one_after_the_other(database):
    """Of several tasks with the same records at the same time one writes them, and the others find them written."""
    projection, end, counts = _projection(), {(_TOPIC, 0): 500}, []

    def write():
        with ProjectionStore(database, projection) as store:
            counts.append(store.write((_record(offset) for offset in range(500)), end)["records"])

    with ProjectionStore(database, projection) as store:
        store.prepare()
    tasks = [threading.Thread(target=write) for _ in range(3)]
    for task in tasks:
        task.start()
    for task in tasks:
        task.join(60)
    assert sorted(counts) == [0, 0, 500]
    assert _found(database) == _expected("latest", {0: 500})


def _of_outbox(offset, number, cents, *, is_replay=False, outbox="db.public.outbox", key="k"):
    """Return a record with its place in the topic and its id in an outbox; a tombstone if it has no cents."""
    rows = () if cents is None else [("a", cents)]
    place = (_TOPIC, 0, offset, None, f"{outbox}:{number}", key)
    return ProjectedRecord(*place, is_tombstone=cents is None, rows=rows, is_replay=is_replay)


@pytest.mark.parametrize("in_one_batch", [True, False])
def test_a_replay_does_not_go_back(database, in_one_batch):
    """Replayed records replace older rows, not newer ones; without comparable ids the last record counts."""
    records = [
        _of_outbox(0, 9, 9),
        _of_outbox(1, 100, 100, key="other"),
        _of_outbox(2, 9, 9, key="mended"),
        _of_outbox(3, 5, 5, is_replay=True),
        _of_outbox(4, 9, 9, is_replay=True),
        _of_outbox(5, 10, 10, is_replay=True, key="mended"),
        _of_outbox(6, 1, 1, is_replay=True, outbox="another", key="other"),
    ]
    with ProjectionStore(database, _projection()) as store:
        store.prepare()
        batches = [records] if in_one_batch else [[record] for record in records]
        counts = [store.write(iter(batch), {(_TOPIC, 0): batch[-1].offset + 1}) for batch in batches]
    assert sum(count["repeated"] for count in counts) == 2
    with psycopg.connect(database) as connection:
        rows = connection.execute("SELECT _key, _outbox_id, cents FROM lines ORDER BY 1").fetchall()
        totals = connection.execute("SELECT cents, lines FROM totals").fetchall()
    assert rows == [("k", "db.public.outbox:9", 9), ("mended", "db.public.outbox:10", 10), ("other", "another:1", 1)]
    assert totals == [(20, 3)]


def test_pipelines_of_one_database_have_positions_of_their_own(database):
    """A second pipeline on the same database does not begin at the first one's positions."""
    for name in ("a", "b"):
        with ProjectionStore(database, _projection(query=name)) as store:
            store.prepare()
            assert store.positions() == {}
            store.advance({(_TOPIC, 0): 9})
            assert store.positions() == {(_TOPIC, 0): 9}
            store.advance({(_TOPIC, 0): 3})
            assert store.positions() == {(_TOPIC, 0): 9}


@pytest.mark.parametrize("fit", [True, False])
def test_large_records_do_not_stay_in_memory(database, fit):
    """Neither rows nor misfits of a batch are in memory all at once."""
    columns = {"sku": "text", "cents": "bigint"}
    projection = Projection("p", TableName.parse("lines"), TableName.parse("odd"), columns, "latest")

    def records():
        for offset in range(64):
            place, text = (_TOPIC, 0, offset, None, f"x:{offset}", f"k{offset}"), f"{offset}" * 2**20
            misfit = None if fit else Misfit("odd", b"k", text.encode(), [])
            yield ProjectedRecord(*place, is_tombstone=False, rows=[(text, 1)] if fit else (), misfit=misfit)

    with ProjectionStore(database, projection) as store:
        store.prepare()
        tracemalloc.start()
        try:
            counts = store.write(records(), {(_TOPIC, 0): 64})
            _, peak = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert (counts["rows"], counts["quarantined"]) == ((64, 0) if fit else (0, 64))
    assert peak < 32 * 2**20


def test_says_what_is_wrong(database):
    """A table with other columns and an unreachable database are named, without the password."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE TABLE lines (sku text)")
    with ProjectionStore(database, _projection()) as store, pytest.raises(OutboxTableError, match="lines"):
        store.prepare()
    with pytest.raises(StoreUnavailable, match="cannot reach") as refused:
        ProjectionStore("postgresql://me:hunter2@127.0.0.1:1/x", _projection())
    assert "hunter2" not in str(refused.value)
