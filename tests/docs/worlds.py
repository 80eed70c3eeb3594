"""The surroundings of the Python blocks of a page: names that the reader's application has, and addresses of services.

A page without an entry here must bring all its names itself.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import confluent_kafka
import psycopg
import pytest
import sqlalchemy
from sqlalchemy.ext.asyncio import AsyncSession, create_async_engine
from sqlalchemy.orm import DeclarativeBase, Mapped, Session, mapped_column, sessionmaker

import outbox_django
import outbox_sqlalchemy
from devstack.processes import wait_until
from outbox_core.config import HarvestConfig
from outbox_core.schema import TableName, create_hold_sql, create_inbox_sql, create_table_sql
from outbox_core.testing import capture_stashed

URL = "postgresql+psycopg://postgres@localhost/shop"
"""The address that the pages use for SQLAlchemy."""


@dataclass
class World:
    """The surroundings of a page's blocks."""

    names: Callable[[], dict[str, Any]] = dict  # called before each block: a page may use a name in two ways
    replaced: dict[str, str] = field(default_factory=dict)
    after: Callable[[dict[str, Any]], None] | None = None  # checks what the blocks did, with the page's names
    after_each: Callable[[dict[str, Any]], None] | None = None


def make_outbox(database: str) -> None:
    """Make outbox, holds and inbox, the same in the schema `billing`, and a table of orders."""
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "CREATE SCHEMA billing; CREATE TABLE orders (id bigserial PRIMARY KEY, number text, total int)"
        )
        connection.execute("ALTER TABLE orders ADD COLUMN state text; CREATE TABLE payments (id bigserial PRIMARY KEY)")
        for table in map(TableName.parse, ("outbox", "billing.outbox")):
            connection.execute(create_table_sql(table))
            connection.execute(create_hold_sql(table))
        connection.execute(create_inbox_sql(TableName("inbox")))


class _Base(DeclarativeBase):
    pass


class _Order(_Base):
    __tablename__ = "orders"
    id: Mapped[int] = mapped_column(primary_key=True)
    number: Mapped[str | None]
    total: Mapped[int | None]
    pk = 1  # as Django's models have

    def save(self) -> None:
        """Do nothing: the block's own session saves it."""


class _Payment(_Base):
    __tablename__ = "payments"
    id: Mapped[int] = mapped_column(primary_key=True)

    def __init__(self, *_: Any) -> None:
        super().__init__()


def _url(database: str) -> str:
    return outbox_sqlalchemy.sqlalchemy_url(database).render_as_string(hide_password=False)


def _count(database: str, table: str = "outbox") -> int:
    with psycopg.connect(database) as connection:
        return connection.execute(f"SELECT count(*) FROM {table}").fetchone()[0]


def _fresh_base() -> type[DeclarativeBase]:
    class Base(DeclarativeBase):
        pass

    return Base


def _django_names() -> dict[str, Any]:
    from django.db import connection, transaction
    from django.http import HttpResponse

    created = SimpleNamespace(pk=1)
    return {
        "outbox": outbox_django,
        "transaction": transaction,
        "connection": connection,
        "HttpResponse": HttpResponse,
        "Order": SimpleNamespace(objects=SimpleNamespace(create=lambda *_, **__: created)),
        "Payment": SimpleNamespace(objects=SimpleNamespace(create=lambda *_: created)),
    }


def _sqlalchemy(request: pytest.FixtureRequest) -> World:
    database = request.getfixturevalue("database")
    make_outbox(database)
    url = _url(database)
    request.getfixturevalue("monkeypatch").setenv("OUTBOX_POSTGRES_DSN", database)

    def names() -> dict[str, Any]:
        engine, billing_base = sqlalchemy.create_engine(url), _fresh_base()
        record = outbox_sqlalchemy.OutboxRecord("orders", "A-1", {"total": 1})
        return {
            "engine": engine,
            "shop_engine": engine,
            "billing_engine": engine,
            "session": Session(engine),
            "async_session": AsyncSession(create_async_engine(url)),
            "Session": Session,
            "sessionmaker": sessionmaker,
            "Base": _fresh_base(),
            "BillingBase": billing_base,
            "BillingOutbox": type(
                "BillingOutbox", (outbox_sqlalchemy.OutboxMixin, billing_base), {"__tablename__": "b"}
            ),
            "Order": _Order,
            "Table": sqlalchemy.Table,
            "MetaData": sqlalchemy.MetaData,
            "event": sqlalchemy.event,
            "text": sqlalchemy.text,
            "prices": [("sku-1", 5)],
            "more_records": [record],
            "record": record,
            "records": [record],
            "lines": [SimpleNamespace(key="1", payload={"sku": 1})],
            "invoice_id": 7,
            "pdf_bytes": b"%PDF",
            "order_id": 1,
            "dsn": database,
            "json": json,
            "os": os,
            "psycopg": psycopg,
        }

    def after(page: dict[str, Any]) -> None:
        assert (_count(database), _count(database, "billing.outbox")) == (4, 3)
        page["place_order"] = lambda session, number, total: outbox_sqlalchemy.stash(
            session, outbox_sqlalchemy.OutboxRecord("orders", number, {"total": total})
        )
        with Session(sqlalchemy.create_engine(url)) as session, capture_stashed() as records:
            page["test_an_order_is_announced"](session, records)

    # The table of the last step is another one than the page has made before.
    migrated = f'alembic_config("{database}", "migrated.outbox")'
    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute("CREATE SCHEMA migrated")
    return World(
        names, {'alembic_config("postgresql://postgres@localhost/shop", "billing.outbox")': migrated, URL: url}, after
    )


def _readme(request: pytest.FixtureRequest) -> World:
    database = request.getfixturevalue("database")
    make_outbox(database)
    engine = sqlalchemy.create_engine(_url(database))

    def after(_: dict[str, Any]) -> None:
        from outbox_django.models import Outbox

        assert (_count(database), Outbox.objects.count()) == (1, 1)

    return World(lambda: {"engine": engine, "order": _Order(number="A-1", total=42)}, after=after)


def _django(_: pytest.FixtureRequest) -> World:
    from django.db import connection

    with connection.cursor() as cursor:
        cursor.execute(create_table_sql(TableName("billing_outbox")))

    def after(page: dict[str, Any]) -> None:
        from outbox_django.models import Outbox

        client = SimpleNamespace(post=lambda *_: page["place_order"](None))
        with capture_stashed() as records:
            page["test_an_order_is_announced"](client, records)
        assert Outbox.objects.count() == 1

    def names() -> dict[str, Any]:
        return {
            **_django_names(),
            "invoice": SimpleNamespace(pk=7),
            "pdf_bytes": b"%PDF",
            "pytest": pytest,
            "json": json,
        }

    return World(names, {'using="billing"': 'using="default"'}, after)


def _inbox(request: pytest.FixtureRequest) -> World:
    database = request.getfixturevalue("database")
    make_outbox(database)
    url = _url(database)
    keys = iter(range(100))

    def names() -> dict[str, Any]:
        engine = sqlalchemy.create_engine(url)
        return {
            **_django_names(),
            "engine": engine,
            "async_engine": create_async_engine(url),
            "Session": Session,
            "AsyncSession": AsyncSession,
            "account_id": 1,
            "key": f"key-{next(keys)}",
        }

    def before_sqlalchemy() -> dict[str, Any]:
        found = names()
        if int(found["key"].removeprefix("key-")) == 0:  # the first block is SQLAlchemy's
            found["Payment"] = _Payment
        if int(found["key"].removeprefix("key-")) == 2:  # the third one that of a bare connection
            found["connection"] = psycopg.connect(database)
        return found

    def after(page: dict[str, Any]) -> None:
        assert _count(database, "inbox") == 2  # SQLAlchemy's twice the same, and that of the bare connection
        assert _count(database, "payments") == 1
        page["outbox"] = outbox_django
        assert page["place_order"]("Ada", {}, "a-key").pk == 1

    return World(before_sqlalchemy, {"AsyncSession(engine)": "AsyncSession(async_engine)"}, after)


def _holds(request: pytest.FixtureRequest) -> World:
    database = request.getfixturevalue("database")
    make_outbox(database)
    hold_record(database, 17)
    return World(lambda: {"psycopg": psycopg, "dsn": database}, after=lambda _: _is_empty(database))


def hold_record(database: str, record_id: int) -> None:
    """Put a record into the outbox and hold it."""
    from outbox_core import Holds

    with psycopg.connect(database, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO outbox (id, kafka_topic, kafka_key) OVERRIDING SYSTEM VALUE VALUES (%s, 'orders', '4711') "
            "ON CONFLICT DO NOTHING",
            [record_id],
        )
        with connection.transaction():
            Holds().add_record(connection, record_id, reason="refused")


def _is_empty(database: str) -> None:
    assert _count(database) == 0


def _queues(request: pytest.FixtureRequest) -> World:
    from outbox_queue import QueueConfig, QueueService

    database = request.getfixturevalue("database")
    make_outbox(database)
    queue = QueueService(QueueConfig(bootstrap_servers="localhost:9092")).queue("emails")

    def names() -> dict[str, Any]:
        engine = sqlalchemy.create_engine(_url(database))
        mine = {"engine": engine, "Session": Session, "psycopg": psycopg, "dsn": database}
        return {**_django_names(), **mine, "queue": queue, "order": _Order(number="A-1")}

    return World(names)


def _consumers(request: pytest.FixtureRequest) -> World:
    database = request.getfixturevalue("database")
    message = SimpleNamespace(
        headers=lambda: [("outbox-id", b"shop.public.outbox:1")], key=lambda: b"a", value=lambda: b"5"
    )

    def after(page: dict[str, Any]) -> None:
        with psycopg.connect(database, autocommit=True) as connection:
            connection.execute(page["CREATE"])
            page["outbox_id"] = lambda _: "shop.public.outbox:1"  # headers_of takes messages of the client only
            assert [page["handle"](connection, message) for _ in range(2)] == [True, False]

    return World(after=after)


def _goharvest(request: pytest.FixtureRequest) -> World:
    database = request.getfixturevalue("database")
    bootstrap = request.getfixturevalue("kafka_bootstrap")
    make_outbox(database)
    given = "host=localhost port=5432 user=postgres password= dbname=postgres sslmode=disable"
    return World(replaced={"localhost:9092": bootstrap, given: database})


def _metrics(request: pytest.FixtureRequest) -> World:
    import prometheus_client

    # Other tests of this process use the default registry, too.
    registry = prometheus_client.CollectorRegistry()
    request.getfixturevalue("monkeypatch").setattr(prometheus_client, "REGISTRY", registry)
    return World()


def _wake_up(request: pytest.FixtureRequest) -> World:
    connection = psycopg.connect(request.getfixturevalue("database"))
    return World(lambda: {"connection": connection})


def _fastapi(request: pytest.FixtureRequest) -> World:
    """Serve both applications of the page, the second with a harvester that leads."""
    database = request.getfixturevalue("database")
    bootstrap = request.getfixturevalue("kafka_bootstrap")
    topic = request.getfixturevalue("make_topic")()
    make_outbox(database)
    for name, value in (("POSTGRES_DSN", database), ("KAFKA_BOOTSTRAP", bootstrap)):
        request.getfixturevalue("monkeypatch").setenv(f"OUTBOX_{name}", value)
    applications: list[Any] = []  # the page has two, of one name

    def after(_: dict[str, Any]) -> None:
        from fastapi.testclient import TestClient

        first, second = applications
        with TestClient(first) as client:
            assert client.post("/orders", json={"total": 42}).json() == {"id": 1}
        assert _count(database) == 1
        with TestClient(second) as client:
            assert wait_until(lambda: _count(database) == 0, 60), "the application's harvester publishes the record"
            assert client.get("/healthz/outbox").json() == {"leader": True, "detail": "leading"}

    return World(
        replaced={'OutboxRecord("orders"': f'OutboxRecord("{topic}"'},
        after=after,
        after_each=lambda page: applications.append(page["app"]),
    )


def _flask(request: pytest.FixtureRequest) -> World:
    database = request.getfixturevalue("database")
    make_outbox(database)
    request.getfixturevalue("monkeypatch").setenv("OUTBOX_POSTGRES_DSN", database)

    def after(page: dict[str, Any]) -> None:
        answer = page["app"].test_client().post("/orders", json={"total": 42})
        assert (answer.status_code, answer.json, _count(database)) == (201, {"id": 1}, 1)
        page["engine"].dispose()

    return World(after=after)


DJANGO_PAGES = {"README.md", "docs/how-to-django.md", "docs/how-to-inbox.md", "docs/how-to-queues.md"}
"""Pages whose blocks use Django's databases."""

WORLDS: dict[str, Callable[[pytest.FixtureRequest], World]] = {
    "README.md": _readme,
    "docs/choosing-delivery.md": lambda _: World(lambda: {"Consumer": confluent_kafka.Consumer}),
    "docs/configuration.md": lambda _: World(lambda: {"HarvestConfig": HarvestConfig, "fetch_token": print}),
    "docs/consumers.md": _consumers,
    "docs/how-to-bad-records.md": _holds,
    "docs/how-to-django.md": _django,
    "docs/how-to-fastapi.md": _fastapi,
    "docs/how-to-flask.md": _flask,
    "docs/how-to-goharvest.md": _goharvest,
    "docs/how-to-inbox.md": _inbox,
    "docs/how-to-queues.md": _queues,
    "docs/how-to-sqlalchemy.md": _sqlalchemy,
    "docs/metrics.md": _metrics,
    "docs/wake-up.md": _wake_up,
}
