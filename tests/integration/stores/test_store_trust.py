"""The store among others' objects, rights and settings, such as a role with little more than INSERT can make."""

import json
import threading
from contextlib import closing, nullcontext
from datetime import timedelta
from uuid import uuid4

import psycopg
import pytest

from outbox_core.cli import main
from outbox_core.config import HarvestConfig
from outbox_core.console.values import record_as_json
from outbox_core.doctor.pending import PeekQuery, peek
from outbox_core.doctor.session import DatabaseSession
from outbox_core.errors import OutboxError, OutboxTableError, RowsRemain, StoreUnavailable
from outbox_core.harvest.parts import Parts
from outbox_core.record import MAX_KEY_BYTES
from outbox_core.retention.history import History
from outbox_core.schema import TableName, create_history_sql, create_hold_sql, create_table_sql
from outbox_core.stores.interface import (
    HoldSet,
    NewHold,
    OversizedValue,
    RowId,
    RowQuery,
    bytes_of,
    held_key,
    ids_and_times,
    row_id,
)
from outbox_core.stores.postgres import connection as sessions
from outbox_core.stores.postgres import statements as sql
from outbox_core.stores.postgres.deadlines import BoundedConnection
from outbox_core.stores.postgres.notify import CommitNotices, NoNotices
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import Scene
from tests.hostile_rows import OutboxNames, hostile_rows, insert

ME = uuid4()


@pytest.fixture
def scene(database):
    """A fresh outbox of the binary layout, with its holds, without constraints against odd rows."""
    return Scene(database, "", constrained=False)


@pytest.fixture
def store(scene):
    """A store on that outbox."""
    store = PostgresStore(scene.database)
    store.check()
    yield store
    store.close()


# -- search paths

_TRAP = """
CREATE FUNCTION {name} RETURNS {result} LANGUAGE plpgsql AS
$$ BEGIN RAISE EXCEPTION 'somebody else''s code ran as the harvester''s role: {name}'; END $$
"""
# Each fits its arguments better than PostgreSQL's own of that name.
_TRAPS = {
    "public.pg_column_size(bytea[])": "integer",
    "public.pg_column_size(text[])": "integer",
    "public.pg_column_compression(bytea[])": "text",
    "public.cardinality(text[])": "integer",
    "public.array_send(bytea[])": "bytea",
    "public.array_send(text[])": "bytea",
    "public.octet_length(varchar)": "integer",
    "public.starts_with(varchar, text)": "boolean",
    "public.unnest(text[])": "SETOF text",
    "public.unnest(bigint[])": "SETOF bigint",
    "public.jsonb_object_agg(name, text)": "jsonb",
    "public.to_regclass(varchar)": "regclass",
    "public.quote_ident(name)": "text",
    "public.is_other(varchar, text)": "boolean",
    "public.is_other(regclass, oid)": "boolean",
    "public.is_other(oid, regclass)": "boolean",
    "public.is_other(name, text)": "boolean",
    "public.join_up(varchar, text)": "text",
}
_OPERATORS = [
    "public.= (LEFTARG = varchar, RIGHTARG = text, FUNCTION = public.is_other)",
    "public.= (LEFTARG = oid, RIGHTARG = regclass, FUNCTION = public.is_other)",
    "public.|| (LEFTARG = varchar, RIGHTARG = text, FUNCTION = public.join_up)",
]


def _set_traps(scene):
    for name, result in _TRAPS.items():
        scene.execute(_TRAP.format(name=name, result=result))
    for operator in _OPERATORS:
        scene.execute(f"CREATE OPERATOR {operator}")


def test_functions_of_other_schemas_are_never_called(scene):
    """No statement of the store or listener uses a function or operator of another schema on the search path."""
    _set_traps(scene)
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_header_keys, kafka_header_values)"
        " VALUES ('t', 'k', '{a}', '{x}'), ('t', 'l', '{a}', '{x}')"
    )
    store = PostgresStore(scene.database)
    store.check()
    floor = store.sequence.snapshot()
    store.sequence.describe(["1/1"])
    assert len(store.mark(ME, RowQuery(10)).records) == 2
    held = HoldSet(frozenset({"u"}), frozenset({("t", "l")}), frozenset({7}))
    assert (
        len(
            store.mark(uuid4(), RowQuery(10, without_keys={("t", "k")}, without_rows=[RowId(9, 0)], holds=held)).records
        )
        == 0
    )
    assert len(store.scan(RowQuery(10))) == 2
    (row,) = store.scan(RowQuery(10, without_rows=[RowId(9, 0)], without_keys={("t", "x")}, holds=held))
    store.holds.add([NewHold("t", "l", 2, "refused", "", dead_letter=True)])
    assert store.holds.read().lanes == {("t", "l")}
    (letter,) = store.holds.fetch([2])
    store.holds.refuse_dead_letters([2], "no")
    assert store.holds.delete_dead_lettered([2], [letter[7]]) == 1
    assert store.holds.release_gone() == 0
    assert store.marks.count().number == store.backlog().pending == 1
    assert store.marks.clear() == 1
    assert store.reset(ME, [1]) == store.purge(ME, [1], [row[7]]) == 0
    assert store.delete_published([1], [row[7]]) == 1
    assert not floor.unusable
    assert store.is_empty()
    store.close()
    notices = CommitNotices(scene.database, "outbox", application_name="kafka-outbox test")
    with pytest.raises(NoNotices, match="no trigger"):
        notices.open()
    notices.dispose()


@pytest.fixture
def second_on_path(database):
    """A database whose outbox, with a row and its holds, is in the second schema of the path; and the way to it."""
    scene = Scene(database, "", layout=None)
    for schema in ("first", "second"):
        scene.execute(f"CREATE SCHEMA {schema}")
    scene.execute(create_table_sql(TableName("outbox", "second")))
    scene.execute(create_hold_sql(TableName("outbox", "second")))
    scene.execute("INSERT INTO second.outbox (kafka_topic) VALUES ('t')")
    return scene, psycopg.conninfo.make_conninfo(database, options="-c search_path=first,second")


def test_tables_are_found_by_the_sessions_own_path(second_on_path):
    """A table without a schema is found once by the search path, and kept although the path later finds another."""
    scene, dsn = second_on_path
    store = PostgresStore(dsn)
    assert store.check().endswith(".second.outbox")
    scene.execute(create_table_sql(TableName("outbox", "first")))
    store.close()
    assert len(store.mark(ME, RowQuery(10)).records) == 1
    assert store.holds.read() is not None
    store.close()


def test_all_stores_of_a_harvester_are_of_one_table(second_on_path):
    """A store that first connects when another outbox, or table of holds, comes earlier on the path is of the first."""
    scene, dsn = second_on_path
    scene.execute(create_hold_sql(TableName("outbox", "first")))
    parts = Parts(HarvestConfig(data_source=dsn), None, None, None)
    assert parts.identify().outbox.endswith(".second.outbox")
    scene.execute(create_table_sql(TableName("outbox", "first")))
    with closing(parts.store()) as purger:
        assert len(purger.mark(ME, RowQuery(10)).records) == 1
        paused = "(id, outbox, kafka_topic, reason) VALUES (1, 'second.outbox', 't', 'paused')"
        scene.execute(f"INSERT INTO second.outbox_hold {paused}")
        assert list(purger.holds.read().topics) == ["t"]


def test_table_that_comes_later(database):
    """A table that is made after a failed check is found by the next one."""
    scene = Scene(database, "", layout=None)
    store = PostgresStore(database)
    with pytest.raises(OutboxTableError, match="does not exist"):
        store.check()
    scene.execute(create_table_sql(TableName("outbox")))
    assert store.check().endswith(".public.outbox")
    store.close()


# -- odd rows

LAST, FIRST = 2**63 - 1, -(2**63)
# Times as text. A scan and a delete represent each by the same number: True if it is exact; otherwise it is 0.
_TIMES = {
    "2026-01-02 03:04:05.678901+00": True,
    "1969-12-31 23:59:59.999999+00": True,
    "4713-01-01 00:00:00.000001+00 BC": True,
    "293999-12-31 00:00:00.999999+00": True,
    "294276-12-31 00:00:00.999999+00": False,
    "infinity": False,
    "-infinity": False,
    None: False,
}


@pytest.mark.parametrize("text", _TIMES)
@pytest.mark.parametrize("zone", ["with", "without"])
def test_any_create_time_can_be_read_and_deleted(scene, store, text, zone):
    """A row of any create time can be read, and deleted by the time read; ordinary times are exact."""
    scene.execute("ALTER TABLE outbox ALTER create_time DROP NOT NULL")
    scene.execute(f"ALTER TABLE outbox ALTER create_time TYPE timestamp {zone} time zone")
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key, create_time) VALUES ('t', 'k', %s)", [text])
    (row,) = store.scan(RowQuery(10))
    if not _TIMES[text]:
        assert row[7] == 0
    else:
        found = scene.execute("SELECT (extract(epoch FROM create_time) * 1000000)::bigint AS exactly FROM outbox")
        assert row[7] == found[0].exactly
    assert store.backlog().pending == 1
    assert store.backlog().oldest_age_seconds < float("inf")
    store.holds.add([NewHold("t", "k", 1, "refused", "", dead_letter=True)])
    (letter,) = store.holds.fetch([1])
    assert letter[7] == row[7]
    assert store.delete_published([1], [row[7] + 1]) == 0
    assert store.delete_published([1], [row[7]]) == 1


def test_ids_at_both_ends(scene, store):
    """The lowest and the highest possible ids are found, left out and held like any other."""
    scene.execute("INSERT INTO outbox (id, kafka_topic) VALUES (%s, 't'), (%s, 't'), (5, 't')", [FIRST, LAST])
    rows = store.scan(RowQuery(10))
    assert [row[0] for row in rows] == [FIRST, 5, LAST]
    first, _, last = map(row_id, rows)
    assert [row[0] for row in store.scan(RowQuery(10, without_rows=[first, last]))] == [5]
    neighbours = RowId(LAST - 1, last.create_time), RowId(FIRST + 1, first.create_time)
    assert [row[0] for row in store.scan(RowQuery(10, without_rows=[first, last, *neighbours]))] == [5]
    store.holds.add([NewHold("t", None, LAST, "refused", ""), NewHold("t", None, FIRST, "refused", "")])
    holds = store.holds.read()
    assert [row[0] for row in store.scan(RowQuery(10, holds=holds))] == [5]
    assert [row[0] for row in store.mark(ME, RowQuery(10, holds=holds)).records] == [5]
    assert [row[0] for row in store.mark(ME, RowQuery(10)).records] == [FIRST, LAST]
    assert store.purge(ME, [FIRST, LAST], [first.create_time, last.create_time]) == 2


def test_the_lowest_id_is_shown(scene, capsys):
    """A page of pending records, and a search by id, find the lowest possible id, and an id that none can have."""
    scene.execute("INSERT INTO outbox (id, kafka_topic) VALUES (%s, 't'), (5, 't')", [FIRST])
    assert main(["peek", "--json", "--dsn", scene.database]) == 0
    assert [json.loads(line)["id"] for line in capsys.readouterr().out.splitlines()] == [FIRST, 5]
    assert main(["peek", "--id", str(FIRST), "--dsn", scene.database]) == 0
    assert main(["peek", "--json", "--after", str(FIRST), "--dsn", scene.database]) == 0
    assert main(["peek", "--id", str(2**63), "--dsn", scene.database]) != 0
    assert f"there is no record {2**63}" in capsys.readouterr().err


def test_record_without_a_topic(scene, store):
    """A row without a topic, in a hand-made table, is read as a record with an empty topic, and can be held."""
    scene.execute("ALTER TABLE outbox ALTER kafka_topic DROP NOT NULL")
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES (NULL, 'k'), ('t', 'k')")
    assert [row[1] for row in store.scan(RowQuery(10))] == ["", "t"]
    store.holds.add([NewHold("", "k", 1, "refused", "", dead_letter=True)])
    assert store.holds.release_gone() == 0
    assert [row[0] for row in store.scan(RowQuery(10, holds=store.holds.read()))] == [2]
    assert [row[0] for row in store.mark(ME, RowQuery(10, holds=store.holds.read())).records] == [2]
    (letter,) = store.holds.fetch([1])
    assert store.holds.delete_dead_lettered([1], [letter[7]]) == 1


@pytest.fixture
def set_for_all(scene):
    """Return a function that changes a setting for all later sessions of the database."""
    (name,) = scene.execute("SELECT quote_ident(current_database()) AS quoted")
    return lambda setting: scene.execute(f"ALTER DATABASE {name.quoted} SET {setting}")


def test_text_that_the_usual_encoding_has_not(scene, set_for_all, capsys):
    """Rows and holds are read whatever encoding sessions have by default: one key would end the harvester."""
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', '\u20ac')")
    set_for_all("client_encoding = 'LATIN1'")
    with closing(PostgresStore(scene.database)) as store:
        (record,) = store.scan(RowQuery(10, without_keys=[("t", "\u20ac\u20ac")]))
        assert record.key == "\u20ac"
        store.holds.add([NewHold("t", "\u20ac", 1, "refused", "")])
    assert main(["hold", "list", "--dsn", scene.database]) == 0
    assert "\u20ac" in capsys.readouterr().out


def test_sessions_are_read_committed(set_for_all, scene):
    """Statements are not serializable where sessions are by default: a purge that fails for that is a repeat."""
    set_for_all("default_transaction_isolation = 'serializable'")
    with closing(PostgresStore(scene.database)) as store:
        assert store.table.query("SHOW transaction_isolation") == [("read committed",)]


def test_odd_rows_are_shown(scene, capsys):
    """`outbox peek` and the console show every hostile row, and one without a topic and a time."""
    scene.execute("ALTER TABLE outbox ALTER kafka_topic DROP NOT NULL, ALTER create_time DROP NOT NULL")
    scene.execute("INSERT INTO outbox (create_time, kafka_topic) VALUES (NULL, NULL)")
    for row in hostile_rows(OutboxNames.of("shop.public.outbox"), "t"):
        if row.name != "id-smallest":  # behind which a page begins
            scene.execute(*insert("outbox", row))
    scene.hold("add_record", 1)
    assert main(["peek", "--json", "--limit", "1000", "--dsn", scene.database]) == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert len(shown) == scene.count()
    assert [row["topic"] for row in shown if row["hold_id"]] == [""]
    assert [["a", "1"], ["b", "2"]] in [row["headers"] for row in shown]
    with DatabaseSession(scene.database, "outbox", application_name="console") as session:
        assert len([record_as_json(row, 400) for row in peek(session, PeekQuery(limit=1000))]) == len(shown)
    for row in shown:
        assert main(["peek", "--id", str(row["id"]), "--dsn", scene.database]) == 0


def test_little_is_read_of_a_huge_row_to_show_it(scene):
    """Pages of records, holds and events read no more of keys and headers than a stash allows."""
    scene.execute(create_history_sql(TableName("outbox")))
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_header_keys, kafka_header_values) VALUES"
        " ('t', repeat('k', 1000000), ARRAY[repeat('n', 1000000)], ARRAY['x'::bytea]),"
        " ('t', NULL, array_fill(NULL::text, ARRAY[200000]), array_fill(NULL::bytea, ARRAY[200000]))"
    )
    scene.hold("add_record", 1)
    with DatabaseSession(scene.database, "outbox", application_name="console") as session:
        records = peek(session, PeekQuery())
        (event,) = History(session.table).events(session.connection, timedelta(hours=1))
        (whole, _) = peek(session, PeekQuery(value_bytes=2**20))
    (hold,) = scene.held()
    assert [len(one.key) for one in (records[0], hold, event)] == [MAX_KEY_BYTES] * 3
    assert [one.headers for one in records] == [(("(the headers are too large to be shown)", None),)] * 2
    assert whole.headers == (("n" * 1_000_000, b"x"),)
    assert (records[0].hold_id, records[1].hold_id) == (hold.id, None)


@pytest.mark.timeout(180)
def test_millions_of_empty_headers_are_not_measured_one_by_one(scene, limited):
    """A row of some kilobytes with thirty million headers does not hold up a scan for minutes."""
    many = 30_000_000
    columns = "kafka_topic, kafka_header_keys, kafka_header_values"
    insert = f"INSERT INTO outbox ({columns}) SELECT 't', array_fill(NULL::text, ARRAY[{many}]), "
    scene.execute(f"{insert} array_fill(NULL::bytea, ARRAY[{many}])")
    scene.execute(f"INSERT INTO outbox ({columns}) SELECT {columns} FROM outbox, generate_series(1, 20)")
    limited.table.set_timeout(60.0)
    records = [record for record in limited.scan(RowQuery(100)) if isinstance(record.value, OversizedValue)]
    assert len(records) == 21


def test_columns_of_others_are_no_matter(scene, store):
    """A table may have columns of its owner's, whatever statements of ours call theirs."""
    names = "content held ids size rows number bytes noted topic before contents measured reason record_id error first"
    scene.execute(f"ALTER TABLE outbox {', '.join(f'ADD {name} text' for name in names.split())}")
    scene.execute("INSERT INTO outbox (kafka_topic) SELECT 't' FROM generate_series(1, 3)")
    small, all_of_them = RowQuery(3, max_bytes=1), RowQuery(3)
    assert len(store.scan(small)) == len(store.mark(ME, small).records) == 1
    assert (len(store.scan(all_of_them)), len(store.mark(ME, all_of_them).records)) == (3, 2)
    assert store.reset(ME, [3]) == 1
    assert (store.marks.count().number, store.marks.hold(1), store.marks.release_held()) == (2, 1, 1)
    store.holds.add([NewHold("t", None, 1, "refused", "", dead_letter=True)])
    assert [row.id for row in store.scan(all_of_them._replace(holds=store.holds.read()))] == [2, 3]
    assert (store.backlog().held.number, store.holds.release_gone()) == (1, 0)
    (letter,) = store.holds.fetch([1])
    assert store.holds.delete_dead_lettered([1], [letter.create_time]) == 1
    assert store.delete_published([2, 3], [row.create_time for row in store.find([2, 3])]) == 2


def test_columns_of_other_types_are_refused(scene):
    """The check refuses a column of another type."""
    scene.execute("ALTER TABLE outbox ALTER kafka_header_keys DROP DEFAULT")
    scene.execute("ALTER TABLE outbox ALTER kafka_header_keys TYPE integer[] USING '{}'")
    with pytest.raises(OutboxTableError, match="kafka_header_keys is integer"):
        PostgresStore(scene.database).check()
    scene.execute("ALTER TABLE outbox ALTER kafka_partition TYPE text")
    with pytest.raises(OutboxTableError, match="kafka_partition is text, expected integer"):
        PostgresStore(scene.database).check()


def test_partitions_beyond_any_are_told_from_sizes(scene, store):
    """A partition that only a bigint can hold is none of Kafka's, and not the size of a large message."""
    scene.execute("ALTER TABLE outbox ALTER kafka_partition TYPE bigint")
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_partition) VALUES ('t', 2::bigint ^ 41), ('t', 7)")
    assert [(row.partition, row.value) for row in store.scan(RowQuery(9))] == [(2**31, None), (7, None)]


# -- ids that may repeat

_REPEAT = {
    "no index": "ALTER TABLE outbox DROP CONSTRAINT outbox_pkey",
    "an index of two columns": "ALTER TABLE outbox DROP CONSTRAINT outbox_pkey, ADD PRIMARY KEY (id, create_time)",
    "heirs": "CREATE TABLE heir (LIKE outbox INCLUDING ALL) INHERITS (outbox)",
}


@pytest.mark.parametrize("why", _REPEAT)
def test_rows_of_one_id(scene, caplog, why):
    """The check warns of ids that may repeat; a mark refuses rows of one id by name, and scans and counts work."""
    scene.execute(_REPEAT[why])
    insert_other = "INSERT INTO {} (id, create_time, kafka_topic) VALUES (2, now() + '1 s', 't')"
    scene.execute("INSERT INTO outbox (kafka_topic) VALUES ('t'), ('t'), ('t')")
    scene.execute(insert_other.format("heir" if why == "heirs" else "outbox"))
    with closing(PostgresStore(scene.database)) as store:
        store.check()
        assert caplog.text.count("two rows of outbox may have one id") == 1
        assert [row.id for row in store.scan(RowQuery(9))] == [1, 2, 2, 3]
        assert store.backlog().pending == 4
        assert [row.id for row in store.mark(ME, RowQuery(1)).records] == [1]
        for limit in (1, 9):
            with pytest.raises(OutboxTableError, match=r"more than one row with id 2\b.*ADD PRIMARY KEY"):
                store.mark(uuid4(), RowQuery(limit, without_rows=[row_id(row) for row in store.find([1])]))
        scene.execute("DELETE FROM outbox WHERE id = 1")
        scene.execute("UPDATE outbox SET id = 7 WHERE id = 2 AND create_time > now()")
        assert len(store.mark(uuid4(), RowQuery(9)).records) == 3


@pytest.mark.parametrize("why", _REPEAT)
def test_rows_of_one_id_are_deleted_by_their_times(scene, why):
    """Published rows of one id are deleted together, each by its own create time."""
    scene.execute(_REPEAT[why])
    other = "heir" if why == "heirs" else "outbox"
    scene.execute("INSERT INTO outbox (kafka_topic) VALUES ('t'), ('t'), ('t')")
    scene.execute(f"INSERT INTO {other} (id, create_time, kafka_topic) VALUES (2, now() + '1 s', 't')")
    with closing(PostgresStore(scene.database)) as store:
        ids, times = ids_and_times(store.scan(RowQuery(9)))
        assert store.delete_published([2, 2], [times[1] - 1, times[1] + 1]) == 0
        assert store.delete_published(ids, times) == 4


def test_ids_that_cannot_repeat(database, caplog):
    """A primary key of the id alone, of a partitioned table too, is nothing to warn of."""
    ddl = create_table_sql(TableName("parts")).partition("WITH (")[0]
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(f"{ddl} PARTITION BY HASH (id)")
        connection.execute("CREATE TABLE part PARTITION OF parts FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    for table in ("parts", "part"):
        with closing(PostgresStore(database, table)) as store:
            store.check()
    assert not caplog.text


# -- sizes


def test_rows_count_with_all_they_have(scene, store):
    """Keys, header names and header values fill a batch by their size in memory, however well they are compressed."""
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_header_keys, kafka_header_values) VALUES"
        " ('t', repeat('k', 100000), '{}', '{}'), ('t', repeat('l', 100000), '{}', '{}'),"
        " ('t', 'a', ARRAY[repeat('n', 100000)], '{x}'), ('t', 'b', ARRAY[repeat('n', 100000)], '{x}'),"
        " ('t', 'c', '{a}', ARRAY[repeat('v', 100000)::bytea]), ('t', 'd', '{a}', ARRAY[repeat('v', 100000)::bytea]),"
        " ('t', 'e', array_fill('xy'::text, ARRAY[2000]), array_fill('xy'::bytea, ARRAY[2000]))"
    )
    seen: set[RowId] = set()
    for pair in ([1], [2], [3], [4], [5], [6], [7]):
        rows = store.scan(RowQuery(10, without_rows=seen, max_bytes=90_000))
        assert [row[0] for row in rows] == pair
        assert bytes_of(rows) >= 90_000, "by its size the batch is known to have been cut short"
        seen.update(map(row_id, rows))


@pytest.mark.parametrize("text", [True, False])
def test_sizes_of_ordinary_rows(scene, text):
    """Python's size of a row is at least the database's: otherwise a batch that was cut short looks complete."""
    if text:
        scene.execute("DROP TABLE outbox")
        scene.execute(create_table_sql(TableName("outbox"), "text"))
    kind = "text" if text else "bytea"
    rows = [
        ("t", "k", "v", [], []),
        ("topic", "schl\u00fcssel", "\u4e2d\u6587", ["n\u00e4me"], ["w\u00e9rt"]),
        ("t", "x" * 90, "y" * 900, ["a", "b", "c"], ["1", "22", None]),
        ("t", "x", None, ["", "ab", "abc", "abcd"], ["", "ab", "abc", "abcde"]),
    ]
    for topic, key, value, names, values in rows:
        scene.execute(
            "INSERT INTO outbox (create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys,"
            f" kafka_header_values) VALUES (now(), %s, %s, %s::{kind}, %s, %s::{kind}[])",
            [
                topic,
                key,
                value if text or value is None else value.encode(),
                names,
                [value if text or value is None else value.encode() for value in values],
            ],
        )
    store = PostgresStore(scene.database)
    sizes = scene.execute(f"SELECT {sql.SIZE} AS size FROM outbox ORDER BY id")
    for row, (size,) in zip(store.scan(RowQuery(10)), sizes, strict=True):
        assert size <= bytes_of([row]) <= 4 * size + 64
    store.close()


LIMIT = 50_000


@pytest.fixture
def limited(scene):
    """A store whose client has a limit on messages."""
    store = PostgresStore(scene.database, max_message_bytes=LIMIT)
    store.check()
    yield store
    store.close()


def test_what_cannot_be_sent_is_not_read(scene, limited):
    """Of a message that is too large by value, key or headers only the size is read; the others are read whole."""
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) VALUES"
        " ('t', 'value', repeat('v', 60000)::bytea, '{}', '{}'), ('t', repeat('k', 60000), 'v', '{}', '{}'),"
        " ('t', 'names', 'v', ARRAY[repeat('n', 60000)], '{x}'),"
        " ('t', 'values', 'v', '{a}', ARRAY[repeat('v', 60000)::bytea]),"
        " ('t', 'sum', repeat('v', 25100)::bytea, '{a}', ARRAY[repeat('v', 25100)::bytea]),"
        " ('t', 'fits', repeat('v', 49996)::bytea, '{}', '{}'), ('t', 'null', NULL, '{a}', '{x}')"
    )
    for read in (
        lambda: limited.scan(RowQuery(10)),
        lambda: limited.scan(RowQuery(10, without_rows=[RowId(99, 0)], without_keys={("t", "x")})),
        lambda: limited.mark(uuid4(), RowQuery(10)).records,
        lambda: limited.mark(uuid4(), RowQuery(10, without_keys={("t", "x")})).records,
    ):
        rows = read()
        assert [row[0] for row in rows] == [1, 2, 3, 4, 5, 6, 7]
        for row in rows[:5]:
            assert isinstance(row[3], OversizedValue)
            assert row[3].size > LIMIT == row[3].limit
            assert row[4] is row[5] is None
            assert bytes_of([row]) < 10_000
        assert rows[1][2] == held_key("k" * 60_000)
        assert len(rows[5][3]) == 49_996
        assert rows[6][3:6] == (None, ["a"], [b"x"])
    limited.holds.add([NewHold("t", row[2], row[0], "refused", "", dead_letter=True) for row in rows[:2]])
    assert limited.holds.release_gone() == 0
    assert [row[0] for row in limited.scan(RowQuery(2, holds=limited.holds.read()))] == [3, 4]
    assert isinstance(limited.holds.fetch([1])[0][3], OversizedValue)


def test_headers_of_millions_of_nulls(scene, limited):
    """A row of some bytes whose headers would fill the memory is not read, and its size overflows no integer."""
    nulls = "array_fill(NULL::{}, ARRAY[40000000])"
    scene.execute(
        "INSERT INTO outbox (kafka_topic, kafka_key, kafka_value, kafka_header_keys, kafka_header_values) VALUES"
        f" ('t', 'k', 'v', {nulls.format('text')}, {nulls.format('bytea')}), ('t', 'l', 'w', '{{}}', '{{}}')"
    )
    for read in (lambda: limited.scan(RowQuery(10)), lambda: limited.mark(uuid4(), RowQuery(10)).records):
        hostile, other = read()
        assert isinstance(hostile[3], OversizedValue)
        assert hostile[4] is hostile[5] is None
        assert other[3] == b"w"


def test_holds_of_long_keys(scene, store):
    """A hold knows a long key by its digest: it covers the record and its followers, and no look-alike."""
    long, like = "k" * 300_000, held_key("k" * 300_000)
    for key in (long, long, "k" * 299_999, like, "\u00e9" * 257):
        scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', %s)", [key])
    store.holds.add(
        [NewHold("t", long, 1, "refused", "", dead_letter=True), NewHold("t", "\u00e9" * 257, 5, "refused", "")]
    )
    holds = store.holds.read()
    assert sum(len(key) for _, key in holds.lanes) < 1_000
    assert [row[0] for row in store.scan(RowQuery(10, holds=holds))] == [3, 4]
    assert [row[0] for row in store.mark(ME, RowQuery(10, holds=holds)).records] == [3, 4]
    assert [holds.covers(row) for row in store.scan(RowQuery(10))] == [True, True, False, False, True]
    assert [row[0] for row in store.scan(RowQuery(10, without_keys={("t", long), ("t", like)}))] == [3, 5]
    assert scene.execute("SELECT length(kafka_key) AS n FROM outbox_hold WHERE record_id = 1")[0].n == 300_000
    assert store.holds.release_gone() == 0
    (letter,) = store.holds.fetch([1])
    assert store.holds.delete_dead_lettered([1], [letter[7]]) == 1
    assert [row[0] for row in store.scan(RowQuery(10, holds=store.holds.read()))] == [2, 3, 4]


# -- rows that a DELETE leaves

_KEEP_ROWS = {
    "trigger": [
        "CREATE FUNCTION keep() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN RETURN NULL; END'",
        "CREATE TRIGGER soft_delete BEFORE DELETE ON outbox FOR EACH ROW EXECUTE FUNCTION keep()",
    ],
    "rule": ["CREATE RULE archive AS ON DELETE TO outbox DO INSTEAD NOTHING"],
}
_NAMED = {"trigger": "soft_delete", "rule": "rule archive"}


@pytest.fixture
def role(scene):
    """A role with the harvester's rights."""
    with scene.role("GRANT SELECT, INSERT, UPDATE, DELETE ON outbox, outbox_hold TO {role}") as name:
        yield name


@pytest.mark.parametrize("by", _KEEP_ROWS)
def test_delete_that_deletes_nothing(scene, role, by, caplog):
    """Rows that remain after their DELETE are an error that names the obstacle; absent rows are not an error."""
    for statement in _KEEP_ROWS[by]:
        scene.execute(statement)
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'k'), ('t', 'l')")
    store = PostgresStore(psycopg.conninfo.make_conninfo(scene.database, user=role))
    store.check()
    assert _NAMED[by] in caplog.text
    times = [row[7] for row in store.scan(RowQuery(10))]
    with pytest.raises(RowsRemain, match=r"2 published rows of outbox \(the first is 1\)") as raised:
        store.delete_published([1, 2], times)
    assert _NAMED[by] in str(raised.value)
    store.mark(ME, RowQuery(10))
    with pytest.raises(RowsRemain):
        store.purge(ME, [1, 2], times)
    store.holds.add([NewHold("t", "k", 1, "refused", "", dead_letter=True)])
    with pytest.raises(OutboxError if by == "rule" else RowsRemain):  # with a rule no DELETE can return rows
        store.holds.delete_dead_lettered([1], times[:1])
    assert store.holds.read().lanes == {("t", "k")}, "its hold is not released"
    assert store.delete_published([7, 8], [1, 2]) == store.purge(uuid4(), [1, 2], times) == 0
    assert store.purge(ME, [9], [1]) == 0
    store.close()


def test_obstacles_of_an_ordinary_table(store):
    """A table that the library made has no obstacles."""
    assert store.table.obstacles() == []


# -- the session


def test_timeouts_of_the_role_do_not_end_sessions(scene, role):
    """Time-outs that a role sets do not apply to the harvester's sessions."""
    for setting in scene.execute(
        "SELECT name FROM pg_settings WHERE name IN ('transaction_timeout', 'lock_timeout', 'idle_session_timeout',"
        " 'statement_timeout', 'idle_in_transaction_session_timeout')"
    ):
        scene.execute(f"ALTER ROLE \"{role}\" SET {setting.name} = '150ms'")
    scene.execute("INSERT INTO outbox (kafka_topic) VALUES ('t')")
    store = PostgresStore(psycopg.conninfo.make_conninfo(scene.database, user=role))
    store.check()
    with psycopg.connect(scene.database) as other:
        other.execute("LOCK TABLE outbox")
        release = threading.Timer(0.4, other.rollback)
        release.start()
        assert len(store.mark(ME, RowQuery(10)).records) == 1
        release.join()
    store.close()


def test_a_session_that_is_frozen_within_a_transaction_is_ended(store):
    """Its locks are free for the next leader after the ten seconds of every silence."""
    assert store.table.query("SHOW idle_in_transaction_session_timeout") == [("10s",)]


def test_quoted_identifiers_of_the_database(scene, role, capsys):
    """A role for which PostgreSQL quotes all identifiers, those of types too, harvests and shows rows as others do."""
    scene.execute(f'ALTER ROLE "{role}" SET quote_all_identifiers = on')
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_value) VALUES ('t', 'whole')")
    data_source = psycopg.conninfo.make_conninfo(scene.database, user=role)
    with closing(PostgresStore(data_source)) as store:
        store.check()
        assert len(store.mark(ME, RowQuery(10)).records) == 1
    assert main(["peek", "--dsn", data_source]) == 0
    assert "whole" in capsys.readouterr().out


@pytest.mark.parametrize("code", ["25P04", "57P05", "53300", "XX000", "08006"])
def test_errors_of_the_server_are_outages(scene, store, code):
    """An error that does not concern the table is an outage, whatever class the driver gives it."""
    scene.execute(
        "CREATE FUNCTION fail() RETURNS trigger LANGUAGE plpgsql AS"
        f" $$ BEGIN RAISE EXCEPTION 'no' USING ERRCODE = '{code}'; END $$"
    )
    scene.execute("CREATE TRIGGER fail BEFORE UPDATE ON outbox FOR EACH STATEMENT EXECUTE FUNCTION fail()")
    with pytest.raises(StoreUnavailable):
        store.mark(ME, RowQuery(10))


def test_table_that_is_altered_under_prepared_statements(scene, store):
    """After an ALTER the store checks the table once more, and either goes on or names the fault."""
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'k')")
    store.scan(RowQuery(10))
    scene.execute("ALTER TABLE outbox ALTER kafka_key TYPE varchar(100)")
    with pytest.raises(StoreUnavailable, match="altered"):
        store.scan(RowQuery(10))
    assert len(store.scan(RowQuery(10))) == 1
    scene.execute("ALTER TABLE outbox ALTER kafka_value TYPE text USING 'x'")
    scene.execute("ALTER TABLE outbox ALTER kafka_topic TYPE integer USING 1")
    with pytest.raises(StoreUnavailable, match="altered"):
        store.scan(RowQuery(10))
    with pytest.raises(OutboxTableError, match="kafka_topic is integer"):
        store.scan(RowQuery(10))


@pytest.fixture
def pooled(monkeypatch):
    """Have each connection look like one to a pooler; the function that it returns has new ones share one session."""
    connect, opened = BoundedConnection.connect, []

    def lend(*_, **__):
        if not opened or opened[-1].closed:
            opened.append(connect(*_, **__))
            return opened[-1]
        return nullcontext(opened[-1])

    monkeypatch.setattr(sessions, "_WHO", "SELECT -1, current_user")
    return lambda: monkeypatch.setattr(BoundedConnection, "connect", lend)


@pytest.mark.usefixtures("pooled")
def test_pooler_of_sessions_is_accepted(store):
    """A session that no other connection gets is used, whatever its process id looks like."""
    store.close()
    store.check()
    assert store.table.query("SHOW search_path") == [("pg_catalog, pg_temp",)]


_COMMANDS = ["peek", "hold list", "restash --topic t --dry-run", "schema --apply", "inbox prune --older-than 1d"]


@pytest.fixture
def sent(store, monkeypatch):
    """The statements that connections are given from now on; the store's is closed."""
    store.close()
    statements, execute = [], psycopg.Connection.execute

    def note(connection, statement, *rest, **options):
        statements.append(str(statement))
        return execute(connection, statement, *rest, **options)

    monkeypatch.setattr(psycopg.Connection, "execute", note)
    return statements


@pytest.mark.parametrize("command", _COMMANDS)
def test_pooler_of_transactions_is_refused(database, pooled, sent, capsys, command):
    """A session that serves two connections is an error, before it gets a setting that other clients would have."""
    pooled()
    with pytest.raises(OutboxTableError, match="pool_mode=transaction"):
        PostgresStore(database).check()
    assert main([*command.split(), "--dsn", database]) == 2
    assert "pool_mode=transaction" in capsys.readouterr().err
    assert "set_config" not in "".join(sent)


def test_pool_without_another_connection_is_an_outage(store, monkeypatch):
    """The check for such poolers needs a second connection; if there is none, that is an outage."""
    store.close()
    connect, opened = BoundedConnection.connect, []

    def connect_once(*arguments, **settings):
        if opened:
            raise psycopg.OperationalError("no more connections allowed (max_client_conn)")
        opened.append(connect(*arguments, **settings))
        return opened[0]

    with monkeypatch.context() as patched:
        patched.setattr(sessions, "_WHO", "SELECT -1, current_user")
        patched.setattr(BoundedConnection, "connect", connect_once)
        with pytest.raises(StoreUnavailable, match="no more connections"):
            store.check()


# -- holds


def test_holds_are_read_when_they_change(scene, store):
    """Unchanged holds are the very same object; an insert, update or delete is visible at once."""
    seen = []

    def look():
        holds = store.holds.read()
        assert store.holds.read() is holds
        assert all(holds is not other for other in seen)
        seen.append(holds)
        return holds

    assert not look()
    store.holds.add([NewHold("t", f"k{n}", n, "refused", "") for n in range(1, 4)])
    assert len(look().lanes) == 3
    scene.execute("DELETE FROM outbox_hold WHERE record_id = 2")
    assert len(look().lanes) == 2
    scene.execute("UPDATE outbox_hold SET dead_letter = true WHERE record_id = 1")
    assert look().requests == {1: ""}
    scene.execute(
        "WITH gone AS (DELETE FROM outbox_hold WHERE record_id = 1 RETURNING *) INSERT INTO outbox_hold"
        " SELECT id, outbox, kafka_topic, 'other', record_id FROM gone"
    )
    assert ("t", "other") in look().lanes
    scene.execute("DELETE FROM outbox_hold")
    assert not look()


def test_bury_releases_no_strangers_hold(scene, store):
    """A late repeat of a dead letter's deletion leaves alone a new hold under the same id, of another key."""
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'old')")
    store.holds.add([NewHold("t", "old", 1, "refused", "", dead_letter=True)])
    (letter,) = store.holds.fetch([1])
    assert store.holds.delete_dead_lettered([1], [letter[7]]) == 1
    assert not store.holds.read()
    scene.execute("TRUNCATE outbox RESTART IDENTITY")
    scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', 'new')")
    store.holds.add([NewHold("t", "new", 1, "refused", "", dead_letter=True)])
    assert store.holds.delete_dead_lettered([1], [letter[7]]) == 0
    assert store.holds.read().lanes == {("t", "new")}
