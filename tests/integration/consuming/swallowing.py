"""Handlers that swallow errors of the database, or end their transaction, each in its own way."""

from contextlib import suppress
from uuid import uuid4

import psycopg
import pytest
from sqlalchemy.engine import make_url
from sqlalchemy.orm import DeclarativeBase, Mapped, mapped_column

from outbox_core.schema import TableName, create_inbox_sql

TAKEN = "INSERT INTO orders VALUES (1)"
WORK = "INSERT INTO effect VALUES ('{}')"


class Base(DeclarativeBase):
    """The application's models."""


class Order(Base):
    """An order, of which number 1 is there."""

    __tablename__ = "orders"
    number: Mapped[int] = mapped_column(primary_key=True, autoincrement=False)


class Handler:
    """A handler on a bare connection or on a session, each of whose methods swallows something in its own way."""

    def __init__(self, run, transaction):
        self.run = run
        self.transaction = transaction

    def caught(self):
        self.run(WORK.format("before"))
        with suppress(Exception):
            self.run(TAKEN)

    def caught_and_went_on(self):
        self.caught()
        with suppress(Exception):
            self.run(WORK.format("after"))

    def aborted_savepoint(self):
        self.run("SAVEPOINT inner_one")
        self.caught()

    def rollback(self):
        self.run(WORK.format("before"))
        self.transaction.rollback()

    def rollback_and_more(self):
        self.rollback()
        self.run(WORK.format("after"))

    def raw_rollback(self):
        self.run(WORK.format("before"))
        self.run("ROLLBACK")

    def raw_rollback_and_more(self):
        self.raw_rollback()
        self.run(WORK.format("after"))

    def commit_and_more(self):
        self.run(WORK.format("before"))
        self.transaction.commit()
        self.run(WORK.format("after"))

    def raw_commit_and_more(self):
        self.run(WORK.format("before"))
        self.run("COMMIT")
        self.run(WORK.format("after"))

    def flush(self):
        self.run(WORK.format("before"))
        self.transaction.add(Order(number=1))
        with suppress(Exception):
            self.transaction.flush()

    def savepoint(self):
        self.run(WORK.format("before"))
        self.run("SAVEPOINT inner_one")
        with suppress(Exception):
            self.run(TAKEN)
        self.run("ROLLBACK TO SAVEPOINT inner_one")
        self.run(WORK.format("after"))


WRONG = [name for name in vars(Handler) if not name.startswith("_") and name not in {"savepoint", "flush"}]
COMMITS = ("commit_and_more", "raw_commit_and_more")


@pytest.fixture
def place(database):
    """The database, with an inbox, an order and a table of effects."""
    role = (
        f"swallows_{uuid4().hex}"  # without a password: pg8000 refuses one that was hashed once only, as devstack's is
    )
    with psycopg.connect(database) as connection:
        connection.execute(create_inbox_sql(TableName("inbox")))
        connection.execute("CREATE TABLE orders (number int PRIMARY KEY); INSERT INTO orders VALUES (1)")
        connection.execute("CREATE TABLE effect (value text)")
        connection.execute(f"CREATE ROLE {role} LOGIN SUPERUSER")
    yield make_url(database).set(username=role, password=None).render_as_string()
    with psycopg.connect(database) as connection:
        connection.execute(f"DROP OWNED BY {role}; DROP ROLE {role}")


def found(place):
    """Return the effects, and the number of acceptances."""
    with psycopg.connect(place) as connection:
        effects = [value for (value,) in connection.execute("SELECT value FROM effect ORDER BY value")]
        return effects, connection.execute("SELECT count(*) FROM inbox").fetchone()[0]
