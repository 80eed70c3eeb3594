"""Tables and models: their making, their recognition, and refusals."""

import pytest
from sqlalchemy import (
    ARRAY,
    BigInteger,
    Column,
    DateTime,
    Integer,
    LargeBinary,
    MetaData,
    Numeric,
    String,
    Table,
    Text,
    Uuid,
    create_engine,
    select,
)
from sqlalchemy.dialects import postgresql
from sqlalchemy.orm import DeclarativeBase, Session
from sqlalchemy.schema import CreateTable

import outbox_sqlalchemy as outbox
from outbox_core.schema import STORAGE_PARAMETERS


class _Base(DeclarativeBase):
    pass


class OutboxModel(outbox.OutboxMixin, _Base):
    """A model in the default schema."""

    __tablename__ = "outbox"


class BillingOutboxModel(outbox.OutboxMixin, _Base):
    """A model in a schema of its own."""

    __tablename__ = "outbox"
    __table_args__ = {**outbox.OutboxMixin.__table_args__, "schema": "billing"}  # noqa: RUF012


@pytest.fixture
def engine(database):
    """An engine for an empty database."""
    engine = create_engine(outbox.sqlalchemy_url(database))
    yield engine
    engine.dispose()


def test_model_is_read_and_written(engine):
    """A model maps every column, and a record stashed through it reads back as an object."""
    OutboxModel.__table__.create(engine)
    with Session(engine) as session, session.begin():
        outbox.Outbox(OutboxModel).stash(session, outbox.OutboxRecord("orders", "k", b"v", {"h": None}, 3))
    with Session(engine) as session:
        row = session.scalars(select(OutboxModel)).one()
        assert (row.id, row.kafka_topic, row.kafka_key, row.kafka_value) == (1, "orders", "k", b"v")
        assert (row.kafka_header_keys, row.kafka_header_values, row.kafka_partition) == (["h"], [None], 3)
        assert (row.leader_id, row.create_time.tzinfo is None) == (None, False)


def test_model_with_schema_keeps_the_storage_parameters():
    """A model that adds a schema keeps the storage parameters of a queue table."""
    table = BillingOutboxModel.__table__
    assert table.fullname == "billing.outbox"
    ddl = str(CreateTable(table).compile(dialect=postgresql.dialect()))
    assert all(f"{key} = {value}" in ddl for key, value in STORAGE_PARAMETERS.items())
    assert outbox.Outbox(BillingOutboxModel).table is table


def test_model_of_a_made_table(engine):
    """A table made by the library can be mapped, without the mixin."""

    class Base(DeclarativeBase):
        pass

    class Model(Base):
        __table__ = outbox.make_outbox_table(Base.metadata)

    Base.metadata.create_all(engine)
    with Session(engine) as session, session.begin():
        outbox.Outbox(Model).stash(session, outbox.OutboxRecord("orders", "k"))
    with Session(engine) as session:
        assert session.scalars(select(Model.kafka_key)).all() == ["k"]


def test_naming_convention_of_the_host():
    """The primary key is named by the application's own convention."""
    metadata = MetaData(naming_convention={"pk": "pk_%(table_name)s"})
    assert outbox.make_outbox_table(metadata).primary_key.name == "pk_outbox"


@pytest.mark.parametrize(
    ("arguments", "fullname"),
    [
        ((), "outbox"),
        (("mailbox",), "mailbox"),
        (("billing.outbox",), "billing.outbox"),
        (("outbox", "billing"), "billing.outbox"),
        (("out.box", "billing"), "billing.out.box"),
    ],
)
def test_names(arguments, fullname):
    """A table is named by one string or by name and schema."""
    assert outbox.make_outbox_table(MetaData(), *arguments).fullname == fullname


def test_illegal_names():
    """An illegal name is refused before it reaches a database."""
    for name in ("", "a.b.c", "out box", "x" * 64):
        with pytest.raises(outbox.InvalidConfig):
            outbox.make_outbox_table(MetaData(), name)
        with pytest.raises(outbox.InvalidConfig):
            outbox.Outbox(name)


@pytest.mark.parametrize(
    "layout",
    [
        outbox.BINARY_LAYOUT,
        outbox.TEXT_LAYOUT,
        outbox.TableLayout(values="text", value_length=50),
        outbox.TableLayout(values="text", has_partition=True, key_length=7),
        outbox.TableLayout(key_required=True, key_length=10, has_partition=False),
    ],
    ids=["binary", "goharvest", "text-short", "text-partition", "binary-strict"],
)
def test_layout_survives_the_database(engine, layout):
    """A table of any layout is recognised, as made and as reflected, and a record that fits can be written."""
    made = outbox.make_outbox_table(MetaData(), layout=layout)
    made.create(engine)
    reflected = Table("outbox", MetaData(), autoload_with=engine)
    assert outbox.layout_of(made) == layout
    assert outbox.layout_of(reflected) == layout
    assert outbox.Outbox("outbox", layout=layout).layout == layout
    with Session(engine) as session, session.begin():
        outbox.Outbox(reflected).stash(session, outbox.OutboxRecord("orders", "k", "v", {"h": "x"}))


def _columns(**changed):
    kinds = {
        "id": BigInteger,
        "create_time": DateTime,
        "kafka_topic": String,
        "kafka_key": String,
        "kafka_value": LargeBinary,
        "kafka_header_keys": ARRAY(Text),
        "kafka_header_values": ARRAY(LargeBinary),
        "leader_id": Uuid,
        **changed,
    }
    return [Column(name, kind) for name, kind in kinds.items() if kind is not None]


@pytest.mark.parametrize(
    ("changed", "complaint"),
    [
        ({"leader_id": None, "kafka_key": None}, "it has no column kafka_key, leader_id"),
        ({"kafka_value": Integer}, r"kafka_value has to hold bytea or text .*, not Integer\(\)"),
        ({"kafka_header_values": Text}, r"kafka_header_values has to be bytea\[\], not Text\(\)"),
        ({"kafka_header_values": ARRAY(Text)}, r"kafka_header_values has to be bytea\[\], not ARRAY\(Text\(\)\)"),
        ({"kafka_header_values": ARRAY(Numeric)}, "kafka_header_values has to hold bytea or text"),
        ({"kafka_value": Text}, r"kafka_header_values has to be text\[\]"),
    ],
)
def test_table_that_is_no_outbox(changed, complaint):
    """A table that is not an outbox is refused when the Outbox is made, and the error names table and column."""
    table = Table("orders", MetaData(), *_columns(**changed), schema="shop")
    with pytest.raises(outbox.OutboxTableError, match=f"'shop.orders' is no outbox: .*{complaint}"):
        outbox.Outbox(table)


def test_arguments_that_are_no_table():
    """An argument other than a name, Table or mapped class is refused, and so is a layout beside a Table."""
    for wrong in (object, 3, MetaData()):
        with pytest.raises(outbox.WrongSession, match="expected a table's name, a Table or a mapped class"):
            outbox.Outbox(wrong)
    with pytest.raises(outbox.WrongSession, match="layout: "):
        outbox.Outbox(outbox.make_outbox_table(MetaData()), layout=outbox.TEXT_LAYOUT)


@pytest.mark.parametrize(
    ("dsn", "url"),
    [
        ("postgresql://u:p%40ss@db.example:5433/shop", "postgresql+psycopg://u:p%40ss@db.example:5433/shop"),
        ("postgres://u@db/shop?sslmode=require", "postgresql+psycopg://u@db/shop?sslmode=require"),
        ("host=db port=5433 user=u dbname=shop", "postgresql+psycopg://u@db:5433/shop"),
        ("postgresql://u@/shop?host=/run/pg", "postgresql+psycopg://u@/shop?host=%2Frun%2Fpg"),
        ("host=/run/pg port=5433 dbname=shop", "postgresql+psycopg:///shop?host=%2Frun%2Fpg&port=5433"),
        ("postgresql+asyncpg://u@db/shop", "postgresql+asyncpg://u@db/shop"),
        ("", "postgresql+psycopg://"),
    ],
)
def test_sqlalchemy_url(dsn, url):
    """Every notation of a data source becomes a URL with psycopg; a URL that names a driver stays unchanged."""
    assert outbox.sqlalchemy_url(dsn).render_as_string(hide_password=False) == url


def test_sqlalchemy_url_reaches_libpq():
    """Folders of sockets and several hosts reach the driver in libpq's form."""
    cases = {
        "host=/run/pg port=5433 dbname=shop user=u": {"host": "/run/pg", "port": "5433", "dbname": "shop", "user": "u"},
        "postgresql://u@a:1,b:2/shop": {"host": "a,b", "port": "1,2", "dbname": "shop", "user": "u"},
        "host=a,b dbname=shop": {"host": "a,b", "port": ",", "dbname": "shop"},
        "host=::1 port=5 dbname=shop": {"host": "::1", "port": 5, "dbname": "shop"},
    }
    for dsn, expected in cases.items():
        url = outbox.sqlalchemy_url(dsn)
        _, given = create_engine(url).dialect.create_connect_args(url)
        given.pop("context", None)
        assert {key: value for key, value in given.items() if value is not None} == expected


def test_wrong_dsn_does_not_show_its_password():
    """A wrong DSN is refused without its password in the error."""
    for wrong in ("password=hidden nonsense", "mysql://u:hidden@db/shop"):
        with pytest.raises(outbox.InvalidConfig, match="DSN") as raised:
            outbox.sqlalchemy_url(wrong)
        assert "hidden" not in str(raised.value)
