"""Row level security and everything that concludes something from rows that it does not see, beside the harvester."""

import threading
from contextlib import closing, suppress
from datetime import UTC, datetime, timedelta
from functools import partial
from uuid import uuid4

import psycopg
import pytest

from outbox_core.claims.claims import ClaimMissing
from outbox_core.claims.orphans import find_orphans
from outbox_core.claims.stores import FolderStore, TableStore
from outbox_core.errors import RowsHidden
from outbox_core.holds import Holds
from outbox_core.inbox import Inbox
from outbox_core.record import OutboxRecord
from outbox_core.retention.archive import Archive, archive_statements
from outbox_core.retention.history import History
from outbox_core.row_security import fetch_on, secured_tables, seeing_all
from outbox_core.schema import TableName, create_history_sql, create_inbox_sql, create_table_sql
from outbox_core.stasher import Stasher
from outbox_core.stores.interface import NewEvent, NewHold, RowQuery
from outbox_core.stores.postgres.store import PostgresStore
from outbox_spark.postgres.connection import connect
from outbox_spark.relay.shard_store import ShardRange, ShardStore
from tests.contract.accept_contract import wait_for_a_blocked_session
from tests.harvesting import Scene

_ME = uuid4()


@pytest.fixture
def scene(database):
    """A fresh outbox with archive, history and inbox."""
    scene = Scene(database, "")
    made = create_history_sql(TableName("outbox")), create_inbox_sql(TableName("inbox"))
    for statement in (*made, *archive_statements(TableName("outbox"))):
        scene.execute(statement)
    yield scene
    scene.close()


@pytest.fixture
def role(scene):
    """A role with all rights that does not own the tables."""
    everything = "ALL TABLES IN SCHEMA public", "ALL SEQUENCES IN SCHEMA public"
    with scene.role("; ".join(f"GRANT ALL ON {each} TO {{role}}" for each in everything)) as name:
        yield name


@pytest.fixture
def source(scene, role):
    """The database as that role."""
    return psycopg.conninfo.make_conninfo(scene.database, user=role)


@pytest.fixture
def store(source):
    """A store as that role, in use."""
    with closing(PostgresStore(source)) as store:
        store.check()
        assert store.is_empty()
        yield store


@pytest.fixture
def connection(source):
    """A caller's own connection as that role."""
    with psycopg.connect(source, autocommit=True) as connection:
        yield connection


def secure(scene, *tables):
    """Switch row level security on, without a policy."""
    for table in tables:
        scene.execute(f"ALTER TABLE {table} ENABLE ROW LEVEL SECURITY")


# -- the store


_CONCLUSIONS = {
    "scan": lambda store, _: store.scan(RowQuery(10)),
    "mark": lambda store, _: store.mark(_ME, RowQuery(10)),
    "purge": lambda store, times: store.purge(_ME, [1, 2], times),
    "reset": lambda store, _: store.reset(_ME, [1, 2]),
    "delete published": lambda store, times: store.delete_published([1, 2], times),
    "find": lambda store, _: store.find([1, 2]),
    "empty": lambda store, _: store.is_empty(),
    "marked": lambda store, _: store.marks.count(),
    "hold marked": lambda store, _: store.marks.hold(10),
    "clear marks": lambda store, _: store.marks.clear(),
    "backlog": lambda store, _: store.backlog(),
    "gone": lambda store, _: store.holds.release_gone(),
    "letters": lambda store, _: store.holds.fetch([1, 2]),
    "dead letters": lambda store, times: store.holds.delete_dead_lettered([1, 2], times),
}
_POLICIES = {
    "none": [],
    "some rows": ['CREATE POLICY a_few ON outbox TO "{role}" USING (id = 1)'],
    "no deletes": [
        'CREATE POLICY readers ON outbox FOR SELECT TO "{role}" USING (true)',
        'CREATE POLICY markers ON outbox FOR UPDATE TO "{role}" USING (true)',
    ],
    "restrictive": [
        'CREATE POLICY everything ON outbox TO "{role}" USING (true)',
        "CREATE POLICY tenants ON outbox AS RESTRICTIVE USING (id <> 2)",
    ],
    "for a group": ["CREATE POLICY everything ON outbox TO pg_monitor USING (true)"],
    "forbids new versions": ['CREATE POLICY a_few ON outbox TO "{role}" USING (true) WITH CHECK (leader_id IS NULL)'],
}


@pytest.mark.parametrize(
    ("conclusion", "policies"),
    [(conclusion, "none") for conclusion in _CONCLUSIONS] + [("scan", policies) for policies in _POLICIES],
)
def test_store_concludes_nothing_from_hidden_rows(scene, store, role, policies, conclusion):
    """While policies may hide rows every method of a store raises; afterwards nothing has changed, and it works."""
    scene.execute(f'GRANT pg_monitor TO "{role}"')
    scene.fill("t", 2, keys=None)
    scene.execute("UPDATE outbox SET leader_id = %s", [_ME])
    scene.hold("add_record", 1)
    times = [row[7] for row in store.find([1, 2])]
    secure(scene, "outbox")
    for statement in _POLICIES[policies]:
        scene.execute(statement.format(role=role))
    for is_first in (True, False):
        with pytest.raises(RowsHidden, match=r"table public\.outbox has row level security") as raised:
            _CONCLUSIONS[conclusion](store, times)
        assert f'ALTER ROLE "{role}" BYPASSRLS' in str(raised.value)
        assert raised.value.in_doubt or not is_first, "the next connection may lead to another server"
    scene.execute("ALTER TABLE outbox DISABLE ROW LEVEL SECURITY")
    assert scene.count("leader_id IS NOT NULL") == 2
    assert len(scene.held()) == 1
    _CONCLUSIONS[conclusion](store, times)


def test_store_concludes_nothing_from_hidden_holds(scene, store):
    """Holds that are hidden are not taken for none."""
    scene.hold("add", "t")
    assert len(store.holds.read()) == 1
    secure(scene, "outbox_hold")
    adds = partial(store.holds.add, [NewHold("t", None, None, "", "")])
    for question in (store.holds.read, store.holds.release_gone, adds):
        with pytest.raises(RowsHidden, match="outbox_hold has row level security"):
            question()
    scene.execute("ALTER TABLE outbox_hold DISABLE ROW LEVEL SECURITY")
    assert len(store.holds.read()) == 1


_FREE = {
    "a policy for all": ['CREATE POLICY everything ON outbox TO "{role}" USING (true) WITH CHECK (true)'],
    "for everybody": ["CREATE POLICY everything ON outbox USING (true)"],
    "one for each command": [
        'CREATE POLICY readers ON outbox FOR SELECT TO "{role}" USING (true)',
        'CREATE POLICY markers ON outbox FOR UPDATE TO "{role}" USING (true) WITH CHECK (true)',
        'CREATE POLICY deleters ON outbox FOR DELETE TO "{role}" USING (true)',
    ],
    "beside others": [
        'CREATE POLICY everything ON outbox TO "{role}" USING (true)',
        "CREATE POLICY tenants ON outbox USING (id = 1)",
        "CREATE POLICY needless ON outbox AS RESTRICTIVE USING (true)",
    ],
    "bypass": ['ALTER ROLE "{role}" BYPASSRLS'],
    "owner": ['ALTER TABLE outbox OWNER TO "{role}"'],
}


@pytest.mark.parametrize("how", _FREE)
def test_store_under_policies_that_hide_nothing(scene, store, role, how, caplog):
    """Deliberate policies, which hide nothing from the role, are no trouble, whether they are there before or come."""
    for statement in _FREE[how]:
        scene.execute(statement.format(role=role))
    secure(scene, "outbox")
    scene.fill("t", 4, keys=None)
    with suppress(RowsHidden):  # once, where policies came after the connection, which is given up
        store.is_empty()
    batch = store.mark(_ME, RowQuery(2))
    assert batch.selected == len(batch.records) == 2
    assert store.purge(_ME, [row.id for row in batch.records], [row.create_time for row in batch.records]) == 2
    assert [row.id for row in store.scan(RowQuery(10))] == [3, 4]
    assert "row level security" not in caplog.text


def test_owner_that_is_forced(scene, source, role):
    """FORCE ROW LEVEL SECURITY counts for the owner."""
    scene.execute(f'ALTER TABLE outbox OWNER TO "{role}"; ALTER TABLE outbox FORCE ROW LEVEL SECURITY')
    secure(scene, "outbox")
    with closing(PostgresStore(source)) as store, pytest.raises(RowsHidden, match="outbox has row level security"):
        store.check()


def test_role_that_the_session_sets(scene, role):
    """It counts for the role that a session has taken by SET ROLE, and the remedy names that one."""
    secure(scene, "outbox")
    with psycopg.connect(scene.database, autocommit=True) as connection:
        assert secured_tables(fetch_on(connection), [TableName("outbox")]) == []
        connection.execute(f'SET ROLE "{role}"')
        (found,) = secured_tables(fetch_on(connection), [TableName("outbox")])
        assert found.role == f'"{role}"'
        assert found.hides


def test_policies_of_a_partition_do_not_count(scene, source, role):
    """PostgreSQL applies the policies of the table that a statement names, and so do we."""
    scene.execute("DROP TABLE outbox CASCADE")
    made = create_table_sql(TableName("outbox")).partition("WITH (")[0] + " PARTITION BY HASH (id)"
    scene.execute(made)
    scene.execute("CREATE TABLE outbox_0 PARTITION OF outbox FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
    scene.execute(f'GRANT ALL ON outbox TO "{role}"')
    secure(scene, "outbox_0")
    scene.fill("t", 3)
    with closing(PostgresStore(source)) as store:
        store.check()
        assert len(store.scan(RowQuery(10))) == 3
        secure(scene, "outbox")
        with pytest.raises(RowsHidden):
            store.scan(RowQuery(10))


def test_policy_that_changes_under_a_watched_statement(scene, source, role):
    """A statement under deliberate policies keeps them from being changed until they were looked at."""
    scene.execute(f'CREATE POLICY everything ON outbox TO "{role}" USING (true)')
    secure(scene, "outbox")
    scene.fill("t", 3)
    with closing(PostgresStore(source)) as store:
        store.check()
        assert len(store.scan(RowQuery(10))) == 3
        scene.execute("ALTER POLICY everything ON outbox USING (id = 1)")
        for _ in range(2):
            with pytest.raises(RowsHidden, match="policies: everything"):
                store.scan(RowQuery(10))
        times = [0, 0, 0]
        with pytest.raises(RowsHidden):
            store.delete_published([1, 2, 3], times)
        scene.execute("ALTER POLICY everything ON outbox USING (true)")
        with suppress(RowsHidden):  # once: this connection began while they hid rows
            store.is_empty()
        assert len(store.scan(RowQuery(10))) == 3


def test_role_that_is_exempted_under_a_watched_statement(scene, source, role, monkeypatch):
    """An exemption waits for no statement: one that was planned before saw a part, and its plan must go."""
    scene.execute(f'CREATE POLICY everything ON outbox TO "{role}" USING (true)')
    secure(scene, "outbox")
    scene.fill("t", 3)
    with closing(PostgresStore(source)) as store:
        store.check()
        for _ in range(6):
            assert len(store.scan(RowQuery(10))) == 3
        scene.execute("ALTER POLICY everything ON outbox USING (id = 1)")

        def exempt_and_fetch(connection):
            scene.execute(f'ALTER ROLE "{role}" BYPASSRLS')
            return fetch_on(connection)

        monkeypatch.setattr("outbox_core.row_security.fetch_on", exempt_and_fetch)
        with pytest.raises(RowsHidden, match=r"table public\.outbox .* stopped counting"):
            store.scan(RowQuery(10))
        assert len(store.scan(RowQuery(10))) == 3


def test_watched_statement_locks_no_other_table(scene, source):
    """The look at policies waits for no table that the statement did not touch: a migration may have locked it."""
    secure(scene, "outbox", "outbox_hold")
    scene.execute("CREATE POLICY everything ON outbox USING (true)")
    scene.execute("CREATE POLICY everything ON outbox_hold USING (true)")
    scene.fill("t", 3)
    with closing(PostgresStore(source, statement_timeout=3.0)) as store:
        store.check()
        with scene.connect() as migration:
            migration.execute("LOCK TABLE outbox_hold IN ACCESS EXCLUSIVE MODE")
            assert len(store.scan(RowQuery(10))) == 3


@pytest.mark.parametrize("policies", [[], ["CREATE POLICY everything ON outbox USING (true)"]])
def test_shards_of_a_relay_are_not_read_in_part(scene, source, policies):
    """A relay's task neither takes a shard for exhausted nor the table for empty while a policy hides rows."""
    for statement in policies:
        scene.execute(statement)
        secure(scene, "outbox")
    scene.fill("t", 4)
    with closing(ShardStore(source)) as store:
        store.check()
        shard = ShardRange(0, 1)
        assert len(store.scan_shard(RowQuery(10), shard)) == sum(map(len, store.read_shard(0, 1))) == store.highest_id()
        if policies:
            scene.execute("ALTER POLICY everything ON outbox USING (id = 1)")
        else:
            secure(scene, "outbox")
        for question in (
            store.highest_id,
            partial(store.scan_shard, RowQuery(10), shard),
            lambda: list(store.read_shard(0, 1)),
        ):
            with pytest.raises(RowsHidden):
                question()


def test_pipelines_conclude_nothing_from_hidden_positions(scene, source):
    """A pipeline's session is refused rows that a policy would hide, unless policies hide nothing."""
    secure(scene, "inbox")
    connection, _ = connect(source, TableName("inbox"), what="test")
    with connection, pytest.raises(psycopg.errors.InsufficientPrivilege, match="row-level security"):
        connection.execute("SELECT count(*) FROM public.inbox")
    scene.execute("CREATE POLICY everything ON inbox USING (true)")
    connection, _ = connect(source, TableName("inbox"), what="test")
    with connection:
        assert connection.execute("SELECT count(*) FROM public.inbox").fetchone() == (0,)
    scene.execute("INSERT INTO inbox (source, message_id) VALUES ('s', 'm')")
    connection, _ = connect(source, TableName("inbox"), what="test")
    scene.execute("ALTER POLICY everything ON inbox USING (false)")
    with closing(connection), pytest.raises(RowsHidden, match="policies: everything"), seeing_all(connection):
        assert connection.execute("SELECT count(*) FROM public.inbox").fetchone() == (0,)
    assert connection.closed


def test_history_under_row_security(scene, source, caplog):
    """The history is optional: where a policy would hide it nothing is written, and changes of holds go on."""
    secure(scene, "outbox_event", "outbox_statistics")
    with closing(PostgresStore(source)) as store:
        store.check()
        store.history.add_events([NewEvent("leader_acquired", "me", 0.0, "", _ME, 1)])
        store.holds.add([NewHold("t", None, None, "paused", "")])
        assert len(store.holds.read()) == 1
    assert scene.execute("SELECT count(*) FROM outbox_event")[0].count == 0
    assert caplog.text.count("nothing is written into the history") == 1
    assert "row level security" in caplog.text


# -- on connections of the caller's


@pytest.mark.parametrize("table", ["outbox", "outbox_hold"])
def test_holds_are_not_changed_blindly(scene, connection, table):
    """`Holds` says that rows are hidden; it neither lists nor changes a part, and the session keeps its settings."""
    scene.fill("t", 2, keys=None)
    scene.hold("add_record", 1)
    secure(scene, table)
    holds = Holds()
    for action in (
        lambda: holds.list(connection),
        lambda: holds.causes(connection),
        lambda: holds.count(connection),
        lambda: holds.add(connection, "t"),
        lambda: holds.add_record(connection, 2),
        lambda: holds.release(connection, records=[1]),
        lambda: holds.skip(connection, records=[1]),
        lambda: holds.dead_letter(connection, records=[1]),
    ):
        with pytest.raises(RowsHidden, match=f"table public.{table} has row level security"):
            action()
    assert connection.execute("SHOW row_security").fetchone() == ("on",)
    scene.execute(f"ALTER TABLE {table} DISABLE ROW LEVEL SECURITY")
    assert [hold.record_id for hold in holds.list(connection)] == [1]
    assert holds.skip(connection, records=[1]) == 1


def test_skip_keeps_the_hold_of_a_row_that_was_just_hidden(scene, connection, monkeypatch):
    """A policy that comes between question and statement makes `skip` do nothing, rather than drop the hold alone."""
    scene.fill("t", 1, keys=None)
    scene.hold("add_record", 1)
    secure(scene, "outbox")
    monkeypatch.setattr("outbox_core.holds.refuse_hidden", lambda *_: None)
    assert Holds().skip(connection, records=[1]) == 0
    assert len(scene.held()) == 1


_IN_A_SNAPSHOT = {
    "skip": lambda connection: Holds().skip(connection, records=[1]),
    "list": lambda connection: Holds().list(connection),
    "restash": lambda connection: Archive().restash(connection, "t"),
}


@pytest.mark.parametrize("action", _IN_A_SNAPSHOT)
@pytest.mark.parametrize("level", ["REPEATABLE READ", "SERIALIZABLE"])
def test_policies_that_a_snapshot_does_not_show(scene, connection, level, action):
    """In a transaction that sees old policies row level security that counts for the role is refused, whatever it says.

    Its statements run with the policies of now.
    """
    scene.fill("t", 1, keys=None)
    scene.hold("add_record", 1)
    for table in ("outbox", "outbox_archive"):
        scene.execute(f"CREATE POLICY everything ON {table} USING (true)")
        secure(scene, table)
    with suppress(RowsHidden), connection.transaction():
        connection.execute(f"SET TRANSACTION ISOLATION LEVEL {level}")
        connection.execute("SELECT 1 FROM pg_policy")
        scene.execute("ALTER POLICY everything ON outbox USING (false)")
        scene.execute("ALTER POLICY everything ON outbox_archive USING (false)")
        with pytest.raises(RowsHidden, match=f"isolation level {level.lower()}"):
            _IN_A_SNAPSHOT[action](connection)
    assert len(scene.held()) == 1


@pytest.mark.parametrize("table", ["outbox", "outbox_archive"])
def test_no_payload_is_an_orphan_of_hidden_rows(scene, connection, tmp_path, table):
    """A payload whose record a policy hides is not called an orphan: nothing is known then."""
    store = FolderStore(tmp_path)
    with scene.connect() as owner:
        stasher = Stasher(claim_store=store, claim_check_above=100)
        stasher.stash(owner, OutboxRecord("t", "k", b"x" * 1000))
    if table == "outbox_archive":
        scene.execute("INSERT INTO outbox_archive SELECT * FROM outbox; DELETE FROM outbox")
    secure(scene, table)
    outboxes, tomorrow = [TableName("outbox")], datetime.now(UTC) + timedelta(days=1)
    with pytest.raises(RowsHidden, match=f"table public.{table} has row level security"):
        find_orphans(store, connection, outboxes, {}, group="g", before=tomorrow)
    assert len(list(store.names())) == 1


def test_payload_that_is_hidden_is_not_missing(scene, source):
    """A table of payloads that hides a row does not say that there is none."""
    store = TableStore(lambda: psycopg.connect(source))
    scene.execute(store.create_sql)
    scene.execute("GRANT ALL ON outbox_claim TO PUBLIC")
    name = f"t/{datetime.now(UTC):%Y%m%dT%H%M%S}-{uuid4()}"
    with pytest.raises(ClaimMissing):
        store.get(name)
    secure(scene, "outbox_claim")
    with pytest.raises(RowsHidden, match=r"table public\.outbox_claim has row level security"):
        store.get(name)


def test_inbox_under_row_security(scene, connection, role):
    """A repeat is a repeat although a policy hides the first; pruning says that it cannot see what it is to delete."""
    with connection.transaction():
        assert Inbox().accept(connection, "api", "1")
    scene.execute("UPDATE inbox SET accept_time = now() - interval '2 hours'")
    secure(scene, "inbox")
    scene.execute(f'CREATE POLICY writers ON inbox FOR INSERT TO "{role}" WITH CHECK (true)')
    scene.execute(
        f"CREATE POLICY readers ON inbox FOR SELECT TO \"{role}\" USING (accept_time > now() - interval '1 hour')"
    )
    with connection.transaction():
        assert not Inbox().accept(connection, "api", "1"), "its first row is hidden"
        assert Inbox().accept(connection, "api", "2")
    with pytest.raises(RowsHidden, match=r"table public\.inbox has row level security"):
        Inbox().prune(connection, timedelta(seconds=1))


def test_archive_and_history_are_not_read_in_part(scene, connection):
    """Neither an archive nor a history that is hidden looks empty."""
    secure(scene, "outbox_archive", "outbox_event", "outbox_statistics")
    for question in (
        lambda: Archive().select(connection, "t"),
        lambda: Archive().restash(connection, "t"),
        lambda: History().events(connection, timedelta(days=1)),
        lambda: History().statistics(connection, timedelta(days=1)),
    ):
        with pytest.raises(RowsHidden, match="has row level security"):
            question()


@pytest.fixture(params=["the role itself", "a role that is set to it"])
def login(request, scene, role):
    """The role's own login, or one that has the role's rights alone, as where logins are made for some hours each."""
    if request.param == "the role itself":
        yield role
        return
    with scene.role(f'GRANT "{role}" TO {{role}}') as made:
        scene.execute(f'ALTER ROLE "{made}" SET role = "{role}"')
        yield made


def test_whoever_asks_if_the_database_is_at_work_waits_for_no_lock(scene, source, role, login):
    """A leader whose statement waits for a lock keeps its leadership, also where deliberate policies are looked at."""
    secure(scene, "outbox")
    source = psycopg.conninfo.make_conninfo(source, user=login)
    scene.execute(f'CREATE POLICY everything ON outbox TO "{role}" USING (true) WITH CHECK (true)')
    with closing(PostgresStore(source)) as marker, closing(PostgresStore(source, statement_timeout=3.0)) as asking:
        marker.mark(_ME, RowQuery(1))
        with psycopg.connect(scene.database) as blocking:
            blocking.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
            marking = threading.Thread(target=marker.mark, args=(_ME, RowQuery(1)))
            marking.start()
            wait_for_a_blocked_session(scene.database)
            assert asking.at_work(0.0) == "has it wait for a lock"
            blocking.rollback()
        marking.join()
        assert marker.table.role == role
