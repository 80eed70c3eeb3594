"""The Stasher on bare DB-API connections: the contract on each installed driver, and further rules."""

import subprocess
import sys
import time
from contextlib import contextmanager

import psycopg
import pytest

from outbox_core import OutboxRecord, Stasher
from outbox_core.errors import InvalidRecord, OutboxError, TransactionRequired
from outbox_core.schema import BINARY_LAYOUT, TEXT_LAYOUT, TableName, create_table_sql
from tests.contract.stash_contract import StashContract, TextStashContract, stashed


class _Writer:
    def __init__(self, connection, stasher):
        self.connection = connection
        self.stasher = stasher

    def stash(self, record):
        self.stasher.stash(self.connection, record)

    def stash_many(self, records):
        self.stasher.stash_many(self.connection, records)

    def execute(self, sql):
        self.connection.cursor().execute(sql)

    @contextmanager
    def savepoint(self):
        self.execute("SAVEPOINT test_savepoint")
        try:
            yield
        except BaseException:
            self.execute("ROLLBACK TO SAVEPOINT test_savepoint")
            raise
        self.execute("RELEASE SAVEPOINT test_savepoint")


class _PreparedWriter(_Writer):
    """A writer that stashes each single record through a prepared stasher."""

    def stash(self, record):
        with self.stasher.prepare(self.connection) as prepared:
            prepared.stash(record)


class _Adapter:
    writer = _Writer

    def __init__(self, connect, layout=BINARY_LAYOUT):
        self.connect = connect
        self.stasher = Stasher("outbox", layout)

    @contextmanager
    def transaction(self):
        connection = self.connect()
        try:
            yield self.writer(connection, self.stasher)
            connection.commit()
        finally:
            connection.close()

    @contextmanager
    def autocommit(self):
        connection = self.connect()
        connection.autocommit = True
        try:
            yield self.writer(connection, self.stasher)
        finally:
            connection.close()


class _PreparedAdapter(_Adapter):
    writer = _PreparedWriter


class TestPsycopg3(StashContract):
    """The contract on psycopg 3."""

    @pytest.fixture
    def adapter(self, outbox_database):
        """Connections of psycopg 3."""
        return _Adapter(lambda: psycopg.connect(outbox_database))


class TestPsycopg3Prepared(StashContract):
    """The contract on psycopg 3, with prepared stashers for single records."""

    @pytest.fixture
    def adapter(self, outbox_database):
        """Connections of psycopg 3."""
        return _PreparedAdapter(lambda: psycopg.connect(outbox_database))


class TestPsycopg3Text(TextStashContract):
    """The contract of the text layout on psycopg 3."""

    @pytest.fixture
    def adapter(self, outbox_database):
        """Connections of psycopg 3."""
        return _Adapter(lambda: psycopg.connect(outbox_database), TEXT_LAYOUT)


class TestPsycopg2(StashContract):
    """The contract on psycopg2, where it is installed."""

    @pytest.fixture
    def adapter(self, outbox_database):
        """Connections of psycopg2."""
        psycopg2 = pytest.importorskip("psycopg2", reason="psycopg2 is not installed")
        return _PreparedAdapter(lambda: psycopg2.connect(outbox_database))


@pytest.fixture
def connection(database):
    """A psycopg connection to a database with an outbox."""
    with psycopg.connect(database) as connection:
        connection.execute(create_table_sql(TableName("outbox")))
        connection.commit()
        yield connection


def test_explicit_transaction_on_autocommit_connection(database, connection):
    """An autocommit connection is accepted inside `transaction()` or after BEGIN, and refused again afterwards."""
    connection.autocommit = True
    stasher = Stasher()
    with connection.transaction():
        stasher.stash(connection, OutboxRecord("orders", 1))
    connection.execute("BEGIN")
    stasher.stash(connection, OutboxRecord("orders", 2))
    connection.execute("COMMIT")
    with pytest.raises(TransactionRequired, match="autocommit"):
        stasher.stash(connection, OutboxRecord("orders", 3))
    assert [row.kafka_key for row in stashed(database)] == ["1", "2"]


def test_pipeline(database, connection):
    """In a pipeline the stasher asks the server for the state of the transaction."""
    connection.autocommit = True
    stasher = Stasher()
    with connection.pipeline():
        connection.execute("SELECT 1")
        with pytest.raises(TransactionRequired):
            stasher.stash(connection, OutboxRecord("orders", 1))
        with connection.transaction():
            connection.execute("SELECT 1")
            stasher.stash(connection, OutboxRecord("orders", 2))
            stasher.stash_many(connection, [OutboxRecord("orders", 3)])
    assert [row.kafka_key for row in stashed(database)] == ["2", "3"]


def test_prepared_stasher_uses_one_server_side_statement(database, connection):
    """A prepared stasher prepares its INSERT once on the server, and cannot be used after its end."""
    with Stasher().prepare(connection) as prepared:
        for number in range(2):
            prepared.stash(OutboxRecord("orders", number, b"v"))
        statements = connection.execute("SELECT statement FROM pg_prepared_statements").fetchall()
        assert [statement.startswith('INSERT INTO "outbox"') for (statement,) in statements] == [True]
    with pytest.raises(psycopg.InterfaceError, match="closed"):
        prepared.stash(OutboxRecord("orders"))
    connection.commit()
    assert len(stashed(database)) == 2


def test_prepared_stasher_is_refused_once_the_transaction_is_over(database, connection):
    """A prepared stasher is refused once its transaction is over: it would commit each record by itself."""
    connection.autocommit = True
    with pytest.raises(TransactionRequired):
        Stasher().prepare(connection)
    with connection.transaction():
        prepared = Stasher().prepare(connection)
        prepared.stash(OutboxRecord("orders", 1))
    with pytest.raises(TransactionRequired):
        prepared.stash(OutboxRecord("orders", 2))
    assert [row.kafka_key for row in stashed(database)] == ["1"]


def test_ten_thousand_records(database, connection):
    """10,000 records are written in order, within seconds."""
    began = time.monotonic()
    Stasher().stash_many(connection, (OutboxRecord("orders", n, b"v" * 100, {"h": "x"}) for n in range(10_000)))
    connection.commit()
    assert time.monotonic() - began < 10
    assert [row.kafka_key for row in stashed(database)] == [str(n) for n in range(10_000)]


def test_several_outboxes(database, connection):
    """A stasher writes to its own table: in a schema, and with a name that needs quoting and escaping."""
    connection.execute('CREATE SCHEMA "bi.lling"')
    names = ['"bi.lling".outbox', "Audit", '"100% ""of"" it"']
    for name in names:
        connection.execute(create_table_sql(TableName.parse(name)))
        Stasher(name).stash(connection, OutboxRecord("orders", name))
        Stasher(TableName.parse(name)).stash_many(connection, [OutboxRecord("orders", name)])
    connection.commit()
    for name in names:
        assert [row.kafka_key for row in stashed(database, name)] == [name, name]
    assert stashed(database) == []


def test_asynchronous_connection_is_refused():
    """An asynchronous connection is refused."""
    with pytest.raises(OutboxError, match=r"psycopg\..*AsyncConnection is asynchronous"):
        Stasher().stash(object.__new__(psycopg.AsyncConnection), OutboxRecord("orders"))


def test_broken_transaction_is_the_drivers_to_report(connection):
    """In a failed transaction the driver's own error is raised."""
    with pytest.raises(psycopg.errors.UndefinedTable):
        connection.execute("SELECT * FROM missing")
    with pytest.raises(psycopg.errors.InFailedSqlTransaction):
        Stasher().stash(connection, OutboxRecord("orders"))


def test_driver_without_transaction_status():
    """A driver that cannot report explicit transactions is refused in autocommit mode, before a cursor is made."""

    class _Connection:
        autocommit = True

    with pytest.raises(TransactionRequired):
        Stasher().stash(_Connection(), OutboxRecord("orders"))
    connection = _Connection()
    connection.autocommit = False
    with pytest.raises(InvalidRecord):
        Stasher(layout=TEXT_LAYOUT).stash(connection, OutboxRecord("orders"))


def test_import_needs_nothing_else():
    """Importing the stasher imports no driver, framework or Kafka client."""
    program = (
        "import sys; from outbox_core import Stasher, OutboxRecord; "
        "print([m for m in ('psycopg', 'confluent_kafka', 'sqlalchemy', 'django', 'pydantic') if m in sys.modules])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"
