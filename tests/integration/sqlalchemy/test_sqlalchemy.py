"""Stashing through SQLAlchemy beyond the contract: flushes, batches, several databases, wrong arguments."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import psycopg
import pytest
from sqlalchemy import Connection, Delete, Insert, MetaData, String, Table, Update, create_engine, event, text
from sqlalchemy.exc import IntegrityError
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, scoped_session, sessionmaker

import outbox_sqlalchemy as outbox
from outbox_core.claims import FolderStore
from outbox_core.schema import TableName, create_table_sql
from tests.contract.stash_contract import stashed
from tests.services import as_role


class Base(DeclarativeBase):
    """The application's models."""


class Order(Base):
    """Data of the application."""

    __tablename__ = "orders"

    number: Mapped[str] = mapped_column(String(10), primary_key=True)
    state: Mapped[str] = mapped_column(default="new")


class BillingBase(DeclarativeBase):
    """Models of another database."""


class BillingOutbox(outbox.OutboxMixin, BillingBase):
    """The outbox of the other database, as a model."""

    __tablename__ = "outbox"


ORDERS_OUTBOX = outbox.make_outbox_table(Base.metadata)


@pytest.fixture
def engine(database):
    """An engine with the application's tables, an outbox among them."""
    engine = create_engine(outbox.sqlalchemy_url(database))
    Base.metadata.create_all(engine)
    yield engine
    engine.dispose()


@pytest.fixture
def billing(postgres, database):
    """The DSN and an engine of a second database with an outbox."""
    dsn = postgres.create_database(database.rpartition("/")[2] + "_billing")
    engine = create_engine(outbox.sqlalchemy_url(dsn))
    BillingBase.metadata.create_all(engine)
    yield dsn, engine
    engine.dispose()
    postgres.drop_database(dsn.rpartition("/")[2])


def test_a_refused_session_uploads_nothing_and_a_wrong_record_flushes_nothing(engine, statements, tmp_path):
    """AUTOCOMMIT is refused before a large payload is in its claim store, and a record before the session's flush."""
    store = FolderStore(tmp_path)
    claiming = outbox.Outbox(ORDERS_OUTBOX, claim_store=store, claim_check_above=1)
    record = outbox.OutboxRecord(topic="orders", value=b"large")
    with Session(engine.execution_options(isolation_level="AUTOCOMMIT")) as session:
        for write, argument in ((claiming.stash, record), (claiming.stash_many, [record])):
            with pytest.raises(outbox.TransactionRequired):
                write(session, argument)
    with Session(engine) as session:
        session.add(Order(number="1"))
        with pytest.raises(outbox.InvalidRecord):
            claiming.stash(session, "no record")
    assert (list(store.names()), statements) == ([], [])


@pytest.fixture
def statements(engine):
    """The list of every (statement, executemany, number of parameter sets) that the engine sends."""
    sent = []

    @event.listens_for(engine, "before_cursor_execute")
    def note(_connection, _cursor, statement, parameters, _context, executemany):
        sent.append((statement, executemany, len(parameters) if executemany else 1))

    return sent


def _keys(database: str, table: str = "outbox") -> list[str | None]:
    return [row.kafka_key for row in stashed(database, table)]


def test_ten_thousand_in_one_batch(engine, database, statements):
    """10,000 records go to the driver in one executemany, and arrive in order."""
    with Session(engine) as session, session.begin():
        outbox.stash_many(session, (outbox.OutboxRecord("orders", n, b"v" * 100) for n in range(10_000)))
    assert [(executemany, count) for _, executemany, count in statements] == [(True, 10_000)]
    assert _keys(database) == [str(n) for n in range(10_000)]


@pytest.mark.usefixtures("engine")
def test_ten_thousand_in_one_batch_async(database):
    """10,000 records over an asynchronous session go to the driver in one executemany, and arrive in order."""
    batches = []

    async def run():
        async_engine = create_async_engine(outbox.sqlalchemy_url(database))
        event.listen(async_engine.sync_engine, "before_cursor_execute", lambda *a: batches.append((a[5], len(a[3]))))
        async with AsyncSession(async_engine) as session, session.begin():
            await outbox.astash_many(session, [outbox.OutboxRecord("orders", n, b"v") for n in range(10_000)])
        await async_engine.dispose()

    asyncio.run(run())
    assert batches == [(True, 10_000)]
    assert _keys(database) == [str(n) for n in range(10_000)]


def test_one_record_is_one_statement(engine, statements):
    """A record costs one INSERT without RETURNING."""
    with engine.begin() as connection:
        outbox.stash(connection, outbox.OutboxRecord("orders", 1, b"v"))
    assert len(statements) == 1
    assert "RETURNING" not in statements[0][0]


def test_flushes_before_it_stashes(engine, statements):
    """Pending changes are flushed first, so that their row locks are taken before the record's id is drawn."""
    with Session(engine) as session, session.begin():
        session.add(Order(number="A1"))
        outbox.stash(session, outbox.OutboxRecord("orders", "A1"))
    assert [statement.split()[2] for statement, _, _ in statements] == ["orders", "outbox"]


@pytest.mark.parametrize("autoflush", [True, False])
def test_no_autoflush_is_respected(engine, statements, autoflush):
    """Inside `no_autoflush` a stash does not flush, like a query."""
    with Session(engine, autoflush=autoflush) as session, session.begin():
        session.add(Order(number="A1"))
        with session.no_autoflush:
            outbox.stash(session, outbox.OutboxRecord("orders", "A1"))
    assert [statement.split()[2] for statement, _, _ in statements] == ["outbox", "orders"]


def test_bad_record_does_not_flush(engine, statements):
    """A refused record sends no statement, not even pending changes."""
    with Session(engine) as session:
        session.add(Order(number="A1"))
        with pytest.raises(outbox.InvalidRecord):
            outbox.stash(session, {"topic": "orders"})
        assert statements == []


def test_failed_flush_stashes_nothing(engine, database):
    """An error of the flush is raised, and the record is not written."""
    with Session(engine) as session, session.begin():
        session.add(Order(number="A1"))
    with Session(engine) as session:
        session.add(Order(number="A1"))
        with pytest.raises(IntegrityError):
            outbox.stash(session, outbox.OutboxRecord("orders", "A1"))
        session.rollback()
    assert _keys(database) == []


@pytest.mark.parametrize("hook", ["before_flush", "after_flush", "after_flush_postexec", "before_commit"])
def test_stash_in_session_events(engine, database, hook):
    """Handlers of the session's events can stash, also during a flush."""
    maker = sessionmaker(engine)

    @event.listens_for(maker, hook)
    def announce(session, *_):
        if session.info.pop("announce", False):
            outbox.stash(session, outbox.OutboxRecord("orders", hook))

    with maker(info={"announce": True}) as session, session.begin():
        session.add(Order(number="A1"))
    assert _keys(database) == [hook]


def test_stash_in_mapper_events(engine, database):
    """Handlers of a mapper's events can stash on their connection."""

    def announce(_mapper, connection, order):
        outbox.stash(connection, outbox.OutboxRecord("orders", order.number, {"state": order.state}))

    event.listen(Order, "after_insert", announce)
    try:
        with Session(engine) as session, session.begin():
            session.add_all([Order(number="A1"), Order(number="A2")])
    finally:
        event.remove(Order, "after_insert", announce)
    assert _keys(database) == ["A1", "A2"]


def test_no_effect_on_the_callers_objects(engine):
    """A stash neither commits nor expires objects: they keep their loaded state."""
    with Session(engine) as session:
        order = Order(number="A1")
        session.add(order)
        outbox.stash(session, outbox.OutboxRecord("orders", "A1"))
        assert "state" in order.__dict__
        assert session.in_transaction()


@pytest.mark.parametrize(
    "arguments",
    [{"isolation_level": "AUTOCOMMIT"}, {"connect_args": {"autocommit": True}}],
    ids=["engine", "driver"],
)
def test_autocommit_however_it_was_set(database, engine, arguments):
    """Autocommit of the engine or of the driver is refused, also inside `begin()`, which then begins no transaction."""
    autocommit = create_engine(outbox.sqlalchemy_url(database), **arguments)
    with autocommit.begin() as connection, pytest.raises(outbox.TransactionRequired, match="AUTOCOMMIT"):
        outbox.stash(connection, outbox.OutboxRecord("orders", 1))
    with Session(autocommit) as session, session.begin(), pytest.raises(outbox.TransactionRequired):
        outbox.stash(session, outbox.OutboxRecord("orders", 1))
    autocommit.dispose()
    connection = engine.connect().execution_options(isolation_level="AUTOCOMMIT")
    with connection, pytest.raises(outbox.TransactionRequired):
        outbox.stash(connection, outbox.OutboxRecord("orders", 1))
    assert _keys(database) == []


def test_two_databases_by_binds(engine, database, billing):
    """A session with several binds writes each outbox to the database of its table or class, together with the data."""
    billing_dsn, billing_engine = billing
    orders, bills = outbox.Outbox(ORDERS_OUTBOX), outbox.Outbox(BillingOutbox)
    binds = {Order: engine, ORDERS_OUTBOX: engine, BillingBase: billing_engine}
    with Session(binds=binds) as session, session.begin():
        session.add(Order(number="A1"))
        orders.stash(session, outbox.OutboxRecord("orders", "A1"))
        bills.stash_many(session, [outbox.OutboxRecord("bills", "B1")])
        with pytest.raises(outbox.WrongSession, match=r"no database for the table 'outbox'.*Outbox\(table\)"):
            outbox.stash(session, outbox.OutboxRecord("orders", "nowhere"))
    assert _keys(database) == ["A1"]
    assert _keys(billing_dsn) == ["B1"]


def test_routing_session(engine, database, billing):
    """A session that routes reads to a replica and writes to the primary receives an INSERT."""

    class RoutingSession(Session):
        def get_bind(self, mapper=None, *, clause=None, **_):
            del mapper
            return engine if self._flushing or isinstance(clause, Insert | Update | Delete) else billing[1]

    with RoutingSession() as session, session.begin():
        outbox.stash(session, outbox.OutboxRecord("orders", "A1"))
    assert _keys(database) == ["A1"]
    assert _keys(billing[0]) == []


def test_several_outboxes(engine, database):
    """Outboxes by name are independent of each other, also in schemas and with names that need quotes."""
    names = ["billing.outbox", "Audit", '"we""ird.100%"']
    with psycopg.connect(database) as connection:
        connection.execute("CREATE SCHEMA billing")
        for name in names:
            connection.execute(create_table_sql(TableName.parse(name)))
    with Session(engine) as session, session.begin():
        for name in names:
            outbox.Outbox(name).stash(session, outbox.OutboxRecord("orders", name))
            outbox.Outbox(name).stash_many(session, [outbox.OutboxRecord("orders", name)] * 2)
    for name in names:
        assert _keys(database, name) == [name] * 3
    assert _keys(database) == []


def test_schema_translate_map(engine, database):
    """An outbox without a schema follows the connection's schema_translate_map, as tenants use it."""
    with psycopg.connect(database) as connection:
        connection.execute("CREATE SCHEMA tenant7")
        connection.execute(create_table_sql(TableName("outbox", "tenant7")))
    with Session(engine.execution_options(schema_translate_map={None: "tenant7"})) as session, session.begin():
        outbox.stash(session, outbox.OutboxRecord("orders", "A1"))
    assert (_keys(database, "tenant7.outbox"), _keys(database)) == (["A1"], [])


def test_renamed_attributes(engine, database):
    """A stash works on a table whose columns have other keys in Python."""
    table = Table("outbox", MetaData(), autoload_with=engine, listeners=[("column_reflect", _with_other_key)])
    assert "py_kafka_topic" in table.columns
    with engine.begin() as connection:
        outbox.Outbox(table).stash_many(connection, [outbox.OutboxRecord("orders", "A1"), outbox.OutboxRecord("x")])
    assert _keys(database) == ["A1", None]


def _with_other_key(_inspector, _table, column):
    column["key"] = "py_" + column["name"]


@pytest.mark.parametrize("driver", ["psycopg2", "pg8000"])
@pytest.mark.usefixtures("engine")
def test_other_drivers(database, driver):
    """Other drivers, where they are installed, write the same rows."""
    pytest.importorskip(driver, reason=f"{driver} is not installed")
    role = f"uses_{driver}"  # without a password: pg8000 refuses one that was hashed once only, as devstack's is
    with psycopg.connect(database) as connection:
        connection.execute(f"DROP ROLE IF EXISTS {role}")
        connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
    url = outbox.sqlalchemy_url(as_role(database, role))
    other = create_engine(url.set(drivername=f"postgresql+{driver}"))
    records = [outbox.OutboxRecord("orders", n, b"\0\xff", {"h": b"\0", "n": None}, n) for n in range(3)]
    with other.begin() as connection:
        outbox.stash(connection, outbox.OutboxRecord("orders"))
        outbox.stash_many(connection, records)
    with (
        other.connect().execution_options(isolation_level="AUTOCOMMIT") as connection,
        pytest.raises(outbox.TransactionRequired),
    ):
        outbox.stash(connection, records[0])
    other.dispose()
    rows = [(row.kafka_key, row.kafka_value, row.kafka_header_values, row.kafka_partition) for row in stashed(database)]
    assert rows == [(None, None, [], None), *((str(n), b"\0\xff", [b"\0", None], n) for n in range(3))]


@pytest.mark.usefixtures("engine")
def test_asyncpg(database):
    """The driver asyncpg, where it is installed, writes the same rows."""
    pytest.importorskip("asyncpg", reason="asyncpg is not installed")
    record = outbox.OutboxRecord("orders", "k", b"\0\xff", {"h": b"\0", "n": None}, 3)

    async def run():
        other = create_async_engine(outbox.sqlalchemy_url(database).set(drivername="postgresql+asyncpg"))
        async with AsyncSession(other) as session, session.begin():
            await outbox.astash(session, record)
            await outbox.astash_many(session, [outbox.OutboxRecord("orders"), record])
        async with other.connect() as connection:
            await connection.execution_options(isolation_level="AUTOCOMMIT")
            with pytest.raises(outbox.TransactionRequired):
                await outbox.astash(connection, record)
        await other.dispose()

    asyncio.run(run())
    assert [row.kafka_header_values for row in stashed(database)] == [[b"\0", None], [], [b"\0", None]]


def test_threads_share_an_outbox(engine, database):
    """Threads with a scoped session each can stash at once, and every record arrives."""
    sessions = scoped_session(sessionmaker(engine))

    def work(thread):
        for number in range(20):
            with sessions.begin():
                outbox.stash(sessions, outbox.OutboxRecord("orders", f"{thread}-{number}"))
            sessions.remove()

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(8)))
    assert sorted(_keys(database)) == sorted(f"{thread}-{number}" for thread in range(8) for number in range(20))


@pytest.mark.usefixtures("engine")
def test_tasks_share_an_outbox(database):
    """Tasks of one event loop can stash at once, and the rollback of one does not affect the others."""

    async def work(async_engine, number):
        async with AsyncSession(async_engine) as session, session.begin() as transaction:
            await outbox.astash(session, outbox.OutboxRecord("orders", number))
            if number % 3 == 0:
                await transaction.rollback()

    async def run():
        async_engine = create_async_engine(outbox.sqlalchemy_url(database))
        await asyncio.gather(*(work(async_engine, number) for number in range(30)))
        await async_engine.dispose()

    asyncio.run(run())
    assert sorted(map(int, _keys(database))) == [number for number in range(30) if number % 3]


def test_synchronous_functions_refuse_what_is_not_synchronous(engine):
    """`stash` refuses an asynchronous session and names `astash`; for other objects it names the types it expects."""
    record = outbox.OutboxRecord("orders")
    with pytest.raises(outbox.WrongSession, match=r"AsyncSession is asynchronous: use `await astash"):
        outbox.stash(AsyncSession(), record)
    for wrong in (engine, Session, sessionmaker(engine), None):
        with pytest.raises(outbox.WrongSession, match="expected a Session, scoped_session or Connection, got"):
            outbox.stash_many(wrong, [record])


def test_asynchronous_functions_refuse_what_is_not_asynchronous(engine):
    """`astash` refuses a synchronous session and names `stash`; for other objects it names the types it expects."""
    record = outbox.OutboxRecord("orders")
    with Session(engine) as session, pytest.raises(TypeError, match=r"Session is synchronous: use `stash"):
        asyncio.run(outbox.astash(session, record))
    with engine.connect() as connection, pytest.raises(outbox.OutboxError, match=r"Connection is synchronous"):
        asyncio.run(outbox.astash_many(connection, [record]))
    with pytest.raises(outbox.WrongSession, match=r"expected an AsyncSession.*got Engine"):
        asyncio.run(outbox.astash(engine, record))


def test_connection_in_a_callers_transaction(engine, database):
    """A stash begins the transaction of a Connection without one; the caller still commits or rolls back."""
    with engine.connect() as connection:
        outbox.stash(connection, outbox.OutboxRecord("orders", "kept"))
        connection.commit()
        outbox.stash(connection, outbox.OutboxRecord("orders", "forgotten"))
    assert isinstance(connection, Connection)
    assert _keys(database) == ["kept"]


def test_two_phase_commit(engine, database):
    """A two-phase commit includes the record."""
    with Session(engine, twophase=True) as session, session.begin():
        session.execute(text("INSERT INTO orders VALUES ('A1', 'new')"))
        outbox.stash(session, outbox.OutboxRecord("orders", "A1"))
    assert _keys(database) == ["A1"]
