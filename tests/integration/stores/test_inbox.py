"""The inbox on a bare DB-API connection, and its pruning, by function and by `outbox inbox prune`."""

import json
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta

import psycopg
import pytest
from psycopg.conninfo import conninfo_to_dict

from outbox_core import Inbox
from outbox_core.cli import main
from outbox_core.errors import OutboxError
from outbox_core.schema import TableName, create_inbox_sql
from tests.contract.accept_contract import AcceptContract, accepted, wait_for_a_blocked_session
from tests.services import as_role

WEEK = timedelta(days=7)


class _Receiver:
    def __init__(self, connection):
        self.connection = connection

    def accept(self, source, message_id):
        return Inbox().accept(self.connection, source, message_id)

    def execute(self, sql):
        self.connection.cursor().execute(sql)

    def savepoint(self):
        return self.connection.transaction()


class _Adapter:
    """An adapter with one connection for each thread, as in a pool."""

    def __init__(self, connect):
        self.connect = connect
        self.local = threading.local()
        self.opened = []

    def _connection(self):
        if not hasattr(self.local, "connection"):
            self.local.connection = self.connect()
            self.opened.append(self.local.connection)
        return self.local.connection

    @contextmanager
    def transaction(self):
        connection = self._connection()
        try:
            yield _Receiver(connection)
            connection.commit()
        finally:
            connection.rollback()

    @contextmanager
    def autocommit(self):
        ours = self._connection().info
        with psycopg.connect(ours.dsn, password=ours.password, autocommit=True) as connection:
            yield _Receiver(connection)


class TestPsycopg3(AcceptContract):
    """The contract on psycopg 3, with the promised 50 threads and 1,000 ids."""

    threads = 50
    ids = 1000

    @pytest.fixture
    def adapter(self, inbox_database):
        """Connections of psycopg 3."""
        adapter = _Adapter(lambda: psycopg.connect(inbox_database))
        yield adapter
        for connection in adapter.opened:
            connection.close()


@pytest.fixture
def connection(database):
    """A psycopg connection in autocommit mode to a database with an inbox."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(create_inbox_sql(TableName("inbox")))
        yield connection


def test_a_pipeline(database, connection):
    """In a pipeline, where psycopg does not yet know the number of written rows, `accept` answers correctly."""
    with connection.pipeline(), connection.transaction():
        assert [Inbox().accept(connection, "api", number) for number in (1, 1, 2)] == [True, False, True]
    assert accepted(database) == [("api", "1"), ("api", "2")]


def test_several_inboxes(connection, database):
    """An inbox works on its own table: in a schema, and with a name that needs quoting and escaping."""
    connection.execute('CREATE SCHEMA "bi.lling"')
    for name in ('"bi.lling".inbox', "Audit", '"100% ""of"" it"'):
        connection.execute(create_inbox_sql(TableName.parse(name)))
        inbox = Inbox(TableName.parse(name))
        with connection.transaction():
            assert inbox.accept(connection, "api", "a")
            assert not inbox.accept(connection, "api", "a")
        assert accepted(database, name) == [("api", "a")]
        assert inbox.prune(connection, WEEK) == 0
    assert accepted(database) == []


def test_a_table_without_its_key_is_an_error(connection):
    """A table without the key that identifies repeats is an error of PostgreSQL, and accepts no message."""
    connection.execute("ALTER TABLE inbox DROP CONSTRAINT inbox_pkey")
    with pytest.raises(psycopg.errors.InvalidColumnReference), connection.transaction():
        Inbox().accept(connection, "api", "a")


@pytest.mark.parametrize("level", [psycopg.IsolationLevel.REPEATABLE_READ, psycopg.IsolationLevel.SERIALIZABLE])
def test_a_concurrent_repeat_with_snapshots(database, connection, level):
    """With REPEATABLE READ or SERIALIZABLE a concurrent repeat is a serialization failure, and False at the retry."""
    with psycopg.connect(database) as first, psycopg.connect(database) as second:
        second.isolation_level = level
        second.execute("SELECT count(*) FROM inbox")
        assert Inbox().accept(first, "api", "a")
        first.commit()
        with pytest.raises(psycopg.errors.SerializationFailure):
            Inbox().accept(second, "api", "a")
        second.rollback()
        assert not Inbox().accept(second, "api", "a")
    assert connection.execute("SELECT count(*) FROM inbox").fetchone() == (1,)


# -- pruning -----------------------------------------------------------------------------------------------------------


def _fill(connection, *, old, young=3):
    insert = "INSERT INTO inbox SELECT %s, n, now() - %s::interval - n * interval '1 ms' FROM generate_series(1, %s) n"
    connection.execute(insert, ["old", "8 days", old])
    connection.execute(insert, ["young", "6 days", young])


@pytest.mark.parametrize(("old", "batch"), [(0, 10), (9, 10), (10, 10), (25, 10)])
def test_prune_in_batches(connection, old, batch):
    """Messages older than the age are deleted, in transactions of a batch each; younger ones stay."""
    connection.execute("CREATE TABLE pruned (xid xid8, source text)")
    connection.execute(
        """CREATE FUNCTION note() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               INSERT INTO pruned VALUES (pg_current_xact_id(), OLD.source); RETURN OLD; END $$"""
    )
    connection.execute("CREATE TRIGGER note BEFORE DELETE ON inbox FOR EACH ROW EXECUTE FUNCTION note()")
    _fill(connection, old=old)
    assert Inbox().prune(connection, WEEK, batch=batch) == old
    assert connection.execute("SELECT source, count(*) FROM inbox GROUP BY 1").fetchall() == [("young", 3)]
    sizes = connection.execute("SELECT count(*) FROM pruned GROUP BY xid ORDER BY min(xid::text::bigint)").fetchall()
    assert [size for (size,) in sizes] == [batch] * (old // batch) + [old % batch] * (old % batch > 0)


def test_prune_takes_the_oldest_first(connection):
    """A run that breaks off has deleted the oldest messages."""
    _fill(connection, old=30)
    connection.execute(
        """CREATE FUNCTION refuse() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
               IF OLD.message_id = '15' THEN RAISE 'broken off'; END IF; RETURN OLD; END $$"""
    )
    connection.execute("CREATE TRIGGER refuse BEFORE DELETE ON inbox FOR EACH ROW EXECUTE FUNCTION refuse()")
    with pytest.raises(psycopg.errors.RaiseException, match="broken off"):
        Inbox().prune(connection, WEEK, batch=5)
    rows = connection.execute("SELECT message_id::int FROM inbox WHERE source = 'old' ORDER BY 1").fetchall()
    assert [number for (number,) in rows] == list(range(1, 16))


def test_prune_many_of_one_moment(connection):
    """Messages of one transaction, and so of one time, are all deleted, even if they are more than a batch."""
    connection.execute("INSERT INTO inbox SELECT 'old', n, now() - interval '8 days' FROM generate_series(1, 95) n")
    assert Inbox().prune(connection, WEEK, batch=10) == 95


def test_prune_frees_the_ids(connection):
    """A message whose acceptance was pruned is accepted again."""
    _fill(connection, old=1)
    with connection.transaction():
        assert not Inbox().accept(connection, "old", 1)
    Inbox().prune(connection, WEEK)
    with connection.transaction():
        assert Inbox().accept(connection, "old", 1)


def test_prune_a_partitioned_inbox(connection):
    """In a partitioned table, where an address can mean several rows, no young message is deleted."""
    connection.execute("DROP TABLE inbox")
    columns = create_inbox_sql(TableName("inbox")).partition(";")[0]
    connection.execute(f"{columns} PARTITION BY HASH (source)")
    for number in range(2):
        bound = f"FOR VALUES WITH (modulus 2, remainder {number})"
        connection.execute(f"CREATE TABLE part{number} PARTITION OF inbox {bound}")
    for source in "abcdefgh":
        age = "8 days" if source < "e" else "1 day"
        connection.execute("INSERT INTO inbox VALUES (%s, 'x', now() - %s::interval)", [source, age])
    assert Inbox().prune(connection, WEEK, batch=2) == 4
    assert [source for (source,) in connection.execute("SELECT source FROM inbox ORDER BY 1")] == list("efgh")


def test_two_prunes_at_once(database, connection):
    """A second run that meets the first does not fail and goes on to the end, and no message is counted twice."""
    _fill(connection, old=50)
    counts = []
    with psycopg.connect(database) as first, psycopg.connect(database, autocommit=True) as second:
        locked = first.execute("DELETE FROM inbox WHERE source = 'old' AND message_id::int > 40").rowcount
        thread = threading.Thread(target=lambda: counts.append(Inbox().prune(second, WEEK, batch=10)))
        thread.start()
        wait_for_a_blocked_session(database)
        first.commit()
        thread.join(60)
    assert (locked, counts) == (10, [40])


def test_prune_refuses_a_transaction_and_nonsense(database, connection):
    """Pruning refuses a connection in a transaction, which its first batch would commit, and a zero age or batch."""
    _fill(connection, old=1)
    with psycopg.connect(database) as other:
        other.execute("SELECT 1")
        with pytest.raises(OutboxError, match="outside a transaction"):
            Inbox().prune(other, WEEK)
        other.rollback()
        assert Inbox().prune(other, WEEK) == 1
        for arguments in ({"older_than": timedelta(0)}, {"older_than": WEEK, "batch": 0}):
            with pytest.raises(ValueError, match="positive"):
                Inbox().prune(other, **arguments)


def test_prune_uses_the_index(connection):
    """Each batch is found through the index on the time, from the end of the last one."""
    _fill(connection, old=100, young=20_000)
    connection.execute("ANALYZE inbox")
    week_ago, ten_days_ago = (datetime.now(UTC) - timedelta(days=days) for days in (7, 10))
    parameters = [week_ago, ten_days_ago, 50, week_ago]
    plan = "\n".join(line for (line,) in connection.execute("EXPLAIN " + Inbox()._prune_sql, parameters))
    assert "inbox_accept_time_idx" in plan
    assert "Tid Scan" in plan
    assert "Seq Scan" not in plan


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command(database, connection, capsys, monkeypatch, tmp_path):
    """`outbox inbox prune` prunes the given table of the given database, and reports the number."""
    _fill(connection, old=25)
    assert main(["inbox", "prune", "--dsn", database, "--older-than", "7d12h", "--batch", "10"]) == 0
    assert capsys.readouterr().out == "pruned 25 messages from inbox\n"
    connection.execute(create_inbox_sql(TableName("received")))
    connection.execute("INSERT INTO received VALUES ('s', 'i', now() - interval '61 minutes')")
    monkeypatch.setenv("OUTBOX_POSTGRES_DSN", database)
    assert main(["inbox", "prune", "--older-than", "1h", "--table", "public.received"]) == 0
    assert capsys.readouterr().out == "pruned 1 message from public.received\n"
    assert len(accepted(database)) == 3
    monkeypatch.delenv("OUTBOX_POSTGRES_DSN")
    file = tmp_path / "outbox.yaml"
    file.write_text(json.dumps({"harvest": {"dataSource": database, "outboxTable": "elsewhere"}}))
    assert main(["inbox", "prune", "-f", str(file), "--older-than", "7d"]) == 0
    assert capsys.readouterr().out == "pruned 0 messages from inbox\n"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--older-than", "7d", "--table", "a b"], "--table: 'a b' is not a table name"),
        (["--older-than", "7d", "--table", "absent"], "there is no table absent; `outbox schema --inbox absent`"),
        (["--older-than", "7d", "--table", "business"], "business is no inbox: column"),
        (
            ["--older-than", "7d", "--dsn", "host=/nowhere password=geheim"],
            "cannot connect to database (the default) at /nowhere: ",
        ),
        (["--older-than", "7d", "--dsn", "nonsense geheim"], "--dsn: "),
        (["--older-than", "7d", "--dsn", ""], "no database: pass --dsn or -f, or set OUTBOX_POSTGRES_DSN"),
    ],
)
@pytest.mark.usefixtures("connection")
def test_what_the_command_refuses(database, capsys, monkeypatch, arguments, complaint):
    """An error is one line with exit code 2, and does not show a password."""
    with psycopg.connect(database) as connection:
        connection.execute("CREATE TABLE business (id int)")
    monkeypatch.delenv("OUTBOX_POSTGRES_DSN", raising=False)
    dsn = [] if "--dsn" in arguments else ["--dsn", database]
    assert main(["inbox", "prune", *arguments, *dsn]) == 2
    error = capsys.readouterr().err
    assert complaint in error
    assert error.count("\n") == 1
    assert "geheim" not in error


def test_the_command_needs_the_right_to_delete(database, connection, capsys):
    """For a role that may not delete, the error names the rights that pruning needs."""
    user = f"reader_{conninfo_to_dict(database)['dbname']}"
    connection.execute(f"CREATE ROLE {user} LOGIN; GRANT SELECT ON inbox TO {user}")
    try:
        assert main(["inbox", "prune", "--older-than", "7d", "--dsn", as_role(database, user)]) == 2
        assert "needs SELECT and DELETE to prune" in capsys.readouterr().err
    finally:
        connection.execute(f"DROP OWNED BY {user}; DROP ROLE {user}")


def test_the_command_needs_psycopg_alone(database, connection):
    """Pruning works without a Kafka client, a framework, pydantic and PyYAML."""
    _fill(connection, old=2)
    blocked = ["confluent_kafka", "pydantic", "yaml", "prometheus_client", "sqlalchemy", "django"]
    program = (
        f"import sys; sys.modules.update(dict.fromkeys({blocked}));"
        "from outbox_core.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    command = [sys.executable, "-c", program, "inbox", "prune", "--older-than=7d", f"--dsn={database}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, "pruned 2 messages from inbox\n"), done.stderr
