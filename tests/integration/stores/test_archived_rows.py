"""The archive of an outbox: deletions that keep what they delete, days that come and go, and records stashed anew."""

from datetime import UTC, datetime, timedelta
from uuid import uuid4

import psycopg
import pytest

from outbox_core.cli import main
from outbox_core.errors import InvalidConfig, OutboxTableError, RightsMissing
from outbox_core.record import Header, OutboxRecord
from outbox_core.retention.archive import RESTASH_HEADER, Archive, archive_statements, drop_archive_statements
from outbox_core.retention.history import History
from outbox_core.schema import TableName, create_history_sql, grants_sql
from outbox_core.stores.interface import NewHold, RowQuery
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import Scene
from tests.services import as_role

ME = uuid4()
NAME = TableName("outbox")


@pytest.fixture(params=["binary", "text"])
def layout(request):
    """Return the layout of the outbox."""
    return request.param


@pytest.fixture
def scene(database, layout):
    """Return an outbox with its archive."""
    scene = Scene(database, "", layout=layout)
    for statement in archive_statements(NAME):
        scene.execute(statement)
    yield scene
    scene.close()


@pytest.fixture
def store(scene):
    """Return a store that archives, and has checked the table."""
    store = PostgresStore(scene.database, archive_days=30)
    store.check()
    yield store
    store.close()


def purge(store, records):
    """Purge these records; return how many were."""
    return store.purge(ME, [record.id for record in records], [record.create_time for record in records])


def archived(scene, columns="id, kafka_topic, kafka_key"):
    """Return the archived rows by id."""
    return [tuple(row) for row in scene.execute(f"SELECT {columns} FROM outbox_archive ORDER BY id")]


def test_each_deletion_archives_what_it_deletes(scene, store):
    """A purge, a deletion of published rows and one of dead letters archive exactly what they delete, whole."""
    scene.stash(
        OutboxRecord("a", "k", "one", headers=[Header("h", "v")]), *(OutboxRecord("a", f"k{n}", "x") for n in range(4))
    )
    before = scene.execute("SELECT id, create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys FROM outbox")
    records = store.scan(RowQuery(3))
    store.mark(ME, RowQuery(2))
    assert purge(store, records) == 2, "the third is not marked"
    third, fourth, _ = store.scan(RowQuery(10))
    assert store.delete_published([3, 4], [third.create_time, fourth.create_time + 1]) == 1
    store.holds.add([NewHold("a", "k2", 4, "refused", "")])
    assert store.holds.delete_dead_lettered([4], [fourth.create_time]) == 1
    assert scene.count() == 1
    columns = "id, create_time, kafka_topic, kafka_key, kafka_value, kafka_header_keys"
    assert archived(scene, columns) == [tuple(row) for row in before[:4]]
    assert archived(scene, "dead_letter") == [(False,), (False,), (False,), (True,)]
    assert archived(scene, "leader_id") == [(ME,), (ME,), (None,), (None,)]


def test_days_are_partitions_that_come_and_go(scene, store):
    """There is a partition for today and the next days; those that are too old are dropped, with their rows."""

    def days():
        found = scene.execute("SELECT inhrelid::regclass::text AS name FROM pg_inherits ORDER BY 1")
        return [row.name.removeprefix("outbox_archive_") for row in found if row.name.startswith("outbox_archive_")]

    today = datetime.now(UTC).date()
    coming = [f"{today + timedelta(days=n):%Y%m%d}" for n in range(4)]
    assert days() == [*coming, "default"]
    scene.fill("t", 2)
    purge(store, store.mark(ME, RowQuery(2)).records)
    assert scene.execute(f"SELECT count(*) FROM outbox_archive_{coming[0]}")[0].count == 2
    old, young = today - timedelta(days=31), today - timedelta(days=30)
    for day in (old, young):
        scene.execute(
            f"CREATE TABLE outbox_archive_{day:%Y%m%d} PARTITION OF outbox_archive"
            f" FOR VALUES FROM ('{day} 00:00+00') TO ('{day + timedelta(days=1)} 00:00+00')"
        )
    scene.execute("CREATE TABLE moved AS SELECT * FROM outbox_archive")
    for age in (29, 30, 40):
        scene.execute(f"UPDATE moved SET archive_time = now() - interval '{age} days'")
        scene.execute("INSERT INTO outbox_archive SELECT * FROM moved")
    assert store.rotate_archive() == 1
    assert days() == [f"{young:%Y%m%d}", *coming, "default"]
    assert len(archived(scene)) == 6, "rows of 40 days ago are gone from the default partition, too"
    assert store.rotate_archive() == 0


@pytest.mark.parametrize("layout", ["binary"], indirect=True)
def test_day_without_a_partition_stops_nothing(scene, store):
    """If partitions were not made in time, rows go into the default one, and making others goes on without error."""
    for statement in scene.execute(
        "SELECT 'DROP TABLE ' || inhrelid::regclass AS drop FROM pg_inherits"
        " WHERE inhparent = 'outbox_archive'::regclass AND inhrelid::regclass::text !~ 'default'"
    ):
        scene.execute(statement.drop)
    scene.fill("t", 1)
    assert purge(store, store.mark(ME, RowQuery(1)).records) == 1
    assert scene.execute("SELECT count(*) FROM outbox_archive_default")[0].count == 1
    store.rotate_archive()
    made = scene.execute("SELECT count(*) FROM pg_inherits WHERE inhparent = 'outbox_archive'::regclass")[0].count
    assert made == 4, "tomorrow's and two more; today's rows are in the default partition"


@pytest.mark.parametrize("layout", ["binary"], indirect=True)
def test_publication_of_all_tables(scene, store):
    """Under a logical publication of all tables rows are archived, and days come and go."""
    scene.execute("CREATE PUBLICATION everything FOR ALL TABLES")
    scene.fill("t", 3)
    assert purge(store, store.mark(ME, RowQuery(9)).records) == 3
    assert store.rotate_archive() == 0
    assert len(archived(scene)) == 3


def test_rotation_waits_for_no_standby(scene, store):
    """Partitions are made and dropped without a wait for a synchronous standby; the next commit waits for it."""
    scene.execute(
        "CREATE OR REPLACE FUNCTION outbox_archive_rotate(keep_days integer) RETURNS integer LANGUAGE sql AS "
        "$$ SELECT (current_setting('synchronous_commit') = 'local')::integer $$"
    )
    assert store.rotate_archive() == 1
    assert store.table.query("SHOW synchronous_commit") == [("on",)]


@pytest.mark.parametrize("layout", ["binary"], indirect=True)
def test_printed_grants_suffice(scene, topic_name):
    """A role with the printed grants archives and rotates, and can do neither without; it cannot delete."""
    for days in ("0", "-100000", "NULL"):
        with pytest.raises(psycopg.Error, match="keep_days must be at least 1"):
            scene.execute(f"SELECT outbox_archive_rotate({days})")
    role = topic_name("harvester")
    scene.execute(f'CREATE ROLE "{role}" LOGIN')
    store = PostgresStore(as_role(scene.database, role), archive_days=30)
    try:
        scene.execute(grants_sql(NAME, "postgres", role).replace('FROM "postgres", ', "FROM "))
        scene.execute(f'REVOKE EXECUTE ON FUNCTION outbox_archive_rotate(integer) FROM "{role}"')
        with pytest.raises(RightsMissing, match="GRANT EXECUTE ON FUNCTION"):
            store.check()
        scene.execute(grants_sql(NAME, "postgres", role).replace('FROM "postgres", ', "FROM "))
        store.check()
        scene.fill("t", 1)
        assert purge(store, store.mark(ME, RowQuery(1)).records) == 1
        assert store.rotate_archive() == 0
        for statement in ("DELETE FROM outbox_archive", "DROP TABLE outbox_archive"):
            with (
                psycopg.connect(as_role(scene.database, role)) as connection,
                pytest.raises(psycopg.errors.InsufficientPrivilege),
            ):
                connection.execute(statement)
    finally:
        store.close()
        scene.execute(f'DROP OWNED BY "{role}"; DROP ROLE "{role}"')


@pytest.mark.parametrize("layout", ["binary"], indirect=True)
def test_missing_archive_is_an_error_at_the_start(scene, store):
    """A harvester that shall archive does not start without an archive, and says how to make it."""
    for statement in drop_archive_statements(NAME):
        scene.execute(statement)
    with pytest.raises(OutboxTableError, match=r"outbox schema --archive --table outbox"):
        store.check()
    with scene.connect() as connection, pytest.raises(OutboxTableError, match="nothing was archived"):
        Archive().select(connection, "t")


def test_illegal_names_are_refused():
    """A name that cannot be written into the function is refused."""
    with pytest.raises(InvalidConfig, match="none of ' % \\$ @"):
        archive_statements(TableName("it's"))


@pytest.fixture
def filled(scene, store, monkeypatch):
    """Return an archive of records 1 to 6: for orders, for mails, and a dead letter of orders; the last one is old."""
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", scene.database)
    scene.execute(create_history_sql(NAME))
    scene.stash(*(OutboxRecord("orders", f"k{n % 2}", f"v{n}", headers=[Header("h", "v")]) for n in range(4)))
    scene.stash(OutboxRecord("mails", "k0", "v4"), OutboxRecord("orders", "k0", "v5"))
    assert purge(store, store.mark(ME, RowQuery(10)).records) == 6
    scene.execute("UPDATE outbox_archive SET dead_letter = true WHERE id = 4")
    scene.execute("UPDATE outbox_archive SET archive_time = now() - interval '2 hours' WHERE id = 6")
    return scene


def test_restash_stashes_anew_in_order_and_marked(filled, capsys):
    """The published records of a topic come anew in their old order, whole, with the old id in a header."""
    assert main(["restash", "--topic", "orders", "--reason", "consumer lost them"]) == 0
    assert capsys.readouterr().out == "stashed 4 records of topic orders anew\n"
    text = lambda value: value if isinstance(value, str) else bytes(value).decode()  # noqa: E731
    rows = filled.rows()
    assert [(row.kafka_key, text(row.kafka_value)) for row in rows] == [
        ("k0", "v0"),
        ("k1", "v1"),
        ("k0", "v2"),
        ("k0", "v5"),
    ]
    assert [list(row.kafka_header_keys) for row in rows] == [["h", RESTASH_HEADER]] * 3 + [[RESTASH_HEADER]]
    assert [text(row.kafka_header_values[-1]) for row in rows] == [f"public.outbox:{n}" for n in (1, 2, 3, 6)]
    assert min(row.id for row in rows) > 6
    assert {row.leader_id for row in rows} == {None}
    assert len(archived(filled)) == 6
    with filled.connect() as connection:
        (event,) = History().events(connection, timedelta(hours=1))
    assert (event.kind, event.topic, event.reason) == ("restashed", "orders", "4 records: consumer lost them")


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["--key", "k1"], [2]),
        (["--dead-letters"], [4]),
        (["--since", "1h"], [1, 2, 3]),
        (["--until", "1h"], [6]),
        (["--since", "2020-01-01T00:00+01:00", "--until", "2999-01-01"], [1, 2, 3, 6]),
        (["--since", "1h", "--key", "nobody"], []),
    ],
)
@pytest.mark.parametrize("layout", ["binary"], indirect=True)
def test_restash_takes_what_is_named(filled, capsys, arguments, expected):
    """Key and times choose among a topic's published records; a dry run counts the same ones, and changes nothing."""
    assert main(["restash", "--topic", "orders", *arguments, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"would stash {len(expected)} record" if expected else "no archived record")
    assert filled.count() == 0
    assert main(["restash", "--topic", "orders", *arguments]) == 0
    assert [int(bytes(row.kafka_header_values[-1]).split(b":")[1]) for row in filled.rows()] == expected


def test_wrong_times_are_refused(capsys):
    """Arguments that are neither times nor ages are refused, with the notation."""
    with pytest.raises(SystemExit):
        main(["restash", "--topic", "orders", "--since", "yesterday"])
    assert "'yesterday' is neither a time" in capsys.readouterr().err


@pytest.mark.real_broker
def test_dead_letters_with_odd_headers_are_stashed_anew(scene, store):
    """Of a dead letter's headers a restash takes the pairs, as the dead letter has them."""
    nested, few, none = ("{{x,y}}", "{{1},{2}}"), ("{x,y}", "{1}"), ("{}", "{}")
    for names, values in (nested, few, none):
        scene.execute(
            "INSERT INTO outbox_archive (id, create_time, kafka_topic, kafka_key, kafka_header_keys,"
            " kafka_header_values, dead_letter) SELECT count(*), now(), 't', 'k', %s, %s, true FROM outbox_archive",
            [names, values],
        )
    command = ["restash", "--topic", "t", "--dead-letters", "--dsn", scene.database]
    assert main(command) == 0
    mark = [b"public.outbox:0", b"public.outbox:1", b"public.outbox:2"]
    told = [(row.header_keys, [as_bytes(value) for value in row.header_values]) for row in store.scan(RowQuery(9))]
    assert told == [
        (["x", "y", RESTASH_HEADER], [b"1", b"2", mark[0]]),
        (["x", RESTASH_HEADER], [b"1", mark[1]]),
        ([RESTASH_HEADER], [mark[2]]),
    ]


@pytest.mark.parametrize("layout", ["binary"], indirect=True)
def test_record_that_the_outbox_refuses(filled, capsys):
    """A restash of a record that the outbox's constraints refuse is an error of one line, and stashes nothing."""
    filled.execute("UPDATE outbox_archive SET kafka_partition = -5 WHERE id = 2")
    assert main(["restash", "--topic", "orders"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "outbox_partition_in_range" in line
    assert not filled.count()


def as_bytes(value):
    """Return a header's value as bytes in both layouts."""
    return value.encode() if isinstance(value, str) else value


@pytest.mark.parametrize("delivery", ["at-least-once", "exactly-once"])
def test_harvester_archives_what_it_publishes(database, kafka_bootstrap, make_topic, delivery):
    """Both deliveries move every published record into the archive, and a restash is published once more."""
    scene, topic = Scene(database, kafka_bootstrap), make_topic()
    for statement in archive_statements(NAME):
        scene.execute(statement)
    scene.fill(topic, 200)
    config = {"delivery": delivery, "retention": "archive"}
    scene.drain(config=config)
    assert [row[0] for row in archived(scene)] == list(range(1, 201))
    with scene.connect() as connection:
        assert Archive().restash(connection, topic, "k7") == 2
    scene.drain(config=config)
    messages = scene.read(topic, isolation="read_committed")
    assert len(messages) == 202
    assert [m.key for m in messages if RESTASH_HEADER in dict(m.headers)] == [b"k7", b"k7"]
    assert len(archived(scene)) == 202
    scene.close()
