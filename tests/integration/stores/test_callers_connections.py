"""Connections of applications: what we read on them does not depend on what rows they make, or how they send."""

from contextlib import closing, contextmanager
from datetime import timedelta
from enum import Enum
from functools import partial

import psycopg
import psycopg2
import psycopg2.extras
import pytest
from psycopg.rows import dict_row, kwargs_row, namedtuple_row, scalar_row
from sqlalchemy.orm import Session

from outbox_core import Holds, Inbox, OutboxError, OutboxRecord, Stasher, TransactionRequired
from outbox_core.retention.history import History
from outbox_core.schema import TableName, create_history_sql, create_inbox_sql


class Order:
    """A row that takes no other columns than its own."""

    def __init__(self, *, number, state):
        self.number, self.state = number, state


def _psycopg2(url, cursor_factory):
    return psycopg2.connect(url, cursor_factory=cursor_factory)


CONNECTS = {
    "plain": psycopg.connect,
    "dict_row": lambda url: psycopg.connect(url, row_factory=dict_row),
    "namedtuple_row": lambda url: psycopg.connect(url, row_factory=namedtuple_row),
    "scalar_row": lambda url: psycopg.connect(url, row_factory=scalar_row),
    "class": lambda url: psycopg.connect(url, row_factory=kwargs_row(Order)),
    "ClientCursor": lambda url: psycopg.connect(url, cursor_factory=psycopg.ClientCursor),
    "RawCursor": lambda url: psycopg.connect(url, cursor_factory=psycopg.RawCursor, row_factory=dict_row),
    "psycopg2 DictCursor": lambda url: _psycopg2(url, psycopg2.extras.DictCursor),
    "psycopg2 RealDictCursor": lambda url: _psycopg2(url, psycopg2.extras.RealDictCursor),
    "psycopg2 NamedTupleCursor": lambda url: _psycopg2(url, psycopg2.extras.NamedTupleCursor),
}


@pytest.mark.parametrize("connect", CONNECTS.values(), ids=CONNECTS)
def test_whatever_rows_a_connection_makes(scene, connect):
    """Stash, inbox, holds and history do the same on each."""
    scene.execute(create_inbox_sql(TableName("inbox")) + create_history_sql(scene.table))
    holds, inbox, stasher = Holds("outbox"), Inbox(), Stasher()
    with closing(connect(scene.database)) as connection:
        stasher.stash(connection, OutboxRecord("t", "k", "1"))
        stasher.stash_many(connection, [OutboxRecord("t", "k", "2")])
        with stasher.prepare(connection) as prepared:
            prepared.stash(OutboxRecord("t", "k", "3"))
        assert inbox.accept(connection, "s", "1")
        assert not inbox.accept(connection, "s", "1")
        inbox.confirm(connection, "s", "1")
        assert holds.add(connection, "t", reason="broken")
        assert holds.add_record(connection, 2, reason="wrong")
        connection.commit()
        assert {(hold.topic, hold.record_id) for hold in holds.list(connection)} == {("t", 2), ("t", None)}
        assert holds.release(connection, topic="t") == 1
        assert holds.skip(connection, records=[2]) == 1
        connection.commit()
        assert {event.kind for event in History().events(connection, timedelta(days=1))} >= {"held", "released"}
        connection.commit()
        assert inbox.prune(connection, timedelta(microseconds=1)) == 1
    assert [row.id for row in scene.rows()] == [1, 3]


@contextmanager
def _block_of_psycopg(url):
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection, connection.transaction


@contextmanager
def _begin_of_psycopg(url):
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection, lambda: _begun(connection)


@contextmanager
def _begin_of_psycopg2(url):
    with closing(psycopg2.connect(url)) as connection:
        connection.autocommit = True
        yield connection, lambda: _begun(connection)


@contextmanager
def _isolation_of_psycopg2(url):
    with closing(psycopg2.connect(url)) as connection:
        connection.set_isolation_level(psycopg2.extensions.ISOLATION_LEVEL_AUTOCOMMIT)
        yield connection, lambda: _begun(connection)


@contextmanager
def _begun(connection):
    with closing(connection.cursor()) as cursor:
        cursor.execute("BEGIN")
        yield
        cursor.execute("COMMIT")


@pytest.mark.parametrize("connect", [_block_of_psycopg, _begin_of_psycopg, _begin_of_psycopg2, _isolation_of_psycopg2])
def test_connections_that_commit_by_themselves(scene, connect):
    """Within a transaction of their own all works, outside it nothing is written; holds need none."""
    scene.execute(create_inbox_sql(TableName("inbox")) + create_history_sql(scene.table))
    inbox, stasher, record = Inbox(), Stasher(), OutboxRecord("t", "k", "1")
    with connect(scene.database) as (connection, transaction):
        with transaction():
            stasher.stash(connection, record)
            stasher.stash_many(connection, [record])
            with stasher.prepare(connection) as prepared:
                prepared.stash(record)
            assert inbox.accept(connection, "s", "1")
            inbox.confirm(connection, "s", "1")
        for refused in (
            lambda: stasher.stash(connection, record),
            lambda: stasher.stash_many(connection, []),
            lambda: stasher.prepare(connection),
            lambda: inbox.accept(connection, "s", "2"),
        ):
            with pytest.raises(TransactionRequired, match="begin a transaction first, or turn autocommit off"):
                refused()
        holds = Holds("outbox")
        assert holds.add(connection, Topic.ORDERS, reason=Topic.ORDERS)
        assert holds.add_record(connection, Number.TWO)
        assert [hold.reason for hold in holds.list(connection, topic=Topic.ORDERS)] == ["orders"]
        assert holds.skip(connection, records=[Number.TWO], key="k", topic="t") == 1
        assert inbox.prune(connection, timedelta(microseconds=1)) == 1
    assert [row.id for row in scene.rows()] == [1, 3]


class Topic(str, Enum):  # noqa: UP042  its text is its name
    """An application's topics."""

    ORDERS = "orders"


class Number(int, Enum):
    """An application's numbers."""

    TWO = 2


def test_what_is_no_connection_of_a_driver():
    """A session of SQLAlchemy is no connection for the core, which says where its functions are."""
    for use in (partial(Stasher().stash, record=OutboxRecord("t")), partial(Inbox().accept, source="s", message_id=1)):
        with Session() as session, pytest.raises(OutboxError, match=r"session\.Session; .* outbox_sqlalchemy"):
            use(session)
