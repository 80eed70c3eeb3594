"""Holds by their interfaces (functions and `outbox hold`), and their part of the store."""

import json
import threading
import time
from contextlib import closing, contextmanager, suppress
from uuid import uuid4

import psycopg
import pytest

from outbox_core import Holds, OutboxRecord
from outbox_core.cli import main
from outbox_core.errors import (
    InvalidConfig,
    OutboxError,
    OutboxTableError,
    RightsMissing,
    StoreUnavailable,
    TableUnusable,
)
from outbox_core.schema import create_hold_sql
from outbox_core.stores.interface import NewHold, RowQuery
from outbox_core.stores.postgres.store import PostgresStore
from tests.contract.accept_contract import wait_for_a_blocked_session
from tests.harvesting import Scene

LEADER = uuid4()


@pytest.fixture(params=["binary", "text"])
def scene(request, database):
    """One outbox of each layout, with its holds."""
    return Scene(database, "", layout=request.param)


@pytest.fixture
def store(scene):
    """A store on that outbox."""
    store = PostgresStore(scene.database)
    yield store
    store.close()


def refuse(store, *records, dead_letter=False):
    """Hold records as a harvester does."""
    store.holds.add([NewHold(topic, key, identity, "refused", "boo", dead_letter) for identity, topic, key in records])


def fill(scene):
    """Write rows 1 to 6, of the keys a, b and c."""
    for key in ("a", "b", "a", "b", "c", "a"):
        scene.stash(OutboxRecord("t", key, "v"))


def ids(records):
    """Return the ids of records."""
    return [record[0] for record in records]


def test_add_and_release_are_idempotent(scene, store):
    """Adding twice makes one hold, releasing twice releases once; a topic and its keys are held independently."""
    assert scene.hold("add", "t", reason="why")
    assert not scene.hold("add", "t")
    assert scene.hold("add", "t", b"a")
    assert not scene.hold("add", "t", "a")
    assert [(hold.key, hold.reason) for hold in scene.held()] == [(None, "why"), ("a", "")]
    assert store.holds.read().topics == {"t"}
    assert scene.hold("release", topic="t") == 1
    assert scene.hold("release", topic="t") == 0
    assert store.holds.read().lanes == {("t", "a")}
    assert scene.hold("release", topic="t", key="a") == 1
    assert not store.holds.read()


@pytest.mark.parametrize("autocommit", [True, False])
def test_added_by_many_at_once(scene, autocommit):
    """Of several sessions that add the same hold at once, one gets True, and one hold results."""
    fill(scene)
    together = threading.Barrier(4)
    told = []

    def add():
        with scene.connect(autocommit=autocommit) as connection:
            for call in (lambda: scene.holds.add(connection, "t"), lambda: scene.holds.add_record(connection, 3)):
                together.wait()
                told.append(call())
                connection.commit()

    threads = [threading.Thread(target=add) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(told) == [False] * 6 + [True] * 2
    assert [hold.record_id for hold in scene.held()] == [None, 3]


def test_one_adds_while_another_has_not_committed(scene):
    """The second of two concurrent adds waits for the end of the first transaction."""
    told = []

    def add():
        told.append(scene.hold("add", "t"))

    for end in ("rollback", "commit"):
        with scene.connect() as first:
            scene.hold("release", topic="t")
            assert scene.holds.add(first, "t")
            second = threading.Thread(target=add)
            second.start()
            wait_for_a_blocked_session(scene.database)
            getattr(first, end)()
            second.join()
    assert told == [True, False]
    assert len(scene.held()) == 1


def test_hold_that_was_written_by_other_means(scene, store):
    """A hold inserted by plain SQL is a hold like any other: it is not added again, and can be released."""
    scene.execute(
        "INSERT INTO outbox_hold (outbox, kafka_topic, kafka_key) VALUES ('public.outbox', 't', NULL),"
        " ('public.outbox', 't', 'a')"
    )
    assert store.holds.read().topics == {"t"}
    assert not scene.hold("add", "t")
    assert not scene.hold("add", "t", "a")
    assert scene.hold("release", topic="t", key="a") == 1
    assert scene.hold("release", topic="t") == 1


def test_hold_of_many_among_many(scene, store):
    """The cost of a new hold does not depend on the number of holds: no plan compares each with all."""
    scene.execute(
        "INSERT INTO outbox_hold (outbox, kafka_topic, kafka_key, record_id)"
        " SELECT 'public.outbox', 't', 'k' || n, n FROM generate_series(1, 30000) AS n"
    )
    began = time.monotonic()
    for _ in range(2):
        store.holds.add([NewHold("u", f"k{n}", n, "refused", "boo") for n in range(5_000)])
    assert time.monotonic() - began < 10.0
    assert scene.execute("SELECT count(*) FROM outbox_hold")[0].count == 35_000


def test_scan_and_mark_leave_out_what_is_held(scene, store):
    """Scan and mark leave out keys and topics by the holds that are passed to them, not by those in the table."""
    fill(scene)
    scene.stash(OutboxRecord("u", "a", "v"))
    scene.hold("add", "t", "a")
    holds = store.holds.read()
    scene.hold("release", topic="t", key="a")
    scene.hold("add", "u")
    assert ids(store.scan(RowQuery(10, holds=holds))) == [2, 4, 5, 7]
    assert ids(store.mark(LEADER, RowQuery(10, holds=holds)).records) == [2, 4, 5, 7]
    assert ids(store.scan(RowQuery(10, holds=store.holds.read()))) == [1, 2, 3, 4, 5, 6]
    assert ids(store.scan(RowQuery(10))) == list(range(1, 8))


@pytest.mark.parametrize("key", ['"', "\\", "a,b", "{}", "", "NULL", "\u00e4/\u00f6", "%s"])
def test_strange_keys(scene, store, key):
    """A hold of a key with special characters affects that key, and no other."""
    scene.stash(OutboxRecord("t", key, "v"), OutboxRecord("t", f"{key}x", "v"))
    scene.hold("add", "t", key)
    assert ids(store.scan(RowQuery(10, holds=store.holds.read()))) == [2]
    assert scene.held(topic="t", key=key)[0].key == key
    assert scene.hold("release", topic="t", key=key.encode()) == 1


def test_release_skip_and_dead_letter_of_records(scene, store):
    """Skip and dead-letter affect only held records; a key's release also ends the holds of its records."""
    fill(scene)
    refuse(store, (1, "t", "a"), (2, "t", "b"), (5, "t", "c"))
    refuse(store, (1, "t", "a"))
    assert [hold.record_id for hold in scene.held()] == [1, 2, 5]
    assert scene.hold("skip", records=[1, 3, 99]) == 1
    assert scene.hold("skip", records=[1]) == 0
    assert [row.id for row in scene.rows()] == [2, 3, 4, 5, 6]
    assert scene.hold("dead_letter", records=[2, 3]) == 1
    assert scene.hold("dead_letter", records=[2]) == 0
    assert dict(store.holds.read().requests) == {2: "boo"}
    assert ids(store.holds.fetch([2, 3, 5])) == [2, 5]
    assert store.holds.refuse_dead_letters([2], "no") == 1
    assert not store.holds.read().requests
    assert scene.hold("release", topic="t", key="b") == 1
    assert scene.hold("release_records") == 1
    assert scene.held() == []


def test_bury_deletes_row_and_hold(scene, store):
    """A dead-lettered row is identified by id and create time, and deleted together with its hold."""
    fill(scene)
    refuse(store, (1, "t", "a"), (2, "t", "b"), dead_letter=True)
    first, second = store.holds.fetch([1, 2])
    assert store.holds.delete_dead_lettered([1, 2], [first[7], second[7]]) == 2
    assert scene.held() == []
    assert scene.count() == 4


def test_holds_of_records_that_are_gone(scene, store):
    """A hold whose row was deleted, or whose id belongs to another row, is released, unless somebody added it."""
    fill(scene)
    refuse(store, (1, "t", "a"), (2, "t", "b"), (3, "other", "a"))
    scene.hold("add_record", 4)
    scene.execute("DELETE FROM outbox WHERE id IN (1, 4)")
    assert store.holds.release_gone() == 2
    assert sorted(hold.record_id for hold in scene.held()) == [2, 4]
    assert scene.hold("dead_letter", records=[4]) == 1
    assert store.holds.release_gone() == 1, "it was given up"


def test_skip_spares_another_row_of_the_same_id(scene, store):
    """After TRUNCATE ... RESTART IDENTITY an old hold does not apply to a new row of the same id."""
    fill(scene)
    refuse(store, (1, "t", "a"))
    scene.execute("TRUNCATE outbox RESTART IDENTITY")
    scene.stash(OutboxRecord("t", "z", "new"))
    assert scene.hold("skip", records=[1]) == 0
    assert scene.count() == 1


def test_record_without_a_topic(scene, store):
    """A row without a topic, in a table made by hand, is held, counted and skipped like any other."""
    scene.execute("ALTER TABLE outbox ALTER kafka_topic DROP NOT NULL")
    fill(scene)
    scene.execute("UPDATE outbox SET kafka_topic = NULL WHERE id <= 2")
    assert scene.hold("waiting_topics") == {"": False, "t": False}
    assert "(they are for t, )" in scene.hold("doubt", "orders").text
    assert scene.hold("add_record", 2)
    refuse(store, (1, "", "a"))
    assert sorted(scene.hold("count_behind").values()) == [1, 1]
    assert scene.hold("skip") == 2
    assert (scene.held(), scene.count("id <= 2"), scene.count()) == ([], 0, 4)


def test_no_hold_of_a_row_that_is_gone(scene, store):
    """A refused record's hold is not set if the table was emptied meanwhile, and another row has its id and key."""
    fill(scene)
    refused = store.scan(RowQuery(1))[0]
    scene.execute("TRUNCATE outbox RESTART IDENTITY")
    fill(scene)
    for record in (refused, store.scan(RowQuery(1))[0]):
        store.holds.add([NewHold("t", "a", 1, "refused", "boo", create_time=record.create_time)])
        assert len(scene.held()) == (record is not refused)


def test_add_record(scene):
    """A record is held with its key; an id without a row is an error."""
    fill(scene)
    assert scene.hold("add_record", 3, reason="look at it")
    assert not scene.hold("add_record", 3)
    (hold,) = scene.held()
    assert (hold.topic, hold.key, hold.record_id, hold.reason) == ("t", "a", 3, "look at it")
    with pytest.raises(OutboxError, match="no record 99"):
        scene.hold("add_record", 99)


def test_what_cannot_be_is_refused(scene):
    """A bad argument is an error that names it, before any SQL; so is a missing table."""
    for call, complaint in (
        (lambda: scene.hold("add", ""), "topic"),
        (lambda: scene.hold("add", "t", b"\xff"), "key: bytes"),
        (lambda: scene.hold("add", "t", "a\0"), "key: contains a NUL"),
        (lambda: scene.hold("release"), "name records, a topic"),
        (lambda: scene.hold("skip", key="a"), "name the topic"),
        (lambda: scene.hold("skip", records=["1"]), "by its id"),
    ):
        with pytest.raises(InvalidConfig, match=complaint):
            call()
    scene.execute("DROP TABLE outbox_hold")
    with pytest.raises(OutboxTableError, match=r"outbox schema --apply"):
        scene.held()
    with pytest.raises(OutboxTableError, match="does not exist"), scene.connect() as connection:
        Holds("nowhere").list(connection)


def run(scene, capsys, *arguments):
    """Run `outbox hold`; return the exit code, output and errors."""
    code = main(["hold", *arguments, "--dsn", scene.database])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_command(scene, store, capsys):
    """List, add, release, skip and dead-letter report their effect."""
    fill(scene)
    refuse(store, (1, "t", "a"), (2, "t", "b"))
    assert run(scene, capsys, "add", "--topic", "t", "--reason", "why")[:2] == (0, "topic t is held\n")
    assert run(scene, capsys, "add", "--topic", "t")[1] == "topic t is held already\n".replace("is", "was")
    assert run(scene, capsys, "add", "--topic", "t", "--key", "c")[1] == "key c of topic t is held\n"
    assert run(scene, capsys, "add", "--record", "4")[1] == "record 4 is held\n"
    lines = [line.split("\t") for line in run(scene, capsys, "list")[1].splitlines()]
    assert [(line[0], line[2]) for line in lines] == [
        ("topic", "-"),
        ("record 1", "a"),
        ("record 2", "b"),
        ("record 4", "b"),
        ("key", "c"),
    ]
    _, out, err = run(scene, capsys, "list", "--limit", "1")
    assert (len(out.splitlines()), "there are more" in err) == (1, True)
    shown = [
        json.loads(line)
        for line in run(scene, capsys, "list", "--json", "--key", "a", "--topic", "t")[1].split("\n")[:-1]
    ]
    assert [(hold["record_id"], hold["error"]) for hold in shown] == [(1, "boo")]
    assert run(scene, capsys, "dead-letter", "2", "9")[1].startswith("asked for 1 record (1 of the given ids: nothing")
    assert "waits for the dead-letter topic" in run(scene, capsys, "list", "--topic", "t", "--key", "b")[1]
    assert run(scene, capsys, "skip", "1")[1] == "skipped 1 record\n"
    assert run(scene, capsys, "release", "--topic", "t")[1] == "released 1 hold\n"
    assert run(scene, capsys, "release", "--all")[1] == "released 2 holds\n"
    assert run(scene, capsys, "release", "--topic", "t", "--key", "c")[1] == "released 1 hold\n"
    assert run(scene, capsys, "list") == (0, "", "")
    assert "nothing is held for topic t" in run(scene, capsys, "release", "--topic", "t")[2]


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["add"], "name a --topic"),
        (["skip"], "name the ids of held records, or say --all"),
        (["release"], "name the ids"),
        (["skip", "1", "--all"], "or say --all"),
        (["add", "--record", "77"], "no record 77"),
        (["list", "--table", "a b"], "--table"),
    ],
    ids=str,
)
def test_command_says_what_is_wrong(scene, capsys, arguments, complaint):
    """A mistake gives exit code 2 and an error that names it."""
    code, out, err = run(scene, capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith("outbox: error: ")
    assert complaint in err


def test_command_on_a_standby(scene, capsys, monkeypatch):
    """A command on a standby ends with an error that says so, and what to name."""
    with monkeypatch.context() as environment:
        environment.setenv("PGOPTIONS", "-c default_transaction_read_only=on")
        code, out, err = run(scene, capsys, "add", "--topic", "t")
    assert (code, out) == (2, "")
    assert "the database takes no writes: it is a standby, or read-only by default; name the primary" in err


@contextmanager
def store_of_role(scene, *rights):
    """Yield a store whose role may harvest, and has these rights on the table of holds."""
    role = f"harvests-{uuid4()}"
    scene.execute(f'CREATE ROLE "{role}" LOGIN')
    scene.execute(f'GRANT SELECT, UPDATE, DELETE ON outbox TO "{role}"')
    for right in rights:
        scene.execute(f'GRANT {right} ON outbox_hold TO "{role}"')
    store = PostgresStore(psycopg.conninfo.make_conninfo(scene.database, user=role))
    store.role = role
    try:
        yield store
    finally:
        store.close()
        scene.execute(f'DROP OWNED BY "{role}"')
        scene.execute(f'DROP ROLE "{role}"')


def test_role_that_may_not_read_the_holds(scene):
    """A role that may not read the holds could publish held records: the check refuses it, and names the right."""
    scene.hold("add", "t")
    with store_of_role(scene, "INSERT, UPDATE, DELETE") as store:
        grant = f'GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE "outbox_hold" TO "{store.role}"'
        with pytest.raises(RightsMissing, match="missing rights on outbox_hold") as raised:
            store.check()
        assert grant in str(raised.value)
        scene.execute(grant)
        store.check()
        assert store.holds.read().topics == {"t"}


def test_right_to_read_the_holds_is_withdrawn(scene):
    """A withdrawn right to read the holds is an outage, not the end of all holds; it ends when the right is back."""
    with store_of_role(scene, "SELECT, INSERT, UPDATE, DELETE") as store:
        scene.hold("add", "t")
        assert store.holds.read().topics == {"t"}
        scene.execute(f'REVOKE SELECT ON outbox_hold FROM "{store.role}"')
        for call in (
            store.holds.read,
            store.holds.read,
            store.holds.release_gone,
            lambda: refuse(store, (1, "t", "a")),
        ):
            with pytest.raises(StoreUnavailable, match=r'outbox_hold.*GRANT SELECT.* TO "harvests-'):
                call()
        scene.execute(f'GRANT SELECT ON outbox_hold TO "{store.role}"')
        assert store.holds.read().topics == {"t"}


@pytest.mark.parametrize("missing", ["INSERT", "UPDATE", "DELETE"])
def test_role_that_may_only_read_the_holds(scene, caplog, missing):
    """Without one right to write holds, held records stay held and no dead letter is sent; one log line says so."""
    fill(scene)
    rights = [right for right in ("SELECT", "INSERT", "UPDATE", "DELETE") if right != missing]
    with store_of_role(scene, *rights) as store:
        store.check()
        scene.hold("add_record", 1)
        scene.hold("dead_letter", records=[1])
        for _ in range(2):
            holds = store.holds.read()
            assert not holds.may_change
            assert ids(store.scan(RowQuery(10, holds=holds))) == [2, 4, 5]
            assert not holds.requests
        scene.execute(f'GRANT {missing} ON outbox_hold TO "{store.role}"')
        assert store.holds.read().may_change
        assert list(store.holds.read().requests) == [1]
    (told,) = [record.message for record in caplog.records if "missing rights on outbox_hold" in record.message]
    assert "GRANT SELECT, INSERT, UPDATE, DELETE ON TABLE" in told


def test_table_of_holds_that_lacks_a_column(scene, store):
    """A table that is there may hold something: neither a store that has read it nor a new one takes it for none."""
    scene.hold("add", "t")
    assert store.holds.read()
    scene.execute("ALTER TABLE outbox_hold RENAME kafka_topic TO topic")
    with pytest.raises(StoreUnavailable, match="was altered"):
        store.holds.read()
    with closing(PostgresStore(scene.database)) as another:
        for each in (store, another):
            with pytest.raises(OutboxTableError, match=r"outbox_hold lacks the column\(s\) kafka_topic: nothing is"):
                each.holds.read()
    scene.execute("ALTER TABLE outbox_hold RENAME topic TO kafka_topic")
    assert list(store.holds.read().topics) == ["t"]


def test_table_of_holds_that_is_dropped(scene, store, caplog):
    """A table of holds that was there and is gone is an outage: somebody may have held something since it was read.

    It is no reason to hand over to a process that need not know of them. Without one from the first there are no holds,
    which is logged once, and a table made later is found.
    """
    scene.execute("DROP TABLE outbox_hold")
    assert store.holds.read() is None
    assert store.holds.read() is None
    assert sum("nothing can be held" in record.message for record in caplog.records) == 1
    scene.execute(create_hold_sql(scene.table))
    assert not store.holds.read()
    scene.execute("DROP TABLE outbox_hold")
    for _ in range(2):
        with pytest.raises(TableUnusable, match=r"outbox_hold is gone: .*outbox schema --only hold"):
            store.holds.read()
    scene.execute(create_hold_sql(scene.table))
    assert not store.holds.read()


def unless_given_up(call):
    """Return the call, which may give up."""

    def calls(*args):
        with suppress(StoreUnavailable):
            call(*args)

    return calls


@pytest.mark.parametrize(
    "call",
    [
        lambda store, _: store.holds.release_gone(),
        lambda store, _: refuse(store, (2, "t", "b")),
        lambda store, _: store.holds.refuse_dead_letters([1], "boo"),
        lambda store, _: store.holds.fetch([1]),
        lambda store, _: store.holds.delete_dead_lettered([1], [0]),
        lambda _, scene: scene.hold("skip", records=[1]),
    ],
    ids=["release_gone", "add", "refuse_dead_letters", "fetch", "delete_dead_lettered", "skip"],
)
def test_the_outbox_is_locked_before_its_holds(database, call):
    """A migration that alters the outbox and then its holds, in one transaction, meets nobody who waits with a lock."""
    scene = Scene(database, "")
    fill(scene)
    with closing(PostgresStore(database)) as store, psycopg.connect(database) as migration:
        refuse(store, (1, "t", "a"), (99, "t", "b"))
        migration.execute("ALTER TABLE outbox ADD COLUMN extra text")
        calling = threading.Thread(target=unless_given_up(call), args=(store, scene))
        calling.start()
        wait_for_a_blocked_session(database)
        migration.execute("LOCK TABLE outbox_hold IN ACCESS EXCLUSIVE MODE NOWAIT")
        migration.rollback()
        calling.join()


def test_a_partition_that_comes_back_is_still_held(database):
    """A record that somebody holds stays held while its partition is detached; one that was refused would be again."""
    scene = Scene(database, "")
    scene.execute("DROP TABLE outbox")
    scene.execute(
        """CREATE TABLE outbox (
            id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY, create_time timestamptz NOT NULL DEFAULT now(),
            kafka_topic text NOT NULL, kafka_key text, kafka_value bytea,
            kafka_header_keys text[] NOT NULL DEFAULT '{}', kafka_header_values bytea[] NOT NULL DEFAULT '{}',
            leader_id uuid
        ) PARTITION BY RANGE (id)"""
    )
    for part, first, last in (("old", 1, 4), ("new", 4, 100)):
        scene.execute(f"CREATE TABLE {part} PARTITION OF outbox FOR VALUES FROM ({first}) TO ({last})")
    with closing(PostgresStore(database)) as store:
        for key in ("a", "b", "c", "d"):
            scene.execute("INSERT INTO outbox (kafka_topic, kafka_key) VALUES ('t', %s)", [key])
        scene.hold("add_record", 1, reason="never publish this")
        scene.execute("UPDATE outbox SET leader_id = %s WHERE id = 2", [LEADER])
        assert store.marks.hold(10) == 1
        refuse(store, (3, "t", "c"))
        scene.execute("ALTER TABLE outbox DETACH PARTITION old")
        assert store.holds.release_gone() == 1
        scene.execute("ALTER TABLE outbox ATTACH PARTITION old FOR VALUES FROM (1) TO (4)")
        assert ids(store.scan(RowQuery(10, holds=store.holds.read()))) == [3, 4]
        scene.execute("ALTER TABLE outbox DETACH PARTITION old")
        assert scene.hold("release", records=[1]) == 1, "for good, by somebody who dropped the partition"
