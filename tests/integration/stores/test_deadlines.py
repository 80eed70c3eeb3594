"""Servers that say nothing while their connections stay open: every kind of call ends by its deadline and says so."""

import socket
import threading
import time
from contextlib import closing, contextmanager, suppress
from datetime import timedelta
from uuid import uuid4

import pg8000.dbapi
import psycopg
import psycopg2
import pytest

from devstack.ports import LOCALHOST
from devstack.proxy import TcpProxy
from outbox_core.claims.stores import TableStore
from outbox_core.cli import main
from outbox_core.console.outboxes import ConsoleOutbox
from outbox_core.doctor import session as doctor_session
from outbox_core.doctor.session import DatabaseSession
from outbox_core.doctor.status import Unknown, read_database_status
from outbox_core.errors import StoreUnavailable
from outbox_core.inbox import Inbox
from outbox_core.retention.archive import archive_statements
from outbox_core.schema import TableName, create_history_sql, create_inbox_sql, notify_sql
from outbox_core.stores.interface import NewHold, NewStatistics, RowQuery
from outbox_core.stores.postgres import connection as connections
from outbox_core.stores.postgres import deadlines, notify
from outbox_core.stores.postgres.connection import connect_to_primary
from outbox_core.stores.postgres.deadlines import BoundedConnection, ConnectionGivenUp
from outbox_core.stores.postgres.notify import CommitNotices
from outbox_core.stores.postgres.store import PostgresStore
from tests.harvesting import Scene, wait_until

pytestmark = pytest.mark.usefixtures("scene")

ME = uuid4()
_GRACE_SECONDS = 0.5
_TIMEOUT_SECONDS = 0.5


@pytest.fixture(autouse=True)
def little_patience(monkeypatch):
    """Wait for a fraction of the time."""
    monkeypatch.setattr(deadlines, "GRACE_SECONDS", _GRACE_SECONDS)
    monkeypatch.setattr(deadlines, "LONG_SECONDS", 1.0)
    monkeypatch.setattr("outbox_core.stores.postgres.table.LONG_SECONDS", 1.0)
    monkeypatch.setattr("outbox_core.stores.postgres.table._WHOLE_TABLE_FACTOR", 1.0)
    monkeypatch.setattr(BoundedConnection, "patience", 1.0)
    monkeypatch.setattr(doctor_session, "_STATEMENT_SECONDS", _TIMEOUT_SECONDS)
    monkeypatch.setattr(notify, "_STATEMENT_SECONDS", _TIMEOUT_SECONDS)


@pytest.fixture
def scene(database):
    """Return an outbox with all that can be beside it."""
    scene = Scene(database, "")
    scene.execute(create_history_sql(scene.table))
    for statement in archive_statements(scene.table):
        scene.execute(statement)
    scene.execute(notify_sql(scene.table))
    scene.fill("t", 10)
    yield scene
    scene.close()


@pytest.fixture
def proxy(database):
    """Return a proxy before the database."""
    given = psycopg.conninfo.conninfo_to_dict(database)
    with TcpProxy(given["host"], int(given["port"])) as running:
        running.data_source = psycopg.conninfo.make_conninfo(database, host=LOCALHOST, port=running.port)
        yield running


_CALLS = {
    "mark": lambda store: store.mark(ME, RowQuery(10, 2**20)),
    "scan": lambda store: store.scan(RowQuery(10, 2**20)),
    "purge": lambda store: store.purge(ME, [1], [0]),
    "reset": lambda store: store.reset(ME, [1]),
    "delete published": lambda store: store.delete_published([1], [0]),
    "find": lambda store: store.find([1]),
    "is empty": lambda store: store.is_empty(),
    "backlog": lambda store: store.backlog(),
    "read holds": lambda store: store.holds.read(),
    "add holds": lambda store: store.holds.add([NewHold("t", "k1", 1, "why", "error")]),
    "sequence": lambda store: store.sequence.snapshot(),
    "count marked": lambda store: store.marks.count(),
    "hold marked": lambda store: store.marks.hold(10),
    "statistics": lambda store: store.history.add_statistics(NewStatistics("me", 10.0, 1, 0, 1, None, None, None)),
    "server id": lambda store: store.server_id(),
    "rotate archive": lambda store: store.rotate_archive(),
    "check": lambda store: store.check(),
}


@pytest.mark.parametrize("call", _CALLS)
def test_store_call_ends_by_its_deadline_and_the_next_one_works(proxy, call):
    """A call without an answer ends in doubt, names host, time and statement; the next makes a new connection."""
    store = PostgresStore(
        proxy.data_source, statement_timeout=_TIMEOUT_SECONDS, archive_days=3, application_name="kafka-outbox test"
    )
    with closing(store):
        store.check()
        _CALLS[call](store)
        proxy.cut()
        began = time.monotonic()
        silence = rf"at {LOCALHOST}:{proxy.port} has not answered for 1 s \(.+\)"
        with pytest.raises(StoreUnavailable, match=silence) as caught:
            _CALLS[call](store)
        assert caught.value.in_doubt
        assert time.monotonic() - began >= 0.9
        proxy.restore()

        def works():
            with suppress(StoreUnavailable):  # the timeout is short for a session that is set up on a busy machine
                _CALLS[call](store)
                return True
            return False

        wait_until(works, "the next one works")


@pytest.fixture
def looking(proxy, monkeypatch):
    """Return a store, with a timeout, that looks after half a second if the server still takes connections."""
    monkeypatch.setattr("outbox_core.stores.postgres.table.LONG_SECONDS", 25.0)
    monkeypatch.setattr("outbox_core.stores.postgres.table.LOOK_SECONDS", 0.5)
    monkeypatch.setattr(deadlines, "_LOOK_TIMEOUT_SECONDS", 2)
    with closing(PostgresStore(proxy.data_source, statement_timeout=5.0)) as store:
        store.check()
        yield store


@contextmanager
def counting(store, scene):
    """Have marks counted in the background, behind a lock; yield what becomes of it, a number or an error."""
    results = []

    def count():
        try:
            results.append(store.marks.count().number)
        except StoreUnavailable as error:
            results.append(str(error))

    thread, waiting = (
        threading.Thread(target=count),
        "SELECT pid FROM pg_locks WHERE relation = 'outbox'::regclass AND NOT granted",
    )
    with scene.connect() as other:
        other.execute("LOCK TABLE outbox")
        thread.start()
        wait_until(lambda: scene.execute(waiting), "it waits for the lock")
        yield results
    thread.join()


def test_whole_table_is_not_waited_for_where_the_server_takes_no_connection(looking, proxy, scene):
    """A statement that reads the whole table, and has no timeout, is given up once the server is gone for all."""
    with counting(looking, scene) as results:
        proxy.cut()
        wait_until(lambda: results, "it is given up")
    assert "and takes no other connection" in results[0]
    proxy.restore()
    assert looking.marks.count().number == 0


def test_whole_table_is_waited_for_where_the_server_takes_connections(looking, scene):
    """As long as the server takes others it may be at work: its statement is waited for."""
    connection = looking.table.connected()
    with counting(looking, scene) as results:
        wait_until(lambda: connection._looked_at, "it has looked")
        looked_at = connection._looked_at
        wait_until(lambda: connection._looked_at > looked_at, "it looks again")
        assert not results
    assert results == [0]
    assert looking.table.connected() is connection


def test_error_names_the_statement(proxy):
    """The statement is named as in the source, without its values."""
    with closing(PostgresStore(proxy.data_source, statement_timeout=_TIMEOUT_SECONDS)) as store:
        store.check()
        proxy.cut()
        with pytest.raises(StoreUnavailable, match="statement delete published") as caught:
            store.delete_published([4711], [0])
    assert "4711" not in str(caught.value)


@pytest.mark.parametrize("statement", ["_WHO", "_FIND", "_PIN", "_NAME", "_SESSION"])
def test_session_that_is_set_up_has_a_deadline(scene, proxy, monkeypatch, statement):
    """Every statement before the session's own timeout counts is bounded, too."""
    execute = psycopg.Connection.execute

    def cut_first(self, query, *arguments, **options):
        if query == getattr(connections, statement):
            proxy.cut()
        return execute(self, query, *arguments, **options)

    monkeypatch.setattr(psycopg.Connection, "execute", cut_first)
    with pytest.raises(StoreUnavailable, match="has not answered for 1 s"):
        connect_to_primary(proxy.data_source, "kafka-outbox test", scene.table, statement_timeout=30.0)


def test_second_attempt_has_the_time_that_it_was_given(proxy):
    """The deadline follows the statement timeout in force, which grows for reads that need longer."""
    with closing(PostgresStore(proxy.data_source, statement_timeout=_TIMEOUT_SECONDS)) as store:
        store.check()
        store.table.set_timeout(2.0)
        assert store.table.connected().patience == 2.0 + _GRACE_SECONDS
        with store.table.without_timeout():
            assert store.table.connected().patience == 1.0 + _GRACE_SECONDS
        assert store.table.connected().patience == _TIMEOUT_SECONDS + _GRACE_SECONDS


def test_answer_that_takes_long_is_waited_for_as_long_as_bytes_come(proxy):
    """A result that comes in pieces takes longer than the patience, and is whole."""
    with closing(BoundedConnection.connect(proxy.data_source, autocommit=True)) as connection:
        connection.patience = 0.5
        rows = connection.execute("SELECT n, repeat('x', 20000), pg_sleep(0.2) FROM generate_series(1, 8) AS n")
        assert len(rows.fetchall()) == 8


@pytest.mark.parametrize("end", ["commit", "rollback"])
def test_end_of_a_transaction_is_bounded(proxy, end):
    """COMMIT and ROLLBACK wait no longer than statements, and the connection is closed."""
    with closing(BoundedConnection.connect(proxy.data_source)) as connection:
        connection.execute("SELECT 1")
        proxy.cut()
        with pytest.raises(ConnectionGivenUp, match="has not answered"):
            getattr(connection, end)()
        assert connection.closed


def test_copy_that_nobody_reads_is_bounded(proxy):
    """COPY into a connection that takes no more bytes ends as a statement does."""
    with closing(BoundedConnection.connect(proxy.data_source, autocommit=True)) as connection:
        connection.execute("CREATE TEMP TABLE taken (text text)")
        with pytest.raises(ConnectionGivenUp):
            _copy_much(connection, proxy)


def test_descriptor_of_a_connection_that_was_given_up_harms_no_other(proxy, database):
    """The next connection gets the same descriptor, and works."""
    first = BoundedConnection.connect(proxy.data_source, autocommit=True)
    descriptor = first.fileno()
    proxy.cut()
    with pytest.raises(ConnectionGivenUp):
        first.execute("SELECT 1")
    first.close()
    with closing(BoundedConnection.connect(database, autocommit=True)) as second:
        assert second.fileno() == descriptor
        assert second.execute("SELECT 1").fetchall() == [(1,)]


def test_unix_socket_is_given_up_too(scene, tmp_path):
    """A connection over a Unix socket ends in the same way."""
    path = tmp_path / ".s.PGSQL.5432"
    given = psycopg.conninfo.conninfo_to_dict(scene.database)
    with socket.create_server(str(path), family=socket.AF_UNIX) as listener, _Relay(listener, given) as relay:
        source = psycopg.conninfo.make_conninfo(scene.database, host=str(tmp_path), port="5432")
        with closing(BoundedConnection.connect(source, autocommit=True)) as connection:
            assert connection.execute("SELECT 1").fetchall() == [(1,)]
            relay.freeze()
            with pytest.raises(ConnectionGivenUp, match=str(tmp_path)):
                connection.execute("SELECT 1")


def test_listener_notices_silence(proxy):
    """The check of the connection that listens ends by its deadline; the next `open` works."""
    notices = CommitNotices(proxy.data_source, "outbox", application_name="kafka-outbox test")
    notices.open()
    proxy.cut()
    with pytest.raises(StoreUnavailable, match=r"has not answered for 1 s \(LISTEN for notices\)"):
        notices.check()
    proxy.restore()
    notices.open()
    notices.dispose()


def test_doctor_status_and_console_end(scene, proxy):
    """Sessions of commands that look, and those of the console, end by their deadline."""
    config = scene.config(data_source=proxy.data_source, base_kafka_config={"bootstrap.servers": "127.0.0.1:1"})
    with DatabaseSession(proxy.data_source, "outbox", application_name="kafka-outbox doctor") as session:
        session.ask("SELECT 1")
        proxy.cut()
        with pytest.raises(StoreUnavailable, match=r"has not answered for 1 s \(kafka-outbox doctor\)"):
            session.ask("SELECT 1")
    proxy.restore()
    console = ConsoleOutbox("one", config)
    with pytest.raises(StoreUnavailable, match=r"\(kafka-outbox console\)"):
        _ask_the_silent(console, proxy)
    status = read_database_status(config)
    assert isinstance(status.backlog, Unknown)


@pytest.mark.parametrize(
    "arguments",
    [
        ["hold", "list"],
        ["hold", "add", "--topic", "t"],
        ["inbox", "prune", "--older-than", "1d"],
        ["schema", "--apply"],
    ],
    ids=lambda arguments: " ".join(arguments[:2]),
)
def test_command_ends(proxy, monkeypatch, capsys, arguments):
    """A command whose database falls silent in the middle says so, and ends with an error."""
    real = BoundedConnection.set_patience

    def cut_after(self, *given, **options):
        real(self, *given, **options)
        proxy.cut()

    monkeypatch.setattr(BoundedConnection, "set_patience", cut_after)
    assert main([*arguments, "--dsn", proxy.data_source]) != 0
    assert f"{LOCALHOST}:{proxy.port} has not answered for 1 s" in capsys.readouterr().err


def _connect_pg8000(source):
    given = psycopg.conninfo.conninfo_to_dict(source)
    role = "prunes_by_pg8000"  # without a password: pg8000 refuses one that was hashed once only, as devstack's is
    with psycopg.connect(source, autocommit=True) as connection:
        if not connection.execute("SELECT FROM pg_roles WHERE rolname = %s", [role]).fetchall():
            connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
    return pg8000.dbapi.connect(role, given["host"], given["dbname"], int(given["port"]))


_DRIVERS = {"psycopg": psycopg.connect, "psycopg2": psycopg2.connect, "pg8000": _connect_pg8000}


@pytest.mark.parametrize("driver", _DRIVERS)
def test_connection_of_another_is_given_up(scene, proxy, monkeypatch, caplog, driver):
    """Pruning on a caller's connection ends with the driver's own error and one log line, whatever the driver."""
    scene.execute(create_inbox_sql(TableName("inbox")))
    monkeypatch.setattr("outbox_core.inbox.LONG_SECONDS", 1.0)
    monkeypatch.setattr("outbox_core.row_security.SHORT_SECONDS", 1.0)
    inbox = Inbox("inbox")
    connection = _DRIVERS[driver](proxy.data_source)
    assert inbox.prune(connection, timedelta(days=1)) == 0
    proxy.cut()
    with pytest.raises(Exception) as caught:  # noqa: PT011  each driver has its own
        inbox.prune(connection, timedelta(days=1))
    with suppress(Exception):  # pg8000 says goodbye even to a connection that is lost
        connection.close()
    (line,) = [record.getMessage() for record in caplog.records if "given up" in record.getMessage()]
    silence = f"the database at {LOCALHOST}:{proxy.port} has not answered for 1 s (row level security)"
    assert line == f"{silence}; the connection was given up"
    assert caught.value.__notes__ == [line]


@pytest.mark.parametrize("driver", ["psycopg", "psycopg2"])
def test_store_of_payloads_is_given_up(scene, proxy, monkeypatch, driver):
    """A payload that the database does not return ends with an error; the next call makes a connection of its own."""
    monkeypatch.setattr("outbox_core.claims.stores.LONG_SECONDS", 1.0)
    frozen = threading.Event()

    def connect():
        connection = _DRIVERS[driver](proxy.data_source)
        if frozen.is_set():
            proxy.cut()
        return connection

    store = TableStore(connect)
    scene.execute(store.create_sql)
    name = f"t/20261127T120000Z-{uuid4().hex}"
    store.put(name, b"payload")
    frozen.set()
    with pytest.raises(Exception) as caught:  # noqa: PT011  each driver has its own
        store.get(name)
    assert "has not answered for 1 s (payloads in outbox_claim)" in caught.value.__notes__[0]
    frozen.clear()
    proxy.restore()
    assert store.get(name) == b"payload"


def _copy_much(connection, proxy):
    with connection.cursor().copy("COPY taken FROM STDIN") as copy:
        proxy.cut()
        for _ in range(3000):
            copy.write_row(["x" * 10_000])


def _ask_the_silent(console, proxy):
    with console.session(writes=True) as session:
        proxy.cut()
        session.connection.execute("SELECT 1")


class _Relay:
    """A listener's connections, forwarded to a database until `freeze`."""

    def __init__(self, listener, given):
        self._listener, self._to = listener, (given["host"], int(given["port"]))
        self._frozen = threading.Event()
        self._sides = []
        self._thread = threading.Thread(target=self._serve, daemon=True)

    def freeze(self):
        """Forward nothing more."""
        self._frozen.set()

    def __enter__(self):
        self._thread.start()
        return self

    def __exit__(self, *_):
        for side in self._sides:
            side.close()

    def _serve(self):
        near, _ = self._listener.accept()
        far = socket.create_connection(self._to)
        self._sides += [near, far]
        for one, other in ((near, far), (far, near)):
            threading.Thread(target=self._pump, args=(one, other), daemon=True).start()

    def _pump(self, one, other):
        try:
            while data := one.recv(65536):
                if not self._frozen.is_set():
                    other.sendall(data)
        except OSError:
            pass
